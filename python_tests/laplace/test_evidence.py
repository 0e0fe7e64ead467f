"""The evidence and its derivatives, against closed forms and dense matrices."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ella_cuda.laplace import KronLaplace
from ella_cuda.laplace.evidence import evidence_at
from ella_cuda.nn import FactoredLinear2d, RelaxedEquivariance
from python_tests.laplace.checks import Function


@pytest.fixture
def fitted():
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.Tanh(), FactoredLinear2d(3, 2, 2, 2), nn.Flatten(), nn.Linear(8, 3)
    ).double()
    return KronLaplace(model).fit([(torch.randn(6, 2, 4, 4, dtype=torch.float64), torch.randint(3, (6,)))])


def bayesian_linear_regression(x, y, delta, sigma):
    """log N(y | 0, sigma^2 I + X X^T / delta), summed over outputs."""
    covariance = sigma**2 * torch.eye(len(x), dtype=x.dtype) + x @ x.T / delta
    normal = torch.distributions.MultivariateNormal(torch.zeros(len(x), dtype=x.dtype), covariance)
    return normal.log_prob(y.T).sum()


@pytest.mark.parametrize(("n", "features", "outputs"), [(9, 4, 1), (9, 4, 3), (3, 5, 2)])
def test_bayesian_linear_regression(n, features, outputs):
    x, y = torch.randn(n, features, dtype=torch.float64), torch.randn(n, outputs, dtype=torch.float64)
    delta = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    sigma = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    model = nn.Linear(features, outputs, bias=False).double()
    identity = torch.eye(features, dtype=torch.float64)
    with torch.no_grad():  # the MAP
        model.weight.copy_(torch.linalg.solve(x.T @ x + delta * sigma**2 * identity, x.T @ y).T)
    la = KronLaplace(model, "regression", prior_precision=0.7, sigma_noise=1.3).fit(
        zip(x.split(2), y.split(2), strict=True)
    )
    expected = bayesian_linear_regression(x, y, delta, sigma)
    actual = la.log_marginal_likelihood(delta, sigma)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(la.log_marginal_likelihood(), expected.detach(), rtol=1e-12, atol=0)
    # At the MAP the derivative through theta vanishes, so the derivatives agree too.
    for a, e in zip(*(torch.autograd.grad(v, (delta, sigma)) for v in (actual, expected)), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-12)


def test_evidence_at_logarithms_is_the_same_function(fitted):
    log_precision = torch.randn(len(fitted.parameter_names), dtype=torch.float64, requires_grad=True)
    expected = fitted.log_marginal_likelihood(log_precision.exp())
    found = evidence_at(fitted, log_precision)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(
        *(torch.autograd.grad(v, log_precision)[0] for v in (found, expected)), rtol=1e-11, atol=0
    )
    x, y = torch.randn(7, 3, dtype=torch.float64), torch.randn(7, 2, dtype=torch.float64)
    la = KronLaplace(nn.Linear(3, 2).double(), "regression", prior_precision=0.8, sigma_noise=0.5).fit([(x, y)])
    logs = torch.tensor([0.3, -0.4], dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64)
    logs = tuple(t.requires_grad_() for t in logs)
    expected = la.log_marginal_likelihood(*(t.exp() for t in logs))
    found = evidence_at(la, *logs)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    for a, e in zip(*(torch.autograd.grad(v, logs) for v in (found, expected)), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-11, atol=0)
    la.sigma_noise = 0.5
    torch.testing.assert_close(evidence_at(la, logs[0]), la.log_marginal_likelihood(logs[0].exp(), 0.5))


def test_more_data_changes_the_packed_eigenvalues(fitted):
    precision = 0.3
    before = fitted.log_det_ratio.item(), fitted.effective_parameters()
    data = [(torch.randn(4, 2, 4, 4, dtype=torch.float64), torch.randint(3, (4,)))]
    fitted.fit(data, override=False)
    blocks = [torch.block_diag(*f.to_dense()) for f in fitted.factors.values()]
    expected = sum(torch.logdet(torch.eye(len(b), dtype=b.dtype) + b / precision) for b in blocks)
    fitted.prior_precision = precision
    torch.testing.assert_close(fitted.log_det_ratio, expected, rtol=1e-11, atol=0)
    fitted.prior_precision = 1.0
    assert fitted.log_det_ratio.item() != before[0] and fitted.effective_parameters() != before[1]


def test_evidence_read_in_inference_mode_leaves_later_gradients_alone(fitted):
    with torch.inference_mode():
        read = fitted.log_marginal_likelihood().item(), fitted.effective_parameters()
    assert read == (fitted.log_marginal_likelihood().item(), fitted.effective_parameters())
    precision = fitted.prior_precision.clone().requires_grad_()
    (slope,) = torch.autograd.grad(fitted.log_marginal_likelihood(precision), precision)
    norms = torch.stack([p.detach().square().sum() for p in fitted.model.parameters()])
    gamma = torch.tensor(list(read[1].values()), dtype=torch.float64)
    torch.testing.assert_close(slope, 0.5 * (gamma - norms), rtol=1e-10, atol=1e-12)


def test_a_module_put_in_before_the_fit_is_differentiated_in():
    x, y = torch.randn(6, 2, dtype=torch.float64), torch.randint(3, (6,))
    model = nn.Sequential(nn.Identity(), nn.Linear(2, 3).double())
    la = KronLaplace(model)
    model[0] = Function(lambda m, x: x * m.temperature, temperature=nn.Buffer(torch.ones(()).double()))
    temperature = model[0].temperature.requires_grad_()
    la.fit([(x, y)])
    (found,) = torch.autograd.grad(la.log_marginal_likelihood(), temperature)
    expected = torch.autograd.grad(-nn.functional.cross_entropy(model(x), y, reduction="sum"), temperature)[0]
    torch.testing.assert_close(found, expected)


def test_gradient_in_the_log_precisions_is_the_published_formula(fitted):
    log_precision = torch.randn(len(fitted.parameter_names), dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(fitted.log_marginal_likelihood(log_precision.exp()), log_precision)
    for (name, factor), d, actual in zip(fitted.factors.items(), log_precision.detach().exp(), gradient, strict=True):
        theta = fitted.model.get_parameter(name).detach()
        eigenvalues = torch.linalg.eigvalsh(factor.to_dense())
        expected = -0.5 * (d * theta.square().sum() + (d / (eigenvalues + d)).sum() - theta.numel())
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


def test_sigma_scales_the_curvature():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    la = KronLaplace(model, "regression").fit([(x, y)])
    sigma = torch.tensor(0.6, dtype=torch.float64, requires_grad=True)
    expected = torch.distributions.Normal(model(x).detach(), 0.6).log_prob(y).sum()
    for name, factor in la.factors.items():
        theta, dense = model.get_parameter(name).detach(), factor.to_dense()[0] / 0.6**2
        log_det = torch.logdet(dense + 2 * torch.eye(len(dense), dtype=torch.float64))
        expected = expected - 0.5 * (2 * theta.square().sum() + log_det - theta.numel() * math.log(2))
    torch.testing.assert_close(la.log_marginal_likelihood(2.0, sigma), expected, rtol=1e-12, atol=0)
    assert torch.autograd.gradcheck(lambda s: la.log_marginal_likelihood(2.0, s), sigma)
    gammas = KronLaplace(model, "regression", prior_precision=2.0, sigma_noise=0.6).fit([(x, y)]).effective_parameters()
    for name, factor in la.factors.items():
        eigenvalues = torch.linalg.eigvalsh(factor.to_dense()) / 0.6**2
        assert gammas[name] == pytest.approx((eigenvalues / (eigenvalues + 2)).sum().item(), rel=1e-9)


def test_scalar_and_vector_precisions_agree_and_float32_is_accepted(fitted):
    count = len(fitted.parameter_names)
    expected = fitted.log_marginal_likelihood(0.3)
    single = torch.full((count,), 0.3, requires_grad=True)
    actual = fitted.log_marginal_likelihood(single)
    assert actual.dtype == torch.float64 and actual.shape == ()
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
    actual.backward()
    assert single.grad.dtype == torch.float32 and single.grad.isfinite().all()
    torch.testing.assert_close(fitted.log_marginal_likelihood(torch.tensor([0.3], dtype=torch.float64)), expected)
    assert (fitted.prior_precision == 0.3).all() and not fitted.prior_precision.requires_grad  # as laplace-torch's
    fitted.prior_precision = 1.0


def test_effective_parameters_are_the_eigenvalue_sum(fitted):
    precision = torch.logspace(-3, 3, len(fitted.parameter_names), dtype=torch.float64)
    fitted.prior_precision = precision
    gammas = fitted.effective_parameters()
    assert list(gammas) == fitted.parameter_names
    for (name, factor), d in zip(fitted.factors.items(), precision, strict=True):
        eigenvalues = torch.linalg.eigvalsh(factor.to_dense())
        assert gammas[name] == pytest.approx((eigenvalues / (eigenvalues + d)).sum().item(), rel=1e-8, abs=1e-12)
        assert 0 <= gammas[name] <= fitted.model.get_parameter(name).numel()


def test_a_type_needs_one_effective_parameter_in_all():
    """However the paths share what is left of a layer: below one in all it has no type."""
    paths = {"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)}
    model = nn.Sequential(RelaxedEquivariance(paths), nn.Linear(3, 3)).double()
    la = KronLaplace(model).fit([(torch.randn(40, 3, dtype=torch.float64), torch.randint(3, (40,)))])
    names = la.parameter_names

    def precisions(of_a: float, of_b: float) -> torch.Tensor:
        return torch.tensor([{"0.a.weight": of_a, "0.b.weight": of_b}.get(n, 1.0) for n in names])

    def sums() -> list[float]:
        return [la.effective_parameters()[f"0.{path}.weight"] for path in "ab"]

    of_a = 1.0
    la.prior_precision = precisions(of_a, 1e12)  # b off, a above one
    assert sums()[0] > 1 > 1e-6 > sums()[1] and la.layer_types() == {"0": "a"}
    while sums()[0] >= 1:
        of_a *= 1.1
        la.prior_precision = precisions(of_a, 1e12)
    assert sums()[0] > 0.8 and la.layer_types() == {"0": "none"}
    la.prior_precision = precisions(of_a, of_a / 1.01)
    assert sums()[0] < sums()[1] and sum(sums()) > 1 and la.layer_types() == {"0": "b"}  # the sum counts, not each
