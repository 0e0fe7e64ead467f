"""The Shepp-Logan phantom, 32 x 32 pixels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ella_cuda.papers.studies import Part, Study, Work
from ella_cuda.papers.tomography.drawn import drawn_densities, drawn_errors, drawn_images
from ella_cuda.papers.tomography.reconstruction import ANGLES, NOISES, measured, rows, settings_of, text
from ella_cuda.papers.tomography.sources import shepp_logan

TITLE = "The Shepp-Logan phantom from few angles: reconstructions and error bars"
SIZE = 32


def plan(seeds: Sequence[int], scale: float, data: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A study for each noise, number of angles and seed, of the noise and of the network."""
    return {
        f"phantom-{angles}angles-{100 * noise:g}noise-seed{seed}": {
            **settings_of(scale, SIZE, angles, noise),
            "seed": seed,
        }
        for noise in NOISES
        for angles in ANGLES
        for seed in seeds
    }


def run(study: Study, work: Work) -> dict[str, Any]:
    """Reconstruct the phantom, with error bars in all ways."""
    return measured(shepp_logan(study.settings["image_size"]), study.settings, work)


PART = Part(
    "phantom",
    TITLE,
    plan,
    run,
    rows,
    partial(text, TITLE),
    drawn_images,
    pictures={"phantom-densities": drawn_densities, "phantom-errors": drawn_errors},
)
