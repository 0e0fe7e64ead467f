"""Scores of predictions against scikit-learn, scipy and sums written out."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
import torch

from ella_cuda import metrics


def predictions(n: int = 200, k: int = 5, dtype: torch.dtype = torch.float64):
    p = torch.randn(n, k, dtype=torch.float64).mul(2).softmax(1)
    return p.to(dtype), torch.randint(k, (n,))


def by_hand(p: torch.Tensor, y: torch.Tensor, bins: int) -> list[list[tuple[Fraction, bool]]]:
    """(confidence, right) of the predictions in each bin, compared as exact fractions."""
    members: list[list[tuple[Fraction, bool]]] = [[] for _ in range(bins)]
    for row, label in zip(p.tolist(), y.tolist(), strict=True):
        confidence = max(row)
        place = next(m for m in range(bins) if m == bins - 1 or confidence < (m + 1) / bins)
        members[place].append((Fraction(confidence), row.index(confidence) == label))
    return members


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_are_scikit_learns(dtype):
    p, y = predictions(dtype=dtype)
    wide = p.double()
    assert float(metrics.nll(p, y)) == pytest.approx(-float(wide[torch.arange(200), y].log().mean()), rel=1e-12)
    assert float(metrics.nll(p, y)) == pytest.approx(
        sklearn.metrics.log_loss(y, wide / wide.sum(1, keepdim=True), labels=range(5)), rel=1e-5
    )
    assert float(metrics.accuracy(p, y)) == sklearn.metrics.accuracy_score(y, wide.argmax(1))
    one_hot = np.eye(5)[y.numpy()]
    assert float(metrics.brier_score(p, y)) == pytest.approx(((wide.numpy() - one_hot) ** 2).sum(1).mean(), rel=1e-12)
    np.testing.assert_allclose(metrics.entropy(p), scipy.stats.entropy(wide.numpy(), axis=1), rtol=1e-6)
    assert all(f(p, y).dtype == torch.float64 for f in (metrics.nll, metrics.accuracy, metrics.brier_score))


def test_certain_predictions():
    """Right and wrong ones with probabilities of 0 and 1: every score is finite."""
    p, y = torch.eye(3)[[0, 1, 2, 0]], torch.tensor([0, 1, 2, 1])
    assert float(metrics.nll(p, y)) == pytest.approx(12 * math.log(10) / 4)
    assert float(metrics.accuracy(p, y)) == 0.75 and float(metrics.brier_score(p, y)) == 0.5
    assert metrics.entropy(p).tolist() == [0, 0, 0, 0]
    assert float(metrics.expected_calibration_error(p, y)) == 0.25
    assert metrics.reliability(p, y, 4).count.tolist() == [0, 0, 0, 4]


@pytest.mark.parametrize("bins", [1, 3, 10, 15])
def test_reliability_and_calibration_error_are_the_sums_of_their_bins(bins):
    p, y = predictions(500, 4)
    members, found = by_hand(p, y, bins), metrics.reliability(p, y, bins)
    assert found.count.tolist() == [len(m) for m in members]
    for member, confidence, accuracy in zip(members, found.confidence, found.accuracy, strict=True):
        if not member:
            assert confidence.isnan() and accuracy.isnan()
            continue
        assert float(confidence) == pytest.approx(float(sum(c for c, _ in member) / len(member)), rel=1e-12)
        assert float(accuracy) == pytest.approx(sum(right for _, right in member) / len(member), rel=1e-12)
    gaps = [abs(sum(right for _, right in m) - sum(c for c, _ in m)) for m in members]
    error = metrics.expected_calibration_error(p, y, bins)
    assert float(error) == pytest.approx(float(sum(gaps) / 500), rel=1e-12) and error.dtype == torch.float64


def test_a_confidence_on_an_edge_is_in_the_upper_bin():
    p = torch.tensor([[0.5, 0.5], [0.75, 0.25], [1, 0]])
    assert metrics.reliability(p, torch.zeros(3, dtype=torch.long), 4).count.tolist() == [0, 0, 1, 2]


def test_what_is_calibrated_has_no_calibration_error():
    """Of four predictions of 3/4, three are right."""
    p = torch.tensor([[0.75, 0.25]]).expand(4, 2)
    assert float(metrics.expected_calibration_error(p, torch.tensor([0, 0, 0, 1]))) == 0


@pytest.mark.parametrize("ties", [False, True])
def test_auroc_is_scikit_learns(ties):
    inside, outside = torch.randn(70), torch.randn(41) + 0.7
    if ties:
        inside, outside = inside.round(), outside.round()
    truth = [0] * 70 + [1] * 41
    expected = sklearn.metrics.roc_auc_score(truth, torch.cat([inside, outside]))
    assert float(metrics.auroc(inside, outside)) == pytest.approx(expected, rel=1e-12)
    pairs = (outside[:, None] > inside).double() + 0.5 * (outside[:, None] == inside)
    assert float(metrics.auroc(inside, outside)) == pytest.approx(float(pairs.mean()), rel=1e-15)


def test_auroc_of_sets_apart_and_of_infinite_scores():
    low, high = torch.tensor([0.0, 1.0]), torch.tensor([2.0, math.inf])
    assert [float(metrics.auroc(*pair)) for pair in ((low, high), (high, low), (high, high))] == [1, 0, 0.5]


@pytest.mark.parametrize("ties", [False, True])
def test_aurc_is_the_mean_risk_over_all_coverages_and_orders_of_equal_ones(ties):
    p = torch.rand(6, 2, dtype=torch.float64).softmax(1)
    p = p[[0, 0, 1, 0, 1, 2]] if ties else p
    y = torch.tensor([0, 1, 1, 0, 0, 1])
    wrong, confidence = (p.argmax(1) != y).double().tolist(), p.amax(1).tolist()
    orders = [
        o
        for o in itertools.permutations(range(6))
        if all(confidence[a] >= confidence[b] for a, b in itertools.pairwise(o))
    ]
    risks = [sum(sum(wrong[i] for i in o[:k]) / k for k in range(1, 7)) / 6 for o in orders]
    assert float(metrics.aurc(p, y)) == pytest.approx(sum(risks) / len(risks), rel=1e-12)


@pytest.mark.parametrize("recall", [0.5, 0.95, 1.0])
@pytest.mark.parametrize("ties", [False, True])
def test_false_positives_are_those_of_scikit_learns_curve(ties, recall):
    inside, outside = torch.randn(70), torch.randn(41) + 0.7
    if ties:
        inside, outside = inside.round(), outside.round()
    truth = [1] * 70 + [0] * 41  # familiar ones are to be found
    fpr, tpr, _ = sklearn.metrics.roc_curve(truth, -torch.cat([inside, outside]), drop_intermediate=False)
    expected = min(f for f, t in zip(fpr, tpr, strict=True) if t >= recall)
    assert float(metrics.fpr_at_recall(inside, outside, recall)) == pytest.approx(expected, rel=1e-12)


P, Y = torch.full((4, 3), 1 / 3), torch.tensor([0, 1, 2, 0])
OF_LABELS = [metrics.nll, metrics.accuracy, metrics.brier_score, metrics.reliability]
OF_LABELS += [metrics.expected_calibration_error, metrics.aurc]


@pytest.mark.parametrize("function", OF_LABELS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("p", "y", "error", "words"),
    [
        (P[0], Y, ValueError, r"p must have shape \(N, K\)"),
        (P[:, :0], Y, ValueError, r"p must have shape \(N, K\)"),
        (P[:0], Y[:0], ValueError, "p must have at least one row"),
        (P.int(), Y, TypeError, "p must be a floating-point tensor, got torch.int32"),
        (P.numpy(), Y, TypeError, "p must be a floating-point tensor, got ndarray"),
        (P * 2, Y, ValueError, "sums from 2 to 2; of logits pass their softmax"),
        (P - torch.tensor([1.0, 0, -1]), Y, ValueError, "smallest value of -0.666667"),
        (P * math.nan, Y, ValueError, "p must be probabilities"),
        (P, Y[:3], ValueError, r"y must have shape \(4,\)"),
        (P, Y + 1, ValueError, "y must be labels from 0 to 2, as p has 3 classes, got values from 1 to 3"),
        (P, Y - 1, ValueError, "y must be labels from 0 to 2"),
        (P, Y.double(), TypeError, "y must be a tensor of integer labels, got torch.float64"),
        (P, Y.to("meta"), ValueError, "y must be on the device of p, cpu, got meta"),
    ],
)
def test_what_is_no_prediction_is_refused(function, p, y, error, words):
    name = "reliability" if function is metrics.expected_calibration_error else function.__name__
    with pytest.raises(error, match=f"^{name}: .*{words}"):
        function(p, y)


@pytest.mark.parametrize("bins", [0, -1, True, 1.5])
def test_bins_are_counted(bins):
    for function in (metrics.reliability, metrics.expected_calibration_error):
        with pytest.raises(ValueError, match=f"reliability: bins must be a positive integer, got {bins}"):
            function(P, Y, bins)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: metrics.auroc(torch.ones(0), torch.ones(2)), ValueError, r"auroc: scores_in must have shape \(N,\)"),
        (lambda: metrics.auroc(torch.ones(2), torch.ones(2, 1)), ValueError, "auroc: scores_out must have shape"),
        (lambda: metrics.auroc(torch.ones(2), torch.tensor([math.nan])), ValueError, "scores_out must have no NaN, got 1 of 1"),
        (lambda: metrics.auroc(torch.ones(2).long(), torch.ones(2)), TypeError, "scores_in must be a floating-point"),
        (lambda: metrics.fpr_at_recall(torch.ones(2), torch.ones(2), 0), ValueError, "recall must be above 0"),
        (lambda: metrics.entropy(P * 2), ValueError, "entropy: p must be probabilities"),
    ],
)  # fmt: skip
def test_other_arguments_are_named(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_entropy_of_no_predictions():
    assert metrics.entropy(torch.ones(0, 3)).shape == (0,)
