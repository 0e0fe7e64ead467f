"""Convolutions of one and three axes, and transposed convolutions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ella_cuda.laplace.factors import FactorShape
from ella_cuda.laplace.jacobian import Jacobian
from ella_cuda.laplace.rules.base import Rule, register
from ella_cuda.laplace.rules.conv import (
    add_mean_patches,
    add_output_sides,
    convolution_jacobians,
    convolution_shapes,
    pad,
    patches,
    side_padding,
    summed_patches,
)
from ella_cuda.laplace.second_moment import SecondMoment


@register(nn.Conv1d)
@register(nn.Conv3d)
class ConvNdRule(Rule):
    """:class:`torch.nn.Conv1d` and ``Conv3d`` with any padding mode, stride, dilation and groups.

    ``weight``: A = mean over data of the sum over positions of a aᵀ, a the patch, channels first; B = sum over data, mean over positions
    of g gᵀ; with "reduce" those of the mean of a and of the sum of g, as for a ``Conv2d``. One block per group, block index (patch entry,
    output channel of the group). ``bias``: B = sum over data of s sᵀ with s the sum of g over positions, the exact GGN block.

    Source: Grosse and Martens, ICML 2016.
    """

    reduces = True
    averages = True

    def shapes(self) -> dict[str, FactorShape]:
        return convolution_shapes(self.module)

    def inputs(self, x: Tensor) -> None:
        if "weight" not in self.factors:
            return
        m = self.module
        if self.approximation == "reduce":
            add_mean_patches(self, x, m.kernel_size, m.stride, m.dilation, side_padding(m), m.padding_mode)
            return
        x = pad(x, side_padding(m), m.padding_mode)
        _add_patches(self.factors["weight"].input_moment, x, m, (0,) * len(m.kernel_size), 1.0)

    def outputs(self, gradient: Tensor) -> None:
        add_output_sides(self, gradient.flatten(3)[..., None, :], math.prod(gradient.shape[3:]))

    def jacobians(self, arguments: Sequence[Any], gradient: Tensor) -> dict[str, Jacobian]:
        m, x = self.module, arguments[0]
        rows = patches(pad(x, side_padding(m), m.padding_mode), m) if "weight" in self.trainable else None
        return convolution_jacobians(self, rows, gradient)


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

    reduces = True
    averages = True

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

    def inputs(self, x: Tensor, output_size: object = None) -> None:
        self.positions = math.prod(x.shape[2:])
        if "weight" in self.factors:
            rows = x.flatten(2).transpose(1, 2).unflatten(2, (self.module.groups, -1))
            reduced = self.approximation == "reduce"
            self.factors["weight"].input_moment.add(
                rows.sum(1) / max(self.positions, 1) if reduced else rows.flatten(0, 1)
            )

    def outputs(self, gradient: Tensor) -> None:
        flat = gradient.flatten(0, 1)
        if "weight" in self.factors:
            moment, m = self.factors["weight"].output_moment, self.module
            if self.approximation == "reduce":
                sides = [(p, p) for p in m.padding]
                sums, _ = summed_patches(flat, m.kernel_size, m.stride, m.dilation, sides, "zeros")
                moment.add(sums.flatten(1).unflatten(1, (m.groups, -1)))
            else:
                _add_patches(moment, flat, m, m.padding, 1 / max(self.positions, 1))
        if "bias" in self.factors:
            self.factors["bias"].output_moment.add(flat.flatten(2).sum(2)[:, None])

    def jacobians(self, arguments: Sequence[Any], gradient: Tensor) -> dict[str, Jacobian]:
        m, x = self.module, arguments[0]
        found = {}
        if "weight" in self.trainable:
            rows = x.flatten(2).transpose(1, 2).unflatten(2, (m.groups, -1))
            seen = patches(pad(gradient.flatten(0, 1), [(p, p) for p in m.padding], "zeros"), m)
            found["weight"] = Jacobian(seen.unflatten(0, gradient.shape[:2]), rows)
        if "bias" in self.trainable:
            found["bias"] = Jacobian.of_bias(gradient.flatten(3).sum(3))
        return found


def _add_patches(moment: SecondMoment, x: Tensor, m: nn.Module, padding: tuple[int, ...], alpha: float) -> None:
    """Add the outer products of the patches of x, ``(R, G*C, ...)`` padded with zeros, that a convolution like the layer reads."""
    axes = len(m.kernel_size)
    if axes == 3:
        x = F.pad(x, [p for side in reversed(padding) for p in (side, side)])
        moment.add_windows(x, m.kernel_size, m.stride, m.dilation, alpha)
        return
    lift = (0,) * (2 - axes)
    geometry = {
        "stride": (1,) * (2 - axes) + m.stride,
        "padding": lift + padding,
        "dilation": (1,) * (2 - axes) + m.dilation,
    }
    image = x if axes == 2 else x[:, :, None]
    moment.add_patches(image, (1,) * (2 - axes) + m.kernel_size, "zeros", alpha, **geometry)
    reach = [d * (k - 1) + 1 for d, k in zip(m.dilation, m.kernel_size, strict=True)]
    sides = zip(x.shape[2:], padding, reach, m.stride, strict=True)
    moment.count(x.shape[0] * math.prod((size + 2 * p - r) // s + 1 for size, p, r, s in sides))
