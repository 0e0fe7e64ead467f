"""Distance of an image from the true one, and how well its error bars describe the difference."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

WINDOW = 7  # pixels along a side, of structural similarity
K1, K2 = 0.01, 0.03  # its constants, of pixels in 0..1
INSIDE = 2.0  # deviations
BINS = tuple(0.02 * k for k in range(16))  # of absolute errors; the last is of all larger ones


def psnr(image: Tensor, truth: Tensor) -> float:
    """Peak signal-to-noise ratio in decibels, of pixels in 0..1."""
    return float(-10 * (image.double() - truth.double()).square().mean().log10())


def ssim(image: Tensor, truth: Tensor) -> float:
    """Mean structural similarity of images ``(H, W)`` with pixels in 0..1, over all 7 x 7 windows, whose covariances are unbiased.

    Source: Wang, Bovik, Sheikh, Simoncelli, "Image quality assessment", IEEE Trans. Image Processing 2004, equation 13; windows and
    constants are scikit-image's.
    """
    a, b = image.double(), truth.double()
    side = min(WINDOW, *a.shape)
    n = side * side
    means = F.avg_pool2d(torch.stack([a, b, a * a, b * b, a * b])[:, None], side, stride=1)[:, 0]
    mean_a, mean_b = means[:2]
    var_a, var_b, both = (means[2:] - torch.stack([mean_a * mean_a, mean_b * mean_b, mean_a * mean_b])) * n / (n - 1)
    c1, c2 = K1**2, K2**2
    similar = (2 * mean_a * mean_b + c1) * (2 * both + c2)
    return float((similar / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))).mean())


def inside(error: Tensor, deviation: Tensor) -> float:
    """The share of pixels whose error is within two predicted deviations."""
    return float((error.abs() <= INSIDE * deviation).double().mean())


def error_shares(error: Tensor, deviation: Tensor, bins: Sequence[float] = BINS) -> dict[str, list[float]]:
    """Absolute errors in bins: the share of pixels, and the share that normal errors with the predicted deviations have in expectation.

    Args:
        error, deviation: ``(H, W)``. bins: lower ends, from 0 on.

    Returns:
        ``found`` and ``expected``, each of a sum of 1.
    """
    error, deviation = error.double().abs().flatten(), deviation.double().flatten()
    ends = torch.tensor([*bins, math.inf], dtype=torch.float64)
    below = torch.erf(ends / (deviation[:, None] * math.sqrt(2))).mean(0)
    counts = torch.histogram(error.clamp(max=bins[-1] + 1), torch.tensor([*bins, bins[-1] + 2], dtype=torch.float64))
    return {"found": (counts.hist / len(error)).tolist(), "expected": below.diff().tolist()}
