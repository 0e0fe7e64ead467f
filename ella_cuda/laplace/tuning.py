"""Choice of prior precisions and noise after a fit: by the evidence, its fixed points, or validation data."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ella_cuda.laplace.batches import kept, pair_on, require_loader
from ella_cuda.laplace.evidence import Evidence, is_finer, log_likelihood, log_scale, mean_at, norms_at, set_values
from ella_cuda.laplace.likelihoods import LINKS
from ella_cuda.laplace.parameters import check_choice, number
from ella_cuda.laplace.prior_structure import STRUCTURES, group_indices
from ella_cuda.nn._sizes import as_count
from ella_cuda.ops._precision import in_own_precision
from ella_cuda.recording import CudaGraphs, has_graphs, recorded_or_told

METHODS = ("marglik", "mackay", "gridsearch", "loo")
SMALLEST, LARGEST = 1e-6, 1e10  # precisions that fixed points are held between
BOUNDS = math.log(SMALLEST), math.log(LARGEST)
STILL = 1e-8  # the largest change of a logarithm at which fixed points have come to rest
SHARE = 2 / 3  # of the way to a fixed point's right side that an update goes
NOTHING = 1e-3  # elements of a group that are none
FURTHEST = 300  # power of ten that a grid has
ROUNDING = 1e-14  # of the evidence, relative

Loss = Callable[[Any, Tensor], Tensor | float]  # (predictions, targets)


class Groups:
    """Parameter tensors, elements or units that share a prior precision: ``count`` groups, by their numbers, see :func:`groups_of`."""

    def __init__(self, numbers: Sequence[int], device: torch.device) -> None:
        self.count, self._number = max(numbers) + 1, torch.tensor(numbers, device=device)
        self._alone = self.count == len(numbers)
        self._members = (
            self._number if self._alone else self._number == torch.arange(self.count, device=device)[:, None]
        )

    def spread(self, values: Tensor) -> Tensor:
        """One value for each tensor from one for each group."""
        return values if self._alone else values[self._number]

    def sums(self, values: Tensor) -> Tensor:
        """One value for each group from one for each tensor, in one order on every device."""
        return values if self._alone else torch.where(self._members, values, values.new_zeros(())).sum(1)


def groups_of(la: Evidence, structure: str) -> Groups:
    """Those of a structure: of tensors as :func:`.group_indices` has them; "unit", every output unit, and "diag", every element, alone.
    ValueError where la has no units; and as :func:`.group_indices`."""
    counts = {"unit": lambda: la._unit_counts, "diag": lambda: la.counts}.get(structure)
    numbers = group_indices(structure, la.parameter_names, la.model) if counts is None else range(sum(counts()))
    return Groups(numbers, la.fitted_model.device)


def logarithms(la: Evidence, groups: Groups) -> Tensor:
    """Means of the log precisions of each group, and last that of the noise's precision, ``(G + 1,)``, float64."""
    logs, noise = la.prior_precision.detach().log(), la.sigma_noise.detach().log()[None]
    return torch.cat([groups.sums(logs) / groups.sums(torch.ones_like(logs)), -2 * noise])


def tempered_likelihood(la: Evidence, log_sigma: Tensor | None, at_mode: str = "network") -> Tensor:
    """The log likelihood in the objective of a noise that is tuned, None if it is not: divided by the temperature with its normaliser, which
    :meth:`~ella_cuda.laplace.KronLaplace.log_marginal_likelihood` leaves whole. A whole one would only rescale the noise by the temperature's
    root."""
    if log_sigma is None:
        return log_likelihood(la, la.sigma_noise, at_mode)
    statistic = mean_at(la, at_mode).statistic
    return la.likelihood_function.log_likelihood(statistic, la.n_targets, log_sigma.exp()) / la.temperature


def gradients(la: Evidence, groups: Groups, log_precision: Tensor, log_sigma: Tensor | None = None) -> list[Tensor]:
    """Those of the tempered evidence in the logarithms of the groups' precisions and, unless None, of sigma."""
    spread = groups.spread(log_precision)
    terms = la._terms(spread, log_scale(la, log_sigma), norms_at(la, spread))
    found = [-0.5 * groups.sums(terms.slope)]
    if log_sigma is not None:
        with torch.enable_grad():  # a user's likelihood may have any normaliser
            leaf = log_sigma.detach().requires_grad_()
            (slope,) = torch.autograd.grad(tempered_likelihood(la, leaf), leaf)
        found.append(slope + terms.effective.sum())
    return found


def climb(
    la: Evidence,
    optimizer: torch.optim.Adam,
    groups: Groups,
    n_steps: int,
    weight: float,
    graphs: Any,
    progress_bar: bool,
) -> None:
    """Steps of a fused optimizer of the logarithms of the groups' precisions, and maybe of sigma, up the tempered evidence times ``weight``.
    Each is the same function of static shapes on the same tensors, of which the host reads none: ``graphs``, a :class:`CudaGraphs`, records
    the second and replays it; None runs each as it is."""
    options = optimizer.param_groups[0]
    options["capturable"] = graphs is not None

    def step() -> None:
        for tensor, gradient in zip(options["params"], gradients(la, groups, *options["params"]), strict=True):
            tensor.grad = -weight * gradient
        optimizer.step()

    run = step
    with torch.inference_mode(False), torch.no_grad():
        for done in tqdm(range(n_steps), desc="evidence", disable=not progress_bar, leave=False):
            if graphs is not None and done < 2:
                run = (
                    recorded_or_told(graphs, step, "a step on the prior precisions")
                    if done
                    else partial(graphs.warm_up, step)
                )
            run()
    optimizer.zero_grad()  # gradients may lie in a graph's memory


def raise_evidence(la: Evidence, n_steps: int, lr: float, groups: Groups, tune_sigma: bool, progress_bar: bool) -> None:
    """Adam on the logarithms of the precisions, one for each group of tensors, and of sigma; ValueError where these end at no finite one. On
    CUDA steps are recorded, where their ops are those of a graph."""
    device = la.square_norms.device
    records = la._records_steps and not is_finer(la, la.prior_precision)
    graphs = CudaGraphs(device) if records and has_graphs(device) and n_steps > 2 else None
    with torch.inference_mode(False), torch.no_grad():
        at = logarithms(la, groups)
        learnt = [at[:-1].clone(), *([-0.5 * at[-1]] if tune_sigma else [])]
        climb(la, torch.optim.Adam(learnt, lr=lr, fused=True), groups, n_steps, 1.0, graphs, progress_bar)
        precision, *sigma = (logarithm.exp() for logarithm in learnt)
        set_values(la, groups.spread(precision), *sigma or [la.sigma_noise])


@torch.no_grad()
def fixed_points(
    la: Evidence,
    n_steps: int,
    groups: Groups,
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
    evidence stand still, for its precision may be anything. The host reads once an update, and once for each time that it is halved.

    Args:
        la: where the updates start, at the mean of a group's logarithms.
        n_steps: how many, at most.
        groups, tune_sigma: what is updated. progress_bar: show one.
        limit: how far the logarithms of the precisions, and of the noise's :math:`1 / \sigma^2`, may go; None for no limit.
        at_mode: "network", or "linear": whose distances from the prior's mean and squared errors these are.

    Returns:
        The logarithms of the groups' precisions and of sigma, and whether they rest.

    Source: MacKay, "Bayesian interpolation", 1992, section 4.
    """
    mean = mean_at(la, at_mode)
    square_error = -2 * mean.statistic
    at = logarithms(la, groups)  # of the precisions and of the noise's, in a row
    norms_of_each = norms_at(la, groups.spread(at[:-1]), at_mode)
    norms = groups.sums(norms_of_each)
    lowest, highest = (at - limit, at + limit) if limit is not None else (at - math.inf, at + math.inf)

    def look(at: Tensor) -> tuple[Tensor, Tensor]:
        """The tempered evidence there, and the elements of each group that the data determine."""
        log_sigma = -at[-1] / 2 if tune_sigma else None
        terms = la._terms(groups.spread(at[:-1]), log_scale(la, log_sigma), norms_of_each)
        value = torch.add(tempered_likelihood(la, log_sigma, at_mode), terms.value, alpha=-0.5)
        return value, groups.sums(terms.effective)

    evidence, gamma = look(at)
    before = torch.full_like(gamma, math.inf)  # the determined elements before the last update
    for _ in tqdm(range(n_steps), desc="fixed points", disable=not progress_bar, leave=False):
        aim = (gamma / norms).log()
        # Of tensors at their prior's mean that the data say nothing about, nothing is learned.
        aim = torch.where(aim.isnan(), at[:-1], aim)
        part = (at[:-1] + SHARE * (aim - at[:-1])).clamp(*BOUNDS)
        noise = at[-1:]
        if tune_sigma:
            determined = gamma.sum() * la.temperature
            slower = (square_error + determined * (-noise).exp()) / la.n_targets
            faster = square_error / (la.n_targets - determined)
            noise = -torch.where(2 * determined < la.n_targets, faster, slower).log()
        step = torch.minimum(torch.maximum(torch.cat([part, noise]), lowest), highest) - at
        while True:
            after, found = look(at + step)
            moves = step.abs() >= STILL
            stands = (gamma < NOTHING) & ((gamma - before).abs() < STILL) & ((after - evidence).abs() < STILL)
            moves[:-1] &= ~stands
            fell = after < evidence - ROUNDING * evidence.abs()
            fell, moving, sound = torch.stack([fell, moves.any(), (at + step).isfinite().all()]).tolist()
            if not fell:
                break
            step = step / 2
            step = step.masked_fill(step.abs().max() < STILL, 0)
        at, evidence, before, gamma = at + step, after, gamma, found
        if not moving:
            break
    put(la, at, groups, tune_sigma, sound)
    return at[:-1], -at[-1] / 2, not moving


def put(la: Evidence, at: Tensor, groups: Groups, tune_sigma: bool, sound: bool = False) -> None:
    """Give la these logarithms, of the groups' precisions and last the noise's, which are read if not ``sound``, known to be finite."""
    precision = at[:-1].exp()
    held = precision.clamp(SMALLEST, LARGEST)  # at a bound without what the exponential of its logarithm is off
    precision = torch.where((precision - held).abs() < 1e-13 * held, held, precision)
    set_values(la, groups.spread(precision), (-at[-1] / 2).exp() if tune_sigma else la.sigma_noise, sound)


def warn_of_motion(n_steps: int, instead: str = "") -> None:
    """Warn at the line that called optimize_prior_precision that fixed points do not rest; ``instead``: what else to do than to take more."""
    words = f"optimize_prior_precision: the fixed points do not rest after n_steps={n_steps}; take more{instead}."
    warnings.warn(words, stacklevel=3)


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
    seen: list[list[Any]] = [[] for _ in grid]  # log densities, or predictions and targets
    count = 0
    for batch in tqdm(val_loader, desc="grid", disable=not progress_bar, leave=False):
        x, y = pair_on(batch, la.prior_precision.device, "optimize_prior_precision", la.fitted_model.keys)
        count += len(y)
        for place, predictions in enumerate(predict(x)):
            seen[place].append(log_density(la, predictions, y) if loss is None else (predictions, kept(y)))
    if not count:
        raise ValueError(
            "optimize_prior_precision: val_loader gave no data; pass a re-iterable loader such as a DataLoader."
        )
    if loss is None:
        values = torch.stack([-sum(densities) for densities in seen]).cpu() / count
    else:
        values = grid.new_tensor([_of_all(loss, pairs) for pairs in seen])
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
    """The log predictive density of all targets, noise included, 0-dim float64, by probabilities, or by mean and variance of the outputs;
    TypeError or ValueError where the targets do not fit. A likelihood without a closed form integrates over samples."""
    likelihood = la.likelihood_function
    likelihood.check(predictions if likelihood.has_classes else predictions[0], targets)
    return likelihood.log_predictive(predictions, targets, la.sigma_noise, n_samples).sum()


def _of_all(loss: Loss, pairs: list[tuple[Any, Tensor]]) -> float:
    """The loss of the predictions and targets of all batches."""
    predictions, targets = zip(*pairs, strict=True)
    parts = [torch.cat(part) for part in zip(*predictions, strict=True)] if isinstance(predictions[0], tuple) else []
    found = loss(tuple(parts) or torch.cat(predictions), torch.cat(targets))
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
            f"prior_structure={prior_structure!r} has a precision for every element, which FullLaplace and DiagLaplace learn by "
            "method='marglik' at='network' alone: use 'layerwise'."
        )
    check_choice("prior_structure", prior_structure, STRUCTURES)
    if method == "gridsearch":
        if val_loader is None:
            raise ValueError("optimize_prior_precision: method='gridsearch' needs val_loader, which yields (x, y).")
        require_loader(val_loader, "optimize_prior_precision: val_loader")
        if prior_structure != "scalar":
            raise ValueError("method='gridsearch' tries one precision for all tensors; pass prior_structure='scalar'.")
    if method == "loo" and prior_structure not in ("scalar", "layerwise"):
        raise ValueError(
            "method='loo' tries one precision for all tensors, prior_structure='scalar', or one factor of the present precisions, "
            f"'layerwise'; got {prior_structure!r}."
        )
    ends = [number(f"log_prior_prec_{n}", v) for n, v in (("min", low), ("max", high))]
    if not -FURTHEST <= ends[0] <= ends[1] <= FURTHEST:
        raise ValueError(
            "log_prior_prec_min and log_prior_prec_max must be powers of ten, the first no larger, from "
            f"{-FURTHEST} to {FURTHEST}, got {low!r} and {high!r}."
        )
    return torch.logspace(*ends, as_count("grid_size", size), dtype=torch.float64, device="cpu")
