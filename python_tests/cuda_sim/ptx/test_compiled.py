"""What nvcc makes of the kernels, inline assembly included, computes what the package's CPU ops compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ella_cuda.ops import pack_spectra

from ..checking import arrange, assert_accurate, guarded, rounded_to_tf32, tuple_of
from ..launches import PROCESSORS, accumulate, accumulate_16_bits, call_every_op
from .device import PtxDevice

pytestmark = [pytest.mark.nvcc, pytest.mark.slow]


class Checked:
    """A device's ops; every call is held against the CPU op of that name, in float64 and in the same precision."""

    def __init__(self, device: PtxDevice) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            reference = getattr(torch.ops.ella_cuda, name)
            if name.endswith("_"):
                factor, *rest = arguments
                got, untouched = guarded(factor, fill=7.0)
                getattr(self._device.ops, name)(got, *rest)
                untouched()
                got, same, exact = (got,), (factor.clone(),), (factor.double(),)
                reference(*same, *rest)
                reference(*exact, *map(_double, rest))
            else:
                got = tuple_of(getattr(self._device.ops, name)(*arguments))
                same, exact = tuple_of(reference(*arguments)), tuple_of(reference(*map(_double, arguments)))
            floating = (a for a in arguments if isinstance(a, Tensor) and a.is_floating_point())
            single = any(a.dtype != torch.float64 for a in floating)
            # Those that end in whether products may be in TF32, whose numbers have 11 bits.
            coarse = single and name.startswith("averaged_filters") and arguments[-1]
            for one, expected, other in zip(got, exact, same, strict=True):
                if coarse and one.is_floating_point() and one.numel():
                    bound = 2.0**-9 * expected.abs().max().item()
                    torch.testing.assert_close(one.double(), expected, rtol=0, atol=bound)
                elif one.is_floating_point():  # a result in float64 of numbers in float32 is as accurate as those
                    assert_accurate(one.float() if single else one, expected, other)
                else:
                    assert torch.equal(one, other), name
            return got[0] if len(got) == 1 else got

        return call


def _double(argument: Any) -> Any:
    return argument.double() if isinstance(argument, Tensor) and argument.is_floating_point() else argument


def test_every_kernel(ampere: PtxDevice) -> None:
    ampere.launched.clear()
    with ampere.scheduled(multiprocessors=PROCESSORS):
        call_every_op(Checked(ampere))
        accumulate_16_bits(Checked(ampere))
        with ampere.path(product="scalar"):
            accumulate(Checked(ampere), torch.float32, [40])
    assert ampere.launched == set(ampere.kernels)


def test_products_of_warpgroups(hopper: PtxDevice) -> None:
    hopper.launched.clear()
    with hopper.scheduled(multiprocessors=PROCESSORS):
        accumulate(Checked(hopper), torch.float32, [100])
    with hopper.scheduled(blocks="reverse"):
        for d, layout in ((128, "contiguous"), (200, "contiguous"), (200, "permuted"), (200, "strided")):
            Checked(hopper).kron_accumulate_(torch.randn(2, d, d), arrange(torch.randn(70, 2, d), layout), 0.3)
        image, ones = torch.randn(2, 22, 8, 9), (1, 1)
        with hopper.path(lags="no"):
            Checked(hopper).conv_kron_accumulate_(torch.randn(198, 198), image, (3, 3), ones, ones, ones, True, 0.3)
    known = {name for name in hopper.kernels if "syrk_warpgroup_kernel" in name}
    assert known and known <= hopper.launched


@pytest.mark.parametrize("device", ["ampere", "hopper"])
def test_rows_are_rounded_to_tf32(request: pytest.FixtureRequest, device: str) -> None:
    """To nearest, where a call allows it."""
    rows, factor = torch.randn(70, 1, 100), torch.zeros(1, 100, 100)
    request.getfixturevalue(device).ops.kron_accumulate_(factor, rows, 1.0, True)
    rounded = rounded_to_tf32(rows)
    exact, torchs = (torch.einsum("ngi,ngj->gij", values, values) for values in (rounded.double(), rounded))
    assert_accurate(factor, exact, torchs)


# (N, C, D, X, Y): tiles that are not full, several tiles, one position, an intermediate that is stored and one that is not; one, two and
# four results a thread.
SHAPES = [
    (5, 3, 4, 7, 6),
    (70, 2, 9, 33, 20),
    (3, 6, 66, 5, 18),
    (66, 5, 3, 1, 9),
    (2, 20, 33, 4, 1),
    (5, 2, 3, 70, 130),
]
SHAPES += [(34, 3, 2, 130, 70), (3, 40, 2, 2, 40)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_factored_linear(ampere: PtxDevice, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    N, C, D, X, Y = shape
    x, grad = (arrange(torch.randn(N, c, n, dtype=dtype), "strided") for c, n in ((C, X), (D, Y)))
    weight_in, weight_out = (arrange(torch.randn(D, C, n, dtype=dtype), "contiguous") for n in (X, Y))
    bias_in, bias_out = torch.randn(D, dtype=dtype), torch.randn(Y, dtype=dtype)
    for cache_bytes in (64, 1 << 20):
        with ampere.scheduled("reverse", cache_bytes=cache_bytes, multiprocessors=PROCESSORS):  # some share depths out
            ops = Checked(ampere)
            ops.factored_linear(x, weight_in, weight_out, bias_in, bias_out)
            ops.factored_linear_backward(grad.contiguous(), x, weight_in, weight_out, bias_in, *[True] * 5)


TYPES = [(torch.float32, torch.float32), (torch.float32, torch.float64), (torch.float64, torch.float64)]


@pytest.mark.parametrize(("dtype", "total"), TYPES)
@pytest.mark.parametrize("shape", [(70, 2, 33), (37, 1, 133), (9, 3, 64), (300, 2, 32), (200, 1, 72), (40, 1, 200)])
def test_kron_accumulate(
    ampere: PtxDevice, shape: tuple[int, int, int], dtype: torch.dtype, total: torch.dtype
) -> None:
    rows = torch.randn(shape, dtype=dtype)
    with ampere.scheduled("random"):
        for layout in ("contiguous", "strided", "permuted", "expanded"):
            factor = torch.randn(shape[1], *shape[2:] * 2, dtype=total)
            Checked(ampere).kron_accumulate_(factor, arrange(rows, layout), -1.5)


@pytest.mark.parametrize("total", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_rows_of_16_bits(ampere: PtxDevice, dtype: torch.dtype, total: torch.dtype) -> None:
    with ampere.scheduled("random"):
        for layout in ("contiguous", "strided", "permuted", "expanded"):
            for shape in ((70, 2, 33), (9, 3, 6)):
                rows, factor = torch.randn(shape).to(dtype), torch.randn(shape[1], *shape[2:] * 2, dtype=total)
                Checked(ampere).kron_accumulate_(factor, arrange(rows, layout), -1.5)
            image, ones = arrange(torch.randn(5, 2, 10, 9).to(dtype), layout), (1, 1)
            for circular in (True, False):
                factor = torch.randn(18, 18, dtype=total)
                Checked(ampere).conv_kron_accumulate_(factor, image, (3, 3), ones, ones, ones, circular, 0.7)


# Image, kernel, stride, padding, dilation: factors of each tile's size, and of several tiles.
GEOMETRIES = [
    ((5, 1, 9, 8), (3, 3), (1, 1), (1, 1), (1, 1)),
    ((5, 2, 10, 9), (3, 3), (2, 1), (1, 2), (1, 2)),
    ((5, 7, 7, 9), (3, 2), (1, 1), (0, 0), (2, 2)),
    ((2, 8, 12, 7), (3, 3), (1, 2), (1, 1), (1, 1)),
    ((1, 15, 8, 7), (3, 3), (1, 1), (1, 1), (1, 1)),
    ((1, 22, 8, 9), (3, 3), (1, 1), (1, 1), (1, 1)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_conv_kron_accumulate(ampere: PtxDevice, geometry: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> None:
    shape, kernel, *rest = geometry
    side = shape[1] * kernel[0] * kernel[1]
    with ampere.scheduled("random"), ampere.path(lags="no"):
        for layout, circular in (("contiguous", True), ("permuted", False)):
            half = torch.randn(side, side, dtype=dtype)
            image = arrange(torch.randn(shape, dtype=dtype), layout)
            Checked(ampere).conv_kron_accumulate_(half + half.T, image, kernel, *rest, circular, 0.7)


@pytest.mark.parametrize(("dtype", "total"), TYPES)
@pytest.mark.parametrize(
    ("shape", "kernel"), [((3, 7, 6, 9), (3, 3)), ((2, 1, 33, 30), (3, 5)), ((1, 12, 5, 4), (1, 3))]
)
def test_lags(ampere: PtxDevice, shape, kernel, dtype: torch.dtype, total: torch.dtype) -> None:
    """Channels and positions that fill neither groups nor vectors, images in bands, one image in a unit and several."""
    side, padding, ones = shape[1] * kernel[0] * kernel[1], (kernel[0] // 2, kernel[1] // 2), (1, 1)
    with ampere.scheduled("random"), ampere.path(lags="yes"):
        for layout in ("contiguous", "permuted"):
            half, image = torch.randn(side, side, dtype=total), arrange(torch.randn(shape, dtype=dtype), layout)
            Checked(ampere).conv_kron_accumulate_(half + half.T, image, kernel, ones, padding, ones, True, 0.7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kron_evidence(ampere: PtxDevice, dtype: torch.dtype) -> None:
    """Tensors of many products and of few, groups with factors of their own, products too large to multiply, a negative one."""
    shapes = [(3, 5, 7, 1), (2, 3, 4, 2), (1, 170, 40, 1), (1, 1, 600, 1), (2, 0, 3, 1)]
    pairs = [(3 * torch.rand(G, a, dtype=dtype), 2 * torch.rand(own, b, dtype=dtype)) for G, a, b, own in shapes]
    spectra = pack_spectra(pairs)
    packed = spectra.eigenvalues, spectra.tiles, spectra.starts
    norms, log_precision = (torch.rand(len(shapes), dtype=dtype) for _ in range(2))
    with ampere.scheduled("random"):
        ops = Checked(ampere)
        for log_scale in (0.3, 80.0, 700.0):
            ops.kron_evidence(*packed, norms, log_precision, torch.tensor(log_scale, dtype=dtype))
        ops.kron_evidence_bend(*packed, -log_precision)
        packed[0][0] = -1e-3
        ops.kron_evidence(*packed, norms, log_precision, torch.tensor(0.3, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_images(ampere: PtxDevice, dtype: torch.dtype) -> None:
    """Several images and channels, odd sides, any layout: padding, folding and pooling."""
    with ampere.scheduled("reverse"):
        ops = Checked(ampere)
        for layout in ("contiguous", "permuted", "strided"):
            image = arrange(torch.randn(3, 2, 17, 13, dtype=dtype), layout)
            for index in (None, torch.tensor([2, -1, 3, -1, 1, -1])[::2]):
                padded = ops.circular_pad2d(image, 2, 3, index)
                ops.circular_fold2d(arrange(padded, layout), 2, 3, index)
            even = arrange(torch.randn(3, 4, 20, 10, dtype=dtype), layout)
            for norm in (1.0, 2.0, float("inf")):
                pooled, index = ops.polyphase_pool(even, norm)
                ops.polyphase_scatter(arrange(pooled, layout), index)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_affine_copies(ampere: PtxDevice, dtype: torch.dtype) -> None:
    """Maps of each image's own and of all, one without an inverse, one that is not a number; channels that fill no group."""
    with ampere.scheduled("reverse"):
        ops = Checked(ampere)
        for layout, count in (("contiguous", 2), ("strided", 1)):
            x = arrange(torch.randn(2, 5, 7, 6, dtype=dtype), layout)
            maps = torch.eye(2, 3, dtype=dtype) + 0.4 * torch.randn(count, 3, 2, 3, dtype=dtype)
            maps[0, 0] = torch.tensor([[0, 0, 0.1], [0, 0, -0.2]])
            for direction in (None, torch.randn_like(maps)):
                copies = ops.affine_copies(x, arrange(maps, layout), direction)
                ops.affine_copies_backward(arrange(copies, layout), x, maps, direction, True, True)
        maps[0, 1, 0, 2] = float("nan")
        ops.affine_copies_backward(ops.affine_copies(x, maps, None), x, maps, None, True, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_averaged_filters(ampere: PtxDevice, dtype: torch.dtype) -> None:
    """Every activation, a tile and one more, transforms that blocks share out; copies of four numbers and of one."""
    with ampere.scheduled("reverse"):
        ops = Checked(ampere)
        for activation, (n, s, h, d) in enumerate(((5, 3, 66, 20), (65, 2, 8, 7), (4, 2, 4, 12), (9, 3, 5, 18))):
            for layout in ("contiguous", "strided"):
                x, bank = torch.randn(n, d, dtype=dtype), 2 * torch.randn(s, h, d, dtype=dtype) / d**0.5
                x, bank, bias = (arrange(t, layout) for t in (x, bank, torch.randn(h, dtype=dtype)))
                y, _ = ops.averaged_filters(x, bank, bias, activation, False)
                ops.averaged_filters_backward(arrange(y, layout), x, bank, bias, None, activation, True, True, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kron_logdet(ampere: PtxDevice, dtype: torch.dtype) -> None:
    """Several rows in a block, and one row's columns that a block takes in several rounds, each in both directions."""
    precision = torch.tensor(0.3, dtype=dtype)
    with ampere.scheduled("reverse"):
        ops = Checked(ampere)
        for sizes in ((300, 20), (20, 300)):
            sides = [torch.rand(2, size, dtype=dtype) for size in sizes]
            ops.kron_logdet(*sides, precision)
            ops.kron_logdet_gradient(*sides, precision)
            ops.kron_logdet_hvp(*sides, precision, *map(torch.randn_like, (*sides, precision)))


def test_symmetric_eigenvalues(ampere: PtxDevice) -> None:
    """Several panels and a last one that is not full, odd and even rows, a matrix of zeros and one that is not finite."""
    sets = [torch.randn(groups, d, d, dtype=torch.float64) for groups, d in ((1, 66), (1, 18), (3, 2), (2, 33), (2, 1))]
    sets[1].zero_()
    sets[2][1, 1, 0] = torch.nan
    numbers = torch.cat([(half + half.mT).flatten() for half in sets])
    with ampere.scheduled("random"):
        Checked(ampere).symmetric_eigenvalues(numbers, [len(s) for s in sets], [s.shape[1] for s in sets])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kron_variance(ampere: PtxDevice, dtype: torch.dtype) -> None:
    """At one position, at several, and of a Jacobian; more rows, columns and outputs than a tile has."""
    spectra = torch.rand(2, 18).double(), torch.rand(1, 67).double(), torch.tensor(0.3).double()
    with ampere.scheduled("reverse"):
        ops = Checked(ampere)
        for k, t in ((2, 1), (6, 2)):
            inputs, outputs = torch.randn(3, t, 2, 18, dtype=dtype), torch.randn(k, 3, t, 2, 67, dtype=dtype)
            ops.kron_variance_(torch.randn(3, k, k, dtype=dtype), outputs, inputs, *spectra)
        jacobian = torch.randn(2, 3, 2, 18, 67, dtype=dtype)
        ops.kron_variance_(torch.randn(3, 2, dtype=dtype), jacobian, None, *spectra)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gaussian_project(ampere: PtxDevice, dtype: torch.dtype) -> None:
    """Points near enough to each other and some too far for an exponential above zero."""
    u, v, du, dv = (torch.randn(n, 2, dtype=torch.float64) for n in (70, 5, 70, 5))
    u[::3] *= 30
    x, grad = torch.randn(9, 70, dtype=dtype), torch.randn(9, 5, dtype=dtype)
    with ampere.scheduled("random"):
        ops = Checked(ampere)
        ops.gaussian_project(x, u, v)
        ops.gaussian_project_tangent(x, u, v, du, dv)
        ops.gaussian_project_gradient(grad, x, u, v)
        ops.gaussian_project_hvp(grad, x, u, v, du, dv)
