"""Base of Laplace approximations: a model's parameters and hyperparameters, and the evidence on a curvature that subclasses hold."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import itertools
import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ella_cuda.laplace.batches import (
    DEFAULT_KEYS,
    Inputs,
    checked_outputs,
    data_points,
    dict_keys,
    require_loader,
    run_model,
    take,
    tensors_of,
)
from ella_cuda.laplace.check_extensions import POINTS, check_likelihood, is_own
from ella_cuda.laplace.copies import augment_of, checked_draws, fixed_draws, require_constant_amounts, tried_copies
from ella_cuda.laplace.curvature import CurvaturePass
from ella_cuda.laplace.distributed_fit import FitSums, accumulate_together
from ella_cuda.laplace.evidence import (
    MODES,
    DataFitGradient,
    data_weight,
    elements,
    evidence_at,
    finer,
    is_finer,
    layer_type,
    log_likelihood,
    log_scale,
    norms_at,
    of_tensors,
    precisions_of,
    present_terms,
    require_likelihood_of_fit,
    resolved,
    sigma_of,
    square_distances,
)
from ella_cuda.laplace.factors import CHECKSUM, require_checksum, with_checksum
from ella_cuda.laplace.fingerprint import fingerprint_and_buffers
from ella_cuda.laplace.fitted_model import FittedModel
from ella_cuda.laplace.interception import hooks
from ella_cuda.laplace.last_layer import Features, LastLayer
from ella_cuda.laplace.leave_one_out import (
    Influence,
    LeaveOneOut,
    Prediction,
    Tempered,
    best_of,
    calibrate,
    calibrate_by_folds,
    have_learned_alike,
    influence,
    leave_one_out,
    shuffles,
)
from ella_cuda.laplace.likelihoods import IGNORED, LINKS, Likelihood, likelihood_of
from ella_cuda.laplace.linear_mode import HESSIANS, LinearMode, alternate, features_of_fit, move, solve
from ella_cuda.laplace.parameters import Value, as_float64, check_choice, positive_number
from ella_cuda.laplace.posterior import Posterior
from ella_cuda.laplace.predictive import MEANS, PREDICTIONS, Predictive, predictions_at
from ella_cuda.laplace.rules.base import Rule
from ella_cuda.laplace.rules.network import UNKNOWN
from ella_cuda.laplace.tangent_model import TangentModel
from ella_cuda.laplace.test_time import at_test_time
from ella_cuda.laplace.tuning import (
    Loss,
    check_arguments,
    fixed_points,
    grid_search,
    groups_of,
    raise_evidence,
    warn_of_motion,
)
from ella_cuda.laplace.uncertainty import Uncertainty, uncertainty
from ella_cuda.modes import exclusively, running_the_model
from ella_cuda.nn import RelaxedEquivariance
from ella_cuda.nn._sizes import as_count
from ella_cuda.ops._precision import without_autocast

NEAR = {torch.float32: 1e-4, torch.float64: 1e-6}  # residual of a linear mode, unless told


@dataclasses.dataclass(frozen=True)
class LaplaceOptions:
    """Arguments of :class:`ella_cuda.laplace.KronLaplace`, which documents them, that have nothing to do with factors."""

    prior_precision: Value = 1.0
    sigma_noise: Value = 1.0
    prior_mean: Value = 0.0
    temperature: float = 1.0
    memory_budget: int | None = None
    unknown: str = "error"
    subset_of_weights: str | Sequence[str] = "all"
    dict_key_x: str = DEFAULT_KEYS.x
    dict_key_y: str = DEFAULT_KEYS.y
    ignore_index: int = IGNORED
    enable_backprop: bool = False


class BaseLaplace(Predictive):
    """A Laplace approximation whose prior has one precision for each parameter tensor; see :class:`ella_cuda.laplace.KronLaplace`, whose
    arguments and attributes these are. A subclass holds the curvature: it defines :meth:`fit` and the methods that are abstract here.
    Parts of the package read the attributes of :class:`ella_cuda.laplace.evidence.Evidence`.
    """

    _settings: tuple[str, ...]  # attributes that a state must agree on
    _finer_word = "element"  # what the finer structure's precisions are of

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let the class's signature say the options that its constructor takes by name."""
        super().__init_subclass__(**kwargs)
        own = inspect.signature(cls.__init__)
        named = [p for p in [*own.parameters.values()][1:] if p.kind is not p.VAR_KEYWORD]
        if len(named) + 1 < len(own.parameters):
            options = inspect.signature(LaplaceOptions).parameters.values()
            cls.__signature__ = own.replace(parameters=[*named, *(p.replace(kind=p.KEYWORD_ONLY) for p in options)])

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood,
        options: LaplaceOptions,
        resolution: str = "shared",
        approximation: str = "expand",
    ) -> None:
        keys = dict_keys(options.dict_key_x, options.dict_key_y)
        self.unknown = check_choice("unknown", options.unknown, UNKNOWN)
        self.fitted_model = FittedModel(
            model,
            type(self).__name__,
            keys,
            resolution=resolution,
            approximation=approximation,
            unknown=self.unknown,
            subset_of_weights=options.subset_of_weights,
        )
        self.ignore_index, self.enable_backprop = options.ignore_index, options.enable_backprop
        self.likelihood_function = likelihood_of(likelihood, options.ignore_index)
        self.dict_key_x, self.dict_key_y = keys
        self.resolution, self.approximation = resolution, approximation
        self.model, self.subset_of_weights = model, options.subset_of_weights
        self.parameter_names, self.free_elements = self.fitted_model.parameter_names, None
        self._relabelled = False  # whether the likelihood was set to another one than that of the fit
        with exclusively(model):
            self._rules = self.fitted_model.present_rules()
        budget, default = options.memory_budget, 64 << 20 if self._device.type == "cpu" else 2 << 30
        self.memory_budget = default if budget is None else as_count("memory_budget", budget)
        self._forget()
        self.prior_precision = options.prior_precision
        self.sigma_noise = options.sigma_noise
        self.temperature = options.temperature
        self.prior_mean = options.prior_mean

    def __repr__(self) -> str:
        state = f"fitted to {self.n_data} data points" if self.n_data else "not fitted"
        likelihood = f"likelihood={repr(self.likelihood_function)!r}"
        return f"{type(self).__name__}({type(self.model).__name__}, {likelihood}, {self._described()}, {state})"

    def __copy__(self) -> BaseLaplace:
        """An approximation of the same model, with sums of its own, which ``fit(override=False)`` adds to."""
        kept = [*self.model.modules(), self.fitted_model.bases]  # the latter knows the model's own bases
        return copy.deepcopy(self, {id(one): one for one in kept})

    def __getstate__(self) -> dict[str, Any]:
        """Copies and files have the hyperparameters' values, not the graph that they were computed in, which torch does not copy."""
        given = {name: getattr(self, name) for name in ("_prior_precision", "_sigma_noise")}
        values = {name: value if value.is_leaf else value.detach() for name, value in given.items()}
        return self.__dict__ | values | {"_predicting": None, "_loaders": [], "_ways": []}

    @property
    def _device(self) -> torch.device:
        return self.fitted_model.device

    def _forget(self) -> None:
        """Be unfitted."""
        self.fitted_model.forget()
        self.counts = self.fitted_model.numels
        self.n_params = sum(self.counts)
        self.n_data = self.n_outputs = self.n_targets = 0
        self.statistic = self.fitted_model.zero.clone()
        self.statistic_gradients: dict[str, Tensor] = {}
        self.square_norms, self.element_norms = self.statistic.new_zeros(len(self.parameter_names)), None
        self.linear_fit: LinearMode | None = None
        self.fitted_likelihood: Likelihood | None = None
        self._predictive_prior_precision: Tensor | None = None
        self._predicting, self._ways = None, []
        self._loaders: list[Iterable[Any]] = []  # of the fit's data

    # what a structure defines ----------------------------------------------------------------------------------------

    @abstractmethod
    def fit(self, loader: Iterable[Any], override: bool = True, progress_bar: bool = False) -> BaseLaplace:
        """One streaming pass over the data at the model's present parameters."""

    @abstractmethod
    def _allocate(self, rules: Sequence[Rule]) -> None:
        """Hold a curvature of no data, for these rules."""

    @abstractmethod
    def _pass_over(self, sums: FitSums, loader: Iterable[Any], progress_bar: bool, **how: Any) -> None:
        """Add a pass over the data to the curvature and the sums; ``how`` may have ``hessian_at`` as in :meth:`_refit`."""

    @abstractmethod
    def _check_finite(self, sums: FitSums) -> None:
        """FloatingPointError where the statistic or the curvature is not finite."""

    @abstractmethod
    def _hold(self) -> None:
        """Take the curvature that the pass has left, or that was read, as that of ``n_data`` data points."""

    @abstractmethod
    def _posterior(self, precision: Tensor, scale: Tensor) -> Posterior:
        """With the curvature at sigma = 1 times a scale, 0-dim, and one precision per tensor; float64."""

    @abstractmethod
    def _described(self) -> str:
        """The settings and the size, for the representation."""

    @abstractmethod
    def _curvature_state(self) -> dict[str, Any]:
        """The curvature's entries of :meth:`state_dict`, copied."""

    @abstractmethod
    def _read(self, state: Mapping[str, Any], n_data: int) -> Callable[[], None]:
        """Check the curvature of a state; returns a function that takes it."""

    # fitting ---------------------------------------------------------------------------------------------------------

    def _try_out(self, run: CurvaturePass, x: Inputs, y: Tensor, several: bool) -> bool:
        """Checks before the first batch; returns whether the network's forward ran.

        Raises:
            ValueError: with ``subset_of_weights="last_layer"``, the model's output is not that of the layer; a likelihood or a rule of
                the user's contradicts autograd; and as :func:`ella_cuda.laplace.check_model.probe`.
        """
        if self.subset_of_weights == "last_layer":
            _require_last(self.model, self._rules[-1], take(x, slice(1)))
        tried, others = run.try_out(x, several), not is_own(type(self.likelihood_function)) and len(y) == data_points(x)
        if others:
            few = torch.arange(POINTS, device=y.device) % len(y)
            with torch.no_grad():
                inputs, _ = tried_copies(self.model, take(x, few.to(tensors_of(x)[0].device)))
                outputs = checked_outputs(run_model(self.model, inputs), POINTS)
            self.likelihood_function.check(outputs, y[few])
            check_likelihood(self.likelihood_function, outputs, y[few])
        return tried or others or self.subset_of_weights == "last_layer"

    def _fit(
        self, loader: Iterable[Any], override: bool = True, progress_bar: bool = False, group: Any = None, **how: Any
    ) -> None:
        """:meth:`fit`, with arguments of :meth:`_pass_over`; the loader is kept for what passes over the same data later."""
        before, fitted = self._loaders, self.n_data > 0
        if group is None:
            sums = self._begin(loader, override, how.get("hessian_at"))
            self._pass_over(sums, loader, progress_bar, **how)
            self._require_pass(sums)
            self._check_finite(sums)
            self._end(sums)
        else:
            accumulate_together(self, loader, override, progress_bar, how["generator"], group)
        before = [] if override else before
        added_to_unknown = not override and fitted and not before
        # Of several processes this one's loader is a part of the data alone.
        self._loaders = [] if added_to_unknown or group is not None else [*before, loader]

    def _refit(self, loader: Iterable[Any], hessian_at: Callable[[Inputs], Tensor]) -> None:
        """Accumulate the curvature once more with the likelihood's Hessian at other outputs of inputs than the network's."""
        loaders = self._loaders
        self._fit(loader, hessian_at=hessian_at)
        self._loaders = loaders

    def _batches(
        self, sums: FitSums, loader: Iterable[Any], progress_bar: bool, run: CurvaturePass, several: bool
    ) -> Iterator[tuple[Inputs, Tensor]]:
        """The batches of a pass, which are counted, on the model's device; the model is tried out on the first with data."""
        for batch in tqdm(loader, desc="curvature", disable=not progress_bar, leave=False):
            x, y = sums.batch = self.fitted_model.batch(batch, "fit")
            if data_points(x) and not sums.seen:
                with without_autocast(self._device.type):
                    sums.tried = self._try_out(run, x, y, several)
            sums.seen, sums.n_targets = sums.seen + data_points(x), sums.n_targets + y.numel()
            yield x, y

    def _begin(
        self, loader: Iterable[Any], override: bool, hessian_at: Callable[[Inputs], Tensor] | None = None
    ) -> FitSums:
        """Check and allocate before a fit's pass."""
        if not isinstance(override, bool):
            raise TypeError(
                f"fit: override must be a bool, got {type(override).__name__}; fit takes one loader of batches (x, y), which tensors make by "
                "ella_cuda.data.TensorLoader(x, y, batch_size=...)."
            )
        require_loader(loader, "fit: loader")
        fitted, anew = self.fitted_model, override or self.n_data == 0
        if self._relabelled:
            sigma_of(self, self.sigma_noise)
            if not anew:
                raise ValueError("fit(override=False): the likelihood was changed since the fit; use override=True.")
        rules = fitted.present_rules()
        parameters = fitted.present_parameters(rules)
        require_constant_amounts(self.model)
        if anew:
            self._require_room(rules)
        data_fit = self._data_fit()
        fingerprint, buffers = fingerprint_and_buffers(self.model, () if anew else fitted.filled)
        norms = square_distances(self, parameters.values())
        if anew:
            fitted.describe(parameters)
            self._rules = rules
            self._forget()
            if hessian_at is None:
                fitted.draws = fixed_draws(self.model)
            self._allocate(rules)
        else:
            fitted.require_same(fingerprint, [rule.module for rule in rules] == [rule.module for rule in self._rules])
            if norms.device != self._device:
                raise ValueError(
                    f"fit(override=False): the model moved from {self._device} to {norms.device} since the fit; use override=True."
                )
            if data_fit.buffers.keys() != self.statistic_gradients.keys():
                raise ValueError(
                    "fit(override=False): other buffers require a gradient than in the fit it would add to; use override=True."
                )
        given = self.prior_precision, self.sigma_noise
        self._prior_precision, self._sigma_noise = (v.to(self._device) for v in given)  # the model may have moved
        fingerprint = fingerprint.to(self._device)
        sums = FitSums(data_fit, fingerprint, buffers, norms, anew, self.n_data, self.n_targets, self.statistic)
        self._predictive_prior_precision = None
        self.n_data, fitted.fingerprint = 0, None  # until the pass is complete
        return sums

    def _require_room(self, rules: Sequence[Rule]) -> None:
        """MemoryError where the device has no room for the curvature."""

    def _data_fit(self) -> DataFitGradient:
        return DataFitGradient(self.model)

    @staticmethod
    def _require_pass(sums: FitSums) -> None:
        """ValueError where the pass saw no data, or not all layers."""
        if not sums.seen:
            raise ValueError(
                "fit: the loader gave no data; an iterator is consumed once: pass a re-iterable loader such as a DataLoader."
            )
        called = {id(p) for rule, calls in sums.calls.items() if calls for p in rule.parameters().values()}
        never = [r for r in sums.calls if not called >= {id(r.parameters()[name]) for name in r.trainable}]
        if never:
            raise ValueError(
                "fit: freeze with requires_grad_(False) what the model does not use, or register a rule for the module that uses the "
                "parameters directly:"
                + "".join(f"\n- {rule.label} has trainable parameters but was never called" for rule in never)
            )

    def _end(self, sums: FitSums) -> None:
        """Be fitted with these sums and the curvature that the pass has left."""
        self.n_data, self.n_targets = sums.n_data + sums.seen, sums.n_targets
        self.statistic, self.square_norms, self.linear_fit = sums.statistic, sums.norms, None
        before = self.statistic_gradients
        self.statistic_gradients = {name: g + before.get(name, 0) for name, g in sums.gradients.items()}
        self.fitted_model.settle(sums.fingerprint, sums.buffers if sums.ran else None)
        self.fitted_likelihood, self._relabelled = self.likelihood_function, False
        self._weigh_elements()
        self._hold()

    def _weigh_elements(self) -> None:
        """Take ``element_norms`` of the model's parameters, where elements or units may have precisions of their own."""

    def _norms_of_finer(self) -> Tensor:
        return self.element_norms

    @property
    def _finer_counts(self) -> list[int] | None:
        return self.counts if self._elementwise_priors else None

    def _of_elements(self, precision: Tensor) -> Tensor:
        """The precision of each element from those of the finer structure."""
        return precision

    @property
    def _unit_counts(self) -> list[int]:
        """The number of output units of each parameter tensor, in ``parameter_names`` order; ValueError where this structure has none."""
        raise ValueError(
            f"{type(self).__name__}: prior_structure='unit' has a precision for each output unit, which KronLaplace alone learns; use that, "
            "or 'layerwise' here."
        )

    @property
    def likelihood(self) -> str:
        """The likelihood's name; set it from what the constructor takes. A curvature that is there stays that of the fit, so that functional
        samples and variances do not change, and the evidence waits for another fit."""
        return self.likelihood_function.name

    @likelihood.setter
    def likelihood(self, value: str | Likelihood) -> None:
        before, self.likelihood_function = self.likelihood_function, likelihood_of(value, self.ignore_index)
        if repr(before) == repr(self.likelihood_function):
            self.likelihood_function = before
        elif self.fitted_likelihood is None:
            sigma_of(self, self.sigma_noise)
        self._relabelled = self.fitted_likelihood is not None and self.fitted_likelihood is not self.likelihood_function

    # hyperparameters -------------------------------------------------------------------------------------------------

    @property
    def prior_precision(self) -> Tensor:
        """One positive value per parameter tensor, 1-D, in ``named_parameters()`` order; set it from a number or such a vector. Full and
        diagonal approximations also take one value per element that has a posterior, unless these are as many as parameter tensors;
        :class:`ella_cuda.laplace.KronLaplace` one per output unit, see ``unit_precisions``.
        Predictions are by it unless ``predictive_prior_precision`` is set later."""
        return self._prior_precision

    @prior_precision.setter
    def prior_precision(self, value: Value) -> None:
        self._prior_precision = precisions_of(self, value).clone()  # what its owner does to it later on is not checked
        self._predictive_prior_precision = None

    @property
    def prior_precision_diag(self) -> Tensor:
        """The prior's precision of each element that has a posterior, ``(S,)``, float64."""
        precision = self.prior_precision
        if is_finer(self, precision):
            return self._of_elements(precision)
        return precision.repeat_interleave(torch.tensor(self.counts, device=precision.device))

    @property
    def predictive_prior_precision(self) -> Tensor | None:
        """Prior precisions of predictions alone, one per parameter tensor, float64; None where those are by ``prior_precision``.

        Predictions are calls, functional variances, covariances and samples, predictive samples and :meth:`uncertainty`. The evidence,
        ``posterior_precision``, ``sample``, ``log_prob``, ``effective_parameters``, ``layer_types`` and :meth:`leave_one_out` are of
        ``prior_precision``.

        Set by :meth:`calibrate`, or from a number, such a vector, or None. A fit, :meth:`optimize_prior_precision` and a new
        ``prior_precision`` set it to None.
        """
        return self._predictive_prior_precision

    @predictive_prior_precision.setter
    def predictive_prior_precision(self, value: Value | None) -> None:
        found = None if value is None else precisions_of(self, value, "predictive_prior_precision").detach().clone()
        self._predictive_prior_precision = found

    @property
    def sigma_noise(self) -> Tensor:
        """Standard deviation of a regression's Gaussian likelihood, 0-dim; 1 for others."""
        return self._sigma_noise

    @sigma_noise.setter
    def sigma_noise(self, value: Value) -> None:
        self._sigma_noise = sigma_of(self, value).clone()

    @property
    def prior_mean(self) -> Tensor:
        """The prior's mean, 0-dim, or one value per element of the parameters, ``(P,)``, in ``parameter_names`` order, float64; may be
        set, after a fit while the parameters are those of the fit."""
        return self._prior_mean

    @prior_mean.setter
    def prior_mean(self, value: Value) -> None:
        mean = self._mean_of_prior(value)
        if self.n_data:
            self.fitted_model.require_unchanged()
            self.square_norms, self.linear_fit = square_distances(self, self.fitted_model.parameters(), mean), None
        self._prior_mean = mean
        if self.n_data:
            self._weigh_elements()

    def _mean_of_prior(self, value: Value) -> Tensor:
        """Checked, float64, on the model's device."""
        mean = as_float64("prior_mean", value, self._device).detach().clone()
        if mean.numel() != 1 and tuple(mean.shape) != (self.n_params,):
            raise ValueError(
                f"prior_mean: expected a number or one value for each of the {self.n_params} parameters, got shape {tuple(mean.shape)}."
            )
        if not (mean.isfinite().all() if isinstance(value, Tensor) else math.isfinite(value)):
            raise ValueError("prior_mean: expected finite values, got inf or nan.")
        return mean.reshape(()) if mean.numel() == 1 else mean

    @property
    def temperature(self) -> float:
        """T, by which likelihood and curvature are divided."""
        return self._temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        self._temperature = positive_number("temperature", value)

    # evidence --------------------------------------------------------------------------------------------------------

    @property
    def log_likelihood(self) -> Tensor:
        """``log p(D | theta)`` summed over the data, 0-dim float64."""
        return log_likelihood(self, self.sigma_noise)

    @property
    def scatter(self) -> Tensor:
        """``sum_l delta_l ||theta_l - prior mean||^2``, theta at the fit, 0-dim float64."""
        self.fitted_model.require_fit()
        return (self.prior_precision * norms_at(self, self.prior_precision)).sum()

    @property
    def loss(self) -> Tensor:
        """``-log p(D | theta)`` at sigma = 1 and T = 1 without a Gaussian's normaliser, summed over the data, 0-dim float64."""
        noise = self.likelihood_function.has_noise
        return (-self.statistic if noise else -self.log_likelihood * self.temperature).detach()

    @property
    def log_det_prior_precision(self) -> Tensor:
        """``sum_l P_l log delta_l``, 0-dim float64."""
        logs = self.prior_precision.log()
        return (elements(self, logs) * logs).sum()

    @property
    def log_det_ratio(self) -> Tensor:
        """``log_det_posterior_precision - log_det_prior_precision``, computed without that difference."""
        self.fitted_model.require_fit()
        return self._penalty(self.prior_precision.log(), log_scale(self), torch.zeros_like(self.prior_precision))

    @property
    def log_det_posterior_precision(self) -> Tensor:
        """``sum_l log|H_l + delta_l I|``, 0-dim float64."""
        return self.log_det_ratio + self.log_det_prior_precision

    def log_marginal_likelihood(
        self, prior_precision: Value | None = None, sigma_noise: Value | None = None, at: str = "network"
    ) -> Tensor:
        r"""The Laplace evidence ``log q(D | delta)`` of all data, 0-dim float64, differentiable twice in both
        arguments, and in the buffers that required a gradient at the fit.

        Divide by ``-n_data`` for the paper's ``-log q/N``. As laplace-torch's, it sets ``prior_precision`` and ``sigma_noise`` to the values
        of its arguments, without their graph, once the evidence is known, and leaves a Gaussian's normaliser undivided by the
        temperature; :meth:`optimize_prior_precision` divides the normaliser too where it tunes the noise, or the temperature would only
        rescale that.

        With ``at="linear"`` it is that of the linearised network at its mode :math:`\theta_\star`, which is held:
        :math:`\log p(D | h(\theta_\star)) - \frac12 (\|\theta_\star\|^2_\Lambda + \log|H \Lambda^{-1} + I|)`. Where :math:`\theta_\star` is
        the mode at these precisions, this is the linear model's exact evidence, of a regression and the full matrix H.

        Args:
            prior_precision: as the attribute, which it becomes; None is ``self.prior_precision``.
            sigma_noise: likewise.
            at: "network", the parameters of the fit, or "linear", what :meth:`fit_linear_mode` found.

        Raises:
            ValueError: a value is not positive and finite, or of a wrong shape.
            RuntimeError: not fitted, or fitted before a buffer required a gradient or a basis changed; ``at="linear"`` before
                :meth:`fit_linear_mode`, or with buffers to differentiate in.
            FloatingPointError, ArithmeticError: a factor is not finite, or has an eigenvalue negative beyond rounding.

        Source: Immer et al., ICML 2021, eq. 5; van der Ouderaa et al., NeurIPS 2023, eq. 7; Antoran et al., "Adapting the linearised
        Laplace model evidence for modern deep learning", ICML 2022, section 4 (at="linear").
        """
        precision, sigma = resolved(self, prior_precision, sigma_noise)
        found = evidence_at(self, precision.log(), None if sigma_noise is None else sigma.log(), at)
        if prior_precision is not None:
            self.prior_precision = precision.detach()
        if sigma_noise is not None:
            self._sigma_noise = sigma.detach().clone()
        return found

    @property
    def unit_precisions(self) -> dict[str, Tensor]:
        """Parameter name -> the prior's precision of each output unit, ``(units,)``, float64, in ``parameter_names`` order, by whatever
        structure it was learned. Units are rows of a linear layer's weight, output channels of a convolution's and of an F-FC layer's,
        columns of an embedding's; a bias is one unit, and so is what has no output side. ValueError where the approximation has none."""
        counts = self._unit_counts
        return dict(zip(self.parameter_names, finer(self, self.prior_precision.detach()).split(counts), strict=True))

    def effective_parameters(self, per_unit: bool = False) -> dict[str, Any]:
        r"""Parameter name -> :math:`\gamma`, how many of its elements the data determine: with eigenvalues :math:`\lambda_i` of the curvature
        :math:`\sum_i \lambda_i/(\lambda_i + \delta)`, between 0 and the tensor's size. With ``per_unit`` those of each output unit,
        ``(units,)``, float64, whose sum that is; ValueError where the approximation has no units.

        Source: MacKay, "Bayesian interpolation", 1992; van der Ouderaa et al., NeurIPS 2023, section 5.
        """
        if per_unit:
            counts, precision = self._unit_counts, finer(self, self.prior_precision.detach())
            self.fitted_model.require_fit()
            found = self._terms(precision.log(), log_scale(self).detach(), self._norms_of_finer()).effective.split(
                counts
            )
            return dict(zip(self.parameter_names, found, strict=True))
        return dict(zip(self.parameter_names, present_terms(self).effective.tolist(), strict=True))

    def layer_types(self) -> dict[str, str]:
        """Name of every :class:`ella_cuda.nn.RelaxedEquivariance` -> the path with the largest share, its type.

        The first of equals; "none" where all paths together have fewer than one effective parameter: of such a layer the data determine
        nothing that its type could name, however the rest is shared.
        """
        types, gammas = {}, self.effective_parameters().items()
        for layer, module in self.model.named_modules():
            if isinstance(module, RelaxedEquivariance):
                starts = {path: f"{layer}.{path}.".removeprefix(".") for path in module.path_names}
                sums = {path: math.fsum(g for n, g in gammas if n.startswith(start)) for path, start in starts.items()}
                types[layer] = layer_type(sums) or "none"
        return types

    @property
    def posterior_precision(self) -> Posterior:
        """P = curvature + prior precision, at the present hyperparameters."""
        return self._posterior_at(self.prior_precision)

    @property
    def posterior_covariance(self) -> Tensor:
        """The covariance of the elements that have a posterior, ``(S, S)``. For small networks."""
        return self.posterior_precision.to_matrix(-1)

    @property
    def posterior_variance(self) -> Tensor:
        """The variance of each parameter, ``(P,)``; zero of elements without a posterior."""
        return self.posterior_precision.diag(-1)

    @property
    def _predictive_posterior(self) -> Posterior:
        """That of predictions: with ``predictive_prior_precision`` where it is not None."""
        chosen = self.predictive_prior_precision
        return self._posterior_at(self.prior_precision if chosen is None else chosen)

    def _posterior_at(self, precision: Tensor) -> Posterior:
        self.fitted_model.require_fit()
        self.fitted_model.bases.check()
        return self._posterior(precision.detach(), data_weight(self))

    # the linearised network's mode -----------------------------------------------------------------------------------

    @property
    def linear_mode(self) -> Tensor | None:
        """The mode of the linearised network's posterior, ``(P,)`` in ``parameter_names`` order, of the parameters' dtype; None before
        :meth:`fit_linear_mode` and after another fit."""
        return None if self.linear_fit is None else self.linear_fit.theta.to(self.fitted_model.dtype)

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

        with h of :class:`ella_cuda.laplace.TangentModel`. Weights that were stopped early, or that normalisation layers follow, are no mode,
        and the evidence at them chooses precisions that are too small. The network goes on being linearised at its own parameters, and
        predictions have the mean of its outputs unless asked for another. The loss is convex: Newton's method, by conjugate gradients that
        the posterior's covariance preconditions, takes one pass over the data for each product with the curvature.

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
        self.fitted_model.require_unchanged()
        require_likelihood_of_fit(self)
        if augment_of(self.model) is not None and self.fitted_model.draws is None:
            raise ValueError(
                "fit_linear_mode: the augmentation draws anew in every pass over the data (sampling='independent'), so that there is no one "
                "function whose mode to find; fit in the context augment.held(), or with another sampling."
            )
        tol = self._near(tol)
        how = {"precondition": precondition, "max_passes": max_passes, "checkpoint": checkpoint}
        self._find_linear_mode(loader, tol, solver, form, hessian_at, start, progress_bar=progress_bar, **how)
        if self.linear_fit.why:
            warnings.warn(
                f"fit_linear_mode: the residual is {self.linear_fit.residual:.2g} after {self.linear_fit.passes} passes over the data, above "
                f"tol={tol:g}; {self.linear_fit.why}.",
                stacklevel=3,
            )
        return self.linear_mode

    def _require_additive(self) -> None:
        """ValueError where the curvature of further data cannot be added without past data."""

    def _near(self, tol: float | None) -> float:
        return NEAR[self.fitted_model.dtype] if tol is None else tol

    def _find_linear_mode(
        self,
        loader: Iterable[Any],
        tol: float,
        solver: str,
        form: str,
        hessian_at: str,
        start: Tensor | None = None,
        **how: Any,
    ) -> None:
        if start is not None:
            start = self._checked_vector(start, "start")
            if start.dim() != 1:
                raise ValueError(
                    f"start: expected one vector of all parameters, ({self.n_params},), got {tuple(start.shape)}."
                )
        elif self.linear_fit is not None and self.linear_fit.form == form:
            start = self.linear_fit.theta
        found = solve(self, loader, tol, solver, form, start, **how)
        if hessian_at == "linear":
            tangent = TangentModel(self.model, form, self.parameter_names)
            self._refit(
                loader.loader if isinstance(loader, Features) else loader, lambda x: tangent(found.theta, x).detach()
            )
        self.linear_fit = found

    @running_the_model
    def update(self, x: Any, y: Tensor, tol: float | None = None) -> BaseLaplace:
        r"""Add data points to a fitted posterior of a linear last layer. The network runs on these alone, and past data are not needed.

        What depends on the data has these too, as after ``fit([(x, y)], override=False)``: curvature, ``n_data``, ``log_likelihood`` and the
        evidence. The network's parameters stay. Where :meth:`fit_linear_mode` found a mode :math:`\theta_\star`, it moves to

        .. math::
            \arg\min_\theta\, -\tfrac1T \log p(y | h(\theta, x)) + \tfrac12 (\theta - \theta_\star)^T P (\theta - \theta_\star)

        with P the posterior's precision before, and these data's Hessian is taken there: one posterior is the next prior, as in online
        Laplace approximations. A regression's mode is that of all data together, exactly so with :class:`ella_cuda.laplace.FullLaplace`, and
        with Kronecker factors, to which what is between weight and bias is added here. The log likelihood of past data at the new mode,
        a part of the evidence ``at="linear"``, is taken to be quadratic around the old one, which a regression's is.

        Args:
            x: the model's inputs, ``(N, ...)``, as in a batch of :meth:`fit`. y: their targets.
            tol: of the moved mode's residual, as of :meth:`fit_linear_mode`.

        Returns:
            self.

        Raises:
            ValueError: the posterior is not of a linear last layer alone, whose inputs do not depend on it; x or y do not fit;
                ``eigenvalue_correction=True``, whose basis needs past data.
            RuntimeError: not fitted, the model changed since, or the linear mode was found at other precisions, noise or temperature.
            FloatingPointError: a log likelihood is not finite. Nothing is changed then.

        Warns:
            UserWarning: the moved mode's residual stays above ``tol``.

        Source: Spiegelhalter and Lauritzen, "Sequential updating of conditional probabilities on directed graphical structures", 1990;
        Ritter, Botev and Barber, "Online structured Laplace approximations for overcoming catastrophic forgetting", NeurIPS 2018, eq. 7.
        """
        self.fitted_model.require_unchanged()
        self._require_additive()
        layer = LastLayer.of(self.model, self._rules)
        inputs, targets = self.fitted_model.batch((x, y), "update")
        with self.fitted_model.filling():
            found = layer.features(inputs) if layer is not None and data_points(inputs) else None
        if found is None or found[0].dim() > 2:
            raise ValueError(
                f"update: expected data points, and a posterior of a linear last layer alone, got {data_points(inputs)} points and "
                f"{', '.join(self.parameter_names[:5])}: the inputs of other layers change with the posterior. Use "
                f"{type(self).__name__}(model, subset_of_weights='last_layer') of a network whose output is that of a torch.nn.Linear; "
                "fit(loader, override=False) adds data at the parameters of a fit."
            )
        features, outputs = found
        self.likelihood_function.check(outputs, targets)
        if not self.likelihood_function.statistic(outputs, targets).isfinite():
            raise FloatingPointError(
                "update: the log likelihood of the data is not finite. Check x and y, or use model.double()."
            )
        moved, how = None, {}
        if self.linear_fit is not None:
            tol, at = self._near(tol), layer.tangent(self.linear_fit.form)
            moved = move(self, Features(layer, [], [(features, targets)]), tol)
            how = {"hessian_at": lambda some: at(moved.theta, layer.features(some)[0])}
            if moved.why:
                warnings.warn(
                    f"update: the residual is {moved.residual:.2g}, above {tol:g}; {moved.why}.", stacklevel=3
                )
        self._fit([(x, y)], override=False, **how)
        self.linear_fit, self._loaders = moved, []  # past data are not held
        return self

    # tuning ----------------------------------------------------------------------------------------------------------

    def optimize_prior_precision(
        self,
        pred_type: str = "glm",
        method: str = "marglik",
        n_steps: int = 100,
        lr: float = 0.1,
        init_prior_prec: Value | None = None,
        prior_structure: str | None = None,
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
        temperatures: Sequence[float] | None = None,
    ) -> Tensor:
        """Choose the prior precisions, and a regression's noise, for the curvature as it was fitted; predictions are by them, too.

        Args:
            pred_type, link_approx, n_samples: of the predictions of "gridsearch", see a call.
            method: "marglik" raises the evidence by Adam on the logarithms; "mackay" repeats the evidence's fixed points in closed form,
                until they rest; "gridsearch" takes the precision with the best predictions of ``val_loader``; "loo" that with the largest
                leave-one-out density of the training data, :meth:`leave_one_out`, among those under which no data point has a leverage of 1
                or more, so that it needs no validation data.
            n_steps: how many steps, at most.
            lr: of Adam, in units of the logarithm.
            init_prior_prec: where "marglik" and "mackay" start; None is ``self.prior_precision``. The evidence at the linear mode can have
                several maxima where groups have their own precisions; the network's choice is a good start. For "loo" the precisions that
                the network was trained with, at which its outputs' means lose a data point; None is those of the grid, which with the
                network's outputs held choose a narrow posterior nearly always.
            prior_structure: which tensors share a precision, see :func:`ella_cuda.marglik_training`: "layerwise" (none), "module",
                "normalised" or "scalar" (all); "gridsearch" takes "scalar" alone. "loo" takes "scalar", or "layerwise": one factor of all the
                present precisions. "diag" is a precision for each element, of full and diagonal approximations, by "marglik" at the network;
                "unit" one for each output unit of a weight and for each other tensor, of Kronecker ones, at the network.
                None is "scalar" for "gridsearch" and "layerwise" for others.
            val_loader: yields ``(x, y)``, as for :meth:`fit`.
            loss: ``(predictions, targets) -> number``, of all data of the loader: probabilities, or of likelihoods without classes mean and
                variance of the outputs, both ``(N, K)``; None is the mean negative log density of the targets, noise included.
            log_prior_prec_min, log_prior_prec_max, grid_size: of the grid of precisions, or of "loo"'s factors: powers of ten.
            progress_bar: show one.
            tune_sigma: whether "marglik" and "mackay" choose ``sigma_noise`` too, of a likelihood that has one.
            at: "network", where the evidence is that at the network's parameters; or "linear": :meth:`fit_linear_mode` and MacKay's fixed
                points at what it finds take turns until both stand still, whichever of "marglik" and "mackay" is given, since the evidence at
                the mode has its maximum there. ``n_steps`` are rounds of both.
            train_loader: of the fit's data, for "loo" and ``at="linear"``; None is what :meth:`fit` got.
            tol: with ``at="linear"``, the largest change of a precision's logarithm in a round that is none.
            form, hessian_at, solver: of :meth:`fit_linear_mode`.
            temperatures: for "loo", each tried with each precision, in the same pass; the best one is ``self.temperature`` from then on.
                None keeps it.

        Returns:
            ``self.prior_precision``: one value per parameter tensor, element or unit.

        Raises:
            TypeError, ValueError: an argument does not fit, the loader is empty, no loss of a grid is finite, or under every precision of
                "loo" a data point has a leverage of 1 or more; nothing is changed then.
            RuntimeError: as :meth:`log_marginal_likelihood`.

        Source: Immer et al., ICML 2021, section 3 (marglik); MacKay, "Bayesian interpolation", 1992 (mackay).
        """
        check_choice("pred_type", pred_type, PREDICTIONS)
        if prior_structure is None:
            prior_structure = "scalar" if method == "gridsearch" else "layerwise"
        each = prior_structure == "diag" and method == "marglik" and at == "network" and self._elementwise_priors
        structure = "layerwise" if each else prior_structure
        grid = check_arguments(
            method, structure, link_approx, val_loader, log_prior_prec_min, log_prior_prec_max, grid_size
        )
        n_steps, lr, tol = as_count("n_steps", n_steps), positive_number("lr", lr), positive_number("tol", tol)
        check_choice("at", at, MODES)
        check_choice("hessian_at", hessian_at, HESSIANS)
        self.fitted_model.require_fit()
        self.fitted_model.bases.check()
        if method != "gridsearch":
            require_likelihood_of_fit(self)
        if each and len(self.counts) == sum(self.counts) and max(self.counts) > 1:
            raise ValueError(
                f"prior_structure='diag': the subnetwork has as many elements as the model has parameter tensors ({len(self.counts)}), and "
                "so many precisions are those of tensors; choose another element more, or use 'layerwise'."
            )
        if at == "linear" and method in ("gridsearch", "loo"):
            raise ValueError(f"optimize_prior_precision: method={method!r} has no at='linear'; use 'marglik'.")
        if pred_type == "nn" and method == "loo":
            raise ValueError(
                "optimize_prior_precision: method='loo' is of the linearised network, pred_type='glm'; got 'nn'."
            )
        if temperatures is not None:
            if method != "loo":
                raise ValueError(f"optimize_prior_precision: temperatures are for method='loo', got {method!r}.")
            temperatures = [positive_number("optimize_prior_precision: temperatures", t) for t in temperatures]
            if not temperatures:
                raise ValueError("optimize_prior_precision: temperatures is empty; pass one or more, or None.")
        loader = (
            self._training_loader(train_loader, "optimize_prior_precision: train_loader")
            if at == "linear" or method == "loo"
            else None
        )
        before = self.prior_precision, self.sigma_noise, self.linear_fit, self.predictive_prior_precision
        sigma = tune_sigma and self.likelihood_function.has_noise
        if structure == "unit" and at == "linear":
            raise ValueError("optimize_prior_precision: prior_structure='unit' has no at='linear'; use at='network'.")
        groups = groups_of(self, "diag" if each else structure)
        try:
            if method == "gridsearch":
                how = {"pred_type": pred_type, "link_approx": link_approx, "n_samples": n_samples}
                predict = functools.partial(predictions_at, self, grid, **how)
                self.prior_precision = grid_search(self, grid, predict, val_loader, loss, progress_bar)
                return self.prior_precision
            if init_prior_prec is not None:
                self._prior_precision = precisions_of(self, init_prior_prec, "init_prior_prec").clone()
            if each or structure == "unit":
                self._prior_precision = finer(self, self.prior_precision)
            elif method != "loo":
                self._prior_precision = of_tensors(self, self.prior_precision)
            if method == "loo":
                now = self.prior_precision.detach()
                start = None if init_prior_prec is None else Tempered(now, self.temperature)
                now = torch.ones_like(now) if prior_structure == "scalar" else now
                how = Prediction(link_approx, n_samples)
                tried = [Tempered(now * factor, t) for t in temperatures or [self.temperature] for factor in grid]
                self.prior_precision, self.temperature = best_of(self, tried, start, loader, how, progress_bar)
            elif at == "linear":
                loader = running_the_model(features_of_fit)(self, loader, 4)

                def find(inner: float) -> None:
                    self._find_linear_mode(loader, inner, solver, form, hessian_at)

                # With the Hessian at moving outputs the evidence need not rise, which is what an accelerated round is judged by.
                accelerated = hessian_at == "network"
                alternated = running_the_model(alternate)
                if not alternated(self, find, n_steps, groups, sigma, tol, accelerated, progress_bar):
                    warn_of_motion(n_steps)
                if self.linear_fit.why:
                    warnings.warn(
                        f"optimize_prior_precision: the residual of the last linear mode is {self.linear_fit.residual:.2g}, above what "
                        f"tol={tol:g} asks for; {self.linear_fit.why}. Precisions may be off by more than tol.",
                        stacklevel=2,
                    )
            elif method == "marglik":
                raise_evidence(self, n_steps, lr, groups, sigma, progress_bar)
            elif not fixed_points(self, n_steps, groups, sigma, progress_bar)[2]:
                warn_of_motion(n_steps, ", or method='marglik'")
        except BaseException:
            self._prior_precision, self._sigma_noise, self.linear_fit, self._predictive_prior_precision = before
            raise
        return self.prior_precision

    def _training_loader(self, given: Iterable[Any] | None, name: str) -> Iterable[Any]:
        """The loader that was given, or what the fit got; ``name`` is the argument's."""
        self.fitted_model.require_unchanged()
        if given is not None:
            require_loader(given, name)
            return given
        if not self._loaders:
            raise ValueError(
                f"{name} is None, and this approximation does not have the training data to pass over: pass {name.split()[-1]}."
            )
        return self._loaders[0] if len(self._loaders) == 1 else _Joined(self._loaders)

    # leaving out -----------------------------------------------------------------------------------------------------

    def leave_one_out(
        self,
        loader: Iterable[Any] | None = None,
        link_approx: str = "probit",
        n_samples: int = 100,
        generator: torch.Generator | None = None,
        *,
        mean: str = "network",
        progress_bar: bool = False,
    ) -> LeaveOneOut:
        r"""Predict each of the fit's data points from all others, in one pass and without a refit.

        With outputs :math:`f_i` of covariance :math:`S_i`, and gradient :math:`g_i` and Hessian :math:`\Lambda_i` of
        :math:`-\log p(y_i | f_i) / T` in them, the outputs without the data point have the covariance
        :math:`S_{-i} = (I - S_i \Lambda_i)^{-1} S_i` and the mean :math:`f_i + S_{-i} g_i`. Exact for a Gaussian linear model with its
        exact curvature at its mode, as a linear network or its linear mode is; elsewhere features have seen the data point, so that densities
        are too large. No Jacobian is kept; memory is by ``memory_budget``, which a data point's covariances must fit in.

        Args:
            loader: of the fit's data or a part of them, as for :meth:`fit`; None is what that got. Of a data point that it got twice one copy
                is left out.
            link_approx, n_samples, generator, mean: as of a call; "mc" draws each data point's outputs by themselves.
            progress_bar: show one.

        Returns:
            Log densities, leverages and influences. A regression's density is that of all outputs of a data point together, noise included;
            other likelihoods without classes take outputs as independent. A data point's positions, where outputs are ``(N, T, K)``, are
            left out together, and their log densities summed; positions with the label ``ignore_index`` have none.

        Raises:
            RuntimeError: as a call.
            ValueError: an argument is none of its choices; the loader gave no data or more than the fit's; targets do not fit.
            MemoryError: a data point has too many outputs for ``memory_budget``.
            FloatingPointError: an output or a variance is not finite.

        Warns:
            UserWarning: the loader has as many data as the fit with another log likelihood, as random augmentation gives.

        Source: Beirami et al., "On optimal generalizability in parametric learning", NeurIPS 2017; Nickl et al., "The memory-perturbation
        equation", NeurIPS 2023, section 3.
        """
        check_choice("link_approx", link_approx, LINKS)
        check_choice("mean", mean, MEANS)
        how = Prediction(link_approx, as_count("n_samples", n_samples), generator, mean)
        return leave_one_out(self, self._training_loader(loader, "leave_one_out: loader"), how, progress_bar)

    def influence(
        self, loader: Iterable[Any] | None = None, link_approx: str = "probit", *, progress_bar: bool = False
    ) -> Influence:
        """Rank the fit's data points by how much all others contradict their targets: those with likely wrong labels come first.

        The score is minus the log density of :meth:`leave_one_out`, whose arguments these are, under a posterior in which each data point has
        one: of the present precisions times 1, 10, ..., a million, the first under which all leverages are below 1. One
        pass; the approximation stays as it is.

        Raises:
            ValueError: there is no such factor; and as :meth:`leave_one_out`, as other errors are.

        Warns:
            UserWarning: the loader shuffles, so that the numbers in ``order`` are nobody's; and as :meth:`leave_one_out`.
        """
        check_choice("link_approx", link_approx, LINKS)
        return influence(
            self, self._training_loader(loader, "influence: loader"), Prediction(link_approx), progress_bar
        )

    def calibrate(
        self,
        loader: Iterable[Any] | None = None,
        tolerance: float = 0.01,
        progress_bar: bool = False,
        *,
        folds: Sequence[tuple[BaseLaplace, Iterable[Any]]] | None = None,
    ) -> Tensor:
        r"""Choose ``predictive_prior_precision``: the widest posterior that predicts the training data, each point left out, about as well as
        the network alone.

        Of ``prior_precision`` times :math:`10^{k/4}`, k = 0, ..., 28, this is the smallest under which all leverages are below 1 and the NLL
        of :meth:`leave_one_out` is at most ``tolerance`` above that of the network's own outputs on the same data: of its softmax, or of a
        regression's noise around them. The precisions that the evidence learned are often too small for predictions, since Kronecker factors
        put too much variance at the training data; they stay ``prior_precision``. A regression is left with next to no variance away from
        its data, too, unless data points are many more than effective parameters. One pass through the network for the whole grid.

        A network that has learned its data by heart is as sure of them without one of them, so that leaving one out in closed form does not
        tell that the network is too sure. Networks trained on parts of the data do: with ``folds`` the factor is that with the largest log
        density of the data which these have not seen, under ``prior_precision`` times it, k from -8 on; the largest factor
        leaves the network's own outputs. One network of two thirds of the data is enough.

        Args:
            loader: of the fit's data, as for :meth:`leave_one_out`; None is what the fit got. The first
                :data:`~ella_cuda.laplace.leave_one_out.CALIBRATION_POINTS` (500) data points are used; of large networks fewer, but 50 at
                least.
            tolerance: nats per data point, positive.
            progress_bar: show one.
            folds: approximations of the same kind of network, each fitted to a part of the data that the network was trained on, with a
                loader of the other part, of which the first 10,000 are used, of large networks fewer. ``loader`` and ``tolerance`` are
                used where the folds are not asked.

        Returns:
            ``predictive_prior_precision``: one value per parameter tensor. Call again after another ``sigma_noise`` or ``temperature``.

        Raises:
            As :meth:`leave_one_out`; nothing is changed then. ValueError: a fold is of other parameters, or another likelihood.

        Warns:
            UserWarning: under no factor is the NLL within the tolerance, and the largest is taken; or folds take the smallest. The network
                knows its labels by heart, at a mean NLL below :data:`~ella_cuda.laplace.leave_one_out.BY_HEART` (0.1). Folds know theirs at
                more than twice that, and twice this network's NLL, and data points are left out instead.
        """
        if folds is None:
            tolerance = positive_number("tolerance", tolerance)
            loader = self._training_loader(loader, "calibrate: loader")
            self.predictive_prior_precision = calibrate(self, loader, tolerance, progress_bar)
            return self.predictive_prior_precision
        if loader is not None:
            require_loader(loader, "calibrate: loader")
        if not folds:
            raise ValueError("calibrate: folds must be pairs of an approximation and a loader, got none.")
        for number, (other, held_out) in enumerate(folds):
            require_loader(held_out, f"calibrate: the loader of folds[{number}]")
            for name in ("parameter_names", "likelihood_function", "n_outputs"):
                ours, theirs = (repr(getattr(la, name, None)) for la in (self, other))
                if ours != theirs:
                    raise ValueError(
                        f"calibrate: folds[{number}] must have {name} of {ours}, got {theirs}; fit it to a network of the same kind."
                    )
        if not have_learned_alike(self, [other for other, _ in folds]):
            warnings.warn(
                "calibrate: the folds' networks have learned their own data far less than this one has, and would ask for too much variance, "
                "so that data points are left out instead; train them longer, or on larger parts of the data.",
                stacklevel=2,
            )
            return self.calibrate(loader, tolerance, progress_bar)
        self.predictive_prior_precision = calibrate_by_folds(self, folds, progress_bar)
        return self.predictive_prior_precision

    def uncertainty(
        self, x: Any, n_samples: int = 1000, generator: torch.Generator | None = None, *, mean: str = "network"
    ) -> Uncertainty:
        """Split the uncertainty of predictions into that of the data and that of the parameters.

        The entropy of the predictive is the expected entropy of the target given the parameters, plus the mutual information of both. Of
        classes the entropies are averages over samples of each data point's Gaussian outputs; a regression's are closed forms, differential
        entropies of all outputs together, noise included. Of several positions, or several binary outputs, entropies are summed.

        Args:
            x, mean: as of a call.
            n_samples, generator: of the outputs of classes; the mutual information is too small by about a share of ``1 / n_samples``.

        Returns:
            ``total``, ``aleatoric`` and ``epistemic``, ``(N,)`` each, nats.

        Raises:
            NotImplementedError: the likelihood has neither classes nor a closed form: poisson, heteroscedastic.
            MemoryError, RuntimeError, ValueError, FloatingPointError: as :meth:`leave_one_out`.

        Source: Houlsby et al., "Bayesian active learning for classification and preference learning", 2011, equation 2; Depeweg et al.,
        "Decomposition of uncertainty in Bayesian deep learning", ICML 2018, section 3.
        """
        check_choice("mean", mean, MEANS)
        return uncertainty(self, x, as_count("n_samples", n_samples), generator, mean)

    # saving ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything a fit produced, and the hyperparameters: tensors, numbers and strings, loadable with ``weights_only=True``; and a
        checksum of them, which takes a core a second for some 0.6 GB."""
        return with_checksum(self._state())

    def _state(self) -> dict[str, Any]:
        linear, draws, fingerprint = self.linear_fit, self.fitted_model.draws, self.fitted_model.fingerprint
        predictive = self.predictive_prior_precision
        return {
            **{key: getattr(self, key) for key in self._settings},
            "likelihood": repr(self.fitted_likelihood or self.likelihood_function),
            "parameter_names": list(self.parameter_names),
            "prior_precision": self.prior_precision.detach().clone(),
            "predictive_prior_precision": None if predictive is None else predictive.clone(),
            "sigma_noise": self.sigma_noise.detach().clone(),
            "prior_mean": self.prior_mean.clone(),
            "temperature": self.temperature,
            "n_data": self.n_data,
            "n_outputs": self.n_outputs,
            "n_targets": self.n_targets,
            "statistic": self.statistic.clone(),
            "square_norms": self.square_norms.clone(),
            "fingerprint": (self.fitted_model.zero if fingerprint is None else fingerprint).clone(),
            "filled_buffers": sorted(self.fitted_model.filled),
            "linear_mode": None if linear is None else linear.on(self._device)._asdict(),
            "draws": None if draws is None else draws.clone(),
            **self._curvature_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave, for the same model and settings; the model's parameters are not part of
        it.

        Raises:
            TypeError: state is no mapping.
            ValueError: an entry is missing, unknown or does not fit this object, or its values are out of range; nothing is changed then.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"load_state_dict: expected a mapping as state_dict gives it, got {type(state).__name__}.")
        own = self._state()
        if missing := sorted(own.keys() - state.keys()):
            raise ValueError(
                f"load_state_dict: entries missing from the state of a {type(self).__name__}: {', '.join(missing)}; pass one of that class."
            )
        if unknown := sorted(map(repr, state.keys() - own.keys() - {CHECKSUM})):
            raise ValueError(f"load_state_dict: unknown entries in the state: {', '.join(unknown)}.")
        what = "the state was changed since state_dict gave it, or is damaged; load it as it was saved"
        require_checksum(state, "load_state_dict", what)
        for key in ("likelihood", *self._settings, "parameter_names"):
            if type(state[key]) is not type(own[key]) or state[key] != own[key]:
                raise ValueError(f"load_state_dict: {key} is {state[key]!r} in the state, but {own[key]!r} here.")
        precision, sigma = precisions_of(self, state["prior_precision"]), sigma_of(self, state["sigma_noise"])
        mean, linear = self._mean_of_prior(state["prior_mean"]), state["linear_mode"]
        draws, predictive = checked_draws(self.model, state["draws"]), state["predictive_prior_precision"]
        if predictive is not None:
            predictive = precisions_of(self, predictive, "predictive_prior_precision").clone()
        take_curvature = self._read(state, state["n_data"])
        self._forget()
        self._prior_precision, self._sigma_noise, self._prior_mean = precision.clone(), sigma.clone(), mean
        self._temperature, self._predictive_prior_precision = state["temperature"], predictive
        self.linear_fit = None if linear is None else LinearMode(**linear).on(self._device)
        self.n_data, self.n_outputs, self.n_targets = (state[key] for key in ("n_data", "n_outputs", "n_targets"))
        self.fitted_likelihood = self.likelihood_function if self.n_data else None
        self.statistic, self.square_norms = (
            state[key].to(self._device, copy=True) for key in ("statistic", "square_norms")
        )
        self.fitted_model.restore(state["fingerprint"] if self.n_data else None, state["filled_buffers"], draws)
        take_curvature()


class _Joined:
    """Several loaders, one after the other."""

    def __init__(self, loaders: Sequence[Iterable[Any]]) -> None:
        self._loaders, self.shuffle = loaders, any(map(shuffles, loaders))

    def __iter__(self) -> Any:
        return itertools.chain.from_iterable(self._loaders)


def _require_last(model: nn.Module, rule: Rule, x: Inputs) -> None:
    """ValueError where the model's output is not the output of the rule's layer, or rows of it, as those of a sequence's last token."""
    seen: list[Any] = []
    x, copies = tried_copies(model, x)
    with hooks([rule.module], after=lambda module, args, out: seen.append(out)), torch.no_grad(), at_test_time(model):
        outputs = run_model(model, x)
    if copies > 1:
        seen = [out.unflatten(0, (-1, copies)).mean(1) for out in seen[-1:]]
    found = seen[-1] if seen else None
    known = isinstance(found, Tensor) and isinstance(outputs, Tensor) and found.shape[-1:] == outputs.shape[-1:]
    rows = (outputs.flatten(0, -2)[:, None] == found.flatten(0, -2)).all(2) if known else None
    if rows is None or not rows.any(1).all():
        raise ValueError(
            f"subset_of_weights='last_layer': the model's output is not that of {rule.label}, the last module of model.named_modules() with "
            "trainable parameters. Name the last layer: subset_of_weights=['its name']."
        )
