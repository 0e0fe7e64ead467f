"""Class probabilities from a Gaussian over logits."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from ella_cuda.laplace.values import check_choice

LINKS = ("probit", "probit_full", "mc", "bridge", "bridge_norm")
NOTHING = 100.0  # times the resolution, of the largest variance: less is rounding
DIAGONAL = ("probit",)  # those that read nothing but variances


def softmax_probabilities(link: str, mean: Tensor, covariance: Tensor) -> Tensor:
    """Approximations of the softmax's mean under ``N(mean, covariance)``.

    Args:
        link: "probit" scales each logit by its variance; "probit_full" compares every pair of logits by the variance of their difference,
            so that nothing depends on what is added to all of them; "bridge" is a Dirichlet's mean, "bridge_norm" with its correction of
            large variances. A Dirichlet needs a variance of every logit, given that logits sum to zero; where one is none beyond rounding,
            a data point gets "probit_full", of which a warning tells.
        mean: ``(..., K)``. Classes at minus infinity are masked: they have probability 0, and the link is that of the others.
        covariance: ``(..., K, K)``, or variances ``(..., K)`` for "probit".

    Returns:
        ``(..., K)``, sums of one.

    Source: MacKay, "The evidence framework applied to classification networks", 1992 (probit); Hobbhahn, Kristiadi and Hennig, "Fast
    predictive uncertainty for classification with Bayesian deep networks", UAI 2022 (bridge).
    """
    if link == "probit":
        return torch.softmax(mean * _shrink(covariance), -1)
    if link == "probit_full":
        return _pairwise(mean, covariance)
    return _bridge(mean, covariance, link == "bridge_norm")


def sigmoid_probabilities(link: str, mean: Tensor, variance: Tensor) -> Tensor:
    """The sigmoid's mean under independent Gaussians, by the probit approximation; ``(...)`` each.

    Raises:
        ValueError: the link is a Dirichlet's, of several classes.
    """
    check_choice("link_approx with likelihood='binary'", link, ("probit", "probit_full", "mc"))
    return torch.sigmoid(mean * _shrink(variance))


def _shrink(variance: Tensor) -> Tensor:
    return 1 / (1 + math.pi / 8 * variance).sqrt()


def _pairwise(mean: Tensor, covariance: Tensor) -> Tensor:
    variances = covariance.diagonal(dim1=-2, dim2=-1)
    of_differences = (variances[..., :, None] + variances[..., None, :] - 2 * covariance).clamp(min=0)
    differences = mean[..., None, :] - mean[..., :, None]  # of the others to each
    differences = differences.masked_fill((mean == -math.inf)[..., :, None], math.inf)  # of two masked ones it is nan
    return torch.softmax(-torch.logsumexp(differences * _shrink(of_differences), -1), -1)


def _bridge(mean: Tensor, covariance: Tensor, normalised: bool) -> Tensor:
    given, there = mean, mean > -math.inf
    classes = there.sum(-1, keepdim=True)
    mean = mean.masked_fill(~there, 0.0)
    among = covariance * there[..., :, None] * there[..., None, :]
    rows = among.sum(-1)
    whole = rows.sum(-1, keepdim=True)
    # Condition on logits that sum to zero.
    mean = mean - rows * mean.sum(-1, keepdim=True) / whole
    variances = among.diagonal(dim1=-2, dim2=-1)
    largest = variances.amax(-1, keepdim=True)
    variances = variances - rows.square() / whole
    none = ~((variances > NOTHING * torch.finfo(mean.dtype).eps * largest) | ~there).all(-1)
    told = int((none & (classes[..., 0] > 1)).sum())  # one class alone is certain
    if told:
        warnings.warn(
            f"link_approx: {told} of {none.numel()} predictions have logits without a variance of their own, which a Dirichlet "
            "needs; these are probit_full's.",
            UserWarning,
            stacklevel=2,
        )
    variances = variances.masked_fill(none[..., None], 1.0)
    mean = mean.masked_fill(none[..., None], 0.0)
    found = _dirichlet(mean, variances, there, classes.clamp(min=2).to(mean.dtype), normalised)
    return torch.where(none[..., None], _pairwise(given, covariance), found) if none.any() else found


def _dirichlet(mean: Tensor, variances: Tensor, there: Tensor, classes: Tensor, normalised: bool) -> Tensor:
    """Its mean, of logits that sum to zero over the ``classes`` (..., 1) that are ``there``."""
    if normalised:
        size = (variances * there).sum(-1, keepdim=True) / classes / (classes / 2).sqrt()
        mean, variances = mean / size.sqrt(), variances / size
    # The Dirichlet's parameters are (1 - 2 / K + e^z / K^2) / variance; as logarithms, large logits do not overflow.
    z = mean + torch.logsumexp((-mean).masked_fill(~there, -math.inf), -1, keepdim=True)
    logits = torch.logaddexp((1 - 2 / classes).log(), z - 2 * classes.log()) - variances.log()
    return torch.softmax(logits.masked_fill(~there, -math.inf), -1)
