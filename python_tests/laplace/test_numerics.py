"""Eigenvalues: precision, rounding below zero, and sums that are no sums of outer products."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from ella_cuda.laplace import FactorShape, KroneckerFactor, KronLaplace, SecondMoment, second_moment
from ella_cuda.laplace.posterior import eigenbases_of
from ella_cuda.laplace.second_moment import WHOLE


def moment(total: torch.Tensor, rows: int = 1) -> SecondMoment:
    m = SecondMoment(*total.shape[:2], total, "layer.weight (input side)")
    m.total.copy_(total)
    m.count(rows)
    return m


def test_float32_eigenvalues_would_break_the_log_determinant():
    # Inputs of very different scales, D M D with M well conditioned: entries are accurate in float32 at every scale,
    # and Cholesky of the stored numbers in float64 keeps that accuracy.
    size, delta, errors = 16, 1e-16, []
    correlation = 0.5 + 0.5 * torch.eye(size, dtype=torch.float64)
    for _ in range(20):  # orders: how well the solver does in float32 depends on them
        scales = torch.logspace(0, -5, size, dtype=torch.float64)[torch.randperm(size)]
        total = (scales[:, None] * correlation * scales).float()
        dense = torch.kron(total.double(), total.double()) + delta * torch.eye(size**2, dtype=torch.float64)
        truth = 2 * torch.linalg.cholesky(dense).diagonal().log().sum()
        factor = KroneckerFactor(FactorShape(1, size, size, 1), *(moment(total[None], size) for _ in range(2)))
        factor.n_data = 1
        torch.testing.assert_close(factor.logdet(torch.tensor(delta, dtype=torch.float64)), truth, rtol=1e-6, atol=0)
        single = torch.linalg.eigvalsh(total).double().clamp(min=0)
        errors.append((torch.log(single[:, None] * single + delta).sum() - truth).abs())
    assert max(errors) > 10  # nats


def test_eigenvalues_negative_within_rounding_are_clamped():
    direction = torch.randn(6, dtype=torch.float64)
    total = torch.outer(direction, direction) - 1e-7 * torch.eye(6, dtype=torch.float64)
    values = moment(total.float()[None]).eigenvalues()
    assert values.dtype == torch.float64 and (values >= 0).all() and (values[0, :5] < 1e-7).all()


def test_the_rounding_of_a_long_sum_is_tolerated_and_that_of_a_short_one_is_not():
    total = torch.diag(torch.tensor([1.0, 1.0, -1e-5]))[None]
    assert moment(total, rows=10**6).eigenvalues()[0, 0] == 0
    with pytest.raises(ArithmeticError, match=r"layer.weight \(input side\): block 0 .* eigenvalue -1e-05"):
        moment(total, rows=10).eigenvalues()


def test_a_layer_that_was_switched_off_is_no_error(monkeypatch):
    """Rows of 1e-22 in float32: their products are subnormal, and the rounded sum is indefinite."""
    monkeypatch.setattr(second_moment, "SMALL", 0)
    dead = SecondMoment(2, 12, torch.zeros((), dtype=torch.float32), "dead (input side)")
    dead.add(1e-22 * torch.randn(3, 2, 12))
    spectrum = torch.linalg.eigvalsh(dead.total.double())
    assert spectrum.min() < -1e-5 * spectrum.max()
    assert (dead.eigenvalues() >= 0).all()


def test_a_negative_block_among_good_ones_is_named():
    total = torch.eye(3).repeat(4, 1, 1)
    total[2] *= -1
    with pytest.raises(ArithmeticError, match=r"block 2 .* eigenvalue -1"):
        moment(total).eigenvalues()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_sum_that_is_not_finite_is_reported(bad):
    total = torch.eye(3)[None].clone()
    total[0, 1, 1] = bad
    with pytest.raises(FloatingPointError, match=r"layer.weight"):
        moment(total).eigenvalues()


def test_overflow_in_a_fit_names_the_layer(monkeypatch):
    monkeypatch.setattr(second_moment, "SMALL", 0)
    monkeypatch.setattr(second_moment, "are_alike", lambda found: [False] * len(found))
    model = nn.Sequential(nn.Linear(2, WHOLE + 1), nn.Linear(WHOLE + 1, 2))
    with torch.no_grad():
        model[0].bias[0] = 1e30
        model[1].weight[:, 0] = 1e-30
    la = KronLaplace(model)
    with pytest.raises(FloatingPointError, match=r"input side of the factor of '1.weight' is not finite"):
        la.fit([(torch.randn(4, 2), torch.tensor([0, 1, 1, 0]))])
    with pytest.raises(RuntimeError, match="call fit"):
        la.log_marginal_likelihood()


def test_infinite_outputs_are_reported():
    model = nn.Linear(2, 2, bias=False)
    with pytest.raises(FloatingPointError, match="log likelihood is not finite"):
        KronLaplace(model, "regression").fit([(torch.randn(4, 2), torch.full((4, 2), float("inf")))])


def test_the_evidence_does_not_depend_on_the_batch_size():
    """Correlated inputs far from zero, whose small eigenvalues a float32 total loses. The oracle: float64 sums of the inputs, and the
    Hessian of squares, the number of data points times the identity.
    """
    rough = 0.5 + 0.5 * torch.rand(3000, 1, 4, 4)
    x = (nn.functional.interpolate(rough, 12, mode="bilinear").flatten(1) * 255).round()
    y = torch.randn(3000, 2)
    model, precision = nn.Linear(144, 2), 1e-2

    def log_det_ratio(total):
        eigenvalues = torch.linalg.eigvalsh(total.double()).clamp(min=0)
        return 2 * (torch.log1p(eigenvalues / precision).sum() + math.log1p(len(x) / precision))

    exact = log_det_ratio(x.double().T @ x.double())
    for size in (20, 3000):
        la = KronLaplace(model, "regression", prior_precision=precision)
        la.fit(list(zip(x.split(size), y.split(size), strict=True)))
        torch.testing.assert_close(la.log_det_ratio, exact, rtol=0, atol=0.5)
    single = torch.zeros(144, 144)
    for row in x:
        single.addr_(row, row)
    assert (log_det_ratio(single) - exact).abs() > 5, "these inputs do not tell float32 totals from others"


def images_of(kind: str, n: int) -> torch.Tensor:
    """Float32 images ``(n, 2, 10, 10)``: numbers of 0 to 255, far from zero, large, or of few dimensions."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, 2, 10, 10, generator=generator)
    coarse = nn.functional.interpolate(x[..., ::4, ::4], size=(10, 10), mode="bilinear")
    return {"pixels": 255 * x, "offset": x + 1e4, "scale": 1e3 * x, "coarse": 255 * coarse}[kind]


def layers_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    convolution = [nn.Conv2d(2, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 4, 3, stride=2), nn.Flatten()]
    perceptron = [nn.Flatten(), nn.Linear(200, 140), nn.ReLU(), nn.Linear(140, 64)]
    layers = convolution if kind == "convolution" else perceptron
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(64, 3))


@pytest.mark.parametrize("network", ["convolution", "perceptron"])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize(
    ("kind", "n", "lowest", "settings"),
    [
        ("pixels", 6, 1e-4, {"SMALL": 0, "ALIKE": 0.0}),  # by the rank alone
        ("scale", 6, 1e-4, {"SMALL": 0, "ALIKE": 0.0}),
        ("offset", 40, 1e-2, {"SMALL": 0}),  # by rows that are alike
        ("coarse", 40, 1e-4, {}),  # by sums that are small
        ("offset", 6, 1e-4, {}),
        ("coarse", 300, 1e-2, {"SMALL": 0}),  # by numbers side by side that are alike
    ],
)
def test_float32_evidences_are_float64s(network, likelihood, kind, n, lowest, settings, monkeypatch):
    """Rounding in directions that no data point has is no curvature. Classes have moderate logits."""
    for name, value in settings.items():
        monkeypatch.setattr(second_moment, name, value)
    x, model = images_of(kind, n), layers_of(network)
    y = torch.arange(n) % 3 if likelihood == "classification" else torch.sin(torch.arange(3.0 * n)).view(n, 3)
    if likelihood == "classification":
        model[-1].weight.data /= x.abs().max()
    single, double = KronLaplace(model, likelihood), KronLaplace(copy.deepcopy(model).double(), likelihood)
    single.fit([(x, y)])
    double.fit([(x.double(), y if likelihood == "classification" else y.double())])
    for precision in (lowest, 1.0):
        single.prior_precision = double.prior_precision = precision
        for of in (lambda la: la.log_det_ratio / 2, lambda la: la.posterior_precision.logdet() / 2):
            assert (of(single) - of(double)).abs() < 0.3
        found, expected = (sum(la.effective_parameters().values()) for la in (single, double))
        assert abs(found - expected) < 0.3
    variance = double.functional_variance(x[:3].double())
    torch.testing.assert_close(
        single.functional_variance(x[:3]).double(), variance, rtol=1e-2, atol=1e-3 * variance.max()
    )


def test_output_sides_of_wide_layers_on_raw_pixels_are_float64s():
    """Units that are never off have gradients of as many directions as there are outputs: rounding in the others would count, times the
    inputs' largest eigenvalue. Numbers side by side are alike."""
    x = torch.randint(256, (600, 100)).float()
    torch.manual_seed(0)
    model, y = nn.Sequential(nn.Linear(100, 300), nn.ReLU(), nn.Linear(300, 3)), torch.randn(600, 3)
    single = KronLaplace(model, "regression", prior_precision=1e-2).fit([*zip(x.split(100), y.split(100), strict=True)])
    double = KronLaplace(copy.deepcopy(model).double(), "regression", prior_precision=1e-2)
    double.fit([(x.double(), y.double())])
    assert (single.log_det_ratio - double.log_det_ratio).abs() / 2 < 0.3


def test_eigenvectors_of_few_rows_are_completed(monkeypatch):
    """Rank 5 of 300: a basis of all, without decomposing a large matrix; its values are those that the evidence reads."""
    sizes, eigh = [], torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda a: sizes.append(a.shape[-1]) or eigh(a))
    torch.manual_seed(0)
    model = nn.Linear(300, 2).double()
    la = KronLaplace(model, "regression", prior_precision=0.1).fit(
        [(x := torch.randn(5, 300).double(), torch.ones(5, 2).double())]
    )
    basis = eigenbases_of(la)["weight"]
    assert max(sizes) < 20
    vectors, values = basis.vectors_in[0], basis.values.inputs[0]
    torch.testing.assert_close(vectors.mT @ vectors, torch.eye(300).double())
    torch.testing.assert_close(vectors * values @ vectors.mT, x.mT @ x / 5)
    assert (values > 0).sum() == 5
    dense = torch.linalg.inv(x.mT @ x + 0.1 * torch.eye(300).double())  # B is the number of data times the identity
    found = la.functional_variance(x)[:, 0, 0] - la.functional_variance(0 * x)[:, 0, 0]
    torch.testing.assert_close(found, (x @ dense * x).sum(1))


@pytest.mark.parametrize("scale", [1e25, 1e30])
def test_a_variance_beyond_the_dtype_names_the_data_point(scale):
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    la = KronLaplace(model, "regression").fit([(x, torch.zeros(4, 2))])
    x[2] *= scale
    for predict in (la, la.functional_variance, la.functional_covariance):
        with pytest.raises(FloatingPointError, match=r"data point 2 is beyond torch.float32.*model.double\(\)"):
            predict(x)
    wide = KronLaplace(copy.deepcopy(model).double(), "regression").fit([(x[:2].double(), torch.zeros(2, 2).double())])
    assert wide.functional_variance(x.double()).isfinite().all()
