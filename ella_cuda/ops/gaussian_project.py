"""Products with the Gaussian kernel matrix of two sets of points, which is never stored; the core of :func:`basis_project`.

Four ops are closed under differentiation up to second order in reverse mode: the product, its derivative along a direction of the
coordinates, its gradient in them, and the Hessian times a direction. What lies beyond (third order; forward over forward) is
plain torch, which stores the matrix.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ella_cuda.ops._operator import (
    COORDINATES,
    differentiable,
    joins_rows,
    keep,
    nested_forward_mode,
    operand_sizes,
    sum_of_parts,
)

Pair = tuple[Tensor, Tensor]


def gaussian_project(x: Tensor, u: Tensor, v: Tensor) -> Tensor:
    r"""Signals on X points, projected on Gaussian bumps of unit width around A points.

    .. math:: y_{ma} = \sum_x x_{mx} E_{ax}, \qquad E_{ax} = \exp(-\tfrac12 \lVert u_x - v_a \rVert^2)

    Differentiable in all three arguments. The matrix is evaluated tile by tile (see :func:`basis_project`) and never stored, nor are
    its derivatives up to second order. Equivalent to :func:`gaussian_project_torch`.

    Args:
        x: ``(M, X)``, float32 or float64.
        u: ``(X, P)``, float64 whatever x's dtype: differences of coordinates lose what the coordinates were rounded to.
        v: ``(A, P)``, float64.

    Returns:
        ``(M, A)``, contiguous, of x's dtype.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; the message names the argument.
    """
    return gaussian_project_torch(x, u, v) if nested_forward_mode() else _project(x, u, v)


def gaussian_project_torch(x: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Plain-torch reference of :func:`gaussian_project`; stores the ``(A, X)`` matrix."""
    return x @ gaussian_matrix(u, v).to(x.dtype).mT


def gaussian_matrix(u: Tensor, v: Tensor) -> Tensor:
    """E of :func:`gaussian_project`: ``u (X, P)``, ``v (A, P)`` -> ``(A, X)``."""
    if u.shape[1] == 0:
        return u.new_ones(v.shape[0], u.shape[0])
    # Axis by axis: a sum over a last axis of two takes several times longer.
    return torch.exp(-0.5 * sum((p - q[:, None]).square() for p, q in zip(u.unbind(1), v.unbind(1), strict=True)))


def _differences(u: Tensor, v: Tensor) -> Tensor:
    return u - v[:, None]  # (A, X, P)


def _direction(du: Tensor | None, dv: Tensor | None, u: Tensor, v: Tensor) -> Pair | None:
    """A direction of the coordinates with zeros for a missing half; None where both are missing."""
    if du is None and dv is None:
        return None
    return torch.zeros_like(u) if du is None else du, torch.zeros_like(v) if dv is None else dv


def _save_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
    keep(ctx, *inputs)


# plain torch, for the orders beyond -------------------------------------------------------------------------------------------


def _second_tangent(x: Tensor, u: Tensor, v: Tensor, first: Pair, second: Pair) -> Tensor:
    """The second derivative of the product along two directions, ``(M, A)``."""
    d, s, t = _differences(u, v), _differences(*first), _differences(*second)
    matrix = gaussian_matrix(u, v) * ((d * s).sum(-1) * (d * t).sum(-1) - (s * t).sum(-1))
    return x @ matrix.to(x.dtype).mT


def _third_derivative(grad: Tensor, x: Tensor, u: Tensor, v: Tensor, first: Pair, second: Pair) -> Pair:
    """The gradient in (u, v) of ``<grad, second_tangent>``: twice a direction put into the third derivative."""
    d, s, t = _differences(u, v), _differences(*first), _differences(*second)
    along_s, along_t, s_t = ((a * b).sum(-1, keepdim=True) for a, b in ((d, s), (d, t), (s, t)))
    weight = ((grad.mT @ x).double() * gaussian_matrix(u, v))[..., None]
    terms = weight * (s * along_t + t * along_s - d * (along_s * along_t - s_t))
    return terms.sum(0), -terms.sum(1)


# product ----------------------------------------------------------------------------------------------------------------------


def _project_backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None
    x, u, v = ctx.saved_tensors
    needs_x, *needs = ctx.needs_input_grad
    by_points = _gradient(grad, x, u, v) if any(needs) else (None, None)
    return _project(grad, v, u) if needs_x else None, *by_points


def _project_jvp(ctx: Any, x_t: Tensor | None, u_t: Tensor | None, v_t: Tensor | None) -> Tensor:
    x, u, v = ctx.saved_tensors
    moved = _direction(u_t, v_t, u, v)
    return sum_of_parts(
        None if x_t is None else _project(x_t, u, v),
        None if moved is None else _tangent(x, u, v, *moved),
    )


# derivative along a direction -------------------------------------------------------------------------------------------------


def _tangent_backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 5
    x, u, v, du, dv = ctx.saved_tensors
    needs_x, needs_u, needs_v, needs_du, needs_dv = ctx.needs_input_grad
    by_points = _hvp(grad, x, u, v, du, dv) if needs_u or needs_v else (None, None)
    by_direction = _gradient(grad, x, u, v) if needs_du or needs_dv else (None, None)
    return _tangent(grad, v, u, dv, du) if needs_x else None, *by_points, *by_direction


def _tangent_jvp(ctx: Any, x_t: Tensor | None, *tangents: Tensor | None) -> Tensor:
    x, u, v, du, dv = ctx.saved_tensors
    moved, turned = _direction(*tangents[:2], u, v), _direction(*tangents[2:], u, v)
    return sum_of_parts(
        None if x_t is None else _tangent(x_t, u, v, du, dv),
        None if moved is None else _second_tangent(x, u, v, (du, dv), moved),
        None if turned is None else _tangent(x, u, v, *turned),
    )


# gradient in (u, v) -----------------------------------------------------------------------------------------------------------


def _gradient_backward(ctx: Any, cu: Tensor | None, cv: Tensor | None) -> tuple[Tensor | None, ...]:
    grad, x, u, v = ctx.saved_tensors
    along = _direction(cu, cv, u, v)
    if along is None:
        return (None,) * 4
    needs_grad, needs_x, *needs = ctx.needs_input_grad
    by_points = _hvp(grad, x, u, v, *along) if any(needs) else (None, None)
    return (
        _tangent(x, u, v, *along) if needs_grad else None,
        _tangent(grad, v, u, along[1], along[0]) if needs_x else None,
        *by_points,
    )


def _gradient_jvp(ctx: Any, grad_t: Tensor | None, x_t: Tensor | None, *tangents: Tensor | None) -> Pair:
    grad, x, u, v = ctx.saved_tensors
    moved = _direction(*tangents, u, v)
    return sum_of_parts(
        None if grad_t is None else _gradient(grad_t, x, u, v),
        None if x_t is None else _gradient(grad, x_t, u, v),
        None if moved is None else _hvp(grad, x, u, v, *moved),
    )


# Hessian times a direction ----------------------------------------------------------------------------------------------------


def _hvp_backward(ctx: Any, cu: Tensor | None, cv: Tensor | None) -> tuple[Tensor | None, ...]:
    grad, x, u, v, du, dv = ctx.saved_tensors
    along = _direction(cu, cv, u, v)
    if along is None:
        return (None,) * 6
    needs_grad, needs_x, needs_u, needs_v, needs_du, needs_dv = ctx.needs_input_grad
    by_points = _third_derivative(grad, x, u, v, (du, dv), along) if needs_u or needs_v else (None, None)
    by_direction = _hvp(grad, x, u, v, *along) if needs_du or needs_dv else (None, None)
    return (
        _second_tangent(x, u, v, (du, dv), along) if needs_grad else None,
        _second_tangent(grad, v, u, (dv, du), along[::-1]) if needs_x else None,
        *by_points,
        *by_direction,
    )


def _hvp_jvp(ctx: Any, grad_t: Tensor | None, x_t: Tensor | None, *tangents: Tensor | None) -> Pair:
    grad, x, u, v, du, dv = ctx.saved_tensors
    moved, turned = _direction(*tangents[:2], u, v), _direction(*tangents[2:], u, v)
    return sum_of_parts(
        None if grad_t is None else _hvp(grad_t, x, u, v, du, dv),
        None if x_t is None else _hvp(grad, x_t, u, v, du, dv),
        None if moved is None else _third_derivative(grad, x, u, v, (du, dv), moved),
        None if turned is None else _hvp(grad, x, u, v, *turned),
    )


# registration -----------------------------------------------------------------------------------------------------------------


def _like_product(x: Tensor, u: Tensor, v: Tensor, *direction: Tensor) -> Tensor:
    op = "gaussian_project_tangent" if direction else "gaussian_project"
    s = operand_sizes(op, x=(x, "M X"), **_points(u, v, *direction))
    return x.new_empty(s["M"], s["A"])


def _like_points(grad: Tensor, x: Tensor, u: Tensor, v: Tensor, *direction: Tensor) -> Pair:
    op = "gaussian_project_hvp" if direction else "gaussian_project_gradient"
    points = _points(u, v, *direction)
    operand_sizes(op, x=(x, "M X"), u=points.pop("u"), v=points.pop("v"), grad=(grad, "M A"), **points)
    return u.new_empty(u.shape), v.new_empty(v.shape)


def _points(*tensors: Tensor) -> dict[str, tuple[Any, ...]]:
    """u, v and perhaps the directions they move in, for :func:`operand_sizes`."""
    places = zip(("u", "v", "du", "dv"), tensors, ("X P", "A P", "X P", "A P"), strict=False)
    return {name: (tensor, axes, COORDINATES) for name, tensor, axes in places}


_hvp = differentiable(
    "gaussian_project_hvp",
    fake=_like_points,
    save=_save_inputs,
    backward=_hvp_backward,
    jvp=_hvp_jvp,
)
_gradient = differentiable(
    "gaussian_project_gradient",
    fake=_like_points,
    save=_save_inputs,
    backward=_gradient_backward,
    jvp=_gradient_jvp,
)
_tangent = differentiable(
    "gaussian_project_tangent",
    fake=_like_product,
    save=_save_inputs,
    backward=_tangent_backward,
    jvp=_tangent_jvp,
    vmap=joins_rows("gaussian_project_tangent"),
)
_project = differentiable(
    "gaussian_project",
    fake=_like_product,
    save=_save_inputs,
    backward=_project_backward,
    jvp=_project_jvp,
    vmap=joins_rows("gaussian_project"),
)
