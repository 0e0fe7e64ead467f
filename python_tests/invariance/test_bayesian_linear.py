"""A linear layer with a Gaussian posterior: divergence, moments, the best q, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

from ella_cuda.invariance import BayesianLinear
from python_tests.augment.augments import DOUBLE


def layer_of(q: str, d: int = 4, k: int = 3) -> BayesianLinear:
    """With a q in general position, above the diagonal too, where L has nothing."""
    layer = BayesianLinear(d, k, q, prior_precision=0.7, **DOUBLE)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return layer


def posteriors(layer: BayesianLinear) -> list[MultivariateNormal]:
    if layer.q == "diag":
        return [
            MultivariateNormal(m, torch.diag((2 * s).exp())) for m, s in zip(layer.mean, layer.log_scale, strict=True)
        ]
    lower = [torch.tril(below, -1) + torch.diag(s.exp()) for below, s in zip(layer.lower, layer.log_scale, strict=True)]
    return [MultivariateNormal(m, scale_tril=L) for m, L in zip(layer.mean, lower, strict=True)]


@pytest.mark.parametrize("q", ["full", "diag"])
def test_the_divergence_is_torchs(q):
    layer = layer_of(q)
    prior = MultivariateNormal(torch.zeros(4, **DOUBLE), torch.eye(4, **DOUBLE) / layer.prior_precision)
    expected = sum(kl_divergence(one, prior) for one in posteriors(layer))
    torch.testing.assert_close(layer.kl(), expected, rtol=1e-12, atol=1e-12)
    leaves = list(layer.parameters())
    mine, theirs = (torch.autograd.grad(value, leaves, retain_graph=True) for value in (layer.kl(), expected))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("q", ["full", "diag"])
def test_moments_are_those_of_q(q):
    layer, features = layer_of(q), torch.randn(5, 4, **DOUBLE)
    mean, variance = layer.moments(features)
    for k, one in enumerate(posteriors(layer)):
        torch.testing.assert_close(mean[:, k], features @ one.mean)
        torch.testing.assert_close(variance[:, k], ((features @ one.covariance_matrix) * features).sum(1))
    torch.testing.assert_close(layer(features), mean)
    torch.testing.assert_close(layer.moments(features.expand(2, 5, 4))[1], variance.expand(2, 5, 3))
    torch.testing.assert_close(
        layer.scale_tril @ layer.scale_tril.mT, torch.stack([one.covariance_matrix for one in posteriors(layer)])
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 2), "in_features must be a positive integer, got 0"),
        ((2, True), "out_features must be a positive integer"),
        ((2, 2, "low-rank"), "q must be one of 'full', 'diag', got 'low-rank'"),
    ],
)
def test_wrong_arguments_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        BayesianLinear(*arguments)


def test_wrong_precisions_and_features_are_refused():
    with pytest.raises(ValueError, match="prior_precision must be positive and finite, got 0"):
        BayesianLinear(2, 2, prior_precision=0)
    layer = BayesianLinear(2, 3)
    for features, words in (
        (torch.ones(4, 3), r"must have shape \(..., 2\), got \(4, 3\)"),
        (torch.ones(4, 2).double(), "torch.float64"),
    ):
        for call in (layer, layer.moments, layer.scaled):
            with pytest.raises(ValueError, match=words):
                call(features)
