"""Images of data sets, 28 x 28 pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ella_cuda.experiments.studies import Part, Study, Work
from ella_cuda.experiments.tomography.drawn import drawn_densities, drawn_errors, drawn_images
from ella_cuda.experiments.tomography.reconstruction import ANGLES, NOISES, measured, rows_of, settings_of, text_of
from ella_cuda.experiments.tomography.sources import image_of

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


def rows(study: Study, result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each way."""
    return rows_of(study.settings, result)


def text(rows: Sequence[dict[str, Any]]) -> str:
    """For people."""
    return text_of(PART.title, rows)


PART = Part(
    "images",
    "Images of data sets from few angles: reconstructions and error bars",
    plan,
    run,
    rows,
    text,
    drawn_images,
    data=("digits", "fashion-mnist"),
    pictures={"images-densities": drawn_densities, "images-errors": drawn_errors},
)
