"""Convolutions."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ella_cuda import ops
from ella_cuda.laplace.factors import FactorShape
from ella_cuda.laplace.rules.base import Rule, register


@register(nn.Conv2d)
class Conv2dRule(Rule):
    """:class:`torch.nn.Conv2d` with circular or zero padding, any stride, dilation and groups (KFAC-expand).

    ``weight``: A = mean over data of the sum over positions of a aᵀ with a the patch in :func:`torch.nn.functional.unfold`'s order, B =
    sum over data, mean over positions of g gᵀ; one block per group, block index (patch entry, output channel of the group).
    ``bias``: B = sum over data of s sᵀ with s the sum of g over positions, the exact GGN block.

    Source: Grosse and Martens, ICML 2016.
    """

    differentiates = True

    def __init__(self, module: nn.Conv2d, name: str, resolution: str = "shared") -> None:
        super().__init__(module, name, resolution)
        if module.padding_mode not in ("zeros", "circular"):
            raise ValueError(
                f"{self.label}: padding_mode must be 'zeros' or 'circular', got {module.padding_mode!r}. Pad before the layer "
                f"(torch.nn.functional.pad with mode={module.padding_mode!r}) and give it padding=0, or register a rule of your own."
            )

    def shapes(self) -> dict[str, FactorShape]:
        m = self.module
        a = m.in_channels // m.groups * math.prod(m.kernel_size)
        return {
            "weight": FactorShape(m.groups, a, m.out_channels // m.groups, m.groups),
            "bias": FactorShape.bias(m.out_channels),
        }

    def _pads(self) -> tuple[int, int, int, int]:
        """Padding (left, right, top, bottom); an even kernel with padding='same' has different ones on the two sides."""
        m = self.module
        if m.padding == "valid":
            return 0, 0, 0, 0
        if m.padding == "same":
            total = [d * (k - 1) for d, k in zip(m.dilation, m.kernel_size, strict=True)]
            return total[1] // 2, total[1] - total[1] // 2, total[0] // 2, total[0] - total[0] // 2
        return m.padding[1], m.padding[1], m.padding[0], m.padding[0]

    def inputs(self, x: Tensor) -> None:
        m = self.module
        if x.dim() != 4:
            raise ValueError(
                f"{self.label}: expected an input (N, {m.in_channels}, H, W), got shape {tuple(x.shape)}; add a batch axis."
            )
        if "weight" not in self.factors:
            return
        left, right, top, bottom = self._pads()
        padding, mode = (top, left), m.padding_mode
        if left != right or top != bottom:
            x = F.pad(x, (left, right, top, bottom), mode="circular" if mode == "circular" else "constant")
            padding, mode = (0, 0), "zeros"
        moment = self.factors["weight"].input_moment
        for factor, part in zip(moment.total, x.chunk(m.groups, 1), strict=True):
            ops.conv_kron_accumulate_(
                factor, part, m.kernel_size, mode, stride=m.stride, padding=padding, dilation=m.dilation
            )
        moment.count(x.shape[0])

    def pull_back(self, gradient: Tensor, input_shape: torch.Size | None) -> Tensor | None:
        m = self.module
        columns, flat = gradient.shape[0], gradient.flatten(0, 1)
        if "weight" in self.factors:
            positions = max(math.prod(flat.shape[2:]), 1)
            rows = flat.unflatten(1, (m.groups, -1)).permute(0, 3, 4, 1, 2).flatten(0, 2)
            self.factors["weight"].output_moment.add(rows, 1 / positions)
        if "bias" in self.factors:
            self.factors["bias"].output_moment.add(flat.sum((2, 3))[:, None])
        return None if input_shape is None else self._input_gradient(flat, input_shape).unflatten(0, (columns, -1))

    def _input_gradient(self, gradient: Tensor, input_shape: torch.Size) -> Tensor:
        """Transposed convolution onto the padded image, whose border is then folded back (circular) or cut off (zeros).

        Autograd's own path through circular padding copies the padded gradient once per border strip.
        """
        m = self.module
        left, right, top, bottom = self._pads()
        height, width = input_shape[-2:]
        spare = [
            size - (d * (k - 1) + 1 + s * (o - 1))
            for size, d, k, s, o in zip(
                (height + top + bottom, width + left + right),
                m.dilation,
                m.kernel_size,
                m.stride,
                gradient.shape[2:],
                strict=True,
            )
        ]
        symmetric = m.padding_mode == "zeros" and left == right and top == bottom
        padding = (top, left) if symmetric else (0, 0)
        full = F.conv_transpose2d(gradient, m.weight.detach(), None, m.stride, padding, spare, m.groups, m.dilation)
        if symmetric:
            return full
        if m.padding_mode == "circular":
            full[:, :, height : height + top] += full[:, :, :top]
            full[:, :, top : top + bottom] += full[:, :, top + height :]
        full = full[:, :, top : top + height]
        if m.padding_mode == "circular":
            full[..., width : width + left] += full[..., :left]
            full[..., left : left + right] += full[..., left + width :]
        return full[..., left : left + width]
