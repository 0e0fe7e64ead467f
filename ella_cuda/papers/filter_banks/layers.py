"""Three first layers: the bound of each, beside test accuracy and NLL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ella_cuda.papers.filter_banks.networks import (
    KERNEL,
    LAYERS,
    measured,
    plan_of,
    row_of,
    sizes_said,
    small_said,
    trained,
)
from ella_cuda.papers.filter_banks.pictures import draw_first_layers
from ella_cuda.papers.invariances.images import data_of
from ella_cuda.papers.studies import Part, Study, Work
from ella_cuda.papers.studies.text import seeds_said, table, with_error

SHOWN = {"plain": "plain", "rotated": "rotated ±180°", "translated-8of14": "translated"}


def plan(seeds: Sequence[int], scale: float, data: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A study for each data set, task, layer and seed."""
    return plan_of("layers", SHOWN, "layer", LAYERS, seeds, scale, data)


def run(study: Study, work: Work) -> dict[str, Any]:
    """Train by the bound."""
    s = study.settings
    dataset = data_of(s, work)
    return measured(trained(s["layer"], dataset, s, work, "bound"), dataset)


def rows(study: Study, result: dict[str, Any]) -> list[dict[str, Any]]:
    """One row."""
    return [row_of(study.settings, "layer", result)]


def text(rows: Sequence[dict[str, Any]]) -> str:
    """For people: a table for each data set, and which layer has the highest bound."""
    blocks = []
    for data in dict.fromkeys(r["data"] for r in rows):
        some, lines = [r for r in rows if r["data"] == data], []
        for task, shown in SHOWN.items():
            for layer, name in LAYERS.items():
                here = [r for r in some if (r["task"], r["layer"]) == (task, layer)]
                if here:
                    styles = {"bound": "{:.3f}", "accuracy": "{:.1f}", "nll": "{:.3f}"}
                    lines.append([shown, name, *(with_error([r[k] for r in here], f) for k, f in styles.items())])
        head = ["images", "first layer", "bound/N", "accuracy, %", "NLL"]
        title = f"{sizes_said(some[0])}; {seeds_said(sorted({r['seed'] for r in some}))}"
        blocks.append(table(title, head, lines, [], left=2).rstrip())
    notes = (
        "All by the bound, in nats per training image, with as many features. FC: a filter of the image's size for each feature. "
        f"Convolution: filters of {KERNEL} x {KERNEL} pixels, means over positions. Learned: FC's filters, averaged over transformations of "
        "learned amounts. Filters are point estimates in the bound: it has no price for fitting images with more of them."
    )
    return "\n\n".join([PART.title, *blocks, small_said(list(rows)) + notes])


def draw(found: Sequence[tuple[Study, dict[str, Any]]]) -> Any:
    """Of the first data set."""
    data = found[0][0].settings["data"]
    made = [r for study, result in found if study.settings["data"] == data for r in rows(study, result)]
    return draw_first_layers(made, LAYERS, SHOWN, f"{PART.title}; {data}")


PART = Part(
    "layers",
    "First layers: the bound, accuracy and NLL of three",
    plan,
    run,
    rows,
    text,
    draw,
    data=("fashion-mnist",),
)
