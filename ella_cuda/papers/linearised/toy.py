"""The talk's toy: error bars and precisions of a network with BatchNorm, at its weights and at the linear mode."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from ella_cuda.laplace import FullLaplace
from ella_cuda.papers.linearised.pictures import draw_toy
from ella_cuda.papers.linearised.precisions import chosen
from ella_cuda.papers.linearised.regression import full_laplace, grid, loader_of, predicted, trained
from ella_cuda.papers.studies import Part, Study, Work, share
from ella_cuda.papers.studies.text import table
from ella_cuda.reports.text import EVIDENCE_AT, SHARED, number

WIDTH, EPOCHS = 50, 1000  # 1-50-50-1 has 2,600 parameters
TRIED = [10 ** (k / 4) for k in range(-8, 13)]  # single precisions
TALKS = (100.0, 10.0, 5.0, 1.0, 0.1)  # those of the talk's panels


def plan(seeds: Sequence[int], scale: float, data: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A study for each seed."""
    settings = {"width": share(scale, WIDTH, 3), "epochs": share(scale, EPOCHS, 4)}
    return {f"toy-seed{seed}": {**settings, "seed": seed} for seed in seeds}


def run(study: Study, work: Work) -> dict[str, Any]:
    """Train, choose precisions in four ways, and take the evidence over single precisions."""
    s = study.settings
    model, points = trained(s["width"], "batch", s["seed"], s["epochs"], work)
    fitted, loader = full_laplace(model, points), loader_of(points)

    def choose(at: str, structure: str) -> dict[str, Any]:
        one = chosen(fitted, loader, at, structure, work.progress)
        return one.described() | predicted(one.la, s["seed"])

    return {
        "parameters": fitted.n_params,
        "x": points.x.flatten().tolist(),
        "y": points.y.flatten().tolist(),
        "grid": grid().flatten().tolist(),
        "chosen": [
            work.kept(f"{at}-{structure}", lambda at=at, structure=structure: choose(at, structure))
            for structure in ("scalar", "normalised")
            for at in EVIDENCE_AT
        ],
        "evidence": [work.kept(f"evidence-{p:.6g}", lambda p=p: _evidence(fitted, loader, p)) for p in TRIED],
    }


def _evidence(fitted: FullLaplace, loader: Any, precision: float) -> dict[str, float]:
    """Nats per data point at a single precision; the linear mode is found anew."""
    la = copy.copy(fitted)
    la.prior_precision = precision
    la.fit_linear_mode(loader)
    return {"precision": precision} | {
        at: la.log_marginal_likelihood(at=at).item() / la.n_data for at in ("network", "linear")
    }


def rows(study: Study, result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each way."""
    tried = result["evidence"]
    return [
        {
            "seed": study.settings["seed"],
            "parameters": result["parameters"],
            "at": found["at"],
            "structure": found["structure"],
            **{f"precision_{name}": value for name, value in found["precision"].items()},
            "neg_log_marginal_likelihood": found["neg_log_marginal_likelihood"],
            "effective_parameters": found["effective_parameters"],
            "best_tried": max(tried, key=lambda t, at=found["at"]: t[at])["precision"],
            "best_of_talks": best_of_talks(tried, found["at"]),
            "error_bar": found["error_bar"],
            "nll": found["nll"],
        }
        for found in result["chosen"]
    ]


def best_of_talks(tried: Sequence[dict[str, float]], at: str) -> float:
    """Which of the talk's single precisions has the most evidence, by interpolation in the logarithm."""
    x = torch.tensor([t["precision"] for t in tried], dtype=torch.float64).log10()
    y = [t[at] for t in tried]

    def between(value: float) -> float:
        place = torch.tensor(value, dtype=torch.float64).log10()
        i = int((x <= place + 1e-12).sum().clamp(1, len(x) - 1)) - 1
        part = ((place - x[i]) / (x[i + 1] - x[i])).item()
        return (1 - part) * y[i] + part * y[i + 1]

    return max(TALKS, key=between)


def text(rows: Sequence[dict[str, Any]]) -> str:
    """For people."""
    layers = [key for key in rows[0] if key.startswith("precision_")]
    shown = [
        [
            str(r["seed"]),
            EVIDENCE_AT[r["at"]],
            SHARED[r["structure"]],
            " ".join(number(r[key]) for key in layers),
            number(r["best_of_talks"]),
            number(r["neg_log_marginal_likelihood"]),
            number(r["error_bar"]),
            number(r["nll"]),
        ]
        for r in rows
    ]
    head = [
        "seed",
        "evidence at",
        "precisions",
        "first middle head",
        "of 100 10 5 1 0.1",
        "-log q/N",
        "error bar",
        "NLL",
    ]
    notes = [
        f"{rows[0]['parameters']:,} parameters, full curvature, noise known. Error bar: the mean standard deviation on [-2, 2]. The mean is "
        "the network's output in all rows.",
        "The talk's panel of most evidence at the network's weights: 0.1, of error bars that explode.",
    ]
    return table(PART.title, head, shown, notes, left=3)


def draw(found: Sequence[tuple[Study, dict[str, Any]]]) -> Any:
    """Of the first seed."""
    study, result = found[0]
    return draw_toy(result, f"{PART.title}; {result['parameters']:,} parameters, seed {study.settings['seed']}")


PART = Part(
    "toy", "Toy: error bars by evidence at the network's weights and at the linear mode", plan, run, rows, text, draw
)
