"""Layers made on a device and in a dtype at once, as torch's are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ella_cuda.nn import (
    CircularConv2d,
    FactoredLinear2d,
    FullyConnected2d,
    GroupFactoredLinear2d,
    SparseConv2d,
    SparseFactoredLinear2d,
    SpatialBasis,
    StridedCircularConv2d,
)
from python_tests.nn.layers import WITH_PARAMETERS

each_layer = pytest.mark.parametrize(("layer", "shape"), WITH_PARAMETERS.values(), ids=list(WITH_PARAMETERS))


@each_layer
def test_device_and_dtype(layer, shape, device):
    made = layer(device=device, dtype=torch.float64)
    tensors = [*made.parameters(), *made.buffers()]
    assert tensors and all(t.dtype == torch.float64 and t.device.type == device.type for t in tensors)
    assert made(torch.randn(shape, device=device, dtype=torch.float64)).dtype == torch.float64
    assert {t.dtype for t in (*layer().parameters(), *layer().buffers())} == {torch.float32}


@each_layer
def test_shapes_on_meta(layer, shape):
    """Shapes without memory."""
    made = layer(device="meta")
    assert all(t.is_meta for t in (*made.parameters(), *made.buffers()))
    assert made(torch.empty(shape, device="meta")).shape == layer()(torch.randn(shape)).shape
    assert [p.shape for p in made.parameters()] == [p.shape for p in layer().parameters()]


@each_layer
@pytest.mark.parametrize("make", ["skip_init", "meta"])
def test_layers_without_initialization_are_given_one(layer, shape, make, device):
    """Memory first, then ``reset_parameters``, which sets buffers too."""
    if make == "skip_init":
        made = torch.nn.utils.skip_init(layer.func, *layer.args, **layer.keywords, device=device)
    else:
        made = layer(device="meta").to_empty(device=device)
    with torch.no_grad():
        for tensor in made.state_dict().values():
            tensor.fill_(1e4)  # what memory may hold

    def begin(module):
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
        else:
            for child in module.children():
                begin(child)

    def reset():
        torch.manual_seed(3)
        begin(made)
        return [t.clone() for t in made.state_dict().values()]

    first = reset()
    assert all(t.abs().max() < 10 for t in first)
    for ours, like in zip(first, layer().state_dict().values(), strict=True):
        assert ours.shape == like.shape and (ours.any() == like.any())
    torch.testing.assert_close(reset(), first)


def test_a_basis_begins_anew_where_it_was_told_to():
    anchors = torch.tensor([[0.5, -0.5], [1.0, 1.5]])
    basis = SpatialBasis((3, 4), inverse_lengthscale=0.3, anchors=anchors)
    start = {name: tensor.clone() for name, tensor in basis.state_dict().items()}
    anchors.zero_()  # the caller's, not what the basis keeps
    for tensor in basis.state_dict().values():
        tensor.fill_(1e4)
    before = basis.matrix()
    basis.reset()
    torch.testing.assert_close(basis.state_dict(), start)
    assert not torch.equal(basis.matrix(), before)


def test_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        for layer, _ in WITH_PARAMETERS.values():
            made = layer()
            assert {t.dtype for t in (*made.parameters(), *made.buffers())} == {torch.float64}
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("layer", "sizes"), [(SparseFactoredLinear2d, (2, 3, 4, 2)), (SparseConv2d, (2, 3))], ids=["s_fc", "s_conv"]
)
def test_weights_are_as_exact_as_their_dtype(layer, sizes):
    for weight in layer(*sizes, dtype=torch.float64).parameters():
        assert not weight.any() or not torch.equal(weight, weight.float().double())


def test_a_basis_is_as_exact_as_its_dtype():
    """Not made in float32 and converted: thirds of a pixel show the difference."""
    anchors = torch.tensor([[1 / 3, -1 / 3], [0.1, 0.2]], dtype=torch.float64)
    basis = SpatialBasis(4, inverse_lengthscale=0.1, anchors=anchors, dtype=torch.float64)
    assert torch.equal(basis.anchors, anchors) and basis.inverse_lengthscale.item() == 0.1
    layer = SparseConv2d(1, 1, anchors=anchors, inverse_lengthscale=0.1, dtype=torch.float64)
    assert torch.equal(layer.basis.anchors, anchors) and layer.basis.inverse_lengthscale.item() == 0.1


@pytest.mark.parametrize(
    ("layer", "sizes"),
    [
        *((layer, (4, 4)) for layer in (FactoredLinear2d, FullyConnected2d, GroupFactoredLinear2d)),
        *((layer, ()) for layer in (CircularConv2d, StridedCircularConv2d)),
    ],
)
@pytest.mark.parametrize(("channels", "name"), [((0, 2), "in"), ((2, 0), "out"), (("1", 2), "in")])
def test_no_channels(layer, sizes, channels, name):
    with pytest.raises(ValueError, match=f"{name}_channels must be a positive integer, got"):
        layer(*channels, *sizes)


def test_numpys_integers_are_numbers():
    two, four = np.int64(2), np.int32(4)
    for layer, sizes in ((FactoredLinear2d, (two, two, four, four)), (CircularConv2d, (two, two))):
        made = layer(*sizes)
        assert type(made.in_channels) is int and made(torch.randn(1, 2, 4, 4)).shape == (1, 2, 4, 4)
