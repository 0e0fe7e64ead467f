"""Bilinear layers: against the dense GGN where they are exact, and against a linear layer on the products of the inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ella_cuda.laplace import KronLaplace


class Products(nn.Module):
    """A linear layer on all products of the two inputs' entries."""

    def __init__(self, bilinear: nn.Bilinear) -> None:
        super().__init__()
        self.linear = nn.Linear(bilinear.weight[0].numel(), bilinear.out_features, dtype=torch.float64)
        with torch.no_grad():
            self.linear.weight.copy_(bilinear.weight.flatten(1))
            self.linear.bias.copy_(bilinear.bias)

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        return self.linear((input1[..., :, None] * input2[..., None, :]).flatten(-2))


class Network(nn.Module):
    def __init__(self, bilinear: nn.Module) -> None:
        super().__init__()
        self.bilinear = bilinear
        self.head = nn.Linear(12, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = x.tanh()
        inner = self.bilinear(input2=x[..., 3:], input1=x[..., :3])  # in the other order
        return self.head(inner.tanh().flatten(1))


def problem(images: int, positions: int) -> tuple[nn.Bilinear, Tensor, Tensor]:
    layer = nn.Bilinear(3, 2, 12 // positions, dtype=torch.float64)
    return layer, torch.randn(images, positions, 5, dtype=torch.float64), torch.randint(3, (images,))


def test_one_data_point_is_exact(dense_ggn):
    layer, x, y = problem(1, 1)
    model = Network(layer)
    exact = dense_ggn(model, x, y)
    factors = KronLaplace(model).fit([(x, y)]).factors
    block = exact["bilinear.weight"].unflatten(0, (12, 6)).unflatten(2, (12, 6)).permute(1, 0, 3, 2).reshape(72, 72)
    torch.testing.assert_close(factors["bilinear.weight"].to_dense()[0], block, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(factors["bilinear.bias"].outputs[0], exact["bilinear.bias"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("positions", [1, 3])
def test_it_is_a_linear_layer_on_products(positions, dense_ggn, batches):
    layer, x, y = problem(5, positions)
    model, other = Network(layer), Network(Products(layer))
    other.head.load_state_dict(model.head.state_dict())
    found = KronLaplace(model).fit(batches(x, y, 2)).factors
    expected = KronLaplace(other).fit([(x, y)]).factors
    for name in ("weight", "bias"):
        ours, theirs = found[f"bilinear.{name}"], expected[f"bilinear.linear.{name}"]
        torch.testing.assert_close(ours.inputs, theirs.inputs, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(ours.outputs, theirs.outputs, rtol=1e-9, atol=1e-12)
    exact = dense_ggn(model, x, y)["bilinear.bias"]
    torch.testing.assert_close(found["bilinear.bias"].outputs[0], exact, rtol=1e-9, atol=1e-12)
