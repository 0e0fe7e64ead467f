"""ella_cuda.ops.kron_accumulate_ against explicit sums of outer products."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from ella_cuda import ops
from python_tests.ops import checks

OPERANDS = {
    "kron_accumulate_": checks.Operands([("G d d",), ("N G d",)], (1.0,)),
}
REFUSALS = [
    ("kron_accumulate_", [("1 2 2",), ("3 1 2",)], (math.nan,), "alpha must be a finite number"),
    ("kron_accumulate_", [("1 2 2",), ("3 1 2",)], (-math.inf,), "alpha must be a finite number"),
    ("kron_accumulate_", [("1 2 2",), ("3 1 2",)], (1e39,), "factor (float32), got 1e+39"),
]

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


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_sum_of_outer_products(shape, dtype, device):
    factor, rows = tensors(shape, device, dtype)
    ours, reference = factor.clone(), factor.clone()
    assert ops.kron_accumulate_(ours, rows, 0.7) is ours
    ops.kron_accumulate_torch_(reference, rows, 0.7)
    checks.error_at_most_twice(ours, reference, outer_products(factor, rows, 0.7))
    assert torch.equal(ours, ours.mT)


@pytest.mark.parametrize(
    "shape",
    [
        (6, 3, 5),
        (6, 2, 16),
        (5, 1, 37),
        (6, 2, 70),
        (130, 9, 3),
        (70, 37, 20),
        (300, 3, 130),
        (5, 2, 300),
        (4501, 1, 37),
        (70_001, 1, 8),
    ],
)
def test_every_layout(shape, device):
    factor, rows = tensors(shape, device)
    innermost = rows.permute(2, 0, 1).contiguous().permute(1, 2, 0)  # the blocks, as the z of factored layers has them
    checks.assert_same(ops.kron_accumulate_(factor.clone(), innermost, 2.0), outer_products(factor, rows, 2.0))
    for _, laid_out in checks.layouts(rows):
        checks.assert_same(ops.kron_accumulate_(factor.clone(), laid_out, 2.0), outer_products(factor, laid_out, 2.0))
    middle = rows[:, :1].expand_as(rows)  # stride 0 over blocks
    checks.assert_same(ops.kron_accumulate_(factor.clone(), middle), outer_products(factor, middle, 1.0))


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
        (5, 3, 5),
        (70, 2, 41),
        (300, 3, 70),
        (30, 1, 300),
        (30, 1, 301),
        (4501, 1, 37),
        (70, 30, 3),
        (70, 7, 4),
        (70, 27, 40),
    ],
)
@pytest.mark.parametrize("block", ["adjacent", "apart", "overlapping", "the same"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_past_the_end_is_read_or_written(shape, block, dtype):
    n, g, d = shape
    step = {"adjacent": d, "apart": d + 3, "overlapping": d // 2, "the same": 0}[block]
    row = (g - 1) * step + d
    factor, memory = tensors((n, g, d), torch.device("cpu"), dtype)[0], torch.randn(n * row, dtype=dtype)
    expected = ops.kron_accumulate_(factor.clone(), memory.as_strided(shape, (row, step, 1)))
    guarded, written = checks.before_a_guard_page(memory), checks.before_a_guard_page(factor)
    assert torch.equal(ops.kron_accumulate_(written, guarded.as_strided(shape, (row, step, 1))), expected)


# Side by side in a vector, in place, joined to the factor in squares, one that is shared out, packed.
EVERY_WAY = [(40, 7, 5), (40, 7, 16), (70, 27, 40), (70, 3, 130), (4501, 1, 37), (70, 2, 300)]


@pytest.mark.parametrize("shape", EVERY_WAY)
@pytest.mark.parametrize("alpha", [-1.5, 0.0])
def test_weights_that_are_not_positive(shape, alpha, device):
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


@pytest.mark.parametrize("alpha", [float("nan"), float("inf"), 1e39])
def test_a_weight_that_is_not_finite_in_the_dtype_is_refused(alpha, device):
    factor, rows = tensors((4, 2, 3), device, torch.float32)
    before = factor.clone()
    with pytest.raises(RuntimeError, match="alpha must be a finite number"):
        ops.kron_accumulate_(factor, rows, alpha)
    assert torch.equal(factor, before)
    with pytest.raises(RuntimeError, match="alpha must be a finite number"):
        ops.conv_kron_accumulate_(
            torch.zeros(9, 9, device=device), torch.ones(1, 1, 4, 4, device=device), 3, alpha=alpha
        )
    if alpha == 1e39:
        doubles = ops.kron_accumulate_(factor.double(), rows.double(), alpha)
        checks.assert_same(doubles, outer_products(factor, rows, alpha))


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
        (1000, 2, 40),
        (1000, 40, 3),
        (1000, 3, 16),
        (600, 3, 70),
        (300, 1, 300),
        (50, 3, 300),
        (4501, 1, 37),
        (12501, 1, 37),
        (300, 7, 200),
        (70_001, 1, 8),
    ],
)
def test_rows_beyond_one_tile_add_up_in_a_fixed_order(shape):
    factor, rows = tensors(shape, torch.device("cpu"), torch.float32)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(ops.kron_accumulate_(factor.clone(), rows))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_a_factor_that_is_not_contiguous_is_refused(device):
    factor, rows = tensors((4, 2, 3), device)
    wide = torch.zeros(2, 3, 6, dtype=torch.float64, device=device)[:, :, ::2]
    with pytest.raises(RuntimeError, match="factor"):
        ops.kron_accumulate_(wide, rows)
    with pytest.raises(RuntimeError, match="rows"):
        ops.kron_accumulate_(factor, rows[:, :, :2])
    with pytest.raises(RuntimeError, match=r"of factor \(float32\) or be bfloat16 or float16, got float64"):
        ops.kron_accumulate_(factor.float(), rows)
    with pytest.raises(RuntimeError, match=r"\(float64\) or be float32, bfloat16 or float16, got int16"):
        ops.kron_accumulate_(factor, rows.short())
    with pytest.raises(RuntimeError, match=r"factor must be float32 or float64, got float16"):
        ops.kron_accumulate_(factor.half(), rows.half())
    with pytest.raises(RuntimeError, match="factor must be contiguous"):
        ops.kron_accumulate_(factor[:1].expand(2, 3, 3), rows)


def test_rows_in_the_factors_memory_are_refused(device):
    memory = torch.randn(60, dtype=torch.float64, device=device)
    factor = memory[:18].view(2, 3, 3)
    for rows in (memory[:24].view(4, 2, 3), memory[17:41].view(4, 2, 3), memory[17].expand(4, 2, 3)):
        before = memory.clone()
        with pytest.raises(RuntimeError, match="rows must not share memory with factor"):
            ops.kron_accumulate_(factor, rows)
        assert torch.equal(memory, before)
    with pytest.raises(RuntimeError, match="x must not share memory with factor"):
        ops.conv_kron_accumulate_(memory[:4].view(2, 2), memory[:24].view(1, 2, 3, 4), 1)
    apart = memory[18:42].view(4, 2, 3)
    checks.assert_same(ops.kron_accumulate_(factor.clone(), apart), outer_products(factor, apart, 1.0))
    ops.kron_accumulate_(factor, apart)  # they begin where it ends


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


@pytest.mark.skipif(os.name != "posix", reason="needs mprotect")
@pytest.mark.parametrize("shape", [(5, 3, 5), (70, 2, 41), (30, 1, 301), (4501, 1, 37), (70, 27, 40)])
def test_nothing_past_the_end_of_a_float64_factor_is_written(shape):
    rows, zeros = torch.randn(shape), torch.zeros(shape[1], *shape[2:] * 2, dtype=torch.float64)
    written = ops.kron_accumulate_(checks.before_a_guard_page(zeros), checks.before_a_guard_page(rows))
    assert torch.equal(written, ops.kron_accumulate_(zeros, rows))


def test_float32_rows_under_vmap_and_in_opcheck(device):
    factor = torch.zeros(4, 2, 3, 3, dtype=torch.float64, device=device)
    rows = torch.randn(4, 5, 2, 3, device=device)
    torch.func.vmap(ops.kron_accumulate_)(factor, rows)
    expected = torch.stack([outer_products(torch.zeros_like(f), r, 1.0) for f, r in zip(factor, rows, strict=True)])
    checks.assert_same(factor, expected, rtol=1e-6, atol=1e-6)
    torch.library.opcheck(torch.ops.ella_cuda.kron_accumulate_.default, (factor[0], rows[0], 0.5))


INSTRUCTION_SETS = """
import torch
from ella_cuda import ops
torch.manual_seed(0)
for n, g, d in [(300, 1, 5), (600, 21, 4), (300, 3, 16), (70, 27, 40), (300, 3, 130), (4501, 1, 37), (600, 1, 300), (70, 3, 257)]:
    rows = torch.randint(199, 256, (n, g, d)).float()
    factor = torch.full((g, d, d), 2.0**40, dtype=torch.float64)
    exact = factor + 0.5 * torch.einsum("ngi,ngj->gij", rows.double(), rows.double())
    assert torch.equal(ops.kron_accumulate_(factor, rows, 0.5), exact), (n, g, d)
"""


@pytest.mark.parametrize("capability", checks.OTHER_KERNEL_SETS)
def test_float64_factors_in_every_instruction_set(capability, beside_the_tests):
    environment = os.environ | {"ATEN_CPU_CAPABILITY": capability}
    command = [sys.executable, "-c", INSTRUCTION_SETS]
    subprocess.run(command, check=True, env=environment, cwd=beside_the_tests, timeout=300)


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


def test_opcheck(device):
    factor, rows = tensors((4, 2, 3), device)
    torch.library.opcheck(torch.ops.ella_cuda.kron_accumulate_.default, (factor, rows, 0.5))


def test_compile(device):
    factor, rows = tensors((4, 2, 3), device)
    written = factor.clone()
    torch._dynamo.reset()
    torch.compile(lambda f, r: ops.kron_accumulate_(f, r) + 1, fullgraph=True, backend="aot_eager")(written, rows)
    checks.assert_same(written, outer_products(factor, rows, 1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_more_rows_than_are_packed_at_once(dtype, device):
    rows = torch.randn(150_000, 1, 3, dtype=torch.float64, device=device).to(dtype)
    ours, reference = rows.new_zeros(1, 3, 3), rows.new_zeros(1, 3, 3)
    ops.kron_accumulate_(ours, rows)
    ops.kron_accumulate_torch_(reference, rows)
    checks.error_at_most_twice(ours, reference, outer_products(torch.zeros_like(ours), rows, 1.0))


of_16_bits = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])


def accurate_in_both(rows: Tensor, alpha: float = 0.7) -> None:
    """Rows of 16 bits beside a factor of either dtype. The oracle is float64 on the same numbers."""
    factor, _ = tensors((1, *rows.shape[1:]), rows.device)
    for total in (torch.float32, torch.float64):
        start = factor.to(total)
        ours, exact = ops.kron_accumulate_(start.clone(), rows, alpha), outer_products(start, rows, alpha)
        reference = ops.kron_accumulate_torch_(factor.float(), rows, alpha)
        if total == torch.float64:  # products of float32 are summed in float32 for a while
            floor = 4 * torch.finfo(torch.float32).eps * exact.abs().max()
            assert (ours - exact).abs().max() <= max(2 * (reference.double() - exact).abs().max(), floor)
        else:
            checks.error_at_most_twice(ours, reference, exact)
        assert torch.equal(ours, ours.mT)


@pytest.mark.parametrize("shape", SHAPES)
@of_16_bits
def test_rows_of_16_bits(shape, dtype, device):
    accurate_in_both(tensors(shape, device)[1].to(dtype))


@pytest.mark.parametrize("shape", [(6, 3, 5), (130, 9, 3), (70, 37, 20), (300, 3, 130), (5, 2, 300), (4501, 1, 37)])
@of_16_bits
def test_every_layout_of_rows_of_16_bits(shape, dtype, device):
    rows = tensors(shape, device)[1].to(dtype)
    accurate_in_both(rows.permute(2, 0, 1).contiguous().permute(1, 2, 0))
    accurate_in_both(rows[:, :1].expand_as(rows))
    for _, laid_out in checks.layouts(rows):
        accurate_in_both(laid_out)


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


@pytest.mark.skipif(os.name != "posix", reason="needs mprotect")
@pytest.mark.parametrize("shape", [(5, 3, 5), (70, 2, 41), (300, 3, 70), (30, 1, 301), (4501, 1, 37), (70, 27, 40)])
@of_16_bits
def test_nothing_past_the_end_of_rows_of_16_bits_is_read(shape, dtype):
    factor, rows = tensors(shape, torch.device("cpu"), torch.float32)
    rows = rows.to(dtype)
    guarded = ops.kron_accumulate_(factor.clone(), checks.before_a_guard_page(rows))
    assert torch.equal(guarded, ops.kron_accumulate_(factor.clone(), rows))


@of_16_bits
@pytest.mark.parametrize("shape", [(4_000_000, 1, 4), (400_000, 2, 20), (60_000, 1, 256), (50_000, 1, 320)])
@pytest.mark.parametrize("strided", [False, True])
def test_rows_of_16_bits_are_never_all_copied(shape, strided, dtype):
    n, g, d = shape
    rows = torch.ones(d, g, n, dtype=dtype).permute(2, 1, 0) if strided else torch.ones(shape, dtype=dtype)
    factor = torch.zeros(g, d, d)
    assert checks.peak_bytes(lambda: ops.kron_accumulate_(factor, rows)) <= rows.numel()  # a copy has four bytes each


@of_16_bits
def test_rows_of_16_bits_in_transforms_and_autocast(dtype, device):
    factor, rows = tensors((4, 2, 3), device, torch.float32)
    rows = rows.to(dtype)
    expected = ops.kron_accumulate_(factor.clone(), rows)
    torch.library.opcheck(torch.ops.ella_cuda.kron_accumulate_.default, (factor.clone(), rows, 0.5))
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(ops.kron_accumulate_(factor.clone(), rows), expected)
    torch._dynamo.reset()
    written = factor.clone()
    torch.compile(ops.kron_accumulate_, fullgraph=True, backend="aot_eager")(written, rows)
    assert torch.equal(written, expected)
    several = factor.expand(3, 2, 3, 3).clone()
    torch.func.vmap(ops.kron_accumulate_, (0, None))(several, rows)
    torch.testing.assert_close(several, expected.expand_as(several))
    assert torch.equal(ops.kron_accumulate_(factor.clone(), rows[:0]), factor)


@of_16_bits
def test_rows_of_16_bits_in_the_factors_memory_are_refused(dtype, device):
    memory = torch.zeros(60, device=device)
    halves, factor = memory.view(dtype), memory[:18].view(2, 3, 3)
    with pytest.raises(RuntimeError, match="rows must not share memory with factor"):
        ops.kron_accumulate_(factor, halves[35:59].view(4, 2, 3))
    with pytest.raises(RuntimeError, match="x must not share memory with factor"):
        ops.conv_kron_accumulate_(memory[:4].view(2, 2), halves[7:31].view(1, 2, 3, 4), 1)
    ops.kron_accumulate_(factor, halves[36:60].view(4, 2, 3))
    ops.conv_kron_accumulate_(memory[:4].view(2, 2), halves[8:32].view(1, 2, 3, 4), 1)
