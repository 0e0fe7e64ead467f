"""The exact evidence of an averaged model recovers the amount that made its data, and its data fit alone does not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ella_cuda.augment import AffineAugment, Augment
from python_tests.augment.augments import DOUBLE, RotatePoints, smooth_images

NOISE = 0.1
ANGLES = [math.radians(degrees) for degrees in range(0, 181, 15)]


def averaged_kernel(augment: Augment, x: Tensor, lengthscale: float) -> Tensor:
    """Covariance of targets: f a Gaussian process with squared exponential kernel, averaged over copies, plus noise."""
    n, copies = len(x), augment(x).flatten(2).flatten(0, 1)
    distances = torch.cdist(copies, copies, compute_mode="donot_use_mm_for_euclid_dist").square()
    kernel = (-distances / (2 * lengthscale**2)).exp().view(n, augment.n_samples, n, augment.n_samples).mean((1, 3))
    return kernel + NOISE**2 * torch.eye(n, **DOUBLE)


def cases(kind: str) -> tuple[Augment, Tensor, float]:
    options = {"init": 0.1, "constraint": "raw", "sampling": "grid", **DOUBLE}
    if kind == "points":
        return RotatePoints(12, **options), torch.randn(60, 2, **DOUBLE), 0.5
    return AffineAugment(8, "rotation", **options), smooth_images(40, 1, 9, 9), 0.7


@pytest.mark.parametrize("kind", ["points", "images"])
def test_the_evidence_peaks_at_the_true_amount_and_the_fit_at_zero(kind):
    augment, x, lengthscale = cases(kind)
    factors = []
    for angle in ANGLES:
        augment.set_eta(angle)
        factors.append(torch.linalg.cholesky(averaged_kernel(augment, x, lengthscale)))
    for true in (0, 2, 4, 6, 12):
        # Targets of the model itself, and their expectation: E y' K^-1 y = tr(K^-1 K_0).
        y = factors[true] @ torch.randn(len(x), 40, **DOUBLE)
        fits = [-torch.linalg.solve_triangular(L, y, upper=False).square().sum(0).mean() / 2 for L in factors]
        expected = [-torch.linalg.solve_triangular(L, factors[true], upper=False).square().sum() / 2 for L in factors]
        evidence, mean = (
            [float(f - L.diagonal().log().sum()) for f, L in zip(fs, factors, strict=True)] for fs in (fits, expected)
        )
        assert evidence.index(max(evidence)) == true
        assert mean.index(max(mean)) == true
        assert fits.index(max(fits)) == 0
