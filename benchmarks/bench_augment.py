"""31 affine copies of every image of a batch, forward and backward, as the evidence's gradient in augmentation amounts takes them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from benchmarks.compiling import compiled
from ella_cuda import ops

COPIES = 31
# Rotation by up to a quarter turn, shifts by up to an eighth of the image, scales and shear.
AMOUNTS = (0.25, 0.25, math.pi / 2, 0.3, 0.3, 0.1)


def maps_of(images, device):
    """Of every image and copy, rows of matrix exponentials."""
    tx, ty, rotation, sx, sy, shear = (AMOUNTS[k] * (2 * torch.rand(images, COPIES) - 1) for k in range(6))
    zero = torch.zeros_like(tx)
    rows = [sx, shear - rotation, tx], [rotation + shear, sy, ty], [zero, zero, zero]
    generators = torch.stack([torch.stack(row, -1) for row in rows], -2)
    return torch.matrix_exp(generators)[:, :, :2].to(device)


def by_torch(x, maps):
    """One grid as high as all copies, so that no image is repeated."""
    (n, c, h, w), s = x.shape, maps.shape[1]
    grid = F.affine_grid(maps.flatten(0, 1), (n * s, c, h, w), align_corners=True)
    return F.grid_sample(x, grid.view(n, s * h, w, 2), align_corners=True).unflatten(2, (s, h)).transpose(1, 2)


def of_repeated_images(x, maps):
    (n, c, h, w), s = x.shape, maps.shape[1]
    grid = F.affine_grid(maps.flatten(0, 1), (n * s, c, h, w), align_corners=True)
    return F.grid_sample(x.repeat_interleave(s, 0), grid, align_corners=True).unflatten(0, (n, s))


CANDIDATES = {
    "ella_cuda": ops.affine_copies,
    "affine_grid + grid_sample": by_torch,
    "the same of repeated images": of_repeated_images,
    "torch.compile of affine_grid + grid_sample": compiled(by_torch),
}
SHAPES = {
    "250 x 1 x 28 x 28": (250, 1, 28, 28),
    "128 x 3 x 32 x 32": (128, 3, 32, 32),
    "1000 x 1 x 28 x 28": (1000, 1, 28, 28),
    "16 x 3 x 96 x 96": (16, 3, 96, 96),
    "2 x 3 x 224 x 224": (2, 3, 224, 224),
}


def work(shape, gradients):
    """Operations for a place: its coordinates 4, its weights 4; for each channel of it 8; for the map's gradient 8 of each channel and
    14, for the image's 8 of each channel."""
    n, c, h, w = shape
    places = n * COPIES * h * w
    return places * (8 + 8 * c + ("maps" in gradients) * (14 + 8 * c) + ("image" in gradients) * 8 * c)


@pytest.mark.parametrize("who", CANDIDATES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gradients", ["no gradient", "maps", "maps and image"])
def test_copies(time, device, gradients, shape, who):
    call, size = CANDIDATES[who], SHAPES[shape]
    x, maps = torch.rand(size, device=device), maps_of(size[0], device)
    grad = torch.randn(size[0], COPIES, *size[1:], device=device)

    def value_and_gradients(function, x, maps, grad):
        if gradients == "no gradient":
            return (function(x, maps),)
        leaves = [maps.requires_grad_()] + [x.requires_grad_()] * ("image" in gradients)
        y = function(x, maps)
        return y.detach(), *torch.autograd.grad(y, leaves, grad)

    exact = value_and_gradients(by_torch, *(t.double() for t in (x, maps, grad)))
    found = value_and_gradients(call, x, maps, grad)
    # Where a coordinate is as good as whole, float32 may take the slope on its other side: of millions, for a few.
    for ours, theirs, bound in zip(found, exact, (1e-4, 1e-2, 1e-4), strict=False):
        assert (ours - theirs).norm() <= bound * theirs.norm()
    del exact, found, ours, theirs
    passes = 0 if gradients == "no gradient" else 1
    time(
        lambda: value_and_gradients(call, x, maps, grad),
        work=f"{COPIES} copies of {shape}, " + (gradients if not passes else f"gradient in {gradients}"),
        who=who,
        flops=work(size, gradients),
        bytes=4 * (x.numel() * (1 + passes + ("image" in gradients)) + grad.numel() * (1 + passes)),
    )
