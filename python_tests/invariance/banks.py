"""Filter banks, and data drawn from a shallow network, that several tests take."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ella_cuda.augment import AffineAugment
from ella_cuda.invariance import BayesianLinear, InvariantFilterBank, ShallowNetwork
from python_tests.augment.augments import DOUBLE, smooth_images

SIDE = 12


def smooth_bank(
    n_filters: int, augment: AffineAugment, side: int = SIDE, channels: int = 1, **options: object
) -> InvariantFilterBank:
    """Filters without kinks between pixels, of norm 3."""
    bank = InvariantFilterBank((channels, side, side), n_filters, augment, **options)
    with torch.no_grad():
        bank.weight.copy_(of_norm_3(smooth_images(n_filters, channels, side, side)))
    return bank


def of_norm_3(images: Tensor) -> Tensor:
    """Scaled so that their mean norm is 3."""
    return images * 3 / images.flatten(1).norm(dim=1).mean()


def turned_targets(
    degrees: float, n: int = 40, n_filters: int = 60, outputs: int = 5, noise: float = 0.3
) -> tuple[Tensor, Tensor, ShallowNetwork]:
    """Images, targets of a shallow network with that angle, and the network with their prior."""
    augment = AffineAugment(12, "rotation", 0.1, "grid", constraint="raw", **DOUBLE)
    x = of_norm_3(smooth_images(n, 1, SIDE, SIDE))
    bank = smooth_bank(n_filters, augment)
    augment.set_eta(math.radians(degrees))
    with torch.no_grad():
        features = bank(x)
        precision = n_filters * features.var().item()
        y = features @ torch.randn(n_filters, outputs, **DOUBLE) / precision**0.5 + noise * torch.randn(
            n, outputs, **DOUBLE
        )
    layer = BayesianLinear(n_filters, outputs, prior_precision=precision, **DOUBLE)
    return x, y, ShallowNetwork(bank, layer, "regression", sigma_noise=0.1)


@torch.no_grad()
def fit_best(layer: BayesianLinear, features: Tensor, y: Tensor, noise: float) -> None:
    """Put q to the best one of its family, of Gaussian targets: "full" is then the exact posterior."""
    identity = torch.eye(features.shape[1], dtype=features.dtype)
    precision = features.T @ features / noise**2 + layer.prior_precision * identity
    layer.mean.copy_((torch.linalg.solve(precision, features.T @ y) / noise**2).T)
    lower = torch.linalg.cholesky(torch.linalg.inv(precision))
    if layer.q == "full":
        layer.lower.copy_(lower.tril(-1).expand_as(layer.lower))
        layer.log_scale.copy_(lower.diagonal().log().expand_as(layer.log_scale))
    else:
        layer.log_scale.copy_((-precision.diagonal().log() / 2).expand_as(layer.log_scale))
