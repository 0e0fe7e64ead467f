"""Which rule serves which layer, rules of the user's own, and everything that must be refused loudly."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ella_cuda.laplace import FactorShape, KronLaplace, Rule, register


def labelled(*shape):
    return torch.randn(4, *shape, dtype=torch.float64), torch.tensor([0, 1, 1, 2])


class Mystery(nn.Module):
    """A layer that no rule will ever know."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.secret = nn.Parameter(torch.ones(1, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.secret.sin()


class Scale(nn.Module):
    """y[n, :, t] = scale * x[n, :, t]."""

    def __init__(self, size):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(size))

    def forward(self, x):
        self.seen = x
        return x * self.scale[:, None]


def test_a_subclass_that_changes_the_computation_needs_its_own_rule():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    with pytest.raises(
        TypeError, match=r"layer '0' is a Scaled, a subclass of Linear that overrides forward.*register"
    ):
        KronLaplace(nn.Sequential(Scaled(2, 3)))

    class Flipped(nn.Conv2d):
        def _conv_forward(self, x, weight, bias):
            return super()._conv_forward(x, weight.flip(2), bias)

    with pytest.raises(TypeError, match="overrides _conv_forward"):
        KronLaplace(Flipped(1, 2, 3))


def test_a_subclass_that_changes_only_construction_is_served():
    class Initialised(nn.Linear):
        def __init__(self, size):
            super().__init__(size, 3)
            self.reset_parameters()

        def reset_parameters(self):
            nn.init.ones_(self.weight)
            nn.init.zeros_(self.bias)

        def extra_repr(self):
            return "initialised"

        def helper(self):
            return 3

    x, y = labelled(2)
    assert KronLaplace(Initialised(2).double()).fit([(x, y)]).n_data == 4


def test_layers_without_a_rule_are_named():
    layer = Mystery(2)
    with pytest.raises(TypeError, match=r"layer '1' \(Mystery\).*ella_cuda.laplace.register"):
        KronLaplace(nn.Sequential(nn.Linear(2, 2), layer))
    layer.requires_grad_(False)
    KronLaplace(nn.Sequential(nn.Linear(2, 2), layer))  # frozen, it is a constant


def test_a_frozen_batch_norm_is_a_constant(dense_ggn):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)).double()
    model(torch.randn(8, 2, dtype=torch.float64))  # statistics that are not the identity
    model[1].requires_grad_(False)
    before = model[1].running_mean.clone()
    x, y = labelled(2)
    la = KronLaplace(model).fit([(x, y)])
    model.eval()
    torch.testing.assert_close(la.factors["0.bias"].outputs[0], dense_ggn(model, x, y)["0.bias"])
    assert torch.equal(model[1].running_mean, before)


def test_parameters_that_a_rule_does_not_know_are_refused():
    layer = nn.Linear(2, 3)
    layer.gain = nn.Parameter(torch.ones(3))
    with pytest.raises(TypeError, match="'gain'"):
        KronLaplace(layer)


PARAMETRIZED = {
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
    "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "pruned": lambda layer: nn.utils.prune.l1_unstructured(layer, "weight", 0.3),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("kind", PARAMETRIZED)
def test_a_weight_that_is_computed_is_refused_with_advice_that_works(kind, alone, dense_ggn):
    layer = PARAMETRIZED[kind](nn.Linear(4, 3).double())
    model = (layer if alone else nn.Sequential(nn.Linear(4, 4).double(), nn.Tanh(), layer)).eval()
    x, y = labelled(4)
    outputs = model(x).detach()
    with pytest.raises(TypeError) as refusal:
        KronLaplace(model)
    exec(re.search(r"call (torch\.nn\.utils\..*?\)), which", str(refusal.value))[1], {"torch": torch, "model": model})
    assert torch.equal(model(x), outputs)
    la = KronLaplace(model).fit([(x[:1], y[:1])])
    prefix = "" if alone else "2."
    blocks = dense_ggn(model, x[:1], y[:1])
    torch.testing.assert_close(la.factors[prefix + "bias"].to_dense()[0], blocks[prefix + "bias"])
    weight = blocks[prefix + "weight"].view(3, 4, 3, 4).permute(1, 0, 3, 2).reshape(12, 12)
    torch.testing.assert_close(la.factors[prefix + "weight"].to_dense()[0], weight)


@pytest.mark.parametrize("approximation", ["expand", "reduce"])
def test_a_bias_may_come_before_its_weight(approximation):
    def fitted(bias_first):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)).double()
        for layer in (model[0], model[2]) if bias_first else ():
            weight = layer.weight
            del layer.weight
            layer.weight = weight
        x, y = torch.randn(4, 1, 4, 4, dtype=torch.float64), torch.tensor([0, 1, 1, 2])
        la = KronLaplace(model, approximation=approximation).fit([(x, y)])
        again = KronLaplace(model, approximation=approximation)
        again.load_state_dict(la.state_dict())
        again.load_state_dict(again.state_dict())
        return la.parameter_names, la.log_marginal_likelihood(), again.log_marginal_likelihood(), la(x), again(x)

    (names, *first), (others, *second) = fitted(False), fitted(True)
    assert names == ["0.weight", "0.bias", "2.weight", "2.bias"] and others == [
        "0.bias",
        "0.weight",
        "2.bias",
        "2.weight",
    ]
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other)


def test_shapes_that_contradict_the_parameter_are_refused():
    class Other(Scale):
        pass

    @register(Other)
    class Wrong(Rule):
        def shapes(self):
            return {"scale": FactorShape.bias(3)}

        def inputs(self, x):
            pass

    with pytest.raises(ValueError, match=r"'scale' .* 3 elements .* has 2"):
        KronLaplace(Other(2))


def test_register_refuses_what_is_no_layer_or_no_rule():
    with pytest.raises(TypeError, match=r"subclass of torch.nn.Module"):
        register(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"subclass of ella_cuda.laplace.Rule"):
        register(Scale)(object)


def test_a_module_of_two_names_is_one_layer():
    parts = nn.ModuleList([nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)])
    model = nn.ModuleDict({"parts": parts, "network": nn.Sequential(*parts), "last": parts[2]}).double()
    model.forward = lambda x: model["network"](x)
    batch = labelled(3)
    la, expected = KronLaplace(model).fit([batch]), KronLaplace(model["network"]).fit([batch])
    assert la.parameter_names == ["parts.0.weight", "parts.0.bias", "parts.2.weight", "parts.2.bias"]
    assert la.parameter_names == [name for name, _ in model.named_parameters()]
    torch.testing.assert_close(la.log_marginal_likelihood(), expected.log_marginal_likelihood(), rtol=0, atol=0)
    module = nn.Linear(3, 3).double()
    module.again = module.weight
    assert KronLaplace(module).parameter_names == ["weight", "bias"]


class Unused(nn.Module):
    """A layer that is never called; its weight may be used behind the rule's back."""

    def __init__(self, uses: bool) -> None:
        super().__init__()
        self.used, self.unused, self.uses = nn.Linear(3, 3), nn.Linear(3, 3), uses

    def forward(self, x):
        return F.linear(self.used(x), self.unused.weight if self.uses else torch.eye(3).to(x))


@pytest.mark.parametrize(
    ("uses", "words"),
    [
        (False, "has trainable parameters but was never called"),
        (True, ".*'weight' is used outside of the layer's call"),
    ],
)
def test_a_layer_that_is_never_called_is_refused(uses, words):
    with pytest.raises(ValueError, match=rf"layer 'unused' \(Linear\):? ?{words}"):
        KronLaplace(Unused(uses).double()).fit([labelled(3)])


def test_a_layer_whose_output_goes_nowhere_has_zero_curvature():
    class Aside(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.aside = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            self.aside(x)
            return self.used(x)

    la = KronLaplace(Aside().double()).fit([labelled(3)])
    assert not la.factors["aside.weight"].outputs.any() and not la.factors["aside.bias"].outputs.any()
    assert la.factors["used.weight"].outputs.any()


class CalledAndUsed(nn.Module):
    """A layer that is called, and whose parameters a function uses too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return F.linear(self.layer(x).tanh(), self.layer.weight, self.layer.bias)


def test_a_layer_that_is_called_and_used_by_a_function_is_refused():
    with pytest.raises(ValueError, match=r"layer 'layer' \(Linear\): its parameter 'weight' is used outside"):
        KronLaplace(CalledAndUsed().double()).fit([labelled(3)])


class Folded(nn.Module):
    """Layers on positions that are folded into the batch, ``(N * T, ...)``, or that are an axis of their own."""

    def __init__(self, images_first: bool = True, folded: bool = True) -> None:
        super().__init__()
        self.inner, self.norm, self.last = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3)
        self.images_first, self.folded = images_first, folded

    def forward(self, x):
        h = x if self.images_first else x.transpose(0, 1)
        shape = h.shape
        h = self.norm(self.inner(h.flatten(0, 1) if self.folded else h).tanh()).view(*shape[:2], 4)
        return self.last(h.sin().mean(1 if self.images_first else 0))


def test_positions_folded_before_the_batch_are_refused():
    x, y = torch.randn(5, 2, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    with pytest.raises(ValueError, match=r"layer 'inner' .*2 positions of every image are folded.*do not lie together"):
        KronLaplace(Folded(images_first=False).double()).fit([(x, y)])


def test_frames_folded_into_the_batch_of_a_convolution_are_refused():
    model = nn.Sequential(nn.Flatten(0, 1), nn.Conv2d(1, 2, 2), nn.Unflatten(0, (-1, 2)), nn.Flatten(), nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"layer '1' \(Conv2d\).*got \(4, 2, 1, 1\) for N = 2 .*folded into the batch"):
        KronLaplace(model).fit([(torch.randn(3, 2, 1, 2, 2), torch.tensor([0, 1, 2]))])


class Positions(nn.Module):
    """An embedding of positions, looked up once for all sequences, or for each."""

    def __init__(self, lookups: str) -> None:
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(5, 4), nn.Embedding(3, 4), nn.Linear(4, 3)
        self.lookups = lookups

    def forward(self, x):
        places = {
            "once": torch.arange(3),
            "in one row": torch.arange(3)[None],
            "each": torch.arange(3).expand(len(x), -1),
        }
        return self.head((self.words(x) + self.places(places[self.lookups])).tanh().mean(1))


def test_layers_without_the_batch_are_refused_with_what_to_do(dense_ggn):
    x, y = torch.randint(5, (4, 3)), torch.tensor([0, 1, 2, 0])
    for lookups in ("once", "in one row"):
        with pytest.raises(ValueError, match=r"'places' \(Embedding\).*whatever the number of data points.*expand"):
            KronLaplace(Positions(lookups).double()).fit([(x, y)])
    la = KronLaplace(Positions("each").double()).fit([(x, y)])
    torch.testing.assert_close(la.factors["places.weight"].inputs.flatten(), torch.ones(3, dtype=torch.float64))


def test_a_users_forward_hook_after_a_layer_counts_as_what_follows(dense_ggn):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    model[0].register_forward_hook(lambda module, args, out: 3 * out)
    x, y = labelled(3)
    la = KronLaplace(model).fit([(x, y)])
    torch.testing.assert_close(la.factors["0.bias"].outputs[0], dense_ggn(model, x, y)["0.bias"])


def test_a_layer_called_by_keyword(dense_ggn):
    class ByKeyword(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            return torch.tanh(self.linear(input=x))

    model = ByKeyword().double()
    x, y = labelled(3)
    la = KronLaplace(model).fit([(x, y)])
    torch.testing.assert_close(la.factors["linear.bias"].outputs[0], dense_ggn(model, x, y)["linear.bias"])
    torch.testing.assert_close(la.factors["linear.weight"].inputs[0], x.T @ x / 4)


@pytest.mark.parametrize(
    ("layers", "error", "names"),
    [
        ([Mystery(2), nn.GRUCell(2, 2), Mystery(3)], TypeError, ["Mystery", "GRUCell", "Mystery"]),
        (
            [
                nn.BatchNorm1d(2, track_running_stats=False),
                nn.ConvTranspose1d(1, 1, 3, dilation=2, output_padding=1),
            ],
            ValueError,
            ["track_running_stats", "output_padding"],
        ),
        (
            [nn.BatchNorm1d(2, track_running_stats=False), Mystery(2)],
            TypeError,
            ["track_running_stats", "Mystery"],
        ),
    ],
)
def test_all_layers_that_cannot_be_served_are_named_at_once(layers, error, names):
    model = nn.Sequential(nn.Linear(2, 2), *layers)
    with pytest.raises(error) as refused:
        KronLaplace(model)
    head, *lines = str(refused.value).splitlines()
    served = [line for line in lines if line.startswith(("Layers with rules: ", "KronLaplace(unknown='freeze') "))]
    assert head == f"{len(layers)} layers have no curvature rule that serves them:"
    assert len(served) == 2 * ("Mystery" in names) and len(lines) == len(layers) + len(served)
    for number, (line, name) in enumerate(zip(lines, names, strict=False), start=1):
        assert line.startswith(f"- layer '{number}' (") and name in line


def test_one_layer_that_cannot_be_served_is_refused_in_its_own_words():
    with pytest.raises(TypeError, match=r"^layer '1' \(Mystery\) .*register\(Mystery\).*Layers with rules: "):
        KronLaplace(nn.Sequential(nn.Linear(2, 2), Mystery(2)))
