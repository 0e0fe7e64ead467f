"""An ``nn.ReLU`` and the layer that follows it are one node of a fit; the factors are those that ``torch.relu`` gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ella_cuda import models
from ella_cuda.laplace import KronLaplace, Rule, curvature, register
from ella_cuda.laplace.factors import FactorShape
from ella_cuda.laplace.rules import base
from ella_cuda.nn import CircularConv2d, FactoredLinear2d, PolyphasePool2d, RelaxedEquivariance


class Functional(nn.Module):
    """ReLU that no fit can tell from other functions."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x)


class Blocks(nn.Module):
    """Layers with a rectifier between them, in a forward of its own."""

    def __init__(self, relu: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        strided = nn.Sequential(CircularConv2d(3, 4), PolyphasePool2d())
        self.first = CircularConv2d(2, 3)
        self.second = RelaxedEquivariance({"conv": strided, "f_fc": FactoredLinear2d(3, 4, 4, 2)})
        self.third = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(16, 3)
        self.relu = relu
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.first(x))
        x = self.relu(self.second(x))
        x = x + self.relu(self.third(x))
        return self.head(self.relu(x).flatten(1))


class Doubled(Blocks):
    """What went into the rectifier is changed in place afterwards, and used."""

    def forward(self, x: Tensor) -> Tensor:
        before = self.first(x)
        x = self.relu(before)
        before.mul_(2)
        x = self.relu(self.third(self.relu(self.second(x)))) + before[:, :1, ::2, ::2]
        return self.head(x.flatten(1))


class Overwritten(Blocks):
    """What came out of the rectifier is overwritten when the layer has read it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.first(x))
        y = self.relu(self.third(self.relu(self.second(x))))
        x.zero_()
        return self.head(y.flatten(1))


class Scaled(Blocks):
    """A hook on what came out of the rectifier changes its gradient."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.first(x))
        x.register_hook(lambda gradient: 3 * gradient)
        x = self.relu(self.second(x))
        x.register_hook(lambda gradient: 5 * gradient)
        return self.head(self.relu(self.third(x)).flatten(1))


def data(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(7, 2, 4, 4, generator=generator, dtype=torch.float64).to(device)
    y = torch.randint(3, (7,), generator=generator).to(device)
    return [(x[:4], y[:4]), (x[4:], y[4:])]


def assert_same_factors(one: KronLaplace, other: KronLaplace) -> None:
    assert len(one.factors) == len(other.factors) > 0
    for ours, theirs in zip(one.factors.values(), other.factors.values(), strict=True):
        assert bool(ours.outputs.abs().sum() > 0)
        torch.testing.assert_close(ours.outputs, theirs.outputs, rtol=1e-11, atol=1e-13)
        if ours.inputs is not None:
            torch.testing.assert_close(ours.inputs, theirs.inputs, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    "kind, inplace", [(Blocks, False), (Blocks, True), (Scaled, False), (Scaled, True), (Doubled, False)]
)
@pytest.mark.parametrize("memory_budget", [1, 1 << 26])
def test_factors_are_those_of_the_function(kind, inplace, memory_budget, device):
    models = [kind(relu).to(device) for relu in (nn.ReLU(inplace), Functional())]
    fits = [KronLaplace(model, memory_budget=memory_budget).fit(data(device)) for model in models]
    assert_same_factors(*fits)


def test_no_gradient_passes_through_a_rectifier_between_layers(device):
    model = nn.Sequential(
        CircularConv2d(2, 3), nn.ReLU(), CircularConv2d(3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)
    )
    model.double().to(device)
    seen = []

    class Outputs(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.threshold_backward.default:
                seen.append(tuple(args[0].shape))
            return function(*args, **(kwargs or {}))

    with Outputs():
        KronLaplace(model, memory_budget=1).fit(data(device))
    # The last one's output is flattened before a layer sees it: two columns of either batch pass through that one alone.
    assert [shape[1:] for shape in seen] == [(2, 4, 4)] * 4


def test_a_hook_on_the_rectifier_still_sees_gradients(device):
    relu, seen = nn.ReLU(), []
    relu.register_full_backward_hook(lambda module, before, after: seen.append(len(after)))
    fits = [KronLaplace(Blocks(r).to(device), memory_budget=1).fit(data(device)) for r in (relu, Functional())]
    assert len(seen) > 0
    assert_same_factors(*fits)


def doubled(module: nn.Module, args: object, out: Tensor) -> Tensor | None:
    return 2 * out if isinstance(module, (nn.ReLU, Functional)) else None


@pytest.mark.parametrize("where", ["hook", "global hook", "forward"])
def test_a_rectifier_that_was_changed_is_what_it_was_made(where, device):
    fits = []
    for relu in (nn.ReLU(), Functional()):
        handle = None
        if where == "hook":
            relu.register_forward_hook(doubled)
        elif where == "global hook":
            handle = torch.nn.modules.module.register_module_forward_hook(doubled)
        else:
            relu.forward = lambda x: 2 * torch.relu(x)
        try:
            fits.append(KronLaplace(Blocks(relu).to(device)).fit(data(device)))
        finally:
            if handle is not None:
                handle.remove()
    assert_same_factors(*fits)


def test_an_input_overwritten_too_early_is_an_error(device):
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        KronLaplace(Overwritten(nn.ReLU()).to(device)).fit(data(device))


class Shared(nn.Module):
    """y = x + b, whose gradient is that at its output: the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


def test_memory_that_a_rule_does_not_own_is_not_changed(device, monkeypatch):
    monkeypatch.setattr(base, "_RULES", dict(base._RULES))

    @register(Shared)
    class SharedRule(Rule):
        differentiates = True

        def shapes(self):
            return {"bias": FactorShape.bias(1)}

        def inputs(self, x):
            pass

        def pull_back(self, gradient, input_shape):
            self.factors["bias"].output_moment.add(gradient.flatten(2).sum(2).reshape(-1, 1, 1))
            return gradient if input_shape is not None else None

    class Network(nn.Module):
        def __init__(self, relu: nn.Module) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.beside, self.head = nn.Linear(32, 5), nn.Linear(32, 5), nn.Linear(5, 3)
            self.shift, self.relu = Shared(), relu
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            beside = self.beside(x.flatten(1))  # so early that its gradient, of the same memory, is used last
            return self.head(self.shift(self.relu(self.first(x.flatten(1)))) + beside)

    fits = [KronLaplace(Network(relu).to(device)).fit(data(device)) for relu in (nn.ReLU(), Functional())]
    assert_same_factors(*fits)


def test_rectifiers_of_the_paper_network_are_seen(device):
    assert len(curvature._rectifiers(models.neyshabur("conv", 1, 10, 1))) == 2
