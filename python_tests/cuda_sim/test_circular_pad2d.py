"""circular_pad2d and circular_fold2d against indices modulo the image's sides, with places counted in 31 bits and in 63."""

from __future__ import annotations

import pytest
import torch

from python_tests.ops.test_circular_pad2d import folded, wrapped

from .checking import DTYPES, LAYOUTS, arrange, assert_accurate, in_every_order

# N, C, H, W, pad_h, pad_w; the simulator counts up to 3,000 places in 31 bits.
SHAPES = [
    (3, 2, 5, 6, 1, 1),
    (2, 3, 4, 7, 0, 2),
    (2, 1, 2, 3, 5, 10),
    (5, 2, 1, 1, 1, 2),
    (4, 3, 16, 16, 1, 1),  # more than one block
    (1, 1, 3, 2, 600, 1),  # places counted in 63 bits
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("moves", [None, "close", "spaced"])
def test_pad_and_fold(simulator, shape, dtype, layout, moves):
    """Images as they are, or moved by their component first."""
    n, c, h, w, pad_h, pad_w = shape
    index = None if moves is None else torch.arange(n) * 3 % 4 + (n == 1)
    if moves == "spaced":
        index = torch.stack([index, torch.full((n,), -1)], 1)[:, 0]
    x = arrange(torch.randn(n, c, h, w, dtype=dtype), layout)
    (y,) = in_every_order(simulator, lambda: simulator.ops.circular_pad2d(x, pad_h, pad_w, index))
    assert torch.equal(y, wrapped(x, pad_h, pad_w, index))
    grad = arrange(torch.randn(y.shape, dtype=dtype), layout)
    (back,) = in_every_order(simulator, lambda: simulator.ops.circular_fold2d(grad, pad_h, pad_w, index))
    exact, own = (folded(g, h, w, pad_h, pad_w, index) for g in (grad.double(), grad))
    assert_accurate(back, exact, own)


def test_no_component_is_nan(simulator):
    """That image alone: the device is not waited for."""
    index = torch.tensor([1, 4, -1, 3])
    for out in (
        simulator.ops.circular_pad2d(torch.ones(4, 2, 4, 4), 1, 1, index),
        simulator.ops.circular_fold2d(torch.ones(4, 2, 6, 6), 1, 1, index),
    ):
        assert out.isnan().flatten(1).all(1).tolist() == [False, True, True, False]
        assert not out[::3].isnan().any()


@pytest.mark.parametrize("size", [(0, 2, 4, 5), (2, 0, 4, 5)])
def test_empty(simulator, size):
    y = simulator.ops.circular_pad2d(torch.zeros(size), 1, 2, None)
    assert y.shape == (*size[:2], 6, 9)
    assert simulator.ops.circular_fold2d(y, 1, 2, None).shape == size
    assert simulator.ops.circular_pad2d(torch.zeros(2, 3, 0, 4), 0, 1, torch.tensor([1, 2])).shape == (2, 3, 0, 6)
