"""Prior precisions and noise after a fit."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ella_cuda.laplace import DiagLaplace, FullLaplace, KronLaplace
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


@pytest.mark.parametrize("kind", [KronLaplace, DiagLaplace, FullLaplace])
@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_fixed_points_are_the_tempered_evidences(kind: Any, temperature: float) -> None:
    model = randomised(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    la = kind(model, "regression", temperature=temperature).fit(data(50, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la.optimize_prior_precision(method="mackay", n_steps=3000)
    assert max(*(slope.abs().max() for slope in slopes(la))) < 1e-4


def test_fixed_points_where_the_diagonal_counts_more_than_there_is() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    la = DiagLaplace(model, "regression").fit([(torch.randn(12, 3).double(), torch.randn(12, 3).double())])
    la.sigma_noise = 0.01
    assert sum(la.effective_parameters().values()) > la.n_targets
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la.optimize_prior_precision(method="mackay", n_steps=20000)
    assert max(*(slope.abs().max() for slope in slopes(la))) < 1e-3
    with pytest.warns(UserWarning, match="the fixed points do not rest after n_steps=2"):
        regression().optimize_prior_precision(method="mackay", n_steps=2)


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
    losses, spreads = {}, {}
    for exponent in (-2.0, -1.0, 0.0, 1.0, 2.0):
        la.prior_precision = 10**exponent
        spreads[10**exponent] = torch.cat([la(x, link_approx=link)[:, 0] for x, _ in validation]).std()
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
    if link != "bridge":
        assert spread[0] == 0.01  # a wide posterior makes predictions alike
    with pytest.warns(UserWarning, match=r"not a number at 1 of 5 precisions \(0\.01\), which are left out"):
        others = la.optimize_prior_precision(
            **grid, loss=lambda p, y: float("nan") if p[:, 0].std() == spreads[0.01] else p[:, 0].std().item()
        )
    assert others[0] != 0.01


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


def test_density_of_a_heteroscedastic_prediction_is_of_negative_second_parameters() -> None:
    model = randomised(nn.Linear(3, 2))
    with torch.no_grad():
        model.weight[1], model.bias[1] = 0.1, -2.0
    x, y = data(8, 0)[0]
    la = KronLaplace(model, "heteroscedastic").fit([(x, y[:, 0])])
    grid = torch.linspace(-40, 40, 4001, dtype=torch.float64)
    for precision in (0.03, 100.0):
        la.prior_precision = precision
        mean, variance = la(x, diagonal_output=True)
        found = la.log_density((mean, variance), y[:, 0], n_samples=4000)
        total = 0.0
        for n in range(len(x)):
            # Of eta_1 the integral is a Gaussian's in closed form; of eta_2 < 0 a sum.
            second = torch.distributions.Normal(mean[n, 1].detach(), variance[n, 1].sqrt())
            eta_2 = grid[grid < 0] / 40 * (4 - mean[n, 1].detach() + 8 * variance[n, 1].sqrt())
            weights = second.log_prob(eta_2).exp()
            noise = -0.5 / eta_2
            given = torch.distributions.Normal(mean[n, 0] * noise, (noise + variance[n, 0] * noise.square()).sqrt())
            total += ((given.log_prob(y[n, 0]).exp() * weights).sum() / weights.sum()).log().item()
        assert found.item() == pytest.approx(total, abs=0.04 * len(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen = la.optimize_prior_precision(
            method="gridsearch", prior_structure="scalar", val_loader=[(x, y[:, 0])], grid_size=5
        )
    assert chosen[0] > 0


def test_targets_of_the_grid_that_do_not_fit_are_refused() -> None:
    la, x = regression(), data(20, 1)[0][0]
    how: dict[str, Any] = {"method": "gridsearch", "prior_structure": "scalar", "grid_size": 2}
    with pytest.raises(ValueError, match="targets: expected the outputs' shape"):
        la.optimize_prior_precision(val_loader=[(x, torch.zeros(len(x), 1))], **how)
    with pytest.raises(ValueError, match="label"):
        classifier().optimize_prior_precision(val_loader=[(x, torch.full((len(x),), 2))], **how)


@pytest.mark.filterwarnings("ignore:pred_type='nn'")
@pytest.mark.parametrize("how", [{}, {"pred_type": "nn"}], ids=str)
def test_the_grid_samples_where_asked(how: dict[str, Any]) -> None:
    la = classifier()
    how = {"link_approx": "mc", "n_samples": 300, **how}
    loader = [(x, y.argmax(1)) for x, y in data(20, 1)]
    losses = {}
    for exponent in (-1.0, 1.0, 3.0):
        la.prior_precision = 10**exponent
        log_p = torch.cat([la(x, **how)[torch.arange(len(y)), y].log() for x, y in loader])
        losses[10**exponent] = -log_p.mean().item()
    best, second, _ = sorted(losses, key=losses.__getitem__)
    assert losses[second] - losses[best] > 0.03  # ten times what samples do
    found = la.optimize_prior_precision(
        method="gridsearch",
        prior_structure="scalar",
        val_loader=loader,
        grid_size=3,
        log_prior_prec_min=-1,
        log_prior_prec_max=3,
        **how,
    )
    assert found[0] == pytest.approx(best)


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
