"""Rules of a user's own that contradict autograd of their layers, and honest ones, which pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ella_cuda.laplace import Dense, FactorShape, FullLaplace, KronLaplace, Rule, register
from ella_cuda.laplace.factors import Jacobian
from ella_cuda.laplace.rules import base


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    monkeypatch.setattr(base, "_RULES", dict(base._RULES))


class Layer(nn.Linear):
    """Linear, of positions or of none; the user's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Honest(Rule):
    """Hooks for mistakes: what is done to input rows, output rows and sums of gradients."""

    def shapes(self):
        m = self.module
        return {"weight": FactorShape(1, m.in_features, m.out_features, 1), "bias": FactorShape.bias(m.out_features)}

    def of_inputs(self, rows):
        return rows

    def of_outputs(self, rows, alpha):
        return rows, alpha

    def of_bias(self, gradient):
        return gradient.reshape(*gradient.shape[:2], -1, gradient.shape[-1]).sum(2)

    def inputs(self, x):
        self.factors["weight"].input_moment.add(self.of_inputs(x.flatten(0, -2))[:, None])

    def outputs(self, gradient):
        positions = gradient[0, 0, ..., 0].numel()
        rows, alpha = self.of_outputs(gradient.flatten(0, -2), 1 / positions)
        self.factors["weight"].output_moment.add(rows[:, None], alpha)
        self.factors["bias"].output_moment.add(self.of_bias(gradient).flatten(0, 1)[:, None])


class Differentiates(Honest):
    def vjp(self, gradient, input_shape):
        self.outputs(gradient)
        return None if input_shape is None else gradient @ self.module.weight.detach()


class Jacobians(Honest):
    def jacobians(self, arguments, gradient):
        rows = gradient.flatten(2, -2) if gradient.dim() > 3 else gradient[:, :, None]
        inputs = arguments[0].flatten(1, -2) if arguments[0].dim() > 2 else arguments[0][:, None]
        weight, bias = Jacobian(rows[:, :, :, None], inputs[:, :, None]), Jacobian.of_bias(self.of_bias(gradient))
        return {"weight": self.of_jacobian(weight), "bias": bias}

    def of_jacobian(self, jacobian):
        return jacobian


class Permuted(Honest):
    """Positions of outputs in another order than those of inputs, which sums do not know."""

    def of_outputs(self, rows, alpha):
        return rows.flip(0), alpha


class OfMeans(Honest):
    """One row a data point, as of approximation="reduce"."""

    def inputs(self, x):
        self.factors["weight"].input_moment.add(x.flatten(1, -2).mean(1)[:, None])

    def outputs(self, gradient):
        rows = self.of_bias(gradient).flatten(0, 1)[:, None]
        self.factors["weight"].output_moment.add(rows)
        self.factors["bias"].output_moment.add(rows)


class Padded(Honest):
    """Rows of zeros are left out."""

    def of_inputs(self, rows):
        return rows[rows.any(1)]


class AddsToTotals(Honest):
    def inputs(self, x):
        moment = self.factors["weight"].input_moment
        moment.total[0] += (rows := x.flatten(0, -2).double()).T @ rows
        moment.count(len(rows))


HONEST = [Honest, Differentiates, Jacobians, Permuted, OfMeans, Padded, AddsToTotals]


class Pooled(nn.Module):
    """A product with one weight, then the mean over positions."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1))

    def forward(self, x):
        return (x @ self.weight).mean(1)


class PooledRule(Rule):
    def shapes(self):
        return {"weight": FactorShape(1, 1, 1, 1)}

    def inputs(self, x):
        self.positions_of = x.shape[1]
        self.factors["weight"].input_moment.add(x.flatten(0, 1)[:, None])

    def outputs(self, gradient):
        each = gradient[:, :, None].expand(-1, -1, self.positions_of, -1) / self.positions_of
        self.factors["weight"].output_moment.add(each.flatten(0, 2)[:, None], 1 / self.positions_of)


def test_positions_that_a_layer_joins_are_not_told_apart():
    register(Pooled)(PooledRule)
    x = torch.randn(5, 3, 1, dtype=torch.float64)
    model = nn.Sequential(Pooled(), nn.Linear(1, 3)).double()
    assert KronLaplace(model).fit([(x, torch.arange(5) % 3)]).log_marginal_likelihood().isfinite()


def network(positions: bool) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(3, 4), nn.Tanh(), Layer(4, 3), nn.Tanh())
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(3 * (2 if positions else 1), 3)).double()


def data(positions: bool, count: int = 7) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(count, *((2,) if positions else ()), 3, dtype=torch.float64), torch.arange(count) % 3


def fit(rule: type[Rule], positions: bool, kind=KronLaplace, count: int = 7):
    register(Layer)(rule)
    return kind(network(positions)).fit([data(positions, count)])


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize("rule", HONEST)
def test_honest_rules_pass(rule, positions, count):
    if rule is OfMeans and not positions:
        return
    for kind in (KronLaplace, FullLaplace):
        if rule is AddsToTotals and kind is FullLaplace:
            continue
        assert fit(rule, positions, kind, count).log_marginal_likelihood().isfinite()


def of(base: type[Rule], **methods):
    return type("Wrong", (base,), methods)


def scaled(number):
    return lambda self, rows, *alpha: (rows * number, *alpha) if alpha else rows * number


def in_place(self, gradient):
    Honest.outputs(self, gradient)
    gradient *= 0.5


WRONG = {
    "inputs doubled": (of(Honest, of_inputs=scaled(2)), "inputs and outputs", "are 2 times the parameter's gradient"),
    "outputs doubled": (of(Honest, of_outputs=scaled(2)), "inputs and outputs", "are 2 times"),
    "half of the inputs": (of(Honest, of_inputs=scaled(0.5)), "inputs and outputs", "are 0.5 times"),
    "bias doubled": (of(Honest, of_bias=lambda self, g: 2 * Honest.of_bias(self, g)), "outputs", "'bias'"),
    "bias of other entries": (of(Honest, of_bias=lambda self, g: Honest.of_bias(self, g).flip(2)), "outputs", "'bias'"),
    "three rows of five": (of(Honest, of_inputs=lambda self, rows: rows[:3]), "inputs", "of 5 data points are not"),
    "three gradients of five": (
        of(Honest, of_bias=lambda self, g: Honest.of_bias(self, g)[:, :3]),
        "outputs",
        "'bias' of 5 data points are not",
    ),
    "mean over data": (of(Honest, of_inputs=lambda self, rows: rows.mean(0, True)), "inputs", "of 5 data points are not"),
    "data's number": (of(Honest, of_inputs=lambda self, rows: rows / len(rows) ** 0.5), "inputs", "data points are not"),
    "gradient in place": (of(Honest, outputs=in_place), "outputs", "in place"),
    "input in place": (of(Honest, inputs=lambda self, x: Honest.inputs(self, x.mul_(2))), "inputs", "in place"),
    "vjp of a wrong sign": (
        of(Differentiates, vjp=lambda self, g, shape: -Differentiates.vjp(self, g, shape)),
        "vjp",
        "the gradient at the input",
    ),
    "vjp in place": (of(Differentiates, vjp=lambda self, g, shape: Differentiates.vjp(self, g.mul_(2), shape)), "vjp", "in place"),
    "jacobians of a wrong sign": (
        of(Jacobians, of_jacobian=lambda self, j: j._replace(outputs=-j.outputs)),
        "jacobians",
        "single data points in 'weight': relative difference 2",
    ),
    "jacobians in another order": (
        of(Jacobians, of_jacobian=lambda self, j: j._replace(outputs=j.outputs.flip(1), inputs=j.inputs.flip(0))),
        "jacobians",
        "single data points in 'weight'",
    ),
}  # fmt: skip
OF_POSITIONS = {
    "sum for a mean": (
        of(Honest, of_outputs=lambda self, rows, alpha: (rows, 1.0)),
        "inputs and outputs",
        "are 1.414 times",
    ),
    "mean for a sum": (of(Honest, of_bias=lambda self, g: g.flatten(2, -2).mean(2)), "outputs", "'bias'"),
}


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("kind", {**WRONG, **OF_POSITIONS})
def test_rules_that_contradict_autograd_are_refused(kind, positions):
    if kind in OF_POSITIONS and not positions:
        return
    rule, method, words = {**WRONG, **OF_POSITIONS}[kind]
    with pytest.raises(ValueError, match=rf"layer '2' \(Layer\): Wrong\.{method} contradicts autograd.*{words}"):
        fit(rule, positions)


class Says(Rule):
    """The same rows, said."""

    shapes = Honest.shapes

    def of_inputs(self, rows):
        return rows

    def input_rows(self, x):
        return {"weight": Dense(self.of_inputs(x.reshape(len(x), -1, 1, x.shape[-1])))}

    def output_rows(self, gradient, kept):
        rows = gradient.flatten(0, 1)
        rows = self.of_outputs(rows.reshape(len(rows), -1, 1, rows.shape[-1]))
        return {"weight": Dense(rows), "bias": Dense(rows)}

    def of_outputs(self, rows):
        return rows

    def input_gradient(self, gradient, call):
        return gradient @ self.module.weight.detach()


@pytest.mark.parametrize("positions", [False, True])
def test_rules_that_say_other_rows_are_refused(positions):
    assert fit(Says, positions).log_marginal_likelihood().isfinite()
    for methods, method, words in (
        ({"of_inputs": lambda self, rows: 2 * rows}, "input_rows and output_rows", "'weight'.*difference 0.5"),
        ({"of_outputs": lambda self, rows: rows.flip(3)}, "input_rows and output_rows", "single data points"),
        (
            {"input_gradient": lambda self, g, call: -Says.input_gradient(self, g, call)},
            "input_gradient",
            "at the input",
        ),
        ({"input_rows": lambda self, x: Says.input_rows(self, x.mul_(2))}, "input_rows", "in place"),
    ):
        with pytest.raises(ValueError, match=rf"Wrong\.{method} contradicts autograd.*{words}"):
            fit(of(Says, **methods), positions)


def test_a_wrong_rule_is_found_by_predictions_of_a_full_matrix_too():
    with pytest.raises(ValueError, match=r"Wrong\.jacobians contradicts autograd"):
        fit(WRONG["jacobians of a wrong sign"][0], False, FullLaplace)


def test_the_packages_own_rules_are_not_run_twice(monkeypatch):
    calls = []
    rows = base._RULES[nn.Linear].input_rows
    monkeypatch.setattr(base._RULES[nn.Linear], "input_rows", lambda self, x: (calls.append(len(x)), rows(self, x))[1])
    KronLaplace(nn.Linear(3, 3).double()).fit([data(False)])
    assert calls == [7]
