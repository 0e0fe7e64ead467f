"""The circular convolution against an explicit sum of rolled images in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ella_cuda import ops
from ella_cuda.ops.circular_conv2d import weight_grad
from python_tests.ops import checks

IMAGE = ("1 1 4 4",)
KERNEL = ("1 1 3 3",)
OPERANDS = {
    "circular_conv2d": checks.Operands([("N C H W",), ("D C 3 3",)], (None,)),
    "circular_conv2d_weight_grad": checks.Operands([("N D H W",), ("N C H W",)], (3, 3)),
}
REFUSALS = [
    ("circular_conv2d", [IMAGE, ("1 1 2 3",)], (None,), r"weight must have odd height and width, got (2, 3)"),
    ("circular_conv2d", [IMAGE, ("1 1 3 0",)], (None,), r"weight must have odd height and width, got (3, 0)"),
    ("circular_conv2d", [IMAGE, KERNEL, ("2",)], (), "bias must have shape (D,) = (1,), got (2,)"),
    ("circular_conv2d_weight_grad", [IMAGE, IMAGE], (2, 3), "the kernel must have odd height and width, got (2, 3)"),
    ("circular_conv2d_weight_grad", [IMAGE, IMAGE], (3, 0), "the kernel must have odd height and width, got (3, 0)"),
    ("circular_conv2d_weight_grad", [IMAGE, IMAGE], (-1, 3), "the kernel must have odd height and width, got (-1, 3)"),
]
VECTORISED = ["test_equals_the_sum_of_rolled_images", "test_gradients_equal_those_of_rolled_images"]

# N, C, D, H, W, kh, kw: images wider than a vector (whole vectors and not), narrower, and smaller than the kernel; then weights
# so many that their gradient is a product of matrices, whose patches are of all images, of some at a time, or of a part of one;
# then narrow images too few to fill vectors, packed at once or not, and so few with so much work that threads share each of them.
SHAPES = [
    (3, 2, 4, 5, 6, 3, 3), (2, 3, 7, 32, 32, 3, 3), (5, 6, 5, 16, 16, 3, 3), (3, 2, 3, 7, 19, 5, 3),
    (2, 3, 2, 3, 33, 1, 7), (37, 5, 13, 8, 8, 3, 3), (20, 3, 5, 4, 4, 5, 5), (20, 4, 9, 2, 2, 3, 3),
    (17, 3, 2, 1, 1, 3, 3), (9, 2, 3, 2, 3, 7, 9), (4, 3, 2, 16, 8, 1, 1), (3, 70, 8, 4, 17, 3, 3),
    (1, 1, 1, 1, 1, 1, 1), (20, 60, 61, 3, 4, 7, 7), (83, 85, 81, 3, 5, 3, 3), (97, 45, 187, 8, 7, 3, 3),
    (2, 122, 121, 32, 9, 3, 3), (2, 31, 65, 24, 26, 3, 3), (2, 6, 17, 6, 10, 3, 9), (2, 3, 16, 5, 6, 3, 5),
    (2, 5, 19, 40, 18, 5, 7), (5, 120, 7, 15, 13, 3, 3), (1, 70, 61, 7, 7, 3, 3), (3, 40, 44, 16, 17, 3, 3),
]  # fmt: skip


def arguments(
    shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    n, c, d, h, w, kh, kw = shape
    sizes = ((n, c, h, w), (d, c, kh, kw), (d,))
    return tuple(torch.randn(s, dtype=torch.float64).to(device, dtype) for s in sizes)


def gradient(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape[0], shape[2], *shape[3:5], dtype=torch.float64).to(device, dtype)


def rolled(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same map as a sum over the kernel's entries of rolled images, in float64."""
    x, weight = x.double(), weight.double()
    total = torch.zeros(x.shape[0], weight.shape[0], *x.shape[2:], dtype=torch.float64, device=x.device)
    for i in range(weight.shape[2]):
        for j in range(weight.shape[3]):
            moved = x.roll((weight.shape[2] // 2 - i, weight.shape[3] // 2 - j), (2, 3)) if x.numel() else x
            total = total + torch.einsum("nchw,dc->ndhw", moved, weight[:, :, i, j])
    return total if bias is None else total + bias.double()[:, None, None]


DIFFERENTIATED = [(2, 2, 3, 3, 2, 3, 3), (2, 2, 3, 3, 4, 3, 3), (2, 1, 2, 2, 1, 3, 3), (1, 2, 1, 2, 16, 1, 3)]
DIFFERENTIABLE = {
    "circular_conv2d": checks.Case(
        ops.circular_conv2d,
        ops.circular_conv2d_torch,
        rolled,
        arguments,
        DIFFERENTIATED,
        laid_out=[
            (4, 3, 5, 6, 7, 3, 3), (3, 2, 3, 4, 32, 3, 5), (5, 2, 3, 4, 17, 3, 3), (4, 2, 3, 2, 2, 3, 3),
            (4, 3, 17, 6, 7, 3, 3), (9, 3, 5, 6, 7, 3, 3), (1, 3, 17, 3, 4, 3, 3),
        ],
        empty=[
            (0, 2, 3, 4, 5, 3, 3), (2, 0, 3, 4, 5, 3, 3), (2, 3, 0, 4, 5, 3, 3), (2, 3, 4, 0, 5, 3, 3),
            (2, 3, 4, 5, 0, 3, 3), (2, 0, 3, 4, 20, 3, 3),
        ],
        threaded=[
            (50, 4, 8, 32, 32, 3, 3),
            (50, 9, 11, 8, 8, 3, 3),
            (70, 8, 16, 2, 2, 3, 3),
            (30, 2, 3, 5, 19, 3, 3),
            (83, 122, 121, 9, 11, 3, 3),
            (97, 45, 187, 8, 7, 3, 3),
            (1, 70, 61, 7, 7, 3, 3),
            (3, 40, 44, 16, 17, 3, 3),
            (9, 20, 40, 8, 9, 3, 3),
            (128, 20, 21, 8, 8, 3, 3),  # eight units, together or by fours where there are many threads
        ],
        optional=1,
    )
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_sum_of_rolled_images(shape, dtype, device):
    x, weight, bias = arguments(shape, device, dtype)
    for b in (None, bias):
        y = ops.circular_conv2d(x, weight, b)
        assert y.dtype == dtype and y.is_contiguous()
        checks.error_at_most_twice(y, ops.circular_conv2d_torch(x, weight, b), rolled(x, weight, b))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_equal_those_of_rolled_images(shape, dtype, device):
    args, grad = arguments(shape, device, dtype), gradient(shape, device, dtype)
    checks.check_gradients(ops.circular_conv2d, ops.circular_conv2d_torch, rolled, args, grad)


def test_the_direction_of_the_kernel(device):
    """Entry (0, 0) of a 3x3 kernel looks one up and one to the left, around the border."""
    x = torch.arange(12.0, device=device).view(1, 1, 3, 4)
    weight = torch.zeros(1, 1, 3, 3, device=device)
    weight[0, 0, 0, 0] = 1
    assert ops.circular_conv2d(x, weight)[0, 0].tolist() == [[11, 8, 9, 10], [3, 0, 1, 2], [7, 4, 5, 6]]


@pytest.mark.parametrize("shape", DIFFERENTIATED)
def test_derivatives_of_the_weight_gradient(shape):
    device = torch.device("cpu")  # elsewhere it is torch's
    args = gradient(shape, device), arguments(shape, device)[0]
    checks.check_vmap(lambda g, x: weight_grad(g, x, *shape[5:]), args, batch=2)
    args = tuple(a.requires_grad_() for a in args)
    checks.check_derivatives(lambda g, x: weight_grad(g, x, *shape[5:]), args)


@pytest.mark.parametrize("wanted", ["x", "weight"])
def test_vmap_of_gradients_joins_the_batch(wanted):
    """The columns of the generalised Gauss-Newton are such a vmap; it must be one call, not one a column."""
    shape = (3, 2, 4, 5, 3, 3, 3)
    x, weight, bias = (a.requires_grad_() for a in arguments(shape, torch.device("cpu")))
    y = ops.circular_conv2d(x, weight, bias)
    columns = torch.randn(6, *y.shape, dtype=torch.float64)
    leaf, op = (x, "circular_conv2d") if wanted == "x" else (weight, "circular_conv2d_weight_grad")

    def pulled(column: Tensor) -> Tensor:
        return torch.autograd.grad(y, leaf, column, retain_graph=True)[0]

    batched, calls = checks.runs_during(lambda: torch.func.vmap(pulled)(columns), f"ella_cuda::{op}")
    assert list(calls.values()) == [2]
    checks.assert_same(batched, torch.stack([pulled(c) for c in columns]))


@pytest.mark.parametrize("shape", [(37, 12, 20, 7, 5, 3, 3), (6, 8, 9, 5, 19, 3, 3), (25, 64, 64, 4, 4, 3, 3)])
def test_numbers_of_an_image_do_not_depend_on_the_others(shape):
    x, weight, bias = arguments(shape, torch.device("cpu"), torch.float32)
    together = ops.circular_conv2d(x, weight, bias)
    for images in (1, 3, 16):
        parts = [ops.circular_conv2d(part, weight, bias) for part in x.split(images)]
        assert torch.equal(torch.cat(parts), together)


def test_scratch_of_many_weights_does_not_grow_with_the_batch():
    """Copies of 4 MB of gradients at most; those of all would be 60 MB."""
    x = torch.randn(8000, 122, 4, 4)
    assert checks.peak_bytes(lambda: weight_grad(x, x, 3, 3)) < 20e6


def test_autocast_leaves_the_precision_alone(device):
    """Torch's convolution, which computes it on CUDA, would be in bfloat16."""
    args = [a.requires_grad_() for a in arguments(SHAPES[0], device, torch.float32)]
    expected = ops.circular_conv2d(*args)
    gradients = torch.autograd.grad(expected.sum(), args)
    with torch.autocast(device.type, torch.bfloat16):
        result = ops.circular_conv2d(*args)
        again = torch.autograd.grad(result.sum(), args)
    torch.testing.assert_close((result, *again), (expected, *gradients))
