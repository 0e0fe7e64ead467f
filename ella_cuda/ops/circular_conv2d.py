"""Circular convolution at stride 1, for few channels.

The map is linear in each of ``x`` and ``weight``, so every derivative of every order is a sum of calls to the same two ops,
``circular_conv2d`` and ``circular_conv2d_weight_grad``, with tangents in place of arguments.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ella_cuda.ops._cases import KernelCase, cases, normal
from ella_cuda.ops._operator import (
    batched_first,
    differentiable,
    keep,
    map_over_batch,
    nested_forward_mode,
    operand_sizes,
    sum_of_parts,
)
from ella_cuda.ops._precision import without_autocast
from ella_cuda.ops.circular_pad2d import circular_pad2d


def circular_conv2d(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    r"""Cross-correlation with circular padding and a kernel of odd sides; the output is as large as the input.

    .. math:: y[n,d,h,w] = \sum_{c,i,j} K[d,c,i,j]\, x\big[n,c,(h+i-\lfloor k_h/2\rfloor) \bmod H,(w+j-\lfloor k_w/2\rfloor) \bmod W\big]
        + b[d]

    The map of ``torch.nn.Conv2d(..., padding="same", padding_mode="circular")``; a kernel larger than the image meets pixels more
    than once. On the CPU it is an op of this package, made for few channels, where it is several times as fast as padding and
    :func:`torch.nn.functional.conv2d`. On CUDA it is cuDNN's convolution, which no kernel of ours would improve on, of
    :func:`ella_cuda.ops.circular_pad2d`, by torch's default in TF32 (``torch.backends.cudnn.allow_tf32``); half precision, other devices
    and empty images take :func:`circular_conv2d_torch`.

    Where each image of a call has numbers in one of its polyphase components only, such as gradients that come through
    :func:`ella_cuda.ops.polyphase_pool`, the other zeros are not multiplied on the CPU, here and in the gradient of the weight: by
    infinities and NaN neither. That takes images of even sides, kernels of at least three rows and columns, and channels enough for
    it to pay; an image of zeros alone counts as having one component.

    Args:
        x: ``(N, C, H, W)``.
        weight: K, ``(D, C, kh, kw)`` with kh and kw odd.
        bias: b, ``(D,)`` or None.

    Returns:
        ``(N, D, H, W)``, of x's dtype (on the CPU float32 or float64); on the CPU contiguous.

    Raises:
        RuntimeError: a shape, dtype or device does not fit; the message names the argument.
    """
    if nested_forward_mode():
        return circular_conv2d_torch(x, weight, bias)
    if x.device.type in ("cpu", "meta"):
        return convolve(x, weight, bias)
    return _padded(x, weight, bias) if x.device.type == "cuda" else circular_conv2d_torch(x, weight, bias)


def _padded(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """:func:`circular_conv2d` by torch's convolution of padded images."""
    require_convolution("circular_conv2d", x, weight, bias)
    if x.dtype not in (torch.float32, torch.float64) or not x.numel() or not weight.numel():
        return circular_conv2d_torch(x, weight, bias)
    with without_autocast(x.device.type):  # no lower precision than the CPU's
        return F.conv2d(circular_pad2d(x, *(k // 2 for k in weight.shape[2:])), weight, bias)


def require_convolution(op: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise the RuntimeError of an op whose arguments do not fit, as the CPU's kernels do: torch has other words, and none for no images."""
    if x.dim() != 4:
        raise RuntimeError(f"{op}: x must have shape (N, C, H, W), got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise RuntimeError(f"{op}: x must be float32 or float64, got {x.dtype}")
    if weight.dim() != 4 or weight.shape[1] != x.shape[1]:
        raise RuntimeError(
            f"{op}: weight must have shape (D, C, kh, kw) with the C = {x.shape[1]} of x, got {tuple(weight.shape)}"
        )
    if weight.shape[2] % 2 == 0 or weight.shape[3] % 2 == 0:
        raise RuntimeError(f"{op}: weight must have odd height and width, got {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise RuntimeError(
            f"{op}: bias must have shape (D,) with the D = {weight.shape[0]} of weight, got {tuple(bias.shape)}"
        )


def circular_conv2d_torch(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Plain-torch reference of :func:`circular_conv2d`."""
    require_convolution("circular_conv2d", x, weight, bias)
    (height, width), (half_h, half_w) = x.shape[2:], (k // 2 for k in weight.shape[2:])
    if half_h <= height and half_w <= width and x.numel() and weight.numel():
        return F.conv2d(F.pad(x, (half_w, half_w, half_h, half_h), mode="circular"), weight, bias)
    # F.pad wraps around once at most.
    rows = torch.arange(-half_h, height + half_h if height else -half_h, device=x.device) % max(height, 1)
    columns = torch.arange(-half_w, width + half_w if width else -half_w, device=x.device) % max(width, 1)
    patches = (
        x[:, :, rows][:, :, :, columns].unfold(2, weight.shape[2], 1).unfold(3, weight.shape[3], 1)
        if x.numel()
        else None
    )
    if patches is None:
        y = x.sum() * weight.sum() + x.new_zeros(x.shape[0], weight.shape[0], height, width)
    else:
        y = torch.einsum("nchwij,dcij->ndhw", patches, weight)
    return y if bias is None else y + bias[:, None, None]


def convolution_sizes(op: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> dict[str, int]:
    """Check a convolution's tensors and get their axes' sizes, for an op's fake."""
    s = operand_sizes(op, x=(x, "N C H W"), weight=(weight, "D C kh kw"))
    require_odd(op, "weight", s["kh"], s["kw"])
    return operand_sizes(op, s, x=(x, None), bias=(bias, "D"))


def require_odd(op: str, name: str, kernel_h: int, kernel_w: int) -> None:
    """Check that a kernel has a centre, for an op's fake."""
    for size in (kernel_h, kernel_w):
        for holds in (size > 0, size % 2 == 1):
            torch._check(holds, lambda: f"{op}: {name} must have odd height and width, got ({kernel_h}, {kernel_w})")


def mirrored(weight: Tensor) -> Tensor:
    """The kernel of the transposed map, ``(D, C, kh, kw) -> (C, D, kh, kw)``."""
    return weight.flip(2, 3).transpose(0, 1)


# circular_conv2d ------------------------------------------------------------------------------------------------------------


def _forward_fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    s = convolution_sizes("circular_conv2d", x, weight, bias)
    return x.new_empty(s["N"], s["D"], s["H"], s["W"])


def _forward_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _ = inputs
    keep(ctx, x, weight)


def _forward_backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if grad is None:
        return None, None, None
    x, weight = ctx.saved_tensors
    need_x, need_weight, need_bias = ctx.needs_input_grad
    return (
        convolve(grad, mirrored(weight), None) if need_x else None,
        weight_grad(grad, x, *weight.shape[2:]) if need_weight else None,
        grad.sum((0, 2, 3)) if need_bias else None,
    )


def _forward_jvp(ctx: Any, x_t: Tensor | None, weight_t: Tensor | None, bias_t: Tensor | None) -> Tensor:
    x, weight = ctx.saved_tensors
    total = sum_of_parts(
        None if x_t is None else convolve(x_t, weight, None),
        None if weight_t is None else convolve(x, weight_t, None),
        None if bias_t is None else bias_t[:, None, None].expand(x.shape[0], -1, *x.shape[2:]),
    )
    return torch.zeros_like(_forward_fake(x, weight, None)) if total is None else total.contiguous()


def _forward_vmap(info: Any, in_dims: tuple[int | None, ...], *args: Tensor | None) -> tuple[Any, Any]:
    op = torch.ops.ella_cuda.circular_conv2d
    x, weight, bias = (batched_first(a, d) for a, d in zip(args, in_dims, strict=True))
    x_dim, weight_dim, bias_dim = in_dims
    if weight_dim is None:  # the batch joins N
        shared = None if bias_dim is not None else bias
        y = (
            op(x, weight, shared)[None]
            if x_dim is None
            else op(x.flatten(0, 1), weight, shared).unflatten(0, x.shape[:2])
        )
        return (y if bias_dim is None else y + bias[:, None, :, None, None]), 0
    if x_dim is None:  # the batch joins D
        if bias is not None:
            bias = (bias.expand(info.batch_size, -1) if bias_dim is None else bias).flatten()
        return op(x, weight.flatten(0, 1), bias).unflatten(1, weight.shape[:2]), 1
    return map_over_batch(op, info, in_dims, args)


# circular_conv2d_weight_grad ------------------------------------------------------------------------------------------------


def _weight_grad_fake(grad: Tensor, x: Tensor, kernel_h: int, kernel_w: int) -> Tensor:
    s = operand_sizes("circular_conv2d_weight_grad", x=(x, "N C H W"), grad=(grad, "N D H W"))
    require_odd("circular_conv2d_weight_grad", "the kernel", kernel_h, kernel_w)
    return x.new_empty(s["D"], s["C"], kernel_h, kernel_w)


def _weight_grad_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad, x, *kernel_size = inputs
    keep(ctx, grad, x)
    ctx.kernel_size = kernel_size


def _weight_grad_backward(ctx: Any, v: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None]:
    if v is None:
        return None, None, None, None
    grad, x = ctx.saved_tensors
    return (
        convolve(x, v, None) if ctx.needs_input_grad[0] else None,
        convolve(grad, mirrored(v), None) if ctx.needs_input_grad[1] else None,
        None,
        None,
    )


def _weight_grad_jvp(ctx: Any, grad_t: Tensor | None, x_t: Tensor | None, *_: Any) -> Tensor:
    grad, x = ctx.saved_tensors
    total = sum_of_parts(
        None if grad_t is None else weight_grad(grad_t, x, *ctx.kernel_size),
        None if x_t is None else weight_grad(grad, x_t, *ctx.kernel_size),
    )
    return torch.zeros_like(_weight_grad_fake(grad, x, *ctx.kernel_size)) if total is None else total


def _weight_grad_vmap(
    info: Any, in_dims: tuple[Any, ...], grad: Tensor, x: Tensor, *kernel_size: int
) -> tuple[Any, Any]:
    op = torch.ops.ella_cuda.circular_conv2d_weight_grad
    grad_dim, x_dim = in_dims[:2]
    if x_dim is None:  # the batch joins D
        grad = grad.movedim(grad_dim, 1)
        return op(grad.flatten(1, 2), x, *kernel_size).unflatten(0, grad.shape[1:3]), 0
    if grad_dim is None:  # the batch joins C
        x = x.movedim(x_dim, 1)
        return op(grad, x.flatten(1, 2), *kernel_size).unflatten(1, x.shape[1:3]), 1
    return map_over_batch(op, info, (grad_dim, x_dim, None, None), (grad, x, *kernel_size))


# sum_{n,h,w} grad[n,d,h,w] x[n,c,(h+i-kh//2) mod H,(w+j-kw//2) mod W], (D, C, kh, kw)
weight_grad = differentiable(
    "circular_conv2d_weight_grad",
    fake=_weight_grad_fake,
    save=_weight_grad_save,
    backward=_weight_grad_backward,
    jvp=_weight_grad_jvp,
    vmap=_weight_grad_vmap,
)
convolve = differentiable(
    "circular_conv2d",
    fake=_forward_fake,
    save=_forward_save,
    backward=_forward_backward,
    jvp=_forward_jvp,
    vmap=_forward_vmap,
)


def kernel_cases() -> list[KernelCase]:
    def inputs() -> tuple[Tensor, ...]:
        return normal(5, 3, 8, 16), normal(4, 3, 3, 3), normal(4)

    return cases("circular_conv2d", inputs, circular_conv2d, circular_conv2d_torch, derivatives=1)
