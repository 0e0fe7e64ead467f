"""Smooth functions on a grid of positions, given by their values at few anchors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from ella_cuda import ops
from ella_cuda.nn._sizes import Size, as_count, as_size
from ella_cuda.ops._precision import without_autocast
from ella_cuda.ops.basis import BASIS_KINDS

LEAST_SQUARES_CUTOFF = 1e-2  # singular values of the basis below this share of the largest are not fitted with
Scale = float | Tensor


class SpatialBasis(nn.Module):
    r"""Basis functions :math:`\Psi` (A, X) of a sparsified layer: functions on ``H x W`` positions from values at A anchors.

    The inverse lengthscale and the anchors shape the layer as prior precisions do: they are hyperparameters, learned by the evidence
    (:func:`ella_cuda.marglik_training`, ``learn``) and not by the training loss. So they are buffers, not parameters.

    Buffers, to be changed by assignment or in place (not through ``.data``, which leaves no trace):
        points: ``(X, 2)``, the grid's rows and columns in pixels, centred: ``-(H-1)/2 ... (H-1)/2``.
        anchors: ``(A, 2)``, in the same units, drawn uniformly over the grid's extent if not given.
        inverse_lengthscale: 0-dim, :math:`\omega` per pixel; at 0 every function is constant.

    Args:
        size: H and W, or one number for both.
        num_anchors: A; None is that of ``anchors`` or, where they are not given either, half the positions, rounded up.
        kind: "interpolating" or "exponential", see :func:`ella_cuda.ops.basis_matrix`.
        inverse_lengthscale: :math:`\omega` at the start, at least 0, a number or a tensor of one element.
        anchors: where they are at the start, ``(A, 2)``, copied; None draws them.
        device, dtype: of the buffers, float32 or float64; None is torch's default.

    Raises:
        TypeError: anchors are no real tensor, or inverse_lengthscale is neither a number nor a tensor.
        ValueError: a size or num_anchors is not positive; kind is unknown; inverse_lengthscale is negative or not finite; anchors
            are of another shape or not finite.

    Source: van der Ouderaa et al., NeurIPS 2023, section 3.2 and eq. 6.
    """

    points: Tensor
    anchors: Tensor
    inverse_lengthscale: Tensor

    def __init__(
        self,
        size: Size,
        num_anchors: int | None = None,
        kind: str = "interpolating",
        inverse_lengthscale: Scale = 1.0,
        anchors: Tensor | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.size, self.kind = as_size("size", size), kind
        if not isinstance(kind, str) or kind not in BASIS_KINDS:
            raise ValueError(f"basis must be one of {', '.join(BASIS_KINDS)}, got {kind!r}.")
        count = _count(num_anchors, anchors, math.prod(self.size))
        # Where they start, beside the buffers, in which they change.
        self._start = (
            as_scale("inverse_lengthscale", inverse_lengthscale),
            None if anchors is None else anchors.detach().clone(),
        )
        kind_of = {"device": device, "dtype": torch.get_default_dtype() if dtype is None else dtype}
        self.register_buffer("points", torch.empty(math.prod(self.size), 2, **kind_of))
        self.register_buffer("anchors", torch.empty(count, 2, **kind_of))
        self.register_buffer("inverse_lengthscale", torch.empty((), **kind_of))
        self._kept: tuple[Versions, Tensor] | None = None
        self._held: Tensor | None = None
        self.reset()

    @property
    def num_anchors(self) -> int:
        return self.anchors.shape[0]

    @property
    def num_points(self) -> int:
        return self.points.shape[0]

    def reset(self) -> None:
        """Put the grid, the inverse lengthscale and the anchors to where they start, whatever the buffers hold, such as uninitialised
        memory after ``to_empty``; anchors that were not given are drawn anew."""
        scale, anchors = self._start
        with torch.no_grad():
            self.points.copy_(_grid(*self.size, self.points))
            self.inverse_lengthscale.fill_(scale)
            if anchors is not None:
                self.anchors.copy_(anchors)
        if anchors is None:
            self.reset_anchors()

    def reset_anchors(self) -> None:
        """Draw the anchors anew, from torch's global generator."""
        with torch.no_grad():
            half = (self.anchors.new_tensor(self.size) - 1) / 2
            self.anchors.uniform_(-1, 1).mul_(half)

    def matrix(self) -> Tensor:
        r""":math:`\Psi`, ``(A, X)``, differentiable in the anchors and the inverse lengthscale.

        Not to be written to: where no gradient is wanted it is kept until one of them changes. Training makes thousands of steps between
        two evidence steps.
        """
        if self._held is not None:
            return self._held
        buffers = (self.points, self.anchors, self.inverse_lengthscale)
        if not _may_be_kept(buffers):
            return ops.basis_matrix(*buffers, self.kind)
        if self._kept is None or self._kept[0] != Versions(buffers):
            self._kept = Versions(buffers), ops.basis_matrix(*buffers, self.kind)
        return self._kept[1]

    def versions(self) -> Versions:
        """What the anchors and the inverse lengthscale are now, to be compared with what they will be."""
        return Versions((self.anchors, self.inverse_lengthscale))

    def learns(self) -> bool:
        """Whether the anchors or the inverse lengthscale require a gradient."""
        return self.anchors.requires_grad or self.inverse_lengthscale.requires_grad

    @contextmanager
    def held(self) -> Iterator[Tensor]:
        """For the duration of the context the matrix is a leaf of the graph, which is given: one backward pass then differentiates in
        the matrix, and many can share the way from there to the anchors."""
        with torch.no_grad():
            self._held = self.matrix().clone().requires_grad_()
        try:
            yield self._held
        finally:
            self._held = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None, "_held": None}  # copies and files do without

    def project(self, x: Tensor) -> Tensor:
        """``x @ matrix().T``: ``(..., X) -> (..., A)``."""
        if self.kind == "exponential" and self._held is None:  # evaluated on the fly
            return ops.basis_project(x, self.points, self.anchors, self.inverse_lengthscale, self.kind)
        with without_autocast(x.device.type):
            return x @ self.matrix().T

    def expand(self, values: Tensor) -> Tensor:
        """The functions with these values at the anchors: ``values @ matrix()``, ``(..., A) -> (..., X)``."""
        if self.kind == "exponential" and self._held is None:  # symmetric in points and anchors
            return ops.basis_project(values, self.anchors, self.points, self.inverse_lengthscale, self.kind)
        with without_autocast(values.device.type):
            return values @ self.matrix()

    def fit(self, functions: Tensor) -> Tensor:
        """Values whose expansion is nearest to the given functions, by least squares in float64: ``(..., X) -> (..., A)``.

        Directions in which the basis is weaker than 0.01 of its strongest (singular values) are left out: between anchors that nearly
        coincide they would take values of any size.

        Raises:
            TypeError: functions are not floating point.
        """
        if not functions.is_floating_point():
            raise TypeError(f"SpatialBasis.fit: functions must be floating point, got {functions.dtype}.")
        with torch.no_grad(), without_autocast(functions.device.type):
            psi = self.matrix().double()
            squares, directions = torch.linalg.eigh(psi @ psi.T)
            kept = squares > LEAST_SQUARES_CUTOFF**2 * squares[-1]
            inverse = (directions * torch.where(kept, 1 / squares, 0.0)) @ directions.T
            return (functions.detach().double() @ psi.T @ inverse).to(functions.dtype)

    def residual(self, functions: Tensor, values: Tensor) -> float:
        """``|functions - expand(values)| / |functions|`` in the Euclidean norm over all entries; 0 where both are zero.
        ValueError where functions ``(..., X)`` and values ``(..., A)`` have other axes."""
        if functions.shape[:-1] != values.shape[:-1]:
            raise ValueError(
                f"SpatialBasis.residual: functions and values must have the same axes but the last, got {tuple(functions.shape)} and "
                f"{tuple(values.shape)}."
            )
        with torch.no_grad():
            difference = (functions - self.expand(values)).double().norm()
            norm = functions.double().norm()
            return float(difference / norm) if norm > 0 else float(difference)

    def extra_repr(self) -> str:
        return f"{self.size}, num_anchors={self.num_anchors}, kind={self.kind!r}"


class Versions:
    """Tensors and how often each has been written, by autograd's count: equal as long as they are the same, unchanged tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors, self.writes = tuple(tensors), [t._version for t in tensors]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Versions):
            return NotImplemented
        same = all(mine is theirs for mine, theirs in zip(self.tensors, other.tensors, strict=True))
        return same and self.writes == other.writes

    __hash__ = None  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        since = [t._version - written for t, written in zip(self.tensors, self.writes, strict=True)]
        return {"tensors": self.tensors, "written_since": since}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy or from a file: autograd counts the writes of copied tensors anew."""
        self.tensors = state["tensors"]
        self.writes = [t._version - since for t, since in zip(self.tensors, state["written_since"], strict=True)]


def as_scale(name: str, value: Scale) -> float:
    """An inverse lengthscale as a float.

    Raises:
        TypeError: neither a number nor a tensor. ValueError: a tensor of several elements; negative or not finite.
    """
    if isinstance(value, bool) or not isinstance(value, (Real, Tensor)):
        raise TypeError(f"{name} must be a number or a tensor of one element, got {type(value).__name__}.")
    if isinstance(value, Tensor) and (value.numel() != 1 or value.is_complex()):
        raise ValueError(
            f"{name} must be a number or a real tensor of one element, got {value.dtype} of shape {tuple(value.shape)}."
        )
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be at least 0 and finite, got {float(value)!r}.")
    return float(value)


def _count(num_anchors: int | None, anchors: Tensor | None, positions: int) -> int:
    """The number of anchors, once what is given of it and of them is found to fit."""
    if num_anchors is not None:
        as_count("num_anchors", num_anchors)
    if anchors is None:
        return -(-positions // 2) if num_anchors is None else num_anchors
    if not isinstance(anchors, Tensor):
        raise TypeError(
            f"anchors must be a tensor (A, 2) of rows and columns in centred pixels, got {type(anchors).__name__}; use torch.tensor()."
        )
    if anchors.dim() != 2 or anchors.shape[1] != 2 or not anchors.shape[0]:
        raise ValueError(
            f"anchors must have shape (A, 2), a row and a column in centred pixels for each, got {tuple(anchors.shape)}."
        )
    if not anchors.is_floating_point():
        raise TypeError(f"anchors must be floating point, got {anchors.dtype}; convert with .float().")
    if num_anchors not in (None, anchors.shape[0]):
        raise ValueError(
            f"anchors must be num_anchors = {num_anchors} rows, got {anchors.shape[0]}; leave num_anchors out."
        )
    if not anchors.isfinite().all():
        raise ValueError("anchors must be finite, got inf or nan among them.")
    return anchors.shape[0]


def _may_be_kept(buffers: Sequence[Tensor]) -> bool:
    if (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch.is_inference_mode_enabled()
        or torch._C._are_functorch_transforms_active()
    ):
        return False
    wanted = torch.is_grad_enabled() and any(b.requires_grad for b in buffers)
    return not wanted and all(type(b) is Tensor and not b.is_inference() for b in buffers)


def _grid(height: int, width: int, like: Tensor) -> Tensor:
    """Centred pixel coordinates of the positions in row-major order, ``(H*W, 2)``, of a tensor's dtype and on its device."""
    rows, columns = (torch.arange(n, device=like.device, dtype=like.dtype) - (n - 1) / 2 for n in (height, width))
    return torch.cartesian_prod(rows, columns)
