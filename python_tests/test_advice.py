"""What a refusal recommends works: each is provoked, its advice taken, and the whole of a fit tried."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ella_cuda.laplace import DiagLaplace, FullLaplace, KronLaplace, TangentModel, exact_log_marginal_likelihood
from python_tests.laplace.checks import Function
from python_tests.laplace.test_errors import Zeta

pytestmark = pytest.mark.filterwarnings("ignore:fit", "ignore:.*weight_norm:FutureWarning", "ignore:.*batching rule")

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randn(6, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
WORDS = torch.tensor([[0, 1, 2], [3, 1, 4], [2, 2, 0], [4, 4, 4], [0, 0, 1], [3, 2, 1]])


def freeze(*names: str) -> Callable[[nn.Module], nn.Module]:
    def frozen(model: nn.Module) -> nn.Module:
        for name in names:
            (
                model.get_parameter(name) if name in dict(model.named_parameters()) else model.get_submodule(name)
            ).requires_grad_(False)
        return model

    return frozen


def instead(make: Callable[[], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    return lambda _: make()


def mlp(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), *middle, nn.Tanh(), nn.Linear(4, 2))


def words(kind: type[nn.Module] = nn.Embedding, **flags: Any) -> nn.Module:
    def run(net: Any, x: Tensor) -> Tensor:
        found = net.embed(x)
        return net.head((found if found.dim() == 2 else found.mean(1)).tanh())

    return Function(run, embed=kind(5, 4, **flags), head=nn.Linear(4, 2))


def twice(by_layer: bool) -> nn.Module:
    """A weight of two linear maps."""

    def run(net: Any, x: Tensor) -> Tensor:
        h = net.first(x).tanh()
        return net.head((net.again(h) if by_layer else functional.linear(h, net.first.weight)).tanh())

    first, again = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
    again.weight = first.weight
    return Function(run, first=first, head=nn.Linear(3, 2), **({"again": again} if by_layer else {}))


def replaced() -> nn.Module:
    def run(net: Any, x: Tensor) -> Tensor:
        own = {"weight": 2 * net.first.weight, "bias": net.first.bias}
        return net.head(torch.func.functional_call(net.first, own, (x,)).tanh())

    return Function(run, first=nn.Linear(3, 3), head=nn.Linear(3, 2))


def forces() -> nn.Module:
    def run(net: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(net.energy(net.first(x).tanh()).sum(), x, create_graph=True)
        return net.head(force)

    return Function(run, first=nn.Linear(3, 4), energy=nn.Linear(4, 1), head=nn.Linear(3, 2))


def listed(attribute: bool) -> nn.Module:
    """A parameter that the forward takes from a list of its own."""
    own = nn.Parameter(torch.ones(3, 2))
    run = (lambda net, x: net.head(x @ net.own)) if attribute else (lambda net, x: net.head(x @ net.kept[0]))
    return Function(run, own=own, kept=[own], head=nn.Linear(2, 2))


def attentions(together: bool) -> nn.Module:
    def run(net: Any, x: Tensor) -> Tensor:
        h = net.first(x)[:, None] * torch.linspace(0.5, 1, 3, dtype=x.dtype)[:, None]
        other = net.attention if together else net.other
        h = net.attention(h, h, h)[0]
        return net.head(other(h, h.tanh(), h.tanh())[0].mean(1))

    own = {} if together else {"other": nn.MultiheadAttention(4, 2, batch_first=True)}
    return Function(
        run, first=nn.Linear(3, 4), attention=nn.MultiheadAttention(4, 2, batch_first=True), head=nn.Linear(4, 2), **own
    )


def recurrent(kind: type[nn.Module]) -> nn.Module:
    def run(net: Any, x: Tensor) -> Tensor:
        return net.head(net.layer(x[:, None])[0][:, -1])

    return Function(run, layer=kind(3, 4, batch_first=True), head=nn.Linear(4, 2))


def checkpointed(reentrant: bool) -> nn.Module:
    def run(net: Any, x: Tensor) -> Tensor:
        return net.head(checkpoint(lambda h: net.first(h).tanh(), x, use_reentrant=reentrant))

    return Function(run, first=nn.Linear(3, 4), head=nn.Linear(4, 2))


def without_norm(model: nn.Module) -> nn.Module:
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    return model


def without_old_norm(model: nn.Module) -> nn.Module:
    nn.utils.remove_weight_norm(model[0])
    return model


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def weight_normed() -> nn.Module:
    model = mlp()
    nn.utils.parametrizations.weight_norm(model[0])
    return model


def unused() -> nn.Module:
    return Function(lambda net, x: net.first(x), first=nn.Linear(3, 2), other=nn.Linear(2, 2))


def turned() -> nn.Module:
    """Its last module is not the last that runs."""
    return Function(lambda net, x: net.head(net.body(x).tanh()), head=nn.Linear(4, 2), body=nn.Linear(3, 4))


LAST = {"subset_of_weights": "last_layer"}
DIAGONAL, LEFT = {"unknown": "diagonal"}, {"unknown": "freeze"}
# What is refused, by which words and with which settings; the model and the settings that the words recommend.
CASES: dict[str, tuple[Any, dict[str, Any], str, Any, dict[str, Any]]] = {
    "max_norm, without": (lambda: words(max_norm=0.5), {}, "max_norm=None", instead(words), {}),
    "max_norm, frozen": (lambda: words(max_norm=0.5), {}, "or freeze it", freeze("embed"), {}),
    "max_norm of bags, frozen": (lambda: words(nn.EmbeddingBag, max_norm=0.5), {}, "or freeze it", freeze("embed"), {}),
    "bags, frozen": (lambda: words(nn.EmbeddingBag, mode="max"), {}, "freeze the layer", freeze("embed"), {}),
    "bags, mean": (lambda: words(nn.EmbeddingBag, mode="max"), {}, "'sum' or 'mean'", instead(lambda: words(nn.EmbeddingBag)), {}),
    "beside, a layer": (lambda: twice(False), {}, "nn.Linear with its weight set to this one", instead(lambda: twice(True)), {}),
    "beside, frozen": (lambda: twice(False), {}, "freeze it with", freeze("first.weight"), {}),
    "replaced, frozen": (replaced, {}, "or freeze it", freeze("first"), {}),
    "forces, frozen": (forces, {}, "Freeze these layers", freeze("first", "energy"), {}),
    "forces, behind": (forces, {}, "or fit those behind them alone", lambda m: m, {"subset_of_weights": ["head"]}),
    "listed, frozen": (lambda: listed(False), DIAGONAL, "or freeze it", freeze("own"), {}),
    "listed, attribute": (lambda: listed(False), DIAGONAL, "Read it as an attribute", instead(lambda: listed(True)), DIAGONAL),
    "attention, frozen": (lambda: attentions(True), {}, "or freeze it", freeze("attention"), {}),
    "attention, apart": (lambda: attentions(True), {}, "Give each use its own layer", instead(lambda: attentions(False)), {}),
    "LSTM, frozen": (lambda: recurrent(nn.LSTM), {}, "freeze the parameters", freeze("layer"), {}),
    "LSTM, left out": (lambda: recurrent(nn.LSTM), {}, "unknown='freeze'", lambda m: m, LEFT),
    "LSTM, diagonal": (lambda: recurrent(nn.LSTM), {}, "unknown='diagonal'", lambda m: m, DIAGONAL),
    "GRU, diagonal": (lambda: recurrent(nn.GRU), {}, "unknown='diagonal'", lambda m: m, DIAGONAL),
    "checkpoint": (lambda: checkpointed(True), {}, "use_reentrant=False", instead(lambda: checkpointed(False)), {}),
    "weight_norm, frozen": (weight_normed, {}, "freeze the parameters", freeze("0"), {}),
    "weight_norm, diagonal": (weight_normed, {}, "unknown='diagonal'", lambda m: m, DIAGONAL),
    "weight_norm, removed": (weight_normed, {}, "no curvature rule", without_norm, {}),
    "old weight_norm": (lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 2))), {}, "weight_g", without_old_norm, {}),
    "subclass, frozen": (lambda: nn.Sequential(Doubled(3, 4), nn.Linear(4, 2)), {}, "Register one", lambda m: m, LEFT),
    "statistics, GroupNorm": (
        lambda: mlp(nn.BatchNorm1d(4, track_running_stats=False)),
        {},
        "or use GroupNorm",
        instead(lambda: mlp(nn.GroupNorm(2, 4))),
        {},
    ),
    "statistics, kept": (
        lambda: mlp(nn.BatchNorm1d(4, track_running_stats=False)),
        {},
        "track_running_stats=True",
        instead(lambda: mlp(nn.BatchNorm1d(4))),
        {},
    ),
    "unused, frozen": (unused, {}, r"freeze with requires_grad_\(False\) what", freeze("other"), {}),
    "last layer, named": (turned, LAST, r"\['its name'\]", lambda m: m, {"subset_of_weights": ["head"]}),
    "shared, all": (lambda: twice(True), {"subset_of_weights": ["first"]}, "subset_of_weights='all'", lambda m: m, {}),
    "no gradient, frozen": (lambda: mlp(Zeta()), {}, "or freeze with requires_grad_", freeze("0"), {}),
}  # fmt: skip


@pytest.mark.parametrize(("make", "settings", "words", "mend", "others"), CASES.values(), ids=CASES)
def test_advice_is_good(make: Any, settings: Any, words: str, mend: Any, others: Any) -> None:
    """In float32, in which kernels are other ones than in float64; numbers against those that float64 gives."""
    torch.manual_seed(0)
    model = make()
    x = WORDS if hasattr(model, "embed") else X.float()
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=words):
        KronLaplace(model, "regression", **settings).fit([(x, Y.float())])
    model = mend(model)
    wide = copy.deepcopy(model).double()
    evidences = []
    for net, inputs, targets in ((model, x, Y.float()), (wide, x if x is WORDS else X, Y)):
        la = KronLaplace(net, "regression", **others).fit([(inputs, targets)])
        evidences.append(la.log_marginal_likelihood())
        mean, variance = la(inputs)
        assert la.functional_samples(inputs, n_samples=2).shape == (2, *mean.shape) and variance.isfinite().all()
        la.fit_linear_mode([(inputs, targets)], tol=1e-2, progress_bar=False)
    torch.testing.assert_close(*evidences, rtol=1e-3, atol=1e-3)
    # The whole matrix' variances are the linearised network's: J (J^T J + I)^-1 J^T.
    names = la.parameter_names
    full = FullLaplace(wide, "regression", **others).fit([(inputs, targets)])
    tangent = TangentModel(wide, names=names)
    jacobian = tangent.jvp(inputs, torch.eye(tangent.n_params, dtype=torch.float64)).movedim(0, -1)
    precision = torch.tensordot(jacobian, jacobian, ([0, 1], [0, 1])) + torch.eye(tangent.n_params)
    expected = jacobian @ torch.linalg.solve(precision, jacobian.mT)
    torch.testing.assert_close(full.functional_variance(inputs), expected, rtol=1e-6, atol=1e-9)
    diagonal = DiagLaplace(wide, "regression", **others).fit([(inputs, targets)])
    torch.testing.assert_close(diagonal.H, jacobian.square().sum((0, 1)), rtol=1e-6, atol=1e-9)


def test_rows_that_come_later_are_shortened_without_a_change() -> None:
    """A frozen embedding's max_norm shortens rows when they are looked up first."""
    model = words(max_norm=0.5)
    model.embed.requires_grad_(False)
    la = KronLaplace(model, "regression").fit([(WORDS[:2] % 2, Y[:2].float())])
    expected = la.model(WORDS)
    torch.testing.assert_close(la(WORDS)[0], expected.detach())
    with torch.no_grad():
        model.embed.weight[3] *= -1
    with pytest.raises(RuntimeError, match="changed since the fit"):
        la(WORDS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_network_as_float(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = mlp().to(dtype)
    with pytest.raises(TypeError, match=r"model.float\(\) and x.float\(\)"):
        KronLaplace(model, "regression")
    la = KronLaplace(model.float(), "regression").fit([(X.to(dtype).float(), Y.float())])
    assert la(X.to(dtype).float())[1].isfinite().all()


@pytest.mark.parametrize("make", [lambda: nn.Sequential(*weight_normed()), mlp])
def test_a_bias_may_come_before_its_weight(make: Any) -> None:
    """As removed parametrizations leave them."""
    torch.manual_seed(0)
    model = make().double()
    if hasattr(model[0], "parametrizations"):
        model = without_norm(model)
    plain = mlp().double()
    plain.load_state_dict(model.state_dict())
    one, other = (KronLaplace(net, "regression").fit([(X, Y)]) for net in (model, plain))
    torch.testing.assert_close(one.log_marginal_likelihood(), other.log_marginal_likelihood())
    torch.testing.assert_close(one(X), other(X))
    assert one.memory_estimate(X[:2]) == other.memory_estimate(X[:2])


def test_the_exact_evidence_of_frozen_layers() -> None:
    model = Function(
        lambda net, x: net.head((net.shift * net.first(x)).tanh()), first=nn.Linear(3, 3), head=nn.Linear(3, 2)
    )
    model.shift = nn.Parameter(torch.ones(3))
    model = model.double()
    with pytest.raises(ValueError, match="or freeze its parameters"):
        exact_log_marginal_likelihood(KronLaplace(model, "regression"), X, Y)
    model.shift.requires_grad_(False)
    la = KronLaplace(model, "regression")
    found = exact_log_marginal_likelihood(la, X, Y)
    torch.testing.assert_close(found, la.fit([(X, Y)]).log_marginal_likelihood())


def test_a_layer_without_a_second_derivative_may_be_frozen() -> None:
    layers = [nn.Linear(3, 4), nn.Unflatten(1, (4, 1, 1)), nn.CrossMapLRN2d(2), nn.Flatten(), nn.Linear(4, 2)]
    model = nn.Sequential(*layers).double()
    la = KronLaplace(model, "regression").fit([(X, Y)])
    with pytest.raises(
        NotImplementedError, match=r"layer '2' \(CrossMapLRN2d\).* or freeze with requires_grad_\(False\)"
    ):
        la.fit_linear_mode([(X, Y)])
    model[0].requires_grad_(False)
    la = KronLaplace(model, "regression").fit([(X, Y)])
    inputs = torch.cat([model[:4](X), torch.ones(6, 1)], 1).detach()
    expected = torch.linalg.solve(inputs.T @ inputs + torch.eye(5), inputs.T @ Y)
    found = la.fit_linear_mode([(X, Y)], tol=1e-9, progress_bar=False)
    torch.testing.assert_close(found, torch.cat([expected[:4].T.flatten(), expected[4]]), rtol=1e-6, atol=1e-8)


def test_a_reentrant_checkpoint_has_no_products() -> None:
    """Its forward mode and its gradients both leave out what it computes."""
    for reentrant in (True, False):
        tangent = TangentModel(checkpointed(reentrant).double())
        if reentrant:
            with pytest.raises(ValueError, match=r"TangentModel: .*use_reentrant=False"):
                tangent.vjp(X, Y)
            continue
        assert (tangent.vjp(X, Y) != 0).all()
