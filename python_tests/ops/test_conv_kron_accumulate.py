"""ella_cuda.ops.conv_kron_accumulate_ against patches gathered one index at a time."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ella_cuda import ops
from python_tests.ops import checks

IMAGE = ("1 1 4 4",)
SIDE = ("1 1 2 2",)

PLAIN = ([1, 1], [1, 1], [0, 0], [1, 1], True, 1.0)


def geometry(**other: Any) -> tuple[Any, ...]:
    """What follows the tensors of conv_kron_accumulate_, some of them others."""
    names = ("kernel_size", "stride", "padding", "dilation", "circular", "alpha")
    return tuple((dict(zip(names, PLAIN, strict=True)) | other).values())


OPERANDS = {"conv_kron_accumulate_": checks.Operands([("C C",), ("N C H W",)], PLAIN)}
REFUSALS = [
    ("conv_kron_accumulate_", [("1 1",), IMAGE], geometry(alpha=math.inf), "alpha must be a finite number"),
    ("conv_kron_accumulate_", [("1 1",), IMAGE], geometry(alpha=math.nan), "alpha must be a finite number"),
    ("conv_kron_accumulate_", [("1 1",), IMAGE], geometry(kernel_size=[1]), "kernel_size must have 2 values"),
    ("conv_kron_accumulate_", [("1 1",), IMAGE], geometry(kernel_size=[1, 1, 1]), "kernel_size must have 2 values"),
    ("conv_kron_accumulate_", [("1 1",), IMAGE], geometry(kernel_size=[-1, -1]), "kernel_size must be at least 1 and at most"),
    ("conv_kron_accumulate_", [("1 1",), IMAGE], geometry(stride=[0, 1]), "stride must be at least 1 and at most"),
    ("conv_kron_accumulate_", [("1 1",), IMAGE], geometry(padding=[0, -1]), "padding must be at least 0 and at most"),
    ("conv_kron_accumulate_", [("1 1",), IMAGE], geometry(dilation=[1, 1 << 31]), "dilation must be at least 1 and at most"),
    ("conv_kron_accumulate_", [("9 9",), SIDE], geometry(kernel_size=[3, 3]), "does not fit the padded image (2, 2)"),
    ("conv_kron_accumulate_", [("3 3",), SIDE], geometry(kernel_size=[1, 3]), "does not fit the padded image (2, 2)"),
    ("conv_kron_accumulate_", [("1 1",), SIDE], geometry(padding=[1, 3]), "circular padding must not exceed the image (2, 2)"),
    ("conv_kron_accumulate_", [("4 4",), IMAGE], geometry(), "(C*kh*kw, C*kh*kw) = (1, 1), got (4, 4)"),
    (
        "conv_kron_accumulate_",
        [("1 1",), IMAGE],
        geometry(padding=[0, 2**63 - 1], circular=False),
        "padding must be at least 0 and at most 1073741824, got (0, 9223372036854775807)",
    ),
    (
        "conv_kron_accumulate_",
        [("4 4",), IMAGE],
        geometry(kernel_size=[4, 1], dilation=[(2**64 + 2) // 3, 1], circular=False),
        "dilation must be at least 1 and at most",
    ),
]  # fmt: skip
VECTORISED = ["test_a_float64_factor_loses_nothing_of_short_float32_sums"]

GEOMETRIES = [  # kernel, stride, padding, dilation, padding_mode
    (3, 1, None, 1, "circular"),
    (3, 1, None, 1, "zeros"),
    (1, 1, None, 1, "circular"),
    ((3, 2), (2, 1), (1, 0), 1, "zeros"),
    (3, 2, 1, 1, "circular"),
    (3, 1, 2, 2, "circular"),
    (3, (1, 2), 0, (1, 2), "zeros"),
    (5, 1, None, 1, "circular"),
    ((3, 5), 1, None, 1, "circular"),
    # Nearly 'same' circular convolutions, for which there is a way of their own:
    (2, 1, 1, 1, "circular"),
    ((3, 2), 1, 1, 1, "circular"),
    ((2, 3), 1, 1, 1, "circular"),
    (3, (1, 2), 1, 1, "circular"),
    (3, (2, 1), 1, 1, "circular"),
    (3, 1, (1, 0), 1, "circular"),
    (3, 1, (2, 1), 1, "circular"),
    (3, 1, 1, (1, 2), "circular"),
]


def pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


def explicit(x: Tensor, kernel, stride=1, padding=None, dilation=1, mode="circular") -> Tensor:
    """sum of a a^T, a[(c, i, j)] = x[n, c, s p + dil i - pad, ...], by plain indexing in float64."""
    kernel, stride, dilation = pair(kernel), pair(stride), pair(dilation)
    pads = tuple(d * (k - 1) // 2 for k, d in zip(kernel, dilation, strict=True)) if padding is None else pair(padding)
    columns = []
    for offset in itertools.product(range(kernel[0]), range(kernel[1])):
        seen = x.double()
        for axis in (0, 1):
            size, span = x.shape[2 + axis], dilation[axis] * (kernel[axis] - 1) + 1
            first = torch.arange((size + 2 * pads[axis] - span) // stride[axis] + 1, device=x.device) * stride[axis]
            at = first + dilation[axis] * offset[axis] - pads[axis]
            inside = (at >= 0) & (at < size) | (mode == "circular")
            seen = seen.index_select(2 + axis, at % size) * (inside[:, None] if axis == 0 else inside)
        columns.append(seen.flatten(2))
    patches = torch.stack(columns, 2).flatten(1, 2)
    return torch.einsum("nip,njp->ij", patches, patches)


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def views(x: Tensor) -> Iterator[Tensor]:
    """In every layout, and with other channels around."""
    yield from (view for _, view in checks.layouts(x))
    more = torch.full((x.shape[0], x.shape[1] + 3, *x.shape[2:]), torch.nan, dtype=x.dtype, device=x.device)
    more[:, 1:-2] = x
    yield more[:, 1:-2]


def check_sum(x: Tensor, kernel, stride=1, padding=None, dilation=1, mode="circular", alpha: float = 0.3) -> None:
    """In every layout: accurate beside a factor of the images' precision and of float64, and symmetric to the bit."""
    options = {"padding_mode": mode, "alpha": alpha, "stride": stride, "padding": padding, "dilation": dilation}
    narrow = torch.promote_types(x.dtype, torch.float32)
    for number, view in enumerate(views(x)):
        exact = alpha * explicit(view, kernel, stride, padding, dilation, mode)
        start = number % 2 * torch.randn(exact.shape, dtype=torch.float64).to(x.device, narrow)  # or zeros
        start = start + start.T
        ours, reference = start.clone(), start.clone()
        assert ops.conv_kron_accumulate_(ours, view, kernel, **options) is ours
        ops.conv_kron_accumulate_torch_(reference, view, kernel, **options)
        terms = start.double().abs() + alpha * explicit(view.abs(), kernel, stride, padding, dilation, mode)
        checks.error_at_most_twice(ours, reference, start.double() + exact, terms)
        assert torch.equal(ours, ours.T)
        if narrow == torch.float64:
            continue
        zeros = torch.zeros_like(start)
        wide = ops.conv_kron_accumulate_(zeros.double(), view, kernel, **options)
        error = (ops.conv_kron_accumulate_torch_(zeros, view, kernel, **options).double() - exact).abs().max()
        assert (wide - exact).abs().max() <= max(2 * error, 4 * torch.finfo(narrow).eps * exact.abs().max())
        assert torch.equal(wide, wide.T)


SMALL_IMAGES = [  # x, kernel: all lags are wanted, or nearly
    ((5, 37, 4, 4), 3),
    ((5, 70, 2, 2), 3),
    ((3, 19, 2, 4), (1, 5)),
    ((3, 5, 1, 8), (1, 5)),
    ((3, 5, 8, 1), (5, 1)),
    ((3, 9, 2, 8), (3, 5)),
    ((7, 40, 1, 1), 3),
    ((3, 4, 4, 4), 5),
    ((3, 5, 8, 8), 5),
    ((3, 5, 4, 8), (3, 5)),
    ((3, 6, 3, 3), 3),
    ((3, 6, 2, 3), (3, 3)),
    ((4, 3, 4, 6), 3),
    ((3, 2, 2, 2), 3),  # the network's last stage
    ((3, 3, 33, 31), 3),  # many positions and channels
    ((3, 20, 8, 8), 3),
    ((2, 17, 2, 5), 3),
]
BORDERED = [
    (3, 4, 6, 9), (20, 3, 7, 6), (2, 5, 17, 33), (37, 2, 8, 8), (1, 1, 6, 6), (2, 20, 5, 8),
]  # zeros around, 3x3  # fmt: skip
OTHERS = [  # zeros around, without a way of their own
    (3, 1, 0, 1), (3, 1, (1, 0), 1), (3, 1, (1, 2), 1), (3, (2, 1), 1, 1), (3, 1, 1, (1, 2)), (5, 1, 2, 1),
    (5, 1, 1, 1), ((3, 1), 1, (1, 0), 1),
]  # fmt: skip
PAIRS = [  # x, kernel, stride, padding, dilation: patches read the same pairs of pixels again and again
    ((9, 37, 4, 4), 3, 1, 1, 1), ((9, 70, 4, 4), 3, 1, 1, 1), ((9, 131, 3, 5), 3, 1, 1, 1),
    ((34, 16, 2, 2), 3, 1, 1, 1), ((35, 17, 1, 4), 3, 1, 1, 1), ((130, 19, 1, 1), 3, 1, 1, 1),
    ((3, 41, 8, 7), 3, 1, 1, 1), ((9, 20, 5, 8), 3, 1, 0, 1), ((9, 18, 5, 4), 3, 1, 2, 1),
    ((5, 17, 7, 5), (3, 5), 1, (1, 2), 1), ((6, 21, 6, 5), (2, 3), 1, (0, 1), 1),
    ((5, 17, 5, 7), (5, 3), 1, (2, 1), 1), ((5, 16, 6, 5), 5, 1, 2, 1), ((17, 33, 8, 8), 3, 2, 1, 1),
    ((9, 20, 7, 6), 3, (2, 1), 1, 1), ((33, 20, 4, 7), 3, (1, 2), (1, 0), 1), ((5, 17, 7, 8), 3, 1, (1, 2), (1, 2)),
    ((5, 22, 8, 5), 3, 1, (2, 1), (2, 1)),
]  # fmt: skip
PIXELS = [(40, 70, 1, 1), (9, 70, 2, 3), (7, 20, 3, 3), (300, 5, 1, 2), (5, 20, 4, 4), (150, 6, 8, 8), (3, 20, 5, 5)]
PIXELS += [(2, 4, 7, 33)]  # of which patches of one pixel are taken
CASES = [((2, 2, 5, 6), *geometry) for geometry in GEOMETRIES]
CASES += [(shape, kernel, 1, None, 1, "circular") for shape, kernel in SMALL_IMAGES]
CASES += [(shape, 3, 1, None, 1, "zeros") for shape in BORDERED]
CASES += [((2, 2, 7, 8), *geometry, "zeros") for geometry in OTHERS]
CASES += [(*case, "zeros") for case in PAIRS]
CASES += [(shape, 1, 1, None, 1, mode) for shape in PIXELS for mode in ("circular", "zeros")]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_sum_over_patches(case, dtype, device):
    shape, *geometry = case
    check_sum(torch.randn(shape, dtype=torch.float64).to(device, dtype), *geometry)


@pytest.mark.parametrize("shape, kernel", [((200, 130, 8, 8), 3), ((2100, 16, 4, 4), 3), ((40, 16, 24, 24), 5)])
@pytest.mark.parametrize("wide", [False, True])
def test_more_pairs_of_pixels_than_are_packed_at_once(shape, kernel, wide, device):
    """Integers, of which all sums are exact."""
    x = torch.randint(-3, 4, shape).to(device, torch.float32)
    d = shape[1] * kernel**2
    found = torch.zeros(d, d, dtype=torch.float64 if wide else torch.float32, device=device)
    ops.conv_kron_accumulate_(found, x, kernel, "zeros")
    exact = torch.zeros(d, d, dtype=torch.float64, device=device)
    for some in x.split(100):
        ops.conv_kron_accumulate_torch_(exact, some, kernel, "zeros")
    assert torch.equal(found.double(), exact)


@pytest.mark.parametrize(
    "shape, kernel, padding",
    [
        ((1, 16, 400, 400), 5, None),
        ((8000, 16, 4, 4), 3, None),
        ((20, 64, 28, 28), 5, 0),  # pairs of pixels fall apart into many classes
        ((40, 32, 3, 3), 13, None),
        ((1, 16, 1, 9000), (1, 25), None),  # lists of pairs are long
        ((1, 16, 9000, 1), (25, 1), None),
    ],
)
def test_scratch_does_not_grow_with_images_or_kernels(shape, kernel, padding):
    x, d = torch.ones(shape), shape[1] * math.prod(pair(kernel))
    factor = torch.zeros(d, d)
    call = functools.partial(ops.conv_kron_accumulate_, factor, x, kernel, "zeros", padding=padding)
    assert checks.peak_bytes(call) <= 24e6


@pytest.mark.parametrize("mode", ["circular", "zeros"])
@pytest.mark.parametrize("shape", [(30, 80, 4, 4), (30, 80, 2, 2), (40, 20, 8, 8), (200, 33, 8, 8), (9, 30, 3, 5)])
def test_same_numbers_for_any_number_of_threads(shape, mode):
    x, d = torch.randn(shape), 9 * shape[1]
    call = functools.partial(ops.conv_kron_accumulate_, x=x, kernel_size=3, padding_mode=mode)
    checks.same_for_any_number_of_threads(lambda: call(torch.zeros(d, d)), (1, 2, 7))


def test_more_images_of_small_size_than_are_packed_at_once(device):
    x = torch.randint(-3, 4, (9000, 3, 2, 2)).to(device, torch.float32)  # sums are exact
    found = ops.conv_kron_accumulate_(torch.zeros(27, 27, device=device), x, 3)
    patches = F.unfold(F.pad(x.double(), (1, 1, 1, 1), mode="circular"), 3)
    assert torch.equal(found.double(), torch.einsum("nip,njp->ij", patches, patches))


@pytest.mark.parametrize("mode", ["circular", "zeros"])
def test_more_positions_than_are_packed_at_once(mode, device):
    """1x1 patches at a stride, which have no way of their own: two numbers each, whose sum is a product of two matrices."""
    x = torch.randn(70, 2, 64, 130, dtype=torch.float64, device=device)
    factor = torch.zeros(2, 2, dtype=torch.float64, device=device)
    rows = x[..., ::2].transpose(0, 1).flatten(1)
    checks.assert_same(ops.conv_kron_accumulate_(factor, x, 1, mode, stride=(1, 2)), rows @ rows.T)


@pytest.mark.parametrize("size", [(0, 5), (4, 0), (0, 0)])
@pytest.mark.parametrize("images, channels", [(3, 2), (40, 16)])
def test_images_without_pixels(size, images, channels, device):
    """Patches of their border alone are zero."""
    factor = torch.ones(9 * channels, 9 * channels, dtype=torch.float64, device=device)
    x = torch.zeros(images, channels, *size, dtype=torch.float64, device=device)
    assert torch.equal(ops.conv_kron_accumulate_(factor.clone(), x, 3, "zeros", padding=2), factor)


def test_errors(device):
    x = torch.randn(2, 2, 4, 4, dtype=torch.float64, device=device)
    factor = torch.zeros(18, 18, dtype=torch.float64, device=device)
    for kernel, mode, options, words in (
        (3, "reflect", {}, "padding_mode"),
        ((3, 3, 3), "circular", {}, "kernel_size"),
        (3, "circular", {"stride": 0}, "stride"),
    ):
        with pytest.raises(ValueError, match=words):
            ops.conv_kron_accumulate_(factor, x, kernel, mode, **options)
    with pytest.raises(ValueError, match="x requires grad"):
        ops.conv_kron_accumulate_(factor, x.requires_grad_(), 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_transforms_and_autocast(dtype, device):
    x = torch.randn(3, 2, 2, 4, 4, dtype=torch.float64).to(device, dtype)
    zeros = torch.zeros(18, 18, dtype=torch.promote_types(dtype, torch.float32), device=device)
    factors = zeros.expand(3, 18, 18).clone()
    torch.func.vmap(lambda f, image: ops.conv_kron_accumulate_(f, image, 3))(factors, x)
    expected = torch.stack([explicit(image, 3) for image in x]).to(zeros.dtype)
    checks.assert_same(factors, expected)
    single = ops.conv_kron_accumulate_(zeros.clone(), x[0], 3)
    raw = (zeros.clone(), x[0], (3, 3), (1, 1), (1, 1), (1, 1), True, 1.0)
    torch.library.opcheck(torch.ops.ella_cuda.conv_kron_accumulate_.default, raw)
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(ops.conv_kron_accumulate_(zeros.clone(), x[0], 3), single)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda f, image: ops.conv_kron_accumulate_(f, image, 3) + 1, fullgraph=True, backend="aot_eager"
    )
    written = zeros.clone()
    compiled(written, x[0])
    checks.assert_same(written, expected[0])
    for empty in (x[0, :0], x[0, :, :, :0]):
        options = {} if empty.shape[2] else {"padding": 2}
        assert torch.equal(ops.conv_kron_accumulate_(single.clone(), empty, 3, "zeros", **options), single)


@pytest.mark.parametrize(
    ("shape", "kernel", "mode", "geometry"),
    [
        ((20, 3, 8, 8), 3, "circular", {}),
        ((20, 2, 9, 7), 3, "zeros", {"stride": 2}),
        ((300, 16, 1, 1), 1, "circular", {}),
        ((2000, 2, 2, 2), 3, "circular", {}),
        ((2, 1, 150, 150), 5, "circular", {}),
        ((1, 2, 130, 130), 1, "zeros", {}),
        ((1000, 3, 3, 3), 1, "circular", {}),
        ((150, 16, 4, 4), 3, "zeros", {}),
        ((150, 32, 8, 8), 3, "zeros", {}),
        ((150, 16, 8, 8), 3, "zeros", {"stride": 2}),
        ((70, 70, 4, 4), 3, "zeros", {}),
        ((150, 35, 8, 8), 3, "zeros", {}),
        ((40, 17, 8, 6), 3, "zeros", {"stride": 2}),
        ((9, 24, 6, 7), 5, "zeros", {}),
    ],
)
def test_a_float64_factor_loses_nothing_of_short_float32_sums(shape, kernel, mode, geometry):
    """Integers whose sums of 256 products float32 holds, but not of all: the oracle is float64 throughout."""
    x = torch.randint(199, 256, shape).float()
    size = shape[1] * kernel**2
    factor = torch.full((size, size), 2.0**40, dtype=torch.float64)
    expected = ops.conv_kron_accumulate_torch_(factor.clone(), x.double(), kernel, mode, 0.5, **geometry)
    got = ops.conv_kron_accumulate_(factor.clone(), x, kernel, mode, 0.5, **geometry)
    if not geometry and (mode == "circular" or kernel == 1):  # sums over the lanes of a vector
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-7 * float((expected - factor).abs().max()))
    else:
        assert torch.equal(got, expected)
    assert torch.equal(got, got.T)


def test_vmap_inside_a_compiled_function_and_inside_vmap():
    def accumulate(factor, x):
        return ops.conv_kron_accumulate_(factor, x, 1)

    images = torch.randn(2, 3, 4, 2, 1, 5)
    expected = torch.einsum("abncij,abndij->abcd", images, images)
    nested, compiled = torch.zeros(2, 3, 2, 2), torch.zeros(2, 2, 2)
    torch.vmap(torch.vmap(accumulate))(nested, images)
    torch.testing.assert_close(nested, expected)
    torch.compile(torch.vmap(accumulate), backend="aot_eager", fullgraph=True)(compiled, images[:, 0])
    torch.testing.assert_close(compiled, expected[:, 0])


of_16_bits = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])


@of_16_bits
def test_more_images_of_16_bits_than_are_copied_at_once(dtype, device):
    """Integers, of which all sums are exact."""
    x = torch.randint(-3, 4, (700, 60, 8, 8)).to(device, dtype)
    found = ops.conv_kron_accumulate_(torch.zeros(540, 540, device=device), x, 3)
    exact = torch.zeros(540, 540, dtype=torch.float64, device=device)
    for some in x.split(100):
        ops.conv_kron_accumulate_torch_(exact, some, 3)
    assert torch.equal(found.double(), exact)


@of_16_bits
@pytest.mark.parametrize("kernel, options", [(3, {}), (3, {"stride": 2}), (1, {})])
def test_images_of_16_bits_are_never_all_copied(kernel, options, dtype):
    x, size = torch.ones(1500, 16, 32, 32, dtype=dtype), 16 * kernel**2
    factor = torch.zeros(size, size)
    peak = checks.peak_bytes(lambda: ops.conv_kron_accumulate_(factor, x, kernel, **options))
    assert peak <= 2 * x.numel()  # a copy has four bytes each
