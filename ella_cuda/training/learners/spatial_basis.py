"""The bases of sparsified layers."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from ella_cuda.models import SPARSE_PATHS
from ella_cuda.nn import SpatialBasis
from ella_cuda.training.checks import positive
from ella_cuda.training.learners.learner import BufferLearner


def bases_of(model: nn.Module) -> dict[str, SpatialBasis]:
    """The bases of the model's sparsified layers, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, SpatialBasis)}


class _OfBases(BufferLearner):
    """A buffer of all bases."""

    paths = SPARSE_PATHS

    def __init__(
        self, word: str, buffer: str, model: nn.Module, lr: float, logarithmic: bool, hold_factors: bool
    ) -> None:
        names = [f"{name}.{buffer}" if name else buffer for name in bases_of(model)]
        if not names:
            raise ValueError(
                f"marglik_training: learn=[{word!r}] needs sparsified layers (ella_cuda.nn.SparseFactoredLinear2d, SparseConv2d), the model "
                "has none."
            )
        super().__init__(word, model, names, positive(f"lr_{word}", lr), logarithmic, hold_factors)

    def record(self) -> None:
        """Nothing: a checkpoint has the anchors, every evaluation the lengthscales."""


class Anchors(_OfBases):
    """The anchors of all bases, in pixels."""

    run_settings: ClassVar = {"lr_anchors": (0.003, "Adam's learning rate on anchors that --learn names, in pixels")}

    def __init__(self, model: nn.Module, n_steps: int, *, lr_anchors: float = 0.003, hold_factors: bool = True) -> None:
        super().__init__("anchors", "anchors", model, lr_anchors, False, hold_factors)


class Lengthscales(_OfBases):
    """log ω of all bases."""

    run_settings: ClassVar = {
        "lr_lengthscales": (0.03, "Adam's learning rate on the logarithms of lengthscales that --learn names")
    }

    def __init__(
        self, model: nn.Module, n_steps: int, *, lr_lengthscales: float = 0.03, hold_factors: bool = True
    ) -> None:
        super().__init__("lengthscales", "inverse_lengthscale", model, lr_lengthscales, True, hold_factors)
