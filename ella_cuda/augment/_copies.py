"""Transformed copies of images, in plain torch: the stand-in of the op ``affine_copies``."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def affine_copies(x: Tensor, maps: Tensor) -> Tensor:
    """``x (N, C, H, W)``, ``maps (N or 1, S, 2, 3)`` from the output's to the input's normalised coordinates -> ``(N, S, C, H, W)``."""
    n, s = x.shape[0], maps.shape[1]
    maps = maps.expand(n, -1, -1, -1).flatten(0, 1)
    grid = F.affine_grid(maps, [n * s, *x.shape[1:]], align_corners=True)
    copies = x[:, None].expand(-1, s, -1, -1, -1).flatten(0, 1)
    return F.grid_sample(copies, grid, align_corners=True).unflatten(0, (n, s))
