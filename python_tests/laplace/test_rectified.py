"""An ``nn.ReLU`` and the layers that it feeds are differentiated together in a fit; the factors are those that ``torch.relu`` gives."""

from __future__ import annotations

import copy
import functools
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ella_cuda import models
from ella_cuda.laplace import KronLaplace, Rule, curvature, register
from ella_cuda.laplace.curvature import curvature_pass
from ella_cuda.laplace.factors import FactorShape
from ella_cuda.laplace.probe import Findings
from ella_cuda.laplace.rules import base, rules_for
from ella_cuda.laplace.rules.linear import LinearRule
from ella_cuda.nn import CircularConv2d, FactoredLinear2d, PolyphasePool2d, RelaxedEquivariance
from python_tests.laplace.checks import assert_same_factors, image_batches


class Functional(nn.Module):
    """ReLU that no fit can tell from other functions."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.relu(input)


def network(relu: nn.Module) -> nn.Sequential:
    """All kinds of layers behind a rectifier, and what is none."""
    torch.manual_seed(0)
    strided = nn.Sequential(CircularConv2d(3, 4), PolyphasePool2d())
    return nn.Sequential(
        CircularConv2d(2, 3),
        relu,
        RelaxedEquivariance({"conv": strided, "f_fc": FactoredLinear2d(3, 4, 4, 2)}),
        relu,
        nn.Sequential(nn.Conv2d(4, 3, 3, padding=1), nn.AvgPool2d(1)),
        relu,
        FactoredLinear2d(3, 5, 2, 1),
        relu,
        nn.Flatten(),
        nn.Linear(5, 4),
        relu,
        nn.Linear(4, 3),
    ).double()


def data(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    return image_batches(device, 4)


class Passes(torch.utils._python_dispatch.TorchDispatchMode):
    """Shapes of the gradients that go through a ReLU's own derivative, behind the axis of images."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.threshold_backward.default:
            self.shapes.append(tuple(args[0].shape[1:]))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("memory_budget", [1, 1 << 26])
def test_factors_are_those_of_the_function(inplace, memory_budget, device):
    fits = [
        KronLaplace(network(relu).to(device), memory_budget=memory_budget).fit(data(device))
        for relu in (nn.ReLU(inplace), Functional())
    ]
    assert_same_factors(*fits)
    for factor in fits[0].factors.values():
        assert bool(factor.outputs.abs().sum() > 0)


def test_no_gradient_of_its_own_where_a_layer_follows(device, monkeypatch):
    monkeypatch.setattr(curvature, "probe", lambda *_: Findings({}, True))  # whose gradients are all torch's
    with Passes() as passes:
        KronLaplace(network(nn.ReLU()).to(device), memory_budget=1).fit(data(device)[:1])
    assert passes.shapes == [(5, 1, 1)] * 2  # two columns: what is flattened before a layer gets it
    with Passes() as passes:
        model = models.neyshabur("f_fc+conv", 2, 3, 1).to(device)
        KronLaplace(model, memory_budget=1).fit([(torch.randn(2, 2, 32, 32, device=device), torch.tensor([0, 1]))])
    assert passes.shapes == [(16, 1, 1)] * 2


@pytest.mark.parametrize("stage", [0, 2], ids=["before it", "after it"])
def test_hooks_beside_the_rectifier_are_obeyed(stage, device):
    """A layer's hook that triples the gradient at its output, or at its input."""

    def triple(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        (out if stage == 0 else args[0]).register_hook(lambda gradient: 3 * gradient)

    fits = []
    for relu in (nn.ReLU(), Functional()):
        model = network(relu).to(device)
        model[stage].register_forward_hook(triple)
        fits.append(KronLaplace(model, memory_budget=1).fit(data(device)))
    assert_same_factors(*fits)


def doubled(module: nn.Module, args: object, out: Tensor) -> Tensor | None:
    return 2 * out if isinstance(module, (nn.ReLU, Functional)) else None


class Doubling(nn.ReLU):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * torch.relu(input)


def tripling(model: nn.Sequential, x: Tensor) -> Tensor:
    for i, module in enumerate(model):
        x = module(x)
        if i == 1:
            x.register_hook(lambda gradient: 3 * gradient)
    return x


class Watching(nn.Module):
    """Calls the parts of a container by itself."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return tripling(self.layers, x)


@pytest.mark.parametrize("inner", [False, True])
def test_a_container_whose_parts_somebody_else_calls(inner, device):
    """What is between the parts is theirs, also while another container is called."""
    models = [Watching(network(relu)).to(device) for relu in (nn.ReLU(), Functional())]
    if inner:
        torch.manual_seed(1)
        before = [nn.Sequential(CircularConv2d(2, 2), nn.ReLU(), CircularConv2d(2, 2)).double().to(device)]
        before.append(copy.deepcopy(before[0]))
        models = [nn.Sequential(*first, model) for first, model in zip(before, models, strict=True)]
    assert_same_factors(*(KronLaplace(model).fit(data(device)) for model in models))


@pytest.mark.parametrize("where", ["hook", "global hook", "forward", "class", "layer's forward", "container's forward"])
def test_what_was_changed_is_what_it_was_made(where, device):
    fits = []
    for relu in (Doubling() if where == "class" else nn.ReLU(), Functional()):
        model, handle = network(relu).to(device), None
        if where == "hook" or (where == "class" and isinstance(relu, Functional)):
            relu.register_forward_hook(doubled)
        elif where == "global hook":
            handle = torch.nn.modules.module.register_module_forward_hook(doubled)
        elif where == "forward":
            relu.forward = lambda input: 2 * torch.relu(input)
        elif where == "container's forward":
            model.forward = functools.partial(tripling, model)
        elif where == "layer's forward":
            mean = model[2].forward
            model[2].forward = lambda x, mean=mean: mean(x.detach())
        try:
            fits.append(KronLaplace(model).fit(data(device)))
        finally:
            if handle is not None:
                handle.remove()
    assert_same_factors(*fits)


class Between(nn.Module):
    """Layers with a rectifier between them, and something done to what is between."""

    def __init__(self, relu: nn.Module, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.relu, self.how = nn.Linear(32, 7), nn.Linear(7, 6), nn.Linear(6, 3), relu, how
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        z = self.a(x.flatten(1))
        if self.how == "no graph":
            with torch.no_grad():
                h = self.relu(z)
        elif self.how == "no graph, then one":
            with torch.no_grad():
                h = self.relu(z)
            h.requires_grad_()
        else:
            h = self.relu(z)
        if self.how == "cut":
            h.detach_()
        elif self.how == "cut before":
            z.detach_()
        elif self.how == "changed before":
            z.mul_(2)
        elif self.how == "new numbers":
            h.data = h.data - 0.3
        out = self.b(h)
        if self.how == "hook":
            h.register_hook(lambda gradient: 3 * gradient)
        return self.c(torch.tanh(out)) + (z[:, :3] if self.how == "changed before" else 0)


def triple_output(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
    out.register_hook(lambda gradient: 3 * gradient)


class Blocked(nn.Module):
    """A block that begins with a rectifier, called in another way than its own."""

    def __init__(self, relu: nn.Module, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.how = nn.Linear(32, 7), nn.Linear(6, 3), how
        self.block = nn.Sequential(relu, nn.Sequential(nn.Linear(7, 6)))
        self.block[1].number_of_hooks = 3  # somebody's own attribute
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        z, kept = self.a(x.flatten(1)), []
        if self.how == "checkpoint":
            return self.b(checkpoint(self.block, z, use_reentrant=False))
        if self.how == "no hook at all":  # an attribute of a class that has nothing to do with us
            return self.b(self.block(z))
        hook = {
            "hook that keeps": lambda: self.block[0].register_forward_hook(lambda m, args, out: kept.append(out)),
            "hook": lambda: self.block[0].register_forward_hook(triple_output),
            "hook before the layer": lambda: self.block[1].register_forward_pre_hook(lambda m, args: kept.extend(args)),
            "hook inside": lambda: self.block[1][0].register_forward_pre_hook(lambda m, args: kept.extend(args)),
            "global hook": lambda: nn.modules.module.register_module_forward_hook(
                lambda m, args, out: kept.append(out) if m is self.block[0] else None
            ),
            "another function": lambda: AnotherRelu(lambda x: F.leaky_relu(x, 0.5)),
            "another input": lambda: AnotherRelu(lambda x: torch.relu(2 * x)),
            "hook on what it makes": lambda: AnotherRelu(tripled_relu),
        }[self.how]
        with hook():
            y = self.block(z)
        for h in kept:
            h.register_hook(lambda gradient: 3 * gradient)
        return self.b(y)


def tripled_relu(x: Tensor) -> Tensor:
    out = torch.relu(x)
    out.register_hook(lambda gradient: 3 * gradient)
    return out


class AnotherRelu(torch.overrides.TorchFunctionMode):
    """In place of every ReLU's function."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def __torch_function__(self, function, types, args=(), kwargs=None):
        replaced = function in (torch.relu, F.relu)
        return self.function(args[0]) if replaced else function(*args, **(kwargs or {}))


class Odd(Blocked):
    handed_on = False


@pytest.mark.parametrize(
    "kind, how",
    [(Blocked, how) for how in ("checkpoint", "hook that keeps", "hook", "hook before the layer", "hook inside")]
    + [(Blocked, how) for how in ("global hook", "another function", "another input", "hook on what it makes")]
    + [(Odd, "no hook at all")],
)
def test_what_a_forward_sets_up_is_obeyed(kind, how, device):
    fits = [KronLaplace(kind(relu, how).to(device)).fit(data(device)) for relu in (nn.ReLU(), Functional())]
    assert_same_factors(*fits)


@pytest.mark.parametrize(
    "how",
    ["no graph", "no graph, then one", "cut", "cut before", "changed before", "new numbers", "hook"],
)
def test_a_forward_of_its_own_may_do_anything_between_them(how, device):
    fits = [KronLaplace(Between(relu, how).to(device)).fit(data(device)) for relu in (nn.ReLU(), Functional())]
    assert len(fits[0].factors) == 6
    for ours, theirs in zip(*(fit.factors.values() for fit in fits), strict=True):
        torch.testing.assert_close(ours.outputs, theirs.outputs, rtol=1e-11, atol=1e-13)


class Announced(nn.Module):
    """A network that says what it hands on, and calls its modules by keyword."""

    def __init__(self, relu: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.relu = nn.Linear(32, 7), nn.Linear(7, 3), relu
        self.double()

    def handed_on(self) -> list[tuple[nn.Module, nn.Module]]:
        return [(self.relu, self.b)]

    def forward(self, x: Tensor) -> Tensor:
        return self.b(input=self.relu(input=self.a(x.flatten(1))))


class Scales(Announced):
    """Inherits what was said of another forward."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.a(x.flatten(1)))
        h.register_hook(lambda gradient: 3 * gradient)
        return self.b(h)


@pytest.mark.parametrize("kind", [Announced, Scales])
def test_networks_that_say_what_they_hand_on(kind, device):
    assert_same_factors(*(KronLaplace(kind(r).to(device)).fit(data(device)) for r in (nn.ReLU(), Functional())))


def test_under_inference_mode(device):
    fits = []
    for relu in (nn.ReLU(), Functional()):
        model = nn.Sequential(relu, nn.Flatten(), *network(relu)[9:]).to(device)
        model[2] = nn.Linear(32, 4, dtype=torch.float64, device=device)
        nn.init.constant_(model[2].weight, 0.1)
        with torch.inference_mode():
            features = [(2 * x, y) for x, y in data(device)]
            KronLaplace(model).fit(features)
        fits.append(KronLaplace(model).fit(features))
    assert_same_factors(*fits)


def test_a_compiled_network(device):
    torch._dynamo.reset()
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(32, 7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3)
    ).double()
    model.to(device)
    compiled = torch.compile(model, backend="aot_eager")
    assert_same_factors(*(KronLaplace(m).fit(data(device)) for m in (model, compiled)))


def test_a_network_that_inductor_compiled_for_dynamic_shapes(inductor):
    """Its factors are those of the network as it is, also blocks that lie further on in a factor, and a vmap over the backward."""
    torch._dynamo.reset()
    layers = (
        nn.Conv2d(4, 4, 1),
        nn.Tanh(),
        nn.Conv2d(4, 8, 3, padding=1, groups=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(128, 3),
    )
    model = nn.Sequential(*layers).double()
    compiled = torch.compile(model, dynamic=True)
    batches = [(torch.randn(n, 4, 4, 4, dtype=torch.float64), torch.arange(n) % 3) for n in (7, 5)]
    compiled(batches[0][0])
    assert_same_factors(*(KronLaplace(m).fit(batches) for m in (model, compiled)))


def test_nothing_is_held(device):
    """What went into the rectifier is gone when the outputs are there, with the network as it is or as a fit sees it."""
    relu, seen = nn.ReLU(), []
    before = nn.Sequential(nn.Linear(32, 7), nn.Tanh(), relu)
    model = nn.Sequential(*before, nn.Linear(7, 6), nn.Tanh(), relu, nn.Identity(), nn.Linear(6, 3), nn.Identity())
    model.double().to(device)
    for layer in (model[1], model[4]):
        layer.register_forward_hook(lambda module, args, out: seen.append(weakref.ref(out)))
    x = data(device)[0][0].flatten(1)
    rules = rules_for(model, "shared")
    for rule in rules:
        rule.allocate()
    with curvature_pass(model, rules, 1) as run:
        outputs = run.forward(x)
        gc.collect()
        assert outputs.requires_grad and [reference() for reference in seen] == [None, None]
        with run.paused():
            model(x)
        gc.collect()
        assert [reference() for reference in seen] == [None] * 4


class Shared(nn.Module):
    """y = x + b, whose gradient is that at its output: the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


@pytest.mark.parametrize("parent", [Rule, LinearRule])
def test_memory_that_a_rule_does_not_own_is_not_changed(parent, device, monkeypatch):
    monkeypatch.setattr(base, "_RULES", dict(base._RULES))

    @register(Shared)
    class SharedRule(parent):
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
            self.beside, self.head = nn.Linear(32, 5), nn.Linear(5, 3)
            self.branch = nn.Sequential(nn.Linear(32, 5), relu, Shared())
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            beside = self.beside(x.flatten(1))  # so early that its gradient, of the same memory, is used last
            return self.head(self.branch(x.flatten(1)) + beside)

    assert_same_factors(*(KronLaplace(Network(r).to(device)).fit(data(device)) for r in (nn.ReLU(), Functional())))
