"""Subsampling by two that commutes with translations, one choice per image.

Three ops close the family under differentiation: ``polyphase_pool`` chooses and gathers, ``polyphase_select`` gathers with a given
choice, ``polyphase_scatter`` is the transpose of the gather. Each of the last two is the derivative of the other.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ella_cuda.ops._cases import KernelCase, cases, normal
from ella_cuda.ops._operator import INDEX, batched_first, differentiable, keep, operand_sizes


def polyphase_pool(x: Tensor, norm: float = 2) -> Tensor:
    """Keep, for each image, the one of its four polyphase components with the largest norm.

    Component i is ``x[:, :, (i & 1)::2, (i >> 1)::2]``; a translation of the image permutes and translates the components, so the
    output moves with the input. The choice is made per image: an image's output does not depend on its neighbours in the batch.
    Equivalent to :func:`polyphase_pool_torch`.

    Args:
        x: ``(N, C, H, W)``, H and W even, float32 or float64.
        norm: 1, 2 or ``math.inf``: the norm over channels and positions that decides. Of equal components the first is taken.

    Returns:
        ``(N, C, H/2, W/2)``. Where the choice changes, the map is not differentiable; elsewhere the gradient is the gather's.

    Raises:
        ValueError: ``norm`` is none of these.
        RuntimeError: x is not 4-dimensional, floating point and of even height and width.

    Source: Chaman and Dokmanic, "Truly shift-invariant convolutional neural networks", CVPR 2021, section 4; used per image in
    van der Ouderaa et al., NeurIPS 2023, appendix on the network.
    """
    check_norm("polyphase_pool", norm)
    return _pool(x, float(norm))[0]


def polyphase_pool_torch(x: Tensor, norm: float = 2) -> Tensor:
    """Plain-torch reference of :func:`polyphase_pool`."""
    check_norm("polyphase_pool", norm)
    components = torch.stack([x[:, :, i & 1 :: 2, i >> 1 :: 2] for i in range(4)])
    sizes = components.detach().double().flatten(2)
    norms = torch.linalg.vector_norm(sizes, ord=norm, dim=2) if sizes.shape[2] else sizes.new_zeros(sizes.shape[:2])
    return components[norms.argmax(0), torch.arange(x.shape[0], device=x.device)]


def check_norm(op: str, norm: float) -> None:
    """Raise the ValueError of an op whose norm is none that there is."""
    if norm not in (1, 2, math.inf):
        raise ValueError(f"{op}: norm must be 1, 2 or math.inf, got {norm!r}.")


def require_norm(op: str, norm: float) -> None:
    """Check the norm as the kernels do, for an op's fake."""
    torch._check(
        norm == 1 or norm == 2 or norm == math.inf, lambda: f"{op}: norm must be 1, 2 or inf, got {float(norm):g}"
    )


def require_even(op: str, x: Tensor) -> None:
    """Check that images have polyphase components of one size, for an op's fake."""
    for size in x.shape[2:]:
        torch._check(size % 2 == 0, lambda: f"{op}: x must have even height and width, got {tuple(x.shape)}")


def _fold(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> list[Tensor]:
    """The batch axis joins N: every image chooses for itself, so nothing else changes."""
    size = info.batch_size
    moved = (
        batched_first(t, d) if d is not None else t.expand(size, *t.shape)
        for t, d in zip(tensors, in_dims, strict=True)
    )
    return [t.flatten(0, 1) for t in moved]


def _halved(x: Tensor, op: str, **index: Any) -> Tensor:
    n, c, h, w = operand_sizes(op, x=(x, "N C H W"), **index).values()
    require_even(op, x)
    return x.new_empty(n, c, h // 2, w // 2)


def _pool_fake(x: Tensor, norm: float) -> tuple[Tensor, Tensor]:
    require_norm("polyphase_pool", norm)
    return _halved(x, "polyphase_pool"), x.new_empty(x.shape[0], dtype=torch.int64)


def _pool_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    keep(ctx, output[1])


def _pool_backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, None]:
    return (None if grad is None else polyphase_scatter(grad, ctx.saved_tensors[0])), None


def _pool_jvp(ctx: Any, x_t: Tensor, _: Any) -> tuple[Tensor, None]:
    return polyphase_select(x_t, ctx.saved_tensors[0]), None


def _pool_vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, norm: float) -> tuple[Any, Any]:
    (folded,) = _fold(info, in_dims[:1], x)
    out, index = torch.ops.ella_cuda.polyphase_pool(folded, norm)
    return (out.unflatten(0, (info.batch_size, -1)), index.unflatten(0, (info.batch_size, -1))), (0, 0)


def _index_save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    keep(ctx, inputs[1])


def _select_backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
    return (None if grad is None else polyphase_scatter(grad, ctx.saved_tensors[0])), None


def _select_jvp(ctx: Any, x_t: Tensor, _: Any) -> Tensor:
    return polyphase_select(x_t, ctx.saved_tensors[0])


def _select_vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, index: Tensor) -> tuple[Tensor, int]:
    return torch.ops.ella_cuda.polyphase_select(*_fold(info, in_dims, x, index)).unflatten(0, (info.batch_size, -1)), 0


def _scatter_fake(grad: Tensor, index: Tensor) -> Tensor:
    n, c, h, w = operand_sizes("polyphase_scatter", grad=(grad, "N C h w"), index=(index, "N", INDEX)).values()
    return grad.new_empty(n, c, 2 * h, 2 * w)


def _scatter_backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
    return (None if grad is None else polyphase_select(grad, ctx.saved_tensors[0])), None


def _scatter_jvp(ctx: Any, grad_t: Tensor, _: Any) -> Tensor:
    return polyphase_scatter(grad_t, ctx.saved_tensors[0])


def _scatter_vmap(info: Any, in_dims: tuple[int | None, ...], grad: Tensor, index: Tensor) -> tuple[Tensor, int]:
    return torch.ops.ella_cuda.polyphase_scatter(*_fold(info, in_dims, grad, index)).unflatten(
        0, (info.batch_size, -1)
    ), 0


_pool = differentiable(
    "polyphase_pool", fake=_pool_fake, save=_pool_save, backward=_pool_backward, jvp=_pool_jvp, vmap=_pool_vmap
)
polyphase_select = differentiable(
    "polyphase_select",
    fake=lambda x, index: _halved(x, "polyphase_select", index=(index, "N", INDEX)),
    save=_index_save,
    backward=_select_backward,
    jvp=_select_jvp,
    vmap=_select_vmap,
)
polyphase_scatter = differentiable(
    "polyphase_scatter",
    fake=_scatter_fake,
    save=_index_save,
    backward=_scatter_backward,
    jvp=_scatter_jvp,
    vmap=_scatter_vmap,
)


def kernel_cases() -> list[KernelCase]:
    of = lambda function: lambda x: function(x, 2)  # noqa: E731
    inputs = lambda: (normal(4, 6, 8, 8),)  # noqa: E731
    return cases("polyphase_pool", inputs, of(polyphase_pool), of(polyphase_pool_torch), derivatives=1)
