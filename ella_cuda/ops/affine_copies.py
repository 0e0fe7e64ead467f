"""Copies of images under affine maps: coordinates, bilinear gather and S copies at once, with no grid stored.

Two ops are closed under differentiation up to second order in reverse mode: the copies, and their gradients in images and maps. Each
has an argument ``direction``: with it they are those of the copies' derivative along a direction of the maps. What lies beyond is plain
torch: within a pixel's cell the third derivative in the maps is zero.
"""

from __future__ import annotations

import torch
from torch import Tensor


def affine_copies(x: Tensor, maps: Tensor) -> Tensor:
    r"""S copies of every image, each under an affine map of its own.

    .. math:: y_{nscij} = \sum_{kl} x_{nckl} \, h(u_{nsij} - l) \, h(v_{nsij} - k), \qquad h(t) = \max(0, 1 - |t|)

    where :math:`(u, v)` are the column and row to which ``maps[n, s]`` takes pixel (i, j). Maps act on normalised coordinates: -1 and 1
    are the centres of the first and the last pixel of a side, the first coordinate is the column's, and a side of one pixel is at 0.
    Outside the image are zeros. This is ``torch.nn.functional.affine_grid`` and ``grid_sample`` with ``align_corners=True``, bilinear and
    padded with zeros, on S repetitions of the images; neither those nor a grid are stored, forward or backward. As maps take output to
    input coordinates, the picture moves by their inverse.

    Differentiable in both arguments, twice by kernels. Where a coordinate is a whole number the copies have a kink in the maps; the
    derivative there is that of the pixels to the right and below.

    Args:
        x: ``(N, C, H, W)``, float32 or float64; a plane with a border of one pixel has fewer than 2^31 pixels.
        maps: ``(N, S, 2, 3)``, or ``(1, S, 2, 3)`` for the same S maps of all images, of x's dtype: rows 0 and 1 of the affine matrix. A map
            with a number that is not finite makes its copies, and the gradients that read it, NaN.

    Returns:
        ``(N, S, C, H, W)``, contiguous. Gradients are summed in a fixed order.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; the message names the argument.

    Source: the sampling of Jaderberg et al., "Spatial transformer networks", NeurIPS 2015, equations 1 and 5; its use for learned invariances
    is that of Benton et al., NeurIPS 2020, and Immer et al., NeurIPS 2022.
    """
    return affine_copies_torch(x, maps)


def affine_copies_torch(x: Tensor, maps: Tensor) -> Tensor:
    """Plain-torch reference of :func:`affine_copies`, differentiable any number of times."""
    column, row = _places(maps, *x.shape[2:])
    left, up = column.floor().detach(), row.floor().detach()
    right, down = column - left, row - up
    return sum(
        _corner(x, up + i, left + j) * ((down if i else 1 - down) * (right if j else 1 - right))[:, :, None]
        for i in (0, 1)
        for j in (0, 1)
    )


def _places(maps: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Columns and rows, in pixels, to which maps take the pixels of an image: ``(M, S, 2, 3)`` -> twice ``(M, S, H, W)``."""
    return _moved(maps, height, width, 0), _moved(maps, height, width, 1)


def _moved(maps: Tensor, height: int, width: int, axis: int, origin: bool = True) -> Tensor:
    """One coordinate of :func:`_places`, in which a pixel of the centre is the origin's; linear in the maps unless that is added."""
    middle = ((width - 1) / 2, (height - 1) / 2)
    # In pixels of the coordinate that results, so that the identity's are whole numbers.
    across, down = (
        torch.linspace(-1, 1, size, dtype=maps.dtype, device=maps.device) * middle[axis]
        if size > 1 and side != axis
        else torch.arange(size, dtype=maps.dtype, device=maps.device) - middle[side]
        if size > 1
        else maps.new_zeros(size)
        for side, size in enumerate((width, height))
    )
    a, b, c = (m[..., None, None] for m in maps[:, :, axis].unbind(-1))
    moved = a * across + b * down[:, None] + c * middle[axis]
    return moved + middle[axis] if origin else moved


def _corner(x: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """The pixels at whole coordinates ``(M, S, H, W)``, zero outside: ``(N, S, C, H, W)``."""
    n, c, h, w = x.shape
    inside = (row >= 0) & (row < h) & (column >= 0) & (column < w)
    index = torch.where(inside, row, 0).long() * w + torch.where(inside, column, 0).long()
    index = index.expand(n, *index.shape[1:]).flatten(1)
    picked = x.flatten(2).gather(2, index[:, None].expand(-1, c, -1)).unflatten(2, row.shape[1:]).transpose(1, 2)
    return torch.where(inside[:, :, None], picked, 0)
