"""The factored fully connected map (F-FC) of van der Ouderaa et al. (NeurIPS 2023), eq. 5, as one fused op.

The map is linear in each of ``x``, ``weight_in`` and ``weight_out``, so every derivative of every order is a sum of calls to the
same two ops, ``factored_linear`` and ``factored_linear_backward``, with tangents in place of arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ella_cuda._extension import _C
from ella_cuda.ops._cases import KernelCase, cases, normal
from ella_cuda.ops._operator import (
    batched_first,
    differentiable,
    keep,
    map_over_batch,
    nested_forward_mode,
    operand_sizes,
    plain_autograd,
    require_backend,
)
from ella_cuda.ops._precision import allows_tf32, without_autocast

# These two have no fake: what they keep is as long as the CPU's vectors make it, and plain autograd alone calls them.
_OP_KEEPING = torch.ops.ella_cuda.factored_linear_keeping.default
_OP_BACKWARD_KEEPING = torch.ops.ella_cuda.factored_linear_backward_keeping.default
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def factored_linear(
    x: Tensor, weight_in: Tensor, weight_out: Tensor, bias_in: Tensor | None = None, bias_out: Tensor | None = None
) -> Tensor:
    r"""Fully connected map over positions, factored through one scalar per pair of channels.

    .. math:: y[n,d,y] = \sum_c V[d,c,y] \Big(\sum_x U[d,c,x]\, x[n,c,x] + b_{in}[d]\Big) + b_{out}[y]

    Equivalent to :func:`factored_linear_torch`, without storing the ``(N, D, C)`` intermediate where it is large. It is kept for the
    backward where it is no larger than x (from 32 positions on: than x and the result together): computing it again costs up to a
    fifth of all products. On CUDA it is kept in float32 alone, of at most 2^23 numbers, and a call stores at most so many of it (or
    those of one channel) at a time. Float64 products there are torch's. Float32 products run on tensor cores, from values that are
    split in two TF32 numbers: an infinite value, or one within 2^-12 of overflow, gives NaN. Where torch may multiply float32 matrices
    in TF32 (``torch.backends.cuda.matmul.fp32_precision``) each value is rounded to one TF32 number instead, a relative error of at
    most 2^-11 in each factor of a product, the intermediate among them; sums stay as accurate as float32's. Derivatives have the
    setting of the forward pass. On the CPU the backward has the intermediate, and its gradient, for at most 1,024
    inputs and so many output channels that each of the two is no larger than twice the larger one of those inputs' x and y, or 4 MiB,
    or six channels (float32 with AVX-512; fewer inputs and channels otherwise).

    Where X or Y is 1, the weights multiplied out are no larger than they are apart, and take fewer operations: there, from
    N D C = 2^19 on (on CUDA from 16 MiB of the intermediate on, in float32 with Y = 1 always), the map is one matrix product with
    them, in which V U may overflow where V (U x) does not. Where Y is not 1, and in float64 on CUDA, it is torch's, in eager mode,
    whose settings (TF32 on CUDA, if allowed) apply.

    Args:
        x: ``(N, C, X)``, N inputs of C channels on X positions.
        weight_in: U, ``(D, C, X)``.
        weight_out: V, ``(D, C, Y)``.
        bias_in: ``(D,)`` or None.
        bias_out: ``(Y,)`` or None.

    Returns:
        ``(N, D, Y)``, contiguous, of x's dtype (float32 or float64).

    Raises:
        RuntimeError: a shape, dtype or device does not fit; the message names the argument.

    Source: van der Ouderaa, Immer, van der Wilk, "Learning Layer-wise Equivariances Automatically using Gradients", NeurIPS 2023, eq. 5.
    """
    args = x, weight_in, weight_out, bias_in, bias_out
    plain = plain_autograd(args)
    if (plain or plain_autograd(args, graph=False)) and _to_multiply_out(*args):
        return _MultipliedOut.apply(*args) if plain else _multiplied_out(*args)
    if plain and _keeps(*args):
        return _Keeping.apply(*args, allows_tf32(x))
    if nested_forward_mode():
        return factored_linear_torch(*args)
    return _forward(*args, allows_tf32(x))


def factored_linear_torch(
    x: Tensor, weight_in: Tensor, weight_out: Tensor, bias_in: Tensor | None = None, bias_out: Tensor | None = None
) -> Tensor:
    """Plain-torch reference of :func:`factored_linear`."""
    z = torch.einsum("ncx,dcx->ndc", x, weight_in)
    if bias_in is not None:
        z = z + bias_in[:, None]
    y = torch.einsum("ndc,dcy->ndy", z, weight_out)
    return y if bias_out is None else y + bias_out


def _to_multiply_out(
    x: Tensor, weight_in: Tensor, weight_out: Tensor, bias_in: Tensor | None, bias_out: Tensor | None
) -> bool:
    """Whether these are arguments that the op would take, and that make one large product for torch."""
    if not x.dim() == weight_in.dim() == weight_out.dim() == 3:
        return False
    (n, c, x_size), (d, _, y_size) = x.shape, weight_out.shape
    if 1 not in (x_size, y_size) or not (x.is_cpu or x.is_cuda):
        return False
    if not _C.factored_linear_by_torch(n, c, x_size, d, y_size, x.element_size(), x.is_cuda):
        return False
    others = (weight_in, (d, c, x_size)), (weight_out, (d, c, y_size)), (bias_in, (d,)), (bias_out, (y_size,))
    return (
        x.dtype in (torch.float32, torch.float64)
        and x.layout == torch.strided
        and all(
            t is None or (tuple(t.shape) == shape and t.dtype == x.dtype and t.device == x.device)
            for t, shape in others
        )
    )


def _product_of_weights(weight_in: Tensor, weight_out: Tensor) -> Tensor:
    """``V[d,c,y] U[d,c,x]`` as a ``(C X, D Y)`` matrix, where X or Y is 1."""
    weight = weight_in * weight_out  # (D, C, X or Y)
    return weight.flatten(1).t() if weight_out.shape[2] == 1 else weight.transpose(0, 1).flatten(1)


def _multiplied_out(
    x: Tensor, weight_in: Tensor, weight_out: Tensor, bias_in: Tensor | None, bias_out: Tensor | None
) -> Tensor:
    """:func:`factored_linear` as a product with ``V[d,c,y] U[d,c,x]``, where x or y has one value. In x's dtype under autocast too,
    as the compiled ops."""
    with without_autocast(x.device.type):
        d, _, y_size = weight_out.shape
        weight, inputs = _product_of_weights(weight_in, weight_out), x.flatten(1)
        shift = None if bias_out is None else bias_out.expand(d, y_size)
        if bias_in is not None:
            inner = bias_in[:, None] * weight_out.sum(1)
            shift = inner if shift is None else inner + shift
        y = inputs @ weight if shift is None else torch.addmm(shift.flatten(), inputs, weight)
        return y.unflatten(1, (d, y_size))


class _MultipliedOut(torch.autograd.Function):
    """:func:`_multiplied_out` under plain autograd; whatever else looks at the backward sees that of the op."""

    @staticmethod
    def forward(ctx: Any, *args: Tensor | None) -> Tensor:
        ctx.save_for_backward(*args[:4])
        ctx.set_materialize_grads(False)
        ctx.allow_tf32 = allows_tf32(args[0])
        return _multiplied_out(*args)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Gradients:
        if grad is None:
            return None, None, None, None, None
        x, weight_in, weight_out, bias_in = inputs = ctx.saved_tensors
        wanted = tuple(ctx.needs_input_grad)
        if not plain_autograd((grad, *inputs), graph=False):
            grads = _backward(grad, *inputs, *wanted, ctx.allow_tf32)
            return tuple(g if want else None for g, want in zip(grads, wanted, strict=True))
        with without_autocast(x.device.type):
            (d, c, y_size), x_size = weight_out.shape, x.shape[2]
            flat, sums = grad.flatten(1), grad.sum(0)  # (N, D Y), (D, Y)
            x_grad = weight_in_grad = weight_out_grad = bias_in_grad = None
            if wanted[0]:
                x_grad = (flat @ _product_of_weights(weight_in, weight_out).t()).view(x.shape)
            if wanted[1] or wanted[2]:
                weight = flat.t() @ x.flatten(1)  # (D Y, C X)
                weight = weight.view(d, c, x_size) if y_size == 1 else weight.view(d, y_size, c).transpose(1, 2)
                if wanted[1]:
                    weight_in_grad = (weight * weight_out).sum_to_size(weight_in.shape)
                if wanted[2]:
                    weight_out_grad = (weight * weight_in).sum_to_size(weight_out.shape)
                if wanted[2] and bias_in is not None:
                    weight_out_grad = weight_out_grad + (bias_in[:, None] * sums)[:, None]
            if wanted[3]:
                bias_in_grad = (weight_out.sum(1) * sums).sum(1)
            parts = x_grad, weight_in_grad, weight_out_grad, bias_in_grad, sums.sum(0)
            return tuple(g if want else None for g, want in zip(parts, wanted, strict=True))


def _tangent(
    x: Tensor,
    weight_in: Tensor,
    weight_out: Tensor,
    bias_in: Tensor | None,
    x_t: Tensor | None,
    weight_in_t: Tensor | None,
    weight_out_t: Tensor | None,
    bias_in_t: Tensor | None,
    bias_out_t: Tensor | None,
    allow_tf32: bool,
) -> Tensor:
    """The directional derivative of ``factored_linear``; a missing tangent is zero. ``(N, D, Y)``."""
    total = x.new_zeros(()).expand(x.shape[0], weight_in.shape[0], weight_out.shape[2])
    if x_t is not None:
        total = total + _forward(x_t, weight_in, weight_out, None, None, allow_tf32)
    if weight_in_t is not None:
        total = total + _forward(x, weight_in_t, weight_out, None, None, allow_tf32)
    if weight_out_t is not None:
        total = total + _forward(x, weight_in, weight_out_t, bias_in, None, allow_tf32)
    if bias_in_t is not None:
        total = total + bias_in_t[:, None] * weight_out.sum(1)
    if bias_out_t is not None:
        total = total + bias_out_t
    return total.contiguous()


def _add(total: list[Tensor | None], parts: tuple[Tensor, ...], wanted: tuple[bool, ...]) -> None:
    for i, (part, want) in enumerate(zip(parts, wanted, strict=False)):
        if want:
            total[i] = part if total[i] is None else total[i] + part


def _backward_tangent(
    grad: Tensor,
    x: Tensor,
    weight_in: Tensor,
    weight_out: Tensor,
    bias_in: Tensor | None,
    tangents: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    wanted: tuple[bool, bool, bool, bool],
    allow_tf32: bool,
) -> list[Tensor | None]:
    """How the gradients of (x, weight_in, weight_out, bias_in) move with those four arguments, ``grad`` held fixed.

    It is the Hessian of ``<grad, factored_linear>`` times ``tangents``; being symmetric, it serves forward mode over the
    backward op and the backward of the backward op alike.
    """
    x_t, weight_in_t, weight_out_t, bias_in_t = tangents
    total: list[Tensor | None] = [None] * 4

    def add(
        x: Tensor, weight_in: Tensor, weight_out: Tensor, bias_in: Tensor | None, moved: tuple[bool, bool, bool, bool]
    ) -> None:
        mask = tuple(w and m for w, m in zip(wanted, moved, strict=True))
        if any(mask):
            _add(total, _backward(grad, x, weight_in, weight_out, bias_in, *mask, False, allow_tf32), mask)

    if x_t is not None:
        add(x_t, weight_in, weight_out, None, (False, True, True, False))
    if weight_in_t is not None:
        add(x, weight_in_t, weight_out, None, (True, False, True, False))
    if weight_out_t is not None:
        add(x, weight_in, weight_out_t, bias_in, (True, True, False, True))
    if bias_in_t is not None and wanted[2]:
        moved = (bias_in_t[:, None] * grad.sum(0))[:, None, :].expand_as(weight_out)
        total[2] = moved if total[2] is None else total[2] + moved
    return total


# factored_linear ------------------------------------------------------------------------------------------------------------


def _forward_fake(
    x: Tensor,
    weight_in: Tensor,
    weight_out: Tensor,
    bias_in: Tensor | None,
    bias_out: Tensor | None,
    allow_tf32: bool = False,
) -> Tensor:
    weights = {"weight_in": (weight_in, "D C X"), "weight_out": (weight_out, "D C Y")}
    s = operand_sizes("factored_linear", x=(x, "N C X"), **weights, bias_in=(bias_in, "D"), bias_out=(bias_out, "Y"))
    return x.new_empty(s["N"], s["D"], s["Y"])


def _forward_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight_in, weight_out, bias_in, _, ctx.allow_tf32 = inputs
    keep(ctx, x, weight_in, weight_out, bias_in)


def _forward_backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None, None, None, None
    x, weight_in, weight_out, bias_in = ctx.saved_tensors
    wanted = tuple(ctx.needs_input_grad[:5])
    grads = _backward(grad, x, weight_in, weight_out, bias_in, *wanted, ctx.allow_tf32)
    return *(g if want else None for g, want in zip(grads, wanted, strict=True)), None


def _forward_jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
    return _tangent(*ctx.saved_tensors, *tangents[:5], ctx.allow_tf32)


def _forward_vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    op = torch.ops.ella_cuda.factored_linear
    flags = args[5:]
    x, weight_in, weight_out, bias_in, bias_out = (
        batched_first(a, d) for a, d in zip(args[:5], in_dims[:5], strict=True)
    )
    x_dim, *weight_dims, bias_out_dim = in_dims[:5]
    if all(d is None for d in in_dims[1:]):  # one set of weights: the batch joins N
        y = op(x.flatten(0, 1), weight_in, weight_out, bias_in, bias_out, *flags)
        return y.unflatten(0, x.shape[:2]), 0
    if x_dim is None:  # one input: the batch joins the output channels
        size = info.batch_size

        def stack(t: Tensor | None, dim: int | None) -> Tensor | None:
            return t if t is None else (t.expand(size, *t.shape) if dim is None else t).flatten(0, 1)

        weights = [stack(t, d) for t, d in zip((weight_in, weight_out, bias_in), weight_dims, strict=True)]
        y = op(x, *weights, None if bias_out_dim is not None else bias_out, *flags).unflatten(1, (size, -1))
        return (y if bias_out is None or bias_out_dim is None else y + bias_out[:, None]), 1
    return map_over_batch(op, info, in_dims, args)


# factored_linear_backward ---------------------------------------------------------------------------------------------------


def _backward_fake(
    grad: Tensor, x: Tensor, weight_in: Tensor, weight_out: Tensor, bias_in: Tensor | None, *wanted: bool
) -> tuple[Tensor, ...]:
    weights = {"weight_in": (weight_in, "D C X"), "weight_out": (weight_out, "D C Y")}
    s = operand_sizes(
        "factored_linear_backward", x=(x, "N C X"), **weights, grad=(grad, "N D Y"), bias_in=(bias_in, "D")
    )
    shapes = (x.shape, weight_in.shape, weight_out.shape, (s["D"],), (s["Y"],))
    return tuple(x.new_empty(shape if want else (0,)) for shape, want in zip(shapes, wanted[:5], strict=True))


def _backward_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    grad, x, weight_in, weight_out, bias_in, *ctx.wanted, ctx.allow_tf32 = inputs
    keep(ctx, grad, x, weight_in, weight_out, bias_in)


def _backward_backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
    grad, x, weight_in, weight_out, bias_in = ctx.saved_tensors
    x_t, weight_in_t, weight_out_t, bias_in_t, bias_out_t = (
        t if want else None for t, want in zip(cotangents, ctx.wanted, strict=True)
    )
    needs_grad, *needs = ctx.needs_input_grad[:5]
    grad_grad = None
    if needs_grad:
        tangents = x_t, weight_in_t, weight_out_t, bias_in_t, bias_out_t
        grad_grad = _tangent(x, weight_in, weight_out, bias_in, *tangents, ctx.allow_tf32)
    moved = x_t, weight_in_t, weight_out_t, bias_in_t
    others = _backward_tangent(grad, x, weight_in, weight_out, bias_in, moved, tuple(needs), ctx.allow_tf32)
    return grad_grad, *others, None, None, None, None, None, None


def _backward_jvp(ctx: Any, grad_t: Tensor | None, *tangents: Any) -> tuple[Tensor, ...]:
    grad, x, weight_in, weight_out, bias_in = ctx.saved_tensors
    wanted, allow_tf32 = tuple(ctx.wanted), ctx.allow_tf32
    moved = _backward_tangent(grad, x, weight_in, weight_out, bias_in, tangents[:4], wanted[:4], allow_tf32)
    total = [*moved, None]
    if grad_t is not None:
        _add(total, _backward(grad_t, x, weight_in, weight_out, bias_in, *wanted, allow_tf32), wanted)
    shapes = _backward_fake(grad, x, weight_in, weight_out, bias_in, *wanted)
    return tuple(torch.zeros_like(like) if t is None else t for t, like in zip(total, shapes, strict=True))


def _backward_vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    op = torch.ops.ella_cuda.factored_linear_backward
    wanted, flags = args[5:10], args[10:]
    if in_dims[0] is not None and in_dims[2] is None and in_dims[3] is None and not any(wanted[1:]):
        # Only the gradient of x: it does not read x or bias_in, so the batch joins N and x is a stand-in of the right shape.
        grad, x = batched_first(args[0], in_dims[0]), batched_first(args[1], in_dims[1])
        stand_in = x.new_zeros(()).expand(info.batch_size * grad.shape[1], *x.shape[-2:])
        grad_x, *rest = op(grad.flatten(0, 1), stand_in, args[2], args[3], None, *wanted, *flags)
        return (grad_x.unflatten(0, grad.shape[:2]), *rest), (0, None, None, None, None)
    return map_over_batch(op, info, in_dims, args)


_backward = differentiable(
    "factored_linear_backward",
    fake=_backward_fake,
    save=_backward_save,
    backward=_backward_backward,
    jvp=_backward_jvp,
    vmap=_backward_vmap,
)
_forward = differentiable(
    "factored_linear",
    fake=_forward_fake,
    save=_forward_save,
    backward=_forward_backward,
    jvp=_forward_jvp,
    vmap=_forward_vmap,
)


def _keeps(x: Tensor, weight_in: Tensor, weight_out: Tensor, bias_in: Tensor | None, bias_out: Tensor | None) -> bool:
    """Whether the op, for these arguments of eager autograd, is to keep its intermediate, which the gradient of weight_out reads."""
    if not weight_out.requires_grad or not (x.is_cpu or x.is_cuda):
        return False
    require_backend("factored_linear", x)
    return all(
        a is None or (a.is_cuda == x.is_cuda and a.is_cpu == x.is_cpu)
        for a in (weight_in, weight_out, bias_in, bias_out)
    )


class _Keeping(torch.autograd.Function):
    """``factored_linear`` under plain autograd: the first backward reads the intermediate that the forward kept."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            y, intermediate = _OP_KEEPING(*args)
        *_, ctx.allow_tf32 = args
        ctx.save_for_backward(*args[:4], intermediate)
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None, None, None
        *inputs, intermediate = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:5]
        if plain_autograd((grad, *inputs), graph=False):
            with torch._C._AutoDispatchBelowAutograd():
                grads = _OP_BACKWARD_KEEPING(grad, *inputs, intermediate, *wanted, ctx.allow_tf32)
        else:
            grads = _backward(grad, *inputs, *wanted, ctx.allow_tf32)
        return *(g if want else None for g, want in zip(grads, wanted, strict=True)), None


def kernel_cases() -> list[KernelCase]:
    def case(name: str, n: int, c: int, x: int, d: int, y: int) -> list[KernelCase]:
        inputs = lambda: (normal(n, c, x), normal(d, c, x), normal(d, c, y), normal(d), normal(y))  # noqa: E731
        return cases(name, inputs, factored_linear, factored_linear_torch, derivatives=1)

    return [
        *case("factored_linear", 6, 3, 40, 5, 12),
        *case("factored_linear of sizes of 4", 72, 4, 132, 68, 20),  # CUDA in float32: copies of four numbers
        *case("factored_linear of many images", 4200, 3, 7, 5, 3),  # a backward that does not store the intermediate
    ]
