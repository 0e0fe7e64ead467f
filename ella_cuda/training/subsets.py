"""Subsets of the training data, one for each evidence step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, SequentialSampler

from ella_cuda.laplace.batches import DictKeys, Inputs, data_points, kept, pair_of, take


def require_shuffled(loader: Any, argument: str) -> None:
    """ValueError where the first batches of a pass are the same in every pass; ``argument`` asks for subsets, with its owner."""
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(loader if batches is None else batches, "sampler", None)
    sequential = isinstance(loader, DataLoader) and isinstance(sampler, SequentialSampler)
    if isinstance(loader, (list, tuple)) or sequential or getattr(loader, "shuffle", None) is False:
        raise ValueError(
            f"{argument} takes the first of a new pass, which of this loader are the same in every pass; pass a DataLoader with shuffle=True."
        )


def first_points(loader: Iterable[Any], count: int, where: str, keys: DictKeys) -> list[tuple[Inputs, Tensor]]:
    """The first data points of a new pass as batches, all of them where the pass has fewer."""
    found: list[tuple[Inputs, Tensor]] = []
    with contextlib.closing(iter(pair_of(batch, where, keys) for batch in loader)) as pairs:
        while count > 0 and (pair := next(pairs, None)) is not None:
            x, y = (take(part, slice(count)) for part in pair)
            found.append(kept((x, y)))
            count -= data_points(x)
    return found
