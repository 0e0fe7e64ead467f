"""Rules of users whose methods add to moments: results are those of the package's rules for the same layers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ella_cuda.augment import AffineAugment, AveragedFunction
from ella_cuda.laplace import (
    FactorShape,
    KronLaplace,
    Rule,
    evidence_gradient,
    exact_log_marginal_likelihood,
    register,
)
from ella_cuda.laplace.rules import Conv2dRule, LayerNormRule, LinearRule

FORWARDS = {
    nn.Linear: lambda m, x: F.linear(x, m.weight, m.bias),
    nn.Conv2d: lambda m, x: F.conv2d(x, m.weight, m.bias, m.stride, m.padding),
    nn.LayerNorm: lambda m, x: F.layer_norm(x, m.normalized_shape, m.weight, m.bias, m.eps),
}


def own_layer(layer: type[nn.Module], rule: type[Rule], method: str) -> type[nn.Module]:
    """A layer that computes what ``layer`` does, with a rule that defines a method anew as the package's rule has it."""
    kind = type(f"Own{layer.__name__}", (layer,), {"forward": FORWARDS[layer]})

    def same(self, *args):
        return getattr(super(own, self), method)(*args)

    own = type(f"Own{rule.__name__}", (rule,), {method: same, "reduces": True, "averages": True})
    register(kind)(own)
    return kind


class Amount(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("amount", torch.tensor(1.1))

    def forward(self, x):
        return x * self.amount


class Calls(nn.Module):
    """A layer that is called with 4, 2 and 1 shared positions."""

    def __init__(self, layer: type[nn.Module]):
        super().__init__()
        self.scale, self.layer, self.last = Amount(), layer(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        x = self.scale(x.mean(1))
        few = self.layer(x[:, 0])
        return self.last(torch.tanh(self.layer(x)).mean(1) + torch.tanh(self.layer(x[:, :2])).sum(1) * few)


class Normalised(nn.Module):
    def __init__(self, layer: type[nn.Module]):
        super().__init__()
        self.scale, self.first, self.norm, self.last = Amount(), nn.Linear(4, 4), layer(4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(torch.tanh(self.first(self.scale(x.mean(1)))))).sum(1))


class Sliced(nn.Module):
    """Convolutions, of one of which every second position goes on."""

    def __init__(self, layer: type[nn.Module]):
        super().__init__()
        self.scale, self.first = Amount(), nn.Conv2d(2, 2, 1)
        self.conv, self.strided, self.last = layer(2, 3, 3, padding=1), layer(3, 2, 3, 2, 1), nn.Linear(2, 2)

    def forward(self, x):
        h = torch.relu(self.conv(torch.relu(self.first(self.scale(x))))[:, :, ::2, ::2])
        return self.last(self.strided(h).flatten(1))


CASES = [
    (nn.Linear, LinearRule, Calls, ("inputs", "outputs", "vjp")),
    (nn.LayerNorm, LayerNormRule, Normalised, ("inputs", "outputs")),
    (nn.Conv2d, Conv2dRule, Sliced, ("inputs", "outputs", "vjp")),
]


def everything(network: nn.Module, x, y, copies: int | None, **options) -> dict[str, torch.Tensor]:
    """Factors, variances, evidences and the evidence's gradient of a fit."""
    torch.manual_seed(0)
    model = network if copies is None else AveragedFunction(network, AffineAugment(n_samples=copies, dtype=x.dtype))
    la = KronLaplace(model.double(), **options).fit([(x, y)])
    found = {f"{name} A": factor.inputs for name, factor in la.factors.items()}
    found |= {f"{name} B": factor.outputs for name, factor in la.factors.items()}
    found["variance"], found["evidence"] = la.functional_variance(x), la.log_marginal_likelihood()
    if copies is None:
        found["exact"] = exact_log_marginal_likelihood(la, x, y)
    names = ["scale.amount"] if copies is None else ["augment.raw"]
    return found | evidence_gradient(la, [(x, y)], names)


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 2, 4, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(2, (5,), generator=generator)


def built(make, layer) -> nn.Module:
    torch.manual_seed(3)
    return make(layer)


@pytest.mark.parametrize(("copies", "budget"), [(None, None), (3, None), (12, 1)])
@pytest.mark.parametrize("approximation", ["expand", "reduce"])
@pytest.mark.parametrize(
    ("layer", "rule", "make", "method"),
    [(layer, rule, make, method) for layer, rule, make, methods in CASES for method in methods],
)
def test_a_rule_with_one_method_of_its_own(layer, rule, make, method, approximation, copies, budget):
    options = {"approximation": approximation, "memory_budget": budget}
    expected = everything(built(make, layer), *data(), copies, **options)
    found = everything(built(make, own_layer(layer, rule, method)), *data(), copies, **options)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


class Table(nn.Embedding):
    def forward(self, index):
        return F.embedding(index, self.weight)


class TableRule(Rule):
    def shapes(self):
        return {"weight": FactorShape(self.module.num_embeddings, 1, self.module.embedding_dim, 1, layout="gab")}

    def inputs(self, index):
        moment = self.factors["weight"].input_moment
        counts = torch.bincount(index.flatten(), minlength=self.module.num_embeddings)
        if self.adds == "add_counts":
            moment.add_counts(counts)
        else:
            moment.add_diagonal(counts, index.numel())

    def outputs(self, gradient):
        rows = gradient.reshape(-1, 1, gradient.shape[-1])
        self.factors["weight"].output_moment.add(rows, 1 / gradient.shape[2:-1].numel())


class LookUps(nn.Module):
    def __init__(self, table: type[nn.Module], twice: bool):
        super().__init__()
        self.table, self.scale, self.last, self.twice = table(6, 3), Amount(), nn.Linear(3, 2), twice

    def forward(self, index):
        h = torch.tanh(self.scale(self.table(index))).mean(1)
        return self.last(h * self.table(index[:, :2]).sum(1) if self.twice else h)


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("adds", ["add_counts", "add_diagonal"])
def test_a_table_of_counts(adds, twice):
    register(Table)(type("OwnTableRule", (TableRule,), {"adds": adds}))
    index, y = torch.arange(20).reshape(4, 5) % 6, torch.tensor([0, 1, 1, 0])
    expected, found = (
        everything(built(lambda t: LookUps(t, twice), table), index, y, None) for table in (nn.Embedding, Table)
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


class Gain(nn.BatchNorm1d):
    """A layer of constant statistics, of mean 0 and variance 1: its weight times its input."""

    def forward(self, x):
        return x * self.weight + self.bias


@register(Gain)
class GainRule(Rule):
    """Output rows need the input of the same call."""

    averages = sees_copies = True

    def shapes(self):
        return {"weight": FactorShape.bias(4)}

    def inputs(self, x):
        self.kept = x

    def outputs(self, gradient):
        rows = (gradient * self.kept).unflatten(1, (-1, self.copies)).sum(2)
        self.factors["weight"].output_moment.add(rows.flatten(0, 1)[:, None])


class Twice(nn.Module):
    """A layer that is called twice."""

    def __init__(self, layer: type[nn.Module]):
        super().__init__()
        self.first, self.gain, self.last = nn.Linear(4, 4), layer(4, eps=0.0), nn.Linear(4, 2)
        self.gain.bias.requires_grad_(False)

    def forward(self, x):
        return self.last(self.gain(torch.tanh(2 * self.gain(torch.tanh(self.first(x.mean((1, 2))))))))


@pytest.mark.parametrize("budget", [None, 1])
def test_what_a_call_leaves_on_a_rule_is_there_for_its_gradients_over_copies(budget):
    expected, found = (
        everything(built(Twice, layer), *data(), 12, memory_budget=budget) for layer in (nn.BatchNorm1d, Gain)
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
