"""basis_matrix and basis_project against loops in numpy and closed forms."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from ella_cuda import ops
from ella_cuda.ops.basis import INTERPOLATION_NOISE
from python_tests.ops import checks

KINDS = ("exponential", "interpolating")


def arguments(
    device: torch.device, rows: tuple[int, ...] = (3,), x: int = 6, a: int = 3, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Signals, points, anchors and an inverse lengthscale."""
    values = torch.randn(*rows, x), 2 * torch.randn(x, 2), 2 * torch.randn(a, 2), torch.tensor(0.8)
    return tuple(t.to(device, dtype) for t in values)


DIFFERENTIABLE = {
    f"basis_project {kind}": checks.Case(
        partial(ops.basis_project, kind=kind),
        partial(ops.basis_project_torch, kind=kind),
        partial(ops.basis_project_torch, kind=kind),
        lambda sizes, device, dtype: arguments(device, *sizes, dtype),
        small=[((2,), 3, 2)],
        laid_out=[((4, 2), 6, 3)],
        empty=[((0,), 3, 2), ((2, 0), 3, 2), ((2,), 0, 2), ((2,), 3, 0), ((2, 3), 0, 0)],
    )
    for kind in KINDS
}


def matrix(points: Tensor, anchors: Tensor, w: float, kind: str) -> np.ndarray:
    """The definition, in numpy and float64."""
    p, q = points.double().cpu().numpy(), anchors.double().cpu().numpy()

    def kernel(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return np.exp(-(w**2) * ((left[:, None] - right) ** 2).sum(2) / 2)

    if kind == "exponential":
        return kernel(q, p)
    return np.linalg.inv(kernel(q, q) + INTERPOLATION_NOISE**2 * np.eye(len(q))) @ kernel(q, p)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [(), (3,), (2, 5)])
@pytest.mark.parametrize("w", [0.0, 0.3, 1.0, 4.0])
def test_equals_the_definition(kind, rows, w, device):
    x, points, anchors, _ = arguments(device, rows, 40, 7)
    psi = matrix(points, anchors, w, kind)
    checks.assert_same(ops.basis_matrix(points, anchors, w, kind).cpu(), torch.from_numpy(psi), rtol=1e-9, atol=1e-10)
    expected = torch.from_numpy(x.cpu().numpy() @ psi.T).to(device)
    for given in (w, torch.tensor(w, device=device), torch.tensor([w], dtype=torch.float64, device=device)):
        single = isinstance(given, Tensor) and given.dtype == torch.float32 and w == 0.3  # 0.3 is rounded there
        tolerance = 1e-5 if single else 1e-9
        checks.assert_same(ops.basis_project(x, points, anchors, given, kind), expected, rtol=tolerance, atol=tolerance)


def test_the_default_is_interpolating(device):
    x, points, anchors, w = arguments(device)
    checks.assert_same(
        ops.basis_project(x, points, anchors, w), ops.basis_project(x, points, anchors, w, "interpolating")
    )
    checks.assert_same(ops.basis_matrix(points, anchors, w), ops.basis_matrix(points, anchors, w, "interpolating"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_a_lengthscale_everything_is_constant(dtype, device):
    """At w = 0 every position is the same place: sums of rows, divided by A + s^2 when interpolating."""
    x, points, anchors, _ = arguments(device, (3,), 50, 20, dtype)
    zero = torch.zeros((), dtype=dtype, device=device, requires_grad=True)
    total = x.double().sum(1, keepdim=True).expand(3, 20)
    for kind, divisor in (("exponential", 1), ("interpolating", 20 + INTERPOLATION_NOISE**2)):
        y = ops.basis_project(x, points, anchors, zero, kind)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-9
        checks.assert_same(y.double(), total / divisor, rtol=tolerance, atol=tolerance)
        (slope,) = torch.autograd.grad(y.sum(), zero)
        assert slope == 0  # the basis is even in w


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_towards_an_infinite_lengthscale(dtype, device):
    """As w -> 0 the interpolation tends to the constant 1 / (A + s^2), without a jump where the kernel becomes singular."""
    _, points, anchors, _ = arguments(device, (1,), 50, 20, dtype)
    limit = 1 / (20 + INTERPOLATION_NOISE**2)
    distances = [
        float((ops.basis_matrix(points, anchors, w) - limit).abs().max()) for w in (1e-2, 1e-3, 1e-4, 1e-6, 1e-12)
    ]
    assert all(b <= a for a, b in itertools.pairwise(distances))
    assert distances[-1] <= 4 * torch.finfo(dtype).eps * (1e4 if dtype == torch.float64 else 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_anchors_on_one_spot(dtype, device):
    """n anchors in one place share the weight of one: k / (n + s^2) each; values and gradients stay numbers."""
    points = torch.randn(30, 2, dtype=dtype, device=device)
    anchors = torch.tensor([[0.3, -0.2]], dtype=dtype, device=device).repeat(40, 1).requires_grad_()
    w = torch.tensor(1.3, dtype=dtype, device=device, requires_grad=True)
    psi = ops.basis_matrix(points, anchors, w)
    one = np.exp(-(1.3**2) / 2 * ((points.cpu().double().numpy() - [0.3, -0.2]) ** 2).sum(1)) / (40 + 1e-4)
    expected = torch.from_numpy(one).to(device).expand(40, 30)
    checks.assert_same(psi.detach().double(), expected, rtol=1e-5 if dtype == torch.float32 else 1e-7, atol=1e-9)
    for gradient in torch.autograd.grad(psi.square().sum(), (anchors, w)):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("a", [2, 128, 512])
def test_close_anchors_in_float32(a, device):
    """Anchors much closer than a lengthscale: the kernel matrix is singular but for the noise, and float32 loses nothing."""
    points = torch.rand(64, 2, device=device)
    anchors = torch.rand(a, 2, device=device)
    for w in (1e-3, 0.1, 1.0):
        psi = ops.basis_matrix(points, anchors, w)
        exact = ops.basis_matrix(points.double(), anchors.double(), w)
        checks.assert_same(psi.double(), exact, rtol=1e-6, atol=1e-6 * float(exact.abs().max()))
        residual = torch.from_numpy(matrix(anchors, anchors, w, "exponential")) + INTERPOLATION_NOISE**2 * torch.eye(a)
        kernel = torch.from_numpy(matrix(points, anchors, w, "exponential"))
        checks.assert_same(residual @ exact.cpu(), kernel, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("w", [1e4, 1e30, 3e38, 1e300])
def test_huge_inverse_lengthscales(kind, dtype, w, device):
    """Only an anchor's own position is left; derivatives up to second order are zero there, not NaN."""
    if dtype == torch.float32 and w > 1e38:
        w = 3e38
    points = torch.tensor([[0.0, 0.0], [15.5, -15.5], [1.0, 1.0]], dtype=dtype, device=device)
    anchors = torch.tensor([[15.5, -15.5], [0.5, 0.5]], dtype=dtype, device=device)
    own = 1.0 if kind == "exponential" else 1 / (1 + INTERPOLATION_NOISE**2)
    expected = torch.tensor([[0.0, own, 0.0], [0.0, 0.0, 0.0]], dtype=dtype, device=device)
    checks.assert_same(ops.basis_matrix(points, anchors, w, kind), expected)
    leaves = [torch.eye(3, dtype=dtype, device=device), points, anchors, torch.tensor(w, dtype=dtype, device=device)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    y = ops.basis_project(*leaves, kind)
    checks.assert_same(y, expected.mT)
    checks.assert_same(ops.basis_project(leaves[0], points, anchors, w, kind), y)
    gradients = torch.autograd.grad(y.sum(), leaves, create_graph=True)
    assert all(g.isfinite().all() for g in gradients)
    assert gradients[3] == 0
    # Not differentiated again in the coordinates: there the second derivative at an anchor, -w^2, may overflow.
    seconds = torch.autograd.grad(gradients[3], leaves, allow_unused=True)
    assert all(s.isfinite().all() for s in seconds if s is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_accuracy(kind, device):
    """In float32, at the first and fourth stage of the paper's network, at most twice the error of torch in float32."""
    for side, rows in ((32, 40), (8, 200)):
        grid = torch.arange(side) - (side - 1) / 2
        points = torch.cartesian_prod(grid, grid).to(device)
        anchors = ((torch.rand(side * side // 2, 2) - 0.5) * (side - 1)).to(device)
        x = torch.randn(rows, side * side, device=device)
        grad = torch.randn(rows, len(anchors), device=device)
        w = torch.tensor(0.83, device=device)

        def in_torch(x, points, anchors, w):
            square = (points - anchors[:, None]).square().sum(-1)
            if kind == "exponential":
                return x @ torch.exp(-0.5 * w**2 * square).mT
            return ops.basis_project_torch(x, points, anchors, w, kind)

        def value_and_gradients(function, *tensors):
            *args, grad = tensors
            leaves = [t.clone().requires_grad_() for t in args]
            y = function(*leaves)
            return y.detach(), *torch.autograd.grad(y, leaves, grad)

        given = (x, points, anchors, w, grad)
        exact = value_and_gradients(in_torch, *(t.double() for t in given))
        reference = value_and_gradients(in_torch, *given)
        ours = value_and_gradients(lambda *t: ops.basis_project(*t, kind), *given)
        for value, theirs, right in zip(ours, reference, exact, strict=True):
            checks.error_at_most_twice(value, theirs, right)


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives(kind, device):
    args = tuple(t.requires_grad_() for t in arguments(device, (2,), 3, 2))
    checks.check_derivatives(lambda *t: ops.basis_matrix(*t, kind), args[1:])


@pytest.mark.parametrize("kind", KINDS)
def test_compile(kind, device):
    args = arguments(device, (2, 2))
    checks.check_compile(lambda *t: ops.basis_matrix(*t, kind), args[1:])
    number = torch.compile(lambda x, p, a: ops.basis_project(x, p, a, 0.8, kind), fullgraph=True, backend="aot_eager")
    checks.assert_same(number(*args[:3]), ops.basis_project(*args, kind))


def test_errors(device):
    x, points, anchors, w = arguments(device)
    number = "inverse_lengthscale must be"
    for call in (lambda *a: ops.basis_project(x, *a), ops.basis_matrix):
        for kind, words, *args in (
            (ValueError, "kind must be one of 'exponential', 'interpolating', got 'linear'", points, anchors, w, "linear"),
            (ValueError, r"kind must be one of.*got \['exponential'\]", points, anchors, w, ["exponential"]),
            (ValueError, r"anchors must have shape \(A, P\) with the P = 2 of points, got \(3, 1\)", points, anchors[:, :1], w),
            (ValueError, "points must have shape", points[0], anchors, w),
            (ValueError, "anchors must have the dtype of points", points, anchors.float(), w),
            (TypeError, r"anchors must be a tensor \(A, P\), got list", points, anchors.tolist(), w),
            (TypeError, r"points must be a tensor \(X, P\), got NoneType", None, anchors, w),
            *((ValueError, f"{number} at least 0 and finite, got", points, anchors, wrong) for wrong in (-1.0, np.nan, np.inf)),
            (ValueError, r"inverse_lengthscale must have one element, got shape \(2,\)", points, anchors, torch.ones(2, device=device)),
            (TypeError, rf"{number} floating point, got torch\.int64", points, anchors, torch.tensor(1, device=device)),
            (TypeError, f"{number} a number or a tensor, got str", points, anchors, "1"),
            (ValueError, rf"{number} on the CPU or on the device of points \(c.*got meta", points, anchors, torch.ones((), device="meta")),
        ):  # fmt: skip
            with pytest.raises(kind, match=words):
                call(*args)
        for wrong in (-1.0, np.nan, np.inf) if device.type == "cpu" else ():
            with pytest.raises(ValueError, match=f"{number} at least 0 and finite, got"):
                call(points, anchors, torch.tensor(wrong))
    for kind in KINDS:  # whatever it is computed with, the message speaks of what was called
        for error, words, *args in (
            (ValueError, "anchors must have shape", x, points, anchors[:, :1], w),
            (TypeError, r"x must be a tensor \(\.\.\., X\), got ndarray", x.cpu().numpy(), points, anchors, w),
            (TypeError, r"x must be float32 or float64, got torch\.int64", x.long(), points, anchors, w),
            (ValueError, r"x must have shape \(\.\.\., X\) with the X = 6 of points, got \(3, 5\)", x[:, :5], points, anchors, w),
            (ValueError, "points must have the dtype of x", x.float(), points, anchors, w),
        ):  # fmt: skip
            with pytest.raises(error, match=f"^basis_project: {words}"):
                ops.basis_project(*args, kind)
    with pytest.raises(TypeError, match=r"points must be float32 or float64, got torch\.int64"):
        ops.basis_matrix(points.long(), anchors.long(), w)
