"""Kronecker factors of the CONV network on 1,000 images: ours and, where installed, the peers that laplace-torch uses."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ella_cuda import models
from ella_cuda.laplace import KronLaplace

IMAGES, BATCH, WIDTH = 1000, 125, 10
PEERS = {"laplace-torch, curvlinops": "CurvlinopsGGN", "laplace-torch, ASDL": "AsdlGGN"}


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


@pytest.mark.parametrize("who", ["ella_cuda", "ella_cuda, 99 % of the trace", *PEERS])
def test_factors_of_the_convolutional_network(time, problem, who):
    model, loader = problem
    if who.startswith("ella_cuda"):
        la = KronLaplace(model, column_tolerance=0.01 if "%" in who else 0.0)

        def fit() -> None:
            la.fit(loader)

    else:
        curvature = pytest.importorskip("laplace.curvature")
        laplace = pytest.importorskip("laplace")
        backend = getattr(curvature, PEERS[who], None)
        if backend is None:
            pytest.skip(f"{who} is not installed")
        peer = laplace.KronLaplace(model, "classification", backend=backend)
        try:
            peer.fit(loader)
        except Exception as error:  # a peer that cannot do this network is a result too
            pytest.skip(f"{who} fails: {error}")

        def fit() -> None:
            laplace.KronLaplace(model, "classification", backend=backend).fit(loader)

    fit()
    time(fit, work="factors of CONV, 1,000 images, K = 10", who=who, flops=floor(model), bytes=0, rounds=3)
