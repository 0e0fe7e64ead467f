"""ella_cuda.ops.kron_accumulate_ against explicit sums of outer products."""

from __future__ import annotations

import itertools
import math
import os

import pytest
import torch
from torch import Tensor

from ella_cuda import ops
from python_tests.ops import checks

OPERANDS = {"kron_accumulate_": checks.Operands([("G d d",), ("N G d",)], (1.0,))}
REFUSALS = [
    ("kron_accumulate_", [("1 2 2",), ("3 1 2",)], (math.nan,), "alpha must be a finite number"),
    ("kron_accumulate_", [("1 2 2",), ("3 1 2",)], (-math.inf,), "alpha must be a finite number"),
    ("kron_accumulate_", [("1 2 2",), ("3 1 2",)], (1e39,), "factor (float32), got 1e+39"),
]
VECTORISED = ["test_equals_the_sum_of_outer_products", "test_a_float64_factor_loses_nothing_of_short_float32_sums"]

SHAPES = [(5, 2, 3), (1, 1, 1), (1, 4, 7), (300, 1, 5), (3, 2, 65), (70, 3, 33)]  # N, G, d
SHAPES += [(300, 40, 2), (600, 21, 4), (40, 7, 15), (9, 30, 1), (2, 5, 13)]  # side by side in a vector
SHAPES += [(300, 3, 16), (5, 2, 32), (40, 2, 128), (7, 1, 144)]  # whole vectors
SHAPES += [(70, 60, 20), (10, 300, 4), (65, 27, 40), (3, 2, 41)]  # more numbers in a row than are summed at once
SHAPES += [(4097, 2, 16), (8200, 3, 4), (4200, 3, 44)]  # more rows than are summed before the factor is touched
SHAPES += [(300, 5, 130), (70, 3, 256), (70, 3, 257)]  # the largest that are not packed, and larger
SHAPES += [
    (30, 2, 300),
    (300, 1, 330),
    (7000, 1, 300),
    (400, 17, 300),
]  # several groups of panels, passes, factors at once
SHAPES += [
    (4501, 1, 37),
    (70_001, 1, 8),
    (500, 1, 130),
]  # one block, whose rows are shared out, and a row or none that is left


def outer_products(factor: Tensor, rows: Tensor, alpha: float) -> Tensor:
    return factor.double() + alpha * torch.einsum("ngi,ngj->gij", rows.double(), rows.double())


def tensors(
    shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    n, g, d = shape
    factor = torch.randn(g, d, d, dtype=torch.float64)
    return (factor + factor.mT).to(device, dtype), torch.randn(n, g, d, dtype=torch.float64).to(device, dtype)


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
of_16_bits = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])


def check_sum(rows: Tensor, alpha: float = 0.7) -> None:
    """Beside a factor of the rows' precision and of float64. The oracle is float64 on the same numbers."""
    factor, _ = tensors((1, *rows.shape[1:]), rows.device)
    narrow = torch.promote_types(rows.dtype, torch.float32)
    for total in {narrow, torch.float64}:
        start = factor.to(total)
        ours, exact = start.clone(), outer_products(start, rows, alpha)
        assert ops.kron_accumulate_(ours, rows, alpha) is ours
        reference = ops.kron_accumulate_torch_(factor.to(narrow), rows, alpha)
        if total == narrow:
            checks.error_at_most_twice(ours, reference, exact)
        else:  # products of float32 are summed in float32 for a while
            floor = 4 * torch.finfo(torch.float32).eps * exact.abs().max()
            assert (ours - exact).abs().max() <= max(2 * (reference.double() - exact).abs().max(), floor)
        assert torch.equal(ours, ours.mT)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_sum_of_outer_products(shape, dtype, device):
    check_sum(tensors(shape, device)[1].to(dtype))


LAID_OUT = [(6, 3, 5), (6, 2, 16), (5, 1, 37), (6, 2, 70), (130, 9, 3), (70, 37, 20), (300, 3, 130), (5, 2, 300)]
LAID_OUT += [(4501, 1, 37), (70_001, 1, 8)]


@pytest.mark.parametrize("shape", LAID_OUT)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_every_layout(shape, dtype, device):
    rows = tensors(shape, device)[1].to(dtype)
    check_sum(rows.permute(2, 0, 1).contiguous().permute(1, 2, 0))  # the blocks, as the z of factored layers has them
    check_sum(rows[:, :1].expand_as(rows))  # stride 0 over blocks
    for _, laid_out in checks.layouts(rows):
        check_sum(laid_out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("d", range(1, 35))
def test_every_size_around_a_vector(d, dtype, device):
    """Blocks side by side and apart, their number filling vectors and not, one batch of rows and part of the next."""
    for n, g, apart in itertools.product((64, 70), (1, 5, 48), (0, 1)):
        factor, wide = tensors((n, g, d + apart), device, dtype)
        factor, rows = factor[:, :d, :d].contiguous(), wide[..., :d]
        ours = ops.kron_accumulate_(factor.clone(), rows, 0.5)
        exact = outer_products(factor, rows, 0.5)
        torch.testing.assert_close(
            ours.double(), exact, rtol=0, atol=16 * torch.finfo(dtype).eps * exact.abs().max().item()
        )
        assert torch.equal(ours, ours.mT)


@pytest.mark.parametrize(
    "shape", [(200_000, 2, 44), (300_000, 1, 5), (100_000, 1, 41), (200_000, 4, 4), (50_000, 2, 260)]
)
@pytest.mark.parametrize("strided", [False, True])
def test_sums_over_many_rows_are_short(shape, strided):
    """Numbers of one sign, whose sums grow: partial sums of few terms lose less of them."""
    n, g, d = shape
    rows = torch.rand(d, g, n).permute(2, 1, 0) if strided else torch.rand(n, g, d)
    ours = ops.kron_accumulate_(torch.zeros(g, d, d), rows)
    exact = outer_products(torch.zeros(g, d, d), rows, 1.0)
    torch.testing.assert_close(
        ours.double(), exact, rtol=0, atol=4 * torch.finfo(torch.float32).eps * exact.max().item()
    )


@pytest.mark.skipif(os.name != "posix", reason="needs mprotect")
@pytest.mark.parametrize(
    "shape",
    [
        (5, 3, 5), (70, 2, 41), (300, 3, 70), (30, 1, 300), (30, 1, 301), (4501, 1, 37), (70, 30, 3), (70, 7, 4),
        (70, 27, 40),
    ],
)  # fmt: skip
@pytest.mark.parametrize("block", ["adjacent", "apart", "overlapping", "the same"])
@pytest.mark.parametrize(
    ("dtype", "total"), [*((d, torch.promote_types(d, torch.float32)) for d in DTYPES), (torch.float32, torch.float64)]
)
def test_nothing_past_the_end_is_read_or_written(shape, block, dtype, total):
    n, g, d = shape
    step = {"adjacent": d, "apart": d + 3, "overlapping": d // 2, "the same": 0}[block]
    row = (g - 1) * step + d
    factor, memory = tensors((n, g, d), torch.device("cpu"), total)[0], torch.randn(n * row).to(dtype)
    expected = ops.kron_accumulate_(factor.clone(), memory.as_strided(shape, (row, step, 1)))
    guarded, written = checks.before_a_guard_page(memory), checks.before_a_guard_page(factor)
    assert torch.equal(ops.kron_accumulate_(written, guarded.as_strided(shape, (row, step, 1))), expected)


# Side by side in a vector, in place, joined to the factor in squares, one that is shared out, packed.
EVERY_WAY = [(40, 7, 5), (40, 7, 16), (70, 27, 40), (70, 3, 130), (4501, 1, 37), (70, 2, 300)]


@pytest.mark.parametrize("shape", EVERY_WAY)
@pytest.mark.parametrize("alpha", [-1.5, 0.0, 1e39])  # the last is beyond float32
def test_weights_of_any_sign_and_size(shape, alpha, device):
    factor, rows = tensors(shape, device)
    checks.assert_same(ops.kron_accumulate_(factor.clone(), rows, alpha), outer_products(factor, rows, alpha))


@pytest.mark.parametrize("shape", [s for s in EVERY_WAY if s[1] > 1])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_not_finite_stays_in_its_block(shape, value, dtype, device):
    factor, rows = tensors(shape, device, dtype)
    before = ops.kron_accumulate_(factor.clone(), rows)
    rows[3, 1, 2] = value
    after = ops.kron_accumulate_(factor.clone(), rows)
    others = torch.arange(shape[1], device=device) != 1
    assert torch.equal(after[others], before[others])
    assert not after[1, 2].isfinite().any() and torch.equal(after.isfinite(), after.mT.isfinite())


@pytest.mark.parametrize("shape", [(0, 2, 3), (4, 0, 3), (4, 2, 0)])
def test_empty(shape, device):
    factor, rows = tensors(shape, device)
    assert torch.equal(ops.kron_accumulate_(factor.clone(), rows), factor)


@pytest.mark.parametrize("shape", [(7, 9, 4), (7, 2, 16), (1, 3, 3), (7, 1, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_lies_around_the_rows_does_not_matter(shape, dtype, device):
    n, g, d = shape
    factor, rows = tensors(shape, device, dtype)
    around = rows.new_full((n + 2, 5 + g * d + 3), float("nan"))
    around[1:-1, 5:-3] = rows.flatten(1)
    inside = around[1:-1, 5:-3].unflatten(1, (g, d))
    assert torch.equal(ops.kron_accumulate_(factor.clone(), inside), ops.kron_accumulate_(factor.clone(), rows))
    few = around[1:2, 5:-3].unflatten(1, (g, d)).expand(3, g, d)  # stride 0 over rows
    checks.error_at_most_twice(
        ops.kron_accumulate_(factor.clone(), few),
        ops.kron_accumulate_torch_(factor.clone(), few),
        outer_products(factor, few, 1.0),
    )


@pytest.mark.parametrize(
    "shape",
    [
        (1000, 2, 40), (1000, 40, 3), (1000, 3, 16), (600, 3, 70), (300, 1, 300), (50, 3, 300), (4501, 1, 37),
        (12501, 1, 37), (300, 7, 200), (70_001, 1, 8),
    ],
)  # fmt: skip
def test_rows_beyond_one_tile_add_up_in_a_fixed_order(shape):
    factor, rows = tensors(shape, torch.device("cpu"), torch.float32)
    checks.same_for_any_number_of_threads(lambda: ops.kron_accumulate_(factor.clone(), rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_in_the_factors_memory_are_refused(dtype, device):
    memory = torch.zeros(60, device=device)
    seen, factor, ends = memory.view(dtype), memory[:18].view(2, 3, 3), 18 * 4 // dtype.itemsize
    for begin, step in ((0, 1), (ends - 1, 1), (ends - 1, 0)):
        rows = seen.as_strided((4, 2, 3), (6 * step, 3 * step, step), begin)
        with pytest.raises(RuntimeError, match="rows must not share memory with factor"):
            ops.kron_accumulate_(factor, rows)
    patches = memory[:4].view(2, 2)
    with pytest.raises(RuntimeError, match="x must not share memory with factor"):
        ops.conv_kron_accumulate_(patches, seen[ends * 4 // 18 - 1 :][:24].view(1, 2, 3, 4), 1)
    assert not memory.any()
    memory[18:] = 1.0  # they begin where it ends
    apart = seen[ends : ends + 24].view(4, 2, 3)
    expected = outer_products(factor, apart, 1.0).to(factor.dtype)
    checks.assert_same(ops.kron_accumulate_(factor, apart), expected)
    ops.conv_kron_accumulate_(patches, seen[ends * 4 // 18 :][:24].view(1, 2, 3, 4), 1)


def integers(*shape: int) -> Tensor:
    """float32 numbers of which products are exact, and sums of up to 256 products, but not of twice as many."""
    return torch.randint(199, 256, shape).float()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("strided", [False, True])
def test_a_float64_factor_loses_nothing_of_short_float32_sums(shape, strided):
    """The oracle is float64 throughout; what was in the factor before is far beyond float32."""
    n, g, d = shape
    rows = integers(d, g, n).permute(2, 1, 0) if strided else integers(n, g, d)
    factor = torch.randint(1 << 20, (g, d, d)).double() + 2.0**40
    factor = torch.triu(factor) + torch.triu(factor, 1).mT
    got = ops.kron_accumulate_(factor.clone(), rows, 0.5)
    assert torch.equal(got, outer_products(factor, rows, 0.5))


def test_many_small_batches_add_up_to_one_large_one(device):
    """Rows whose mean is far from zero, one at a time: float32 totals are off by hundreds of roundings."""
    rows = (3 + torch.rand(3000, 1, 40)).to(device)
    total, single = torch.zeros(1, 40, 40, dtype=torch.float64, device=device), torch.zeros(1, 40, 40, device=device)
    for row in rows.split(1):
        ops.kron_accumulate_(total, row)
        ops.kron_accumulate_(single, row)
    exact = outer_products(torch.zeros_like(total), rows, 1.0)
    error = (total - exact).abs().max() / exact.abs().max()
    # A CPU's products are exact in float64. On CUDA tensor cores sum three terms of a product and cut what is beyond float32 off.
    assert error <= (0.1 if device.type == "cpu" else 1) * torch.finfo(torch.float32).eps
    assert (single - exact).abs().max() / exact.abs().max() > 10 * error
    at_once = ops.kron_accumulate_(torch.zeros_like(total), rows)
    assert (at_once - exact).abs().max() / exact.abs().max() <= torch.finfo(torch.float32).eps


@pytest.mark.parametrize("shape", EVERY_WAY)
def test_a_float64_factor_of_float32_rows_scales_them_in_float64(shape):
    rows = integers(shape[0] % 256, *shape[1:])
    zeros = torch.zeros(shape[1], *shape[2:] * 2, dtype=torch.float64)
    got = ops.kron_accumulate_(zeros.clone(), rows, 0.1)
    torch.testing.assert_close(got, outer_products(zeros, rows, 0.1), rtol=4e-16, atol=0)


def test_graphs_are_refused(device):
    factor, rows = tensors((4, 2, 3), device)
    with pytest.raises(ValueError, match="rows requires grad"):
        ops.kron_accumulate_(factor, rows.clone().requires_grad_())
    with pytest.raises(ValueError, match="factor requires grad"):
        ops.kron_accumulate_(factor.clone().requires_grad_(), rows)
    with pytest.raises(ValueError, match="tangent"):
        torch.func.jvp(lambda r: ops.kron_accumulate_(factor.clone(), r), (rows,), (rows,))
    with pytest.raises(ValueError, match="requires grad"):
        torch.func.grad(lambda r: ops.kron_accumulate_(factor.clone(), r).sum())(rows)
    with torch.no_grad():
        ops.kron_accumulate_(factor, rows.clone().requires_grad_())


def test_autograd_notices_the_write(device):
    factor, rows = tensors((4, 2, 3), device)
    weight = torch.ones(2, 3, 3, dtype=torch.float64, device=device, requires_grad=True)
    product = weight * factor  # saves factor
    ops.kron_accumulate_(factor, rows)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("dims", [(0, 0), (1, 2), (0, None)])
def test_vmap_writes_each_entrys_own_factor(dims, device):
    factor = torch.zeros(4, 2, 3, 3, dtype=torch.float64, device=device)
    rows = torch.randn(4, 5, 2, 3, dtype=torch.float64, device=device)
    batched_factor = factor.movedim(0, dims[0]).clone()
    batched_rows = rows[0] if dims[1] is None else rows.movedim(0, dims[1])
    torch.func.vmap(lambda f, r: ops.kron_accumulate_(f, r), dims)(batched_factor, batched_rows)
    expected = torch.stack(
        [outer_products(f, r if dims[1] is not None else rows[0], 1.0) for f, r in zip(factor, rows, strict=True)]
    )
    checks.assert_same(batched_factor.movedim(dims[0], 0), expected)


def test_vmap_over_rows_alone_is_refused(device):
    factor, rows = tensors((4, 2, 3), device)
    with pytest.raises(ValueError, match="first argument"):
        torch.func.vmap(lambda r: ops.kron_accumulate_(factor, r))(rows[None])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("total", [torch.float32, torch.float64], ids=str)
def test_transforms_and_autocast(dtype, total, device):
    if dtype == torch.float64 != total:
        pytest.skip("refused")
    factor, rows = (t.to(d) for t, d in zip(tensors((4, 2, 3), device), (total, dtype), strict=True))
    expected = ops.kron_accumulate_(factor.clone(), rows)
    torch.library.opcheck(torch.ops.ella_cuda.kron_accumulate_.default, (factor.clone(), rows, 0.5))
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(ops.kron_accumulate_(factor.clone(), rows), expected)
    torch._dynamo.reset()
    written = factor.clone()
    torch.compile(lambda f, r: ops.kron_accumulate_(f, r) + 1, fullgraph=True, backend="aot_eager")(written, rows)
    assert torch.equal(written, expected)
    several = factor.expand(3, 2, 3, 3).clone()
    torch.func.vmap(ops.kron_accumulate_, (0, None))(several, rows)
    torch.testing.assert_close(several, expected.expand_as(several))
    assert torch.equal(ops.kron_accumulate_(factor.clone(), rows[:0]), factor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_more_rows_than_are_packed_at_once(dtype, device):
    rows = torch.randn(150_000, 1, 3, dtype=torch.float64, device=device).to(dtype)
    ours, reference = rows.new_zeros(1, 3, 3), rows.new_zeros(1, 3, 3)
    ops.kron_accumulate_(ours, rows)
    ops.kron_accumulate_torch_(reference, rows)
    checks.error_at_most_twice(ours, reference, outer_products(torch.zeros_like(ours), rows, 1.0))


@of_16_bits
def test_every_number_of_16_bits_is_taken_as_it_is(dtype, device):
    """Its product with 1, once by each way through the rows: subnormal numbers, infinities and NaN among them."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype).to(device)
    pairs = torch.stack([numbers, torch.ones_like(numbers)], 1)[None]  # (1, G, 2)
    for rows in (pairs, pairs.permute(2, 1, 0).contiguous().permute(2, 1, 0)):
        factor = ops.kron_accumulate_(torch.zeros(1 << 16, 2, 2, device=device), rows)
        torch.testing.assert_close(factor[:, 0, 1], numbers.float(), rtol=0, atol=0, equal_nan=True)
    if device.type == "cpu":  # tensor cores give NaN for an infinite number
        finite = numbers[numbers.isfinite()][: 40 * 1000].view(-1, 1, 40).float().to(dtype)
        for row in finite.split(1):
            one = torch.cat([torch.ones_like(row[..., :1]), row], 2)
            factor = ops.kron_accumulate_(torch.zeros(1, 41, 41, dtype=torch.float64), one)
            assert torch.equal(factor[0, 0, 1:], row[0, 0].double())


@of_16_bits
@pytest.mark.parametrize("shape", [(4_000_000, 1, 4), (400_000, 2, 20), (60_000, 1, 256), (50_000, 1, 320)])
@pytest.mark.parametrize("strided", [False, True])
def test_rows_of_16_bits_are_never_all_copied(shape, strided, dtype):
    n, g, d = shape
    rows = torch.ones(d, g, n, dtype=dtype).permute(2, 1, 0) if strided else torch.ones(shape, dtype=dtype)
    factor = torch.zeros(g, d, d)
    assert checks.peak_bytes(lambda: ops.kron_accumulate_(factor, rows)) <= rows.numel()  # a copy has four bytes each
