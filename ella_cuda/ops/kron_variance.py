"""The predictive variance under one Kronecker-factored block of the posterior, in place."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ella_cuda.ops._cases import KernelCase, cases, normal
from ella_cuda.ops._operator import (
    COORDINATES,
    operand_sizes,
    refuse_graph,
    register_in_place,
    require_backend,
    require_countable,
)


def kron_variance_(
    variance: Tensor,
    inputs: Tensor | None,
    outputs: Tensor,
    eigenvalues_in: Tensor,
    eigenvalues_out: Tensor,
    precision: Tensor,
    scale: Tensor | float = 1.0,
) -> Tensor:
    """Add ``J (scale A ⊗ B + precision)^-1 J^T`` of one parameter to the variance of the outputs of every data point.

    With the Jacobian in the eigenbases of both sides, ``M[n,k,g,i,j] = sum_t inputs[n,t,g,i] outputs[k,n,t,g,j]``::

        variance[n,k,l] += sum_{g,i,j} M[n,k,g,i,j] M[n,l,g,i,j] / (scale eigenvalues_in[g,i] eigenvalues_out[g,j] + precision)

    Equivalent to :func:`kron_variance_torch_`, without M or the denominators as a whole: on the CPU only tiles of about 1 MiB a thread
    exist, or of ``512 * K`` numbers where that is more, and sums of 8 MiB, or of ``(K, K)`` float64 where that is more. At a single
    position M has rank one, and the sum over i becomes one product with the denominators' inverses per group.

    Args:
        variance: ``(N, K, K)``, or ``(N, K)`` for the diagonal alone; float32 or float64, contiguous; changed in place.
        inputs: ``(N, T, G, a)``, any strides: the input rows of T shared positions in the eigenbasis of the input side. None if
            ``outputs`` is the Jacobian itself.
        outputs: ``(K, N, T, G, b)``, any strides: the gradients of output k at these positions in the eigenbasis of the output side;
            with ``inputs=None``, ``(K, N, G, a, b)``: M. Of the variance's dtype, or float32 beside a float64 variance;
            ``inputs`` has the same dtype. Products are taken in it, their sums over tiles are float64, in a fixed order.
        eigenvalues_in: ``(G, a)`` float64, not negative.
        eigenvalues_out: ``(G, b)``, or ``(1, b)`` for all groups alike; float64, not negative.
        precision: ``()`` float64, positive. The values of tensors are not checked.
        scale: ``()`` float64 tensor or number, positive.

    Returns:
        ``variance``.

    Raises:
        ValueError: a tensor carries a graph or a tangent, as the op has no derivative; or scale is a number that is not positive and finite.
        RuntimeError: a shape, dtype or device does not fit; the message names the argument.

    Source: Immer, Korzepa and Bauer, "Improving predictions of Bayesian neural nets via local linearization", AISTATS 2021, eq. 9,
    with the Kronecker-factored posterior of Ritter, Botev and Barber, ICLR 2018.
    """
    tensors = {"variance": variance, "outputs": outputs, "inputs": inputs}
    tensors |= {"eigenvalues_in": eigenvalues_in, "eigenvalues_out": eigenvalues_out, "precision": precision}
    tensors["scale"] = scale if isinstance(scale, Tensor) else None
    refuse_graph("kron_variance_", **{name: tensor for name, tensor in tensors.items() if tensor is not None})
    require_backend("kron_variance_", variance)
    _add(variance, outputs, inputs, _scaled(eigenvalues_in, scale), eigenvalues_out, precision)
    return variance


def kron_variance_torch_(
    variance: Tensor,
    inputs: Tensor | None,
    outputs: Tensor,
    eigenvalues_in: Tensor,
    eigenvalues_out: Tensor,
    precision: Tensor,
    scale: Tensor | float = 1.0,
) -> Tensor:
    """Plain-torch reference of :func:`kron_variance_`: M and the denominators as a whole, products in the dtype of ``outputs``."""
    jacobian = outputs if inputs is None else torch.einsum("ntgi,kntgj->kngij", inputs, outputs)
    denominators = scale * eigenvalues_in[:, :, None] * eigenvalues_out[:, None] + precision
    weighted = jacobian / denominators.to(jacobian.dtype)
    equation = "kngij,kngij->nk" if variance.dim() == 2 else "kngij,lngij->nkl"
    return variance.add_(torch.einsum(equation, weighted, jacobian))


def _scaled(eigenvalues: Tensor, scale: Tensor | float) -> Tensor:
    if isinstance(scale, Tensor):
        operand_sizes("kron_variance_", eigenvalues_in=(eigenvalues, None), scale=(scale, "", COORDINATES))
    elif not 0 < scale < math.inf:
        raise ValueError(f"ella_cuda.ops.kron_variance_: scale must be a positive, finite number, got {scale}.")
    elif scale == 1:
        return eigenvalues
    return eigenvalues * scale


def _fake(
    variance: Tensor,
    outputs: Tensor,
    inputs: Tensor | None,
    eigenvalues_in: Tensor,
    eigenvalues_out: Tensor,
    precision: Tensor,
) -> None:
    op = "kron_variance_"
    narrower = (torch.float32,) if variance.dtype == torch.float64 else ()
    sizes = operand_sizes(
        op,
        variance=(variance, "N K" if variance.dim() == 2 else "N K K"),
        outputs=(outputs, "K N G a b" if inputs is None else "K N T G b", (variance.dtype, *narrower)),
    )
    if inputs is not None:
        operand_sizes(op, sizes, outputs=(outputs, None), inputs=(inputs, "N T G a"))
        sizes["a"] = inputs.shape[-1]
    shared = eigenvalues_out.dim() == 2 and eigenvalues_out.shape[0] == 1
    operand_sizes(
        op,
        sizes,
        variance=(variance, None),
        eigenvalues_in=(eigenvalues_in, "G a", COORDINATES),
        eigenvalues_out=(eigenvalues_out, "1 b" if shared else "G b", COORDINATES),
        precision=(precision, "", COORDINATES),
    )
    require_countable(op, variance=variance, outputs=outputs, inputs=inputs)
    torch._check(variance.is_contiguous(), lambda: f"{op}: variance must be contiguous, it is updated in place")


_add = register_in_place("kron_variance_", fake=_fake)


def kernel_cases() -> list[KernelCase]:
    def case(name: str, n: int, k: int, t: int, g: int, a: int, b: int, jacobian: bool = False) -> list[KernelCase]:
        def inputs() -> tuple[Tensor, ...]:
            spectra = normal(g, a).square() + 0.1, normal(1, b).square() + 0.1
            rows = normal(n, t, g, a), normal(k, n, t, g, b)
            return torch.zeros(n, k, k).double(), *rows, *spectra, torch.tensor(0.7, dtype=torch.float64)

        def of(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
            def call(total: Tensor, rows: Tensor | None, outputs: Tensor, *spectra: Tensor) -> tuple[Tensor, Tensor]:
                if jacobian:
                    rows, outputs = None, torch.einsum("ntgi,kntgj->kngij", rows, outputs)
                arguments = rows, outputs, *(t.double() for t in spectra), 1.5
                return function(total, *arguments), function(total.new_zeros(total.shape[:2]), *arguments)

            return call

        return cases(name, inputs, of(kron_variance_), of(kron_variance_torch_))

    return [
        *case("kron_variance_ at one position", 70, 3, 1, 2, 40, 130),
        *case("kron_variance_ at several positions", 5, 7, 20, 2, 33, 18),
        *case("kron_variance_ of a Jacobian", 5, 7, 1, 2, 33, 18, jacobian=True),
    ]
