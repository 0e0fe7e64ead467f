"""The parts of the experiment."""

from __future__ import annotations

from ella_cuda.papers.linearised import networks, stopping, sweep, toy, unet
from ella_cuda.papers.studies import Experiment

EXPERIMENT = Experiment(
    "linearised",
    "the evidence at the network's weights and at the linear model's mode (Antorán et al., ICML 2022)",
    "widths and epochs, and of networks' images and parameters",
    (toy.PART, sweep.PART, stopping.PART, networks.PART, unet.PART),
)
