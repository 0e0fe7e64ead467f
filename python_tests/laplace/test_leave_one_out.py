"""Leave-one-out predictions against refits without the data point."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ella_cuda.laplace import FullLaplace, KronLaplace
from python_tests.laplace.checks import drawn, randomised

N = 24


def regression() -> tuple[nn.Module, Tensor, Tensor]:
    """Two outputs that share their features."""
    return randomised(nn.Linear(3, 2, bias=False)), drawn(N, 3, seed=1), drawn(N, 2, seed=2)


def ridge(x: Tensor, y: Tensor, noise: float, prior: float, prior_mean: float) -> tuple[Tensor, Tensor]:
    """Mean ``(3, 2)`` and covariance ``(3, 3)`` of a linear model's weights, whose covariance is the same for each output."""
    covariance = torch.linalg.inv(x.T @ x / noise + prior * torch.eye(3, dtype=x.dtype))
    return covariance @ (x.T @ y / noise + prior * prior_mean), covariance


@pytest.mark.parametrize("kind", [FullLaplace, KronLaplace])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_linear_regression_is_refitted_exactly(kind: Any, temperature: float) -> None:
    model, x, y = regression()
    batches = [(x[:10], y[:10]), (x[10:], y[10:])]
    sigma, prior, prior_mean = 0.7, 0.4, 0.3
    options = {"prior_precision": prior, "sigma_noise": sigma, "prior_mean": prior_mean, "temperature": temperature}
    la = kind(model, "regression", **options).fit(batches)
    la.fit_linear_mode(batches, tol=1e-12)
    found = la.leave_one_out(mean="linear", progress_bar=False)
    outputs = la(x, mean="linear")[0]
    for i in range(N):
        others = [j for j in range(N) if j != i]
        mean, covariance = ridge(x[others], y[others], sigma**2 * temperature, prior, prior_mean)
        variance = x[i] @ covariance @ x[i] + sigma**2
        density = torch.distributions.Normal(x[i] @ mean, variance.sqrt()).log_prob(y[i]).sum()
        torch.testing.assert_close(found.log_density[i], density, rtol=0, atol=1e-8)
        torch.testing.assert_close(outputs[i] + found.influence[i], x[i] @ mean, rtol=0, atol=1e-8)
    assert found.n_undefined == 0
    torch.testing.assert_close(found.total, found.log_density.sum())
    assert found.total_leverage.item() == pytest.approx(sum(la.effective_parameters().values()), rel=1e-9)
