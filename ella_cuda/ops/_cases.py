"""Cases that :mod:`ella_cuda.testing` checks: an op beside its reference, at inputs of random numbers. Each op's module lists its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]
# A name, a function that makes float64 inputs, the op and its reference: of the inputs, some of which they change, to the results.
KernelCase = tuple[str, Callable[[], Tensors], Callable[..., Tensors], Callable[..., Tensors]]


def cases(
    name: str,
    inputs: Callable[[], Tensors],
    op: Callable[..., Tensor | Tensors],
    reference: Callable[..., Tensor | Tensors],
    derivatives: int = 0,
) -> list[KernelCase]:
    """An op as it is, and its derivatives.

    Args:
        name: the op's, and words that tell this case from others.
        inputs: makes float64 tensors on the CPU.
        op, reference: functions of the inputs, of one result where there are derivatives.
        derivatives: the highest order checked, 0 to 2, in all inputs.
    """
    orders = {"": values, " backward": gradients, " second derivative": curvature}
    return [(name + order, inputs, take(op), take(reference)) for order, take in [*orders.items()][: derivatives + 1]]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def values(function: Callable[..., Tensor | Tensors]) -> Callable[..., Tensors]:
    def call(*inputs: Tensor) -> Tensors:
        found = function(*inputs)
        return (found,) if isinstance(found, Tensor) else tuple(found)

    return call


def gradients(function: Callable[..., Tensor]) -> Callable[..., Tensors]:
    """Gradients of a weighted sum of the results."""

    def call(*inputs: Tensor) -> Tensors:
        leaves = [t.requires_grad_() for t in inputs]
        y = function(*leaves)
        weight = (  # not symmetric: the gradients of biases would vanish
            torch.linspace(-1, 2, y.numel(), dtype=torch.float64, device=y.device).to(y.dtype).view_as(y)
            if y.dim()
            else torch.ones_like(y)
        )
        return torch.autograd.grad(y, leaves, weight)

    return call


def curvature(function: Callable[..., Tensor]) -> Callable[..., Tensors]:
    """The Hessian of the sum of squared results, times ones."""

    def call(*inputs: Tensor) -> Tensors:
        leaves = [t.requires_grad_() for t in inputs]
        grads = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.sum() for g in grads), leaves)

    return call


def few_bits(inputs: Callable[[], Tensors], dtype: torch.dtype) -> Callable[[], Tensors]:
    """The same factor, and whole numbers of as many bits as the type has, so few of them that no sum is rounded in either precision."""
    largest, every = (255, 1) if dtype == torch.bfloat16 else (2047, 200)

    def made() -> Tensors:
        factor, like = inputs()
        numbers = torch.zeros_like(like)
        numbers[::every] = torch.randint(-largest, largest + 1, numbers[::every].shape).double()
        return factor, numbers

    return made
