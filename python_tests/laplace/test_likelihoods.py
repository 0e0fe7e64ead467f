"""Square roots of output Hessians, and log likelihoods."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch

from ella_cuda.laplace.likelihoods import Classification, Regression, checked_outputs


def hessian_of(columns):
    return torch.einsum("kna,knb->nab", columns, columns)


@pytest.mark.parametrize("k", [2, 3, 10])
def test_softmax_columns_are_a_square_root_of_rank_k_minus_one(k):
    f = 2 * torch.randn(7, k, dtype=torch.float64)
    p = f.softmax(1)
    columns = Classification().columns(f)[:]
    assert columns.shape == (k - 1, 7, k)
    expected = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    torch.testing.assert_close(hessian_of(columns), expected, rtol=1e-12, atol=1e-14)
    by_likelihood = columns.permute(1, 2, 0).take_along_dim(p.argsort(1, descending=True)[:, :, None], 1)
    assert not by_likelihood.triu(1).any()  # Cholesky: (N, K, K-1) lower triangular


@pytest.mark.parametrize("tolerance", [0.3, 0.05, 0.001])
def test_columns_left_out_are_within_the_tolerance_and_no_fewer_than_possible(tolerance):
    f = 4 * torch.randn(50, 20, dtype=torch.float64)
    p = f.softmax(1)
    trace = (1 - p.square().sum(1)).sum()
    columns = Classification().columns(f, tolerance)[:]
    assert len(columns) < 19
    assert trace - columns.square().sum() <= tolerance * trace
    assert trace - columns[:-1].square().sum() > tolerance * trace
    left_out = torch.diag_embed(p) - p[:, :, None] * p[:, None, :] - hessian_of(columns)
    assert torch.linalg.eigvalsh(left_out).min() > -1e-12  # a lower bound of the Hessian, image by image


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_softmax_columns_stay_accurate_for_certain_predictions(dtype):
    f = torch.tensor([[0.0, 200.0, -300.0], [800.0, 0.0, 0.0], [0.0, 0.0, 1e4], [60.0, 0.0, 59.0]], dtype=dtype)
    actual = hessian_of(Classification().columns(f)[:].double())
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
    columns = Classification().columns(logits)[:]
    p = torch.softmax(logits, 1)
    torch.testing.assert_close(hessian_of(columns), torch.diag_embed(p) - p[:, :, None] * p[:, None, :])
    broken = logits.clone()
    broken[0, 0] = torch.nan
    assert Classification().columns(broken)[:].isnan().any()


@pytest.mark.parametrize("likelihood", [Classification(), Regression()])
def test_sampled_columns_average_to_the_hessian(likelihood):
    f = torch.tensor([[0.3, -1.0, 1.2], [2.0, 0.0, -2.0]], dtype=torch.float64)
    draws = 20_000
    generator = torch.Generator().manual_seed(5)
    columns = likelihood.sampled_column(f.repeat(draws, 1), generator)[:]
    assert columns.shape == (1, 2 * draws, 3)
    products = (columns[0, :, :, None] * columns[0, :, None, :]).view(draws, 2, 3, 3)
    expected = hessian_of(likelihood.columns(f)[:])
    error = (products.mean(0) - expected).abs()
    standard_error = products.std(0) / draws**0.5
    assert (error <= 4 * standard_error + 1e-12).all()


def test_log_likelihoods_are_those_of_torch_distributions():
    f = torch.randn(6, 3, dtype=torch.float64)
    labels, targets = torch.randint(3, (6,)), torch.randn(6, 3, dtype=torch.float64)
    one, sigma = torch.tensor(1.0), torch.tensor(0.7, dtype=torch.float64)
    c, r = Classification(), Regression()
    expected = torch.distributions.Categorical(logits=f).log_prob(labels).sum()
    torch.testing.assert_close(c.log_likelihood(c.statistic(f, labels), 18, one), expected)
    expected = torch.distributions.Normal(f, sigma).log_prob(targets).sum()
    torch.testing.assert_close(r.log_likelihood(r.statistic(f, targets), 18, sigma), expected)


@pytest.mark.parametrize(
    ("likelihood", "y", "error", "message"),
    [
        (Classification(), torch.tensor([0, 3]), ValueError, "labels must lie in 0..2 .* got 0..3"),
        (Classification(), torch.tensor([-1, 0]), ValueError, "labels must lie in 0..2 .* got -1..0"),
        (Classification(), torch.zeros(2), TypeError, "integer class indices, got dtype torch.float32"),
        (
            Classification(),
            torch.zeros(2, 3, dtype=torch.long),
            ValueError,
            r"shape \(2,\), got .* \(2, 3\); .*one-hot .*y\.argmax\(1\)\.$",
        ),
        (
            Classification(),
            torch.zeros(2, 1).long(),
            ValueError,
            r"shape \(2,\), got .* \(2, 1\); pass y\.squeeze\(1\)\.$",
        ),
        (Classification(), torch.zeros(2, 4).long(), ValueError, r"shape \(2,\), got shape \(2, 4\)\.$"),
        (Regression(), torch.zeros(2), ValueError, r"outputs' shape \(2, 3\), got \(2,\)\.$"),
        (Regression(), torch.zeros(2, 3, dtype=torch.long), TypeError, "real numbers .* got dtype torch.int64"),
    ],
)
def test_targets_that_do_not_fit_are_refused(likelihood, y, error, message):
    with pytest.raises(error, match=message):
        likelihood.check(torch.zeros(2, 3), y)


def test_targets_of_one_output_without_its_axis_are_told_how_to_get_it():
    with pytest.raises(ValueError, match=r"outputs' shape \(2, 1\), got \(2,\); pass y\[:, None\]\.$"):
        Regression().check(torch.zeros(2, 1), torch.zeros(2))


def test_outputs_that_are_no_matrix_are_refused():
    with pytest.raises(ValueError, match=r"got shape \(2,\); of one output per image return outputs\[:, None\]\.$"):
        checked_outputs(torch.zeros(2))
    with pytest.raises(ValueError, match=r"must return a tensor \(N, K\), got shape \(2, 3, 4\)\.$"):
        checked_outputs(torch.zeros(2, 3, 4))
    with pytest.raises(TypeError, match=r"must return a tensor \(N, K\), got tuple of 2; wrap"):
        checked_outputs((torch.zeros(2, 3), None))
    with pytest.raises(TypeError, match=r"got OrderedDict with the keys 'logits'; wrap"):
        checked_outputs(OrderedDict(logits=torch.zeros(2, 3)))
    with pytest.raises(ValueError, match="at least 2 outputs"):
        Classification().check(torch.zeros(2, 1), torch.zeros(2, dtype=torch.long))


def test_log_likelihoods_of_float32_outputs_are_summed_in_float64():
    f, targets, labels = 1000 + torch.randn(4096, 5), torch.randn(4096, 5), torch.randint(5, (4096,))
    expected = (f.double() - targets.double()).square().sum()
    torch.testing.assert_close(Regression().statistic(f, targets), expected, rtol=1e-13, atol=0)
    expected = torch.distributions.Categorical(logits=f.double()).log_prob(labels).sum()
    torch.testing.assert_close(Classification().statistic(f, labels), expected, rtol=1e-12, atol=0)
