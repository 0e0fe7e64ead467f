"""Oracles that share no code with the package: the dense generalised Gauss-Newton matrix from torch.func."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev


def _negative_log_likelihood(f: Tensor, y: Tensor, likelihood: str | Callable[..., Tensor]) -> Tensor:
    """Of one data point: outputs (K,), target () or (K,), sigma = 1; ``likelihood`` may be this function itself."""
    if callable(likelihood):
        return likelihood(f, y)
    if likelihood == "classification":
        return torch.logsumexp(f, 0) - f[y]
    return 0.5 * (f - y).square().sum()


def _dense_ggn(
    model: nn.Module, x: Tensor, y: Tensor, likelihood: str | Callable[..., Tensor] = "classification"
) -> dict[str, Tensor]:
    parameters = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    blocks = {n: torch.zeros(p.numel(), p.numel(), dtype=p.dtype) for n, p in parameters.items()}
    for x_n, y_n in zip(x, y, strict=True):

        def outputs(theta: dict[str, Tensor], x_n: Tensor = x_n) -> Tensor:
            return functional_call(model, theta, (x_n[None],))[0].flatten()

        shape = functional_call(model, parameters, (x_n[None],)).shape[1:]
        f = outputs(parameters).detach()
        curvature = hessian(lambda f, y_n=y_n, shape=shape: _negative_log_likelihood(f.view(shape), y_n, likelihood))(f)
        jacobian = jacrev(outputs)(parameters)
        for name, j in jacobian.items():
            j = j.detach().reshape(len(j), -1)
            blocks[name] += j.T @ curvature @ j
    return blocks


@pytest.fixture
def dense_ggn() -> Callable[..., dict[str, Tensor]]:
    """``dense_ggn(model, x, y, likelihood)`` -> parameter name -> its diagonal block of the sum over data, in flatten
    order.
    """
    return _dense_ggn


@pytest.fixture
def batches() -> Callable[..., list[tuple[Tensor, Tensor]]]:
    """``batches(x, y, size)`` -> a list of minibatches."""
    return lambda x, y, size: list(zip(x.split(size), y.split(size), strict=True))
