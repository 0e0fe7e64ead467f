"""A prior precision per output unit, against dense curvatures and priors."""

from __future__ import annotations

import io
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ella_cuda import marglik_training
from ella_cuda.laplace import DiagLaplace, FullLaplace, KronLaplace, NTKLaplace
from ella_cuda.laplace.evidence import evidence_bound, sharing_prior
from ella_cuda.laplace.hypergradients import evidence_gradient, exact_log_marginal_likelihood
from ella_cuda.nn import FactoredLinear2d, SparseFactoredLinear2d
from ella_cuda.training import EvidenceCallback, MarglikTrainer


def drawn(*sizes, seed=0):
    return torch.randn(*sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def initialised(model, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for p in model.double().parameters():
        p.data.normal_(generator=generator).mul_(0.5)
    return model


class Tied(nn.Module):
    """A layer that is called twice, and one that uses the transpose of an embedding's weight."""

    def __init__(self):
        super().__init__()
        self.table, self.middle, self.last = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5)
        self.last.weight = self.table.weight

    def forward(self, x):
        return self.last(self.middle(self.middle(self.table(x).mean(1)).tanh()).tanh())


def net(first, size, **options):
    return nn.Sequential(first, nn.Tanh(), nn.Flatten(), nn.Linear(size, 2, **options))


IMAGES, WORDS = drawn(5, 2, 4, 4), torch.tensor([[0, 1, 1], [2, 3, 0], [3, 3, 4], [1, 0, 2]])
CASES = {
    "linear": (lambda: net(nn.Linear(3, 4), 4), drawn(6, 3)),
    "convolution": (lambda: net(nn.Conv2d(2, 3, 3), 12, bias=False), IMAGES),
    "group convolution": (lambda: net(nn.Conv2d(2, 4, 3, groups=2), 16), IMAGES),
    "transposed": (lambda: net(nn.ConvTranspose2d(4, 6, 2, groups=2), 54), drawn(4, 4, 2, 2)),
    "factored": (lambda: net(FactoredLinear2d(2, 3, 4, 4), 48), IMAGES),
    "factored, per channel": (lambda: net(FactoredLinear2d(2, 3, 4, 4), 48), IMAGES),
    "embedding": (lambda: net(nn.Embedding(5, 3), 9), WORDS),
    "tied": (Tied, WORDS),
}


@pytest.fixture(params=CASES)
def name(request):
    return request.param


def fitted(name="linear", **options):
    make, x = CASES[name]
    model, options = initialised(make()), options | ({"resolution": "per_channel"} if "," in name else {})
    y = torch.arange(len(x)) % model(x).shape[1]
    return KronLaplace(model, **options).fit([(x, y)]), x, y


def with_units(la, seed=3):
    """Different precisions of all units."""
    la.prior_precision = drawn(sum(la._unit_counts), seed=seed).exp() * 0.3
    return la


def units_of(la):
    """Each element's unit among all, from the tensor's place of its output axis alone."""
    found, start = [], 0
    for name, parameter in la.model.named_parameters():
        shape, module = parameter.shape, la.model.get_submodule(name.rpartition(".")[0])
        if parameter.dim() == 1 or name.endswith("bias_out"):
            number = torch.zeros(shape, dtype=torch.long)
        elif isinstance(module, nn.Embedding):
            number = torch.arange(shape[1]).expand(shape)
        elif isinstance(module, nn.ConvTranspose2d):  # (inputs, outputs of a group, ...)
            group = torch.arange(module.groups).repeat_interleave(shape[0] // module.groups)
            number = (group[:, None] * shape[1] + torch.arange(shape[1]))[:, :, None, None].expand(shape)
        else:
            number = torch.arange(shape[0]).view(-1, *[1] * (parameter.dim() - 1)).expand(shape)
        found.append(start + number.flatten())
        start += int(number.max()) + 1
    return torch.cat(found)


def dense(la):
    """The curvature of all parameters, and the prior's precisions."""
    blocks = []
    for factor in la.factors.values():
        shape, whole = factor.shape, factor.to_dense()
        one = torch.block_diag(*whole)  # of blocks, inputs, outputs
        place = torch.arange(shape.numel).view(shape.groups, shape.inputs, shape.outputs)
        order = shape.from_blocks(place, (shape.numel,))
        blocks.append(one[order][:, order])
    return torch.block_diag(*blocks), la.prior_precision[units_of(la)]


def jacobian_of(model, x):
    """``(N, K, P)``."""
    parameters = dict(model.named_parameters())
    parts = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, x))(parameters).values()
    return [part.flatten(2) for part in parts]


def theta_of(la):
    return torch.cat([p.detach().flatten() for p in la.model.parameters()])


def evidence(la, curvature, prior):
    ratio = torch.logdet(curvature / la.temperature + prior.diag()) - prior.log().sum()
    return la.log_likelihood - 0.5 * (ratio + (prior * theta_of(la) ** 2).sum())


def test_the_evidence_its_gradient_and_effective_parameters_are_those_of_the_dense_matrices(name):
    la, *_ = fitted(name, temperature=0.7)
    assert la._unit_counts[0] > 1
    logs = with_units(la).prior_precision.log().requires_grad_()
    curvature, prior = dense(la)
    found = la.log_marginal_likelihood(logs.exp())
    torch.testing.assert_close(found, evidence(la, curvature, prior))
    torch.testing.assert_close(la.prior_precision_diag, prior)
    torch.testing.assert_close(la.log_det_prior_precision, prior.log().sum())
    torch.testing.assert_close(la.scatter, (prior * theta_of(la) ** 2).sum())
    again = logs.detach().requires_grad_()
    expected = evidence(la, curvature, again.exp()[units_of(la)])
    slopes = [torch.autograd.grad(value, at)[0] for value, at in ((found, logs), (expected, again))]
    torch.testing.assert_close(*slopes)
    share = 1 - prior * torch.linalg.inv(curvature / la.temperature + prior.diag()).diagonal()
    gamma = torch.zeros(len(logs), dtype=torch.float64).index_add_(0, units_of(la), share)
    per_unit = la.effective_parameters(per_unit=True)
    torch.testing.assert_close(torch.cat([*per_unit.values()]), gamma)
    assert la.effective_parameters() == pytest.approx({n: g.sum().item() for n, g in per_unit.items()})


def test_predictions_samples_and_densities_are_those_of_the_dense_covariance(name):
    la, x, _ = fitted(name)
    curvature, prior = dense(with_units(la))
    covariance = torch.linalg.inv(curvature + prior.diag())
    posterior = la.posterior_precision
    for exponent, matrix in ((-1, covariance), (1, curvature + prior.diag())):
        torch.testing.assert_close(posterior.to_matrix(exponent), matrix)
        torch.testing.assert_close(posterior.diag(exponent), matrix.diagonal())
    torch.testing.assert_close(posterior.logdet(), torch.logdet(curvature + prior.diag()))
    root = posterior._coloured(torch.eye(len(prior), dtype=torch.float64)).mT
    torch.testing.assert_close(root @ root.mT, covariance)
    with pytest.raises(ValueError, match=r"exponent must be 1 or -1 .* sample\(\) has a root"):
        posterior.bmm(theta_of(la), -0.5)

    rows = torch.cat(jacobian_of(la.model, x), 2)
    variance = rows @ covariance @ rows.mT
    torch.testing.assert_close(la.functional_variance(x), variance)
    torch.testing.assert_close(la.functional_covariance(x), rows.flatten(0, 1) @ covariance @ rows.flatten(0, 1).mT)
    mean = la.model(x).detach()
    kappa = 1 / (1 + math.pi / 8 * variance.diagonal(dim1=1, dim2=2)).sqrt()
    torch.testing.assert_close(la(x), (mean * kappa).softmax(1))


def test_equal_precisions_of_a_tensors_units_are_that_of_the_tensor(name):
    la, x, _ = fitted(name)
    layerwise = torch.linspace(0.2, 3, len(la._unit_counts), dtype=torch.float64)
    value, gamma = la.log_marginal_likelihood(layerwise), la.effective_parameters()
    variance, per_unit = la.functional_variance(x), la.effective_parameters(per_unit=True)
    units = layerwise.repeat_interleave(torch.tensor(la._unit_counts))
    torch.testing.assert_close(la.log_marginal_likelihood(units), value)
    assert len(la.prior_precision) == sum(la._unit_counts) and la.effective_parameters() == pytest.approx(gamma)
    torch.testing.assert_close(la.functional_variance(x), variance)
    torch.testing.assert_close(la.effective_parameters(per_unit=True), per_unit)


def test_the_exact_ggn_of_one_data_point():
    """Where the Kronecker product is the block of the generalised Gauss-Newton matrix itself."""
    make, x = CASES["linear"]
    model = initialised(make())
    la = with_units(KronLaplace(model, "regression").fit([(x[:1], drawn(1, 2))]))
    curvature = torch.block_diag(*[j[0].mT @ j[0] for j in jacobian_of(model, x[:1])])
    expected = evidence(la, curvature, la.prior_precision[units_of(la)])
    torch.testing.assert_close(la.log_marginal_likelihood(), expected)


@pytest.mark.parametrize("name", ["linear", "group convolution", "factored"])
def test_both_ways_to_the_precisions_end_where_the_gradient_is_zero(name):
    la, *_ = fitted(name)
    with_layers = la.optimize_prior_precision(method="mackay", n_steps=1000)
    before = la.log_marginal_likelihood()
    found = la.optimize_prior_precision(method="mackay", prior_structure="unit", n_steps=1000)
    assert len(with_layers) < len(found) == sum(la._unit_counts)
    value = la.log_marginal_likelihood()
    assert value > before
    logs = found.log().requires_grad_()
    gradient = torch.autograd.grad(evidence(la, dense(la)[0], logs.exp()[units_of(la)]), logs)[0]
    inside = found < 0.99e10
    assert gradient[inside].abs().max() < 1e-5 and inside.sum() >= 3
    gamma = torch.cat([*la.effective_parameters(per_unit=True).values()])
    torch.testing.assert_close((gamma / la._norms_of_finer())[inside], found[inside], rtol=1e-4, atol=0)
    la.optimize_prior_precision(prior_structure="unit", n_steps=2000, lr=0.05, init_prior_prec=with_layers)
    torch.testing.assert_close(la.log_marginal_likelihood(), value, rtol=1e-3, atol=0)


def test_units_that_do_nothing_are_switched_off():
    model = initialised(nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)))
    x = drawn(40, 3)
    model[0].bias.data[4:] = -100.0  # never active
    model[0].weight.data[3], model[0].bias.data[3] = 1e-6, 1.0
    y = (x[:, 0] * x[:, 1] > 0).long()
    la = KronLaplace(model).fit([(x, y)])
    la.optimize_prior_precision(method="mackay", prior_structure="unit", n_steps=500)
    gamma, delta = la.effective_parameters(per_unit=True)["0.weight"], la.unit_precisions["0.weight"]
    assert gamma[3:].max() < 1e-3 and gamma[:3].sum() > 1
    assert delta[3] > 1e4 > 100 * delta[gamma > 0.1].max()
    assert torch.equal(torch.cat([*la.unit_precisions.values()]), la.prior_precision)


def test_calibration_shares_one_basis_and_scales_the_precisions():
    la, x, y = fitted("linear")
    with_units(la)
    la.calibrate([(x, y)])
    factor = la.predictive_prior_precision / la.prior_precision
    torch.testing.assert_close(factor, factor[:1].expand(len(factor)))
    one, other = la._posterior(la.prior_precision * 3, torch.ones(())), la.posterior_precision
    assert one.bases is other.bases
    torch.testing.assert_close(one.to_matrix(1), dense(la)[0] + 3 * la.prior_precision_diag.diag())
    probabilities = la.model(x).detach().softmax(1)
    hessians = torch.diag_embed(probabilities) - probabilities[:, :, None] * probabilities[:, None]
    leverage = la.leave_one_out([(x, y)]).total_leverage
    rows = torch.cat(jacobian_of(la.model, x), 2)
    covariance = torch.linalg.inv(dense(la)[0] + la.prior_precision_diag.diag())
    torch.testing.assert_close(leverage, (rows @ covariance @ rows.mT @ hessians).diagonal(dim1=1, dim2=2).sum())


@pytest.mark.parametrize("name", ["convolution", "factored"])
def test_a_saved_state_has_the_same_precisions_and_evidence(name):
    la, x, _ = fitted(name)
    la.optimize_prior_precision(prior_structure="unit", n_steps=5)
    file = io.BytesIO()
    torch.save(la.state_dict(), file)
    file.seek(0)
    other = KronLaplace(la.model)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other.prior_precision, la.prior_precision)
    assert torch.equal(other.log_marginal_likelihood(), la.log_marginal_likelihood())
    assert torch.equal(other.functional_variance(x), la.functional_variance(x))
    other.prior_mean = 0.5
    distance = (la.prior_precision_diag * (theta_of(la) - 0.5) ** 2).sum()
    torch.testing.assert_close(other.scatter, distance)


def test_what_has_no_units_says_so_before_it_works():
    la, x, y = fitted("linear", eigenvalue_correction=True)
    with pytest.raises(ValueError, match=r"needs Kronecker products; pass eigenvalue_correction=False, or use 'layerw"):
        la.optimize_prior_precision(prior_structure="unit")
    for kind in (DiagLaplace, FullLaplace, NTKLaplace):
        other = kind(la.model).fit([(x, y)])
        with pytest.raises(ValueError, match=f"{kind.__name__}: prior_structure='unit' .* KronLaplace alone"):
            other.optimize_prior_precision(prior_structure="unit")
        with pytest.raises(ValueError, match="KronLaplace alone"):
            other.effective_parameters(per_unit=True)
    la = fitted("linear")[0]
    with pytest.raises(ValueError, match="prior_structure='unit' has no at='linear'"):
        la.optimize_prior_precision(prior_structure="unit", at="linear")
    with pytest.raises(ValueError, match="or 8, one per output unit, got shape"):
        la.prior_precision = torch.ones(5)
    with_units(la)
    with pytest.raises(ValueError, match="one per output unit; set prior_precision before"):
        la.fit_linear_mode([(x, y)])


def small(seed=5):
    model = initialised(nn.Sequential(nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)), seed)
    x = drawn(30, 1, 3, 3)
    return model, DataLoader(TensorDataset(x, (x[:, 0, 0, 0] > 0).long()), batch_size=30)


def penalty_of(model, precisions, n):
    """The prior's part of the objective by rows."""
    parts = ((precisions[m], p if p.dim() > 1 else p[None]) for m, p in model.named_parameters())
    return sum(0.5 * (own * p.flatten(1).square().sum(1)).sum() for own, p in parts) / n


@pytest.mark.parametrize("hyper", ["adam", "mackay"])
def test_training_learns_precisions_of_units_and_steps_along_their_prior(hyper):
    model, loader = small()
    how = {"prior_structure": "unit", "hyper_optimizer": hyper, "progress_bar": False}
    la, *_ = marglik_training(model, loader, n_epochs=6, n_epochs_burnin=1, **how)
    precisions = la.unit_precisions
    assert [len(p) for p in precisions.values()] == [3, 1, 2, 1]
    assert all(len(set(p.tolist())) == len(p) for p in precisions.values())

    trainer = MarglikTrainer(*small(), n_epochs=4, optimizer_cls=torch.optim.SGD, optimizer_kwargs={"lr": 0.1}, **how)
    for _ in range(2):
        trainer.epoch()
    trainer.evidence_step()
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    ((x, y),) = loader
    loss = nn.functional.cross_entropy(trainer.model(x), y) + penalty_of(trainer.model, trainer.la.unit_precisions, 30)
    slopes = torch.autograd.grad(loss, [*trainer.model.parameters()])
    trainer.epoch()
    for (name, p), slope in zip(trainer.model.named_parameters(), slopes, strict=True):
        torch.testing.assert_close(p.detach(), before[name] - 0.1 * slope)
    entry = trainer.history[-1]
    assert len(entry["prior_precision"]) == len(entry["effective_parameters"]) == 4
    mean = trainer.la.unit_precisions["0.weight"].log().mean().exp()
    assert entry["prior_precision"][0] == pytest.approx(mean.item())


def test_a_loop_of_ones_own_has_the_units_precisions_in_its_loss():
    model, loader = small()
    evidence = EvidenceCallback(model, loader, prior_structure="unit")
    optimizer = torch.optim.AdamW(model.parameters())
    for refused in (lambda: evidence.attach(optimizer), lambda: evidence.weight_decay):
        with pytest.raises(ValueError, match=r"precision for each row, .* attach\(optimizer, weight_decay=False\)"):
            refused()
    evidence.attach(optimizer, weight_decay=False)
    evidence.step(0)
    expected = penalty_of(model, evidence.la.unit_precisions, 30)
    torch.testing.assert_close(evidence.penalised(torch.zeros(())), expected.detach().float(), check_dtype=False)
    evidence.add_prior()
    for p, slope in zip(model.parameters(), torch.autograd.grad(expected, [*model.parameters()]), strict=True):
        torch.testing.assert_close(p.grad, slope)
    assert optimizer.param_groups[0]["weight_decay"] == 0
    other = EvidenceCallback(model, loader, prior_structure="unit")
    other.load_state_dict(evidence.state_dict())
    assert torch.equal(other.prior_precision, evidence.prior_precision)
    with pytest.raises(ValueError, match="KronLaplace alone"):
        EvidenceCallback(model, loader, form="diag", prior_structure="unit")


def test_a_part_of_the_data_bears_its_share_of_the_units_prior():
    la, *_ = fitted("linear")
    with_units(la)
    with sharing_prior(la, 12), torch.no_grad():
        share = la.log_marginal_likelihood()
    torch.testing.assert_close(share * 2, evidence_bound(la, 12))
    halved = la.log_marginal_likelihood() + 0.25 * la.scatter
    torch.testing.assert_close(share, halved)


def test_gradients_inside_the_network():
    """With factors that follow it, as fits at other values; with held ones, as with equal precisions of tensors."""
    torch.manual_seed(0)
    model = net(SparseFactoredLinear2d(1, 2, 4, 4), 32).double()
    name = next(n for n, _ in model.named_buffers() if n.endswith("inverse_lengthscale"))
    buffer, x, y = model.get_buffer(name), drawn(5, 1, 4, 4), torch.arange(5) % 2
    at, values = buffer.clone(), []
    la = with_units(KronLaplace(model).fit([(x, y)]))
    found = evidence_gradient(la, [(x, y)], [name])[name]
    with pytest.raises(ValueError, match="got one per output unit; evidence_gradient takes those"):
        exact_log_marginal_likelihood(la, x, y)
    for step in (1e-5, -1e-5):
        buffer.copy_(at + step)
        values.append(KronLaplace(model, prior_precision=la.prior_precision).fit([(x, y)]).log_marginal_likelihood())
    torch.testing.assert_close(found, (values[0] - values[1]) / 2e-5, rtol=1e-5, atol=1e-7)
    buffer.requires_grad_()
    la = KronLaplace(model).fit([(x, y)])
    layers = torch.linspace(0.2, 3, len(la.parameter_names), dtype=torch.float64)
    units = layers.repeat_interleave(torch.tensor(la._unit_counts))
    one, other = (torch.autograd.grad(la.log_marginal_likelihood(at), buffer)[0] for at in (layers, units))
    torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-9)
    assert min(found.abs(), one.abs()) > 1e-4
