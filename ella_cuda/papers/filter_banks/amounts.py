"""Recovered amounts: what the bound and a point estimate learn of transformed images, and the filters that come of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ella_cuda.papers.filter_banks.networks import (
    INIT,
    measured,
    plan_of,
    row_of,
    sampled_filters,
    sizes_said,
    small_said,
    trained,
)
from ella_cuda.papers.filter_banks.pictures import draw_sampled_filters, draw_trajectories
from ella_cuda.papers.invariances.images import FULL_RANGE, data_of
from ella_cuda.papers.invariances.ranges import GENERATORS, TRUE
from ella_cuda.papers.studies import Part, Study, Work
from ella_cuda.papers.studies.text import seeds_said, table, with_error

SHOWN = {"plain": "plain", "rotated": "rotated ±180°", "scaled": "scaled", "translated-8of14": "translated"}
OBJECTIVES = {"bound": "bound", "point": "point estimate"}
FILTERS, COPIES = 3, 7  # in a picture: filters of each task, and copies of each


def plan(seeds: Sequence[int], scale: float, data: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A study for each data set, task, objective and seed."""
    return plan_of("amounts", SHOWN, "objective", OBJECTIVES, seeds, scale, data)


def run(study: Study, work: Work) -> dict[str, Any]:
    """Train, and look at amounts and filters."""
    s = study.settings
    dataset = data_of(s, work)
    trainer = trained("learned", dataset, s, work, s["objective"])
    trajectory = {
        "epochs": [entry["epoch"] for entry in trainer.history],
        "amounts": {name: [entry[name] for entry in trainer.history] for name in GENERATORS},
    }
    filters = sampled_filters(trainer.model, FILTERS, COPIES) if s["objective"] == "bound" else []
    return {**measured(trainer, dataset), "trajectory": trajectory, "filters": filters}


def rows(study: Study, result: dict[str, Any]) -> list[dict[str, Any]]:
    """One row."""
    row = row_of(study.settings, "objective", result)
    row |= {name: result["learned"][name] for name in GENERATORS}
    return [row | {f"share_{name}": result["learned"][name] / FULL_RANGE[name] for name in GENERATORS}]


def text(rows: Sequence[dict[str, Any]]) -> str:
    """For people: a table for each data set."""
    blocks = []
    for data in dict.fromkeys(r["data"] for r in rows):
        some, lines = [r for r in rows if r["data"] == data], []
        for task, shown in SHOWN.items():
            for objective, name in OBJECTIVES.items():
                here = [r for r in some if (r["task"], r["objective"]) == (task, objective)]
                if not here:
                    continue
                bounds = [r["bound"] for r in here if r["bound"] is not None]
                lines.append(
                    [
                        shown,
                        name,
                        *(with_error([r[f"share_{one}"] for r in here], "{:.2f}") for one in GENERATORS),
                        with_error(bounds),
                        with_error([r["accuracy"] for r in here], "{:.1f}"),
                        with_error([r["nll"] for r in here]),
                    ]
                )
        head = ["images", "learned by", *GENERATORS, "bound/N", "accuracy, %", "NLL"]
        title = f"{sizes_said(some[0])}; {seeds_said(sorted({r['seed'] for r in some}))}"
        blocks.append(table(title, head, lines, [], left=2).rstrip())
    notes = (
        f"Amounts over the full range: rotation 180°, translations 8/14 of half the image, scales and shear log 2 = {math.log(2):.2f}. "
        f"The data's own: 1 for rotated, translated, and the two scales of scaled, which are one. Amounts start at {INIT:g} of their units. "
        "Bound in nats per training image. The bound learns how much is harmless; a point estimate pays nothing for flexibility."
    )
    return "\n\n".join([PART.title, *blocks, small_said(list(rows)) + notes])


def _first(found: Sequence[tuple[Study, dict[str, Any]]]) -> tuple[str, list[tuple[Any, dict[str, Any]]]]:
    """Settings and results of the first data set, and its name."""
    data = found[0][0].settings["data"]
    return data, [(study.settings, result) for study, result in found if study.settings["data"] == data]


def draw(found: Sequence[tuple[Study, dict[str, Any]]]) -> Any:
    """Trajectories of the first data set, by task and objective."""
    data, some = _first(found)
    lines: dict[str, dict[str, list[Any]]] = {name: {} for name in OBJECTIVES.values()}
    for s, result in some:
        shares = {name: [v / FULL_RANGE[name] for v in result["trajectory"]["amounts"][name]] for name in GENERATORS}
        runs = lines[OBJECTIVES[s["objective"]]].setdefault(SHOWN[s["task"]], [])
        runs.append((result["trajectory"]["epochs"], shares))
    true = {shown: TRUE[task] for task, shown in SHOWN.items()}
    return draw_trajectories(lines, f"{PART.title}; {data}", "share of full range", true)


def draw_filters(found: Sequence[tuple[Study, dict[str, Any]]]) -> Any:
    """Filters of the first data set's first seed, and transformed by draws of the learned amounts."""
    data, some = _first(found)
    learned = [(s, result) for s, result in some if result["filters"]]
    if not learned:
        return draw_sampled_filters({})
    seed = min(s["seed"] for s, _ in learned)
    groups = {SHOWN[s["task"]]: result["filters"] for s, result in learned if s["seed"] == seed}
    return draw_sampled_filters(
        groups, f"Filters (left) and filters transformed by the learned amounts; {data}, seed {seed}"
    )


PART = Part(
    "amounts",
    "Amounts that the bound and a point estimate learn of transformed images",
    plan,
    run,
    rows,
    text,
    draw,
    data=("fashion-mnist",),
    pictures={"filters": draw_filters},
)
