"""Leave-one-out predictions of the data of a fit, in closed form from the posterior of all data."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import RandomSampler
from tqdm import tqdm

from ella_cuda.laplace.batches import Inputs, data_points, pair_on, take
from ella_cuda.laplace.copies import augment_of
from ella_cuda.laplace.evidence import data_weight, require_likelihood_of_fit
from ella_cuda.laplace.likelihoods import DIAGONAL, by_position, gaussian_outputs
from ella_cuda.laplace.posterior import Posterior
from ella_cuda.modes import running_the_model
from ella_cuda.ops._precision import in_own_precision, without_autocast

if TYPE_CHECKING:
    from ella_cuda.laplace.predictive import Predictive

SCALES = tuple(10.0**k for k in range(7))  # of the precisions of a ranking
FACTORS = tuple(10 ** (k / 4) for k in range(29))  # of the precisions of a calibration
FOLDS_FACTORS = tuple(10 ** (k / 4) for k in range(-8, 29))  # and of one by folds, which may ask for more variance
BY_HEART = 0.1  # nats of a training label, below which a network knows its data by heart
ENOUGH = 2  # times the NLL of another network on its own data that a fold's may have
CALIBRATION_POINTS = 500  # data points that a calibration takes at most
WORK = 1e12  # products of covariances that nobody asked for: minutes of a core
LEAST = 50  # data points, however many products they take
FOLD_TIMES, FOLD_POINTS = 10, 10_000  # so many times the work, and points at most, of data that a fold has not seen
PIECES = 10, 100  # data points at a time: of the first, which rule most factors out, and of the others
BESIDE = 6  # matrices of a data point's outputs that are there beside the covariances
APART = 1e-3  # of log likelihoods of the same data, relative


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class LeaveOneOut:
    r"""What the posterior of all other data says of each data point, in the loader's order.

    Attributes:
        log_density: of a data point's target, ``(N,)``, nats, float64: nan where it is not defined.
        leverage: the largest eigenvalue of :math:`S_i \Lambda_i`, ``(N,)``, float64. From 1 on a data point's own curvature is at least all
            that the posterior has along some direction of its outputs: there is no posterior of the others.
        influence: :math:`m_{-i} - f_i = S_{-i} g_i`, ``(N, ...)`` of the outputs' shape, float64: how far the outputs move when the data
            point is left out; nan where it is not defined.
        total_leverage: the sum of the traces of :math:`S_i \Lambda_i`, 0-dim float64: the sum of ``la.effective_parameters()`` where the
            posterior has the exact Gauss-Newton matrix of these data.
    """

    log_density: Tensor
    leverage: Tensor
    influence: Tensor
    total_leverage: Tensor

    @property
    def n_undefined(self) -> int:
        """How many data points have a leverage of 1 or more."""
        return int((self.leverage >= 1).sum())

    @property
    def total(self) -> Tensor:
        """The sum of the defined log densities, 0-dim float64."""
        return self.log_density.nansum()

    @property
    def nll(self) -> Tensor:
        """The mean of the defined negative log densities, 0-dim float64: an estimate of the NLL of test data."""
        return -self.log_density.nanmean()

    def __repr__(self) -> str:
        count = len(self.leverage)
        largest = f"{self.leverage.max().item():.3g}" if count else "none"
        return (
            f"{type(self).__name__}({count} data points, {self.n_undefined} undefined, nll={self.nll.item():.4g}, "
            f"largest leverage {largest}, total leverage {self.total_leverage.item():.4g})"
        )


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Influence(LeaveOneOut):
    """A :class:`LeaveOneOut` that ranks data points by how much the others contradict their targets.

    Attributes:
        scale: the factor of the prior precisions, the smallest power of ten from 1 on under which no data point has a leverage of
            1 or more.
        score: minus the log density, ``(N,)``, nats, float64: large where all other data expect another target.
        order: the data points' numbers, ``(N,)``, int64, from the most contradicted on.
    """

    scale: float

    @property
    def score(self) -> Tensor:
        return -self.log_density

    @property
    def order(self) -> Tensor:
        return self.score.argsort(descending=True, stable=True)


class Left(NamedTuple):
    """Of some data points under one posterior: leverages and traces ``(N,)`` of :math:`S_i \\Lambda_i`, influences ``(N, ...)`` and
    covariances ``(N, E, E)`` without them, the latter two of any values where the leverage is 1 or more."""

    leverage: Tensor
    traces: Tensor
    influence: Tensor
    covariance: Tensor

    @property
    def undefined(self) -> Tensor:
        return self.leverage >= 1


class Tempered(NamedTuple):
    """A posterior's prior precisions, one value for each tensor, and temperature."""

    precision: Tensor
    temperature: float


class Prediction(NamedTuple):
    """How densities come from Gaussian outputs: arguments of a call of an approximation."""

    link_approx: str = "probit"
    n_samples: int = 100
    generator: torch.Generator | None = None
    mean: str = "network"


@running_the_model
@torch.no_grad()
def leave_one_out(la: Predictive, loader: Iterable[Any], how: Prediction, progress_bar: bool) -> LeaveOneOut:
    """Of la's posterior; see :meth:`ella_cuda.laplace.KronLaplace.leave_one_out`."""
    return _results(la, [la.posterior_precision], loader, how, "leave_one_out", progress_bar)[0]


@running_the_model
@torch.no_grad()
def influence(la: Predictive, loader: Iterable[Any], how: Prediction, progress_bar: bool) -> Influence:
    """See :meth:`ella_cuda.laplace.KronLaplace.influence`."""
    if shuffles(loader):
        warnings.warn(
            "influence: the loader shuffles, so that order and score are of the data points as this pass had them, which no later pass has; "
            "pass a loader of the same data that does not.",
            stacklevel=5,
        )
    weight, now = data_weight(la), la.prior_precision.detach()
    posteriors = [la._posterior(now * scale, weight) for scale in SCALES]
    for scale, found in zip(SCALES, _results(la, posteriors, loader, how, "influence", progress_bar), strict=True):
        if not found.n_undefined:
            return Influence(**vars(found), scale=scale)
    raise ValueError(
        f"influence: under {SCALES[-1]:g} times the prior precisions {found.n_undefined} data points have a leverage of 1 or more; set "
        "larger prior_precision."
    )


def shuffles(loader: Iterable[Any]) -> bool:
    """Whether a loader of torch's or ours has another order in each pass."""
    return bool(getattr(loader, "shuffle", False)) or isinstance(getattr(loader, "sampler", None), RandomSampler)


def _results(
    la: Predictive,
    posteriors: Sequence[Posterior],
    loader: Iterable[Any],
    how: Prediction,
    where: str,
    progress_bar: bool,
) -> list[LeaveOneOut]:
    """Under each of the posteriors."""
    found: list[list[tuple[Tensor, ...]]] = [[] for _ in posteriors]
    for place, mean, targets, left in left_out(la, posteriors, loader, how, where, progress_bar):
        density = _log_density(la, mean + left.influence, left.covariance, targets, how)
        nowhere = left.undefined.view(-1, *[1] * (mean.dim() - 1))
        density, shift = density.masked_fill(left.undefined, math.nan), left.influence.masked_fill(nowhere, math.nan)
        found[place].append((density, left.leverage, shift, left.traces))
    together = [[torch.cat(each) for each in zip(*parts, strict=True)] for parts in found]
    return [LeaveOneOut(density, leverage, shift, traces.sum()) for density, leverage, shift, traces in together]


@running_the_model
@torch.no_grad()
def best_of(
    la: Predictive,
    candidates: Sequence[Tempered],
    start: Tempered | None,
    loader: Iterable[Any],
    how: Prediction,
    progress_bar: bool,
) -> Tempered:
    """The candidate with the largest sum of leave-one-out log densities among those under which all are defined; ValueError where there are
    none.

    Args:
        start: under which the means are those without the data point; a warning says how many data points have none and no part in the sum.
            None is the candidate whose covariance it is.
    """
    tried, where = [*candidates] if start is None else [start, *candidates], "optimize_prior_precision"
    weights = [data_weight(la) * la.temperature / temperature for _, temperature in tried]
    posteriors = [la._posterior(precision, weight) for (precision, _), weight in zip(tried, weights, strict=True)]
    totals = data_weight(la).new_zeros(len(tried))
    undefined, count = torch.zeros_like(totals), 0
    for place, mean, targets, left in left_out(la, posteriors, loader, how, where, progress_bar, weights=weights):
        if start is None or not place:
            means, count = left, count + (len(mean) if not place else 0)
        density = _log_density(la, mean + means.influence, left.covariance, targets, how)
        totals[place] += density[~(means.undefined | left.undefined)].sum()
        undefined[place] += (left.undefined if means is left else left.undefined & ~means.undefined).sum()
    if start is not None:
        unknown, undefined, totals = int(undefined[0]), undefined[1:], totals[1:]
        if unknown == count:
            raise ValueError(
                "optimize_prior_precision: under init_prior_prec every data point has a leverage of 1 or more, so that none has means "
                "without it; pass a larger init_prior_prec."
            )
        if unknown:
            warnings.warn(
                f"optimize_prior_precision: under init_prior_prec {unknown} data points have a leverage of 1 or more, and no part in "
                "the choice.",
                stacklevel=5,
            )
    possible = (undefined == 0) & totals.isfinite()
    if not possible.any():
        raise ValueError(
            "optimize_prior_precision: method='loo' takes precisions under which no data point has a leverage of 1 or more, which none of "
            f"the grid is: at its end {int(undefined[-1])} have; increase log_prior_prec_max, now at precisions up to "
            f"{candidates[-1].precision.max().item():.3g}."
        )
    return candidates[int(totals.where(possible, -math.inf).argmax())]


def training_nll(la: Predictive) -> float:
    """What the network itself says of the fit's targets, at any temperature: the mean negative log density of one, nats."""
    return -float(la.log_likelihood) * la.temperature / la.n_targets


def knows_by_heart(la: Predictive) -> bool:
    """Whether the network leaves next to no gradient at the labels of its fit, so that leaving one of them out changes nothing."""
    return la.likelihood_function.has_classes and training_nll(la) < BY_HEART


def have_learned_alike(la: Predictive, folds: Iterable[Predictive]) -> bool:
    """Whether networks of parts of la's data have learned these as la's has learned all: to at most :data:`ENOUGH` times its NLL, or as often
    :data:`BY_HEART`. Networks that have learned less are wrong more often, and ask for too much variance."""
    if not la.likelihood_function.has_classes:
        return True
    seen = [(other.n_targets, training_nll(other)) for other in folds]
    mean = sum(count * nll for count, nll in seen) / sum(count for count, _ in seen)
    return mean <= ENOUGH * max(BY_HEART, training_nll(la))


@running_the_model
@torch.no_grad()
def calibrate(la: Predictive, loader: Iterable[Any], tolerance: float, progress_bar: bool) -> Tensor:
    """The precisions of predictions; see :meth:`ella_cuda.laplace.KronLaplace.calibrate`."""
    if knows_by_heart(la):
        warnings.warn(
            f"calibrate: the network predicts its training labels at {training_nll(la):.2g} nats, as by heart, so that leaving one out "
            "hardly changes it and does not tell how sure it may be of new data; pass folds=, networks of a part of the data each.",
            stacklevel=5,
        )
    weight, now, how, where = data_weight(la), la.prior_precision.detach(), Prediction(), "calibrate"
    posteriors = [la._posterior(now * factor, weight) for factor in FACTORS]
    totals, alone, count, last = weight.new_zeros(len(FACTORS)), weight.new_zeros(()), 0, len(FACTORS) - 1
    data, failed = _first(la, loader, where), set()
    for place, mean, targets, left in left_out(la, posteriors, data, how, where, progress_bar, failed, whole=False):
        density = _log_density(la, mean + left.influence, left.covariance, targets, how)
        totals[place] += density.masked_fill(left.undefined, -math.inf).sum()
        if place == last:
            alone += _log_density(la, mean, torch.zeros_like(left.covariance), targets, how).sum()
            count += len(targets)
        elif not totals[place].isfinite():
            failed.add(place)
    nll, own = -totals / count, -alone / count
    fits = (nll <= own + tolerance).tolist()
    if not any(fits):
        warnings.warn(
            f"calibrate: the leave-one-out NLL is {nll[-1].item():.4g} nats under {FACTORS[-1]:g} times the prior precisions, the largest "
            f"factor, and that of the network's own outputs {own.item():.4g}, more than tolerance={tolerance:g} below; predictions are by "
            "that factor. Set larger prior_precision, or a larger tolerance.",
            stacklevel=5,
        )
        fits[-1] = True
    return now * FACTORS[fits.index(True)]


@running_the_model
@torch.no_grad()
def calibrate_by_folds(la: Predictive, folds: Sequence[tuple[Predictive, Iterable[Any]]], progress_bar: bool) -> Tensor:
    """The precisions of predictions; see :meth:`ella_cuda.laplace.KronLaplace.calibrate`."""
    now, totals, how = la.prior_precision.detach(), data_weight(la).new_zeros(len(FOLDS_FACTORS)), Prediction()
    for number, (other, loader) in enumerate(folds):
        where, weight = f"calibrate: folds[{number}]", data_weight(other)
        other.fitted_model.require_unchanged()
        require_likelihood_of_fit(other)
        posteriors = [other._posterior(now * factor, weight) for factor in FOLDS_FACTORS]
        likelihood, count = other.likelihood_function, 0
        diagonal = likelihood.has_classes or not likelihood.couples_outputs
        each = len(posteriors) * other.n_params * other.n_outputs ** (1 if diagonal else 2)
        most = affordable(FOLD_POINTS, each, FOLD_TIMES)
        for batch in tqdm(loader, desc=f"fold {number + 1} of {len(folds)}", disable=not progress_bar, leave=False):
            x, y = pair_on(batch, other.fitted_model.device, where, other.fitted_model.keys)
            x, y = take(x, slice(most - count)), y[: most - count]
            for place, which, _, mean, spread in _moments(other, posteriors, x, y, how, where, diagonal=diagonal):
                covariance = torch.diag_embed(spread.flatten(1)) if diagonal else spread
                totals[place] += _log_density(other, mean.double(), covariance.double(), y[which], how).sum()
            count += len(y)
            if count >= most:
                break
        if not count:
            raise ValueError(f"{where}: the loader gave no data; pass a re-iterable loader such as a DataLoader.")
    if not totals.isfinite().any():
        raise FloatingPointError(
            "calibrate: no precision gives the folds' targets a finite log density; check the data."
        )
    best = int(totals.where(totals.isfinite(), -math.inf).argmax())
    if not best:
        least = f"calibrate: folds choose {FOLDS_FACTORS[0]:g} times the prior precisions, the smallest factor; set smaller prior_precision."
        warnings.warn(least, stacklevel=5)
    return now * FOLDS_FACTORS[best]


def _first(la: Predictive, loader: Iterable[Any], where: str) -> Iterator[tuple[Inputs, Tensor]]:
    """The loader's first :data:`CALIBRATION_POINTS` data points or fewer, :data:`PIECES` at a time."""
    each = len(FACTORS) * la.n_params * la.n_outputs**2
    room, piece = affordable(CALIBRATION_POINTS, each), PIECES[0]
    for batch in loader:
        x, y = pair_on(batch, la.fitted_model.device, where, la.fitted_model.keys)
        if len(y) != data_points(x):
            yield x, y  # which is refused
        begin, end = 0, min(len(y), room)
        while begin < end:
            some = slice(begin, min(begin + piece, end))
            yield take(x, some), y[some]
            begin, piece = some.stop, PIECES[1]
        room -= len(y)
        if room <= 0:
            return


def left_out(
    la: Predictive,
    posteriors: Sequence[Posterior],
    loader: Iterable[Any],
    how: Prediction,
    where: str,
    progress_bar: bool,
    failed: Collection[int] = (),
    whole: bool = True,
    weights: Sequence[Tensor] = (),
) -> Iterator[tuple[int, Tensor, Tensor, Left]]:
    """The posterior's place, means, targets and what is left of some of the loader's data, for one pass through the network where a data
    point's covariances under all posteriors are within ``la.memory_budget``; places come in order, without those that the caller has put into
    ``failed`` before. Of data that are not ``whole``, which may be a part, no other log likelihood than the fit's is told. ``weights`` are
    each posterior's factor of the likelihood, where that is not la's.

    Raises:
        ValueError: the loader gave no data, or more than the fit had; targets do not fit.
        MemoryError: a data point has too many outputs.
        FloatingPointError: outputs are not finite.

    Warns:
        UserWarning: as many data as the fit's have another log likelihood.
    """
    la.fitted_model.require_unchanged()
    require_likelihood_of_fit(la)
    count, statistic = 0, la.statistic.new_zeros(())
    for batch in tqdm(loader, desc="leave one out", disable=not progress_bar, leave=False):
        x, y = pair_on(batch, la.fitted_model.device, where, la.fitted_model.keys)
        if len(y) != data_points(x):
            raise ValueError(f"{where}: expected a target for each data point, got {len(y)} for {data_points(x)}.")
        count += len(y)
        if count > la.n_data:
            raise ValueError(
                f"{where}: the loader must yield data of the fit, which had {la.n_data} data points, and yields more; pass the fit's loader."
            )
        seen = -1
        for place, which, outputs, mean, covariance in _moments(la, posteriors, x, y, how, where, failed):
            if which.start != seen:
                with without_autocast(mean.device.type):
                    statistic, seen = statistic + la.likelihood_function.statistic(outputs, y[which]), which.start
            weight = weights[place] if weights else data_weight(la)
            yield place, mean.double(), y[which], _without(la, mean, covariance, y[which], which.start, weight)
    if not count:
        raise ValueError(f"{where}: the loader gave no data; pass a re-iterable loader such as a DataLoader.")
    if whole and count == la.n_data and (statistic - la.statistic).abs() > APART * (1 + la.statistic.abs()):
        remedy = "pass the fit's data without random augmentation"
        if augment_of(la.model) is not None and la.fitted_model.draws is None:
            remedy = (
                "the model's augmentation draws other copies in every pass (sampling='independent'); fit in the context "
                "augment.held(), or with another sampling"
            )
        warnings.warn(
            f"{where}: the loader's data are as many as the fit's but have another log likelihood ({statistic.item():.6g}, not "
            f"{la.statistic.item():.6g}, up to a normaliser), so that it is not they that are left out; {remedy}.",
            stacklevel=7,
        )


def _moments(
    la: Predictive,
    posteriors: Sequence[Posterior],
    x: Inputs,
    y: Tensor,
    how: Prediction,
    where: str,
    failed: Collection[int] = (),
    diagonal: bool = False,
) -> Iterator[tuple[int, slice, Tensor, Tensor, Tensor]]:
    """The posterior's place, some of a batch's data points, their outputs, means and covariances, or variances; see :func:`left_out`."""
    begin = 0
    while begin < len(y):
        places = [place for place in range(len(posteriors)) if place not in failed]
        points, together = room(la, len(places), where)
        which = slice(begin, begin + points)
        for first in range(0, len(places), together):
            some = places[first : first + together]
            under = [posteriors[place] for place in some]
            outputs, covariances = la._moments_under(la.fitted_model.inputs(take(x, which)), under, diagonal=diagonal)
            mean = outputs + la._shift(take(x, which), how.mean)
            with without_autocast(mean.device.type):
                la.likelihood_function.check(mean, y[which])
            for place, covariance in zip(some, covariances, strict=True):
                yield place, which, outputs, mean, covariance
        begin += points


def affordable(most: int, each: float, times: float = 1.0) -> int:
    """How many data points of ``each`` products take so many times :data:`WORK`, at most ``most`` and at least :data:`LEAST`."""
    return min(most, max(LEAST, int(times * WORK / each)))


def room(la: Predictive, count: int, where: str) -> tuple[int, int]:
    """How many data points, and posteriors of ``count``, go together; MemoryError where there is no room for one."""
    each = 8 * la.n_outputs**2
    most = la.memory_budget // each
    if most <= BESIDE:
        raise MemoryError(
            f"{where}: a data point has {la.n_outputs:,} outputs, whose covariances take {(BESIDE + 1) * each:,} bytes at once, more than "
            f"memory_budget={la.memory_budget:,}; give the approximation a larger memory_budget."
        )
    together = min(count, most - BESIDE)
    return most // (together + BESIDE), together


@in_own_precision
def _without(la: Predictive, mean: Tensor, covariance: Tensor, targets: Tensor, begin: int, weight: Tensor) -> Left:
    r"""Of data points with Gaussian outputs under the posterior of all data, mean ``(N, ...)`` and covariance ``(N, E, E)``; ``weight`` is
    the likelihood's factor in it.

    With :math:`R R^T = \Lambda` and :math:`R^T S R = Q \mathrm{diag}(\lambda) Q^T`, which has the eigenvalues of :math:`S \Lambda`,
    :math:`(I - S \Lambda)^{-1} S = S + S R Q\, \mathrm{diag}(1 / (1 - \lambda))\, Q^T R^T S`.
    """
    likelihood = la.likelihood_function
    mean, covariance = mean.double(), covariance.double()
    root = likelihood.columns(mean, targets)
    root = root[0 : len(root)].double().flatten(2).permute(1, 2, 0) * weight.sqrt()  # (N, E, columns)
    pushed = covariance @ root
    inner = root.mT @ pushed
    if not inner.isfinite().all():
        which = int((~inner.flatten(1).isfinite().all(1)).nonzero()[0])
        raise FloatingPointError(
            f"the leverage of a data point is not finite: number {begin + which} of its batch; check the data and the network's outputs."
        )
    values, vectors = torch.linalg.eigh(inner)
    leverage = values[:, -1]
    gain = torch.where((leverage < 1)[:, None], 1 / (1 - values), 0.0)
    pushed = pushed @ vectors
    covariance = covariance + (pushed * gain[:, None]) @ pushed.mT
    slope = weight * likelihood.gradient(mean, targets)
    influence = (covariance @ slope.flatten(1)[..., None]).view_as(mean)
    return Left(leverage, values.sum(1), influence, covariance)


@in_own_precision
def _log_density(la: Predictive, mean: Tensor, covariance: Tensor, targets: Tensor, how: Prediction) -> Tensor:
    """The log densities of targets ``(N,)`` under Gaussian outputs, by the likelihood's predictive."""
    likelihood, link = la.likelihood_function, how.link_approx
    variance = covariance.diagonal(dim1=1, dim2=2)
    if not likelihood.has_classes:
        spread = covariance if likelihood.couples_outputs else variance.view_as(mean)
        predictions: Any = mean, spread
    elif link == "mc":
        total = torch.zeros_like(mean)
        for sample in gaussian_outputs(mean, by_position(mean, covariance), how.n_samples, how.generator):
            total += likelihood.response(sample)
        predictions = total / how.n_samples
    else:
        alone = link in DIAGONAL or not likelihood.couples_outputs
        predictions = likelihood.probabilities(link, mean, by_position(mean, variance if alone else covariance))
    found = likelihood.log_predictive(predictions, targets, la.sigma_noise, how.n_samples)
    if not found.dim() or len(found) != len(mean):
        raise TypeError(
            f"leave one out: log_predictive of {likelihood!r} must return log densities of data points, (N, ...) for N = {len(mean)}, got "
            f"shape {tuple(found.shape)}."
        )
    return found.reshape(len(mean), -1).sum(1)
