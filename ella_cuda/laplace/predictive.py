"""Predictions of a fitted approximation: what the linearised network's Gaussian says of outputs, and of targets."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ella_cuda.laplace import input_gradients
from ella_cuda.laplace.batches import Inputs, data_points, model_outputs, tensors_of
from ella_cuda.laplace.evidence import Evidence, data_weight, linear_fit_of
from ella_cuda.laplace.factors import Jacobian
from ella_cuda.laplace.jacobian_pass import JacobianConsumer, JacobianPass
from ella_cuda.laplace.last_layer import LastLayer, LinearTangent
from ella_cuda.laplace.likelihoods import DIAGONAL, LINKS, by_position, unit_columns
from ella_cuda.laplace.parameters import check_choice
from ella_cuda.laplace.posterior import Contraction, Posterior
from ella_cuda.laplace.recorded_predictions import RecordedPredictions
from ella_cuda.laplace.rules.base import Rule
from ella_cuda.laplace.tangent import ReplacedParameters
from ella_cuda.laplace.tangent_model import TangentModel
from ella_cuda.laplace.test_time import at_test_time, in_plain_products, requiring_grad
from ella_cuda.modes import running_the_model
from ella_cuda.nn._sizes import as_count
from ella_cuda.ops._precision import in_own_precision, without_autocast

PREDICTIONS, MEANS = ("glm", "nn"), ("network", "linear")
SAMPLED = 256 << 20  # bytes of samples that go through the network together
ACTIVATIONS = 16  # numbers that layers make of a number of the inputs, roughly


class Predictive(Evidence):
    """Predictions of approximations with a Gaussian posterior over parameters: see :class:`ella_cuda.laplace.KronLaplace`."""

    _rules: Sequence[Rule]  # of the layers with a posterior
    prior_precision_diag: Tensor
    predictive_prior_precision: Tensor | None
    _predictive_posterior: Posterior
    _ways: list[tuple[int, bool | Exception]]  # to derivatives along directions, see TangentModel
    _predicting: tuple[list[nn.Module | nn.Parameter], RecordedPredictions, list[int]] | None

    def __call__(
        self,
        x: Any,
        pred_type: str = "glm",
        joint: bool = False,
        link_approx: str = "probit",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        *,
        mean: str = "network",
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The posterior predictive at x, whose names and shapes are laplace-torch's.

        The network is linearised at its parameters, so that its outputs are Gaussian: the mean is the network's output, the covariance
        ``J P^-1 J^T``, with P the curvature and ``predictive_prior_precision``, or ``prior_precision`` where that is None. Memory does not
        depend on the number of parameters times that of outputs; with many outputs pass ``link_approx="probit"``, or of likelihoods without
        classes ``diagonal_output=True``, which take variances alone, or "mc".

        Args:
            x: the model's inputs, ``(N, ...)``: a tensor, a tuple or list of arguments, or a mapping of them by name; moved to the model's
                device. Of a mapping with ``dict_key_x`` alone, or with targets beside it, the model gets what is under that key.
            pred_type: "glm", or "nn": the network itself at samples of its parameters, with ``link_approx="mc"``; a warning says why not.
            joint: for likelihoods without classes, the covariance of all data points' outputs together.
            link_approx: how class probabilities come from Gaussian logits: "probit", "probit_full" (with covariances), "mc" (samples),
                "bridge", "bridge_norm"; see :mod:`ella_cuda.laplace.likelihoods`. Likelihoods without classes have no link.
            n_samples: of "mc" and "nn".
            diagonal_output: leave covariances between a data point's outputs out, where there are no classes, or of samples ("mc").
            generator: of the samples, on any device; None is torch's global one.
            mean: "network", its output; or "linear", that of the linearised network at the mode that :meth:`fit_linear_mode` found.

        Returns:
            classification, binary: probabilities ``(N, ..., K)``. Others: mean ``(N, K)`` and covariance ``(N, K, K)`` of the outputs, or
            variances ``(N, K)`` with ``diagonal_output``; with ``joint`` ``(N K,)`` and ``(N K, N K)``. A regression's noise is not among
            them: add ``sigma_noise**2``. With "nn" the samples' mean and variance.

        Raises:
            RuntimeError: not fitted, the model's parameters or buffers are not those of the fit, or the linear mode was not found.
            ValueError: an argument is none of its choices, or x does not fit.
            FloatingPointError: a variance is beyond the range of the model's dtype, as with inputs of 1e30 in float32.

        Source: Immer, Korzepa and Bauer, "Improving predictions of Bayesian neural nets via local linearization", AISTATS 2021; Daxberger
        et al., "Laplace redux", NeurIPS 2021.
        """
        check_choice("pred_type", pred_type, PREDICTIONS)
        check_choice("link_approx", link_approx, LINKS)
        likelihood = self.likelihood_function
        if pred_type == "nn" or (likelihood.has_classes and link_approx == "mc"):
            if pred_type == "nn" and link_approx != "mc":
                raise ValueError(
                    f"link_approx must be 'mc' with pred_type='nn', which averages over samples of the parameters; got {link_approx!r}."
                )
            if pred_type == "nn" and mean == "linear":
                raise ValueError("mean='linear' is of the linearised network, pred_type='glm'; got pred_type='nn'.")
            samples = self.functional_samples(x, pred_type, n_samples, diagonal_output, generator)
            samples = self._response(samples + self._shift(x, mean))
            return samples.mean(0) if likelihood.has_classes else (samples.mean(0), samples.var(0))
        shift = self._shift(x, mean)
        if likelihood.has_classes:
            outputs, covariance = moments(self, x, diagonal=link_approx in DIAGONAL or not likelihood.couples_outputs)
            return self._probabilities(link_approx, outputs + shift, by_position(outputs, covariance))
        outputs, covariance = moments(self, x, joint=joint, diagonal=diagonal_output and not joint)
        outputs = outputs + shift
        if joint:
            return outputs.flatten(), covariance
        return outputs, covariance.view_as(outputs) if diagonal_output else covariance

    def _shift(self, x: Any, mean: str) -> Tensor | float:
        """How far the outputs' mean is from the network's."""
        if check_choice("mean", mean, MEANS) == "network":
            return 0.0
        self.fitted_model.require_unchanged()
        found, x = linear_fit_of(self, "mean"), self.fitted_model.inputs(x)
        tangent, x = self._linearised(x, found.form)
        if found.form == "simple":
            outputs = tangent.outputs(x)  # where they are infinite, a class is masked, and stays so
            return (tangent.jvp(x, found.theta) - outputs).masked_fill(outputs.isinf(), 0.0)
        return tangent.jvp(x, found.theta - tangent.point)

    def functional_variance(self, x: Any) -> Tensor:
        """Covariances ``J P^-1 J^T`` of each data point's outputs, ``(N, K, K)``, K the entries of a data point's outputs.

        Args:
            x: the model's inputs, as for a call; or their Jacobians ``(N, K, P)``, P all parameters of ``parameter_names``. What has the
                shape of the inputs of the fit is inputs.
        """
        if self._is_jacobian(x):
            return self._predictive_posterior.inv_square_form(x)
        return moments(self, x)[1]

    def functional_covariance(self, x: Any) -> Tensor:
        """The covariance of all data points' outputs, ``(N K, N K)``; x as for :meth:`functional_variance`."""
        if self._is_jacobian(x):
            return self._predictive_posterior.joint_square_form(x)
        return moments(self, x, joint=True)[1]

    def functional_samples(
        self,
        x: Any,
        pred_type: str = "glm",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Samples of the outputs, ``(n_samples, N, ...)``. A sample is one of the parameters, which all data points share: that of the
        linearised network, a Jacobian-vector product each, or with "nn" of the network itself. Calls with generators of one state draw the
        same functions.

        Args:
            x: the model's inputs, as for a call.
            pred_type: "glm" or "nn".
            n_samples: how many.
            diagonal_output: with "glm", draw every output by itself, from its variance; samples are then no functions.
            generator: on any device; None is torch's global one.

        Raises:
            NotImplementedError: with "glm", a function of the network has neither a forward mode nor gradients with derivatives.
        """
        check_choice("pred_type", pred_type, PREDICTIONS)
        n_samples = as_count("n_samples", n_samples)
        if pred_type == "glm" and diagonal_output:
            mean, variance = moments(self, x, diagonal=True)
            drawn = _normal((n_samples, *mean.shape), mean, generator)
            return mean + variance.view_as(mean).sqrt() * drawn
        if pred_type == "nn":
            warnings.warn(
                "pred_type='nn' puts samples of a posterior whose curvature is that of the linearised network into the network itself, which "
                "underfits (Immer et al., AISTATS 2021); pred_type='glm' is consistent with it.",
                stacklevel=2,
            )
        return self._sampled(x, pred_type, n_samples, generator)

    def predictive_samples(
        self,
        x: Any,
        pred_type: str = "glm",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """:meth:`functional_samples` through the likelihood's inverse link: probabilities of classes, rates of counts; a regression's as they
        are, without noise. ``(n_samples, N, ...)``."""
        samples = self.functional_samples(x, pred_type, n_samples, diagonal_output, generator)
        return self._response(samples)

    @in_own_precision
    def _response(self, samples: Tensor) -> Tensor:
        return self.likelihood_function.response(samples)

    @in_own_precision
    def _probabilities(self, link: str, mean: Tensor, covariance: Tensor) -> Tensor:
        return self.likelihood_function.probabilities(link, mean, covariance)

    # the posterior over parameters -----------------------------------------------------------------------------------

    @property
    def mean(self) -> Tensor:
        """The parameters at the fit, ``(P,)``, in ``parameter_names`` order; before a fit the prior's mean, 0-dim or ``(P,)``."""
        if not self.n_data:
            return self.prior_mean
        self.fitted_model.require_unchanged()
        return torch.cat([p.detach().flatten() for p in self.fitted_model.parameters()])

    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        """Draws of all parameters from the posterior, ``(n_samples, P)``, in ``parameter_names`` order."""
        return self.mean + self.posterior_precision.sample(n_samples, generator)

    def square_norm(self, value: Tensor) -> Tensor:
        """``(v - mean)^T P (v - mean)`` of parameters ``(..., P)``, float64; before a fit P is the prior's precision."""
        if not self.n_data:
            return (self._checked_vector(value).double() - self.mean).square() @ self._prior_of_all()
        return self.posterior_precision.square_form(self._checked_vector(value) - self.mean)

    def log_prob(self, value: Tensor, normalized: bool = True) -> Tensor:
        """The posterior's log density at parameters ``(..., P)``, float64; before a fit the prior's. Without its normaliser if not
        ``normalized``."""
        exponent = -0.5 * self.square_norm(value)
        if not normalized:
            return exponent
        determinant = self.posterior_precision.logdet() if self.n_data else self.prior_precision_diag.log().sum()
        return exponent + 0.5 * (determinant - sum(self.counts) * math.log(2 * math.pi))

    def _prior_of_all(self) -> Tensor:
        """The prior's precision of each element ``(P,)``, zero where an element has no posterior."""
        precision = self.prior_precision_diag
        if self.free_elements is None:
            return precision
        return torch.zeros_like(self.free_elements).masked_scatter(self.free_elements.bool(), precision)

    def _checked_vector(self, value: Tensor, name: str = "value") -> Tensor:
        count = self.n_params
        if not isinstance(value, Tensor) or not value.dim() or value.shape[-1] != count:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{name}: expected all parameters, a tensor (..., {count}), got {got}.")
        return value.to(self.fitted_model.device)

    # passes ----------------------------------------------------------------------------------------------------------

    def _is_jacobian(self, x: Any) -> bool:
        shape = (self.n_outputs, self.n_params)
        known = self.fitted_model.inputs_shape
        return isinstance(x, Tensor) and x.dim() == 3 and x.shape[1:] == shape and known != shape

    @running_the_model
    def _moments_under(
        self, x: Inputs, posteriors: Sequence[Posterior], joint: bool = False, diagonal: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        """The outputs ``(N, ...)`` and their covariances under several posteriors of one curvature, for one pass through the network, which
        is recorded where it comes again. The network is taken to be that of the fit: ``fitted_model.require_unchanged()`` comes before."""
        with self.fitted_model.filling(), without_autocast(self.fitted_model.device.type):
            passes = self._pass(x)
            found = None if joint or not data_points(x) else self._of_features(x, posteriors, diagonal, passes)
            mean, *found = passes(x, posteriors, joint, diagonal) if found is None else found
        found = [v.to(mean.dtype) for v in found]
        _require_range(mean, found)
        return mean, found

    def _of_features(
        self, x: Inputs, posteriors: Sequence[Posterior], diagonal: bool, passes: RecordedPredictions
    ) -> list[Tensor] | None:
        """Outputs and covariances by the features ``(N, D)`` of a linear last layer; None where it is not alone."""
        layer = LastLayer.of(self.model, self._rules)
        if layer is None:
            return None
        with passes.running(x) as run:
            found = layer.features(x, run.images_at_once(data_points(x)))
            if found is None or found[0].dim() > 2:
                return None
            return [found[1], *(posterior.of_linear(found[0], layer.names, diagonal) for posterior in posteriors)]

    @running_the_model
    def _linearised(self, x: Inputs, form: str = "full") -> tuple[TangentModel | LinearTangent, Inputs]:
        """The linearised network and its inputs: x, or the features of a linear last layer that alone has a posterior."""
        layer = LastLayer.of(self.model, self._rules)
        with self.fitted_model.filling():
            found = None if layer is None else layer.features(x)
        return (self._tangent(form), x) if found is None else (layer.tangent(form), found[0])

    def _pass(self, x: Inputs) -> RecordedPredictions:
        """The pass of all predictions of a fit at inputs of as many axes, whose network is tried out once."""
        dims = [t.dim() for t in tensors_of(x)]
        here = [*self.model.modules(), *self.model.parameters()]
        if (
            self._predicting is None
            or self._predicting[2] != dims
            or len(self._predicting[0]) != len(here)
            or any(a is not b for a, b in zip(self._predicting[0], here, strict=True))
        ):
            # What has a posterior does not change with what is trainable after the fit.
            wanted = {id(p): p for p in self.fitted_model.parameters()}
            frozen = [p for p in wanted.values() if not p.requires_grad]
            others = [p for p in self.model.parameters() if p.requires_grad and id(p) not in wanted]
            with requiring_grad(frozen, True), requiring_grad(others, False):
                rules = self.fitted_model.present_rules()
                self.fitted_model.present_parameters(rules)
            shapes = self.posterior_precision.shapes
            run = JacobianPass(self.model, rules, shapes, self.memory_budget)
            self._predicting = here, RecordedPredictions(run, self.fitted_model, _moments), dims
        passes = self._predicting[1]
        passes.run.memory_budget = self.memory_budget
        return passes

    @running_the_model
    def _sampled(self, x: Any, pred_type: str, n_samples: int, generator: torch.Generator | None) -> Tensor:
        """Outputs of the network or of its linearisation at samples of the parameters, of as many at a time as there is room for."""
        posterior, x = self._predictive_posterior, self.fitted_model.inputs(x)
        parameters = ReplacedParameters(self.model, self.parameter_names)
        mean = self.mean
        # Samples go through the network together as far as their parameters, and what layers make of the inputs, find room.
        each = 4 * mean.numel() + ACTIVATIONS * sum(t.numel() for t in tensors_of(x))
        at_once = max(SAMPLED // (each * mean.element_size()), 1)
        found = []
        filling, plain = self.fitted_model.filling(), without_autocast(mean.device.type)
        with_graph = input_gradients.is_wanted(self, x)
        if with_graph and pred_type == "glm":
            outputs, jacobians = input_gradients.outputs_and_jacobians(self, x)
            drawn = posterior.sample(n_samples, generator)
            return outputs + (drawn @ jacobians.flatten(0, 1).mT).view(n_samples, *outputs.shape)
        with filling, at_test_time(self.model), in_plain_products(), plain, torch.set_grad_enabled(with_graph):
            outputs = model_outputs(self.model, x)

            def function(values: dict[str, Tensor]) -> Tensor:
                with parameters.replaced(values):
                    return model_outputs(self.model, x)

            tangent, inputs = self._linearised(x) if pred_type == "glm" else (None, x)
            for begin in range(0, n_samples, at_once):
                drawn = posterior.sample(min(at_once, n_samples - begin), generator)
                if tangent is not None:
                    found.append(outputs + tangent.jvp(inputs, drawn))
                else:
                    found += [function(parameters.split(one))[None] for one in mean + drawn]
        return torch.cat(found)

    def _tangent(self, form: str = "full") -> TangentModel:
        """The network's linearisation, whose way to derivatives is looked for once in a fit."""
        tangent = TangentModel(self.model, form, self.parameter_names)
        tangent.ways = self._ways
        return tangent


def moments(la: Predictive, x: Any, joint: bool = False, diagonal: bool = False) -> tuple[Tensor, Tensor]:
    """The outputs' mean ``(N, ...)`` and covariance ``(N, K, K)``, variances ``(N, K)`` with ``diagonal``, or ``(N K, N K)`` with
    ``joint``; x as for a call."""
    la.fitted_model.require_unchanged()
    posterior, x = la._predictive_posterior, la.fitted_model.inputs(x)
    if input_gradients.is_wanted(la, x):
        return input_gradients.moments(la, x, posterior, joint, diagonal)
    mean, (covariance,) = la._moments_under(x, [posterior], joint, diagonal)
    return mean, covariance


def predictions_at(
    la: Predictive, prior_precisions: Tensor, x: Any, pred_type: str, link_approx: str, n_samples: int
) -> Iterator[Any]:
    """Predictions under each of several prior precisions, one for all tensors: probabilities, or mean and variance of the outputs."""
    likelihood = la.likelihood_function
    if pred_type == "glm" and not (likelihood.has_classes and link_approx == "mc"):
        diagonal = not likelihood.has_classes or link_approx in DIAGONAL or not likelihood.couples_outputs
        la.fitted_model.require_unchanged()
        weight, like = data_weight(la), la.prior_precision.detach()
        posteriors = [la._posterior(torch.ones_like(like) * precision, weight) for precision in prior_precisions]
        mean, covariances = la._moments_under(la.fitted_model.inputs(x), posteriors, diagonal=diagonal)
        for covariance in covariances:
            parts = mean, by_position(mean, covariance)
            yield la._probabilities(link_approx, *parts) if likelihood.has_classes else parts
        return
    before = la.prior_precision, la.predictive_prior_precision
    try:
        for precision in prior_precisions:
            la.prior_precision = precision
            yield la(x, pred_type, link_approx=link_approx, n_samples=n_samples)
    finally:
        la.prior_precision, la.predictive_prior_precision = before


def _moments(
    run: JacobianPass, x: Inputs, posteriors: Sequence[Posterior], joint: bool, diagonal: bool
) -> list[Tensor]:
    """The outputs, and their covariances under each of the posteriors, float64, of data points that go together."""
    moments = _Moments(posteriors, data_points(x), joint, diagonal)
    mean = run.run(x, lambda f, _: unit_columns(f), moments, all_data=True, each_alone=diagonal)
    return [mean, *moments.covariances]


class _Moments(JacobianConsumer):
    """Adds up the covariance of outputs over parameters.

    Attributes:
        covariances: under each of the posteriors, float64: ``(N, K, K)``, variances ``(N, K)``, or ``(N K, N K)``.
    """

    def __init__(self, posteriors: Sequence[Posterior], count: int, joint: bool, diagonal: bool) -> None:
        self._posteriors, self._count, self._joint, self._diagonal = posteriors, count, joint, diagonal
        self.row_bytes = sum(p.row_bytes for p in posteriors)
        self.covariances: list[Tensor] = []
        self._adds: list[Contraction] = []
        self._places: list[Tensor] = []
        self._parts: list[Tensor] = []

    def begin(self, outputs: Tensor, which: slice, columns: slice) -> None:
        entries = math.prod(outputs.shape[1:])
        if not self.covariances:
            size = (self._count, entries) if self._diagonal else (self._count, entries, entries)
            size = (self._count * entries,) * 2 if self._joint else size
            self.covariances = [outputs.new_zeros(size, dtype=torch.float64) for _ in self._posteriors]
        self._places = [
            v if self._joint else v[which, columns] if self._diagonal else v[which] for v in self.covariances
        ]
        # Of some columns, what is added to is a copy: the op takes contiguous memory alone.
        self._parts = [p if p.is_contiguous() else p.new_zeros(p.shape) for p in self._places]
        self._adds = [p.contraction(part, self._joint) for p, part in zip(self._posteriors, self._parts, strict=True)]

    def take(self, name: str, jacobian: Jacobian) -> None:
        for piece in self._posteriors[0].pieces(name, jacobian, self._joint):
            for add in self._adds:
                add.take(name, *piece)

    def end(self) -> None:
        for add, part, place in zip(self._adds, self._parts, self._places, strict=True):
            add.finish()
            if part is not place:
                place += part


def _require_range(mean: Tensor, covariances: Sequence[Tensor]) -> None:
    """FloatingPointError where a covariance is not finite though no output of the data point is nan."""
    if not mean.numel():
        return
    known = ~mean.isnan().flatten(1).any(1)
    lost = torch.stack([~v.isfinite().view(len(mean), -1).all(1) for v in covariances]).any(0) & known
    if lost.any():
        raise FloatingPointError(
            f"the variance of the outputs of data point {int(lost.nonzero()[0])} is beyond {mean.dtype}; scale the inputs as those of "
            "the fit, or fit and predict in float64: model.double()."
        )


def _normal(size: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    device = like.device if generator is None else generator.device
    return torch.randn(size, dtype=like.dtype, device=device, generator=generator).to(like.device)
