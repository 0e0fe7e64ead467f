"""Where Kronecker factors are exact, they equal the dense generalised Gauss-Newton matrix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ella_cuda.laplace import KronLaplace
from ella_cuda.nn import FactoredLinear2d, PolyphasePool2d, RelaxedEquivariance


def randomise(model: nn.Module) -> nn.Module:
    for p in model.parameters():
        nn.init.normal_(p, std=0.7)
    return model.double()


def targets(likelihood: str, n: int, k: int) -> Tensor:
    return torch.randint(k, (n,)) if likelihood == "classification" else torch.randn(n, k, dtype=torch.float64)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11 * expected.abs().max().item())


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_linear_weights_are_exact_for_one_data_point(likelihood, dense_ggn):
    model = randomise(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)))
    x, y = torch.randn(1, 4, dtype=torch.float64), targets(likelihood, 1, 3)
    factors = KronLaplace(model, likelihood).fit([(x, y)]).factors
    for name, ggn in dense_ggn(model, x, y, likelihood).items():
        if "weight" in name:  # flatten order is (output, input), the factor's (input, output)
            out, inp = model.get_parameter(name).shape
            ggn = ggn.view(out, inp, out, inp).permute(1, 0, 3, 2).reshape(out * inp, -1)
        close(factors[name].to_dense()[0], ggn)


@pytest.mark.parametrize("padding_mode", ["circular", "zeros"])
def test_a_convolution_with_one_output_position_is_exact_for_one_data_point(padding_mode, dense_ggn):
    conv = nn.Conv2d(2, 3, 3, stride=3, padding=1, padding_mode=padding_mode)  # a 3x3 image padded to 5x5: one position
    model = randomise(nn.Sequential(nn.Conv2d(1, 2, 1), nn.Tanh(), conv, nn.Flatten()))
    x, y = torch.randn(1, 1, 3, 3, dtype=torch.float64), targets("classification", 1, 3)
    factor = KronLaplace(model).fit([(x, y)]).factors["2.weight"]
    ggn = dense_ggn(model, x, y)["2.weight"].view(3, 18, 3, 18).permute(1, 0, 3, 2).reshape(54, 54)
    close(factor.to_dense()[0], ggn)


def test_factored_weights_per_channel_are_the_exact_diagonal_blocks_for_one_data_point(dense_ggn):
    c, d, x_size, y_size = 2, 3, (2, 2), (2, 1)
    model = randomise(
        nn.Sequential(
            nn.Conv2d(1, c, 1), FactoredLinear2d(c, d, x_size, y_size), nn.Tanh(), nn.Flatten(), nn.Linear(6, 3)
        )
    )
    x, y = torch.randn(1, 1, 2, 2, dtype=torch.float64), targets("classification", 1, 3)
    factors = KronLaplace(model, resolution="per_channel").fit([(x, y)]).factors
    ggn = dense_ggn(model, x, y)
    dense_in, dense_out = ggn["1.weight_in"].view(d, c, 4, d, c, 4), ggn["1.weight_out"].view(d, c, 2, d, c, 2)
    for i in range(c):
        close(factors["1.weight_in"].to_dense()[i], dense_in[:, i, :, :, i, :].permute(1, 0, 3, 2).reshape(12, 12))
    for i in range(d):
        close(factors["1.weight_out"].to_dense()[i], dense_out[i, :, :, i, :, :].reshape(4, 4))


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("resolution", ["shared", "per_channel"])
def test_biases_are_exact_for_many_data_points_in_a_mixed_network(likelihood, resolution, dense_ggn, batches):
    paths = {
        "f_fc": FactoredLinear2d(3, 4, 4, 2),
        "conv": nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), PolyphasePool2d()),
    }
    model = randomise(
        nn.Sequential(
            nn.Conv2d(2, 3, (3, 2), padding="same", dilation=(1, 2)),
            nn.ReLU(inplace=True),
            RelaxedEquivariance(paths),
            nn.ReLU(inplace=True),
            nn.Flatten(2),
            nn.Linear(4, 2),  # weights shared over the 4 channels
            nn.Flatten(),
            nn.Linear(8, 3),
        )
    )
    x, y = torch.randn(5, 2, 4, 4, dtype=torch.float64), targets(likelihood, 5, 3)
    factors = KronLaplace(model, likelihood, resolution=resolution).fit(batches(x, y, 3)).factors
    biases = {name: ggn for name, ggn in dense_ggn(model, x, y, likelihood).items() if "bias" in name}
    assert len(biases) == 6
    for name, ggn in biases.items():
        close(factors[name].to_dense()[0], ggn)
