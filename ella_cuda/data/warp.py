"""Images seen through an affine map of the plane, one map for each image."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

WARP_CHUNK = 1024  # images at a time: bounds the scratch memory, at 32x32 about 50 MB


def warp(images: Tensor, matrix: Tensor, shift: Tensor) -> Tensor:
    """Sample each image bilinearly at ``matrix @ p + shift`` for every pixel p of the result.

    Positions are (right, down) in pixels from the image's centre. What lies outside the image is 0, also for the
    interpolation: a pixel whose source is less than one pixel beyond the outermost centres fades to 0.

    Each image's result depends on that image and its map alone, to the last bit: the grid is computed elementwise, in
    float64.

    Args:
        images: ``(N, C, S, S)``.
        matrix: ``(N, 2, 2)`` float64, from positions in the result to positions in the image.
        shift: ``(N, 2)`` float64, in pixels.

    Returns:
        ``(N, C, S, S)`` of the images' dtype, on their device.
    """
    size = images.shape[-1]
    centred = torch.arange(size, dtype=torch.float64, device=images.device) - (size - 1) / 2
    right, down = centred[None, None, :], centred[None, :, None]
    out = torch.empty_like(images)
    for start in range(0, len(images), WARP_CHUNK):
        part = slice(start, start + WARP_CHUNK)
        m, t = (x[part].to(images.device)[..., None, None] for x in (matrix, shift))
        source = [m[:, i, 0] * right + m[:, i, 1] * down + t[:, i] for i in range(2)]
        grid = torch.stack(source, dim=-1) * (2 / size)  # grid_sample's units: -1 and 1 are the image's edges
        out[part] = F.grid_sample(
            images[part], grid.to(images.dtype), mode="bilinear", padding_mode="zeros", align_corners=False
        )
    return out
