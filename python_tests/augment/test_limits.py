"""What holds exactly: the invariance of a closed orbit, and the zero gradient of a symmetric grid without amounts."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ella_cuda.augment import AffineAugment, Augment, AveragedFunction
from python_tests.augment.augments import DOUBLE, RotatePoints, raw, smooth_images, turned

FULL_CIRCLE = {"generators": "rotation", "init": math.pi, "constraint": "raw"}


def spread(function: nn.Module, x: Tensor, turn: Callable[[Tensor], Tensor]) -> float:
    """How much an output changes as the input turns, relative to outputs."""
    before, after = function(x).detach(), function(turn(x)).detach()
    return float((after - before).abs().max() / before.abs().max())


def closed_twice(augment: Augment) -> Tensor:
    """The planted bug: a grid whose ends are the same place of a closed circle."""
    return torch.linspace(-1, 1, augment.n_samples, **DOUBLE)[:, None]


@pytest.mark.parametrize("n_samples", [3, 5, 8, 31])
def test_points_on_a_full_circle_of_angles(n_samples):
    network = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 3)).double()
    augment = RotatePoints(n_samples, init=math.pi, constraint="raw", sampling="grid", **DOUBLE)
    function, x = AveragedFunction(network, augment), torch.randn(40, 2, dtype=torch.float64)
    for k in (1, 2, -1):
        assert spread(function, x, lambda x, k=k: turned(x, 2 * math.pi * k / n_samples)) < 1e-14
    if n_samples == 31:  # the sum is nearly the integral, for any angle
        assert spread(function, x, lambda x: turned(x, 0.123)) < 1e-6
    with augment.held(closed_twice(augment)):
        assert spread(function, x, lambda x: turned(x, 2 * math.pi / n_samples)) > 1e-3


@pytest.mark.parametrize("draws", ["grid", "quarter turns"])
def test_images_on_four_angles(draws):
    network = nn.Sequential(nn.Flatten(), nn.Linear(98, 20), nn.Tanh(), nn.Linear(20, 3)).double()
    augment = AffineAugment(4, **FULL_CIRCLE, sampling="grid", **DOUBLE)
    function, x = AveragedFunction(network, augment), torch.randn(6, 2, 7, 7, dtype=torch.float64)
    turn = lambda x: torch.rot90(x, 1, (2, 3))  # noqa: E731
    quarters = torch.tensor([-0.5, 0, 0.5, 1], **DOUBLE)[:, None]
    with augment.held(quarters if draws == "quarter turns" else None):
        assert spread(function, x, turn) < 1e-13
    with augment.held(closed_twice(augment)):
        assert spread(function, x, turn) > 1e-3


def squares(augment: Augment, network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (AveragedFunction(network, augment)(x) - y).square().sum()


@pytest.mark.parametrize("kind", ["rotation", "two generators"])
def test_on_a_symmetric_grid_the_gradient_at_zero_is_zero_and_elsewhere_not(kind):
    """For points and for images. The reason why init=0 is refused there; amounts that start at 0.05 move, and so do drawn ones at 0."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.Tanh(), nn.Linear(9, 2)).double()
    x, y = smooth_images(10, 1, 8, 8), torch.randn(10, 2, dtype=torch.float64)
    names = ("rotation",) if kind == "rotation" else ("sx", "rotation")
    grid = raw(4 ** len(names), names, 0.05, sampling="grid")

    def gradient(augment: Augment) -> Tensor:
        augment.raw.requires_grad_()
        return torch.autograd.grad(squares(augment, network, x, y), augment.raw)[0]

    scale = float(gradient(grid).abs().min())
    assert scale > 1e-5
    grid.set_eta(0.0)
    assert float(gradient(grid).abs().max()) < 1e-12 * scale
    drawn = raw(16, names, 0.0, sampling="shared")
    assert float(gradient(drawn).abs().min()) > 0
    if kind == "rotation":
        with pytest.raises(
            ValueError, match=r"init must not be 0 .*even in every amount, so the gradient at 0 is exactly 0"
        ):
            raw(4, "rotation", 0.0, sampling="grid")


def test_for_points_it_is_zero_to_the_last_digit_and_steps_from_elsewhere_leave():
    network = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    x = torch.randn(30, 2, dtype=torch.float64)
    augment = RotatePoints(7, init=1.5, constraint="raw", sampling="grid", **DOUBLE)
    y = AveragedFunction(network, augment)(x).detach()
    augment.set_eta(0.0)
    augment.raw.requires_grad_()
    squares(augment, network, x, y).backward()
    assert float(augment.raw.grad) == pytest.approx(0, abs=1e-14)
    augment.set_eta(0.05)
    optimizer = torch.optim.Adam([augment.raw], lr=0.05)
    for _ in range(100):
        optimizer.zero_grad()
        squares(augment, network, x, y).backward()
        optimizer.step()
    assert augment.amounts()["rotation"] == pytest.approx(1.5, abs=0.03)
