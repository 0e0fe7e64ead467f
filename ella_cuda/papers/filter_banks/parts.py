"""The parts of the experiment."""

from __future__ import annotations

from ella_cuda.papers.filter_banks import amounts, layers, recovery
from ella_cuda.papers.invariances.sizes import TWO_CORES
from ella_cuda.papers.studies import Experiment

EXPERIMENT = Experiment(
    "filter-banks",
    "filters averaged over learned transformations, by a bound on the evidence (van der Ouderaa and van der Wilk, UAI 2022)",
    f"images and steps of amounts and layers, of which {TWO_CORES:g} is for two cores and 1 has all images at 28 x 28 pixels and 24,000 "
    f"steps; recovery has its full size from {TWO_CORES:g} on",
    (recovery.PART, amounts.PART, layers.PART),
    scale=TWO_CORES,
)
