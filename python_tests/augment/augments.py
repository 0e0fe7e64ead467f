"""Augmentations of points, and images, that several tests take."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ella_cuda.augment import AffineAugment, Augment

DOUBLE = {"dtype": torch.float64}


def raw(
    n_samples: int, generators: str | tuple[str, ...] = "all", init: float = 0.3, **options: object
) -> AffineAugment:
    """In double precision, with amounts that may be 0."""
    return AffineAugment(n_samples, generators, init, constraint="raw", **DOUBLE | options)


class RotatePoints(Augment):
    """Points in the plane turned about the origin: ``(N, 2) -> (N, S, 2)``."""

    def __init__(self, n_samples: int, **options: object) -> None:
        super().__init__(n_samples, ("rotation",), limits={"rotation": math.pi}, **options)

    def transform(self, x: Tensor, eps: Tensor, eta: Tensor) -> Tensor:
        return turned(x[:, None], eps[..., 0] * eta)


def turned(points: Tensor, angle: Tensor | float) -> Tensor:
    angle = torch.as_tensor(angle, dtype=points.dtype)
    x, y = points.unbind(-1)
    return torch.stack([angle.cos() * x - angle.sin() * y, angle.sin() * x + angle.cos() * y], -1)


def smooth_images(n: int, channels: int, height: int, width: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random images without kinks between pixels that matter, 0 at the border."""
    coarse = torch.randn(n, channels, max(height // 3, 2), max(width // 3, 2), dtype=dtype)
    images = F.interpolate(coarse, (height, width), mode="bicubic", align_corners=True)
    rows, columns = (torch.linspace(-1, 1, side, dtype=dtype) for side in (height, width))
    return images * ((1 - rows**2)[:, None] * (1 - columns**2)) ** 2
