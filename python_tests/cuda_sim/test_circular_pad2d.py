"""circular_pad2d and circular_fold2d against indices modulo the image's sides, with places counted in 31 bits and in 63."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from .checking import DTYPES, LAYOUTS, arrange, assert_accurate, in_every_order
from .simulator import Simulator

pytestmark = pytest.mark.simulator

# N, C, H, W, pad_h, pad_w; the simulator counts up to 3,000 places in 31 bits.
SHAPES = [
    (3, 2, 5, 6, 1, 1),
    (2, 3, 4, 7, 0, 2),
    (2, 1, 2, 3, 5, 10),
    (5, 2, 1, 1, 1, 2),
    (4, 3, 16, 16, 1, 1),  # more than one block
    (1, 1, 3, 2, 600, 1),  # places counted in 63 bits
]


def places(size: int, pad: int) -> Tensor:
    return torch.arange(-pad, size + pad) % size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pad(simulator: Simulator, shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> None:
    n, c, h, w, pad_h, pad_w = shape
    x = arrange(torch.randn(n, c, h, w, dtype=dtype), layout)
    (y,) = in_every_order(simulator, lambda: simulator.ops.circular_pad2d(x, pad_h, pad_w, None))
    assert torch.equal(y, x[:, :, places(h, pad_h)][..., places(w, pad_w)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fold(simulator: Simulator, shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> None:
    n, c, h, w, pad_h, pad_w = shape
    grad = arrange(torch.randn(n, c, h + 2 * pad_h, w + 2 * pad_w, dtype=dtype), layout)
    (x,) = in_every_order(simulator, lambda: simulator.ops.circular_fold2d(grad, pad_h, pad_w, None))

    def sums(values: Tensor) -> Tensor:
        rows = torch.zeros(n, c, h, w + 2 * pad_w, dtype=values.dtype).index_add_(2, places(h, pad_h), values)
        return torch.zeros(n, c, h, w, dtype=values.dtype).index_add_(3, places(w, pad_w), rows)

    assert_accurate(x, sums(grad.double()), sums(grad))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spaced", [False, True])
def test_images_moved_by_their_component(simulator: Simulator, shape: tuple[int, ...], spaced: bool) -> None:
    n, c, h, w, pad_h, pad_w = shape
    index = torch.arange(n) * 3 % 4 + (1 if n == 1 else 0)
    if spaced:
        index = torch.stack([index, torch.full((n,), -1)], 1)[:, 0]
    x, grad = torch.randn(n, c, h, w), torch.randn(n, c, h + 2 * pad_h, w + 2 * pad_w)
    (y,) = in_every_order(simulator, lambda: simulator.ops.circular_pad2d(x, pad_h, pad_w, index))
    (back,) = in_every_order(simulator, lambda: simulator.ops.circular_fold2d(grad, pad_h, pad_w, index))
    (still,) = in_every_order(simulator, lambda: simulator.ops.circular_fold2d(grad, pad_h, pad_w, None))
    for image, i in enumerate(index.tolist()):
        moved = x[image].roll((-(i & 1), -(i >> 1)), (1, 2))
        assert torch.equal(y[image], moved[:, places(h, pad_h)][..., places(w, pad_w)])
        torch.testing.assert_close(back[image], still[image].roll((i & 1, i >> 1), (1, 2)))


def test_no_component_is_nan(simulator: Simulator) -> None:
    """That image alone: the device is not waited for."""
    index = torch.tensor([1, 4, -1, 3])
    for out in (
        simulator.ops.circular_pad2d(torch.ones(4, 2, 4, 4), 1, 1, index),
        simulator.ops.circular_fold2d(torch.ones(4, 2, 6, 6), 1, 1, index),
    ):
        assert out.isnan().flatten(1).all(1).tolist() == [False, True, True, False]
        assert not out[::3].isnan().any()


@pytest.mark.parametrize("size", [(0, 2, 4, 5), (2, 0, 4, 5)])
def test_empty(simulator: Simulator, size: tuple[int, ...]) -> None:
    y = simulator.ops.circular_pad2d(torch.zeros(size), 1, 2, None)
    assert y.shape == (*size[:2], 6, 9)
    assert simulator.ops.circular_fold2d(y, 1, 2, None).shape == size
    assert simulator.ops.circular_pad2d(torch.zeros(2, 3, 0, 4), 0, 1, torch.tensor([1, 2])).shape == (2, 3, 0, 6)
