"""kron_accumulate_ against explicit outer products; on each path of launches: test_syrk_paths.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from .checking import DTYPES, LAYOUTS, arrange, assert_accurate, guarded, in_every_order
from .simulator import Simulator

# (N, G, d): tiles are 16, 32, 64 or (float32 on tensor cores) 128 wide, slabs 8 to 128 rows.
SHAPES = [(1, 1, 1), (5, 3, 7), (130, 2, 16), (70, 2, 31), (37, 2, 33), (9, 1, 70), (20, 1, 133)]
SHAPES += [(300, 2, 32), (110, 1, 64), (20, 1, 136), (55, 1, 260), (0, 2, 3), (4, 0, 3), (4, 2, 0)]


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


def check(simulator: Simulator, rows: Tensor, **device: Any) -> None:
    """The sum in every order: accurate, and symmetric to the bit."""
    start = symmetric(rows.shape[1], rows.shape[2], torch.promote_types(rows.dtype, torch.float32))
    (got,) = in_every_order(simulator, lambda: accumulated(simulator, start, rows, 0.3), **device)
    assert_accurate(got, exact(start.double(), rows.double(), 0.3), exact(start, rows.to(start.dtype), 0.3))
    assert torch.equal(got, got.mT)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_accumulates(simulator, shape, dtype):
    check(simulator, arrange(torch.randn(shape, dtype=dtype), "contiguous"))


@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize("d", [7, 32, 98])
def test_layouts(simulator, layout, d):
    check(simulator, arrange(torch.randn(45, 2, d), layout))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1500, 3, 5), (1100, 1, 32), (300, 1, 130)])
def test_rows_shared_out_over_blocks(simulator, shape, dtype):
    check(simulator, torch.randn(shape, dtype=dtype), multiprocessors=64)


@pytest.mark.parametrize(("d", "offset"), [(36, 1), (38, 0), (132, 3)])
def test_rows_of_any_alignment(simulator, d, offset):
    """16-byte copies and updates where addresses allow them, single elements where they do not."""
    storage = torch.full((40 * 2 * d + offset,), float("nan"))
    rows = storage[offset:].view(40, 2, d).copy_(torch.randn(40, 2, d))
    check(simulator, rows)
    check(simulator, rows[:, 1:])  # one block of two: its stride among blocks does not matter


def normalised_error(got: Tensor, rows: Tensor) -> float:
    """The largest error, each in units of the two columns' lengths: what sums of products can be held to."""
    moment = exact(torch.zeros(1), rows.double(), 1.0)
    lengths = moment.diagonal(dim1=1, dim2=2).sqrt()
    return ((got.double() - moment) / (lengths[:, :, None] * lengths[:, None])).abs().max().item()


@pytest.mark.parametrize("warpgroups", [False, True])
@pytest.mark.parametrize("kind", ["signed", "positive", "scaled"])
@pytest.mark.parametrize("count", [17, 2000])
def test_tensor_cores_are_as_accurate_as_float32(simulator, count, kind, warpgroups):
    """A few roundings for any number of rows: neither a term of the split may be missing nor sums be cut again and again."""
    d = 100 if warpgroups else 40
    rows = torch.rand(count, 1, d) + 0.5 if kind == "positive" else torch.randn(count, 1, d)
    if kind == "scaled":
        rows = rows * 10 ** torch.empty(d).uniform_(-12, 12)
    with simulator.scheduled(warpgroups=warpgroups):
        error = normalised_error(accumulated(simulator, torch.zeros(1, d, d), rows, 1.0), rows)
    assert error <= 5 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("warpgroups", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(simulator, value, warpgroups):
    """In its row and column of the factor and nowhere else."""
    rows = torch.randn(40, 1, 100)
    rows[33, 0, 70] = value
    with simulator.scheduled(warpgroups=warpgroups):
        got = accumulated(simulator, torch.zeros(1, 100, 100), rows, 1.0)
    there = torch.zeros(1, 100, 100, dtype=torch.bool)
    there[:, 70], there[:, :, 70] = True, True
    assert not got[there].isfinite().any() and got[~there].isfinite().all()


def integers(*shape: int) -> Tensor:
    """float32 numbers of which products are exact, and sums of up to 1,024 products, but not of twice as many."""
    return torch.randint(101, 128, shape).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 3, 7), (2500, 1, 5), (2500, 2, 20), (1100, 1, 40), (1100, 1, 130)])
@pytest.mark.parametrize(("multiprocessors", "warpgroups"), [(2, False), (64, True)])
def test_a_float64_factor_loses_nothing_of_short_float32_sums(simulator, shape, multiprocessors, warpgroups, dtype):
    """Rows shared out and not, in one launch and in several; what was in the factor before is far beyond float32."""
    start, rows = symmetric(shape[1], shape[2], torch.float64) + 2.0**40, integers(*shape).to(dtype)
    orders = {"threads": "random", "blocks": "random"}
    with simulator.scheduled(**orders, multiprocessors=multiprocessors, warpgroups=warpgroups):
        got = accumulated(simulator, start, rows, 0.5)
    assert torch.equal(got, exact(start, rows.double(), 0.5))


of_16_bits = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])


@of_16_bits
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(5, 3, 7), (90, 1, 40), (150, 1, 130)])
def test_rows_of_16_bits(simulator, shape, layout, dtype):
    """In one copy and in several; places counted in 31 bits and in 63."""
    check(simulator, arrange(torch.randn(shape).to(dtype), layout))


@of_16_bits
def test_every_number_of_16_bits_is_taken_as_it_is(simulator, dtype):
    numbers = torch.arange(0, 1 << 16, 61, dtype=torch.int32).to(torch.uint16).view(dtype)
    rows = torch.stack([numbers, torch.ones_like(numbers)], 1)[None]
    got = accumulated(simulator, torch.zeros(len(numbers), 2, 2), rows, 1.0)
    torch.testing.assert_close(got[:, 0, 1], numbers.float(), rtol=0, atol=0, equal_nan=True)
