"""kron_evidence and its second derivative against the products written out, differentiated by torch; one launch each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ella_cuda.ops import KronSpectra, pack_spectra

from .checking import DTYPES, LAYOUTS, SCHEDULES, arrange, assert_accurate, in_every_order
from .simulator import Simulator

pytestmark = pytest.mark.simulator

# Of each tensor (G, a, b, shared): cut into several tiles, one product, nothing, wide and narrow, groups of their own.
NETWORKS = [
    [(3, 5, 7, True), (1, 1, 1, True), (2, 0, 3, True), (2, 3, 4, False), (1, 170, 100, True), (1, 1, 1100, True)],
    [(1, 2, 3, True)],
    [(1, 0, 3, True)],
]


def network(shapes: list[tuple], dtype: torch.dtype) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor, Tensor]:
    pairs = [
        (3 * torch.rand(G, a, dtype=dtype), 2 * torch.rand(1 if shared else G, b, dtype=dtype))
        for G, a, b, shared in shapes
    ]
    count = len(pairs)
    return (
        pairs,
        5 * torch.rand(count, dtype=dtype),
        2 * torch.randn(count, dtype=dtype),
        torch.tensor(0.3, dtype=dtype),
    )


def exact(pairs: list, norms: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    z = (v.double() - u.double()).requires_grad_()
    logs = torch.stack(
        [
            torch.log1p(ratio * l.double()[:, :, None] * m.double()[:, None]).sum()
            for (l, m), ratio in zip(pairs, z.exp(), strict=True)
        ]
    )
    (effective,) = torch.autograd.grad(logs.sum(), z)
    prior = u.double().exp() * norms.double()
    return logs.sum().detach() + prior.sum(), prior - effective, effective


def exact_bend(pairs: list, z: Tensor) -> Tensor:
    """Second derivatives of log(1 + e^y) in factors that do not cancel."""
    sums = []
    for (l, m), shift in zip(pairs, z.double(), strict=True):
        y = (l.double()[:, :, None] * m.double()[:, None]).log() + shift
        sums.append((torch.sigmoid(y) * torch.sigmoid(-y)).sum())
    return torch.stack(sums)


def tensors(spectra: KronSpectra) -> tuple[Tensor, Tensor, Tensor]:
    return spectra.eigenvalues, spectra.tiles, spectra.starts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shapes", NETWORKS)
def test_value_and_derivatives(simulator: Simulator, shapes: list, dtype: torch.dtype) -> None:
    pairs, norms, u, v = network(shapes, dtype)
    spectra = tensors(pack_spectra(pairs))
    before = simulator.launch_count()
    results = in_every_order(simulator, lambda: simulator.ops.kron_evidence(*spectra, norms, u, v))
    assert simulator.launch_count() == before + len(SCHEDULES)
    for result, expected in zip(results, exact(pairs, norms, u, v), strict=True):
        assert_accurate(result, expected)
    before = simulator.launch_count()
    (result,) = in_every_order(simulator, lambda: simulator.ops.kron_evidence_bend(*spectra, v - u))
    assert simulator.launch_count() == before + len(SCHEDULES)
    assert_accurate(result, exact_bend(pairs, v - u))


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_layouts(simulator: Simulator, layout: str) -> None:
    pairs, norms, u, v = network(NETWORKS[0][:4], torch.float64)
    spectra = pack_spectra(pairs)
    arranged = [arrange(t, layout) for t in (spectra.eigenvalues, norms, u)]
    if layout == "expanded":
        pairs = [tuple(torch.full_like(side, spectra.eigenvalues[0]) for side in pair) for pair in pairs]
    results = simulator.ops.kron_evidence(arranged[0], *tensors(spectra)[1:], *arranged[1:], v)
    for result, expected in zip(results, exact(pairs, *arranged[1:], v), strict=True):
        assert_accurate(result, expected)
    z = arrange(v - u, layout)
    result = simulator.ops.kron_evidence_bend(arranged[0], *tensors(spectra)[1:], z)
    assert_accurate(result, exact_bend(pairs, z))


def test_extreme_terms(simulator: Simulator) -> None:
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
