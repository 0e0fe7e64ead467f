"""Projection on basis functions, both kinds, at the sizes of the paper's stages; anchors for half the positions."""

from __future__ import annotations

import pytest
import torch

from benchmarks.bench_factored_linear import BATCH, stages
from benchmarks.compiling import compiled
from ella_cuda import ops
from ella_cuda.ops.basis import INTERPOLATION_NOISE


def squared_distances(left, right):
    return (left - right[:, None]).square().sum(-1)


def expression(x, points, anchors, w, kind):
    """Psi rebuilt in torch, as one would write it: in float32 where that is enough."""
    if kind == "exponential":
        psi = torch.exp(-0.5 * w.square() * squared_distances(points, anchors))
    else:
        points, anchors, w = points.double(), anchors.double(), w.double()
        noise = INTERPOLATION_NOISE**2 * torch.eye(len(anchors), dtype=torch.float64, device=anchors.device)
        inner = torch.exp(-0.5 * w.square() * squared_distances(anchors, anchors)) + noise
        outer = torch.exp(-0.5 * w.square() * squared_distances(points, anchors))
        psi = torch.cholesky_solve(outer, torch.linalg.cholesky(inner)).to(x.dtype)
    return x @ psi.T


CANDIDATES = {
    "ella_cuda": ops.basis_project,
    "x @ Psi.T": expression,
    "torch.compile of it": compiled(expression),
}
SHAPES = sorted({(c, x) for c, _, x, _ in stages(10)}, key=lambda shape: (-shape[1], shape[0]))


def work(kind, rows, points, anchors, backward):
    """Operations: the products with x, and for interpolation the factor and solves, twice as slow in float64."""
    product, solve = 2 * rows * points * anchors, 2 * points * anchors**2
    if not backward:
        return product + (2 * (solve + anchors**3 / 3) if kind == "interpolating" else 0)
    # x's gradient and Psi's; of the solve one more, and its result times Psi
    return 3 * product + (2 * (3 * solve + anchors**3 / 3) if kind == "interpolating" else 0)


def arguments(channels, positions, device):
    side = round(positions**0.5)
    grid = torch.arange(side, device=device) - (side - 1) / 2
    points = torch.cartesian_prod(grid, grid)
    anchors = (torch.rand((positions + 1) // 2, 2, device=device) - 0.5) * (side - 1)
    x = torch.randn(BATCH * channels, positions, device=device)
    return x, points, anchors, torch.tensor(1.0, device=device)


def assert_close(actual, expected):
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=1e-3 * float(theirs.square().mean().sqrt()))


@pytest.mark.parametrize("who", CANDIDATES)
@pytest.mark.parametrize(("channels", "positions"), SHAPES)
@pytest.mark.parametrize("kind", ["exponential", "interpolating"])
def test_forward(time, device, kind, channels, positions, who):
    given = arguments(channels, positions, device)
    rows, anchors = len(given[0]), len(given[2])
    call = CANDIDATES[who]
    assert_close([call(*given, kind)], [expression(*(t.double() for t in given), kind)])
    time(
        lambda: call(*given, kind),
        work=f"{kind}, {rows} x {positions} -> {anchors}, forward",
        who=who,
        flops=work(kind, rows, positions, anchors, backward=False),
        bytes=4 * rows * (positions + anchors),
    )


@pytest.mark.parametrize("who", CANDIDATES)
@pytest.mark.parametrize(("channels", "positions"), SHAPES)
@pytest.mark.parametrize("kind", ["exponential", "interpolating"])
def test_forward_and_backward(time, device, kind, channels, positions, who):
    """With the gradients of x, the anchors and the inverse lengthscale."""
    x, points, anchors, w = arguments(channels, positions, device)
    grad = torch.randn(len(x), len(anchors), device=device)
    call = CANDIDATES[who]

    def value_and_gradients(call, x, points, anchors, w, grad):
        leaves = [t.requires_grad_() for t in (x, anchors, w)]
        y = call(x, points, anchors, w, kind)
        return y.detach(), *torch.autograd.grad(y, leaves, grad)

    given = (x, points, anchors, w, grad)
    exact = value_and_gradients(expression, *(t.double().clone() for t in given))
    assert_close(value_and_gradients(call, *given), exact)
    time(
        lambda: value_and_gradients(call, *given),
        work=f"{kind}, {len(x)} x {positions} -> {len(anchors)}, backward too",
        who=who,
        flops=work(kind, len(x), positions, len(anchors), backward=True),
        bytes=4 * 2 * len(x) * (positions + len(anchors)),
    )
