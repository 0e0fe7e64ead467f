"""Learned weights and anchors: what is drawn against the modules that have them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.patches import Circle

from ella_cuda.reports import draw_anchors, draw_filters
from ella_cuda.reports.pictures.page import signed_colour_map
from ella_cuda.reports.weights import spatial_weights, strongest_channels
from python_tests.reports.pictures.networks import network, read


def named(weights, layer: int, path: str, tensor: str):
    (found,) = [w for w in weights if (w.layer, w.path, w.tensor) == (f"blocks.{layer}", path, tensor)]
    return found


def test_weights_are_the_modules():
    model, _, weights = read("fc+f_fc+conv")
    assert {w.path for w in weights} == {"f_fc", "conv"}  # the matrix of FC has no images
    assert torch.equal(named(weights, 0, "conv", "weight").images, model.blocks[0].conv.weight)
    assert torch.equal(named(weights, 1, "conv", "0.weight").images, model.blocks[1].conv[0].weight)
    assert torch.equal(named(weights, 3, "f_fc", "weight_out").images, model.blocks[3].f_fc.weight_out)
    assert all(w.basis is None for w in weights)
    assert named(weights, 7, "f_fc", "weight_out").positions == 1
    assert len(weights) == 8 + 8 + 8


def test_weights_of_one_position_in_every_layer_are_no_images():
    model, _, weights = read("gconv", group_conv="separable")
    assert model.blocks[1].gconv[0].mixing.weight.shape[-2:] == (1, 1)
    assert {w.tensor.removeprefix("0.") for w in weights} == {"spatial.weight"}


@pytest.mark.parametrize("kind", ["interpolating", "exponential"])
def test_sparsified_weights_are_expanded(kind):
    model, _, weights = read("s_fc+s_conv", basis=kind)
    conv, linear = model.blocks[1].s_conv[0], model.blocks[1].s_fc
    found = named(weights, 1, "s_conv", "0.weight")
    torch.testing.assert_close(found.images, conv.kernel().detach())
    assert found.basis.name == "blocks.1.s_conv.0.basis"
    assert torch.equal(found.basis.anchors, conv.basis.anchors)
    found = named(weights, 1, "s_fc", "weight_out")
    torch.testing.assert_close(found.images, linear.to_dense().weight_out.detach())
    assert found.images.shape[-2:] == (16, 16)
    assert found.basis.inverse_lengthscale == float(linear.basis_out.inverse_lengthscale)


def test_a_groups_elements_count_as_input_channels():
    kernel = torch.randn(3, 2, 4, 3, 3)
    layers = [{"name": "b", "paths": {"gconv": {"prior_precision": {"weight": 1.0, "bias": 1.0}}}}]
    (weight,) = spatial_weights(layers, {"b.gconv.weight": kernel, "b.gconv.bias": torch.zeros(3)}, "interpolating")
    assert weight.images.shape == (3, 8, 3, 3)
    assert torch.equal(weight.images[2, 5], kernel[2, 1, 1])
    assert weight.elements == 4


def test_the_strongest_channels_are_those_of_the_largest_map():
    _, _, weights = read("f_fc")
    pair = [w for w in weights if w.layer == "blocks.2"]
    found = strongest_channels(pair, 5)
    maps = torch.einsum("dchw,dcij->dchwij", *(w.images.double() for w in pair)).flatten(2).norm(dim=2)
    expected = [tuple(divmod(int(i), maps.shape[1])) for i in maps.flatten().argsort(descending=True)[:5]]
    assert found == expected
    assert len(strongest_channels([w for w in weights if w.layer == "blocks.0"], 5)) == 2  # there are no more


def test_filters_show_the_weights_on_their_scale():
    model, made, weights = read("f_fc+conv")
    figure = draw_filters(made, weights)
    axes = [axis for axis in figure.axes if axis.images and axis.get_title(loc="left")]
    assert len(axes) == 3 * 8
    headings = [axis.get_title(loc="left").splitlines()[0] for axis in axes[:3]]
    assert headings == ["F-FC weight_in", "F-FC weight_out", "CONV weight"]
    found = {heading: axes[j::3] for j, heading in enumerate(headings)}
    assert "up to 4 filters" in figure.get_supxlabel()
    kernel = model.blocks[1].conv[0].weight.detach()
    axis = found["CONV weight"][1]
    labels = [t.get_text() for t in axis.get_xticklabels()]
    pairs = [tuple(map(int, label.split("←"))) for label in labels]
    assert len(pairs) == 4
    assert [float(kernel[p].norm()) for p in pairs] == sorted(
        (float(n) for n in kernel.flatten(2).norm(dim=2).flatten()), reverse=True
    )[:4]
    assert list(axis.get_xticks()) == sorted(axis.get_xticks())
    image = axis.images[0]
    assert image.get_clim() == (-1, 1)
    largest = max(float(kernel[p].abs().max()) for p in pairs)
    assert f"±{largest:.2g}"[:4] in axis.get_title(loc="left")
    drawn = image.get_array()
    for position, pair in zip(axis.get_xticks(), pairs, strict=True):
        tile = kernel[pair] / largest
        fine = drawn.shape[0] // 3
        left = round(position + 0.5 - 1.5 * fine)
        seen = drawn[fine // 2 :: fine, left + fine // 2 : left + 3 * fine : fine]
        np.testing.assert_allclose(np.asarray(seen), tile.numpy(), rtol=1e-6)
    assert np.ma.getmaskarray(drawn).any() or np.isnan(np.asarray(drawn)).any()  # gaps between the tiles
    assert [t.get_text() for t in found["F-FC weight_in"][3].get_xticklabels()] == [
        t.get_text() for t in found["F-FC weight_out"][3].get_xticklabels()
    ]
    last = found["F-FC weight_out"][7]  # one position
    out, into = map(int, last.get_xticklabels()[0].get_text().split("←"))
    written = float(model.blocks[7].f_fc.weight_out.detach()[out, into])
    assert float(last.texts[0].get_text()) == pytest.approx(written, rel=0.1)
    other = found["F-FC weight_in"][4]
    places = [np.divide(a.get_xticks(), a.get_xlim()[1]) for a in (last, other)]
    np.testing.assert_allclose(*places, atol=0.01)  # in one column of the picture
    assert [axis.get_ylabel() for axis in axes[::3]] == [f"layer {i}" for i in range(1, 9)]
    assert any("weight /" in a.get_ylabel() for a in figure.axes)


def test_signs_survive_grey_print():
    colours = signed_colour_map()(np.linspace(0, 1, 101))[:, :3]
    luminance = colours @ [0.299, 0.587, 0.114]
    assert (np.diff(luminance) > 0).all()
    middle = colours[50]
    assert np.ptp(middle) < 0.02  # zero is grey


def test_anchors_stand_where_they_are():
    model, made, weights = read("s_fc+s_conv", inverse_lengthscale=0.4)
    basis = model.blocks[2].s_fc.basis_in
    start = {"blocks.2.s_fc.basis_in": (basis.anchors - 0.5).tolist()}
    figure = draw_anchors(made, weights, start)
    axes = [a for a in figure.axes if a.images and a.get_visible()]
    assert len(axes) == 8 + 7 + 8
    axis = next(a for a in axes if a.get_title().startswith("layer 3"))  # of S-FC's input side, the first line
    started, points = [c for c in axis.collections if isinstance(c, PathCollection)]
    np.testing.assert_allclose(started.get_offsets(), basis.anchors.flip(1).numpy() - 0.5, rtol=1e-5, atol=1e-6)
    assert started.get_alpha() < 1 and points.get_alpha() is None
    np.testing.assert_allclose(points.get_offsets(), basis.anchors.flip(1).numpy(), rtol=1e-6)  # x is the column
    nearest = basis.anchors[basis.anchors.norm(dim=1).argmin()]
    for circle in [p for p in axis.patches if isinstance(p, Circle)]:
        assert circle.radius == pytest.approx(1 / 0.4)
        assert circle.center == pytest.approx((float(nearest[1]), float(nearest[0])))
    assert axis.get_title().endswith("\n2.50 px")
    (ways,) = [c for c in axis.collections if isinstance(c, LineCollection)]
    ends = np.array([way.vertices for way in ways.get_paths()])
    np.testing.assert_allclose(ends[:, 1], points.get_offsets(), rtol=1e-6)
    np.testing.assert_allclose(ends[:, 0], points.get_offsets() - 0.5, rtol=1e-5, atol=1e-6)
    # The picture's pixels are the grid's positions: 16 x 16, with rows downwards.
    assert axis.images[0].get_extent() == [-8, 8, 8, -8]
    assert axis.get_ylim()[0] > axis.get_ylim()[1]
    pair = strongest_channels([w for w in weights if (w.layer, w.path) == ("blocks.2", "s_fc")], 1)[0]
    images = named(weights, 2, "s_fc", "weight_in").images
    expected = images[pair] / images[pair].abs().max()
    np.testing.assert_allclose(np.asarray(axis.images[0].get_array()), expected.numpy(), rtol=1e-6)
    assert f"{pair[0]}←{pair[1]}" in axis.get_title()
    tensors = [label.replace("\n", " ") for a in axes if (label := a.get_ylabel())]
    assert tensors == [tensor for tensor in ("S-FC weight_in", "S-FC weight_out", "S-CONV weight") for _ in "12"]
    note = figure.legends[0].get_title().get_text()
    assert "column and row, pixels" in note
    assert note.endswith("of a single position: S-FC weight_out of layer 8.")
    labels = [t.get_text() for t in figure.legends[0].get_texts()]
    assert len(labels) == 3 and "1/ω" in labels[1]


def test_anchors_are_seen_in_large_grids_and_apart():
    _, made, weights = read("s_fc+s_conv")
    figure = draw_anchors(made, weights, None)
    axes = [a for a in figure.axes if a.images]
    figure.draw_without_rendering()
    sides = [axis.get_window_extent().width / figure.dpi for axis in axes]
    for axis, side in zip(axes, sides, strict=True):
        (points,) = [c for c in axis.collections if isinstance(c, PathCollection)]
        dot = float(points.get_sizes()[0]) ** 0.5
        apart = 72 * side / len(points.get_offsets()) ** 0.5  # points, on average
        assert 1.5 < dot <= apart / 1.7
    assert min(sides) > 0.8


def test_anchors_outside_the_grid_are_seen_and_a_flat_basis_has_no_circle():
    model, made = network("s_conv")
    basis = model.blocks[0].s_conv.basis
    basis.anchors[0] = torch.tensor([0.0, -4.0])
    basis.inverse_lengthscale.zero_()
    figure = draw_anchors(made, spatial_weights(made["layers"], model.state_dict(), "interpolating"), None)
    axis = figure.axes[0]
    assert axis.get_xlim()[0] < -4
    assert not axis.patches
    assert axis.get_title().endswith("\n∞ px")
    assert len(figure.legends[0].get_texts()) == 2
