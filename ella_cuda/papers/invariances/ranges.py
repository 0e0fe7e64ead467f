"""Recovered ranges: amounts that the evidence learns of transformed images, beside those of the published figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ella_cuda.experiments.run import sampled
from ella_cuda.papers.invariances.images import (
    FULL_RANGE,
    HIDDEN,
    data_of,
    measured,
    mlp,
    schedule,
    settings_of,
    sizes_said,
    small_said,
    trained,
)
from ella_cuda.papers.invariances.pictures import draw_first_copies
from ella_cuda.papers.studies import Part, Study, Work, share
from ella_cuda.papers.studies.text import seeds_said, table, with_error
from ella_cuda.reports.pictures.amounts import draw_amounts

EPOCHS = 1000
SHOWN = {
    "rotated-90": "rotated ±90°",
    "rotated": "rotated ±180°",
    "translated-8of14": "translated",
    "scaled": "scaled",
    "plain": "plain",
}
GENERATORS = ("rotation", "tx", "ty", "sx", "sy", "shear")
# Shares of the full range, of MNIST, with the network of ranges and 31 copies; read off a figure, to about 0.03.
FIGURE = {
    "rotated": {"rotation": 1.00, "tx": 0.0, "ty": 0.0, "sx": 0.05, "sy": 0.04, "shear": 0.01},
    "rotated-90": {"rotation": 0.52, "tx": 0.0, "ty": 0.0, "sx": None, "sy": 0.04, "shear": 0.02},
    "translated-8of14": {"rotation": 0.0, "tx": 1.01, "ty": 0.85, "sx": 0.03, "sy": 0.04, "shear": 0.0},
    "scaled": {"rotation": 0.04, "tx": 0.0, "ty": 0.0, "sx": 1.13, "sy": 1.05, "shear": 0.01},
    "plain": {"rotation": 0.0, "tx": 0.37, "ty": 0.31, "sx": 0.04, "sy": 0.06, "shear": 0.01},
}
# What the data have, in the same units.
TRUE = {
    "rotated": {"rotation": 1.0},
    "rotated-90": {"rotation": 0.5},
    "translated-8of14": {"tx": 1.0, "ty": 1.0},
    "scaled": {"sx": 1.0, "sy": 1.0},
    "plain": {},
}
SAMPLED, COPIES = 3, 6  # images, and copies of each, in a picture


def plan(seeds: Sequence[int], scale: float, data: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A study for each data set, task and seed."""
    made = {}
    for name in data:
        common = settings_of(name, scale) | schedule(share(scale, EPOCHS, 3))
        common["hidden"] = share(scale, HIDDEN, 8)
        for task in SHOWN:
            for seed in seeds:
                made[f"ranges-{name}-{task}-seed{seed}"] = {**common, "task": task, "seed": seed}
    return made


def run(study: Study, work: Work) -> dict[str, Any]:
    """Train, and look at the amounts."""
    s = study.settings
    dataset = data_of(s, work)
    size = s["image_size"]
    found = trained(lambda: mlp(s["hidden"], dataset.channels, size, dataset.num_classes), dataset, s, work, "evidence")
    result = measured(found, dataset)
    trajectory = {"epochs": found.epochs, "amounts": found.amounts}
    return {**result, "trajectory": trajectory, "samples": sampled(found.model.augment, dataset, SAMPLED, COPIES)}


def rows(study: Study, result: dict[str, Any]) -> list[dict[str, Any]]:
    """One row."""
    s = study.settings
    task = s["task"]
    row = {
        key: s[key]
        for key in (
            "data",
            "task",
            "seed",
            "image_size",
            "train_size",
            "test_size",
            "copies",
            "hidden",
            "epochs",
            "batch",
        )
    }
    row |= {key: result[key] for key in ("accuracy", "nll", "neg_log_marginal_likelihood")}
    row |= {name: result["amounts"][name] for name in GENERATORS}
    row |= {f"share_{name}": result["amounts"][name] / FULL_RANGE[name] for name in GENERATORS}
    return [row | {f"figure_{name}": FIGURE[task][name] for name in GENERATORS}]


def text(rows: Sequence[dict[str, Any]]) -> str:
    """For people: a table for each data set."""
    blocks = []
    for data in dict.fromkeys(r["data"] for r in rows):
        some = [r for r in rows if r["data"] == data]
        lines = []
        for task in [task for task in SHOWN if any(r["task"] == task for r in some)]:
            here = [r for r in some if r["task"] == task]
            cells = [SHOWN[task], *(with_error([r[f"share_{name}"] for r in here], "{:.2f}") for name in GENERATORS)]
            cells += [
                with_error([r[key] for r in here], style)
                for key, style in (("accuracy", "{:.1f}"), ("nll", "{:.3f}"), ("neg_log_marginal_likelihood", "{:.3f}"))
            ]
            lines.append(cells)
            figure = FIGURE[task]
            lines.append(
                [
                    "  read off a figure (MNIST)",
                    *("-" if figure[n] is None else f"{figure[n]:.2f}" for n in GENERATORS),
                    "",
                    "",
                    "",
                ]
            )
        head = ["images", *GENERATORS, "accuracy, %", "NLL", "-log q/N"]
        first = some[0]
        seeds = seeds_said(sorted({r["seed"] for r in some}))
        title = f"{sizes_said(first)}: {first['train_size']:,} images, {first['epochs']} epochs, {first['hidden']:,} hidden units; {seeds}"
        blocks.append(table(title, head, lines, [], left=1).rstrip())
    notes = (
        f"Amounts over the full range: rotation 180°, translations 8/14 of half the image, scales and shear log 2 = {math.log(2):.2f}. "
        "The data's own: 1 for rotated ±180°, 0.5 for ±90°, 1 for translated and scaled, whose two scales are one. Read off a figure: of "
        "Immer, van der Ouderaa et al.'s code, MNIST, about ±0.03, with all images, 1,000 epochs and 1,000 hidden units."
    )
    return "\n\n".join([PART.title, *blocks, small_said(rows) + notes])


def draw(found: Sequence[tuple[Study, dict[str, Any]]]) -> Any:
    """Trajectories."""
    lines: dict[str, list[Any]] = {}
    true = {}
    several = len({study.settings["data"] for study, _ in found}) > 1
    for study, result in found:
        s, trajectory = study.settings, result["trajectory"]
        title = (f"{s['data']}, " if several else "") + SHOWN[s["task"]]
        shares = {name: [v / FULL_RANGE[name] for v in trajectory["amounts"][name]] for name in GENERATORS}
        lines.setdefault(title, []).append((trajectory["epochs"], shares))
        true[title] = TRUE[s["task"]]
    data = ", ".join(dict.fromkeys(study.settings["data"] for study, _ in found))
    return draw_amounts(lines, f"{PART.title}; {data}", "share of the full range", true)


def draw_copies(found: Sequence[tuple[Study, dict[str, Any]]]) -> Any:
    """Test images of the first seed, and copies at the learned amounts."""
    return draw_first_copies(found, lambda s: SHOWN[s["task"]])


PART = Part(
    "ranges",
    "Ranges: amounts of augmentation that the evidence learns of transformed images",
    plan,
    run,
    rows,
    text,
    draw,
    data=("fashion-mnist",),
    pictures={"ranges-samples": draw_copies},
)
