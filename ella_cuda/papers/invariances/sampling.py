"""Ways to draw copies: the angle with the most evidence, of data from a model with a known one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ella_cuda.papers.invariances.pictures import draw_sampling
from ella_cuda.papers.invariances.points import Turn
from ella_cuda.papers.invariances.sizes import of_small
from ella_cuda.papers.studies import Part, Study, Work
from ella_cuda.papers.studies.text import seeds_said, table, with_error
from ella_cuda.reports.text import counted

POINTS, FINE = 120, 90  # data, and copies of the model that they are from
SAMPLINGS = ("independent", "shared", "grid")
COPIES = (4, 16, 31)
TRUE = (30, 90)  # degrees
ANGLES = tuple(range(0, 181, 15))
LENGTH, NOISE = 0.7, 0.1  # of the kernel; standard deviation
DRAWS = 4  # of copies, over which the evidence is averaged
# The best angles of a program in plain torch, by sampling and copies: at 30° and at 90°.
REFERENCE = {
    ("independent", 4): (0, 20),
    ("shared", 4): (30, 60),
    ("grid", 4): (30, 90),
    ("independent", 16): (10, 30),
    ("shared", 16): (30, 120),
    ("grid", 16): (30, 90),
    ("independent", 31): (20, 45),
    ("shared", 31): (30, 90),
    ("grid", 31): (30, 90),
}


def plan(seeds: Sequence[int], scale: float, data: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A study for each seed."""
    settings = {"points": of_small(scale, POINTS, 12), "fine": of_small(scale, FINE, 12)}
    return {f"sampling-seed{seed}": {**settings, "seed": seed} for seed in seeds}


def run(study: Study, work: Work) -> dict[str, Any]:
    """The expected evidence over angles, in each way to draw."""
    s = study.settings
    generator = torch.Generator().manual_seed(s["seed"])
    x = torch.randn(s["points"], 2, generator=generator, dtype=torch.float64)
    x = x / x.norm(dim=1, keepdim=True) * torch.rand(s["points"], 1, generator=generator, dtype=torch.float64).sqrt()
    fine = [covariance(copies_of(x, s["fine"], angle, "grid", generator)) for angle in TRUE]

    def measure(sampling: str, count: int) -> dict[str, Any]:
        drawn = torch.Generator().manual_seed(s["seed"])
        times = 1 if sampling == "grid" else DRAWS
        values: list[list[float]] = [[] for _ in TRUE]
        for angle in ANGLES:
            found = torch.zeros(len(TRUE), dtype=torch.float64)
            for _ in range(times):
                matrix = covariance(copies_of(x, count, angle, sampling, drawn))
                found += torch.stack([expected_evidence(matrix, true) for true in fine]) / times
            for at, value in zip(values, (found / len(x)).tolist(), strict=True):
                at.append(value)
        return {"sampling": sampling, "copies": count, "evidence": values}

    ways = [(sampling, count) for count in COPIES for sampling in SAMPLINGS]
    return {
        "ways": [
            work.kept(f"{sampling}-{count}", lambda way=(sampling, count): measure(*way)) for sampling, count in ways
        ],
        "data": [(expected_evidence(matrix, matrix) / len(x)).item() for matrix in fine],
    }


def copies_of(x: Tensor, count: int, degrees: float, sampling: str, generator: torch.Generator) -> Tensor:
    """``(N, S, 2)``."""
    turn = Turn(count, 1.0, sampling)
    return turn.transform(x, turn.draw(len(x), generator=generator), torch.tensor([math.radians(degrees)]).double())


def covariance(copies: Tensor) -> Tensor:
    """Of noisy values at the data points, of a Gaussian process averaged over copies: ``(N, S, 2) -> (N, N)``."""
    n, s = copies.shape[:2]
    flat = copies.flatten(0, 1)
    kernel = torch.stack(
        [(-(torch.cdist(some, flat) ** 2) / (2 * LENGTH**2)).exp().unflatten(1, (n, s)).mean((0, 2)) for some in copies]
    )
    return kernel + NOISE**2 * torch.eye(n, dtype=kernel.dtype)


def expected_evidence(matrix: Tensor, true: Tensor) -> Tensor:
    """The mean of ``log N(y; 0, matrix)`` over y of covariance ``true``, which has its maximum where both are one."""
    root = torch.linalg.cholesky(matrix)
    fit = torch.cholesky_solve(true, root).diagonal().sum()
    return -0.5 * (fit + 2 * root.diagonal().log().sum() + len(matrix) * math.log(2 * math.pi))


def rows(study: Study, result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each way and true angle."""
    made = []
    for way in result["ways"]:
        for i, (true, values) in enumerate(zip(TRUE, way["evidence"], strict=True)):
            made.append(
                {
                    "seed": study.settings["seed"],
                    "true": true,
                    "copies": way["copies"],
                    "sampling": way["sampling"],
                    "best": ANGLES[max(range(len(values)), key=values.__getitem__)],
                    "reference_best": REFERENCE.get((way["sampling"], way["copies"]), (None,) * len(TRUE))[i],
                    "evidence": max(values),
                    "evidence_at_true": values[ANGLES.index(true)],
                    "evidence_of_data": result["data"][i],
                }
            )
    return made


def text(rows: Sequence[dict[str, Any]]) -> str:
    """For people, means over seeds."""
    lines = []
    for true, copies, sampling in sorted(
        {(r["true"], r["copies"], r["sampling"]) for r in rows},
        key=lambda way: (*way[:2], SAMPLINGS.index(way[2])),
    ):
        some = [r for r in rows if (r["true"], r["copies"], r["sampling"]) == (true, copies, sampling)]
        lost = [r["evidence_of_data"] - r["evidence_at_true"] for r in some]
        lines.append(
            [
                f"{true}°",
                str(copies),
                sampling,
                with_error([r["best"] for r in some], "{:.0f}°"),
                "-" if some[0]["reference_best"] is None else f"{some[0]['reference_best']}°",
                with_error(lost),
            ]
        )
    head = ["true angle", "copies", "sampling", "most evidence at", "ref.", "lost at the true angle"]
    seeds = sorted({r["seed"] for r in rows})
    notes = [
        "Exact evidence of a Gaussian process averaged over turned copies, on average over targets of the model with the true angle and "
        f"{FINE} copies on a grid. Lost: nats per data point against that model. Ref.: a program in plain torch, other data.",
        "Independent draws act as noise, which the evidence reduces by a smaller angle.",
    ]
    return table(f"{PART.title}; {seeds_said(seeds)}", head, lines, notes, left=3)


def draw(found: Sequence[tuple[Study, dict[str, Any]]]) -> Any:
    """Means over seeds."""
    return draw_sampling(
        [result for _, result in found],
        TRUE,
        ANGLES,
        f"{PART.title}; {'mean over ' if len(found) > 1 else ''}{counted(len(found), 'seed')}",
    )


PART = Part(
    "sampling", "Sampling: the angle with the most evidence by how copies are drawn", plan, run, rows, text, draw
)
