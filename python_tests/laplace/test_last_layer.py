"""Linear last layers: features collected in one pass, and further data, against dense matrices and closed forms."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional

from ella_cuda.augment import AveragedFunction
from ella_cuda.laplace import DiagLaplace, FullLaplace, KronLaplace
from ella_cuda.laplace.last_layer import LastLayer
from python_tests.laplace.checks import Function, drawn, randomised

KINDS = [FullLaplace, DiagLaplace, KronLaplace]
X = drawn(25, 3)
TARGETS = {
    "regression": X[:, :2].sin() + 0.3 * drawn(25, 2, seed=1),
    "classification": (X @ drawn(3, 2, seed=2) + drawn(25, 2, seed=3)).argmax(1),
}
PARTS = ["last_layer", ["2.weight"], ["2.bias"]]


RUNS: list[int] = []  # data points of each run of a network


class Watched(nn.Softplus):
    def forward(self, x: Tensor) -> Tensor:
        RUNS.append(len(x))
        return super().forward(x)


def network(outputs: int = 2) -> nn.Sequential:
    return randomised(nn.Sequential(nn.Linear(3, 5), Watched(), nn.Linear(5, outputs)))


def batches(x: Tensor, y: Tensor, size: int = 10) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


def fitted(kind: Any, likelihood: str, count: int = 25, subset: Any = "last_layer", **how: Any) -> Any:
    loader = batches(X[:count], TARGETS[likelihood][:count])
    how |= {"sigma_noise": 0.4} if likelihood == "regression" else {}
    la = kind(
        network(), likelihood, subset_of_weights=subset, prior_precision=0.7, prior_mean=0.1, temperature=0.8, **how
    )
    return la.fit(loader)


def jacobian(la: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs ``(N, K)`` and their Jacobian ``(N, K, P)``, by torch.func alone."""
    model, own = copy.deepcopy(la.model), {n: la.model.get_parameter(n).detach() for n in la.parameter_names}
    found = jacrev(lambda values: functional_call(model, values, (x,)))(own)
    return functional_call(model, own, (x,)).detach(), torch.cat([j.flatten(2) for j in found.values()], 2)


def close(found: Any, wanted: Any, rtol: float = 1e-8) -> None:
    wanted = torch.as_tensor(wanted, dtype=torch.float64)
    torch.testing.assert_close(torch.as_tensor(found, dtype=torch.float64), wanted, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["full", "simple"])
@pytest.mark.parametrize("likelihood", TARGETS)
@pytest.mark.parametrize("subset", PARTS)
def test_the_linear_mode_is_that_of_the_whole_network(monkeypatch, kind, form, likelihood, subset):
    la = fitted(kind, likelihood, subset=subset)
    loader = la._loaders[0]
    RUNS.clear()
    found = la.fit_linear_mode(loader, 1e-11, form=form)
    assert RUNS == [10, 10, 5]
    samples = la.functional_samples(X[:4], n_samples=3, generator=torch.Generator().manual_seed(0))
    answers = [found, la.linear_fit.loss, la._shift(X[:4], "linear"), samples]
    monkeypatch.setattr(LastLayer, "of", lambda *_: None)
    la.linear_fit = None
    wanted = la.fit_linear_mode(loader, 1e-11, form=form)
    samples = la.functional_samples(X[:4], n_samples=3, generator=torch.Generator().manual_seed(0))
    for ours, theirs in zip(answers, [wanted, la.linear_fit.loss, la._shift(X[:4], "linear"), samples], strict=True):
        close(ours, theirs)
    assert len(RUNS) > 20


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("subset", PARTS)
@pytest.mark.parametrize("budget", [1, 1 << 20])
def test_moments_by_features(kind, subset, budget):
    la = fitted(kind, "classification", subset=subset, memory_budget=budget)
    la.functional_variance(X[:1])  # tries the network out
    outputs, dense = jacobian(la, X)
    wanted = dense @ la.posterior_precision.to_matrix(-1) @ dense.mT
    RUNS.clear()
    close(la.functional_variance(X), wanted)
    assert ([7, 7, 7, 4] if budget == 1 else [25]) == RUNS
    variances = wanted.diagonal(dim1=1, dim2=2)
    close(la(X), torch.softmax(outputs / (1 + torch.pi / 8 * variances).sqrt(), 1))


def in_place(m: Any, x: Tensor) -> Tensor:
    return m.layer(x).add_(1.0)


OF_LIKELIHOODS = {
    "classification": torch.arange(25).remainder(4).index_fill(0, torch.arange(5), -100),
    "binary": torch.arange(100).remainder(3).eq(0).view(25, 4),
    "poisson": torch.arange(100).remainder(5).view(25, 4),
    "regression": drawn(25, 4, seed=4),
}


@pytest.mark.parametrize("likelihood", OF_LIKELIHOODS)
@pytest.mark.parametrize("subset", PARTS)
def test_the_output_side_is_the_sum_of_hessians(monkeypatch, likelihood, subset):
    model, y = network(4), OF_LIKELIHOODS[likelihood]
    la = KronLaplace(model, likelihood, subset_of_weights=subset)
    f = model(X).detach()
    hessians = torch.func.hessian(lambda some: -la.likelihood_function.log_prob(some, y).sum())(f)
    wanted = torch.einsum("ncnd->cd", hessians)
    with monkeypatch.context() as context:
        context.delattr(KronLaplace, "_columns_at")
        la.fit(batches(X, y))
    for factor in la.factors.values():
        close(factor.outputs[0], wanted)
    assert {len(factor.outputs) for factor in la.factors.values()} == {1}
    low = KronLaplace(model, likelihood, subset_of_weights=subset, column_tolerance=0.3).fit(batches(X, y))
    smaller = likelihood != "regression"  # whose columns are of one size
    assert all((f.outputs[0].trace() < wanted.trace() * (1 - 1e-6)) == smaller for f in low.factors.values())


NOT_LAST = {
    "a function after it": lambda m, x: m.layer(x) * 2.0,
    "a change of its output": in_place,
    "two calls": lambda m, x: m.layer(m.layer(x)),
    "a call by name": lambda m, x: m.layer(input=x),
    "a gradient that is not its output's": lambda m, x: (
        m.layer(x) * 2.0 - m.layer.weight.sum() * 0 - m.layer(x).detach()
    ),
}


@pytest.mark.parametrize("name", NOT_LAST)
def test_what_is_no_last_layer_goes_through_the_network(name):
    model = randomised(Function(NOT_LAST[name], layer=nn.Linear(3, 3)))
    layer = LastLayer.of(model, KronLaplace(model)._rules)
    assert layer is not None and layer.features(X) is None


def test_which_layers_are_last():
    model = network()
    for la in (KronLaplace(model), KronLaplace(model, subset_of_weights=["0", "2.bias"])):
        assert LastLayer.of(model, la._rules) is None
    rules = KronLaplace(model, subset_of_weights="last_layer")._rules
    assert LastLayer.of(model, rules) is not None
    assert LastLayer.of(AveragedFunction(model, nn.Identity()), rules) is None
    model[2].register_forward_hook(lambda module, args, out: out * 2)
    assert LastLayer.of(model, rules) is None


def test_features_without_room_are_not_kept(monkeypatch):
    la = fitted(KronLaplace, "classification")
    needed = 25 * 5 * 8
    monkeypatch.setattr("ella_cuda.laplace.linear_mode.available_bytes", lambda device: 2 * needed - 1)
    wanted = fitted(KronLaplace, "classification")
    with pytest.warns(UserWarning, match=f"take {needed:,} bytes, more than half of the 1,999 that cpu has") as told:
        found = la.fit_linear_mode(la._loaders[0], 1e-10)
    assert told[0].filename == __file__
    monkeypatch.setattr("ella_cuda.laplace.linear_mode.available_bytes", lambda device: 2 * needed)
    close(found, wanted.fit_linear_mode(wanted._loaders[0], 1e-10))


def test_in_inference_mode():
    la = fitted(FullLaplace, "regression", 20)
    _, dense = jacobian(la, X)
    with torch.inference_mode():
        la.fit_linear_mode(la._loaders[0])
        la.update(X[20:], TARGETS["regression"][20:])
        mean, variances = la(X, mean="linear", diagonal_output=True)
    close(mean, la.model(X) + dense @ (la.linear_mode - la.mean))
    close(variances, (dense @ la.posterior_precision.to_matrix(-1) @ dense.mT).diagonal(dim1=1, dim2=2))


def test_rounds_at_the_linear_mode_run_the_network_once():
    la = fitted(KronLaplace, "classification")
    RUNS.clear()
    la.optimize_prior_precision(at="linear", n_steps=30)
    assert RUNS == [10, 10, 5]


# further data -----------------------------------------------------------------------------------------------------------


def log_likelihood(la: Any, f: Tensor, y: Tensor) -> Tensor:
    if la.likelihood == "regression":
        return torch.distributions.Normal(f, la.sigma_noise).log_prob(y).sum()
    return -functional.cross_entropy(f, y, reduction="sum")


@pytest.mark.parametrize("subset", ["last_layer", ["2.weight"]])
@pytest.mark.parametrize("kind", [FullLaplace, KronLaplace])
def test_a_regression_with_further_data_is_that_of_all_data(kind, subset):
    y = TARGETS["regression"]
    la = fitted(kind, "regression", 12, subset)
    la.fit_linear_mode(la._loaders[0], 1e-12)
    assert la.update(X[12:20], y[12:20], 1e-12) is la
    la.update(X[20:], y[20:], tol=1e-12)
    f, dense = jacobian(la, X)
    rows, weight = dense.flatten(0, 1), 1 / (0.8 * 0.4**2)
    precision = weight * rows.T @ rows + 0.7 * torch.eye(la.n_params, dtype=torch.float64)
    offset = f.flatten() - rows @ la.mean
    mode = torch.linalg.solve(precision, weight * rows.T @ (y.flatten() - offset) + 0.07)
    close(la.linear_mode, mode)
    assert (la.n_data, la.n_targets) == (25, 50)
    close(
        la.log_likelihood,
        log_likelihood(la, f, y) / 0.8 - 50 * (1 - 1 / 0.8) * torch.tensor(0.4 * (2 * torch.pi) ** 0.5).log(),
    )
    whole = fitted(kind, "regression", subset=subset)
    whole.fit_linear_mode(whole._loaders[0], 1e-12)
    close(la.posterior_precision.to_matrix(), whole.posterior_precision.to_matrix())
    for at in ("network", "linear"):
        close(la.log_marginal_likelihood(at=at), whole.log_marginal_likelihood(at=at))
    close(la.linear_fit.loss, whole.linear_fit.loss)
    assert whole.update(X[:3], y[:3]).n_data == 28


@pytest.mark.parametrize("kind", KINDS)
def test_classes_with_further_data_are_an_online_laplace_step(kind):
    y = TARGETS["classification"]
    la = fitted(kind, "classification", 20)
    before, mode = la.posterior_precision.to_matrix(), la.fit_linear_mode(la._loaders[0], 1e-12)
    if kind is KronLaplace:  # with what is between weight and bias, in the columns of the bias and of the weight
        features = la.model[:2](X[:20]).detach().mean(0)
        between = torch.kron(la.factors["2.weight"].outputs[0] / 0.8, features[:, None])
        before[:10, 10:], before[10:, :10] = between, between.T
    old = la.linear_fit
    la.update(X[20:], y[20:], 1e-11)
    f, dense = jacobian(la, X[20:])
    rows, theta = dense.flatten(0, 1), mode.clone()
    for _ in range(30):  # Newton's method
        p = torch.softmax(f + dense @ (theta - la.mean), 1)
        slope = rows.T @ (p - functional.one_hot(y[20:], 2)).flatten() / 0.8 + before @ (theta - mode)
        hessian = torch.einsum("ncp,ncd,ndq->pq", dense, p.diag_embed() - p[:, :, None] * p[:, None], dense) / 0.8
        theta = theta - torch.linalg.solve(hessian + before, slope)
    close(la.linear_mode, theta, 1e-7)
    if kind is FullLaplace:
        close(la.posterior_precision.to_matrix(), before + hessian, 1e-7)
    step, prior = theta - mode, 0.7 * torch.eye(len(theta), dtype=torch.float64)
    quadratic = prior @ (mode - 0.1) - 0.5 * (before - prior) @ step
    new = log_likelihood(la, f + dense @ (theta - la.mean), y[20:])
    close(la.linear_fit.statistic, old.statistic + 0.8 * step @ quadratic + new, 1e-7)
    close(la.linear_fit.square_norms.sum(), (theta - 0.1).square().sum(), 1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_linear_mode_the_curvature_is_added(kind):
    y = TARGETS["classification"]
    la, whole = fitted(kind, "classification", 20).update(X[20:], y[20:]), fitted(kind, "classification")
    close(la.posterior_precision.to_matrix(), whole.posterior_precision.to_matrix())
    close(la.log_marginal_likelihood(), whole.log_marginal_likelihood())
    assert la.linear_mode is None and la.n_data == 25


def test_a_saved_mode_moves_on():
    y = TARGETS["regression"]
    la, other = fitted(KronLaplace, "regression", 20), fitted(KronLaplace, "regression", 12)
    la.fit_linear_mode(la._loaders[0], 1e-12)
    other.load_state_dict(la.state_dict())
    close(other.update(X[20:], y[20:], 1e-12).linear_mode, la.update(X[20:], y[20:], 1e-12).linear_mode)


def test_refused_data_change_nothing():
    y = TARGETS["classification"]
    la = fitted(KronLaplace, "classification", 20)
    la.fit_linear_mode(la._loaders[0])
    before = la.state_dict()
    with pytest.raises(ValueError, match="label"):
        la.update(X[20:], y[20:] + 7)
    with pytest.raises(FloatingPointError, match=r"update: .*not finite"):
        la.update(X[20:] * torch.inf, y[20:])
    with pytest.raises(ValueError, match="update: expected data points"):
        la.update(X[:0], y[:0])
    la.prior_precision = 3.0
    with pytest.raises(RuntimeError, match="other prior precisions"):
        la.update(X[20:], y[20:])
    la.prior_precision, la.linear_fit = 0.7, la.linear_fit._replace(features=None)
    with pytest.raises(RuntimeError, match="without keeping the last layer's inputs"):
        la.update(X[20:], y[20:])
    la.linear_fit = la.linear_fit._replace(features=before["linear_mode"]["features"])
    assert la.state_dict()["checksum"] == before["checksum"]


@pytest.mark.parametrize("subset", ["all", ["0"]])
def test_other_posteriors_are_not_updated(subset):
    la = fitted(KronLaplace, "regression", subset=subset)
    with pytest.raises(ValueError, match=r"0\.weight, .*inputs of other layers change with the posterior"):
        la.update(X, TARGETS["regression"])


def test_corrected_eigenvalues_are_not_updated():
    la = fitted(KronLaplace, "regression", 20, eigenvalue_correction=True)
    before = la.state_dict()["checksum"]
    with pytest.raises(ValueError, match=r"update: with eigenvalue_correction=True .*past data"):
        la.update(X[20:], TARGETS["regression"][20:])
    assert la.state_dict()["checksum"] == before
