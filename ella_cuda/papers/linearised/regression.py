"""A regression in one dimension, whose data lie in two clusters, and its small networks with normalisation."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gaussian_nll_loss

from ella_cuda.data import TensorLoader
from ella_cuda.laplace import FullLaplace
from ella_cuda.papers.studies import Work
from ella_cuda.run_folder import CHECKPOINT_FILE
from ella_cuda.training import Evaluation, marglik_training

NORMS = ("batch", "layer")
POINTS, TEST_POINTS, GRID_POINTS = 80, 200, 81
NOISE = 0.3  # standard deviation
LEFT, RIGHT = (-2.0, -1.0), (0.75, 2.0)  # the clusters
HARDLY = 1e-6  # the prior's precision of the training, which is stopped early
TINY = 1e-12  # of a normalisation's variance, so that scale does not matter


class Points(NamedTuple):
    """Inputs and targets, ``(N, 1)`` each, float64."""

    x: Tensor
    y: Tensor


def two_clusters(count: int, seed: int) -> Points:
    """Noisy values of a sine, as many in each cluster."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.rand(count, 1, generator=generator, dtype=torch.float64)
    low, high = (torch.tensor(ends, dtype=torch.float64)[:, None] for ends in zip(LEFT, RIGHT, strict=True))
    which = torch.arange(count) % 2
    x = low[which] + (high - low)[which] * u
    return Points(x, 3 * torch.sin(2 * x) + NOISE * torch.randn(count, 1, generator=generator, dtype=torch.float64))


def grid() -> Tensor:
    """Where error bars are looked at, ``(G, 1)``."""
    return torch.linspace(-2, 2, GRID_POINTS, dtype=torch.float64)[:, None]


def normalised_mlp(width: int, norm: str = "batch") -> nn.Sequential:
    """1-width-width-1 with a normalisation without affine parameters after both hidden layers; float64.

    Before BatchNorm, layers have no biases. Of one input LayerNorm leaves the sign alone, so that before it layers have them. The
    activation is smooth, for error bars are as wide as derivatives jump.
    """
    bias = norm == "layer"

    def normalisation() -> nn.Module:
        if norm == "layer":
            return nn.LayerNorm(width, eps=TINY, elementwise_affine=False)
        return nn.BatchNorm1d(width, eps=TINY, momentum=1.0, affine=False)  # statistics of the last batch, all points

    layers = {
        "first": nn.Linear(1, width, bias=bias),
        "first_norm": normalisation(),
        "first_activation": nn.SiLU(),
        "middle": nn.Linear(width, width, bias=bias),
        "middle_norm": normalisation(),
        "middle_activation": nn.SiLU(),
        "head": nn.Linear(width, 1, bias=False),
    }
    return nn.Sequential(OrderedDict(layers)).double()


def rescaled(model: nn.Sequential, k: float) -> nn.Sequential:
    """A copy of the same function whose middle layer's parameters are k times as large; BatchNorm's statistics follow."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.middle.parameters():
            p.mul_(k)
        if isinstance(model.middle_norm, nn.BatchNorm1d):
            model.middle_norm.running_mean.mul_(k)
            model.middle_norm.running_var.mul_(k**2)
    return model


def loader_of(points: Points) -> TensorLoader:
    """All points in one batch."""
    return TensorLoader(*points, batch_size=len(points.x))


def trained(
    width: int,
    norm: str,
    seed: int,
    epochs: int,
    work: Work,
    every: int | None = None,
    on_evaluation: Callable[[nn.Sequential, Points, int], None] | None = None,
) -> tuple[nn.Sequential, Points]:
    """The network after that many steps of Adam on all points, and the points. A killed training goes on from its checkpoint.

    Args:
        width, norm: of :func:`normalised_mlp`. seed: of weights and data. epochs: steps.
        work: where.
        every: epochs between checkpoints, and calls of ``on_evaluation(model, points, epoch)``; None is a tenth of all.
        on_evaluation: whatever looks at the network during the training.
    """
    points = two_clusters(POINTS, seed)
    torch.manual_seed(seed)
    model = normalised_mlp(width, norm)

    def look(evaluation: Evaluation) -> None:
        if on_evaluation is not None:
            _settle(model, points)
            on_evaluation(model, points, evaluation.epoch)

    marglik_training(
        model,
        loader_of(points),
        "regression",
        optimizer_kwargs={"lr": 0.01},
        n_epochs=epochs,
        marglik_frequency=max(1, epochs // 10) if every is None else every,
        prior_prec_init=HARDLY,
        sigma_noise_init=NOISE,
        objective="map",
        progress_bar=work.progress,
        checkpoint=work.folder / CHECKPOINT_FILE,
        depends_on={"width": width, "norm": norm, "seed": seed},
        on_evaluation=look,
        description=work.folder.name,
    )
    _settle(model, points)
    return model.eval(), points


@torch.no_grad()
def _settle(model: nn.Sequential, points: Points) -> None:
    """Give BatchNorm the statistics at the present weights; those of training are of the weights before the last step."""
    before = model.training
    model.train()
    model(points.x)
    model.train(before)


def full_laplace(model: nn.Module, points: Points) -> FullLaplace:
    """Fitted, with the noise of the data."""
    return FullLaplace(model, "regression", sigma_noise=NOISE).fit(loader_of(points))


def predicted(la: FullLaplace, seed: int) -> dict[str, object]:
    """Of an approximation: the negative log density of new points, and mean and standard deviation on the grid, without noise."""
    test = two_clusters(TEST_POINTS, seed + 10_000)
    mean, variance = la(test.x, diagonal_output=True)
    on_grid, bars = la(grid(), diagonal_output=True)
    deviation = bars.flatten().sqrt()
    return {
        "nll": gaussian_nll_loss(mean.double(), test.y.double(), variance.double() + NOISE**2, full=True).item(),
        "error_bar": deviation.mean().item(),
        "mean": on_grid.flatten().tolist(),
        "deviation": deviation.tolist(),
    }
