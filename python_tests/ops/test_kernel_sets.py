"""The accuracy of ops by the vectors of each set of instructions that this processor has, of other lengths than the running ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from python_tests.ops import checks

TESTS = [
    "test_affine_copies.py::test_sums_over_single_pixels",
    "test_affine_copies.py::test_the_accuracy_of_grid_sample",
    "test_averaged_filters.py::test_sums",
    "test_averaged_filters.py::test_the_accuracy_of_torch",
    "test_circular_conv2d.py::test_equals_the_sum_of_rolled_images",
    "test_circular_conv2d.py::test_gradients_equal_those_of_rolled_images",
    "test_circular_conv2d_pool.py::test_equals_the_two_apart",
    "test_circular_conv2d_pool.py::test_gradients_equal_those_of_the_two_apart",
    "test_conv_kron_accumulate.py::test_a_float64_factor_loses_nothing_of_short_float32_sums",
    "test_kron_accumulate.py::test_a_float64_factor_loses_nothing_of_short_float32_sums",
    "test_kron_variance.py::test_equals_the_dense_product",
    "test_one_component.py::test_images_of_one_polyphase_component",
    "test_one_component.py::test_gradients_of_one_polyphase_component",
]
CODE = """
import sys, ella_cuda, pytest
assert ella_cuda.build_info()["cpu_kernels"] == sys.argv[1]
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-k", "not convolutions and not inf", *sys.argv[2:]]))
"""


@pytest.mark.parametrize("capability", checks.OTHER_KERNEL_SETS)
def test_each_set_of_instructions(capability, beside_the_tests):
    tests = [str(Path(__file__).parent / test) for test in TESTS]
    command = [sys.executable, "-c", CODE, checks.KERNEL_SETS[capability], *tests]
    environment = os.environ | {"ATEN_CPU_CAPABILITY": capability}
    done = subprocess.run(command, env=environment, cwd=beside_the_tests, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
