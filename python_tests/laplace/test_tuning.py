"""Prior precisions and noise after a fit."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ella_cuda.laplace import KronLaplace
from python_tests.laplace.checks import randomised

Batches = list[tuple[Tensor, Tensor]]


def data(count: int, seed: int) -> Batches:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    noise = 0.3 * torch.randn(count, 2, generator=generator, dtype=torch.float64)
    return [(part, target) for part, target in zip(x.split(16), (x[:, :2].sin() + noise).split(16), strict=True)]


def regression() -> KronLaplace:
    model = randomised(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    return KronLaplace(model, "regression").fit(data(50, 0))


def classifier() -> KronLaplace:
    model = randomised(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), 1.5)
    return KronLaplace(model).fit([(x, y.argmax(1)) for x, y in data(50, 0)])


def slopes(la: KronLaplace) -> tuple[Tensor, Tensor]:
    """Of the evidence in the logarithms of the precisions and of sigma."""
    precision, sigma = la.prior_precision.log().requires_grad_(), la.sigma_noise.log().requires_grad_()
    evidence = la.log_marginal_likelihood(precision.exp(), sigma.exp())
    return torch.autograd.grad(evidence, (precision, sigma))


@pytest.mark.parametrize("method", ["marglik", "mackay"])
def test_the_evidence_is_stationary(method: str) -> None:
    la = regression()
    returned = la.optimize_prior_precision(method=method, n_steps=3000, lr=0.05)
    assert torch.equal(returned, la.prior_precision)
    assert len(set(returned.tolist())) == 4
    assert la.sigma_noise != 1
    of_precision, of_sigma = slopes(la)
    assert max(of_precision.abs().max(), of_sigma.abs()) < 1e-4
    assert torch.autograd.functional.hessian(la.evidence_at, la.prior_precision.log()).diagonal().max() < 0


@pytest.mark.parametrize("method", ["marglik", "mackay"])
def test_one_precision_for_all(method: str) -> None:
    la = regression()
    la.optimize_prior_precision(
        method=method, prior_structure="scalar", n_steps=3000, lr=0.05, init_prior_prec=3.0, tune_sigma=False
    )
    assert len(set(la.prior_precision.tolist())) == 1
    assert la.sigma_noise == 1
    of_precision, of_sigma = slopes(la)
    assert of_precision.sum().abs() < 1e-4
    assert min(of_precision.abs().max(), of_sigma.abs()) > 1e-2


def test_what_the_data_say_nothing_about_is_held() -> None:
    la = regression()
    la.prior_mean = la.mean  # then there is no distance from it
    la.optimize_prior_precision(method="mackay", n_steps=5)
    assert torch.equal(la.prior_precision, torch.full((4,), 1e10, dtype=torch.float64))


@pytest.mark.parametrize("link", ["probit", "probit_full", "bridge"])
def test_the_grids_best_is_that_of_predictions(link: str) -> None:
    la, validation = classifier(), [(x, y.argmax(1)) for x, y in data(40, 1)]
    losses = {}
    for exponent in (-2.0, -1.0, 0.0, 1.0, 2.0):
        la.prior_precision = 10**exponent
        log_p = torch.cat([la(x, link_approx=link)[torch.arange(len(y)), y].log() for x, y in validation])
        losses[exponent] = -log_p.mean().item()
    best = min(losses, key=losses.__getitem__)
    la.prior_precision = 7.0
    grid: dict[str, Any] = {
        "method": "gridsearch",
        "prior_structure": "scalar",
        "val_loader": validation,
        "grid_size": 5,
        "link_approx": link,
        "log_prior_prec_min": -2,
        "log_prior_prec_max": 2,
    }
    found = la.optimize_prior_precision(**grid)
    torch.testing.assert_close(found, torch.full((4,), 10**best, dtype=torch.float64))

    def seen(predictions: Tensor, targets: Tensor) -> float:
        assert predictions.shape == (40, 2)
        assert targets.shape == (40,)
        return predictions[:, 0].std().item()

    spread = la.optimize_prior_precision(**grid, loss=seen)
    assert link == "bridge" or spread[0] == 0.01  # a wide posterior makes predictions alike


def test_the_grid_of_a_regression_sees_the_variance() -> None:
    la, validation = regression(), data(40, 1)
    la.sigma_noise = 0.4
    densities = {}
    for exponent in (-3.0, -1.0, 1.0, 3.0):
        la.prior_precision = 10**exponent
        total = torch.zeros((), dtype=torch.float64)
        for x, y in validation:
            mean, variance = la(x, diagonal_output=True)
            total += torch.distributions.Normal(mean, (variance + 0.16).sqrt()).log_prob(y).sum()
        densities[exponent] = total.item()
    best = max(densities, key=densities.__getitem__)
    found = la.optimize_prior_precision(
        method="gridsearch",
        prior_structure="scalar",
        val_loader=validation,
        grid_size=4,
        log_prior_prec_min=-3,
        log_prior_prec_max=3,
    )
    assert found[0] == pytest.approx(10**best)


def test_targets_of_the_grid_that_do_not_fit_are_refused() -> None:
    la, x = regression(), data(20, 1)[0][0]
    how: dict[str, Any] = {"method": "gridsearch", "prior_structure": "scalar", "grid_size": 2}
    with pytest.raises(ValueError, match="targets: expected the outputs' shape"):
        la.optimize_prior_precision(val_loader=[(x, torch.zeros(len(x), 1))], **how)
    with pytest.raises(ValueError, match="label"):
        classifier().optimize_prior_precision(val_loader=[(x, torch.full((len(x),), 2))], **how)


def test_the_grid_samples_where_asked() -> None:
    la = classifier()
    loader = [(x, y.argmax(1)) for x, y in data(20, 1)]
    for how in ({"link_approx": "mc"}, {"pred_type": "nn", "link_approx": "mc"}):
        with pytest.warns(UserWarning) if "pred_type" in how else contextlib.nullcontext():
            found = la.optimize_prior_precision(
                method="gridsearch", prior_structure="scalar", val_loader=loader, grid_size=3, n_samples=10, **how
            )
        assert found[0] in (1e-4, 1.0, 1e4)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"method": "adam"}, "method must be one of 'marglik', 'mackay', 'gridsearch', got 'adam'"),
        ({"prior_structure": "diag"}, "prior_structure='diag' has a precision for every parameter"),
        ({"method": "gridsearch", "prior_structure": "scalar"}, "needs val_loader"),
        ({"method": "gridsearch", "val_loader": [1]}, "prior_structure='scalar'"),
        ({"method": "gridsearch", "prior_structure": "scalar", "val_loader": []}, "val_loader gave no data"),
        ({"n_steps": 0}, "n_steps and lr must be positive"),
    ],
    ids=str,
)
def test_wrong_arguments_change_nothing(how: dict[str, Any], words: str) -> None:
    la = classifier()
    with pytest.raises(ValueError, match=words):
        la.optimize_prior_precision(**how)
    assert torch.equal(la.prior_precision, torch.ones(4, dtype=torch.float64))


def test_a_failure_puts_the_hyperparameters_back() -> None:
    la = classifier()
    loader = [(x, y.argmax(1)) for x, y in data(20, 1)]

    def fails(predictions: Tensor, targets: Tensor) -> float:
        raise KeyError

    with pytest.raises(KeyError):
        la.optimize_prior_precision(
            method="gridsearch", prior_structure="scalar", val_loader=loader, grid_size=3, loss=fails
        )
    assert torch.equal(la.prior_precision, torch.ones(4, dtype=torch.float64))
