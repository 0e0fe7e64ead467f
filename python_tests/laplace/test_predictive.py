"""Predictions against dense algebra, sampling and laplace-torch."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ella_cuda.laplace import DiagLaplace, FullLaplace, KronLaplace, exact_log_marginal_likelihood
from ella_cuda.laplace.likelihoods import softmax_probabilities
from ella_cuda.laplace.posterior import Eigenbasis
from ella_cuda.laplace.predictive import _Moments, predictions_at
from python_tests.laplace.checks import Function, randomised
from python_tests.laplace.jacobians import NETWORKS, OwnTanh, dense_jacobians, network
from python_tests.ops.checks import Largest


def fitted(name: str, **how: object) -> tuple[KronLaplace, Tensor]:
    """To targets of a regression, with a precision of its own for every tensor."""
    model, x = network(name)
    generator = torch.Generator().manual_seed(5)
    y = torch.randn(model(x).shape, generator=generator, dtype=torch.float64)
    la = KronLaplace(model, "regression", unknown="diagonal", sigma_noise=0.7, **how).fit([(x, y)])
    la.prior_precision = torch.rand(len(la.parameter_names), generator=generator, dtype=torch.float64) + 0.3
    return la, x


def dense_posterior(la: KronLaplace) -> dict[str, Tensor]:
    """Of each parameter, the covariance of its blocks' elements, ``(G, a b, a b)``."""
    scale = 1 / (la.sigma_noise**2 * la.temperature)
    found = {}
    for (name, factor), delta in zip(la.factors.items(), la.prior_precision, strict=True):
        curvature = scale * factor.to_dense()
        found[name] = torch.linalg.inv(curvature + delta * torch.eye(curvature.shape[1], dtype=torch.float64))
    return found


def dense_covariance(la: KronLaplace, x: Tensor) -> Tensor:
    """``(N K, N K)``."""
    posterior = dense_posterior(la)
    total = torch.zeros((), dtype=torch.float64)
    for name, jacobian in dense_jacobians(la.model, x).items():
        blocks = la.factors[name].shape.to_blocks(jacobian.flatten(0, 1), 1).flatten(2)  # (N K, G, a b)
        total = total + torch.einsum("pgi,gij,qgj->pq", blocks, posterior[name], blocks)
    return total


def blocks_of(covariance: Tensor, n: int) -> Tensor:
    """Of each of n data points, ``(N, K, K)``."""
    return covariance.unflatten(1, (n, -1)).unflatten(0, (n, -1)).diagonal(dim1=0, dim2=2).movedim(2, 0)


@pytest.mark.parametrize("name", NETWORKS)
def test_covariances_are_dense_algebras(name: str) -> None:
    la, x = fitted(name)
    covariance = dense_covariance(la, x)
    blocks = blocks_of(covariance, len(x))
    torch.testing.assert_close(la.functional_variance(x), blocks, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(la.functional_covariance(x), covariance, rtol=1e-10, atol=1e-12)
    mean, variance = la(x, diagonal_output=True)
    torch.testing.assert_close(mean, la.model(x))
    torch.testing.assert_close(variance.flatten(1), blocks.diagonal(dim1=1, dim2=2), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["conv", "our conv", "factored", "attention", "tied"])
@pytest.mark.parametrize(
    "how", [{"resolution": "per_channel"}, {"approximation": "reduce"}, {"temperature": 0.3}, {"memory_budget": 1}], ids=str
)  # fmt: skip
def test_settings_change_the_posterior_not_the_algebra(name: str, how: dict[str, object]) -> None:
    la, x = fitted(name, **how)
    blocks = blocks_of(dense_covariance(la, x), len(x))
    torch.testing.assert_close(la.functional_variance(x), blocks, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["conv", "bags", "distances"])
def test_variances_of_some_columns_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    la, x = fitted(name)
    variance = dense_covariance(la, x).diagonal().view(len(x), -1)
    sizes, begin = set(), _Moments.begin

    def noted(self: _Moments, outputs: Tensor, which: slice, columns: slice) -> None:
        sizes.add((len(outputs), columns.stop - columns.start))
        begin(self, outputs, which, columns)

    monkeypatch.setattr(_Moments, "begin", noted)
    for power in range(20):
        la.memory_budget = 1 << power
        found = la(x, diagonal_output=True)[1].flatten(1)
        torch.testing.assert_close(found, variance, rtol=1e-10, atol=1e-12)
    outputs = variance.shape[1]
    assert {(1, 1), (len(x), outputs)} <= sizes and any(n > 1 and k < outputs for n, k in sizes)


def flat_jacobians(la: KronLaplace, x: Tensor) -> Tensor:
    """``(N, K, P)``."""
    found = dense_jacobians(la.model, x)
    return torch.cat([found[name].flatten(2) for name in la.parameter_names], 2)


@pytest.mark.parametrize("name", ["conv", "factored", "tied", "attention"])
def test_jacobians_may_be_given(name: str) -> None:
    la, x = fitted(name)
    jacobians, posterior = flat_jacobians(la, x), la.posterior_precision
    covariance = dense_covariance(la, x)
    torch.testing.assert_close(la.functional_variance(jacobians), la.functional_variance(x), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(la.functional_covariance(jacobians), covariance, rtol=1e-9, atol=1e-12)
    inverse = posterior.to_matrix(-1)
    rows = jacobians.flatten(0, 1)
    torch.testing.assert_close(rows @ inverse @ rows.T, covariance, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(posterior.diag(-1), inverse.diagonal(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(posterior.to_matrix() @ inverse, torch.eye(len(inverse), dtype=torch.float64))
    torch.testing.assert_close(posterior.logdet(), torch.logdet(posterior.to_matrix()), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(posterior.logdet(), la.log_det_posterior_precision, rtol=1e-10, atol=1e-9)
    half = posterior.bmm(posterior.bmm(rows, -0.5), -0.5)
    torch.testing.assert_close(half, rows @ inverse, rtol=1e-9, atol=1e-12)


def test_density_is_the_gaussians() -> None:
    la, _ = fitted("conv")
    values = la.mean + 0.1 * torch.randn(3, la.n_params, dtype=torch.float64)
    gaussian = torch.distributions.MultivariateNormal(la.mean, precision_matrix=la.posterior_precision.to_matrix())
    torch.testing.assert_close(la.log_prob(values), gaussian.log_prob(values), rtol=1e-9, atol=1e-8)
    peak = la.log_prob(la.mean)
    torch.testing.assert_close(la.log_prob(values, normalized=False) + peak, la.log_prob(values), rtol=1e-9, atol=1e-8)
    torch.testing.assert_close(la.square_norm(values), -2 * la.log_prob(values, normalized=False))


def assert_covariance(samples: Tensor, covariance: Tensor) -> None:
    """Samples ``(S, d)`` are of a Gaussian with this covariance: once whitened, entries of their covariance are independent."""
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), samples.T, upper=False)
    unit = torch.eye(len(white), dtype=torch.float64)
    z = (white @ white.T / len(samples) - unit) * (len(samples) / (1 + unit)).sqrt()
    upper = z[torch.ones_like(z).triu() > 0]
    assert upper.abs().max() < 5
    assert abs(upper.square().mean() - 1) < 5 * (2 / len(upper)) ** 0.5


@pytest.mark.parametrize("name", ["linear", "our conv", "tied", "attention", "bags"])
def test_samples_have_the_covariance(name: str) -> None:
    la, x = fitted(name)
    generator = torch.Generator().manual_seed(0)
    functions = la.functional_samples(x, n_samples=4000, generator=generator).flatten(1) - la.model(x).flatten()
    covariance = dense_covariance(la, x)
    assert_covariance(functions.detach(), covariance)
    draws = la.sample(4000, generator) - la.mean
    some = torch.randperm(la.n_params, generator=generator)[:40]
    assert_covariance(draws[:, some], la.posterior_precision.to_matrix(-1)[some][:, some])


class Once(OwnTanh):
    """With a gradient that has no derivative either."""

    class _Function(OwnTanh._Function):
        backward = staticmethod(torch.autograd.function.once_differentiable(OwnTanh._Function.backward))


def products(_: nn.Module, h: Tensor) -> Tensor:
    """By index, whose forward mode is wrong in torch."""
    at = torch.tensor([0, 1, 2, 2]).expand(len(h), -1)
    return h.new_ones(len(h), 4).scatter_reduce(1, at, h, "prod")


@pytest.mark.filterwarnings("ignore:fit")
@pytest.mark.parametrize("function", [OwnTanh, lambda: Function(products)], ids=["none", "wrong"])
def test_samples_of_functions_without_a_right_forward_mode(function: Callable[[], nn.Module]) -> None:
    model = randomised(nn.Sequential(nn.Linear(3, 4), function(), nn.Linear(4, 2)))
    x = torch.randn(4, 3, dtype=torch.float64)
    la = KronLaplace(model, "regression").fit([(x, torch.randn(4, 2, dtype=torch.float64))])
    found = la.functional_samples(x, n_samples=3, generator=torch.Generator().manual_seed(1))
    drawn = la.sample(3, torch.Generator().manual_seed(1)) - la.mean
    expected = model(x) + torch.einsum("nkp,sp->snk", flat_jacobians(la, x), drawn)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.filterwarnings("ignore:fit")
def test_samples_of_functions_that_are_differentiable_once_are_refused() -> None:
    model = randomised(nn.Sequential(nn.Linear(3, 4), Once(), nn.Linear(4, 2)))
    x = torch.randn(4, 3, dtype=torch.float64)
    la = KronLaplace(model, "regression").fit([(x, torch.randn(4, 2, dtype=torch.float64))])
    assert la.functional_variance(x).isfinite().all()
    with pytest.raises(NotImplementedError, match=r"layer '1' \(Once\)"):
        la.functional_samples(x, n_samples=3)


@pytest.mark.filterwarnings("ignore:fit")
@pytest.mark.parametrize("name", NETWORKS)
def test_samples_are_functions_that_data_points_share(name: str) -> None:
    la, x = fitted(name)
    whole = la.functional_samples(x, n_samples=3, generator=torch.Generator().manual_seed(1))
    parts = [
        la.functional_samples(part, n_samples=3, generator=torch.Generator().manual_seed(1)) for part in x.split(2)
    ]
    torch.testing.assert_close(whole, torch.cat(parts, 1))
    again = la.functional_samples(x, n_samples=3, generator=torch.Generator().manual_seed(2))
    assert not torch.allclose(whole, again)
    parameters = la.sample(3, torch.Generator().manual_seed(1))
    along = torch.einsum("nkp,sp->snk", flat_jacobians(la, x), parameters - la.mean)
    expected = la.model(x) + along.view(3, *la.model(x).shape)
    torch.testing.assert_close(whole, expected, rtol=1e-9, atol=1e-10)


def test_it_does_not_matter_how_many_samples_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    la, x = fitted("conv")
    whole = la.functional_samples(x, n_samples=5, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr("ella_cuda.laplace.predictive.SAMPLED", 1)
    apart = la.functional_samples(x, n_samples=5, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(apart, whole)


def test_samples_of_the_network_are_its_outputs_at_samples() -> None:
    la, x = fitted("conv")
    with pytest.warns(UserWarning, match="underfits"):
        samples = la.functional_samples(x, "nn", n_samples=2, generator=torch.Generator().manual_seed(1))
    before = la.mean
    for values, outputs in zip(la.sample(2, torch.Generator().manual_seed(1)), samples, strict=True):
        nn.utils.vector_to_parameters(values, la.model.parameters())
        torch.testing.assert_close(outputs, la.model(x))
    nn.utils.vector_to_parameters(before, la.model.parameters())


# classification -------------------------------------------------------------------------------------------------------


def classifier() -> tuple[KronLaplace, Tensor]:
    model = randomised(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)), 1.0)
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return KronLaplace(model, prior_precision=10.0).fit([(x, torch.arange(8) % 4)]), x


def test_sampled_probabilities_are_the_softmaxs_mean() -> None:
    la, x = classifier()
    mean, covariance = la.model(x), la.functional_variance(x)
    root = torch.linalg.cholesky(covariance)
    drawn = torch.randn(200_000, 1, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = torch.softmax(mean + (root @ drawn[..., None])[..., 0], 2).mean(0)
    sampled = la(x, link_approx="mc", n_samples=20_000, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(sampled, expected, rtol=0, atol=0.02)


def test_links_by_hand() -> None:
    la, x = classifier()
    mean, covariance = la.model(x), la.functional_variance(x)
    v = covariance.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(la(x), torch.softmax(mean / (1 + math.pi / 8 * v).sqrt(), 1))
    full = torch.zeros_like(mean)
    for n in range(8):
        for c in range(4):
            wide = 1 + math.pi / 8 * (v[n, c] + v[n] - 2 * covariance[n, c])
            full[n, c] = 1 / ((mean[n] - mean[n, c]) / wide.sqrt()).exp().sum()
    torch.testing.assert_close(la(x, link_approx="probit_full"), full / full.sum(1, keepdim=True))


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("link", ["probit", "bridge", "bridge_norm"])
def test_laplace_torch_predicts_the_same(link: str, diagonal: bool) -> None:
    laplace = pytest.importorskip("laplace")
    # Without biases, whose blocks differ, and a single position.
    model = randomised(nn.Sequential(nn.Linear(3, 5, bias=False), nn.Tanh(), nn.Linear(5, 4, bias=False)), 1.0)
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = torch.utils.data.TensorDataset(x, torch.arange(8) % 4)
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    ours = KronLaplace(model, prior_precision=0.7).fit(loader)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = laplace.KronLaplace(model, "classification", prior_precision=0.7)
        theirs.fit(loader)
        expected = theirs(x, link_approx=link, diagonal_output=diagonal).detach()
    torch.testing.assert_close(ours(x, link_approx=link, diagonal_output=diagonal), expected, rtol=1e-5, atol=1e-6)
    variance = theirs.functional_variance(theirs.backend.jacobians(x)[0]).detach()
    torch.testing.assert_close(ours.functional_variance(x), variance, rtol=1e-5, atol=1e-6)


def test_positions_have_predictions_of_their_own() -> None:
    model = randomised(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    x = torch.randn(6, 2, 4, dtype=torch.float64)
    la = KronLaplace(model).fit([(x, torch.randint(3, (6, 2)))])
    covariance, mean = la.functional_variance(x).view(6, 2, 3, 2, 3), model(x).detach()
    for t in range(2):
        for link in ("probit_full", "bridge"):
            expected = softmax_probabilities(link, mean[:, t], covariance[:, t, :, t])
            torch.testing.assert_close(la(x, link_approx=link)[:, t], expected)


def test_binary_and_counts() -> None:
    model = randomised(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    x = torch.randn(9, 3, dtype=torch.float64)
    la = KronLaplace(model, "binary").fit([(x, torch.arange(9.0)[:, None] % 2)])
    mean, variance = model(x), la.functional_variance(x)[:, :, 0]
    torch.testing.assert_close(la(x), torch.sigmoid(mean / (1 + math.pi / 8 * variance).sqrt()))
    sampled = la(x, link_approx="mc", n_samples=20_000, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(sampled, la(x), rtol=0, atol=0.02)
    with pytest.raises(ValueError, match="link_approx with likelihood='binary' must be one of"):
        la(x, link_approx="bridge")
    counts = KronLaplace(model, "poisson").fit([(x, torch.arange(9.0)[:, None])])
    torch.testing.assert_close(counts(x)[0], mean)
    generator = torch.Generator().manual_seed(0)
    rates = counts.predictive_samples(x, n_samples=5, generator=generator)
    torch.testing.assert_close(
        rates.log(), counts.functional_samples(x, n_samples=5, generator=torch.Generator().manual_seed(0))
    )


# arguments, state ------------------------------------------------------------------------------------------------------


class Named(nn.Module):
    """Takes two inputs by name, one of which is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, a: Tensor, b: Tensor, factor: float = 1.0) -> Tensor:
        return self.linear(torch.tanh(a) + b * factor)


def test_inputs_are_what_a_fit_takes() -> None:
    model = randomised(Named())
    a, b, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64), torch.arange(5) % 2
    la = KronLaplace(model).fit([((a, b), y)])
    expected = la((a, b), link_approx="probit_full")
    for x in ({"a": a, "b": b}, {"a": a, "b": b, "labels": y}, {"a": a, "b": b, "factor": 1.0}):
        torch.testing.assert_close(la(x, link_approx="probit_full"), expected)
    other = KronLaplace(randomised(nn.Linear(3, 2)), dict_key_x="x").fit([{"x": a, "labels": y}])
    torch.testing.assert_close(other({"x": a, "labels": y}), other(a))
    with pytest.raises(ValueError, match="must all have the batch"):
        la((a, b[:3]))
    with pytest.raises(TypeError, match="x must be a tensor"):
        la("images")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"pred_type": "gp"}, "pred_type must be one of 'glm', 'nn', got 'gp'"),
        ({"link_approx": "logit"}, "link_approx must be one of 'probit', 'probit_full', 'mc', 'bridge', 'bridge_norm'"),
        ({"pred_type": "nn"}, "link_approx must be 'mc' with pred_type='nn'"),
        ({"link_approx": "mc", "n_samples": 0}, "n_samples must be a positive integer, got 0"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(how: dict[str, object], words: str) -> None:
    la, x = classifier()
    with pytest.raises(ValueError, match=words):
        la(x, **how)


@pytest.mark.parametrize("wrong", [-1, 0, 1.5, True, None])
def test_numbers_of_samples_that_there_cannot_be(wrong: object) -> None:
    la, x = classifier()
    for draw in (
        lambda: la.sample(wrong),
        lambda: la.posterior_precision.sample(wrong),
        lambda: la.functional_samples(x, n_samples=wrong),
        lambda: la.functional_samples(x, n_samples=wrong, diagonal_output=True),
        lambda: la.predictive_samples(x, n_samples=wrong),
        lambda: la(x, link_approx="mc", n_samples=wrong),
    ):
        with pytest.raises(ValueError, match="n_samples must be a positive integer, got"):
            draw()


def test_joint_and_marginal_shapes() -> None:
    model = randomised(nn.Linear(3, 2))
    x = torch.randn(5, 3, dtype=torch.float64)
    la = KronLaplace(model, "regression").fit([(x, torch.randn(5, 2, dtype=torch.float64))])
    mean, covariance = la(x, joint=True)
    assert (mean.shape, covariance.shape) == ((10,), (10, 10))
    torch.testing.assert_close(covariance, la.functional_covariance(x))
    mean, covariance = la(x)
    assert (mean.shape, covariance.shape) == ((5, 2), (5, 2, 2))
    with pytest.warns(UserWarning, match="underfits"):
        mean, variance = la(x, "nn", link_approx="mc", n_samples=4000, generator=torch.Generator().manual_seed(0))
    # A linear model is its own linearisation.
    torch.testing.assert_close(mean, la.model(x), rtol=0, atol=0.1)
    torch.testing.assert_close(variance, la(x, diagonal_output=True)[1], rtol=0.2, atol=0.01)
    empty = la(x[:0])
    assert [part.shape for part in empty] == [(0, 2), (0, 2, 2)]


def test_a_generator_settles_what_is_drawn() -> None:
    la, x = classifier()

    def drawn(seed: int) -> Tensor:
        return la(x, link_approx="mc", n_samples=3, generator=torch.Generator().manual_seed(seed))

    before = torch.get_rng_state()
    assert torch.equal(drawn(0), drawn(0))
    assert not torch.equal(drawn(0), drawn(1))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(0)
    one = la.sample(2)
    torch.manual_seed(0)
    assert torch.equal(la.sample(2), one)


def test_predictions_leave_the_model_as_it_was() -> None:
    la, x = fitted("conv")
    model = la.model.train()
    state = {name: t.clone() for name, t in model.state_dict().items()}
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            mean, covariance = la(x)
            samples = la.functional_samples(x, n_samples=2)
        assert not mean.requires_grad and not covariance.requires_grad and not samples.requires_grad
    assert model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    la(x)  # buffers of the norms are those of the fit


def test_a_float32_network_has_float32_predictions_of_float64_accuracy() -> None:
    la, x = fitted("conv")
    expected = la.functional_variance(x)
    model = la.model.float()
    narrow = KronLaplace(model, "regression", sigma_noise=0.7, prior_precision=la.prior_precision)
    narrow.fit([(x.float(), la.model(x.float()).detach() * 0)])
    found = narrow.functional_variance(x.float())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(narrow.functional_variance(x.float()), found)


def test_the_prior_and_the_noise_are_read_at_every_call() -> None:
    la, x = fitted("linear")
    wide = la.functional_variance(x)
    la.prior_precision = la.prior_precision * 10
    assert (la.functional_variance(x).diagonal(dim1=1, dim2=2) < wide.diagonal(dim1=1, dim2=2)).all()
    torch.testing.assert_close(la.functional_covariance(x), dense_covariance(la, x))
    la.sigma_noise = 0.1
    torch.testing.assert_close(la.functional_covariance(x), dense_covariance(la, x))


def test_predictions_survive_saving() -> None:
    la, x = fitted("factored", prior_mean=0.2, temperature=0.5)
    other = KronLaplace(la.model, "regression", unknown="diagonal")
    other.load_state_dict(la.state_dict())
    assert torch.equal(other.functional_variance(x), la.functional_variance(x))
    assert torch.equal(other.scatter, la.scatter)
    assert torch.equal(other.log_marginal_likelihood(), la.log_marginal_likelihood())


def test_the_priors_mean_moves_the_scatter_alone() -> None:
    la, x = fitted("conv")
    before, mean = la.functional_variance(x), torch.randn(la.n_params, dtype=torch.float64)
    la.prior_mean = mean
    sizes = [la.model.get_parameter(name).numel() for name in la.parameter_names]
    prior = la.prior_precision.repeat_interleave(torch.tensor(sizes))
    torch.testing.assert_close(la.scatter, (prior * (la.mean - mean).square()).sum())
    assert torch.equal(la.functional_variance(x), before)
    again = KronLaplace(la.model, "regression", sigma_noise=0.7, prior_mean=mean, prior_precision=la.prior_precision)
    again.fit([(x, la.model(x).detach())])
    torch.testing.assert_close(again.scatter, la.scatter)
    with pytest.raises(ValueError, match="prior_mean: expected a number or one value for each of the"):
        la.prior_mean = mean[:3]


def test_a_temperature_divides_likelihood_and_curvature() -> None:
    la, _ = classifier()
    warm = KronLaplace(la.model, temperature=2.0, prior_precision=la.prior_precision)
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    warm.fit([(x, torch.arange(8) % 4)])
    torch.testing.assert_close(warm.log_likelihood, la.log_likelihood / 2)
    unit = torch.eye(la.n_params, dtype=torch.float64) * 10
    halved = (la.posterior_precision.to_matrix() + unit) / 2
    torch.testing.assert_close(warm.posterior_precision.to_matrix(), halved)
    torch.testing.assert_close(warm.log_det_posterior_precision, torch.logdet(warm.posterior_precision.to_matrix()))
    with pytest.raises(ValueError, match="temperature: expected positive"):
        la.temperature = 0.0


def add(tensor: Tensor, step: float = 1e-3) -> None:
    tensor.view(-1)[0] += step


WAYS: dict[str, Callable[[nn.Module], object]] = {
    "in place": torch.no_grad()(lambda model: add(model[0].weight)),
    "data": lambda model: add(model[0].weight.data),
    "vector": lambda model: nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) + 1e-3, model.parameters()),
    "turned": lambda model: model[0].weight.data.copy_(model[0].weight.data.flip(0)),
    "moved": lambda model: (add(model[0].weight.data), add(model[0].weight.data.view(-1)[-1:], -1e-3)),
    "statistics": lambda model: add(model.norm.running_mean.data),
    "not saved": lambda model: add(model.scale),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_whatever_changes_the_network_is_seen(way: str) -> None:
    model, x = network("twice" if way == "statistics" else "conv")
    if way == "not saved":
        parts = {"scale": nn.Buffer(torch.ones(1).double(), persistent=False), "inner": model}
        model = Function(lambda m, x: m.scale * m.inner(x), **parts)
    la = KronLaplace(model, "regression").fit([(x, torch.zeros_like(model(x)))])
    la(x)
    WAYS[way](model)
    with pytest.raises(RuntimeError, match="changed since the fit"):
        la(x)
    with pytest.raises(RuntimeError, match="changed since the fit"):
        la.functional_samples(x, n_samples=1)


class Fails(nn.Module):
    """A linear layer that raises at a call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.left = nn.Linear(3, 2), 10**9

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left < 0:
            raise KeyError("left")
        return self.linear(x)


@pytest.mark.filterwarnings("ignore:pred_type='nn'")
@pytest.mark.parametrize("calls", [0, 1, 2])
@pytest.mark.parametrize("asked", ["glm", "nn", "covariance"])
def test_an_error_leaves_the_model_as_it_was(asked: str, calls: int) -> None:
    model = randomised(Fails())
    x = torch.randn(5, 3, dtype=torch.float64)
    la = KronLaplace(model).fit([(x, torch.arange(5) % 2)])
    expected, weight = la(x), model.linear.weight
    model.left = calls
    with contextlib.suppress(KeyError):  # some need fewer calls
        if asked == "covariance":
            la.functional_covariance(x)
        else:
            la.functional_samples(x, asked, n_samples=3)
    model.left = 10**9
    assert model.linear.weight is weight
    assert all(p.requires_grad for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())
    torch.testing.assert_close(la(x), expected)


def test_a_network_is_tried_out_once_for_a_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    la, x = fitted("conv")
    expected = la.functional_variance(x)
    tried: list[object] = []
    monkeypatch.setattr("ella_cuda.laplace.curvature.probe", lambda *args: tried.append(args))
    torch.testing.assert_close(la.functional_variance(x), expected, rtol=0, atol=0)
    assert not tried
    la.model.requires_grad_(False)  # which a prediction does not undo
    torch.testing.assert_close(la.functional_variance(x), expected, rtol=0, atol=0)
    assert not any(p.requires_grad for p in la.model.parameters())


@pytest.mark.parametrize("kind", [KronLaplace, DiagLaplace, FullLaplace])
@pytest.mark.parametrize("frozen", ["all", "some", "none"])
def test_what_has_a_posterior_is_settled_by_the_fit(kind: Any, frozen: str) -> None:
    model, x = network("conv")
    first = model[0].requires_grad_(False)
    y = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    la = kind(model, "regression").fit([(x, y)])
    state = la.state_dict()
    expected = la.functional_variance(x)
    assert expected.diagonal(dim1=1, dim2=2).min() > 0
    for name, p in model.named_parameters():
        p.requires_grad_(frozen == "none" or (frozen == "some" and name == la.parameter_names[0]))
    before = [p.requires_grad for p in model.parameters()]
    la._predicting = None  # as before a first prediction
    torch.testing.assert_close(la.functional_variance(x), expected, rtol=0, atol=0)
    assert before == [p.requires_grad for p in model.parameters()] and first.weight.requires_grad == (frozen == "none")
    model.requires_grad_(True)
    first.requires_grad_(False)
    loaded = kind(model, "regression")
    loaded.load_state_dict(state)
    model.requires_grad_(False)
    torch.testing.assert_close(loaded.functional_variance(x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("what", ["a parameter", "all parameters", "a layer"])
def test_equals_in_anothers_place_are_seen(what: str) -> None:
    la, x = fitted("conv")
    expected = la.functional_variance(x)
    if what == "a layer":
        la.model[0] = copy.deepcopy(la.model[0])
    elif what == "all parameters":
        la.model.load_state_dict({n: t.clone() for n, t in la.model.state_dict().items()}, assign=True)
    else:
        la.model[0].weight = nn.Parameter(la.model[0].weight.detach().clone())
    torch.testing.assert_close(la.functional_variance(x), expected, rtol=0, atol=0)


def test_inputs_of_as_many_features_as_parameters_are_inputs() -> None:
    model = randomised(nn.Sequential(nn.Linear(3, 1, bias=False), nn.Tanh()))
    x = torch.randn(5, 3, dtype=torch.float64)
    la = KronLaplace(model, "regression").fit([(x, torch.randn(5, 1, dtype=torch.float64))])
    torch.testing.assert_close(la.functional_covariance(x), dense_covariance(la, x), rtol=1e-10, atol=1e-12)
    positions = randomised(nn.Sequential(nn.Linear(2, 1, bias=False), nn.Flatten()))
    x = torch.randn(5, 3, 2, dtype=torch.float64)  # as (N, K, P)
    la = KronLaplace(positions, "regression").fit([(x, torch.randn(5, 3, dtype=torch.float64))])
    blocks = torch.stack([dense_covariance(la, one[None]) for one in x])
    torch.testing.assert_close(la.functional_variance(x), blocks, rtol=1e-10, atol=1e-12)


def test_samples_of_independent_outputs_have_the_variances() -> None:
    la, x = fitted("conv")
    samples = la.functional_samples(x, n_samples=4000, diagonal_output=True, generator=torch.Generator().manual_seed(0))
    assert_covariance((samples - la.model(x)).flatten(1).detach(), dense_covariance(la, x).diagonal().diag())


def test_the_exact_evidence_has_prior_mean_and_temperature() -> None:
    model, x = network("our conv")
    y = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    la = KronLaplace(model, "regression", prior_mean=0.3, temperature=2.0, sigma_noise=0.8, prior_precision=1.3)
    exact = exact_log_marginal_likelihood(la, x, y)
    torch.testing.assert_close(exact, la.fit([(x, y)]).log_marginal_likelihood(), rtol=1e-10, atol=1e-10)
    plain = KronLaplace(model, "regression", sigma_noise=0.8, prior_precision=1.3)
    assert abs(exact_log_marginal_likelihood(plain, x, y) - exact) > 0.1


def test_many_outputs_need_no_jacobian() -> None:
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 200))
    x = torch.randn(16, 20)
    la = KronLaplace(model, fisher="mc", memory_budget=1 << 20).fit([(x, torch.arange(16))])
    la(x[:1])  # decomposes the factors
    with Largest() as largest:
        la(x)
    jacobian = 16 * 200 * la.n_params
    assert 0 < largest.numbers < jacobian / 40
    torch.testing.assert_close(la(x).sum(1), torch.ones(16))
    samples = la(x, link_approx="mc", n_samples=2)
    torch.testing.assert_close(samples.sum(1), torch.ones(16))


@pytest.mark.parametrize("name", ["conv", "factored", "tied", "attention"])
def test_a_grid_of_precisions_rotates_rows_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    la, x = fitted(name)
    precisions = torch.tensor([0.2, 3.0, 40.0], dtype=torch.float64)
    rotating, calls = Eigenbasis.output_rows_in, []
    monkeypatch.setattr(Eigenbasis, "output_rows_in", lambda *args: calls.append(0) or rotating(*args))
    found = [spread for _, spread in predictions_at(la, precisions, x, "glm", "probit", 1)]
    of_grid = len(calls)
    for one, precision in zip(found, precisions, strict=True):
        la.prior_precision, calls[:] = precision, []
        variances = dense_covariance(la, x).diagonal().view_as(one)
        torch.testing.assert_close(one, variances, rtol=1e-9, atol=1e-12)
        assert torch.equal(la(x, diagonal_output=True)[1], one)
        assert len(calls) == of_grid > 0
