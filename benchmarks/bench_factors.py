"""Kronecker factors of the CONV network on 1,000 images: ours and laplace-torch's on curvlinops.

Of all benchmarks the one without a check of its own: python_tests/laplace/test_laplace_torch.py compares the two.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ella_cuda import models
from ella_cuda.laplace import KronLaplace

IMAGES, BATCH, WIDTH = 1000, 125, 10
PEER = "laplace-torch, curvlinops"


@pytest.fixture(scope="module")
def problem(device):
    torch.manual_seed(0)
    model = models.neyshabur("conv", 3, 10, WIDTH).to(device)
    x = torch.randn(IMAGES, 3, 32, 32, device=device)
    y = torch.randint(10, (IMAGES,), device=device)
    return model, DataLoader(TensorDataset(x, y), BATCH)


def floor(model: torch.nn.Module) -> float:
    """Operations of nine columns' backward pass (activations only) and of the factors' upper triangles by lags."""
    total, size = 0, 32
    for block, (_, shrink) in zip(model.blocks, models.STAGES, strict=True):
        weight = next(p for p in block.parameters() if p.dim() == 4)
        d, c = weight.shape[:2]
        total += size * size * (2 * 10 * 9 * c * d + 25 * c * c + 9 * d * d)  # forward once, nine back; A; B
        size //= shrink
    return IMAGES * total


@pytest.mark.parametrize("who", ["ella_cuda", "ella_cuda, 99 % of the trace", PEER])
def test_factors_of_the_convolutional_network(time, problem, who):
    model, loader = problem
    if who.startswith("ella_cuda"):
        la = KronLaplace(model, column_tolerance=0.01 if "%" in who else 0.0)

        def fit() -> None:
            la.fit(loader)

    else:
        laplace = pytest.importorskip("laplace", reason="laplace-torch is not installed")
        backend = laplace.curvature.CurvlinopsGGN

        def fit() -> None:
            laplace.KronLaplace(model, "classification", backend=backend).fit(loader)

    fit()
    time(fit, work="factors of CONV, 1,000 images, K = 10", who=who, flops=floor(model), bytes=0, rounds=3)
