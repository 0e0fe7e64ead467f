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
from python_tests.laplace.checks import Function

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


def amount() -> nn.Module:
    return Function(lambda m, x: x * m.amount, amount=nn.Buffer(torch.tensor(1.1)))


def calls(layer: type[nn.Module]) -> nn.Module:
    """A layer that is called with 4, 2 and 1 shared positions."""

    def forward(m, x):
        x = m.scale(x.mean(1))
        few = m.layer(x[:, 0])
        return m.last(torch.tanh(m.layer(x)).mean(1) + torch.tanh(m.layer(x[:, :2])).sum(1) * few)

    return Function(forward, scale=amount(), layer=layer(4, 4), last=nn.Linear(4, 2))


def normalised(layer: type[nn.Module]) -> nn.Module:
    def forward(m, x):
        return m.last(torch.tanh(m.norm(torch.tanh(m.first(m.scale(x.mean(1)))))).sum(1))

    return Function(forward, scale=amount(), first=nn.Linear(4, 4), norm=layer(4), last=nn.Linear(4, 2))


def sliced(layer: type[nn.Module]) -> nn.Module:
    """Convolutions, of one of which every second position goes on."""

    def forward(m, x):
        h = torch.relu(m.conv(torch.relu(m.first(m.scale(x))))[:, :, ::2, ::2])
        return m.last(m.strided(h).flatten(1))

    convs = {"first": nn.Conv2d(2, 2, 1), "conv": layer(2, 3, 3, padding=1), "strided": layer(3, 2, 3, 2, 1)}
    return Function(forward, scale=amount(), **convs, last=nn.Linear(2, 2))


def lookups(table: type[nn.Module], twice: bool) -> nn.Module:
    def forward(m, index):
        h = torch.tanh(m.scale(m.table(index))).mean(1)
        return m.last(h * m.table(index[:, :2]).sum(1) if twice else h)

    return Function(forward, table=table(6, 3), scale=amount(), last=nn.Linear(3, 2))


def gained_twice(layer: type[nn.Module]) -> nn.Module:
    """A layer that is called twice."""

    def forward(m, x):
        return m.last(m.gain(torch.tanh(2 * m.gain(torch.tanh(m.first(x.mean((1, 2))))))))

    gain = layer(4, eps=0.0)
    gain.bias.requires_grad_(False)
    return Function(forward, first=nn.Linear(4, 4), gain=gain, last=nn.Linear(4, 2))


CASES = [
    (nn.Linear, LinearRule, calls, ("inputs", "outputs", "vjp")),
    (nn.LayerNorm, LayerNormRule, normalised, ("inputs", "outputs")),
    (nn.Conv2d, Conv2dRule, sliced, ("inputs", "outputs", "vjp")),
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
    x = torch.randn(3, 2, 4, 4, generator=generator, dtype=torch.float64)
    return x, torch.tensor([0, 1, 1])


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


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("adds", ["add_counts", "add_diagonal"])
def test_a_table_of_counts(adds, twice):
    register(Table)(type("OwnTableRule", (TableRule,), {"adds": adds}))
    index, y = torch.arange(20).reshape(4, 5) % 6, torch.tensor([0, 1, 1, 0])
    models = (built(lambda t: lookups(t, twice), table) for table in (nn.Embedding, Table))
    expected, found = (everything(model, index, y, None) for model in models)
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


@pytest.mark.parametrize("budget", [None, 1])
def test_what_a_call_leaves_on_a_rule_is_there_for_its_gradients_over_copies(budget):
    expected, found = (
        everything(built(gained_twice, layer), *data(), 12, memory_budget=budget) for layer in (nn.BatchNorm1d, Gain)
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
