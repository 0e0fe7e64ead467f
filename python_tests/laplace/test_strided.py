"""A convolution and the polyphase choice that follows it are one node of a fit; the factors are those of the two by themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ella_cuda.laplace import KronLaplace
from ella_cuda.laplace.rules.conv import Conv2dRule
from ella_cuda.nn import CircularConv2d, PolyphasePool2d


class Apart(nn.Module):
    """The layers of an ``nn.Sequential``, called by a forward of its own."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x))


class BothSides(nn.Module):
    """What is between the convolution and the choice is used once more, beside the choice."""

    def __init__(self, layers: nn.Sequential, apart: bool) -> None:
        super().__init__()
        self.layers, self.apart = layers, apart

    def forward(self, x: Tensor) -> Tensor:
        between = self.layers[0](x)
        pooled = self.layers[1](between) if not self.apart else self.layers[1](between * 1)
        return pooled + between[:, :, ::2, ::2]


def network(kernels: tuple[int, int], wrap=lambda layers: layers, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    first, second = kernels
    return nn.Sequential(
        wrap(nn.Sequential(CircularConv2d(2, 3, first, bias), PolyphasePool2d())),
        nn.Tanh(),
        wrap(nn.Sequential(CircularConv2d(3, 4, second, bias), PolyphasePool2d())),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, 3),
    ).double()


def data(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(7, 2, 8, 8, generator=generator, dtype=torch.float64).to(device)
    y = torch.randint(3, (7,), generator=generator).to(device)
    return [(x[:4], y[:4]), (x[4:], y[4:])]


def assert_same_factors(one: KronLaplace, other: KronLaplace) -> None:
    assert len(one.factors) == len(other.factors) > 0
    for ours, theirs in zip(one.factors.values(), other.factors.values(), strict=True):
        torch.testing.assert_close(ours.outputs, theirs.outputs, rtol=1e-11, atol=1e-13)
        if ours.inputs is not None:
            torch.testing.assert_close(ours.inputs, theirs.inputs, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("kernels", [(3, 3), (5, 3), (1, 3), (3, 1)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("memory_budget", [1, 1 << 26])
def test_factors_are_those_of_the_two_apart(kernels, bias, memory_budget, device):
    fits = [
        KronLaplace(network(kernels, wrap, bias).to(device), memory_budget=memory_budget).fit(data(device))
        for wrap in (lambda layers: layers, Apart)
    ]
    assert_same_factors(*fits)


def test_the_gradient_between_them_is_not_formed(monkeypatch, device):
    def refuse(*_):
        raise AssertionError("a gradient at a convolution's output")

    monkeypatch.setattr(Conv2dRule, "pull_back", refuse)
    KronLaplace(network((3, 3)).to(device)).fit(data(device))
    with pytest.raises(AssertionError):
        KronLaplace(network((3, 3), Apart).to(device)).fit(data(device))


def test_a_hook_between_them_is_obeyed(device):
    hooked, plain = network((3, 3)).to(device), network((3, 3), Apart).to(device)
    hooked[2][0].register_forward_hook(lambda module, args, out: out.sin())
    plain[2].layers[0].register_forward_hook(lambda module, args, out: out.sin())
    assert_same_factors(*(KronLaplace(m).fit(data(device)) for m in (hooked, plain)))


def test_a_hook_before_the_choice_is_obeyed(device):
    hooked, plain = network((3, 3)).to(device), network((3, 3), Apart).to(device)
    for pool in (hooked[2][1], plain[2].layers[1]):
        pool.register_forward_pre_hook(lambda module, args: (args[0].sin(),))
    assert_same_factors(*(KronLaplace(m).fit(data(device)) for m in (hooked, plain)))


def test_layers_of_a_sequence_called_one_by_one(device):
    """Another use of what is between them: cross terms of the two gradients are part of the factor."""
    fits = [
        KronLaplace(network((3, 3), lambda layers, apart=apart: BothSides(layers, apart)).to(device)).fit(data(device))
        for apart in (False, True)
    ]
    assert_same_factors(*fits)


def test_a_choice_shared_by_several_layers(device):
    shared, own = network((3, 3)).to(device), network((3, 3), Apart).to(device)
    shared[2][1] = shared[0][1]
    assert_same_factors(*(KronLaplace(m).fit(data(device)) for m in (shared, own)))


def test_no_hook_stays(device):
    model = network((3, 3)).to(device)
    KronLaplace(model).fit(data(device))
    bad = [
        (
            torch.full((2, 2, 8, 8), float("nan"), dtype=torch.float64, device=device),
            torch.zeros(2, dtype=torch.int64, device=device),
        )
    ]
    with pytest.raises((ValueError, FloatingPointError)):
        KronLaplace(model).fit(bad)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
