"""Posteriors of full, diagonal and subnetwork curvature against dense algebra by autograd."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ella_cuda.laplace import (
    DiagLaplace,
    FullLaplace,
    KronLaplace,
    LargestMagnitudeSubnetMask,
    LargestVarianceDiagLaplaceSubnetMask,
    LastLayerSubnetMask,
    ModuleNameSubnetMask,
    ParamNameSubnetMask,
    RandomSubnetMask,
    SubnetLaplace,
)
from python_tests.laplace.checks import Function, randomised
from python_tests.laplace.jacobians import NETWORKS, dense_jacobians, network


def labelled(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    model, x = network(name)
    outputs = model(x)
    return model, x, torch.arange(outputs[..., 0].numel()).view(outputs.shape[:-1]) % outputs.shape[-1]


def dense_curvature(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The GGN matrix ``(P, P)`` of a classification, and the Jacobians ``(N, K, P)``, by autograd of single data points."""
    jacobians = torch.cat([j.flatten(2) for j in dense_jacobians(model, x).values()], 2)
    outputs = model(x).detach()
    p = torch.softmax(outputs, -1).flatten(0, -2)
    hessians = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    rows = jacobians.reshape(len(p), p.shape[1], -1)
    return torch.einsum("nkp,nkl,nlq->pq", rows, hessians, rows), jacobians


def precisions(la: Any) -> Tensor:
    """One of its own for each tensor."""
    return torch.linspace(0.4, 1.7, len(la.parameter_names), dtype=torch.float64)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("kind", ["full", "diag"])
def test_curvature_and_covariances_are_dense_algebras(name: str, kind: str) -> None:
    model, x, y = labelled(name)
    la = (FullLaplace if kind == "full" else DiagLaplace)(model).fit([(x[:3], y[:3]), (x[3:], y[3:])])
    curvature, jacobians = dense_curvature(model, x)
    curvature = curvature if kind == "full" else curvature.diagonal()
    torch.testing.assert_close(la.H, curvature, rtol=1e-9, atol=1e-11)
    la.prior_precision = precisions(la)
    sizes = torch.tensor([model.get_parameter(n).numel() for n in la.parameter_names])
    prior = la.prior_precision.repeat_interleave(sizes)
    precision = curvature + prior.diag() if kind == "full" else (curvature + prior).diag()
    covariance = torch.linalg.inv(precision)
    rows = jacobians.flatten(0, 1)
    joint = rows @ covariance @ rows.T
    each = joint.view(len(x), -1, len(x), jacobians.shape[1]).diagonal(dim1=0, dim2=2).movedim(2, 0)
    torch.testing.assert_close(la.functional_variance(x), each, rtol=1e-8, atol=1e-11)
    torch.testing.assert_close(la.functional_covariance(x), joint, rtol=1e-8, atol=1e-11)
    torch.testing.assert_close(la.functional_variance(jacobians), each, rtol=1e-8, atol=1e-11)
    penalty = torch.logdet(precision) - prior.log().sum() + (la.prior_precision * la.square_norms).sum()
    log_p = -nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction="sum")
    torch.testing.assert_close(la.log_marginal_likelihood(), log_p - penalty / 2, rtol=1e-9, atol=1e-9)
    shares = 1 - prior * covariance.diagonal()
    expected = [part.sum().item() for part in shares.split(sizes.tolist())]
    assert list(la.effective_parameters().values()) == pytest.approx(expected, rel=1e-7, abs=1e-9)


@pytest.mark.parametrize("kind", [FullLaplace, DiagLaplace])
def test_posteriors_agree_with_their_matrices(kind: Any) -> None:
    model, x, y = labelled("conv")
    la = kind(model, prior_precision=0.5, temperature=2.0).fit([(x, y)])
    posterior = la.posterior_precision
    matrix = posterior.to_matrix()
    curvature, _ = dense_curvature(model, x)
    expected = curvature / 2 if kind is FullLaplace else (curvature / 2).diagonal().diag()
    torch.testing.assert_close(matrix, expected + 0.5 * torch.eye(len(matrix)).double(), rtol=1e-8, atol=1e-10)
    v = torch.randn(3, la.n_params, dtype=torch.float64)
    torch.testing.assert_close(posterior.bmm(v), torch.linalg.solve(matrix, v.T).T)
    torch.testing.assert_close(posterior.bmm(posterior.bmm(v, -0.5), 0.5), v)
    torch.testing.assert_close(posterior.square_form(v), ((v @ matrix) * v).sum(1))
    torch.testing.assert_close(posterior.diag(-1), torch.linalg.inv(matrix).diagonal())
    torch.testing.assert_close(posterior.logdet(), torch.logdet(matrix))
    gaussian = torch.distributions.MultivariateNormal(la.mean, precision_matrix=matrix)
    torch.testing.assert_close(la.log_prob(v), gaussian.log_prob(v), rtol=1e-9, atol=1e-8)
    draws = la.sample(20_000, torch.Generator().manual_seed(0))[:, -6:] - la.mean[-6:]
    covariance = torch.linalg.inv(matrix)[-6:, -6:]
    found = draws.T @ draws / len(draws)
    error = ((covariance.diagonal()[:, None] * covariance.diagonal() + covariance.square()) / len(draws)).sqrt()
    assert ((found - covariance) / error).abs().max() < 5


@pytest.mark.parametrize("structure", ["full", "diag"])
@pytest.mark.parametrize("name", ["conv", "tied", "factored"])
def test_a_subnetwork_is_the_restricted_matrix(name: str, structure: str) -> None:
    model, x, y = labelled(name)
    curvature, jacobians = dense_curvature(model, x)
    chosen = torch.randperm(len(curvature), generator=torch.Generator().manual_seed(0))[:9].sort().values
    la = SubnetLaplace(model, subnetwork_indices=chosen, hessian_structure=structure, unknown="diagonal").fit([(x, y)])
    la.prior_precision = precisions(la)
    sizes = torch.tensor([model.get_parameter(n).numel() for n in la.parameter_names])
    prior = la.prior_precision.repeat_interleave(sizes)[chosen]
    part = curvature[chosen][:, chosen]
    precision = (part if structure == "full" else part.diagonal().diag()) + prior.diag()
    rows = jacobians[:, :, chosen]
    expected = rows @ torch.linalg.inv(precision) @ rows.mT
    torch.testing.assert_close(la.functional_variance(x), expected, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(la.functional_variance(jacobians), expected, rtol=1e-8, atol=1e-12)
    theta = torch.cat([model.get_parameter(n).detach().flatten() for n in la.parameter_names])[chosen]
    penalty = torch.logdet(precision) - prior.log().sum() + (prior * theta.square()).sum()
    torch.testing.assert_close(la.log_marginal_likelihood(), la.log_likelihood - penalty / 2, rtol=1e-9, atol=1e-9)
    offsets = la.sample(5) - la.mean
    others = torch.ones(la.n_params, dtype=torch.bool)
    others[chosen] = False
    assert offsets[:, others].abs().max() == 0
    assert offsets[:, chosen].abs().min() > 0
    la.optimize_prior_precision(method="mackay", n_steps=3)
    assert la(x).shape == model(x).shape


@pytest.mark.parametrize("how", [{"unknown": "freeze"}, {"subset_of_weights": ["first", "head"]}], ids=str)
def test_indices_are_among_all_trainable_parameters(how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    parts = {"own": nn.Parameter(torch.ones(2, 3)), "first": nn.Linear(3, 4), "head": nn.Linear(4, 3)}
    model = Function(lambda m, x: m.head(torch.tanh(m.first(x * m.own.sum(0)))), **parts).double()
    x, y = torch.randn(12, 3).double(), torch.arange(12) % 3
    chosen = ParamNameSubnetMask(model, ["first.weight"]).select()
    la = SubnetLaplace(model, subnetwork_indices=chosen, **how).fit([(x, y)])
    assert {n for n, gamma in la.effective_parameters().items() if gamma} == {"first.weight"}
    assert torch.equal(la.subnetwork_indices, chosen)
    alone = FullLaplace(model, subset_of_weights=["first.weight"]).fit([(x, y)])
    torch.testing.assert_close(la.H, alone.H)
    torch.testing.assert_close(la.functional_variance(x), alone.functional_variance(x))
    loaded = SubnetLaplace(model, subnetwork_indices=chosen, **how)
    loaded.load_state_dict(la.state_dict())
    torch.testing.assert_close(loaded.functional_variance(x), la.functional_variance(x))
    with pytest.raises(ValueError, match="of own, which subset_of_weights or unknown='freeze' leaves out"):
        SubnetLaplace(model, subnetwork_indices=torch.tensor([3, 7]), **how)


def test_density_of_a_subnetwork_is_that_of_its_elements() -> None:
    model, x = network("conv")
    y = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    indices = torch.tensor([1, 5, 40, 41])
    la = SubnetLaplace(model, "regression", subnetwork_indices=indices).fit([(x, y)])
    values = la.sample(3, torch.Generator().manual_seed(0))
    assert torch.equal((values != la.mean).any(0).nonzero().flatten(), indices)
    precision = la.H + torch.eye(4, dtype=torch.float64)
    gaussian = torch.distributions.MultivariateNormal(la.mean[indices], precision_matrix=precision)
    torch.testing.assert_close(la.log_prob(values), gaussian.log_prob(values[:, indices]))


def test_the_last_layer_alone() -> None:
    model, x, y = labelled("conv")
    last = [name for name, _ in model.named_modules()][-1]
    la = KronLaplace(model, subset_of_weights="last_layer").fit([(x, y)])
    assert la.parameter_names == [f"{last}.weight", f"{last}.bias"]
    whole = KronLaplace(model).fit([(x, y)])
    for name, factor in la.factors.items():
        torch.testing.assert_close(factor.to_dense(), whole.factors[name].to_dense())
    frozen = copy.deepcopy(model)
    for name, p in frozen.named_parameters():
        p.requires_grad_(name.startswith(f"{last}."))
    torch.testing.assert_close(la(x), KronLaplace(frozen).fit([(x, y)])(x))
    by_mask = SubnetLaplace(model, subnetwork_indices=LastLayerSubnetMask(model).select()).fit([(x, y)])
    exact = FullLaplace(model, subset_of_weights=[last]).fit([(x, y)])
    torch.testing.assert_close(by_mask.functional_variance(x), exact.functional_variance(x))
    assert all(p.requires_grad for p in model.parameters())


def test_a_layer_that_is_not_the_last_is_refused() -> None:
    model = Function(lambda m, x: m.head(torch.tanh(m.body(x))), head=nn.Linear(3, 2), body=nn.Linear(2, 3))
    data = [(torch.randn(4, 2), torch.arange(4) % 2)]
    for kind in (KronLaplace, FullLaplace):
        with pytest.raises(ValueError, match=r"not that of layer 'body' \(Linear\)"):
            kind(model, subset_of_weights="last_layer").fit(data)
        assert kind(model, subset_of_weights=["head"]).fit(data).n_params == 8


def test_masks() -> None:
    model = randomised(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)))
    x, y = torch.randn(6, 2, dtype=torch.float64), torch.arange(6) % 2
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    chosen = LargestMagnitudeSubnetMask(model, 4).select()
    assert flat[chosen].abs().min() > flat[[i for i in range(17) if i not in chosen.tolist()]].abs().max()
    assert chosen.equal(chosen.sort().values)
    diagonal = DiagLaplace(model).fit([(x, y)])
    by_variance = LargestVarianceDiagLaplaceSubnetMask(model, 4, diagonal).select()
    assert by_variance.equal((1 / (diagonal.H + 1)).topk(4).indices.sort().values)
    assert by_variance.equal(LargestVarianceDiagLaplaceSubnetMask(model, 4).select([(x, y)]))
    drawn = [RandomSubnetMask(model, 4, torch.Generator().manual_seed(s)).select() for s in (0, 0, 1)]
    assert drawn[0].equal(drawn[1])
    assert not drawn[0].equal(drawn[2])
    assert ParamNameSubnetMask(model, ["0.bias", "2.bias"]).select().tolist() == [6, 7, 8, 15, 16]
    assert ModuleNameSubnetMask(model, ["2"]).select().tolist() == list(range(9, 17))
    mask = LastLayerSubnetMask(model)
    with pytest.raises(AttributeError, match="call select first"):
        mask.indices  # noqa: B018
    assert mask.select().tolist() == list(range(9, 17))
    assert mask.n_params_subnet == 8


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda m: SubnetLaplace(m, subnetwork_indices=torch.tensor([3, 1])), "ascending indices"),
        (lambda m: SubnetLaplace(m, subnetwork_indices=torch.tensor([17])), "below the 17 trainable parameters"),
        (lambda m: SubnetLaplace(m, subnetwork_indices=torch.tensor([0.5])), "expected an int64 tensor"),
        (lambda m: SubnetLaplace(m, subnetwork_indices=torch.arange(2), hessian_structure="kron"), "'full', 'diag'"),
        (lambda m: RandomSubnetMask(m, 18), "from 1 to the model's 17"),
        (lambda m: ParamNameSubnetMask(m, ["1.bias"]), "got '1.bias'"),
        (lambda m: ModuleNameSubnetMask(m, []), "got none"),
        (lambda m: LargestVarianceDiagLaplaceSubnetMask(m, 3).select(), "pass train_loader"),
        (lambda m: KronLaplace(m, subset_of_weights="first"), "'all', 'last_layer', or a list"),
        (lambda m: KronLaplace(m, subset_of_weights=["0.scale"]), "inside of, '0.scale'"),
        (lambda m: KronLaplace(m, subset_of_weights=[]), r"subset_of_weights must be .* got \[\]"),
        (lambda m: KronLaplace(m, subset_of_weights=None), "subset_of_weights must be .* got None"),
        (lambda m: KronLaplace(m, memory_budget=1e9), "memory_budget must be a positive integer, got 1000000000.0"),
    ],
)
def test_wrong_choices_are_named(make: Any, words: str) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    with pytest.raises(ValueError, match=words):
        make(model)


def test_a_matrix_without_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ella_cuda.laplace.exact_ggn.available_bytes", lambda device: 1000)
    model = nn.Linear(3, 2)
    with pytest.raises(MemoryError, match=r"8 parameters and its Cholesky factor take 1,024 bytes.*DiagLaplace"):
        FullLaplace(model).fit([(torch.randn(4, 3), torch.arange(4) % 2)])


def test_few_outputs_are_the_same_algebra() -> None:
    """Whose curvature has a low rank: evidence, its gradients and effective parameters, after data are added too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, y = torch.randn(6, 5, dtype=torch.float64), torch.arange(6) % 3
    la = FullLaplace(model, temperature=0.7)
    for part in (slice(3), slice(3, 6)):
        la.fit([(x[part], y[part])], override=part.start is None)
        seen = slice(part.stop)
        assert 2 * la.n_data * la.n_outputs <= la.n_params
        curvature = dense_curvature(model, x[seen])[0] / 0.7
        log_precision = precisions(la).log().requires_grad_()
        evidence = la.log_marginal_likelihood(log_precision.exp())
        (found,) = torch.autograd.grad(evidence, log_precision)

        sizes = torch.tensor([p.numel() for p in model.parameters()])
        elementwise = log_precision.exp().repeat_interleave(sizes)
        theta = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        log_lik = -nn.functional.cross_entropy(model(x[seen]), y[seen], reduction="sum").detach() / 0.7
        expected = log_lik + 0.5 * (
            elementwise.log().sum() - torch.logdet(curvature + elementwise.diag()) - (elementwise * theta**2).sum()
        )
        torch.testing.assert_close(evidence, expected, rtol=1e-11, atol=0)
        torch.testing.assert_close(found, *torch.autograd.grad(expected, log_precision), rtol=1e-9, atol=1e-11)

        la.prior_precision = precisions(la)
        inverse = torch.linalg.inv(curvature + elementwise.detach().diag())
        shares = (1 - elementwise.detach() * inverse.diagonal()).split(sizes.tolist())
        effective = torch.tensor([*la.effective_parameters().values()], dtype=torch.float64)
        torch.testing.assert_close(effective, torch.stack([s.sum() for s in shares]), rtol=1e-9, atol=1e-11)
