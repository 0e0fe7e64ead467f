"""Basis functions: the lengthscale that the training loss learns, and the one that the evidence learns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ella_cuda.papers.invariances.pictures import draw_lengthscales
from ella_cuda.papers.invariances.sizes import of_small
from ella_cuda.papers.studies import Part, Study, Work
from ella_cuda.papers.studies.text import seeds_said, table, with_error
from ella_cuda.progress import bar_size

POINTS, TEST_POINTS, BASIS = 40, 200, 200
HALF, BEYOND = 3.0, 1.0  # inputs are within the first, centres of basis functions reach that much further
TRUE = (0.3, 0.6, 1.2)
NOISE = 0.1  # standard deviation; weights have 1
START = (1.0, 1.0, 0.3)  # lengthscale, standard deviations of weights and of noise
LOSS_STEPS, LOSS_RATE, LOSS_WEIGHT_RATE = 10_000, 0.01, 0.03
EVIDENCE_STEPS, EVIDENCE_RATE = 400, 0.03
LOOKS = 100  # at the lengthscale during a training
TRIED = tuple(10 ** (-1.7 + 0.1 * k) for k in range(22))  # lengthscales of the curves
GRID = 121  # inputs of the pictures
KINDS = {"evidence": "evidence", "loss": "training loss"}


def plan(seeds: Sequence[int], scale: float, data: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A study for each seed."""
    sizes = {"loss_steps": of_small(scale, LOSS_STEPS, 20), "evidence_steps": of_small(scale, EVIDENCE_STEPS, 20)}
    return {f"lengthscale-seed{seed}": {**sizes, "seed": seed} for seed in seeds}


def features(x: Tensor, lengthscale: Tensor) -> Tensor:
    """Gaussian bumps about regular centres, whose squares have the sum 1 at every input: ``(N,) -> (N, M)``."""
    end = HALF + BEYOND
    centres = torch.linspace(-end, end, BASIS, dtype=x.dtype)
    return ((-((x[:, None] - centres) ** 2) / lengthscale**2).log_softmax(1) / 2).exp()


def evidence(phi: Tensor, y: Tensor, weight: Tensor, noise: Tensor) -> Tensor:
    r""":math:`\log N(y; 0, s^2 \Phi\Phi^T + \sigma^2 I)` by the posterior of the weights.

    Args:
        phi: ``(N, M)``. y: ``(N,)``. weight, noise: s and σ.
    """
    n, m = phi.shape
    root = torch.linalg.cholesky(phi.T @ phi / noise**2 + torch.eye(m, dtype=phi.dtype) / weight**2)
    mean = posterior_mean(phi, y, weight, noise, root)
    fit = -((y - phi @ mean).square().sum() / noise**2 + mean.square().sum() / weight**2)
    determinant = 2 * root.diagonal().log().sum() + 2 * m * weight.log()
    return 0.5 * (fit - determinant - 2 * n * noise.log() - n * math.log(2 * math.pi))


def posterior_mean(phi: Tensor, y: Tensor, weight: Tensor, noise: Tensor, root: Tensor | None = None) -> Tensor:
    """Of the weights, ``(M,)``; ``root`` is the Cholesky factor of their posterior precision."""
    if root is None:
        root = torch.linalg.cholesky(phi.T @ phi / noise**2 + torch.eye(phi.shape[1], dtype=phi.dtype) / weight**2)
    return torch.cholesky_solve((phi.T @ y / noise**2)[:, None], root)[:, 0]


def data_of(true: float, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs and targets of training, and of the test with targets without noise, of a function of the model with that lengthscale."""
    drawn = torch.Generator().manual_seed(seed)
    x, test = (HALF * (2 * torch.rand(n, generator=drawn, dtype=torch.float64) - 1) for n in (POINTS, TEST_POINTS))
    weights = torch.randn(BASIS, generator=drawn, dtype=torch.float64)
    at = torch.tensor(true, dtype=torch.float64)
    y = features(x, at) @ weights + NOISE * torch.randn(POINTS, generator=drawn, dtype=torch.float64)
    return x, y, test, features(test, at) @ weights


def run(study: Study, work: Work) -> dict[str, Any]:
    """Learn the lengthscale in both ways from functions of every true one."""
    s = study.settings
    return {"true": [work.kept(f"{true:g}", lambda true=true: _of_true(true, s, work.progress)) for true in TRUE]}


def _of_true(true: float, s: dict[str, Any], progress: bool) -> dict[str, Any]:
    x, y, test, target = data_of(true, s["seed"])
    by_evidence, learned = learned_by_evidence(x, y, s["evidence_steps"])
    by_loss, weights = learned_by_loss(x, y, s["loss_steps"], progress)
    shown = torch.linspace(-HALF, HALF, GRID, dtype=x.dtype)
    scales = torch.tensor([by_evidence[-1][1], by_loss[-1][1]], dtype=x.dtype)
    means = {"evidence": posterior_mean(features(x, scales[0]), y, *learned), "loss": weights}
    at = dict(zip(KINDS, scales, strict=True))
    curves: dict[str, list[float]] = {"evidence": [], "loss": []}
    unit, noise = torch.ones((), dtype=x.dtype), torch.tensor(NOISE, dtype=x.dtype)
    for tried in torch.tensor(TRIED, dtype=x.dtype):
        phi = features(x, tried)
        curves["evidence"].append(evidence(phi, y, unit, noise).item() / len(x))
        left = y - phi @ posterior_mean(phi, y, unit, noise)
        curves["loss"].append(left.square().mean().item())
    return {
        "true": true,
        "trajectories": {"evidence": by_evidence, "loss": by_loss},
        "weight": learned[0].item(),
        "noise": learned[1].item(),
        "train": {k: (y - features(x, at[k]) @ w).square().mean().sqrt().item() for k, w in means.items()},
        "test": {k: (target - features(test, at[k]) @ w).square().mean().sqrt().item() for k, w in means.items()},
        "curves": curves,
        "points": [x.tolist(), y.tolist()],
        "functions": {k: (features(shown, at[k]) @ w).tolist() for k, w in means.items()},
    }


def learned_by_evidence(x: Tensor, y: Tensor, steps: int) -> tuple[list[tuple[int, float]], tuple[Tensor, Tensor]]:
    """Steps with lengthscales, and the standard deviations of weights and noise at the end, all by gradients of the evidence."""
    raw = torch.tensor(START, dtype=x.dtype).log().requires_grad_()
    optimizer, found = torch.optim.Adam([raw], lr=EVIDENCE_RATE), []
    for step in range(steps + 1):
        if step % max(1, steps // LOOKS) == 0 or step == steps:
            found.append((step, raw[0].exp().item()))
        optimizer.zero_grad()
        scale, weight, noise = raw.exp().unbind()
        (-evidence(features(x, scale), y, weight, noise)).backward()
        if step < steps:
            optimizer.step()
    _, weight, noise = raw.detach().exp().unbind()
    return found, (weight, noise)


def learned_by_loss(x: Tensor, y: Tensor, steps: int, progress: bool = False) -> tuple[list[tuple[int, float]], Tensor]:
    """Steps with lengthscales, and the weights at the end, all by gradients of the squared error, from weights of 0."""
    raw = torch.tensor(START[0], dtype=x.dtype).log().requires_grad_()
    weights = torch.zeros(BASIS, dtype=x.dtype, requires_grad=True)
    groups = [{"params": [raw], "lr": LOSS_RATE}, {"params": [weights], "lr": LOSS_WEIGHT_RATE}]
    optimizer, found = torch.optim.Adam(groups), [(0, START[0])]
    for step in tqdm(range(steps), "training loss", disable=not progress, leave=False, **bar_size()):
        optimizer.zero_grad()
        (y - features(x, raw.exp()) @ weights).square().mean().backward()
        optimizer.step()
        if (step + 1) % max(1, steps // LOOKS) == 0 or step + 1 == steps:
            found.append((step + 1, raw.exp().item()))
    return found, weights.detach()


def rows(study: Study, result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each true lengthscale and way."""
    return [
        {
            "seed": study.settings["seed"],
            "true": one["true"],
            "by": kind,
            "steps": one["trajectories"][kind][-1][0],
            "lengthscale": one["trajectories"][kind][-1][1],
            "noise": one["noise"] if kind == "evidence" else None,
            "weight_deviation": one["weight"] if kind == "evidence" else None,
            "train_rmse": one["train"][kind],
            "test_rmse": one["test"][kind],
        }
        for one in result["true"]
        for kind in KINDS
    ]


def text(rows: Sequence[dict[str, Any]]) -> str:
    """For people, means over seeds."""
    lines = []
    for true in sorted({r["true"] for r in rows}):
        for kind, title in KINDS.items():
            some = [r for r in rows if (r["true"], r["by"]) == (true, kind)]
            cells = [f"{true:g}", title, f"{some[0]['steps']:,}"]
            cells += [with_error([r[k] for r in some], "{:.2f}") for k in ("lengthscale", "train_rmse", "test_rmse")]
            noises = [r["noise"] for r in some if r["noise"] is not None]
            lines.append([*cells, with_error(noises, "{:.2f}")])
    head = ["true", "learned by", "steps", "lengthscale", "RMSE, training", "RMSE, test", "noise"]
    notes = [
        f"{POINTS} noisy values (deviation {NOISE:g}) of a function with {BASIS} Gaussian bumps, all of one lengthscale. The training loss "
        "is the squared error, by Adam on weights and lengthscale; the evidence learns lengthscale, weights' deviation and noise. "
        "Both start at 1.",
        "Test: against the function without noise.",
    ]
    return table(f"{PART.title}; {seeds_said(sorted({r['seed'] for r in rows}))}", head, lines, notes, left=2)


def draw(found: Sequence[tuple[Study, dict[str, Any]]]) -> Any:
    """All seeds; functions of the first one."""
    seeds = [study.settings["seed"] for study, _ in found]
    order = sorted(range(len(found)), key=seeds.__getitem__)
    return draw_lengthscales([found[i][1]["true"] for i in order], TRIED, KINDS, HALF, PART.title)


PART = Part(
    "lengthscale",
    "Lengthscale: that of basis functions by the training loss and by the evidence",
    plan,
    run,
    rows,
    text,
    draw,
)
