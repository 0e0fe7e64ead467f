"""The layout of factors inside parameter tensors."""

from __future__ import annotations

import pytest
import torch

from ella_cuda.laplace.factors import FactorShape


@pytest.mark.parametrize("layout", ["gba", "bga", "gab"])
def test_blocks_are_the_elements_of_the_layout(layout: str) -> None:
    shape = FactorShape(2, 3, 5, 1, layout=layout)
    sizes = [{"g": 2, "a": 3, "b": 5}[axis] for axis in layout]
    tensor = torch.arange(60).view(2, *sizes)
    expected = torch.einsum(f"n{layout}->ngab", tensor)
    assert torch.equal(shape.to_blocks(tensor, 1), expected)
    assert torch.equal(shape.from_blocks(expected, sizes), tensor)


def test_a_block_of_a_parameter_without_axes_is_a_number():
    shape, number = FactorShape.bias(1), torch.tensor(3.0)
    assert shape.from_blocks(shape.to_blocks(number), number.shape).equal(number)
