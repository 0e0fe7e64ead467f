"""symmetric_eigenvalues against LAPACK in float64, of matrices whose eigenvalues are hard to tell apart or to reach."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from .checking import guarded, in_every_order
from .simulator import Simulator

SIZES = [1, 2, 3, 5, 8, 9, 17, 33, 70]  # a panel has 8 columns


def eigenvalues(simulator: Simulator, sets: Sequence[Tensor]) -> list[Tensor]:
    """In every order of threads and blocks; nothing beside the numbers is read or written, nor the numbers written."""
    given, untouched = zip(*map(guarded, sets), strict=True)
    (values,) = in_every_order(simulator, lambda: simulator.ops.symmetric_eigenvalues(given, [], []))
    for check, kept, blocks in zip(untouched, given, sets, strict=True):
        check()
        assert torch.equal(kept.nan_to_num(nan=7), blocks.nan_to_num(nan=7))
    parts = values.split([blocks.shape[0] * blocks.shape[1] for blocks in sets])
    return [part.view(blocks.shape[:2]) for part, blocks in zip(parts, sets, strict=True)]


def assert_eigenvalues(found: Tensor, blocks: Tensor) -> None:
    """Ascending, and LAPACK's up to what LAPACK's own are wrong by."""
    exact = torch.from_numpy(np.linalg.eigvalsh(blocks.numpy()))
    assert bool((found.diff() >= 0).all())
    largest = exact.abs().amax(1)
    error, size = (found - exact).abs().amax(1), blocks.shape[1]
    assert bool((error <= 2 * (size + 4) * torch.finfo(torch.float64).eps * largest).all()), (error / largest).max()


def symmetric(groups: int, size: int) -> Tensor:
    half = torch.randn(groups, size, size, dtype=torch.float64)
    return half + half.mT


def with_eigenvalues(values: Tensor) -> Tensor:
    basis = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64)).Q
    block = basis * values @ basis.T
    return (block + block.T)[None] / 2


@pytest.mark.parametrize("size", SIZES)
def test_random(simulator, size):
    blocks = symmetric(2, size)
    (found,) = eigenvalues(simulator, [blocks])
    assert_eigenvalues(found, blocks)


def test_sizes_together(simulator):
    """More sets than a launch takes, some of them empty."""
    sets = [symmetric(1 + d % 3, d) for d in (66, 33, 17, 65, 9, *3 * [*range(1, 31)], *range(1, 9))]
    sets[5:5] = [symmetric(0, 4), symmetric(3, 0)]
    for found, blocks in zip(eigenvalues(simulator, sets), sets, strict=True):
        if blocks.numel():
            assert_eigenvalues(found, blocks)


def test_more_columns_than_threads(simulator):
    """Two numbers of a column a thread: of an arrow, as other matrices of that size would take long."""
    size = 520
    block = torch.diag(torch.randn(size, dtype=torch.float64))
    block[0, :] = block[:, 0] = torch.randn(size, dtype=torch.float64)
    found = simulator.ops.symmetric_eigenvalues([block[None]], [], [])
    assert_eigenvalues(found[None], block[None])


HARD = {
    "zero": lambda d: torch.zeros(1, d, d, dtype=torch.float64),
    "diagonal": lambda d: torch.diag(torch.randn(d, dtype=torch.float64))[None],
    "minors that are zero": lambda d: torch.diag(torch.tensor([-1.0, 0, -1, -1, 1] * d).double())[None],
    "tiny minors": lambda d: torch.diag(torch.cat([torch.ones(1), 1e-10 * torch.randn(2 * d)]).double())[None],
    "identity": lambda d: torch.eye(d, dtype=torch.float64)[None],
    "low rank": lambda d: with_eigenvalues(torch.arange(d).sub(d - 3).clamp(min=0).double()),
    "ones": lambda d: torch.ones(1, d, d, dtype=torch.float64),
    "repeated": lambda d: with_eigenvalues((torch.arange(d) // 4).double()),
    "graded": lambda d: with_eigenvalues(torch.logspace(-12, 0, d, dtype=torch.float64)),
    "graded entries": lambda d: graded_entries(d),
    "two blocks": lambda d: torch.block_diag(*symmetric(1, d), *symmetric(1, d))[None],
    "two scales": lambda d: torch.block_diag(*symmetric(1, d), *(1e-200 * symmetric(1, d)))[None],
    "tridiagonal": lambda d: torch.diag(torch.ones(d, dtype=torch.float64), 1)[None].add(
        torch.diag(torch.ones(d, dtype=torch.float64), -1)
    ),
    "large": lambda d: 1e300 * with_eigenvalues(torch.linspace(-1, 1, d, dtype=torch.float64)),
    "small": lambda d: 1e-300 * symmetric(1, d),
}


def graded_entries(size: int) -> Tensor:
    scale = torch.logspace(-150, 0, size, dtype=torch.float64)
    return (symmetric(1, size) * scale * scale[:, None]).flip(1, 2)


@pytest.mark.parametrize("size", [2, 33])
@pytest.mark.parametrize("kind", HARD)
def test_hard(simulator, kind, size):
    blocks = HARD[kind](size)
    (found,) = eigenvalues(simulator, [blocks])
    assert_eigenvalues(found, blocks)


def test_the_largest_and_the_smallest_numbers(simulator):
    number = torch.finfo(torch.float64)
    values = torch.tensor([number.max / 2, number.tiny, 5e-324, -number.max / 2], dtype=torch.float64)
    (found,) = eigenvalues(simulator, [values.view(4, 1, 1)])
    torch.testing.assert_close(found.flatten(), values, rtol=2 * number.eps, atol=0)
    blocks = 5e-324 * torch.tensor([[[3.0, 1], [1, 3]]], dtype=torch.float64)
    (found,) = eigenvalues(simulator, [blocks])
    assert torch.equal(found, 5e-324 * torch.tensor([[2.0, 4]], dtype=torch.float64))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [(0, 0), (16, 3), (16, 16)])
def test_numbers_that_are_not_finite(simulator, value, place):
    """All eigenvalues of such a matrix are NaN, the others' are not."""
    blocks = symmetric(3, 17)
    blocks[1][place] = value
    found = eigenvalues(simulator, [blocks, symmetric(1, 3)])
    assert bool(found[0][1].isnan().all()) and not found[1].isnan().any()
    assert_eigenvalues(found[0][::2], blocks[::2])


def test_the_lower_triangle_is_read(simulator):
    blocks = torch.randn(2, 17, 17, dtype=torch.float64)
    (found,) = eigenvalues(simulator, [blocks.tril() + torch.full_like(blocks, float("nan")).triu(1)])
    assert_eigenvalues(found, blocks.tril() + blocks.tril(-1).mT)
