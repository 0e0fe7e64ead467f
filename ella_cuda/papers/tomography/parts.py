"""The parts of the experiment."""

from __future__ import annotations

from ella_cuda.papers.invariances.sizes import TWO_CORES
from ella_cuda.papers.studies import Experiment
from ella_cuda.papers.tomography import images, phantom

EXPERIMENT = Experiment(
    "tomography",
    "reconstructions from few angles by a deep image prior, with error bars (Antorán, Barbano et al., TMLR 2023)",
    f"the network's channels and of all steps, of which {TWO_CORES:g} is for two cores, minutes for an image, and 1 is the published "
    "recipe",
    (phantom.PART, images.PART),
    scale=TWO_CORES,
)
