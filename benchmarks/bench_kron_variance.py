"""The predictive variance under one Kronecker-factored block: ``kron_variance_``, and torch with the Jacobian and the denominators as a
whole. Layers without shared positions (T = 1), where the Jacobian has rank one, have the rank-one formulation too."""

from __future__ import annotations

import pytest
import torch

from ella_cuda import ops

# data points, outputs, positions, groups, inputs, outputs of the layer
SHAPES = [(100, 10, 1, 1, 784, 100), (100, 10, 1, 20, 256, 40), (50, 10, 64, 1, 360, 80), (20, 10, 1024, 1, 27, 10)]


def rank_one(variance, inputs, outputs, l, m, precision):
    """Of one position; returns the variance."""
    weights = torch.bmm(
        inputs[:, 0].transpose(0, 1).square(), (1 / (l[:, :, None] * m[:, None] + precision)).to(inputs.dtype)
    )
    rows = outputs[:, :, 0].transpose(0, 1).flatten(2)
    return variance.add_(torch.bmm(rows * weights.transpose(0, 1).flatten(1)[:, None], rows.mT))


CANDIDATES = {"ella_cuda": ops.kron_variance_, "einsum": ops.kron_variance_torch_, "rank one": rank_one}


@pytest.mark.parametrize(
    ("shape", "who"), [(s, w) for s in SHAPES for w in CANDIDATES if w != "rank one" or s[2] == 1], ids=str
)
def test_kron_variance(time, device, shape, who):
    n, k, t, g, a, b = shape
    inputs, outputs = torch.randn(n, t, g, a, device=device), torch.randn(k, n, t, g, b, device=device)
    spectra = [torch.rand(size, dtype=torch.float64, device=device) for size in ((g, a), (g, b), ())]
    variance, exact = torch.zeros(n, k, k, device=device), torch.zeros(n, k, k, dtype=torch.float64, device=device)
    CANDIDATES[who](variance, inputs, outputs, *spectra)
    ops.kron_variance_torch_(exact, inputs.double(), outputs.double(), *spectra)
    torch.testing.assert_close(variance.double(), exact, rtol=1e-4, atol=1e-4 * float(exact.abs().max()))
    products = n * g * a * b if t == 1 else n * g * a * b * (t * k + k * (k + 1) // 2)
    time(
        lambda: CANDIDATES[who](variance, inputs, outputs, *spectra),
        work=f"kron_variance_, {n} points, {k} outputs, {t} positions, {g} blocks of {a} x {b}",
        who=who,
        flops=2 * products,
        bytes=4 * (inputs.numel() + outputs.numel()),
    )
