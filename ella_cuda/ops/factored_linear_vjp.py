"""The gradients of a factored fully connected map that curvature takes: at its input and at the intermediate between its two maps."""

from __future__ import annotations

import torch
from torch import Tensor

from ella_cuda.ops._operator import operand_sizes
from ella_cuda.ops._precision import without_autocast

# The gradient at the input is one product with the dense map of all pairs of positions where that has at most so many times the
# multiplications of the two factored ones, X Y against X + Y for each pair of channels: those are many small products and copies.
MAP_OF_PAIRS = 4


def factored_linear_vjp(
    grad: Tensor, weight_in: Tensor, weight_out: Tensor, grad_x: bool = True, grad_intermediate: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    r"""With :math:`z[n,d,c] = \sum_x U[d,c,x]\, x[n,c,x]` between the two maps of :func:`ella_cuda.ops.factored_linear`:

    .. math:: dz[n,d,c] = \sum_y V[d,c,y]\, dy[n,d,y], \qquad dx[n,c,x] = \sum_d U[d,c,x]\, dz[n,d,c]

    Plain torch on every device: products of its own libraries, of which no kernel of ours was faster in sum.

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
    weights = {"weight_out": (weight_out, "D C Y"), "weight_in": (weight_in, "D C X")}
    operand_sizes("factored_linear_vjp", grad=(grad, "N D Y"), **weights)
    x_size, y_size = weight_in.shape[2], weight_out.shape[2]
    of_pairs = x_size * y_size <= MAP_OF_PAIRS * (x_size + y_size)
    dx = dz = None
    with without_autocast(grad.device.type):
        if grad_intermediate or (grad_x and not of_pairs):
            dz = torch.bmm(weight_out, grad.permute(1, 2, 0))
        if grad_x and of_pairs:
            pairs = torch.einsum("dcy,dcx->dycx", weight_out, weight_in)
            dx = (grad.flatten(1) @ pairs.flatten(0, 1).flatten(1)).unflatten(1, pairs.shape[2:])
        elif grad_x:
            dx = torch.bmm(dz.permute(1, 2, 0), weight_in.transpose(0, 1)).transpose(0, 1)
    return dx, dz if grad_intermediate else None
