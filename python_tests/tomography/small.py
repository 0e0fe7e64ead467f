"""Small networks, transforms and linearised images, and dense matrices of them by other ways."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from ella_cuda.tomography import LinearisedDIP, RayTransform, UNet

SIDE = 6
EXACT = {"tol": 1e-13, "max_iterations": 200, "rank": 5}  # of the iterative way, for comparisons


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def phantom(side: int = SIDE) -> Tensor:
    x = torch.zeros(side, side, dtype=torch.float64)
    x[1 : side - 2, 2 : side - 1] = 0.8
    x[2:3, 1 : side - 2] = 0.4
    return x


def small_unet(seed: int = 1) -> nn.Module:
    """With 3x3 and 1x1 blocks: inc, down.0, up.0 with a skip connection, outc."""
    torch.manual_seed(seed)
    return UNet(channels=3, scales=2, skip_channels=(0, 2)).double()


def fitted(n_angles: int = 4, detectors: int = 7, network: nn.Module | None = None, **options: Any) -> LinearisedDIP:
    """A few steps of the deep image prior, and its linearisation."""
    rays = RayTransform(SIDE, n_angles, detectors)
    y = rays.forward(phantom())
    y = y + 0.05 * y.abs().mean() * drawn(*y.shape, seed=3)
    dip = LinearisedDIP(small_unet() if network is None else network, rays, tv_weight=1e-3, **options)
    dip.reconstruct(y, n_steps=5, lr=1e-2, progress_bar=False)
    return dip.linearise()


def set_apart(dip: LinearisedDIP) -> None:
    """Hyperparameters that all differ."""
    names = [block.name for block in dip.prior.blocks]
    smooth = [block.name for block in dip.prior.blocks if block.n_taps > 1]
    dip.set_hyperparameters(
        {name: 0.3 + 0.4 * i for i, name in enumerate(names)},
        {name: 0.6 + 0.5 * i for i, name in enumerate(smooth)},
        0.02,
    )


def tap_covariance(side: int, lengthscale: Tensor | float) -> Tensor:
    """exp(-distance / lengthscale) + 1e-6 I of the taps of a square kernel, entry by entry."""
    places = [(r, c) for r in range(side) for c in range(side)]
    rows = []
    for a in places:
        rows.append([torch.exp(-torch.as_tensor(math.dist(a, b), dtype=torch.float64) / lengthscale) for b in places])
    return torch.stack([torch.stack(row) for row in rows]) + 1e-6 * torch.eye(side * side, dtype=torch.float64)


def weight_covariance(dip: LinearisedDIP, raw: dict[str, Tensor] | None = None, only: int | None = None) -> Tensor:
    """S, ``(P, P)``, filter by filter; ``only`` one block's."""
    raw = dip._raw if raw is None else raw
    blocks, smooth = [], 0
    for i, block in enumerate(dip.prior.blocks):
        variance = raw["log_variance"][i].exp()
        if block.n_taps > 1:
            one = variance * tap_covariance(block.kernel_size[0], raw["log_lengthscale"][smooth].exp())
            smooth += 1
        else:
            one = variance[None, None]
        for name in block.parameters:
            shape = dip.network.get_parameter(name).shape
            blocks += [one if only in (None, i) else torch.zeros_like(one)] * (shape[0] * shape[1])
    return torch.block_diag(*blocks)


def jacobian(dip: LinearisedDIP) -> Tensor:
    """(d, P) by torch.func, in the order of theta."""
    names = [name for block in dip.prior.blocks for name in block.parameters]
    values = {name: dip.network.get_parameter(name).detach() for name in names}
    others = {n: p.detach() for n, p in dip.network.named_parameters() if n not in values}

    def image(chosen: dict[str, Tensor]) -> Tensor:
        return functional_call(dip.network, {**others, **chosen}, (dip._x,)).flatten()

    found = jacrev(image)(values)
    return torch.cat([found[name].flatten(1) for name in names], 1)


def projection(dip: LinearisedDIP) -> Tensor:
    """A, ``(n, d)``."""
    return dip.ray_transform.matrix().to_dense()


def weights_of(dip: LinearisedDIP) -> Tensor:
    """The network's, in the order of theta."""
    names = [name for block in dip.prior.blocks for name in block.parameters]
    return torch.cat([dip.network.get_parameter(name).detach().flatten() for name in names])
