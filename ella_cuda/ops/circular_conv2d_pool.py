"""Circular convolution followed by the choice of one polyphase component per image, as one op.

The gradient of what stands between the two, four times as large as the result and three quarters zeros, is never formed. Given the
choice the map is a convolution of stride 2 of images that are moved by it, and that is what CUDA does on the way back. On the CPU
what is between is not stored either, and three ops close the family under differentiation, beside those of
:mod:`ella_cuda.ops.circular_conv2d`: ``circular_conv2d_pool`` itself, ``circular_conv2d_scattered``, the convolution behind
``polyphase_scatter``, and ``circular_conv2d_scattered_weight_grad``, the gradient of a convolution's weights behind it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ella_cuda.ops._cases import KernelCase, cases, normal
from ella_cuda.ops._operator import (
    INDEX,
    batched_first,
    differentiable,
    joins_rows,
    keep,
    map_over_batch,
    nested_forward_mode,
    operand_sizes,
    sum_of_parts,
)
from ella_cuda.ops._precision import without_autocast
from ella_cuda.ops.circular_conv2d import (
    circular_conv2d,
    circular_conv2d_torch,
    convolution_sizes,
    mirrored,
    require_convolution,
    require_odd,
)
from ella_cuda.ops.circular_pad2d import circular_fold2d, circular_pad2d
from ella_cuda.ops.polyphase_pool import (
    check_norm,
    polyphase_pool,
    polyphase_pool_torch,
    polyphase_scatter,
    polyphase_select,
    require_even,
    require_norm,
)

COMPILED_FOR = ("cpu", "meta")  # what this package has kernels of its own for; on CUDA they are cuDNN's


def circular_conv2d_pool(x: Tensor, weight: Tensor, bias: Tensor | None = None, norm: float = 2) -> Tensor:
    """``polyphase_pool(circular_conv2d(x, weight, bias), norm)``, a strided convolution that commutes with translations.

    Gradients take a quarter of the products that those of a convolution take: of the other components' zeros none is formed. On the CPU
    the convolution is kept of a few images at a time. Equivalent to :func:`circular_conv2d_pool_torch`.

    Args:
        x: ``(N, C, H, W)``, H and W even, float32 or float64.
        weight: ``(D, C, kh, kw)`` with kh and kw odd.
        bias: ``(D,)`` or None.
        norm: 1, 2 or ``math.inf``, see :func:`ella_cuda.ops.polyphase_pool`.

    Returns:
        ``(N, D, H/2, W/2)``.

    Raises:
        ValueError: ``norm`` is none of these.
        RuntimeError: a shape, dtype or device does not fit; the message names the argument.

    Source: Chaman and Dokmanic, "Truly shift-invariant convolutional neural networks", CVPR 2021, section 4.
    """
    check_norm("circular_conv2d_pool", norm)
    if nested_forward_mode():
        return polyphase_pool(circular_conv2d(x, weight, bias), norm)
    return _pool(x, weight, bias, float(norm))[0]


def circular_conv2d_pool_index(x: Tensor, weight: Tensor, bias: Tensor | None = None, norm: float = 2) -> Tensor:
    """The component that :func:`circular_conv2d_pool` chooses for each image, ``(N,)``, int64."""
    return _pool(x, weight, bias, float(norm))[1]


def _pool_of_two(x: Tensor, weight: Tensor, bias: Tensor | None, norm: float) -> tuple[Tensor, Tensor]:
    require_convolution("circular_conv2d_pool", x, weight, bias)
    if x.shape[2] % 2 or x.shape[3] % 2:
        raise RuntimeError(f"circular_conv2d_pool: x must have even height and width, got {tuple(x.shape)}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != x.dtype:
            raise RuntimeError(
                f"circular_conv2d_pool: {name} must have the dtype of x ({x.dtype}), got {tensor.dtype}; convert with {name}.to(x)"
            )
    with torch.no_grad():
        return torch.ops.ella_cuda.polyphase_pool(circular_conv2d(x, weight, bias), norm)


torch.library.impl("ella_cuda::circular_conv2d_pool", "CUDA", _pool_of_two)


def circular_conv2d_pool_torch(x: Tensor, weight: Tensor, bias: Tensor | None = None, norm: float = 2) -> Tensor:
    """Plain-torch reference of :func:`circular_conv2d_pool`."""
    return polyphase_pool_torch(circular_conv2d_torch(x, weight, bias), norm)


def circular_conv2d_pool_transposed(grad: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """The transpose of :func:`circular_conv2d_pool` without bias, its choice given: a quarter of the products of a whole convolution.

    On the CPU an op that convolves nothing but the chosen components. On CUDA cuDNN's transposed convolution of stride 2, of which
    :func:`ella_cuda.ops.circular_pad2d`'s transpose makes images with circular padding.

    Args:
        grad: ``(N, D, H/2, W/2)``, float32 or float64.
        index: ``(N,)``, int64, the components chosen.
        weight: ``(D, C, kh, kw)`` with kh and kw odd.

    Returns:
        ``(N, C, H, W)``.

    Raises:
        RuntimeError: a shape, dtype or device does not fit, or, on the CPU, an index is none of 0 to 3.
    """
    compiled = grad.device.type in COMPILED_FOR
    narrow = min(weight.shape[2:]) < 3  # some outputs see nothing of a component
    if nested_forward_mode() or (narrow if compiled else _nothing(grad, weight)):
        return circular_conv2d(polyphase_scatter(grad, index), mirrored(weight))
    if compiled:
        return _scattered(grad, index, mirrored(weight))
    with without_autocast(grad.device.type):
        padded = F.conv_transpose2d(grad, weight, stride=2, output_padding=1)
    return circular_fold2d(padded, *_pads(weight), index)


def _pool_weight_grad(grad: Tensor, index: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The gradient of :func:`circular_conv2d_pool`'s weight, its choice given; of ``weight`` the shape alone counts."""
    if grad.device.type in COMPILED_FOR:
        return _scattered_weight_grad(grad, index, x, *weight.shape[2:])
    if _nothing(x, weight):
        return grad.sum() * x.sum() + torch.zeros_like(weight)
    moved = circular_pad2d(x, *_pads(weight), index)
    # Stride, padding, dilation, transposed or not, its padding, groups. Autocast leaves this one alone.
    geometry = ([2, 2], [0, 0], [1, 1], False, [0, 0], 1)
    return torch.ops.aten.convolution_backward(grad, moved, weight, None, *geometry, [False, True, False])[1]


def _chosen(x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """:func:`circular_conv2d_pool` without bias, its choice given."""
    if x.device.type in COMPILED_FOR or _nothing(x, weight):
        return polyphase_select(circular_conv2d(x, weight), index)
    with without_autocast(x.device.type):
        return F.conv2d(circular_pad2d(x, *_pads(weight), index), weight, stride=2)


def _pads(weight: Tensor) -> tuple[int, int]:
    return weight.shape[2] // 2, weight.shape[3] // 2


def _nothing(x: Tensor, weight: Tensor) -> bool:
    """Whether a sum over products of the two has no term, which torch's convolutions may refuse."""
    return not (x.numel() and weight.numel())


# circular_conv2d_pool -------------------------------------------------------------------------------------------------------


def _pool_fake(x: Tensor, weight: Tensor, bias: Tensor | None, norm: float) -> tuple[Tensor, Tensor]:
    require_norm("circular_conv2d_pool", norm)
    s = convolution_sizes("circular_conv2d_pool", x, weight, bias)
    require_even("circular_conv2d_pool", x)
    return x.new_empty(s["N"], s["D"], s["H"] // 2, s["W"] // 2), x.new_empty(s["N"], dtype=torch.int64)


def _pool_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, _ = inputs
    ctx.mark_non_differentiable(output[1])
    keep(ctx, x, weight, output[1])


def _pool_backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None, None
    x, weight, index = ctx.saved_tensors
    need_x, need_weight, need_bias, _ = ctx.needs_input_grad
    return (
        circular_conv2d_pool_transposed(grad, index, weight) if need_x else None,
        _pool_weight_grad(grad, index, x, weight) if need_weight else None,
        grad.sum((0, 2, 3)) if need_bias else None,
        None,
    )


def _pool_jvp(
    ctx: Any, x_t: Tensor | None, weight_t: Tensor | None, bias_t: Tensor | None, _: Any
) -> tuple[Tensor, None]:
    x, weight, index = ctx.saved_tensors
    total = sum_of_parts(
        None if x_t is None else _chosen(x_t, index, weight),
        None if weight_t is None else _chosen(x, index, weight_t),
        None if bias_t is None else bias_t[:, None, None].expand(x.shape[0], -1, *(s // 2 for s in x.shape[2:])),
    )
    return (torch.zeros_like(_pool_fake(x, weight, None, 2.0)[0]) if total is None else total.contiguous()), None


# circular_conv2d_scattered ---------------------------------------------------------------------------------------------------


def _scattered_fake(x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    op = "circular_conv2d_scattered"
    s = operand_sizes(op, x=(x, "N C h w"), index=(index, "N", INDEX), weight=(weight, "D C kh kw"))
    require_odd(op, "weight", s["kh"], s["kw"])
    for size in (s["kh"], s["kw"]):
        torch._check(
            size >= 3, lambda: f"{op}: weight must have height and width of at least 3, got ({s['kh']}, {s['kw']})"
        )
    return x.new_empty(s["N"], s["D"], 2 * s["h"], 2 * s["w"])


def _scattered_save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    keep(ctx, *inputs)


def _scattered_backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, Tensor | None]:
    if grad is None:
        return None, None, None
    x, index, weight = ctx.saved_tensors
    need_x, _, need_weight = ctx.needs_input_grad
    return (
        _chosen(grad, index, mirrored(weight)) if need_x else None,
        None,
        # Which of the two images is shifted against the other is the kernel's direction.
        mirrored(_scattered_weight_grad(x, index, grad, *weight.shape[2:])) if need_weight else None,
    )


def _scattered_jvp(ctx: Any, x_t: Tensor | None, _: Any, weight_t: Tensor | None) -> Tensor:
    x, index, weight = ctx.saved_tensors
    total = sum_of_parts(
        None if x_t is None else _scattered(x_t, index, weight),
        None if weight_t is None else _scattered(x, index, weight_t),
    )
    return torch.zeros_like(_scattered_fake(x, index, weight)) if total is None else total


def _scattered_vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
    x, index, weight = args
    if in_dims[0] is None or any(dim is not None for dim in in_dims[1:]):
        return map_over_batch(torch.ops.ella_cuda.circular_conv2d_scattered, info, in_dims, args)
    x = batched_first(x, in_dims[0])  # as columns of gradients of one choice are: the batch joins N
    found = torch.ops.ella_cuda.circular_conv2d_scattered(x.flatten(0, 1), index.repeat(info.batch_size), weight)
    return found.unflatten(0, x.shape[:2]), 0


# circular_conv2d_scattered_weight_grad ---------------------------------------------------------------------------------------


def _scattered_weight_grad_fake(grad: Tensor, index: Tensor, x: Tensor, kernel_h: int, kernel_w: int) -> Tensor:
    op = "circular_conv2d_scattered_weight_grad"
    s = operand_sizes(op, x=(x, "N C H W"))
    require_even(op, x)
    s = operand_sizes(op, s, x=(x, None), grad=(grad, "N D H/2 W/2"), index=(index, "N", INDEX))
    require_odd(op, "the kernel", kernel_h, kernel_w)
    return x.new_empty(s["D"], s["C"], kernel_h, kernel_w)


def _scattered_weight_grad_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad, index, x, *kernel_size = inputs
    keep(ctx, grad, index, x)
    ctx.kernel_size = kernel_size


def _scattered_weight_grad_backward(ctx: Any, v: Tensor | None) -> tuple[Tensor | None, ...]:
    if v is None:
        return (None,) * 5
    grad, index, x = ctx.saved_tensors
    need_grad, _, need_x, _, _ = ctx.needs_input_grad
    return (
        _chosen(x, index, v) if need_grad else None,
        None,
        circular_conv2d_pool_transposed(grad, index, v) if need_x else None,
        None,
        None,
    )


def _scattered_weight_grad_jvp(ctx: Any, grad_t: Tensor | None, _: Any, x_t: Tensor | None, *__: Any) -> Tensor:
    grad, index, x = ctx.saved_tensors
    total = sum_of_parts(
        None if grad_t is None else _scattered_weight_grad(grad_t, index, x, *ctx.kernel_size),
        None if x_t is None else _scattered_weight_grad(grad, index, x_t, *ctx.kernel_size),
    )
    return torch.zeros_like(_scattered_weight_grad_fake(grad, index, x, *ctx.kernel_size)) if total is None else total


# sum_{n,h,w} polyphase_scatter(grad, index)[n,d,h,w] x[n,c,(h+i-kh//2) mod H,(w+j-kw//2) mod W], (D, C, kh, kw)
_scattered_weight_grad = differentiable(
    "circular_conv2d_scattered_weight_grad",
    fake=_scattered_weight_grad_fake,
    save=_scattered_weight_grad_save,
    backward=_scattered_weight_grad_backward,
    jvp=_scattered_weight_grad_jvp,
)
_scattered = differentiable(
    "circular_conv2d_scattered",
    fake=_scattered_fake,
    save=_scattered_save,
    backward=_scattered_backward,
    jvp=_scattered_jvp,
    vmap=_scattered_vmap,
)
_pool = differentiable(
    "circular_conv2d_pool",
    fake=_pool_fake,
    save=_pool_save,
    backward=_pool_backward,
    jvp=_pool_jvp,
    vmap=joins_rows("circular_conv2d_pool"),
)


def kernel_cases() -> list[KernelCase]:
    def inputs() -> tuple[Tensor, ...]:
        return normal(19, 3, 8, 6), normal(4, 3, 3, 3), normal(4)

    return cases("circular_conv2d_pool", inputs, circular_conv2d_pool, circular_conv2d_pool_torch, derivatives=1)
