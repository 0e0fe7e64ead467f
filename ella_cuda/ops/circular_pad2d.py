"""Circular padding in one kernel, and its transpose. Each of the two is the derivative of the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ella_cuda.ops._operator import batched_first, differentiable, keep, nested_forward_mode


def circular_pad2d(x: Tensor, pad_h: int, pad_w: int) -> Tensor:
    r"""Put rows and columns of an image on a torus around it.

    .. math:: y[n,c,i,j] = x\big[n,c,(i-p_h) \bmod H,(j-p_w) \bmod W\big]

    The map of ``torch.nn.functional.pad(x, (pad_w, pad_w, pad_h, pad_h), mode="circular")``, for any width of the border. There each
    border is a copy of its own and, on the way back, each copy one of the whole gradient: on CUDA some 30 kernels a layer, which is
    most of what a training step launches. Here it is one each way.

    Args:
        x: ``(N, C, H, W)``, float32 or float64.
        pad_h: rows above and as many below.
        pad_w: columns on the left and as many on the right.

    Returns:
        ``(N, C, H + 2 pad_h, W + 2 pad_w)``, contiguous. The gradient is summed in a fixed order.

    Raises:
        RuntimeError: x has another shape or dtype, no pixel in a direction that is padded, or a pad is negative or over 2^30.
    """
    return circular_pad2d_torch(x, pad_h, pad_w) if nested_forward_mode() else _pad(x, pad_h, pad_w)


def circular_pad2d_torch(x: Tensor, pad_h: int, pad_w: int) -> Tensor:
    """Plain-torch twin of :func:`circular_pad2d`."""
    rows, columns = (
        torch.arange(-pad, size + pad, device=x.device) % max(size, 1)
        for pad, size in zip((pad_h, pad_w), x.shape[2:], strict=True)
    )
    return x[:, :, rows][:, :, :, columns]


def _pad_fake(x: Tensor, pad_h: int, pad_w: int) -> Tensor:
    n, c, h, w = x.shape
    return x.new_empty(n, c, h + 2 * pad_h, w + 2 * pad_w)


def _fold_fake(grad: Tensor, pad_h: int, pad_w: int) -> Tensor:
    n, c, h, w = grad.shape
    return grad.new_empty(n, c, h - 2 * pad_h, w - 2 * pad_w)


def _save(ctx: Any, inputs: tuple[Tensor, int, int], output: Tensor) -> None:
    keep(ctx)
    ctx.pads = inputs[1:]


def _pad_backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
    return (None if grad is None else _fold(grad, *ctx.pads)), None, None


def _fold_backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
    return (None if grad is None else _pad(grad, *ctx.pads)), None, None


def _pad_jvp(ctx: Any, x_t: Tensor, *_: Any) -> Tensor:
    return _pad(x_t, *ctx.pads)


def _fold_jvp(ctx: Any, grad_t: Tensor, *_: Any) -> Tensor:
    return _fold(grad_t, *ctx.pads)


def _batch_joins_n(name: str) -> Any:
    def vmap(info: Any, in_dims: tuple[Any, ...], image: Tensor, pad_h: int, pad_w: int) -> tuple[Tensor, int]:
        image = batched_first(image, in_dims[0])
        op = getattr(torch.ops.ella_cuda, name)
        return op(image.flatten(0, 1), pad_h, pad_w).unflatten(0, image.shape[:2]), 0

    return vmap


_pad = differentiable(
    "circular_pad2d",
    fake=_pad_fake,
    save=_save,
    backward=_pad_backward,
    jvp=_pad_jvp,
    vmap=_batch_joins_n("circular_pad2d"),
)
_fold = differentiable(
    "circular_fold2d",
    fake=_fold_fake,
    save=_save,
    backward=_fold_backward,
    jvp=_fold_jvp,
    vmap=_batch_joins_n("circular_fold2d"),
)
