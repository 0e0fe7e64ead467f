"""Early stopping: how far the predictives of both evidences are apart while a network is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ella_cuda.papers.linearised.pictures import draw_stopping
from ella_cuda.papers.linearised.precisions import chosen
from ella_cuda.papers.linearised.regression import (
    NORMS,
    Points,
    full_laplace,
    loader_of,
    predicted,
    trained,
)
from ella_cuda.papers.linearised.sweep import NORM_TITLES
from ella_cuda.papers.studies import Part, Study, Work, share
from ella_cuda.papers.studies.text import seeds_said, table, with_error
from ella_cuda.reports.text import EVIDENCE_AT, SHARED, counted

WIDTH, FIRST, DOUBLINGS = 16, 25, 7


def plan(seeds: Sequence[int], scale: float, data: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A study for each seed and normalisation. The network is looked at whenever the number of epochs has doubled."""
    settings = {"width": share(scale, WIDTH, 3), "first": share(scale, FIRST, 1), "doublings": DOUBLINGS}
    return {f"stopping-{norm}-seed{seed}": {**settings, "norm": norm, "seed": seed} for seed in seeds for norm in NORMS}


def run(study: Study, work: Work) -> dict[str, Any]:
    """Train, and on the way choose precisions in four ways."""
    s = study.settings
    stops = [s["first"] * 2**i for i in range(s["doublings"] + 1)]

    def look(model: nn.Module, points: Points, epoch: int) -> None:
        if epoch in stops:
            work.kept(str(epoch), lambda: measure(model, points, epoch))

    def measure(model: nn.Module, points: Points, epoch: int) -> dict[str, Any]:
        fitted, loader = full_laplace(model, points), loader_of(points)
        found = []
        for structure in ("scalar", "normalised"):
            for at in EVIDENCE_AT:
                one = chosen(fitted, loader, at, structure, work.progress)
                found.append(one.described() | predicted(one.la, s["seed"]))
        return {"epoch": epoch, "chosen": found}

    trained(s["width"], s["norm"], s["seed"], stops[-1], work, s["first"], look)
    return {"stops": [work.found(str(epoch)) for epoch in stops]}


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The root mean square over the grid of the 2-Wasserstein distance of two Gaussian predictives."""
    pairs = zip(one["mean"], other["mean"], one["deviation"], other["deviation"], strict=True)
    squares = [(m - n) ** 2 + (a - b) ** 2 for m, n, a, b in pairs]
    return (sum(squares) / len(squares)) ** 0.5


def rows(study: Study, result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each stop and structure."""
    made = []
    for stop in result["stops"]:
        by = {(one["structure"], one["at"]): one for one in stop["chosen"]}
        for structure in dict.fromkeys(structure for structure, _ in by):
            network, linear = by[structure, "network"], by[structure, "linear"]
            made.append(
                {
                    "norm": study.settings["norm"],
                    "seed": study.settings["seed"],
                    "structure": structure,
                    "epoch": stop["epoch"],
                    "distance": distance(network, linear),
                    **{f"{key}_{at}": by[structure, at][key] for key in ("error_bar", "nll") for at in EVIDENCE_AT},
                }
            )
    return made


def text(rows: Sequence[dict[str, Any]]) -> str:
    """For people, means over seeds."""
    shown = []
    for norm, structure, epoch in dict.fromkeys((r["norm"], r["structure"], r["epoch"]) for r in rows):
        some = [r for r in rows if (r["norm"], r["structure"], r["epoch"]) == (norm, structure, epoch)]
        keys = ("distance", "error_bar_network", "error_bar_linear", "nll_network", "nll_linear")
        cells = [with_error([r[key] for r in some]) for key in keys]
        shown.append([NORM_TITLES[norm], SHARED[structure], f"{epoch:,}", *cells])
    shown.sort(key=lambda line: line[:2])
    head = [
        "norm",
        "precisions",
        "epochs",
        "distance",
        "error bar, network's weights",
        "linear mode",
        "NLL, network's weights",
        "linear mode",
    ]
    seeds = sorted({r["seed"] for r in rows})
    notes = [
        "Distance: 2-Wasserstein, of the predictives of both evidences, root mean square on [-2, 2]. "
        f"{seeds_said(seeds).capitalize()}.",
    ]
    return table(PART.title, head, shown, notes, left=2)


def draw(found: Sequence[tuple[Study, dict[str, Any]]]) -> Any:
    """All seeds' means."""
    made = [row for study, result in found for row in rows(study, result)]
    return draw_stopping(made, f"{PART.title}; means over {counted(len({r['seed'] for r in made}), 'seed')}")


PART = Part(
    "stopping", "Early stopping: distance between the predictives of both evidences", plan, run, rows, text, draw
)
