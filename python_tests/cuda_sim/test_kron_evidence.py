"""kron_evidence and its second derivative against the products written out, differentiated by torch; one launch each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ella_cuda.ops import KronSpectra, pack_spectra
from python_tests.ops.test_kron_evidence import by_products, network

from .checking import DTYPES, LAYOUTS, arrange, assert_accurate, in_every_order

# Of each tensor (G, a, H, b): cut into several tiles, one product, nothing, wide and narrow, groups of their own.
NETWORKS = [
    [(3, 5, 1, 7), (1, 1, 1, 1), (2, 0, 1, 3), (2, 3, 2, 4), (1, 170, 1, 100), (1, 1, 1, 1100)],
    [(1, 2, 1, 3)],
    [(1, 0, 1, 3)],
]
CPU = torch.device("cpu")


def tensors(spectra: KronSpectra) -> tuple[Tensor, Tensor, Tensor]:
    return spectra.eigenvalues, spectra.tiles, spectra.starts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shapes", NETWORKS)
def test_value_and_derivatives(simulator, shapes, dtype):
    pairs, args = network(CPU, shapes, dtype)
    spectra, log_ratio = tensors(pack_spectra(pairs)), args[2] - args[1]
    evidence, bend = simulator.ops.kron_evidence, simulator.ops.kron_evidence_bend
    for call in (lambda: evidence(*spectra, *args), lambda: bend(*spectra, log_ratio)):
        before = simulator.launch_count()
        call()
        assert simulator.launch_count() == before + 1
    results = *in_every_order(simulator, lambda: evidence(*spectra, *args)), bend(*spectra, log_ratio)
    for result, expected in zip(results, by_products(pairs, *args), strict=True):
        assert_accurate(result, expected)
    in_every_order(simulator, lambda: bend(*spectra, log_ratio))


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_layouts(simulator, layout):
    pairs, (norms, u, v) = network(CPU, NETWORKS[0][:4])
    spectra = pack_spectra(pairs)
    values, norms, u, ratio = (arrange(t, layout) for t in (spectra.eigenvalues, norms, u, v - u))
    if layout == "expanded":
        pairs = [tuple(torch.full_like(side, values[0]) for side in pair) for pair in pairs]
    results = simulator.ops.kron_evidence(values, *tensors(spectra)[1:], norms, u, v)
    for result, expected in zip(results, by_products(pairs, norms, u, v), strict=False):
        assert_accurate(result, expected)
    result = simulator.ops.kron_evidence_bend(values, *tensors(spectra)[1:], ratio)
    assert_accurate(result, by_products(pairs, norms, -ratio, torch.zeros(()))[3])


def test_extreme_terms(simulator):
    """Products of terms must not overflow, nor the ratio times eigenvalues; what is no number comes out as one."""
    wide = torch.logspace(-300, 200, 501, dtype=torch.float64)[None]
    big, one = torch.full((1, 3000), 1e300, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    zero = torch.zeros(1, dtype=torch.float64)
    for values, u in ((wide, 0.0), (wide, 600.0), (wide, -600.0), (big, 0.0), (big, -700.0)):
        spectra = tensors(pack_spectra([(values, one)]))
        value, _, gamma = simulator.ops.kron_evidence(*spectra, zero, torch.tensor([u]).double(), zero[0])
        z = values.log() - u
        expected = torch.logaddexp(z, torch.zeros_like(z)).sum()
        torch.testing.assert_close(value, expected, rtol=1e-14, atol=1e-15)  # terms below the rounding of 1 are lost
        torch.testing.assert_close(
            gamma, torch.sigmoid(z).sum()[None], rtol=1e-12, atol=0
        )  # z is large, its exponential off
    for bad in (-2.0, float("nan")):
        spectra = tensors(pack_spectra([(torch.tensor([[0.0, 1.0, bad]]).double(), one)]))
        value, slope, gamma = simulator.ops.kron_evidence(*spectra, zero, zero, zero[0])
        assert value.isnan() and slope.isnan() and gamma.isnan()
    spectra = tensors(pack_spectra([(torch.tensor([[0.0, -0.5]]).double(), one)]))
    assert_accurate(
        simulator.ops.kron_evidence(*spectra, zero, zero, zero[0])[0], torch.tensor(0.5, dtype=torch.float64).log()
    )
