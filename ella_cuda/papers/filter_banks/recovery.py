"""Recovery: targets of a shallow network with a known angle, and the angle that the bound and a point estimate learn of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ella_cuda.augment import AffineAugment
from ella_cuda.data import TensorLoader
from ella_cuda.invariance import BayesianLinear, ElboTrainer, InvariantFilterBank, ShallowNetwork
from ella_cuda.papers.filter_banks.pictures import draw_recovery
from ella_cuda.papers.invariances.sizes import of_small
from ella_cuda.papers.studies import Part, Study, Work
from ella_cuda.papers.studies.text import seeds_said, table, with_error

SIDE, NORM = 12, 3.0  # of images and filters
POINTS, FILTERS, OUTPUTS, COPIES, BATCH = 150, 40, 5, 12, 50
NOISE, START_NOISE = 0.1, 0.1  # of targets, and from where it is learned
EPOCHS = 300
TRUE = (0, 60, 90)  # degrees
START = 45.0
RATE, ANGLE_RATE = 1e-2, 2e-2  # of filters and q, and of the angle, precision and noise
OBJECTIVES = {"bound": "bound", "point": "point estimate"}


def plan(seeds: Sequence[int], scale: float, data: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A study for each seed."""
    settings = {
        "points": of_small(scale, POINTS, 12),
        "filters": of_small(scale, FILTERS, 6),
        "epochs": of_small(scale, EPOCHS, 5),
    }
    return {f"recovery-seed{seed}": {**settings, "seed": seed} for seed in seeds}


def run(study: Study, work: Work) -> dict[str, Any]:
    """Learn the angle of each true one, by each objective."""
    ways = [(true, objective) for true in TRUE for objective in OBJECTIVES]
    return {
        "found": [
            work.kept(f"{true}-{objective}", lambda way=(true, objective): learned(*way, study.settings))
            for true, objective in ways
        ]
    }


def smooth(count: int) -> Tensor:
    """Random images ``(count, 1, SIDE, SIDE)`` that end before the border, of a mean norm, by torch's global generator."""
    coarse = torch.randn(count, 1, SIDE // 3, SIDE // 3, dtype=torch.float64)
    places = torch.linspace(-1, 1, SIDE, dtype=torch.float64)
    window = ((1 - places**2)[:, None] * (1 - places**2)) ** 2
    images = F.interpolate(coarse, (SIDE, SIDE), mode="bicubic", align_corners=True) * window
    return images * NORM / images.flatten(1).norm(dim=1).mean()


def problem(true: float, settings: Mapping[str, Any]) -> tuple[Tensor, Tensor, ShallowNetwork]:
    """Images, targets of a network with that angle in degrees, and the network, whose filters start at the data's."""
    torch.manual_seed(settings["seed"])
    augment = AffineAugment(COPIES, "rotation", 0.1, "grid", constraint="raw", dtype=torch.float64)
    bank = InvariantFilterBank((1, SIDE, SIDE), settings["filters"], augment, activation="tanh")
    x = smooth(settings["points"])
    augment.set_eta(math.radians(true))
    with torch.no_grad():
        bank.weight.copy_(smooth(settings["filters"]))
        features = bank(x)
        precision = settings["filters"] * features.var().item()
        weights = torch.randn(settings["filters"], OUTPUTS, dtype=torch.float64) / precision**0.5
        y = features @ weights + NOISE * torch.randn(len(x), OUTPUTS, dtype=torch.float64)
    layer = BayesianLinear(settings["filters"], OUTPUTS, prior_precision=precision, dtype=torch.float64)
    return x, y, ShallowNetwork(bank, layer, "regression", sigma_noise=START_NOISE)


def learned(true: float, objective: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The angle in degrees over the epochs."""
    x, y, model = problem(true, settings)
    augment = model.features.augment
    augment.set_eta(math.radians(START))
    options = {"objective": objective, "lr": RATE, "lr_hyp": ANGLE_RATE, "progress_bar": False}
    trainer = ElboTrainer(model, TensorLoader(x, y, BATCH, shuffle=True), n_epochs=settings["epochs"], **options)
    trainer.run()
    angles = [START, *(math.degrees(entry["rotation"]) for entry in trainer.history)]
    return {
        "true": true,
        "objective": objective,
        "angles": angles,
        "objective_per_point": trainer.history[-1]["objective"],
    }


def rows(study: Study, result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each true angle and objective."""
    s = study.settings
    return [
        {
            **{key: s[key] for key in ("seed", "points", "filters", "epochs")},
            "true": found["true"],
            "objective": found["objective"],
            "angle": found["angles"][-1],
            "objective_per_point": found["objective_per_point"],
        }
        for found in result["found"]
    ]


def text(rows: Sequence[dict[str, Any]]) -> str:
    """For people."""
    lines = [
        [
            f"{true}°",
            *(
                with_error([r["angle"] for r in rows if (r["true"], r["objective"]) == (true, objective)], "{:.0f}°")
                for objective in OBJECTIVES
            ),
        ]
        for true in sorted({r["true"] for r in rows})
    ]
    notes = [
        f"{rows[0]['points']} smooth images, targets of {rows[0]['filters']} filters turned by up to the true angle either way, noise "
        f"{NOISE:g}. Angle, filters, weights or q, and with the bound precision and noise are learned together, from {START:g}°."
    ]
    seeds = sorted({r["seed"] for r in rows})
    return table(f"{PART.title}; {seeds_said(seeds)}", ["true angle", *OBJECTIVES.values()], lines, notes, left=1)


def draw(found: Sequence[tuple[Study, dict[str, Any]]]) -> Any:
    """Angles over epochs, a line for each seed."""
    results = [one for _, result in found for one in result["found"]]
    return draw_recovery(results, OBJECTIVES, PART.title)


PART = Part(
    "recovery", "Recovery: the angle learned of data that a network with a known one made", plan, run, rows, text, draw
)
