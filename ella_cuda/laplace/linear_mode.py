"""The mode of the linearised network's posterior, and the precisions whose evidence it is the mode of."""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from ella_cuda.claim import claim
from ella_cuda.files import no_file, remove_temporary_files, write_file
from ella_cuda.laplace.batches import Inputs, joined, kept, tensors_of
from ella_cuda.laplace.evidence import Evidence, data_weight, present_terms, require_of_tensors, square_distances
from ella_cuda.laplace.factors import require_checksum, with_checksum
from ella_cuda.laplace.fingerprint import fingerprint_of, uneven_sum
from ella_cuda.laplace.last_layer import Features, batches_of_fit, with_features
from ella_cuda.laplace.likelihoods import Regression
from ella_cuda.laplace.memory import available_bytes
from ella_cuda.laplace.parameters import Value, check_choice, positive_number, rounding_of
from ella_cuda.laplace.posterior import KronPosterior, Posterior
from ella_cuda.laplace.tangent_model import TangentModel
from ella_cuda.laplace.tuning import BOUNDS, NOTHING, Groups, fixed_points, logarithms, put
from ella_cuda.nn._sizes import as_count

SOLVERS = ("auto", "cg", "dual", "newton_cg")
HESSIANS = ("network", "linear")
FEW_OUTPUTS = 1000  # of all data, whose kernel is factorised where the solver is chosen
SUFFICIENT = 1e-4  # the share of a step's promised descent that it must give
OVERSHOOT = 0.3  # of the tolerance that products with the curvature aim at
ROUNDED = 64.0  # rounding errors of terms, in a sum of them that is negative
APART = 16.0  # rounding errors of terms that a fit and a pass differ by, which have batches of other sizes
SHORTEST = 1e-8  # part of a Newton step that is tried
EVERY = 30.0  # seconds between checkpoints
INNER = 200  # fixed-point updates in a round
DEPTH = 5  # rounds that Anderson's method looks back
LOOSEST, INEXACT = 1e-3, 1e-2  # tolerance of the linear mode in a round, at most and of the last round's change
TIGHTEST = {torch.float32: 1e-5, torch.float64: 1e-11}


class LinearMode(NamedTuple):
    r"""The mode of the linearised network's posterior, as :meth:`ella_cuda.laplace.KronLaplace.fit_linear_mode` found it.

    Attributes:
        theta: the mode, ``(P,)``, float64.
        statistic: what the log likelihood is a function of, at the linearised network's outputs, 0-dim float64.
        square_norms: of each parameter tensor, the squared distance from the prior's mean, float64.
        form: of the linearised network, "full" or "simple".
        loss: :math:`-\log p(D | h(\theta)) / T + \frac12 \|\theta - \mu\|^2_\Lambda`, nats, up to a regression's normaliser.
        residual: the norm of the loss' gradient over the larger of those of its two terms, in the metric of the posterior's covariance.
        passes: over the data that it took.
        why: the reason why the residual did not go below the tolerance; "" where it did.
        features: of a linear last layer, the sum of its inputs and of ones over the data, ``(D + 1,)``, float64; None of other posteriors,
            and where the inputs were not kept.
    """

    theta: Tensor
    statistic: Tensor
    square_norms: Tensor
    form: str
    loss: float
    residual: float
    passes: int
    why: str = ""
    features: Tensor | None = None

    def on(self, device: torch.device) -> LinearMode:
        """A copy on the device."""
        tensors = {key: v.to(device, copy=True) for key, v in self._asdict().items() if isinstance(v, Tensor)}
        return self._replace(**tensors)


class _Loss:
    """The linearised network's loss over the data of la's fit, whose passes are counted, and move the bar; ``norm`` is in the metric of the
    posterior's ``covariance``."""

    def __init__(self, la: Evidence, loader: Iterable[Any], form: str, bar: tqdm, max_passes: int) -> None:
        self.la, self.loader, self.bar, self.max_passes = la, loader, bar, max_passes
        of_features = isinstance(loader, Features)
        self.tangent = loader.layer.tangent(form) if of_features else TangentModel(la.model, form, la.parameter_names)
        self.point = self.tangent.point.double()
        self.eps = torch.finfo(self.tangent.point.dtype).eps
        self.weight = data_weight(la).item()
        self.free = la.free_elements
        precision = la.prior_precision.detach()
        self.prior = precision.repeat_interleave(torch.tensor(la.fitted_model.numels, device=precision.device))
        self.mean = la.prior_mean.expand(self.point.shape)
        self.passes = 0
        # Where a gradient was last taken, and the linearised network's outputs there, by batch.
        self._theta: Tensor | None = None
        self._outputs: dict[Any, Tensor] = {}

    @functools.cached_property
    def _posterior(self) -> Posterior:
        return self.la.posterior_precision

    def covariance(self, vector: Tensor) -> Tensor:
        return self._posterior.bmm(vector.to(self.tangent.point.dtype), -1).double()

    def norm(self, vector: Tensor) -> float:
        return math.sqrt(max(torch.dot(vector, self.covariance(vector)).item(), 0.0))

    def push(self, theta: Tensor) -> Tensor:
        """The direction that the linearised network's outputs at theta are derivatives along."""
        return theta if self.tangent.form == "simple" else theta - self.point

    def outputs(self, f: Tensor, along: Tensor) -> Tensor:
        """The linearised network's; masked classes, at minus infinity, stay masked in the simple form too."""
        return torch.where(f.isinf(), f, along) if self.tangent.form == "simple" else f + along

    def gradient(self, theta: Tensor) -> tuple[float, Tensor, Tensor]:
        """The statistic, the data term's gradient and the prior's, ``(P,)`` each: a pass."""
        likelihood, direction = self.la.likelihood_function, self.push(theta)
        self._theta, self._outputs = theta, {}
        sums = torch.zeros(5, dtype=torch.float64, device=theta.device)

        def of(x: Inputs, y: Tensor) -> Tensor:
            unfit = sum((_not_finite(t) for t in tensors_of(x) if t.is_floating_point()), sums.new_zeros(()))

            def cotangent(f: Tensor, along: Tensor) -> Tensor:
                likelihood.check(f, y)
                h = self._outputs[_key(x)] = self.outputs(f, along)
                slope = likelihood.gradient(h, y).to(h.dtype)
                with torch.no_grad():
                    size = ((1 + slope.abs()) * f.abs()).sum(dtype=torch.float64)
                    statistics = [likelihood.statistic(outputs.double(), y).double() for outputs in (h, f)]
                    sums.add_(torch.stack([*statistics, size, _not_finite(f), unfit]))
                return slope

            return self.tangent.push_pull(x, direction, cotangent)

        slope = self.weight * self._sum(of)
        statistic, network, size, outputs, inputs = sums.tolist()
        if outputs:
            whose = "last layer's" if isinstance(self.loader, Features) else "loader's"
            what = f"the {whose} inputs are" if inputs else "the network's outputs are, at inputs that are finite,"
            how = "Check the data" if inputs else "Check the network and its parameters, or use model.double()"
            raise FloatingPointError(f"fit_linear_mode: {what} not finite in pass {self.passes} over the data. {how}.")
        self._check_network(network, size)
        return statistic, slope, self._of_prior(theta)

    def _check_network(self, statistic: float, size: float) -> None:
        """ValueError where what the network's log likelihood is a function of is another than at the fit, by more than rounding."""
        fitted = self.la.statistic.item()
        rounding = rounding_of(self.tangent.point) if self.point.is_cuda else APART * self.eps
        if abs(statistic - fitted) > rounding * (abs(fitted) + size):
            raise ValueError(
                f"fit_linear_mode: the loader's data must be those of the fit in every pass, got a log likelihood of the network of "
                f"{self.weight * statistic:.6g} where the fit has {self.weight * fitted:.6g}, up to a normaliser; pass the fit's loader, and "
                "neither augment data nor leave some out while it is read."
            )

    def product(self, direction: Tensor) -> tuple[Tensor, float]:
        """The loss' Hessian where the gradient was last taken, times a direction ``(P,)``, and the curvature along this: a pass. By outputs,
        for the direction times its product is negative where rounding of the two Jacobian products is larger than the curvature; 0 where
        rounding hides the curvature. ArithmeticError where it is negative, FloatingPointError where it is not finite."""
        bend = direction.new_zeros(2)

        def of(x: Inputs, y: Tensor) -> Tensor:
            h = self._outputs.get(_key(x))
            if h is None:  # another batch than in the gradient's pass
                h = self.outputs(self.tangent.outputs(x), self.tangent.jvp(x, self.push(self._theta)))

            def cotangent(_: Tensor, along: Tensor) -> Tensor:
                curved = self._curved(h, y, along)
                terms = along.double() * curved
                bend.add_(torch.stack([terms.sum(), terms.abs().sum()]))
                return curved.to(along.dtype)

            return self.tangent.push_pull(x, direction, cotangent)

        of_prior = self._weighted(direction)
        product = self.weight * self._sum(of) + of_prior
        # What is not finite in the product is so in the sum.
        data, size = (self.weight * bend + 0 * product.sum()).tolist()
        curvature = data + torch.dot(direction, of_prior).item()
        if not math.isfinite(data):
            raise FloatingPointError("fit_linear_mode: a product with the curvature is not finite; use float64.")
        if curvature <= 0 and -data > ROUNDED * self.eps * size:
            raise ArithmeticError(
                f"fit_linear_mode: the Hessian must not be negative, got a curvature of {data:.3g}; check log_prob of {self.la.likelihood!r}."
            )
        return product, max(curvature, 0.0)

    def batches(self) -> Iterable[tuple[Inputs, Tensor]]:
        """The batches of a pass, on the model's device."""
        if isinstance(self.loader, Features):
            yield from self.loader
        else:
            yield from batches_of_fit(self.la, self.loader, "fit_linear_mode")
        self.passes += 1
        self.bar.update()

    def _sum(self, of: Callable[[Inputs, Tensor], Tensor]) -> Tensor:
        total = torch.zeros_like(self.point)
        for x, y in self.batches():
            total += of(x, y)
        return self._masked(total)

    def _of_prior(self, theta: Tensor) -> Tensor:
        return self._weighted(theta - self.mean)

    def _weighted(self, vector: Tensor) -> Tensor:
        """The prior's precision times a vector."""
        return self._masked(self.prior * vector)

    def _masked(self, vector: Tensor) -> Tensor:
        return vector if self.free is None else vector * self.free

    def value(self, statistic: float, theta: Tensor) -> float:
        """The loss; infinite where the likelihood does not admit the outputs."""
        if not math.isfinite(statistic):
            return math.inf
        return -self.weight * statistic + 0.5 * torch.dot(self._of_prior(theta), theta - self.mean).item()

    def _curved(self, h: Tensor, y: Tensor, along: Tensor) -> Tensor:
        """The Hessian of ``-log p`` in the outputs times a direction of theirs."""
        with torch.enable_grad():
            h, along = h.detach().double().requires_grad_(), along.double()
            value = -self.la.likelihood_function.log_prob(h, y).sum()
            (slope,) = torch.autograd.grad(value, h, create_graph=True)
            if not slope.requires_grad:
                return torch.zeros_like(along)
            (curved,) = torch.autograd.grad(slope, h, along, materialize_grads=True)
        return curved


class _OnlineLoss(_Loss):
    """The loss over further data, whose features are given, with the present posterior around the linear mode as the prior. Kronecker factors
    of weight and bias are taken as one of both, whose input side has the sum of features between these."""

    def __init__(self, la: Evidence, features: Features, form: str, bar: tqdm, max_passes: int) -> None:
        super().__init__(la, features, form, bar, max_passes)
        self.of_data, self.mean = self.mean, la.linear_fit.theta
        names, sums = features.layer.names, la.linear_fit.features
        factor = la.factors[names["weight"]] if len(names) > 1 and isinstance(self._posterior, KronPosterior) else None
        self._sides: tuple[Tensor, Tensor] | None = None
        if factor is not None and sums is None:
            raise RuntimeError(
                "update: the linear mode was found without keeping the last layer's inputs, whose sum a mode of weight and bias needs to "
                "move; call fit_linear_mode(loader) where there is memory for these, or use FullLaplace."
            )
        if factor is not None:
            inputs = torch.nn.functional.pad(factor.inputs[0], (0, 1, 0, 1))
            inputs[-1] = inputs[:, -1] = sums / la.n_data
            self._sides = inputs, self.weight * factor.outputs[0]

    def _weighted(self, vector: Tensor) -> Tensor:
        if self._sides is None:
            return self._masked(self._posterior.bmm(vector, 1))
        inputs, outputs = self._sides
        weight, bias = vector.split([vector.numel() - len(outputs), len(outputs)])
        found = outputs @ torch.cat([weight.view(len(outputs), -1), bias[:, None]], 1) @ inputs
        return torch.cat([found[:, :-1].flatten(), found[:, -1]]) + self.prior * vector

    def _check_network(self, statistic: float, size: float) -> None:
        """No fit has these data."""

    def of_all(self, found: LinearMode) -> LinearMode:
        """The mode that was found as that of all data, whose log likelihood before these is quadratic around the last mode."""
        before, norms = self.la.linear_fit, found.square_norms
        step = found.theta - before.theta
        slope, curved = self.prior * (before.theta - self.of_data), self._weighted(step) - self.prior * step
        change = self._masked(step).dot(slope - 0.5 * curved) / self.weight
        statistic = before.statistic + change + found.statistic
        sums = None if before.features is None else before.features + self.loader.sums()
        return found._replace(statistic=statistic, loss=_loss_at(self.la, statistic, norms), features=sums)


def _loss_at(la: Evidence, statistic: Tensor, square_norms: Tensor) -> float:
    return (0.5 * (la.prior_precision * square_norms).sum() - data_weight(la) * statistic).item()


def move(la: Evidence, features: Features, tol: float, max_passes: int = 500) -> LinearMode:
    """The linear mode once further data are there, by Newton's method on their loss with the present posterior as the prior.

    Raises:
        RuntimeError: the linear mode was found at other precisions, noise or temperature than la's present ones.
    """
    before = la.linear_fit
    if not math.isclose(_loss_at(la, before.statistic, before.square_norms), before.loss, rel_tol=1e-6, abs_tol=1e-6):
        raise RuntimeError(
            "update: the linear mode was found at other prior precisions, noise or temperature than the present ones, so that it is no mode "
            "that could move; call fit_linear_mode(loader) first."
        )
    tol = positive_number("update: tol", tol)
    with tqdm(disable=True) as bar, torch.no_grad():
        loss = _OnlineLoss(la, features, before.form, bar, max_passes)
        return loss.of_all(_newton(loss, before.theta, True, tol, _Checkpoint(la, before.form, None)))


def _not_finite(tensor: Tensor) -> Tensor:
    """The number of entries that are not finite, 0-dim float64; minus infinity is the logit of a masked class."""
    return (~(tensor < torch.inf)).sum(dtype=torch.float64)


def _key(x: Inputs) -> Any:
    """Shapes and weighted sums of a batch's inputs, by which the same batch is known again."""
    parts = [torch.view_as_real(t) if t.is_complex() else t for t in tensors_of(x)]
    return tuple((t.shape, uneven_sum(t.detach()).item()) for t in parts)


def features_of_fit(la: Evidence, loader: Iterable[Any], depth: int) -> Iterable[Any]:
    """:func:`with_features`, of which a warning is about the call so many calls ago."""
    return with_features(la, loader, "fit_linear_mode", available_bytes(la.fitted_model.device), depth + 1)


def solve(
    la: Evidence,
    loader: Iterable[Any],
    tol: Value,
    solver: str,
    form: str,
    start: Tensor | None,
    precondition: bool = True,
    max_passes: int = 500,
    checkpoint: str | os.PathLike[str] | None = None,
    progress_bar: bool = False,
) -> LinearMode:
    """The linearised network's mode at la's prior precisions and noise; arguments as of
    :meth:`ella_cuda.laplace.KronLaplace.fit_linear_mode`."""
    require_of_tensors(la, la.prior_precision)
    tol = positive_number("fit_linear_mode: tol", tol)
    if tol >= 1:
        raise ValueError(f"fit_linear_mode: tol must be less than 1, got {tol!r}.")
    max_passes = as_count("fit_linear_mode: max_passes", max_passes)
    file = _Checkpoint(la, form, checkpoint)
    bars = tqdm(desc="linear mode", unit="pass", disable=not progress_bar, leave=False)
    with file.claimed(), bars as bar, torch.no_grad():
        theta, chosen = file.read(), _chosen(la, solver)
        loader = features_of_fit(la, loader, 6)
        loss = _Loss(la, loader, form, bar, max_passes)
        theta = start if theta is None else theta
        theta = (loss.mean if form == "simple" else loss.point) if theta is None else theta.to(loss.point)
        if loss.free is not None:
            theta = torch.where(loss.free > 0, theta, loss.point)
        if chosen == "dual":
            theta = _by_kernel(la, loss)
        found = _newton(loss, theta, precondition, tol, file)
        return found._replace(features=loader.sums()) if isinstance(loader, Features) else found


def _chosen(la: Evidence, solver: str) -> str:
    """The solver, chosen if it is "auto"; ValueError where the likelihood does not have it."""
    check_choice("solver", solver, SOLVERS)
    gaussian = isinstance(la.likelihood_function, Regression)
    if solver in ("cg", "dual") and not gaussian:
        raise ValueError(
            f"fit_linear_mode: solver={solver!r} solves a linear system, which a regression has; of {la.likelihood} use 'newton_cg'."
        )
    if solver == "dual" and la.free_elements is not None:
        raise ValueError(
            "fit_linear_mode: solver='dual' takes all elements of the parameters; of a subnetwork use 'cg'."
        )
    few = gaussian and la.n_targets <= min(FEW_OUTPUTS, la.n_params) and la.free_elements is None
    return "dual" if few and solver == "auto" else solver


def _newton(loss: _Loss, theta: Tensor, precondition: bool, tol: float, file: _Checkpoint) -> LinearMode:
    """Newton's method, each step by conjugate gradients; of a regression one step, and more where rounding asks for them."""
    la, quadratic = loss.la, isinstance(loss.la.likelihood_function, Regression)
    statistic, slope, prior = loss.gradient(theta)
    value, stalled, rounded = loss.value(statistic, theta), 0, False
    if value == math.inf:
        raise FloatingPointError(
            "fit_linear_mode: the log likelihood is not finite where the solver starts. Check the data, pass another start, or use float64."
        )
    while True:
        gradient = slope + prior
        norm, largest = loss.norm(gradient), max(loss.norm(slope), loss.norm(prior))
        residual = norm / largest if largest else 0.0
        loss.bar.set_postfix(residual=f"{residual:.1e}")
        file.write(theta, force=True)
        done = residual <= tol
        if done or stalled > 1 or loss.passes + 2 > loss.max_passes:  # a step is a product and a gradient at least
            break
        share = 0.0 if quadratic else min(0.5, math.sqrt(residual))
        aim = max(OVERSHOOT * tol * largest, share * norm)
        step = _conjugate(loss, theta, gradient, precondition, aim, file)
        rounding = loss.eps * abs(value)
        descended = _descended(loss, theta, step, value, torch.dot(gradient, step).item(), rounding)
        if descended is None:
            rounded = loss.passes < loss.max_passes
            break
        there, after, (statistic, slope, prior) = descended
        still = after > value - rounding and loss.norm(slope + prior) > 0.5 * norm
        stalled = stalled + 1 if still else 0
        theta, value = there, after
    why = f"max_passes={loss.max_passes} are over: call again for more, which go on from here"
    if done:
        why = ""
        file.remove()
    elif stalled > 1 or rounded:
        why = "rounding keeps it there: use model.double(), or a larger tol"
    norms = square_distances(la, theta.split(la.fitted_model.numels))
    found = torch.tensor(statistic, dtype=torch.float64, device=theta.device)
    return LinearMode(theta.clone(), found, norms, loss.tangent.form, value, residual, loss.passes, why)


def _descended(
    loss: _Loss, theta: Tensor, step: Tensor, value: float, descent: float, rounding: float
) -> tuple[Tensor, float, tuple[float, Tensor, Tensor]] | None:
    """A place along a step where the loss has fallen, the loss and :meth:`_Loss.gradient` there; the step's length is halved until it does.
    None where passes are over before, or float32 sees no fall; ArithmeticError where float64 sees none."""
    length = 1.0
    while loss.passes < loss.max_passes:
        there = theta + length * step
        found = loss.gradient(there)
        after = loss.value(found[0], there)
        if after <= value + SUFFICIENT * length * descent + rounding:
            return there, after, found
        length /= 2
        if length < SHORTEST and loss.tangent.point.dtype == torch.float64:
            raise ArithmeticError(
                f"fit_linear_mode: the loss rises along a Newton step: its derivatives do not belong together; check {loss.la.likelihood!r}."
            )
        if length < SHORTEST:
            break
    return None


def _conjugate(
    loss: _Loss, theta: Tensor, gradient: Tensor, precondition: bool, aim: float, file: _Checkpoint
) -> Tensor:
    """The Newton step, by conjugate gradients until the gradient's norm is ``aim`` by their own account, or passes are over."""
    step, left = torch.zeros_like(gradient), -gradient
    direction: Tensor | None = None
    before = 1.0
    while loss.passes < loss.max_passes - 1:
        covered = loss.covariance(left)
        square = torch.dot(left, covered).item()
        if square <= aim**2:
            break
        preconditioned = covered if precondition else left
        power = torch.dot(left, preconditioned).item()
        direction = preconditioned if direction is None else preconditioned + (power / before) * direction
        product, curvature = loss.product(direction)
        if not curvature:
            break
        length, before = power / curvature, power
        step += length * direction
        left = left - length * product
        loss.bar.set_postfix(left=f"{math.sqrt(square) / aim:.1e}")
        file.write(theta + step)
    return step


def _by_kernel(la: Evidence, loss: _Loss) -> Tensor:
    r"""A regression's :math:`\mu + \Lambda^{-1} J^T (J \Lambda^{-1} J^T + \sigma^2 T)^{-1} (y - h(\mu))`, by the kernel of all outputs."""
    x, y = joined([kept(pair) for pair in loss.batches()])
    precision = la.prior_precision.detach()
    if isinstance(loss.loader, Features):
        kernel = loss.loader.layer.kernel(x, 1 / precision)  # J Lambda^-1 J^T
    else:
        prior = la._posterior(precision, la.fitted_model.zero)
        kernel = la._moments_under(x, [prior], joint=True)[1][0].double()
    kernel.diagonal().add_(1 / loss.weight)
    h = loss.outputs(loss.tangent.outputs(x), loss.tangent.jvp(x, loss.push(loss.mean))).double()
    factor, failed = torch.linalg.cholesky_ex(kernel)
    if failed:
        raise ArithmeticError(
            "fit_linear_mode: the kernel of solver='dual' is not positive definite by rounding; use solver='cg' or model.double()."
        )
    weights = torch.cholesky_solve((y.double() - h).reshape(-1, 1), factor).view_as(h)
    theta = loss.mean + loss.tangent.vjp(x, weights).double() / loss.prior
    loss.passes += 3
    loss.bar.update(3)
    return theta


class _Checkpoint:
    """A file with where a solution is, from which another goes on."""

    def __init__(self, la: Evidence, form: str, path: str | os.PathLike[str] | None) -> None:
        self.path = None if path is None else Path(path)
        self._is_of = {
            "parameter_names": list(la.parameter_names),
            "form": form,
            "fingerprint": fingerprint_of(la.model).item(),
        }
        self._written = time.monotonic()
        if self.path is not None and not self.path.parent.is_dir():
            raise FileNotFoundError(
                f"fit_linear_mode: checkpoint: the folder {self.path.parent} does not exist; make it."
            )

    def claimed(self) -> AbstractContextManager[None]:
        """A lock, by which one process alone works on the file."""
        where = f"fit_linear_mode: checkpoint {self.path}"
        return nullcontext() if self.path is None else claim(self.path.with_name(f".{self.path.name}.lock"), where)

    def read(self) -> Tensor | None:
        """The place where the last solution was interrupted, if one was; what killed processes left of the file is removed."""
        if self.path is None:
            return None
        remove_temporary_files(self.path.parent, self.path.name)
        if not self.path.exists():
            return None
        try:
            if what := no_file(self.path):
                raise ValueError(f"it is {what}")
            state = torch.load(self.path, weights_only=True, map_location="cpu")
            state = require_checksum(state, "state", "it is damaged, or of another version")
        except Exception as error:
            raise ValueError(
                f"fit_linear_mode: checkpoint {self.path} cannot be read ({error}); remove it or name another file."
            ) from error
        theta = state.pop("theta", None)
        if state != self._is_of:
            raise ValueError(
                f"fit_linear_mode: checkpoint {self.path} is of another network, form or fit; remove it or name another file."
            )
        return theta

    def write(self, theta: Tensor, force: bool = False) -> None:
        """Replace the file, if it is time to."""
        if self.path is None or not (force or time.monotonic() - self._written > EVERY):
            return
        state = with_checksum({**self._is_of, "theta": theta.cpu()})
        write_file(self.path, lambda name: torch.save(state, name))
        self._written = time.monotonic()

    def remove(self) -> None:
        """The solution is there."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def alternate(
    la: Evidence,
    find: Callable[[float], None],
    n_steps: int,
    groups: Groups,
    tune_sigma: bool,
    tol: float,
    accelerated: bool,
    progress_bar: bool,
) -> bool:
    r"""Find the linear mode and MacKay's fixed points there in turns, until both stand still; returns whether they do.

    Each raises :math:`M(\Lambda; \theta)`, the evidence at the precisions and at a mean, in one of its arguments, so that the evidence at the
    mode rises from one round to the next; where it stands still, its gradient is zero, by the envelope theorem. Rounds alone come there
    linearly, so that Anderson's method goes on from several of them; where the evidence falls by that, the plain round is taken instead, from
    the mode before: a mode that is not reached in its passes is near only if it starts near. Groups of which the data determine next to
    nothing have no part in this, nor in what stands still: their precisions may go on to the bound while nothing else moves.

    Args:
        la: fitted, at the precisions where the rounds start; at those of the last linear mode in the end.
        find: finds the linear mode at la's present values, to a tolerance.
        n_steps: rounds, at most. groups, tune_sigma: see :func:`ella_cuda.laplace.tuning.fixed_points`.
        tol: the largest change of a logarithm that is none. accelerated: whether to go on from several rounds.

    Source: Antoran et al., ICML 2022, section 4; Walker and Ni, "Anderson acceleration for fixed-point iterations", 2011.
    """
    at = logarithms(la, groups)
    trail: list[tuple[Tensor, Tensor]] = []
    plain: Tensor | None = None  # where the last round alone leads, if the present place is another
    best, inner, kept, place = -math.inf, LOOSEST, la.linear_fit, at
    least = TIGHTEST[next(la.model.parameters()).dtype]
    for _ in tqdm(range(n_steps), desc="rounds", disable=not progress_bar, leave=False):
        put(la, at, groups, tune_sigma)
        find(inner)
        evidence = la.log_marginal_likelihood(at="linear").item()
        if plain is not None and evidence < best:
            at, plain, trail = plain, None, []
            la.linear_fit = kept
            continue
        best, kept, place = evidence, la.linear_fit, at
        found = fixed_points(la, INNER, groups, tune_sigma, at_mode="linear")
        aim = torch.cat([found[0], -2 * found[1][None]])
        gamma = groups.sums(present_terms(la).effective)
        moving = torch.cat([gamma >= NOTHING, gamma.new_ones(1, dtype=torch.bool)])
        step = aim - at
        change = step[moving].abs().max().item()
        if change < tol and inner <= max(tol * INEXACT, least):
            put(la, at, groups, tune_sigma)
            return True
        trail = [*trail[-DEPTH:], (at, step)]
        plain, at = None, aim
        if accelerated and len(trail) > 1:
            plain, at = aim, torch.where(moving, _extrapolated(trail, moving), aim)
            at[:-1].clamp_(*BOUNDS)  # where updates of the precisions are held; the noise's are free
        inner = min(max(change * INEXACT, tol * INEXACT, least), LOOSEST)
    put(la, at, groups, tune_sigma)
    find(inner)
    if accelerated and la.log_marginal_likelihood(at="linear").item() < best:
        put(la, place, groups, tune_sigma)
        la.linear_fit = kept
    return False


def _extrapolated(trail: list[tuple[Tensor, Tensor]], moving: Tensor) -> Tensor:
    """Anderson's next place from places and the steps that lead on from them: the steps' least combination."""
    places, steps = (torch.stack(part) for part in zip(*trail, strict=True))
    changes = torch.diff(steps[:, moving], dim=0).T
    weights = torch.linalg.lstsq(changes, steps[-1, moving][:, None], driver="gelsd").solution[:, 0]
    whole = torch.diff(places + steps, dim=0)
    return places[-1] + steps[-1] - weights @ whole
