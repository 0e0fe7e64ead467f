"""N, the number of data points, which weighs the prior against the data."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from tqdm.auto import tqdm

from ella_cuda.laplace.batches import DEFAULT_KEYS, DictKeys, pair_of
from ella_cuda.progress import bar_size
from ella_cuda.training.checkpoint import random_state, restore_random_state


@dataclasses.dataclass(frozen=True)
class Points:
    """How many data points one pass over a loader yields.

    Attributes:
        count: how many.
        loader: whose argument the loader is and its name, for messages.
        source: how it is known, for messages; "" where the user gave N and passes may yield other numbers.
    """

    count: int
    loader: str
    source: str

    def require_at_most(self, seen: int) -> None:
        """ValueError where a pass has yielded more."""
        if self.source and seen > self.count:
            self._refuse(f"{seen} data points or more")

    def require(self, seen: int) -> None:
        """ValueError where a whole pass has yielded another number."""
        if self.source and seen != self.count:
            self._refuse(f"{seen} data points")

    def _refuse(self, got: str) -> None:
        raise ValueError(
            f"{self.loader} must yield {self.count} data points in every pass, as {self.source}, but a pass yielded "
            f"{got}. The prior weighs 1/N against one data point's loss: let every pass yield the same number, or pass n_data=N."
        )


def points_of(
    loader: Any, name: str, progress_bar: bool = False, keys: DictKeys = DEFAULT_KEYS, where: str = "marglik_training"
) -> Points:
    """What the loader declares in an attribute ``dataset_size``, else what torch's DataLoader knows from its data set and samplers,
    else what one pass yields, which is counted; random generators are put back to where they were.

    Args:
        loader: of batches ``(x, y)``.
        name: of the argument, for messages.
        progress_bar: whether to show one while batches are counted.
        keys: of batches that are mappings.
        where: whose argument it is, for messages.

    Raises:
        TypeError: a batch is no pair.
        ValueError: there are no data points.
    """
    declared = getattr(loader, "dataset_size", None)
    if declared is not None:
        count, source = int(declared), "its dataset_size says"
    elif (known := _known(loader)) is not None:
        count, source = known, "its data set and samplers say"
    else:
        count, source = _counted(loader, name, progress_bar, keys, where), "a pass before the first step did"
    if count < 1:
        raise ValueError(f"{where}: {name} has no data points; check its data set, samplers and drop_last.")
    return Points(count, f"{where}: {name}", source)


def _known(loader: Any) -> int | None:
    """From the lengths of a DataLoader's parts; None where they do not tell."""
    batches = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or type(batches) is not BatchSampler:
        return None  # a batch sampler of the user's own, or a data set of whole batches
    streams = isinstance(loader.dataset, IterableDataset)
    try:
        size = len(loader.dataset if streams else batches.sampler)
    except (TypeError, NotImplementedError):
        return None
    if not batches.drop_last:
        return size
    if streams and loader.num_workers > 1:
        return None  # every worker drops its own rest
    return size - size % batches.batch_size


def _counted(loader: Any, name: str, progress_bar: bool, keys: DictKeys, where: str) -> int:
    before = random_state([loader])
    try:
        seen = 0
        # The bar does not iterate itself: tqdm's asks the loader for two passes and starts its workers twice.
        with tqdm(desc=f"counting {name}", unit="batch", leave=False, disable=not progress_bar, **bar_size()) as bar:
            for batch in loader:
                seen += len(pair_of(batch, f"{where} ({name})", keys)[1])
                bar.update()
        return seen
    finally:
        restore_random_state(before, [loader])


def points_of_both(
    train_loader: Any, marglik_loader: Any, n_data: int | None, progress_bar: bool, keys: DictKeys
) -> tuple[Points, Points]:
    """Of a pass over the training's loader and over the evidence's, which is the same where ``marglik_loader`` is None.

    Args:
        n_data: N as the user gave it, where passes may yield other numbers; None lets the loaders tell.

    Raises:
        What :func:`points_of` raises. ValueError: the loaders differ.
    """
    if n_data is not None:
        return (Points(n_data, "marglik_training: train_loader", ""),) * 2
    points = points_of(train_loader, "train_loader", progress_bar, keys)
    if marglik_loader is None or marglik_loader is train_loader:
        return points, points
    of_evidence = points_of(marglik_loader, "marglik_loader", progress_bar, keys)
    if of_evidence.count != points.count:
        raise ValueError(
            f"marglik_training: marglik_loader must yield as many data points as train_loader, got {of_evidence.count} and {points.count}: "
            "the prior has one precision for both. Pass loaders of the same data, or n_data=N, against which the prior is weighed in "
            "training."
        )
    return points, of_evidence
