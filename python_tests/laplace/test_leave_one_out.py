"""Leave-one-out predictions, against refits without the data point and dense algebra, and what is made of them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ella_cuda.augment import AffineAugment, AveragedFunction
from ella_cuda.data import TensorLoader
from ella_cuda.laplace import DiagLaplace, FullLaplace, KronLaplace, SubnetLaplace
from python_tests.laplace.checks import drawn, randomised, sequences

N = 24
GRID = torch.linspace(-8, 8, 4001, dtype=torch.float64)  # of a standard normal number
Batches = list[tuple[Tensor, Tensor]]


def linear() -> nn.Module:
    """Three features, two outputs."""
    return randomised(nn.Linear(3, 2, bias=False))


def network(outputs: int = 3) -> nn.Module:
    return randomised(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)), 0.6)


def batches(y: Tensor) -> Batches:
    x = drawn(len(y), 3, seed=1)
    return [(x[:10], y[:10]), (x[10:], y[10:])]


def labels(classes: int = 3) -> Tensor:
    return torch.randint(classes, (N,), generator=torch.Generator().manual_seed(2))


def mean_over_grid(values: Tensor) -> Tensor:
    """The mean of values ``(N, 4001)`` at a normal number."""
    return torch.trapezoid(values * torch.exp(-(GRID**2) / 2) / math.sqrt(2 * math.pi), GRID, dim=1)


def ridge(x: Tensor, y: Tensor, noise: float, prior: float, prior_mean: float) -> tuple[Tensor, Tensor]:
    """Mean ``(3, 2)`` and covariance ``(3, 3)`` of a linear model's weights, whose covariance is the same for each output."""
    covariance = torch.linalg.inv(x.T @ x / noise + prior * torch.eye(3, dtype=x.dtype))
    return covariance @ (x.T @ y / noise + prior * prior_mean), covariance


@pytest.mark.parametrize("kind", [FullLaplace, KronLaplace])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_linear_regression_is_refitted_exactly(kind: Any, temperature: float) -> None:
    loader = batches(drawn(N, 2, seed=2))
    x, y = (torch.cat(parts) for parts in zip(*loader, strict=True))
    sigma, prior, prior_mean = 0.7, 0.4, 0.3
    options = {"prior_precision": prior, "sigma_noise": sigma, "prior_mean": prior_mean, "temperature": temperature}
    la = kind(linear(), "regression", **options).fit(loader)
    la.fit_linear_mode(loader, tol=1e-12)
    found, outputs = la.leave_one_out(mean="linear"), la(x, mean="linear")[0]
    for i in range(N):
        others = [j for j in range(N) if j != i]
        mean, covariance = ridge(x[others], y[others], sigma**2 * temperature, prior, prior_mean)
        variance = x[i] @ covariance @ x[i] + sigma**2
        density = torch.distributions.Normal(x[i] @ mean, variance.sqrt()).log_prob(y[i]).sum()
        torch.testing.assert_close(found.log_density[i], density, rtol=0, atol=1e-8)
        torch.testing.assert_close(outputs[i] + found.influence[i], x[i] @ mean, rtol=0, atol=1e-8)
    assert found.n_undefined == 0 and found.total.item() == pytest.approx(found.log_density.sum().item())
    assert found.total_leverage.item() == pytest.approx(sum(la.effective_parameters().values()), rel=1e-9)


def softmax_mode(phi: Tensor, y: Tensor, prior: float) -> tuple[Tensor, Tensor]:
    """The weights ``(3, D)`` of a softmax-linear model at their mode, by Newton's method, and the inverse Hessian there."""
    weights, eye = phi.new_zeros(3, phi.shape[1]), torch.eye(3 * phi.shape[1], dtype=phi.dtype)
    for _ in range(30):
        p = torch.softmax(phi @ weights.T, 1)
        gradient = (p - F.one_hot(y, 3)).T @ phi + prior * weights
        curvature = torch.einsum("nkl,ni,nj->kilj", torch.diag_embed(p) - p[:, :, None] * p[:, None], phi, phi)
        covariance = torch.linalg.inv(curvature.reshape(eye.shape) + prior * eye)
        weights = weights - (covariance @ gradient.flatten()).view_as(weights)
        if gradient.norm() < 1e-10:
            break
    return weights, covariance


def softmax_refits(phi: Tensor, y: Tensor, prior: float, which: Tensor) -> Tensor:
    """The log densities of some labels under the probit predictive of refits without each."""
    found = []
    for i in which.tolist():
        others = [j for j in range(len(y)) if j != i]
        weights, covariance = softmax_mode(phi[others], y[others], prior)
        jacobian = torch.kron(torch.eye(3, dtype=phi.dtype), phi[i])
        variance = (jacobian @ covariance * jacobian).sum(1)
        found.append(F.log_softmax(weights @ phi[i] / (1 + math.pi / 8 * variance).sqrt(), 0)[y[i]])
    return torch.stack(found)


def test_softmax_linear_is_near_newtons_refits() -> None:
    x = drawn(800, 3, seed=1)
    y = (x + drawn(800, 3, seed=2)).argmax(1)
    model = nn.Linear(3, 3, bias=False).double()
    model.weight.data = softmax_mode(x, y, 0.5)[0]
    found = FullLaplace(model, prior_precision=0.5).fit([(x, y)]).leave_one_out().log_density
    which = found.argsort()[:40]  # those that a refit moves furthest
    torch.testing.assert_close(found[which], softmax_refits(x, y, 0.5, which), rtol=0, atol=1e-3)
    network = F.log_softmax(model(x), 1).detach()[which, y[which]]
    assert (found[which] - network).abs().max() > 0.02


@pytest.mark.parametrize("kind", [FullLaplace, KronLaplace])
def test_a_last_layer_ranks_data_as_refits_do(kind: Any) -> None:
    x = drawn(60, 3, seed=1)
    y = (x.sin() + 0.7 * drawn(60, 3, seed=2)).argmax(1)
    model = randomised(nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3, bias=False)))
    phi = model[:2](x).detach()
    model[2].weight.data = softmax_mode(phi, y, 0.5)[0]
    la = kind(model, subset_of_weights="last_layer", prior_precision=0.5).fit([(x, y)])
    ranks = [
        values.argsort().argsort().double()
        for values in (la.leave_one_out().log_density, softmax_refits(phi, y, 0.5, torch.arange(60)))
    ]
    assert torch.corrcoef(torch.stack(ranks))[0, 1] >= 0.95


LIKELIHOODS: dict[str, tuple[int, Callable[[], Tensor]]] = {
    "classification": (3, labels),
    "regression": (2, lambda: drawn(N, 2, seed=2)),
    "binary": (2, lambda: (drawn(N, 2, seed=2) > 0).double()),
    "poisson": (2, lambda: drawn(N, 2, seed=2).square().floor()),
    "heteroscedastic": (2, lambda: drawn(N, 1, seed=2)),
}
POSTERIORS = {
    "full": FullLaplace,
    "diagonal": DiagLaplace,
    "Kronecker": KronLaplace,
    "subnetwork": lambda model, *args, **how: SubnetLaplace(
        model, *args, subnetwork_indices=torch.arange(2, 20, 3), **how
    ),
    "last layer": lambda *args, **how: KronLaplace(*args, subset_of_weights="last_layer", **how),
}


class Negative(nn.Module):
    """A negative second output, as a heteroscedastic likelihood needs it."""

    def forward(self, f: Tensor) -> Tensor:
        return torch.cat([f[:, :1], -0.5 * F.softplus(f[:, 1:]) - 0.1], 1)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("posterior", POSTERIORS)
def test_every_posterior_and_likelihood_is_dense_algebra(likelihood: str, posterior: str) -> None:
    """With the Hessian by autograd, and densities as a grid search has them."""
    outputs, targets = LIKELIHOODS[likelihood]
    if likelihood == "heteroscedastic" and posterior == "last layer":
        pytest.skip("its last module has no parameters")
    model = network(outputs) if likelihood != "heteroscedastic" else nn.Sequential(*network(outputs), Negative())
    loader = batches(targets())
    x, y = (torch.cat(parts) for parts in zip(*loader, strict=True))
    options = {"prior_precision": 40.0, "temperature": 1.5} | (
        {"sigma_noise": 1.3} if likelihood == "regression" else {}
    )
    la = POSTERIORS[posterior](model, likelihood, **options).fit(loader)
    found, f, covariance = la.leave_one_out(), model(x).detach(), la.functional_variance(x)
    traces = 0.0
    for i in range(N):

        def loss(f_i: Tensor) -> Tensor:
            weight = 1 / (1.5 * la.sigma_noise**2)
            return -weight * la.likelihood_function.log_prob(f_i[None], y[i : i + 1]).sum()  # noqa: B023

        product = covariance[i] @ torch.func.hessian(loss)(f[i])
        s = torch.linalg.inv(torch.eye(outputs, dtype=f.dtype) - product) @ covariance[i]
        influence = s @ torch.func.grad(loss)(f[i])
        torch.testing.assert_close(found.influence[i], influence, rtol=1e-7, atol=1e-9)
        assert found.leverage[i].item() == pytest.approx(torch.linalg.eigvals(product).real.max().item(), rel=1e-7)
        traces += product.trace()
        mean, variance = (f[i] + influence)[None], s.diagonal()[None]
        if likelihood == "regression":
            noise = la.sigma_noise**2 * torch.eye(2, dtype=f.dtype)
            density = torch.distributions.MultivariateNormal(mean[0], s + noise).log_prob(y[i])
        elif likelihood in ("classification", "binary"):
            scaled = mean / (1 + math.pi / 8 * variance).sqrt()
            density = la.likelihood_function.log_prob(scaled, y[i : i + 1]).sum()
        else:
            continue  # by draws, below
        assert found.log_density[i].item() == pytest.approx(density.item(), rel=1e-7)
    assert found.total_leverage.item() == pytest.approx(float(traces), rel=1e-7)
    assert found.n_undefined == 0 and found.log_density.isfinite().all()
    if posterior == "full":
        assert found.total_leverage.item() == pytest.approx(sum(la.effective_parameters().values()), rel=1e-7)


def test_counts_are_integrated_over() -> None:
    y = drawn(N, 1, seed=2).square().floor()
    la = KronLaplace(model := network(1), "poisson", prior_precision=20.0).fit(batches(y))
    found = la.leave_one_out(n_samples=10_000)
    x = torch.cat([x for x, _ in batches(y)])
    f, s = model(x).detach(), la.functional_variance(x)[:, 0]
    s = s / (1 - s * f.exp())
    rates = (f + s * (f.exp() - y)) + s.sqrt() * GRID
    density = torch.exp(y * rates - rates.exp() - torch.lgamma(y + 1))
    torch.testing.assert_close(found.log_density, mean_over_grid(density).log(), rtol=0, atol=0.05)


def test_positions_are_left_out_together_and_ignored_ones_say_nothing() -> None:
    x, _ = sequences(6, 3)
    y = torch.randint(3, (6, 5), generator=torch.Generator().manual_seed(0))
    y[0, 1:4], y[3] = -100, -100
    model = randomised(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    la = KronLaplace(model, prior_precision=4.0).fit([(x, y)])
    found, f, covariance = la.leave_one_out(link_approx="probit_full"), model(x).detach(), la.functional_variance(x)
    assert found.influence.shape == (6, 5, 3)
    assert found.log_density[3] == 0 and found.leverage[3] == 0 and not found.influence[3].any()
    for i in range(6):
        loss = lambda f_i: F.cross_entropy(f_i.view(5, 3), y[i], reduction="sum", ignore_index=-100)  # noqa: B023, E731
        if i == 3:
            continue
        eye = torch.eye(15, dtype=f.dtype)
        s = torch.linalg.inv(eye - covariance[i] @ torch.func.hessian(loss)(f[i].flatten())) @ covariance[i]
        mean = (f[i].flatten() + s @ torch.func.grad(loss)(f[i].flatten())).view(5, 3)
        blocks = torch.stack([s[3 * t : 3 * t + 3, 3 * t : 3 * t + 3] for t in range(5)])
        p = la.likelihood_function.probabilities("probit_full", mean, blocks)
        density = sum(p[t, y[i, t]].log() for t in range(5) if y[i, t] != -100)
        assert found.log_density[i].item() == pytest.approx(density.item(), rel=1e-7)


def tight(**options: Any) -> DiagLaplace:
    """A diagonal posterior of features that go together, under which leverages are above 1."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 1, generator=generator, dtype=torch.float64) + 0.1 * drawn(N, 6, seed=1)
    y = (x[:, 0] + 0.5 * drawn(N, seed=2) > 0).long()
    return DiagLaplace(randomised(nn.Linear(6, 2, bias=False), 0.1), **options).fit([(x, y)])


def test_a_leverage_of_one_or_more_is_undefined() -> None:
    la = tight(prior_precision=1e-2)
    found, ((x, _),) = la.leave_one_out(), la._loaders[0]
    leverages = torch.stack(
        [
            torch.linalg.eigvals(s @ h).real.max()
            for s, h in zip(la.functional_variance(x), hessians(la, x), strict=True)
        ]
    )
    wrong = leverages >= 1
    assert 0 < wrong.sum() < N and found.n_undefined == int(wrong.sum())
    torch.testing.assert_close(found.leverage, leverages)
    assert torch.equal(found.log_density.isnan(), wrong) and torch.equal(found.influence.isnan().all(1), wrong)
    assert found.total.item() == pytest.approx(found.log_density[~wrong].sum().item())
    assert found.nll.item() == pytest.approx(-found.log_density[~wrong].mean().item())
    assert f"{N} data points, {int(wrong.sum())} undefined" in repr(found)
    ranked = la.influence()
    assert ranked.scale > 1 and ranked.n_undefined == 0
    la.prior_precision = 1e-2 * ranked.scale
    torch.testing.assert_close(ranked.log_density, la.leave_one_out().log_density)
    la.prior_precision = 1e-2 * ranked.scale / 10
    assert la.leave_one_out().n_undefined
    la.prior_precision = 1e-9
    with pytest.raises(ValueError, match=r"influence: under 1e\+06 times the prior precisions \d+ data points"):
        la.influence()


def hessians(la: Any, x: Tensor) -> Tensor:
    p = torch.softmax(la.model(x).detach(), 1)
    return torch.diag_embed(p) - p[:, :, None] * p[:, None]


class Counting:
    """A loader that counts its passes, of a network whose data points are counted."""

    def __init__(self, loader: Batches, model: nn.Module) -> None:
        self.loader, self.passes, self.seen = loader, 0, 0
        self._handle = model.register_forward_pre_hook(self._count)

    def _count(self, module: nn.Module, args: Any) -> None:
        self.seen += len(args[0])

    def __iter__(self) -> Any:
        self.passes += 1
        return iter(self.loader)


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_memory_budget_and_batches_change_nothing(subset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    la = KronLaplace(network(), prior_precision=3.0, subset_of_weights=subset).fit(batches(labels()))
    wide = la.leave_one_out()
    la.memory_budget, passing, sizes = 8 * 9 * (6 + 3), la._moments_under, []
    monkeypatch.setattr(la, "_moments_under", lambda x, *args, **how: sizes.append(len(x)) or passing(x, *args, **how))
    narrow, part = la.leave_one_out(), la.leave_one_out(batches(labels())[1:])
    for name in ("log_density", "leverage", "influence"):
        torch.testing.assert_close(getattr(narrow, name), getattr(wide, name), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(getattr(part, name), getattr(wide, name)[10:], rtol=1e-10, atol=1e-12)
    assert max(sizes) == 1 and len(sizes) == 24 + 14
    la.memory_budget = 8 * 9 * 6
    with pytest.raises(MemoryError, match=r"a data point has 3 outputs.* 504 bytes.*memory_budget=432"):
        la.leave_one_out()


def test_samples_of_outputs_are_near_the_pairwise_link() -> None:
    la = KronLaplace(network(), prior_precision=30.0).fit(batches(labels()))
    draws = [la.leave_one_out(None, "mc", 4000, torch.Generator().manual_seed(0)).log_density for _ in range(2)]
    assert torch.equal(*draws)
    torch.testing.assert_close(draws[0], la.leave_one_out(link_approx="probit_full").log_density, rtol=0, atol=0.1)


def test_wrong_data_are_told() -> None:
    loader = batches(labels())
    la = KronLaplace(network(), prior_precision=3.0).fit(loader)
    with pytest.raises(ValueError, match="the fit, which had 24 data points, and yields more"):
        la.leave_one_out([*loader, loader[0]])
    with pytest.raises(ValueError, match="gave no data"):
        la.leave_one_out([])
    with pytest.raises(ValueError, match="a target for each data point, got 9 for 10"):
        la.leave_one_out([(loader[0][0], loader[0][1][:9])])
    with pytest.warns(UserWarning, match="have another log likelihood.*without random augmentation"):
        la.leave_one_out([(2 * x, y) for x, y in loader])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la.leave_one_out(loader[::-1])
    again = KronLaplace(la.model)
    again.load_state_dict(la.state_dict())
    with pytest.raises(ValueError, match="leave_one_out: loader is None"):
        again.leave_one_out()
    la.model[0].weight.data[0, 0] = math.nan
    with pytest.raises(RuntimeError, match="changed since the fit"):
        la.leave_one_out()


@pytest.mark.filterwarnings("error")
def test_copies_of_independent_draws_are_told() -> None:
    torch.manual_seed(0)
    augment = AffineAugment(2, init=0.5, sampling="independent", dtype=torch.float64)
    network = randomised(nn.Sequential(nn.Flatten(), nn.Linear(16, 3)))
    la = KronLaplace(AveragedFunction(network, augment), prior_precision=30.0)
    loader = [(drawn(N, 1, 4, 4), torch.arange(N) % 3)]
    with pytest.warns(UserWarning, match=r"another log likelihood.* draws other copies .*augment\.held\(\), or with"):
        la.fit(loader).leave_one_out()
    with augment.held():
        la.fit(loader)
    la.leave_one_out()


# prior precisions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["scalar", "layerwise"])
@pytest.mark.parametrize("init", [None, 3.0])
def test_the_best_precision_of_a_grid(structure: str, init: float | None) -> None:
    """Means at the grid's precisions choose its largest, those at the precisions of training another."""
    x = drawn(N, 3, seed=1)
    y, model = (x + drawn(N, 3, seed=2)).argmax(1), network()
    model[2].weight.data = softmax_mode(model[:2](x).detach(), y, 0.02)[0]
    loader = Counting([(x, y)], model)
    la = FullLaplace(model, prior_precision=torch.tensor([1.0, 2.0, 3.0, 4.0])).fit(loader)
    f, now = model(x).detach(), la.prior_precision if init is None else torch.full_like(la.prior_precision, init)
    totals = []
    for exponent in range(-2, 6):
        la.prior_precision = 10.0**exponent * (now if structure == "layerwise" else torch.ones_like(now))
        here = la.leave_one_out(link_approx="probit_full")
        s = la.functional_variance(x)
        s = torch.linalg.solve(torch.eye(3, dtype=s.dtype) - s @ hessians(la, x), s)
        la.prior_precision = now
        influence = la.leave_one_out().influence if init else here.influence
        p = la.likelihood_function.probabilities("probit_full", f + influence, s)
        totals.append(p[torch.arange(N), y].log().sum().item())
        assert init or totals[-1] == pytest.approx(here.total.item())
    best = totals.index(max(totals))
    assert best == (7 if init is None else 0)
    la.prior_precision = torch.tensor([1.0, 2.0, 3.0, 4.0])
    loader.passes, loader.seen = 0, 0
    grid = {"log_prior_prec_min": -2, "log_prior_prec_max": 5, "grid_size": 8, "link_approx": "probit_full"}
    found = la.optimize_prior_precision(method="loo", prior_structure=structure, init_prior_prec=init, **grid)
    wanted = 10.0 ** (best - 2) * (now if structure == "layerwise" else torch.ones_like(now))
    torch.testing.assert_close(found, wanted)
    assert torch.equal(found, la.prior_precision)
    assert loader.passes == 1 and loader.seen <= N + 1  # once for all of the grid, and a data point for the budget


@pytest.mark.parametrize("kind", [FullLaplace, KronLaplace])
@pytest.mark.parametrize("init", [None, 2.0])
def test_the_best_temperature_is_that_of_fits_of_their_own(kind: Any, init: float | None) -> None:
    x = drawn(N, 3, seed=1)
    y, model = (x + drawn(N, 3, seed=2)).argmax(1), network()
    loader, temperatures, totals = Counting([(x, y)], model), (0.1, 0.3, 3.0), {}
    f = model(x).detach()
    start = kind(model, prior_precision=init or 1.0, temperature=1.5).fit([(x, y)])
    assert start.leave_one_out().n_undefined == 0
    for precision in (0.1, 1.0, 10.0):
        for temperature in temperatures:
            la = kind(model, prior_precision=precision, temperature=temperature).fit([(x, y)])
            here, s = la.leave_one_out(), la.functional_variance(x)
            s = torch.linalg.solve(torch.eye(3, dtype=s.dtype) - s @ hessians(la, x) / temperature, s)
            mean = f + (start.leave_one_out() if init else here).influence
            scaled = mean / (1 + math.pi / 8 * s.diagonal(dim1=1, dim2=2)).sqrt()
            if not here.n_undefined:
                totals[precision, temperature] = -F.cross_entropy(scaled, y, reduction="sum").item()
                assert init or totals[precision, temperature] == pytest.approx(here.total.item())
    best = max(totals, key=totals.__getitem__)
    assert len(totals) > 4 and best[1] != temperatures[0]
    grid = {"log_prior_prec_min": -1, "log_prior_prec_max": 1, "grid_size": 3, "prior_structure": "scalar"}
    la = kind(model, prior_precision=5.0, temperature=1.5).fit(loader)
    loader.passes = 0
    found = la.optimize_prior_precision(method="loo", init_prior_prec=init, temperatures=temperatures, **grid)
    assert (float(found[0]), la.temperature, loader.passes) == (pytest.approx(best[0]), best[1], 1)
    for given, how, words in [((), {"method": "loo"}, "is empty"), ((1.0,), {}, "are for method='loo'")]:
        with pytest.raises(ValueError, match=f"temperatures {words}"):
            la.optimize_prior_precision(temperatures=given, **how)


def test_precisions_with_undefined_data_are_not_taken() -> None:
    la = tight()
    grid = {"method": "loo", "prior_structure": "scalar", "log_prior_prec_min": -2, "grid_size": 5}
    found = float(la.optimize_prior_precision(**grid, log_prior_prec_max=6)[0])
    totals, undefined = {}, {}
    for precision in torch.logspace(-2, 6, 5, dtype=torch.float64).tolist():
        la.prior_precision = precision
        looked = la.leave_one_out()
        totals[precision], undefined[precision] = looked.total.item(), looked.n_undefined
    assert totals[min(totals)] > totals[found] or undefined[min(undefined)] > 0
    assert found == max((p for p in totals if not undefined[p]), key=totals.__getitem__)
    with pytest.warns(UserWarning, match=f"under init_prior_prec {undefined[min(undefined)]} data points"):
        found = la.optimize_prior_precision(**grid, log_prior_prec_max=6, init_prior_prec=1e-2)
    la.prior_precision, f = 1e-2, la.model(x := la._loaders[0][0][0]).detach()
    start, values = la.leave_one_out(), {}
    known, y = start.leverage < 1, la._loaders[0][0][1]
    for precision in torch.logspace(-2, 6, 5, dtype=torch.float64).tolist():
        la.prior_precision = precision
        if not (la.leave_one_out().leverage >= 1)[known].any():
            s = la.functional_variance(x)
            s = torch.linalg.solve(torch.eye(2, dtype=s.dtype) - s @ hessians(la, x), s).diagonal(dim1=1, dim2=2)
            p = torch.softmax((f + start.influence) / (1 + math.pi / 8 * s).sqrt(), 1)[range(N), y]
            values[precision] = p[known].log().sum().item()
    assert found[0] == pytest.approx(max(values, key=values.__getitem__)) and len(values) > 1
    la.prior_precision = 0.5
    with pytest.raises(ValueError, match=r"none of the grid is: at its end \d+ have; increase log_prior_prec_max"):
        la.optimize_prior_precision(**grid, log_prior_prec_max=-1)
    assert (la.prior_precision == 0.5).all()


# uncertainty -----------------------------------------------------------------------------------------------------------


def test_a_binary_entropy_is_its_quadrature() -> None:
    x, y = drawn(N, 3, seed=1), (drawn(N, 1, seed=2) > 0).double()
    la = KronLaplace(network(1), "binary").fit([(x, y)])
    found = la.uncertainty(x, 4000, torch.Generator().manual_seed(0))
    p = torch.sigmoid(la.model(x).detach() + la.functional_variance(x)[:, 0].sqrt() * GRID)
    entropy = lambda p: -p * p.log() - (1 - p) * (1 - p).log()  # noqa: E731
    torch.testing.assert_close(found.total, entropy(mean_over_grid(p)), rtol=0, atol=0.02)
    torch.testing.assert_close(found.aleatoric, mean_over_grid(entropy(p)), rtol=0, atol=0.02)
    assert torch.equal(found.epistemic, found.total - found.aleatoric) and (found.epistemic > 0).all()


def test_entropies_of_classes_are_those_of_samples_of_functions() -> None:
    x, y = drawn(N, 3, seed=1), labels()
    la = KronLaplace(network(), prior_precision=2.0).fit([(x, y)])
    found = la.uncertainty(x, 5000, torch.Generator().manual_seed(0))
    p = la.predictive_samples(x, n_samples=5000, generator=torch.Generator().manual_seed(1))
    entropy = lambda p: torch.distributions.Categorical(p).entropy()  # noqa: E731
    torch.testing.assert_close(found.total, entropy(p.mean(0)), rtol=0, atol=0.02)
    torch.testing.assert_close(found.aleatoric, entropy(p).mean(0), rtol=0, atol=0.02)
    certain = KronLaplace(la.model, prior_precision=1e12).fit([(x, y)]).uncertainty(x, 20)
    torch.testing.assert_close(certain.total, entropy(torch.softmax(la.model(x), 1)).detach(), rtol=1e-5, atol=1e-6)
    assert certain.epistemic.abs().max() < 1e-6


def test_a_regressions_entropies_are_closed_forms() -> None:
    x, y = drawn(N, 3, seed=1), drawn(N, 2, seed=2)
    la = KronLaplace(network(2), "regression", sigma_noise=0.6).fit([(x, y)])
    found, noise = la.uncertainty(x), 0.36 * torch.eye(2, dtype=x.dtype)
    normal = torch.distributions.MultivariateNormal
    total = normal(la(x)[0], la.functional_variance(x) + noise).entropy()
    torch.testing.assert_close(found.total, total)
    torch.testing.assert_close(found.aleatoric, normal(la(x)[0], noise.expand(N, 2, 2)).entropy())
    assert (found.epistemic > 0).all() and la.uncertainty(x[:0]).total.shape == (0,)


def test_entropies_of_counts_are_not_known() -> None:
    la = KronLaplace(network(1), "poisson").fit([(drawn(N, 3, seed=1), drawn(N, 1, seed=2).square().floor())])
    with pytest.raises(NotImplementedError, match="Poisson must define uncertainty"):
        la.uncertainty(drawn(2, 3))


# wrong labels ----------------------------------------------------------------------------------------------------------


def test_a_flipped_label_comes_first() -> None:
    x = drawn(N, 3, seed=1)
    y = x.argmax(1)
    y[5] = (x[5]).argmin()
    model = nn.Linear(3, 3, bias=False).double()
    model.weight.data = softmax_mode(x, y, 0.5)[0]
    ranked = FullLaplace(model, prior_precision=0.5).fit([(x, y)]).influence()
    assert ranked.order[0] == 5 and torch.equal(ranked.score, -ranked.log_density)
    assert (ranked.score[ranked.order].diff() <= 0).all() and sorted(ranked.order.tolist()) == list(range(N))


@pytest.mark.parametrize("of", [torch.utils.data.DataLoader, TensorLoader])
@pytest.mark.parametrize("added", [False, True])
def test_a_ranking_of_shuffled_data_is_told(of: Any, added: bool) -> None:
    x, y = drawn(N, 3, seed=1), labels()
    data = (x, y) if of is TensorLoader else (torch.utils.data.TensorDataset(x, y),)
    la = KronLaplace(network(), prior_precision=30.0).fit(of(*data, batch_size=8, shuffle=True))
    if added:
        la.fit(of(*data, batch_size=8), override=False)
    with pytest.warns(UserWarning, match="influence: the loader shuffles") as told:
        la.influence()
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la.influence(of(*data, batch_size=8))


def test_a_start_under_which_nothing_is_defined_is_refused():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double(), torch.randn(3, 8).double()
    la = DiagLaplace(model, "regression", sigma_noise=0.1).fit([(x, torch.randn(3, 2).double())])
    with pytest.raises(ValueError, match="larger init_prior_prec"):
        la.optimize_prior_precision(method="loo", prior_structure="scalar", init_prior_prec=1e-3, grid_size=5)
    assert torch.equal(la.prior_precision, torch.ones(4).double())
