"""The parts of the experiment."""

from __future__ import annotations

from ella_cuda.papers.invariances import gp, lastlayer, lengthscale, local, ranges, rings, sampling, subsets
from ella_cuda.papers.invariances.sizes import TWO_CORES
from ella_cuda.papers.studies import Experiment

EXPERIMENT = Experiment(
    "invariances",
    "amounts of augmentation learned by the evidence (Immer, van der Ouderaa et al., NeurIPS 2022)",
    f"images, epochs and hidden units of ranges and subsets, of which {TWO_CORES:g} is for two cores and 1 is the published recipe; rings "
    f"and sampling have their full size from {TWO_CORES:g} on",
    (rings.PART, ranges.PART, subsets.PART, sampling.PART, lengthscale.PART, gp.PART, local.PART, lastlayer.PART),
    scale=TWO_CORES,
)
