"""The layers against dense layers and explicit formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ella_cuda.nn import (
    FactoredLinear2d,
    FullyConnected2d,
    GroupPolyphasePool2d,
    PolyphasePool2d,
    RelaxedEquivariance,
    StridedCircularConv2d,
)
from python_tests.ops.checks import assert_same


def test_factored_layer_is_a_dense_layer_with_a_factored_weight(device):
    layer = FactoredLinear2d(2, 3, (4, 5), (2, 3)).to(device, torch.float64)
    nn.init.normal_(layer.bias_in)
    nn.init.normal_(layer.bias_out)
    x = torch.randn(6, 2, 4, 5, dtype=torch.float64, device=device)
    weight = torch.einsum("dcij,dchw->dijchw", layer.weight_out, layer.weight_in)
    bias = torch.einsum("d,dcij->dij", layer.bias_in, layer.weight_out) + layer.bias_out
    assert_same(layer(x), torch.einsum("dijchw,nchw->ndij", weight, x) + bias)
    plain = FactoredLinear2d(2, 3, (4, 5), (2, 3), bias=False).to(device, torch.float64)
    assert plain.bias_in is None and plain.bias_out is None and plain(x).shape == (6, 3, 2, 3)


def test_factored_layer_starts_as_published():
    layer = FactoredLinear2d(3, 64, 16, 8)
    for weight, bound in ((layer.weight_in, math.sqrt(3 / 256)), (layer.weight_out, math.sqrt(3 / 3))):
        assert weight.abs().max() <= bound
        assert abs(weight.std() / (bound / math.sqrt(3)) - 1) < 0.05  # uniform
    assert layer.bias_in.abs().max() == 0 and layer.bias_out.abs().max() == 0


def test_fully_connected_layer(device):
    layer = FullyConnected2d(2, 3, (4, 5), (2, 3)).to(device)
    x = torch.randn(6, 2, 4, 5, device=device)
    assert_same(layer(x), (x.flatten(1) @ layer.linear.weight.T).view(6, 3, 2, 3))


def test_relaxed_layer_is_the_mean_of_its_paths(device):
    paths = {
        "f_fc": FactoredLinear2d(2, 3, 4, 4),
        "conv": nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
        "fc": FullyConnected2d(2, 3, 4, 4),
    }
    layer = RelaxedEquivariance(paths).to(device)
    x = torch.randn(5, 2, 4, 4, device=device)
    assert_same(layer(x), (paths["f_fc"](x) + paths["conv"](x) + paths["fc"](x)) / 3)
    images = torch.ones(1, 1, 2, 2, dtype=torch.int64, device=device)  # of whole numbers too, whose paths do not change
    halves = RelaxedEquivariance({"one": nn.Identity(), "other": nn.ZeroPad2d(0), "third": nn.Identity()})
    assert torch.equal(halves(images), torch.ones(1, 1, 2, 2, device=device)) and bool((images == 1).all())
    assert layer.path_names == ("f_fc", "conv", "fc")
    assert {name.split(".")[0] for name, _ in layer.named_parameters()} == set(paths)


def test_paths_without_names_are_refused():
    with pytest.raises(AttributeError, match="items"):
        RelaxedEquivariance([nn.Identity()])
    for paths in ({"f_fc": nn.Identity(), "conv": nn.Identity}, {3: nn.Identity()}):
        with pytest.raises(TypeError):
            RelaxedEquivariance(paths)
    RelaxedEquivariance(nn.ModuleDict({"conv": nn.Identity()}))  # no Mapping, but as good


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FactoredLinear2d(2, 3, 0, 4), "in_size"),
        (lambda: FactoredLinear2d(2, 3, 4, (4, 4, 4)), "out_size"),
        (lambda: FactoredLinear2d(2, 3, 4, 4)(torch.zeros(1, 2, 4, 5)), "FactoredLinear2d"),
        (lambda: FullyConnected2d(2, 3, 4, 4)(torch.zeros(1, 3, 4, 4)), "FullyConnected2d"),
        (lambda: FullyConnected2d(2, 3, 4, 4)(torch.zeros(1, 2, 4, 4).double()), "x is torch.float64"),
        (lambda: FactoredLinear2d(2, 3, 4, 4).double()(torch.zeros(1, 2, 4, 4)), "x is torch.float32"),
        (lambda: RelaxedEquivariance({}), "paths"),
        (lambda: PolyphasePool2d(norm=3), "PolyphasePool2d: norm must be 1, 2 or math.inf, got 3"),
        (lambda: StridedCircularConv2d(1, 1, norm=3), "norm must be 1, 2 or math.inf, got 3"),
        (lambda: RelaxedEquivariance({"a.b": nn.Identity()}), "a.b; choose another name"),
        (lambda: RelaxedEquivariance({"": nn.Identity()}), "empty string"),
        (lambda: RelaxedEquivariance({"type": nn.Identity()}), "'type' already exists"),
        (lambda: RelaxedEquivariance({"path_names": nn.Identity()}), "'path_names' already exists"),
        (lambda: GroupPolyphasePool2d(norm=0), "GroupPolyphasePool2d: norm must be 1, 2 or math.inf, got 0"),
        (lambda: RelaxedEquivariance({"a": nn.Identity(), "b": nn.MaxPool2d(2)})(torch.zeros(1, 1, 4, 4)), "path 'b'"),
    ],
)
def test_errors(make, words):
    with pytest.raises(ValueError, match=words):
        make()
