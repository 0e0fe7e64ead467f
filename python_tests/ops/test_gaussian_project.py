"""The product with a Gaussian kernel matrix and its derivatives, against formulas in numpy, closed forms and autograd."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from ella_cuda.ops.gaussian_project import _gradient, _hvp, _tangent, gaussian_project, gaussian_project_torch
from python_tests.ops import checks

POINTS = [("X P", torch.float64), ("A P", torch.float64)]
OPERANDS = {
    "gaussian_project": checks.Operands([("M X",), *POINTS]),
    "gaussian_project_tangent": checks.Operands([("M X",), *POINTS, *POINTS]),
    "gaussian_project_gradient": checks.Operands([("M A",), ("M X",), *POINTS]),
    "gaussian_project_hvp": checks.Operands([("M A",), ("M X",), *POINTS, *POINTS]),
}

# M, X, A, P: one of everything; whole vectors and not; few anchors; several tiles, panels, shares and reduction lengths
SHAPES = [
    (1, 1, 1, 1), (5, 4, 2, 2), (3, 70, 2, 2), (7, 33, 17, 3), (1, 600, 300, 2), (4200, 20, 6, 2), (300, 300, 140, 1),
]  # fmt: skip


def arguments(
    shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    m, x, a, p = shape
    signals = {"grad": torch.randn(m, a, dtype=dtype), "x": torch.randn(m, x, dtype=dtype)}
    points = {"u": (x, p), "v": (a, p), "du": (x, p), "dv": (a, p)}
    values = signals | {name: torch.randn(size, dtype=torch.float64) for name, size in points.items()}
    return {name: value.to(device) for name, value in values.items()}


DIFFERENTIABLE = {
    "gaussian_project": checks.Case(
        gaussian_project,
        gaussian_project_torch,
        gaussian_project_torch,
        lambda *made: tuple(arguments(*made)[name] for name in ("x", "u", "v")),
        small=[(2, 3, 2, 1), (2, 3, 2, 2)],
    )
}


def formulas(grad: Tensor, x: Tensor, u: Tensor, v: Tensor, du: Tensor, dv: Tensor) -> dict[str, np.ndarray]:
    """All four results in float64 and numpy, from the formulas."""
    grad, x, u, v, du, dv = (t.double().cpu().numpy() for t in (grad, x, u, v, du, dv))
    d, delta = u - v[:, None], du - dv[:, None]  # (A, X, P)
    e, along = np.exp(-(d**2).sum(2) / 2), (d * delta).sum(2)
    weight = np.einsum("ma,mx,ax->ax", grad, x, e, optimize=True)
    first = -np.einsum("ax,axp->axp", weight, d)
    second = np.einsum("ax,axp->axp", weight, along[..., None] * d - delta)
    return {
        "value": np.einsum("mx,ax->ma", x, e),
        "tangent": np.einsum("mx,ax->ma", x, -along * e),
        "gu": first.sum(0),
        "gv": -first.sum(1),
        "hu": second.sum(0),
        "hv": -second.sum(1),
    }


def results(grad: Tensor, x: Tensor, u: Tensor, v: Tensor, du: Tensor, dv: Tensor) -> dict[str, Tensor]:
    (gu, gv), (hu, hv) = _gradient(grad, x, u, v), _hvp(grad, x, u, v, du, dv)
    return {
        "value": gaussian_project(x, u, v),
        "tangent": _tangent(x, u, v, du, dv),
        "gu": gu,
        "gv": gv,
        "hu": hu,
        "hv": hv,
    }


def assert_close(actual: dict[str, Tensor], expected: dict[str, np.ndarray], relative: float) -> None:
    for name, value in actual.items():
        exact = torch.from_numpy(expected[name])
        scale = float(exact.abs().max()) if exact.numel() else 0.0
        checks.assert_same(value.double().cpu(), exact, rtol=0, atol=relative * scale)


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_formulas(shape, device):
    values = arguments(shape, device)
    assert_close(results(**values), formulas(**values), 1e-13)
    values = arguments(shape, device, torch.float32)
    got = results(**values)
    assert got["value"].dtype == torch.float32
    assert got["gu"].dtype == torch.float64
    assert_close(got, formulas(**values), 3e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_accuracy(shape, device):
    """In float32 at most twice torch's error, for the product and for every gradient."""
    values = arguments(shape, device, torch.float32)
    x, u, v, grad = (values[name] for name in ("x", "u", "v", "grad"))

    def value_and_gradients(function, x, u, v, grad):
        leaves = [t.clone().requires_grad_() for t in (x, u, v)]
        y = function(*leaves)
        return y, *torch.autograd.grad(y, leaves, grad)

    exact = value_and_gradients(gaussian_project_torch, x.double(), u, v, grad.double())
    reference = value_and_gradients(gaussian_project_torch, x, u, v, grad)
    for ours, theirs, right in zip(value_and_gradients(gaussian_project, x, u, v, grad), reference, exact, strict=True):
        checks.error_at_most_twice(ours.float(), theirs.float(), right)


def test_differences_of_far_points_are_exact(device):
    """In float32 a coordinate of 2^20 + 0.3 would be rounded by 0.02, a difference of 0.3 with it."""
    u = torch.tensor([[2.0**20 + 0.3]], dtype=torch.float64, device=device)
    v = torch.tensor([[2.0**20]], dtype=torch.float64, device=device)
    y = gaussian_project(torch.ones(1, 1, device=device), u, v)
    assert abs(float(y) - np.exp(-(0.3**2) / 2)) < 2e-7


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float32, 13.2), (torch.float64, 37.6)])
def test_the_exponential_over_its_whole_range(dtype, largest, device):
    """One signal at the origin: the value at distance r is exp(-r^2 / 2), down to the smallest normal number, then 0."""
    r = torch.cat([torch.linspace(0, largest, 4001, dtype=torch.float64), torch.tensor([39.0, 1e10, 1e30])])
    origin = torch.zeros(1, 1, dtype=torch.float64, device=device)
    y = gaussian_project(torch.ones(1, 1, dtype=dtype, device=device), origin, r[:, None].to(device))[0].double().cpu()
    exact = torch.exp(-r.square() / 2)
    units = 4 + 2 * r.square()  # rounding r^2 / 2 alone moves the result by r^2 / 2 units
    assert ((y - exact).abs() <= torch.finfo(dtype).eps * units * exact)[:-3].all()
    assert torch.equal(y[-3:], torch.zeros(3, dtype=torch.float64))
    assert y[0] == 1


def test_nothing_comes_from_beyond_the_range(device):
    """Where E underflows it wins over distances whose squares overflow: derivatives are zero, not NaN."""
    for dtype in (torch.float32, torch.float64):
        far = 1e37 if dtype == torch.float32 else 1e300
        u = torch.tensor([[far, -far], [0.0, 0.0]], dtype=torch.float64, device=device)
        v = torch.zeros(1, 2, dtype=torch.float64, device=device)
        one = torch.ones(1, 2, dtype=dtype, device=device)
        got = results(one[:, :1], one, u, v, u, v)
        assert float(got.pop("value")) == 1
        assert all(torch.equal(value, torch.zeros_like(value)) for value in got.values())


def test_every_layout(device):
    values = arguments((6, 20, 9, 2), device)
    for name in values:
        for _, laid_out in checks.layouts(values[name]):
            changed = {**values, name: laid_out}
            assert_close(results(**changed), formulas(**changed), 1e-13)


@pytest.mark.parametrize("shape", [(0, 3, 2, 2), (3, 0, 2, 2), (3, 4, 0, 2), (3, 4, 2, 0)])
def test_empty(shape, device):
    for dtype in (torch.float32, torch.float64):
        values = arguments(shape, device, dtype)
        assert_close(results(**values), formulas(**values), 1e-6)


@pytest.mark.parametrize("few", [True, False])
def test_nan_stays_where_it_belongs(few, device):
    """A signal that is not a number spoils its own row, a point all rows through its column, an anchor its column."""
    anchors = 2 if few else 40
    values = arguments((4, 5, anchors, 2), device)
    x, u, v = (values[name] for name in ("x", "u", "v"))
    spoilt = x.clone()
    spoilt[2, 1] = float("nan")
    assert torch.equal(gaussian_project(spoilt, u, v).isnan().any(1).cpu(), torch.tensor([False, False, True, False]))
    moved = v.clone()
    moved[1, 0] = float("nan")
    assert torch.equal(gaussian_project(x, u, moved).isnan().all(0).cpu(), torch.arange(anchors) == 1)
    assert torch.equal(gaussian_project(x, u, moved).isnan().any(0).cpu(), torch.arange(anchors) == 1)


def test_derivatives(device):
    values = {name: value.requires_grad_() for name, value in arguments((2, 3, 2, 2), device).items()}
    grad, x, u, v, du, dv = values.values()
    checks.check_derivatives(_tangent, (x, u, v, du, dv))
    checks.check_derivatives(_gradient, (grad, x, u, v))
    checks.check_derivatives(_hvp, (grad, x, u, v, du, dv))


@pytest.mark.parametrize("order", [2, 3])
def test_every_nesting_of_forward_and_reverse(order, device):
    values = arguments((1, 2, 1, 1) if order == 3 else (2, 2, 2, 1), device)
    args = tuple(values[name] for name in ("x", "u", "v"))
    for chain in itertools.product((torch.func.jacfwd, torch.func.jacrev), repeat=order):
        ours, reference = gaussian_project, gaussian_project_torch
        for transform in chain:
            ours, reference = transform(ours, (0, 1, 2)), transform(reference, (0, 1, 2))
        checks.assert_same(ours(*args), reference(*args))


def test_vmap(device):
    values = arguments((2, 3, 2, 2), device)
    grad, x, u, v, du, dv = values.values()
    checks.check_vmap(lambda x, u, du: _tangent(x, u, v, du, dv), (x, u, du))
    checks.check_vmap(lambda grad, x: torch.cat(_gradient(grad, x, u, v)), (grad, x))


def test_no_matrix_is_stored():
    """E of 3000 x 1500 would be 18 MB in float32; the value, its first and second derivatives together need less than half."""
    x, u, v = torch.randn(4, 3000), torch.randn(3000, 2, dtype=torch.float64), torch.randn(1500, 2, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (x, u, v)]

    def derivatives() -> None:
        gradients = torch.autograd.grad(gaussian_project(*leaves).square().sum(), leaves, create_graph=True)
        torch.autograd.grad(sum(g.square().sum() for g in gradients), leaves)

    assert 0 < checks.peak_bytes(derivatives) < 9e6


def test_results_do_not_depend_on_threads():
    values = arguments((4200, 300, 140, 2), torch.device("cpu"), torch.float32)
    checks.same_for_any_number_of_threads(lambda: results(**values), (1, 3))
