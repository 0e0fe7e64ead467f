"""The layout of factors inside parameter tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ella_cuda import nn as ella_nn
from ella_cuda.laplace import KronLaplace
from ella_cuda.laplace.factors import FactorShape

LAYERS = {
    "linear": nn.Linear(3, 4),
    "grouped conv": nn.Conv2d(4, 6, 3, groups=2),
    "transposed conv": nn.ConvTranspose2d(4, 6, 3, groups=2),
    "embedding": nn.Embedding(5, 3),
    "f-fc": ella_nn.FactoredLinear2d(2, 3, 4, 2),
    "attention": nn.MultiheadAttention(4, 2),
}


@pytest.mark.parametrize("layout", ["gba", "bga", "gab"])
def test_blocks_are_the_elements_of_the_layout(layout: str) -> None:
    shape = FactorShape(2, 3, 5, 1, layout=layout)
    sizes = [{"g": 2, "a": 3, "b": 5}[axis] for axis in layout]
    tensor = torch.arange(60).view(2, *sizes)
    expected = torch.einsum(f"n{layout}->ngab", tensor)
    assert torch.equal(shape.to_blocks(tensor, 1), expected)
    assert torch.equal(shape.from_blocks(expected, sizes), tensor)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_every_layer_has_its_tensors_back(layer: nn.Module) -> None:
    for rule in KronLaplace(layer).fitted_model.present_rules():
        for name, shape in rule.shapes().items():
            tensor = torch.randn(2, *rule.module.get_parameter(name).shape)
            blocks = shape.to_blocks(tensor, 1)
            assert blocks.shape == (2, shape.groups, shape.inputs, shape.outputs)
            assert torch.equal(shape.from_blocks(blocks, tensor.shape[1:]), tensor)


def test_a_block_of_a_parameter_without_axes_is_a_number():
    shape, number = FactorShape.bias(1), torch.tensor(3.0)
    assert shape.from_blocks(shape.to_blocks(number), number.shape).equal(number)
