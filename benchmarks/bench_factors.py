"""Kronecker factors of the CONV network on 1,000 images and their evidence: ours and laplace-torch's on curvlinops.

laplace-torch decomposes the factors at the end of a fit, we when the evidence is asked for; so both do both. Of all benchmarks
the one without a check of its own: python_tests/laplace/test_laplace_torch.py compares the two.
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
    """Operations of one forward pass, of nine columns' backward pass (activations only) and of the factors' upper triangles
    by lags. A kernel that is larger than the image folds into as many entries as there are pixels. Decompositions are not counted.
    """
    total, size = 0, 32
    for i, (block, (_, shrink)) in enumerate(zip(model.blocks, models.STAGES, strict=True)):
        weight = next(p for p in block.parameters() if p.dim() == 4)
        d, c = weight.shape[:2]
        products = 1 + (9 if i > 0 else 0)  # nothing needs the gradient at the images
        entries, lags = min(3, size) ** 2, min(5, size) ** 2
        total += size * size * (2 * products * entries * c * d + lags * c * c + 9 * d * d)
        size //= shrink
    return IMAGES * total


@pytest.mark.parametrize("who", ["ella_cuda", PEER])
def test_factors_of_the_convolutional_network(time, problem, who):
    model, loader = problem
    if who == "ella_cuda":
        la = KronLaplace(model)
    else:
        laplace = pytest.importorskip("laplace", reason="laplace-torch is not installed")
        la = laplace.KronLaplace(model, "classification", backend=laplace.curvature.CurvlinopsGGN)

    def evidence() -> None:
        la.fit(loader)
        assert torch.isfinite(la.log_marginal_likelihood())

    time(evidence, work="factors + evidence of CONV, 1,000 images", who=who, flops=floor(model), bytes=0, rounds=3)
