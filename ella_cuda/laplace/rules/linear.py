"""Fully connected layers."""

from __future__ import annotations

import math

from torch import Tensor, nn

from ella_cuda.laplace.call import Call
from ella_cuda.laplace.factors import FactorShape
from ella_cuda.laplace.rows import Dense, Rows
from ella_cuda.laplace.rules.base import Rule, register
from ella_cuda.nn._autocast import full


@register(nn.Linear)
class LinearRule(Rule):
    """:class:`torch.nn.Linear` on ``(N, in)``, or on ``(N, ..., in)`` or ``(T, N, ..., in)`` with T shared positions.

    ``weight``: A = mean over data of the sum over positions of x xᵀ, B = sum over data, 1/T of the sum over positions of g gᵀ; with
    "reduce" A = mean over data of m mᵀ with m the mean of x over positions, B = sum over data of s sᵀ with s the sum of g. Block index
    (input, output). ``bias``: B = sum over data of s sᵀ, the exact GGN block.
    """

    def shapes(self) -> dict[str, FactorShape]:
        a, b = self.module.in_features, self.module.out_features
        return {"weight": FactorShape(1, a, b, 1), "bias": FactorShape.bias(b)}

    def shares_outputs(self) -> dict[str, str]:
        # Without shared positions, or with "reduce", both sides are the same sum.
        return {"bias": "weight"} if {"bias", "weight"} <= set(self.trainable) else {}

    def input_rows(self, x: Tensor) -> dict[str, Rows]:
        if x.dim() < 2:
            raise ValueError(
                f"{self.label}: expected an input (N, ..., {self.module.in_features}), got shape {tuple(x.shape)}; add "
                "a batch axis."
            )
        return {"weight": at_positions(x)}

    def output_rows(self, gradient: Tensor, kept: None) -> dict[str, Rows]:
        rows = at_positions(gradient.flatten(0, 1))
        return {"weight": rows, "bias": rows}

    def input_gradient(self, gradient: Tensor, call: Call) -> Tensor:
        return gradient @ self.module.weight.detach()


def at_positions(x: Tensor) -> Dense:
    """The last axis of ``(R, ..., d)`` as rows, the axes between as positions."""
    return Dense(x.reshape(x.shape[0], math.prod(x.shape[1:-1]), 1, x.shape[-1]))


@register(nn.Bilinear)
class BilinearRule(Rule):
    """:class:`torch.nn.Bilinear` on two inputs ``(N, ..., in1)`` and ``(N, ..., in2)``: a linear layer on all products of their entries.

    ``weight``: A = mean over data of the sum over positions of a aᵀ, a the products ``x1[i] x2[j]``; B = sum over data, mean over positions
    of g gᵀ; with "reduce" those of the mean of a and of the sum of g, as for a linear layer. Block index (i and j, output). ``bias``: the
    exact GGN block, as that of a linear layer.
    """

    sees_copies = True  # where a subclass adds to moments: rows are not linear in inputs

    def shapes(self) -> dict[str, FactorShape]:
        m = self.module
        weight = FactorShape(1, m.in1_features * m.in2_features, m.out_features, 1)
        return {"weight": weight, "bias": FactorShape.bias(m.out_features)}

    def input_rows(self, x1: Tensor, x2: Tensor) -> dict[str, Rows]:
        if "weight" not in self.trainable:
            return {}
        x1, x2 = full(x1), full(x2)
        return {"weight": at_positions((x1[..., :, None] * x2[..., None, :]).flatten(-2))}

    def output_rows(self, gradient: Tensor, kept: None) -> dict[str, Rows]:
        rows = at_positions(gradient.flatten(0, 1))
        return {"weight": rows, "bias": rows}
