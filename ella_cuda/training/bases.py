"""The bases of sparsified layers, as the evidence steps move them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ella_cuda.laplace import KronLaplace
from ella_cuda.nn import SpatialBasis


class LearnedBases:
    """Hyperparameters inside the network: the bases of its sparsified layers, of which ``learn`` says what moves.

    Leaves are what the optimizer works on, float64 whatever the model's dtype, lengthscales in logarithms. The model's buffers are the
    truth: leaves are read from them before a step, buffers written after it.
    """

    def __init__(self, model: nn.Module, learn: Sequence[str]) -> None:
        if isinstance(learn, str):
            raise ValueError(
                f"marglik_training: learn must be a list of names, got {learn!r}; pass a list, such as [{learn!r}]."
            )
        if any(name not in ("anchors", "lengthscales") for name in learn):
            raise ValueError(f"marglik_training: learn must list any of anchors, lengthscales, got {learn!r}.")
        self.learn = tuple(name for name in ("anchors", "lengthscales") if name in learn)  # plain strings
        self.by_name = {name: m for name, m in model.named_modules() if isinstance(m, SpatialBasis)}
        if self.learn and not self.by_name:
            raise ValueError(
                f"marglik_training: learn={list(learn)} needs sparsified layers (ella_cuda.nn.SparseFactoredLinear2d, SparseConv2d), the "
                "model has none."
            )
        attributes = {"anchors": "anchors", "lengthscales": "inverse_lengthscale"}
        self._places = [(basis, attributes[name]) for basis in self.by_name.values() for name in self.learn]
        self._kinds = [name for _ in self.by_name for name in self.learn]
        self.leaves = [b.detach().double().clone().requires_grad_() for b in self.buffers()]
        self.read()

    def groups(self, rates: dict[str, float]) -> list[dict[str, Any]]:
        """The leaves as an optimizer's groups, each kind at its rate."""
        return [
            {
                "params": [leaf for leaf, kind in zip(self.leaves, self._kinds, strict=True) if kind == name],
                "lr": rates[name],
            }
            for name in self.learn
        ]

    def buffers(self) -> list[Tensor]:
        """What moves, as it stands in the model."""
        return [getattr(basis, name) for basis, name in self._places]

    @contextmanager
    def differentiable(self) -> Iterator[None]:
        """The buffers that move require a gradient for the duration of the context."""
        before = [(buffer, buffer.requires_grad) for buffer in self.buffers()]
        for buffer, _ in before:
            buffer.requires_grad_()
        try:
            yield
        finally:
            for buffer, required in before:
                buffer.requires_grad_(required)

    def read(self) -> None:
        """The leaves from the buffers; ValueError where a lengthscale has no logarithm."""
        with torch.no_grad():
            for leaf, buffer in zip(self.leaves, self.buffers(), strict=True):
                if not leaf.dim() and not buffer > 0:
                    raise ValueError("marglik_training: learn='lengthscales' needs positive inverse lengthscales.")
                leaf.copy_(buffer if leaf.dim() else buffer.double().log())

    def write(self) -> None:
        """The buffers from the leaves."""
        with torch.no_grad():
            for leaf, buffer in zip(self.leaves, self.buffers(), strict=True):
                buffer.copy_(leaf if leaf.dim() else leaf.exp())

    def inverse_lengthscales(self) -> dict[str, float]:
        """ω of every basis, by the basis' name."""
        return {name: float(basis.inverse_lengthscale) for name, basis in self.by_name.items()}


def bases_step(la: KronLaplace, bases: LearnedBases, optimizer: torch.optim.Optimizer) -> None:
    """One step on the hyperparameters inside the network, along the gradient of log q / N at the fit."""
    bases.read()
    buffers = bases.buffers()
    with bases.differentiable(), torch.enable_grad():
        gradients = torch.autograd.grad(la.log_marginal_likelihood() / la.n_data, buffers)
    for leaf, buffer, gradient in zip(bases.leaves, buffers, gradients, strict=True):
        leaf.grad = -(
            gradient if leaf.dim() else gradient * buffer
        ).double()  # a leaf of no axes is its buffer's logarithm
    optimizer.step()
    bases.write()
