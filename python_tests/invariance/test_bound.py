"""The multi-sample bound: the exact evidence at the best q and below it elsewhere, tighter with more copies, its gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from ella_cuda.augment import AffineAugment
from ella_cuda.invariance import BayesianLinear, ShallowNetwork, multisample_elbo
from python_tests.augment.augments import DOUBLE, smooth_images
from python_tests.invariance.banks import fit_best, smooth_bank

NOISE = 0.4


def problem(q: str = "full", n: int = 7, d: int = 5, k: int = 2) -> tuple[BayesianLinear, Tensor, Tensor]:
    return (
        BayesianLinear(d, k, q, prior_precision=0.6, **DOUBLE),
        torch.randn(n, 3, d, **DOUBLE),
        torch.randn(n, k, **DOUBLE),
    )


def evidence(layer: BayesianLinear, features: Tensor, y: Tensor, noise: float) -> Tensor:
    """log N(y; 0, features features^T / delta + noise^2), summed over outputs."""
    n = len(features)
    covariance = features @ features.T / layer.prior_precision + noise**2 * torch.eye(n, **DOUBLE)
    return MultivariateNormal(torch.zeros(n, **DOUBLE), covariance).log_prob(y.T).sum()


def test_at_the_best_q_it_is_the_evidence():
    layer, features, y = problem()
    shared = features.mean(1)
    exact = evidence(layer, shared, y, NOISE)
    fit_best(layer, shared, y, NOISE)
    for given in (shared, features):
        bound = multisample_elbo(layer, given, y, "regression", sigma_noise=NOISE)
        torch.testing.assert_close(bound, exact, rtol=0, atol=1e-10)
    # Its slope is the evidence's too, for q has none there.
    noise = torch.tensor(NOISE, requires_grad=True, **DOUBLE)
    moved = shared.clone().requires_grad_()
    of_bound = torch.autograd.grad(
        multisample_elbo(layer, moved, y, "regression", sigma_noise=noise), [moved, layer.log_prior_precision, noise]
    )
    of_exact = torch.autograd.grad(evidence(layer, moved, y, noise), [moved, layer.log_prior_precision, noise])
    for a, b in zip(of_bound, of_exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_elsewhere_it_is_below():
    layer, features, y = problem()
    shared = features.mean(1)
    exact = evidence(layer, shared, y, NOISE)
    fit_best(layer, shared, y, NOISE)
    best = {name: p.detach().clone() for name, p in layer.named_parameters()}
    for name in ("mean", "log_scale", "lower"):
        for _ in range(10):
            layer.load_state_dict(best)
            with torch.no_grad():
                layer.get_parameter(name).add_(0.1 * torch.randn_like(best[name]))
            assert multisample_elbo(layer, shared, y, "regression", sigma_noise=NOISE) < exact - 1e-4
    diagonal = BayesianLinear(5, 2, "diag", prior_precision=0.6, **DOUBLE)
    fit_best(diagonal, shared, y, NOISE)
    assert multisample_elbo(diagonal, shared, y, "regression", sigma_noise=NOISE) < exact - 1e-3


def of_subsets(
    layer: BayesianLinear, features: Tensor, y: Tensor, likelihood: str, size: int, **options: object
) -> Tensor:
    """The mean of the bound over all subsets of copies of a size."""
    found = []
    for subset in itertools.combinations(range(features.shape[1]), size):
        generator = torch.Generator().manual_seed(0)  # the same draws of logits' noise
        found.append(multisample_elbo(layer, features[:, subset], y, likelihood, generator=generator, **options))
    return torch.stack(found).mean()


@pytest.mark.parametrize("likelihood", ["regression", "classification"])
def test_it_grows_with_the_number_of_copies(likelihood):
    """On average over all subsets of some copies, an inequality without an error. Draws of logits are many."""
    layer, _, y = problem(n=6, k=3)
    features = torch.randn(6, 5, 5, **DOUBLE)
    with torch.no_grad():
        layer.mean.add_(torch.randn_like(layer.mean))
    options = {"sigma_noise": NOISE} if likelihood == "regression" else {"n_samples": 4000}
    y = y if likelihood == "regression" else torch.arange(6) % 3
    values = [of_subsets(layer, features, y, likelihood, size, **options).item() for size in (1, 2, 3, 4, 5)]
    assert all(b > a + 0.01 for a, b in itertools.pairwise(values)), values


def test_draws_of_logits_have_qs_expectation():
    layer, features, _ = problem(k=3)
    with torch.no_grad():
        layer.mean.add_(torch.randn_like(layer.mean))
        layer.log_scale.add_(1.5)
    y, mean = torch.arange(7) % 3, features.mean(1)
    found = multisample_elbo(layer, mean, y, n_samples=20000)
    weights = layer.mean + torch.einsum("kij,nkj->nki", layer.scale_tril, torch.randn(20000, 3, 5, **DOUBLE))
    logits = torch.einsum("nd,skd->snk", mean, weights)
    expected = logits.log_softmax(2)[:, torch.arange(7), y].mean(0).sum() - layer.kl()
    assert found.item() == pytest.approx(expected.item(), abs=0.1)
    assert multisample_elbo(layer, mean, y, n_samples=1).item() != pytest.approx(found.item(), abs=1e-6)


def test_the_unbiased_square_has_the_expectation_of_all_copies():
    """On average over all pairs of a finite law of copies, drawn with replacement, it is the averaged function's; the other is below."""
    layer, features, y = problem()
    exact = multisample_elbo(layer, features.mean(1), y, "regression", sigma_noise=NOISE)
    pairs = list(itertools.product(range(3), repeat=2))
    unbiased, plain = (
        torch.stack(
            [
                multisample_elbo(layer, features[:, pair], y, "regression", sigma_noise=NOISE, unbiased=u)
                for pair in pairs
            ]
        ).mean()
        for u in (True, False)
    )
    torch.testing.assert_close(unbiased, exact, rtol=1e-12, atol=1e-10)
    assert plain < exact - 0.1


def test_a_batch_stands_for_all_data():
    layer, features, y = problem()
    mean = features.mean(1)
    one = multisample_elbo(layer, mean, y, "regression", sigma_noise=NOISE)
    doubled = multisample_elbo(layer, mean, y, "regression", sigma_noise=NOISE, n_data=14)
    torch.testing.assert_close(doubled, 2 * (one + layer.kl()) - layer.kl())


@pytest.mark.parametrize("likelihood", ["regression", "unbiased", "classification"])
@pytest.mark.parametrize("path", ["filters", "inputs"])
@pytest.mark.parametrize("q", ["full", "diag"])
def test_gradients_are_those_of_finite_differences(likelihood, path, q):
    """In filters, bias, q, amounts, the prior's precision and the noise at once."""
    augment = AffineAugment(3, ("rotation", "tx", "sx", "shear"), 0.2, **DOUBLE)
    bank = smooth_bank(4, augment, 9, activation="tanh", path=path)
    kind, unbiased = (
        ("classification", False) if likelihood == "classification" else ("regression", likelihood == "unbiased")
    )
    model = ShallowNetwork(bank, BayesianLinear(4, 3, q, **DOUBLE), kind, sigma_noise=0.5)
    with torch.no_grad():
        for parameter in model.layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    x = smooth_images(6, 1, 9, 9)
    y = torch.arange(6) % 3 if kind == "classification" else torch.randn(6, 3, **DOUBLE)
    leaves = [augment.raw.requires_grad_(), *model.parameters()]
    assert len(leaves) == 6 + (q == "full") + (kind == "regression")
    eps = augment.draw(1, "shared")

    def bound() -> Tensor:
        with augment.held(eps):
            return model.elbo(x, y, 20, unbiased=unbiased, generator=torch.Generator().manual_seed(1))

    slopes = torch.autograd.grad(bound(), leaves)
    for leaf, slope in zip(leaves, slopes, strict=True):
        direction, step = torch.randn_like(leaf), 1e-6
        with torch.no_grad():
            leaf.add_(step * direction)
            above = bound()
            leaf.sub_(2 * step * direction)
            below = bound()
            leaf.add_(step * direction)
        difference = (above - below) / (2 * step)
        assert difference.item() == pytest.approx((slope * direction).sum().item(), rel=2e-6, abs=2e-6)
        assert difference.abs() > 1e-4  # or the comparison says nothing


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"likelihood": "poisson"}, "likelihood must be one of 'classification', 'regression', got 'poisson'"),
        ({"features": torch.ones(7, 5).double()[0]}, "features must be"),
        ({"features": torch.ones(0, 5).double()}, "not empty"),
        ({"features": torch.ones(7, 4).double()}, r"features must have shape \(..., 5\)"),
        ({"y": torch.zeros(7).double()}, "y must be classes"),
        ({"y": torch.zeros(6, dtype=torch.int64)}, r"y must be classes \(7,\)"),
        ({"y": torch.full((7,), 2)}, "from 0 to 1, got 2 to 2"),
        ({"y": torch.full((7,), -1)}, "from 0 to 1, got -1"),
        ({"likelihood": "regression", "y": torch.zeros(7, 1).double()}, r"y must be targets \(7, 2\)"),
        ({"likelihood": "regression", "y": torch.zeros(7, 2)}, "torch.float64, got"),
        ({"n_data": 0}, "n_data must be a positive integer, got 0"),
        ({"n_samples": 1.5}, "n_samples must be a positive integer, got 1.5"),
        (
            {"likelihood": "regression", "y": torch.zeros(7, 2).double(), "sigma_noise": -1.0},
            "sigma_noise must be positive",
        ),
        ({"unbiased": True}, "unbiased=True needs likelihood='regression'"),
        ({"unbiased": True, "likelihood": "regression", "y": torch.zeros(7, 2).double()}, "features by copy"),
    ],
)
def test_what_does_not_fit_is_refused(change, words):
    layer, features, _ = problem()
    arguments = {"features": features.mean(1), "y": torch.zeros(7, dtype=torch.int64)} | change
    with pytest.raises(ValueError, match=words):
        multisample_elbo(layer, **arguments)


@pytest.mark.parametrize("q", ["full", "diag"])
def test_under_autocast_it_is_in_single_precision(q):
    layer, features, y = BayesianLinear(5, 2, q), torch.randn(7, 5), torch.randn(7, 2)
    with torch.no_grad():
        layer.mean.add_(torch.randn(2, 5))
    exact = multisample_elbo(layer, features, y, "regression", sigma_noise=NOISE)
    with torch.autocast("cpu", torch.bfloat16):
        found = multisample_elbo(layer, features, y, "regression", sigma_noise=NOISE)
        assert layer(features).dtype == torch.float32
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-6)


def test_noise_is_one_number():
    layer, features, y = problem()
    one = multisample_elbo(layer, features, y, "regression", sigma_noise=NOISE)
    torch.testing.assert_close(
        multisample_elbo(layer, features, y, "regression", sigma_noise=torch.tensor([NOISE])), one
    )
    with pytest.raises(ValueError, match=r"sigma_noise must be one number, got shape \(7, 1\)"):
        multisample_elbo(layer, features, y, "regression", sigma_noise=torch.full((7, 1), NOISE))


@pytest.mark.parametrize("sampling", ["grid", "sobol"])
def test_the_unbiased_square_needs_independent_copies(sampling):
    model = ShallowNetwork(
        smooth_bank(4, AffineAugment(4, "rotation", 0.5, sampling, **DOUBLE), 9),
        BayesianLinear(4, 2, **DOUBLE),
        "regression",
    )
    x, y = smooth_images(3, 1, 9, 9), torch.randn(3, 2, **DOUBLE)
    with pytest.raises(ValueError, match=f"drawn independently .* got '{sampling}'"):
        model.elbo(x, y, unbiased=True)
    assert model.elbo(x, y).isfinite()
    model.features.augment.sampling = "shared"
    assert model.elbo(x, y, unbiased=True).isfinite()
