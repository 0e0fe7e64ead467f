"""Jacobians by layers against autograd of single data points."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ella_cuda.laplace import KronLaplace
from ella_cuda.laplace.factors import Jacobian
from ella_cuda.laplace.jacobian_pass import JacobianConsumer, JacobianPass, running
from ella_cuda.laplace.likelihoods import unit_columns
from ella_cuda.laplace.rules import Rule
from python_tests.laplace.checks import randomised
from python_tests.laplace.jacobians import NETWORKS, OwnTanh, dense_jacobians, network


class Collected(JacobianConsumer):
    """Jacobians by name, ``(N, K, *parameter.shape)``."""

    def __init__(self, la: KronLaplace, rules: list[Rule], count: int) -> None:
        shapes = {r.full_name(n): s for r in rules for n, s in r.shapes().items() if n in r.trainable}
        self.shapes = {name: shapes[name] for name in la.parameter_names}
        self.model, self.count, self.found, self.parts = la.model, count, {}, 0

    def begin(self, outputs: Tensor, which: slice, columns: slice) -> None:
        self.entries, self.which, self.columns = outputs[0].numel(), which, columns
        self.parts += 1

    def take(self, name: str, jacobian: Jacobian) -> None:
        shape, parameter = self.shapes[name], self.model.get_parameter(name)
        m = shape.from_blocks(jacobian.dense(shape.groups), parameter.shape).transpose(0, 1)
        whole = self.found.setdefault(name, m.new_zeros(self.count, self.entries, *parameter.shape))
        whole[self.which, self.columns] += m


def by_layers(model: nn.Module, x: Tensor, budget: int = 1 << 30, **how: bool) -> Collected:
    """As :func:`dense_jacobians`."""
    la = KronLaplace(model, "regression", unknown="diagonal")
    rules = la.fitted_model.present_rules()
    collected = Collected(la, rules, len(x))
    with running(JacobianPass(model, rules, collected.shapes, budget)) as run:
        run.try_out(x, several=True)
        outputs = run.run(x, lambda out, _: unit_columns(out), collected, **how)
    torch.testing.assert_close(outputs, model(x))
    return collected


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, jacobian in expected.items():
        assert jacobian.abs().max() > 0
        torch.testing.assert_close(found[name], jacobian, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", NETWORKS)
def test_jacobians_are_autograds(name: str) -> None:
    model, x = network(name)
    assert_same(by_layers(model, x).found, dense_jacobians(model, x))


@pytest.mark.parametrize("name", ["conv", "tied", "attention"])
@pytest.mark.parametrize("each_alone", [False, True])
def test_a_small_budget_takes_parts(name: str, each_alone: bool) -> None:
    model, x = network(name)
    collected = by_layers(model, x, 1, each_alone=each_alone)
    entries = model(x)[0].numel()
    assert collected.parts == len(x) * (entries if each_alone else 1)
    assert_same(collected.found, dense_jacobians(model, x))
    assert by_layers(model, x, 1, all_data=True).parts == 1


def test_columns_go_back_one_by_one_where_they_must() -> None:
    model = randomised(nn.Sequential(nn.Linear(3, 4), OwnTanh(), nn.Linear(4, 2)))
    x = torch.randn(4, 3, dtype=torch.float64)
    with pytest.warns(UserWarning, match="one at a time"):
        found = by_layers(model, x).found
    assert_same(found, dense_jacobians(model, x))


def test_an_input_that_changed_is_refused() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = x * 1
            y = self.linear(x)
            x += 1
            return self.other(y)

    model = randomised(InPlace())
    with pytest.raises(ValueError, match=r"'linear' \(Linear\): its input was changed in place"):
        by_layers(model, torch.randn(4, 3, dtype=torch.float64))
