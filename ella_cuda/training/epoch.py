"""One pass over the training data."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ella_cuda.laplace.batches import DictKeys, pair_on
from ella_cuda.training.checkpoint import Snapshot, random_state, restore_random_state
from ella_cuda.training.graph import GraphedStep
from ella_cuda.training.learners import Prior
from ella_cuda.training.points import Points
from ella_cuda.training.step import TrainingStep, what_is_not_finite


def train_epoch(
    step: TrainingStep,
    graphed: GraphedStep | None,
    loader: Iterable[Any],
    keys: DictKeys,
    points: Points,
    scheduler: Any,
    prior: Prior,
    epoch: int,
) -> tuple[float, float | None]:
    """One pass; returns the images' mean data loss plus the prior's part at its start, and the training accuracy as a fraction.

    By recorded steps where there are such; where one went wrong, the epoch is done again without them, to say which and why.

    Raises:
        TypeError, ValueError: a batch is no pair or does not fit the likelihood, the pass yields nothing or another number of
            data points than ``points`` has.
        FloatingPointError: the loss is not finite.
    """
    if graphed is not None:
        before, random_before = Snapshot(step.model, step.optimizer, scheduler), random_state([loader])
        graphed.begin_epoch()
        loss, accuracy = _pass(step, graphed, loader, keys, points, scheduler, prior, epoch)
        if math.isfinite(loss) and graphed.labels_were_classes():
            return loss, accuracy
        before.restore()
        restore_random_state(random_before, [loader])
        graphed.forget()  # they read the optimizer's state where it was
    return _pass(step, None, loader, keys, points, scheduler, prior, epoch)


def _pass(
    step: TrainingStep,
    graphed: GraphedStep | None,
    loader: Iterable[Any],
    keys: DictKeys,
    points: Points,
    scheduler: Any,
    prior: Prior,
    epoch: int,
) -> tuple[float, float | None]:
    step.model.train()
    penalty = step.begin_epoch(prior.of_parameters(), float(prior.sigma().detach()), points.count)
    device = step.parameters[0].device
    done = seen = 0

    def require_finite(loss: Tensor) -> None:
        if not torch.isfinite(loss + penalty):
            raise FloatingPointError(
                f"marglik_training: the loss is {float(loss) + penalty} at epoch {epoch}, step {done + 1}; "
                f"{what_is_not_finite(step.model, x, y)}. The last checkpoint, if any, is from before this epoch."
            )

    for batch in loader:
        x, y = pair_on(batch, device, "marglik_training (train_loader)", keys)
        if not len(y):
            continue  # as the evidence does: there is nothing to learn from
        points.require_at_most(seen + len(y))
        if graphed is None:
            step(x, y, step.checked, require_finite)
        else:
            graphed(x, y)
        if scheduler is not None:
            scheduler.step()
        seen, done = seen + len(y), done + 1
    if done == 0:
        raise ValueError(
            f"marglik_training: train_loader yielded no data in epoch {epoch}; every epoch iterates over it anew. Check its data set and "
            "drop_last, and that its __iter__ starts a new pass."
        )
    points.require(seen)
    loss, accuracy = step.epoch_means(seen)
    return loss + penalty, accuracy
