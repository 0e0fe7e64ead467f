"""Base of Laplace approximations: a model's parameters and hyperparameters, and the evidence on a curvature that subclasses hold."""

from __future__ import annotations

import copy
import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from ella_cuda.laplace.batches import (
    Inputs,
    data_points,
    dict_keys,
    map_tensors,
    pair_on,
    require_loader,
    run_model,
    take,
    tensors_of,
)
from ella_cuda.laplace.check_likelihood import POINTS, check_likelihood
from ella_cuda.laplace.check_rule import is_own
from ella_cuda.laplace.copies import augment_of, checked_draws, require_served, tried_copies, with_draws
from ella_cuda.laplace.curvature import CurvaturePass, at_test_time
from ella_cuda.laplace.data_fit import hyperparameters
from ella_cuda.laplace.evidence import Mean
from ella_cuda.laplace.function import FunctionDescription
from ella_cuda.laplace.jacobian_pass import JacobianPass
from ella_cuda.laplace.layer_type import layer_type
from ella_cuda.laplace.likelihoods import Likelihood, checked_outputs, likelihood_of
from ella_cuda.laplace.linear_mode import HESSIANS, LinearMode, Stopping, alternate, solve
from ella_cuda.laplace.options import LaplaceOptions
from ella_cuda.laplace.parameters import (
    FittedBases,
    filled_since,
    fingerprint_of,
    require_local,
    require_no_inference,
    trainable,
    uneven_sum,
)
from ella_cuda.laplace.posterior import Posterior
from ella_cuda.laplace.predictive import PREDICTIONS, Predictive
from ella_cuda.laplace.rules import UNKNOWN, Rule, restricted, rules_for
from ella_cuda.laplace.state import (
    CHECKSUM,
    NEVER_POSITIVE,
    checked_count,
    checked_tensor,
    require_checksum,
    with_checksum,
)
from ella_cuda.laplace.tangent_model import TangentModel
from ella_cuda.laplace.tuning import (
    Loss,
    check_arguments,
    fixed_points,
    grid_search,
    groups_of,
    raise_evidence,
    warn_of_motion,
)
from ella_cuda.laplace.values import Value, as_float64, check_choice, check_positive, positive_number
from ella_cuda.modes import exclusively, running_the_model
from ella_cuda.nn import RelaxedEquivariance
from ella_cuda.nn._autocast import widened
from ella_cuda.nn._sizes import as_count
from ella_cuda.ops._precision import autocast_is_on

MODES = ("network", "linear")
NEAR = {torch.float32: 1e-4, torch.float64: 1e-6}  # residual of a linear mode, unless told


class _Joined:
    """Several loaders, one after the other."""

    def __init__(self, loaders: Sequence[Iterable[Any]]) -> None:
        self._loaders = loaders

    def __iter__(self) -> Iterator[Any]:
        for loader in self._loaders:
            yield from loader


class BaseLaplace(Predictive):
    """A Laplace approximation whose prior has one precision for each parameter tensor; see :class:`ella_cuda.laplace.KronLaplace`, whose
    arguments and attributes these are. A subclass holds the curvature: it defines :meth:`fit`, :meth:`_penalty`, :meth:`posterior_at` and
    :meth:`effective_parameters`.
    """

    resolution: str = "shared"
    approximation: str = "expand"

    def __init__(self, model: nn.Module, likelihood: str | Likelihood, options: LaplaceOptions) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"{type(self).__name__}: model must be a torch.nn.Module, got {type(model).__name__}.")
        require_local(model)
        self.likelihood_function = likelihood_of(likelihood, options.ignore_index)
        self.dict_key_x, self.dict_key_y = dict_keys(options.dict_key_x, options.dict_key_y)
        self.unknown = check_choice("unknown", options.unknown, UNKNOWN)
        self.model, self.subset_of_weights = model, options.subset_of_weights
        with exclusively(model):
            trainable(model)  # refuses what no rule could serve
            self._rules = self.present_rules()
            parameters = self._served(self._rules)
            require_no_inference(parameters)
            self.parameter_names = list(parameters)
            self._describe(parameters)
        budget, default = options.memory_budget, 64 << 20 if self._device.type == "cpu" else 2 << 30
        self.memory_budget = default if budget is None else as_count("memory_budget", budget)
        self.prior_precision = options.prior_precision
        self.sigma_noise = options.sigma_noise
        self.temperature = options.temperature
        self._hold_model()
        self._draws: Tensor | None = None  # of the copies that the model averages over, for all data points
        self._forget()
        self.prior_mean = options.prior_mean

    def __copy__(self) -> BaseLaplace:
        """Of the same model, with sums of its own, which ``fit(override=False)`` adds to."""
        kept = [*self.model.modules(), self._bases]  # the latter knows the model's own bases
        return copy.deepcopy(self, {id(one): one for one in kept})

    def _hold_model(self) -> None:
        self._modules = list(self.model.modules())  # an evidence step is shorter than a walk through them
        self._no_scale = torch.zeros((), dtype=torch.float64, device=self._device)

    def _forget(self) -> None:
        """Be unfitted."""
        self.n_data = 0
        self.n_outputs = 0
        self._n_targets = 0
        self._statistic = torch.zeros((), dtype=torch.float64, device=self._device)
        self._statistic_gradients: dict[str, Tensor] = {}
        self._bases = FittedBases(self.model)
        self._square_norms = self._statistic.new_zeros(len(self.parameter_names))
        self._fingerprint = self._statistic.clone()
        self._filled: frozenset[str] = frozenset()  # buffers that the function fills itself
        # None where it is that of the model at its first use.
        self._function: FunctionDescription | None = FunctionDescription(self.model)
        self._verified: tuple[list[tuple[int, ...]], Tensor] | None = None  # what the fingerprint was compared for
        self._predicting: tuple[list[nn.Module | nn.Parameter], JacobianPass] | None = None
        self._ways: list[tuple[int, bool | Exception]] = []  # to derivatives along directions, see TangentModel
        self._inputs_shape: torch.Size | None = None  # of a data point of the fit
        self._linear: LinearMode | None = None
        self._loaders: list[Iterable[Any]] = []  # of the fit's data

    def _try_out(self, run: CurvaturePass, x: Inputs, y: Tensor, several: bool) -> None:
        """What is looked at before the first batch.

        Raises:
            ValueError: with ``subset_of_weights="last_layer"``, the model's output is not that of the layer; a likelihood or a rule of
                the user's contradicts autograd; and as :func:`ella_cuda.laplace.check_model.probe`.
        """
        if self.subset_of_weights == "last_layer":
            _require_last(self.model, self._rules[-1], take(x, slice(1)))
        run.try_out(x, several)
        if not is_own(type(self.likelihood_function)) and len(y) == data_points(x):
            few = torch.arange(POINTS, device=y.device) % len(y)
            with torch.no_grad():
                inputs, _ = tried_copies(self.model, take(x, few.to(tensors_of(x)[0].device)))
                outputs = checked_outputs(run_model(self.model, inputs), POINTS)
            self.likelihood_function.check(outputs, y[few])
            check_likelihood(self.likelihood_function, outputs, y[few])

    @abstractmethod
    def fit(self, loader: Iterable[Any], override: bool = True, progress_bar: bool = False) -> BaseLaplace:
        """One streaming pass over the data at the model's present parameters."""

    @abstractmethod
    def _penalty(self, log_precision: Tensor, log_scale: Tensor, square_norms: Tensor) -> Tensor:
        """``sum_l log|c H_l / delta_l + I| + delta_l square_norms_l``, c the exponential of log_scale."""

    @abstractmethod
    def posterior_at(self, prior_precision: Value) -> Posterior:
        """:attr:`posterior_precision` at another prior precision."""

    @abstractmethod
    def _posterior(self, precision: Tensor, scale: Tensor) -> Posterior:
        """With the curvature at sigma = 1 times a scale."""

    def prior_covariance(self, x: Inputs) -> Tensor:
        r""":math:`J \Lambda^{-1} J^T` of all data points' outputs, ``(N K, N K)``, float64."""
        prior = self._posterior(self.prior_precision.detach(), self._no_scale)
        return self._moments_under(x, [prior], joint=True)[1][0].double()

    @abstractmethod
    def effective_parameters(self) -> dict[str, float]:
        """Parameter name -> how many of its elements the data determine."""

    @property
    def likelihood(self) -> str:
        """The likelihood's registered name."""
        return self.likelihood_function.name

    def present_rules(self) -> list[Rule]:
        """New rules, without factors, of the model's layers as they are; raises as :func:`ella_cuda.laplace.rules.rules_for`."""
        rules = restricted(
            rules_for(self.model, self.resolution, self.approximation, self.unknown), self.subset_of_weights
        )
        require_served(self.model, rules)
        return rules

    def _served(self, rules: Sequence[Rule]) -> dict[str, nn.Parameter]:
        """The trainable parameters that these rules have, by name; ``unknown="freeze"`` leaves some out."""
        served = {id(rule.parameters()[name]) for rule in rules for name in rule.trainable}
        parameters = {name: p for name, p in trainable(self.model).items() if id(p) in served}
        if not parameters:
            raise ValueError(
                f"{type(self).__name__}: no trainable parameter has a rule, and unknown='freeze' leaves out the others."
            )
        return parameters

    def present_parameters(self) -> dict[str, nn.Parameter]:
        """The model's trainable parameters as they are, by name, in the order of ``parameter_names``; without those that
        ``unknown="freeze"`` leaves out.

        Raises:
            ValueError: others are trainable than when this object was made, which has a precision for each.
            RuntimeError: one was made in ``torch.inference_mode()``.
        """
        return self._checked_parameters(self.present_rules())

    def _checked_parameters(self, rules: Sequence[Rule]) -> dict[str, nn.Parameter]:
        parameters = self._served(rules)
        if list(parameters) != self.parameter_names:
            gone = [name for name in self.parameter_names if name not in parameters]
            new = [name for name in parameters if name not in set(self.parameter_names)]
            changes = [
                f"{', '.join(names[:5])}{', ...' if names[5:] else ''} {what}"
                for names, what in ((gone, "are gone or frozen"), (new, "are new or unfrozen"))
                if names
            ]
            raise ValueError(
                f"{type(self).__name__}: the model's trainable parameters are not those that this object has precisions for: "
                f"{'; '.join(changes) or 'their order is another one'}. Make a new {type(self).__name__}(model)."
            )
        require_no_inference(parameters)
        return parameters

    def _describe(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Keep the sizes and the device of these parameters."""
        self._numels = [p.numel() for p in parameters.values()]
        self.n_params = sum(self._numels)
        self._device = next(iter(parameters.values())).device

    def batch_of(self, batch: Any, where: str) -> tuple[Inputs, Tensor]:
        """What a loader yielded, on the model's device, as tensors that autograd may save; under autocast the reduced inputs of a full
        network in full. Of a model that averages over copies, the draws are with the inputs. ``where`` begins messages."""
        x, y = pair_on(batch, self._device, where, dict_keys(self.dict_key_x, self.dict_key_y))
        self._inputs_shape = x.shape[1:] if isinstance(x, Tensor) else None
        x = map_tensors(x, lambda t: widened(t, self.model)) if autocast_is_on(self._device.type) else x
        return with_draws(self.model, x, self._draws), y

    def _fitted(self) -> None:
        if self.n_data == 0:
            raise RuntimeError(
                f"{type(self).__name__}: call fit (successfully) before asking for the evidence, the curvature or predictions."
            )

    @property
    def prior_precision(self) -> Tensor:
        """One positive value per parameter tensor, 1-D, in ``named_parameters()`` order; set it from a number or such a
        vector.
        """
        return self._prior_precision

    @prior_precision.setter
    def prior_precision(self, value: Value) -> None:
        self._prior_precision = self._precisions(value).clone()  # what its owner does to it later on is not checked

    @property
    def sigma_noise(self) -> Tensor:
        """Standard deviation of a regression's Gaussian likelihood, 0-dim; 1 for others."""
        return self._sigma_noise

    @sigma_noise.setter
    def sigma_noise(self, value: Value) -> None:
        self._sigma_noise = self._sigma(value).clone()

    @property
    def prior_mean(self) -> Tensor:
        """Of the parameters, 0-dim, or one value per element, ``(P,)``, in ``parameter_names`` order, float64; may be set, after a fit while
        the parameters are those of the fit."""
        return self._prior_mean

    @prior_mean.setter
    def prior_mean(self, value: Value) -> None:
        mean = self._mean_of_prior(value)
        if self.n_data:
            self.require_unchanged()
            self._square_norms = self.norms({n: self.model.get_parameter(n) for n in self.parameter_names}, mean)
            self._linear = None
        self._prior_mean = mean

    def _mean_of_prior(self, value: Value) -> Tensor:
        """Checked, float64, on the model's device."""
        mean = as_float64("prior_mean", value, self._device).detach().clone()
        if mean.numel() != 1 and tuple(mean.shape) != (self.n_params,):
            raise ValueError(
                f"prior_mean: expected a number or one value for each of the {self.n_params} parameters, got shape {tuple(mean.shape)}."
            )
        if not mean.isfinite().all():
            raise ValueError("prior_mean: expected finite values, got inf or nan.")
        return mean.reshape(()) if mean.numel() == 1 else mean

    def norms(self, parameters: Mapping[str, Tensor], mean: Tensor | None = None) -> Tensor:
        """Of each parameter tensor, the squared distance from the prior's mean, ``self.prior_mean`` unless given; float64."""
        mean = (self._prior_mean if mean is None else mean).to(next(iter(parameters.values())).device)
        if not mean.dim():
            return torch.stack([(p.detach().double() - mean).square().sum() for p in parameters.values()])
        means = mean.split([p.numel() for p in parameters.values()])
        return torch.stack(
            [
                (p.detach().double().flatten() - m).square().sum()
                for p, m in zip(parameters.values(), means, strict=True)
            ]
        )

    @property
    def temperature(self) -> float:
        """T, by which likelihood and curvature are divided."""
        return self._temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        self._temperature = self._checked_temperature(value)

    @staticmethod
    def _checked_temperature(value: float) -> float:
        return positive_number("temperature", value)

    def _precisions(self, value: Value, name: str = "prior_precision") -> Tensor:
        count = len(self.parameter_names)
        value = as_float64(name, value, self._device)
        if value.numel() != 1 and tuple(value.shape) != (count,):
            raise ValueError(
                f"{name}: expected a number or a vector of {count} values, one per trainable parameter tensor "
                f"({', '.join(self.parameter_names[:3])}, ...), got shape {tuple(value.shape)}."
            )
        check_positive(name, value)
        return value.reshape(()).expand(count) if value.numel() == 1 else value

    def _sigma(self, value: Value) -> Tensor:
        value = as_float64("sigma_noise", value, self._device)
        if value.numel() != 1:
            raise ValueError(f"sigma_noise: expected one number, got shape {tuple(value.shape)}.")
        check_positive("sigma_noise", value)
        if not self.likelihood_function.has_noise and value.item() != 1:
            raise ValueError(
                f"sigma_noise belongs to likelihood='regression'; it must be 1 for {self.likelihood}, got {value.item()}."
            )
        return value.reshape(())

    def resolve(self, prior_precision: Value | None, sigma_noise: Value | None) -> tuple[Tensor, Tensor]:
        """Given hyperparameters, or this object's where None: one precision per parameter tensor and sigma, float64, checked."""
        precision = self.prior_precision if prior_precision is None else self._precisions(prior_precision)
        return precision, self.sigma_noise if sigma_noise is None else self._sigma(sigma_noise)

    def mean_at(self, at: str) -> Mean:
        """At the network's parameters, "network", or at the mode of the linearised network, "linear".

        Raises:
            RuntimeError: not fitted, or the linear mode was not found.
        """
        self._fitted()
        if check_choice("at", at, MODES) == "network":
            return Mean(self._statistic, self._square_norms)
        if self._linear is None:
            raise RuntimeError(
                f"{type(self).__name__}: at='linear' needs the linearised network's mode at this fit; call fit_linear_mode(loader)."
            )
        return Mean(self._linear.statistic, self._linear.square_norms)

    def _log_likelihood(self, sigma: Tensor, at: str = "network") -> Tensor:
        statistic = self.mean_at(at).statistic
        if torch.is_grad_enabled() and any(
            b.requires_grad for m in self._modules for b in m._buffers.values() if b is not None
        ):
            if at == "linear":
                raise RuntimeError(
                    f"{type(self).__name__}: the evidence at='linear' has no derivatives in buffers; evaluate it under torch.no_grad(), or "
                    "with buffers that do not require a gradient."
                )
            for name, b in hyperparameters(self.model).items():
                if name not in self._statistic_gradients:
                    raise RuntimeError(
                        f"{type(self).__name__}: the buffer {name!r} requires a gradient, but did not when this approximation was fitted; "
                        "call fit again, or evaluate under torch.no_grad()."
                    )
                # Adds nothing but the gradient.
                statistic = statistic + (self._statistic_gradients[name] * (b - b.detach())).sum()
        if self._temperature == 1:
            return self.likelihood_function.log_likelihood(statistic, self._n_targets, sigma)
        return self.likelihood_function.log_likelihood(statistic / self._temperature, self._n_targets, sigma)

    def _sizes(self) -> Tensor:
        return torch.tensor(self._numels, dtype=torch.float64, device=self._device)

    @property
    def log_likelihood(self) -> Tensor:
        """``log p(D | theta)`` summed over the data, 0-dim float64."""
        return self._log_likelihood(self.sigma_noise)

    @property
    def scatter(self) -> Tensor:
        """``sum_l delta_l ||theta_l - prior mean||^2``, theta at the fit, 0-dim float64."""
        self._fitted()
        return (self.prior_precision * self._square_norms).sum()

    @property
    def log_det_prior_precision(self) -> Tensor:
        """``sum_l P_l log delta_l``, 0-dim float64."""
        return (self._sizes() * self.prior_precision.log()).sum()

    @property
    def log_det_ratio(self) -> Tensor:
        """``log_det_posterior_precision - log_det_prior_precision``, computed without that difference."""
        nothing = torch.zeros_like(self._square_norms)
        return self._penalty(self.prior_precision.log(), self._log_scale(None), nothing)

    @property
    def log_det_posterior_precision(self) -> Tensor:
        """``sum_l log|H_l + delta_l I|``, 0-dim float64."""
        return self.log_det_ratio + self.log_det_prior_precision

    def _log_scale(self, log_sigma: Tensor | None) -> Tensor:
        """Logarithm of the curvature's factor, which is kept at sigma = 1; None: at ``self.sigma_noise``."""
        scale = self._no_scale if self._temperature == 1 else self._no_scale - math.log(self._temperature)
        if log_sigma is None and not self.likelihood_function.has_noise:
            return scale
        return scale - 2 * (self.sigma_noise.log() if log_sigma is None else log_sigma)

    def log_marginal_likelihood(
        self, prior_precision: Value | None = None, sigma_noise: Value | None = None, at: str = "network"
    ) -> Tensor:
        r"""The Laplace evidence ``log q(D | delta)`` of all data, 0-dim float64, differentiable twice in both
        arguments, and in the buffers that required a gradient at the fit.

        Divide by ``-n_data`` for the paper's ``-log q/N``. The arguments do not change the object. As laplace-torch's, it leaves a Gaussian's
        normaliser undivided by the temperature; :meth:`optimize_prior_precision` divides the normaliser too where it tunes the noise, or
        the temperature would only rescale that.

        With ``at="linear"`` it is that of the linearised network at its mode :math:`\theta_\star`, which is held:
        :math:`\log p(D | h(\theta_\star)) - \frac12 (\|\theta_\star\|^2_\Lambda + \log|H \Lambda^{-1} + I|)`. Where :math:`\theta_\star` is
        the mode at these precisions, this is the linear model's exact evidence, of a regression and the full matrix H.

        Args:
            prior_precision: a number, or one value per parameter tensor; None is ``self.prior_precision``.
            sigma_noise: None is ``self.sigma_noise``.
            at: "network", the parameters of the fit, or "linear", what :meth:`fit_linear_mode` found.

        Raises:
            ValueError: a value is not positive and finite, or of a wrong shape.
            RuntimeError: not fitted, or fitted before a buffer required a gradient or a basis changed; ``at="linear"`` before
                :meth:`fit_linear_mode`, or with buffers to differentiate in.
            FloatingPointError, ArithmeticError: a factor is not finite, or has an eigenvalue negative beyond rounding.

        Source: Immer et al., ICML 2021, eq. 5; van der Ouderaa et al., NeurIPS 2023, eq. 7; Antoran et al., "Adapting the linearised
        Laplace model evidence for modern deep learning", ICML 2022, section 4 (at="linear").
        """
        precision, sigma = self.resolve(prior_precision, sigma_noise)
        return self.evidence_at(precision.log(), None if sigma_noise is None else sigma.log(), at)

    def evidence_at(self, log_precision: Tensor, log_sigma: Tensor | None = None, at: str = "network") -> Tensor:
        """:meth:`log_marginal_likelihood` as a function of the logarithms, where an optimizer of both works: nothing is
        checked, and the derivatives in log_precision, ``(gamma_l - delta_l ||theta_l||^2) / 2``, come with the value.

        Args:
            log_precision: one value per parameter tensor, float64, on the model's device.
            log_sigma: 0-dim float64; None is that of ``self.sigma_noise``.
            at: see there.
        """
        sigma = self.sigma_noise if log_sigma is None else log_sigma.exp()
        penalty = self._penalty(log_precision, self._log_scale(log_sigma), self.mean_at(at).square_norms)
        return torch.add(self._log_likelihood(sigma, at), penalty, alpha=-0.5)

    # the linearised network's mode -----------------------------------------------------------------------------------

    @property
    def linear_mode(self) -> Tensor | None:
        """The mode of the linearised network's posterior, ``(P,)`` in ``parameter_names`` order, of the parameters' dtype; None before
        :meth:`fit_linear_mode` and after another fit."""
        if self._linear is None:
            return None
        return self._linear.theta.to(self.model.get_parameter(self.parameter_names[0]).dtype)

    @property
    def linear_fit(self) -> LinearMode | None:
        """How :attr:`linear_mode` was found: its loss, the residual, the passes over the data."""
        return self._linear

    @running_the_model
    def fit_linear_mode(
        self,
        loader: Iterable[Any],
        tol: float | None = None,
        solver: str = "auto",
        *,
        form: str = "full",
        hessian_at: str = "network",
        start: Tensor | None = None,
        precondition: bool = True,
        max_passes: int = 500,
        checkpoint: str | PathLike[str] | None = None,
        progress_bar: bool = False,
    ) -> Tensor:
        r"""Find the mode of the linearised network's posterior at the present precisions and noise:

        .. math::
            \theta_\star = \arg\min_\theta\, -\tfrac1T \log p(D | h(\theta)) + \tfrac12 \|\theta - \mu\|^2_\Lambda

        with h of :class:`ella_cuda.laplace.TangentModel`. Weights that were stopped early, or that normalisation layers follow, are not a
        mode, and the evidence at them chooses precisions that are too small, whose error bars are too wide; :math:`\theta_\star` is one. The
        network goes on being linearised at its own parameters, and predictions have the mean of its outputs unless asked for another.

        The loss is convex. Newton's method finds its minimum, each step by conjugate gradients, whose products with the curvature are a
        derivative along a direction and a gradient, one pass over the data each, and which the posterior's covariance preconditions.

        Args:
            loader: of the fit's data, as for :meth:`fit`; augmentation must be off. Batches that are the same in every pass save a run of the
                network in each.
            tol: of the residual: the norm of the loss' gradient over that of the larger of its two terms, in the metric of the posterior's
                covariance. None is 1e-6, and 1e-4 of float32 networks, whose rounding comes first.
            solver: "newton_cg"; of a regression, whose loss is quadratic, "cg" or "dual", which factorises the kernel of all ``N K`` outputs;
                "auto" is "dual" with few outputs, "cg", or "newton_cg".
            form: "full", or "simple": ``h = J theta``.
            hessian_at: "network", or "linear": the curvature is accumulated once more with the likelihood's Hessian at the linearised
                network's outputs, and is the approximation's from then on.
            start: where to start, ``(P,)``; None is the last mode of this fit and form if there is one, else the network's parameters, or
                with "simple" the prior's mean.
            precondition: False leaves the preconditioner out.
            max_passes: over the data, at most; "dual" takes three and one for the residual.
            checkpoint: a file, which is written every half a minute and removed at the end; if it exists, the solver starts from it.
            progress_bar: show one.

        Returns:
            :attr:`linear_mode`; :attr:`linear_fit` says more.

        Raises:
            ValueError: an argument does not fit; the loader's data are not as many as the fit's, or give the network another log likelihood.
            RuntimeError: not fitted, or the model's parameters or buffers changed since.
            NotImplementedError: a function of the network has no derivatives along directions.
            FloatingPointError: the log likelihood is not finite.

        Warns:
            UserWarning: the residual stays above ``tol``. What was found is kept.

        Source: Antoran et al., "Adapting the linearised Laplace model evidence for modern deep learning", ICML 2022, section 4.
        """
        require_loader(loader, "fit_linear_mode: loader")
        check_choice("hessian_at", hessian_at, HESSIANS)
        self.require_unchanged()
        if augment_of(self.model) is not None and self._draws is None:
            raise ValueError(
                "fit_linear_mode: the augmentation draws anew in every pass over the data (sampling='independent'), so that there is no one "
                "function whose mode to find; fit in the context augment.held(), or with another sampling."
            )
        if tol is None:
            tol = NEAR[self.model.get_parameter(self.parameter_names[0]).dtype]
        self._find_linear_mode(
            loader, tol, solver, form, hessian_at, start, precondition, max_passes, checkpoint, progress_bar
        )
        if self._linear.why:
            warnings.warn(
                f"fit_linear_mode: the residual is {self._linear.residual:.2g} after {self._linear.passes} passes over the data, above "
                f"tol={tol:g}; {self._linear.why}.",
                UserWarning,
                stacklevel=3,
            )
        return self.linear_mode

    def _find_linear_mode(
        self,
        loader: Iterable[Any],
        tol: float,
        solver: str,
        form: str,
        hessian_at: str,
        start: Tensor | None = None,
        precondition: bool = True,
        max_passes: int = 500,
        checkpoint: str | PathLike[str] | None = None,
        progress_bar: bool = False,
    ) -> None:
        if start is None and self._linear is not None and self._linear.form == form:
            start = self._linear.theta
        elif start is not None:
            start = self._checked_vector(start, "start")
            if start.dim() != 1:
                raise ValueError(
                    f"start: expected one vector of all parameters, ({self.n_params},), got {tuple(start.shape)}."
                )
        stopping = Stopping.checked(tol, max_passes)
        found = solve(self, loader, stopping, solver, form, start, precondition, checkpoint, progress_bar)
        if hessian_at == "linear":
            tangent = TangentModel(self.model, form, self.parameter_names)
            self._refit(loader, lambda x: tangent(found.theta, x).detach())
        self._linear = found

    def _fit(self, loader: Iterable[Any], override: bool, progress_bar: bool, **how: Any) -> None:
        """:meth:`fit`; the loader is kept for what passes over the same data later."""
        before, fitted = self._loaders, self.n_data > 0
        self._accumulate(loader, override, progress_bar, **how)
        before = [] if override else before
        added_to_unknown = not override and fitted and not before
        # Of several processes this one's loader is a part of the data alone.
        self._loaders = [] if added_to_unknown or how.get("group") is not None else [*before, loader]

    def _refit(self, loader: Iterable[Any], outputs_of: Callable[[Inputs], Tensor]) -> None:
        """Accumulate the curvature once more with the likelihood's Hessian at other outputs of inputs than the network's."""
        loaders = self._loaders
        self._accumulate(loader, override=True, progress_bar=False, outputs_of=outputs_of)
        self._loaders = loaders

    @abstractmethod
    def _accumulate(self, loader: Iterable[Any], override: bool, progress_bar: bool, **how: Any) -> None:
        """The pass over the data of a fit, with ``outputs_of`` as in :meth:`_refit`, if it is among ``how``."""

    def data_weight(self) -> Tensor:
        """By which likelihood and curvature at sigma = 1 are multiplied, ``1 / (sigma^2 T)``, 0-dim float64."""
        return self._log_scale(None).exp().detach()

    def free_elements(self) -> Tensor | None:
        """Of all parameters, one where an element has a posterior and zero elsewhere, ``(P,)``; None where all have one."""
        return None

    @abstractmethod
    def effective_by_tensor(self) -> Tensor:
        """:meth:`effective_parameters` in ``parameter_names`` order, float64."""

    def optimize_prior_precision(
        self,
        pred_type: str = "glm",
        method: str = "marglik",
        n_steps: int = 100,
        lr: float = 0.1,
        init_prior_prec: Value | None = None,
        prior_structure: str = "layerwise",
        val_loader: Iterable[Any] | None = None,
        loss: Loss | None = None,
        log_prior_prec_min: float = -4.0,
        log_prior_prec_max: float = 4.0,
        grid_size: int = 100,
        link_approx: str = "probit",
        n_samples: int = 100,
        progress_bar: bool = False,
        *,
        tune_sigma: bool = True,
        at: str = "network",
        train_loader: Iterable[Any] | None = None,
        tol: float = 1e-3,
        form: str = "full",
        hessian_at: str = "network",
        solver: str = "auto",
    ) -> Tensor:
        """Choose the prior precisions, and a regression's noise, for the curvature as it was fitted.

        Args:
            pred_type, link_approx, n_samples: of the predictions of "gridsearch", see a call.
            method: "marglik" raises the evidence by Adam on the logarithms; "mackay" repeats the evidence's fixed points in closed form,
                until they rest; "gridsearch" takes the precision with the best predictions of ``val_loader``.
            n_steps: how many steps, at most.
            lr: of Adam, in units of the logarithm.
            init_prior_prec: where "marglik" and "mackay" start; None is ``self.prior_precision``. The evidence at the linear mode can have
                several maxima where groups have their own precisions; the network's choice is a good start.
            prior_structure: which tensors share a precision, see :func:`ella_cuda.marglik_training`: "layerwise" (none), "module",
                "normalised" or "scalar" (all); "gridsearch" takes "scalar" alone.
            val_loader: yields ``(x, y)``, as for :meth:`fit`.
            loss: ``(predictions, targets) -> number``, of all data of the loader: probabilities, or of likelihoods without classes mean and
                variance of the outputs, both ``(N, K)``; None is the mean negative log density of the targets, noise included.
            log_prior_prec_min, log_prior_prec_max, grid_size: of the grid, powers of ten.
            progress_bar: show one.
            tune_sigma: whether "marglik" and "mackay" choose ``sigma_noise`` too, of a likelihood that has one.
            at: "network", where the evidence is that at the network's parameters; or "linear": :meth:`fit_linear_mode` and MacKay's fixed
                points at what it finds take turns until both stand still, whichever of "marglik" and "mackay" is given, since the evidence at
                the mode has its maximum there. ``n_steps`` are rounds of both.
            train_loader: of the fit's data, for ``at="linear"``; None is what :meth:`fit` got.
            tol: with ``at="linear"``, the largest change of a precision's logarithm in a round that is none.
            form, hessian_at, solver: of :meth:`fit_linear_mode`.

        Returns:
            ``self.prior_precision``: one value per parameter tensor.

        Raises:
            TypeError, ValueError: an argument does not fit, the loader is empty, no loss of a grid is finite; nothing is changed then.
            RuntimeError: as :meth:`log_marginal_likelihood`.

        Source: Immer et al., ICML 2021, section 3 (marglik); MacKay, "Bayesian interpolation", 1992 (mackay).
        """
        check_choice("pred_type", pred_type, PREDICTIONS)
        grid = check_arguments(
            method, prior_structure, link_approx, val_loader, log_prior_prec_min, log_prior_prec_max, grid_size
        )
        n_steps, lr, tol = as_count("n_steps", n_steps), positive_number("lr", lr), positive_number("tol", tol)
        check_choice("at", at, MODES)
        check_choice("hessian_at", hessian_at, HESSIANS)
        self._fitted()
        self._bases.check()
        if at == "linear":
            loader = self._training_loader(method, train_loader)
        before = self.prior_precision, self.sigma_noise, self._linear
        sigma = tune_sigma and self.likelihood_function.has_noise
        group = groups_of(self, prior_structure)
        try:
            if method == "gridsearch":
                self.prior_precision = grid_search(
                    self, grid, val_loader, loss, pred_type, link_approx, n_samples, progress_bar
                )
                return self.prior_precision
            if init_prior_prec is not None:
                self.prior_precision = self._precisions(init_prior_prec, "init_prior_prec")
            if at == "linear":
                if not self._alternate(loader, solver, form, hessian_at, n_steps, group, sigma, tol, progress_bar):
                    warn_of_motion(n_steps)
                if self._linear.why:
                    warnings.warn(
                        f"optimize_prior_precision: the residual of the last linear mode is {self._linear.residual:.2g}, above what "
                        f"tol={tol:g} asks for; {self._linear.why}. Precisions may be off by more than tol.",
                        UserWarning,
                        stacklevel=2,
                    )
            elif method == "marglik":
                raise_evidence(self, n_steps, lr, group, sigma, progress_bar)
            elif not fixed_points(self, n_steps, group, sigma, progress_bar)[2]:
                warn_of_motion(n_steps, ", or method='marglik'")
        except BaseException:
            self.prior_precision, self.sigma_noise, self._linear = before
            raise
        return self.prior_precision

    def _training_loader(self, method: str, given: Iterable[Any] | None) -> Iterable[Any]:
        if method == "gridsearch":
            raise ValueError("optimize_prior_precision: method='gridsearch' has no at='linear'; use 'marglik'.")
        self.require_unchanged()
        if given is not None:
            require_loader(given, "optimize_prior_precision: train_loader")
            return given
        if not self._loaders:
            raise ValueError(
                "optimize_prior_precision: at='linear' passes over the training data, whose loader a copied or loaded approximation, or a "
                "group's, does not have; pass train_loader."
            )
        return self._loaders[0] if len(self._loaders) == 1 else _Joined(self._loaders)

    @running_the_model
    def _alternate(
        self,
        loader: Iterable[Any],
        solver: str,
        form: str,
        hessian_at: str,
        n_steps: int,
        group: Tensor,
        tune_sigma: bool,
        tol: float,
        progress_bar: bool,
    ) -> bool:
        def find(inner: float) -> None:
            self._find_linear_mode(loader, inner, solver, form, hessian_at)

        # With the Hessian at moving outputs the evidence need not rise, which is what an accelerated round is judged by.
        return alternate(self, find, n_steps, group, tune_sigma, tol, hessian_at == "network", progress_bar)

    @property
    def square_norms(self) -> Tensor:
        """Of each parameter tensor, the squared distance from the prior's mean at the fit, float64."""
        self._fitted()
        return self._square_norms.clone()

    @property
    def square_error(self) -> Tensor:
        """The sum over the data of a regression's squared errors at the fit, 0-dim float64."""
        self._fitted()
        return -2 * self._statistic

    @property
    def n_targets(self) -> int:
        """Entries of all data's targets."""
        return self._n_targets

    @property
    def posterior_precision(self) -> Posterior:
        """P = curvature + prior precision, at the present hyperparameters."""
        self._fitted()
        self._bases.check()
        return self.posterior_at(self.prior_precision)

    def require_unchanged(self) -> None:
        """RuntimeError where this is not fitted, or the model's function, parameters or buffers are not what they were at the fit, but for
        buffers that its forward fills."""
        self._fitted()
        if change := self._change():
            raise RuntimeError(
                f"{type(self).__name__}: the model changed since the fit, whose curvature is not its own: {change}. Put it back, or call fit "
                "again."
            )
        # Sums see what is written through ``.data``, of which versions know nothing; both take less time than the fingerprint.
        tensors = [*self.model.parameters(), *self.model.buffers()]
        seen = [(id(t), t._version, t.data_ptr()) for t in tensors]
        sums = [uneven_sum(t.detach()).to(self._device) for t in tensors if t.is_floating_point()]
        if (
            self._verified is not None
            and self._verified[0] == seen
            and torch.equal(self._verified[1], torch.stack(sums))
        ):
            return
        present = fingerprint_of(self.model, self._filled).to(self._device)
        if not torch.allclose(present, self._fingerprint, rtol=1e-12, atol=0):
            raise RuntimeError(
                f"{type(self).__name__}: the model's parameters or buffers changed since the fit, whose curvature is not theirs; "
                "call fit again."
            )
        self._verified = seen, torch.stack(sums)

    def _change(self) -> str:
        """The change of the model's function since the fit, in words; "" where there is none."""
        if self._function is None:
            self._function = FunctionDescription(self.model)
        return self._function.change(self.model)

    def _require_same(self, fingerprint: Tensor, layers: bool = True) -> None:
        """ValueError where the model is not that of the fit: with this fingerprint of its numbers, and the same ``layers`` or not."""
        same = layers and torch.allclose(fingerprint.to(self._device), self._fingerprint, rtol=1e-12, atol=0)
        change = "" if same else "its parameters, buffers or layers"
        if change := self._change() or change:
            raise ValueError(
                f"fit(override=False): the model's layers or parameters changed since the fit it would add to ({change}); use override=True."
            )

    def _settle(self, fingerprint: Tensor, buffers: Mapping[str, Tensor | None]) -> None:
        """Be of the model as it is after a pass, before which it had this fingerprint and these sums of its buffers."""
        filled = filled_since(self.model, buffers)
        self._filled = self._filled | filled
        self._fingerprint = fingerprint_of(self.model, self._filled).to(self._device) if filled else fingerprint
        self._function, self._verified, self._linear = FunctionDescription(self.model), None, None

    @contextmanager
    def _filling(self) -> Iterator[None]:
        """For the duration of the context, in which a model that is that of the fit runs, buffers that it changes are its own to fill."""

        def marks() -> dict[str, tuple[int, ...]]:
            named = self.model.named_buffers(remove_duplicate=False)
            return {name: (id(b), b._version, b.data_ptr()) for name, b in named}

        before = marks()
        try:
            yield
        finally:
            if filled := {name for name, mark in marks().items() if before.get(name) != mark} - self._filled:
                self._filled = self._filled | filled
                self._fingerprint = fingerprint_of(self.model, self._filled).to(self._device)

    def relative_effective_parameters(self) -> dict[str, dict[str, float]]:
        """Name of every :class:`ella_cuda.nn.RelaxedEquivariance` -> path -> its share of the layer's effective
        parameters.

        Shares sum to 1. Where no path has any (dead layer), all shares are nan.
        """
        result = {}
        for layer, sums in self._effective_by_path().items():
            total = math.fsum(sums.values())
            result[layer] = {path: value / total if total > 0 else math.nan for path, value in sums.items()}
        return result

    def _effective_by_path(self) -> dict[str, dict[str, float]]:
        gammas = self.effective_parameters()
        result = {}
        for layer, module in self.model.named_modules():
            if isinstance(module, RelaxedEquivariance):
                prefix = f"{layer}." if layer else ""
                result[layer] = {
                    path: math.fsum(g for name, g in gammas.items() if name.startswith(f"{prefix}{path}."))
                    for path in module.path_names
                }
        return result

    def layer_types(self) -> dict[str, str]:
        """Name of every :class:`ella_cuda.nn.RelaxedEquivariance` -> the path with the largest share, its type.

        The first of equals; "none" where all paths together have fewer than one effective parameter: of such a layer the data determine
        nothing that its type could name, however the rest is shared.
        """
        return {layer: layer_type(sums) or "none" for layer, sums in self._effective_by_path().items()}

    def state_dict(self) -> dict[str, Any]:
        """Everything a fit produced, and the hyperparameters: tensors, numbers and strings, loadable with ``weights_only=True``; and a
        checksum of them, which takes a core a second for some 0.6 GB."""
        return with_checksum(self._state())

    def _shared_state(self) -> dict[str, Any]:
        """What :meth:`state_dict` has of every approximation."""
        return {
            "likelihood": repr(self.likelihood_function),
            "parameter_names": list(self.parameter_names),
            "prior_precision": self.prior_precision.detach().clone(),
            "sigma_noise": self.sigma_noise.detach().clone(),
            "prior_mean": self.prior_mean.clone(),
            "temperature": self.temperature,
            "n_data": self.n_data,
            "n_outputs": self.n_outputs,
            "n_targets": self._n_targets,
            "statistic": self._statistic.clone(),
            "square_norms": self._square_norms.clone(),
            "fingerprint": self._fingerprint.clone(),
            "filled_buffers": sorted(self._filled),
            "linear_mode": self._saved_linear_mode(),
            "draws": None if self._draws is None else self._draws.clone(),
        }

    def _saved_linear_mode(self) -> dict[str, Any] | None:
        if self._linear is None:
            return None
        return {key: v.clone() if isinstance(v, Tensor) else v for key, v in self._linear._asdict().items()}

    def _checked_state(
        self, state: Mapping[str, Any], settings: Sequence[str], defaults: Mapping[str, Any] | None = None
    ) -> tuple[Mapping[str, Any], int, Callable[[], None]]:
        """A state with the defaults of what files of older approximations lack, how many data it is of, and what takes the entries of
        :meth:`_shared_state`.

        Args:
            settings: attributes that the state's entries of these names must equal.
            defaults: of entries of the subclass.

        Raises:
            TypeError, ValueError: see :meth:`load_state_dict`. What takes the entries raises where the checksum does not fit.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"load_state_dict: expected a mapping as state_dict gives it, got {type(state).__name__}.")
        own, given = self._state().keys(), state
        none = torch.zeros((), dtype=torch.float64, device="cpu")
        old = {"prior_mean": none, "temperature": 1.0, "linear_mode": None, "draws": None, "filled_buffers": []}
        state = {**old, **(defaults or {}), **state}
        if missing := sorted(own - state.keys()):
            raise ValueError(
                f"load_state_dict: entries missing from the state: {', '.join(missing)}; a {type(self).__name__} takes the states of its own "
                "class."
            )
        if unknown := sorted(map(repr, state.keys() - own - {CHECKSUM})):
            raise ValueError(f"load_state_dict: unknown entries in the state: {', '.join(unknown)}.")
        expected = {key: getattr(self, key) for key in (*settings, "parameter_names")}
        for key, here in {"likelihood": repr(self.likelihood_function), **expected}.items():
            if type(state[key]) is not type(here) or state[key] != here:
                raise ValueError(f"load_state_dict: {key} is {state[key]!r} in the state, but {here!r} here.")
        n_data, n_outputs, n_targets = (checked_count(key, state[key]) for key in ("n_data", "n_outputs", "n_targets"))
        if n_data and not n_outputs:
            raise ValueError(f"load_state_dict: n_outputs must be positive with n_data = {n_data}, got 0.")
        count = len(self.parameter_names)
        precision = self._precisions(checked_tensor("prior_precision", state["prior_precision"], (count,)))
        sigma = self._sigma(checked_tensor("sigma_noise", state["sigma_noise"], ()))
        mean = self._mean_of_prior(state["prior_mean"])
        temperature = self._checked_temperature(state["temperature"])
        square_norms = checked_tensor("square_norms", state["square_norms"], (count,))
        if (square_norms < 0).any():
            raise ValueError(f"load_state_dict: square_norms must not be negative, got {square_norms.min().item()}.")
        statistic, fingerprint = (checked_tensor(key, state[key], ()) for key in ("statistic", "fingerprint"))
        linear = LinearMode.of_state(state["linear_mode"], self.n_params, count)
        for name, value in (("statistic", statistic), ("linear_mode: statistic", linear and linear.statistic)):
            if value is not None and value > 0 and self.likelihood_function.name in NEVER_POSITIVE:
                raise ValueError(
                    f"load_state_dict: {name} must not be positive for {self.likelihood!r}, got {value.item()}."
                )
        draws, filled = checked_draws(self.model, state["draws"]), state["filled_buffers"]
        if not isinstance(filled, list) or not all(isinstance(name, str) for name in filled):
            raise ValueError(f"load_state_dict: filled_buffers must be a list of names, got {filled!r}.")

        def restore() -> None:
            if CHECKSUM in given:
                what = "the state was changed since state_dict gave it, or is damaged; load it as it was saved"
                require_checksum(given, "load_state_dict", what)
            self._prior_precision, self._sigma_noise = precision.clone(), sigma.clone()
            self._prior_mean, self._temperature, self._verified = mean, temperature, None
            self._bases = FittedBases(self.model)
            self.n_data, self.n_outputs, self._n_targets = n_data, n_outputs, n_targets
            self._statistic, self._square_norms, self._fingerprint = (
                tensor.to(self._device, copy=True) for tensor in (statistic, square_norms, fingerprint)
            )
            self._linear = None if linear is None else linear.on(self._device)
            self._draws, self._loaders = draws, []
            self._filled, self._function = frozenset(filled), FunctionDescription(self.model)

        return state, n_data, restore

    def __getstate__(self) -> dict[str, Any]:
        """Copies and files have the hyperparameters' values, not the graph that they were computed in, which torch does not copy."""
        given = {name: getattr(self, name) for name in ("_prior_precision", "_sigma_noise")}
        values = {name: value if value.is_leaf else value.detach() for name, value in given.items()}
        unchanged = not self._change()
        return self.__dict__ | values | {"_predicting": None, "_loaders": [], "_ways": [], "_function": unchanged}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy is of the modules that it has, where the original is of its own."""
        self.__dict__.update(state)
        try:
            self._function = FunctionDescription(self.model if state["_function"] else nn.Module())
        except AttributeError:  # this is an attribute of its model, which is filled after it
            self._function = None


def _require_last(model: nn.Module, rule: Rule, x: Inputs) -> None:
    """ValueError where the model's output is not the output of the rule's layer."""
    seen: list[Any] = []
    x, copies = tried_copies(model, x)
    handle = rule.module.register_forward_hook(lambda module, args, out: seen.append(out))
    try:
        with torch.no_grad(), at_test_time(model):
            outputs = run_model(model, x)
    finally:
        handle.remove()
    if copies > 1:
        seen = [out.unflatten(0, (-1, copies)).mean(1) for out in seen[-1:]]
    if not (seen and isinstance(seen[-1], Tensor) and isinstance(outputs, Tensor) and torch.equal(seen[-1], outputs)):
        raise ValueError(
            f"subset_of_weights='last_layer': the model's output is not that of {rule.label}, the last module of model.named_modules() with "
            "trainable parameters. Name the last layer: subset_of_weights=['its name']."
        )
