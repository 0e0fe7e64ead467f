"""The bases of sparsified layers."""

from __future__ import annotations

from torch import nn

from ella_cuda.nn import SpatialBasis
from ella_cuda.training.learners.learner import BufferLearner


def bases_of(model: nn.Module) -> dict[str, SpatialBasis]:
    """The bases of the model's sparsified layers, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, SpatialBasis)}


def _buffers(model: nn.Module, word: str, buffer: str) -> list[str]:
    names = [f"{name}.{buffer}" if name else buffer for name in bases_of(model)]
    if not names:
        raise ValueError(
            f"marglik_training: learn=[{word!r}] needs sparsified layers (ella_cuda.nn.SparseFactoredLinear2d, SparseConv2d), the model has "
            "none."
        )
    return names


class Anchors(BufferLearner):
    """The anchors of all bases, in pixels."""

    def __init__(self, model: nn.Module, lr: float, hold_factors: bool = True) -> None:
        super().__init__("anchors", model, _buffers(model, "anchors", "anchors"), lr, hold_factors=hold_factors)

    def record(self) -> None:
        """Nothing: a checkpoint has them, and histories stay small."""


class Lengthscales(BufferLearner):
    """log ω of all bases."""

    def __init__(self, model: nn.Module, lr: float, hold_factors: bool = True) -> None:
        buffers = _buffers(model, "lengthscales", "inverse_lengthscale")
        super().__init__("lengthscales", model, buffers, lr, True, hold_factors)

    def record(self) -> None:
        """Nothing: ω is in every evaluation, learned or not."""
