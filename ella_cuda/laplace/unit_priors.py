r"""A prior precision for each output unit of a weight, with Kronecker factors.

With a block's curvature :math:`A \otimes B`, B of the outputs, and the prior's precision :math:`I \otimes D`, D diagonal,

.. math::
    s A \otimes B + I \otimes D = (I \otimes D^{1/2})\, (s A \otimes \tilde B + I)\, (I \otimes D^{1/2}),
    \quad \tilde B = D^{-1/2} B D^{-1/2} = W\, \mathrm{diag}(\mu)\, W^T,

so that eigenvalues :math:`\lambda_k \mu_m` give the log determinant, and the posterior's covariance is that of eigenvectors
:math:`U \otimes D^{-1/2} W`, which are not orthogonal, under a prior of precision 1. The data determine
:math:`\gamma_j = \sum_m W_{jm}^2 \sum_k s \lambda_k \mu_m / (s \lambda_k \mu_m + 1)` elements of unit j.

Source: Dhahri et al., "Shaving weights with Occam's razor", NeurIPS 2024 (unit-wise priors); MacKay, "Bayesian interpolation", 1992.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ella_cuda import ops
from ella_cuda.laplace.factors import FactorShape, KroneckerFactor
from ella_cuda.laplace.posterior import Eigenbasis, KronPosterior
from ella_cuda.laplace.rules.base import Rule


def unit_shapes(rules: Sequence[Rule], names: Sequence[str]) -> dict[str, FactorShape]:
    """The shapes of the named parameters, in order, before or after a fit; a factor merged with that of the transpose has the same units."""
    found = {rule.full_name(n): s for rule in rules for n, s in rule.shapes().items() if n in rule.trainable}
    return {name: found[name] for name in names}


class Side(NamedTuple):
    """Of one factor: its ``shape``, the input side's eigenvalues ``(G or 1, a)``, the output side ``(G or 1, b, b)`` and its eigenvalues."""

    shape: FactorShape
    inputs: Tensor
    outputs: Tensor
    output_values: Tensor


def sides_of(factors: Iterable[KroneckerFactor]) -> list[Side]:
    """Float64, differentiable where bases learn. Raises as :meth:`KroneckerFactor.eigenvalues`."""
    pairs = [(factor, *factor.eigenvalues()) for factor in factors]
    return [Side(factor.shape, inputs, factor.outputs, values) for factor, inputs, values in pairs]


def _whitened_outputs(shape: FactorShape, outputs: Tensor, precision: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of the output side in the prior's metric, ``(G or 1, b)`` and ``(G or 1, b, b)``."""
    root = shape.over_units(precision)[:, 0].rsqrt()  # (G or 1, b)
    values, vectors = torch.linalg.eigh(root[:, :, None] * outputs * root[:, None])
    return values.clamp(min=0), vectors


def unit_evidence(
    sides: Sequence[Side], log_precision: Tensor, log_scale: Tensor, square_norms: Tensor
) -> ops.KronEvidence:
    """:func:`ella_cuda.ops.kron_evidence` of output units: log precisions and squared norms ``(U,)`` are of all tensors' units, as slopes and
    effective parameters are. The value is differentiable once in the log precisions and the scale; twice where no eigenvalues coincide."""
    precision, scale = log_precision.exp(), log_scale.exp()
    value, effective = precision.new_zeros(()), []
    for side, own in zip(sides, precision.split([side.shape.unit_count for side in sides]), strict=True):
        shape, inputs = side.shape, scale * side.inputs[:, :, None]
        if "b" in shape.unit_axes:
            values, vectors = _whitened_outputs(shape, side.outputs, own)
            ratio = inputs * values[:, None]  # (G, a, b)
        else:
            ratio = inputs * side.output_values[:, None] / shape.over_units(own)
        value = value + ratio.log1p().sum()
        with torch.no_grad():
            shares = ratio / (1 + ratio)
            if "b" in shape.unit_axes:
                shares = shares.sum(1, keepdim=True) @ vectors.square().mT
            effective.append(shape.unit_sums(shares))
    gamma, weighted = torch.cat(effective), precision * square_norms
    return ops.KronEvidence(value + weighted.sum(), weighted - gamma, gamma)


def normalised(precision: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The geometric mean of each tensor's precisions, and each precision in its units: ``(B,)`` and ``(U,)``."""
    logs = precision.log().split(counts)
    means = [part.mean() for part in logs]
    return torch.stack(means).exp(), torch.cat([part - m for part, m in zip(logs, means, strict=True)]).exp()


@torch.no_grad()
def whitened(
    bases: Mapping[str, Eigenbasis], factors: Mapping[str, KroneckerFactor], precision: Tensor
) -> dict[str, Eigenbasis]:
    """Bases V, not orthogonal, with ``V^T H V`` the values and ``V^T D V`` the identity, D of these precisions, one per unit."""
    found = {}
    counts = [basis.shape.unit_count for basis in bases.values()]
    for (name, basis), own in zip(bases.items(), precision.split(counts), strict=True):
        shape, (inputs, outputs) = basis.shape, basis.values
        weights = shape.over_units(own)
        if "b" in shape.unit_axes:
            outputs, vectors = _whitened_outputs(shape, factors[name].outputs, own)
            vectors = weights[:, 0, :, None].rsqrt() * vectors
            basis = basis._replace(vectors_out=vectors.to(basis.vectors_out.dtype))
        elif shape.unit_axes:
            inputs, root = inputs / weights[:, :, 0], weights.rsqrt().to(basis.vectors_out.dtype)
            basis = basis._replace(vectors_in=root if basis.vectors_in is None else root * basis.vectors_in)
        found[name] = basis._replace(values=type(basis.values)(inputs, outputs))
    return found


class UnitPosterior(KronPosterior):
    r"""The precision :math:`s H + c D` of a posterior with prior precisions c D, one per output unit, where D's geometric mean is 1 in each
    tensor.

    Args:
        bases: of :func:`whitened`, for D.
        prior_precision: c, one value per tensor, float64.
        scale, dtype: as of :class:`KronPosterior`.
        weights: D, one value per unit.
    """

    def __init__(
        self,
        bases: Mapping[str, Eigenbasis],
        prior_precision: Tensor,
        scale: Tensor,
        dtype: torch.dtype,
        weights: Tensor,
    ) -> None:
        super().__init__(bases, prior_precision, scale, dtype)
        self._weights = weights

    def of(self, own: Sequence[Tensor]) -> UnitPosterior:
        return UnitPosterior(self.bases, *own, self.dtype, self._weights)

    def bmm(self, vectors: Tensor, exponent: float = -1) -> Tensor:
        """ValueError where the exponent is neither 1 nor -1."""
        if self._is_covariance(exponent):
            return super().bmm(vectors, exponent)
        weights = self._of_elements()
        return (weights * super().bmm(weights * vectors.double(), 1)).to(vectors.dtype)

    def diag(self, exponent: float = 1) -> Tensor:
        """ValueError where the exponent is neither 1 nor -1."""
        found = super().diag(exponent)
        return found if self._is_covariance(exponent) else (self._of_elements().square() * found).to(self.dtype)

    def _is_covariance(self, exponent: float) -> bool:
        if exponent not in (1, -1):
            raise ValueError(
                f"exponent must be 1 or -1 of a posterior with a prior precision per output unit, got {exponent!r}; sample() has a root."
            )
        return exponent == -1

    def _of_elements(self) -> Tensor:
        """D, ``(P,)``."""
        counts, shapes = [shape.unit_count for shape in self.shapes.values()], self.shapes.values()
        return torch.cat([s.of_elements(own) for s, own in zip(shapes, self._weights.split(counts), strict=True)])
