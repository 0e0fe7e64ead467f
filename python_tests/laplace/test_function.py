"""A fit is of one function: another one in its place is refused, what a forward fills is part of it."""

from __future__ import annotations

import copy
import pickle
import types

import pytest
import torch
from torch import nn

from ella_cuda.laplace import DiagLaplace, FullLaplace, KronLaplace, evidence_gradient
from python_tests.laplace.checks import Function


class Halved(nn.Module):
    def forward(self, h):
        return h / 2


class Half(nn.Module):
    """With a plain attribute that the forward writes."""

    def __init__(self, by=2):
        super().__init__()
        self.by, self.seen = by, 0

    def forward(self, h):
        self.seen += len(h)
        return h / self.by


def network():
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), nn.LeakyReLU(0.1), Half(), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(32, 3))


def data():
    return torch.randn(6, 1, 4, 4), torch.arange(6) % 3


def with_half_of_3(model):
    model[2] = Half(3)


def in_turn(model):
    model[1], model[2] = model[2], model[1]


CHANGES = {
    "a submodule": lambda m: m.__setitem__(1, nn.Tanh()),
    "a submodule of one class": with_half_of_3,
    "an added submodule": lambda m: m.append(nn.Softmax(1)),
    "two in turn": in_turn,
    "a forward hook": lambda m: m.register_forward_hook(lambda module, args, out: 2 * out),
    "a hook inside": lambda m: m[1].register_forward_hook(lambda module, args, out: 2 * out),
    "a pre-hook inside": lambda m: m[1].register_forward_pre_hook(lambda module, args: (2 * args[0],)),
    "a backward hook": lambda m: m[4].register_full_backward_hook(lambda module, g, of_output: (2 * g[0],)),
    "a forward": lambda m: setattr(m[1], "forward", lambda h: h),
    "a bound forward": lambda m: setattr(m[1], "forward", types.MethodType(lambda self, h: h, m[1])),
    "a class": lambda m: setattr(m[2], "__class__", Halved),
    "double": lambda m: m.double(),
    "a slope": lambda m: setattr(m[1], "negative_slope", 0.5),
    "padding": lambda m: setattr(m[0], "padding_mode", "zeros"),
}

WAYS = {
    "call": lambda la, x, y: la(x),
    "variance": lambda la, x, y: la.functional_variance(x),
    "covariance": lambda la, x, y: la.functional_covariance(x),
    "samples": lambda la, x, y: la.functional_samples(x, n_samples=2),
    "predictive samples": lambda la, x, y: la.predictive_samples(x, n_samples=2),
    "network samples": lambda la, x, y: la(x, pred_type="nn", link_approx="mc", n_samples=2),
    "parameters": lambda la, x, y: la.sample(2),
    "linear mode": lambda la, x, y: la.fit_linear_mode([(x, y)]),
    "linear mean": lambda la, x, y: la(x, mean="linear"),
    "grid search": lambda la, x, y: la.optimize_prior_precision(
        method="gridsearch", prior_structure="scalar", val_loader=[(x, y)], grid_size=3
    ),
    "leave one out": lambda la, x, y: la.leave_one_out([(x, y)]),
    "loo": lambda la, x, y: la.optimize_prior_precision(method="loo", grid_size=2),
    "uncertainty": lambda la, x, y: la.uncertainty(x),
    "rounds": lambda la, x, y: la.optimize_prior_precision(at="linear", n_steps=1),
    "prior mean": lambda la, x, y: setattr(la, "prior_mean", 0.1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_function_does_not_predict(change):
    model, (x, y) = network(), data()
    la = (KronLaplace if len(change) % 2 else DiagLaplace)(model).fit([(x, y)])
    CHANGES[change](model)
    x = x.to(next(model.parameters()).dtype)
    with pytest.raises(RuntimeError, match="changed since the fit"):
        la(x)
    with pytest.raises(ValueError, match="changed since the fit it would add to"):
        la.fit([(x, y)], override=False)


def test_nothing_that_runs_the_model_takes_another_function():
    model, (x, y) = network(), data()
    la = DiagLaplace(model).fit([(x, y)])
    la.fit_linear_mode([(x, y)], tol=0.1)
    handle = model[1].register_forward_hook(lambda module, args, out: 2 * out)
    for way in WAYS.values():
        with pytest.raises(RuntimeError, match=r"changed since the fit.*'1' \(LeakyReLU\)"):
            way(la, x, y)
    handle.remove()
    assert la(x, mean="linear").isfinite().all()


def test_the_evidences_gradient_takes_no_other_function():
    model, (x, y) = network(), data()
    model.register_buffer("scale", torch.ones(()))
    model[2].register_forward_hook(lambda module, args, out: model.scale * out)
    la = KronLaplace(model).fit([(x, y)])
    model[1].negative_slope = 0.5
    with pytest.raises(RuntimeError, match="changed since the fit"):
        evidence_gradient(la, [(x, y)], ["scale"])


@pytest.mark.parametrize("kind", [KronLaplace, FullLaplace])
def test_copies_and_states_are_of_their_own_models(kind):
    model, (x, y) = network(), data()
    la = kind(model).fit([(x, y)])
    loaded = kind(copy.deepcopy(model))
    loaded.load_state_dict(la.state_dict())
    shared = copy.copy(la)
    apart = [copy.deepcopy(la), pickle.loads(pickle.dumps(la)), loaded]
    for other in (*apart, shared):
        torch.testing.assert_close(other(x), la(x))
    model[1].negative_slope = 0.5
    late = copy.deepcopy(la)  # of what the fit is not of
    for other in apart:
        assert other(x).isfinite().all()
        other.model[1].negative_slope = 0.5
    for other in (*apart, shared, late):
        with pytest.raises(RuntimeError, match="changed since the fit"):
            other(x)


def run_and_compile(model):
    with torch.no_grad():
        model.eval()(data()[0])
    model._orig_mod.compile(backend="eager")


# What is no change, of a network with a norm and dropout, and what is one.
NO_CHANGES = {
    "compiled": (run_and_compile, lambda m: m[1].register_forward_pre_hook(lambda module, args: (2 * args[0],))),
    "labels": (lambda m: (setattr(m, "output_size", 3), setattr(m[5], "label", "head")), lambda m: delattr(m[1], "negative_slope")),
    "constants of training": (lambda m: (setattr(m[2], "momentum", 0.01), setattr(m[3], "p", 0.5)), lambda m: setattr(m[2], "eps", 1.0)),
}  # fmt: skip


@pytest.mark.parametrize("kind", NO_CHANGES)
def test_what_is_no_change_of_the_function(kind):
    """A label as laplace-torch sets it; a model that is compiled after the fit, or was before."""
    (x, y), model = data(), network()
    model[2] = nn.BatchNorm2d(2)
    model.insert(3, nn.Dropout(0.2))
    la = KronLaplace(torch.compile(model, backend="eager") if kind == "compiled" else model).fit([(x, y)])
    expected = la(x)
    none, one = NO_CHANGES[kind]
    none(la.model)
    torch.testing.assert_close(la(x), expected)
    one(model)
    for ask in (lambda: la(x), lambda: la.sample(1)):
        with pytest.raises(RuntimeError, match="changed since the fit"):
            ask()


def test_graphs_that_modes_replace_are_one_function():
    extraction = pytest.importorskip("torchvision.models.feature_extraction")
    (x, y), inner = data(), network()
    inner[2] = nn.Dropout()
    model = nn.Sequential(
        extraction.create_feature_extractor(inner, {"4": "out"}), Function(lambda m, found: found["out"])
    ).train()
    la = KronLaplace(model).fit([(x, y)])
    expected = KronLaplace(inner).fit([(x, y)])(x)
    for mode in (True, False):
        model.train(mode)
        torch.testing.assert_close(la(x), expected)


def test_another_graph_is_another_function():
    (x, y), inner = data(), network()
    inner[2] = nn.Dropout()
    model = torch.fx.symbolic_trace(inner)
    la = KronLaplace(model).fit([(x, y)])
    expected = la(x)
    model.recompile()  # to the same
    torch.testing.assert_close(la(x), expected)
    (node,) = model.graph.find_nodes(op="call_module", target="1")
    node.replace_all_uses_with(node.args[0])
    model.graph.erase_node(node)
    model.recompile()
    with pytest.raises(RuntimeError, match="changed since the fit"):
        la(x)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_models_that_hold_their_own_fit_are_copied(copied):
    model, (x, y) = network(), data()
    model.fit = KronLaplace(model).fit([(x, y)])
    other = copied(model)
    torch.testing.assert_close(other.fit(x), model.fit(x))
    other[1].negative_slope = 0.5
    with pytest.raises(RuntimeError, match="changed since the fit"):
        other.fit(x)
    assert model.fit(x).isfinite().all()


class Positions(nn.Module):
    """A table that the first forward makes, and longer sequences make again."""

    def __init__(self, persistent):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 3)
        self.persistent = persistent
        self.register_buffer("table", None, persistent=persistent)
        self.register_buffer("scale", torch.ones(4), persistent=False)

    def forward(self, x):
        length = x.shape[1]
        if self.table is None or len(self.table) < length:
            table = torch.arange(length)[:, None] * torch.tensor([1.0, 0.5, 0.25, 0.1])
            self.register_buffer("table", table.sin().to(x), persistent=self.persistent)
        return self.last((self.first(x) * self.scale + self.table[:length]).tanh().mean(1))


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", [KronLaplace, FullLaplace])
@pytest.mark.parametrize("filled", [False, True])
def test_what_a_forward_fills_is_no_change(kind, persistent, filled):
    model = Positions(persistent)
    x, y, longer = torch.randn(6, 5, 3), torch.arange(6) % 3, torch.randn(4, 9, 3)
    if filled:
        model(x)
    la = kind(model).fit([(x, y)])
    expected = la(longer)
    torch.testing.assert_close(la(longer), expected)
    torch.testing.assert_close(la.functional_samples(x, n_samples=2).shape, torch.Size([2, 6, 3]))
    fresh = Positions(persistent)
    fresh.load_state_dict({name: value for name, value in model.state_dict().items() if name != "table"})
    other = kind(fresh)
    other.load_state_dict(la.state_dict())
    torch.testing.assert_close(other(x), la(x))
    torch.testing.assert_close(other(longer), expected)
    model.scale *= 2  # no forward fills it
    with pytest.raises(RuntimeError, match="changed since the fit"):
        la(x)


def test_a_table_that_batches_lengthen_is_no_change():
    model = Positions(False)
    loader = [(torch.randn(3, length, 3), torch.arange(3)) for length in (4, 8)]
    la = KronLaplace(model).fit(loader)
    assert la(loader[1][0]).isfinite().all()
    assert la.fit(loader, override=False).n_data == 12
