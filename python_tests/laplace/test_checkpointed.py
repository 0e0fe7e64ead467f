"""Networks that compute layers anew for the way back, and tensors of subclasses inside a network: numbers of the plain network."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ella_cuda.laplace import FactorShape, KronLaplace, Rule, exact_log_marginal_likelihood, register
from ella_cuda.laplace.rules import LinearRule, base
from ella_cuda.nn import SparseFactoredLinear2d


class Checkpointed(nn.Module):
    """A block whose parts are computed anew, the last of them without a layer of a rule."""

    def __init__(self, block: nn.Sequential, last: nn.Module, reentrant: bool | None = False) -> None:
        super().__init__()
        self.block, self.last, self.dropout, self.reentrant = block, last, nn.Dropout(0.5), reentrant

    def forward(self, x):
        if self.reentrant is None:
            return self.last(self.dropout(self.block(x)))
        h = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.last(checkpoint(self.dropout, h, use_reentrant=self.reentrant))


def checkpointed_and_plain(activation: nn.Module) -> tuple[nn.Module, nn.Module]:
    """With batch statistics that training mode would not use, and learned lengthscales."""
    norm = nn.BatchNorm2d(3).requires_grad_(False)
    norm.running_mean.normal_()
    block = nn.Sequential(SparseFactoredLinear2d(1, 3, 4, 4), norm, activation, nn.Conv2d(3, 2, 3), nn.Flatten())
    models = [Checkpointed(block, nn.Linear(8, 4), reentrant).double() for reentrant in (False, None)]
    models[1].last = models[0].last
    block[0].basis_in.inverse_lengthscale.requires_grad_()
    return models[0], models[1]


def labelled(*shape: int, classes: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(*shape, dtype=torch.float64), torch.arange(shape[0]) % classes


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.ReLU(), nn.ReLU(inplace=True)])
def test_the_exact_evidence_of_a_checkpointed_network(activation):
    """Its value, and its gradients in a buffer and in both hyperparameters, which compute layers anew after the call."""
    models, (x, y) = checkpointed_and_plain(activation), labelled(5, 1, 4, 4)
    scale = models[0].block[0].basis_in.inverse_lengthscale
    found = []
    for model in models:
        la = KronLaplace(model)
        precision = torch.full((len(la.parameter_names),), 0.5, dtype=torch.float64, requires_grad=True)
        value = exact_log_marginal_likelihood(la, x, y, precision * 2)
        assert model.training and model.block[1].training and all(p.requires_grad for p in model.last.parameters())
        found.append((value, *torch.autograd.grad(value, [scale, precision])))
        assert model.training and model.block[1].training and all(p.requires_grad for p in model.last.parameters())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        torch.testing.assert_close(la.fit([(x, y)]).log_marginal_likelihood(precision * 2), value)
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)
    assert found[0][1] != 0


def test_gradients_of_a_checkpointed_network_are_checked_by_differences():
    """Also where a precision is made from a buffer; second gradients, which would lack a part, are refused."""
    model, (x, y) = checkpointed_and_plain(nn.Tanh())[0], labelled(3, 1, 4, 4)
    model.last.register_buffer("scale", torch.ones((), dtype=torch.float64, requires_grad=True))
    model.last.register_forward_hook(lambda module, args, out: out * module.scale)
    la = KronLaplace(model)

    def evidence() -> Tensor:
        return exact_log_marginal_likelihood(la, x, y, (model.last.scale * 2).expand(len(la.parameter_names)))

    (slope,) = torch.autograd.grad(evidence(), model.last.scale)
    values = []
    for step in (1e-5, -1e-5):
        with torch.no_grad():
            model.last.scale.fill_(1 + step)
        values.append(evidence())
    torch.testing.assert_close(slope, (values[0] - values[1]).detach() / 2e-5, rtol=1e-7, atol=1e-7)
    with pytest.raises(ValueError, match="has first gradients only; take them without create_graph=True"):
        evidence().backward(create_graph=True)


@pytest.mark.parametrize("use", ["fit", "exact_log_marginal_likelihood"])
def test_reentrant_checkpoints_are_refused_with_what_to_do(use):
    model, (x, y) = (
        Checkpointed(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 3), True).double(),
        labelled(4, 3),
    )
    la = KronLaplace(model)
    with pytest.raises(ValueError, match=f"^{use}: .*use_reentrant=True.*Call it with use_reentrant=False"):
        la.fit([(x, y % 3)]) if use == "fit" else exact_log_marginal_likelihood(la, x, y % 3)
    assert all(m.training for m in model.modules()) and all(p.requires_grad for p in model.parameters())


# ---- rules of users ----


class Scale(nn.Linear):
    """A layer of another class, whose rule is a user's."""


class OutputsOnly(Rule):
    """Of a linear layer: autograd differentiates it."""

    batch_second = True
    kinds: list[type]

    def shapes(self) -> dict[str, FactorShape]:
        m = self.module
        return {"weight": FactorShape(1, m.in_features, m.out_features, 1), "bias": FactorShape.bias(m.out_features)}

    def inputs(self, x: Tensor) -> None:
        self.kinds.append(type(x))
        self.factors["weight"].input_moment.add(x.reshape(-1, 1, x.shape[-1]))

    def outputs(self, gradient: Tensor) -> None:
        positions = max(gradient[0, 0, ..., 0].numel(), 1)
        self.factors["weight"].output_moment.add(gradient.reshape(-1, 1, gradient.shape[-1]), 1 / positions)
        self.factors["bias"].output_moment.add(gradient.flatten(2, -2).sum(2).flatten(0, 1)[:, None])


class Differentiates(LinearRule):
    """Of a linear layer, with the position of an input's largest entry among its image's in what it collects."""

    kinds: list[type]

    def inputs(self, x: Tensor) -> None:
        self.kinds.append(type(x))
        self.first = x[:, :1]  # the first position of every image, which is another thing with the axes exchanged
        super().inputs(self.first.expand_as(x))

    def vjp(self, gradient: Tensor, input_shape: torch.Size | None) -> Tensor | None:
        pulled = super().vjp(gradient, input_shape)
        assert pulled is None or pulled.shape[1:] == input_shape
        return pulled


@pytest.fixture(params=[OutputsOnly, Differentiates])
def rule(request, monkeypatch) -> Iterator[type[Rule]]:
    monkeypatch.setattr(base, "_RULES", dict(base._RULES))
    monkeypatch.setattr(request.param, "kinds", [], raising=False)
    yield register(Scale)(request.param)


class Sequences(nn.Module):
    def __init__(self, second: bool, layer: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.second, self.layer, self.last = second, layer, last

    def forward(self, x):  # (N, T, 2)
        h = self.layer((x.transpose(0, 1) if self.second else x).sin())
        return self.last(h.tanh().mean(0 if self.second else 1))


@pytest.mark.parametrize(("length", "images"), [(4, 4), (3, 5), (5, 2), (2, 1)])
def test_rules_get_the_batch_in_front_wherever_it_is(rule, length, images, dense_ggn):
    """A bias against the dense matrix; all factors, and the exact evidence, against the network with the batch in front."""
    layer, last = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), Scale(2, 4)), nn.Linear(4, 3)
    second, first = (Sequences(is_second, layer, last).double() for is_second in (True, False))
    x, y = labelled(images, length, 2, classes=3)
    ours, theirs = (KronLaplace(model).fit([(x, y)]) for model in (second, first))
    for name, factor in ours.factors.items():
        torch.testing.assert_close(factor.outputs, theirs.factors[name].outputs)
        torch.testing.assert_close(factor.inputs, theirs.factors[name].inputs)
    torch.testing.assert_close(ours.factors["layer.2.bias"].outputs[0], dense_ggn(second, x, y)["layer.2.bias"])
    torch.testing.assert_close(exact_log_marginal_likelihood(ours, x, y), ours.log_marginal_likelihood())


def test_rules_within_a_checkpoint(rule):
    block, last = nn.Sequential(Scale(3, 4), nn.Tanh(), Scale(4, 4), nn.Tanh()), nn.Linear(4, 3)
    x, y = labelled(5, 2, 3, classes=3)
    last = nn.Sequential(nn.Flatten(), nn.Linear(8, 3))
    models = [Checkpointed(block, last, reentrant).double() for reentrant in (False, None)]
    ours, theirs = (KronLaplace(model).fit([(x, y)]) for model in models)
    for name, factor in ours.factors.items():
        torch.testing.assert_close(factor.outputs, theirs.factors[name].outputs)
        torch.testing.assert_close(factor.inputs, theirs.factors[name].inputs)
        assert factor.outputs.norm() > 0
    for model in models:
        torch.testing.assert_close(
            exact_log_marginal_likelihood(KronLaplace(model), x, y), ours.log_marginal_likelihood()
        )


# ---- tensors of subclasses ----


class Uncopied(Tensor):
    """Holds its numbers itself, and refuses to be copied."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") == "clone":
            raise TypeError("no copies")
        return super().__torch_function__(function, types, args, kwargs or {})


class Marks(nn.Module):
    def __init__(self, layer: nn.Module, last: nn.Module, kind: type[Tensor]) -> None:
        super().__init__()
        self.layer, self.last, self.kind, self.seen = layer, last, kind, []

    def forward(self, x):
        h = self.layer(x.as_subclass(self.kind))
        self.seen.append(type(h))
        return self.last(h.tanh()).as_subclass(Tensor)


@pytest.mark.parametrize("layer", [Scale, nn.Linear])
def test_a_model_sees_its_own_kind_of_tensors_and_rules_plain_ones(rule, layer):
    layers = layer(3, 4), nn.Linear(4, 3)
    marked, plain = (Marks(*layers, kind).double() for kind in (Uncopied, Tensor))
    x, y = labelled(5, 1, 3, classes=3)
    flat = nn.Flatten()
    marked.last = plain.last = nn.Sequential(flat, layers[1])
    expected = KronLaplace(plain).fit([(x, y)]).log_marginal_likelihood()
    ours = KronLaplace(marked).fit([(x, y)])
    exact = exact_log_marginal_likelihood(ours, x, y)
    torch.testing.assert_close((ours.log_marginal_likelihood(), exact), (expected, expected))
    assert set(marked.seen) == {Uncopied} and set(rule.kinds) <= {Tensor}
    assert rule.kinds or layer is nn.Linear
