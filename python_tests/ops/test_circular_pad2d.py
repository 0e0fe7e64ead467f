"""ella_cuda.ops.circular_pad2d against indices modulo the image's sides, and the convolution that CUDA takes with it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ella_cuda import ops
from ella_cuda.ops.circular_conv2d import _padded
from ella_cuda.ops.circular_pad2d import circular_fold2d
from python_tests.ops import checks

IMAGE = ("1 1 4 4",)
SIDE = ("1 1 2 2",)
CHOICE = ("1", torch.int64)
OPERANDS = {
    "circular_pad2d": checks.Operands([("N C H W",)], (1, 1, None)),
    "circular_fold2d": checks.Operands([("N C H W",)], (1, 1, None)),
}
REFUSALS = [
    ("circular_pad2d", [IMAGE], (-1, 1, None), "pad_h and pad_w must be from 0 to 2^30, got -1 and 1"),
    ("circular_pad2d", [IMAGE], (1, 1 << 31, None), "pad_h and pad_w must be from 0 to 2^30, got 1 and 2147483648"),
    ("circular_pad2d", [("1 1 0 3",)], (1, 1, None), "x must have a pixel in each direction that is padded"),
    ("circular_pad2d", [("1 1 3 0",)], (0, 1, None), "x must have a pixel in each direction that is padded"),
    ("circular_pad2d", [("2 1 3 3",)], (1, 1, CHOICE), "index must have shape (N,) = (2,), got (1,)"),
    ("circular_fold2d", [SIDE], (1, 0, None), "grad must have a pixel in each direction that is padded"),
    ("circular_fold2d", [SIDE], (0, 2, None), "grad must have a pixel in each direction that is padded"),
    ("circular_fold2d", [SIDE], (-1, 1, None), "pad_h and pad_w must be from 0 to 2^30, got -1 and 1"),
    ("circular_fold2d", [("2 1 3 3",)], (1, 1, CHOICE), "index must have shape (N,) = (2,), got (1,)"),
]

# N, C, H, W, pad_h, pad_w: the usual border; none in one direction; as wide as the image, and wider, more than once around.
SHAPES = [
    (3, 2, 5, 6, 1, 1), (2, 3, 4, 7, 0, 2), (2, 2, 3, 4, 3, 0), (1, 3, 4, 3, 4, 3), (2, 1, 2, 3, 5, 10),
    (5, 2, 1, 1, 1, 2), (2, 2, 32, 32, 1, 1), (70, 40, 8, 4, 2, 1),
]  # fmt: skip


def choices(n: int, device: torch.device) -> Tensor:
    return torch.arange(n, device=device) * 3 % 4


def wrapped(x: Tensor, pad_h: int, pad_w: int, index: Tensor | None = None) -> Tensor:
    """By numpy, which knows this padding as "wrap" and goes around as often as it takes; images moved by their component first."""
    if index is not None and len(x):
        moved = [image.roll((-(i & 1), -(i >> 1)), (1, 2)) for image, i in zip(x, index.tolist(), strict=True)]
        x = torch.stack(moved)
    pads = ((0, 0), (0, 0), (pad_h, pad_h), (pad_w, pad_w))
    return torch.from_numpy(np.pad(x.detach().cpu().numpy(), pads, mode="wrap")).to(x.device)


def folded(grad: Tensor, height: int, width: int, pad_h: int, pad_w: int, index: Tensor | None = None) -> Tensor:
    """The transpose, a pixel at a time."""
    total = torch.zeros(*grad.shape[:2], height, width, dtype=grad.dtype, device=grad.device)
    for i in range(grad.shape[2]):
        for j in range(grad.shape[3]):
            total[:, :, (i - pad_h) % height, (j - pad_w) % width] += grad[:, :, i, j]
    for i in range(0 if index is None else 4):
        total = torch.where((index == i)[:, None, None, None], total.roll((i & 1, i >> 1), (2, 3)), total)
    return total


each_way = pytest.mark.parametrize("moves", [False, True], ids=["as they are", "moved"])


@pytest.mark.parametrize("shape", [*SHAPES, (6, 2, 4, 6, 0, 0), (5, 1, 1, 1, 0, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@each_way
def test_repeats_the_image_and_the_gradient_adds_up(shape, dtype, moves, device):
    *size, pad_h, pad_w = shape
    x = torch.randn(size, dtype=dtype, device=device, requires_grad=True)
    index = choices(size[0], device) if moves else None
    expected = wrapped(x, pad_h, pad_w, index)
    for pad in (ops.circular_pad2d, ops.circular_pad2d_torch):
        y = pad(x, pad_h, pad_w, index)
        assert torch.equal(y, expected) and y.dtype == dtype and y.is_contiguous()
    grad = torch.randn_like(expected)
    (ours,) = torch.autograd.grad(ops.circular_pad2d(x, pad_h, pad_w, index), x, grad)
    torch.testing.assert_close(ours, folded(grad, *size[2:], pad_h, pad_w, index))


@pytest.mark.parametrize("shape", [(3, 2, 5, 6, 1, 2), (2, 3, 2, 3, 3, 4), (5, 2, 4, 6, 1, 2)])
@each_way
def test_every_layout(shape, moves, device):
    *size, pad_h, pad_w = shape
    x = torch.randn(size, dtype=torch.float64, device=device)
    index = torch.stack([choices(size[0], device), x.new_full(size[:1], -1).long()], 1)[:, 0] if moves else None
    grad = torch.randn_like(wrapped(x, pad_h, pad_w))
    for _, laid_out in checks.layouts(x):
        assert torch.equal(ops.circular_pad2d(laid_out, pad_h, pad_w, index), wrapped(laid_out, pad_h, pad_w, index))
    for _, laid_out in checks.layouts(grad):
        found = circular_fold2d(laid_out, pad_h, pad_w, index)
        checks.assert_same(found, folded(laid_out, *size[2:], pad_h, pad_w, index))
        assert found.is_contiguous()


@pytest.mark.parametrize("size", [(0, 2, 4, 5), (2, 0, 4, 5)])
def test_empty(size, device):
    x = torch.zeros(size, device=device, requires_grad=True)
    y = ops.circular_pad2d(x, 1, 2)
    assert y.shape == (*size[:2], 6, 9)
    assert torch.autograd.grad(y.sum(), x)[0].shape == x.shape
    assert ops.circular_pad2d(torch.zeros(2, 3, 0, 4, device=device), 0, 1).shape == (2, 3, 0, 6)


@pytest.mark.parametrize(
    ("size", "pads", "moves"),
    [((2, 2, 3, 2), (1, 1), False), ((2, 2, 3, 2), (0, 2), False), ((1, 1, 3, 2), (4, 5), False), ((3, 1, 2, 4), (1, 2), True)],
)  # fmt: skip
def test_derivatives_and_transforms(size, pads, moves, device):
    x = torch.randn(size, dtype=torch.float64, device=device)
    index = choices(len(x), device) if moves else None

    def pad(t: Tensor) -> Tensor:
        return ops.circular_pad2d(t, *pads, index)

    checks.check_derivatives(lambda t: pad(t).sin(), (x.clone().requires_grad_(),))
    checks.check_func_transforms(pad, lambda t: ops.circular_pad2d_torch(t, *pads, index), (x,))
    checks.check_vmap(pad, (x,))
    checks.check_compile(pad, (x,))
    padded = torch.randn_like(pad(x)).requires_grad_()
    checks.check_derivatives(lambda t: circular_fold2d(t, *pads, index).sin(), (padded,))
    checks.check_derivatives(
        lambda g: torch.autograd.grad(pad(leaf := x.clone().requires_grad_()), leaf, g, create_graph=True), (padded,)
    )
    for name, t in (("circular_pad2d", x.clone().requires_grad_()), ("circular_fold2d", padded)):
        op = getattr(torch.ops.ella_cuda, name)
        batch = torch.stack([t.detach(), t.detach() * 2], -1)
        checks.assert_same(
            torch.func.vmap(lambda b, op=op: op(b, *pads, index), -1)(batch),
            torch.stack([op(b, *pads, index) for b in batch.unbind(-1)]),
        )


def test_same_numbers_for_any_number_of_threads():
    grad = torch.randn(50, 7, 18, 18)
    checks.same_for_any_number_of_threads(lambda: circular_fold2d(grad, 1, 1))


def test_a_convolution_of_stride_two_gives_the_component(device):
    x, weight = torch.randn(6, 3, 4, 8, device=device).double(), torch.randn(2, 3, 3, 5, device=device).double()
    index = choices(6, device)
    full = ops.circular_conv2d_torch(x, weight)
    found = F.conv2d(ops.circular_pad2d(x, 1, 2, index), weight, stride=2)
    for n, i in enumerate(index.tolist()):
        checks.assert_same(found[n], full[n, :, i & 1 :: 2, i >> 1 :: 2])


def test_vmap_of_moves(device):
    """Of images and moves, and of either alone."""
    x, index = torch.randn(2, 3, 1, 2, 4, device=device), torch.tensor([[0, 1, 2], [3, 2, 0]], device=device)
    for f in (lambda t, i: ops.circular_pad2d(t, 1, 1, i), lambda t, i: circular_fold2d(t, 0, 1, i)):
        for dims in ((0, 0), (0, None), (None, 0)):
            given = [t if d == 0 else t[0] for t, d in zip((x, index), dims, strict=True)]
            one_by_one = [f(*(t[k] if d == 0 else t for t, d in zip(given, dims, strict=True))) for k in range(2)]
            checks.assert_same(torch.func.vmap(f, dims)(*given), torch.stack(one_by_one))


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (torch.zeros(2), "index must be int64"),
        (torch.tensor([0, 4]), "index must be in 0..3, got 4 for image 1"),
        (torch.tensor([-1, 0]), "index must be in 0..3, got -1 for image 0"),
    ],
)
def test_errors_of_the_index(index, words):
    with pytest.raises(RuntimeError, match=words):
        ops.circular_pad2d(torch.zeros(2, 3, 4, 4), 1, 1, index)
    with pytest.raises(RuntimeError, match=words):
        circular_fold2d(torch.zeros(2, 3, 4, 4), 1, 1, index)


@pytest.mark.parametrize(
    "shape", [(3, 2, 4, 5, 6, 3, 3), (2, 3, 2, 2, 3, 7, 9), (2, 2, 3, 1, 1, 3, 5), (2, 2, 3, 4, 4, 1, 1)]
)
def test_the_convolution_of_padded_images(shape, device):
    """What :func:`ops.circular_conv2d` is on CUDA, on every device: kernels larger than the image too."""
    n, c, d, h, w, kh, kw = shape
    args = [
        torch.randn(s, dtype=torch.float64, device=device, requires_grad=True)
        for s in ((n, c, h, w), (d, c, kh, kw), (d,))
    ]
    reference = [a.detach().clone().requires_grad_() for a in args]
    y, expected = _padded(*args), ops.circular_conv2d_torch(*reference)
    checks.assert_same(y, expected)
    grad = torch.randn_like(expected)
    checks.assert_same(torch.autograd.grad(y, args, grad), torch.autograd.grad(expected, reference, grad))


def test_the_convolution_of_other_images(device):
    """Half precision, which the op does not know, and nothing at all are the reference's; wrong shapes are named."""
    x, weight = torch.randn(2, 3, 4, 5, device=device), torch.randn(4, 3, 3, 3, device=device)
    half = _padded(x.bfloat16(), weight.bfloat16(), None)
    assert torch.equal(half, F.conv2d(F.pad(x.bfloat16(), (1, 1, 1, 1), mode="circular"), weight.bfloat16()))
    assert _padded(x[:, :, :0], weight, None).shape == (2, 4, 0, 5)
    with pytest.raises(RuntimeError, match=r"circular_conv2d: x must have shape .* got \(2, 3, 4\)"):
        _padded(x[..., 0], weight, None)
