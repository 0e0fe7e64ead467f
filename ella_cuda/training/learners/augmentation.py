"""The amounts of an augmentation that the network averages over."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from ella_cuda.laplace import KronLaplace
from ella_cuda.laplace.copies import augment_of
from ella_cuda.laplace.hypergradients import COLUMNS
from ella_cuda.laplace.parameters import check_choice
from ella_cuda.training.checks import positive, warn, whole
from ella_cuda.training.learners.learner import BufferLearner


class Augmentation(BufferLearner):
    """The amounts of the augmentation of an :class:`ella_cuda.augment.AveragedFunction`: one Adam step along the evidence's gradient, with
    the factors in it, at each evidence step; see :func:`ella_cuda.laplace.evidence_gradient`.

    Args:
        model: the averaged function.
        n_steps: evidence steps.
        lr_aug, lr_aug_min, aug_sampling, aug_data, aug_columns: see :func:`ella_cuda.marglik_training`.

    Raises:
        TypeError, ValueError: an argument does not fit, the model averages over no augmentation with amounts, or an amount is 0 and the
            draws are a grid.

    Warns:
        UserWarning: the steps' rates cannot bring an amount to its limit.
    """

    run_settings: ClassVar = {"lr_aug": (0.2, "Adam's learning rate on amounts, through a softplus")}
    alone = True

    def __init__(
        self,
        model: nn.Module,
        n_steps: int,
        *,
        lr_aug: float = 0.05,
        lr_aug_min: float | None = None,
        aug_sampling: str | None = None,
        aug_data: int | None = None,
        aug_columns: str = "all",
    ) -> None:
        augment = augment_of(model)
        if augment is None:
            raise ValueError(
                "marglik_training: learn=['augmentation'] needs a network that is averaged over an ella_cuda.augment.Augment; pass "
                "augment=AffineAugment(n_samples), or a model AveragedFunction(network, augment)."
            )
        if (aug_sampling or augment.sampling) == "grid" and 0 in augment.amounts().values():
            raise ValueError(
                "marglik_training: learn=['augmentation'] with draws of a grid needs amounts that are not 0, got "
                f"{augment.amounts()}: the gradient at 0 is exactly 0 there. Start at 0.05 to 0.1, or pass aug_sampling='shared'."
            )
        super().__init__("augmentation", model, ["augment.raw"], positive("lr_aug", lr_aug), hold_factors=False)
        self.lr_min = self.lr if lr_aug_min is None else positive("lr_aug_min", lr_aug_min)
        self._n_data = None if aug_data is None else whole("aug_data", aug_data, 1)
        self._columns = check_choice("marglik_training: aug_columns", aug_columns, COLUMNS)
        self._augment, self._n_steps = augment, max(n_steps, 1)
        self._steps = 0
        self._warn_of_limits(n_steps)

    def _rate(self, step: int) -> float:
        share = min(step / max(self._n_steps - 1, 1), 1.0)
        return self.lr_min + (self.lr - self.lr_min) * (1 + math.cos(math.pi * share)) / 2

    def _warn_of_limits(self, n_steps: int) -> None:
        """UserWarning where Adam, which moves ``raw`` by about a rate in a step at most, cannot bring an amount to its limit."""
        way = math.fsum(map(self._rate, range(n_steps)))
        short = list(self._augment._out_of_reach(way)) if n_steps else []
        if short:
            words = [f"{name} to at most {most:.3g} of its limit {limit:.3g}" for name, limit, most, _ in short]
            rate = 1.006 * max(needed for *_, needed in short) / n_steps  # which rounding leaves large enough
            warn(
                f"marglik_training: learn=['augmentation']: the rates of the {n_steps} evidence steps sum to {way:.3g}, which takes "
                f"{', '.join(words)}, whatever the evidence says. If it may be more, pass lr_aug={rate:.3g} (--lr-aug) and no lr_aug_min, "
                "take more evidence steps (n_epochs, marglik_frequency, n_epochs_burnin), or start at a larger amount."
            )

    def gradients(self, la: KronLaplace, loader: Iterable[Any]) -> dict[str, Tensor]:
        return self._followed(la, loader, n_data=self._n_data, columns=self._columns)

    def step(self, la: KronLaplace, gradients: Mapping[str, Tensor]) -> None:
        self.optimizer.param_groups[0]["lr"] = self._rate(self._steps)
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
