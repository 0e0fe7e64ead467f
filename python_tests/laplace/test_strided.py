"""The rule of a strided convolution: its factors are those of a convolution and adaptive polyphase sampling as layers of their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ella_cuda import ops
from ella_cuda.laplace import KronLaplace
from ella_cuda.nn import CircularConv2d, PolyphasePool2d, StridedCircularConv2d
from python_tests.laplace.checks import assert_same_factors, image_batches


def in_a_row(in_channels: int, out_channels: int, kernel_size: int, bias: bool, norm: float) -> nn.Sequential:
    return nn.Sequential(CircularConv2d(in_channels, out_channels, kernel_size, bias), PolyphasePool2d(norm))


def network(layer, kernels: tuple[int, int] = (3, 3), bias: bool = True, norm: float = 2) -> nn.Sequential:
    torch.manual_seed(0)
    first, second = layer(2, 3, kernels[0], bias, norm), layer(3, 4, kernels[1], bias, norm)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)).double()


def fits(device: torch.device, memory_budget: int | None = None, **options) -> list[KronLaplace]:
    """Of the network with either layer."""
    models = [network(layer, **options).to(device) for layer in (StridedCircularConv2d, in_a_row)]
    return [KronLaplace(m, memory_budget=memory_budget).fit(data(device)) for m in models]


def data(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    return image_batches(device, 8)


@pytest.mark.parametrize("kernels", [(3, 3), (5, 3), (1, 3), (3, 1)])
@pytest.mark.parametrize("memory_budget", [1, 1 << 26])
def test_factors_are_those_of_two_layers(kernels, memory_budget, device, way):
    assert_same_factors(*fits(device, memory_budget, kernels=kernels))


def test_the_gradient_of_the_convolution_is_not_formed(monkeypatch, device, way):
    """It would be scattered from the layer's, as where a kernel misses components on the CPU."""

    def refuse(*_):
        raise AssertionError("a gradient at a convolution's output")

    monkeypatch.setitem(ops.circular_conv2d_pool.__globals__, "polyphase_scatter", refuse)
    KronLaplace(network(StridedCircularConv2d).to(device)).fit(data(device))
    if device.type == "cpu" and way == "the device's":
        with pytest.raises(AssertionError):
            KronLaplace(network(StridedCircularConv2d, kernels=(3, 1))).fit(data(device))


def test_a_hook_on_the_layer_is_obeyed(device):
    """It sees, and changes, what the layer returns."""
    models = [network(layer).to(device) for layer in (StridedCircularConv2d, in_a_row)]
    for model in models:
        model[2].register_forward_hook(lambda module, args, out: out.sin())
    hooked = [KronLaplace(model).fit(data(device)) for model in models]
    assert_same_factors(*hooked)
    plain = KronLaplace(network(StridedCircularConv2d).to(device)).fit(data(device))
    assert not torch.allclose(plain.factors["0.weight"].outputs, hooked[0].factors["0.weight"].outputs)
