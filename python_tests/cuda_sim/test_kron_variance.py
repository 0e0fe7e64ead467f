"""kron_variance_ against the Jacobian and the denominators written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from python_tests.ops.test_kron_variance import diagonal_of, exact

from .checking import DTYPES, LAYOUTS, arrange, guarded, in_every_order
from .simulator import Simulator

# N, K, T, G, a, b, shared
SIZES = [
    (1, 1, 1, 1, 1, 1, False),
    (34, 3, 1, 2, 70, 67, True),  # data points, rows and columns beyond a tile
    (3, 18, 1, 30, 1, 3, False),  # outputs beyond a tile of pairs
    (2, 6, 3, 2, 17, 5, True),  # two groups of outputs
    (1, 11, 52, 1, 3, 18, False),  # more positions than stages hold
    (2, 2, 0, 2, 3, 4, False),
    (0, 2, 2, 2, 3, 4, False),
]


def arguments(size: tuple, dtype: torch.dtype, layout: str = "contiguous") -> tuple[Tensor, ...]:
    N, K, T, G, a, b, shared = size
    inputs, outputs = torch.randn(N, T, G, a, dtype=dtype), torch.randn(K, N, T, G, b, dtype=dtype)
    spectra = torch.rand(G, a, dtype=torch.float64), torch.rand(1 if shared else G, b, dtype=torch.float64)
    return (*(arrange(t, layout) for t in (outputs, inputs, *spectra)), torch.tensor(0.3, dtype=torch.float64))


def check(simulator: Simulator, args: tuple, diagonal: bool, total: torch.dtype) -> None:
    outputs, inputs, *spectra = args
    wanted = exact(inputs, outputs, *spectra)
    wanted = diagonal_of(wanted) if diagonal else wanted
    before = torch.randn(wanted.shape, dtype=total)

    def call() -> Tensor:
        variance, untouched = guarded(before)
        simulator.ops.kron_variance_(variance, *args)
        untouched()
        return variance.clone()

    (ours,) = in_every_order(simulator, call)
    scale = wanted.abs().max().item() + 1 if wanted.numel() else 1
    precise = args[0].dtype == torch.float64
    torch.testing.assert_close(ours.double(), before + wanted, rtol=0, atol=scale * (1e-13 if precise else 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_equals_the_sum(simulator, size, diagonal, dtype):
    check(simulator, arguments(size, dtype), diagonal, dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [(3, 2, 1, 2, 5, 6, False), (2, 3, 2, 2, 5, 6, True)])
def test_layouts_and_float32_rows_beside_a_float64_variance(simulator, size, layout):
    check(simulator, arguments(size, torch.float32, layout), False, torch.float64)


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_a_jacobian(simulator, layout, diagonal):
    _, _, l, m, p = arguments((2, 6, 1, 2, 18, 5, False), torch.float64)
    jacobian = arrange(torch.randn(6, 2, 2, 18, 5, dtype=torch.float64), layout)
    check(simulator, (jacobian, None, l, m, p), diagonal, torch.float64)
