"""Layers over groups: maps against torch's own convolutions and loops, equivariance as an identity, and where it must fail."""

from __future__ import annotations

import copy
import itertools
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ella_cuda.groups import GROUPS, Group, cyclic_shifts
from ella_cuda.models import neyshabur
from ella_cuda.nn import (
    CircularConv2d,
    FactoredLinear2d,
    FullyConnected2d,
    GroupConv2d,
    GroupFactoredLinear2d,
    GroupFilter2d,
    GroupLift,
    GroupMaxPool,
    GroupPolyphasePool2d,
    SlicesAsChannels,
)
from python_tests.test_groups import moved as turn

VARIANTS = ("full", "separable", "depthwise_separable", "pointwise")
GROUP_LIST = [GROUPS["p4"], GROUPS["p4m"], cyclic_shifts(2)]
SHIFT = (3, 2)  # odd along one side: a subsampled grid changes its phase

each_group = pytest.mark.parametrize("group", GROUP_LIST, ids=[g.name for g in GROUP_LIST])
each_variant = pytest.mark.parametrize("variant", VARIANTS)
each_frame = pytest.mark.parametrize("frames", ["own", "common"])


def images(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def randomised(module: nn.Module) -> nn.Module:
    for p in module.parameters():
        nn.init.normal_(p, std=0.5)
    return module.double()


def error(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


def translated(group: Group, x: Tensor, shift: tuple[int, int]) -> Tensor:
    """Features as they must be for a translated image: slice g is moved by g, so its content is moved back, rolled, and moved again."""
    slices = [turn(group, turn(group, s, group.inverse[g]).roll(shift, (-2, -1)), g) for g, s in enumerate(x.unbind(2))]
    return torch.stack(slices, 2)


def rearranged(group: Group, x: Tensor, element: int) -> Tensor:
    return torch.stack([x[:, :, group.cayley[g][element]] for g in range(group.order)], 2)


# maps -----------------------------------------------------------------------------------------------------------


def test_lift_is_the_stack_of_rotations():
    x = images(2, 3, 6, 6)
    assert torch.equal(GroupLift()(x), torch.stack([torch.rot90(x, g, (2, 3)) for g in range(4)], 2))


def on_p4(x: Tensor, layer: GroupFilter2d) -> Tensor:
    """torch's convolution in three dimensions, circular in all: element u is u slices on."""
    u, kh, kw = layer.weight.shape[2:]
    padded = F.pad(x, (kw // 2, kw // 2, kh // 2, kh // 2, 0, u - 1), mode="circular")
    return F.conv3d(padded, layer.weight, layer.bias, groups=layer.in_channels if layer.depthwise else 1)


@each_variant
@pytest.mark.parametrize("kernel_size", [3, (5, 3)])
def test_convolutions_over_p4_are_circular_convolutions_in_three_dimensions(variant, kernel_size):
    layer = randomised(GroupConv2d(3, 4, kernel_size, variant))
    x = images(2, 3, 4, 6, 6)
    expected = x
    for part in layer:
        expected = on_p4(expected, part)
    torch.testing.assert_close(layer(x), expected)


@each_group
@each_frame
@pytest.mark.parametrize(("mixes", "depthwise"), [(True, False), (True, True), (False, True), (False, False)])
def test_filters_are_their_sum(group, frames, mixes, depthwise):
    """The formula of the docstring, slice by slice; p4m tells u g from g u."""
    layer = randomised(GroupFilter2d(3, 3, 3, mixes, depthwise, group, frames))
    x = images(2, 3, group.order, 6, 6)

    def correlate(k: Tensor, s: Tensor) -> Tensor:
        return F.conv2d(F.pad(s, (1, 1, 1, 1), mode="circular"), k, groups=3 if depthwise else 1)

    slices = []
    for g in range(group.order):
        total = layer.bias[:, None, None].expand(2, 3, 6, 6)
        for u in range(group.order) if mixes else [group.identity]:
            seen = x[:, :, group.cayley[u][g]]
            if frames == "common":
                seen = turn(group, seen, group.inverse[u])
            total = total + correlate(layer.weight[:, :, u if mixes else 0], seen)
        slices.append(total)
    torch.testing.assert_close(layer(x), torch.stack(slices, 2))


def test_slices_as_channels_is_a_convolution_of_channel_slices():
    conv = randomised(CircularConv2d(2 * 4, 3 * 4))
    x = images(2, 2, 4, 6, 6)
    y = SlicesAsChannels(conv)(x)
    stacked = torch.cat([x[:, c] for c in range(2)], 1)  # channel c, slice g at c * 4 + g
    assert torch.equal(y.flatten(1, 2), conv(stacked)) and y.shape == (2, 3, 4, 6, 6)


def test_factored_layers_over_a_domain_are_their_sums():
    layer = randomised(GroupFactoredLinear2d(2, 3, 4, 2))
    f, x = layer.factored, images(2, 2, 4, 4, 4)
    weight_in, weight_out = f.weight_in.view(3, 2, 4, 4, 4), f.weight_out.view(3, 2, 4, 2, 2)
    z = torch.einsum("dcgij,ncgij->ndc", weight_in, x) + f.bias_in[:, None]
    expected = torch.einsum("dchij,ndc->ndhij", weight_out, z) + f.bias_out.view(4, 2, 2)
    torch.testing.assert_close(layer(x), expected)
    assert sum(p.numel() for p in layer.parameters()) == 3 * 2 * 4 * (16 + 4) + 3 + 4 * 4


def test_max_pool():
    x = images(2, 3, 8, 4, 4)
    assert torch.equal(GroupMaxPool("p4m")(x), x.amax(2))


# equivariance ---------------------------------------------------------------------------------------------------


@each_group
@each_variant
@each_frame
def test_convolutions_are_equivariant_to_every_element(group, variant, frames):
    lift, layer, x = GroupLift(group), randomised(GroupConv2d(3, 4, 3, variant, group, frames)), images(2, 3, 8, 8)
    y = layer(lift(x))
    for h in range(group.order):
        assert error(layer(lift(turn(group, x, h))), rearranged(group, y, h)) < 1e-13
        assert torch.equal(rearranged(group, y, h), group.act_on_features(y, h))


@each_group
@each_variant
@each_frame
def test_convolutions_are_equivariant_to_translations_where_slices_are_aligned_or_apart(group, variant, frames):
    lift, layer, x = GroupLift(group), randomised(GroupConv2d(3, 4, 3, variant, group, frames)), images(2, 3, 8, 8)
    y = layer(lift(x.roll(SHIFT, (2, 3))))
    difference = error(y, translated(group, layer(lift(x)), SHIFT))
    # Shifts commute with translations, so that their slices move alike in any frame.
    if frames == "common" or variant == "pointwise" or group.name.startswith("shifts"):
        assert difference < 1e-13
    else:
        assert difference > 1e-2


@each_group
@each_frame
def test_pooling_is_equivariant_to_every_element_and_translation(group, frames):
    lift, pool = GroupLift(group), GroupPolyphasePool2d(group, frames)
    layer = randomised(GroupConv2d(3, 4, 3, "pointwise", group))
    x = images(3, 3, 8, 8)

    def features(x: Tensor) -> Tensor:
        return pool(layer(lift(x)))

    y = features(x)
    assert y.shape == (3, 4, group.order, 4, 4)
    for h in range(group.order):
        assert error(features(turn(group, x, h)), rearranged(group, y, h)) < 1e-13
    assert error(features(x.roll((2, -4), (2, 3))), translated(group, y, (1, -2))) < 1e-13
    odd = features(x.roll((1, 0), (2, 3)))  # by half a pixel of the new grid: to one of its pixels or the other
    if frames == "own":
        for g in range(group.order):
            for n in range(3):
                found = [
                    error(odd[n : n + 1, :, g], y[n : n + 1, :, g].roll(s, (2, 3))) < 1e-13
                    for s in itertools.product((-1, 0, 1), repeat=2)
                ]
                assert any(found)
    else:
        for n in range(3):
            shifts = itertools.product((-1, 0, 1), repeat=2)
            assert any(error(odd[n : n + 1], translated(group, y[n : n + 1], s)) < 1e-13 for s in shifts)


@pytest.mark.parametrize("layer", [
    SlicesAsChannels(CircularConv2d(8, 8)),
    SlicesAsChannels(CircularConv2d(8, 8), frames="common"),
    SlicesAsChannels(FactoredLinear2d(8, 8, 8, 8)),
    SlicesAsChannels(FullyConnected2d(8, 8, 8, 8)),
    GroupFactoredLinear2d(2, 2, 8, 8),
], ids=["conv", "conv common", "f_fc", "fc", "domain"])  # fmt: skip
def test_other_paths_break_the_rotations(layer):
    layer, lift, x = randomised(layer), GroupLift(), images(2, 2, 8, 8)
    y = layer(lift(x))
    assert error(layer(lift(torch.rot90(x, 1, (2, 3)))), rearranged(GROUPS["p4"], y, 1)) > 1e-2


@pytest.mark.parametrize(("frames", "holds"), [("common", True), ("own", False)])
def test_a_convolution_of_slices_is_equivariant_to_translations_in_common_frames(frames, holds):
    layer, lift, x = randomised(SlicesAsChannels(CircularConv2d(8, 8), frames=frames)), GroupLift(), images(2, 2, 8, 8)
    moved = layer(lift(x.roll(SHIFT, (2, 3))))
    assert (error(moved, translated(GROUPS["p4"], layer(lift(x)), SHIFT)) < 1e-13) == holds


@pytest.mark.parametrize("group", ["p4", "p4m"])
@each_variant
@each_frame
def test_networks_are_invariant_to_their_group_and_to_translations_where_they_should_be(group, variant, frames):
    torch.manual_seed(0)
    model = neyshabur("gconv", 1, 4, 2, group=group, group_conv=variant, frames=frames).double()
    for p in model.parameters():
        if p.dim() == 1:
            nn.init.constant_(p, 0.1)  # narrow networks die in their ReLUs otherwise
    x, actions = images(2, 1, 32, 32), GROUPS[group]
    y = model(x)
    assert error(y[:1], y[1:]) > 1e-3
    for h in range(actions.order):
        assert error(model(turn(actions, x, h)), y) < 1e-12
    moved = error(model(x.roll((5, 2), (2, 3))), y)
    assert moved < 1e-12 if frames == "common" or variant == "pointwise" else moved > 1e-4


def test_multi_group_networks_are_not_invariant_and_do_not_mix_images():
    torch.manual_seed(0)
    model = randomised(neyshabur("f_fc+conv+gconv", 1, 4, 1))
    x = images(3, 1, 32, 32)
    y = model(x)
    assert error(model(torch.rot90(x, 1, (2, 3))), y) > 1e-3
    torch.testing.assert_close(model(x[1:2]), y[1:2])


# counts, errors, and life in torch -------------------------------------------------------------------------------


def test_a_network_of_three_paths_has_as_many_parameters_as_the_papers():
    """Those of one path: papers/test_equivariances.py."""
    with torch.device("meta"):
        assert sum(p.numel() for p in neyshabur("f_fc+conv+gconv", width=2).parameters()) == 1_237_527


def test_an_equivariant_start_has_its_other_paths_off():
    torch.manual_seed(1)
    start = {"in_channels": 1, "num_classes": 3, "width": 1, "init": "equivariant"}
    model = neyshabur("f_fc+gconv", **start, group_conv="separable").double()
    x = images(2, 1, 32, 32)
    block, lifted = model.blocks[1], GroupLift()(images(2, 1, 32, 32))
    assert not block.f_fc(lifted).any() and block.gconv(lifted).abs().max() > 0
    assert error(model(torch.rot90(x, 1, (2, 3))), model(x)) < 1e-12
    model(x).square().sum().backward()
    assert all(
        p.grad is not None and p.grad.any() for n, p in model.named_parameters() if n.endswith("f_fc.layer.weight_out")
    )
    torch.manual_seed(1)
    alone = neyshabur("f_fc+gconv", **{**start, "init": "published"}, group_conv="separable").double()
    y, published = block.gconv(lifted), alone.blocks[1].gconv(lifted)
    torch.testing.assert_close(
        y, 2 * published
    )  # one of two paths: times n / sqrt(m), also through two filters in a row


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GroupConv2d(1, 1, variant="half"), "variant must be one of full"),
        (lambda: GroupConv2d(1, 1, group="p6"), "group must be one of p4, p4m"),
        (lambda: GroupConv2d(1, 1, frames="mine"), "frames must be one of own, common"),
        (lambda: GroupConv2d(1, 1, 2), "kernel_size must be odd"),
        (lambda: GroupConv2d(0, 1), "in_channels must be a positive integer"),
        (lambda: GroupConv2d(1, 1, (3, 1), frames="common"), "3x1 kernel onto itself"),
        (lambda: GroupFilter2d(2, 3, depthwise=True), "must be in_channels, 2; got 3"),
        (lambda: GroupConv2d(3, 1)(images(2, 3, 8, 4, 4).float()), r"\(N, 3, 4, H, W\), with a slice for each element of p4"),
        (lambda: GroupConv2d(3, 1)(images(2, 2, 4, 4, 4).float()), r"\(N, 3, 4, H, W\)"),
        (lambda: GroupConv2d(3, 1)(images(2, 3, 4, 4, 4)), "x is torch.float64, the layer's parameters are torch.float32"),
        (lambda: GroupLift()(images(3, 4, 4)), r"\(N, C, H, W\), got \(3, 4, 4\)"),
        (lambda: GroupLift()(images(1, 3, 4, 6)), "square images, got 4x6"),
        (lambda: GroupMaxPool()(images(2, 3, 4, 4)), "GroupLift makes such features"),
        (lambda: GroupFactoredLinear2d(1, 1, 4, 4)(images(2, 1, 4, 5, 5).float()), "slices of 4x4"),
        (lambda: SlicesAsChannels(nn.Conv2d(4, 3, 1))(images(2, 1, 4, 4, 4).float()), "the layer must give"),
        (lambda: GroupConv2d(1, 1, 11, "separable")(images(1, 1, 4, 4, 4).float()), "11x11 kernel .* wraps more than once"),
        (lambda: GroupConv2d(1, 1)(torch.zeros(1, 1, 4, 4, 4, device="meta")), "x is on meta, the layer's parameters are on cpu"),
        (lambda: neyshabur("conv", frames="mine"), "frames must be one of"),
        (lambda: neyshabur("gconv", group="p6"), "group must be one of"),
        (lambda: neyshabur("gconv", group_conv="half"), "variant must be one of"),
    ],
)  # fmt: skip
def test_errors_say_what_is_wrong(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def small_network(variant: str, frames: str) -> nn.Module:
    pool = GroupPolyphasePool2d(frames=frames)
    return randomised(nn.Sequential(GroupLift(), GroupConv2d(2, 3, 3, variant, frames=frames), pool, GroupMaxPool()))


@pytest.mark.parametrize("layer", [GroupLift(), GroupMaxPool(), GroupConv2d(1, 1), SlicesAsChannels(nn.Identity())])
def test_what_is_no_tensor_is_said(layer):
    with pytest.raises(TypeError, match="x must be a tensor, got NoneType"):
        layer(None)


def test_only_modules_are_wrapped():
    with pytest.raises(TypeError, match="layer must be a module, got NoneType"):
        SlicesAsChannels(None)


@each_frame
def test_pooling_heeds_its_norm(frames):
    """One component has one large value, another many small ones: the largest norm is the first's by maximum, the second's by sum."""
    x = torch.zeros(1, 1, 4, 4, 4)
    x[0, 0, :, 0, 0] = 3.0
    x[0, 0, :, 1::2, 1::2] = 2.0
    if frames == "common":
        x = torch.stack([torch.rot90(x[:, :, 0], g, (2, 3)) for g in range(4)], 2)
    largest = {norm: GroupPolyphasePool2d(frames=frames, norm=norm)(x)[0, 0, 0].max().item() for norm in (2, math.inf)}
    assert largest == {2: 2.0, math.inf: 3.0}


def test_paths_of_a_network_have_the_frames_and_the_gains_they_should():
    model = neyshabur("f_fc+conv+gconv", 1, 3, 8, group_conv="separable", frames="common")
    block = model.blocks[2]
    assert block.conv.frames == "common" and block.f_fc.frames == "own" and block.gconv.mixing.frames == "common"
    assert model.blocks[1].gconv[1].frames == "common"
    for part, gain in ((block.gconv.spatial, 1.0), (block.gconv.mixing, math.sqrt(2))):  # no ReLU between the two
        bound = gain * math.sqrt(3 / part.weight[0].numel())
        assert 0.97 * bound < part.weight.abs().max() <= bound


@pytest.mark.parametrize(("variant", "frames"), [("full", "common"), ("separable", "own")])
def test_layers_compile_whole(variant, frames):
    torch._dynamo.reset()
    model = small_network(variant, frames)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for size in (4, 6):
        x = images(3, 2, size, size)
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.slow
def test_gradients_of_a_layer_compiled_to_machine_code(inductor):
    torch._dynamo.reset()
    layer, x = GroupConv2d(2, 2, variant="depthwise_separable").double(), images(3, 2, 4, 6, 6).requires_grad_()
    leaves = [x, *layer.parameters()]
    y, expected = torch.compile(layer, fullgraph=True)(x), layer(x)
    torch.testing.assert_close(y, expected)
    for mine, theirs in zip(*(torch.autograd.grad(out.square().sum(), leaves) for out in (y, expected)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@each_variant
@each_frame
def test_layers_pass_through_torch_func(variant, frames):
    model, x = small_network(variant, frames), images(2, 2, 4, 4)
    single = torch.func.vmap(lambda one: model(one[None])[0])(x)
    torch.testing.assert_close(single, model(x))
    tangent = torch.randn_like(x)
    _, forward = torch.func.jvp(model, (x,), (tangent,))
    step = 1e-6 * tangent
    torch.testing.assert_close(forward, (model(x + step) - model(x - step)) / 2e-6, rtol=1e-6, atol=1e-6)
    assert torch.autograd.gradcheck(model[1], GroupLift()(x[:1, :, :2, :2]).requires_grad_())


def test_layers_hold_weights_only_and_can_be_copied_and_pickled():
    model = neyshabur("conv+gconv", 1, 3, 1, group_conv="full", frames="common")
    assert set(model.state_dict()) == {n for n, _ in model.named_parameters()}
    x = torch.randn(2, 1, 32, 32)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(x), model(x))
