"""kron_accumulate_ against explicit outer products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from .checking import DTYPES, LAYOUTS, arrange, assert_accurate, guarded, in_every_order
from .simulator import Simulator

pytestmark = pytest.mark.simulator

# (N, G, d): tiles are 16, 32, 64 or (float32 on tensor cores) 128 wide, slabs 8 to 128 rows.
SHAPES = [(1, 1, 1), (5, 3, 7), (130, 2, 16), (70, 2, 31), (37, 2, 33), (9, 1, 70), (20, 1, 133)]
SHAPES += [(300, 2, 32), (110, 1, 64), (70, 2, 100), (20, 1, 136), (55, 1, 260)]


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
@pytest.mark.parametrize("d", [7, 32, 40, 98])
def test_layouts(simulator: Simulator, layout: str, d: int) -> None:
    start, rows = symmetric(2, d, torch.float32), arrange(torch.randn(45, 2, d), layout)
    (got,) = in_every_order(simulator, lambda: accumulated(simulator, start, rows, -1.5))
    assert_accurate(got, exact(start.double(), rows.double(), -1.5), exact(start, rows, -1.5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("count", "groups", "d"), [(1500, 1, 5), (1500, 3, 5), (1100, 1, 32), (300, 1, 130), (300, 2, 130)]
)
def test_rows_shared_out_over_blocks(simulator: Simulator, count: int, groups: int, d: int, dtype: torch.dtype) -> None:
    start, rows = symmetric(groups, d, dtype), torch.randn(count, groups, d, dtype=dtype)
    results = []
    for order in ("forward", "reverse", "random"):
        with simulator.scheduled(threads=order, blocks=order, multiprocessors=64):
            results.append(accumulated(simulator, start, rows, 0.01))
    assert all(torch.equal(results[0], other) for other in results[1:])
    assert_accurate(results[0], exact(start.double(), rows.double(), 0.01), exact(start, rows, 0.01))
    assert torch.equal(results[0], results[0].mT)


@pytest.mark.parametrize(("d", "offset"), [(36, 0), (36, 1), (36, 2), (38, 0), (132, 0), (132, 3)])
def test_rows_of_any_alignment(simulator: Simulator, d: int, offset: int) -> None:
    """16-byte copies and updates where addresses allow them, single elements where they do not."""
    storage = torch.full((40 * 2 * d + offset,), float("nan"))
    rows = storage[offset:].view(40, 2, d).copy_(torch.randn(40, 2, d))
    start = symmetric(2, d, torch.float32)
    (got,) = in_every_order(simulator, lambda: accumulated(simulator, start, rows, 0.5))
    assert_accurate(got, exact(start.double(), rows.double(), 0.5), exact(start, rows, 0.5))
    assert torch.equal(got, got.mT)
    block = rows[:, 1:]  # one block of two: its stride among blocks does not matter
    (got,) = in_every_order(simulator, lambda: accumulated(simulator, start[1:], block, 0.5))
    assert_accurate(got, exact(start[1:].double(), block.double(), 0.5), exact(start[1:], block, 0.5))


def normalised_error(got: Tensor, rows: Tensor) -> float:
    """The largest error, each in units of the two columns' lengths: what sums of products can be held to."""
    moment = exact(torch.zeros(1), rows.double(), 1.0)
    lengths = moment.diagonal(dim1=1, dim2=2).sqrt()
    return ((got.double() - moment) / (lengths[:, :, None] * lengths[:, None])).abs().max().item()


@pytest.mark.parametrize("kind", ["signed", "positive", "scaled"])
@pytest.mark.parametrize("count", [1, 17, 600, 3000])
def test_tensor_cores_are_as_accurate_as_float32(simulator: Simulator, count: int, kind: str) -> None:
    """A few roundings for any number of rows: neither a term of the split may be missing nor sums be cut again and again."""
    rows = torch.rand(count, 1, 40) + 0.5 if kind == "positive" else torch.randn(count, 1, 40)
    if kind == "scaled":
        rows = rows * 10 ** torch.empty(40).uniform_(-12, 12)
    error = normalised_error(accumulated(simulator, torch.zeros(1, 40, 40), rows, 1.0), rows)
    assert error <= 5 * torch.finfo(torch.float32).eps
    if count == 600:
        one_by_one = torch.zeros(1, 40, 40)
        for row in rows:
            one_by_one += row[:, :, None] * row[:, None]
        assert error <= 2 * normalised_error(one_by_one, rows)


def test_small_integers_are_exact(simulator: Simulator) -> None:
    """Where no product or sum is rounded, every element is right to the bit; each column's values are its own."""
    rows = torch.randint(-9, 10, (150, 1, 140)).float() + torch.arange(140)
    got = accumulated(simulator, torch.zeros(1, 140, 140), rows, 1.0)
    assert torch.equal(got, torch.einsum("ngi,ngj->gij", rows.double(), rows.double()).float())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.4e38])
def test_what_is_not_finite_shows(simulator: Simulator, value: float) -> None:
    """In its row and column of the factor and nowhere else."""
    rows = torch.randn(20, 1, 40)
    rows[3, 0, 35] = value
    got = accumulated(simulator, torch.zeros(1, 40, 40), rows, 1.0)
    there = torch.zeros(1, 40, 40, dtype=torch.bool)
    there[:, 35], there[:, :, 35] = True, True
    assert not got[there & torch.eye(40, dtype=torch.bool)].isfinite().any()
    assert got[~there].isfinite().all()
    if value != 3.4e38:  # that one's products with small numbers are numbers
        assert not got[there].isfinite().any()


def integers(*shape: int) -> Tensor:
    """float32 numbers of which products are exact, and sums of up to 1,024 products, but not of twice as many."""
    return torch.randint(101, 128, shape).float()


@pytest.mark.parametrize("shape", [*SHAPES, (2500, 1, 5), (2500, 2, 20), (2500, 1, 32), (1100, 1, 40), (1100, 1, 130)])
@pytest.mark.parametrize("multiprocessors", [2, 64])
def test_a_float64_factor_loses_nothing_of_short_float32_sums(
    simulator: Simulator, shape: tuple[int, ...], multiprocessors: int
) -> None:
    """Rows shared out and not, in one launch and in several; what was in the factor before is far beyond float32."""
    start, rows = symmetric(shape[1], shape[2], torch.float64) + 2.0**40, integers(*shape)
    for warpgroups in (False, True):
        with simulator.scheduled(
            threads="random", blocks="random", multiprocessors=multiprocessors, warpgroups=warpgroups
        ):
            got = accumulated(simulator, start, rows, 0.5)
        assert torch.equal(got, exact(start, rows.double(), 0.5))


def test_a_float64_factor_is_added_to_in_float64(simulator: Simulator) -> None:
    """The weight is not rounded either."""
    rows = integers(40, 2, 20)
    got = accumulated(simulator, torch.zeros(2, 20, 20, dtype=torch.float64), rows, 0.1)
    assert torch.equal(got, 0.1 * exact(torch.zeros(1), rows.double(), 1.0))


of_16_bits = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])


@of_16_bits
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(5, 3, 7), (130, 2, 16), (70, 2, 33), (90, 1, 40), (55, 1, 100), (150, 1, 130)])
def test_rows_of_16_bits(simulator: Simulator, shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> None:
    """In one copy and in several; places counted in 31 bits and in 63."""
    N, G, d = shape
    rows = arrange(torch.randn(N, G, d).to(dtype), layout)
    start = symmetric(G, d, torch.float32)
    (got,) = in_every_order(simulator, lambda: accumulated(simulator, start, rows, 0.3))
    assert_accurate(got, exact(start.double(), rows.double(), 0.3), exact(start, rows.float(), 0.3))
    assert torch.equal(got, got.mT)


@of_16_bits
def test_rows_of_16_bits_that_repeat_are_copied_once(simulator: Simulator, dtype: torch.dtype) -> None:
    """One launch more than for float32: all of these rows are few numbers."""
    start, few = symmetric(3, 7, torch.float32), torch.randn(1, 1, 7).to(dtype)
    for shape in ((900, 1, 7), (1, 3, 7), (900, 3, 7)):
        rows, counts = few.expand(shape), []
        for values in (rows.float().contiguous(), rows):
            before = simulator.launch_count()
            got = accumulated(simulator, start[: shape[1]], values, 1.0)
            counts.append(simulator.launch_count() - before)
        assert counts[1] == counts[0] + 1
        assert_accurate(
            got, exact(start[: shape[1]].double(), rows.double(), 1.0), exact(start[: shape[1]], rows.float(), 1.0)
        )


@pytest.mark.parametrize("layout", ["contiguous", "permuted"])
@pytest.mark.parametrize("d", [20, 40, 100])
def test_the_copy_of_rows_of_16_bits_lies_as_they_do(simulator: Simulator, d: int, layout: str) -> None:
    """The same kernels multiply as for float32, which choose by what is adjacent, but with one product of tensor cores for three."""
    values = torch.randn(d, 1, d)
    kernels = []
    for dtype in (torch.float32, torch.bfloat16):
        simulator.launches()
        accumulated(simulator, torch.zeros(1, d, d), arrange(values.to(dtype), layout), 1.0)
        kernels.append({launch.kernel for launch in simulator.launches() if "widen_kernel" not in launch.kernel})
    assert {kernel.replace("Tf32E0", "Tf32E1") for kernel in kernels[0]} == kernels[1]
    assert any("Tf32E1" in kernel for kernel in kernels[1]) == (d >= 32)


@of_16_bits
def test_a_float64_factor_loses_nothing_of_short_sums_of_16_bit_rows(simulator: Simulator, dtype: torch.dtype) -> None:
    start, rows = symmetric(2, 20, torch.float64) + 2.0**40, integers(300, 2, 20).to(dtype)
    got = accumulated(simulator, start, rows, 0.5)
    assert torch.equal(got, exact(start, rows.double(), 0.5))


@of_16_bits
def test_every_number_of_16_bits_is_taken_as_it_is(simulator: Simulator, dtype: torch.dtype) -> None:
    numbers = torch.arange(0, 1 << 16, 61, dtype=torch.int32).to(torch.uint16).view(dtype)
    rows = torch.stack([numbers, torch.ones_like(numbers)], 1)[None]
    got = accumulated(simulator, torch.zeros(len(numbers), 2, 2), rows, 1.0)
    torch.testing.assert_close(got[:, 0, 1], numbers.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(0, 2, 3), (4, 0, 3), (4, 2, 0)])
def test_empty(simulator: Simulator, shape: tuple[int, ...]) -> None:
    N, G, d = shape
    start = symmetric(G, d, torch.float64)
    assert torch.equal(accumulated(simulator, start, torch.randn(N, G, d, dtype=torch.float64), 1.0), start)


def test_bad_arguments_are_refused(simulator: Simulator) -> None:
    with pytest.raises(RuntimeError, match="rows must have shape"):
        simulator.ops.kron_accumulate_(torch.zeros(2, 3, 3), torch.zeros(5, 2, 4), 1.0)
    with pytest.raises(RuntimeError, match=r"of factor \(float32\) or be bfloat16 or float16, got float64"):
        simulator.ops.kron_accumulate_(torch.zeros(2, 3, 3), torch.zeros(5, 2, 3, dtype=torch.float64), 1.0)
    with pytest.raises(RuntimeError, match=r"of factor \(float64\) or be float32, bfloat16 or float16, got int16"):
        simulator.ops.kron_accumulate_(torch.zeros(2, 3, 3).double(), torch.zeros(5, 2, 3).short(), 1.0)
    with pytest.raises(RuntimeError, match="factor must be contiguous"):
        simulator.ops.kron_accumulate_(torch.zeros(2, 3, 6)[:, :, ::2], torch.zeros(5, 2, 3), 1.0)
