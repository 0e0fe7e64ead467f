"""Copies of images under affine maps: coordinates, bilinear gather and S copies at once, with no grid stored.

Two ops are closed under differentiation up to second order in reverse mode: the copies, and their gradients in images and maps. Each
has an argument ``direction``: with it they are those of the copies' derivative along a direction of the maps. What lies beyond (third
order; forward over forward) is plain torch: within a cell of four pixels the second derivative in the maps is that of a product of two
coordinates, and the third is zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ella_cuda.ops._cases import KernelCase, cases, normal
from ella_cuda.ops._operator import (
    batched_first,
    differentiable,
    keep,
    nested_forward_mode,
    operand_sizes,
    sum_of_parts,
)

MAX_PLANE = (1 << 31) - 1  # pixels of a plane with its border; the kernels' limit


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
    return affine_copies_torch(x, maps) if nested_forward_mode() else _copies(x, maps, None)


def affine_adjoint(y: Tensor, maps: Tensor) -> Tensor:
    r"""The adjoint of :func:`affine_copies` in images: ``(N, S, C, H, W), (N or 1, S, 2, 3) -> (N, C, H, W)``.

    .. math:: \langle y, \mathrm{copies}(x, m) \rangle = \langle \mathrm{adjoint}(y, m), x \rangle

    It is the gradient of the copies in images, by the same kernels, and differentiable in both arguments.

    Args:
        y: copies. maps: as of :func:`affine_copies`.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; the message names maps, or y as grad.
    """
    torch._check(y.dim() == 5, lambda: f"affine_adjoint: y must have shape (N, S, C, H, W), got {tuple(y.shape)}")
    n, _, *shape = y.shape
    return _gradients(y, y.new_zeros(()).expand(n, *shape), maps, None, True, False)[0]


def affine_copies_torch(x: Tensor, maps: Tensor) -> Tensor:
    """Plain-torch reference of :func:`affine_copies`, differentiable any number of times."""
    column, row = _places(maps, *x.shape[2:])
    left, up = column.floor(), row.floor()
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
    (n, c, h, w), s = x.shape, row.shape[1]
    index, inside = _index(row, column, n)
    picked = x.reshape(n, c, h * w).gather(2, index.expand(n, c, s * h * w))
    return torch.where(inside[:, :, None], picked.reshape(n, c, s, h, w).transpose(1, 2), 0)


def _index(row: Tensor, column: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Places in a plane, ``(n, 1, S H W)``, and which of them are those of pixels inside it, ``(M, S, H, W)``."""
    s, h, w = row.shape[1:]
    inside = (row >= 0) & (row < h) & (column >= 0) & (column < w)
    index = torch.where(inside, row, 0).long() * w + torch.where(inside, column, 0).long()
    return index.expand(n, s, h, w).reshape(n, 1, s * h * w), inside


# plain torch, for the orders beyond -------------------------------------------------------------------------------------------


def _twice(maps: Tensor, height: int, width: int, first: Tensor, second: Tensor) -> Tensor:
    """What two directions of the maps multiply the mixed derivative of a cell's function by: ``(M, S, 1, H, W)``."""
    (u, v), (s, t) = ([_moved(d, height, width, axis, origin=False) for axis in (0, 1)] for d in (first, second))
    return (u * t + v * s)[:, :, None]


def _second_tangent(x: Tensor, maps: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """The second derivative of the copies along two directions of the maps, ``(N, S, C, H, W)``."""
    left, up = (place.floor() for place in _places(maps, *x.shape[2:]))
    mixed = sum((1 if i == j else -1) * _corner(x, up + i, left + j) for i in (0, 1) for j in (0, 1))
    return mixed * _twice(maps, *x.shape[2:], first, second)


def _second_tangent_in_x(grad: Tensor, maps: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """The gradient in x of ``<grad, second_tangent>``, ``(N, C, H, W)``."""
    n, s, c, h, w = grad.shape
    left, up = (place.floor() for place in _places(maps, h, w))
    weighted = grad * _twice(maps, h, w, first, second)
    total = grad.new_zeros(n, c, h * w)
    for i in (0, 1):
        for j in (0, 1):
            index, inside = _index(up + i, left + j, n)
            part = torch.where(inside[:, :, None], weighted if i == j else -weighted, 0).transpose(1, 2)
            total = total.scatter_add(2, index.expand(n, c, s * h * w), part.reshape(n, c, s * h * w))
    return total.reshape(n, c, h, w)


# copies -----------------------------------------------------------------------------------------------------------------------


def _sizes(op: str, x: Tensor, maps: Tensor, direction: Tensor | None, grad: Tensor | None = None) -> dict[str, int]:
    s = operand_sizes(op, x=(x, "N C H W"), maps=(maps, "M S 2 3"))
    torch._check(
        s["M"] == s["N"] or s["M"] == 1,
        lambda: f"{op}: maps must have shape (M, S, 2, 3) with M = N = {s['N']} or M = 1, got {tuple(maps.shape)}",
    )
    operand_sizes(op, s, x=(x, None), direction=(direction, "M S 2 3"))
    torch._check(
        s["H"] < MAX_PLANE and s["W"] < MAX_PLANE and (s["H"] + 1) * (s["W"] + 1) < MAX_PLANE,
        lambda: f"{op}: x must have fewer than 2^31 pixels in a plane with a border, got {tuple(x.shape)}",
    )
    operand_sizes(op, s, x=(x, None), grad=(grad, "N S C H W"))
    return s


def _copies_fake(x: Tensor, maps: Tensor, direction: Tensor | None) -> Tensor:
    return x.new_empty([_sizes("affine_copies", x, maps, direction)[axis] for axis in "NSCHW"])


def _copies_save(ctx: Any, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
    keep(ctx, *inputs)


def _copies_backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None
    x, maps, direction = ctx.saved_tensors
    needs_x, needs_maps, needs_direction = ctx.needs_input_grad
    by_x = by_maps = None
    if needs_x or needs_maps:
        by_x, by_maps = _gradients(grad, x, maps, direction, needs_x, needs_maps)
    by_direction = _gradients(grad, x, maps, None, False, True)[1] if needs_direction else None
    return by_x if needs_x else None, by_maps if needs_maps else None, by_direction


def _copies_jvp(ctx: Any, x_t: Tensor | None, maps_t: Tensor | None, direction_t: Tensor | None) -> Tensor:
    x, maps, direction = ctx.saved_tensors
    return sum_of_parts(
        None if x_t is None else _copies(x_t, maps, direction),
        None if maps_t is None else _along(x, maps, direction, maps_t),
        None if direction_t is None else _copies(x, maps, direction_t),
    )


def _along(x: Tensor, maps: Tensor, direction: Tensor | None, other: Tensor) -> Tensor:
    """The derivative of the copies, or of that along a direction, along another one of the maps."""
    return _copies(x, maps, other) if direction is None else _second_tangent(x, maps, direction, other)


def _copies_vmap(info: Any, in_dims: tuple[int | None, ...], *args: Tensor | None) -> tuple[Tensor, int]:
    op, size = torch.ops.ella_cuda.affine_copies, info.batch_size
    x, maps, direction = (batched_first(t, d) for t, d in zip(args, in_dims, strict=True))
    x_dim, *map_dims = in_dims
    if all(d is None for d in map_dims):  # one set of maps: the batch joins the channels
        y = op(x.movedim(0, 1).flatten(1, 2), maps, direction)
        return y.unflatten(2, (size, x.shape[2])), 2
    maps, direction = (
        t if t is None or d is not None else t.expand(size, *t.shape)
        for t, d in zip((maps, direction), map_dims, strict=True)
    )
    if x_dim is None:  # one set of images: the batch joins the copies
        y = op(x, *(t if t is None else t.movedim(0, 1).flatten(1, 2) for t in (maps, direction)))
        return y.unflatten(1, (size, maps.shape[2])), 1
    n = x.shape[1]  # the batch joins the images
    y = op(
        x.flatten(0, 1), *(t if t is None else t.expand(size, n, *t.shape[2:]).flatten(0, 1) for t in (maps, direction))
    )
    return y.unflatten(0, (size, n)), 0


# gradients --------------------------------------------------------------------------------------------------------------------


def _gradients_fake(
    grad: Tensor, x: Tensor, maps: Tensor, direction: Tensor | None, wants_x: bool, wants_maps: bool
) -> tuple[Tensor, Tensor]:
    _sizes("affine_copies_backward", x, maps, direction, grad)
    return x.new_empty(x.shape if wants_x else (0,)), maps.new_empty(maps.shape if wants_maps else (0,))


def _gradients_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    keep(ctx, *inputs[:4])
    ctx.wanted = inputs[4:]


def _gradients_backward(ctx: Any, by_x: Tensor | None, by_maps: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of ``<grad, copies(by_x) + the copies of x along by_maps>``."""
    by_x, by_maps = (t if wanted else None for t, wanted in zip((by_x, by_maps), ctx.wanted, strict=True))
    grad, x, maps, direction = ctx.saved_tensors
    needs_grad, needs_x, needs_maps, needs_direction = ctx.needs_input_grad[:4]
    to_grad = to_x = to_maps = to_direction = None
    if needs_grad:
        to_grad = sum_of_parts(
            None if by_x is None else _copies(by_x, maps, direction),
            None if by_maps is None else _along(x, maps, direction, by_maps),
        )
    if by_maps is not None and (needs_x or (needs_maps and direction is None)):
        if direction is None:
            to_x, to_maps = _gradients(grad, x, maps, by_maps, needs_x, needs_maps)
        else:
            to_x = _second_tangent_in_x(grad, maps, direction, by_maps)
    if by_x is not None and needs_maps:
        moved = _gradients(grad, by_x, maps, direction, False, True)[1]
        to_maps = moved if to_maps is None else to_maps + moved
    if needs_direction:
        to_direction = sum_of_parts(
            None if by_x is None else _gradients(grad, by_x, maps, None, False, True)[1],
            None if by_maps is None else _gradients(grad, x, maps, by_maps, False, True)[1],
        )
    return to_grad, to_x if needs_x else None, to_maps if needs_maps else None, to_direction, None, None


def _gradients_jvp(
    ctx: Any, grad_t: Tensor | None, x_t: Tensor | None, maps_t: Tensor | None, direction_t: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor]:
    grad, x, maps, direction = ctx.saved_tensors
    wants_x, wants_maps = ctx.wanted
    parts = []
    if grad_t is not None:
        parts.append(_gradients(grad_t, x, maps, direction, wants_x, wants_maps))
    if x_t is not None and wants_maps:
        parts.append((None, _gradients(grad, x_t, maps, direction, False, True)[1]))
    if maps_t is not None and direction is None:
        parts.append(_gradients(grad, x, maps, maps_t, wants_x, wants_maps))
    if maps_t is not None and direction is not None and wants_x:
        parts.append((_second_tangent_in_x(grad, maps, direction, maps_t), None))
    if direction_t is not None:
        parts.append(_gradients(grad, x, maps, direction_t, wants_x, wants_maps))
    totals = (sum_of_parts(*(part[k] for part in parts if wanted)) for k, wanted in enumerate((wants_x, wants_maps)))
    shapes = _gradients_fake(grad, x, maps, direction, wants_x, wants_maps)
    return tuple(torch.zeros_like(like) if t is None else t for t, like in zip(totals, shapes, strict=True))


_gradients = differentiable(
    "affine_copies_backward",
    fake=_gradients_fake,
    save=_gradients_save,
    backward=_gradients_backward,
    jvp=_gradients_jvp,
)
_copies = differentiable(
    "affine_copies",
    fake=_copies_fake,
    save=_copies_save,
    backward=_copies_backward,
    jvp=_copies_jvp,
    vmap=_copies_vmap,
)


def kernel_cases() -> list[KernelCase]:
    def inputs(maps: int) -> tuple[Tensor, Tensor]:
        return normal(4, 6, 9, 11), torch.eye(2, 3, dtype=torch.float64) + 0.3 * normal(maps, 5, 2, 3)

    return [
        *cases("affine_copies", lambda: inputs(4), affine_copies, affine_copies_torch, derivatives=2),
        *cases("affine_copies of shared maps", lambda: inputs(1), affine_copies, affine_copies_torch, derivatives=2),
    ]
