"""Eigenvalue-corrected Kronecker factors against dense algebra by autograd, refits and curvlinops."""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from ella_cuda.augment import AffineAugment, AveragedFunction
from ella_cuda.laplace import KronLaplace, evidence_gradient, exact_log_marginal_likelihood
from ella_cuda.laplace.posterior import eigenbases_of
from ella_cuda.laplace.predictive import moments
from ella_cuda.nn import SparseConv2d
from python_tests.laplace.checks import drawn, randomised
from python_tests.laplace.jacobians import NETWORKS
from python_tests.laplace.test_exact_ggn import dense_curvature, labelled, precisions
from python_tests.laplace.test_state import through_a_file

SCALE = 0.5  # 1 / temperature


def corrected(model: nn.Module, *args: Any, **how: Any) -> KronLaplace:
    return KronLaplace(model, *args, eigenvalue_correction=True, **how)


class Dense(NamedTuple):
    """The corrected curvature of a fit as a matrix ``(P, P)``, from the dense Gauss-Newton matrix and the fit's eigenvectors; Jacobians
    ``(N, K, P)``; elements of each tensor."""

    matrix: Tensor
    jacobians: Tensor
    sizes: list[int]


def vectors_of(la: KronLaplace) -> dict[str, Tensor]:
    """By parameter the eigenvectors, in rows, among its flattened elements; these are orthonormal, and diagonalise each factor."""
    found = {}
    for name, basis in eigenbases_of(la).items():
        shape = basis.shape
        units = torch.eye(shape.numel, dtype=torch.float64).view(-1, shape.groups, shape.inputs, shape.outputs)
        blocks = basis.back(units)
        found[name] = shape.from_blocks(blocks, (shape.numel,))
        torch.testing.assert_close(found[name] @ found[name].T, torch.eye(shape.numel).double())
        kron = torch.einsum("pgx,gxy,qgy->pq", blocks.flatten(2), la.factors[name].to_dense(), blocks.flatten(2))
        torch.testing.assert_close(kron, kron.diagonal().diag(), rtol=0, atol=1e-9 * float(1e-9 + kron.abs().max()))
    return found


def dense(la: KronLaplace, x: Tensor) -> Dense:
    ggn, jacobians = dense_curvature(la.model, x)
    sizes = [la.model.get_parameter(name).numel() for name in la.parameter_names]
    blocks, end = [], 0
    for name, vectors in vectors_of(la).items():
        begin, end = end, end + la.model.get_parameter(name).numel()
        values = (vectors @ ggn[begin:end, begin:end] @ vectors.T).diagonal()
        blocks.append(vectors.T @ values.diag() @ vectors)
    return Dense(torch.block_diag(*blocks), jacobians, sizes)


@pytest.mark.parametrize("memory_budget", [None, 4096])
@pytest.mark.parametrize("name", NETWORKS)
def test_curvature_evidence_and_covariances_are_dense_algebras(name: str, memory_budget: int | None) -> None:
    model, x, y = labelled(name)
    la = corrected(model, unknown="diagonal", memory_budget=memory_budget, temperature=1 / SCALE)
    la.fit([(x[:3], y[:3]), (x[3:], y[3:])])
    found = dense(la, x)
    la.prior_precision = precisions(la)
    prior = la.prior_precision.repeat_interleave(torch.tensor(found.sizes))
    precision = SCALE * found.matrix + prior.diag()
    torch.testing.assert_close(la.posterior_precision.to_matrix(), precision, rtol=1e-9, atol=1e-10)
    covariance = torch.linalg.inv(precision)
    rows = found.jacobians.flatten(0, 1)
    joint = rows @ covariance @ rows.T
    each = joint.view(len(x), -1, len(x), found.jacobians.shape[1]).diagonal(dim1=0, dim2=2).movedim(2, 0)
    how = {"rtol": 1e-8, "atol": 1e-11}
    torch.testing.assert_close(la.functional_variance(x), each, **how)
    torch.testing.assert_close(la.functional_covariance(x), joint, **how)
    torch.testing.assert_close(la.functional_variance(found.jacobians), each, **how)
    torch.testing.assert_close(moments(la, x, diagonal=True)[1], each.diagonal(dim1=1, dim2=2), **how)
    ratio = torch.logdet(precision) - prior.log().sum()
    torch.testing.assert_close(la.log_det_ratio, ratio, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(la.posterior_precision.logdet(), torch.logdet(precision), rtol=1e-9, atol=1e-9)
    # Leverages of the training data sum to the effective parameters, as of the whole matrix.
    p = torch.softmax(model(x).detach(), -1).flatten(0, -2)
    hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    of_points = torch.stack([torch.block_diag(*part) for part in hessian.unflatten(0, (len(x), -1))])
    leverages = SCALE * torch.einsum("nkl,nlk->", la.functional_variance(x), of_points)
    assert leverages.item() == pytest.approx(sum(la.effective_parameters().values()), rel=1e-9)
    shares = (SCALE * found.matrix @ covariance).diagonal()
    expected = [part.sum().item() for part in shares.split(found.sizes)]
    assert list(la.effective_parameters().values()) == pytest.approx(expected, rel=1e-7, abs=1e-9)


@pytest.mark.parametrize("name", ["conv", "tied"])
def test_the_posterior_agrees_with_its_matrix(name: str) -> None:
    model, x, y = labelled(name)
    la = corrected(model, unknown="diagonal", prior_precision=0.5).fit([(x, y)])
    posterior = la.posterior_precision
    matrix = dense(la, x).matrix + 0.5 * torch.eye(la.n_params).double()
    inverse, v = torch.linalg.inv(matrix), drawn(3, la.n_params)
    torch.testing.assert_close(posterior.bmm(v), v @ inverse)
    torch.testing.assert_close(posterior.bmm(posterior.bmm(v, -0.5), 0.5), v)
    torch.testing.assert_close(posterior.square_form(v), ((v @ matrix) * v).sum(1))
    for exponent, expected in ((1, matrix), (-1, inverse)):
        torch.testing.assert_close(posterior.diag(exponent), expected.diagonal())
    root = posterior._coloured(torch.eye(la.n_params).double())
    torch.testing.assert_close(root.T @ root, inverse)


def test_the_evidence_s_derivatives_and_its_maxima() -> None:
    model, x, y = labelled("conv")
    la = corrected(model).fit([(x, y)])
    found, norms = dense(la, x), la.square_norms

    def evidence(log_precision: Tensor) -> Tensor:
        prior = log_precision.exp().repeat_interleave(torch.tensor(found.sizes))
        ratio = torch.logdet(found.matrix + prior.diag()) - prior.log().sum()
        return la.log_likelihood - 0.5 * (ratio + (log_precision.exp() * norms).sum())

    at = precisions(la).log().requires_grad_()
    ours = la.log_marginal_likelihood(at.exp())
    torch.testing.assert_close(ours, evidence(at), rtol=1e-10, atol=1e-10)
    slopes = [torch.autograd.grad(value, at, create_graph=True)[0] for value in (ours, evidence(at))]
    torch.testing.assert_close(*slopes, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(*(torch.autograd.grad(s.square().sum(), at)[0] for s in slopes), rtol=1e-7, atol=1e-8)
    la.optimize_prior_precision(method="mackay", n_steps=1000)
    rest = la.prior_precision.log().requires_grad_()
    (slope,) = torch.autograd.grad(evidence(rest), rest)
    assert slope[la.prior_precision < 1e9].abs().max() < 1e-5
    best = la.log_marginal_likelihood()
    la.optimize_prior_precision(n_steps=300, init_prior_prec=1.0)
    assert best - 1e-3 < la.log_marginal_likelihood() <= best + 1e-6
    la.optimize_prior_precision(method="gridsearch", prior_structure="scalar", val_loader=[(x, y)], grid_size=5)
    losses = {}
    for value in torch.logspace(-4, 4, 5).tolist():
        la_of = copy.copy(la)
        la_of.prior_precision = value
        losses[value] = -la_of(x).log()[range(len(y)), y].mean().item()
    assert la.prior_precision[0].item() == pytest.approx(min(losses, key=losses.__getitem__), rel=1e-6)


@pytest.mark.parametrize("kind", ["fewer data than inputs", "one data point", "a dead input", "kernels"])
def test_where_the_product_is_exact_nothing_is_corrected(kind: str) -> None:
    """A linear layer's block in a regression is ``X X^T`` and the unit matrix, whatever its rank."""
    inputs = 300 if kind == "kernels" else 6  # large blocks are decomposed in their range
    count = {"one data point": 1, "fewer data than inputs": 4}.get(kind, 9)
    x, y = drawn(count, inputs), drawn(count, 2, seed=1)
    if kind in ("a dead input", "kernels"):
        x[:, 2:5] = 0
    model = randomised(nn.Linear(inputs, 2))
    la, plain = (make(model, "regression").fit([(x, y)]) for make in (corrected, KronLaplace))
    torch.testing.assert_close(la.log_marginal_likelihood(), plain.log_marginal_likelihood(), rtol=1e-10, atol=1e-9)
    torch.testing.assert_close(la.functional_variance(x + 1), plain.functional_variance(x + 1), rtol=1e-9, atol=1e-10)
    values = eigenbases_of(la)["weight"].values.whole()
    assert (values >= 0).all()
    assert (values > 1e-9 * values.max()).sum() == 2 * torch.linalg.matrix_rank(x)


def test_a_layer_without_gradients_has_no_curvature() -> None:
    model = randomised(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    nn.init.constant_(model[0].bias, -100.0)
    la = corrected(model).fit([(drawn(5, 3), torch.arange(5) % 2)])
    gamma = la.effective_parameters()
    assert gamma["0.weight"] == gamma["0.bias"] == gamma["2.weight"] == 0 < gamma["2.bias"]
    assert la(drawn(2, 3)).isfinite().all()


@pytest.mark.parametrize("name", ["conv", "several outputs"])
def test_sampled_columns_are_right_on_average(name: str) -> None:
    model, x, y = labelled(name)
    repeats = 300
    la = corrected(model, fisher="mc").fit([(x, y)] * repeats, generator=torch.Generator().manual_seed(0))
    ggn, _ = dense_curvature(model, x)
    end = 0
    for name, basis in eigenbases_of(la).items():
        begin, end = end, end + basis.shape.numel
        found = basis.values.whole().sum() / repeats
        assert found.item() == pytest.approx(ggn.diagonal()[begin:end].sum().item(), rel=0.1), name
    again = corrected(model, fisher="mc").fit([(x, y)] * repeats, generator=torch.Generator().manual_seed(0))
    assert again.log_marginal_likelihood() == la.log_marginal_likelihood()


def test_curvlinops_has_the_same_weights() -> None:
    curvlinops = pytest.importorskip("curvlinops", exc_type=ImportError)
    layers = nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 2, 2, stride=2), nn.Flatten(), nn.Linear(8, 3)
    model, x, y = randomised(nn.Sequential(*layers)), drawn(7, 2, 4, 4), torch.arange(7) % 3
    weights = {name: p for name, p in model.named_parameters() if name.endswith("weight")}
    loss, data = nn.CrossEntropyLoss(reduction="sum"), [(x[:4], y[:4]), (x[4:], y[4:])]
    how = {"check_deterministic": False, "fisher_type": "type-2", "kfac_approx": "expand"}
    operator = curvlinops.EKFACLinearOperator(model, loss, list(weights.values()), data, **how)
    la = corrected(model, subset_of_weights=list(weights)).fit(data)
    count = sum(p.numel() for p in weights.values())
    theirs = operator @ torch.eye(count, dtype=torch.float64)
    ours = la.posterior_precision.to_matrix() - torch.eye(count, dtype=torch.float64)
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-7, atol=1e-10 * float(theirs.abs().max()))


def test_the_linear_mode_s_hessian_is_that_of_both_passes() -> None:
    model, x, y = labelled("linear")
    la = corrected(model).fit([(x, y)])
    trace = sum(float(basis.values.whole().sum()) for basis in eigenbases_of(la).values())
    la.fit_linear_mode([(x, y)], hessian_at="linear")
    _, jacobians = dense_curvature(model, x)
    outputs = model(x).detach() + jacobians @ (la.linear_mode - la.mean)
    p = outputs.softmax(1)
    hessians = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    expected = torch.einsum("nkp,nkl,nlp->", jacobians, hessians, jacobians)
    found = sum(basis.values.whole().sum() for basis in eigenbases_of(la).values())
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
    assert abs(float(found) - trace) > 1e-3


def test_copies_of_the_data_are_those_of_the_first_pass() -> None:
    torch.manual_seed(0)
    net = randomised(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3)))
    augment = AffineAugment(3, init=0.3, sampling="shared", dtype=torch.float64)
    model, x, y = AveragedFunction(net, augment), drawn(4, 1, 5, 5), torch.arange(4) % 3
    la = corrected(model).fit([(x, y)])
    with augment.held(la.fitted_model.draws):
        found = dense(la, x)
    ours = la.posterior_precision.to_matrix() - torch.eye(la.n_params).double()
    torch.testing.assert_close(ours, found.matrix, rtol=1e-8, atol=1e-10)
    augment.sampling = "independent"
    with pytest.raises(ValueError, match=r"the same draws in both passes.*held\(sampling='shared'\)"):
        corrected(model).fit([(x, y)])


def test_a_state_has_the_basis(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = labelled("tied")
    la = corrected(model, unknown="diagonal").fit([(x, y)])
    state = through_a_file(la.state_dict())
    other = corrected(model, unknown="diagonal")
    with monkeypatch.context() as patched:  # a machine with other eigenvectors
        patched.setattr(torch.linalg, "eigh", lambda blocks: pytest.fail("decomposed anew"))
        other.load_state_dict(state)
        assert other.log_marginal_likelihood() == la.log_marginal_likelihood()
        assert torch.equal(other.functional_variance(x), la.functional_variance(x))
    la.prior_precision = 3.0
    assert other.log_marginal_likelihood() != la.log_marginal_likelihood()
    with pytest.raises(ValueError, match="eigenvalue_correction is True in the state, but False here"):
        KronLaplace(model, unknown="diagonal").load_state_dict(state)
    with pytest.raises(ValueError, match="the loaders of the earlier data are not there"):
        other.fit([(x, y)], override=False)
    assert other.n_data == len(x)
    unfitted = corrected(model, unknown="diagonal")
    unfitted.load_state_dict(corrected(model, unknown="diagonal").state_dict())
    assert unfitted.n_data == 0


def test_a_fit_can_be_added_to() -> None:
    model, x, y = labelled("conv")
    parts = [[(x[:3], y[:3])], [(x[3:], y[3:])]]
    la = corrected(model).fit(parts[0]).fit(parts[1], override=False)
    whole = corrected(model).fit(parts[0] + parts[1])
    torch.testing.assert_close(la.log_marginal_likelihood(), whole.log_marginal_likelihood(), rtol=1e-10, atol=1e-9)
    torch.testing.assert_close(la.functional_variance(x), whole.functional_variance(x), rtol=1e-8, atol=1e-10)


class Dwindling(list):
    """Has a batch less in every pass."""

    def __iter__(self) -> Any:
        yield from tuple(super().__iter__())
        self.pop()


def test_what_a_second_pass_cannot_follow_is_refused() -> None:
    model, x, y = labelled("conv")
    la = corrected(model).fit([(x, y)])
    before = la.log_marginal_likelihood()
    with pytest.raises(TypeError, match=r"iterated twice.*got the iterator generator.*Pass list\(loader\)"):
        la.fit(batch for batch in [(x, y)])
    assert la.log_marginal_likelihood() == before  # nothing was done
    with pytest.raises(ValueError, match="same data twice, got 8 data points and then 4"):
        la.fit(Dwindling([(x, y), (x, y)]))
    with pytest.raises(RuntimeError, match="call fit"):
        la.log_marginal_likelihood()
    with pytest.raises(TypeError, match="eigenvalue_correction must be a bool, got 'yes'"):
        KronLaplace(model, eigenvalue_correction="yes")


def test_derivatives_in_the_network_are_refused() -> None:
    model, x, y = (
        randomised(nn.Sequential(SparseConv2d(1, 2), nn.Flatten(), nn.Linear(32, 2))),
        drawn(3, 1, 4, 4),
        torch.arange(3) % 2,
    )
    la = corrected(model).fit([(x, y)])
    with pytest.raises(ValueError, match="exact_log_marginal_likelihood: la must be without eigenvalue_correction"):
        exact_log_marginal_likelihood(la, x, y)
    with pytest.raises(ValueError, match="evidence_gradient: la must be without eigenvalue_correction"):
        evidence_gradient(la, [(x, y)], ["0.basis.anchors"])
    model[0].basis.anchors.requires_grad_()
    with pytest.raises(ValueError, match="KronLaplace: eigenvalue_correction=True has no derivatives in the bases"):
        la.log_det_ratio  # noqa: B018
    with torch.no_grad():
        assert math.isfinite(la.log_det_ratio)
    with pytest.raises(ValueError, match="fit: eigenvalue_correction=True has no derivatives in the bases"):
        la.fit([(x, y)])


def test_what_is_told_of_it() -> None:
    model, _, _ = labelled("conv")
    la, plain = corrected(model), KronLaplace(model)
    assert "Kronecker, corrected" in la.summary() and "corrected" not in plain.summary()
    assert "eigenvalue_correction=True" in repr(la)
    assert la.memory_estimate() >= plain.memory_estimate() + 2 * 8 * la.n_params
