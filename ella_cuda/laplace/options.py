"""Options that every Laplace approximation takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ella_cuda.laplace.batches import DEFAULT_KEYS
from ella_cuda.laplace.likelihoods import IGNORED
from ella_cuda.laplace.values import Value


@dataclasses.dataclass(frozen=True)
class LaplaceOptions:
    """Arguments of :class:`ella_cuda.laplace.KronLaplace`, which documents them, that have nothing to do with factors."""

    prior_precision: Value = 1.0
    sigma_noise: Value = 1.0
    prior_mean: Value = 0.0
    temperature: float = 1.0
    memory_budget: int | None = None
    unknown: str = "error"
    subset_of_weights: str | Sequence[str] = "all"
    dict_key_x: str = DEFAULT_KEYS.x
    dict_key_y: str = DEFAULT_KEYS.y
    ignore_index: int = IGNORED
