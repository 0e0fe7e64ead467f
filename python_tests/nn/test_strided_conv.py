"""The strided convolution is a convolution and adaptive polyphase sampling in a row, as one op."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import Tensor, nn

from ella_cuda import ops
from ella_cuda.models import neyshabur
from ella_cuda.nn import CircularConv2d, PolyphasePool2d, StridedCircularConv2d
from python_tests.ops.checks import assert_same


def layer(device: torch.device, **kwargs: float) -> StridedCircularConv2d:
    torch.manual_seed(1)
    return StridedCircularConv2d(2, 3, **kwargs).to(device, torch.float64)


def images(device: torch.device) -> Tensor:
    return torch.randn(4, 2, 6, 8, dtype=torch.float64, device=device)


@pytest.fixture
def one_op(monkeypatch):
    """How often the one op is called."""
    calls = []
    op = ops.circular_conv2d_pool
    monkeypatch.setattr(ops, "circular_conv2d_pool", lambda *args: calls.append(1) or op(*args))
    return calls


@pytest.mark.parametrize("kwargs", [{}, {"kernel_size": (1, 5)}, {"bias": False}, {"norm": math.inf}, {"norm": 1}])
def test_it_is_two_layers(kwargs, device, one_op):
    strided, x = layer(device, **kwargs), images(device).requires_grad_()
    torch.manual_seed(1)
    norm = kwargs.pop("norm", 2)
    two = nn.Sequential(CircularConv2d(2, 3, **kwargs), PolyphasePool2d(norm)).to(device, torch.float64)
    assert_same(dict(strided.named_parameters()), dict(two[0].named_parameters()), rtol=0, atol=0)  # one initialisation
    y, exact = strided(x), two(x)
    assert len(one_op) == 1
    assert_same(y, exact)
    grad = torch.randn_like(y)
    assert_same(
        torch.autograd.grad(y, [x, *strided.parameters()], grad),
        torch.autograd.grad(exact, [x, *two.parameters()], grad),
    )


def test_copies_and_files(device):
    strided, x = layer(device), images(device)
    for other in (copy.deepcopy(strided), pickle.loads(pickle.dumps(strided))):
        assert_same(other(x), strided(x), rtol=0, atol=0)


def test_parameters_of_a_functional_call(device):
    strided, x = layer(device), images(device)
    doubled = {name: 2 * p for name, p in strided.named_parameters()}
    assert_same(torch.func.functional_call(strided, doubled, (x,)), 2 * strided(x))


def test_compiled_in_one_graph(device):
    strided, x = layer(device), images(device)
    torch._dynamo.reset()
    compiled = torch.compile(strided, fullgraph=True, backend="aot_eager")
    assert_same(compiled(x), strided(x))
    gradients = torch.autograd.grad(compiled(x).square().sum(), list(strided.parameters()))
    assert_same(gradients, torch.autograd.grad(strided(x).square().sum(), list(strided.parameters())))


def test_the_networks_strided_convolutions_are_such_layers(device, one_op):
    """And their parameters have the names of two layers in a row."""
    model = neyshabur("f_fc+conv", 1, 10, width=1).to(device)
    model(torch.randn(2, 1, 32, 32, device=device))
    assert len(one_op) == 5
    names = [name for name in model.state_dict() if ".conv." in name]
    assert "blocks.0.conv.weight" in names and "blocks.1.conv.0.weight" in names and len(names) == 16
