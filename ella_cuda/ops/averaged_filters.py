"""Activations of a bank of filters, averaged over the transforms that the filters were resampled by, as one fused op.

The op and its gradients are kernels. Derivatives beyond (forward mode and second order) are plain torch, which has the activations of
one transform at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ella_cuda.ops._cases import KernelCase, cases, normal
from ella_cuda.ops._operator import (
    batched_first,
    differentiable,
    keep,
    map_over_batch,
    nested_forward_mode,
    operand_sizes,
    plain_autograd,
    sum_of_parts,
)
from ella_cuda.ops._precision import allows_tf32, without_autocast

ACTIVATIONS = {"identity": 0, "relu": 1, "tanh": 2, "gaussian": 3}  # as csrc/common/activation.h has them
IDENTITY, RELU, TANH, GAUSSIAN = ACTIVATIONS.values()
PANEL_BYTES = 256  # of images, for which bits are kept together; the CPU kernels' panel


def averaged_filters(x: Tensor, bank: Tensor, bias: Tensor | None = None, activation: str = "relu") -> Tensor:
    r"""The first layer of an invariant network: filters instead of inputs are transformed, and activations averaged.

    .. math:: y_{nh} = \frac1S \sum_s \sigma\Big(\sum_d W_{shd}\, x_{nd} + b_h\Big)

    One product with the S H filters, whose activations join the mean where they are computed: the ``(N, S, H)`` numbers are never stored,
    forward or backward. The backward computes them again for some images and filters at a time; eager autograd of ReLU on the CPU keeps a
    bit for each. The identity has one product with the mean of the bank. Equivalent to :func:`averaged_filters_torch`.

    Differentiable in x, bank and bias, in each only where asked. Forward mode and second derivatives are plain torch of one transform at a
    time. ReLU's derivative at 0 is 0.

    On CUDA products of float32 numbers are on tensor cores, from values that are split in two TF32 numbers; where torch may multiply in
    TF32 (``torch.backends.cuda.matmul.fp32_precision``), from values rounded to one. Products in float64 are torch's.

    Args:
        x: ``(N, D)``, float32 or float64.
        bank: ``(S, H, D)``, each of H filters under S > 0 transforms. Any strides; fastest where the last axis is contiguous.
        bias: ``(H,)`` or None, of a filter under every transform.
        activation: ``"relu"``, ``"tanh"``, ``"gaussian"`` (``exp(-z^2 / 2)``) or ``"identity"``.

    Returns:
        ``(N, H)``, contiguous, of x's dtype. Sums are in a fixed order.

    Raises:
        ValueError: the activation is none of these.
        RuntimeError: shapes, dtypes or devices do not fit; the message names the argument.

    Source: van der Ouderaa and van der Wilk, "Learning Invariant Weights in Neural Networks", UAI 2022.
    """
    number = _number_of(activation)
    if nested_forward_mode():
        return averaged_filters_torch(x, bank, bias, activation)
    if number == IDENTITY and bank.dim() == 3 and len(bank):
        bank = bank.mean(0, keepdim=True)
    args = x, bank, bias
    learned = any(t is not None and t.requires_grad for t in args)
    keeps = number == RELU and learned and plain_autograd(args)
    return _forward(x, bank, bias, number, keeps, allows_tf32(x))[0]


def averaged_filters_torch(x: Tensor, bank: Tensor, bias: Tensor | None = None, activation: str = "relu") -> Tensor:
    """Plain-torch reference of :func:`averaged_filters`; stores the ``(N, S, H)`` activations."""
    number = _number_of(activation)
    z = torch.einsum("nd,shd->nsh", x, bank)
    return activated(z if bias is None else z + bias, number).mean(1)


def _number_of(activation: str) -> int:
    if activation not in ACTIVATIONS:
        names = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"averaged_filters: activation must be one of {names}, got {activation!r}.")
    return ACTIVATIONS[activation]


def activated(z: Tensor, activation: int) -> Tensor:
    """Of numbers, by a number of :data:`ACTIVATIONS`."""
    if activation == RELU:
        return z.relu()
    if activation == TANH:
        return z.tanh()
    return torch.exp(-0.5 * z.square()) if activation == GAUSSIAN else z


# plain torch, one transform at a time -----------------------------------------------------------------------------------------


def _slope(z: Tensor, activation: int) -> Tensor:
    if activation == RELU:
        return (~(z <= 0)).to(z.dtype)
    if activation == TANH:
        return 1 - z.tanh().square()
    return -z * torch.exp(-0.5 * z.square()) if activation == GAUSSIAN else torch.ones_like(z)


def _bend(z: Tensor, activation: int) -> Tensor | None:
    """The second derivative; None where it is zero everywhere."""
    if activation == TANH:
        t = z.tanh()
        return 2 * t * (t.square() - 1)
    return (z.square() - 1) * torch.exp(-0.5 * z.square()) if activation == GAUSSIAN else None


def _linear(x: Tensor | None, filters: Tensor | None) -> Tensor | None:
    return None if x is None or filters is None else x @ filters.mT


def _of(bank: Tensor | None, s: int) -> Tensor | None:
    return None if bank is None else bank[s]


def _tangent(
    x: Tensor,
    bank: Tensor,
    bias: Tensor | None,
    activation: int,
    x_t: Tensor | None,
    bank_t: Tensor | None,
    bias_t: Tensor | None,
) -> Tensor:
    """The directional derivative of the averages; a missing tangent is zero. ``(N, H)``."""
    total = None
    with without_autocast(x.device.type):
        for s in range(len(bank)):
            moved = sum_of_parts(_linear(x_t, bank[s]), _linear(x, _of(bank_t, s)), bias_t)
            if moved is not None:
                total = sum_of_parts(total, _slope(sum_of_parts(_linear(x, bank[s]), bias), activation) * moved)
        return x.new_zeros(len(x), bank.shape[1]) if total is None else total / len(bank)


def _moved_gradients(
    grad: Tensor,
    x: Tensor,
    bank: Tensor,
    bias: Tensor | None,
    activation: int,
    tangents: tuple[Tensor | None, Tensor | None, Tensor | None],
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """How the gradients of x, bank and bias move with those three, ``grad`` held fixed: the Hessian of ``<grad, averages>`` times the
    tangents. None where it is zero or not wanted."""
    x_t, bank_t, bias_t = tangents
    if all(t is None for t in tangents) or not any(wanted):
        return None, None, None
    to_x = to_bias = None
    to_bank = []
    with without_autocast(x.device.type):
        share = grad / len(bank)
        for s in range(len(bank)):
            z = sum_of_parts(_linear(x, bank[s]), bias)
            slopes, bends = share * _slope(z, activation), _bend(z, activation)
            if bends is not None:
                moved = sum_of_parts(_linear(x_t, bank[s]), _linear(x, _of(bank_t, s)), bias_t)
                bends = share * bends * moved
            if wanted[0]:
                parts = (None if bends is None else bends @ bank[s]), (None if bank_t is None else slopes @ bank_t[s])
                to_x = sum_of_parts(to_x, *parts)
            if wanted[1]:
                parts = (None if bends is None else bends.mT @ x), (None if x_t is None else slopes.mT @ x_t)
                to_bank.append(sum_of_parts(*parts))
            if wanted[2] and bends is not None:
                to_bias = sum_of_parts(to_bias, bends.sum(0))
    return to_x, torch.stack(to_bank) if to_bank and to_bank[0] is not None else None, to_bias


# averages ---------------------------------------------------------------------------------------------------------------------


def _sizes(op: str, x: Tensor, bank: Tensor, bias: Tensor | None, activation: int) -> dict[str, int]:
    s = operand_sizes(op, x=(x, "N D"), bank=(bank, "S H D"))
    torch._check(s["S"] > 0, lambda: f"{op}: bank must have at least one transform, got {tuple(bank.shape)}")
    operand_sizes(op, s, x=(x, None), bias=(bias, "H"))
    torch._check(
        0 <= activation < len(ACTIVATIONS),
        lambda: f"{op}: activation must be from 0 to {len(ACTIVATIONS) - 1}, got {activation}",
    )
    return s


def _forward_fake(
    x: Tensor, bank: Tensor, bias: Tensor | None, activation: int, keeps: bool, allow_tf32: bool = False
) -> tuple[Tensor, Tensor]:
    s = _sizes("averaged_filters", x, bank, bias, activation)
    shape = [0]
    if keeps and activation == RELU and not x.is_cuda:
        panel = PANEL_BYTES // x.element_size()
        shape = [s["S"], s["H"], (s["N"] + panel - 1) // panel * panel // 8]
    return x.new_empty(s["N"], s["H"]), x.new_empty(shape, dtype=torch.uint8)


def _forward_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    x, bank, bias, ctx.activation, _, ctx.allow_tf32 = inputs
    keep(ctx, x, bank, bias, output[1])


def _forward_backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 6
    wanted = tuple(ctx.needs_input_grad[:3])
    grads = _gradients(grad, *ctx.saved_tensors, ctx.activation, *wanted, ctx.allow_tf32)
    return *(g if want else None for g, want in zip(grads, wanted, strict=True)), None, None, None


def _forward_jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, None]:
    x, bank, bias, _ = ctx.saved_tensors
    return _tangent(x, bank, bias, ctx.activation, *tangents[:3]), None


def _forward_vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    op, size = torch.ops.ella_cuda.averaged_filters, info.batch_size
    activation, _, *allow_tf32 = args[3:]
    flags = activation, False, *allow_tf32
    x, bank, bias = (batched_first(t, d) for t, d in zip(args[:3], in_dims[:3], strict=True))
    x_dim, bank_dim, bias_dim = in_dims[:3]
    if bank_dim is None and bias_dim is None:  # one bank: the batch joins N
        y, kept = op(x.flatten(0, 1), bank, bias, *flags)
        return (y.unflatten(0, x.shape[:2]), kept), (0, None)
    if x_dim is None:  # one set of inputs: the batch joins the filters
        bank = (bank if bank_dim is not None else bank.expand(size, *bank.shape)).transpose(0, 1)
        if bias is not None:
            bias = (bias if bias_dim is not None else bias.expand(size, *bias.shape)).flatten()
        y, kept = op(x, bank.flatten(1, 2), bias, *flags)
        return (y.unflatten(1, (size, bank.shape[2])), kept), (1, None)
    return map_over_batch(op, info, (*in_dims[:3], *[None] * len(flags)), (*args[:3], *flags))


# gradients --------------------------------------------------------------------------------------------------------------------


def _gradients_fake(
    grad: Tensor,
    x: Tensor,
    bank: Tensor,
    bias: Tensor | None,
    kept: Tensor | None,
    activation: int,
    *wanted: bool,
) -> tuple[Tensor, ...]:
    op = "averaged_filters_backward"
    s = _sizes(op, x, bank, bias, activation)
    operand_sizes(op, s, x=(x, None), grad=(grad, "N H"))
    shapes = x.shape, bank.shape, (s["H"],)
    return tuple(x.new_empty(shape if want else (0,)) for shape, want in zip(shapes, wanted[:3], strict=True))


def _gradients_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    grad, x, bank, bias, kept, ctx.activation, *ctx.wanted, ctx.allow_tf32 = inputs
    keep(ctx, grad, x, bank, bias, kept)


def _gradients_backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
    grad, x, bank, bias, _ = ctx.saved_tensors
    moved = tuple(t if want else None for t, want in zip(cotangents, ctx.wanted, strict=True))
    needs_grad, *needs = ctx.needs_input_grad[:4]
    to_grad = None
    if needs_grad and any(t is not None for t in moved):
        to_grad = _tangent(x, bank, bias, ctx.activation, *moved)
    others = _moved_gradients(grad, x, bank, bias, ctx.activation, moved, tuple(needs))
    return to_grad, *others, *(None,) * 6


def _gradients_jvp(ctx: Any, grad_t: Tensor | None, *tangents: Any) -> tuple[Tensor, ...]:
    grad, x, bank, bias, kept = ctx.saved_tensors
    wanted = tuple(ctx.wanted)
    moved = _moved_gradients(grad, x, bank, bias, ctx.activation, tangents[:3], wanted)
    if grad_t is not None:
        own = _gradients(grad_t, x, bank, bias, kept, ctx.activation, *wanted, ctx.allow_tf32)
        moved = tuple(sum_of_parts(part, g) if want else None for part, g, want in zip(moved, own, wanted, strict=True))
    shapes = _gradients_fake(grad, x, bank, bias, kept, ctx.activation, *wanted)
    return tuple(torch.zeros_like(like) if t is None else t for t, like in zip(moved, shapes, strict=True))


_gradients = differentiable(
    "averaged_filters_backward",
    fake=_gradients_fake,
    save=_gradients_save,
    backward=_gradients_backward,
    jvp=_gradients_jvp,
)
_forward = differentiable(
    "averaged_filters",
    fake=_forward_fake,
    save=_forward_save,
    backward=_forward_backward,
    jvp=_forward_jvp,
    vmap=_forward_vmap,
)


def kernel_cases() -> list[KernelCase]:
    def case(name: str, activation: str, n: int, s: int, h: int, d: int, derivatives: int) -> list[KernelCase]:
        return cases(
            name,
            lambda: (normal(n, d), normal(s, h, d) / d**0.5, normal(h)),
            lambda *inputs: averaged_filters(*inputs, activation),
            lambda *inputs: averaged_filters_torch(*inputs, activation),
            derivatives,
        )

    return [  # CUDA in float32: copies of four numbers, and of one
        *case("averaged_filters", "tanh", 6, 3, 5, 7, derivatives=2),
        *case("averaged_filters relu", "relu", 70, 5, 68, 132, derivatives=1),
        *case("averaged_filters tanh", "tanh", 9, 3, 66, 37, derivatives=1),
        *case("averaged_filters gaussian", "gaussian", 130, 4, 5, 20, derivatives=1),
    ]
