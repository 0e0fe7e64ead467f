"""LILA's illustration: rings of points, seen under an arc, and a small network averaged over turned copies."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ella_cuda.augment import Augment


class Turn(Augment):
    """Turned copies of points of the plane; the amount is an angle."""

    def __init__(self, n_samples: int, init: float, sampling: str = "grid") -> None:
        super().__init__(n_samples, ("turn",), init, sampling, "raw", dtype=torch.float64)

    def transform(self, x: Tensor, eps: Tensor, eta: Tensor) -> Tensor:
        angle = (eps * eta)[..., 0]
        cosine, sine = angle.cos(), angle.sin()
        a, b = x[:, None, 0], x[:, None, 1]
        return torch.stack([cosine * a - sine * b, sine * a + cosine * b], 2)


def rings(n: int = 200, arc: float = 120.0) -> tuple[Tensor, Tensor]:
    """Half of the points are of class 0, at radius 0.5; of class 1 a third is at the centre, the others at radius 1."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(n) % 2
    radius = torch.where(y == 0, 0.5, torch.where(torch.arange(n) % 6 == 1, 0.0, 1.0)).double()
    angle = (torch.rand(n, generator=generator, dtype=torch.float64) - 0.5) * math.radians(arc)
    x = radius[:, None] * torch.stack([angle.cos(), angle.sin()], 1)
    return x + 0.06 * torch.randn(n, 2, generator=generator, dtype=torch.float64), y


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 2)).double()
