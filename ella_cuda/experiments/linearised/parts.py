"""The parts of the experiment, and what is done for them."""

from __future__ import annotations

from collections.abc import Sequence

from ella_cuda.experiments.linearised import networks, stopping, sweep, toy
from ella_cuda.experiments.linearised.study import Part, Study

PARTS: dict[str, Part] = {part.name: part for part in (toy.PART, sweep.PART, stopping.PART, networks.PART)}


def plan_studies(
    parts: Sequence[str], seeds: Sequence[int] = (0,), scale: float = 1.0, data: Sequence[str] | None = None
) -> list[Study]:
    """The studies of some parts, in the parts' order.

    Args:
        parts: names of :data:`PARTS`.
        seeds: of weights and data; every part has a study of each.
        scale: share of the full sizes, above 0 and at most 1: of regressions' hidden units and epochs, and of networks' images, batches and
            parameters, which are trained for as many steps.
        data: data sets; None is each part's own.

    Raises:
        ValueError: an unknown part, no seed, or a scale out of range.
    """
    if unknown := [name for name in parts if name not in PARTS]:
        raise ValueError(f"part must be one of {', '.join(PARTS)}, got {', '.join(unknown)}.")
    if not seeds:
        raise ValueError("seeds must hold at least one, got none.")
    if not 0 < scale <= 1:
        raise ValueError(f"scale must be above 0 and at most 1, got {scale}.")
    return [
        Study(part.name, name, settings)
        for part in PARTS.values()
        if part.name in parts
        for name, settings in part.plan(list(dict.fromkeys(seeds)), scale, part.data if data is None else data).items()
    ]
