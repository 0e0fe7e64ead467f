"""A training step's first layer under 31 transforms that all inputs share: filters that are transformed beside inputs that are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from benchmarks.bench_augment import AMOUNTS, COPIES
from benchmarks.compiling import compiled
from benchmarks.counting import Work
from ella_cuda import ops

FILTERS, SIDE = 256, 28
EPS = 2 * torch.rand(COPIES, len(AMOUNTS), generator=torch.Generator().manual_seed(0)) - 1


def maps_of(amounts):
    """Of every transform, rows of the matrix exponential, ``(1, S, 2, 3)``; differentiable in the amounts."""
    tx, ty, rotation, sx, sy, shear = (EPS.to(amounts) * amounts).unbind(1)
    zero = torch.zeros_like(tx)
    rows = [sx, shear - rotation, tx], [rotation + shear, sy, ty], [zero, zero, zero]
    generators = torch.stack([torch.stack(row, -1) for row in rows], -2)
    return torch.matrix_exp(generators)[None, :, :2]


def of_filters(x, weight, bias, amounts, copies=ops.affine_copies, average=ops.averaged_filters):
    """Resampled filters, and one product with all."""
    bank = copies(weight.view(FILTERS, 1, SIDE, SIDE), maps_of(amounts)).flatten(2).transpose(0, 1)
    return average(x, bank, bias)


def of_inputs(x, weight, bias, amounts):
    """One grid as high as all copies, a linear layer, and the mean of its activations."""
    n, maps = len(x), maps_of(amounts)[0]
    grid = F.affine_grid(maps, (COPIES, 1, SIDE, SIDE), align_corners=True).view(1, COPIES * SIDE, SIDE, 2)
    copies = F.grid_sample(x.view(n, 1, SIDE, SIDE), grid.expand(n, -1, -1, -1), align_corners=True)
    return F.linear(copies.view(n, COPIES, -1), weight, bias).relu().mean(1)


def of_repeated_inputs(x, weight, bias, amounts):
    """As many images as there are inputs and transforms."""
    n = len(x)
    grid = F.affine_grid(maps_of(amounts)[0].repeat(n, 1, 1), (n * COPIES, 1, SIDE, SIDE), align_corners=True)
    copies = F.grid_sample(x.view(n, 1, SIDE, SIDE).repeat_interleave(COPIES, 0), grid, align_corners=True)
    return F.linear(copies.view(n, COPIES, -1), weight, bias).relu().mean(1)


def of_filters_by_torch(x, weight, bias, amounts):
    """The same idea without this library: it stores the ``(N, S, H)`` activations."""
    grid = F.affine_grid(maps_of(amounts)[0], (COPIES, 1, SIDE, SIDE), align_corners=True)
    grid = grid.view(1, COPIES * SIDE, SIDE, 2).expand(FILTERS, -1, -1, -1)
    bank = F.grid_sample(weight.view(FILTERS, 1, SIDE, SIDE), grid, align_corners=True).view(FILTERS, COPIES, -1)
    return F.linear(x, bank.transpose(0, 1).flatten(0, 1)).unflatten(1, (COPIES, FILTERS)).add(bias).relu().mean(1)


CANDIDATES = {
    "ella_cuda": of_filters,
    "torch, inputs": of_inputs,
    "torch.compile, inputs": compiled(of_inputs),
    "torch, repeated inputs": of_repeated_inputs,
    "torch.compile, repeated inputs": compiled(of_repeated_inputs),
    "torch, filters": of_filters_by_torch,
    "torch.compile, filters": compiled(of_filters_by_torch),
}


def work(images):
    """Of the filter path: a product forward and one backward; of every place of a filter's copies 16 operations forward and 22 backward
    in the map and 8 in the filter."""
    product = 2 * images * COPIES * FILTERS * SIDE**2
    places = FILTERS * COPIES * SIDE**2
    return Work(forward=product + 16 * places, weights=product + 30 * places).step


@pytest.mark.parametrize("who", CANDIDATES)
@pytest.mark.parametrize("images", [512, 128])
def test_first_layer(time, device, images, who):
    call = CANDIDATES[who]
    x, grad = torch.rand(images, SIDE**2, device=device), torch.randn(images, FILTERS, device=device)
    weight, bias = 0.05 * torch.randn(FILTERS, SIDE**2, device=device), torch.randn(FILTERS, device=device)
    leaves = [t.requires_grad_() for t in (weight, bias, torch.tensor(AMOUNTS, device=device))]

    def step(function, *leaves):
        y = function(x.to(leaves[0]), *leaves)
        return y.detach(), *torch.autograd.grad(y, leaves, grad.to(y))

    # The paths differ by the order of sampling and sums; each is held against its own in float64.
    own = of_inputs if "inputs" in who else of_filters_by_torch
    exact = step(own, *(t.detach()[:].double().requires_grad_() for t in leaves))
    found = step(call, *leaves)
    for ours, theirs, bound in zip(found, exact, (1e-5, 1e-3, 1e-3, 1e-2), strict=True):
        assert (ours - theirs).norm() <= bound * theirs.norm()
    del exact, found, ours, theirs
    numbers = x.numel() + grad.numel() + 2 * weight.numel() + images * FILTERS
    time(
        lambda: step(call, *leaves),
        work=f"first layer, {FILTERS} filters, {COPIES} transforms, batch {images}",
        who=who,
        flops=work(images),
        bytes=4 * (numbers + 4 * FILTERS * COPIES * SIDE**2),
    )
