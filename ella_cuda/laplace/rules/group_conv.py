"""Convolutions over a group and the grid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ella_cuda.laplace.factors import FactorShape
from ella_cuda.laplace.jacobian import Jacobian
from ella_cuda.laplace.rules.base import Rule, register
from ella_cuda.laplace.rules.conv import add_summed_outputs, convolution_jacobians, pad, patches, summed_patches
from ella_cuda.nn import GroupFilter2d


@register(GroupFilter2d)
class GroupFilter2dRule(Rule):
    """:class:`ella_cuda.nn.GroupFilter2d`, a convolution whose shared positions are slices and pixels.

    ``weight``: A = mean over data of the sum over slices g and pixels of a aᵀ, a the patch in the order (channel, element, row, column)
    of the weight; B = sum over data, mean over slices and pixels of g gᵀ; with "reduce" those of the mean of a and of the sum of g. One
    block, or one for each channel if depthwise, with block index (patch entry, output channel). ``bias``: B = sum over data of s sᵀ with s
    the sum of the gradient over slices and pixels, the exact GGN block.

    Source: Grosse and Martens, ICML 2016; van der Ouderaa et al., NeurIPS 2023, appendix.
    """

    takes_reduced = True
    reduces = True
    averages = True

    def shapes(self) -> dict[str, FactorShape]:
        m = self.module
        patch = math.prod(m.weight.shape[1:])
        blocks = m.in_channels if m.depthwise else 1
        return {
            "weight": FactorShape(blocks, patch, m.out_channels // blocks, blocks),
            "bias": FactorShape.bias(m.out_channels),
        }

    def inputs(self, x: Tensor) -> None:
        if "weight" in self.factors:
            moment, m = self.factors["weight"].input_moment, self.module
            n, _, order, height, width = x.shape
            self.positions = order * height * width
            if self.approximation == "reduce":
                sums, _ = summed_patches(self._seen(x), m.kernel_size)
                rows = sums.unflatten(0, (n, order)).sum(1).flatten(1) / max(self.positions, 1)
                moment.add(rows.unflatten(1, (self.factors["weight"].shape.groups, -1)))
                return
            moment.add_patches(self._seen(x), m.kernel_size)
            moment.count(n * order * height * width)

    def _seen(self, x: Tensor) -> Tensor:
        """For every output slice the input slices in the order and the frame in which the filter meets them, as channels:
        ``(N*G, C*U, H, W)``."""
        m, group = self.module, self.module.group
        if not m.mixes_slices:
            return x.transpose(1, 2).flatten(0, 1)
        slices, elements = x.unbind(2), range(group.order)
        seen = [[slices[group.cayley[u][g]] for u in elements] for g in elements]
        if m.turns:
            seen = [[group.act(part, group.inverse[u]) for u, part in enumerate(parts)] for parts in seen]
        return torch.stack([torch.stack(parts, 2) for parts in seen], 1).flatten(0, 1).flatten(1, 2)

    def outputs(self, gradient: Tensor) -> None:
        if "weight" in self.factors and self.approximation == "expand":
            slices = gradient.transpose(2, 3).flatten(0, 2)  # (K*N*G, D, H, W)
            moment, (height, width) = self.factors["weight"].output_moment, slices.shape[2:]
            moment.add_patches(slices, 1, alpha=1 / (gradient.shape[3] * height * width))
            moment.count(slices.shape[0] * height * width)
        if "bias" in self.factors or self.approximation == "reduce":
            add_summed_outputs(self, gradient.sum((3, 4, 5)).flatten(0, 1))

    def jacobians(self, arguments: Sequence[Any], gradient: Tensor) -> dict[str, Jacobian]:
        x, rows = arguments[0], None
        if "weight" in self.trainable:
            sides = [(k // 2, k // 2) for k in self.module.kernel_size]
            rows = patches(pad(self._seen(x), sides, "circular"), self.module, (1, 1))  # (N*G, HW, 1, a)
            blocks = self.shapes()["weight"].groups
            rows = rows.flatten(2).unflatten(2, (blocks, -1)).unflatten(0, (x.shape[0], -1)).flatten(1, 2)
        return convolution_jacobians(self, rows, gradient)
