"""The mode of the linearised network's posterior, and the precisions whose evidence it is the mode of."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from ella_cuda.claim import claim
from ella_cuda.files import no_file, remove_temporary_files, write_file
from ella_cuda.laplace.batches import Inputs, data_points, joined, kept, tensors_of
from ella_cuda.laplace.evidence import Evidence, data_weight, effective_by_tensor, square_distances
from ella_cuda.laplace.likelihoods import Regression
from ella_cuda.laplace.parameters import fingerprint_of
from ella_cuda.laplace.state import checked_count, checked_tensor, require_checksum, with_checksum
from ella_cuda.laplace.tangent import rounding_of
from ella_cuda.laplace.tangent_model import FORMS, TangentModel
from ella_cuda.laplace.tuning import BOUNDS, NOTHING, fixed_points, mean_log_precisions, put, sums_by_group
from ella_cuda.laplace.values import Value, check_choice, positive_number
from ella_cuda.nn._sizes import as_count

SOLVERS = ("auto", "cg", "dual", "newton_cg", "sgd")
HESSIANS = ("network", "linear")
FEW_OUTPUTS = 1000  # of all data, whose kernel is factorised where the solver is chosen
SUFFICIENT = 1e-4  # the share of a step's promised descent that it must give
OVERSHOOT = 0.3  # of the tolerance that products with the curvature aim at
ROUNDED = 64.0  # rounding errors of terms, in a sum of them that is negative
APART = 16.0  # rounding errors of terms that a fit and a pass differ by, which have batches of other sizes
SHORTEST = 1e-8  # part of a Newton step that is tried
GOLDEN = 20  # sections of a step whose best part is looked for
EVERY = 30.0  # seconds between checkpoints
INNER = 200  # fixed-point updates in a round
DEPTH = 5  # rounds that Anderson's method looks back
LOOSEST, INEXACT = 1e-3, 1e-2  # tolerance of the linear mode in a round, at most and of the last round's change
TIGHTEST = {torch.float32: 1e-5, torch.float64: 1e-11}

Vectors = Callable[[Tensor], Tensor]


class LinearMode(NamedTuple):
    r"""Where the linearised network's posterior has its mode, as :meth:`ella_cuda.laplace.KronLaplace.fit_linear_mode` found it.

    Attributes:
        theta: the mode, ``(P,)``, float64.
        statistic: what the log likelihood is a function of, at the linearised network's outputs, 0-dim float64.
        square_norms: of each parameter tensor, the squared distance from the prior's mean, float64.
        form: of the linearised network, "full" or "simple".
        loss: :math:`-\log p(D | h(\theta)) / T + \frac12 \|\theta - \mu\|^2_\Lambda`, nats, up to a regression's normaliser.
        residual: the norm of the loss' gradient over the larger of those of its two terms, in the metric of the posterior's covariance.
        passes: over the data that it took.
        why: not the residual went below the tolerance; "" where it did.
    """

    theta: Tensor
    statistic: Tensor
    square_norms: Tensor
    form: str
    loss: float
    residual: float
    passes: int
    why: str = ""

    def on(self, device: torch.device) -> LinearMode:
        """A copy on the device."""
        tensors = {key: v.to(device, copy=True) for key, v in self._asdict().items() if isinstance(v, Tensor)}
        return self._replace(**tensors)

    @classmethod
    def of_state(cls, state: Any, n_params: int, n_tensors: int) -> LinearMode | None:
        """What a state has of one; ValueError where an entry is missing or does not fit."""
        if state is None:
            return None
        if not isinstance(state, Mapping) or state.keys() != set(cls._fields):
            raise ValueError(f"load_state_dict: linear_mode must be None or have the entries {', '.join(cls._fields)}.")
        shapes = {"theta": (n_params,), "statistic": (), "square_norms": (n_tensors,)}
        tensors = {key: checked_tensor(f"linear_mode: {key}", state[key], shape) for key, shape in shapes.items()}
        if (tensors["square_norms"] < 0).any():
            raise ValueError("load_state_dict: linear_mode: square_norms must not be negative.")
        check_choice("load_state_dict: linear_mode: form", state["form"], FORMS)
        for key in ("loss", "residual"):
            if not isinstance(state[key], float) or not math.isfinite(state[key]):
                raise ValueError(f"load_state_dict: linear_mode: {key} must be a finite float, got {state[key]!r}.")
        checked_count("linear_mode: passes", state["passes"])
        return cls(**{**state, **tensors, "why": str(state["why"])})


class Stopping(NamedTuple):
    """When to stop.

    Attributes:
        tol: of the residual. passes: over the data, at most.
    """

    tol: float
    passes: int

    @classmethod
    def checked(cls, tol: Value, passes: int) -> Stopping:
        """ValueError where one is out of range, TypeError where the tolerance is no number."""
        found = positive_number("fit_linear_mode: tol", tol)
        if found >= 1:
            raise ValueError(f"fit_linear_mode: tol must be less than 1, got {tol!r}.")
        return cls(found, as_count("fit_linear_mode: max_passes", passes))


class _Loss:
    """The linearised network's loss over a loader's data, whose passes are counted.

    Args:
        la: fitted.
        loader: of the data of the fit.
        form: see :class:`TangentModel`.
        bar: moves with every pass.
    """

    def __init__(self, la: Evidence, loader: Iterable[Any], form: str, bar: tqdm) -> None:
        self.la, self.loader, self.bar = la, loader, bar
        self.tangent = TangentModel(la.model, form, la.parameter_names)
        self.point = self.tangent.point.double()
        self.weight = data_weight(la).item()
        self.free = la.free_elements
        precision = la.prior_precision.detach()
        sizes = torch.tensor([la.model.get_parameter(n).numel() for n in la.parameter_names], device=precision.device)
        self.prior = precision.repeat_interleave(sizes)
        self.mean = la.prior_mean.expand(self.point.shape)
        self.passes = 0
        # Of the linearised network where a gradient was last taken, by batch; their derivatives along the last direction, and along all that
        # was walked since.
        self._outputs: dict[int, Tensor] = {}
        self._along: dict[int, Tensor] = {}
        # Of the last product: the data's curvature, the sum of its terms' sizes, and the prior's curvature.
        self._bend = 0.0, 0.0, 0.0
        self._walked: dict[int, Tensor] = {}
        self._targets: dict[int, Tensor] = {}
        self._times: dict[int, int] = {}  # that a pass has the batch
        self._theta: Tensor | None = None
        self._batch = 0  # the digest of the present one
        self._points: tuple[Any, int] | None = None  # of the first pass: the shape of a data point, a digest of all

    def push(self, theta: Tensor) -> Tensor:
        """The direction that the linearised network's outputs at theta are derivatives along."""
        return theta if self.tangent.form == "simple" else theta - self.point

    def outputs(self, f: Tensor, along: Tensor) -> Tensor:
        """The linearised network's; masked classes, at minus infinity, stay masked in the simple form too."""
        return torch.where(f.isinf(), f, along) if self.tangent.form == "simple" else f + along

    def gradient(self, theta: Tensor) -> tuple[float, Tensor, Tensor]:
        """The statistic, the data term's gradient and the prior's, ``(P,)`` each: a pass."""
        likelihood, self._theta = self.la.likelihood_function, theta
        self._outputs, self._walked, self._targets, self._times = {}, {}, {}, {}
        direction, sums = self.push(theta), torch.zeros(5, dtype=torch.float64, device=theta.device)

        def of(x: Inputs, y: Tensor) -> Tensor:
            parts, unfit = [], sum(_not_finite(t) for t in tensors_of(x) if t.is_floating_point())

            def cotangent(f: Tensor, along: Tensor, which: slice) -> Tensor:
                h = self.outputs(f, along)
                likelihood.check(f, y[which])
                slope = self._slope(h, y[which])
                with torch.no_grad():
                    size = ((1 + slope.abs()) * f.abs()).sum(dtype=torch.float64)
                    here = self._statistic(h, y[which]), self._statistic(f, y[which]), size, _not_finite(f)
                    sums.add_(torch.stack([*here, torch.zeros_like(size) + unfit]))
                parts.append(h)
                return slope

            found = self.tangent.push_pull(x, direction, cotangent)
            batch = self._batch
            self._outputs[batch], self._targets[batch] = torch.cat(parts), kept(y)
            self._times[batch] = self._times.get(batch, 0) + 1
            return found

        slope = self.weight * self._sum(of)
        statistic, network, size, outputs, inputs = sums.tolist()
        if outputs:
            what = "the loader's inputs are" if inputs else "the network's outputs are, at inputs that are finite,"
            how = "Check the data" if inputs else "Check the network and its parameters, or use model.double()"
            raise FloatingPointError(f"fit_linear_mode: {what} not finite in pass {self.passes} over the data. {how}.")
        self._check_network(network, size)
        return statistic, slope, self._of_prior(theta)

    def _check_network(self, statistic: float, size: float) -> None:
        """ValueError where what the network's log likelihood is a function of is another than at the fit, by more than rounding."""
        fitted = self.la.statistic.item()
        point = self.tangent.point
        rounding = rounding_of(point) if point.is_cuda else APART * torch.finfo(point.dtype).eps
        if abs(statistic - fitted) > rounding * (abs(fitted) + size):
            raise ValueError(
                f"fit_linear_mode: the loader's data must be those of the fit in every pass, got a log likelihood of the network of "
                f"{self.weight * statistic:.6g} where the fit has {self.weight * fitted:.6g}, up to a normaliser; pass the fit's loader, and "
                "neither augment data nor leave some out while it is read."
            )

    def product(self, direction: Tensor) -> Tensor:
        """The loss' Hessian where the gradient was last taken, times a direction ``(P,)``: a pass."""
        there, self._along = self.push(self._theta), {}
        bend = direction.new_zeros(2)

        def of(x: Inputs, y: Tensor) -> Tensor:
            batch, parts = self._batch, []
            h = self._outputs.get(batch)
            if h is None:  # another batch than in the gradient's pass
                h = self.outputs(self.tangent.outputs(x), self.tangent.jvp(x, there))

            def cotangent(f: Tensor, along: Tensor, which: slice) -> Tensor:
                parts.append(along)
                curved = self._curved(h[which], y[which], along)
                terms = along.double() * curved
                bend.add_(torch.stack([terms.sum(), terms.abs().sum()]))
                return curved.to(along.dtype)

            found = self.tangent.push_pull(x, direction, cotangent)
            self._along[batch] = torch.cat(parts)
            return found

        product = self.weight * self._sum(of) + self._masked(self.prior * direction)
        # What is not finite in the product is so in the sum.
        data, size = (self.weight * bend + 0 * product.sum()).tolist()
        self._bend = data, size, torch.dot(direction, self._masked(self.prior * direction)).item()
        return product

    def curvature(self) -> float:
        """The loss' curvature along the last direction that a product was taken with, 0 where rounding hides it: by outputs, for the
        direction times its product is negative where rounding of the two Jacobian products is larger than the curvature.

        Raises:
            ArithmeticError: it is negative. FloatingPointError: it is not finite.
        """
        data, size, prior = self._bend
        if not math.isfinite(data):
            raise FloatingPointError("fit_linear_mode: a product with the curvature is not finite; use float64.")
        if data + prior > 0:
            return data + prior
        if -data > ROUNDED * torch.finfo(self.tangent.point.dtype).eps * size:
            raise ArithmeticError(
                f"fit_linear_mode: the likelihood's Hessian must not be negative, got a curvature of {data:.3g}; check log_prob of "
                f"{self.la.likelihood!r}."
            )
        return 0.0

    def walk(self, length: float) -> None:
        """Go so far along the last direction that a product was taken with."""
        for batch, along in self._along.items():
            self._walked[batch] = self._walked.get(batch, 0) + length * along

    def length_of(self, step: Tensor, value: float, descent: float, rounding: float) -> float:
        """How much of a step, which was walked, to take: all of it where the loss falls by half of what its parabola says, else as much as is
        best. The loss along a step is one of outputs, which takes no pass, where these are known: 1 where they are not.

        Args:
            step: ``(P,)``. value: the loss where it begins. descent: the loss' slope along it. rounding: of the loss.
        """
        if self._walked.keys() != self._outputs.keys():
            return 1.0

        def at(length: float) -> float:
            statistic = sum(
                times * self._statistic(h + length * self._walked[batch], self._targets[batch]).item()
                for (batch, h), times in zip(self._outputs.items(), self._times.values(), strict=True)
            )
            return self.value(statistic, self._theta + length * step)

        if at(1.0) <= value + descent / 4 + rounding:
            return 1.0
        golden, low, high = (math.sqrt(5) - 1) / 2, 0.0, 1.0
        for _ in range(GOLDEN):
            left, right = high - golden * (high - low), low + golden * (high - low)
            low, high = (low, right) if at(left) <= at(right) else (left, high)
        return (low + high) / 2

    def batches(self) -> Iterable[tuple[Inputs, Tensor]]:
        """Those of a pass, on the model's device."""
        count, shapes, points = 0, set(), 0
        for batch in self.loader:
            x, y = self.la.fitted_model.batch(batch, "fit_linear_mode")
            count += data_points(x)
            if data_points(x):
                shape, self._batch, of_points = _digests(x, y) if len(y) == data_points(x) else (None, 0, 0)
                shapes.add(shape)
                points = (points + of_points) % 2**64
                yield x, y
        if count != self.la.n_data:
            what = (
                "an iterator can be consumed once only, pass a re-iterable loader" if not count else "pass its loader"
            )
            raise ValueError(
                f"fit_linear_mode: the loader must yield the {self.la.n_data} data points of the fit, got {count}; {what}."
            )
        self.passes += 1
        self.bar.update()
        if len(shapes) == 1:  # what sequences are padded to may depend on their batch
            found = shapes.pop(), points
            self._points = self._points or found
            if found != self._points:
                raise ValueError(
                    f"fit_linear_mode: the loader's data must be those of the fit in every pass, got others in pass "
                    f"{self.passes} than in the first; pass the fit's loader, and neither augment data nor leave some out while it is read."
                )

    def _sum(self, of: Callable[[Inputs, Tensor], Tensor]) -> Tensor:
        total = torch.zeros_like(self.point)
        for x, y in self.batches():
            total += of(x, y)
        return self._masked(total)

    def _of_prior(self, theta: Tensor) -> Tensor:
        return self._masked(self.prior * (theta - self.mean))

    def _masked(self, vector: Tensor) -> Tensor:
        return vector if self.free is None else vector * self.free

    def value(self, statistic: float, theta: Tensor) -> float:
        """The loss; infinite where the likelihood does not admit the outputs."""
        if not math.isfinite(statistic):
            return math.inf
        return -self.weight * statistic + 0.5 * torch.dot(self._of_prior(theta), theta - self.mean).item()

    # In float64: of large outputs a softmax' small losses are differences.

    def _statistic(self, h: Tensor, y: Tensor) -> Tensor:
        return self.la.likelihood_function.statistic(h.double(), y).double()

    def _slope(self, h: Tensor, y: Tensor) -> Tensor:
        """Of ``-log p`` in the outputs."""
        with torch.enable_grad():
            wide = h.detach().double().requires_grad_()
            (slope,) = torch.autograd.grad(-self.la.likelihood_function.log_prob(wide, y).sum(), wide)
        return slope.to(h.dtype)

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


def _not_finite(tensor: Tensor) -> Tensor:
    """How many numbers are not, 0-dim float64; minus infinity is the logit of a masked class."""
    return (~(tensor < torch.inf)).sum(dtype=torch.float64)


def _digests(x: Inputs, y: Tensor) -> tuple[Any, int, int]:
    """The shapes of a data point, a number of the batch's bits, by which the same batch is known again, and one of its data points in any
    order, whose sum over batches knows the same data again; in whole numbers, so that no rounding depends on its memory."""
    shapes, each = [], torch.zeros(len(y), dtype=torch.int64, device=y.device)
    for tensor in (*tensors_of(x), y):
        flat = tensor.detach().contiguous().reshape(len(tensor), -1)
        flat = torch.view_as_real(flat).flatten(1) if flat.is_complex() else flat
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
        weights = torch.arange(1, flat.shape[1] + 1, device=flat.device) * 0x9E3779B97F4A7C1 | 1
        each = (each * 0x5851F42D4C957F2D) ^ (flat.view(kind).long() * weights).sum(1)
        shapes.append(tuple(tensor.shape[1:]))
    each = (each ^ (each >> 31)) * 0x2545F4914F6CDD1D  # a sum of these knows which numbers stand together
    weights = torch.arange(1, len(each) + 1, device=each.device) * 0x9E3779B97F4A7C1 | 1
    points, batch = torch.stack([each.sum(), (each * weights).sum()]).tolist()
    return tuple(shapes), hash((*shapes, len(y), batch)), points


def solve(
    la: Evidence,
    loader: Iterable[Any],
    stopping: Stopping,
    solver: str,
    form: str,
    start: Tensor | None,
    precondition: bool,
    checkpoint: str | os.PathLike[str] | None,
    progress_bar: bool,
) -> LinearMode:
    """The linearised network's mode at la's prior precisions and noise; arguments as of
    :meth:`ella_cuda.laplace.KronLaplace.fit_linear_mode`."""
    file = _Checkpoint(la, form, checkpoint)
    bars = tqdm(desc="linear mode", unit="pass", disable=not progress_bar, leave=False)
    with file.claimed(), bars as bar, torch.no_grad():
        loss = _Loss(la, loader, form, bar)
        theta = file.read()
        theta = start if theta is None else theta
        theta = theta if theta is None else theta.to(loss.point)
        theta = (loss.mean if form == "simple" else loss.point).clone() if theta is None else theta
        if loss.free is not None:
            theta = torch.where(loss.free > 0, theta, loss.point)
        solver = _chosen(la, solver, loss)
        if solver == "dual":
            theta = _by_kernel(la, loss)
        elif solver == "sgd":
            theta = _by_gradients(la, loss, theta, stopping, file)
        posterior = la.posterior_precision

        def covariance(vector: Tensor) -> Tensor:
            return posterior.bmm(vector.to(loss.tangent.point.dtype), -1).double()

        return _newton(la, loss, theta, covariance, precondition, solver, stopping, file)


def _chosen(la: Evidence, solver: str, loss: _Loss) -> str:
    """The solver, chosen if it is to be; ValueError where the likelihood does not have it."""
    check_choice("solver", solver, SOLVERS)
    gaussian = isinstance(la.likelihood_function, Regression)
    if solver in ("cg", "dual") and not gaussian:
        raise ValueError(
            f"fit_linear_mode: solver={solver!r} solves a linear system, which a regression has; of {la.likelihood} use 'newton_cg'."
        )
    if solver == "dual" and loss.free is not None:
        raise ValueError(
            "fit_linear_mode: solver='dual' takes all elements of the parameters; of a subnetwork use 'cg'."
        )
    if solver != "auto":
        return solver
    few = la.n_targets <= min(FEW_OUTPUTS, len(loss.point)) and loss.free is None
    return ("dual" if few else "cg") if gaussian else "newton_cg"


def _newton(
    la: Evidence,
    loss: _Loss,
    theta: Tensor,
    covariance: Vectors,
    precondition: bool,
    solver: str,
    stopping: Stopping,
    file: _Checkpoint,
) -> LinearMode:
    """Newton's method, each step by conjugate gradients; of a regression one step, and more where rounding asks for them."""
    quadratic = isinstance(la.likelihood_function, Regression)
    statistic, slope, prior = loss.gradient(theta)
    value, stalled, rounded = loss.value(statistic, theta), 0, False
    if value == math.inf:
        raise FloatingPointError(
            "fit_linear_mode: the log likelihood is not finite where the solver starts. Check the data, pass another start, or use float64."
        )
    while True:
        gradient = slope + prior
        norm = _norm(gradient, covariance)
        largest = max(_norm(slope, covariance), _norm(prior, covariance))
        residual = norm / largest if largest else 0.0
        loss.bar.set_postfix(residual=f"{residual:.1e}")
        file.write(theta, force=True)
        done = residual <= stopping.tol
        # A step is a product and a gradient at least.
        if done or stalled > 1 or loss.passes + 2 > stopping.passes or solver == "sgd":
            break
        share = 0.0 if quadratic else min(0.5, math.sqrt(residual))
        aim = max(OVERSHOOT * stopping.tol * largest, share * norm)
        step = _conjugate(loss, theta, gradient, covariance, precondition, aim, stopping.passes - 1, file)
        descent = torch.dot(gradient, step).item()
        rounding = torch.finfo(loss.tangent.point.dtype).eps * abs(value)
        length = 1.0 if quadratic else loss.length_of(step, value, descent, 8 * rounding)
        descended = _descended(loss, theta, step, length, value, descent, rounding, stopping.passes)
        if descended is None:
            rounded = loss.passes < stopping.passes
            break
        there, after, (statistic, slope, prior) = descended
        still = after > value - rounding and _norm(slope + prior, covariance) > 0.5 * norm
        stalled = stalled + 1 if still else 0
        theta, value = there, after
    if done:
        file.remove()
    sizes = [la.model.get_parameter(name).numel() for name in la.parameter_names]
    norms = square_distances(la, dict(zip(la.parameter_names, theta.split(sizes), strict=True)))
    if done:
        why = ""
    elif stalled > 1 or rounded:
        why = "rounding keeps it there: use model.double(), or a larger tol"
    elif solver == "sgd":
        why = "gradients of batches leave it there: go on with solver='auto', which starts from it"
    else:
        why = f"max_passes={stopping.passes} are over: call again for more, which go on from here"
    return LinearMode(
        theta,
        torch.tensor(statistic, dtype=torch.float64, device=theta.device),
        norms,
        loss.tangent.form,
        value,
        residual,
        loss.passes,
        why,
    )


def _descended(
    loss: _Loss,
    theta: Tensor,
    step: Tensor,
    length: float,
    value: float,
    descent: float,
    rounding: float,
    passes: int,
) -> tuple[Tensor, float, tuple[float, Tensor, Tensor]] | None:
    """Where the loss has fallen along a step, whose length is halved until it does: the place, the loss and what :meth:`_Loss.gradient`
    returns there; None where passes are over before, or float32 sees no fall.

    Raises:
        ArithmeticError: the loss does not fall in float64.
    """
    while loss.passes < passes:
        there = theta + length * step
        found = loss.gradient(there)
        after = loss.value(found[0], there)
        if after <= value + SUFFICIENT * length * descent + rounding:
            return there, after, found
        length /= 2
        if length >= SHORTEST:
            continue
        if loss.tangent.point.dtype == torch.float64:
            raise ArithmeticError(
                "fit_linear_mode: the loss does not fall along a Newton step, so that log_prob and its derivatives do not belong together; "
                f"check {loss.la.likelihood!r}."
            )
        break
    return None


def _norm(vector: Tensor, covariance: Vectors) -> float:
    return math.sqrt(max(torch.dot(vector, covariance(vector)).item(), 0.0))


def _conjugate(
    loss: _Loss,
    theta: Tensor,
    gradient: Tensor,
    covariance: Vectors,
    precondition: bool,
    aim: float,
    passes: int,
    file: _Checkpoint,
) -> Tensor:
    """The Newton step, by conjugate gradients until the gradient's norm is ``aim`` by their own account, or passes are over."""
    step, left = torch.zeros_like(gradient), -gradient
    direction: Tensor | None = None
    before = 1.0
    while loss.passes < passes:
        covered = covariance(left)
        square = torch.dot(left, covered).item()
        if square <= aim**2:
            break
        preconditioned = covered if precondition else left
        power = torch.dot(left, preconditioned).item()
        direction = preconditioned if direction is None else preconditioned + (power / before) * direction
        product = loss.product(direction)
        curvature = loss.curvature()
        if not curvature:
            break
        length, before = power / curvature, power
        step += length * direction
        loss.walk(length)
        left = left - length * product
        loss.bar.set_postfix(left=f"{math.sqrt(square) / aim:.1e}")
        file.write(theta + step)
    return step


def _by_kernel(la: Evidence, loss: _Loss) -> Tensor:
    r"""Of a regression :math:`\mu + \Lambda^{-1} J^T (J \Lambda^{-1} J^T + \sigma^2 T)^{-1} (y - h(\mu))`, by the kernel of all outputs."""
    x, y = joined([kept(pair) for pair in loss.batches()])
    prior = la._posterior(
        la.prior_precision.detach(), la.fitted_model.zero
    )  # J Lambda^-1 J^T is its covariance of outputs
    kernel = la._moments_under(x, [prior], joint=True)[1][0].double()
    kernel.diagonal().add_(1 / loss.weight)
    h = loss.outputs(loss.tangent.outputs(x), loss.tangent.jvp(x, loss.push(loss.mean))).double()
    factor, failed = torch.linalg.cholesky_ex(kernel)
    if failed:
        raise ArithmeticError(
            "fit_linear_mode: the kernel of solver='dual' is not positive definite beside the noise, by rounding; use solver='cg', or "
            "model.double()."
        )
    weights = torch.cholesky_solve((y.double() - h).reshape(-1, 1), factor).view_as(h)
    theta = loss.mean + loss.tangent.vjp(x, weights).double() / loss.prior
    loss.passes += 3
    loss.bar.update(3)
    return theta


def _by_gradients(la: Evidence, loss: _Loss, theta: Tensor, stopping: Stopping, file: _Checkpoint) -> Tensor:
    """By steps along preconditioned gradients of batches, with Nesterov's momentum and a rate that falls; the mean of the later half of all
    places."""
    posterior = la.posterior_precision
    dtype = loss.tangent.point.dtype
    momentum, velocity, done = 0.9, torch.zeros_like(theta), 0
    batches, mean, averaged = None, torch.zeros_like(theta), 0
    likelihood = la.likelihood_function
    loss.gradient(theta)  # whether the data are those of the fit
    while loss.passes < stopping.passes - 1:
        count = 0
        for x, y in loss.batches():
            rate = 0.1 if batches is None else 0.1 * max(1 - done / (batches * (stopping.passes - 1)), 0.03)
            ahead = theta + momentum * velocity

            def cotangent(f: Tensor, along: Tensor, which: slice, y: Tensor = y) -> Tensor:
                likelihood.check(f, y[which])
                return loss._slope(loss.outputs(f, along), y[which])

            # As often as there are batches, so that those of all sizes together are the data's; before that is known, by their sizes.
            times = la.n_data / data_points(x) if batches is None else batches
            part = loss.tangent.push_pull(x, loss.push(ahead), cotangent) * (loss.weight * times)
            gradient = loss._masked(part) + loss._of_prior(ahead)
            velocity = momentum * velocity - rate * posterior.bmm(gradient.to(dtype), -1).double()
            theta = theta + velocity
            done, count = done + 1, count + 1
            if 2 * loss.passes >= stopping.passes:
                averaged += 1
                mean += (theta - mean) / averaged
        batches = count
        file.write(theta)
    return mean if averaged else theta


class _Checkpoint:
    """A file with where a solution is, from which another goes on."""

    def __init__(self, la: Evidence, form: str, path: str | os.PathLike[str] | None) -> None:
        self.path = None if path is None else Path(path)
        self._count = la.n_params
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

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Work alone on the file; what killed processes left of it is removed."""
        if self.path is None:
            yield
            return
        with claim(self.path.with_name(f".{self.path.name}.lock"), f"fit_linear_mode: checkpoint {self.path}"):
            remove_temporary_files(self.path.parent, self.path.name)
            yield

    def read(self) -> Tensor | None:
        """Where the last solution was interrupted; None where none was."""
        if self.path is None or not self.path.exists():
            return None
        try:
            if what := no_file(self.path):
                raise ValueError(f"it is {what}")
            state = torch.load(self.path, weights_only=True, map_location="cpu")
            state = require_checksum(state, "state", "it is damaged, or of another version")
            theta = checked_tensor("theta", state.pop("theta"), (self._count,)) if state.keys() > {"theta"} else None
        except Exception as error:
            raise ValueError(
                f"fit_linear_mode: checkpoint {self.path} cannot be read ({error}); remove it or name another file."
            ) from error
        if theta is None or state != self._is_of:
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
    group: Tensor,
    tune_sigma: bool,
    tol: float,
    accelerated: bool,
    progress_bar: bool,
) -> bool:
    r"""Find the linear mode and MacKay's fixed points there in turns, until both stand still; returns whether they do.

    Each raises :math:`M(\Lambda; \theta)`, the evidence at the precisions and at a mean, in one of its arguments, so that the evidence at the
    mode rises from one round to the next; where it stands still, its gradient is zero, by the envelope theorem. Rounds alone come there
    linearly, which can be slow, so that Anderson's method goes on from several of them; where the evidence falls by that, the plain round is
    taken instead, from the mode before: a mode that is not reached in its passes is near only if it starts near. Groups of which the data
    determine next to nothing have no part in this, nor in what stands still: their precisions may go on to the bound while nothing else
    moves.

    Args:
        la: fitted, at the precisions where the rounds start; at those of the last linear mode in the end.
        find: finds the linear mode at la's present values, to a tolerance.
        n_steps: rounds, at most.
        group, tune_sigma: see :func:`ella_cuda.laplace.tuning.fixed_points`.
        tol: the largest change of a logarithm that is none.
        accelerated: whether to go on from several rounds.
        progress_bar: show one.

    Source: Antoran et al., ICML 2022, section 4; Walker and Ni, "Anderson acceleration for fixed-point iterations", 2011.
    """
    at = torch.cat([mean_log_precisions(la, group), -2 * la.sigma_noise.detach().log()[None]])
    trail: list[tuple[Tensor, Tensor]] = []
    plain: Tensor | None = None  # where the last round alone leads, if the present place is another
    best, inner, kept, place = -math.inf, LOOSEST, la.linear_fit, at
    least = TIGHTEST[next(la.model.parameters()).dtype]
    for _ in tqdm(range(n_steps), desc="rounds", disable=not progress_bar, leave=False):
        put(la, at, group, tune_sigma, "network")
        find(inner)
        evidence = la.log_marginal_likelihood(at="linear").item()
        if plain is not None and evidence < best:
            at, plain, trail = plain, None, []
            la.linear_fit = kept
            continue
        best, kept, place = evidence, la.linear_fit, at
        found = fixed_points(la, INNER, group, tune_sigma, at_mode="linear")
        aim = torch.cat([found[0], -2 * found[1][None]])
        gamma = sums_by_group(effective_by_tensor(la), group)
        moving = torch.cat([gamma >= NOTHING, gamma.new_ones(1, dtype=torch.bool)])
        step = aim - at
        change = step[moving].abs().max().item()
        if change < tol and inner <= max(tol * INEXACT, least):
            put(la, at, group, tune_sigma, "network")
            return True
        trail = [*trail[-DEPTH:], (at, step)]
        plain, at = None, aim
        if accelerated and len(trail) > 1:
            plain, at = aim, torch.where(moving, _extrapolated(trail, moving), aim)
            at[:-1].clamp_(*BOUNDS)  # where updates of the precisions are held; the noise's are free
        inner = min(max(change * INEXACT, tol * INEXACT, least), LOOSEST)
    put(la, at, group, tune_sigma, "network")
    find(inner)
    if accelerated and la.log_marginal_likelihood(at="linear").item() < best:
        put(la, place, group, tune_sigma, "network")
        la.linear_fit = kept
    return False


def _extrapolated(trail: list[tuple[Tensor, Tensor]], moving: Tensor) -> Tensor:
    """Anderson's next place from places and the steps that lead on from them: the steps' least combination."""
    places, steps = (torch.stack(part) for part in zip(*trail, strict=True))
    changes = torch.diff(steps[:, moving], dim=0).T
    weights = torch.linalg.lstsq(changes, steps[-1, moving][:, None], driver="gelsd").solution[:, 0]
    whole = torch.diff(places + steps, dim=0)
    return places[-1] + steps[-1] - weights @ whole
