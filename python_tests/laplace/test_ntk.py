"""NTKLaplace and evidence_bound: the oracle is dense linear algebra on Jacobians by torch.func, in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from ella_cuda.laplace import DiagLaplace, FullLaplace, KronLaplace, NTKLaplace, evidence_bound, exact_ggn
from python_tests.laplace.checks import Function, drawn, randomised


def scaled(model: nn.Module, x: Tensor) -> Tensor:
    return model.head(torch.tanh(model.body(x)) * model.scale)


NETWORKS = {
    "linear": lambda: (nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), drawn(6, 4)),
    "conv": lambda: (
        nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(12, 3, bias=False)),
        drawn(6, 1, 4, 4),
    ),
    "no rule": lambda: (
        Function(scaled, body=nn.Linear(4, 5), scale=nn.Parameter(torch.ones(5)), head=nn.Linear(5, 3)),
        drawn(6, 4),
    ),
}  # fmt: skip
LIKELIHOODS = {"classification": torch.tensor([0, 2, 1, 1, 0, 2]), "regression": drawn(6, 3, seed=4)}


def problem(name: str = "linear", likelihood: str = "classification") -> tuple[nn.Module, Tensor, Tensor]:
    model, x = NETWORKS[name]()
    return randomised(model, std=0.8), x, LIKELIHOODS[likelihood]


def precisions(model: nn.Module) -> Tensor:
    return torch.linspace(0.3, 1.5, len(list(model.parameters())), dtype=torch.float64)


def dense_evidence(
    model: nn.Module, x: Tensor, y: Tensor, delta: Tensor, sigma: float = 1.0, ratio: float = 1.0
) -> Tensor:
    """Of the data, weighed by ``ratio``, with a GGN of all parameters; its log determinant is weighed too."""
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    jacobians = jacrev(lambda values: functional_call(model, values, (x,)))(parameters)
    rows = torch.cat([j.flatten(2) for j in jacobians.values()], 2)
    outputs = model(x).detach()
    if y.is_floating_point():
        hessians = torch.eye(3).double().expand(len(x), 3, 3) / sigma**2
        fit = torch.distributions.Normal(outputs, sigma).log_prob(y).sum()
    else:
        p = outputs.softmax(1)
        hessians, fit = (
            p.diag_embed() - p[:, :, None] * p[:, None],
            -nn.functional.cross_entropy(outputs, y, reduction="sum"),
        )
    prior = delta.repeat_interleave(torch.tensor([p.numel() for p in parameters.values()]))
    curvature = torch.einsum("nkp,nkl,nlq->pq", rows, hessians, rows)
    log_det = torch.linalg.slogdet(curvature + prior.diag())[1] - prior.log().sum()
    scatter = sum(d * p.square().sum() for d, p in zip(delta, parameters.values(), strict=True))
    return ratio * (fit - log_det / 2) - scatter / 2  # fmt: skip


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("name", NETWORKS)
def test_one_batch_of_all_data_is_exact_and_several_are_a_bound(name, likelihood):
    model, x, y = problem(name, likelihood)
    delta, sigma = precisions(model), 0.7 if likelihood == "regression" else 1.0
    exact = dense_evidence(model, x, y, delta, sigma)
    values = {}
    for outputs, size in itertools.product(("together", "apart"), (6, 3, 2, 1)):
        la = NTKLaplace(model, likelihood, outputs=outputs, prior_precision=delta, sigma_noise=sigma)
        la.fit(list(zip(x.split(size), y.split(size), strict=True)))
        values[outputs, size] = float(la.log_marginal_likelihood())
        parts = zip(x.split(size), y.split(size), strict=True)
        if outputs == "together":
            scatter = sum(d * p.square().sum() for d, p in zip(delta, model.parameters(), strict=True)).item() / 2
            of_parts = sum(float(dense_evidence(model, *part, delta, sigma)) + scatter for part in parts) - scatter
            assert values[outputs, size] == pytest.approx(of_parts, rel=1e-10)
    assert values["together", 6] == pytest.approx(float(exact), rel=1e-10)
    for outputs in ("together", "apart"):
        assert values[outputs, 6] > values[outputs, 3] > values[outputs, 1]
        assert values[outputs, 6] > values[outputs, 2] > values[outputs, 1]
    assert all(values["apart", size] < values["together", size] for size in (6, 3, 2, 1))


@pytest.mark.parametrize("outputs", ["together", "apart"])
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_in_precisions_and_noise_are_those_of_the_value(name, outputs):
    model, x, y = problem(name, "regression")
    batches = list(zip(x.split(3), y.split(3), strict=True))
    la = NTKLaplace(model, "regression", outputs=outputs, memory_budget=2000).fit(batches)
    values = torch.cat([precisions(model), torch.tensor([0.6])]).double().requires_grad_()

    def evidence(values: Tensor) -> Tensor:
        return la.log_marginal_likelihood(values[:-1], values[-1])

    assert torch.autograd.gradcheck(evidence, values) and torch.autograd.gradgradcheck(evidence, values)
    delta = values[:-1].detach()
    (slope,) = torch.autograd.grad(evidence(values), values)
    # d/dlog delta = (gamma - delta ||theta||^2) / 2
    norms = torch.stack([p.detach().square().sum() for p in model.parameters()])
    gamma = torch.tensor(list(la.effective_parameters().values()), dtype=torch.float64)
    torch.testing.assert_close(slope[:-1] * delta, (gamma - delta * norms) / 2)


@pytest.mark.parametrize("name", ["linear", "conv"])
def test_a_subnetworks_kernels_are_of_its_elements(name):
    model, x, y = problem(name)
    count = sum(p.numel() for p in model.parameters())
    chosen, delta = torch.arange(0, count, 2), precisions(model)
    full = FullLaplace(model, prior_precision=delta, subnetwork_indices=chosen).fit([(x, y)])
    la = NTKLaplace(model, prior_precision=delta, subnetwork_indices=chosen).fit([(x, y)])
    assert f"{len(chosen)} parameters" in repr(la)
    torch.testing.assert_close(la.log_marginal_likelihood(), full.log_marginal_likelihood(), rtol=1e-10, atol=0)
    with pytest.raises(TypeError, match="hessian_structure"):
        NTKLaplace(model, hessian_structure="diag")


def test_precisions_are_raised_to_a_stationary_point_of_the_dense_evidence():
    model, x, y = problem()
    la = NTKLaplace(model).fit([(x, y)])
    la.optimize_prior_precision(method="mackay", n_steps=300)
    log_delta = la.prior_precision.log().requires_grad_()
    (slope,) = torch.autograd.grad(dense_evidence(model, x, y, log_delta.exp()), log_delta)
    assert slope.abs().max() < 1e-6
    before = la.log_marginal_likelihood()
    assert before > dense_evidence(model, x, y, torch.ones(4).double())


KINDS = {
    "ntk": NTKLaplace,
    "full": FullLaplace,
    "diag": DiagLaplace,
    "apart": lambda model, **how: NTKLaplace(model, outputs="apart", **how),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["linear", "conv"])
def test_the_mean_over_subsets_is_a_bound_that_rises_with_their_size(name, kind):
    model, x, y = problem(name)
    delta, n = precisions(model), len(x)
    whole = KINDS[kind](model, prior_precision=delta).fit([(x, y)]).log_marginal_likelihood()
    means = []
    for size in range(1, n + 1):
        found = []
        for chosen in itertools.combinations(range(n), size):
            some = list(chosen)
            la = KINDS[kind](model, prior_precision=delta).fit([(x[some], y[some])])
            found.append(evidence_bound(la, n))
            if kind in ("ntk", "full") and size == 2:
                expected = dense_evidence(model, x[some], y[some], delta, ratio=n / size)
                torch.testing.assert_close(found[-1], expected, rtol=1e-9, atol=0)
        means.append(float(torch.stack(found).mean()))
    assert means == sorted(means) and means[0] < means[-2] < means[-1]
    assert means[-1] == pytest.approx(float(whole), rel=1e-12)


@pytest.mark.parametrize(("apart", "sign"), [(True, 1), (False, -1)])
def test_kronecker_factors_of_subsets_are_on_either_side(apart, sign):
    """Two data points, apart where inputs and uncertain classes of one are orthogonal to the other's: their factors' product has four
    eigenvalues of 1/4, the matrix two of 1/2. Of the same point twice it has one of 1."""
    model, delta = nn.Linear(2, 4, bias=False).double(), 0.01
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.0, -50.0], [0.0, -50.0], [-50.0, 0.0], [-50.0, 0.0]]))
    x, y = torch.eye(2).double()[[0, 1 if apart else 0]], torch.tensor([0, 2 if apart else 0])
    whole = KronLaplace(model, prior_precision=delta).fit([(x, y)]).log_marginal_likelihood()
    parts = [KronLaplace(model, prior_precision=delta).fit([(x[[i]], y[[i]])]) for i in range(2)]
    mean = sum(evidence_bound(la, 2) for la in parts) / 2
    of_whole = 4 * math.log1p(0.25 / delta) if apart else math.log1p(1 / delta)
    assert float(mean - whole) == pytest.approx(of_whole / 2 - math.log1p(0.5 / delta), rel=1e-9)
    assert sign * float(mean - whole) > 1


def test_a_step_of_the_bound_moves_precisions_by_its_gradient():
    """evidence_bound has the gradient of what it is a sum of, and leaves la's own values alone."""
    model, x, y = problem()
    la = NTKLaplace(model, prior_precision=2.0).fit([(x[:2], y[:2])])
    delta = precisions(model).requires_grad_()
    (slope,) = torch.autograd.grad(evidence_bound(la, 6, delta), delta)
    expected = torch.autograd.grad(dense_evidence(model, x[:2], y[:2], delta, ratio=3.0), delta)[0]
    torch.testing.assert_close(slope, expected, rtol=1e-9, atol=1e-12)
    assert la.prior_precision.tolist() == [2.0] * 4
    assert float(evidence_bound(la, 2)) == pytest.approx(float(la.log_marginal_likelihood()), rel=1e-14)
    with pytest.raises(ValueError, match="n_data must be at least the 2 data points of the fit, got 1"):
        evidence_bound(la, 1)


def test_kernels_without_room_are_refused(monkeypatch):
    model, x, y = problem()
    needed = 8 * (4 + 2) * (2 * 6) ** 2  # four tensors, two columns of six data points
    for available in (needed, needed - 1):
        monkeypatch.setattr(exact_ggn, "available_bytes", lambda device, found=available: found)
        if available == needed:
            NTKLaplace(model).fit([(x, y)])
        else:
            with pytest.raises(MemoryError, match=f"6 data points with 2 columns take {needed:,} bytes"):
                NTKLaplace(model).fit([(x, y)])
            NTKLaplace(model).fit([(x[:3], y[:3]), (x[3:], y[3:])])


def test_what_kernels_do_not_give_is_refused():
    model, x, y = problem()
    la = NTKLaplace(model)
    with pytest.raises(RuntimeError, match="fit"):
        evidence_bound(la, 6)
    la.fit([(x, y)])
    for ask in (lambda: la(x), la.state_dict, lambda: la.H, lambda: la.posterior_precision):
        with pytest.raises(NotImplementedError, match="NTKLaplace"):
            ask()
    with pytest.raises(ValueError, match="outputs must be"):
        NTKLaplace(model, outputs="all")
    with torch.no_grad():
        model[2].weight[0, 0] = math.inf
    with pytest.raises(FloatingPointError, match="kernel"):
        la.fit([(x, y)])
