"""Jacobians by layers against autograd of single data points."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ella_cuda.laplace import KronLaplace
from ella_cuda.laplace.jacobian import Jacobian
from ella_cuda.laplace.jacobian_pass import jacobian_pass
from ella_cuda.laplace.likelihoods import unit_columns
from python_tests.laplace.jacobians import NETWORKS, dense_jacobians, network


def by_layers(model: nn.Module, x: Tensor, budget: int = 1 << 30, each_alone: bool = False) -> dict[str, Tensor]:
    """As :func:`dense_jacobians`."""
    la = KronLaplace(model, "regression", unknown="diagonal")
    rules = la.present_rules()
    shapes = {r.full_name(n): s for r in rules for n, s in r.shapes().items() if n in r.trainable}
    shapes = {name: shapes[name] for name in la.parameter_names}
    found: dict[str, Tensor] = {}
    columns_seen: dict[tuple[str, int], int] = {}

    def take(which: slice) -> object:
        def one(name: str, jacobian: Jacobian) -> None:
            shape, parameter = shapes[name], model.get_parameter(name)
            m = shape.from_blocks(jacobian.dense(shape.groups), parameter.shape).transpose(0, 1)
            outputs = model(x[:1]).numel()
            whole = found.setdefault(name, m.new_zeros(len(x), outputs, *parameter.shape))
            blocks = jacobian.blocks or range(1)
            key = name, which.start
            first = columns_seen.get(key, 0) if blocks.start == 0 or each_alone else 0
            whole[which, first : first + m.shape[1]] += m
            columns_seen[key] = first + m.shape[1] if each_alone else 0

        return one

    with jacobian_pass(model, rules, shapes, budget) as run:
        run.try_out(x, several=True)
        outputs = run.run(x, lambda out, _: unit_columns(out), take, each_alone)
    torch.testing.assert_close(outputs, model(x))
    return found


@pytest.mark.parametrize("name", NETWORKS)
def test_jacobians_are_autograds(name: str) -> None:
    model, x = network(name)
    expected = dense_jacobians(model, x)
    found = by_layers(model, x)
    assert found.keys() == expected.keys()
    for parameter, jacobian in expected.items():
        assert jacobian.abs().max() > 0 or parameter == "places"
        torch.testing.assert_close(found[parameter], jacobian, rtol=1e-9, atol=1e-11, msg=lambda m, p=parameter: f"{p}: {m}")
