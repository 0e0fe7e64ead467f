"""The circular convolution with the polyphase choice behind it, against rolled images in float64 and strided slices of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ella_cuda import ops
from ella_cuda.ops.circular_conv2d_pool import _pool_of_two, _scattered_weight_grad, circular_conv2d_pool_transposed
from ella_cuda.ops.polyphase_pool import polyphase_scatter
from python_tests.ops import checks
from python_tests.ops.test_circular_conv2d import arguments, rolled
from python_tests.ops.test_one_component import COMPONENT_SHAPES, MANY_WEIGHTS, back
from python_tests.ops.test_polyphase_pool import explicit

IMAGE = ("1 1 4 4",)
KERNEL = ("1 1 3 3",)
SIDE = ("1 1 2 2",)
CHOICE = ("1", torch.int64)
OPERANDS = {
    "circular_conv2d_pool": checks.Operands([("N C H H",), ("D C 3 3",)], (None, 2.0)),
    "circular_conv2d_scattered": checks.Operands([("N C H W",), ("N", torch.int64), ("D C 3 3",)]),
    "circular_conv2d_scattered_weight_grad": checks.Operands([("N D 2 2",), ("N", torch.int64), ("N C 4 4",)], (3, 3)),
}
REFUSALS = [
    ("circular_conv2d_pool", [("1 1 3 4",), KERNEL], (None, 2.0), "x must have even height and width"),
    ("circular_conv2d_pool", [("1 1 4 3",), KERNEL], (None, 2.0), "x must have even height and width"),
    ("circular_conv2d_pool", [IMAGE, ("1 1 3 2",)], (None, 2.0), "weight must have odd height and width"),
    ("circular_conv2d_pool", [IMAGE, ("1 1 0 3",)], (None, 2.0), "weight must have odd height and width"),
    ("circular_conv2d_pool", [IMAGE, KERNEL], (None, 0.5), "norm must be 1, 2 or inf, got 0.5"),
    ("circular_conv2d_scattered", [SIDE, CHOICE, ("1 1 2 3",)], (), "weight must have odd height and width"),
    ("circular_conv2d_scattered", [SIDE, CHOICE, ("1 1 3 0",)], (), "weight must have odd height and width"),
    ("circular_conv2d_scattered", [SIDE, CHOICE, ("1 1 1 3",)], (), "height and width of at least 3, got (1, 3)"),
    ("circular_conv2d_scattered", [SIDE, CHOICE, ("1 1 3 1",)], (), "height and width of at least 3, got (3, 1)"),
    ("circular_conv2d_scattered_weight_grad", [SIDE, CHOICE, IMAGE], (2, 3), "the kernel must have odd"),
    ("circular_conv2d_scattered_weight_grad", [SIDE, CHOICE, IMAGE], (3, 0), "the kernel must have odd"),
    ("circular_conv2d_scattered_weight_grad", [SIDE, CHOICE, ("1 1 6 4",)], (3, 3), "(1, *, 3, 2), got (1, 1, 2, 2)"),
    ("circular_conv2d_scattered_weight_grad", [SIDE, CHOICE, ("1 1 5 4",)], (3, 3), "x must have even height"),
    ("circular_conv2d_scattered_weight_grad", [SIDE, CHOICE, ("1 1 4 5",)], (3, 3), "x must have even height"),
    ("circular_conv2d_pool", [IMAGE, KERNEL, ("2",)], (2.0,), "bias must have shape (D,) = (1,), got (2,)"),
]
VECTORISED = ["test_equals_the_two_apart", "test_gradients_equal_those_of_the_two_apart"]

CPU = torch.device("cpu")
# N, C, D, H, W, kh, kw: beside those, kernels that see one component only, kernels of one row, few channels, wide images.
SHAPES = [
    *COMPONENT_SHAPES,
    (4, 3, 2, 8, 6, 1, 1),
    (3, 2, 4, 6, 18, 1, 5),
    (3, 2, 4, 6, 4, 5, 1),
    (2, 1, 2, 4, 34, 3, 3),
    (33, 2, 3, 2, 2, 3, 3),
    (19, 3, 5, 10, 32, 3, 3),
]


def pooled_gradient(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float64) -> Tensor:
    n, _, d, h, w = shape[:5]
    return torch.randn(n, d, h // 2, w // 2, dtype=torch.float64).to(device, dtype)


def choices(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.arange(shape[0], device=device) * 3 % 4


def apart(x: Tensor, weight: Tensor, bias: Tensor | None = None, norm: float = 2) -> Tensor:
    """The oracle: rolled images, then slices."""
    return explicit(rolled(x, weight, bias), norm)


DIFFERENTIABLE = {
    "circular_conv2d_pool": checks.Case(
        ops.circular_conv2d_pool,
        ops.circular_conv2d_pool_torch,
        apart,
        arguments,
        small=[(2, 2, 3, 4, 2, 3, 3), (3, 2, 3, 4, 2, 3, 3), (2, 2, 3, 4, 2, 1, 3)],
        laid_out=[(5, 3, 4, 8, 6, 3, 3), (3, 2, 3, 4, 32, 3, 5), (4, 2, 3, 2, 2, 3, 3)],
        empty=[
            (0, 2, 3, 4, 6, 3, 3), (2, 0, 3, 4, 6, 3, 3), (2, 3, 0, 4, 6, 3, 3), (2, 3, 4, 0, 6, 3, 3),
            (2, 3, 4, 6, 0, 3, 3), (2, 0, 3, 4, 32, 3, 3),
        ],
        threaded=[
            (50, 4, 8, 32, 32, 3, 3),
            (50, 9, 11, 8, 8, 3, 3),
            (70, 8, 16, 2, 2, 3, 3),
            (128, 20, 21, 8, 8, 3, 3),
            MANY_WEIGHTS,
        ],
        optional=1,
        ways=True,
    )
}  # fmt: skip


@pytest.mark.parametrize("norm", [1, 2, math.inf])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_two_apart(shape, dtype, norm, device):
    x, weight, bias = arguments(shape, device, dtype)
    for b in (None, bias):
        y = ops.circular_conv2d_pool(x, weight, b, norm)
        assert y.dtype == dtype and y.is_contiguous()
        checks.error_at_most_twice(y, ops.circular_conv2d_pool_torch(x, weight, b, norm), apart(x, weight, b, norm))


@pytest.mark.parametrize("norm", [1.0, math.inf])
@pytest.mark.parametrize("shape", [*SHAPES[:4], (2, 0, 3, 4, 6, 3, 3)])
def test_the_two_as_one_op(shape, norm, device):
    """What the op is on CUDA, on every device."""
    x, weight, bias = (a.requires_grad_() for a in arguments(shape, device))
    y, index = _pool_of_two(x, weight, bias, norm)
    assert y.is_contiguous() and not y.requires_grad
    full = rolled(x.detach(), weight.detach(), bias.detach())
    checks.assert_same(y, explicit(full, norm))
    parts = torch.stack([full[:, :, i & 1 :: 2, i >> 1 :: 2] for i in range(4)])
    checks.assert_same(y, parts[index, torch.arange(len(x), device=device)])


@pytest.mark.parametrize("shape", [*SHAPES, MANY_WEIGHTS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_equal_those_of_the_two_apart(shape, dtype, device, way):
    args, grad = arguments(shape, device, dtype), pooled_gradient(shape, device, dtype)
    own = way == "the device's" and device.type == "cpu"
    compare = checks.error_at_most_twice if own else lambda o, _, e: checks.close_in_another_order(o, e)
    checks.check_gradients(ops.circular_conv2d_pool, ops.circular_conv2d_pool_torch, apart, args, grad, compare)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_gradients_of_some_arguments(wanted, device, way):
    args = [a.requires_grad_(i in wanted) for i, a in enumerate(arguments((5, 3, 4, 8, 6, 3, 3), device))]
    leaves = [args[i] for i in wanted]
    grad = pooled_gradient((5, 3, 4, 8, 6, 3, 3), device)
    checks.assert_same(
        torch.autograd.grad(ops.circular_conv2d_pool(*args), leaves, grad),
        torch.autograd.grad(apart(*args), leaves, grad),
    )


def test_the_choice_is_that_of_the_convolution(device):
    """Bias included; of equal components the first, and NaN stays visible."""
    x = torch.zeros(4, 1, 4, 4, device=device)
    x[1, 0, 3, 2], x[2, 0, 1, 1], x[3, 0, 2, 3] = -3.0, 2.0, math.nan
    weight = torch.ones(1, 1, 1, 1, device=device)
    for bias, expected in ((0.0, [0, 1, 3, 2]), (2.0, [0, 0, 3, 2])):
        y = ops.circular_conv2d_pool(x, weight, torch.full((1,), bias, device=device))
        for image, out, component in zip(x, y, expected, strict=True):
            chosen = image[:, component & 1 :: 2, component >> 1 :: 2] + bias
            torch.testing.assert_close(out, chosen, rtol=0, atol=0, equal_nan=True)


def test_derivatives_under_autocast(device, way):
    """Taken inside of it, where torch reduces its own convolutions."""
    args = [a.requires_grad_() for a in arguments((3, 4, 5, 8, 6, 3, 3), device, torch.float32)]
    grad = pooled_gradient((3, 4, 5, 8, 6, 3, 3), device, torch.float32)

    def derivatives():
        y = ops.circular_conv2d_pool(*args)
        first = torch.autograd.grad(y, args, grad, create_graph=True)
        second = torch.autograd.grad(sum(f.sin().sum() for f in first), args[:2])
        plain = tuple(a.detach() for a in args)
        jvp = torch.func.jvp(ops.circular_conv2d_pool, plain, tuple(2 * a for a in plain))
        return (y, *first, *jvp), second

    expected = derivatives()
    with torch.autocast(device.type, torch.bfloat16):
        found = derivatives()
    # On CUDA autocast takes the second derivatives of torch's convolutions, wherever they are asked for.
    for mine, theirs, most in zip(found, expected, (1e-5, 1e-5 if device.type == "cpu" else 2e-2), strict=True):
        for one, wanted in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, wanted, rtol=most, atol=most * float(wanted.abs().max()))


def test_no_images_excuse_nothing(way):
    x, weight, bias = arguments((0, 2, 3, 4, 6, 3, 3), CPU)
    for args, words in (
        ((x, weight.float(), bias), "weight must have the dtype"),
        ((x, weight[:, :1], bias), "weight must have shape"),
    ):
        with pytest.raises(RuntimeError, match=words):
            ops.circular_conv2d_pool(*args)


def test_vmap_of_images_is_one_call():
    x, weight, bias = arguments((3, 2, 4, 6, 4, 3, 3), CPU)
    batch = torch.stack([x, 2 * x])
    mapped = torch.func.vmap(lambda images: ops.circular_conv2d_pool(images, weight, bias))
    together, calls = checks.runs_during(lambda: mapped(batch), "ella_cuda::circular_conv2d_pool")
    assert list(calls.values()) == [2]
    checks.assert_same(together, torch.stack([apart(images, weight, bias) for images in batch]))


def test_what_is_between_is_not_stored():
    """Of 64 images of 64 x 64 pixels, 16 channels: the convolution takes 16 MB, a quarter of it is the result."""
    x, weight, bias = arguments((64, 2, 16, 64, 64, 3, 3), CPU, torch.float32)
    result = 64 * 16 * 32 * 32 * 4
    assert checks.peak_bytes(lambda: ops.circular_conv2d_pool(x, weight, bias)) < 2 * result
    assert checks.peak_bytes(lambda: ops.polyphase_pool(ops.circular_conv2d(x, weight, bias))) > 4 * result


def test_errors_of_the_norm():
    args = arguments((3, 2, 4, 6, 4, 3, 3), CPU)
    with pytest.raises(ValueError, match=r"circular_conv2d_pool: norm must be 1, 2 or math.inf, got 3"):
        ops.circular_conv2d_pool(*args, norm=3)
    with pytest.raises(RuntimeError, match="norm must be 1, 2 or inf, got 0"):
        torch.ops.ella_cuda.circular_conv2d_pool(*args, 0.0)


# ---- the convolution behind a scatter ----


def test_second_directional_derivative_of_the_way_back(way):
    """The map is bilinear, so that along two directions it is what the map makes of one and the other."""
    shape = (3, 2, 4, 8, 6, 3, 3)
    index = choices(shape, CPU)

    def pair() -> tuple[Tensor, Tensor]:
        return torch.randn(3, 2, 4, 3, dtype=torch.float64), torch.randn(2, 4, 3, 3, dtype=torch.float64)

    def call(x: Tensor, weight: Tensor) -> Tensor:
        return circular_conv2d_pool_transposed(x, index, weight)

    at, (x1, w1), (x2, w2) = pair(), pair(), pair()
    found = torch.func.jvp(lambda *args: torch.func.jvp(call, args, (x1, w1))[1], at, (x2, w2))[1]
    exact = rolled(polyphase_scatter(x1, index), back(w2)) + rolled(polyphase_scatter(x2, index), back(w1))
    checks.assert_same(found, exact)


def test_vmap_of_gradients_of_one_choice_is_one_call():
    shape = (3, 2, 4, 8, 6, 3, 3)
    index, weight = choices(shape, CPU), arguments(shape, CPU)[1]
    columns = torch.stack([pooled_gradient(shape, CPU) for _ in range(2)], 1)
    mapped = torch.func.vmap(lambda g: circular_conv2d_pool_transposed(g, index, weight), in_dims=1)
    found, calls = checks.runs_during(lambda: mapped(columns), "ella_cuda::circular_conv2d_scattered")
    assert list(calls.values()) == [2]
    exact = [rolled(polyphase_scatter(column, index), back(weight)) for column in columns.unbind(1)]
    checks.assert_same(found, torch.stack(exact))


# ---- the gradient of the weight behind a scatter ----


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("shape", [(5, 3, 4, 8, 6, 3, 3), (5, 3, 4, 8, 32, 3, 3), (5, 3, 4, 2, 2, 3, 3)])
def test_every_layout_of_the_weight_gradient(position, shape):
    given = [pooled_gradient(shape, CPU), choices(shape, CPU), arguments(shape, CPU)[0]]
    for _, laid_out in checks.layouts(given[position]):
        grad, index, x = [*given[:position], laid_out, *given[position + 1 :]]
        wide = torch.zeros(*[shape[2], shape[1], *shape[5:]], dtype=torch.float64, requires_grad=True)
        (exact,) = torch.autograd.grad(rolled(x, wide), wide, polyphase_scatter(grad, index))
        checks.assert_same(_scattered_weight_grad(grad, index, x, *shape[5:]), exact)


def test_derivatives_of_the_weight_gradient():
    shape = (3, 2, 3, 4, 2, 3, 3)
    index, x = choices(shape, CPU), arguments(shape, CPU)[0]

    def call(grad: Tensor, x: Tensor) -> Tensor:
        return _scattered_weight_grad(grad, index, x, 3, 3)

    def reference(grad: Tensor, x: Tensor) -> Tensor:
        full = polyphase_scatter(grad, index)
        moved = [x.roll((1 - i, 1 - j), (2, 3)) for i in range(3) for j in range(3)]
        return torch.stack([torch.einsum("ndhw,nchw->dc", full, m) for m in moved], -1).unflatten(-1, (3, 3))

    args = (pooled_gradient(shape, CPU), x)
    checks.check_func_transforms(call, reference, args)
    checks.check_vmap(call, args, batch=2)
    checks.check_compile(call, args)
    checks.check_derivatives(call, tuple(a.requires_grad_() for a in args))


@pytest.mark.parametrize("moved", [-1, 2])
@pytest.mark.parametrize("name", ["circular_conv2d_scattered", "circular_conv2d_scattered_weight_grad"])
def test_a_choice_of_no_component_is_refused(name, moved):
    shape = (3, 2, 4, 8, 6, 3, 3)
    x, weight, _ = arguments(shape, CPU)
    grad, index = pooled_gradient(shape, CPU), choices(shape, CPU) + moved
    last = (back(weight),) if name == "circular_conv2d_scattered" else (x, 3, 3)
    with pytest.raises(RuntimeError, match=r"index must be in 0\.\.3"):
        getattr(torch.ops.ella_cuda, name)(grad, index, *last)
