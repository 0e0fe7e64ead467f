"""Training of a shallow network by the bound: weights, q, amounts, prior and noise at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm

from ella_cuda.invariance.bound import check_targets, log_normal
from ella_cuda.invariance.shallow import ShallowNetwork
from ella_cuda.laplace.batches import pair_on
from ella_cuda.laplace.parameters import check_choice
from ella_cuda.modes import differentiating
from ella_cuda.ops._precision import without_autocast
from ella_cuda.progress import bar_size
from ella_cuda.training.checkpoint import (
    Checkpoint,
    load_checkpoint,
    random_state,
    restore,
    threads_of,
    warn_of_unsaved_state,
)
from ella_cuda.training.checks import in_words, positive, positive_integer
from ella_cuda.training.data import data_digest
from ella_cuda.training.points import Points, points_of
from ella_cuda.training.start import require_passes

OBJECTIVES = ("bound", "point")
ENTRIES = {
    "epoch": int,
    "history": list,
    "settings": dict,
    "model": dict,
    "optimizer": dict,
    "random": dict,
}  # of a state


class ElboTrainer:
    r"""Adam on the bound of a :class:`ShallowNetwork`, over minibatches: :meth:`run` is the whole of it.

    "bound" maximises :func:`multisample_elbo` in the features' weights, q, the amounts of augmentations among the features, the prior's
    precision and the noise. "point" is the comparison without a posterior: it maximises
    :math:`\log p(y | \bar\phi^T \mu) - \frac\delta2 \|\mu\|^2` in the features' weights, :math:`\mu` and the amounts, with
    :math:`\delta` and the noise as they are, for their best values would be degenerate. A point estimate pays nothing for flexibility, so
    its amounts shrink.

    Args:
        model: trained in place; it stays in training mode.
        train_loader: yields ``(x, y)``, iterated once per epoch; batches are moved to the model's device.
        n_epochs: passes.
        objective: "bound" or "point".
        lr: Adam's rate of the features' weights and q.
        lr_hyp: of amounts, before their softplus, and of the logarithms of precision and noise.
        learn_amounts: whether amounts are learned. Parameters that require no gradient are not learned either.
        n_samples, unbiased: of the bound.
        n_data: N, where passes may yield other numbers; None takes it from the loader's ``dataset_size``, or from a DataLoader's data set and
            samplers, or counts a pass before the first step, and refuses passes that yield another number.
        progress_bar: whether to show one.
        checkpoint: a file, replaced every ``checkpoint_frequency`` epochs and at the end. If it exists, training goes on from it; on the
            CPU to the numbers of a training that was not interrupted, bit for bit. One of other settings or data is refused.
        checkpoint_frequency: epochs.
        depends_on: what else the numbers depend on, by name.
        description: of the progress bar.

    Attributes:
        epochs: how many are done.
        history: of every epoch ``epoch``, ``objective`` (mean over its batches, nats per data point) and the values of
            :meth:`ShallowNetwork.hyperparameters` at its end.

    Raises:
        TypeError, ValueError: an argument does not fit; a checkpoint of other settings or data, or one that cannot be read.
        OSError: the checkpoint cannot be written.
        RuntimeError: another call works on the checkpoint.
        FloatingPointError: the objective, or a parameter after an epoch, is not finite. The last good checkpoint stays.

    Source: van der Ouderaa and van der Wilk, "Learning invariant weights in neural networks", UAI 2022; rates are of this package.
    """

    @differentiating
    def __init__(
        self,
        model: ShallowNetwork,
        train_loader: Iterable[Any],
        *,
        n_epochs: int = 100,
        objective: str = "bound",
        lr: float = 1e-3,
        lr_hyp: float = 1e-2,
        learn_amounts: bool = True,
        n_samples: int = 10,
        unbiased: bool = False,
        n_data: int | None = None,
        progress_bar: bool = True,
        checkpoint: str | Path | None = None,
        checkpoint_frequency: int = 1,
        depends_on: Mapping[str, Any] | None = None,
        description: str = "training",
    ) -> None:
        check_choice("ElboTrainer: objective", objective, OBJECTIVES)
        counts = {"n_epochs": n_epochs, "checkpoint_frequency": checkpoint_frequency, "n_samples": n_samples}
        n_epochs, checkpoint_frequency, n_samples = (positive_integer(*one, "ElboTrainer") for one in counts.items())
        if unbiased and objective == "point":
            raise ValueError("ElboTrainer: unbiased=True is of objective='bound', got 'point'.")
        if unbiased:
            model.check_unbiased()
        lr, lr_hyp = positive("lr", lr, "ElboTrainer"), positive("lr_hyp", lr_hyp, "ElboTrainer")
        self.model, self.objective, self.n_epochs = model, objective, n_epochs
        require_passes(train_loader, "ElboTrainer: train_loader")
        if n_data is None:
            self._points = points_of(train_loader, "train_loader", progress_bar, where="ElboTrainer")
        else:
            self._points = Points(positive_integer("n_data", n_data, "ElboTrainer"), "ElboTrainer: train_loader", "")
        self.n_data = self._points.count
        self._loader, self._checkpoint, self._path = train_loader, Checkpoint(checkpoint, "ElboTrainer"), checkpoint
        self._frequency, self._bound = checkpoint_frequency, {"n_samples": n_samples, "unbiased": unbiased}
        self._augments = list(model.augments()) if learn_amounts else []
        self._groups = self._parameters(objective)
        groups = [
            {"params": group, "lr": rate} for group, rate in zip(self._groups, (lr, lr_hyp), strict=True) if group
        ]
        self._optimizer = torch.optim.Adam(groups)
        self._settings = {
            "trainer": "ElboTrainer",
            "network": repr(model),
            "objective": objective,
            "n_epochs": self.n_epochs,
            "lr": lr,
            "lr_hyp": lr_hyp,
            "learn_amounts": learn_amounts,
            "n_samples": n_samples,
            "unbiased": unbiased,
            "n_data": self.n_data,
            "learned": [
                name for name, tensor in _named(model) if any(tensor is p for group in self._groups for p in group)
            ],
            "depends_on": in_words(depends_on),
            "data": {"train_loader": data_digest(train_loader) if self._checkpoint else None},
        }
        if self._checkpoint:
            warn_of_unsaved_state([train_loader], "ElboTrainer")
        self._bar = {"desc": description, "disable": not progress_bar}
        self.epochs = 0
        self.history: list[dict[str, float]] = []

    @differentiating
    def run(self) -> ShallowNetwork:
        """Epochs and checkpoints from where the training is, or its checkpoint was, to the last epoch; returns the model."""
        with self._checkpoint.claimed():
            if self._checkpoint and Path(self._path).exists():
                self._restore(self._checkpoint.source, load_checkpoint(self._path, self._settings, self.model))
            bar = tqdm(total=self.n_epochs, initial=self.epochs, unit="epoch", **self._bar, **bar_size())
            with bar:
                while self.epochs < self.n_epochs:
                    value = self.epoch()
                    if self._checkpoint and (self.epochs % self._frequency == 0 or self.epochs == self.n_epochs):
                        self._checkpoint.save(self.state_dict())
                    bar.set_postfix({"objective/N": f"{value:.3f}"}, refresh=False)
                    bar.update()
        return self.model

    @differentiating
    def epoch(self) -> float:
        """One pass of steps; returns the mean of the objective per data point."""
        device, total, seen = self.model.layer.mean.device, 0.0, 0
        self.model.train()
        before = [augment.raw.requires_grad for augment in self._augments]
        for augment in self._augments:
            augment.raw.requires_grad_()
        try:
            for batch in self._loader:
                x, y = pair_on(batch, device, "ElboTrainer (train_loader)")
                if not len(y):
                    continue
                self._points.require_at_most(seen + len(y))
                self._optimizer.zero_grad()
                with without_autocast(device.type):
                    value = self._value(x, y) / self.n_data
                    (-value).backward()
                    self._optimizer.step()
                for augment in self._augments:
                    augment.project_()
                total, seen = total + value.detach() * len(y), seen + len(y)
        finally:
            torch.clear_autocast_cache()  # which a caller's autocast filled before the steps
            self._optimizer.zero_grad()
            for augment, required in zip(self._augments, before, strict=True):
                augment.raw.requires_grad_(required)
        if not seen:
            raise ValueError("ElboTrainer: train_loader must yield at least one batch, got none.")
        self._points.require(seen)
        mean = float(total) / seen
        self._check_finite(mean)
        self.epochs += 1
        self.history.append({"epoch": self.epochs, "objective": mean, **self.model.hyperparameters()})
        return mean

    def state_dict(self) -> dict[str, Any]:
        """All that :meth:`load_state_dict` needs to go on, tensors and plain values."""
        return {
            "epoch": self.epochs,
            "history": self.history,
            "settings": self._settings,
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "random": random_state([self._loader]),
            "threads": threads_of(self.model),
        }

    @differentiating
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of a training with the same settings and data.

        Raises:
            ValueError: the state is of another training, or damaged.
        """
        self._restore("the state", state)

    def _restore(self, source: str, state: Mapping[str, Any]) -> None:
        restore(source, state, self._settings, self.model, self._optimizer, [self._loader], ENTRIES)
        self.epochs, self.history = state["epoch"], [dict(entry) for entry in state["history"]]

    def _parameters(self, objective: str) -> tuple[list[Tensor], list[Tensor]]:
        """What is learned at the one rate, and at the other."""
        model, layer = self.model, self.model.layer
        amounts, hyper = [a.raw for a in self._augments], (layer.log_prior_precision, model.log_sigma_noise)
        weights = _learned(*model.features.parameters(), layer.mean)
        if objective == "point":
            return weights, amounts
        of_q = [p for p in layer.parameters() if p is not layer.mean and p is not layer.log_prior_precision]
        return [*weights, *_learned(*of_q)], [*amounts, *_learned(*hyper)]

    def _value(self, x: Tensor, y: Tensor) -> Tensor:
        """The objective in nats of all data."""
        model = self.model
        if self.objective == "bound":
            return model.elbo(x, y, self.n_data, **self._bound)
        mean = model(x)
        check_targets("ElboTrainer", tuple(mean.shape), mean.dtype, y, model.likelihood)
        if model.likelihood == "classification":
            fit = -F.cross_entropy(mean, y, reduction="sum")
        else:
            fit = log_normal((y - mean).square(), model.sigma_noise.detach())
        penalty = 0.5 * model.layer.prior_precision.detach() * model.layer.mean.square().sum()
        return self.n_data / len(y) * fit - penalty

    def _check_finite(self, mean: float) -> None:
        where = f"ElboTrainer: in epoch {self.epochs + 1} "
        if not math.isfinite(mean):
            raise FloatingPointError(
                f"{where}the objective is not finite. Lower lr or lr_hyp; the last checkpoint, if any, stays."
            )
        for name, tensor in self.model.state_dict().items():
            if not tensor.isfinite().all():
                raise FloatingPointError(
                    f"{where}{name} is not finite. Lower lr or lr_hyp; the last checkpoint, if any, stays."
                )


def _named(model: ShallowNetwork) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _learned(*tensors: Tensor | None) -> list[Tensor]:
    """Those that are parameters and not frozen: of others an optimizer has no state to go on from."""
    return [t for t in tensors if isinstance(t, torch.nn.Parameter) and t.requires_grad]
