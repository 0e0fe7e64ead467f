"""Which rule serves which layer, rules of the user's own, and everything that must be refused loudly."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ella_cuda.laplace import FactorShape, KronLaplace, Rule, register
from python_tests.laplace.checks import Function


def labelled(*shape):
    return torch.randn(4, *shape, dtype=torch.float64), torch.tensor([0, 1, 1, 2])


class Mystery(nn.Module):
    """A layer that no rule will ever know."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.secret = nn.Parameter(torch.ones(2, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.secret.sin()


class Scale(nn.Module):
    """y[n, :, t] = scale * x[n, :, t]."""

    def __init__(self, size):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(size))

    def forward(self, x):
        return x * self.scale[:, None]


def test_a_subclass_that_changes_the_computation_needs_its_own_rule():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    with pytest.raises(
        TypeError, match=r"layer '0' \(\S+Scaled\) is a Scaled, a subclass of Linear that overrides forward.*regist"
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
@pytest.mark.parametrize(("kind", "alone"), [("weight_norm", True), *((kind, False) for kind in PARAMETRIZED)])
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
    assert names == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert others == ["0.bias", "0.weight", "2.bias", "2.weight"]
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other)


def test_shapes_that_contradict_the_parameter_are_refused():
    @register(Scale)
    class Wrong(Rule):
        def shapes(self):
            return {"scale": FactorShape.bias(3)}

        def inputs(self, x):
            pass

    with pytest.raises(ValueError, match=r"'scale' .* 3 elements .* has 2"):
        KronLaplace(Scale(2))


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


@pytest.mark.parametrize(
    ("network", "words"),
    [
        (lambda m, x: m.used(x), "layer 'spare' (Linear) has trainable parameters but was never called"),
        (
            lambda m, x: F.linear(m.spare(m.used(x)).tanh(), m.spare.weight, m.spare.bias),
            "layer 'spare' (Linear): its parameter 'weight' is used outside",
        ),
    ],
    ids=["never", "called, and by a function"],
)  # fmt: skip
def test_a_layer_whose_calls_do_not_say_all_is_refused(network, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        KronLaplace(Function(network, used=nn.Linear(3, 3), spare=nn.Linear(3, 3)).double()).fit([labelled(3)])


def test_a_layer_whose_output_goes_nowhere_has_zero_curvature():
    model = Function(lambda m, x: (m.aside(x), m.used(x))[1], used=nn.Linear(3, 3), aside=nn.Linear(3, 3))
    la = KronLaplace(model.double()).fit([labelled(3)])
    assert not la.factors["aside.weight"].outputs.any() and not la.factors["aside.bias"].outputs.any()
    assert la.factors["used.weight"].outputs.any()


def test_positions_folded_before_the_batch_are_refused():
    def forward(m, x):
        h = x.transpose(0, 1)
        return m.last(m.norm(m.inner(h.flatten(0, 1)).tanh()).view(*h.shape[:2], 4).sin().mean(0))

    model = Function(forward, inner=nn.Linear(3, 4), norm=nn.LayerNorm(4), last=nn.Linear(4, 3)).double()
    x, y = torch.randn(5, 2, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    with pytest.raises(ValueError, match=r"layer 'inner' .*2 positions of every image are folded.*do not lie together"):
        KronLaplace(model).fit([(x, y)])


def test_frames_folded_into_the_batch_of_a_convolution_are_refused():
    model = nn.Sequential(nn.Flatten(0, 1), nn.Conv2d(1, 2, 2), nn.Unflatten(0, (-1, 2)), nn.Flatten(), nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"layer '1' \(Conv2d\).*got \(4, 2, 1, 1\) for N = 2 .*folded into the batch"):
        KronLaplace(model).fit([(torch.randn(3, 2, 1, 2, 2), torch.tensor([0, 1, 2]))])


def test_a_users_forward_hook_after_a_layer_counts_as_what_follows(dense_ggn):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    model[0].register_forward_hook(lambda module, args, out: 3 * out)
    x, y = labelled(3)
    la = KronLaplace(model).fit([(x, y)])
    torch.testing.assert_close(la.factors["0.bias"].outputs[0], dense_ggn(model, x, y)["0.bias"])


def test_a_layer_called_by_keyword(dense_ggn):
    model = Function(lambda m, x: torch.tanh(m.linear(input=x)), linear=nn.Linear(3, 3)).double()
    x, y = labelled(3)
    la = KronLaplace(model).fit([(x, y)])
    torch.testing.assert_close(la.factors["linear.bias"].outputs[0], dense_ggn(model, x, y)["linear.bias"])
    torch.testing.assert_close(la.factors["linear.weight"].inputs[0], x.T @ x / 4)


UNTRACKED = nn.BatchNorm1d(2, track_running_stats=False)


@pytest.mark.parametrize(
    ("layers", "error", "names"),
    [
        ([Mystery(2), nn.GRUCell(2, 2), Mystery(3)], TypeError, ["Mystery", "GRUCell", "Mystery"]),
        ([UNTRACKED, nn.ConvTranspose1d(1, 1, 3, dilation=2, output_padding=1)], ValueError, ["track_running_stats", "output_padding"]),
        ([UNTRACKED, Mystery(2)], TypeError, ["track_running_stats", "Mystery"]),
    ],
)  # fmt: skip
def test_all_layers_that_cannot_be_served_are_named_at_once(layers, error, names):
    model = nn.Sequential(nn.Linear(2, 2), *layers)
    with pytest.raises(error) as refused:
        KronLaplace(model)
    head, *lines = str(refused.value).splitlines()
    assert head.endswith(f"{len(layers)} layers have no curvature rule that serves them:")
    assert head.startswith("Pass unknown='diagonal'") == ("Mystery" in names)
    assert ("Layers with rules: " in lines[-1]) == ("Mystery" in names)
    for name in names:
        assert any(name in line for line in lines)
    for line in lines[: len(set(names))]:
        assert line.startswith("- layer '")


def test_one_layer_that_cannot_be_served_is_refused_in_its_own_words():
    layer = Mystery(2)
    with pytest.raises(
        TypeError, match=r" layer '1' \(\S+Mystery\) has.*laplace\.register\(Mystery\).*Layers with rules: "
    ):
        KronLaplace(nn.Sequential(nn.Linear(2, 2), layer))
    KronLaplace(nn.Sequential(nn.Linear(2, 2), layer.requires_grad_(False)))  # frozen, it is a constant
