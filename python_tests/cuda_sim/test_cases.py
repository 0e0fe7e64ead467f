"""The self-check's cases of every op, in the simulator: an op whose kernels have no paths of their own needs no other test here."""

from __future__ import annotations

import pytest
import torch

from ella_cuda import ops
from ella_cuda.testing import check_kernel, kernel_cases

from .checking import SCHEDULES

CASES = kernel_cases()
LIBRARIES = {"circular_conv2d", "circular_conv2d_pool"}  # on CUDA, in place of kernels


@pytest.mark.parametrize("case", CASES, ids=[name.replace(" ", "-") for name, *_ in CASES])
def test_case(simulator, case):
    before = simulator.launch_count()
    for schedule in SCHEDULES[1:3]:
        with simulator.on_cpu_tensors(), simulator.scheduled(**schedule, multiprocessors=8):
            checks = check_kernel(case, "cpu")
        assert [(check.error, check.bound, check.failure) for check in checks if not check.ok] == []
    assert (simulator.launch_count() == before) == (case[0].split()[0] in LIBRARIES)


def test_kernels_of_the_cpu_are_back_afterwards(simulator):
    image, numbers = torch.ones(1, 1, 2, 2), torch.eye(3).double().flatten()
    with simulator.on_cpu_tensors():
        before = simulator.launch_count()
        ops.circular_pad2d(image, 1, 1)
        torch.ops.ella_cuda.symmetric_eigenvalues(numbers, [1], [3])  # whose CPU kernel is in Python
        launched = simulator.launch_count()
    assert launched >= before + 2
    assert torch.equal(ops.circular_pad2d(image, 1, 1), torch.ones(1, 1, 4, 4))
    assert torch.equal(torch.ops.ella_cuda.symmetric_eigenvalues(numbers, [1], [3]), torch.ones(3).double())
    assert simulator.launch_count() == launched
