"""ella_cuda.ops.conv_kron_accumulate_ against patches gathered one index at a time."""

from __future__ import annotations

import functools
import itertools
import math
import os
import subprocess
import sys
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


OPERANDS = {
    "conv_kron_accumulate_": checks.Operands([("C C",), ("N C H W",)], PLAIN),
}
REFUSALS = [
    ("conv_kron_accumulate_", [("1 1",), IMAGE], geometry(alpha=math.inf), "alpha must be a finite number"),
    ("conv_kron_accumulate_", [("1 1",), IMAGE], geometry(alpha=math.nan), "alpha must be a finite number"),
    ("conv_kron_accumulate_", [("1 1",), IMAGE], geometry(kernel_size=[1]), "kernel_size must have 2 values"),
    ("conv_kron_accumulate_", [("1 1",), IMAGE], geometry(kernel_size=[1, 1, 1]), "kernel_size must have 2 values"),
    (
        "conv_kron_accumulate_",
        [("1 1",), IMAGE],
        geometry(kernel_size=[-1, -1]),
        "kernel_size must be at least 1 and at most",
    ),
    ("conv_kron_accumulate_", [("1 1",), IMAGE], geometry(stride=[0, 1]), "stride must be at least 1 and at most"),
    ("conv_kron_accumulate_", [("1 1",), IMAGE], geometry(padding=[0, -1]), "padding must be at least 0 and at most"),
    (
        "conv_kron_accumulate_",
        [("1 1",), IMAGE],
        geometry(dilation=[1, 1 << 31]),
        "dilation must be at least 1 and at most",
    ),
    ("conv_kron_accumulate_", [("9 9",), SIDE], geometry(kernel_size=[3, 3]), "does not fit the padded image (2, 2)"),
    ("conv_kron_accumulate_", [("3 3",), SIDE], geometry(kernel_size=[1, 3]), "does not fit the padded image (2, 2)"),
    (
        "conv_kron_accumulate_",
        [("1 1",), SIDE],
        geometry(padding=[1, 3]),
        "circular padding must not exceed the image (2, 2)",
    ),
    ("conv_kron_accumulate_", [("4 4",), IMAGE], geometry(), "(C*kh*kw, C*kh*kw) = (1, 1), got (4, 4)"),
]

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


def explicit(x: Tensor, kernel, stride, padding, dilation, mode) -> Tensor:
    """sum of a a^T, a[(c, i, j)] = x[n, c, s p + dil i - pad, ...], by plain indexing."""
    kernel, stride, dilation = pair(kernel), pair(stride), pair(dilation)
    pads = tuple(d * (k - 1) // 2 for k, d in zip(kernel, dilation, strict=True)) if padding is None else pair(padding)
    n, c, *size = x.shape
    out = [
        (s + 2 * p - d * (k - 1) - 1) // t + 1
        for s, p, d, k, t in zip(size, pads, dilation, kernel, stride, strict=True)
    ]
    total = torch.zeros(c * kernel[0] * kernel[1], c * kernel[0] * kernel[1], dtype=torch.float64)
    source = x.double().cpu()
    for image, p, q in itertools.product(range(n), range(out[0]), range(out[1])):
        patch = torch.zeros(c, *kernel, dtype=torch.float64)
        for i, j in itertools.product(range(kernel[0]), range(kernel[1])):
            r, s = stride[0] * p + dilation[0] * i - pads[0], stride[1] * q + dilation[1] * j - pads[1]
            if mode == "circular" or (0 <= r < size[0] and 0 <= s < size[1]):
                patch[:, i, j] = source[image, :, r % size[0], s % size[1]]
        total += torch.outer(patch.flatten(), patch.flatten())
    return total.to(x.device)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_sum_over_patches(geometry, dtype, device):
    kernel, stride, padding, dilation, mode = geometry
    x = torch.randn(2, 2, 5, 6, dtype=torch.float64).to(device, dtype)
    d = 2 * pair(kernel)[0] * pair(kernel)[1]
    start = torch.randn(d, d, dtype=torch.float64).to(device, dtype)
    start = start + start.T
    ours, reference = start.clone(), start.clone()
    options = {"stride": stride, "padding": padding, "dilation": dilation}
    assert ops.conv_kron_accumulate_(ours, x, kernel, mode, 0.3, **options) is ours
    ops.conv_kron_accumulate_torch_(reference, x, kernel, mode, 0.3, **options)
    checks.error_at_most_twice(ours, reference, start.double() + 0.3 * explicit(x, *geometry))
    assert torch.equal(ours, ours.T)


def test_image_smaller_than_the_kernel(device):
    x = torch.randn(3, 2, 2, 2, dtype=torch.float64, device=device)  # the network's last stage: 3x3 on 2x2
    factor = torch.zeros(18, 18, dtype=torch.float64, device=device)
    checks.assert_same(ops.conv_kron_accumulate_(factor, x, 3), explicit(x, 3, 1, 1, 1, "circular"))


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
]


@pytest.mark.parametrize("shape, kernel", SMALL_IMAGES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_tori(shape, kernel, dtype, device):
    x = torch.randn(shape, dtype=torch.float64).to(device, dtype)
    d = shape[1] * pair(kernel)[0] * pair(kernel)[1]
    expected = explicit(x, kernel, 1, None, 1, "circular")
    found, reference = torch.zeros(2, d, d, dtype=dtype, device=device)
    ops.conv_kron_accumulate_(found, x, kernel)
    ops.conv_kron_accumulate_torch_(reference, x, kernel)
    checks.error_at_most_twice(found, reference, expected)
    assert torch.equal(found, found.T)
    for view in (x.contiguous(memory_format=torch.channels_last), x.mT.contiguous().mT, x.repeat_interleave(2, 0)[::2]):
        other = ops.conv_kron_accumulate_(torch.zeros_like(found), view, kernel)
        checks.error_at_most_twice(other, reference, expected)


BORDERED = [(3, 4, 6, 9), (20, 3, 7, 6), (2, 5, 17, 33), (37, 2, 8, 8), (1, 1, 6, 6), (2, 20, 5, 8)]


@pytest.mark.parametrize("shape", BORDERED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeros_around_images_of_any_size(shape, dtype, device):
    """A 3x3 kernel of the output's size has a way of its own."""
    x = torch.randn(shape, dtype=torch.float64).to(device, dtype)
    d = 9 * shape[1]
    start = torch.randn(d, d, dtype=torch.float64).to(device, dtype)
    start = start + start.T
    for _, view in checks.layouts(x):
        ours, reference = start.clone(), start.clone()
        ops.conv_kron_accumulate_(ours, view, 3, "zeros", 0.3)
        ops.conv_kron_accumulate_torch_(reference, view, 3, "zeros", 0.3)
        expected = start.double() + 0.3 * explicit(view, 3, 1, None, 1, "zeros")
        checks.error_at_most_twice(ours, reference, expected)
        assert torch.equal(ours, ours.T)


@pytest.mark.parametrize(
    "geometry",
    [
        (3, 1, 0, 1),
        (3, 1, (1, 0), 1),
        (3, 1, (1, 2), 1),
        (3, (2, 1), 1, 1),
        (3, 1, 1, (1, 2)),
        (5, 1, 2, 1),
        (5, 1, 1, 1),
        ((3, 1), 1, (1, 0), 1),
    ],
    ids=str,
)
def test_zeros_around_images_where_that_way_is_none(geometry, device):
    x = torch.randn(2, 2, 7, 8, dtype=torch.float64, device=device)
    kernel, stride, padding, dilation = geometry
    d = 2 * pair(kernel)[0] * pair(kernel)[1]
    options = {"stride": stride, "padding": padding, "dilation": dilation}
    found = ops.conv_kron_accumulate_(torch.zeros(d, d, dtype=x.dtype, device=device), x, kernel, "zeros", **options)
    checks.assert_same(found, explicit(x, *geometry, "zeros"))


PAIRS = [  # x, kernel, stride, padding, dilation: patches read the same pairs of pixels again and again
    ((9, 37, 4, 4), 3, 1, 1, 1),
    ((9, 70, 4, 4), 3, 1, 1, 1),
    ((9, 131, 3, 5), 3, 1, 1, 1),
    ((34, 16, 2, 2), 3, 1, 1, 1),
    ((35, 17, 1, 4), 3, 1, 1, 1),
    ((130, 19, 1, 1), 3, 1, 1, 1),
    ((3, 41, 8, 7), 3, 1, 1, 1),
    ((9, 20, 5, 8), 3, 1, 0, 1),
    ((9, 18, 5, 4), 3, 1, 2, 1),
    ((5, 17, 7, 5), (3, 5), 1, (1, 2), 1),
    ((6, 21, 6, 5), (2, 3), 1, (0, 1), 1),
    ((5, 17, 5, 7), (5, 3), 1, (2, 1), 1),
    ((5, 16, 6, 5), 5, 1, 2, 1),
    ((17, 33, 8, 8), 3, 2, 1, 1),
    ((9, 20, 7, 6), 3, (2, 1), 1, 1),
    ((33, 20, 4, 7), 3, (1, 2), (1, 0), 1),
    ((5, 17, 7, 8), 3, 1, (1, 2), (1, 2)),
    ((5, 22, 8, 5), 3, 1, (2, 1), (2, 1)),
]


@pytest.mark.parametrize("geometry", PAIRS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_pairs_of_pixels(geometry, dtype, device):
    """Images and kernels for which there is a way of their own with zeros around."""
    shape, kernel, stride, padding, dilation = geometry
    x = torch.randn(shape, dtype=torch.float64).to(device, dtype)
    options = {"stride": stride, "padding": padding, "dilation": dilation}
    for _, view in checks.layouts(x):
        exact = explicit(view, kernel, stride, padding, dilation, "zeros")
        if dtype in (torch.bfloat16, torch.float16):
            accurate_in_both(view, kernel, exact, "zeros", **options)
            continue
        start = torch.randn(*exact.shape, dtype=torch.float64).to(device, dtype)
        start = start + start.T
        ours, reference = start.clone(), start.clone()
        ops.conv_kron_accumulate_(ours, view, kernel, "zeros", 0.3, **options)
        ops.conv_kron_accumulate_torch_(reference, view, kernel, "zeros", 0.3, **options)
        checks.error_at_most_twice(ours, reference, start.double() + 0.3 * exact)
        assert torch.equal(ours, ours.T)
        wide = torch.zeros(exact.shape, dtype=torch.float64, device=device)
        ops.conv_kron_accumulate_(wide, view, kernel, "zeros", 0.3, **options)
        torch.testing.assert_close(wide, 0.3 * exact, rtol=0, atol=1e-6 * float(exact.abs().max()))
        assert torch.equal(wide, wide.T)


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


CAPABILITIES = """
import torch
from ella_cuda import ops
torch.manual_seed(0)
shapes = [(150, 16, 4, 4), (70, 70, 4, 4), (150, 35, 8, 8), (40, 17, 8, 6), (9, 24, 6, 7)]
for shape, kernel, stride in zip(shapes, (3, 3, 3, 3, 5), (1, 1, 1, 2, 1), strict=True):
    x = torch.randint(199, 256, shape).float()
    factor = torch.full((shape[1] * kernel**2,) * 2, 2.0**40, dtype=torch.float64)
    settings = {"padding_mode": "zeros", "alpha": 0.5, "stride": stride}
    exact = ops.conv_kron_accumulate_torch_(factor.clone(), x.double(), kernel, **settings)
    assert torch.equal(ops.conv_kron_accumulate_(factor, x, kernel, **settings), exact), (shape, kernel, stride)
"""


@pytest.mark.parametrize("capability", checks.OTHER_KERNEL_SETS)
def test_pairs_of_pixels_in_every_instruction_set(capability, beside_the_tests):
    environment = os.environ | {"ATEN_CPU_CAPABILITY": capability}
    command = [sys.executable, "-c", CAPABILITIES]
    subprocess.run(command, check=True, env=environment, cwd=beside_the_tests, timeout=300)


@pytest.mark.parametrize("mode", ["circular", "zeros"])
@pytest.mark.parametrize("shape", [(30, 80, 4, 4), (30, 80, 2, 2), (40, 20, 8, 8), (200, 33, 8, 8), (9, 30, 3, 5)])
def test_same_numbers_for_any_number_of_threads(shape, mode):
    x, d = torch.randn(shape), 9 * shape[1]
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            results.append(ops.conv_kron_accumulate_(torch.zeros(d, d), x, 3, mode))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_more_images_of_small_size_than_are_packed_at_once(device):
    x = torch.randint(-3, 4, (9000, 3, 2, 2)).to(device, torch.float32)  # sums are exact
    found = ops.conv_kron_accumulate_(torch.zeros(27, 27, device=device), x, 3)
    patches = F.unfold(F.pad(x.double(), (1, 1, 1, 1), mode="circular"), 3)
    assert torch.equal(found.double(), torch.einsum("nip,njp->ij", patches, patches))


@pytest.mark.parametrize("shape", [(3, 3, 33, 31), (3, 20, 8, 8), (2, 17, 2, 5)])
def test_many_positions_and_channels(shape, device):
    x = torch.randn(shape, dtype=torch.float64, device=device)
    d = 9 * shape[1]
    factor = torch.zeros(d, d, dtype=torch.float64, device=device)
    checks.assert_same(ops.conv_kron_accumulate_(factor, x, 3), explicit(x, 3, 1, 1, 1, "circular"))
    assert torch.equal(factor, factor.T)


@pytest.mark.parametrize(
    "shape",
    [
        (40, 70, 1, 1),
        (9, 70, 2, 3),
        (7, 20, 3, 3),
        (300, 5, 1, 2),
        (5, 20, 4, 4),
        (150, 6, 8, 8),
        (3, 20, 5, 5),
        (2, 4, 7, 33),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_patches_of_one_pixel(shape, dtype, device):
    x = torch.randn(shape, dtype=torch.float64).to(device, dtype)
    more = torch.full((shape[0], shape[1] + 3, *shape[2:]), torch.nan, dtype=dtype, device=device)
    more[:, 1:-2] = x
    for laid_out in (*(t for _, t in checks.layouts(x)), more[:, 1:-2]):
        rows = laid_out.double().transpose(0, 1).flatten(1)
        for mode in ("circular", "zeros"):
            ours, reference = (torch.zeros(shape[1], shape[1], dtype=dtype, device=device) for _ in range(2))
            ops.conv_kron_accumulate_(ours, laid_out, 1, mode, 0.5)
            ops.conv_kron_accumulate_torch_(reference, laid_out, 1, mode, 0.5)
            checks.error_at_most_twice(ours, reference, 0.5 * rows @ rows.T)
            assert torch.equal(ours, ours.T)


@pytest.mark.parametrize("mode", ["circular", "zeros"])
def test_more_positions_than_are_packed_at_once(mode, device):
    """1x1 patches at a stride, which have no way of their own: two numbers each, whose sum is a product of two matrices."""
    x = torch.randn(70, 2, 64, 130, dtype=torch.float64, device=device)
    factor = torch.zeros(2, 2, dtype=torch.float64, device=device)
    rows = x[..., ::2].transpose(0, 1).flatten(1)
    checks.assert_same(ops.conv_kron_accumulate_(factor, x, 1, mode, stride=(1, 2)), rows @ rows.T)


def test_every_layout(device):
    x = torch.randn(3, 2, 4, 5, dtype=torch.float64, device=device)
    for _, laid_out in checks.layouts(x):
        factor = torch.zeros(18, 18, dtype=torch.float64, device=device)
        checks.assert_same(ops.conv_kron_accumulate_(factor, laid_out, 3), explicit(laid_out, 3, 1, 1, 1, "circular"))


def test_no_images(device):
    factor = torch.ones(18, 18, dtype=torch.float64, device=device)
    assert torch.equal(
        ops.conv_kron_accumulate_(factor.clone(), torch.zeros(0, 2, 4, 5, dtype=torch.float64, device=device), 3),
        factor,
    )


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
    with pytest.raises(ValueError, match="padding_mode"):
        ops.conv_kron_accumulate_(factor, x, 3, "reflect")
    with pytest.raises(ValueError, match="kernel_size"):
        ops.conv_kron_accumulate_(factor, x, (3, 3, 3))
    with pytest.raises(ValueError, match="stride"):
        ops.conv_kron_accumulate_(factor, x, 3, stride=0)
    with pytest.raises(RuntimeError, match="factor"):
        ops.conv_kron_accumulate_(factor[:9, :9].contiguous(), x, 3)
    with pytest.raises(RuntimeError, match="padding"):
        ops.conv_kron_accumulate_(factor, x, 3, padding=5)
    with pytest.raises(RuntimeError, match="kernel"):
        ops.conv_kron_accumulate_(factor, x, 3, "zeros", padding=0, dilation=4)
    with pytest.raises(
        RuntimeError, match=r"padding must be at least 0 and at most 1073741824, got \(0, 9223372036854775807\)"
    ):
        ops.conv_kron_accumulate_(factor[:2, :2].contiguous(), x, 1, "zeros", padding=(0, 2**63 - 1))
    with pytest.raises(RuntimeError, match="dilation must be at least 1 and at most"):
        ops.conv_kron_accumulate_(
            factor[:8, :8].contiguous(), x, (4, 1), "zeros", padding=0, dilation=((2**64 + 2) // 3, 1)
        )
    with pytest.raises(ValueError, match="x requires grad"):
        ops.conv_kron_accumulate_(factor, x.requires_grad_(), 3)


def test_vmap_opcheck_compile(device):
    x = torch.randn(3, 2, 2, 4, 4, dtype=torch.float64, device=device)
    factors = torch.zeros(3, 18, 18, dtype=torch.float64, device=device)
    torch.func.vmap(lambda f, image: ops.conv_kron_accumulate_(f, image, 3))(factors, x)
    checks.assert_same(factors, torch.stack([explicit(image, 3, 1, 1, 1, "circular") for image in x]))
    raw = (factors[0].clone(), x[0], (3, 3), (1, 1), (1, 1), (1, 1), True, 1.0)
    torch.library.opcheck(torch.ops.ella_cuda.conv_kron_accumulate_.default, raw)
    torch._dynamo.reset()
    written = torch.zeros(18, 18, dtype=torch.float64, device=device)
    torch.compile(lambda f, image: ops.conv_kron_accumulate_(f, image, 3) + 1, fullgraph=True, backend="aot_eager")(
        written, x[0]
    )
    checks.assert_same(written, factors[0])


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


def accurate_in_both(x: Tensor, kernel, exact: Tensor | None = None, mode: str = "circular", **options) -> None:
    """Images of 16 bits beside a factor of either dtype. The oracle is float64 on the same numbers."""
    d = x.shape[1] * pair(kernel)[0] * pair(kernel)[1]
    zeros = torch.zeros(d, d, device=x.device)
    if exact is None:
        exact = explicit(
            x, kernel, *(options.get(k) or v for k, v in {"stride": 1, "padding": None, "dilation": 1}.items()), mode
        )
    reference = ops.conv_kron_accumulate_torch_(zeros.clone(), x, kernel, mode, **options)
    single = ops.conv_kron_accumulate_(zeros.clone(), x, kernel, mode, **options)
    checks.error_at_most_twice(single, reference, exact)
    double = ops.conv_kron_accumulate_(zeros.double(), x, kernel, mode, **options)
    floor = 4 * torch.finfo(torch.float32).eps * exact.abs().max()
    assert (double - exact).abs().max() <= max(2 * (reference.double() - exact).abs().max(), floor)
    assert torch.equal(single, single.T) and torch.equal(double, double.T)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@of_16_bits
def test_images_of_16_bits(geometry, dtype, device):
    kernel, stride, padding, dilation, mode = geometry
    x = torch.randn(2, 2, 5, 6).to(device, dtype)
    for _, laid_out in checks.layouts(x):
        accurate_in_both(
            laid_out, kernel, explicit(laid_out, *geometry), mode, stride=stride, padding=padding, dilation=dilation
        )


@pytest.mark.parametrize(
    "shape, kernel", [((5, 37, 4, 4), 3), ((7, 40, 1, 1), 3), ((3, 5, 1, 8), (1, 5)), ((3, 6, 3, 3), 3)]
)
@of_16_bits
def test_small_tori_of_16_bits(shape, kernel, dtype, device):
    accurate_in_both(torch.randn(shape).to(device, dtype), kernel)


@pytest.mark.parametrize("shape", BORDERED, ids=str)
@of_16_bits
def test_zeros_around_images_of_16_bits(shape, dtype, device):
    accurate_in_both(torch.randn(shape).to(device, dtype), 3, mode="zeros")


@pytest.mark.parametrize("shape", [(40, 70, 1, 1), (9, 70, 2, 3), (5, 20, 4, 4), (2, 4, 7, 33)], ids=str)
@of_16_bits
def test_patches_of_one_pixel_of_16_bits(shape, dtype, device):
    for _, x in checks.layouts(torch.randn(shape).to(device, dtype)):
        rows = x.double().transpose(0, 1).flatten(1)
        accurate_in_both(x, 1, rows @ rows.T)


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


@of_16_bits
def test_images_of_16_bits_in_transforms_and_autocast(dtype, device):
    x = torch.randn(3, 2, 4, 4).to(device, dtype)
    factor = torch.zeros(18, 18, device=device)
    expected = ops.conv_kron_accumulate_(factor.clone(), x, 3)
    raw = (factor.clone(), x, (3, 3), (1, 1), (1, 1), (1, 1), True, 1.0)
    torch.library.opcheck(torch.ops.ella_cuda.conv_kron_accumulate_.default, raw)
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(ops.conv_kron_accumulate_(factor.clone(), x, 3), expected)
    torch._dynamo.reset()
    written = factor.clone()
    torch.compile(lambda f, image: ops.conv_kron_accumulate_(f, image, 3), fullgraph=True, backend="aot_eager")(
        written, x
    )
    assert torch.equal(written, expected)
    several = torch.zeros(3, 18, 18, device=device)
    torch.func.vmap(lambda f, image: ops.conv_kron_accumulate_(f, image[None], 3))(several, x)
    torch.testing.assert_close(several.sum(0), expected)
    for empty in (x[:0], x[:, :, :0]):
        options = {} if empty.shape[2] else {"padding": 2}
        assert torch.equal(ops.conv_kron_accumulate_(factor.clone(), empty, 3, "zeros", **options), factor)
