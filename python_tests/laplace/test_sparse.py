"""Curvature and evidence of sparsified layers, and the evidence's gradient in what shapes them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ella_cuda.laplace import KronLaplace, exact_log_marginal_likelihood
from ella_cuda.laplace.evidence import evidence_at
from ella_cuda.nn import PolyphasePool2d, RelaxedEquivariance, SparseConv2d, SparseFactoredLinear2d, SpatialBasis
from python_tests.laplace.checks import Function
from python_tests.laplace.jacobians import Scaled
from python_tests.ops.checks import assert_same

KINDS = ("interpolating", "exponential")
LIKELIHOODS = ("classification", "regression")


def randomise(model: nn.Module) -> nn.Module:
    for p in model.parameters():
        nn.init.normal_(p, std=0.7)
    model.double()
    for module in model.modules():
        if isinstance(module, SpatialBasis):
            module.inverse_lengthscale.uniform_(0.4, 0.9)
    return model


def targets(likelihood: str, n: int, k: int) -> Tensor:
    return torch.randint(k, (n,)) if likelihood == "classification" else torch.randn(n, k, dtype=torch.float64)


def network(kind: str = "interpolating", side: int = 2) -> nn.Module:
    """Two relaxed layers, the second halving the image, and a head; 4x4 images of two channels, three outputs. With ``side=1``
    a third layer takes its 2x2 positions to one.
    """
    first = {"s_fc": SparseFactoredLinear2d(2, 3, 4, 4, basis=kind), "s_conv": SparseConv2d(2, 3, basis=kind)}
    second = {
        "s_fc": SparseFactoredLinear2d(3, 2, 4, 2, basis=kind),
        "s_conv": nn.Sequential(SparseConv2d(3, 2, basis=kind), PolyphasePool2d()),
    }
    paths = (RelaxedEquivariance(first), nn.Tanh(), RelaxedEquivariance(second), nn.Tanh())
    if side == 1:
        paths += (SparseFactoredLinear2d(2, 4, 2, 1, basis=kind), nn.Tanh())
    return randomise(nn.Sequential(*paths, nn.Flatten(), nn.Linear(8 if side == 2 else 4, 3)))


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {n: b for n, b in model.named_buffers() if not n.endswith("points")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_more_anchors_than_positions_are_no_error(dtype):
    """Projected sums are then rank-deficient, with eigenvalues that rounding makes negative."""
    layer = SparseFactoredLinear2d(2, 3, 4, 2, num_anchors=(40, 12))
    model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)).to(dtype)
    for basis in (layer.basis_in, layer.basis_out):
        basis.inverse_lengthscale.fill_(0.1)
    x, y = torch.randn(20, 2, 4, 4, dtype=dtype), torch.randint(3, (20,))
    la = KronLaplace(model).fit([(x, y)])
    assert la.log_marginal_likelihood().isfinite()
    assert all(0 <= g <= model.get_parameter(n).numel() for n, g in la.effective_parameters().items())


def test_a_projected_sum_that_is_none_is_reported():
    model = network()
    x, y = torch.randn(5, 2, 4, 4, dtype=torch.float64), torch.randint(3, (5,))
    la = KronLaplace(model).fit([(x, y)])
    moment = la.factors["0.s_fc.weight_in"].input_moment
    moment.total.sub_(0.01 * moment.total.abs().max() * torch.eye(16))
    moment.count(0)
    with pytest.raises(ArithmeticError, match="negative beyond rounding"):
        la.log_marginal_likelihood()


@pytest.mark.parametrize(
    ("kind", "likelihood", "resolution", "approximation", "side"),
    [
        ("interpolating", "classification", "shared", "expand", 2),
        ("exponential", "regression", "shared", "reduce", 1),
        ("interpolating", "regression", "per_channel", "expand", 1),
        ("exponential", "classification", "per_channel", "reduce", 2),
    ],
)
def test_exact_evidence_has_the_value_and_the_derivative_of_the_evidence(
    kind, likelihood, resolution, approximation, side
):
    model = network(kind, side)
    x, y = torch.randn(6, 2, 4, 4, dtype=torch.float64), targets(likelihood, 6, 3)
    sigma = 1.0 if likelihood == "classification" else 0.7
    options = {"resolution": resolution, "approximation": approximation}
    la = KronLaplace(model, likelihood, prior_precision=0.6, sigma_noise=sigma, **options)

    def value(*batches: tuple[Tensor, Tensor]) -> float:
        with torch.no_grad():
            return la.fit(batches).log_marginal_likelihood().item()

    found = {n: b.requires_grad_() for n, b in buffers(model).items()}
    delta = torch.full((len(la.parameter_names),), 0.6, dtype=torch.float64, requires_grad=True)
    evidence = exact_log_marginal_likelihood(la, x, y, delta)
    assert evidence.item() == pytest.approx(value((x[:4], y[:4]), (x[4:], y[4:])), rel=1e-12)
    gradients = torch.autograd.grad(evidence, [*found.values(), delta])
    (by_fit,) = torch.autograd.grad(la.fit([(x, y)]).log_marginal_likelihood(delta), delta)
    assert_same(gradients[-1], by_fit)
    step = 1e-5 if side == 2 else 2e-6  # three layers curve more
    for (name, buffer), gradient in zip(found.items(), gradients[:-1], strict=True):
        index = (min(1, len(buffer) - 1), 0) if buffer.dim() else ()
        with torch.no_grad():
            buffer[index] += step
            above = value((x, y))
            buffer[index] -= 2 * step
            below = value((x, y))
            buffer[index] += step
        assert float(gradient[index]) == pytest.approx((above - below) / (2 * step), rel=2e-5, abs=1e-6), name


def test_exact_evidence_of_rules_that_leave_differentiation_to_autograd():
    """The rule of the layer in between defines `outputs` only, and the next layer works in place."""
    layer = SparseConv2d(2, 3)
    behind = nn.Flatten(2), nn.Linear(16, 2), nn.Flatten()
    model = randomise(nn.Sequential(layer, Scaled(), nn.LeakyReLU(inplace=True), *behind))
    x, y = torch.randn(4, 2, 4, 4, dtype=torch.float64), torch.randint(6, (4,))
    la = KronLaplace(model)
    omega = layer.basis.inverse_lengthscale.requires_grad_()
    (gradient,) = torch.autograd.grad(exact_log_marginal_likelihood(la, x, y), omega)
    values = []
    with torch.no_grad():
        for step in (1e-5, -2e-5):
            omega += step
            values.append(la.fit([(x, y)]).log_marginal_likelihood().item())
    assert float(gradient) == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-5)
    assert model.training and all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_the_evidence_is_differentiable_with_its_factors_held(kind, likelihood, batches):
    model = network(kind)
    x, y = torch.randn(9, 2, 4, 4, dtype=torch.float64), targets(likelihood, 9, 3)
    sigma = 1.0 if likelihood == "classification" else 0.7
    la = KronLaplace(model, likelihood, prior_precision=0.6, sigma_noise=sigma)
    found = {n: b.requires_grad_() for n, b in buffers(model).items()}
    la.fit(batches(x, y, 4))
    with torch.no_grad():
        plain = la.log_marginal_likelihood()
    evidence = la.log_marginal_likelihood()
    assert evidence.item() == pytest.approx(plain.item(), rel=1e-12)
    gradients = dict(zip(found, torch.autograd.grad(evidence, list(found.values())), strict=True))

    def data_fit() -> Tensor:
        f = model(x)
        if likelihood == "classification":
            return -F.cross_entropy(f, y, reduction="sum")
        return torch.distributions.Normal(f, 0.7).log_prob(y).sum()

    through_network = dict(zip(found, torch.autograd.grad(data_fit(), list(found.values())), strict=True))
    for name, buffer in found.items():
        index = (1, 1) if buffer.dim() else ()

        def log_det(step: float, buffer: Tensor = buffer, index: tuple[int, ...] = index) -> float:
            with torch.no_grad():
                buffer[index] += step  # the factors follow by their projections, without a new fit
                value = sum(torch.logdet(torch.eye(len(m)).double() * 0.6 + m / sigma**2).item() for m in blocks())
                buffer[index] -= step
            return value

        def blocks() -> list[Tensor]:
            return [m for f in la.factors.values() for m in f.to_dense()]

        slope = (log_det(1e-5) - log_det(-1e-5)) / 2e-5
        expected = float(through_network[name][index]) - 0.5 * slope
        assert float(gradients[name][index]) == pytest.approx(expected, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_precisions_and_noise_have_their_gradients_beside_a_basis_that_learns(likelihood):
    model = network()
    la = KronLaplace(model, likelihood, prior_precision=0.6, sigma_noise=1.0 if likelihood == "classification" else 0.7)
    for buffer in buffers(model).values():
        buffer.requires_grad_()
    la.fit([(torch.randn(9, 2, 4, 4, dtype=torch.float64), targets(likelihood, 9, 3))])
    at = la.prior_precision.log().requires_grad_(), la.sigma_noise.log().requires_grad_()
    given = at if likelihood == "regression" else at[:1]

    def value(*logs: Tensor) -> Tensor:
        return evidence_at(la, *logs)

    gradients = torch.autograd.grad(value(*given), given)
    with torch.no_grad():
        for k, gradient in enumerate(gradients):
            for i in range(gradient.numel()):
                ends = []
                for step in (1e-5, -1e-5):
                    moved = [x.clone() for x in given]
                    moved[k].view(-1)[i] += step
                    ends.append(value(*moved).item())
                assert gradient.view(-1)[i].item() == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-5, abs=1e-6)


def test_gradients_add_up_over_fits_and_do_not_outlive_them():
    model = network()
    x, y = torch.randn(8, 2, 4, 4, dtype=torch.float64), torch.randint(3, (8,))
    omega = model[0].s_fc.basis_in.inverse_lengthscale.requires_grad_()
    la = KronLaplace(model).fit([(x, y)])
    (whole,) = torch.autograd.grad(la.log_marginal_likelihood(), omega)
    la.fit([(x[:3], y[:3])]).fit([(x[3:], y[3:])], override=False)
    assert_same(torch.autograd.grad(la.log_marginal_likelihood(), omega)[0], whole)
    model[0].s_fc.basis_out.anchors.requires_grad_()
    with pytest.raises(ValueError, match="other buffers require a gradient"):
        la.fit([(x, y)], override=False)
    with pytest.raises(RuntimeError, match=r"basis_out.anchors.*call fit again"):
        la.log_marginal_likelihood()
    with torch.no_grad():
        assert la.log_marginal_likelihood().isfinite()


def test_a_basis_that_changed_after_the_fit_is_another_network():
    model = network()
    x, y = torch.randn(6, 2, 4, 4, dtype=torch.float64), torch.randint(3, (6,))
    la = KronLaplace(model).fit([(x, y)])
    la.log_marginal_likelihood()
    basis = model[0].s_conv.basis
    basis.inverse_lengthscale.fill_(0.3)
    for ask in (la.log_marginal_likelihood, la.effective_parameters, lambda: la.log_det_posterior_precision):
        with pytest.raises(RuntimeError, match=r"basis '0.s_conv.basis' changed"):
            ask()
    factor = la.factors["0.s_conv.weight"]
    assert_same(factor.eigenvalues()[0], torch.linalg.eigvalsh(factor.inputs))  # factors follow their basis
    assert_same(la.fit([(x, y)]).log_marginal_likelihood(), KronLaplace(model).fit([(x, y)]).log_marginal_likelihood())


def test_a_loaded_state_has_its_own_gradients():
    model = network()
    x, y = torch.randn(8, 2, 4, 4, dtype=torch.float64), torch.randint(3, (8,))
    omega = model[0].s_fc.basis_in.inverse_lengthscale.requires_grad_()
    la, other = KronLaplace(model).fit([(x[:4], y[:4])]), KronLaplace(model).fit([(x[4:], y[4:])])
    other.load_state_dict(la.state_dict())
    gradients = [torch.autograd.grad(a.log_marginal_likelihood(), omega)[0] for a in (la, other)]
    assert_same(gradients[1], gradients[0])


def test_a_buffer_must_be_a_leaf_to_be_differentiated():
    model = network()
    logarithm = torch.tensor(-0.5, dtype=torch.float64, requires_grad=True)
    model[0].s_conv.basis.inverse_lengthscale = logarithm.exp()
    x, y = torch.randn(4, 2, 4, 4, dtype=torch.float64), torch.randint(3, (4,))
    la = KronLaplace(model)
    with pytest.raises(ValueError, match=r"0.s_conv.basis.inverse_lengthscale.*not a leaf"):
        la.fit([(x, y)])
    (gradient,) = torch.autograd.grad(exact_log_marginal_likelihood(la, x, y), logarithm)
    assert gradient.isfinite()


def test_a_buffer_that_nothing_reads_has_no_gradient():
    model = network()
    model.register_buffer("unused", torch.ones(2, dtype=torch.float64, requires_grad=True))
    x, y = torch.randn(4, 2, 4, 4, dtype=torch.float64), torch.randint(3, (4,))
    la = KronLaplace(model).fit([(x, y)])
    (gradient,) = torch.autograd.grad(la.log_marginal_likelihood(), model.unused)
    assert not gradient.any()


def test_exact_evidence_refuses_what_fit_refuses():
    model = network()
    la = KronLaplace(model)
    with pytest.raises(ValueError, match="no data"):
        exact_log_marginal_likelihood(la, torch.zeros(0, 2, 4, 4).double(), torch.zeros(0).long())
    spare = nn.ModuleDict({"used": model, "never": nn.Linear(2, 2).double()})
    spare.forward = lambda x: model(x)
    with pytest.raises(ValueError, match="never called"):
        exact_log_marginal_likelihood(KronLaplace(spare), torch.zeros(2, 2, 4, 4).double(), torch.zeros(2).long())


def test_a_buffer_that_shapes_no_basis_has_the_data_fits_gradient():
    parts = {"linear": nn.Linear(3, 2), "temperature": nn.Buffer(torch.tensor(0.8))}
    model = Function(lambda m, x: m.linear(x) * m.temperature, **parts).double()
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randint(2, (6,))
    temperature = model.temperature.requires_grad_()
    la = KronLaplace(model).fit([(x, y)])
    (gradient,) = torch.autograd.grad(la.log_marginal_likelihood(), temperature)
    (expected,) = torch.autograd.grad(-F.cross_entropy(model(x), y, reduction="sum"), temperature)
    assert_same(gradient, expected)
    (exact,) = torch.autograd.grad(exact_log_marginal_likelihood(la, x, y), temperature)
    assert abs(float(exact - gradient)) > 1e-3  # the curvature's part


def test_a_fit_leaves_no_trace_on_the_buffers():
    model = network()
    x, y = torch.randn(4, 2, 4, 4, dtype=torch.float64), torch.randint(3, (4,))
    for buffer in buffers(model).values():
        buffer.requires_grad_()
    la = KronLaplace(model).fit([(x, y)])
    assert all(b.requires_grad for b in buffers(model).values())
    with pytest.raises(ValueError, match="labels"):
        la.fit([(x, y + 7)])
    assert all(b.requires_grad for b in buffers(model).values())
    assert all(b.grad is None for b in buffers(model).values())
