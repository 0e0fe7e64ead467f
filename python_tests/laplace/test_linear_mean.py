"""Predictions whose mean is the linearised network's at its mode."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call, jvp

from ella_cuda.laplace import FullLaplace, KronLaplace
from ella_cuda.laplace.likelihoods import LINKS
from python_tests.laplace.checks import Function


def problem(likelihood):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 2, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (12,), generator=generator)
    y = y if likelihood == "classification" else torch.randn(12, 3, generator=generator, dtype=torch.float64)
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3)).double(), x, y


def outputs_at(model, theta, x, form):
    """Of the linearised network, by torch.func."""
    point = {name: p.detach() for name, p in model.named_parameters()}
    parts = dict(zip(point, theta.split([p.numel() for p in point.values()]), strict=True))
    there = {name: parts[name].view_as(p) - (p if form == "full" else 0) for name, p in point.items()}
    f, along = jvp(lambda p: functional_call(model, p, (x,)), (point,), (there,))
    return f + along if form == "full" else along


@pytest.mark.parametrize("form", ["full", "simple"])
@pytest.mark.parametrize("kind", [KronLaplace, FullLaplace])
def test_a_regression_has_the_linear_networks_mean_and_the_same_variances(kind, form):
    model, x, y = problem("regression")
    la = kind(model, "regression", sigma_noise=0.5).fit([(x, y)])
    theta = la.fit_linear_mode([(x, y)], 1e-10, form=form)
    expected = outputs_at(model, theta, x, form)
    assert (expected - model(x)).abs().max() > 0.1
    for how in ({}, {"diagonal_output": True}, {"joint": True}):
        mean, covariance = la(x, mean="linear", **how)
        torch.testing.assert_close(mean.view(12, 3), expected.detach())
        torch.testing.assert_close(covariance, la(x, **how)[1])
    mean, _ = la(x, link_approx="mc", mean="linear", n_samples=5)  # of a regression no link
    torch.testing.assert_close(mean, expected.detach())


@pytest.mark.parametrize("link", ["probit", "probit_full", "mc"])
def test_class_probabilities_are_those_of_the_linear_networks_logits(link):
    model, x, y = problem("classification")
    la = KronLaplace(model, prior_precision=1e8).fit([(x, y)])
    la.prior_precision = 0.3
    theta = la.fit_linear_mode([(x, y)], 1e-10)
    la.prior_precision = 1e8  # no variance is left
    expected = outputs_at(model, theta, x, "full").softmax(1).detach()
    assert (expected - model(x).softmax(1)).abs().max() > 0.1
    torch.testing.assert_close(la(x, link_approx=link, mean="linear"), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("form", ["full", "simple"])
def test_a_masked_class_leaves_mode_evidence_and_predictions(form):
    """They are those of the network without the class, which is at minus infinity, by every link."""
    model, x, y = problem("classification")
    behind = Function(lambda m, x: nn.functional.pad(m.net(x), (0, 1), value=-torch.inf), net=model)
    without, masked = KronLaplace(model).fit([(x, y)]), KronLaplace(behind).fit([(x, y)])
    torch.testing.assert_close(
        masked.fit_linear_mode([(x, y)], 1e-10, form=form), without.fit_linear_mode([(x, y)], 1e-10, form=form)
    )
    for at in ("network", "linear"):
        torch.testing.assert_close(masked.log_marginal_likelihood(at=at), without.log_marginal_likelihood(at=at))
        for link in LINKS:
            how = {"link_approx": link, "mean": at, "n_samples": 3}
            found, expected = (la(x, **how, generator=torch.Generator().manual_seed(0)) for la in (masked, without))
            torch.testing.assert_close(found[:, :3], expected)
            assert (found[:, 3] == 0).all()


def test_what_has_no_linear_mean_is_refused():
    model, x, y = problem("classification")
    la = KronLaplace(model).fit([(x, y)])
    with pytest.raises(RuntimeError, match="call fit_linear_mode"):
        la(x, mean="linear")
    with pytest.raises(ValueError, match="mean must be one of"):
        la(x, mean="mode")
    la.fit_linear_mode([(x, y)], 1e-2)
    with pytest.raises(ValueError, match="pred_type='glm'"):
        la(x, pred_type="nn", link_approx="mc", mean="linear")
