"""Circular padding in one kernel, and its transpose. Each of the two is the derivative of the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ella_cuda.ops._cases import KernelCase, cases, normal
from ella_cuda.ops._operator import INDEX, differentiable, keep, nested_forward_mode, operand_sizes

MAX_PADDED = 1 << 30  # rows or columns on a side; the kernels' limit


def circular_pad2d(x: Tensor, pad_h: int, pad_w: int, index: Tensor | None = None) -> Tensor:
    r"""Put rows and columns of an image with circular padding around it.

    .. math:: y[n,c,i,j] = x\big[n,c,(i-p_h+a_n) \bmod H,(j-p_w+b_n) \bmod W\big], \qquad
        a_n = \mathrm{index}_n \bmod 2, \quad b_n = \lfloor \mathrm{index}_n / 2 \rfloor

    Without index the map of ``torch.nn.functional.pad(x, (pad_w, pad_w, pad_h, pad_h), mode="circular")``, for any width of the border.
    There each border is a copy of its own and, on the way back, each copy one of the whole gradient: on CUDA some 30 kernels a layer,
    which is most of what a training step launches. Here it is one each way. With index a convolution of stride 2 that follows gives
    the polyphase component of that number, see :func:`ella_cuda.ops.polyphase_pool`.

    Args:
        x: ``(N, C, H, W)``, float32 or float64.
        pad_h: rows above and as many below.
        pad_w: columns on the left and as many on the right.
        index: ``(N,)``, int64, 0 to 3: how each image is moved first, up by a and to the left by b; None moves none.

    Returns:
        ``(N, C, H + 2 pad_h, W + 2 pad_w)``, contiguous. The gradient is summed in a fixed order.

    Raises:
        RuntimeError: x or index has another shape or dtype, there is no pixel in a direction that is padded, a pad is negative or over
            2^30, or an index is none of 0 to 3 (on CUDA that image is NaN instead).
    """
    call = circular_pad2d_torch if nested_forward_mode() else _pad
    return call(x, pad_h, pad_w, index)


def circular_fold2d(grad: Tensor, pad_h: int, pad_w: int, index: Tensor | None = None) -> Tensor:
    """The transpose of :func:`circular_pad2d`, with its pads and index: ``(N, C, H + 2 pad_h, W + 2 pad_w) -> (N, C, H, W)``, all that
    a pixel is repeated at, summed in a fixed order. RuntimeError where grad has no such shape, and as there."""
    return _fold(grad, pad_h, pad_w, index)


def circular_pad2d_torch(x: Tensor, pad_h: int, pad_w: int, index: Tensor | None = None) -> Tensor:
    """Plain-torch reference of :func:`circular_pad2d`."""
    rows, columns = (
        torch.arange(-pad, size + pad, device=x.device) for pad, size in zip((pad_h, pad_w), x.shape[2:], strict=True)
    )
    height, width = (max(size, 1) for size in x.shape[2:])
    if index is None:
        return x[:, :, rows % height][:, :, :, columns % width]
    image = torch.arange(x.shape[0], device=x.device)[:, None, None, None]
    channel = torch.arange(x.shape[1], device=x.device)[:, None, None]
    up, left = (index & 1)[:, None], (index >> 1)[:, None]
    return x[image, channel, ((rows + up) % height)[:, None, :, None], ((columns + left) % width)[:, None, None]]


def _pad_fake(x: Tensor, pad_h: int, pad_w: int, index: Tensor | None) -> Tensor:
    n, c, h, w = _require_pads("circular_pad2d", "x", x, ("N", "C", "H", "W"), (pad_h, pad_w), index, folded=False)
    return x.new_empty(n, c, h + 2 * pad_h, w + 2 * pad_w)


def _fold_fake(grad: Tensor, pad_h: int, pad_w: int, index: Tensor | None) -> Tensor:
    axes = "N", "C", "H + 2 pad_h", "W + 2 pad_w"
    return grad.new_empty(_require_pads("circular_fold2d", "grad", grad, axes, (pad_h, pad_w), index, folded=True))


def _require_pads(
    op: str,
    name: str,
    image: Tensor,
    axes: tuple[str, ...],
    pads: tuple[int, int],
    index: Tensor | None,
    *,
    folded: bool,
) -> tuple[int, ...]:
    """Check the arguments of one of the two ops and get the sizes without the padding."""
    known = operand_sizes(op, **{name: (image, axes)})
    for pad in pads:
        for holds in (pad >= 0, pad <= MAX_PADDED):
            torch._check(holds, lambda: f"{op}: pad_h and pad_w must be from 0 to 2^30, got {pads[0]} and {pads[1]}")
    sizes = [size - 2 * pad if folded else size for size, pad in zip(image.shape[2:], pads, strict=True)]
    for size, pad in zip(sizes, pads, strict=True):
        torch._check(
            size > 0 or (size == 0 and pad == 0),
            lambda: (
                f"{op}: {name} must have a pixel in each direction that is padded, got {tuple(image.shape)} with pad_h {pads[0]} and "
                f"pad_w {pads[1]}"
            ),
        )
    operand_sizes(op, known, **{name: (image, None), "index": (index, "N", INDEX)})
    return *image.shape[:2], *sizes


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    keep(ctx, inputs[3])
    ctx.pads = inputs[1:3]


def _pad_backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None, None]:
    return (None if grad is None else _fold(grad, *ctx.pads, *ctx.saved_tensors)), None, None, None


def _fold_backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None, None]:
    return (None if grad is None else _pad(grad, *ctx.pads, *ctx.saved_tensors)), None, None, None


def _pad_jvp(ctx: Any, x_t: Tensor, *_: Any) -> Tensor:
    return _pad(x_t, *ctx.pads, *ctx.saved_tensors)


def _fold_jvp(ctx: Any, grad_t: Tensor, *_: Any) -> Tensor:
    return _fold(grad_t, *ctx.pads, *ctx.saved_tensors)


def _batch_joins_n(name: str) -> Any:
    def vmap(
        info: Any, in_dims: tuple[Any, ...], image: Tensor, pad_h: int, pad_w: int, index: Tensor | None
    ) -> tuple[Tensor, int]:
        image, index = (
            t if t is None else (t.expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0)).flatten(0, 1)
            for t, d in ((image, in_dims[0]), (index, in_dims[3] if index is not None else None))
        )
        op = getattr(torch.ops.ella_cuda, name)
        return op(image, pad_h, pad_w, index).unflatten(0, (info.batch_size, -1)), 0

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


def kernel_cases() -> list[KernelCase]:
    def case(name: str, moved: bool) -> list[KernelCase]:
        def of(function: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
            # Once around and a pixel; of four images, each by another component.
            return lambda x: function(x, 1, 9, torch.arange(4, device=x.device) if moved else None)

        return cases(name, lambda: (normal(4, 6, 8, 8),), of(circular_pad2d), of(circular_pad2d_torch), derivatives=1)

    return [*case("circular_pad2d", moved=False), *case("circular_pad2d of moved images", moved=True)]
