"""kron_accumulate_ against explicit outer products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from .checking import DTYPES, LAYOUTS, arrange, assert_accurate, guarded, in_every_order
from .simulator import Simulator

pytestmark = pytest.mark.simulator

# (N, G, d): tiles are 16, 32, 64 or (float32) 128 wide, slabs 8 to 128 rows.
SHAPES = [(1, 1, 1), (5, 3, 7), (130, 2, 16), (70, 2, 31), (37, 2, 33), (9, 1, 70), (20, 1, 133)]


def exact(factor: Tensor, rows: Tensor, alpha: float) -> Tensor:
    return factor + alpha * (rows[:, :, :, None] * rows[:, :, None, :]).sum(0)


def accumulated(simulator: Simulator, start: Tensor, rows: Tensor, alpha: float) -> Tensor:
    factor, check = guarded(start, fill=7.0)
    simulator.ops.kron_accumulate_(factor, rows, alpha)
    check()
    return factor.clone()


def symmetric(groups: int, d: int, dtype: torch.dtype) -> Tensor:
    half = torch.randn(groups, d, d, dtype=dtype)
    return half + half.mT


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_accumulates(simulator: Simulator, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    N, G, d = shape
    start, rows = symmetric(G, d, dtype), arrange(torch.randn(N, G, d, dtype=dtype), "contiguous")
    (got,) = in_every_order(simulator, lambda: accumulated(simulator, start, rows, 0.3))
    assert_accurate(got, exact(start.double(), rows.double(), 0.3), exact(start, rows, 0.3))
    assert torch.equal(got, got.mT), "a symmetric factor must stay symmetric to the bit"


@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize("d", [7, 40])
def test_layouts(simulator: Simulator, layout: str, d: int) -> None:
    start, rows = symmetric(2, d, torch.float32), arrange(torch.randn(45, 2, d), layout)
    (got,) = in_every_order(simulator, lambda: accumulated(simulator, start, rows, -1.5))
    assert_accurate(got, exact(start.double(), rows.double(), -1.5), exact(start, rows, -1.5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_shared_out_over_blocks(simulator: Simulator, dtype: torch.dtype) -> None:
    start, rows = symmetric(1, 5, dtype), torch.randn(1500, 1, 5, dtype=dtype)
    results = []
    for order in ("forward", "reverse", "random"):
        with simulator.scheduled(threads=order, blocks=order, multiprocessors=64):
            results.append(accumulated(simulator, start, rows, 0.01))
    assert all(torch.equal(results[0], other) for other in results[1:])
    assert_accurate(results[0], exact(start.double(), rows.double(), 0.01), exact(start, rows, 0.01))
    assert torch.equal(results[0], results[0].mT)


@pytest.mark.parametrize("shape", [(0, 2, 3), (4, 0, 3), (4, 2, 0)])
def test_empty(simulator: Simulator, shape: tuple[int, ...]) -> None:
    N, G, d = shape
    start = symmetric(G, d, torch.float64)
    assert torch.equal(accumulated(simulator, start, torch.randn(N, G, d, dtype=torch.float64), 1.0), start)


def test_bad_arguments_are_refused(simulator: Simulator) -> None:
    with pytest.raises(RuntimeError, match="rows must have shape"):
        simulator.ops.kron_accumulate_(torch.zeros(2, 3, 3), torch.zeros(5, 2, 4), 1.0)
    with pytest.raises(RuntimeError, match="factor must be contiguous"):
        simulator.ops.kron_accumulate_(torch.zeros(2, 3, 6)[:, :, ::2], torch.zeros(5, 2, 3), 1.0)
