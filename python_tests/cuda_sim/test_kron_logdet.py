"""kron_logdet and its derivatives against the outer product written out, differentiated by torch; one launch each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from .checking import DTYPES, LAYOUTS, SCHEDULES, arrange, assert_accurate, in_every_order
from .simulator import Simulator

# (G, a, b, shared)
SIZES = [
    (1, 1, 1, False), (3, 5, 7, False), (3, 5, 7, True), (2, 300, 2, True), (40, 9, 1, True), (2, 3, 70, False),
    (1, 2, 5000, True), (2, 0, 4, True),
]  # fmt: skip


def arguments(size: tuple, dtype: torch.dtype, layout: str = "contiguous") -> tuple[Tensor, ...]:
    G, a, b, shared = size
    rows = 1 if shared else G
    lam, m = torch.rand(G, a, dtype=dtype) * 3, torch.rand(rows, b, dtype=dtype) * 2
    directions = torch.randn(G, a, dtype=dtype), torch.randn(rows, b, dtype=dtype), torch.randn((), dtype=dtype)
    return (
        arrange(lam, layout),
        arrange(m, layout),
        torch.tensor(0.37, dtype=dtype),
        *(arrange(v, layout) for v in directions),
    )


def exact(lam: Tensor, m: Tensor, p: Tensor) -> Tensor:
    return torch.log(lam[:, :, None] * m[:, None, :] + p).sum()


def derivatives(lam: Tensor, m: Tensor, p: Tensor, *v: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    leaves = [t.double().clone().requires_grad_() for t in (lam, m, p)]
    gradient = torch.autograd.grad(exact(*leaves), leaves, create_graph=True)
    along = sum((g * d.double()).sum() for g, d in zip(gradient, v, strict=True))
    return tuple(g.detach() for g in gradient), torch.autograd.grad(along, leaves)


def check(simulator: Simulator, given: tuple[Tensor, ...]) -> None:
    lam, m, p, *v = given
    ops = simulator.ops
    calls = (
        lambda: ops.kron_logdet(lam, m, p),
        lambda: ops.kron_logdet_gradient(lam, m, p),
        lambda: ops.kron_logdet_hvp(lam, m, p, *v),
    )
    wanted = ((exact(lam.double(), m.double(), p.double()),), *derivatives(*given))
    before = simulator.launch_count()
    for call, values in zip(calls, wanted, strict=True):
        for result, expected in zip(in_every_order(simulator, call), values, strict=True):
            assert_accurate(result, expected)
    assert simulator.launch_count() == before + len(calls) * len(SCHEDULES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_value_and_derivatives(simulator, size, dtype):
    check(simulator, arguments(size, dtype))


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_layouts(simulator, layout):
    check(simulator, arguments((3, 5, 7, False), torch.float64, layout))


def test_extreme_terms(simulator):
    """The product of mantissas must not overflow; what is no positive normal number comes out as its logarithm."""
    wide = torch.logspace(-300, 200, 501, dtype=torch.float64)[None]
    one, nothing = torch.ones(1, 1, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    assert_accurate(simulator.ops.kron_logdet(wide, one, nothing), torch.log(wide).sum())
    big = torch.full((1, 3000), 1e300, dtype=torch.float64)
    assert_accurate(simulator.ops.kron_logdet(big, one, nothing), torch.log(big).sum())
    for value in (5e-320, 0.0, -1.0, float("inf"), float("nan")):
        special = torch.tensor([[2.0, value]], dtype=torch.float64)
        assert_accurate(simulator.ops.kron_logdet(special, one, nothing), torch.log(special).sum())
