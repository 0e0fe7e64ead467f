"""A fit and its evidence inside what users may have around them: autocast and inference mode."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ella_cuda.data import TensorLoader
from ella_cuda.laplace import KronLaplace
from ella_cuda.nn import CircularConv2d, FactoredLinear2d, RelaxedEquivariance, SparseFactoredLinear2d


def network() -> nn.Module:
    paths = {
        "conv": CircularConv2d(1, 3),
        "f_fc": FactoredLinear2d(1, 3, 4, 4),
        "s_fc": SparseFactoredLinear2d(1, 3, 4, 4),
    }
    return nn.Sequential(RelaxedEquivariance(paths), nn.ReLU(), nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(8, 4))


def numbers(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    la = KronLaplace(model, prior_precision=0.5).fit(TensorLoader(x, y, batch_size=7))
    precision = la.prior_precision.clone()
    with torch.inference_mode(False), torch.enable_grad():
        precision = torch.full((len(precision),), 0.5, dtype=torch.float64, device=x.device).requires_grad_()
        evidence = la.log_marginal_likelihood(precision)
        (slope,) = torch.autograd.grad(evidence, precision)
    optimized = la.optimize_prior_precision(n_steps=3)
    return [
        evidence.detach(),
        slope,
        la.log_likelihood,
        optimized,
        torch.tensor(list(la.effective_parameters().values())),
    ]


@pytest.fixture
def case(device):
    model = network().to(device)
    return model, torch.randn(20, 1, 4, 4, device=device), torch.randint(4, (20,), device=device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_autocast_changes_nothing(case, dtype, device):
    expected = numbers(*case)
    with torch.autocast(device.type, dtype):
        found = numbers(*case)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_inference_mode_changes_nothing(case):
    """With data that were made in it too, which autograd may not save."""
    model, x, y = case
    expected = numbers(model, x, y)
    with torch.inference_mode():
        found = numbers(model, x.clone(), y.clone())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    with torch.inference_mode():
        batch = x.clone(), y.clone()
        la = KronLaplace(model, prior_precision=0.5).fit([batch])  # as it is, not a part of it
    assert torch.allclose(la.log_marginal_likelihood(), expected[0], rtol=1e-6)


def test_inference_mode_and_learned_lengthscales(case):
    """The data fit's gradient in a buffer goes through the network, which saves its inputs."""
    model, x, y = case
    scale = model[0].s_fc.basis_in.inverse_lengthscale.requires_grad_()
    expected = KronLaplace(model).fit([(x, y)])
    with torch.inference_mode():
        found = KronLaplace(model).fit([(x.clone(), y.clone())])
    slopes = [torch.autograd.grad(la.log_marginal_likelihood(), scale) for la in (found, expected)]
    assert slopes[1][0] != 0
    torch.testing.assert_close(*slopes)
