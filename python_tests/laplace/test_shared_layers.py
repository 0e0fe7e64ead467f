"""Layers whose output has no batch axis, parameters used beside their layers, and classes of libraries with torch's own rules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ella_cuda.augment import AffineAugment, AveragedFunction
from ella_cuda.laplace import KronLaplace, evidence_gradient, exact_log_marginal_likelihood
from ella_cuda.laplace.rules import Conv1DRule, LinearRule, rule_for
from python_tests.laplace import checks
from python_tests.laplace.checks import Function, drawn, randomised

IMAGES, CLASSES = 6, 3


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    return checks.sequences(IMAGES, CLASSES)


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 6), nn.ReLU(inplace=True), nn.LayerNorm(6), nn.Linear(6, 4))


# By name: a part, and the positions that it makes for n data points; n is None where all of them share these.
PARTS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int | None], Tensor]]] = {
    "embedding": (lambda: nn.Embedding(7, 4), lambda p, n: p(torch.arange(5).expand(n or 1, -1))),
    "in no row": (lambda: nn.Embedding(7, 4), lambda p, n: p(torch.arange(5).expand(*([n] if n else []), -1))),
    "chain": (chain, lambda p, n: p(drawn(1, 5, 2).expand(n or 1, -1, -1))),
    "one position": (chain, lambda p, n: p(drawn(1, 1, 2).expand(n or 1, -1, -1))),
    "convolution": (lambda: nn.Conv2d(2, 4, (1, 2)), lambda p, n: p(drawn(1, 2, 5, 2).expand(n or 1, -1, -1, -1))[..., 0].mT),
    "called twice": (
        lambda: nn.Embedding(7, 4),
        lambda p, n: p(torch.arange(5).expand(n or 1, -1)) * p(torch.arange(2, 7).expand(n or 1, -1)).cos(),
    ),
}  # fmt: skip


def with_positions(name: str, once: bool) -> nn.Module:
    make, positions = PARTS[name]

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = (m.inner(x) + positions(m.part, None if once else len(x))).tanh()
        return m.head(h.sin().mean(1))

    return randomised(Function(forward, inner=nn.Linear(4, 4), part=make(), head=nn.Linear(4, CLASSES)))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        (name, settings)
        for settings in ({}, {"approximation": "reduce"}, {"memory_budget": 1}, {"eigenvalue_correction": True})
        for name in PARTS
        if (name, settings) != ("called twice", {"approximation": "reduce"})  # of indices, which have no mean
    ],
    ids=str,
)
def test_they_have_the_curvature_of_inputs_expanded_along_the_batch(name, settings, data, dense_ggn):
    x, y = data
    model = with_positions(name, once=True)
    la, expected = (
        KronLaplace(m, **settings).fit([(x[:4], y[:4]), (x[4:], y[4:])]) for m in (model, with_positions(name, once=False))
    )  # fmt: skip
    dense = dense_ggn(model, x, y)
    for parameter, factor in expected.factors.items():
        torch.testing.assert_close(la.factors[parameter].inputs, factor.inputs)
        torch.testing.assert_close(la.factors[parameter].outputs, factor.outputs)
        # Exact where KFAC is: blocks without an input side, and weights whose only input is a constant.
        weight = name == "one position" and parameter.startswith("part") and parameter.endswith("weight")
        if factor.shape.constant_input or weight:
            block = la.factors[parameter].to_dense()[0]
            if not factor.shape.constant_input:
                a, b = factor.shape.inputs, factor.shape.outputs
                block = block.view(a, b, a, b).permute(1, 0, 3, 2).reshape(a * b, a * b)
            torch.testing.assert_close(block, dense[parameter])
    torch.testing.assert_close(la.log_marginal_likelihood(), expected.log_marginal_likelihood())
    torch.testing.assert_close(la.functional_variance(x), expected.functional_variance(x))
    restored = KronLaplace(model, **settings)
    restored.load_state_dict(la.state_dict())
    torch.testing.assert_close(restored(x), la(x))


def by_function(once: bool) -> nn.Module:
    """A linear layer whose weight and bias a function takes, as in Swin transformers, or one that is called."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return m.head((F.linear(x, m.inner.weight, m.inner.bias) if once else m.inner(x)).sin().mean(1))

    return randomised(Function(forward, inner=nn.Linear(4, 4), head=nn.Linear(4, CLASSES)))


@pytest.mark.parametrize(
    "make", [partial(with_positions, "chain"), partial(with_positions, "convolution"), by_function]
)
@pytest.mark.parametrize("budget", [None, 1])
def test_evidence_gradients_have_them(make, budget):
    def gradient(once: bool) -> Tensor:
        torch.manual_seed(0)
        network = Function(lambda m, x: m.net(x[:, 0, :, :4]), net=make(once)).double()
        model = AveragedFunction(network, AffineAugment(8, init=0.2).double())
        x, y = drawn(2, 1, 5, 5), torch.tensor([0, 2])
        with model.augment.held():
            la = KronLaplace(model, memory_budget=budget).fit([(x, y)])
            return evidence_gradient(la, [(x, y)])["augment.raw"]

    torch.testing.assert_close(gradient(True), gradient(False))


def of_first(m: nn.Module, x: Tensor) -> Tensor:
    return m.head((x + m.part(x[:1])).sin().mean(1))


def of_both(m: nn.Module, x: Tensor) -> Tensor:
    return m.head((m.part(x) + m.part(x.new_ones(1, 5, 4))).sin().mean(1))


def of_tied(m: nn.Module, x: Tensor) -> Tensor:
    return m.head((m.part(x) + m.other(x.new_ones(1, 5, 4))).sin().mean(1))


@pytest.mark.parametrize("forward", [of_first, of_both, of_tied])
def test_others_are_refused_in_one_message(forward, data):
    parts = {"part": nn.Linear(4, 4), "other": nn.Linear(4, 4), "head": nn.Linear(4, CLASSES)}
    parts["other"].weight = parts["part"].weight
    model = Function(forward, **parts).double()
    name = "other" if forward is of_tied else "part"
    with pytest.raises(ValueError, match=rf"(expand|give) the input.*freeze[\s\S]*layer '{name}' \(Linear\)"):
        KronLaplace(model).fit([data])


def of_later(m: nn.Module, x: Tensor) -> Tensor:
    """Whose positions hang on data of which the first batch has none."""
    places = (torch.arange(5) + (x[:, 0, 0] > 9).any().long()) % 7
    return m.head((m.inner(x) + m.part(places)).sin().mean(1))


def of_lengths(m: nn.Module, x: Tensor) -> Tensor:
    """The same, read by the host, so that vmap cannot take it."""
    shift = int((x[:, 0, 0] > 9).any())
    return m.head((m.inner(x) + m.part(torch.arange(shift, 5 + shift))).sin().mean(1))


@pytest.mark.filterwarnings("ignore:fit. torch.func.vmap cannot take the model")
@pytest.mark.parametrize("forward", [of_later, of_lengths])
def test_a_later_batch_whose_inputs_are_not_shared_is_refused(forward, data):
    model = randomised(Function(forward, inner=nn.Linear(4, 4), part=nn.Embedding(7, 4), head=nn.Linear(4, CLASSES)))
    x, y = data
    x[5, 0, 0] = 10.0
    with pytest.raises(ValueError, match=r"input of layer 'part' \(Embedding\) a batch axis, or freeze"):
        KronLaplace(model).fit([(x[:4], y[:4]), (x[4:], y[4:])])


def test_the_exact_evidence_refuses_them(data):
    with pytest.raises(ValueError, match=r"layer 'part' \(Embedding\) has parameters that are used outside"):
        exact_log_marginal_likelihood(KronLaplace(with_positions("embedding", once=True)), *data)


# functions of layers' parameters -------------------------------------------------------------------------------------


def of_keys(m: nn.Module, x: Tensor) -> Tensor:
    """BEiT's projection: the bias of the middle part is no parameter."""
    bias = torch.cat([m.q_bias, torch.zeros_like(m.q_bias), m.v_bias])
    return m.head(F.linear(x, m.qkv.weight, bias).sin().mean(1))


def of_zeroed(m: nn.Module, x: Tensor) -> Tensor:
    """Swin V2's projection: a part of the layer's own bias is zero."""
    bias = m.qkv.bias.clone()
    bias[2:4].zero_()
    return m.head(F.linear(x, m.qkv.weight, bias).sin().mean(1))


def without(m: nn.Module, x: Tensor) -> Tensor:
    return m.head(F.linear(x, m.qkv.weight).sin().mean(1))


@pytest.mark.parametrize("approximation", ["expand", "reduce"])
@pytest.mark.parametrize("forward", [of_keys, of_zeroed, without])
def test_a_weight_in_a_function_with_another_bias_has_its_blocks(forward, approximation, dense_ggn):
    """Of one data point of one position, whose Kronecker product is exact."""
    parts = {"qkv": nn.Linear(4, 6, bias=forward is not of_keys), "head": nn.Linear(6, CLASSES)}
    parts |= {name: nn.Parameter(torch.zeros(2)) for name in ("q_bias", "v_bias") if forward is of_keys}
    model, x, y = randomised(Function(forward, **parts)), drawn(1, 1, 4), torch.tensor([1])
    la, dense = KronLaplace(model, approximation=approximation).fit([(x, y)]), dense_ggn(model, x, y)
    for name in la.parameter_names:
        block, shape = la.factors[name].to_dense()[0], la.model.get_parameter(name).shape
        if len(shape) == 2:
            block = block.view(*shape[::-1], *shape[::-1]).permute(1, 0, 3, 2).reshape(dense[name].shape)
        torch.testing.assert_close(block, dense[name])


def test_a_norm_of_positions_folded_into_the_batch_has_exact_blocks(data, dense_ggn):
    """LeViT's: channels are behind the batch and the positions, which a batch norm has as one axis."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return m.head(m.norm(m.inner(x).flatten(0, 1)).view(*x.shape[:2], 3).sin().mean(1))

    parts = {"inner": nn.Linear(4, 3), "norm": nn.BatchNorm1d(3), "head": nn.Linear(3, CLASSES)}
    model = randomised(Function(forward, **parts))
    la, dense = KronLaplace(model).fit([data]), dense_ggn(model, *data)
    for name in ("norm.weight", "norm.bias"):
        torch.testing.assert_close(la.factors[name].to_dense()[0], dense[name])


class Keeping(nn.Module):
    """Biases of positions, of which the module keeps a function in evaluation mode, as LeViT does."""

    def __init__(self) -> None:
        super().__init__()
        self.biases, self.kept = nn.Parameter(torch.zeros(4)), {}

    def train(self, mode: bool = True) -> Keeping:
        self.kept = {} if mode else self.kept
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return x + self.biases.sin()
        if not self.kept:
            self.kept["biases"] = self.biases.sin()
        return x + self.kept["biases"]


def test_what_a_module_keeps_in_evaluation_mode_is_computed_anew(data, dense_ggn):
    model = randomised(nn.Sequential(nn.Linear(4, 4), Keeping(), nn.Tanh(), nn.Flatten(), nn.Linear(20, CLASSES)))
    model[1].train()
    dense = dense_ggn(model, *data)["1.biases"]
    model.eval()(data[0])
    la = KronLaplace(model).fit([data])
    torch.testing.assert_close(la.factors["1.biases"].to_dense()[0], dense)
    assert not model.training and not model[1].training


# classes of libraries ------------------------------------------------------------------------------------------------


class Plain(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, None if self.bias is None else self.bias.to(x.dtype))


class Clamped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-100, 100)


class Adapted(Plain):
    scale = 1.0

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


class Residual(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out + x if out.shape == x.shape else out


class WithoutBias(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return (2.0 if self.bias is None else 1.0) * super().forward(x)


class OfPictures(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return (2.0 if x.dim() == 4 else 1.0) * super().forward(x)


class StopsInput(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.detach(), self.weight, self.bias)


class StopsWeight(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.detach(), self.bias)


def test_a_subclass_that_computes_the_same_has_the_rule_of_linear_layers():
    layer = Plain(3, 2, bias=False)
    before = torch.get_rng_state()
    with torch.inference_mode():
        assert type(rule_for(layer, "layer")) is LinearRule
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Clamped(3, 2),
        lambda: Adapted(3, 2),
        lambda: Residual(3, 3),
        lambda: WithoutBias(3, 2, bias=False),
        lambda: OfPictures(3, 2),
        lambda: StopsInput(3, 2),
        lambda: StopsWeight(3, 2),
    ],
)
def test_a_subclass_with_other_outputs_or_gradients_has_none(make):
    with pytest.raises(TypeError, match="overrides forward"):
        rule_for(make(), "layer")


class OfClass(nn.Linear):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


def test_a_fit_compares_a_subclass_with_autograd_at_its_own_inputs(data, monkeypatch):
    model = randomised(nn.Sequential(OfClass(4, 4), nn.Tanh(), nn.Flatten(), nn.Linear(20, CLASSES)))
    la = KronLaplace(model).fit([data])
    monkeypatch.setattr(OfClass, "scale", 2.0)
    with pytest.raises(ValueError, match=r"layer '0' \(OfClass\): LinearRule.* contradicts autograd"):
        la.fit([data])


class Conv1D(nn.Module):
    """As that of transformers."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.zeros(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, self.nx), self.weight).view(*x.shape[:-1], self.nf)


@pytest.mark.parametrize("approximation", ["expand", "reduce"])
def test_a_linear_layer_of_gpt2_is_one(approximation, data, monkeypatch):
    monkeypatch.setattr(Conv1D, "__module__", "transformers.pytorch_utils")
    model = randomised(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Conv1D(2, 4), nn.Flatten(), nn.Linear(10, CLASSES)))
    same = randomised(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2), nn.Flatten(), nn.Linear(10, CLASSES)))
    same.load_state_dict({n: t.mT if n == "2.weight" else t for n, t in model.state_dict().items()})
    assert type(rule_for(model[2], "2")) is Conv1DRule
    la, expected = (KronLaplace(m, approximation=approximation).fit([data]) for m in (model, same))
    for name, factor in expected.factors.items():
        torch.testing.assert_close(la.factors[name].inputs, factor.inputs)
        torch.testing.assert_close(la.factors[name].outputs, factor.outputs)
    torch.testing.assert_close(la.functional_variance(data[0]), expected.functional_variance(data[0]))


# few parameters without a rule ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "served"), [(40, True), (8, False)])
def test_a_diagonal_unasked_is_for_few_parameters(width, served, data, dense_ggn):
    parts = {
        "position": nn.Parameter(torch.zeros(1, 5, 4)),
        "inner": nn.Linear(4, width),
        "head": nn.Linear(width, CLASSES),
    }
    model = randomised(Function(lambda m, x: m.head(m.inner(x + m.position).tanh().mean(1)), **parts))
    if not served:
        with pytest.raises(TypeError, match=r"^Pass unknown='diagonal'.*23% of the trainable numbers.*up to 10%"):
            KronLaplace(model)
        return
    la = KronLaplace(model).fit([data])
    torch.testing.assert_close(
        la.factors["position"].to_dense().flatten(), dense_ggn(model, *data)["position"].diagonal()
    )
    assert la.summary().splitlines()[1].split()[-1] == "diagonal"
