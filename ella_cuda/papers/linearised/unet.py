"""The talk's first table, the column of the U-Net: log density of a reconstruction from few angles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ella_cuda.papers.invariances.sizes import TWO_CORES
from ella_cuda.papers.studies import Part, Study, Work
from ella_cuda.papers.studies.text import seeds_said, table, with_error
from ella_cuda.papers.tomography import reconstruction
from ella_cuda.papers.tomography.pictures import draw_ways
from ella_cuda.papers.tomography.reconstruction import measured, settings_of
from ella_cuda.papers.tomography.sources import image_of

SIZE, ANGLES, NOISE = 28, 20, 0.05
WAYS = {"network": "network's weights", "linear": "linear mode", "simple": "linear loss, simple form"}
# NLL per pixel and its error, KMNIST, several precisions; the talk's table has no single precision for the U-Net.
TALK = {"network": (-1.703, 0.023), "simple": (-2.240, 0.027)}


def plan(seeds: Sequence[int], scale: float, data: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A study for each data set and seed, which chooses the image too; the scale is that of tomography."""
    settings = settings_of(scale * TWO_CORES, SIZE, ANGLES, NOISE)
    return {f"unet-{name}-seed{seed}": {"data": name, **settings, "seed": seed} for name in data for seed in seeds}


def run(study: Study, work: Work) -> dict[str, Any]:
    """Reconstruct an image, and choose precisions in three ways."""
    s = study.settings
    return measured(image_of(s["data"], s["image_size"], s["seed"], work), s, work, WAYS)


def rows(study: Study, result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each way."""
    made = []
    for row in reconstruction.rows(study, result):
        printed, error = TALK.get(row["way"], (None, None))
        made.append({**row, "nll": -row["log_density"], "talk_nll": printed, "talk_error": error})
    return made


def text(rows: Sequence[dict[str, Any]]) -> str:
    """For people: a table for each data set."""
    blocks = [PART.title]
    for data in dict.fromkeys(r["data"] for r in rows):
        some = [r for r in rows if r["data"] == data]
        one, lines, means = some[0], [], {}
        for way, name in WAYS.items():
            found = [r["nll"] for r in some if r["way"] == way]
            means[way] = sum(found) / len(found)
            printed, error = TALK.get(way, (None, None))
            lines.append([name, with_error(found), "-" if printed is None else f"{printed:.3f} ± {error:.3f}"])
        seeds = sorted({r["seed"] for r in some})
        title = (
            f"{data}, {one['image_size']} x {one['image_size']} pixels, {ANGLES} angles, {NOISE:.0%} noise, {one['parameters']:,} "
            f"parameters; {seeds_said(seeds)}"
        )
        kept = ", ".join(
            f"{WAYS[way]}: {'yes' if means[way] <= means['network'] else 'no'}" for way in ("linear", "simple")
        )
        blocks.append(
            table(
                title,
                ["evidence at", "U-Net", "talk"],
                lines,
                [f"No worse than the network's weights: {kept}."],
                left=1,
            )
        )
    blocks.append(
        "NLL per pixel in nats of the true image, whole covariance, by several precisions: a variance and a lengthscale for each block. "
        "A seed has an image, noise and a network of its own. The "
        "talk's: KMNIST; its linear weights have least error and total variation, of the simple form as in the authors' code."
    )
    return "\n\n".join(blocks)


def draw(found: Sequence[tuple[Study, dict[str, Any]]]) -> Any:
    """NLL of all data sets beside the talk's."""
    made = [row for study, result in found for row in rows(study, result)]
    return draw_ways(made, WAYS, f"{PART.title}; the talk's: KMNIST")


PART = Part(
    "unet",
    "U-Net: NLL of a reconstruction by where the evidence is",
    plan,
    run,
    rows,
    text,
    draw,
    data=("digits", "fashion-mnist"),
)
