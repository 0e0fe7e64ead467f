"""The log determinant of a Kronecker-factored posterior precision, from eigenvalues."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ella_cuda.ops._cases import KernelCase, cases, normal
from ella_cuda.ops._operator import differentiable, keep, nested_forward_mode, operand_sizes

Triple = tuple[Tensor, Tensor, Tensor]


def kron_logdet(eigenvalues_in: Tensor, eigenvalues_out: Tensor, precision: Tensor | float) -> Tensor:
    r"""Log determinant of :math:`A \otimes B + \delta I`, summed over blocks, without storing the products of eigenvalues.

    .. math:: \sum_g \sum_{i,j} \log(\lambda_{g,i}\, \mu_{g,j} + \delta)

    Differentiable in all three arguments; first and second derivatives are computed the same way, by ops that sum on the fly.
    From the third order on plain torch is used, which stores the ``(G, a, b)`` products. Equivalent to :func:`kron_logdet_torch`.

    Args:
        eigenvalues_in: :math:`\lambda`, ``(G, a)`` or ``(a,)``, of the input-side factor's blocks.
        eigenvalues_out: :math:`\mu`, ``(G, b)``, ``(1, b)`` (one output-side factor for all blocks) or ``(b,)``.
        precision: :math:`\delta`, a number or a tensor of one element.

    Returns:
        A 0-dim tensor of the eigenvalues' dtype (sums are float64 inside); NaN where an argument of the logarithm is negative.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; the message names the argument.

    Source: Immer et al., "Scalable marginal likelihood estimation for model selection in deep learning", ICML 2021, section 3.2.
    """
    l, m, delta = _canonical(eigenvalues_in, eigenvalues_out, precision)
    return kron_logdet_torch(l, m, delta) if nested_forward_mode() else _logdet(l, m, delta)


def kron_logdet_torch(eigenvalues_in: Tensor, eigenvalues_out: Tensor, precision: Tensor | float) -> Tensor:
    """Plain-torch reference of :func:`kron_logdet`; stores the ``(G, a, b)`` products."""
    l, m, delta = _canonical(eigenvalues_in, eigenvalues_out, precision)
    return torch.log(_shifted(l, m, delta)).sum()


def _canonical(eigenvalues_in: Tensor, eigenvalues_out: Tensor, precision: Tensor | float) -> Triple:
    if not isinstance(precision, Tensor):
        precision = torch.tensor(precision, dtype=eigenvalues_in.dtype, device=eigenvalues_in.device)
    if precision.numel() != 1:
        raise ValueError(
            f"kron_logdet: precision must have one element, got shape {tuple(precision.shape)}; call once per value, or vmap."
        )
    return torch.atleast_2d(eigenvalues_in), torch.atleast_2d(eigenvalues_out), precision.reshape(())


def _shifted(l: Tensor, m: Tensor, delta: Tensor) -> Tensor:
    return l[:, :, None] * m[:, None, :] + delta


def _dot(first: tuple[Tensor | None, ...], second: Triple) -> Tensor:
    return sum((f * s).sum() for f, s in zip(first, second, strict=True) if f is not None)


def _zeros_for_missing(tensors: tuple[Tensor | None, ...], like: Triple) -> Triple:
    return tuple(torch.zeros_like(x) if t is None else t for t, x in zip(tensors, like, strict=True))


# value ----------------------------------------------------------------------------------------------------------------------


def _save_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
    keep(ctx, *inputs)


def _logdet_backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None
    return tuple(grad * g for g in _gradient(*ctx.saved_tensors))


def _logdet_jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
    return _dot(tangents, _gradient(*ctx.saved_tensors))


# gradient: (dl, dm, ddelta) -------------------------------------------------------------------------------------------------


def _gradient_backward(ctx: Any, *cotangents: Tensor | None) -> Triple:
    return _hvp(*ctx.saved_tensors, *_zeros_for_missing(cotangents, ctx.saved_tensors))


def _gradient_jvp(ctx: Any, *tangents: Tensor | None) -> Triple:
    return _gradient_backward(ctx, *tangents)  # the Hessian is symmetric


# Hessian-vector product -----------------------------------------------------------------------------------------------------


def _third_derivative(point: Triple, v: Triple, w: Triple) -> Triple:
    """The gradient in ``point`` of ``<w, hvp(point, v)>``, in plain torch.

    With s = l m + delta, first variations s_v = l_v m + l m_v + delta_v and second variation s_vw = l_v m_w + l_w m_v, the form is
    sum( s_vw / s - s_v s_w / s^2 ).
    """
    l, m, delta = point
    (l_v, m_v, d_v), (l_w, m_w, d_w) = v, w
    h = 1 / _shifted(l, m, delta)

    def outer(a: Tensor, b: Tensor) -> Tensor:
        return a[:, :, None] * b[:, None, :]

    s_v = outer(l_v, m) + outer(l, m_v) + d_v
    s_w = outer(l_w, m) + outer(l, m_w) + d_w
    s_vw = outer(l_v, m_w) + outer(l_w, m_v)
    by_s = 2 * h**3 * s_v * s_w - h**2 * s_vw
    by_v, by_w = -(h**2) * s_w, -(h**2) * s_v

    def along(t: Tensor, factor: Tensor, dim: int, like: Tensor) -> Tensor:
        return (t * (factor[:, None, :] if dim == 2 else factor[:, :, None])).sum(dim).sum_to_size(like.shape)

    grad_l = along(by_s, m, 2, l) + along(by_v, m_v, 2, l) + along(by_w, m_w, 2, l)
    grad_m = along(by_s, l, 1, m) + along(by_v, l_v, 1, m) + along(by_w, l_w, 1, m)
    return grad_l, grad_m, by_s.sum()


def _hvp_backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor, ...]:
    point, v = ctx.saved_tensors[:3], ctx.saved_tensors[3:]
    w = _zeros_for_missing(cotangents, point)
    return *_third_derivative(point, v, w), *_hvp(*point, *w)


def _hvp_jvp(ctx: Any, *tangents: Tensor | None) -> Triple:
    point, v = ctx.saved_tensors[:3], ctx.saved_tensors[3:]
    point_t, v_t = _zeros_for_missing(tangents[:3], point), _zeros_for_missing(tangents[3:], point)
    return tuple(a + b for a, b in zip(_third_derivative(point, v, point_t), _hvp(*point, *v_t), strict=True))


def _like_inputs(l: Tensor, m: Tensor, delta: Tensor, *direction: Tensor) -> Triple:
    op = "kron_logdet_hvp" if direction else "kron_logdet_gradient"
    names = zip(("v_in", "v_out", "v_precision"), direction, ("G a", "R b", ""), strict=False)
    _require_sizes(op, l, m, delta, **{name: (v, axes) for name, v, axes in names})
    return l.new_empty(l.shape), m.new_empty(m.shape), delta.new_empty(())


def _like_precision(l: Tensor, m: Tensor, delta: Tensor) -> Tensor:
    _require_sizes("kron_logdet", l, m, delta)
    return delta.new_empty(())


def _require_sizes(op: str, l: Tensor, m: Tensor, delta: Tensor, **direction: tuple[Tensor, str]) -> None:
    sides = {"eigenvalues_in": (l, "G a"), "eigenvalues_out": (m, "R b")}
    s = operand_sizes(op, **sides, precision=(delta, ""), **direction)
    if s["R"] != s["G"] and s["R"] != 1:
        raise RuntimeError(
            f"{op}: eigenvalues_out must have shape (G, b) or (1, b) with G = {s['G']}, got {tuple(m.shape)}"
        )


_hvp = differentiable(
    "kron_logdet_hvp",
    fake=_like_inputs,
    save=_save_inputs,
    backward=_hvp_backward,
    jvp=_hvp_jvp,
)
_gradient = differentiable(
    "kron_logdet_gradient",
    fake=_like_inputs,
    save=_save_inputs,
    backward=_gradient_backward,
    jvp=_gradient_jvp,
)
_logdet = differentiable(
    "kron_logdet",
    fake=_like_precision,
    save=_save_inputs,
    backward=_logdet_backward,
    jvp=_logdet_jvp,
)


def kernel_cases() -> list[KernelCase]:
    def spectrum() -> tuple[Tensor, ...]:
        sides = normal(3, 17).square() + 0.1, normal(1, 9).square() + 0.1
        return *sides, torch.tensor(0.7, dtype=torch.float64)

    return cases("kron_logdet", spectrum, kron_logdet, kron_logdet_torch, derivatives=2)
