"""The linearised network's mode, and the evidence at it, against closed forms and dense matrices."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional
from tqdm import tqdm

from ella_cuda.claim import claim
from ella_cuda.data import TensorLoader
from ella_cuda.laplace import DiagLaplace, FullLaplace, KronLaplace, SubnetLaplace, linear_mode
from ella_cuda.laplace.evidence import evidence_at, present_terms
from python_tests.laplace.checks import Function, Reusing, drawn, randomised

KINDS = [FullLaplace, DiagLaplace, KronLaplace]
Batches = list[tuple[Tensor, Tensor]]


def natural() -> nn.Module:
    """Natural parameters of Gaussians."""
    return Function(lambda m, f: torch.cat([f[:, :1], -0.5 * functional.softplus(f[:, 1:]) - 0.5], 1))


def perceptron(outputs: int = 2, end: nn.Module | None = None) -> nn.Module:
    parts = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)]
    return randomised(nn.Sequential(*parts, *([end] if end else [])))


def batches(x: Tensor, y: Tensor, size: int = 10) -> Batches:
    return list(zip(x.split(size), y.split(size), strict=True))


X = drawn(25, 3)
REAL = X[:, :2].sin() + 0.3 * drawn(25, 2, seed=1)
LABELS = (X @ drawn(3, 3, seed=2) + drawn(25, 3, seed=3)).argmax(1)
PROBLEMS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "regression": (perceptron, REAL),
    "classification": (lambda: perceptron(3), LABELS),
    "binary": (lambda: perceptron(1), (X[:, :1] + drawn(25, 1, seed=3) > 0).double()),
    "poisson": (lambda: perceptron(1), drawn(25, 1, seed=3).exp().floor()),
    "heteroscedastic": (lambda: perceptron(2, natural()), REAL[:, :1]),
}


@pytest.fixture(params=PROBLEMS)
def problem(request: Any) -> tuple[nn.Module, str, Batches]:
    make, y = PROBLEMS[request.param]
    return make(), request.param, batches(X, y)


def fitted(kind: Any, problem: tuple[nn.Module, str, Batches], **how: Any) -> Any:
    model, likelihood, loader = problem
    how = {"prior_precision": 0.7, **how}
    if likelihood == "regression":
        how.setdefault("sigma_noise", 0.4)
    return kind(model, likelihood, **how).fit(loader)


def of_regression(kind: Any = FullLaplace, **how: Any) -> tuple[Any, Batches]:
    loader = batches(X, REAL)
    return fitted(kind, (perceptron(), "regression", loader), **how), loader


def of_classes(kind: Any = KronLaplace, **how: Any) -> tuple[Any, Batches]:
    loader = batches(X, LABELS)
    return fitted(kind, (perceptron(3), "classification", loader), **how), loader


class Dense:
    """The linearised network of a fit, by torch.func alone."""

    def __init__(self, la: Any, loader: Batches, form: str = "full") -> None:
        self.la = la
        x, self.y = torch.cat([x for x, _ in loader]), torch.cat([y for _, y in loader])
        held = {n: p.detach() for n, p in la.model.named_parameters()}
        names = la.parameter_names
        self.point = torch.cat([held[n].flatten() for n in names])
        model = copy.deepcopy(la.model).eval()
        jacobian = jacrev(lambda own: functional_call(model, {**held, **own}, (x,)))({n: held[n] for n in names})
        self.f = functional_call(model, held, (x,)).detach()
        self.jacobian = torch.cat([j.flatten(self.f.dim()) for j in jacobian.values()], -1)
        self.rows = self.jacobian.flatten(0, -2)
        self.offset = self.f - self.jacobian @ self.point if form == "full" else torch.zeros_like(self.f)
        sizes = [held[n].numel() for n in names]
        self.prior = torch.cat([d.expand(n) for d, n in zip(la.prior_precision, sizes, strict=True)])
        self.mean = la.prior_mean.expand(len(self.point))

    def outputs(self, theta: Tensor) -> Tensor:
        return self.offset + self.jacobian @ theta

    def log_likelihood(self, theta: Tensor) -> Tensor:
        f, y, la = self.outputs(theta), self.y, self.la
        if la.likelihood == "regression":
            return torch.distributions.Normal(f, la.sigma_noise).log_prob(y).sum()
        if la.likelihood == "classification":
            index = la.likelihood_function.ignore_index
            return -functional.cross_entropy(f.flatten(0, -2), y.flatten(), reduction="sum", ignore_index=index)
        if la.likelihood == "binary":
            return -functional.binary_cross_entropy_with_logits(f, y, reduction="sum")
        if la.likelihood == "poisson":
            return torch.distributions.Poisson(f.exp()).log_prob(y).sum()
        variance = -0.5 / f[:, 1:]
        return torch.distributions.Normal(f[:, :1] * variance, variance.sqrt(), validate_args=False).log_prob(y).sum()

    def loss(self, theta: Tensor) -> Tensor:
        off = theta - self.mean
        return -self.log_likelihood(theta) / self.la.temperature + 0.5 * (self.prior * off * off).sum()

    def gradient(self, theta: Tensor) -> Tensor:
        theta = theta.detach().clone().requires_grad_()
        return torch.autograd.grad(self.loss(theta), theta)[0]

    def minimum(self, start: Tensor, free: Tensor | None = None) -> Tensor:
        """By Newton's method on dense Hessians."""
        theta, free = start.clone(), torch.arange(len(start)) if free is None else free
        for _ in range(50):
            curvature = torch.autograd.functional.hessian(self.loss, theta)[free][:, free]
            step, length = torch.linalg.solve(curvature, self.gradient(theta)[free]), 1.0
            while not self.loss(theta.index_add(0, free, -length * step)) <= self.loss(theta) + 1e-9:
                length /= 2
            theta = theta.index_add(0, free, -length * step)
        return theta

    def exact_evidence(self, log_precision: Tensor | None = None, log_sigma: Tensor | None = None) -> Tensor:
        """``log N(y; o + J mu, J Lambda^-1 J' + s2 I)``."""
        prior, sigma = self.prior, self.la.sigma_noise if log_sigma is None else log_sigma.exp()
        if log_precision is not None:
            sizes = [self.la.model.get_parameter(n).numel() for n in self.la.parameter_names]
            prior = torch.cat([d.exp().expand(n) for d, n in zip(log_precision, sizes, strict=True)])
        covariance = (self.rows / prior) @ self.rows.T + sigma**2 * torch.eye(len(self.rows)).double()
        mean = self.outputs(self.mean).flatten()
        return torch.distributions.MultivariateNormal(mean, covariance).log_prob(self.y.flatten())


def close(found: Tensor, expected: Tensor, rtol: float = 1e-9) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol * expected.abs().max().item())


# the mode ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "how",
    [{}, {"temperature": 2.5, "prior_mean": drawn(40, seed=7)}, {"prior_mean": 0.3, "prior_precision": "some"}],
    ids=["plain", "temperature and means", "mean and precisions"],
)
def test_the_mode_is_the_minimum_and_raises_the_evidence(problem, kind: Any, how: dict[str, Any]) -> None:
    """By as much as the loss falls, whatever the curvature is."""
    count, tensors = sum(p.numel() for p in problem[0].parameters()), len(list(problem[0].parameters()))
    how = dict(how)
    if isinstance(how.get("prior_mean"), Tensor):
        how["prior_mean"] = how["prior_mean"][:count]
    if "prior_precision" in how:
        how["prior_precision"] = torch.linspace(0.2, 3, tensors)
    la = fitted(kind, problem, **how)
    found = la.fit_linear_mode(problem[2], tol=1e-10)
    dense = Dense(la, problem[2])
    assert torch.equal(found, la.linear_mode) and la.linear_fit.residual <= 1e-10 and not la.linear_fit.why
    assert dense.gradient(found).norm() < 1e-6
    close(found, dense.minimum(dense.point), 1e-7)
    falls = dense.loss(dense.point) - dense.loss(found)
    assert falls > 0.01
    close(la.log_marginal_likelihood(at="linear") - la.log_marginal_likelihood(), falls)
    normaliser = 0.0
    if la.likelihood == "regression":
        normaliser = la.n_targets * (0.5 * math.log(2 * math.pi) + la.sigma_noise.log()) / la.temperature
    assert abs(la.linear_fit.loss - (dense.loss(found) - normaliser)) < 1e-8


@pytest.mark.parametrize("solver", ["cg", "dual", "newton_cg", "auto"])
@pytest.mark.parametrize("precondition", [True, False])
@pytest.mark.parametrize("form", ["full", "simple"])
def test_solvers_of_a_regression_agree_with_the_dense_solution(solver: str, precondition: bool, form: str) -> None:
    for how in ({}, {"temperature": 2.0, "prior_mean": 0.2}):
        la, loader = of_regression(KronLaplace, **how)
        dense = Dense(la, loader, form)
        weight = 1 / (la.sigma_noise.item() ** 2 * la.temperature)
        curvature = weight * dense.rows.T @ dense.rows + dense.prior.diag()
        right = weight * dense.rows.T @ (dense.y - dense.offset).flatten() + dense.prior * dense.mean
        found = la.fit_linear_mode(loader, 1e-11, solver, form=form, precondition=precondition)
        close(found, torch.linalg.solve(curvature, right), 1e-8)
        assert la.linear_fit.form == form
        assert solver != "dual" or la.linear_fit.passes == 5  # nothing is left to Newton's method


@pytest.mark.parametrize("form", ["full", "simple"])
def test_other_starts_lead_to_the_same_mode(form: str) -> None:
    la, loader = of_classes()
    found = la.fit_linear_mode(loader, 1e-10, form=form)
    close(la.fit_linear_mode(loader, 1e-10, form=form, start=drawn(la.n_params)), found, 1e-7)
    close(found, Dense(la, loader, form).minimum(found), 1e-7)
    assert la.linear_fit.passes > 3
    la.fit_linear_mode(loader, 1e-9, form=form)  # from there
    assert la.linear_fit.passes == 1
    la.fit_linear_mode(loader, 1e-9, form="simple" if form == "full" else "full")
    assert la.linear_fit.passes > 3


def test_the_curvature_itself_leaves_one_step_of_a_regression() -> None:
    la, loader = of_regression(FullLaplace, prior_precision=0.01)
    la.fit_linear_mode(loader, 1e-8, "cg")
    assert la.linear_fit.passes == 3  # a gradient, a product and the last gradient
    la.linear_fit = None
    la.fit_linear_mode(loader, 1e-8, "cg", precondition=False)
    assert la.linear_fit.passes > 10


def shuffled(loader: Batches) -> Any:
    x, y = (torch.cat(part) for part in zip(*loader, strict=True))
    return TensorLoader(x, y, batch_size=7, shuffle=True, generator=torch.Generator().manual_seed(5))


def test_order_and_sizes_of_batches_do_not_matter() -> None:
    la, loader = of_classes()
    found = la.fit_linear_mode(loader, 1e-10)
    others = [shuffled(loader), batches(X, LABELS, 1), batches(X, LABELS, 25), [*loader, (X[:0], LABELS[:0])]]
    for other in others:
        la.linear_fit = None
        close(la.fit_linear_mode(other, 1e-10), found, 1e-7)


def test_outputs_of_a_batch_are_those_of_the_same_batch() -> None:
    """Two batches with the same inputs and other targets, the same inputs in another order."""
    x = X[:5]
    loader = [(x, LABELS[:5]), (x, LABELS[5:10]), (x.flip(0), LABELS[:5])]
    la = fitted(KronLaplace, (perceptron(3), "classification", loader))
    found = la.fit_linear_mode(loader, 1e-10)
    close(found, Dense(la, loader).minimum(found), 1e-7)


@pytest.mark.parametrize("form", ["full", "simple"])
def test_products_with_the_curvature_are_the_dense_hessians(form: str) -> None:
    """Of batches that the gradient's pass had, and of others."""
    loader = batches(X[:20], LABELS[:20], 5)
    la = fitted(KronLaplace, (perceptron(3), "classification", loader), temperature=2.0)
    dense, theta, v = Dense(la, loader, form), drawn(la.n_params), drawn(la.n_params, seed=1)
    expected, gradient = torch.autograd.functional.hessian(dense.loss, theta) @ v, dense.gradient(theta)
    with tqdm(disable=True) as bar, torch.no_grad():
        loss = linear_mode._Loss(la, loader, form, bar, 500)
        statistic, slope, prior = loss.gradient(theta)
        close(slope + prior, gradient)
        close(torch.tensor(loss.value(statistic, theta), dtype=torch.float64), dense.loss(theta))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loss.tangent, "outputs", None)  # the network does not run for them again
            close(loss.product(v)[0], expected)
        for other in (loader, batches(X[:20].flip(0), LABELS[:20].flip(0), 5), batches(X[:20], LABELS[:20], 7)):
            loss.loader = other
            product, curvature = loss.product(v)
            close(product, expected)
            assert curvature == pytest.approx(torch.dot(v, expected).item(), rel=1e-10)


def test_a_softmax_curvature_of_large_directions_in_single_precision() -> None:
    """Whose differences are far below the rounding of its terms."""
    model = perceptron(3).float()
    loader = batches(X.float(), LABELS)
    la = KronLaplace(model).fit(loader)
    with tqdm(disable=True) as bar:
        loss = linear_mode._Loss(la, loader, "full", bar, 500)
    h, along = torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([[1e5, 1e5, 1e5]]) + torch.tensor([[0.0, 0.5, 1.0]])
    p = h.double().softmax(-1)
    expected = p * (along.double() - (p * along.double()).sum())
    found = loss._curved(h, torch.tensor([1]), along)
    torch.testing.assert_close(found.double(), expected, rtol=1e-9, atol=1e-10)
    assert (found * along.double()).sum() > 0


@pytest.mark.parametrize(
    ("factor", "error", "words"),
    [(-1e3, ArithmeticError, r"must not be negative, got a curvature of -\d"), (math.nan, FloatingPointError, "not finite")],
)  # fmt: skip
def test_a_curvature_that_is_negative_or_not_finite_is_refused(
    factor: float, error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    la, loader = of_classes(FullLaplace)
    curved = linear_mode._Loss._curved
    monkeypatch.setattr(linear_mode._Loss, "_curved", lambda self, h, y, along: factor * curved(self, h, y, along))
    with pytest.raises(error, match=words):
        la.fit_linear_mode(loader)


def test_a_curvature_that_rounding_hides_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum below zero by less than the rounding errors of its terms."""

    def hidden(self: Any, h: Tensor, y: Tensor, along: Tensor) -> Tensor:
        signs = torch.ones(along.numel(), dtype=torch.float64)
        signs[::2] = -1 - 4 * torch.finfo(torch.float64).eps
        return signs.view_as(along) / along

    monkeypatch.setattr(linear_mode._Loss, "_curved", hidden)
    loader = batches(X[:20], LABELS[:20])
    la = fitted(FullLaplace, (perceptron(3), "classification", loader), prior_precision=1e-30)
    with tqdm(disable=True) as bar, torch.no_grad():
        loss = linear_mode._Loss(la, loader, "full", bar, 500)
        loss.gradient(loss.point)
        assert loss.product(drawn(la.n_params))[1] == 0.0


# kinds of posteriors and outputs ------------------------------------------------------------------------------------


def test_a_subnetworks_other_elements_stay() -> None:
    of_reals = perceptron(), "regression", batches(X, REAL)
    for problem in (of_reals, (perceptron(3), "classification", batches(X, LABELS))):
        chosen = torch.tensor([0, 3, 5, 13, 17, 20])
        la = fitted(SubnetLaplace, problem, subnetwork_indices=chosen)
        found, dense = la.fit_linear_mode(problem[2], 1e-10), Dense(la, problem[2])
        rest = torch.ones(la.n_params, dtype=torch.bool).index_fill(0, chosen, False)
        assert torch.equal(found[rest], dense.point[rest])
        close(found, dense.minimum(dense.point, chosen), 1e-7)
        off = (dense.prior * (found - dense.mean) ** 2)[chosen].sum() / 2
        was = (dense.prior * (dense.point - dense.mean) ** 2)[chosen].sum() / 2
        falls = dense.log_likelihood(found) - off - dense.log_likelihood(dense.point) + was
        close(la.log_marginal_likelihood(at="linear") - la.log_marginal_likelihood(), falls)
        close(la.fit_linear_mode(problem[2], 1e-10, start=drawn(la.n_params)), found, 1e-7)
    with pytest.raises(ValueError, match="dual"):
        fitted(SubnetLaplace, of_reals, subnetwork_indices=chosen).fit_linear_mode(of_reals[2], solver="dual")


@pytest.mark.parametrize("solver", ["cg", "dual"])
@pytest.mark.parametrize("subset", ["last_layer", ["0.weight", "2.bias"], "all"])
def test_some_parameters_and_positions(solver: str, subset: Any) -> None:
    loader = batches(drawn(9, 4, 3), drawn(9, 4, 2, seed=1), 4)
    la = fitted(FullLaplace, (perceptron(), "regression", loader), subset_of_weights=subset)
    found, dense = la.fit_linear_mode(loader, 1e-10, solver), Dense(la, loader)
    assert found.shape == (la.n_params,) and (la.n_params < 26) == (subset != "all")
    close(found, dense.minimum(dense.point), 1e-7)
    close(la.log_marginal_likelihood(at="linear"), dense.exact_evidence())


def test_frozen_parameters_are_constants() -> None:
    """A parameter with two axes that no rule knows, beside a layer."""
    parts = {"table": nn.Parameter(torch.ones(3, 3)), "layer": nn.Linear(3, 3)}
    model, loader = randomised(Function(lambda m, x: m.layer(x @ m.table), **parts)), batches(X, LABELS)
    la = fitted(KronLaplace, (model, "classification", loader), unknown="freeze")
    found, dense = la.fit_linear_mode(loader, 1e-10), Dense(la, loader)
    assert la.parameter_names == ["layer.weight", "layer.bias"]
    close(found, dense.minimum(dense.point), 1e-7)


def test_positions_and_ignored_labels() -> None:
    x, y = drawn(9, 4, 3), torch.randint(3, (9, 4), generator=torch.Generator().manual_seed(1))
    y[0, 1] = y[3] = -100
    loader = batches(x, y, 4)
    la = fitted(KronLaplace, (perceptron(3), "classification", loader))
    found, dense = la.fit_linear_mode(loader, 1e-10), Dense(la, loader)
    close(found, dense.minimum(dense.point), 1e-7)
    falls = dense.loss(dense.point) - dense.loss(found)
    close(la.log_marginal_likelihood(at="linear") - la.log_marginal_likelihood(), falls)


@pytest.mark.parametrize("kind", [FullLaplace, KronLaplace, DiagLaplace])
def test_the_hessian_at_the_linear_outputs(kind: Any) -> None:
    la, loader = of_classes(kind)
    before = la.posterior_precision.to_matrix()
    found = la.fit_linear_mode(loader, 1e-10, hessian_at="linear")
    dense = Dense(la, loader)
    p = dense.outputs(found).softmax(-1)
    curved = p.diag_embed() - p[:, :, None] * p[:, None, :]
    ggn = torch.einsum("ncp,ncd,ndq->pq", dense.jacobian, curved, dense.jacobian)
    after = la.posterior_precision.to_matrix()
    assert (after - before).abs().max() > 0.01
    if kind is FullLaplace:
        close(after, ggn + dense.prior.diag())
    elif kind is DiagLaplace:
        close(after.diagonal(), ggn.diagonal() + dense.prior)
    else:  # biases have their exact block
        close(after[-3:, -3:], ggn[-3:, -3:] + dense.prior[-3:].diag())
    assert la.linear_mode is not None and la.n_data == 25
    close(la.log_likelihood, dense.log_likelihood(dense.point))  # still at the network
    la.optimize_prior_precision(at="linear", n_steps=30, hessian_at="linear")  # the loader is still known


def test_modes_that_are_not_reached_do_not_lower_the_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that go on from a place where no mode was found, which is left again."""
    la, loader = of_classes(KronLaplace, prior_precision=1e-3)
    find, seen = la._find_linear_mode, []

    def few(*how: Any) -> None:
        find(*how, max_passes=3)
        seen.append(la.log_marginal_likelihood(at="linear").item())

    monkeypatch.setattr(la, "_find_linear_mode", few)
    for n_steps in range(2, 16, 3):
        seen.clear()
        la.linear_fit = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            la.optimize_prior_precision(at="linear", init_prior_prec=1e-3, train_loader=loader, n_steps=n_steps)
        assert la.log_marginal_likelihood(at="linear").item() >= max(seen) - 1e-9
        for k in range(1, len(seen) - 1):
            best = max(seen[:k])
            assert max(seen[k : k + 2]) >= best - 1e-9  # a leap that failed, and the round in its place


def test_a_last_mode_that_is_not_reached_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    la, loader = of_classes(FullLaplace)
    la.optimize_prior_precision(at="linear", train_loader=loader)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la.optimize_prior_precision(at="linear", train_loader=loader)
    find = la._find_linear_mode
    monkeypatch.setattr(la, "_find_linear_mode", lambda *how: find(*how, max_passes=1))
    with pytest.warns(UserWarning, match="the residual of the last linear mode is"):
        la.optimize_prior_precision(at="linear", init_prior_prec=1.0, train_loader=loader, n_steps=2)


# evidence ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [1e-3, 0.7, 50.0, torch.tensor([0.1, 1.0, 10.0, 100.0])])
@pytest.mark.parametrize("how", [{}, {"prior_mean": 0.4, "sigma_noise": 1.3}])
def test_the_evidence_at_the_mode_is_a_regressions_exact_one(precision: Any, how: dict[str, Any]) -> None:
    la, loader = of_regression(FullLaplace, prior_precision=precision, **how)
    at_network = la.log_marginal_likelihood()
    found, dense = la.fit_linear_mode(loader, 1e-11), Dense(la, loader)
    close(la.log_marginal_likelihood(at="linear"), dense.exact_evidence())
    off = dense.point - found
    gap = 0.5 * off @ la.posterior_precision.to_matrix() @ off
    close(la.log_marginal_likelihood(at="linear") - at_network, gap)
    assert torch.equal(la.log_marginal_likelihood(), at_network)


def test_the_mode_is_held_where_precisions_move() -> None:
    la, loader = of_regression()
    found, dense = la.fit_linear_mode(loader, 1e-11), Dense(la, loader)
    square = (found**2).split([12, 4, 8, 2])
    precision = torch.tensor([1.0, 2.0, 3.0, 4.0]).double()
    expected = la.log_marginal_likelihood(precision) - dense.log_likelihood(dense.point) + dense.log_likelihood(found)
    norms = torch.stack([part.sum() for part in square])
    expected = expected + 0.5 * (precision * (la.square_norms - norms)).sum()
    close(la.log_marginal_likelihood(precision, at="linear"), expected)
    logs = precision.log().requires_grad_()
    (slope,) = torch.autograd.grad(la.log_marginal_likelihood(logs.exp(), at="linear"), logs)
    la.prior_precision = precision
    close(slope, 0.5 * (present_terms(la).effective - precision * norms))
    assert la.linear_mode is not None
    la.prior_mean = 0.5
    assert la.linear_mode is None


@pytest.mark.parametrize("structure", ["layerwise", "scalar", "normalised"])
def test_the_joint_fixed_point_is_stationary_in_the_exact_evidence(structure: str) -> None:
    parts = [nn.Linear(3, 5, bias=False), nn.LayerNorm(5, eps=0, elementwise_affine=False), nn.Tanh(), nn.Linear(5, 2)]
    loader = batches(X, REAL)
    la = FullLaplace(randomised(nn.Sequential(*parts)), "regression").fit(loader)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        returned = la.optimize_prior_precision(at="linear", tol=1e-9, n_steps=2000, prior_structure=structure)
    group = torch.tensor({"layerwise": [0, 1, 2], "scalar": [0, 0, 0], "normalised": [0, 1, 1]}[structure])
    assert torch.equal(returned, la.prior_precision) and len(returned.unique()) == len(group.unique())
    assert la.sigma_noise != 1
    dense = Dense(la, loader)
    logs = torch.stack([returned[group == g][0] for g in group.unique()]).log().requires_grad_()
    sigma = la.sigma_noise.log().requires_grad_()
    evidence = dense.exact_evidence(logs[group], sigma)
    slopes = torch.autograd.grad(evidence, (logs, sigma))
    assert max(slope.abs().max() for slope in slopes) < 1e-6
    close(la.log_marginal_likelihood(at="linear"), evidence.detach())
    assert dense.gradient(la.linear_mode).norm() < 1e-6


@pytest.mark.parametrize(("make", "kind"), [(of_regression, DiagLaplace), (of_classes, KronLaplace)])
def test_the_joint_fixed_point_is_stationary_at_the_mode(make: Any, kind: Any) -> None:
    la, loader = make(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la.optimize_prior_precision(at="linear", tol=1e-9, n_steps=2000)
    logs, sigma = la.prior_precision.log().requires_grad_(), la.sigma_noise.log().requires_grad_()
    found = torch.autograd.grad(
        evidence_at(la, logs, sigma if make is of_regression else None, "linear"), (logs, sigma), materialize_grads=True
    )
    moving = present_terms(la).effective > 1e-3
    assert moving.sum() >= (2 if make is of_regression else 1) and found[0][moving].abs().max() < 1e-6
    assert found[1].abs() < 1e-6
    assert Dense(la, loader).gradient(la.linear_mode).norm() < 1e-6


def normed(kind: type[nn.Module]) -> nn.Module:
    flags = {"elementwise_affine": False} if kind is nn.LayerNorm else {"affine": False}
    linear = functools.partial(nn.Linear, bias=kind is nn.LayerNorm)
    parts = [linear(3, 6), kind(6, eps=0, **flags), nn.Tanh()]
    parts += [linear(6, 6), kind(6, eps=0, **flags), nn.Tanh(), nn.Linear(6, 2)]
    return randomised(nn.Sequential(*parts))


@torch.no_grad()
def rescaled(model: nn.Module, layers: list[str], factors: tuple[float, ...]) -> nn.Module:
    """The same function."""
    model = copy.deepcopy(model)
    for name, k in zip(layers, factors, strict=True):
        for p in model.get_submodule(name).parameters():
            p.mul_(k)
        norm = model[int(name) + 1]
        if isinstance(norm, nn.BatchNorm1d):
            norm.running_mean.mul_(k)
            norm.running_var.mul_(k**2)
    return model


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.BatchNorm1d])
def test_scale_does_not_matter_with_groups_of_normalised_layers(kind: type[nn.Module]) -> None:
    model, layers = normed(kind), ["0", "3"]
    factors, loader, inputs = (3.0, 3.0**1.5), batches(X, REAL), drawn(6, 3, seed=9)
    other = rescaled(model, layers, factors)
    torch.testing.assert_close(other(inputs), model(inputs), rtol=1e-12, atol=1e-12)

    def learned(model: nn.Module, structure: str) -> tuple[Any, Tensor, Tensor]:
        la = FullLaplace(model, "regression").fit(loader)
        la.optimize_prior_precision(at="linear", tol=1e-11, n_steps=2000, prior_structure=structure)
        return la, la.functional_variance(inputs), la.log_marginal_likelihood(at="linear")

    (one, variance, evidence), (two, variance_2, evidence_2) = (learned(m, "normalised") for m in (model, other))
    for name, one_d, two_d in zip(one.parameter_names, one.prior_precision, two.prior_precision, strict=True):
        k = dict(zip(layers, factors, strict=True)).get(name.split(".")[0], 1.0)
        assert abs(two_d * k**2 / one_d - 1) < 1e-8 or one_d > 1e9
    close(variance_2, variance, 1e-8)
    close(evidence_2, evidence, 1e-8)
    (_, variance, _), (_, variance_2, _) = (learned(m, "scalar") for m in (model, other))
    ratio = variance_2.diagonal(dim1=1, dim2=2) / variance.diagonal(dim1=1, dim2=2)
    assert (ratio - 1).abs().max() > 0.01


# what is refused, said and kept ---------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused() -> None:
    la, loader = of_classes()
    for wrong, match in (
        ({"tol": 0.0}, "tol"),
        ({"tol": math.nan}, "tol: expected positive finite values, got nan"),
        ({"max_passes": 0}, "max_passes"),
        ({"solver": "sgd"}, "solver"),
        ({"solver": "dual"}, "newton_cg"),
        ({"form": "half"}, "form"),
        ({"hessian_at": "there"}, "hessian_at"),
        ({"start": drawn(3)}, "start: expected all parameters"),
        ({"start": drawn(2, la.n_params)}, "one vector"),
    ):
        with pytest.raises(ValueError, match=match):
            la.fit_linear_mode(loader, **wrong)
    for other in (loader[:-1], [*loader, loader[0]], iter(())):
        with pytest.raises((ValueError, TypeError), match=r"25 data points|re-iterable"):
            la.fit_linear_mode(other)
    assert la.linear_mode is None and la.linear_fit is None
    with pytest.raises(ValueError, match="gridsearch"):
        la.optimize_prior_precision(at="linear", method="gridsearch", val_loader=loader, prior_structure="scalar")
    with pytest.raises(ValueError, match="at"):
        la.log_marginal_likelihood(at="there")
    with pytest.raises(ValueError, match="at"):
        la.optimize_prior_precision(at="there")
    with pytest.raises(ValueError, match="tol"):
        la.optimize_prior_precision(at="linear", tol=0.0)


def test_a_mode_belongs_to_its_fit() -> None:
    la, loader = of_classes()
    with pytest.raises(RuntimeError, match="fit_linear_mode"):
        la.log_marginal_likelihood(at="linear")
    with pytest.raises(RuntimeError, match="call fit"):
        KronLaplace(la.model).fit_linear_mode(loader)
    la.fit_linear_mode(loader)
    la.fit(loader)
    assert la.linear_mode is None
    la.fit_linear_mode(loader)
    la.fit(loader, override=False)
    assert la.linear_mode is None and la.n_data == 50
    la.optimize_prior_precision(at="linear")  # passes over both
    close(la.fit_linear_mode([*loader, *loader], 1e-9), Dense(la, [*loader, *loader]).minimum(la.linear_mode), 1e-6)
    with torch.no_grad():
        la.model[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed since the fit"):
        la.fit_linear_mode(loader)
    with pytest.raises(RuntimeError, match="changed since the fit"):
        la.optimize_prior_precision(at="linear")


def test_single_precision_says_that_it_stands_still() -> None:
    model, loader = perceptron(3).float(), [(x.float(), y) for x, y in batches(X, LABELS)]
    la = KronLaplace(model).fit(loader)
    with pytest.warns(UserWarning, match=r"model\.double\(\)") as said:
        found = la.fit_linear_mode(loader, 1e-12)
    assert said[0].filename == __file__ and found.dtype == torch.float32
    exact = KronLaplace(perceptron(3)).fit(batches(X, LABELS))
    close(found.double(), exact.fit_linear_mode(batches(X, LABELS), 1e-10), 1e-3)


@pytest.mark.parametrize("passes", [1, 2, 3, 5])
def test_no_more_passes_than_allowed(passes: int) -> None:
    la, loader = of_classes()
    with pytest.warns(UserWarning, match="max_passes") as said:
        found = la.fit_linear_mode(loader, 1e-12, max_passes=passes)
    assert said[0].filename == __file__
    assert torch.equal(found, la.linear_mode) and la.linear_fit.passes <= passes
    dense = Dense(la, loader)
    assert (dense.loss(found) < dense.loss(dense.point)) == (passes > 2)
    la.fit_linear_mode(loader, 1e-9)
    close(la.linear_mode, dense.minimum(dense.point), 1e-6)


class Changing:
    """Other inputs from the n-th pass on."""

    def __init__(self, loader: Batches, since: int, change: Callable[[Tensor], Tensor]) -> None:
        self.loader, self.since, self.change, self.passes = loader, since, change, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.passes += 1
        return iter([(self.change(x), y) if self.passes >= self.since else (x, y) for x, y in self.loader])


@pytest.mark.parametrize(
    ("change", "since"),
    [
        *itertools.product((lambda x: 1.001 * x, lambda x: x + 1e-3 * drawn(*x.shape, seed=1).to(x), lambda x: x.flip(0)), (1, 3)),
        (lambda x: x + 0.3 * drawn(*x.shape, seed=1).to(x), 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_data_than_the_fits_are_refused(dtype: torch.dtype, change: Any, since: int) -> None:
    """Scaled, with noise, of other pairs; at the end of the first pass that has them."""
    model = perceptron(3).to(dtype)
    loader = [(x.to(dtype), y) for x, y in batches(X, LABELS)]
    la, changing = KronLaplace(model).fit(loader), Changing(loader, since, change)
    with pytest.raises(ValueError, match="data must be those of the fit in every pass") as said:
        la.fit_linear_mode(changing, tol=1e-5)
    assert changing.passes == since and la.linear_mode is None
    fitted = -functional.cross_entropy(model(X.to(dtype)).double(), LABELS, reduction="sum").item()
    assert f"where the fit has {fitted:.4g}"[:-1] in str(said.value)
    with pytest.raises(ValueError, match="data must be those of the fit"):
        la.optimize_prior_precision(at="linear", train_loader=Changing(loader, since, change))


def test_what_is_not_finite_is_told_whose_it_is() -> None:
    model = nn.Sequential(Function(lambda m, x: x / 0 * 0 if m.broken else x, broken=False), *perceptron(3))
    loader = batches(X, LABELS)
    la = KronLaplace(model).fit(loader)
    with pytest.raises(FloatingPointError, match="the loader's inputs are not finite in pass 1"):
        la.fit_linear_mode(Changing(loader, 1, lambda x: x.where(x < x.max(), math.nan)))
    model[0].broken = True
    with pytest.raises(FloatingPointError, match="the network's outputs are, at inputs that are finite, not finite"):
        la.fit_linear_mode(loader)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_data_of_the_fit_are_known_whatever_their_rounding(scale: float) -> None:
    """Of networks that fit their data to rounding, in float32: inputs are off by a rounding error, as sums in another order are."""
    exact, sure, x = perceptron(2).float(), perceptron(3).float(), X.float()
    nudged = torch.nextafter(x, torch.full_like(x, math.inf))
    with torch.no_grad():
        exact[-1].weight.mul_(scale)
        exact[-1].bias.mul_(scale)
        sure[-1].weight.mul_(50)
    for model, y, how in (
        (exact, exact(x).detach(), {"likelihood": "regression", "sigma_noise": scale}),
        (sure, sure(x).argmax(1), {}),
    ):
        assert not torch.equal(model(nudged), model(x))
        la = KronLaplace(model, **how).fit(batches(x, y))
        for size in (1, 7, 25):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # five passes do not find the mode
                la.fit_linear_mode(batches(nudged, y, size), max_passes=5, tol=0.5)


class Breaking:
    """Raises in its n-th pass."""

    def __init__(self, loader: Batches, at: int) -> None:
        self.loader, self.at, self.passes = loader, at, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.passes += 1
        if self.passes == self.at:
            raise KeyboardInterrupt
        yield from self.loader


@pytest.mark.parametrize("before", [False, True])
def test_an_interrupted_solution_goes_on(tmp_path: Path, before: bool) -> None:
    la, loader = of_classes()

    def begin() -> Any:
        """At the mode of another precision, or without one."""
        la.linear_fit, la.prior_precision = None, 30.0
        la.fit_linear_mode(loader, 1e-10)
        la.prior_precision = 0.01
        if not before:
            la.linear_fit = None
        return la.linear_fit

    begin()
    expected = la.fit_linear_mode(loader, 1e-10).clone()
    whole = la.linear_fit.passes
    held = begin()
    path = tmp_path / "mode.pt"
    with pytest.raises(KeyboardInterrupt):
        la.fit_linear_mode(Breaking(loader, whole - 2), 1e-10, checkpoint=path)
    assert la.linear_fit is held and path.exists()
    close(la.fit_linear_mode(loader, 1e-10, checkpoint=path), expected, 1e-7)
    assert la.linear_fit.passes < whole / 2 and not path.exists()


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    la, loader = of_classes()
    path = tmp_path / "mode.pt"

    def interrupted(la: Any) -> None:
        with pytest.raises(KeyboardInterrupt):
            la.fit_linear_mode(Breaking(loader, 4), 1e-10, checkpoint=path)

    other = KronLaplace(randomised(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), 0.9)).fit(loader)
    interrupted(other)
    with pytest.raises(ValueError, match="another network, form or fit"):
        la.fit_linear_mode(loader, checkpoint=path)
    path.unlink()
    interrupted(la)
    with pytest.raises(ValueError, match="another network, form or fit"):
        la.fit_linear_mode(loader, form="simple", checkpoint=path)
    whole, state = path.read_bytes(), torch.load(path)
    wrong = [whole[: len(whole) // 2], b"", b"nothing"]
    torch.save({**state, "theta": -state["theta"]}, path)
    wrong.append(path.read_bytes())
    for content in wrong:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"cannot be read|another network"):
            la.fit_linear_mode(loader, checkpoint=path)
    path.write_bytes(whole)
    left = tmp_path / ".mode.1-0.tmp.pt"  # by a process that was killed
    left.write_bytes(whole)
    with claim(tmp_path / ".mode.pt.lock", "it", patience=0.0), monkeypatch.context() as patched:
        patched.setattr(claim.__wrapped__, "__defaults__", (0.0,))
        with pytest.raises(RuntimeError, match=r"fit_linear_mode: checkpoint .*mode\.pt is in use by process \d+"):
            la.fit_linear_mode(loader, checkpoint=path)
    la.fit_linear_mode(loader, checkpoint=path)
    assert not list(tmp_path.iterdir())
    os.mkfifo(path)
    with pytest.raises(ValueError, match=r"cannot be read .it is a pipe or device"):
        la.fit_linear_mode(loader, checkpoint=path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        la.fit_linear_mode(loader, checkpoint=tmp_path / "none" / "mode.pt")


def test_states_and_copies_have_the_mode(tmp_path: Path) -> None:
    la, loader = of_classes()
    la.fit_linear_mode(loader, form="simple")
    torch.save(la.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    loaded = KronLaplace(la.model)
    loaded.load_state_dict(state)
    assert torch.equal(state["linear_mode"]["theta"], la.linear_fit.theta)
    for other in (loaded, copy.copy(la), copy.deepcopy(la)):
        assert torch.equal(other.linear_mode, la.linear_mode) and other.linear_fit.form == "simple"
        close(other.log_marginal_likelihood(at="linear"), la.log_marginal_likelihood(at="linear"), 1e-12)
        with pytest.raises(ValueError, match="pass train_loader"):
            other.optimize_prior_precision(at="linear")
        other.optimize_prior_precision(at="linear", train_loader=loader)
    before = loaded.linear_mode
    with pytest.raises(ValueError, match="load_state_dict: checksum"):
        loaded.load_state_dict({**state, "linear_mode": state["linear_mode"] | {"theta": drawn(2)}})
    assert torch.equal(loaded.linear_mode, before)
    state["linear_mode"]["theta"].zero_()
    assert la.linear_mode.abs().max() > 0


def test_turns_that_do_not_end_say_so_and_those_that_break_change_nothing() -> None:
    la, loader = of_classes()
    with pytest.warns(UserWarning, match=r"n_steps=1; take more\.$") as said:
        la.optimize_prior_precision(at="linear", n_steps=1)
    assert said[0].filename == __file__
    held, precision, state = la.linear_fit, la.prior_precision.clone(), la.state_dict()
    assert Dense(la, loader).gradient(la.linear_mode).norm() < 1e-2  # the mode at the precisions that are returned
    for at in (1, 4, 9):
        with pytest.raises(KeyboardInterrupt):
            la.optimize_prior_precision(at="linear", init_prior_prec=20.0, tol=1e-8, train_loader=Breaking(loader, at))
        assert la.linear_fit is held and torch.equal(la.prior_precision, precision)
        close(la.log_marginal_likelihood(at="linear"), la.log_marginal_likelihood(precision, at="linear"), 1e-13)
    assert torch.equal(la.state_dict()["square_norms"], state["square_norms"])


def test_noise_below_the_precisions_bounds_is_left_alone() -> None:
    la, _ = of_regression(sigma_noise=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Rounding errors are larger than the tolerance with so little noise.
        warnings.filterwarnings("ignore", message=".*the residual of the last linear mode")
        la.optimize_prior_precision(at="linear", tune_sigma=False, n_steps=300, tol=1e-2)
    assert la.sigma_noise.item() == 1e-6


def test_nothing_else_changes() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 3))
    model, loader = randomised(model), batches(X, LABELS)
    model[0].bias.requires_grad_(False)
    la = KronLaplace(model).fit(loader)
    model.train()
    model[3].eval()
    before, precision = copy.deepcopy(model.state_dict()), la.prior_precision.clone()
    needs = [p.requires_grad for p in model.parameters()]
    threads, default = torch.get_num_threads(), torch.get_default_dtype()
    random = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = la.fit_linear_mode(loader, max_passes=30)
        with torch.no_grad():
            la.linear_fit = None
            two = la.fit_linear_mode(loader, max_passes=30)
            assert not torch.is_grad_enabled()
    assert torch.equal(one, two) and torch.is_grad_enabled()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [m.training for m in model] == [True, True, True, False, True] and model.training
    assert [p.requires_grad for p in model.parameters()] == needs and all(p.grad is None for p in model.parameters())
    assert torch.get_num_threads() == threads and torch.get_default_dtype() == default
    assert torch.equal(torch.get_rng_state(), random) and torch.equal(la.prior_precision, precision)


def test_single_precision_finds_the_mode_of_probabilities_that_round_to_one():
    torch.manual_seed(1)
    model = nn.Linear(2, 3).double()
    with torch.no_grad():
        model.weight.mul_(10)
    x = torch.randn(60, 2, dtype=torch.float64)
    y = model(x).argmax(1)  # which planes through zero part
    found = []
    for dtype in (torch.float64, torch.float32):
        loader = [(x.to(dtype), y)]
        la = KronLaplace(copy.deepcopy(model).to(dtype), prior_precision=1e-8).fit(loader)
        found.append(la.fit_linear_mode(loader, 0.02, max_passes=300).double())
        assert not la.linear_fit.why
    probabilities = (x.float() @ found[1].float()[:6].view(3, 2).T + found[1].float()[6:]).softmax(1)
    assert (probabilities.amax(1) == 1).double().mean() > 0.5
    torch.testing.assert_close(found[1], found[0], rtol=0.05, atol=0)


def test_single_precision_rests_where_it_sees_no_fall(monkeypatch):
    """Losses that rise with every look, as rounding may have it."""
    looks = itertools.count()
    monkeypatch.setattr(linear_mode._Loss, "value", lambda *_: 100.0 + next(looks))
    loader = batches(X, LABELS)
    with pytest.raises(ArithmeticError, match="do not belong together"):
        KronLaplace(perceptron(3)).fit(loader).fit_linear_mode(loader)
    single = [(x.float(), y) for x, y in loader]
    la = KronLaplace(perceptron(3).float()).fit(single)
    with pytest.warns(UserWarning, match="rounding keeps it there"):
        la.fit_linear_mode(single)
    assert torch.equal(la.linear_mode, la.mean.double()) and la.linear_fit.passes < 100


def test_no_more_passes_than_allowed_where_steps_are_too_long():
    torch.manual_seed(0)
    model = nn.Linear(2, 3).double()
    with torch.no_grad():
        model.weight.mul_(40)
    x = torch.randn(40, 2, dtype=torch.float64)
    y = torch.randint(3, (40,))
    la = KronLaplace(model, prior_precision=0.1).fit([(x, y)])
    dense, given_up, before = Dense(la, [(x, y)]), 0, la.mean
    for passes in range(3, 24):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = la.fit_linear_mode([(x, y)], 1e-9, start=la.mean, max_passes=passes)
        assert la.linear_fit.passes <= passes
        # The place's own, also where the last step was given up.
        assert abs(la.linear_fit.loss - dense.loss(found)) < 1e-9 * la.linear_fit.loss
        given_up += torch.equal(found, before)
        before = found
    assert given_up


@pytest.mark.parametrize(("make", "solver"), [(of_regression, "dual"), (of_classes, "newton_cg")])
def test_memory_that_a_loader_uses_again_changes_no_number(make: Any, solver: str) -> None:
    la, loader = make()
    expected = la.fit_linear_mode(loader, solver=solver)
    other, _ = make()
    assert torch.equal(other.fit_linear_mode(Reusing(loader), solver=solver), expected)
