"""Choice of prior precisions and noise after a fit: by the evidence, its fixed points, or validation data."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ella_cuda.laplace.batches import kept, pair_on, require_loader
from ella_cuda.laplace.evidence import Evidence, effective_by_tensor, evidence_at, mean_at
from ella_cuda.laplace.likelihoods import LINKS
from ella_cuda.laplace.parameters import as_float64, check_choice
from ella_cuda.laplace.prior_structure import STRUCTURES, group_indices
from ella_cuda.nn._sizes import as_count
from ella_cuda.ops._precision import in_own_precision

METHODS = ("marglik", "mackay", "gridsearch")
SMALLEST, LARGEST = 1e-6, 1e10  # precisions that fixed points are held between
BOUNDS = math.log(SMALLEST), math.log(LARGEST)
STILL = 1e-8  # the largest change of a logarithm at which fixed points have come to rest
SHARE = 2 / 3  # of the way to a fixed point's right side that an update goes
NOTHING = 1e-3  # elements of a group that are none
FURTHEST = 300  # power of ten that a grid has
ROUNDING = 1e-14  # of the evidence, relative

Loss = Callable[[Any, Tensor], Tensor | float]  # (predictions, targets)


def groups_of(la: Evidence, structure: str) -> Tensor:
    """The number of each parameter tensor's group, whose tensors share a precision; see :func:`group_indices`."""
    device = la.prior_precision.device
    with torch.inference_mode(False):  # autograd saves it
        return torch.tensor(group_indices(structure, la.parameter_names, la.model), device=device)


def sums_by_group(values: Tensor, group: Tensor) -> Tensor:
    """Sums of the values of each group's tensors, in one order on every device."""
    member = group == torch.arange(int(group.max()) + 1, device=group.device)[:, None]
    return torch.where(member, values, values.new_zeros(())).sum(1)


def mean_log_precisions(la: Evidence, group: Tensor) -> Tensor:
    """One for each group."""
    logs = la.prior_precision.detach().log()
    return sums_by_group(logs, group) / sums_by_group(torch.ones_like(logs), group)


def tempered_evidence(
    la: Evidence, log_precision: Tensor, log_sigma: Tensor | None, at_mode: str = "network"
) -> Tensor:
    """The objective of a noise that is tuned, None if it is not: the evidence of the likelihood divided by the temperature, with its
    normaliser, which :meth:`~ella_cuda.laplace.KronLaplace.log_marginal_likelihood` leaves whole. A whole one would only rescale the noise
    by the temperature's root."""
    evidence = evidence_at(la, log_precision, log_sigma, at_mode)
    if log_sigma is None or la.temperature == 1:
        return evidence
    return evidence + (1 - 1 / la.temperature) * la.n_targets * (log_sigma + 0.5 * math.log(2 * math.pi))


def raise_evidence(la: Evidence, n_steps: int, lr: float, group: Tensor, tune_sigma: bool, progress_bar: bool) -> None:
    """Adam on the logarithms of the precisions, one for each group of tensors, and of sigma."""
    with torch.inference_mode(False), torch.enable_grad():
        log_precision = mean_log_precisions(la, group).requires_grad_()
        log_sigma = la.sigma_noise.detach().log().requires_grad_() if tune_sigma else None
        learnt = [log_precision] if log_sigma is None else [log_precision, log_sigma]
        optimizer = torch.optim.Adam(learnt, lr=float(lr), maximize=True)
        for _ in tqdm(range(n_steps), desc="evidence", disable=not progress_bar, leave=False):
            evidence = tempered_evidence(la, log_precision[group], log_sigma)
            for tensor, gradient in zip(learnt, torch.autograd.grad(evidence, learnt), strict=True):
                tensor.grad = gradient
            optimizer.step()
    la.prior_precision = log_precision.detach().exp()[group]
    if log_sigma is not None:
        la.sigma_noise = log_sigma.detach().exp()


@torch.no_grad()
def fixed_points(
    la: Evidence,
    n_steps: int,
    group: Tensor,
    tune_sigma: bool,
    progress_bar: bool = False,
    limit: float | None = None,
    at_mode: str = "network",
) -> tuple[Tensor, Tensor, bool]:
    r"""MacKay's updates :math:`\delta_g \leftarrow \gamma_g / \|\theta_g - \mu_g\|^2` of the groups of tensors until they rest, la's values
    included; of the noise :math:`\sigma^2 \leftarrow \|y - f\|^2 / (N K - T \gamma)`, T the temperature. Where the data determine more than
    half of their own number, sigma takes the slower step :math:`\sigma^2 \leftarrow (\|y - f\|^2 + T \gamma \sigma^2) / (N K)` to the same
    point: the diagonal's :math:`\gamma` may be above N K.

    An update goes :data:`SHARE` of the way in the logarithm: there the right side's slope,
    :math:`-\sum_j \gamma_j (1 - \gamma_j) / \sum_j \gamma_j` with :math:`\gamma_j` the share of direction j that the data determine, is
    between -1 and 0, so that the distance from the fixed point falls to a third or less, from wherever it starts; whole updates of what
    the data hardly determine swing for ever. Where the evidence would fall, as noise and precisions together may make it, the update is
    halved until it does not: each part of it is uphill.

    A group rests where its logarithm does; one of which the data determine less than :data:`NOTHING` elements also where these and the
    evidence stand still, for its precision may be anything.

    Args:
        la: where the updates start, at the mean of a group's logarithms.
        n_steps: how many, at most.
        group: of each parameter tensor, the number of its group.
        tune_sigma: whether sigma is updated.
        progress_bar: show one.
        limit: how far the logarithms of the precisions, and of the noise's :math:`1 / \sigma^2`, may go from where they start; None is as far
            as they like.
        at_mode: "network", or "linear": whose distances from the prior's mean and squared errors these are.

    Returns:
        The logarithms of the groups' precisions and of sigma, and whether they rest.

    Source: MacKay, "Bayesian interpolation", 1992, section 4.
    """
    mean = mean_at(la, at_mode)
    norms, count = sums_by_group(mean.square_norms, group), int(group.max()) + 1
    # Of the precisions and of the noise's, in a row.
    at = torch.cat([mean_log_precisions(la, group), -2 * la.sigma_noise.detach().log()[None]])
    lowest, highest = (at - limit, at + limit) if limit is not None else (at - math.inf, at + math.inf)
    evidence = put(la, at, group, tune_sigma, at_mode)
    before: Tensor | None = None  # the determined elements before the last update
    rested = False
    for _ in tqdm(range(n_steps), desc="fixed points", disable=not progress_bar, leave=False):
        gamma = sums_by_group(effective_by_tensor(la), group)
        aim = (gamma / norms).log()
        # Of tensors at their prior's mean that the data say nothing about, nothing is learned.
        aim = torch.where(aim.isnan(), at[:-1], aim)
        part = (at[:-1] + SHARE * (aim - at[:-1])).clamp(*BOUNDS)
        aims = torch.cat([part, _noise_aim(la, -2 * mean.statistic, gamma.sum(), at[-1:], tune_sigma)])
        step = torch.minimum(torch.maximum(aims, lowest), highest) - at
        while (after := put(la, at + step, group, tune_sigma, at_mode)) < evidence - ROUNDING * abs(evidence):
            step = step / 2
            if step.abs().max() < STILL:
                step = torch.zeros_like(step)
        at = at + step
        moves = step.abs() >= STILL
        if before is not None and abs(after - evidence) < STILL:
            moves[:count] &= ~((gamma < NOTHING) & ((gamma - before).abs() < STILL))
        evidence, before = after, gamma
        if not moves.any():
            rested = True
            break
    return at[:-1], -at[-1] / 2, rested


def _noise_aim(la: Evidence, square_error: Tensor, determined: Tensor, log_noise: Tensor, tune_sigma: bool) -> Tensor:
    """The logarithm of the noise's precision after an update, ``(1,)``."""
    if not tune_sigma:
        return log_noise
    determined = determined * la.temperature
    if 2 * determined < la.n_targets:
        return -(square_error / (la.n_targets - determined)).log()[None]
    return -((square_error + determined * (-log_noise).exp()) / la.n_targets).log()


def put(la: Evidence, at: Tensor, group: Tensor, tune_sigma: bool, at_mode: str) -> float:
    """Give la these logarithms, of the groups' precisions and last the noise's; returns :func:`tempered_evidence` there."""
    precision = at[:-1].exp()
    held = precision.clamp(SMALLEST, LARGEST)  # at a bound without what the exponential of its logarithm is off
    la.prior_precision = torch.where((precision - held).abs() < 1e-13 * held, held, precision)[group]
    if tune_sigma:
        la.sigma_noise = (-at[-1] / 2).exp()
    return tempered_evidence(la, at[:-1][group], -at[-1] / 2 if tune_sigma else None, at_mode).item()


def warn_of_motion(n_steps: int, instead: str = "") -> None:
    """Warn at the line that called optimize_prior_precision that fixed points do not rest; ``instead``: what else to do than to take more."""
    warnings.warn(
        f"optimize_prior_precision: the fixed points do not rest after n_steps={n_steps}; take more{instead}.",
        stacklevel=3,
    )


def grid_search(
    la: Evidence,
    grid: Tensor,
    predict: Callable[[Any], Iterable[Any]],
    val_loader: Iterable[Any],
    loss: Loss | None,
    progress_bar: bool,
) -> Tensor:
    """The precision of the grid, one for all tensors, whose predictions have the smallest loss on the loader's data; ``predict`` gives those
    of all the grid's for a batch's inputs."""
    sums, count = torch.zeros(len(grid), dtype=torch.float64, device="cpu"), 0
    seen: list[list[tuple[Any, Tensor]]] = [[] for _ in grid]
    for batch in tqdm(val_loader, desc="grid", disable=not progress_bar, leave=False):
        x, y = pair_on(batch, la.prior_precision.device, "optimize_prior_precision", la.fitted_model.keys)
        count += len(y)
        for number, predictions in enumerate(predict(x)):
            if loss is None:
                sums[number] -= log_density(la, predictions, y).item()
            else:
                seen[number].append((predictions, kept(y)))
    if not count:
        raise ValueError(
            "optimize_prior_precision: val_loader gave no data; pass a re-iterable loader such as a DataLoader."
        )
    values = sums / count if loss is None else sums.new_tensor([_of_all(loss, pairs) for pairs in seen])
    finite = values.isfinite()
    if not finite.any():
        raise ValueError(
            f"optimize_prior_precision: the loss must be finite somewhere on the grid, got {values[0].item()} at first; check loss."
        )
    if not finite.all():
        wrong = ", ".join(f"{v:.3g}" for v in grid[~finite].tolist()[:5])
        warnings.warn(
            f"optimize_prior_precision: the loss is not finite at {int((~finite).sum())} of {len(values)} precisions ({wrong}), which are "
            "left out.",
            stacklevel=3,
        )
    return grid[values.where(finite, math.inf).argmin()]


@in_own_precision
def log_density(la: Evidence, predictions: Any, targets: Tensor, n_samples: int = 100) -> Tensor:
    """The log predictive density of all targets, noise included, 0-dim float64.

    Args:
        la: the approximation that predicts.
        predictions: probabilities, or mean and variance of the outputs.
        targets: as for a fit.
        n_samples: with which a likelihood without a closed form integrates.

    Raises:
        TypeError, ValueError: the targets do not fit.
    """
    likelihood = la.likelihood_function
    likelihood.check(predictions if likelihood.has_classes else predictions[0], targets)
    return likelihood.log_predictive(predictions, targets, la.sigma_noise, n_samples).sum()


def _of_all(loss: Loss, pairs: list[tuple[Any, Tensor]]) -> float:
    """The loss of the predictions and targets of all batches."""
    predictions, targets = zip(*pairs, strict=True)
    if isinstance(predictions[0], tuple):
        found = loss(tuple(torch.cat(part) for part in zip(*predictions, strict=True)), torch.cat(targets))
    else:
        found = loss(torch.cat(predictions), torch.cat(targets))
    try:
        return float(found)
    except (RuntimeError, TypeError, ValueError) as error:
        got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else repr(found)
        raise TypeError(f"optimize_prior_precision: loss must return one number, got {got}.") from error


def check_arguments(
    method: str, prior_structure: str, link_approx: str, val_loader: Any, low: float, high: float, size: int
) -> Tensor:
    """The grid's precisions; ValueError or TypeError where an argument does not fit."""
    check_choice("method", method, METHODS)
    check_choice("link_approx", link_approx, LINKS)
    if prior_structure in ("diag", "diagonal"):
        raise ValueError(
            f"prior_structure={prior_structure!r} has a precision for every parameter, here tensors have one: use 'layerwise'."
        )
    check_choice("prior_structure", prior_structure, STRUCTURES)
    if method == "gridsearch":
        if val_loader is None:
            raise ValueError("optimize_prior_precision: method='gridsearch' needs val_loader, which yields (x, y).")
        require_loader(val_loader, "optimize_prior_precision: val_loader")
        if prior_structure != "scalar":
            raise ValueError("method='gridsearch' tries one precision for all tensors; pass prior_structure='scalar'.")
    ends = [as_float64(f"log_prior_prec_{n}", v, torch.device("cpu")) for n, v in (("min", low), ("max", high))]
    if not -FURTHEST <= ends[0] <= ends[1] <= FURTHEST:
        raise ValueError(
            "log_prior_prec_min and log_prior_prec_max must be powers of ten, the first no larger, from "
            f"{-FURTHEST} to {FURTHEST}, got {low!r} and {high!r}."
        )
    return torch.logspace(*ends, as_count("grid_size", size), dtype=torch.float64, device="cpu")
