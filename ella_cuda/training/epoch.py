"""One pass over the training data."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ella_cuda.training.checkpoint import random_state, restore_random_state
from ella_cuda.training.graph import GraphedStep, Snapshot
from ella_cuda.training.prior import Prior
from ella_cuda.training.step import TrainingStep, first_bad_layer, require_classes


def train_epoch(
    step: TrainingStep,
    graphed: GraphedStep | None,
    loader: Iterable[tuple[Tensor, Tensor]],
    scheduler: Any,
    prior: Prior,
    epoch: int,
) -> tuple[float, float | None]:
    """One pass; returns the batches' mean data loss plus the prior's part at its start, and the training accuracy as a fraction."""
    step.model.train()
    penalty = step.begin_epoch(prior.precision().detach(), float(prior.sigma().detach()), dataset_size(loader))
    done = 0

    def require_finite(loss: Tensor) -> None:
        if not torch.isfinite(loss + penalty):
            raise FloatingPointError(
                f"marglik_training: the loss is {float(loss) + penalty} at epoch {epoch}, step {done + 1}; "
                f"{first_bad_layer(step.model, x)}. Lower the learning rate or raise prior_prec_init; the last checkpoint, if any, is "
                "from before this epoch."
            )

    seen = 0
    for x, y in loader:
        if graphed is None:
            step(x, y, require_classes, require_finite)
        else:
            graphed(x, y)
        if scheduler is not None:
            scheduler.step()
        seen, done = seen + len(x), done + 1
    if done == 0:
        raise ValueError("marglik_training: train_loader yielded no batch; check its data set and drop_last.")
    loss, accuracy = step.epoch_means(done, seen)
    return loss + penalty, accuracy


def train_epoch_by_graphs(
    step: TrainingStep,
    graphed: GraphedStep,
    loader: Iterable[tuple[Tensor, Tensor]],
    scheduler: Any,
    prior: Prior,
    epoch: int,
) -> tuple[float, float | None]:
    """:func:`train_epoch` by recorded steps. Where one went wrong, the epoch is done again without them, to say which and why."""
    before, random_before = Snapshot(step, scheduler), random_state([loader])
    graphed.begin_epoch()
    loss, accuracy = train_epoch(step, graphed, loader, scheduler, prior, epoch)
    if math.isfinite(loss) and graphed.labels_were_classes():
        return loss, accuracy
    before.restore()
    restore_random_state(random_before, [loader])
    graphed.forget()  # they read the optimizer's state where it was
    return train_epoch(step, None, loader, scheduler, prior, epoch)


def dataset_size(loader: Any) -> int:
    """N, which weighs the prior against the data: how many points one pass yields."""
    batches = getattr(loader, "batch_sampler", None)
    if hasattr(loader, "dataset_size"):
        size = loader.dataset_size
    elif hasattr(getattr(batches, "sampler", None), "__len__") and hasattr(batches, "batch_size"):
        size = len(batches.sampler)  # a subset of the data set, where a sampler takes one
        if batches.drop_last:
            size -= size % batches.batch_size
    elif hasattr(getattr(loader, "dataset", None), "__len__"):
        size = len(loader.dataset)
    else:
        raise ValueError(
            "marglik_training: the number of data points is unknown; train_loader needs a `dataset` with a length (as "
            "torch.utils.data.DataLoader has) or an attribute `dataset_size`."
        )
    if size < 1:
        raise ValueError("marglik_training: train_loader has no data points.")
    return size
