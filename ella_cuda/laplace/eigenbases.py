"""The eigenvalues of all factors as one array, and the eigenvectors, in which a posterior's covariance is a diagonal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ella_cuda import ops
from ella_cuda.distributed import Ranks
from ella_cuda.laplace.eigenvalues import eigenbases_of_all
from ella_cuda.laplace.factors import FactorShape, KroneckerFactor
from ella_cuda.laplace.second_moment import SecondMoment
from ella_cuda.ops._precision import in_own_precision


class Eigenbasis(NamedTuple):
    r"""The eigenvectors of a parameter tensor's curvature, in block g
    :math:`(U_g \otimes V_g)\, \mathrm{diag}(\lambda_g \otimes \mu_g)\, (U_g \otimes V_g)^T`.

    Attributes:
        shape: of the factor.
        parameter_shape: of the tensor.
        values_in: :math:`\lambda`, ``(G, a)``, float64. values_out: :math:`\mu`, ``(G or 1, b)``, float64.
        vectors_in: U, ``(G, a, a)``, of the parameter's dtype; None where it is the number one.
        vectors_out: V, ``(G or 1, b, b)``.
    """

    shape: FactorShape
    parameter_shape: torch.Size
    values_in: Tensor
    values_out: Tensor
    vectors_in: Tensor | None
    vectors_out: Tensor

    def precisions(self, prior: Tensor, scale: Tensor) -> Tensor:
        r""":math:`s \lambda \mu + \delta`, ``(G, a, b)``, float64."""
        return scale * self.values_in[:, :, None] * self.values_out[:, None] + prior

    def rotated(self, blocks: Tensor) -> Tensor:
        """``(..., G, a, b)`` into the basis."""
        return self.outputs_in(self.inputs_in(blocks))

    @in_own_precision
    def back(self, blocks: Tensor) -> Tensor:
        """``(..., G, a, b)`` out of the basis."""
        blocks = blocks if self.vectors_in is None else self.vectors_in.to(blocks.dtype) @ blocks
        return blocks @ _whole(self.vectors_out).to(blocks.dtype).mT

    @in_own_precision
    def inputs_in(self, blocks: Tensor) -> Tensor:
        """The input side alone of ``(..., G, a, b)``."""
        return blocks if self.vectors_in is None else self.vectors_in.to(blocks.dtype).mT @ blocks

    @in_own_precision
    def outputs_in(self, blocks: Tensor) -> Tensor:
        """The output side alone of ``(..., G, a, b)``."""
        return blocks @ _whole(self.vectors_out).to(blocks.dtype)

    def input_rows_in(self, rows: Tensor, blocks: range | None = None) -> Tensor:
        """The rows ``(..., G, a)`` of the input side."""
        return rows if self.vectors_in is None else _rows_in(rows, _some(self.vectors_in, blocks))

    def output_rows_in(self, rows: Tensor, blocks: range | None = None) -> Tensor:
        """The rows ``(..., G, b)`` of the output side."""
        return _rows_in(rows, _some(self.vectors_out, blocks))

    def restricted(self, blocks: range | None) -> Eigenbasis:
        """The basis of these blocks alone."""
        if blocks is None or len(blocks) == self.shape.groups:
            return self
        vectors_in = None if self.vectors_in is None else _some(self.vectors_in, blocks)
        return self._replace(
            values_in=_some(self.values_in, blocks),
            values_out=_some(self.values_out, blocks),
            vectors_in=vectors_in,
            vectors_out=_some(self.vectors_out, blocks),
        )


def _some(of_blocks: Tensor, blocks: range | None) -> Tensor:
    """The part of these blocks; what all share as it is."""
    whole = blocks is None or of_blocks.shape[0] == 1
    return of_blocks if whole else of_blocks[blocks.start : blocks.stop]


def _whole(vectors: Tensor) -> Tensor:
    """Vectors that all blocks share without their axis, so that a product with them is one of all rows."""
    return vectors[0] if vectors.shape[0] == 1 else vectors


def _rows_in(rows: Tensor, vectors: Tensor) -> Tensor:
    vectors = _whole(vectors).to(rows.dtype)
    if vectors.dim() == 2:
        return rows @ vectors
    return torch.einsum("...gi,gij->...gj", rows, vectors)


def eigenbases(
    factors: Mapping[str, KroneckerFactor], parameter_shapes: Mapping[str, torch.Size]
) -> dict[str, Eigenbasis]:
    """The eigenbases of all factors; factors that share a side have one decomposition of it.

    Raises:
        FloatingPointError, ArithmeticError: see :meth:`SecondMoment.eigenvalues`.
        torch.linalg.LinAlgError: a block's eigenvectors did not converge.
    """
    sides = {m: None for f in factors.values() for m in (f.input_moment, f.output_moment) if m is not None}
    with torch.no_grad():
        SecondMoment.decompose_all(sides)  # has words for what is wrong with a factor
        vectors = eigenbases_of_all([m.projected() for m in sides], [m.rank for m in sides])
        found = {m: (m.eigenvalues(), v.to(m.dtype)) for m, (_, v) in zip(sides, vectors, strict=True)}
    result = {}
    for name, factor in factors.items():
        values_out, vectors_out = found[factor.output_moment]
        values_in, vectors_in = values_out.new_ones(factor.shape.groups, 1), None
        if factor.input_moment is not None:
            values_in, vectors_in = found[factor.input_moment]
            values_in = values_in / factor.n_data
        vectors_in = None if factor.shape.inputs == 1 else vectors_in
        result[name] = Eigenbasis(factor.shape, parameter_shapes[name], values_in, values_out, vectors_in, vectors_out)
    return result


class Spectra:
    """Eigenvalues of factors as :func:`ella_cuda.ops.kron_evidence` takes them, packed once for as long as no factor changes.

    Args:
        factors: of all parameter tensors, in their order.
    """

    def __init__(self, factors: Iterable[KroneckerFactor]) -> None:
        self._factors = list(factors)
        self._moments = list(
            {m: None for f in self._factors for m in (f.input_moment, f.output_moment) if m is not None}
        )
        self._packed: ops.KronSpectra | None = None
        self._rows: list[int] = []  # in every moment when they were packed

    def decompose_together(self, ranks: Ranks) -> None:
        """Have the eigenvalues of all factors, each block's by one rank; raises as :meth:`packed`, on all ranks."""
        with torch.inference_mode(False), torch.no_grad():
            SecondMoment.decompose_together(self._moments, ranks)

    def packed(self) -> ops.KronSpectra:
        """Constants: no gradient leads to a basis, whose state is taken to be that of the first call.

        Raises:
            FloatingPointError, ArithmeticError: see :meth:`ella_cuda.laplace.second_moment.SecondMoment.eigenvalues`.
        """
        rows = [moment.rows for moment in self._moments]
        if self._packed is None or rows != self._rows:
            with torch.inference_mode(False), torch.no_grad():  # later calls may want gradients
                SecondMoment.decompose_all(self._moments)
                self._packed, self._rows = ops.pack_spectra([f.eigenvalues() for f in self._factors]), rows
        return self._packed


def eigenbases_of(la: Any) -> dict[str, Eigenbasis]:
    """The eigenbases of all factors, by parameter name, computed once for a fit."""
    la.fitted_model.require_fit()
    if la._eigenbases is None:
        shapes = {name: la.model.get_parameter(name).shape for name in la.parameter_names}
        la._eigenbases = eigenbases(la._factors, shapes)
    return la._eigenbases
