"""The gradients of a factored fully connected map that curvature takes: at its input and at the intermediate between its two maps."""

from __future__ import annotations

import torch
from torch import Tensor

from ella_cuda.ops._cases import KernelCase, cases, normal
from ella_cuda.ops._operator import operand_sizes, plain_autograd
from ella_cuda.ops._precision import without_autocast

# The gradient at the input is one product with the dense map of all pairs of positions where that has at most so many times the
# multiplications of the two factored ones, X Y against X + Y for each pair of channels: those are many small products and copies.
MAP_OF_PAIRS = 4


def factored_linear_vjp(
    grad: Tensor, weight_in: Tensor, weight_out: Tensor, grad_x: bool = True, grad_intermediate: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    r"""With :math:`z[n,d,c] = \sum_x U[d,c,x]\, x[n,c,x]` between the two maps of :func:`ella_cuda.ops.factored_linear`:

    .. math:: dz[n,d,c] = \sum_y V[d,c,y]\, dy[n,d,y], \qquad dx[n,c,x] = \sum_d U[d,c,x]\, dz[n,d,c]

    Equivalent to :func:`factored_linear_vjp_torch`, which it is on CUDA and where somebody differentiates it or looks on; else
    on the CPU one op, which has dz for a block of inputs at a time in the cache.

    Args:
        grad: dy, ``(N, D, Y)``, any strides.
        weight_in: U, ``(D, C, X)``.
        weight_out: V, ``(D, C, Y)``.
        grad_x: whether dx is wanted.
        grad_intermediate: whether dz is.

    Returns:
        dx ``(N, C, X)``, and dz with the inputs last, ``(D, C, N)`` contiguous; None for what is not wanted.

    Raises:
        RuntimeError: a shape, dtype or device does not fit; the message names the argument.

    Source: van der Ouderaa, Immer, van der Wilk, "Learning Layer-wise Equivariances Automatically using Gradients", NeurIPS 2023, eq. 5.
    """
    _require_maps(grad, weight_in, weight_out)
    args, recording = (grad, weight_in, weight_out), torch.is_grad_enabled()
    differentiated = recording and any(a.requires_grad for a in args)
    if not grad.is_cpu or differentiated or not plain_autograd(args, graph=recording):
        with without_autocast(grad.device.type):  # no lower precision than the op's
            return factored_linear_vjp_torch(grad, weight_in, weight_out, grad_x, grad_intermediate)
    found = torch.ops.ella_cuda.factored_linear_vjp(grad, weight_in, weight_out, grad_x, grad_intermediate)
    return found[0] if grad_x else None, found[1] if grad_intermediate else None


def factored_linear_vjp_torch(
    grad: Tensor, weight_in: Tensor, weight_out: Tensor, grad_x: bool = True, grad_intermediate: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """Plain-torch reference of :func:`factored_linear_vjp`, in torch's products."""
    x_size, y_size = weight_in.shape[2], weight_out.shape[2]
    of_pairs = x_size * y_size <= MAP_OF_PAIRS * (x_size + y_size)
    dx = dz = None
    if grad_intermediate or (grad_x and not of_pairs):
        dz = torch.bmm(weight_out, grad.permute(1, 2, 0))
    if grad_x and of_pairs:
        pairs = torch.einsum("dcy,dcx->dycx", weight_out, weight_in)
        dx = (grad.flatten(1) @ pairs.flatten(0, 1).flatten(1)).unflatten(1, pairs.shape[2:])
    elif grad_x:
        dx = torch.bmm(dz.permute(1, 2, 0), weight_in.transpose(0, 1)).transpose(0, 1)
    return dx, dz if grad_intermediate else None


def _require_maps(grad: Tensor, weight_in: Tensor, weight_out: Tensor) -> None:
    """Raise the RuntimeError of an op whose arguments do not fit, whoever computes it."""
    if grad.dim() != 3:
        raise RuntimeError(f"factored_linear_vjp: grad must have shape (N, D, Y), got {tuple(grad.shape)}")
    if grad.dtype not in (torch.float32, torch.float64):
        raise RuntimeError(f"factored_linear_vjp: grad must be float32 or float64, got {grad.dtype}")
    (_, d, y_size), c = grad.shape, weight_in.shape[1] if weight_in.dim() == 3 else 0
    for name, weight, expected, fits in (
        ("weight_in", weight_in, "C, X", weight_in.dim() == 3 and weight_in.shape[0] == d),
        ("weight_out", weight_out, f"{c}, {y_size}", tuple(weight_out.shape) == (d, c, y_size)),
    ):
        if not fits:
            raise RuntimeError(
                f"factored_linear_vjp: {name} must have shape ({d}, {expected}), got {tuple(weight.shape)}"
            )
        if weight.dtype != grad.dtype or weight.device != grad.device:
            raise RuntimeError(
                f"factored_linear_vjp: {name} must be {grad.dtype} on {grad.device} as grad is, got {weight.dtype} on {weight.device}"
            )


@torch.library.register_fake("ella_cuda::factored_linear_vjp")
def _fake(
    grad: Tensor, weight_in: Tensor, weight_out: Tensor, grad_x: bool, grad_intermediate: bool
) -> tuple[Tensor, Tensor]:
    weights = {"weight_out": (weight_out, "D C Y"), "weight_in": (weight_in, "D C X")}
    s = operand_sizes("factored_linear_vjp", grad=(grad, "N D Y"), **weights)
    return (
        grad.new_empty((s["N"], s["C"], s["X"]) if grad_x else (0,)),
        grad.new_empty((s["D"], s["C"], s["N"]) if grad_intermediate else (0,)),
    )


def kernel_cases() -> list[KernelCase]:
    def inputs() -> tuple[Tensor, ...]:
        return normal(70, 12, 9), normal(12, 5, 40), normal(12, 5, 9)

    return cases("factored_linear_vjp", inputs, factored_linear_vjp, factored_linear_vjp_torch)
