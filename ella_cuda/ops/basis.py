"""Basis functions between anchors and positions: what a sparsified layer has instead of a weight per position."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ella_cuda.ops._cases import KernelCase, cases, normal
from ella_cuda.ops._precision import without_autocast
from ella_cuda.ops.gaussian_project import gaussian_matrix, gaussian_project

INTERPOLATION_NOISE = 0.01  # sigma of basis_matrix
# Larger ones count as this one: exp(-w^2 r^2 / 2) is 0 for every distance r above 1e-28, and w r still is a float32.
LARGEST_INVERSE_LENGTHSCALE = 1e30


def basis_matrix(
    points: Tensor, anchors: Tensor, inverse_lengthscale: Tensor | float, kind: str = "interpolating"
) -> Tensor:
    r"""The values of the basis functions of A anchors at X positions.

    .. math:: K_{ax} = \exp(-\tfrac12 \omega^2 \lVert p_x - q_a \rVert^2), \qquad
        \Psi = K_{ax} \text{ (exponential)}, \quad \Psi = (K_{aa} + \sigma^2 I)^{-1} K_{ax} \text{ (interpolating)}

    The second is the mean of a Gaussian process through the values at the anchors with noise of standard deviation
    :math:`\sigma = 0.01`, as published: its row a is what a value of one at anchor a adds to every position. Computed in float64
    whatever the dtype: :math:`K_{aa} + \sigma^2 I` has a condition number of up to :math:`A / \sigma^2`, anchors on one spot
    and :math:`\omega = 0` (where :math:`\Psi = 1 / (A + \sigma^2)` everywhere) included. Differentiable to any order in all
    three tensors.

    Args:
        points: ``(X, P)``, coordinates of the positions; P is 2 for images.
        anchors: ``(A, P)``, of the points' dtype (float32 or float64).
        inverse_lengthscale: :math:`\omega \ge 0`, a number or a floating-point tensor of one element, in units of one over
            those of the coordinates. A value so large that all of K between different places underflows gives zeros there; above
            1e30 it counts as that.
        kind: ``"exponential"`` or ``"interpolating"``.

    Returns:
        ``(A, X)``, of the points' dtype.

    Raises:
        TypeError: points or anchors are no tensors of float32 or float64, or inverse_lengthscale is no number or floating-point
            tensor.
        ValueError: a shape, dtype, device or the kind does not fit, or inverse_lengthscale is negative or not finite. A tensor
            on a GPU is not looked at, as that would wait for the GPU: there a negative value counts as positive, infinity as
            very large, and NaN gives NaN.

    Source: van der Ouderaa, Immer, van der Wilk, "Learning Layer-wise Equivariances Automatically using Gradients", NeurIPS
    2023, eq. 6 (exponential) and the published code's default (interpolating).
    """
    scale = _check("basis_matrix", points, anchors, inverse_lengthscale, kind)
    return _matrix(scale, points, anchors, kind)


def basis_project(
    x: Tensor, points: Tensor, anchors: Tensor, inverse_lengthscale: Tensor | float, kind: str = "interpolating"
) -> Tensor:
    r"""Signals on X positions, projected on the basis functions of A anchors: ``x @ basis_matrix(...).mT``.

    .. math:: \tilde x_a = \sum_x \Psi_{ax}\, x_x

    The exponential kind evaluates the matrix tile by tile while it multiplies (on CUDA 2^23 values of it, or an anchor's, at a time,
    for torch's product, in TF32 where allowed) and stores neither it nor its derivatives, up to second order; from the third order
    on (and for forward over forward) plain torch is used, which does. The interpolating kind builds the matrix, whose solve needs
    float64 whatever x's dtype: solving for the projected signals instead would multiply their rounding by the condition number.
    Equivalent to :func:`basis_project_torch`.

    Args:
        x: ``(..., X)``, float32 or float64.
        points: ``(X, P)``, of x's dtype.
        anchors: ``(A, P)``, of x's dtype.
        inverse_lengthscale: :math:`\omega \ge 0`, as in :func:`basis_matrix`.
        kind: ``"exponential"`` or ``"interpolating"``.

    Returns:
        ``(..., A)``, of x's dtype.

    Raises:
        TypeError, ValueError: as :func:`basis_matrix`, and when x does not fit the points.

    Source: van der Ouderaa, Immer, van der Wilk, "Learning Layer-wise Equivariances Automatically using Gradients", NeurIPS
    2023, section 3.2.
    """
    _check_signal(x, points)
    scale = _check("basis_project", points, anchors, inverse_lengthscale, kind)
    if kind != "exponential":
        with without_autocast(x.device.type):
            return x @ _matrix(scale, points, anchors, kind).mT
    u, v = scale * points.double(), scale * anchors.double()
    if x.dim() == 2:
        return gaussian_project(x, u, v)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return gaussian_project(rows, u, v).reshape(*x.shape[:-1], anchors.shape[0])


def basis_project_torch(
    x: Tensor, points: Tensor, anchors: Tensor, inverse_lengthscale: Tensor | float, kind: str = "interpolating"
) -> Tensor:
    """Plain-torch reference of :func:`basis_project`; stores the ``(A, X)`` basis matrix."""
    return x @ basis_matrix(points, anchors, inverse_lengthscale, kind).mT


def _matrix(scale: Tensor | float, points: Tensor, anchors: Tensor, kind: str) -> Tensor:
    return _KINDS[kind](scale * points.double(), scale * anchors.double()).to(points.dtype)


# the two kinds, of scaled coordinates u (X, P) and v (A, P), float64 -----------------------------------------------------------


def _interpolating(u: Tensor, v: Tensor) -> Tensor:
    noise = torch.eye(v.shape[0], dtype=v.dtype, device=v.device) * INTERPOLATION_NOISE**2
    # The matrix is positive definite, with no eigenvalue below the noise's, so that there is nothing to check, for which a GPU
    # would be waited for. Its derivative is one more solve, those of a Cholesky factor are four.
    return torch.linalg.solve_ex(gaussian_matrix(v, v) + noise, gaussian_matrix(u, v)).result


_KINDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "exponential": gaussian_matrix,
    "interpolating": _interpolating,
}
BASIS_KINDS = tuple(_KINDS)


# arguments ----------------------------------------------------------------------------------------------------------------------


def _check(op: str, points: Tensor, anchors: Tensor, inverse_lengthscale: Tensor | float, kind: str) -> Tensor | float:
    """The inverse lengthscale to scale coordinates with, in float64, once all arguments are found to fit."""
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"{op}: kind must be one of {', '.join(map(repr, _KINDS))}, got {kind!r}.")
    _check_real(op, "points", points, "(X, P)")
    if points.dim() != 2:
        raise ValueError(
            f"{op}: points must have shape (X, P), got {tuple(points.shape)}; pass a row for each position."
        )
    _check_tensor(op, "anchors", anchors, "(A, P)")
    if anchors.dim() != 2 or anchors.shape[1] != points.shape[1]:
        raise ValueError(
            f"{op}: anchors must have shape (A, P) with the P = {points.shape[1]} of points, got {tuple(anchors.shape)}; "
            "pass a row for each anchor."
        )
    _check_same(op, "anchors", anchors, "points", points)
    if not isinstance(inverse_lengthscale, Tensor):
        if isinstance(inverse_lengthscale, bool) or not isinstance(inverse_lengthscale, Real):
            raise TypeError(
                f"{op}: inverse_lengthscale must be a number or a tensor, got {type(inverse_lengthscale).__name__}."
            )
        _check_value(op, inverse_lengthscale)
        return min(float(inverse_lengthscale), LARGEST_INVERSE_LENGTHSCALE)
    if not inverse_lengthscale.is_floating_point():
        raise TypeError(f"{op}: inverse_lengthscale must be floating point, got {inverse_lengthscale.dtype}.")
    if inverse_lengthscale.device != points.device and inverse_lengthscale.device.type != "cpu":
        raise ValueError(
            f"{op}: inverse_lengthscale must be on the CPU or on the device of points ({points.device}), got "
            f"{inverse_lengthscale.device}; move with inverse_lengthscale.to(points.device)."
        )
    if inverse_lengthscale.numel() != 1:
        raise ValueError(
            f"{op}: inverse_lengthscale must have one element, got shape {tuple(inverse_lengthscale.shape)}; "
            "call once per value, or vmap."
        )
    scale = inverse_lengthscale.double()
    if scale.dim():
        scale = scale.reshape(())
    if _readable(inverse_lengthscale):
        value = inverse_lengthscale.item()
        _check_value(op, value)
        if value <= LARGEST_INVERSE_LENGTHSCALE:
            return scale
    return scale.clamp(max=LARGEST_INVERSE_LENGTHSCALE)


def _check_signal(x: Tensor, points: Tensor) -> None:
    op = "basis_project"
    _check_real(op, "x", x, "(..., X)")
    _check_tensor(op, "points", points, "(X, P)")
    if points.dim() == 2 and (x.dim() == 0 or x.shape[-1] != points.shape[0]):
        raise ValueError(
            f"{op}: x must have shape (..., X) with the X = {points.shape[0]} of points, got {tuple(x.shape)}; flatten the "
            "positions into the last axis, in the order of points."
        )
    _check_same(op, "points", points, "x", x)


def _check_tensor(op: str, name: str, tensor: Tensor, shape: str) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor {shape}, got {type(tensor).__name__}; use torch.as_tensor().")


def _check_real(op: str, name: str, tensor: Tensor, shape: str) -> None:
    _check_tensor(op, name, tensor, shape)
    if tensor.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{op}: {name} must be float32 or float64, got {tensor.dtype}; convert with .float().")


def _check_same(op: str, name: str, tensor: Tensor, reference_name: str, reference: Tensor) -> None:
    if tensor.dtype != reference.dtype:
        raise ValueError(
            f"{op}: {name} must have the dtype of {reference_name} ({reference.dtype}), got {tensor.dtype}; convert with "
            f"{name}.to({reference_name})."
        )
    if tensor.device != reference.device:
        raise ValueError(
            f"{op}: {name} must be on the device of {reference_name} ({reference.device}), got {tensor.device}; move with "
            f"{name}.to({reference_name})."
        )


def _check_value(op: str, value: float) -> None:
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError(
            f"{op}: inverse_lengthscale must be at least 0 and finite, got {value}; learn its logarithm, which may "
            "be anything."
        )


def _readable(tensor: Tensor) -> bool:
    """Whether the tensor's value is there to be read: on the CPU, and not that of a tracer or a transform."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and _get_current_dispatch_mode() is None
    )


def kernel_cases() -> list[KernelCase]:
    def inputs() -> tuple[Tensor, ...]:
        return normal(50, 40), 3 * normal(40, 2), 3 * normal(20, 2), torch.tensor(0.6, dtype=torch.float64)

    return cases(
        "basis_project",
        inputs,
        lambda *inputs: basis_project(*inputs, "exponential"),  # the other kind is torch's own on every device
        lambda *inputs: basis_project_torch(*inputs, "exponential"),
        derivatives=2,
    )
