"""A convolution and the polyphase choice that follows it are one node of a fit; the factors are those of the two by themselves."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from ella_cuda.laplace import KronLaplace, curvature
from ella_cuda.laplace.rules import base, rules_for
from ella_cuda.laplace.rules.conv import Conv2dRule
from ella_cuda.nn import CircularConv2d, PolyphasePool2d, StridedCircularConv2d
from python_tests.laplace.checks import assert_same_factors, image_batches


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


def in_a_row(in_channels: int, out_channels: int, kernel_size: int, bias: bool, norm: float) -> nn.Sequential:
    return nn.Sequential(CircularConv2d(in_channels, out_channels, kernel_size, bias), PolyphasePool2d(norm))


LAYERS = [in_a_row, StridedCircularConv2d]


def network(
    kernels: tuple[int, int], wrap=lambda layers: layers, bias: bool = True, norm: float = 2, layers=in_a_row
) -> nn.Sequential:
    torch.manual_seed(0)
    first, second = kernels
    return nn.Sequential(
        wrap(layers(2, 3, first, bias, norm)),
        nn.Tanh(),
        wrap(layers(3, 4, second, bias, norm)),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, 3),
    ).double()


def data(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    return image_batches(device, 8)


@pytest.mark.parametrize("kernels", [(3, 3), (5, 3), (1, 3), (3, 1)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("memory_budget", [1, 1 << 26])
@pytest.mark.parametrize("layers", LAYERS)
def test_factors_are_those_of_the_two_apart(layers, kernels, bias, memory_budget, device, way):
    models = [network(kernels, bias=bias, layers=layers), network(kernels, Apart, bias)]
    fits = [KronLaplace(m.to(device), memory_budget=memory_budget).fit(data(device)) for m in models]
    assert_same_factors(*fits)


@pytest.mark.parametrize("layers", LAYERS)
def test_the_gradient_between_them_is_not_formed(layers, monkeypatch, device):
    def refuse(*_):
        raise AssertionError("a gradient at a convolution's output")

    monkeypatch.setattr(Conv2dRule, "pull_back", refuse)
    KronLaplace(network((3, 3), layers=layers).to(device)).fit(data(device))
    with pytest.raises(AssertionError):
        KronLaplace(network((3, 3), Apart).to(device)).fit(data(device))


@pytest.mark.parametrize("norm", [1, math.inf])
def test_factors_with_another_norm(norm, device):
    fits = [KronLaplace(network((3, 3), wrap, norm=norm).to(device)).fit(data(device)) for wrap in (lambda m: m, Apart)]
    assert_same_factors(*fits)


def use_between(layers: nn.Sequential) -> None:
    layers[1].register_forward_hook(lambda module, args, out: out + args[0][:, :, ::2, ::2])


def choose_otherwise(layers: nn.Sequential) -> None:
    layers[1].forward = lambda between: between[:, :, ::2, ::2]


def in_place(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
    """Leaves the same tensor with other numbers."""
    out.mul_(3.0)


def add_a_connection(layers: nn.Sequential) -> None:
    def forward(x: Tensor) -> Tensor:
        between = layers[0](x)
        return layers[1](between) + between[:, :, 1::2, ::2]

    layers.forward = forward


CHANGES = [
    lambda layers: layers[0].register_forward_hook(lambda module, args, out: out.sin()),
    lambda layers: layers[0].register_forward_hook(in_place),
    lambda layers: layers[1].register_forward_pre_hook(lambda module, args: (args[0].sin(),)),
    lambda layers: layers[1].register_forward_pre_hook(lambda module, args: (args[0].mul_(3.0),)),
    lambda layers: layers[1].register_forward_hook(lambda module, args, out: out.sin()),
    use_between,
    choose_otherwise,
    add_a_connection,
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("layers", LAYERS)
def test_what_a_user_puts_between_them_is_obeyed(layers, change, device, monkeypatch):
    """Against the same with the one node taken apart."""
    models = [network((3, 3), layers=layers).to(device) for _ in range(2)]
    for model in models:
        change(model[2])
    together = KronLaplace(models[0]).fit(data(device))
    monkeypatch.setattr(curvature, "_strided_layers", lambda model, rules: [])
    assert_same_factors(together, KronLaplace(models[1]).fit(data(device)))


@pytest.mark.parametrize("kind", ["forward", "forward_pre"])
def test_global_hooks_are_obeyed(kind, device, monkeypatch):
    kept = []

    def hook(module: nn.Module, args: tuple[Tensor, ...], out: Tensor | None = None) -> Tensor | None:
        if isinstance(module, PolyphasePool2d):
            kept.append(args[0])
        if isinstance(module, nn.Flatten) and kind == "forward":
            return out + kept[-1].mean((1, 2, 3))[:, None]
        return (args[0] + kept[-1].mean((1, 2, 3), keepdim=True),) if isinstance(module, nn.Flatten) else None

    fits = []
    handle = getattr(nn.modules.module, f"register_module_{kind}_hook")(hook)
    try:
        for _ in range(2):
            fits.append(KronLaplace(network((3, 3)).to(device)).fit(data(device)))
            monkeypatch.setattr(curvature, "_strided_layers", lambda model, rules: [])
    finally:
        handle.remove()
    assert_same_factors(*fits)


def test_memory_is_charged_for_what_is_formed(device):
    """In bytes of a column of 4 images: gradients at both ends of the first layer, and as much again."""

    def charged(kernels: tuple[int, int], wrap=lambda layers: layers) -> int:
        model = network(kernels, wrap).to(device)
        with curvature.curvature_pass(model, rules_for(model, "shared"), 1) as run:
            for rule in run.rules:
                rule.allocate()
            run.forward(data(device)[0][0])
            return run.column_bytes

    whole, pooled = 2 * 8 * 4 * (2 * 64 + 3 * 64), 2 * 8 * 4 * (2 * 64 + 3 * 16)
    assert charged((3, 3), Apart) == whole
    assert charged((3, 3)) == pooled
    assert charged((1, 3)) == (whole if device.type == "cpu" else pooled)
    observed = nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    try:
        assert charged((3, 3)) == whole
    finally:
        observed.remove()


def test_layers_of_a_sequence_called_one_by_one(device):
    """Another use of what is between them: cross terms of the two gradients are part of the factor."""
    fits = [
        KronLaplace(network((3, 3), lambda layers, apart=apart: BothSides(layers, apart)).to(device)).fit(data(device))
        for apart in (False, True)
    ]
    assert_same_factors(*fits)


def test_a_layer_called_one_by_one_behind_one_that_is_not(device):
    """What is inside of one node is outside of it once its forward has ended."""

    def second(layers: nn.Sequential, apart: bool) -> nn.Module:
        return layers if layers[0].in_channels == 2 else BothSides(layers, apart)

    fits = [
        KronLaplace(network((3, 3), lambda layers, apart=apart: second(layers, apart)).to(device)).fit(data(device))
        for apart in (False, True)
    ]
    assert_same_factors(*fits)


def test_a_rule_of_the_users_own_is_used(device, monkeypatch):
    """A subclass of the convolution's rule says how gradients pass, so that the node may not do it otherwise."""
    calls = []

    class Counting(Conv2dRule):
        def pull_back(self, *args):
            calls.append(self.name)
            return super().pull_back(*args)

    monkeypatch.setitem(base._RULES, CircularConv2d, Counting)
    KronLaplace(network((3, 3)).to(device)).fit(data(device))
    assert calls


def test_a_choice_shared_by_several_layers(device):
    shared, own = network((3, 3)).to(device), network((3, 3), Apart).to(device)
    shared[2][1] = shared[0][1]
    assert_same_factors(*(KronLaplace(m).fit(data(device)) for m in (shared, own)))


@pytest.mark.parametrize("where", ["no error", "inside a layer", "in the loader"])
def test_no_hook_stays(where, device):
    model = network((3, 3)).to(device)

    def batches():
        yield from data(device)
        if where == "inside a layer":
            yield (
                torch.zeros(2, 5, 8, 8, dtype=torch.float64, device=device),
                torch.zeros(2, dtype=torch.int64, device=device),
            )
        if where == "in the loader":
            raise RuntimeError("no more")

    if where == "no error":
        KronLaplace(model).fit(batches())
    else:
        with pytest.raises((RuntimeError, ValueError)):
            KronLaplace(model).fit(batches())
    assert not any(hooks for m in model.modules() for name, hooks in vars(m).items() if name.endswith("_hooks"))
