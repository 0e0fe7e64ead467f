"""Convolutions of one and three axes, and transposed convolutions."""

from __future__ import annotations

import math

from torch import Tensor, nn

from ella_cuda.laplace.factors import FactorShape
from ella_cuda.laplace.rows import Patches, Rows, patches_of, planes_of
from ella_cuda.laplace.rules.base import Rule, register
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
        b = m.out_channels // m.groups * math.prod(m.kernel_size)
        return {
            "weight": FactorShape(m.groups, m.in_channels // m.groups, b, m.groups, layout="gab"),
            "bias": FactorShape.bias(m.out_channels),
        }

    def input_rows(self, x: Tensor, output_size: object = None) -> dict[str, Rows]:
        return {"weight": Patches.of_planes(full(x), self.module.groups)}

    def output_rows(self, gradient: Tensor, kept: None) -> dict[str, Rows]:
        m, flat = self.module, gradient.flatten(0, 1)
        sides = [(p, p) for p in m.padding]
        weight = Patches(flat, m.kernel_size, m.groups, stride=m.stride, dilation=m.dilation, sides=sides)
        return {"weight": weight, "bias": Patches.of_planes(flat)}
