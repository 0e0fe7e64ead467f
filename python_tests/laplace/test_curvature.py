"""What a network does between its layers while a fit's gradients pass: the factors are those of the function that it computes."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from ella_cuda.laplace import KronLaplace, Rule, register
from ella_cuda.laplace.factors import FactorShape
from ella_cuda.laplace.rules import base
from ella_cuda.nn import CircularConv2d, FactoredLinear2d, RelaxedEquivariance, StridedCircularConv2d
from python_tests.laplace.checks import assert_same_factors, image_batches


class Functional(nn.Module):
    """ReLU in new memory."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.relu(input)


def network(relu: nn.Module) -> nn.Sequential:
    """All kinds of layers behind a ReLU, and what is none."""
    torch.manual_seed(0)
    return nn.Sequential(
        CircularConv2d(2, 3),
        relu,
        RelaxedEquivariance({"conv": StridedCircularConv2d(3, 4), "f_fc": FactoredLinear2d(3, 4, 4, 2)}),
        relu,
        nn.Sequential(nn.Conv2d(4, 3, 3, padding=1), nn.AvgPool2d(1)),
        relu,
        StridedCircularConv2d(3, 5),
        relu,
        nn.Flatten(),
        nn.Linear(5, 4),
        relu,
        nn.Linear(4, 3),
    ).double()


def data(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    return image_batches(device, 4)


@pytest.mark.parametrize("memory_budget", [1, 1 << 26])
def test_layers_outputs_may_be_changed_in_place(memory_budget, device):
    fits = [
        KronLaplace(network(relu).to(device), memory_budget=memory_budget).fit(data(device))
        for relu in (nn.ReLU(inplace=True), Functional())
    ]
    assert_same_factors(*fits)
    for factor in fits[0].factors.values():
        assert bool(factor.outputs.abs().sum() > 0)


def test_under_inference_mode(device):
    fits = []
    for inference in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(32, 4), nn.ReLU(), nn.Linear(4, 3)).double().to(device)
        with torch.inference_mode(inference):
            features = [(2 * x, y) for x, y in data(device)]
            fits.append(KronLaplace(model).fit(features))
        fits.append(KronLaplace(model).fit(features))
    for fit in fits[1:]:
        assert_same_factors(fits[0], fit)


def test_a_compiled_network(device):
    torch._dynamo.reset()
    layers = nn.Flatten(), nn.Linear(32, 7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3)
    model = nn.Sequential(*layers).double().to(device)
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
    """What went into a ReLU is gone when the outputs are there, as a fit sees the network."""
    relu, seen, ends = nn.ReLU(), [], []
    before = nn.Sequential(nn.Linear(32, 7), nn.Tanh(), relu)
    model = nn.Sequential(*before, nn.Linear(7, 6), nn.Tanh(), relu, nn.Identity(), nn.Linear(6, 3), nn.Identity())
    model.double().to(device)

    def end(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        gc.collect()
        ends.append((len(out), [reference() is None for reference in seen[-2:]]))

    for layer in (model[1], model[4]):
        layer.register_forward_hook(lambda module, args, out: seen.append(weakref.ref(out)))
    model[-1].register_forward_hook(end)
    images = torch.cat([x for x, _ in data(device)] * 2).flatten(1)
    KronLaplace(model).fit([(images, torch.arange(len(images), device=device) % 3)])
    whole = [gone for count, gone in ends if count == len(images)]
    assert [True, True] in whole


def test_the_network_between_two_batches_is_as_it_is(device):
    """Its layers may be called by a loader, as often as it wants, and give no graph of the fit's."""
    model = network(nn.ReLU()).to(device)

    def batches():
        for x, y in data(device):
            assert not (model(x) + model(x)).requires_grad
            yield x, y

    assert_same_factors(KronLaplace(model).fit(batches()), KronLaplace(model).fit(data(device)))


@pytest.mark.parametrize("where", ["no error", "inside a layer", "in the loader"])
def test_no_hook_stays(where, device):
    model = network(nn.ReLU()).to(device)

    def batches():
        yield from data(device)
        if where == "inside a layer":
            yield torch.zeros(2, 5, 4, 4, dtype=torch.float64, device=device), torch.zeros(2, dtype=torch.int64)
        if where == "in the loader":
            raise RuntimeError("no more")

    if where == "no error":
        KronLaplace(model).fit(batches())
    else:
        with pytest.raises((RuntimeError, ValueError)):
            KronLaplace(model).fit(batches())
    assert not any(hooks for m in model.modules() for name, hooks in vars(m).items() if name.endswith("_hooks"))


class Shared(nn.Module):
    """y = x + b, whose gradient is that at its output: the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


def test_memory_that_a_rule_does_not_own_is_not_changed(device, monkeypatch):
    """The gradient that a rule returns may be the one that it got, which others in the network use too."""
    monkeypatch.setattr(base, "_RULES", dict(base._RULES))

    class SharedRule(Rule):
        def shapes(self):
            return {"bias": FactorShape.bias(1)}

        def inputs(self, x):
            pass

        def outputs(self, gradient):
            self.factors["bias"].output_moment.add(gradient.flatten(2).sum(2).reshape(-1, 1, 1))

        def vjp(self, gradient, input_shape):
            self.outputs(gradient)
            return gradient if input_shape is not None else None

    register(Shared)(SharedRule)

    class Network(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.beside, self.head = nn.Linear(32, 5), nn.Linear(5, 3)
            self.branch = nn.Sequential(nn.Linear(32, 5), nn.ReLU(), layer)
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            beside = self.beside(x.flatten(1))  # so early that its gradient, of the same memory, is used last
            return self.head(self.branch(x.flatten(1)) + beside)

    ours, theirs = (KronLaplace(Network(m).to(device)).fit(data(device)).factors for m in (Shared(), nn.Identity()))
    for name, factor in theirs.items():
        torch.testing.assert_close(ours[name].outputs, factor.outputs)
    torch.testing.assert_close(ours["branch.2.bias"].outputs.sum(), ours["beside.bias"].outputs.sum())
