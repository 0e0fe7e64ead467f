"""What a fit takes for granted of a network is tried before the first batch: served, or refused by name."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ella_cuda.laplace import Dense, FactorShape, FullLaplace, KronLaplace, Rule, curvature, register
from ella_cuda.laplace.parameters import rounding_of


def labelled(*shape, images=4):
    x = torch.randn(images, *shape, dtype=torch.float64)
    return x, torch.randint(3, (images,))


# ---- parameters used outside of their layer ----


class Tied(nn.Module):
    """The weight of ``layer`` once more, in a function of the way that ``how`` says."""

    def __init__(self, how):
        super().__init__()
        self.layer, self.last, self.how = nn.Linear(3, 3), nn.Linear(3, 3), how

    def forward(self, x):
        weight = self.layer.weight
        if self.how == "before":
            x = F.linear(x, weight)
        h = torch.tanh(self.layer(x))
        if self.how == "after":
            h = h @ weight
        if self.how == "bias":
            h = h + self.layer.bias
        if self.how == "added":
            h = h + weight.square().sum()
        if self.how == "in place":
            h.mul_(weight[0, 0])
        if self.how == "constant":
            h = h @ weight.detach()
        if self.how == "aside":
            F.linear(h, weight)
        return self.last(h)


@pytest.mark.parametrize("how", ["before", "after", "added", "in place"])
def test_a_parameter_used_outside_of_its_layer_is_refused(how):
    with pytest.raises(ValueError, match=r"layer 'layer' \(Linear\): its parameter 'weight' is used outside"):
        KronLaplace(Tied(how).double()).fit([labelled(3)])


@pytest.mark.parametrize("approximation", ["expand", "reduce"])
def test_a_bias_used_outside_of_its_layer_has_its_exact_block(approximation, dense_ggn):
    model, (x, y) = Tied("bias").double(), labelled(3)
    la, dense = KronLaplace(model, approximation=approximation).fit([(x, y)]), dense_ggn(model, x, y)
    for name in ("layer.bias", "last.bias"):
        torch.testing.assert_close(la.factors[name].to_dense()[0], dense[name])


@pytest.mark.parametrize("how", ["none", "constant", "aside"])
def test_uses_that_the_outputs_do_not_differentiate_are_none(how, dense_ggn):
    model, (x, y) = Tied(how).double(), labelled(3)
    la = KronLaplace(model).fit([(x, y)])
    if how != "constant":  # where the oracle differentiates in it too
        torch.testing.assert_close(la.factors["layer.bias"].outputs[0], dense_ggn(model, x, y)["layer.bias"])


def test_a_parameter_that_is_frozen_may_be_used_anywhere():
    model = Tied("after").double()
    model.layer.weight.requires_grad_(False)
    assert list(KronLaplace(model).fit([labelled(3)]).factors) == ["layer.bias", "last.weight", "last.bias"]


@pytest.mark.parametrize("change", [lambda p: p / p.norm(), lambda p: 2 * p, lambda p: p.detach(), lambda p: p.clone()])
def test_parameters_that_others_stand_in_for_are_refused(change):
    class Reparametrised(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))

        def forward(self, x):
            changed = {name: change(p) for name, p in self.inner.named_parameters()}
            return torch.func.functional_call(self.inner, changed, (x,))

    with pytest.raises(ValueError, match=r"layer 'inner.0' \(Linear\): its parameter 'weight' is replaced"):
        KronLaplace(Reparametrised().double()).fit([labelled(3)])


def test_a_network_that_differentiates_in_its_forward_is_refused():
    class Force(nn.Module):
        def __init__(self):
            super().__init__()
            self.energy, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                (force,) = torch.autograd.grad(self.energy(x).tanh().sum(), x, create_graph=True)
            return self.last(force)

    with pytest.raises(ValueError, match="differentiates through its layers in its own forward"):
        KronLaplace(Force().double()).fit([labelled(3)])


class Marked(torch.Tensor):
    pass


@pytest.mark.parametrize("place", ["input", "between", "parameter"])
def test_tensor_subclasses_inside_a_model(place):
    class Marking(nn.Sequential):
        def forward(self, x):
            h = self[0](x.as_subclass(Marked) if place == "input" else x)
            return self[2](self[1](h.as_subclass(Marked) if place == "between" else h))

    model, batch = Marking(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double(), labelled(3)
    if place == "parameter":
        model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(Marked))
    la, expected = KronLaplace(model).fit([batch]), KronLaplace(nn.Sequential(*model)).fit([batch])
    torch.testing.assert_close(la.log_marginal_likelihood(), expected.log_marginal_likelihood())


# ---- where the batch is ----


class SequenceFirst(nn.Module):
    def __init__(self, layer=None):
        super().__init__()
        self.embed, self.layer = nn.Linear(2, 4), layer or nn.Linear(4, 4)
        self.last = nn.Linear(4, 3)

    def forward(self, x):  # (N, T, 2)
        h = torch.relu(self.embed(x.transpose(0, 1)))  # (T, N, 4)
        return self.last(torch.tanh(self.layer(h)).mean(0))


class Shift(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return x + self.shift


class Ordered(Shift):
    """Treats its first axis otherwise than its second."""

    def forward(self, x):
        return x.cumsum(0) + self.shift


@pytest.mark.parametrize("layer", [Shift, Ordered])
def test_a_layer_that_takes_the_batch_second_treats_both_axes_alike(layer, dense_ggn):
    @register(Shift)
    class ShiftRule(Rule):
        def shapes(self):
            return {"shift": FactorShape.bias(4)}

        def input_rows(self, x):
            return {}

        def output_rows(self, gradient, kept):
            return {"shift": Dense(gradient.flatten(0, 1)[:, :, None])}

    register(Ordered)(ShiftRule)
    x, y = labelled(4, 2, images=4)  # as many positions as images
    model = SequenceFirst(layer()).double()
    if layer is Shift:
        found = KronLaplace(model).fit([(x, y)]).factors["layer.shift"].to_dense()[0]
        torch.testing.assert_close(found, dense_ggn(model, x, y)["layer.shift"])
        return
    words = r"layer 'layer' \(Ordered\): .*got \(4, 2, 4\) for N = 2 and \(4, 3, 4\) for N = 3"
    with pytest.raises(ValueError, match=words):
        KronLaplace(model).fit([(x, y)])


# ---- images that are not independent ----


class Mixing(nn.Module):
    def __init__(self, mix):
        super().__init__()
        self.first, self.last, self.mix = nn.Linear(3, 3), nn.Linear(3, 3), mix

    def forward(self, x):
        return self.last(self.mix(self.first(x)))


@pytest.mark.parametrize(
    "mix",
    [
        nn.BatchNorm1d(3, affine=False, track_running_stats=False),
        lambda h: h - h.mean(0),
        lambda h: h.softmax(0),
        lambda h: h.roll(1, 0),
        lambda h: h + h.roll(2, 0),
        lambda h: h.cumsum(0),
        lambda h: h.flip(0).cumsum(0).flip(0),
        lambda h: h + h.flip(0),
        lambda h: torch.cat([h[-1:], h[1:-1], h[:1]]) if len(h) > 1 else h,
    ],
    ids=["batch statistics", "mean", "softmax", "roll", "roll by two", "before", "behind", "reverse", "ends"],
)
def test_outputs_that_depend_on_other_images_are_refused(mix):
    with pytest.raises(ValueError, match=r"layer 'first' \(Linear\): an image's outputs depend on .* other images"):
        KronLaplace(Mixing(mix).double()).fit([labelled(3)])


class MixingOutOfSight(nn.Module):
    """Where no gradient goes: what follows the only layer is a function of constants, or what comes before it."""

    def __init__(self, before=lambda x: x, behind=lambda h: h):
        super().__init__()
        self.layer, self.before, self.behind = nn.Linear(3, 3), before, behind

    def forward(self, x):
        return self.behind(self.layer(self.before(x.double())))


def without_gradient(x):
    with torch.no_grad():
        return nn.functional.batch_norm(x, None, None, training=True)


@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize(
    "parts",
    [
        {"before": nn.BatchNorm1d(3, affine=False, track_running_stats=False)},
        {"before": without_gradient},
        {"before": lambda x: x.flip(0)},
        {"behind": lambda h: h - h.mean(0).detach()},
        {"behind": lambda h: h / len(h)},
        {"behind": lambda h: h + h.roll(3, 0)},
    ],
    ids=["batch statistics", "no gradient", "reverse", "constants", "size", "roll by three"],
)
@pytest.mark.parametrize("images", [2, 3, 6])
def test_mixing_that_no_gradient_shows_is_refused(parts, integers, images):
    x, y = labelled(3, images=images)
    x = torch.randperm(256)[: x.numel()].view_as(x).to(torch.uint8) if integers else x
    with pytest.raises(ValueError, match="outputs for two images are others when a third is in the batch"):
        KronLaplace(MixingOutOfSight(**parts).double()).fit([(x, y)])


def test_one_image_shows_mixing_too():
    mixing = nn.BatchNorm1d(3, affine=False, track_running_stats=False)
    with pytest.raises(ValueError, match="outputs for two images are others"):
        KronLaplace(nn.Sequential(mixing, nn.Linear(3, 3)).double()).fit([labelled(3, images=1)])


class KeptBehindABackbone(nn.Module):
    """A layer without a gradient, whose output a buffer keeps."""

    def __init__(self):
        super().__init__()
        self.backbone, self.layer = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("kept", torch.zeros(8, 3))

    def forward(self, x):
        with torch.no_grad():
            h = self.backbone(x)
        self.kept[: len(x)] = x
        return self.layer(h + self.kept[: len(x)])


def test_a_trial_with_a_gradient_at_the_inputs_leaves_none_in_buffers():
    model = KeptBehindABackbone().double()
    KronLaplace(model).fit([labelled(3)])
    assert not model.kept.requires_grad and model.kept.is_leaf


@pytest.mark.parametrize("images", [5, 9])
@pytest.mark.parametrize("kind", [KronLaplace, FullLaplace])
@pytest.mark.parametrize(
    "order",
    [
        lambda h: torch.cat([h[:3], h[3:].flip(0)]),
        lambda h: h if len(h) < 4 else torch.cat([h[:-2], h[-1:], h[-2:-1]]),
        lambda h: h[h[:, 0].argsort()],
        lambda h: h * (torch.arange(len(h))[:, None] < 3),
    ],
    ids=["behind the third", "last two", "sorted", "a capacity"],
)
def test_rows_that_are_not_those_of_their_images_are_refused(order, kind, images):
    model = Mixing(lambda h: h).double()
    x, y = labelled(3, images=images)
    x = x[model.first(x)[:, 0].argsort()]  # in which nothing moves
    x[3:] = x[3:].flip(0)
    model.mix = order
    with pytest.raises(ValueError, match=r"outputs of the first batch.s . images are others|depend on .* other images"):
        kind(model).fit([(x, y)])


def test_steps_that_rounding_passes_are_no_other_order():
    """Of a network that rounds its activations, the same image may have another output in a batch of another size."""

    class Stepped(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            h = self.first(x)
            shift = 1e-3 if len(h) > 3 and len(h) != 8 else 0.0  # in place of rounding
            return self.last(h + (h - h.detach()) + shift)

    assert KronLaplace(Stepped().double()).fit([labelled(3, images=8)]).n_data == 8


# ---- forwards that do unusual things with tensors ----


class Free(nn.Module):
    """Two layers, a buffer and a forward to be given."""

    def __init__(self, forward):
        super().__init__()
        self.layer, self.last, self.body = nn.Linear(3, 3), nn.Linear(3, 3), forward
        self.register_buffer("buffer", torch.zeros(8, 3))

    def forward(self, x):
        return self.body(self, x)


def kept(model, x):
    model.buffer[: len(x)] = x
    return model.last(torch.tanh(model.layer(model.buffer[: len(x)])))


def lengthened(model, x):
    h = model.layer(x)
    h.unsqueeze_(0)
    return model.last(torch.tanh(h[0]))


@pytest.mark.parametrize(
    "forward",
    [
        lambda model, x: model.last(torch.tanh(model.layer(torch.from_numpy(x.numpy() * 1)))),
        lambda model, x: model.last(torch.tanh(model.layer(x.mul_(1)))),
        lambda model, x: model.last(torch.tanh(model.layer(torch.mul(x, 1, out=torch.empty_like(x))))),
        lambda model, x: model.last(torch.tanh(model.layer(x.requires_grad_(False)))),
        kept,
        lengthened,
    ],
    ids=["numpy", "in place", "out", "no gradient", "buffer", "another shape"],
)
def test_forwards_that_a_fit_serves_are_served(forward):
    batch = labelled(3)
    model = Free(forward).double()
    plain = nn.Sequential(model.layer, nn.Tanh(), model.last)
    got, expected = (KronLaplace(m).fit([batch]).log_marginal_likelihood() for m in (model, plain))
    torch.testing.assert_close(got, expected)
    assert not model.buffer.requires_grad and model.buffer.is_leaf


@pytest.mark.parametrize(
    "forward",
    [
        lambda model, x: model.last(model.layer(input=F.linear(x, model.layer.weight))),
        lambda model, x: model.last(model.layer(x).mul_(model.layer.weight[0, 0])),
    ],
    ids=["in the input", "in place"],
)
def test_a_parameter_used_just_before_or_behind_its_layer_is_refused(forward):
    with pytest.raises(ValueError, match=r"layer 'layer' \(Linear\): its parameter 'weight' is used outside"):
        KronLaplace(Free(forward).double()).fit([labelled(3)])


def test_a_hook_that_uses_the_layers_parameter_is_refused():
    model = Free(lambda model, x: model.last(model.layer(x))).double()
    model.layer.register_forward_hook(lambda module, args, out: out * module.weight.sum())
    with pytest.raises(ValueError, match="its parameter 'weight' is used outside"):
        KronLaplace(model).fit([labelled(3)])


def test_what_is_not_finite_is_no_dependence():
    """A gradient of nan is everywhere; the factors tell which layer has it."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    with torch.no_grad():
        model[1].weight[0, 0] = torch.nan
    with pytest.raises(FloatingPointError):
        KronLaplace(model).fit([labelled(3)])


def test_two_axes_alike_are_the_first():
    """(N, N): the last axis is never the batch's."""
    model = nn.Sequential(nn.Linear(3, 3)).double()
    model.forward = lambda x: model[0](x)[:, :2].repeat(1, 2)[:, :3]
    KronLaplace(model).fit([labelled(3)])


def test_a_network_for_one_batch_size_is_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.Unflatten(1, (3, 1)), nn.Flatten()).double()
    model[2].forward = lambda h: h.reshape(4, 3)
    with pytest.raises(ValueError, match=r"takes a batch of 4 but not of two or three images \(RuntimeError"):
        KronLaplace(model).fit([labelled(3)])


def test_an_input_that_no_batch_size_would_help_is_torchs_own_error():
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        KronLaplace(nn.Linear(3, 3).double()).fit([labelled(5)])


# ---- several columns at once ----


class Distances(nn.Module):
    """Torch's gradient of cdist is wrong under vmap."""

    def __init__(self):
        super().__init__()
        self.register_buffer("prototypes", torch.randn(3, 4))

    def forward(self, h):
        return -torch.cdist(h, self.prototypes)


class _Cube(torch.autograd.Function):
    """Whose gradient leaves torch."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * torch.from_numpy(gradient.numpy())


class Cube(nn.Module):
    def forward(self, x):
        return _Cube.apply(x)


class _Strict(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        if torch._C._functorch.is_batchedtensor(gradient):
            raise TypeError("a tensor of this kind is not known")
        return 2 * gradient


class Strict(nn.Module):
    def forward(self, x):
        return _Strict.apply(x)


class Beside(nn.Module):
    """The right one and the wrong one take the same tensor."""

    def __init__(self):
        super().__init__()
        self.right, self.wrong = nn.Linear(4, 3), Distances()

    def forward(self, h):
        return self.right(h) + self.wrong(h)


class Within(nn.Module):
    """The wrong one is behind the module's own layer, in its own forward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("prototypes", torch.randn(3, 4))

    def forward(self, h):
        return -torch.cdist(torch.tanh(self.layer(h)), self.prototypes)


def bias_block(model, x, likelihood):
    """Of the first layer's bias, by plain backward passes."""
    f = model(x)
    rows = [
        [torch.autograd.grad(f[n, k], model[0].bias, retain_graph=True)[0] for k in range(3)] for n in range(len(x))
    ]
    jacobian, p = torch.stack([torch.stack(row) for row in rows]), f.detach().softmax(1)
    softmax = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    hessian = softmax if likelihood == "classification" else torch.eye(3).double().expand(len(x), 3, 3)
    return torch.einsum("nkp,nkl,nlq->pq", jacobian, hessian, jacobian)


@pytest.mark.parametrize(
    ("middle", "words"),
    [
        (Distances(), r"takes wrong gradients through '1\.0' \(Distances\); columns go back one at a time"),
        (Cube(), r"cannot be taken by torch\.func\.vmap \(.*\); columns go back one at a time"),
        (Strict(), r"cannot be taken by torch\.func\.vmap \(.*\); columns go back one at a time"),
        (Beside(), r"takes wrong gradients through '1\.0\.wrong' \(Distances\)"),
        (Within(), r"takes wrong gradients through '1\.0' \(Within\)"),
        (nn.Sequential(torch.jit.script(nn.Tanh()), Distances()), r"wrong gradients through '1\.0\.1' \(Distances\)"),
    ],
    ids=["wrong", "impossible", "refused", "beside", "within", "scripted"],
)
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_columns_that_vmap_has_wrong_go_back_one_at_a_time(middle, words, likelihood):
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(middle), nn.Tanh()).double()
    if isinstance(middle, (Cube, Strict)):
        model.append(nn.Linear(4, 3).double())
    x, y = labelled(3)
    y = y if likelihood == "classification" else torch.randn(4, 3).double()
    with pytest.warns(UserWarning, match=words):
        la = KronLaplace(model, likelihood).fit([(x, y)])
    torch.testing.assert_close(la.factors["0.bias"].outputs[0], bias_block(model, x, likelihood))


def test_a_module_is_named_whose_input_has_no_gradient():
    with pytest.warns(UserWarning, match=r"wrong gradients through '0' \(Within\)"):
        KronLaplace(nn.Sequential(Within(), nn.Identity()).double()).fit([labelled(4)])


def test_one_column_needs_no_vmap(monkeypatch):
    """Predictions after a fit of one column find out whether several go together, and nothing else again."""
    tried = []
    monkeypatch.setattr(curvature, "probe", lambda *a, probe=curvature.probe: tried.append(a) or probe(*a))
    model, (x, y) = nn.Sequential(nn.Linear(3, 4), Distances()).double(), labelled(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la = KronLaplace(model, fisher="mc").fit([(x, y)])
    with pytest.warns(UserWarning, match=r"wrong gradients through '1' \(Distances\)"):
        variance = la.functional_variance(x)
    both = torch.autograd.functional.jacobian(
        lambda w, b: Distances.forward(model[1], x @ w.T + b), tuple(model[0].parameters())
    )
    rows = torch.cat([of.flatten(2) for of in both], 2)
    torch.testing.assert_close(variance, la.functional_variance(rows))
    assert len(tried) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_ordinary_network_has_its_columns_at_once(dtype):
    layers = (
        nn.Conv2d(2, 4, 3, stride=2),
        nn.LeakyReLU(inplace=True),
        nn.Dropout(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4, 3),
    )
    model = nn.Sequential(*layers).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KronLaplace(model).fit([(torch.randn(5, 2, 6, 6, dtype=dtype), torch.randint(3, (5,)))])


# ---- what it leaves as it was ----


def test_it_moves_no_random_state_and_leaves_no_gradient():
    model = Tied("none").double()
    batch = labelled(3)
    before = torch.get_rng_state()
    KronLaplace(model).fit([batch])
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_what_was_frozen_stays_frozen_after_a_refusal():
    model = Tied("after").double()
    model.last.requires_grad_(False)
    with pytest.raises(ValueError, match="outside"):
        KronLaplace(model).fit([labelled(3)])
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, False]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(
    ("dtype", "cuda", "bound"),
    [(torch.float32, True, 2**-6), (torch.float32, False, 2**-11.5), (torch.float64, True, 2**-26)],
)
def test_what_is_compared_may_be_off_by_tf32_where_that_is_taken(dtype, cuda, bound):
    class There(torch.Tensor):
        is_cuda = cuda

    assert rounding_of(torch.zeros((), dtype=dtype).as_subclass(There)) == bound
