"""Few images: accuracy, NLL and evidence of four ways to train on turned images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ella_cuda.papers.invariances.images import (
    FULL_RANGE,
    cnn,
    data_of,
    measured,
    schedule,
    settings_of,
    sizes_said,
    small_said,
    trained,
)
from ella_cuda.papers.invariances.pictures import draw_subsets
from ella_cuda.papers.studies import Part, Study, Work, share
from ella_cuda.papers.studies.text import seeds_said, table, with_error

SIZES = (312, 1250, 5000)  # and all images
TASK = "rotated"
EPOCHS, ALL_EPOCHS = 1000, 300
METHODS = {
    "map": "MAP",
    "augmented": "augmented MAP",
    "augerino": "Augerino",
    "evidence": "evidence",
}
FIXED = {"rotation": math.pi}  # of augmented MAP: the data's own


def plan(seeds: Sequence[int], scale: float, data: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A study for each data set, number of images, method and seed."""
    made = {}
    for name in data:
        common = settings_of(name, scale)
        everything = common["train_size"]
        for size in (*(n for n in SIZES if n < everything), everything):
            epochs = share(scale, ALL_EPOCHS if size == everything else EPOCHS, 3)
            sizes = {**common, **schedule(epochs), "task": TASK, "train_size": size}
            for method in METHODS:
                for seed in seeds:
                    made[f"subsets-{name}-{size}-{method}-seed{seed}"] = {**sizes, "method": method, "seed": seed}
    return made


def run(study: Study, work: Work) -> dict[str, Any]:
    """Train in one way."""
    s = study.settings
    dataset = data_of(s, work)
    found = trained(
        lambda: cnn(dataset.channels, s["image_size"], dataset.num_classes), dataset, s, work, s["method"], FIXED
    )
    return measured(found, dataset, refit=s["method"] == "augerino")


def rows(study: Study, result: dict[str, Any]) -> list[dict[str, Any]]:
    """One row."""
    s = study.settings
    row = {
        key: s[key]
        for key in ("data", "task", "seed", "method", "image_size", "test_size", "copies", "epochs", "batch")
    }
    row |= {"size": s["train_size"]} | {key: result[key] for key in ("accuracy", "nll", "neg_log_marginal_likelihood")}
    return [row | {name: result["amounts"].get(name) for name in FULL_RANGE}]


def text(rows: Sequence[dict[str, Any]]) -> str:
    """For people: a table for each data set."""
    blocks = []
    for data in dict.fromkeys(r["data"] for r in rows):
        some = [r for r in rows if r["data"] == data]
        lines = []
        for size in sorted({r["size"] for r in some}):
            for method in [m for m in METHODS if any((r["size"], r["method"]) == (size, m) for r in some)]:
                here = [r for r in some if (r["size"], r["method"]) == (size, method)]
                cells = [f"{size:,}", METHODS[method], str(here[0]["epochs"])]
                cells += [
                    with_error([r[k] for r in here], style)
                    for k, style in (
                        ("accuracy", "{:.1f}"),
                        ("nll", "{:.3f}"),
                        ("neg_log_marginal_likelihood", "{:.3f}"),
                    )
                ]
                turned = [math.degrees(r["rotation"]) for r in here if r["rotation"] is not None]
                lines.append([*cells, with_error(turned, "{:.0f}°")])
        head = ["images", "method", "epochs", "accuracy, %", "NLL", "-log q/N", "rotation"]
        seeds = sorted({r["seed"] for r in some})
        blocks.append(table(f"{sizes_said(some[0])}; {seeds_said(seeds)}", head, lines, [], left=2).rstrip())
    notes = (
        "Images are turned by up to 180°. MAP and augmented MAP: one network, one precision by the evidence. Augmented MAP: one copy of each "
        "image in each epoch, turned by up to 180°; its evidence is that of the images as they are. Augerino: cross entropy - 0.01 |eta|, "
        "averaged over copies, all amounts learned; its evidence has a precision chosen after training. Evidence: all amounts learned by it."
    )
    return "\n\n".join([PART.title, *blocks, small_said(rows) + notes])


def draw(found: Sequence[tuple[Study, dict[str, Any]]]) -> Any:
    """Of the first data set."""
    data = found[0][0].settings["data"]
    made = [r for study, result in found if study.settings["data"] == data for r in rows(study, result)]
    return draw_subsets(made, METHODS, f"{PART.title}; {data}")


PART = Part(
    "subsets",
    "Subsets: four ways to train on few turned images",
    plan,
    run,
    rows,
    text,
    draw,
    data=("fashion-mnist",),
)
