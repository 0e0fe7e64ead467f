"""Likelihoods of a user's own that contradict their log_prob, and honest ones, which pass."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ella_cuda import marglik_training
from ella_cuda.laplace import IndependentLikelihood, KronLaplace, Likelihood, register_likelihood
from ella_cuda.laplace.check_extensions import check_likelihood
from ella_cuda.laplace.likelihoods import LIKELIHOODS, Classification, Heteroscedastic


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    monkeypatch.setattr("ella_cuda.laplace.likelihoods.LIKELIHOODS", dict(LIKELIHOODS))


class Exponential(IndependentLikelihood):
    """Waiting times; outputs are log rates."""

    def log_prob(self, outputs, targets):
        return outputs - outputs.exp() * targets

    def second_derivative(self, outputs, targets):
        return outputs.exp() * targets


class StudentT(IndependentLikelihood):
    """Whose second derivative is negative far from the target."""

    def log_prob(self, outputs, targets):
        return -2 * torch.log1p((outputs - targets).square() / 3)

    def second_derivative(self, outputs, targets):
        square = (outputs - targets).square()
        return (4 * (3 - square) / (3 + square).square()).clamp(min=0)


class Softmax(Likelihood):
    """Of one target of K; columns in the outputs' dtype."""

    def check(self, outputs, targets):
        pass

    def log_prob(self, outputs, targets):
        return outputs.log_softmax(1).gather(1, targets.long()[:, :1])

    def columns(self, outputs, targets, tolerance=0.0):
        p = outputs.softmax(1)
        root = torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None]
        return root.movedim(2, 0)


class Noisy(IndependentLikelihood):
    """A normal of its own; loss and log_likelihood at sigma."""

    has_noise = True

    def log_prob(self, outputs, targets):
        return -0.5 * (outputs - targets).square()

    def log_likelihood(self, statistic, count, sigma_noise):
        return statistic / sigma_noise**2 - count * (sigma_noise.log() + 0.5 * math.log(2 * math.pi))

    def second_derivative(self, outputs, targets):
        return torch.ones_like(outputs)


class NoSecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0].exp()


class Once(Exponential):
    """By a function that torch differentiates once."""

    def log_prob(self, outputs, targets):
        return outputs - NoSecondDerivative.apply(outputs) * targets


class Missing(IndependentLikelihood):
    """Targets of nan are not there."""

    def check(self, outputs, targets):
        pass

    def log_prob(self, outputs, targets):
        there = ~targets.isnan()
        return -0.5 * there * (outputs - targets.masked_fill(~there, 0)).square()

    def second_derivative(self, outputs, targets):
        return (~targets.isnan()).to(outputs)


class Huber(IndependentLikelihood):
    """By a function of torch whose gradient takes no two dtypes."""

    def log_prob(self, outputs, targets):
        return -F.huber_loss(outputs, targets, reduction="none")

    def second_derivative(self, outputs, targets):
        return ((outputs - targets).abs() <= 1).to(outputs)


class OwnPairs(Heteroscedastic):
    def loss(self, outputs, targets, variance):
        return -self.log_prob(outputs, targets).sum() / len(targets)


class Negative(nn.Module):
    def forward(self, x):
        return torch.cat([x[:, :1], -0.5 * F.softplus(x[:, 1:]) - 1e-6], 1)


def fit(kind: type[Likelihood], count: int = 5, outputs: int = 2, dtype=torch.float64):
    torch.manual_seed(0)
    register_likelihood(f"mine{id(kind)}")(kind)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).to(dtype)
    x, y = torch.randn(count, 3, dtype=dtype), torch.rand(count, outputs, dtype=dtype)
    if issubclass(kind, StudentT):
        y[::2] += 9
    if kind is Missing:
        y[::2, 0] = torch.nan
    if issubclass(kind, Heteroscedastic):
        model, y = nn.Sequential(model, Negative()), y[:, :1]
    return KronLaplace(model, kind()).fit([(x, y)])


HONEST = [Exponential, StudentT, Softmax, Noisy, Once, Missing, Huber, OwnPairs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("kind", HONEST)
def test_honest_likelihoods_pass(kind, count, dtype):
    assert fit(kind, count, dtype=dtype).log_marginal_likelihood().isfinite()


@pytest.mark.parametrize("kind", [Exponential, Softmax])
def test_many_outputs_are_compared_in_part(kind):
    assert fit(kind, 5, 300, torch.float32).log_marginal_likelihood().isfinite()
    wrong = of(kind, **{"second_derivative" if kind is Exponential else "columns": doubled(kind)})
    with pytest.raises(ValueError, match=r"is not the Hessian of -log_prob"):
        fit(wrong, 5, 300, torch.float32)


def test_entries_are_chosen_whatever_the_default_device():
    f, y = torch.randn(3, 300), torch.rand(3, 300)
    torch.set_default_device("meta")
    try:
        check_likelihood(Exponential(), f, y)
    finally:
        torch.set_default_device(None)


def of(base: type[Likelihood], **methods):
    return type("Wrong", (base,), methods)


def doubled(kind):
    if kind is Exponential:
        return lambda self, f, y: 2 * Exponential.second_derivative(self, f, y)
    return lambda self, f, y, tolerance=0.0: 2**0.5 * Softmax.columns(self, f, y)


def in_place(self, outputs, targets):
    return outputs.exp_().mul_(targets)


HESSIAN = r"is not the Hessian of -log_prob"
WRONG = {
    "twice the second derivative": (of(Exponential, second_derivative=doubled(Exponential)), "second_derivative", HESSIAN),
    "sign of the second derivative": (of(Exponential, second_derivative=lambda self, f, y: -f.exp() * y), "second_derivative", HESSIAN),
    "sign of log_prob": (of(Exponential, log_prob=lambda self, f, y: f.exp() * y - f), "second_derivative", HESSIAN),
    "mean over data": (
        of(Exponential, log_prob=lambda self, f, y: Exponential.log_prob(self, f, y).mean(0)),
        "log_prob",
        "its sum over data points",
    ),
    "mean over outputs": (
        of(Exponential, log_prob=lambda self, f, y: Exponential.log_prob(self, f, y).mean(1)),
        "second_derivative",
        HESSIAN,
    ),
    "Fisher of a Student's t": (of(StudentT, second_derivative=lambda self, f, y: torch.full_like(f, 4 / 6)), "second_derivative", HESSIAN),
    "coupled outputs": (
        of(Noisy, log_prob=lambda self, f, y: -0.5 * ((f - y).square() + (f - y).flip(1) * (f - y))),
        "second_derivative",
        HESSIAN,
    ),
    "second derivative in place": (of(Exponential, second_derivative=in_place), "second_derivative", "in place"),
    "targets in place": (of(Exponential, log_prob=lambda self, f, y: Exponential.log_prob(self, f, y.add_(1))), "log_prob", "in place"),
    "shape of the second derivative": (
        of(Exponential, second_derivative=lambda self, f, y: (f.exp() * y).sum(1)),
        "second_derivative",
        r"expected the outputs' shape \(3, 2\), got \(3,\)",
    ),
    "no gradient": (of(Exponential, log_prob=lambda self, f, y: Exponential.log_prob(self, f.detach(), y)), "log_prob", "no gradient"),
    "infinite gradient": (
        of(Exponential, log_prob=lambda self, f, y: Exponential.log_prob(self, f, y) + (f - f.detach()).abs().sqrt()),
        "log_prob",
        "gradient in the outputs is not finite",
    ),
    "columns doubled": (of(Softmax, columns=doubled(Softmax)), "columns", HESSIAN),
    "columns of another shape": (
        of(Softmax, columns=lambda self, f, y, tolerance=0.0: Softmax.columns(self, f, y).sum(2)),
        "columns",
        r"expected \(columns, \(3, 2\)\), got",
    ),
    "sum for the loss": (
        of(Exponential, loss=lambda self, f, y, variance: -self.log_prob(f, y).sum()),
        "loss",
        "mean of -log_prob over the data points",
    ),
    "loss without sigma": (of(Noisy, loss=lambda self, f, y, variance: -self.log_prob(f, y).sum() / len(y)), "loss", r"over sigma\^2 = 2"),
    "likelihood without sigma": (
        of(Noisy, log_likelihood=lambda self, statistic, count, sigma: statistic),
        "log_likelihood",
        r"over sigma\^2 = 2",
    ),
    "another statistic": (of(Exponential, statistic=lambda self, f, y: 2 * self.log_prob(f, y).sum()), "log_likelihood", "log_prob"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_likelihoods_that_contradict_their_log_prob_are_refused(name):
    kind, method, words = WRONG[name]
    with pytest.raises(ValueError, match=rf"Wrong\.{method} of the likelihood .*first batch: .*({words})"):
        fit(kind)


def test_training_refuses_them_too():
    wrong = register_likelihood("twice")(WRONG["twice the second derivative"][0])
    loader = [(torch.randn(4, 3), torch.rand(4, 2))]
    with pytest.raises(ValueError, match=HESSIAN):
        marglik_training(nn.Linear(3, 2), loader, wrong(), n_epochs=1, progress_bar=False)


def test_the_loss_of_a_likelihood_with_noise_is_over_its_variance():
    f, y = torch.randn(5, 2, requires_grad=True), torch.randn(5, 2)
    (found,) = torch.autograd.grad(Noisy().loss(f, y, torch.tensor(4.0)), f)
    torch.testing.assert_close(found, (f - y).detach() / (5 * 4.0))


def test_the_packages_own_likelihoods_are_not_run_twice(monkeypatch):
    calls = []
    log_prob = Classification.log_prob
    monkeypatch.setattr(Classification, "log_prob", lambda self, f, y: (calls.append(1), log_prob(self, f, y))[1])
    KronLaplace(nn.Linear(3, 3)).fit([(torch.randn(4, 3), torch.tensor([0, 1, 2, 0]))])
    assert len(calls) == 1
