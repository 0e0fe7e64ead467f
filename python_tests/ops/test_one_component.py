"""The circular convolution of images of which one polyphase component is not zero, against rolled images in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ella_cuda import ops
from ella_cuda.ops.circular_conv2d import weight_grad
from ella_cuda.ops.circular_conv2d_pool import circular_conv2d_pool_transposed
from ella_cuda.ops.polyphase_pool import polyphase_scatter
from python_tests.ops import checks
from python_tests.ops.test_circular_conv2d import arguments, gradient, rolled

VECTORISED = ["test_images_of_one_polyphase_component", "test_gradients_of_one_polyphase_component"]

# Even sides, with halves wider and narrower than a vector, and than the kernel; products enough for the short cut.
COMPONENT_SHAPES = [
    (5, 10, 12, 32, 64, 3, 3), (19, 11, 10, 16, 8, 3, 3), (6, 7, 6, 4, 34, 3, 5), (21, 3, 4, 8, 4, 7, 5),
    (5, 10, 10, 2, 2, 3, 3), (4, 3, 3, 2, 6, 5, 9), (5, 10, 12, 4, 16, 3, 3), (3, 10, 12, 4, 32, 3, 3),
    (21, 12, 13, 4, 4, 3, 3), (9, 10, 12, 2, 8, 5, 7), (8, 80, 80, 4, 4, 3, 3), (8, 80, 160, 2, 2, 3, 3),
    (3, 32, 41, 48, 48, 3, 3), (2, 64, 66, 16, 18, 3, 3),
]  # fmt: skip
# Weights so many that their gradient is a product of matrices, with patches of some of the images at a time.
MANY_WEIGHTS = (115, 45, 187, 10, 12, 3, 3)


def one_component(images: Tensor) -> Tensor:
    """The images with all but one of their polyphase components, a different one in turn, set to zero, the first image wholly."""
    kept = torch.zeros_like(images)
    for n in range(1, len(images)):
        rows, columns = slice(n % 2, None, 2), slice(n // 2 % 2, None, 2)
        kept[n, :, rows, columns] = images[n, :, rows, columns]
    return kept


@pytest.mark.parametrize("shape", COMPONENT_SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_images_of_one_polyphase_component(shape, dtype, device):
    x, weight, bias = arguments(shape, device, dtype)
    mixed = one_component(x)
    mixed[-1] = x[-1]
    for images in (one_component(x), -one_component(x), mixed):
        for b in (None, bias):
            reference = ops.circular_conv2d_torch(images, weight, b)
            checks.error_at_most_twice(ops.circular_conv2d(images, weight, b), reference, rolled(images, weight, b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradient_of_many_weights(dtype):
    device = torch.device("cpu")  # the op is the CPU's
    x, weight, _ = arguments(MANY_WEIGHTS, device, dtype)
    grad = one_component(gradient(MANY_WEIGHTS, device, dtype))[torch.randperm(MANY_WEIGHTS[0], device=device)]
    wide = weight.double().requires_grad_()
    (reference,) = torch.autograd.grad(ops.circular_conv2d_torch(x, weight.requires_grad_()), weight, grad)
    (exact,) = torch.autograd.grad(rolled(x, wide), wide, grad.double())
    checks.error_at_most_twice(weight_grad(grad, x, 3, 3), reference, exact)


@pytest.mark.parametrize("shape", COMPONENT_SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_one_polyphase_component(shape, dtype, device):
    args, grad = arguments(shape, device, dtype), one_component(gradient(shape, device, dtype))
    checks.check_gradients(ops.circular_conv2d, ops.circular_conv2d_torch, rolled, args, grad)


@pytest.mark.parametrize(
    "shape", [(5, 10, 11, 8, 6, 3, 3), (5, 10, 11, 4, 4, 3, 3), (10, 10, 16, 4, 4, 3, 3), (5, 10, 11, 4, 4, 3, 5)]
)
def test_every_layout_with_images_of_one_component(shape, device):
    x, weight, bias = arguments(shape, device)
    args = one_component(x)[1:], weight, bias
    for position, argument in enumerate(args):
        for _, laid_out in checks.layouts(argument):
            call = [*args[:position], laid_out, *args[position + 1 :]]
            checks.assert_same(ops.circular_conv2d(*call), rolled(*call))
    if device.type != "cpu":
        return  # the gradient of the weight is torch's
    pair = one_component(gradient(shape, device))[1:], x[1:]
    for position, argument in enumerate(pair):
        for _, laid_out in checks.layouts(argument):
            grad, seen = (laid_out, pair[1]) if position == 0 else (pair[0], laid_out)
            wide = weight.clone().requires_grad_()
            exact = torch.autograd.grad(rolled(seen, wide), wide, grad)[0]
            checks.assert_same(weight_grad(grad, seen, *shape[5:]), exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeros_of_the_other_components_are_not_multiplied(dtype):
    x, weight, _ = arguments((3, 10, 10, 8, 8, 3, 3), torch.device("cpu"), dtype)
    images = one_component(x)[1:2]  # odd rows, even columns
    weight[:, :, 1, 1] = float("nan")
    for signed in (images, -images):  # a zero may have a sign
        seen = ops.circular_conv2d(signed, weight).isnan()
        assert seen[:, :, 1::2, ::2].all() and not seen[:, :, ::2].any() and not seen[:, :, :, 1::2].any()
    x[:, :, ::2] = float("nan")
    filters = weight_grad(images, x[1:2], 3, 3).isnan()
    assert filters[:, :, ::2].all() and not filters[:, :, 1].any()


@pytest.mark.parametrize("value", [1.0, float("nan"), 1e-36])
def test_one_number_of_another_component(value):
    """In whatever image, channel, row and column it lies, the images are not of one component."""
    _, weight, _ = arguments((3, 10, 12, 16, 8, 3, 3), torch.device("cpu"), torch.float32)
    for at in ((0, 0, 0, 1), (1, 9, 15, 6), (2, 9, 1, 0), (2, 4, 14, 7), (2, 9, 15, 7)):
        images = torch.zeros(3, 10, 16, 8)
        images[at] = value
        images[at[0], 0, 0, 0] = value * 0.5 if value == value else 1.0
        for laid_out in (images, images.to(memory_format=torch.channels_last), torch.cat([images, images], 1)[:, :10]):
            torch.testing.assert_close(
                ops.circular_conv2d(laid_out, weight).double(),
                rolled(images, weight),
                rtol=1e-5,
                atol=0.0,
                equal_nan=True,
            )


def test_only_the_images_own_numbers_are_looked_at():
    """Zeros between an image's rows, columns or channels in memory are not the image's."""
    _, weight, _ = arguments((2, 10, 12, 8, 8, 3, 3), torch.device("cpu"))
    columns = torch.zeros(2, 10, 8, 8, dtype=torch.float64)
    columns[..., ::2, 0] = torch.randn(2, 10, 4, dtype=torch.float64)
    rows = torch.zeros(2, 10, 16, 8, dtype=torch.float64)
    rows[:, :, ::2, ::2] = torch.randn(2, 10, 8, 4, dtype=torch.float64)
    channels = torch.zeros(2, 20, 8, 8, dtype=torch.float64)
    channels[:, :, ::2, ::2] = torch.randn(2, 20, 4, 4, dtype=torch.float64)
    channels[:, 18] = torch.randn(2, 8, 8, dtype=torch.float64)
    for images in (columns[..., :1].expand(-1, -1, -1, 8), rows[:, :, ::2], channels[:, ::2]):
        checks.assert_same(ops.circular_conv2d(images, weight), rolled(images, weight))


@pytest.mark.parametrize(
    "shape", [(2, 40, 40, 7, 8, 3, 3), (2, 40, 40, 8, 7, 3, 3), (2, 40, 40, 8, 8, 1, 9), (2, 40, 40, 8, 8, 9, 1)]
)
def test_sizes_without_the_short_cut(shape):
    """Odd sides, and kernels by which some outputs see nothing of a component."""
    x, weight, bias = arguments(shape, torch.device("cpu"))
    for images in (torch.zeros_like(x), one_component(x)):
        checks.assert_same(ops.circular_conv2d(images, weight, bias), rolled(images, weight, bias))
        wide = weight.clone().requires_grad_()
        exact = torch.autograd.grad(rolled(x, wide), wide, images)[0]
        checks.assert_same(weight_grad(images, x, *shape[5:]), exact)


@pytest.mark.parametrize("shape", [*COMPONENT_SHAPES, (128, 20, 21, 8, 8, 3, 3), MANY_WEIGHTS])
def test_same_numbers_for_any_number_of_threads(shape):
    x, weight, bias = arguments(shape, torch.device("cpu"), torch.float32)
    grad = one_component(gradient(shape, torch.device("cpu"), torch.float32))
    gathered = components(shape, x.device, x.dtype)

    def results():
        y, filters = ops.circular_conv2d(one_component(x), weight, bias), weight_grad(grad, x, *shape[5:])
        return y, filters, circular_conv2d_pool_transposed(*gathered)

    checks.same_for_any_number_of_threads(results, (1, 2, 3, 7, 16))


# ---- with the component already gathered ----


def components(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Components of images of the shape, which ones they are, and the kernel of the convolution that they came out of."""
    x, weight, _ = arguments(shape, device, dtype)
    return x[:, :, ::2, ::2].contiguous(), torch.arange(shape[0], device=device) * 3 % 4, back(weight).contiguous()


def back(weight: Tensor) -> Tensor:
    """The kernel of the way back."""
    return weight.transpose(0, 1).flip(2, 3)


def scattered(x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """The reference: zeros written out; weight is that of the way back."""
    full = x.new_zeros(*x.shape[:2], 2 * x.shape[2], 2 * x.shape[3])
    for i in range(4):
        mine = torch.nn.functional.interpolate(x, scale_factor=2, mode="nearest").roll((i & 1, i >> 1), (2, 3))
        place = torch.zeros_like(full)
        place[:, :, i & 1 :: 2, i >> 1 :: 2] = 1
        full = full + torch.where((index == i)[:, None, None, None], mine * place, 0)
    return ops.circular_conv2d_torch(full, weight)


@pytest.mark.parametrize("shape", [*COMPONENT_SHAPES, (5, 2, 3, 4, 6, 3, 3), (4, 3, 2, 8, 6, 1, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_convolution_of_scattered_images(shape, dtype, device, way):
    x, index, forward = components(shape, device, dtype)
    weight = back(forward)
    full = torch.zeros(*x.shape[:2], *shape[3:5], dtype=torch.float64, device=device)
    for n, i in enumerate(index.tolist()):
        full[n, :, i & 1 :: 2, i >> 1 :: 2] = x[n]
    reference = ops.circular_conv2d_torch(full.to(dtype), weight)
    found = circular_conv2d_pool_transposed(x, index, forward)
    if way == "the device's" and device.type == "cpu":
        checks.error_at_most_twice(found, reference, rolled(full, weight))
    else:
        checks.close_in_another_order(found, rolled(full, weight))
    checks.error_at_most_twice(scattered(x, index, weight), reference, rolled(full, weight))


@pytest.mark.parametrize("position", [0, 1, 2])
def test_every_layout_of_components(position, device, way):
    args = list(components((5, 3, 4, 8, 6, 3, 3), device))
    for _, laid_out in checks.layouts(args[position]):
        call = [*args[:position], laid_out, *args[position + 1 :]]
        x, index, weight = call
        checks.assert_same(circular_conv2d_pool_transposed(*call), scattered(x, index, back(weight)))


@pytest.mark.parametrize(
    "shape", [(0, 2, 3, 4, 6, 3, 3), (2, 0, 3, 4, 6, 3, 3), (2, 3, 0, 4, 6, 3, 3), (2, 3, 4, 0, 6, 3, 3)]
)
def test_no_components(shape, device, way):
    x, index, weight = components(shape, device)
    full = ops.circular_conv2d(polyphase_scatter(x, index), back(weight))
    checks.assert_same(circular_conv2d_pool_transposed(x, index, weight), full)


def test_derivatives_of_the_way_back(device, way):
    x, index, weight = components((3, 2, 3, 4, 2, 3, 3), device)

    def call(x: Tensor, weight: Tensor) -> Tensor:
        return circular_conv2d_pool_transposed(x, index, weight)

    def reference(x: Tensor, weight: Tensor) -> Tensor:
        return scattered(x, index, back(weight))

    checks.check_derivatives(call, (x.requires_grad_(), weight.requires_grad_()))
    args = (x.detach(), weight.detach())
    checks.check_func_transforms(call, reference, args)
    checks.check_vmap(call, args, batch=2)
    checks.check_compile(call, args)
