"""Metrics of predicted probabilities, in float64: proper scores, calibration, and telling data sets apart."""

from __future__ import annotations

import math
from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor

LEAST = 1e-12  # probability in a logarithm: one that is 0 in its dtype costs 27.6 nats, not infinitely many
SUM_TOLERANCE = 1e-2  # of a row's probabilities, which may be of 16 bits


class Reliability(NamedTuple):
    """What became of predictions, by their confidence; see :func:`reliability`.

    Attributes:
        count: ``(bins,)`` int64, predictions in the bin.
        confidence: ``(bins,)`` float64, their mean largest probability; NaN in an empty bin.
        accuracy: ``(bins,)`` float64, the fraction of them that is right; NaN in an empty bin.
    """

    count: Tensor
    confidence: Tensor
    accuracy: Tensor

    def error(self) -> Tensor:
        """``sum_m count_m / N |accuracy_m - confidence_m|``, 0-dim float64 in [0, 1]: the expected calibration error."""
        gaps = (self.accuracy - self.confidence).abs().nan_to_num(nan=0.0)  # an empty bin has no weight
        return (self.count * gaps).sum() / self.count.sum()


def nll(p: Tensor, y: Tensor) -> Tensor:
    """Mean negative log likelihood in nats of the labels; probabilities below 1e-12 count as 1e-12.

    Args:
        p: ``(N, K)`` probabilities of the classes, N and K at least 1.
        y: ``(N,)`` integer labels in [0, K).

    Returns:
        A 0-dim float64 tensor.

    Raises:
        TypeError: ``p`` is not floating point, ``y`` not integer.
        ValueError: a shape, device, probability or label that is none.
    """
    p, y = _checked("nll", p, y)
    return -p.gather(1, y[:, None]).clamp_min(LEAST).log().mean()


def accuracy(p: Tensor, y: Tensor) -> Tensor:
    """Fraction of data points whose most probable class, the first of equal ones, is the label's.

    Arguments, result and errors are those of :func:`nll`.
    """
    p, y = _checked("accuracy", p, y)
    return _hits(p, y).mean()


def brier_score(p: Tensor, y: Tensor) -> Tensor:
    """Mean over data points of ``sum_k (p_k - [k = y])^2``, from 0 to 2 (Brier 1950).

    Arguments, result and errors are those of :func:`nll`.
    """
    p, y = _checked("brier_score", p, y)
    return (p - torch.nn.functional.one_hot(y, p.shape[1])).square().sum(1).mean()


def entropy(p: Tensor) -> Tensor:
    """Entropy in nats of each prediction: ``-sum_k p_k log p_k``, with 0 log 0 = 0.

    Args:
        p: ``(N, K)`` probabilities of the classes.

    Returns:
        ``(N,)`` float64, in [0, log K]; N may be 0.

    Raises:
        TypeError, ValueError: as :func:`nll`, of ``p``.
    """
    return torch.special.entr(_probabilities("entropy", p)).sum(1)


def reliability(p: Tensor, y: Tensor, bins: int = 15) -> Reliability:
    """Confidence against accuracy: predictions by their largest probability, in bins of equal width on [0, 1].

    Bin m is ``[m/bins, (m+1)/bins)``; the last holds 1 too. A calibrated prediction is right as often as it is confident
    (Guo et al. 2017, section 2).

    Args:
        p: ``(N, K)`` probabilities of the classes, N and K at least 1.
        y: ``(N,)`` integer labels in [0, K).
        bins: how many, at least 1.

    Raises:
        TypeError, ValueError: as :func:`nll`; ``bins`` is no positive integer.
    """
    if isinstance(bins, bool) or not isinstance(bins, Integral) or bins < 1:
        raise ValueError(f"reliability: bins must be a positive integer, got {bins!r}.")
    p, y = _checked("reliability", p, y)
    confidence = p.amax(1)
    edges = torch.arange(1, bins, device=p.device, dtype=torch.float64) / bins
    index = torch.bucketize(confidence, edges, right=True)
    count = torch.bincount(index, minlength=bins)
    sums = [torch.bincount(index, weights=values, minlength=bins) for values in (confidence, _hits(p, y))]
    return Reliability(count, *(total / count for total in sums))


def expected_calibration_error(p: Tensor, y: Tensor, bins: int = 15) -> Tensor:
    """``sum_m count_m / N |accuracy_m - confidence_m|`` over the bins of :func:`reliability`
    (Naeini et al. 2015; Guo et al. 2017, equation 3).

    Arguments and errors are those of :func:`reliability`.

    Returns:
        A 0-dim float64 tensor in [0, 1].
    """
    return reliability(p, y, bins).error()


def auroc(scores_in: Tensor, scores_out: Tensor) -> Tensor:
    """The area under the ROC curve of telling two data sets apart by a score: how probable it is that one of ``scores_out`` is above
    one of ``scores_in``, ties counted half (Hendrycks and Gimpel 2017).

    It is exact, in O(n log n). Scores are higher for what is unfamiliar: entropies, or ``1 - p.amax(1)``. 0.5 is chance.

    Args:
        scores_in: ``(N,)``, of data like those trained on; infinities are scores.
        scores_out: ``(M,)``, of other data.

    Returns:
        A 0-dim float64 tensor in [0, 1].

    Raises:
        TypeError: not floating-point tensors.
        ValueError: a tensor that is empty, not of one axis, has NaN, or is on another device.
    """
    _check_scores("auroc", scores_in, scores_out)
    ordered, others = scores_in.double().sort().values, scores_out.double()
    below, not_above = (torch.searchsorted(ordered, others, right=right).sum() for right in (False, True))
    return (below + not_above).double() / (2 * len(ordered) * len(others))


def aurc(p: Tensor, y: Tensor) -> Tensor:
    """The area under the risk-coverage curve: the mean, over all numbers of the most confident predictions, of the share of these that is
    wrong (Geifman and El-Yaniv 2017). Confidence is the largest probability; among equals the order is a random one's mean.

    Arguments and errors are those of :func:`nll`.

    Returns:
        A 0-dim float64 tensor in [0, 1].
    """
    p, y = _checked("aurc", p, y)
    _, group, count = p.amax(1).neg().unique(return_inverse=True, return_counts=True)  # the most confident first
    wrong = torch.zeros(len(count), dtype=torch.float64, device=p.device).index_add_(0, group, 1 - _hits(p, y))
    errors = (wrong / count).repeat_interleave(count).cumsum(0)
    return (errors / torch.arange(1, len(p) + 1, device=p.device)).mean()


def fpr_at_recall(scores_in: Tensor, scores_out: Tensor, recall: float = 0.95) -> Tensor:
    """The share of ``scores_out`` that passes for familiar, at the least threshold under which ``recall`` of ``scores_in`` do: FPR at 95 %
    (Liang, Li and Srikant 2018).

    Args:
        scores_in, scores_out: as of :func:`auroc`; a score at the threshold passes.
        recall: above 0 and at most 1.

    Returns:
        A 0-dim float64 tensor in [0, 1].

    Raises:
        TypeError, ValueError: as :func:`auroc`; ``recall`` out of range.
    """
    _check_scores("fpr_at_recall", scores_in, scores_out)
    if not 0 < recall <= 1:
        raise ValueError(f"fpr_at_recall: recall must be above 0 and at most 1, got {recall}.")
    limit = scores_in.double().sort().values[math.ceil(recall * len(scores_in)) - 1]
    return (scores_out.double() <= limit).double().mean()


def _hits(p: Tensor, y: Tensor) -> Tensor:
    return (p.argmax(1) == y).double()


def _checked(function: str, p: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Both in 64 bits."""
    p = _probabilities(function, p)
    if not isinstance(y, Tensor) or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        got = y.dtype if isinstance(y, Tensor) else type(y).__name__
        raise TypeError(f"{function}: y must be a tensor of integer labels, got {got}.")
    if y.shape != p.shape[:1]:
        raise ValueError(f"{function}: y must have shape ({len(p)},), a label for each row of p, got {tuple(y.shape)}.")
    if not len(p):
        raise ValueError(f"{function}: p must have at least one row, got shape {tuple(p.shape)}.")
    _check_device(function, "y", y, "p", p)
    if bool(((y < 0) | (y >= p.shape[1])).any()):
        raise ValueError(
            f"{function}: y must be labels from 0 to {p.shape[1] - 1}, as p has {p.shape[1]} classes, got values from {y.min()} to {y.max()}."
        )
    return p, y.long()


def _probabilities(function: str, p: Tensor) -> Tensor:
    _check_floating(function, "p", p)
    if p.dim() != 2 or not p.shape[1]:
        raise ValueError(f"{function}: p must have shape (N, K) with K at least 1, got {tuple(p.shape)}.")
    p = p.double()
    if not bool((p >= 0).all()) or not bool(((p.sum(1) - 1).abs() <= SUM_TOLERANCE).all()):
        low, sums = (p.min().item(), p.sum(1))
        raise ValueError(
            f"{function}: p must be probabilities, at least 0 and of sum 1 in every row, got a smallest value of {low:g} and sums from "
            f"{sums.min().item():g} to {sums.max().item():g}; of logits pass their softmax."
        )
    return p


def _check_scores(function: str, scores_in: Tensor, scores_out: Tensor) -> None:
    for name, scores in (("scores_in", scores_in), ("scores_out", scores_out)):
        _check_floating(function, name, scores)
        if scores.dim() != 1 or not len(scores):
            raise ValueError(
                f"{function}: {name} must have shape (N,) with N at least 1, got {tuple(scores.shape)}; pass one score for each data point."
            )
        if scores.isnan().any():
            raise ValueError(f"{function}: {name} must have no NaN, got {int(scores.isnan().sum())} of {len(scores)}.")
    _check_device(function, "scores_out", scores_out, "scores_in", scores_in)


def _check_floating(function: str, name: str, value: Tensor) -> None:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{function}: {name} must be a floating-point tensor, got {got}.")


def _check_device(function: str, name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    if value.device != other.device:
        raise ValueError(
            f"{function}: {name} must be on the device of {other_name}, {other.device}, got {value.device}."
        )
