"""Convolutions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ella_cuda import ops
from ella_cuda.laplace.column_functions import empty_columns, pieces
from ella_cuda.laplace.factors import FactorShape
from ella_cuda.laplace.jacobian import Jacobian
from ella_cuda.laplace.rules.base import Rule, register
from ella_cuda.nn import CircularConv2d, SparseConv2d, StridedCircularConv2d
from ella_cuda.ops.circular_conv2d import mirrored
from ella_cuda.ops.circular_conv2d_pool import circular_conv2d_pool_index
from ella_cuda.ops.circular_pad2d import circular_pad2d


@register(CircularConv2d)
@register(nn.Conv2d)
class Conv2dRule(Rule):
    """:class:`torch.nn.Conv2d` with any padding mode, stride, dilation and groups.

    ``weight``: A = mean over data of the sum over positions of a aᵀ, a the patch in :func:`torch.nn.functional.unfold`'s order; B = sum over
    data, mean over positions of g gᵀ; with "reduce" A = mean over data of m mᵀ with m the mean of a over positions, B = sum over data of
    s sᵀ with s the sum of g. One block per group, block index (patch entry, output channel of the group). ``bias``: B = sum over data of
    s sᵀ, the exact GGN block.

    Source: Grosse and Martens, ICML 2016.
    """

    differentiates = True
    takes_reduced = True
    reduces = True
    averages = True

    def __init__(self, module: nn.Conv2d, name: str, resolution: str = "shared") -> None:
        super().__init__(module, name, resolution)
        self.layer = module  # the convolution that the module is
        self.differentiates = module.padding_mode in ("zeros", "circular")
        self.takes_samples = self.differentiates and type(self) is Conv2dRule and not self._same_circular()

    def shapes(self) -> dict[str, FactorShape]:
        return convolution_shapes(self.module)

    def _pads(self) -> tuple[int, int, int, int]:
        """Padding (left, right, top, bottom); "same" with an even kernel has different ones on the two sides."""
        (top, bottom), (left, right) = side_padding(self.layer)
        return left, right, top, bottom

    def _same_circular(self) -> bool:
        """Whether the layer is a :func:`ella_cuda.ops.circular_conv2d`: circular padding that keeps the size."""
        m = self.layer
        simple = m.padding_mode == "circular" and m.groups == 1 and m.stride == m.dilation == (1, 1)
        half_h, half_w = (k // 2 for k in m.kernel_size)
        return simple and all(k % 2 for k in m.kernel_size) and self._pads() == (half_w, half_w, half_h, half_h)

    def inputs(self, x: Tensor) -> None:
        m = self.layer
        if x.dim() != 4:
            raise ValueError(
                f"{self.label}: expected an input (N, {m.in_channels}, H, W), got shape {tuple(x.shape)}; add a batch "
                "axis."
            )
        if "weight" not in self.factors:
            return
        if self.approximation == "reduce":
            add_mean_patches(self, x, m.kernel_size, m.stride, m.dilation, side_padding(m), m.padding_mode)
            return
        left, right, top, bottom = self._pads()
        sides = zip(
            (x.shape[2] + top + bottom, x.shape[3] + left + right), m.dilation, m.kernel_size, m.stride, strict=True
        )
        positions = math.prod((size - d * (k - 1) - 1) // s + 1 for size, d, k, s in sides)
        padding, mode = (top, left), m.padding_mode
        if left != right or top != bottom or mode not in ("zeros", "circular"):
            x = F.pad(x, (left, right, top, bottom), mode="constant" if mode == "zeros" else mode)
            padding, mode = (0, 0), "zeros"
        moment = self.factors["weight"].input_moment
        moment.add_patches(x, m.kernel_size, mode, stride=m.stride, padding=padding, dilation=m.dilation)
        moment.count(x.shape[0] * positions)

    def outputs(self, gradient: Tensor) -> None:
        add_output_sides(self, gradient, math.prod(self.samples[:2] if self.samples else gradient.shape[3:]))

    def vjp(self, gradient: Tensor, input_shape: torch.Size | None) -> Tensor | None:
        self.outputs(gradient)
        return None if input_shape is None else self._at_input(gradient, input_shape)

    def jacobians(self, arguments: Sequence[Any], gradient: Tensor) -> dict[str, Jacobian]:
        return convolution_jacobians(self, self._patches(arguments[0]), gradient)

    def _patches(self, x: Tensor) -> Tensor | None:
        """What the filters see of the images at every position, ``(N, T, groups, a)``; None where nobody wants them."""
        m = self.layer
        return patches(pad(x, side_padding(m), m.padding_mode), m) if "weight" in self.trainable else None

    def _at_input(self, gradient: Tensor, input_shape: torch.Size) -> Tensor:
        """``(K, N, D, H', W') -> (K, N, C, H, W)``."""
        if self._same_circular():
            whole = ops.circular_conv2d(gradient.flatten(0, 1), mirrored(self.layer.weight.detach()))
            whole = self.before.take(whole.unflatten(0, gradient.shape[:2]), slice(None))
            return self.before.hand(whole, input_shape)
        # Channels innermost: convolutions are faster so on the CPU, and pieces keep the copies small.
        free = gradient.is_cpu and self.before.any_layout
        layout = torch.contiguous_format if gradient.is_contiguous() and not free else torch.channels_last
        found = empty_columns(gradient, self.before.shape(input_shape), layout)
        for some, images in pieces(found):
            at_output = gradient[some, images].flatten(0, 1).contiguous(memory_format=torch.channels_last)
            piece = self._input_gradient(at_output, input_shape).unflatten(0, gradient[some, images].shape[:2])
            found[some, images] = self.before.take(piece, images)
        return self.before.hand(found, input_shape)

    def _input_gradient(self, gradient: Tensor, input_shape: torch.Size) -> Tensor:
        """``(R, D, H', W') -> (R, C, H, W)``.

        Autograd's own path through circular padding copies the padded gradient once per border strip. At stride 1 with
        the size kept, the transpose of a circular convolution is the circular convolution with the mirrored kernel.
        """
        m = self.layer
        left, right, top, bottom = self._pads()
        height, width = input_shape[-2:]
        if m.padding_mode == "circular" and m.stride == (1, 1) and tuple(gradient.shape[2:]) == (height, width):
            kernel = m.weight.detach().unflatten(0, (m.groups, -1)).transpose(1, 2).flatten(0, 1).flip(2, 3)
            kernel = kernel.contiguous(memory_format=torch.channels_last)
            return F.conv2d(_wrap(gradient, right, left, bottom, top), kernel, None, 1, 0, m.dilation, m.groups)
        symmetric = m.padding_mode == "zeros" and left == right and top == bottom
        padding = (top, left) if symmetric else (0, 0)
        padded = (height + top + bottom - 2 * padding[0], width + left + right - 2 * padding[1])
        full = _transposed(gradient, m, padding, padded, self.samples[2:] if self.samples else (1, 1))
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


@register(SparseConv2d)
class SparseConv2dRule(Conv2dRule):
    r""":class:`ella_cuda.nn.SparseConv2d`: the factors of the convolution it is, the input side projected on the basis,
    :math:`(I_C \otimes \Psi) A (I_C \otimes \Psi)^T`; block index (channel and anchor, output channel).

    Source: van der Ouderaa et al., NeurIPS 2023, section 4 and appendix.
    """

    takes_reduced = True
    reduces = True
    averages = True

    def __init__(self, module: SparseConv2d, name: str, resolution: str = "shared") -> None:
        Rule.__init__(self, module, name, resolution)
        with torch.device("meta"):  # every batch brings its kernel, see inputs
            self.layer = CircularConv2d(module.in_channels, module.out_channels, module.kernel_size, False)

    def shapes(self) -> dict[str, FactorShape]:
        m = self.module
        weight = FactorShape(1, m.in_channels * m.basis.num_anchors, m.out_channels, 1, input_basis=m.basis)
        return {"weight": weight, "bias": FactorShape.bias(m.out_channels)}

    def inputs(self, x: Tensor) -> None:
        self.layer.weight = nn.Parameter(self.module.kernel().detach(), requires_grad=False)
        super().inputs(x)

    def jacobians(self, arguments: Sequence[Any], gradient: Tensor) -> dict[str, Jacobian]:
        rows = self._patches(arguments[0])
        if rows is not None:
            psi = self.module.basis.matrix().to(rows)
            rows = (rows.unflatten(3, (-1, psi.shape[1])) @ psi.T).flatten(3)
        return convolution_jacobians(self, rows, gradient)


@register(StridedCircularConv2d)
class StridedCircularConv2dRule(Rule):
    """:class:`ella_cuda.nn.StridedCircularConv2d`: the factors of its convolution, see :class:`Conv2dRule`, whose output gradient is zero
    outside the sampled polyphase component. Autograd differentiates the layer, because its op skips these zeros.

    Source: Grosse and Martens, ICML 2016.
    """

    reduces = True
    averages = True

    def shapes(self) -> dict[str, FactorShape]:
        m = self.module
        weight = FactorShape(1, m.in_channels * math.prod(m.kernel_size), m.out_channels, 1)
        return {"weight": weight, "bias": FactorShape.bias(m.out_channels)}

    def inputs(self, x: Tensor) -> None:
        if "weight" in self.factors and self.approximation == "reduce":
            add_mean_patches(self, x, self.module.kernel_size)
        elif "weight" in self.factors:
            moment = self.factors["weight"].input_moment
            moment.add_patches(x, self.module.kernel_size)
            moment.count(x[:, 0].numel())

    def outputs(self, gradient: Tensor) -> None:
        add_output_sides(self, gradient, 4 * math.prod(gradient.shape[3:]))

    def jacobians(self, arguments: Sequence[Any], gradient: Tensor) -> dict[str, Jacobian]:
        x, m, rows = arguments[0], self.module, None
        if "weight" in self.trainable:
            chosen = circular_conv2d_pool_index(x, m.weight.detach(), m.bias, m.norm)
            rows = patches(circular_pad2d(x, *(k // 2 for k in m.kernel_size), chosen), m, (2, 2))
        return convolution_jacobians(self, rows, gradient)


def add_output_sides(rule: Rule, gradient: Tensor, positions: int) -> None:
    """Add the output sides of a convolution with so many positions from ``(K, N, D, ...)`` gradients at those that are not zero."""
    flat = gradient.flatten(0, 1)
    reduced = rule.approximation == "reduce"
    if "weight" in rule.factors and not reduced:
        moment = rule.factors["weight"].output_moment
        moment.add_patches(flat, 1, alpha=1 / max(positions, 1))
        moment.count(flat.shape[0] * positions)
    if "bias" in rule.factors or reduced:
        add_summed_outputs(rule, flat.sum((2, 3)))


def add_summed_outputs(rule: Rule, rows: Tensor) -> None:
    """Add ``rows`` ``(R, D)``, gradients of a convolution's channels summed over positions, to the output side of the bias, and with
    "reduce" to that of the weight."""
    if "weight" in rule.factors and rule.approximation == "reduce":
        factor = rule.factors["weight"]
        factor.output_moment.add(rows.unflatten(1, (factor.shape.output_groups, -1)))
    if "bias" in rule.factors:
        rule.factors["bias"].output_moment.add(rows[:, None])


def add_mean_patches(rule: Rule, x: Tensor, kernel_size: Sequence[int], *geometry: Any) -> None:
    """Add the mean over positions of each data point's patches to the input side of the weight, and set ``rule.positions``; geometry as
    for :func:`summed_patches`."""
    sums, rule.positions = summed_patches(x, kernel_size, *geometry)
    factor = rule.factors["weight"]
    factor.input_moment.add((sums.flatten(1) / max(rule.positions, 1)).unflatten(1, (factor.shape.groups, -1)))


def summed_patches(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] | None = None,
    dilation: Sequence[int] | None = None,
    sides: Sequence[tuple[int, int]] | None = None,
    padding_mode: str = "circular",
) -> tuple[Tensor, int]:
    """The sum of the patches that a convolution reads of each of the images x, ``(N, C, ...)`` -> ``(N, C, *kernel_size)``, and how many
    there are of an image. No patch is written out: along each axis, a matrix says how often a tap meets a pixel.

    Args:
        x: images of one to three axes.
        kernel_size: of the convolution. stride, dilation: likewise; None is 1.
        sides: padding before and after, by axis; None is what keeps the size for an odd kernel.
        padding_mode: "zeros", "circular", "reflect" or "replicate".
    """
    ones = (1,) * len(kernel_size)
    stride, dilation, sides = stride or ones, dilation or ones, sides or [(k // 2, k // 2) for k in kernel_size]
    matrices, positions = [], 1
    for size, *axis in zip(x.shape[2:], kernel_size, stride, dilation, sides, strict=True):
        matrix, along = _tap_counts(size, *axis, padding_mode)
        matrices.append(matrix.to(x))
        positions *= along
    pixels, taps = "xyz"[: len(matrices)], "ijk"[: len(matrices)]
    each = ",".join(map("".join, zip(pixels, taps, strict=True)))
    return torch.einsum(f"nc{pixels},{each}->nc{taps}", x, *matrices), positions


def _tap_counts(
    size: int, kernel_size: int, stride: int, dilation: int, sides: tuple[int, int], padding_mode: str
) -> tuple[Tensor, int]:
    """Along an axis of ``size`` pixels, over the positions of a convolution, how often each tap meets each pixel, ``(size, kernel_size)``,
    and the number of positions."""
    pixels = torch.arange(1, size + 1, dtype=torch.float64, device="cpu")[None, None]  # 0 is what zeros pad
    padded = F.pad(pixels, sides, mode="constant" if padding_mode == "zeros" else padding_mode)[0, 0].long()
    met = padded.unfold(0, dilation * (kernel_size - 1) + 1, stride)[:, ::dilation]  # (positions, taps)
    counts = torch.zeros(size + 1, kernel_size, dtype=torch.float64, device="cpu")
    return counts.scatter_add_(0, met, torch.ones(met.shape, dtype=torch.float64, device="cpu"))[1:], met.shape[0]


def pad(x: Tensor, sides: Sequence[tuple[int, int]], padding_mode: str) -> Tensor:
    """Images with padding before and after, for every axis."""
    amounts = [p for side in reversed(sides) for p in side]
    return F.pad(x, amounts, mode="constant" if padding_mode == "zeros" else padding_mode) if any(amounts) else x


def patches(x: Tensor, m: nn.Module, stride: Sequence[int] | None = None) -> Tensor:
    """What a convolution sees of padded images of one to three axes, ``(N, C, ...)``, at every position: ``(N, T, groups, a)``, with a the
    channels of the group and the taps.

    Args:
        x: the images.
        m: the convolution, for its kernel's size, dilation and groups.
        stride: None is the convolution's.
    """
    axes = len(m.kernel_size)
    stride, dilation = stride or m.stride, getattr(m, "dilation", (1,) * axes)
    for axis, (k, s, d) in enumerate(zip(m.kernel_size, stride, dilation, strict=True), start=2):
        x = x.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
    x = x.unflatten(1, (getattr(m, "groups", 1), -1))  # (N, groups, C, *positions, *taps)
    positions = range(3, 3 + axes)
    return x.permute(0, *positions, 1, 2, *range(3 + axes, 3 + 2 * axes)).flatten(2 + axes).flatten(1, axes)


def convolution_jacobians(rule: Rule, rows: Tensor | None, gradient: Tensor) -> dict[str, Jacobian]:
    """Of the weight and the bias of a convolution: rows ``(N, T, groups, a)``, gradient ``(K, N, D, ...)`` at the T positions."""
    outputs = gradient.flatten(3)
    found = {}
    if "weight" in rule.trainable:
        blocks = rule.shapes()["weight"].groups
        found["weight"] = Jacobian(outputs.unflatten(2, (blocks, -1)).permute(0, 1, 4, 2, 3), rows)
    if "bias" in rule.trainable:
        found["bias"] = Jacobian.of_bias(outputs.sum(3))
    return found


def convolution_shapes(m: nn.Module) -> dict[str, FactorShape]:
    """Of a convolution's weight, one block per group, and of its bias."""
    a = m.in_channels // m.groups * math.prod(m.kernel_size)
    weight = FactorShape(m.groups, a, m.out_channels // m.groups, m.groups)
    return {"weight": weight, "bias": FactorShape.bias(m.out_channels)}


def side_padding(m: nn.Module) -> list[tuple[int, int]]:
    """A convolution's padding before and after, for every axis; "same" with an even kernel has different ones on the two sides."""
    if m.padding == "valid":
        return [(0, 0)] * len(m.kernel_size)
    if m.padding == "same":
        total = [d * (k - 1) for d, k in zip(m.dilation, m.kernel_size, strict=True)]
        return [(t // 2, t - t // 2) for t in total]
    return [(p, p) for p in m.padding]


def _transposed(
    gradient: Tensor, m: nn.Conv2d, padding: tuple[int, int], size: tuple[int, int], steps: tuple[int, int]
) -> Tensor:
    """Transposed convolution onto ``size`` of gradients at every so-manieth output; rows and columns beyond what the strides reach get
    zeros."""
    stride = tuple(s * step for s, step in zip(m.stride, steps, strict=True))
    sides = zip(size, padding, m.dilation, m.kernel_size, stride, gradient.shape[2:], strict=True)
    spare = [s - (d * (k - 1) + 1 + step * (o - 1) - 2 * p) for s, p, d, k, step, o in sides]
    return F.conv_transpose2d(gradient, m.weight.detach(), None, stride, padding, spare, m.groups, m.dilation)


def _wrap(x: Tensor, left: int, right: int, top: int, bottom: int) -> Tensor:
    """Circular padding that writes every number once and keeps channels innermost."""
    n, c, h, w = x.shape
    out = x.new_empty(n, h + top + bottom, w + left + right, c).permute(0, 3, 1, 2)
    core = out[:, :, top : top + h]
    core[..., left : left + w] = x
    core[..., :left] = x[..., w - left :]
    core[..., left + w :] = x[..., :right]
    out[:, :, :top] = core[:, :, h - top :]
    out[:, :, top + h :] = core[:, :, :bottom]
    return out
