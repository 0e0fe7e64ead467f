"""The scale of one normalised group: the function is the same, and error bars with a single precision are not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ella_cuda.papers.linearised.pictures import draw_sweep
from ella_cuda.papers.linearised.precisions import chosen
from ella_cuda.papers.linearised.regression import (
    NORMS,
    full_laplace,
    grid,
    loader_of,
    predicted,
    rescaled,
    trained,
)
from ella_cuda.papers.studies import Part, Study, Work, share
from ella_cuda.papers.studies.text import table
from ella_cuda.reports.text import EVIDENCE_AT, SHARED, number

WIDTH, EPOCHS = 16, 1000
SCALES = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
NORM_TITLES = {"batch": "BatchNorm", "layer": "LayerNorm"}


def plan(seeds: Sequence[int], scale: float, data: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A study for each seed and normalisation."""
    settings = {"width": share(scale, WIDTH, 3), "epochs": share(scale, EPOCHS, 4)}
    return {f"sweep-{norm}-seed{seed}": {**settings, "norm": norm, "seed": seed} for seed in seeds for norm in NORMS}


def run(study: Study, work: Work) -> dict[str, Any]:
    """Train once; of the same function at every scale, choose precisions in four ways."""
    s = study.settings
    model, points = trained(s["width"], s["norm"], s["seed"], s["epochs"], work)
    loader = loader_of(points)

    def measure(k: float) -> dict[str, Any]:
        scaled = rescaled(model, k)
        with torch.no_grad():
            moved = (scaled(grid()) - model(grid())).abs().max().item()
        fitted = full_laplace(scaled, points)
        found = []
        for at in EVIDENCE_AT:
            for structure in ("scalar", "normalised"):
                one = chosen(fitted, loader, at, structure, work.progress)
                found.append(one.described() | predicted(one.la, s["seed"]))
        return {"k": k, "moved": moved, "parameters": fitted.n_params, "chosen": found}

    return {"scales": [work.kept(f"k{k:g}", lambda k=k: measure(k)) for k in SCALES]}


def rows(study: Study, result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each scale and way; ratios are to the variances at scale 1."""
    plain = next(found for found in result["scales"] if found["k"] == 1)
    made = []
    for found in result["scales"]:
        for one, same in zip(found["chosen"], plain["chosen"], strict=True):
            # Where all hidden units are off, outputs are certain at every scale.
            pairs = [pair for pair in zip(one["deviation"], same["deviation"], strict=True) if any(pair)]
            ratios = [(a / b) ** 2 for a, b in pairs]
            made.append(
                {
                    "norm": study.settings["norm"],
                    "seed": study.settings["seed"],
                    "parameters": found["parameters"],
                    "at": one["at"],
                    "structure": one["structure"],
                    "k": found["k"],
                    "moved": found["moved"],
                    "variance": sum(d**2 for d in one["deviation"]) / len(one["deviation"]),
                    "least_ratio": min(ratios),
                    "largest_ratio": max(ratios),
                    "neg_log_marginal_likelihood": one["neg_log_marginal_likelihood"],
                    "nll": one["nll"],
                    **{f"precision_{name}": value for name, value in one["precision"].items()},
                }
            )
    return made


def text(rows: Sequence[dict[str, Any]]) -> str:
    """For people."""
    shown = [
        [
            NORM_TITLES[r["norm"]],
            str(r["seed"]),
            EVIDENCE_AT[r["at"]],
            SHARED[r["structure"]],
            *(number(r[key]) for key in ("k", "precision_middle.weight", "variance")),
            *(f"{r[key]:.6f}" for key in ("least_ratio", "largest_ratio", "neg_log_marginal_likelihood")),
            number(r["nll"]),
        ]
        for r in sorted(rows, key=lambda r: (r["norm"], r["seed"], r["at"], r["structure"]), reverse=True)
    ]
    head = [
        "norm",
        "seed",
        "evidence at",
        "precisions",
        "k",
        "of the middle",
        "variance",
        "least",
        "largest",
        "-log q/N",
        "NLL",
    ]
    worst = max(r["moved"] for r in rows)
    notes = [
        "The middle layer's parameters are multiplied by k, and BatchNorm's statistics follow: the network's outputs move by "
        f"{worst:.1g} at most. Variance: the mean predictive variance on [-2, 2]; least and largest: its ratio to that at k = 1.",
        "With grouped precisions nothing depends on k but the middle layer's precision, which is in proportion to 1 / k²; one "
        "of 1e10 is at its bound, and the layer is switched off.",
    ]
    return table(PART.title, head, shown, notes, left=4)


def draw(found: Sequence[tuple[Study, dict[str, Any]]]) -> Any:
    """The first seed's networks."""
    first = found[0][0].settings["seed"]
    made = [row for study, result in found if study.settings["seed"] == first for row in rows(study, result)]
    return draw_sweep(made, f"{PART.title}; seed {first}")


PART = Part("sweep", "Sweep: predictive variance over the scale k of a normalised layer", plan, run, rows, text, draw)
