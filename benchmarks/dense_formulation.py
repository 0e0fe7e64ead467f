"""The published formulation of factored layers, in plain torch: block-diagonal structure stored as dense matrices.

F-FC is written as two ordinary linear layers, with weights ``(D, C X)`` and ``(Y, D C)``. Their inputs are the activations of each
channel in a slice of their own and zeros elsewhere, C and D times as many numbers; their Kronecker factors are the dense matrices
of ``(C X)^2`` and ``(D C)^2`` entries that such inputs give.

Source: van der Ouderaa et al., NeurIPS 2023, appendix, and the released code's layers.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ella_cuda.laplace import Dense, FactorShape, Rows, SecondMoment, register
from ella_cuda.laplace.factors import Jacobian
from ella_cuda.laplace.rules import FactoredLinear2dRule
from ella_cuda.nn import FactoredLinear2d


def block_diagonal(rows: Tensor) -> Tensor:
    """``(N, G, k) -> (N, G, G*k)``: row g in slice g, zeros elsewhere."""
    return torch.diag_embed(rows.mT, dim1=1, dim2=2).flatten(2)


def factored_linear_dense(
    x: Tensor, weight_in: Tensor, weight_out: Tensor, bias_in: Tensor, bias_out: Tensor
) -> Tensor:
    """:func:`ella_cuda.ops.factored_linear` as two linear layers on dense block-diagonal activations."""
    z = F.linear(block_diagonal(x), weight_in.flatten(1), bias_in)  # (N, C, D)
    return F.linear(block_diagonal(z.mT), weight_out.permute(2, 0, 1).flatten(1), bias_out)


def kron_accumulate_dense_(factor: Tensor, rows: Tensor) -> None:
    """``factor += sum_rows row row^T`` for the block-diagonal copies of ``rows`` ``(N, G, k)``; factor ``(G*k, G*k)``."""
    dense = block_diagonal(rows).flatten(0, 1)
    factor += dense.mT @ dense  # in the rows' precision, summed in the factor's


class DenseFactoredLinear2d(FactoredLinear2d):
    """An F-FC layer whose curvature rule stores and decomposes dense input sides."""


@register(DenseFactoredLinear2d)
class DenseFactoredLinear2dRule(FactoredLinear2dRule):
    """As the package's rule, but for the input sides of the two weights; everything else is shared, so that they alone make
    the difference."""

    def shapes(self) -> dict[str, FactorShape]:
        shapes = super().shapes()
        for name in ("weight_in", "weight_out"):
            shape = shapes[name]
            shapes[name] = FactorShape(1, shape.groups * shape.inputs, shape.outputs, 1)
        return shapes

    def input_rows(self, x: Tensor) -> dict[str, Rows]:
        return {name: OfOneBlock(rows.dense()) for name, rows in super().input_rows(x).items()}

    def jacobians(self, arguments: Sequence[Any], gradient: Tensor) -> dict[str, Jacobian]:
        raise NotImplementedError("The dense input sides are a baseline of fits; it does not predict.")


class OfOneBlock(Dense):
    """Rows of blocks, added to one dense block."""

    def gram_(self, moment: SecondMoment, alpha: float = 1.0) -> None:
        rows = self.values[:, 0]
        kron_accumulate_dense_(moment.total[0], rows)
        moment.count(rows.shape[0] * rows.shape[1])


def with_dense_factors(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of a network whose F-FC layers have dense input sides."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if type(module) is FactoredLinear2d:
            module.__class__ = DenseFactoredLinear2d
    return model
