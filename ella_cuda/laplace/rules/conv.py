"""Convolutions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ella_cuda import ops
from ella_cuda.laplace import column_functions
from ella_cuda.laplace.call import Call
from ella_cuda.laplace.factors import FactorShape, Jacobian
from ella_cuda.laplace.rows import Patches, Rows, patches_of, planes_of, same_circular_patches, side_padding
from ella_cuda.laplace.rules.base import Rule, register
from ella_cuda.nn import CircularConv2d, SparseConv2d, StridedCircularConv2d
from ella_cuda.nn._autocast import full
from ella_cuda.ops.circular_conv2d import mirrored
from ella_cuda.ops.circular_conv2d_pool import circular_conv2d_pool_index
from ella_cuda.ops.circular_pad2d import circular_pad2d

_PAD_BACKWARD = {
    "reflect": torch.ops.aten.reflection_pad2d_backward,
    "replicate": torch.ops.aten.replication_pad2d_backward,
}


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

    def __init__(self, module: nn.Module, name: str, resolution: str = "shared") -> None:
        super().__init__(module, name, resolution)
        self.layer = self.convolution()

    def convolution(self) -> nn.Module:
        """The convolution that the module is, for its geometry."""
        return self.module

    def shapes(self) -> dict[str, FactorShape]:
        return {"weight": FactorShape.of_convolution(self.module), "bias": FactorShape.bias(self.module.out_channels)}

    def takes_samples(self) -> bool:
        # A subclass may have methods of its own, which get all positions.
        own = type(self)
        mine = own.output_rows is Conv2dRule.output_rows and own.input_gradient is Conv2dRule.input_gradient
        return mine and not self._same_circular()

    def _kernel(self, call: Call) -> Tensor:
        kernel = self.module.weight if call.kept is None else call.kept
        return kernel.detach() if kernel.requires_grad else kernel

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

    def input_rows(self, x: Tensor) -> dict[str, Rows]:
        m = self.layer
        if x.dim() != 4:
            raise ValueError(
                f"{self.label}: expected an input (N, {m.in_channels}, H, W), got shape {tuple(x.shape)}; add a batch "
                "axis."
            )
        return {"weight": patches_of(x, m)}

    def output_rows(self, gradient: Tensor, kept: Tensor | None) -> dict[str, Rows]:
        return planes_of(gradient, self.layer)

    def input_gradient(self, gradient: Tensor, call: Call) -> Tensor:
        kernel = self._kernel(call)
        if self._same_circular():
            whole = ops.circular_conv2d(gradient.flatten(0, 1), mirrored(kernel))
            whole = call.before.take(whole.unflatten(0, gradient.shape[:2]), slice(None))
            return call.before.hand(whole, call.input_shape)
        # Channels innermost: convolutions are faster so on the CPU, where pieces keep the copies small.
        parted = column_functions.in_pieces(gradient)
        layout = (
            torch.contiguous_format if gradient.is_contiguous() and not call.before.any_layout else torch.channels_last
        )

        def take(piece: Tensor, images: slice) -> Tensor:
            flat = piece.flatten(0, 1)
            flat = flat.contiguous(memory_format=torch.channels_last) if parted else flat
            return self._at_input(flat, kernel, call).unflatten(0, piece.shape[:2])

        return call.before.back(gradient, take, call.input_shape, layout)

    def _at_input(self, gradient: Tensor, kernel: Tensor, call: Call) -> Tensor:
        """``(R, D, H', W') -> (R, C, H, W)``.

        Autograd's own path through circular padding copies the padded gradient once per border strip. At stride 1 with
        the size kept, the transpose of a circular convolution is the circular convolution with the mirrored kernel.
        """
        m = self.layer
        left, right, top, bottom = self._pads()
        height, width = call.input_shape[-2:]
        if m.padding_mode == "circular" and m.stride == (1, 1) and tuple(gradient.shape[2:]) == (height, width):
            mirror = kernel.unflatten(0, (m.groups, -1)).transpose(1, 2).flatten(0, 1).flip(2, 3)
            mirror = mirror.contiguous(memory_format=torch.channels_last)
            return F.conv2d(_wrap(gradient, right, left, bottom, top), mirror, None, 1, 0, m.dilation, m.groups)
        symmetric = m.padding_mode == "zeros" and left == right and top == bottom
        padding = (top, left) if symmetric else (0, 0)
        padded = (height + top + bottom - 2 * padding[0], width + left + right - 2 * padding[1])
        whole = _transposed(gradient, m, kernel, padding, padded, call.samples[2:] if call.samples else (1, 1))
        if symmetric:
            return whole
        if m.padding_mode in _PAD_BACKWARD:
            image = whole.new_empty((*whole.shape[:2], height, width))  # nothing in it is read
            return _PAD_BACKWARD[m.padding_mode](whole, image, [left, right, top, bottom])
        if m.padding_mode == "circular":
            whole[:, :, height : height + top] += whole[:, :, :top]
            whole[:, :, top : top + bottom] += whole[:, :, top + height :]
        whole = whole[:, :, top : top + height]
        if m.padding_mode == "circular":
            whole[..., width : width + left] += whole[..., :left]
            whole[..., left : left + right] += whole[..., left + width :]
        return whole[..., left : left + width]


class Sampled(Patches):
    """What channels are at every position of planes, which are zero outside of one polyphase component.

    Args:
        values: the component, ``(R, D, H, W)``, of planes of twice the size.
        chosen: returns the component of each data point, ``(N,)``, as :func:`ella_cuda.ops.circular_pad2d` counts them.
    """

    def __init__(self, values: Tensor, chosen: Callable[[], Tensor]) -> None:
        super().__init__(values, (1, 1))
        self.chosen = chosen

    @property
    def positions(self) -> int:
        return 4 * super().positions

    def over_copies(self, copies: int, mean: bool) -> Rows:
        return self if copies == 1 else self.settled().over_copies(copies, mean)

    def settled(self) -> Rows:
        g, index = self.values, self.chosen()
        index = index.repeat(len(g) // len(index))
        whole = g.new_zeros(*g.shape[:3], 2, g.shape[3], 2)
        whole[torch.arange(len(g), device=g.device), :, :, index & 1, :, index >> 1] = g
        return Patches.of_planes(whole.flatten(4).flatten(2, 3))


@register(SparseConv2d)
class SparseConv2dRule(Conv2dRule):
    r""":class:`ella_cuda.nn.SparseConv2d`: the factors of the convolution it is, the input side projected on the basis,
    :math:`(I_C \otimes \Psi) A (I_C \otimes \Psi)^T`; block index (channel and anchor, output channel).

    Source: van der Ouderaa et al., NeurIPS 2023, section 4 and appendix.
    """

    def convolution(self) -> nn.Module:
        m = self.module
        with torch.device("meta"):  # every call has its kernel
            return CircularConv2d(m.in_channels, m.out_channels, m.kernel_size, False)

    def shapes(self) -> dict[str, FactorShape]:
        m = self.module
        weight = FactorShape(1, m.in_channels * m.basis.num_anchors, m.out_channels, 1, input_basis=m.basis)
        return {"weight": weight, "bias": FactorShape.bias(m.out_channels)}

    def keep(self, x: Tensor) -> Tensor:
        return self.module.kernel().detach()


@register(StridedCircularConv2d)
class StridedCircularConv2dRule(Rule):
    """:class:`ella_cuda.nn.StridedCircularConv2d`: the factors of its convolution, see :class:`Conv2dRule`, whose output gradient is zero
    outside the sampled polyphase component. Autograd differentiates the layer, because its op skips these zeros.

    Source: Grosse and Martens, ICML 2016.
    """

    sees_copies = True  # where a subclass adds to moments: rows are not linear in inputs

    def shapes(self) -> dict[str, FactorShape]:
        m = self.module
        weight = FactorShape(1, m.in_channels * math.prod(m.kernel_size), m.out_channels, 1)
        return {"weight": weight, "bias": FactorShape.bias(m.out_channels)}

    def input_rows(self, x: Tensor) -> dict[str, Rows]:
        return {"weight": same_circular_patches(full(x), self.module.kernel_size)}

    def keep(self, x: Tensor) -> Tensor | None:
        return x if self.copies > 1 else None  # components differ between copies

    def output_rows(self, gradient: Tensor, kept: Tensor | None) -> dict[str, Rows]:
        m, flat = self.module, gradient.flatten(0, 1)
        weight = Sampled(flat, lambda: circular_conv2d_pool_index(kept, m.weight.detach(), m.bias, m.norm))
        return {"weight": weight, "bias": Patches.of_planes(flat)}

    def jacobians(self, arguments: Sequence[Any], gradient: Tensor) -> dict[str, Jacobian]:
        x, m = arguments[0], self.module
        chosen = circular_conv2d_pool_index(x, m.weight.detach(), m.bias, m.norm)
        sampled = circular_pad2d(x, *(k // 2 for k in m.kernel_size), chosen)
        shapes, outputs = self.shapes(), self._said("output_rows")(self, gradient, x)
        inputs = {"weight": Patches(sampled, m.kernel_size, stride=(2, 2))}
        return {
            name: Jacobian.of_rows(shapes[name], inputs.get(name), outputs[name], len(gradient))
            for name in self.trainable
        }


def _transposed(
    gradient: Tensor,
    m: nn.Conv2d,
    kernel: Tensor,
    padding: tuple[int, int],
    size: tuple[int, int],
    steps: tuple[int, int],
) -> Tensor:
    """Transposed convolution onto ``size`` of gradients at every so-manieth output; rows and columns beyond what the strides reach get
    zeros."""
    stride = tuple(s * step for s, step in zip(m.stride, steps, strict=True))
    sides = zip(size, padding, m.dilation, m.kernel_size, stride, gradient.shape[2:], strict=True)
    spare = [s - (d * (k - 1) + 1 + step * (o - 1) - 2 * p) for s, p, d, k, step, o in sides]
    return F.conv_transpose2d(gradient, kernel, None, stride, padding, spare, m.groups, m.dilation)


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
