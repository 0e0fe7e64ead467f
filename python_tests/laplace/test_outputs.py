"""Fits of networks whose outputs are sequences, images, logits, rates or natural parameters."""

from __future__ import annotations

import pytest
import torch
import torch.distributions as D
from torch import Tensor, nn

from ella_cuda.laplace import KronLaplace, exact_log_marginal_likelihood
from python_tests.laplace.checks import Function
from python_tests.laplace.test_likelihoods import CASES, bernoulli, categorical, gaussians, normal, poisson


def mixing() -> nn.Module:
    """(N, 3, D) -> (N, 3, D), in which every position sees all others."""
    return Function(lambda m, x: m.weights @ x, weights=nn.Buffer(torch.softmax(normal(3, 3, seed=4), 1)))


def natural() -> nn.Module:
    def forward(m: nn.Module, f: Tensor) -> Tensor:
        k = f.shape[1] // 2
        return torch.cat([f[:, :k], -0.5 * nn.functional.softplus(f[:, k:]) - 1e-3], 1)

    return Function(forward)


def seeded(*layers) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(layer() for layer in layers)).double()


def sequences() -> nn.Sequential:
    """(N, 3, 2) -> (N, 3, 4), its positions mixed between the layers."""
    return seeded(lambda: nn.Linear(2, 5), nn.Tanh, mixing, lambda: nn.Linear(5, 4))


def images(*last) -> nn.Sequential:
    """(N, 2, 3, 4) -> (N, 2, 3, 4)."""
    return seeded(lambda: nn.Conv2d(2, 3, 3, padding=1), nn.Tanh, lambda: nn.Conv2d(3, 2, 1), *last)


def vectors(outputs: int, *last) -> nn.Sequential:
    return seeded(lambda: nn.Linear(3, 5), nn.Tanh, lambda: nn.Linear(5, outputs), *last)


def negative(log_prob):
    return lambda f, y: -log_prob(f[None], y[None]).sum()


SEQUENCES, IMAGES, VECTORS = normal(5, 3, 2, seed=6), normal(5, 2, 3, 4, seed=6), normal(5, 3, seed=6)
PIXELS = normal(5, 2, 3, 4, seed=7)
FITS = {
    "sequences": (sequences, SEQUENCES, CASES["sequences"][1].argmax(2), "classification", categorical),
    "ignoring": (sequences, SEQUENCES, CASES["sequences"][2], "classification", categorical),
    "segmentation": (
        lambda: images(lambda: Function(lambda m, f: f.movedim(1, -1))),
        IMAGES,
        (PIXELS[:, 0] > 0).long().masked_fill(PIXELS[:, 1] > 1, -100),
        "classification",
        categorical,
    ),
    "image to image": (images, IMAGES, PIXELS, "regression", lambda f, y: D.Normal(f, 1.0).log_prob(y)),
    "masks": (images, IMAGES, PIXELS > 0, "binary", bernoulli),
    "counts": (images, IMAGES, PIXELS.exp().floor(), "poisson", poisson),
    "one logit": (lambda: vectors(1), VECTORS, VECTORS[:, 0] > 0, "binary", bernoulli),
    "heteroscedastic": (lambda: vectors(4, natural), VECTORS, normal(5, 2, seed=8), "heteroscedastic", gaussians),
}


@pytest.mark.parametrize("case", FITS)
def test_blocks_of_biases_are_those_of_the_dense_curvature(case, dense_ggn):
    make, x, y, likelihood, log_prob = FITS[case]
    model = make()
    la = KronLaplace(model, likelihood).fit([(x[:2], y[:2]), (x[2:], y[2:])])
    assert la.n_outputs == model(x)[0].numel()
    torch.testing.assert_close(la.log_likelihood, log_prob(model(x).detach(), y).sum())
    blocks = dense_ggn(model, x, y, negative(log_prob))
    biases = [name for name in la.factors if name.endswith("bias")]
    assert len(biases) == 2
    for name in biases:
        torch.testing.assert_close(la.factors[name].outputs[0], blocks[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", ["one logit", "heteroscedastic"])
def test_blocks_of_one_data_point_are_the_dense_ones(case, dense_ggn):
    make, x, y, likelihood, log_prob = FITS[case]
    model = make()
    la = KronLaplace(model, likelihood).fit([(x[:1], y[:1])])
    blocks = dense_ggn(model, x[:1], y[:1], negative(log_prob))
    for name in ("0.weight", "2.weight"):
        factor = la.factors[name]
        torch.testing.assert_close(torch.kron(factor.outputs[0], factor.inputs[0]), blocks[name])


@pytest.mark.parametrize("case", FITS)
def test_the_exact_evidence_is_that_of_the_fit(case):
    make, x, y, likelihood, _ = FITS[case]
    la = KronLaplace(make(), likelihood, prior_precision=0.3)
    found = exact_log_marginal_likelihood(la, x, y)
    torch.testing.assert_close(found, la.fit([(x, y)]).log_marginal_likelihood(), rtol=1e-10, atol=0)


@pytest.mark.parametrize("case", FITS)
def test_the_memory_budget_and_batches_change_nothing(case):
    make, x, y, likelihood, _ = FITS[case]
    model = make()
    whole = KronLaplace(model, likelihood).fit([(x, y)])
    parts = KronLaplace(model, likelihood, memory_budget=1).fit([(a[None], b[None]) for a, b in zip(x, y, strict=True)])
    assert KronLaplace(model, likelihood).memory_estimate(x) > 0
    torch.testing.assert_close(whole.log_marginal_likelihood(), parts.log_marginal_likelihood(), rtol=1e-10, atol=0)


def test_a_fit_to_positions_is_that_to_each_as_a_data_point():
    """Where positions do not see each other; those that are ignored are data points that are not there."""
    x, y = SEQUENCES, CASES["sequences"][2]
    model = seeded(lambda: nn.Linear(2, 5), nn.Tanh, lambda: nn.Linear(5, 4))
    la = KronLaplace(model).fit([(x, y)])
    apart = KronLaplace(model).fit([(x[y != -100], y[y != -100])])
    assert (la.n_data, apart.n_data) == (5, 10)
    torch.testing.assert_close(la.log_likelihood, apart.log_likelihood)
    for name, factor in apart.factors.items():
        positions = 3 if name.endswith("weight") else 1  # as the rule's convention is
        torch.testing.assert_close(la.factors[name].outputs * positions, factor.outputs, rtol=1e-10, atol=1e-14)


def test_labels_to_be_ignored_are_those_of_the_argument():
    x, y = SEQUENCES, CASES["sequences"][1].argmax(2)
    model = sequences()
    by_argument = KronLaplace(model, ignore_index=2).fit([(x, y)])
    by_default = KronLaplace(model).fit([(x, y.masked_fill(y == 2, -100))])
    assert by_argument.log_marginal_likelihood() == by_default.log_marginal_likelihood()
    assert by_argument.log_likelihood != KronLaplace(model).fit([(x, y)]).log_likelihood


LABELS = CASES["sequences"][2]


@pytest.mark.parametrize("fisher", ["exact", "mc"])
@pytest.mark.parametrize("vector", [False, True])
def test_a_batch_without_labels_adds_nothing_to_likelihood_and_curvature(fisher, vector):
    model, x, y = (vectors(3), VECTORS, torch.arange(5) % 3) if vector else (sequences(), SEQUENCES, LABELS)
    generator = torch.Generator()
    options = {"fisher": fisher, "column_tolerance": 0.01 if fisher == "exact" else 0.0}
    la = KronLaplace(model, **options).fit([(x, y)], generator=generator.manual_seed(1))
    more = KronLaplace(model, **options)
    more.fit([(x, y), (x, torch.full_like(y, -100))], generator=generator.manual_seed(1))
    assert (la.n_data, more.n_data) == (5, 10) and more.log_likelihood == la.log_likelihood
    for name, factor in la.factors.items():
        assert torch.equal(more.factors[name].outputs, factor.outputs)
    nothing = KronLaplace(model, **options).fit([(x, torch.full_like(y, -100))])
    assert nothing.log_likelihood == 0 and nothing.log_marginal_likelihood().isfinite()


def test_the_tolerance_holds_for_sequences(dense_ggn):
    """The trace of the last bias' block is that of the output Hessian."""
    model = seeded(lambda: nn.Linear(2, 5), nn.Tanh, lambda: nn.Linear(5, 40))
    x, y = 3 * normal(6, 4, 2), torch.zeros(6, 4).long()
    exact, some = (KronLaplace(model, column_tolerance=t).fit([(x, y)]) for t in (0.0, 0.1))
    traces = [float(la.factors["2.bias"].outputs[0].trace()) for la in (exact, some)]
    assert 0.9 * traces[0] <= traces[1] < traces[0]


def test_targets_are_counted_whatever_the_batches_shapes():
    """The Gaussian's normaliser is of every target; batches of sequences differ in length."""
    model = seeded(lambda: nn.Linear(2, 3))
    batches = [(normal(4, t, 2, seed=t), normal(4, t, 3, seed=10 + t)) for t in (2, 5)]
    la = KronLaplace(model, "regression", sigma_noise=0.5).fit(batches[:1]).fit(batches[1:], override=False)
    expected = sum(D.Normal(model(x).detach(), 0.5).log_prob(y).sum() for x, y in batches)
    torch.testing.assert_close(la.log_likelihood, expected)
    other = KronLaplace(model, "regression", sigma_noise=0.5)
    other.load_state_dict(la.state_dict())
    assert other.log_likelihood == la.log_likelihood
    (x, y), _ = batches
    found = exact_log_marginal_likelihood(la, x, y)
    torch.testing.assert_close(found, other.fit([(x, y)]).log_marginal_likelihood(), rtol=1e-10, atol=0)


def test_the_evidence_has_the_right_slope_in_sigma():
    """Of image-to-image regression, by finite differences of the whole evidence."""
    la = KronLaplace(images(), "regression").fit([(IMAGES, PIXELS)])
    sigma = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(la.log_marginal_likelihood(None, sigma), sigma)
    step = 1e-5
    ends = [
        KronLaplace(la.model, "regression", sigma_noise=0.7 + s).fit([(IMAGES, PIXELS)]).log_marginal_likelihood()
        for s in (-step, step)
    ]
    torch.testing.assert_close(slope, (ends[1] - ends[0]) / (2 * step), rtol=1e-6, atol=0)


def test_a_buffer_inside_learns_from_sequences():
    """The gradient of the log likelihood in a buffer, by finite differences."""
    model = sequences()
    la, weights = KronLaplace(model), model[2].weights
    weights.requires_grad_()
    la.fit([(SEQUENCES, LABELS)])
    (slope,) = torch.autograd.grad(la.log_likelihood, weights)
    weights.requires_grad_(False)
    ends = []
    for step in (-1e-5, 1e-5):
        weights[1, 2] += step
        ends.append(float(categorical(model(SEQUENCES).detach(), LABELS).sum()))
        weights[1, 2] -= step
    assert float(slope[1, 2]) == pytest.approx((ends[1] - ends[0]) / 2e-5, rel=1e-6)


@pytest.mark.parametrize(
    ("last", "y", "message"),
    [
        (
            lambda f: f.movedim(-1, 1),
            LABELS,
            r"classes last, \(N, \.\.\., K\), got \(5, 4, 3\) for targets \(5, 3\): return outputs\.movedim\(1, -1\)",
        ),
        (
            lambda f: f.flatten(0, 1),
            LABELS.flatten(),
            r"return the outputs of a data point as one row, \(N, \.\.\.\), got shape \(6, 4\) for N = 2",
        ),
    ],
)
def test_outputs_of_other_layouts_are_told_what_to_return(last, y, message):
    model = nn.Sequential(sequences(), Function(lambda m, f: last(f)))
    with pytest.raises(ValueError, match=message):
        KronLaplace(model).fit([(SEQUENCES, y)])


def test_outputs_that_are_no_natural_parameters_are_refused():
    model = vectors(4)
    with torch.no_grad():
        model[2].bias[2:] = torch.tensor([-9.0, 9.0])
    with pytest.raises(ValueError, match=r"must be negative, got up to .*softplus"):
        KronLaplace(model, "heteroscedastic").fit([(VECTORS, VECTORS[:, :2])])
