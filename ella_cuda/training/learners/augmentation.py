"""The amounts of an augmentation that the network averages over."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from ella_cuda.laplace import KronLaplace
from ella_cuda.laplace.copies import augment_of
from ella_cuda.training.checks import positive
from ella_cuda.training.learners.learner import BufferLearner


class Augmentation(BufferLearner):
    """The amounts of the augmentation of an :class:`ella_cuda.augment.AveragedFunction`: one Adam step along the evidence's gradient, with
    the factors in it, at each evidence step; see :func:`ella_cuda.laplace.evidence_gradient`.

    Args:
        model: the averaged function.
        lr: Adam's learning rate at the first step.
        lr_min: at the last, along half a cosine.
        n_steps: how many there are.
        n_data, columns: of the evidence's gradient.

    Raises:
        ValueError: the model averages over no augmentation with amounts.
    """

    def __init__(
        self, model: nn.Module, lr: float, lr_min: float | None, n_steps: int, n_data: int | None, columns: str
    ) -> None:
        augment = augment_of(model)
        if augment is None:
            raise ValueError(
                "marglik_training: learn=['augmentation'] needs a network that is averaged over an ella_cuda.augment.Augment; pass "
                "augment=AffineAugment(n_samples), or a model AveragedFunction(network, augment)."
            )
        super().__init__("augmentation", model, ["augment.raw"], lr, hold_factors=False)
        self._augment, self._n_steps, self._n_data, self._columns = augment, max(n_steps, 1), n_data, columns
        self.lr_min = self.lr if lr_min is None else positive("lr_aug_min", lr_min)
        self._steps = 0

    def gradients(self, la: KronLaplace, loader: Iterable[Any]) -> dict[str, Tensor]:
        return self._followed(la, loader, n_data=self._n_data, columns=self._columns)

    def step(self, la: KronLaplace, gradients: Mapping[str, Tensor]) -> None:
        share = min(self._steps / max(self._n_steps - 1, 1), 1.0)
        self.optimizer.param_groups[0]["lr"] = (
            self.lr_min + (self.lr - self.lr_min) * (1 + math.cos(math.pi * share)) / 2
        )
        super().step(la, gradients)
        self._augment.project_()
        self._steps += 1

    def settings(self) -> dict[str, Any]:
        return {
            "lr_aug": self.lr,
            "lr_aug_min": self.lr_min,
            "aug_data": self._n_data,
            "aug_columns": self._columns,
        }

    def record(self) -> dict[str, float]:
        """The amounts by name."""
        return self._augment.amounts()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._steps = state["steps"]
