"""Log likelihoods and square roots of output Hessians beside those of torch.distributions, and the registry of likelihoods."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributions as D
from torch import nn

from ella_cuda.laplace import IndependentLikelihood, KronLaplace, Likelihood, register_likelihood
from ella_cuda.laplace.batches import checked_outputs
from ella_cuda.laplace.likelihoods import (
    LIKELIHOODS,
    Binary,
    Classification,
    Heteroscedastic,
    Poisson,
    Regression,
    likelihood_of,
)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def natural(n: int, k: int) -> torch.Tensor:
    return torch.cat([2 * normal(n, k), -0.1 - normal(n, k, seed=1).square()], 1)


def categorical(f: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    counted = y != -100
    return D.Categorical(logits=f[counted], validate_args=False).log_prob(y[counted])


def gaussians(f: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of a mean and a variance, in a matrix or a vector."""
    eta_1, eta_2 = f.chunk(2, -1)
    variance = -1 / (2 * eta_2)
    return D.Normal(eta_1 * variance, variance.sqrt(), validate_args=False).log_prob(y.view(eta_1.shape))


def bernoulli(f: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return D.Bernoulli(logits=f, validate_args=False).log_prob(y.view(f.shape).to(f))


def poisson(f: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return D.Poisson(f.exp(), validate_args=False).log_prob(y.view(f.shape).to(f))


def unit_normal(f: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return D.Normal(f, 1.0, validate_args=False).log_prob(y)


LABELS = torch.tensor([[0, -100, 3], [2, 2, 1], [-100, -100, -100], [3, 0, -100], [1, 1, 1]])
# By name: the likelihood, outputs, targets, and log p by torch.distributions, of a batch and of a data point
CASES = {
    "classes": (Classification(), 2 * normal(5, 4), torch.tensor([0, 3, 2, 1, 1]), categorical),
    "some ignored": (Classification(), 2 * normal(5, 4), torch.tensor([0, -100, 2, 1, -100]), categorical),
    "sequences": (Classification(), 2 * normal(5, 3, 4), LABELS, categorical),
    "pixels": (Classification(), normal(5, 2, 3, 2), torch.arange(30).view(5, 2, 3) % 2, categorical),
    "regression": (Regression(), normal(5, 3), normal(5, 3, seed=2), unit_normal),
    "image to image": (Regression(), normal(5, 2, 3, 2), normal(5, 2, 3, 2, seed=2), unit_normal),
    "one logit": (Binary(), 3 * normal(5, 1), torch.tensor([1, 1, 0, 0, 0]), bernoulli),
    "logits": (Binary(), 3 * normal(5, 2, 3), normal(5, 2, 3, seed=2) > 0, bernoulli),
    "counts": (Poisson(), normal(5, 3), torch.arange(15).view(5, 3), poisson),
    "counts, image to image": (Poisson(), normal(5, 2, 2), torch.arange(20.0).view(5, 2, 2), poisson),
    "heteroscedastic": (Heteroscedastic(), natural(5, 3), normal(5, 3, seed=2), gaussians),
    "heteroscedastic, one": (Heteroscedastic(), natural(5, 1), normal(5, seed=2), gaussians),
}
each_case = pytest.mark.parametrize("case", CASES)


def hessian_of(columns):
    """Sum of outer products of the columns, (N, entries, entries)."""
    columns = columns.flatten(2)
    return torch.einsum("kna,knb->nab", columns, columns)


def expected_hessian(outputs, targets, log_prob):
    """By torch.func, one data point after the other."""
    found = []
    for f, y in zip(outputs, targets, strict=True):
        hessian = torch.func.hessian(lambda flat, f=f, y=y: -log_prob(flat.view(f.shape), y).sum())(f.flatten())
        found.append(hessian)
    return torch.stack(found)


@each_case
def test_columns_are_a_square_root_of_the_hessian(case):
    likelihood, outputs, targets, log_prob = CASES[case]
    columns = likelihood.columns(outputs, targets)
    assert columns[:].shape == (len(columns), *outputs.shape)
    expected = expected_hessian(outputs, targets, log_prob)
    torch.testing.assert_close(hessian_of(columns[:]), expected, rtol=1e-9, atol=1e-12)
    parts = torch.cat([columns[begin : begin + 2] for begin in range(0, len(columns), 2)])
    assert torch.equal(parts, columns[:])
    single = hessian_of(likelihood.columns(outputs.float(), targets)[:])
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), expected, rtol=1e-5, atol=1e-6)


@each_case
@pytest.mark.parametrize("tolerance", [0.3, 0.05])
def test_columns_left_out_are_within_the_tolerance_and_no_fewer_than_possible(case, tolerance):
    likelihood, outputs, targets, log_prob = CASES[case]
    all_columns, columns = likelihood.columns(outputs, targets), likelihood.columns(outputs, targets, tolerance)[:]
    if isinstance(likelihood, Regression):
        assert len(columns) == len(all_columns)
        return
    expected = expected_hessian(outputs, targets, log_prob)
    trace = expected.diagonal(dim1=1, dim2=2).sum()
    assert trace - columns.square().sum() <= tolerance * trace
    assert len(columns) == 1 or trace - columns[:-1].square().sum() > tolerance * trace
    left_out = expected - hessian_of(columns)
    assert torch.linalg.eigvalsh(left_out).min() > -1e-10  # a lower bound of the Hessian, data point by data point


def test_the_tolerance_saves_columns():
    def count(likelihood, outputs, targets, tolerance=0.0):
        return len(likelihood.columns(outputs, targets, tolerance))

    f = 4 * normal(50, 20)
    labels = torch.zeros(50).long()
    assert count(Classification(), f, labels, 0.05) < 19 == count(Classification(), f, labels)
    positions = 4 * normal(10, 5, 20), torch.zeros(10, 5).long()
    assert count(Classification(), *positions, 0.05) < 60 < 95 == count(Classification(), *positions)
    assert count(Binary(), 4 * normal(50, 20), torch.zeros(50, 20), 0.05) < 15
    assert count(Poisson(), 2 * normal(50, 20), torch.zeros(50, 20), 0.05) < 15


def test_positions_without_a_label_have_no_columns():
    """Of T positions with K classes each data point has columns for its labels alone, wherever they are."""
    labels = torch.full((3, 10), -100)
    labels[0, 2] = labels[0, 9] = labels[1, 5] = labels[2, 0] = 1
    assert len(Classification().columns(normal(3, 10, 4), labels)) == 2 * 3
    columns = Classification().columns(normal(3, 10, 4), labels.fill_(-100))
    assert len(columns) == 1 and not columns[:].any()


@pytest.mark.parametrize("k", [2, 3, 10])
def test_softmax_columns_are_a_cholesky_factor_of_rank_k_minus_one(k):
    f = 2 * torch.randn(7, k, dtype=torch.float64)
    columns = Classification().columns(f, torch.zeros(7).long())[:]
    assert columns.shape == (k - 1, 7, k)
    by_likelihood = columns.permute(1, 2, 0).take_along_dim(f.argsort(1, descending=True)[:, :, None], 1)
    assert not by_likelihood.triu(1).any()  # Cholesky: (N, K, K-1) lower triangular


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_softmax_columns_stay_accurate_for_certain_predictions(dtype, positions):
    f = torch.tensor([[0.0, 200.0, -300.0], [800.0, 0.0, 0.0], [0.0, 0.0, 1e4], [60.0, 0.0, 59.0]], dtype=dtype)
    labels = torch.zeros(4).long()
    if positions:
        columns = Classification().columns(f.view(2, 2, 3), labels.view(2, 2))[:]
        # (columns, 2, 2, 3): every column is of one position
        assert (columns != 0).any(3).sum(2).max() == 1
        actual = hessian_of(columns.view(-1, 4, 3).double())
    else:
        actual = hessian_of(Classification().columns(f, labels)[:].double())
    p = f.double().softmax(1)
    log_p = f.double().log_softmax(1)
    q = -torch.expm1(log_p)  # 1 - p without cancellation
    expected = -p[:, :, None] * p[:, None, :]
    expected.diagonal(dim1=1, dim2=2).copy_(p * q)
    assert actual.isfinite().all()
    torch.testing.assert_close(actual, expected, rtol=1e-5 if dtype == torch.float32 else 1e-10, atol=1e-45)


def test_softmax_columns_of_classes_that_cannot_be():
    """Logits of -inf, as masks give: the other classes' Hessian, bordered by zeros."""
    logits = torch.tensor([[0.0, 0.5, 0.3, -torch.inf, -torch.inf], [-torch.inf, 2.0, -1.0, -torch.inf, 0.1]]).double()
    labels = torch.tensor([0, 1])
    columns = Classification().columns(logits, labels)[:]
    p = torch.softmax(logits, 1)
    torch.testing.assert_close(hessian_of(columns), torch.diag_embed(p) - p[:, :, None] * p[:, None, :])
    broken = logits.clone()
    broken[0, 0] = torch.nan
    assert Classification().columns(broken, labels)[:].isnan().any()


def test_logits_far_from_zero_keep_their_curvature():
    f = torch.tensor([[150.0, -150.0]], dtype=torch.float32)
    found = Binary().columns(f, torch.tensor([[1, 0]]))[:].double().square().sum(0)
    expected = torch.sigmoid(-f.double().abs())  # e^-150 is no float32, its root is
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


@each_case
def test_sampled_columns_average_to_the_hessian(case):
    likelihood, outputs, targets, log_prob = CASES[case]
    outputs, targets, draws = outputs[:2], targets[:2], 4000
    generator = torch.Generator().manual_seed(5)
    repeated = [t.repeat(draws, *[1] * (t.dim() - 1)) for t in (outputs, targets)]
    columns = likelihood.sampled_column(*repeated, generator)[:]
    assert columns.shape == (1, 2 * draws, *outputs.shape[1:])
    columns = columns[0].flatten(1)
    products = (columns[:, :, None] * columns[:, None, :]).unflatten(0, (draws, 2))
    error = (products.mean(0) - expected_hessian(outputs, targets, log_prob)).abs()
    assert (error <= 5 * products.std(0) / draws**0.5 + 5 / draws).all()  # a rare class may never be drawn
    again = likelihood.sampled_column(*repeated, generator.manual_seed(5))[:]
    assert torch.equal(again[0].flatten(1), columns)


@pytest.mark.parametrize("case", ["pixels", "image to image", "counts, image to image", "logits"])
def test_outputs_and_targets_may_lie_otherwise(case):
    """As those whose axes were moved."""
    likelihood, outputs, targets, _ = CASES[case]
    moved = [t.movedim(1, -1).contiguous().movedim(-1, 1) for t in (outputs, targets)]
    assert not any(t.is_contiguous() for t in moved)
    assert torch.equal(likelihood.columns(*moved)[:], likelihood.columns(outputs, targets)[:])
    draws = [likelihood.sampled_column(*two, torch.Generator().manual_seed(1)) for two in (moved, (outputs, targets))]
    assert torch.equal(draws[0][:], draws[1][:])
    for value in (likelihood.statistic, lambda *two: likelihood.loss(*two, torch.ones(()))):
        torch.testing.assert_close(value(*moved), value(outputs, targets))


def test_many_columns_are_summed_with_signs_in_parts(monkeypatch):
    likelihood, outputs, targets, _ = CASES["heteroscedastic"]
    whole = likelihood.sampled_column(outputs, targets, torch.Generator().manual_seed(3))
    monkeypatch.setattr("ella_cuda.laplace.likelihoods.SIGNED_BYTES", 1)
    parts = likelihood.sampled_column(outputs, targets, torch.Generator().manual_seed(3))
    torch.testing.assert_close(whole, parts)
    assert whole.ne(likelihood.columns(outputs, targets)[:].sum(0)).any()


@each_case
@pytest.mark.parametrize("sigma", [1.0, 0.7])
def test_log_likelihoods_are_those_of_torch_distributions(case, sigma):
    likelihood, outputs, targets, log_prob = CASES[case]
    sigma_noise = torch.tensor(sigma, dtype=torch.float64)
    statistic = likelihood.statistic(outputs, targets)
    assert statistic.dtype == torch.float64 and statistic.shape == ()
    found = likelihood.log_likelihood(statistic, targets.numel(), sigma_noise)
    if likelihood.has_noise:

        def log_prob(f, y):
            return D.Normal(f, sigma).log_prob(y)

    torch.testing.assert_close(found, log_prob(outputs, targets).sum(), rtol=1e-12, atol=1e-12)


@each_case
def test_a_steps_loss_has_the_gradient_of_the_mean_of_minus_log_p(case):
    likelihood, outputs, targets, log_prob = CASES[case]
    variance = torch.tensor(0.49 if likelihood.has_noise else 1.0, dtype=torch.float64)
    f = outputs.clone().requires_grad_()
    loss = likelihood.loss(f, targets, variance)
    (found,) = torch.autograd.grad(loss, f)
    expected = -log_prob(f, targets).sum() / len(targets) / variance
    torch.testing.assert_close(found, torch.autograd.grad(expected, f)[0], rtol=1e-10, atol=1e-12)
    if not likelihood.has_noise:  # else up to a constant
        torch.testing.assert_close(loss, expected)


def test_losses_of_reduced_outputs_are_of_full_precision():
    """A network's own autocast may give bfloat16, which holds whole numbers up to 256."""
    f, counts = torch.tensor([[6.25]], dtype=torch.bfloat16), torch.tensor([[519]])
    expected = -D.Poisson(torch.tensor(6.25, dtype=torch.float64).exp()).log_prob(torch.tensor(519.0)).item()
    assert float(Poisson().loss(f, counts, torch.ones(()))) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("case", ["classes", "some ignored", "sequences", "one logit", "logits"])
def test_hits_are_counted_where_there_are_labels(case):
    likelihood, outputs, targets, _ = CASES[case]
    right = of = 0
    for f, y in zip(outputs.reshape(targets.numel(), -1).tolist(), targets.flatten().tolist(), strict=True):
        if y != -100:
            of += 1
            right += y == (f.index(max(f)) if isinstance(likelihood, Classification) else f[0] > 0)
    assert likelihood.has_classes and [int(t) for t in likelihood.hits(outputs, targets)] == [right, of]
    assert 0 < right < of


def test_a_class_that_is_ignored_is_no_hit():
    f, y = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]), torch.tensor([1, 0, 0])
    assert [int(t) for t in Classification(1).hits(f, y)] == [1, 2]


CLASSES, BINARY, COUNTS, NATURAL = Classification(), Binary(), Poisson(), Heteroscedastic()
BYTES, UNSURE = torch.tensor([0, 156], dtype=torch.uint8), torch.tensor([[1.0, -1.0], [-3.0, 0.25]])
# The likelihood, outputs or their shape, targets or the shape of integers
REFUSED = [
    (CLASSES, (2, 3), torch.tensor([0, 3]), ValueError, "labels must lie in 0..2 .* got 0..3"),
    (CLASSES, (2, 3), torch.tensor([-1, 0]), ValueError, "labels must lie in 0..2 .* got -1..0"),
    (CLASSES, (2, 3), torch.tensor([-100, 3]), ValueError, r"be ignore_index = -100, got 0\.\.3"),
    (Classification(1), (2, 3), torch.tensor([-100, 1]), ValueError, r"= 1, got -100\.\.0"),
    (CLASSES, (2, 3), BYTES, ValueError, r"got 0\.\.156"),  # -100 in bytes
    (CLASSES, (2, 3), torch.zeros(2), TypeError, "integer class indices, got dtype torch.float32"),
    (CLASSES, (2, 3), (2, 3), ValueError, r"shape \(2,\), got .* \(2, 3\); .*one-hot .*y\.argmax\(1\)\.$"),
    (CLASSES, (2, 3), (2, 1), ValueError, r"shape \(2,\), got .* \(2, 1\); pass y\.squeeze\(1\)\.$"),
    (CLASSES, (2, 1), (2,), ValueError, "at least 2 outputs .*likelihood='binary'"),
    (CLASSES, (2, 4, 5, 3), (2, 5, 3), ValueError, r"classes last, \(N, \.\.\., K\), got .*return outputs\.movedim\(1, -1\)"),
    (CLASSES, (2, 4, 5), (2,), ValueError, r"class indices of shape \(2, 4\), got shape \(2,\)\.$"),
    (Regression(), (2, 3), torch.zeros(2), ValueError, r"outputs' shape \(2, 3\), got \(2,\)\.$"),
    (Regression(), (2, 3), (2, 3), TypeError, "real numbers .* got dtype torch.int64"),
    (Regression(), (2, 1), torch.zeros(2), ValueError, r"outputs' shape \(2, 1\), got \(2,\); pass y\[:, None\]\.$"),
    (BINARY, (2, 3), torch.zeros(2), ValueError, r"outputs' shape \(2, 3\), got \(2,\)\.$"),
    (BINARY, (2, 1), torch.tensor([1.0, 0.5]), ValueError, r"0 or 1 for likelihood='binary', got 0\.5"),
    (BINARY, (2, 1), torch.tensor([1.0, math.nan]), ValueError, "got nan"),
    (COUNTS, (2, 1), torch.tensor([3.0, 2.5]), ValueError, "whole numbers from 0 on .* got 2.5"),
    (COUNTS, (2, 1), torch.tensor([3, -2]), ValueError, "whole numbers from 0 on .* got -2"),
    (COUNTS, (2, 1), torch.tensor([3.0, math.inf]), ValueError, "got inf"),
    (NATURAL, (2, 3), torch.zeros(2, 1), ValueError, r"outputs \(N, 2K\), .* got \(2, 3\)"),
    (NATURAL, -torch.ones(2, 4), torch.zeros(2, 4), ValueError, r"half .* shape \(2, 2\), got \(2, 4\)"),
    (NATURAL, -torch.ones(2, 2), (2,), TypeError, "real numbers .* got dtype torch.int64"),
    (NATURAL, UNSURE, torch.zeros(2), ValueError, r"must be negative, got up to 0\.25; end the network in .*F\.softplus"),
]  # fmt: skip


@pytest.mark.parametrize(("likelihood", "outputs", "y", "error", "message"), REFUSED)
def test_targets_that_do_not_fit_are_refused(likelihood, outputs, y, error, message):
    outputs = torch.zeros(outputs) if isinstance(outputs, tuple) else outputs
    with pytest.raises(error, match=message):
        likelihood.check(outputs, torch.zeros(y).long() if isinstance(y, tuple) else y)


@each_case
def test_targets_that_fit_pass_and_none_are_nothing_wrong(case):
    likelihood, outputs, targets, _ = CASES[case]
    likelihood.check(outputs, targets)
    likelihood.check(outputs[:0], targets[:0])
    given, fit = likelihood.admitted(outputs, targets)
    assert torch.equal(given, targets) and fit.item() is True
    for tolerance in (0.0, 0.5):
        assert likelihood.columns(outputs[:0], targets[:0], tolerance)[:].shape[1:] == (0, *outputs.shape[1:])
    assert likelihood.statistic(outputs[:0], targets[:0]) == 0


@pytest.mark.parametrize(("case", "wrong"), [("classes", 4), ("classes", -1), ("sequences", 4), ("logits", 2), ("counts", -1)])  # fmt: skip
def test_values_that_do_not_fit_are_noted_and_harmless(case, wrong):
    """For a recorded step, which cannot raise."""
    likelihood, outputs, targets, _ = CASES[case]
    targets = targets.long().clone()
    targets.view(-1)[0] = wrong
    given, fit = likelihood.admitted(outputs, targets)
    assert fit.item() is False
    assert torch.equal(given.flatten()[1:], targets.flatten()[1:])
    likelihood.loss(outputs, given, torch.ones(()))  # raises nothing


@pytest.mark.parametrize(
    ("outputs", "error", "words"),
    [
        (torch.zeros(2), ValueError, r"got shape \(2,\) for N = 2; of one output per data point return outputs\[:, None\]\.$"),
        (torch.zeros(()), ValueError, r"must return a tensor \(N, K\), got shape \(\) for N = 2\.$"),
        (torch.zeros(6, 3), ValueError, r"one row, \(N, \.\.\.\), got shape \(6, 3\) for N = 2"),
        ((torch.zeros(2, 3), None), TypeError, r"must return a tensor \(N, K\), got tuple of 2; wrap"),
        ({"logits": torch.zeros(2, 3)}, TypeError, r"got dict with the keys 'logits'; wrap"),
    ],
)  # fmt: skip
def test_outputs_that_are_no_matrix_are_refused(outputs, error, words):
    with pytest.raises(error, match=words):
        checked_outputs(outputs, 2)


def test_log_likelihoods_of_float32_outputs_are_summed_in_float64():
    f, targets, labels = 1000 + torch.randn(4096, 5), torch.randn(4096, 5), torch.randint(5, (4096,))
    expected = -0.5 * (f.double() - targets.double()).square().sum()
    torch.testing.assert_close(Regression().statistic(f, targets), expected, rtol=1e-13, atol=0)
    expected = D.Categorical(logits=f.double()).log_prob(labels).sum()
    torch.testing.assert_close(Classification().statistic(f, labels), expected, rtol=1e-12, atol=0)


# the registry ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr("ella_cuda.laplace.likelihoods.LIKELIHOODS", kept := dict(LIKELIHOODS))
    return kept


def make_gamma() -> type[Likelihood]:
    @register_likelihood("gamma")
    class Gamma(IndependentLikelihood):
        """Of a given shape; outputs are log rates."""

        def __init__(self, shape: float = 1.0) -> None:
            self.shape = shape

        def log_prob(self, outputs, targets):
            constant = (self.shape - 1) * targets.log() - math.lgamma(self.shape)
            return self.shape * outputs - outputs.exp() * targets + constant

        def second_derivative(self, outputs, targets):
            return outputs.exp() * targets

    return Gamma


def test_a_likelihood_of_ones_own(registry, dense_ggn):
    """By name and as an object: evidence, curvature and state; the Hessian is of the targets too."""
    gamma = make_gamma()
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = normal(6, 3), normal(6, 2).exp()
    la = KronLaplace(model, gamma(2.5)).fit([(x[:4], y[:4]), (x[4:], y[4:])])
    assert la.likelihood == "gamma" and "likelihood='gamma(shape=2.5)'" in repr(la)
    f = model(x).detach()
    torch.testing.assert_close(la.log_likelihood, D.Gamma(2.5, f.exp()).log_prob(y).sum())
    blocks = dense_ggn(model, x, y, lambda f, y: -D.Gamma(2.5, f.exp(), validate_args=False).log_prob(y).sum())
    for name in ("0.bias", "2.bias"):
        torch.testing.assert_close(la.factors[name].outputs[0], blocks[name])
    other = KronLaplace(model, gamma(shape=2.5))
    other.load_state_dict(la.state_dict())
    assert other.log_marginal_likelihood() == la.log_marginal_likelihood()
    for wrong in ("gamma", gamma(2.0)):
        with pytest.raises(ValueError, match=r"likelihood is 'gamma\(shape=2\.5\)' in the state, but 'gamma"):
            KronLaplace(model, wrong).load_state_dict(la.state_dict())
    assert KronLaplace(model, "gamma").fit([(x, y)], generator=None).log_likelihood.isfinite()
    assert KronLaplace(model, "gamma", fisher="mc").fit([(x, y)]).log_marginal_likelihood().isfinite()
    with pytest.raises(ValueError, match="sigma_noise belongs to likelihood='regression'; it must be 1 for gamma"):
        KronLaplace(model, "gamma", sigma_noise=2.0)


def test_columns_of_ones_own_may_be_a_tensor(registry):
    @register_likelihood("dense")
    class Dense(Likelihood):
        def check(self, outputs, targets):
            pass

        def log_prob(self, outputs, targets):
            return -0.5 * (outputs - targets).square()

        def columns(self, outputs, targets, tolerance=0.0):
            return torch.eye(outputs.shape[1], dtype=outputs.dtype)[:, None].expand(-1, *outputs.shape)

    model, x, y = nn.Linear(3, 2).double(), normal(5, 3), normal(5, 2)
    ours, theirs = (KronLaplace(model, name, memory_budget=1).fit([(x, y)]) for name in ("dense", "regression"))
    torch.testing.assert_close(ours.factors["weight"].outputs, theirs.factors["weight"].outputs)
    assert KronLaplace(model, "dense", fisher="mc").fit([(x, y)]).log_marginal_likelihood().isfinite()


def test_what_is_no_likelihood_is_not_registered(registry):
    for wrong in (Binary, ""):
        with pytest.raises(TypeError, match=r"expected a name, got .*write @register_likelihood\(\"name\"\)"):
            register_likelihood(wrong)
    for wrong in (nn.Linear, Binary()):
        with pytest.raises(TypeError, match=r"register_likelihood\('mine'\): expected a subclass of .*Likelihood, got"):
            register_likelihood("mine")(wrong)
    with pytest.raises(ValueError, match=r"'binary' is the name of ella_cuda\.laplace\.likelihoods\.Binary; choose"):
        register_likelihood("binary")(Poisson)
    first, second = make_gamma(), make_gamma()  # as a notebook's cell that is run again
    assert first is not second and likelihood_of("gamma").__class__ is second


def test_what_is_no_registered_likelihood_is_refused(registry):
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"likelihood must be one of 'classification', .*'regression', .*got 'normal'"):
        KronLaplace(model, "normal")
    with pytest.raises(TypeError, match=r"got the class; pass Classification\(\.\.\.\)"):
        KronLaplace(model, Classification)

    class Mine(Binary):
        pass

    with pytest.raises(TypeError, match=r"the class Mine is not registered; decorate it with @.*register_likelihood"):
        KronLaplace(model, Mine())


def test_the_label_that_is_ignored():
    model = nn.Linear(3, 2)
    la = KronLaplace(model, ignore_index=1)
    assert la.likelihood_function.ignore_index == 1 and "'classification(ignore_index=1)'" in repr(la)
    assert repr(Classification()) == repr(Classification(-100)) == "classification"
    assert KronLaplace(model, Classification(1)).likelihood_function.ignore_index == 1
    assert KronLaplace(model, Classification(1), ignore_index=1).likelihood == "classification"
    assert KronLaplace(model, "binary").likelihood_function.name == "binary"
    with pytest.raises(TypeError, match=r"ignore_index must be an integer, got 1\.0"):
        KronLaplace(model, ignore_index=1.0)
    for other in ("regression", Classification(2)):
        with pytest.raises(ValueError, match="ignore_index belongs to likelihood='classification', got 1 for"):
            KronLaplace(model, other, ignore_index=1)
