"""What the bound learns of data from a shallow network with a known amount, and what a point estimate does."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ella_cuda.augment import AffineAugment
from ella_cuda.data import TensorLoader
from ella_cuda.invariance import BayesianLinear, ElboTrainer, ShallowNetwork, multisample_elbo
from python_tests.augment.augments import DOUBLE, smooth_images
from python_tests.invariance.banks import SIDE, fit_best, of_norm_3, smooth_bank, turned_targets

ANGLES = [math.radians(degrees) for degrees in range(0, 181, 15)]
NOISE = 0.1


@pytest.mark.parametrize("true", [0, 2, 4, 6, 12])
def test_the_bound_peaks_at_the_true_amount(true):
    """Over targets of the network itself, at q's best, where the bound is the evidence."""
    augment = AffineAugment(8, "rotation", 0.1, "grid", constraint="raw", **DOUBLE)
    bank, x = smooth_bank(30, augment), of_norm_3(smooth_images(40, 1, SIDE, SIDE))
    augment.set_eta(ANGLES[true])
    with torch.no_grad():
        y = bank(x) @ torch.randn(30, 60, **DOUBLE) + NOISE * torch.randn(40, 60, **DOUBLE)
        layer, bounds = BayesianLinear(30, 60, **DOUBLE), []
        for angle in ANGLES:
            augment.set_eta(angle)
            features = bank(x)
            fit_best(layer, features, y, NOISE)
            bounds.append(multisample_elbo(layer, features, y, "regression", sigma_noise=NOISE).item())
    assert bounds.index(max(bounds)) == true


def ascend(model: ShallowNetwork, x: Tensor, y: Tensor, steps: int = 100) -> list[float]:
    """The amounts after steps along the bound's gradient, q at its best at each."""
    raw = model.features.augment.raw.requires_grad_()
    optimizer = torch.optim.Adam([raw], 0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        features = model.features(x)
        fit_best(model.layer, features.detach(), y, NOISE)
        (-multisample_elbo(model.layer, features, y, "regression", sigma_noise=NOISE)).backward()
        optimizer.step()
    return raw.detach().abs().tolist()


@pytest.mark.parametrize("start", [20, 90])
def test_the_bounds_gradient_leads_to_the_true_angle_from_either_side(start):
    torch.manual_seed(1)
    x, y, model = turned_targets(60, n=60, n_filters=30, outputs=20, noise=NOISE)
    model.features.augment.set_eta(math.radians(start))
    (found,) = ascend(model, x, y)
    assert math.degrees(found) == pytest.approx(60, abs=4)


def test_amounts_of_generators_that_data_do_not_have_go_to_zero():
    """Of two generators the one that the targets are averaged over is learned."""
    augment = AffineAugment(16, ("rotation", "tx"), 0.1, "grid", constraint="raw", **DOUBLE)
    bank, x = smooth_bank(30, augment), of_norm_3(smooth_images(150, 1, SIDE, SIDE))
    augment.set_eta({"rotation": 1.2, "tx": 0.0})
    with torch.no_grad():
        features = bank(x)
        precision = 30 * features.var().item()
        y = features @ torch.randn(30, 10, **DOUBLE) / precision**0.5 + NOISE * torch.randn(150, 10, **DOUBLE)
    augment.set_eta(0.2)
    layer = BayesianLinear(30, 10, prior_precision=precision, **DOUBLE)
    rotation, tx = ascend(ShallowNetwork(bank, layer, "regression"), x, y)
    assert rotation == pytest.approx(1.2, abs=0.1) and tx < 0.1


@pytest.mark.slow
def test_the_point_estimate_collapses_and_the_bound_does_not():
    """Everything learned at once, from the same start: filters, amount, q or weights, precision, noise."""
    found = {}
    for objective in ("bound", "point"):
        torch.manual_seed(0)
        x, y, model = turned_targets(90, n=80, n_filters=100)
        model.features.augment.set_eta(math.radians(45))
        options = {"n_epochs": 300, "objective": objective, "lr": 2e-2, "lr_hyp": 6e-2, "progress_bar": False}
        trainer = ElboTrainer(model, TensorLoader(x, y, 80), **options)
        trainer.run()
        found[objective] = math.degrees(model.features.augment.amounts()["rotation"])
        assert trainer.history[-1]["objective"] > trainer.history[0]["objective"]
    assert found["point"] < 20 and 55 < found["bound"] < 110
