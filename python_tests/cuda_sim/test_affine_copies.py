"""affine_copies and its gradients against torch's affine_grid and grid_sample, with places counted in 31 bits and in 63."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from python_tests.ops import test_affine_copies as copies
from python_tests.ops.test_affine_copies import by_torch

from .checking import DTYPES, LAYOUTS, arrange, assert_accurate, in_every_order
from .simulator import Simulator

pytestmark = [pytest.mark.filterwarnings("ignore:.*unit-size grids")]

# N, S, C, H, W and whether all images share maps; the simulator counts up to 3,000 places in 31 bits.
SHAPES = [
    (2, 3, 2, 5, 6, False),
    (3, 2, 5, 4, 3, True),  # a group of channels and one more
    (2, 2, 1, 1, 5, False),
    (2, 2, 1, 4, 1, True),
    (1, 1, 1, 1, 1, False),
    (1, 2, 1, 70, 61, False),  # two parts of a copy's pixels, places counted in 63 bits
]


def arguments(shape: tuple[int, ...], dtype: torch.dtype, layout: str = "contiguous") -> tuple[Tensor, ...]:
    return tuple(arrange(t, layout) for t in copies.arguments(shape, torch.device("cpu"), dtype))


def with_gradients(grad: Tensor, x: Tensor, maps: Tensor) -> tuple[Tensor, ...]:
    leaves = [t.detach().clone().requires_grad_() for t in (x, maps)]
    y = by_torch(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, grad)


def run(simulator: Simulator, grad: Tensor, x: Tensor, maps: Tensor, direction: Tensor | None) -> tuple[Tensor, ...]:
    gradients = simulator.ops.affine_copies_backward(grad, x, maps, direction, True, True)
    return simulator.ops.affine_copies(x, maps, direction), *gradients


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_and_gradients(simulator, shape, dtype, layout):
    grad, x, maps, _ = arguments(shape, dtype, layout)
    found = in_every_order(simulator, lambda: run(simulator, grad, x, maps, None))
    exact = with_gradients(grad.double(), x.double(), maps.double())
    for ours, right, own in zip(found, exact, with_gradients(grad, x, maps), strict=True):
        if dtype == torch.float64:  # torch's own coordinates are rounded too
            torch.testing.assert_close(ours, right, rtol=1e-10, atol=1e-12 * float(right.abs().max()))
        else:
            assert_accurate(ours, right, own)


@pytest.mark.parametrize("shape", SHAPES)
def test_along_a_direction(simulator, shape):
    """The copies' derivative is their difference quotient, as no kink is near; its gradients are those of what it is multiplied with."""
    grad, x, maps, direction = arguments(shape, torch.float64)
    y, by_x, by_maps = in_every_order(simulator, lambda: run(simulator, grad, x, maps, direction))
    step = 1e-7
    quotient = (by_torch(x, maps + step * direction) - by_torch(x, maps - step * direction)) / (2 * step)
    torch.testing.assert_close(y, quotient, rtol=1e-5, atol=1e-5)
    there, back = ((with_gradients(grad, x, maps + sign * step * direction)) for sign in (1, -1))
    for ours, after, before in zip((by_x, by_maps), there[1:], back[1:], strict=True):
        torch.testing.assert_close(ours, (after - before) / (2 * step), rtol=1e-4, atol=1e-4)


def test_one_gradient_alone(simulator):
    grad, x, maps, _ = arguments(SHAPES[0], torch.float64)
    by_x, by_maps = simulator.ops.affine_copies_backward(grad, x, maps, None, True, True)
    only_x, nothing = simulator.ops.affine_copies_backward(grad, x, maps, None, True, False)
    assert torch.equal(only_x, by_x) and nothing.shape == (0,)
    nothing, only_maps = simulator.ops.affine_copies_backward(grad, x, maps, None, False, True)
    assert torch.equal(only_maps, by_maps) and nothing.shape == (0,)


def test_a_map_that_is_not_finite(simulator):
    grad, x, maps, _ = arguments((2, 2, 1, 4, 4, False), torch.float32)
    maps[1, 0, 0, 1] = float("inf")
    y, by_x, by_maps = in_every_order(simulator, lambda: run(simulator, grad, x, maps, None))
    expected = [[False, False], [True, False]]
    for found, axes, wanted in ((y, 2, expected), (by_x, 1, [False, True]), (by_maps, 2, expected)):
        missing = found.isnan().flatten(axes)
        assert missing.all(axes).tolist() == missing.any(axes).tolist() == wanted
