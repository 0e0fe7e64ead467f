"""Rings under an arc: the angle that each curvature's evidence learns, and the evidence over fixed angles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ella_cuda.augment import AveragedFunction
from ella_cuda.papers.invariances.pictures import draw_rings
from ella_cuda.papers.invariances.points import (
    FACTORS,
    Points,
    Turn,
    best_precision,
    evidence,
    network,
    rings,
    square_norm,
)
from ella_cuda.papers.invariances.sizes import of_small
from ella_cuda.papers.studies import Part, Study, Work
from ella_cuda.papers.studies.text import seeds_said, table, with_error

POINTS, ARC, WIDTH, COPIES, STEPS = 200, 120.0, 50, 31, 600
ANGLES = (0, 30, 60, 90, 120, 150, 180)
START = 30.0  # degrees; at 0 the gradient is 0
RATE, ANGLE_RATE = 1e-2, 0.1  # Adam's, of weights and of the angle, the latter down to a tenth along half a cosine
BURN_IN, EVERY = 100, 5  # steps before the first evidence step, and between these
TITLES = {
    "full": "full",
    "kron": "Kronecker, means over copies",
    "second": "Kronecker, second moments (wrong)",
}
# A program in plain torch of the same recipe, other data: at 0, 30, ..., 180 degrees the training's NLL, and the evidence of each curvature.
REFERENCE = {
    "nll": (1.13, 1.01, 0.98, 0.86, 0.91, 1.06, 2.06),
    "full": (-27.8, -24.9, -20.7, -19.6, -17.4, -17.2, -17.0),
    "kron": (-46.3, -46.0, -35.2, -33.5, -29.2, -27.1, -24.6),
    "second": (-46.3, -59.8, -49.8, -52.3, -54.8, -67.2, -77.0),
}


def plan(seeds: Sequence[int], scale: float, data: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A study for each seed."""
    settings = {
        "width": of_small(scale, WIDTH, 4),
        "copies": of_small(scale, COPIES, 5),
        "steps": of_small(scale, STEPS, 20),
        "burn_in": of_small(scale, BURN_IN, 5),
    }
    return {f"rings-seed{seed}": {**settings, "seed": seed} for seed in seeds}


def run(study: Study, work: Work) -> dict[str, Any]:
    """Train at fixed angles, and with the angle that each evidence learns."""
    s = study.settings
    points = rings(POINTS, ARC, s["seed"])
    return {
        "fixed": [work.kept(f"fixed-{angle}", lambda angle=angle: fixed(angle, points, s)) for angle in ANGLES],
        "learned": {way: work.kept(f"learned-{way}", lambda way=way: learned(way, points, s)) for way in FACTORS},
        "collapsed": work.kept("collapsed", lambda: collapsed(points, s)),
    }


def fixed(angle: float, points: Points, settings: Any) -> dict[str, Any]:
    """The evidence at an angle in degrees, with each curvature, the precision chosen by the full one; and its derivatives by radian."""
    model, precision = _trained("full", math.radians(angle), points, settings, learn=False)[:2]
    found: dict[str, Any] = {"angle": angle, "precision": precision}
    with torch.no_grad():
        found["nll"] = F.cross_entropy(model(points.x), points.y, reduction="sum").item()
    for way in FACTORS:
        raw = model.augment.raw.clone().requires_grad_()
        value = evidence(model, points, raw, precision, way)
        found[way] = value.item()
        found[f"slope_{way}"] = torch.autograd.grad(value, raw)[0].item()
    return found


def learned(way: str, points: Points, settings: Any) -> dict[str, Any]:
    """The angle in degrees over the steps, and the evidence where it ends."""
    model, precision, angles = _trained(way, math.radians(START), points, settings)
    with torch.no_grad():
        nll = F.cross_entropy(model(points.x), points.y, reduction="sum").item()
    values = {other: evidence(model, points, model.augment.raw, precision, other).item() for other in FACTORS}
    return {"angles": angles, "nll": nll, "precision": precision, **values}


def collapsed(points: Points, settings: Any) -> dict[str, Any]:
    """The angle over the steps where the training loss moves it with the weights."""
    model = _model(math.radians(START), settings)
    raw = model.augment.raw.requires_grad_()
    groups = [{"params": list(model.parameters())}, {"params": [raw], "lr": 2 * RATE}]
    optimizer, angles = torch.optim.Adam(groups, RATE), [[0, START]]
    for step in range(1, settings["steps"] + 1):
        optimizer.zero_grad()
        F.cross_entropy(model(points.x), points.y).backward()
        optimizer.step()
        if step % EVERY == 0:
            angles.append([step, abs(math.degrees(raw.item()))])
    return {"angles": angles}


def _model(angle: float, settings: Any) -> AveragedFunction:
    turn = Turn(settings["copies"], angle or 1.0)
    turn.set_eta(angle)
    return AveragedFunction(network(settings["width"], settings["seed"]), turn)


def _trained(
    way: str, angle: float, points: Points, settings: Any, learn: bool = True
) -> tuple[AveragedFunction, float, list[list[float]]]:
    """The network, the precision and the angles in degrees by step, after steps on the weights and, between these, on precision and angle."""
    model, steps = _model(angle, settings), settings["steps"]
    raw, precision = model.augment.raw, 1.0
    weights = torch.optim.Adam(model.parameters(), RATE)
    turning = torch.optim.Adam([raw], ANGLE_RATE)
    angles = [[0, math.degrees(angle)]]
    for step in range(1, steps + 1):
        weights.zero_grad()
        (F.cross_entropy(model(points.x), points.y) + 0.5 * precision * square_norm(model) / len(points.x)).backward()
        weights.step()
        if step < settings["burn_in"] or step % EVERY:
            continue
        precision = best_precision(model, points, way)
        if learn:
            leaf = raw.clone().requires_grad_()
            raw.grad = -torch.autograd.grad(evidence(model, points, leaf, precision, way), leaf)[0]
            part = (step - settings["burn_in"]) / max(steps - settings["burn_in"], 1)
            turning.param_groups[0]["lr"] = ANGLE_RATE * (0.1 + 0.45 * (1 + math.cos(math.pi * part)))
            turning.step()
            model.augment.project_()
        angles.append([step, math.degrees(model.augment.amounts()["rotation"])])
    return model, precision, angles


def rows(study: Study, result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each fixed angle, and one for each way to learn it."""
    seed = study.settings["seed"]
    made = []
    for found in result["fixed"]:
        reference = {f"reference_{name}": values[found["angle"] // 30] for name, values in REFERENCE.items()}
        made.append({"seed": seed, "kind": "fixed", **found, **reference})
    for way, found in result["learned"].items():
        others = {key: found[key] for key in ("nll", "precision", *FACTORS)}
        made.append({"seed": seed, "kind": f"learned, {way}", "angle": found["angles"][-1][1], **others})
    made.append({"seed": seed, "kind": "training loss", "angle": result["collapsed"]["angles"][-1][1]})
    return made


def text(rows: Sequence[dict[str, Any]]) -> str:
    """For people, means over seeds."""
    fixed = [r for r in rows if r["kind"] == "fixed"]
    lines = []
    for angle in dict.fromkeys(r["angle"] for r in fixed):
        some = [r for r in fixed if r["angle"] == angle]
        cells = [f"{angle:g}°"]
        for key in ("nll", *FACTORS):
            cells += [with_error([r[key] for r in some], "{:.2f}"), f"{some[0][f'reference_{key}']:.2f}"]
        lines.append(cells)
    head = ["angle", "NLL", "ref.", "full", "ref.", "Kronecker", "ref.", "second moments", "ref."]
    slopes = [
        [
            f"{angle:g}°",
            *(_signed([r[f"slope_{way}"] for r in fixed if r["angle"] == angle]) for way in FACTORS),
        ]
        for angle in dict.fromkeys(r["angle"] for r in fixed)
    ]
    learned = [
        [title, with_error([r["angle"] for r in some], "{:.0f}°")]
        for kind, title in (
            *((f"learned, {way}", f"evidence: {TITLES[way]}") for way in FACTORS),
            ("training loss", "training loss"),
        )
        if (some := [r for r in rows if r["kind"] == kind])
    ]
    seeds = sorted({r["seed"] for r in rows})
    blocks = [
        table(f"{PART.title}; {seeds_said(seeds)}", head, lines, [], left=1).rstrip(),
        table(
            "Derivative of the evidence by the angle, nats per radian",
            ["angle", "full", "Kronecker", "second moments"],
            slopes,
            [],
            left=1,
        ).rstrip(),
        table(f"Angle that is learned from {START:g}°", ["by", "angle"], learned, [], left=1).rstrip(),
        f"The arc of the data has {ARC:g}°. NLL and evidence in nats of all points, at weights of one training with a precision by the full "
        "curvature. Ref.: a program in plain torch of the same recipe, other data.\n"
        "Second moments over copies take copies for data points: their evidence falls with the angle.\n"
        "The angle is learned along the derivative, which is that at the weights of the moment; at fixed angles weights are trained for "
        "each. So it can rest before the angle with the most evidence.",
    ]
    return "\n\n".join(blocks)


def _signed(values: Sequence[float]) -> str:
    """Mean ± standard error, the mean with its sign."""
    return with_error(values, "{:+.1f}").replace("± +", "± ")


def draw(found: Sequence[tuple[Study, dict[str, Any]]]) -> Any:
    """All seeds."""
    results = [result for _, result in found]
    seeds = sorted(study.settings["seed"] for study, _ in found)
    said = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {', '.join(map(str, seeds))}"
    points = rings(POINTS, ARC, found[0][0].settings["seed"])
    return draw_rings(results, (points.x.tolist(), points.y.tolist()), REFERENCE, TITLES, f"{PART.title}; {said}")


PART = Part(
    "rings", "Rings under an arc: the angle that the evidence learns, by curvature", plan, run, rows, text, draw
)
