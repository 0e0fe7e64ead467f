"""Several Kronecker sums in one call: the bits of one after the other, in fewer launches."""

from __future__ import annotations

import torch
from torch import Tensor

from ella_cuda import ops
from ella_cuda.ops.conv_kron_accumulate import GroupedSums

from .simulator import Simulator
from .test_kron_accumulate import symmetric


def problems() -> list[tuple[Tensor, Tensor, dict]]:
    """Factors, their rows or images, and what is said of these: of several kernels, dtypes, lengths and alignments."""
    found = []
    for at in range(25):  # more than a table has
        found.append((symmetric(1, 36, torch.float64), torch.randn(40 + 300 * (at % 4), 1, 36), {"alpha": 0.3 + at}))
    for dtype, shape in ((torch.float64, (1100, 1, 33)), (torch.float32, (70, 3, 5)), (torch.float32, (2100, 1, 130))):
        found.append((symmetric(*shape[1:], dtype), torch.randn(shape, dtype=dtype), {}))
    found.append((symmetric(2, 40, torch.float64), torch.randn(150, 2, 40).bfloat16(), {}))
    for mode, padding, stride in (("zeros", 1, 2), ("circular", 1, 1), ("zeros", 0, 1), ("zeros", (2, 1), (1, 2))):
        images = {"kernel_size": 3, "padding_mode": mode, "padding": padding, "stride": stride}
        for dtype in (torch.float32, torch.float64):
            found.append((symmetric(1, 36, torch.float64)[0], torch.randn(30, 4, 6, 5, dtype=dtype), images))
    found.append((found[0][0], torch.randn(50, 1, 36, dtype=torch.float64), {}))  # a factor that others have
    found.append((found[0][0], torch.randn(1100, 1, 36), {"alpha": -2.0}))
    return found


def add(sums, factor: Tensor, rows: Tensor, words: dict) -> None:
    (sums.kron_accumulate_ if rows.dim() == 3 else sums.conv_kron_accumulate_)(factor, rows, **words)


def test_sums_are_those_of_one_after_the_other(simulator: Simulator) -> None:
    given = problems()
    before = {id(factor): factor.clone() for factor, *_ in given}
    with simulator.on_cpu_tensors(), simulator.scheduled(threads="random", blocks="random", warpgroups=True):
        for problem in given:
            add(ops, *problem)
        alone = [factor.clone() for factor, *_ in given]
        for factor, *_ in given:
            factor.copy_(before[id(factor)])
        together = GroupedSums(1 << 30)
        for problem in given:
            add(together, *problem)
        assert all(torch.equal(factor, before[id(factor)]) for factor, *_ in given)
        together.launch()
    for (factor, *_), expected in zip(given, alone, strict=True):
        assert torch.equal(factor, expected)


def launches(simulator: Simulator, rows: int, most_bytes: int = 1 << 30) -> int:
    """Of ten sums of so many rows each, on as many factors."""
    sums, before = GroupedSums(most_bytes), simulator.launch_count()
    with simulator.on_cpu_tensors(), simulator.scheduled(multiprocessors=1):
        for _ in range(10):
            sums.kron_accumulate_(torch.zeros(1, 40, 40, dtype=torch.float64), torch.randn(rows, 1, 40))
        sums.launch()
    return simulator.launch_count() - before


def test_launches(simulator: Simulator) -> None:
    """One and its finish; as many as the workspace, or what may wait, asks for."""
    assert launches(simulator, 100) == 1
    assert launches(simulator, 1250) == 2  # of two splits
    assert launches(simulator, 6250) == 2 * 3  # of seven, 16 KB each, for which there are 512 KB at a time
    assert launches(simulator, 1250, 4 * 200_000) == 2 * 2  # of 200 KB each, five at a time
