"""Convolutions over a group and the grid."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ella_cuda.laplace.factors import FactorShape
from ella_cuda.laplace.rows import Patches, Rows, same_circular_patches
from ella_cuda.laplace.rules.base import Rule, register
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

    def shapes(self) -> dict[str, FactorShape]:
        m = self.module
        patch = math.prod(m.weight.shape[1:])
        blocks = m.in_channels if m.depthwise else 1
        return {
            "weight": FactorShape(blocks, patch, m.out_channels // blocks, blocks),
            "bias": FactorShape.bias(m.out_channels),
        }

    def input_rows(self, x: Tensor) -> dict[str, Rows]:
        m = self.module
        blocks = m.in_channels if m.depthwise else 1
        return {"weight": same_circular_patches(self._seen(x), m.kernel_size, blocks, images=m.group.order)}

    def output_rows(self, gradient: Tensor, kept: None) -> dict[str, Rows]:
        m, flat = self.module, gradient.flatten(0, 1)  # (K*N, D, G, H, W)
        blocks = m.in_channels if m.depthwise else 1
        return {"weight": Patches.of_planes(flat, blocks), "bias": Patches.of_planes(flat)}

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
