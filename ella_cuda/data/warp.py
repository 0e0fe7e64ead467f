"""Images seen through an affine map of the plane, one map for each image; rotations among them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ella_cuda.ops import affine_copies

AT_ONCE = 1024  # images, of which copies in float64 are there


def warp(images: Tensor, matrix: Tensor, shift: Tensor) -> Tensor:
    """Sample each image bilinearly at ``matrix @ p + shift`` for every pixel p of the result.

    Positions are (right, down) in pixels from the image's centre. What lies outside the image is 0, also for the
    interpolation: a pixel whose source is less than one pixel beyond the outermost centres fades to 0.

    Each image's result depends on that image and its map alone, to the last bit; it is computed in float64.

    Args:
        images: ``(N, C, S, S)``.
        matrix: ``(N, 2, 2)`` float64, from positions in the result to positions in the image.
        shift: ``(N, 2)`` float64, in pixels.

    Returns:
        ``(N, C, S, S)`` of the images' dtype, on their device.
    """
    to_normalised = 2 / max(images.shape[-1] - 1, 1)
    maps = torch.cat([matrix, shift[..., None] * to_normalised], -1)[:, None].to(images.device)
    parts = zip(images.split(AT_ONCE), maps.split(AT_ONCE), strict=True)
    return torch.cat([affine_copies(x.double(), m)[:, 0].to(images.dtype) for x, m in parts])


def rotated(images: Tensor, degrees: float | Tensor) -> Tensor:
    """Turn images about their centre, counter-clockwise as they are looked at; see :func:`warp` for what lies outside.

    Corners come from outside the image, which is 0: turn images before they are normalised, where 0 is their background.

    Args:
        images: ``(N, C, S, S)``, floating point.
        degrees: one angle for all images, or ``(N,)``.

    Returns:
        ``(N, C, S, S)`` of the images' dtype, on their device.

    Raises:
        ValueError: images are not square, or an angle is not finite.
    """
    if images.dim() != 4 or images.shape[2] != images.shape[3]:
        raise ValueError(f"rotated: images must have shape (N, C, S, S), got {tuple(images.shape)}.")
    angle = torch.as_tensor(degrees, dtype=torch.float64)
    if not angle.isfinite().all():
        raise ValueError("rotated: degrees must be finite, got an angle that is not.")
    return turned(images, (angle * (math.pi / 180)).expand(len(images)))


def turned(images: Tensor, angle: Tensor) -> Tensor:
    """:func:`rotated` by angles in radians, ``(N,)`` float64."""
    cos, sin = angle.cos(), angle.sin()
    # The way back, from the result to the image. Clockwise with the second coordinate down.
    back = torch.stack([torch.stack([cos, -sin], dim=-1), torch.stack([sin, cos], dim=-1)], dim=-2)
    return warp(images, back, back.new_zeros(len(images), 2))
