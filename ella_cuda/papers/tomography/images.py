"""Images of data sets, 28 x 28 pixels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ella_cuda.papers.studies import Part, Study, Work
from ella_cuda.papers.tomography.drawn import drawn_densities, drawn_errors, drawn_images
from ella_cuda.papers.tomography.reconstruction import ANGLES, NOISES, measured, rows, settings_of, text
from ella_cuda.papers.tomography.sources import image_of

TITLE = "Images of data sets from few angles: reconstructions and error bars"
SIZE = 28


def plan(seeds: Sequence[int], scale: float, data: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A study for each data set, noise, number of angles and seed; the seed chooses the image too."""
    return {
        f"images-{name}-{angles}angles-{100 * noise:g}noise-seed{seed}": {
            "data": name,
            **settings_of(scale, SIZE, angles, noise),
            "seed": seed,
        }
        for name in data
        for noise in NOISES
        for angles in ANGLES
        for seed in seeds
    }


def run(study: Study, work: Work) -> dict[str, Any]:
    """Reconstruct an image, with error bars in all ways."""
    s = study.settings
    return measured(image_of(s["data"], s["image_size"], s["seed"], work), s, work)


PART = Part(
    "images",
    TITLE,
    plan,
    run,
    rows,
    partial(text, TITLE),
    drawn_images,
    data=("digits", "fashion-mnist"),
    pictures={"images-densities": drawn_densities, "images-errors": drawn_errors},
)
