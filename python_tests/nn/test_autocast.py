"""Layers under autocast: as without it, whatever comes in. bfloat16 has three digits: what differs by less was not computed in it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ella_cuda import ops
from ella_cuda.models import neyshabur
from ella_cuda.nn import (
    FactoredLinear2d,
    FullyConnected2d,
    SparseFactoredLinear2d,
    SpatialBasis,
)
from python_tests.nn.layers import OTHERS, WITH_PARAMETERS

CASES = WITH_PARAMETERS | OTHERS
each_layer = pytest.mark.parametrize(("make", "shape"), CASES.values(), ids=list(CASES))
reduced = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])


@each_layer
@reduced
def test_layers_compute_as_without_autocast(make, shape, dtype, device):
    layer = make().to(device)
    x = torch.randn(shape, device=device).to(dtype)
    expected = layer(x.float())
    with torch.autocast(device.type, dtype):
        from_reduced, from_full = layer(x), layer(x.float())
    assert expected.dtype == torch.float32
    assert from_reduced.dtype == from_full.dtype == torch.float32
    torch.testing.assert_close((from_reduced, from_full), (expected, expected))


@each_layer
def test_gradients_are_those_without_autocast(make, shape, device):
    layer = make().to(device)
    x = torch.randn(shape, device=device).to(torch.bfloat16).requires_grad_()
    wanted = [x, *layer.parameters()]
    expected = torch.autograd.grad(layer(x.float()).square().sum(), wanted)
    with torch.autocast(device.type, torch.bfloat16):
        y = layer(x)
    for mine, theirs in zip(torch.autograd.grad(y.square().sum(), wanted), expected, strict=True):
        torch.testing.assert_close(mine, theirs)  # dtypes too


@pytest.mark.parametrize(("make", "shape"), WITH_PARAMETERS.values(), ids=list(WITH_PARAMETERS))
def test_reduced_inputs_are_refused_outside(make, shape):
    """A conversion that nobody asked for would hide where precision was lost."""
    with pytest.raises(ValueError, match=r"x is torch\.bfloat16, the layer's parameters are torch\.float32"):
        make()(torch.zeros(shape, dtype=torch.bfloat16))


@each_layer
def test_compiled_layers_under_autocast(make, shape, device):
    layer = make().to(device)
    x = torch.randn(shape, device=device).to(torch.bfloat16)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.autocast(device.type, torch.bfloat16):
        y = compiled(x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, layer(x.float()))


def test_network_with_torch_layers_trains_under_autocast(device):
    """Torch's own layers hand on bfloat16, ours float32."""
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), FactoredLinear2d(2, 2, 4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)
    )
    model.to(device)
    with torch.autocast(device.type, torch.bfloat16):
        y = model(torch.randn(5, 1, 4, 4, device=device))
        loss = y.float().square().mean()
    loss.backward()
    assert y.dtype == torch.bfloat16
    assert all(p.grad.dtype == torch.float32 and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("layer", ["f_fc+conv", "s_fc+s_conv"])
def test_published_network_under_autocast(layer, device):
    model, x = neyshabur(layer, width=1).to(device), torch.randn(2, 3, 32, 32, device=device)
    features = torch.randn(0, device=device)

    def keep(module, args, out):
        nonlocal features
        features = out

    model.blocks[-1].register_forward_hook(keep)
    model(x)
    expected = features
    with torch.autocast(device.type, torch.bfloat16):
        logits = model(x)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(features, expected)


@each_layer
def test_layers_in_float64_stay_so(make, shape, device):
    layer, x = make().to(device, torch.float64), torch.randn(shape, dtype=torch.float64, device=device)
    expected = layer(x)
    with torch.autocast(device.type, torch.bfloat16):
        found = layer(x)
    torch.testing.assert_close(found, expected)


def test_layers_of_reduced_precision_take_inputs_as_they_are():
    layer, x = FullyConnected2d(2, 3, 4, 2).bfloat16(), torch.randn(3, 2, 4, 4).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), layer.linear(x.flatten(1)).unflatten(1, (3, 2, 2)))


@pytest.mark.parametrize("kind", ["interpolating", "exponential"])
def test_what_a_basis_makes_is_not_reduced(kind, device):
    basis = SpatialBasis(6, kind=kind).to(device)
    signals, values = torch.randn(5, 36, device=device), torch.randn(5, 18, device=device)

    def made():
        projected = ops.basis_project(signals, basis.points, basis.anchors, basis.inverse_lengthscale, kind)
        return basis.project(signals), basis.expand(values), basis.fit(signals), basis.matrix(), projected

    expected = made()
    with torch.autocast(device.type, torch.bfloat16):
        found = made()
    torch.testing.assert_close(found, expected)


def test_conversions_are_not_reduced():
    dense = FactoredLinear2d(2, 3, 4, 2)

    def converted():
        torch.manual_seed(0)
        layer = SparseFactoredLinear2d.from_dense(dense)
        return [*layer.state_dict().values(), *layer.residuals.values(), *layer.to_dense().state_dict().values()]

    expected = converted()
    with torch.autocast("cpu", torch.bfloat16):
        found = converted()
    torch.testing.assert_close(found, expected)
