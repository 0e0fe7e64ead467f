"""Convolutions of one and three axes, transposed ones, and those over a group and the grid."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ella_cuda.laplace.factors import FactorShape
from ella_cuda.laplace.rows import Patches, Rows, patches_of, planes_of, same_circular_patches
from ella_cuda.laplace.rules.base import Rule, register
from ella_cuda.nn import GroupFilter2d
from ella_cuda.nn._autocast import full


@register(nn.Conv1d)
@register(nn.Conv3d)
class ConvNdRule(Rule):
    """:class:`torch.nn.Conv1d` and ``Conv3d`` with any padding mode, stride, dilation and groups.

    ``weight``: A = mean over data of the sum over positions of a aᵀ, a the patch, channels first; B = sum over data, mean over positions
    of g gᵀ; with "reduce" those of the mean of a and of the sum of g, as for a ``Conv2d``. One block per group, block index (patch entry,
    output channel of the group). ``bias``: B = sum over data of s sᵀ with s the sum of g over positions, the exact GGN block.

    Source: Grosse and Martens, ICML 2016.
    """

    def shapes(self) -> dict[str, FactorShape]:
        return {"weight": FactorShape.of_convolution(self.module), "bias": FactorShape.bias(self.module.out_channels)}

    def input_rows(self, x: Tensor) -> dict[str, Rows]:
        return {"weight": patches_of(full(x), self.module)}

    def output_rows(self, gradient: Tensor, kept: None) -> dict[str, Rows]:
        return planes_of(gradient, self.module)


@register(nn.ConvTranspose1d)
@register(nn.ConvTranspose2d)
@register(nn.ConvTranspose3d)
class ConvTransposeRule(Rule):
    """:class:`torch.nn.ConvTranspose1d`, ``2d`` and ``3d`` with any stride, padding, dilation and groups; the shared positions are those
    of the input.

    The layer adds ``weight[c]`` times the input's channel c at every input position to a patch of its output. ``weight``: A = mean over
    data of the sum over positions of x xᵀ, x the channels at a position; B = sum over data, mean over positions of p pᵀ, p the output
    gradient's patch of the position, channels first; with "reduce" those of the mean of x and of the sum of p. One block per group, block
    index (input channel of the group, patch entry). ``bias``: as that of a convolution.

    Raises:
        ValueError: ``output_padding`` is not below the stride.
    """

    def __init__(self, module: nn.Module, name: str, resolution: str = "shared") -> None:
        super().__init__(module, name, resolution)
        if any(extra >= step for extra, step in zip(module.output_padding, module.stride, strict=True)):
            raise ValueError(
                f"{self.label}: output_padding must be below the stride {module.stride}, got {module.output_padding}. Pad the output after "
                "the layer (torch.nn.functional.pad), or register a rule of your own."
            )

    def shapes(self) -> dict[str, FactorShape]:
        m = self.module
        patch = math.prod(m.kernel_size)
        b = m.out_channels // m.groups * patch
        return {
            "weight": FactorShape(m.groups, m.in_channels // m.groups, b, m.groups, layout="gab", unit_outputs=patch),
            "bias": FactorShape.bias(m.out_channels),
        }

    def input_rows(self, x: Tensor, output_size: object = None) -> dict[str, Rows]:
        return {"weight": Patches.of_planes(full(x), self.module.groups)}

    def output_rows(self, gradient: Tensor, kept: None) -> dict[str, Rows]:
        m, flat = self.module, gradient.flatten(0, 1)
        sides = [(p, p) for p in m.padding]
        weight = Patches(flat, m.kernel_size, m.groups, stride=m.stride, dilation=m.dilation, sides=sides)
        return {"weight": weight, "bias": Patches.of_planes(flat)}


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
