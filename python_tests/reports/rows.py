"""Rows as in summary.json, made by hand."""

from __future__ import annotations

from typing import Any


def row(
    task: str = "digit", layer: str = "f_fc+conv", objective: str = "evidence", seed: int = 0, **changes: Any
) -> dict[str, Any]:
    """A finished run with three layers; F-FC's shares are 20, 50 and 80 %, whatever the paths."""
    paths = layer.split("+")
    layers = []
    for i, share in enumerate((0.2, 0.5, 0.8)):
        shares = [1.0] if len(paths) == 1 else [share, 1 - share]
        entries = {
            p: {
                "prior_precision": {"weight": 10.0**i, "bias": 0.25},
                "parameters": 1234,
                "effective_parameters": 100 * s,
                "relative_effective_parameters": s,
            }
            for p, s in zip(paths, shares, strict=True)
        }
        layers.append(
            {"name": f"blocks.{i}", "type": max(entries, key=lambda p: shares[paths.index(p)]), "paths": entries}
        )
    made = {
        "run": f"digits-{task}-{layer}-{objective}-seed{seed}",
        "data": "digits",
        "task": task,
        "layer": layer,
        "objective": objective,
        "seed": seed,
        "accuracy": 90.0,
        "nll": 0.5,
        "neg_log_marginal_likelihood": 1.25,
        "neg_log_marginal_likelihood_reason": None,
        "seconds": 3.0,
        "parameters": 100,
        "train_size": 10,
        "evaluated_on": "test",
        "evaluated_size": 360,
        "layers": layers,
        "other_parameters": {"head.bias": {"prior_precision": 0.5, "parameters": 10, "effective_parameters": 4.0}},
    }
    return made | changes


def evaluations(made: dict[str, Any], count: int = 3) -> list[dict[str, Any]]:
    """Evaluations at epochs 2, 4, ... of a row of :func:`row`; no two numbers are equal. The first has no evidence step."""
    names = [
        f"{la['name']}.{p}.{t}" for la in made["layers"] for p, e in la["paths"].items() for t in e["prior_precision"]
    ]
    names += list(made["other_parameters"])
    return [
        {
            "epoch": 2 * i,
            "loss": 4.0 - i,
            "accuracy": 0.2 * i,
            "neg_log_marginal_likelihood": None if i == 1 else 8.0 - i,
            "prior_precision": {name: 10.0**i * (1 + k) for k, name in enumerate(names)},
        }
        for i in range(1, count + 1)
    ]
