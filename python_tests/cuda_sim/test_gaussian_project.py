"""gaussian_project and its derivatives against the kernel matrix written out, differentiated by torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from python_tests.ops.test_gaussian_project import formulas

from .checking import DTYPES, LAYOUTS, arrange, assert_accurate, in_every_order
from .simulator import Simulator

# M, X, A, P: one of everything; less than a tile; tiles and a rest of each axis; shares of the points and of the rows
SIZES = [(1, 1, 1, 1), (5, 4, 2, 2), (150, 19, 70, 3), (3, 300, 66, 2), (400, 70, 5, 2), (0, 3, 2, 2), (3, 0, 2, 2)]


def arguments(size: tuple[int, ...], dtype: torch.dtype, layout: str = "contiguous") -> tuple[Tensor, ...]:
    """grad, x, u, v, du, dv."""
    M, X, A, P = size
    signals = [torch.randn(M, A, dtype=dtype), torch.randn(M, X, dtype=dtype)]
    points = [torch.randn(n, P, dtype=torch.float64) for n in (X, A, X, A)]
    return tuple(arrange(t, layout) for t in signals + points)


def matrix(u: Tensor, v: Tensor) -> Tensor:
    return torch.exp(-0.5 * (u - v[:, None]).square().sum(2))


def exact(*given: Tensor) -> tuple[Tensor, ...]:
    """Product, tangent, gradient and Hessian product in float64."""
    return tuple(torch.from_numpy(values) for values in formulas(*given).values())


def run(simulator: Simulator, grad: Tensor, x: Tensor, *points: Tensor) -> tuple[Tensor, ...]:
    u, v = points[:2]
    return (
        simulator.ops.gaussian_project(x, u, v),
        simulator.ops.gaussian_project_tangent(x, *points),
        *simulator.ops.gaussian_project_gradient(grad, x, u, v),
        *simulator.ops.gaussian_project_hvp(grad, x, *points),
    )


def check(results: tuple[Tensor, ...], expected: tuple[Tensor, ...], x: Tensor) -> None:
    """float64 derivatives of float32 signals are as accurate as those are."""
    for result, right in zip(results, expected, strict=True):
        assert_accurate(result.to(x.dtype), right)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_product_and_derivatives(simulator, size, dtype):
    given = arguments(size, dtype)
    results = in_every_order(simulator, lambda: run(simulator, *given))
    assert [r.dtype for r in results] == 2 * [dtype] + 4 * [torch.float64]
    check(results, exact(*given), given[1])


@pytest.mark.parametrize("multiprocessors", [1, 40])
def test_shares(simulator, multiprocessors):
    """However many blocks share a sum."""
    given = arguments((300, 200, 5, 2), torch.float64)
    with simulator.scheduled(multiprocessors=multiprocessors):
        results = run(simulator, *given)
    check(results, exact(*given), given[1])


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_layouts(simulator, layout):
    given = arguments((20, 18, 9, 2), torch.float64, layout)
    check(run(simulator, *given), exact(*given), given[1])


def test_nan_and_overflow(simulator):
    """NaN in x, a point or an anchor goes where it belongs; beyond the range of e derivatives are zero."""
    _, x, u, v, *_ = arguments((5, 70, 66, 2), torch.float32)
    for name, index in (("x", (2, 69)), ("u", (69, 1)), ("v", (65, 0))):
        given = {"x": x.clone(), "u": u.clone(), "v": v.clone()}
        given[name][index] = float("nan")
        grad = torch.ones(5, 66)
        product = simulator.ops.gaussian_project(*given.values())
        assert torch.equal(product.isnan(), (given["x"] @ matrix(given["u"], given["v"]).float().T).isnan())
        by_point, by_anchor = simulator.ops.gaussian_project_gradient(grad, *given.values())
        assert by_point.isnan().any(1).sum() == (70 if name == "v" else 1)
        assert by_anchor.isnan().any(1).sum() == (1 if name == "v" else 66)
    far = torch.tensor([[1e37, -1e37], [0.0, 0.0]], dtype=torch.float64)
    origin, one = torch.zeros(1, 2, dtype=torch.float64), torch.ones(1, 2)
    product, *derivatives = run(simulator, one[:, :1], one, far, origin, far, origin)
    assert product == 1
    assert all(torch.equal(d, torch.zeros_like(d)) for d in derivatives)
