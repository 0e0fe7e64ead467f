"""Convolutions over a group and the grid (GCONV)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ella_cuda import ops
from ella_cuda.groups import Group, as_group
from ella_cuda.nn._autocast import full_precision
from ella_cuda.nn._sizes import Size, as_count, as_kernel_size
from ella_cuda.nn.group_layers import as_frames, check_features, turn_slices

VARIANTS = ("full", "separable", "depthwise_separable", "pointwise")


class GroupFilter2d(nn.Module):
    r"""One filter over a group and the grid, with circular padding: ``(N, C, G, H, W) -> (N, D, G, H, W)``.

    .. math:: y[n,d,g,p] = \sum_{c,u,r} k[d,c,u,r]\, x[n,c,ug,p+r] + b[d]

    with u over the group or, where the filter does not mix slices, the identity alone. With ``frames="common"`` slice ``u g`` is turned
    back by the inverse of u before it is summed.

    Parameters:
        weight: ``(D, C, U, kh, kw)``, or ``(D, 1, U, kh, kw)`` if depthwise; U is the group's order where the filter mixes slices, else
            1. ``weight[:, :, u]`` belongs to element u. Kaiming-uniform as in torch's convolutions.
        bias: ``(D,)``, zeros, or None.

    Args:
        in_channels: C.
        out_channels: D.
        kernel_size: odd height and width, or one odd number for both.
        mixes_slices: whether an output slice sums over all input slices.
        depthwise: whether every channel has a filter of its own and none mix; D = C then.
        group, frames: see :class:`GroupConv2d`.
        bias: whether the layer has a bias.
        device, dtype: of the parameters, float32 or float64; None is torch's default.

    Raises:
        ValueError: a size is not positive, an even kernel, a depthwise filter with D other than C, a group that does not map the kernel
            onto itself in common frames; in forward, an input that does not fit.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size = 3,
        mixes_slices: bool = True,
        depthwise: bool = False,
        group: str | Group = "p4",
        frames: str = "own",
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels = (
            as_count("in_channels", in_channels),
            as_count("out_channels", out_channels),
        )
        self.kernel_size = as_kernel_size(kernel_size)
        if depthwise and in_channels != out_channels:
            raise ValueError(
                f"out_channels of a depthwise filter must be in_channels, {in_channels}; got {out_channels}."
            )
        self.mixes_slices, self.depthwise = mixes_slices, depthwise
        self.group, self.frames = as_group(group), as_frames(frames)
        # A filter that does not mix slices does not care how they are turned against each other.
        self.turns = mixes_slices and self.frames == "common"
        depth = self.group.order if mixes_slices else 1
        shape = (out_channels, 1 if depthwise else in_channels, depth, *self.kernel_size)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype)) if bias else None
        if self.turns:
            self.group.require_kernel(self.kernel_size)  # says now whether the group fits
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew, from torch's global generator."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @full_precision
    def forward(self, x: Tensor) -> Tensor:
        """``(N, C, G, H, W) -> (N, D, G, H, W)``."""
        check_features("GroupFilter2d", x, self.in_channels, self.group, self.weight)
        n, order = x.shape[0], self.group.order
        if not self.mixes_slices and not self.depthwise:
            slices = x.transpose(1, 2).flatten(0, 1)
            return _convolve(slices, self.weight[:, :, 0], self.bias).unflatten(0, (n, order)).transpose(1, 2)
        if self.turns:
            x = turn_slices(x, self.group, "common")
        # Not repeat_interleave, a view of which torch 2.11's compiler makes a convolution's argument and fails.
        bias = None if self.bias is None else torch.stack([self.bias] * order, 1).flatten()
        if self.mixes_slices:
            groups = self.in_channels if self.depthwise else 1
            y = _convolve(x.flatten(1, 2), self.unrolled(), bias, groups)
        else:
            y = _convolve(
                x.flatten(1, 2), self.weight[:, :, 0].repeat_interleave(order, 0), bias, order * self.in_channels
            )
        y = y.unflatten(1, (self.out_channels, order))
        return turn_slices(y, self.group, "own") if self.turns else y

    def unrolled(self) -> Tensor:
        """The filter as a convolution of all slices to all slices: ``(D*G, C*G, kh, kw)``, or ``(D*G, G, kh, kw)`` if depthwise."""
        elements, slices = range(self.group.order), self.weight.unbind(2)
        taps = [slices[self.group.relative(g, h)] for g in elements for h in elements]
        if self.turns:
            taps = [
                self.group.turn_kernel(tap, g)
                for tap, g in zip(taps, (g for g in elements for _ in elements), strict=True)
            ]
        whole = torch.stack(taps, 2).unflatten(2, (len(elements), len(elements)))  # (D, C, G, G', kh, kw)
        return whole.transpose(1, 2).flatten(0, 1).flatten(1, 2)

    def extra_repr(self) -> str:
        what = f"mixes_slices={self.mixes_slices}, depthwise={self.depthwise}, group={self.group.name!r}, frames={self.frames!r}"
        return f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, {what}, bias={self.bias is not None}"


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int = 1) -> Tensor:
    """With circular padding, at stride 1."""
    height, width = weight.shape[2:]
    if groups == 1 and (height, width) != (1, 1):
        return ops.circular_conv2d(x, weight, bias)
    rows, columns = height // 2, width // 2
    if rows > x.shape[2] or columns > x.shape[3]:
        raise ValueError(
            f"GroupFilter2d: a {height}x{width} kernel for each channel by itself wraps more than once around x, {tuple(x.shape)}; use a "
            "smaller one."
        )
    wrapped = F.pad(x, (columns, columns, rows, rows), mode="circular") if rows or columns else x
    return F.conv2d(wrapped, weight, bias, groups=groups)


class GroupConv2d(nn.Sequential):
    r"""A convolution over a finite group and the grid (GCONV), with circular padding: ``(N, C, G, H, W) -> (N, D, G, H, W)``.

    It is equivariant to the group: what :class:`ella_cuda.nn.GroupLift` makes of a moved image has its slices in other places
    (:meth:`ella_cuda.groups.Group.act_on_features`), and so has the output.

    Args:
        in_channels: C.
        out_channels: D.
        kernel_size: odd k, or a pair of odd numbers.
        variant: how the filter is factored, each factor a :class:`GroupFilter2d` with a bias:
            "full": ``D*C*G*k*k`` weights;
            "separable": ``k*k`` for each channel by itself, then ``G`` mixing slices and channels, ``C*k*k + D*C*G``;
            "depthwise_separable": ``k*k``, then ``G`` for each channel by itself, then channels, ``C*k*k + C*G + D*C``;
            "pointwise": every slice by itself with one kernel, ``D*C*k*k``.
        group: "p4" (rotations by 90 degrees), "p4m" (with mirror images), or a :class:`ella_cuda.groups.Group`.
        frames: how slices are mixed. "own": as they are, each turned by its element, as published. "common": turned back to one frame
            first. Both are equivariant to the group; where slices are mixed, only the second is equivariant to translations of the
            image as well (they move the turned slices in different directions). The pointwise variant mixes none and is both in both.
        bias: whether the factors have biases.
        device, dtype: of the parameters, float32 or float64; None is torch's default.

    Raises:
        ValueError: an unknown variant, frames or group, or what :class:`GroupFilter2d` raises.

    Source: van der Ouderaa et al., NeurIPS 2023, section 6 and appendix; Cohen and Welling, ICML 2016; Knigge et al., ICML 2022
    (separable group convolutions).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size = 3,
        variant: str = "full",
        group: str | Group = "p4",
        frames: str = "own",
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if variant not in VARIANTS:
            raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, got {variant!r}.")
        common = {"group": group, "frames": frames, "bias": bias, "device": device, "dtype": dtype}
        c, d, k = in_channels, out_channels, kernel_size

        def spatial(out: int, depthwise: bool) -> GroupFilter2d:
            return GroupFilter2d(c, out, k, mixes_slices=False, depthwise=depthwise, **common)

        filters: dict[str, GroupFilter2d]
        if variant == "full":
            filters = {"full": GroupFilter2d(c, d, k, **common)}
        elif variant == "pointwise":
            filters = {"spatial": spatial(d, depthwise=False)}
        elif variant == "separable":
            filters = {"spatial": spatial(c, depthwise=True), "mixing": GroupFilter2d(c, d, 1, **common)}
        else:
            filters = {
                "spatial": spatial(c, depthwise=True),
                "slices": GroupFilter2d(c, c, 1, depthwise=True, **common),
                "channels": GroupFilter2d(c, d, 1, mixes_slices=False, **common),
            }
        super().__init__()
        self.variant = variant
        for name, part in filters.items():
            self.add_module(name, part)
