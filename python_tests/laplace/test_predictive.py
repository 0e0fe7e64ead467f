"""Predictions against dense algebra, sampling and laplace-torch."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor, nn

from ella_cuda.laplace import KronLaplace
from python_tests.laplace.checks import randomised
from python_tests.laplace.jacobians import NETWORKS, dense_jacobians, network


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


@pytest.mark.parametrize("name", NETWORKS)
def test_covariances_are_dense_algebras(name: str) -> None:
    la, x = fitted(name)
    covariance, n = dense_covariance(la, x), len(x)
    k = len(covariance) // n
    blocks = covariance.view(n, k, n, k).diagonal(dim1=0, dim2=2).movedim(2, 0)
    torch.testing.assert_close(la.functional_variance(x), blocks, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(la.functional_covariance(x), covariance, rtol=1e-10, atol=1e-12)
    mean, variance = la(x, diagonal_output=True)
    torch.testing.assert_close(mean, la.model(x))
    torch.testing.assert_close(variance.flatten(1), blocks.diagonal(dim1=1, dim2=2), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["conv", "our conv", "factored", "attention", "tied"])
@pytest.mark.parametrize(
    "how",
    [{"resolution": "per_channel"}, {"approximation": "reduce"}, {"temperature": 0.3}, {"memory_budget": 1}],
    ids=str,
)
def test_settings_change_the_posterior_not_the_algebra(name: str, how: dict[str, object]) -> None:
    la, x = fitted(name, **how)
    covariance, n = dense_covariance(la, x), len(x)
    k = len(covariance) // n
    blocks = covariance.view(n, k, n, k).diagonal(dim1=0, dim2=2).movedim(2, 0)
    torch.testing.assert_close(la.functional_variance(x), blocks, rtol=1e-10, atol=1e-12)


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
    for rows in (jacobians, jacobians.flatten(0, 1)):
        torch.testing.assert_close(la.functional_covariance(rows), covariance, rtol=1e-9, atol=1e-12)
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
    at_mean = la.log_prob(la.mean)
    torch.testing.assert_close(
        la.log_prob(values, normalized=False) + at_mean, la.log_prob(values), rtol=1e-9, atol=1e-8
    )
    torch.testing.assert_close(la.square_norm(values), -2 * la.log_prob(values, normalized=False))


def assert_covariance(samples: Tensor, covariance: Tensor) -> None:
    """Samples ``(S, d)`` are of a Gaussian with this covariance: once whitened, entries of their covariance are independent."""
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), samples.T, upper=False)
    unit = torch.eye(len(white), dtype=torch.float64)
    z = (white @ white.T / len(samples) - unit) * (len(samples) / (1 + unit)).sqrt()
    upper = z[torch.ones_like(z).triu() > 0]
    assert upper.abs().max() < 5
    assert abs(upper.square().mean() - 1) < 5 * (2 / len(upper)) ** 0.5


@pytest.mark.parametrize("name", ["linear", "our conv", "tied", "attention"])
def test_samples_have_the_covariance(name: str) -> None:
    la, x = fitted(name)
    generator = torch.Generator().manual_seed(0)
    functions = la.functional_samples(x, n_samples=4000, generator=generator).flatten(1) - la.model(x).flatten()
    covariance = dense_covariance(la, x)
    assert_covariance(functions.detach(), covariance)
    draws = la.sample(4000, generator) - la.mean
    some = torch.randperm(la.n_params, generator=generator)[:40]
    assert_covariance(draws[:, some], la.posterior_precision.to_matrix(-1)[some][:, some])


def test_samples_are_functions_that_data_points_share() -> None:
    la, x = fitted("conv")
    whole = la.functional_samples(x, n_samples=3, generator=torch.Generator().manual_seed(1))
    parts = [
        la.functional_samples(part, n_samples=3, generator=torch.Generator().manual_seed(1)) for part in x.split(2)
    ]
    torch.testing.assert_close(whole, torch.cat(parts, 1))
    again = la.functional_samples(x, n_samples=3, generator=torch.Generator().manual_seed(2))
    assert not torch.allclose(whole, again)
    parameters = la.sample(3, torch.Generator().manual_seed(1))
    expected = la.model(x) + torch.einsum("nkp,sp->snk", flat_jacobians(la, x), parameters - la.mean)
    torch.testing.assert_close(whole, expected, rtol=1e-9, atol=1e-10)


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


def test_links_are_near_the_softmaxs_mean() -> None:
    la, x = classifier()
    mean, covariance = la.model(x), la.functional_variance(x)
    root = torch.linalg.cholesky(covariance)
    drawn = torch.randn(200_000, 1, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = torch.softmax(mean + (root @ drawn[..., None])[..., 0], 2).mean(0)
    for link, tolerance in {"probit": 0.1, "probit_full": 0.05}.items():
        found = la(x, link_approx=link)
        torch.testing.assert_close(found.sum(1), torch.ones(8, dtype=torch.float64))
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    sampled = la(x, link_approx="mc", n_samples=20_000, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(sampled, expected, rtol=0, atol=0.02)
    la.prior_precision = 1e12
    for link in ("probit", "probit_full"):
        torch.testing.assert_close(la(x, link_approx=link), torch.softmax(mean, 1), rtol=0, atol=1e-6)


def test_links_by_hand() -> None:
    la, x = classifier()
    mean, covariance = la.model(x), la.functional_variance(x)
    v = covariance.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(la(x), torch.softmax(mean / (1 + math.pi / 8 * v).sqrt(), 1))
    full = torch.zeros_like(mean)
    for n in range(8):
        for c in range(4):
            terms = [
                torch.exp(
                    (mean[n, j] - mean[n, c]) / (1 + math.pi / 8 * (v[n, c] + v[n, j] - 2 * covariance[n, c, j])).sqrt()
                )
                for j in range(4)
            ]
            full[n, c] = 1 / sum(terms)
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
        expected = theirs(x, link_approx=link)
    torch.testing.assert_close(ours(x, link_approx=link), expected.detach(), rtol=1e-5, atol=1e-6)
    assert ours(x, link_approx=link, diagonal_output=diagonal).shape == (8, 4)
    torch.testing.assert_close(
        ours.functional_variance(x),
        theirs.functional_variance(theirs.backend.jacobians(x)[0]).detach(),
        rtol=1e-5,
        atol=1e-6,
    )


def test_positions_have_predictions_of_their_own() -> None:
    model = randomised(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    x = torch.randn(6, 2, 4, dtype=torch.float64)
    la = KronLaplace(model).fit([(x, torch.randint(3, (6, 2)))])
    alone = [la(x[:, t : t + 1], link_approx="probit_full") for t in range(2)]
    torch.testing.assert_close(la(x, link_approx="probit_full"), torch.cat(alone, 1))
    assert la(x, link_approx="bridge", diagonal_output=True).shape == (6, 2, 3)


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
