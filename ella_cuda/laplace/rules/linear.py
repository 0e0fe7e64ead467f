"""Fully connected layers."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ella_cuda.laplace.factors import FactorShape
from ella_cuda.laplace.rules.base import Rule, register


@register(nn.Linear)
class LinearRule(Rule):
    """:class:`torch.nn.Linear` on ``(N, in)``, or on ``(N, ..., in)`` or ``(T, N, ..., in)`` with T shared positions (KFAC-expand).

    ``weight``: A = mean over data of the sum over positions of x xᵀ, B = sum over data, 1/T of the sum over positions
        of g gᵀ; a block
    index is (input, output). ``bias``: B = sum over data of s sᵀ with s the sum of g over positions, the exact GGN
    block.
    """

    differentiates = True
    batch_second = True
    takes_reduced = True

    def shapes(self) -> dict[str, FactorShape]:
        a, b = self.module.in_features, self.module.out_features
        return {"weight": FactorShape(1, a, b, 1), "bias": FactorShape.bias(b)}

    def shares_outputs(self) -> dict[str, str]:
        # Without shared positions both sides are the same sum; vjp separates them when it meets shared positions.
        return {"bias": "weight"} if {"bias", "weight"} <= set(self.trainable) else {}

    def inputs(self, x: Tensor) -> None:
        if x.dim() < 2:
            raise ValueError(
                f"{self.label}: expected an input (N, ..., {self.module.in_features}), got shape {tuple(x.shape)}; add "
                "a batch axis."
            )
        if "weight" in self.factors:
            self.factors["weight"].input_moment.add(x.reshape(-1, 1, x.shape[-1]))

    def vjp(self, gradient: Tensor, input_shape: torch.Size | None) -> Tensor | None:
        positions = math.prod(gradient.shape[2:-1])
        weight, bias = self.factors.get("weight"), self.factors.get("bias")
        if weight is not None and bias is not None and positions != 1 and bias.output_moment is weight.output_moment:
            bias.output_moment = weight.output_moment.clone(f"{self.full_name('bias')} (output side)")
        if weight is not None:
            weight.output_moment.add(gradient.reshape(-1, 1, gradient.shape[-1]), 1 / max(positions, 1))
        if bias is not None and (weight is None or bias.output_moment is not weight.output_moment):
            bias.output_moment.add(
                gradient.flatten(2, -2).sum(2).reshape(-1, 1, gradient.shape[-1])
                if positions != 1
                else gradient.reshape(-1, 1, gradient.shape[-1])
            )
        return None if input_shape is None else gradient @ self.module.weight.detach()
