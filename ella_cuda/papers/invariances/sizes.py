"""Sizes of the parts by the share of the published ones."""

from __future__ import annotations

from ella_cuda.papers.studies import share

TWO_CORES = 0.05  # the share that is for two cores
LARGE = 0.5  # from which on images have their own size


def small(scale: float) -> float:
    """The share of what is of full size from :data:`TWO_CORES` on."""
    return min(1.0, scale / TWO_CORES)


def of_small(scale: float, full: int, least: int) -> int:
    """A size that is full from :data:`TWO_CORES` on."""
    return share(small(scale), full, least)
