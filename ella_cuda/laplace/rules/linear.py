"""Fully connected layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ella_cuda.laplace.factors import FactorShape
from ella_cuda.laplace.jacobian import Jacobian
from ella_cuda.laplace.rules.base import Rule, register


@register(nn.Linear)
class LinearRule(Rule):
    """:class:`torch.nn.Linear` on ``(N, in)``, or on ``(N, ..., in)`` or ``(T, N, ..., in)`` with T shared positions.

    ``weight``: A = mean over data of the sum over positions of x xᵀ, B = sum over data, 1/T of the sum over positions of g gᵀ; with
    "reduce" A = mean over data of m mᵀ with m the mean of x over positions, B = sum over data of s sᵀ with s the sum of g. Block index
    (input, output). ``bias``: B = sum over data of s sᵀ, the exact GGN block.
    """

    differentiates = True
    batch_second = True
    takes_reduced = True
    reduces = True
    averages = True

    def shapes(self) -> dict[str, FactorShape]:
        a, b = self.module.in_features, self.module.out_features
        return {"weight": FactorShape(1, a, b, 1), "bias": FactorShape.bias(b)}

    def shares_outputs(self) -> dict[str, str]:
        # Without shared positions, or with "reduce", both sides are the same sum; else vjp separates them when it meets shared positions.
        return {"bias": "weight"} if {"bias", "weight"} <= set(self.trainable) else {}

    def inputs(self, x: Tensor) -> None:
        if x.dim() < 2:
            raise ValueError(
                f"{self.label}: expected an input (N, ..., {self.module.in_features}), got shape {tuple(x.shape)}; add "
                "a batch axis."
            )
        self.positions = math.prod(x.shape[1:-1])
        if "weight" in self.factors:
            if self.approximation == "reduce" and x.dim() > 2:
                x = x.flatten(1, -2).sum(1) / max(self.positions, 1)
            self.factors["weight"].input_moment.add(x.reshape(-1, 1, x.shape[-1]))

    def vjp(self, gradient: Tensor, input_shape: torch.Size | None) -> Tensor | None:
        self._add_outputs(
            gradient.flatten(2, -2).sum(2) if self.approximation == "reduce" and gradient.dim() > 3 else gradient
        )
        return None if input_shape is None else gradient @ self.module.weight.detach()

    def _add_outputs(self, gradient: Tensor) -> None:
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

    def jacobians(self, arguments: Sequence[Any], gradient: Tensor) -> dict[str, Jacobian]:
        return linear_jacobians(self, arguments[0], gradient)


def linear_jacobians(rule: Rule, x: Tensor, gradient: Tensor) -> dict[str, Jacobian]:
    """Of a map of the input's last axis to the output's: x ``(N, ..., in)``, gradient ``(K, N, ..., out)``."""
    outputs = gradient.reshape(*gradient.shape[:2], -1, 1, gradient.shape[-1])  # (K, N, T, 1, out)
    found = {}
    if "weight" in rule.trainable:
        found["weight"] = Jacobian(outputs, x.reshape(x.shape[0], -1, 1, x.shape[-1]))
    if "bias" in rule.trainable:
        found["bias"] = Jacobian.of_bias(outputs[:, :, :, 0].sum(2))
    return found


@register(nn.Bilinear)
class BilinearRule(Rule):
    """:class:`torch.nn.Bilinear` on two inputs ``(N, ..., in1)`` and ``(N, ..., in2)``: a linear layer on all products of their entries.

    ``weight``: A = mean over data of the sum over positions of a aᵀ, a the products ``x1[i] x2[j]``; B = sum over data, mean over positions
    of g gᵀ; with "reduce" those of the mean of a and of the sum of g, as for a linear layer. Block index (i and j, output). ``bias``: the
    exact GGN block, as that of a linear layer.
    """

    reduces = True
    averages = True
    sees_copies = True

    def shapes(self) -> dict[str, FactorShape]:
        m = self.module
        weight = FactorShape(1, m.in1_features * m.in2_features, m.out_features, 1)
        return {"weight": weight, "bias": FactorShape.bias(m.out_features)}

    def inputs(self, x1: Tensor, x2: Tensor) -> None:
        self.positions = math.prod(x1.shape[1:-1])
        if "weight" in self.factors:
            if self.approximation == "reduce" and x1.dim() > 2:
                products = torch.einsum("nti,ntj->nij", x1.flatten(1, -2), x2.flatten(1, -2)).flatten(1)
                products = products / max(self.positions, 1)
            else:
                products = (x1[..., :, None] * x2[..., None, :]).flatten(-2)
            products = products.unflatten(0, (-1, self.copies)).mean(1) if self.copies > 1 else products
            self.factors["weight"].input_moment.add(products.reshape(-1, 1, products.shape[-1]))

    def outputs(self, gradient: Tensor) -> None:
        gradient = gradient.unflatten(1, (-1, self.copies)).sum(2) if self.copies > 1 else gradient
        summed = gradient.unflatten(1, (-1, 1)).flatten(2, -2).sum(2).flatten(0, 1)[:, None]  # over positions
        if "weight" in self.factors:
            moment, positions = self.factors["weight"].output_moment, math.prod(gradient.shape[2:-1])
            if self.approximation == "reduce":
                moment.add(summed)
            else:
                moment.add(gradient.reshape(-1, 1, gradient.shape[-1]), 1 / max(positions, 1))
        if "bias" in self.factors:
            self.factors["bias"].output_moment.add(summed)

    def jacobians(self, arguments: Sequence[Any], gradient: Tensor) -> dict[str, Jacobian]:
        x1, x2 = arguments
        return linear_jacobians(self, (x1[..., :, None] * x2[..., None, :]).flatten(-2), gradient)
