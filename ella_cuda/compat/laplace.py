"""The plug for laplace-torch 0.3: our curvature under its names.

:class:`EllaGGN` is a curvature backend: ``laplace.KronLaplace(model, "classification", backend=EllaGGN)``. :class:`EllaKronLaplace` is a
``laplace.KronLaplace`` that holds our block structure: importing this module makes it ``laplace.Laplace(model, likelihood, "all",
"ella_kron")``.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import re
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from ella_cuda.laplace import KroneckerFactor, KronLaplace, SecondMoment
from ella_cuda.laplace.posterior import KronPosterior, eigenbases_of
from ella_cuda.laplace.predictive import moments
from ella_cuda.modes import evaluation_mode


def _require_laplace_torch() -> None:
    """ImportError where laplace-torch is not installed, or older than 0.3."""
    remedy = "ella_cuda.compat.laplace needs laplace-torch 0.3 or later: pip install 'ella_cuda[laplace]'"
    try:
        version = metadata.version("laplace-torch")
    except metadata.PackageNotFoundError as error:
        raise ImportError(f"{remedy}. It is not installed.") from error
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < (0, 3):
        raise ImportError(f"{remedy}. Version {version} is installed.")


_require_laplace_torch()

import laplace  # noqa: E402  another version would fail here without a word of the extra
from laplace.curvature import GGNInterface  # noqa: E402
from laplace.utils import Kron  # noqa: E402

INSTEAD = 'hessian_structure="ella_kron" (laplace.Laplace(model, likelihood, "all", "ella_kron"))'


class EllaGGN(GGNInterface):
    """The generalised Gauss-Newton curvature of :class:`ella_cuda.laplace.KronLaplace` as a backend of laplace-torch.

    :meth:`kron` has the factors of ``laplace.curvature.CurvlinopsGGN`` for weights, and other blocks for biases and circular padding, see
    ``docs/laplace-torch.md``. ``full``, ``diag`` and the Jacobians are those of ``GGNInterface``, from ``torch.func``.

    Args:
        model, likelihood, last_layer, subnetwork_indices, dict_key_x, dict_key_y: as laplace-torch gives them.
        stochastic: sampled columns of the output Hessian in the place of all.
        num_samples: how many of a data point with ``stochastic``.
        settings: arguments of :class:`ella_cuda.laplace.KronLaplace`: ``approximation``, ``resolution``, ``column_tolerance``,
            ``memory_budget``, ``unknown`` ("error" or "diagonal"), ``ignore_index``. ``backend_kwargs`` of laplace-torch has them.

    Raises:
        TypeError: another setting is given.
        ValueError: ``unknown="freeze"``, which would leave parameters out that laplace-torch counts.
    """

    SETTINGS = frozenset(
        {"approximation", "resolution", "column_tolerance", "memory_budget", "unknown", "ignore_index"}
    )

    def __init__(
        self,
        model: nn.Module,
        likelihood: str,
        last_layer: bool = False,
        subnetwork_indices: Tensor | None = None,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        stochastic: bool = False,
        num_samples: int = 1,
        **settings: Any,
    ) -> None:
        if unknown := sorted(settings.keys() - self.SETTINGS):
            raise TypeError(
                f"EllaGGN: backend_kwargs has {', '.join(map(repr, unknown))}; it may have stochastic, num_samples, "
                f"{', '.join(sorted(self.SETTINGS))}."
            )
        if settings.get("unknown") == "freeze":
            raise ValueError(
                "EllaGGN: unknown must be 'error' or 'diagonal', got 'freeze': laplace-torch counts every parameter that requires a "
                "gradient; freeze these with requires_grad_(False)."
            )
        super().__init__(
            model, likelihood, last_layer, subnetwork_indices, dict_key_x, dict_key_y, stochastic, num_samples
        )
        self.settings = settings

    def kron_laplace(self, mapping: type[Mapping] | None = None, **settings: Any) -> KronLaplace:
        """Our approximation of the model, or of its last layer, with this backend's settings.

        Args:
            mapping: the type of batches that are mappings, which the model takes whole; None for others.
            settings: in the place of the backend's.
        """
        model = self._model
        if mapping is not None and not self.last_layer:
            model = _TakesMapping(model, mapping, self.dict_key_x)
        drawn = {"fisher": "mc", "mc_samples": self.num_samples} if self.stochastic else {}
        return KronLaplace(
            model,
            str(getattr(self.likelihood, "value", self.likelihood)),
            dict_key_x=self.dict_key_x,
            dict_key_y=self.dict_key_y,
            **drawn | self.settings | settings,
        )

    def kron(self, x: Any, y: Tensor, N: int, **kwargs: Any) -> tuple[Tensor, Kron]:
        """The loss and the Kronecker factors of a batch, in laplace-torch's conventions: ``[B, A]`` of a weight, B summed over the batch and
        A divided by N; one matrix of a parameter with one axis, summed.

        Args:
            x, y: a batch; x is a tensor, or a mapping that the model takes whole.
            N: data points of all batches.
            kwargs: ``kfac_approx`` "expand" or "reduce"; ``mc_samples``, in the place of ``num_samples``: sampled columns of a data point,
                whose outer products are averaged. Draws are those of torch's global generator.

        Raises:
            ValueError: ``mc_samples`` is not 1 without ``stochastic``; a parameter's factors have several blocks, which laplace-torch's
                ``Kron`` cannot hold; the message names it.
            What :class:`ella_cuda.laplace.KronLaplace` and its ``fit`` raise.
        """
        settings = {"approximation": kwargs.pop("kfac_approx")} if "kfac_approx" in kwargs else {}
        if "mc_samples" in kwargs:
            settings["mc_samples"] = kwargs.pop("mc_samples")
            if not self.stochastic and settings["mc_samples"] != 1:
                raise ValueError(
                    f"EllaGGN.kron: mc_samples must be 1 for the exact output Hessian, got {settings['mc_samples']!r}; sampled columns "
                    "are EllaGGN(..., stochastic=True), of a Laplace backend_kwargs={'stochastic': True}."
                )
        if kwargs:
            raise TypeError(f"EllaGGN.kron: unknown arguments {', '.join(map(repr, sorted(kwargs)))}.")
        mapping = type(x) if isinstance(x, Mapping) else None
        la = self.kron_laplace(mapping, **settings)
        parameters = {name: la.model.get_parameter(name) for name in la.parameter_names}
        if self.last_layer:
            with evaluation_mode(self.model), torch.no_grad():
                x = self.model.forward_with_features(x)[1]
        elif mapping is not None:
            x = _entries(x, self.dict_key_y)
        la.fit([(x, y)])
        _require_dense(la.factors, parameters)
        kfacs = [_dense(factor, parameters[name], la.n_data / N) for name, factor in la.factors.items()]
        return la.loss.to(next(iter(parameters.values())).dtype), Kron(kfacs)


class _TakesMapping(nn.Module):
    """A model that takes a batch's mapping whole, called with the entries."""

    def __init__(self, model: nn.Module, mapping: type[Mapping], key: str) -> None:
        super().__init__()
        self.model, self.mapping, self.key = model, mapping, key

    def forward(self, *only: Tensor, **entries: Any) -> Tensor:
        return self.model(self.mapping({self.key: only[0]} if only else entries))


def _entries(batch: Mapping[str, Any], dict_key_y: str) -> dict[str, Any]:
    return {key: value for key, value in batch.items() if key != dict_key_y}


def _require_dense(factors: Mapping[str, KroneckerFactor], parameters: Mapping[str, nn.Parameter]) -> None:
    """ValueError where laplace-torch's ``Kron`` cannot hold a parameter's factors."""
    shapes = {name: factor.shape for name, factor in factors.items() if parameters[name].dim() > 1}
    several = [f"{n} ({s.groups} blocks of {s.inputs} x {s.outputs})" for n, s in shapes.items() if s.groups > 1]
    if several:
        raise ValueError(
            f"EllaGGN.kron: laplace-torch's Kron holds one dense pair of factors for a parameter, but the curvature of {', '.join(several)} "
            f"is block-diagonal. Use {INSTEAD}, which holds blocks."
        )


def _dense(factor: KroneckerFactor, parameter: nn.Parameter, share: float) -> list[Tensor]:
    """The factor of a batch that is this share of all data, as laplace-torch has it."""
    shape, dtype = factor.shape, parameter.dtype
    if parameter.dim() == 1:
        blocks = factor.to_dense()  # (G, a b, a b), within which the elements are those of to_blocks
        where = shape.to_blocks(torch.arange(parameter.numel(), device=blocks.device)).flatten(1)
        matrix = blocks.new_zeros(parameter.numel(), parameter.numel())
        matrix[where[:, :, None], where[:, None]] = blocks
        return [matrix.to(dtype)]
    # Ours has A summed and B averaged over shared positions, theirs the reverse.
    positions = factor.input_moment.rows / factor.n_data if factor.input_moment is not None else 1.0
    outputs, inputs = factor.outputs[0] * positions, factor.inputs[0] * (share / positions)
    sides = [inputs, outputs] if shape.layout.index("a") < shape.layout.index("b") else [outputs, inputs]
    return [side.to(dtype) for side in sides]


class BlockKron:
    r"""A curvature of Kronecker factors in blocks, times a scale, plus a precision for each parameter tensor, with the methods of
    ``laplace.utils.KronDecomposed``. Eigenvalues and eigenvectors are computed when they are first asked for and kept with ``la``.

    Vectors are parameters in ``model.parameters()`` order, flattened, of those that require a gradient.

    Args:
        la: a fitted :class:`ella_cuda.laplace.KronLaplace`.
        scale: a positive number or 0-dim tensor.
        deltas: a number, a 0-dim tensor, or one value per parameter tensor.
    """

    def __init__(self, la: KronLaplace, scale: float | Tensor = 1.0, deltas: float | Tensor = 0.0) -> None:
        self.la, self.scale, self.deltas = la, scale, deltas

    def __len__(self) -> int:
        return len(self.la.parameter_names)

    def __mul__(self, scalar: float | Tensor) -> BlockKron:
        return BlockKron(self.la, self.scale * scalar, self.deltas)

    def __add__(self, deltas: float | Tensor) -> BlockKron:
        return BlockKron(self.la, self.scale, self.deltas + deltas)

    __rmul__, __radd__ = __mul__, __add__

    def decompose(self, damping: bool = False) -> BlockKron:
        """Itself."""
        _refuse_damping(damping)
        return self

    def clone(self) -> BlockKron:
        """The same of a copy of ``la``, which a further fit does not change."""
        parts = (v.clone() if isinstance(v, Tensor) else v for v in (self.scale, self.deltas))
        return BlockKron(copy.copy(self.la), *parts)

    def detach(self) -> BlockKron:
        return BlockKron(self.la, *(v.detach() if isinstance(v, Tensor) else v for v in (self.scale, self.deltas)))

    def _values(self) -> tuple[Tensor, Tensor]:
        """One delta for each tensor, and the scale, float64."""
        like = self.la.prior_precision
        deltas, scale = (torch.as_tensor(v, device=like.device).to(torch.float64) for v in (self.deltas, self.scale))
        return deltas.reshape(-1).expand(len(self)), scale.reshape(())

    def posterior(self) -> KronPosterior:
        """In our terms, without a graph."""
        deltas, scale = (v.detach() for v in self._values())
        return KronPosterior(eigenbases_of(self.la), deltas, scale, self.la.fitted_model.dtype)

    def logdet(self) -> Tensor:
        """0-dim, float64, differentiable in deltas and scale."""
        deltas, scale = self._values()
        factors = self.la.factors.values()
        SecondMoment.decompose_all(
            {m: None for f in factors for m in (f.input_moment, f.output_moment) if m is not None}
        )
        return torch.stack([f.logdet(d, scale) for f, d in zip(factors, deltas.unbind(), strict=True)]).sum()

    def bmm(self, W: Tensor, exponent: float = -1) -> Tensor:
        """The matrix to a power times vectors ``(..., P)``."""
        return self.posterior().bmm(W, exponent)

    def inv_square_form(self, W: Tensor) -> Tensor:
        """``W H^-1 W^T`` of ``(N, K, P)``: ``(N, K, K)``; differentiable in W."""
        half = self.posterior().bmm(W, -0.5)
        return half @ half.mT

    def diag(self, exponent: float = 1) -> Tensor:
        """The diagonal of the matrix to a power, ``(P,)``."""
        return self.posterior().diag(exponent)

    def to_matrix(self, exponent: float = 1) -> Tensor:
        """The matrix to a power, ``(P, P)``. For small networks and tests."""
        return self.posterior().to_matrix(exponent)


def _refuse_damping(damping: bool) -> None:
    if damping:
        raise ValueError("EllaKronLaplace: damping must be False; factors are not damped before they are multiplied.")


class EllaKronLaplace(laplace.KronLaplace):
    """``laplace.KronLaplace`` with the curvature of :class:`ella_cuda.laplace.KronLaplace`, for every network that this one fits:
    ``laplace.Laplace(model, likelihood, "all", "ella_kron")``. A fit is one pass of ours over the loader; predictions take no Jacobians of
    all parameters, but with ``enable_backprop``. The evidence and its parts are float64.

    Args:
        backend: is not used: curvature and Jacobians are of :class:`EllaGGN` (``marglik_training`` always gives one).
        backend_kwargs: of :class:`EllaGGN`.
        damping: False.
        asdl_fisher_kwargs: empty.
        Others: see ``laplace.BaseLaplace``.

    Attributes:
        ella: our approximation.

    Raises:
        TypeError, ValueError: as :class:`ella_cuda.laplace.KronLaplace`, and for the arguments above.
    """

    _key = ("all", "ella_kron")

    def __init__(
        self,
        model: nn.Module,
        likelihood: str,
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float = 1.0,
        enable_backprop: bool = False,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        backend: type | None = None,
        damping: bool = False,
        backend_kwargs: dict[str, Any] | None = None,
        asdl_fisher_kwargs: dict[str, Any] | None = None,
    ) -> None:
        _refuse_damping(damping)
        if asdl_fisher_kwargs:
            raise ValueError("EllaKronLaplace: asdl_fisher_kwargs must be empty; settings belong into backend_kwargs.")
        backend = backend if backend is not None and issubclass(backend, EllaGGN) else EllaGGN
        super().__init__(
            model,
            likelihood,
            sigma_noise,
            prior_precision,
            prior_mean,
            temperature,
            enable_backprop,
            dict_key_x,
            dict_key_y,
            backend,
            damping,
            backend_kwargs,
        )

    # fitting ---------------------------------------------------------------------------------------------------------

    def _init_H(self) -> None:
        self.H = self.H_facs = None
        self._mapping: type[Mapping] | None = None
        self.ella = self.backend.kron_laplace()

    def fit(self, train_loader: Iterable[Any], override: bool = True, progress_bar: bool = False) -> None:
        """One streaming pass over the data at the model's parameters; see :meth:`ella_cuda.laplace.KronLaplace.fit`.

        Args:
            train_loader: yields pairs ``(x, y)``, or mappings with the targets under ``dict_key_y``; the model gets such a mapping without
                the targets.
            override: start anew; False adds to what was fitted at the same parameters.
            progress_bar: show one.
        """
        batches = iter(train_loader)
        first = next(batches, None)
        mapping = type(first) if isinstance(first, Mapping) else None
        if mapping is not self._mapping:
            if not override and self.H is not None:
                raise ValueError(
                    "fit(override=False): batches are mappings where those of the fit before were none, or the reverse."
                )
            self._mapping, self.ella = mapping, self.backend.kron_laplace(mapping)
        self.H = self.H_facs = None
        self.model.eval()
        self.ella.fit(itertools.chain([] if first is None else [first], batches), override, progress_bar)
        mean = parameters_to_vector(self.params)
        self.mean = mean if self.enable_backprop else mean.detach()
        self._hold()

    def _hold(self) -> None:
        """Take what is fitted."""
        self.H = self.H_facs = BlockKron(self.ella)
        self.loss, self.n_data, self.n_outputs = self.ella.loss, self.ella.n_data, self.ella.n_outputs
        self.model.output_size = self.n_outputs

    def _fitted(self) -> KronLaplace:
        """Our approximation at the present hyperparameters."""
        self._check_H_init()
        self.ella.prior_precision, self.ella.temperature = self.prior_precision, self.temperature
        if self.ella.likelihood_function.has_noise:
            self.ella.sigma_noise = self.sigma_noise
        return self.ella

    # evidence --------------------------------------------------------------------------------------------------------

    @property
    def log_likelihood(self) -> Tensor:
        return self._fitted().log_likelihood

    @property
    def log_det_prior_precision(self) -> Tensor:
        return self._fitted().log_det_prior_precision

    @property
    def log_det_posterior_precision(self) -> Tensor:
        return self._fitted().log_det_posterior_precision

    @property
    def log_det_ratio(self) -> Tensor:
        return self._fitted().log_det_ratio

    @property
    def scatter(self) -> Tensor:
        precision = self._fitted().prior_precision
        away = (self.mean.double() - self.prior_mean.double()).split([p.numel() for p in self.params])
        return (precision * torch.stack([part.square().sum() for part in away])).sum()

    def log_prob(self, value: Tensor, normalized: bool = True) -> Tensor:
        """The log density at parameters ``(..., P)``: ``(...)``; before a fit that of the prior."""
        exponent = -0.5 * self.square_norm(value)
        if not normalized:
            return exponent
        unfitted = self.H is None
        determinant = self.prior_precision_diag.log().sum() if unfitted else self.log_det_posterior_precision
        return exponent + 0.5 * (determinant - self.n_params * math.log(2 * math.pi))

    def square_norm(self, value: Tensor) -> Tensor:
        if self.H is None:
            return (value - self.mean).square() @ self.prior_precision_diag
        return self.posterior_precision.posterior().square_form(value - self.mean)

    # predictions -----------------------------------------------------------------------------------------------------

    def _glm_predictive_distribution(
        self, X: Any, joint: bool = False, diagonal_output: bool = False
    ) -> tuple[Tensor, Tensor]:
        if self.enable_backprop:
            return super()._glm_predictive_distribution(X, joint, diagonal_output)
        la = self._fitted()
        if isinstance(X, Mapping) and self._mapping is None:
            raise ValueError("EllaKronLaplace: x is a mapping, but the batches of the fit were none.")
        mean, covariance = moments(la, X, joint, diagonal_output and not joint)
        if mean.dim() != 2:
            raise ValueError(
                f"EllaKronLaplace: laplace-torch predicts outputs (N, K), the model's are {tuple(mean.shape)}; the attribute ella "
                "predicts outputs at several positions."
            )
        return mean.flatten() if joint else mean, covariance

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
        """As ``laplace.KronLaplace``'s, but samples come from ``generator`` where one is given, there from torch's global one."""
        given = inspect.signature(super().__call__).bind(x, *args, **kwargs)
        given.apply_defaults()
        how = given.arguments
        sampled = how["pred_type"] == "nn" or (how["link_approx"] == "mc" and self.likelihood == "classification")
        if how["generator"] is None or not sampled or how["pred_type"] not in ("glm", "nn"):
            return super().__call__(x, *args, **kwargs)
        names = ("pred_type", "n_samples", "diagonal_output", "generator")
        samples = self.predictive_samples(x, **{name: how[name] for name in names})
        return samples.mean(0) if self.likelihood == "classification" else (samples.mean(0), samples.var(0))

    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        return self.mean + self.posterior_precision.posterior().sample(n_samples, generator)

    # saving ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Loadable with ``weights_only=True``; ``H`` is :meth:`ella_cuda.laplace.KronLaplace.state_dict`'s."""
        state = laplace.ParametricLaplace.state_dict(self)
        state |= {key: state[key].detach() for key in ("mean", "prior_precision", "sigma_noise")}
        state["likelihood"] = str(getattr(self.likelihood, "value", self.likelihood))
        state["H"] = self._fitted().state_dict()
        state["mapping"] = self._mapping is not None
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave, for the same model and settings; the model's parameters are not part of it.

        Raises:
            ValueError: the state is another class's, or does not fit; nothing is changed then.
        """
        if state_dict.get("cls_name") != type(self).__name__:
            raise ValueError(
                f"load_state_dict: the state is that of {state_dict.get('cls_name')!r}, expected {type(self).__name__!r}; make the object "
                "with the subset_of_weights and hessian_structure of the saved one."
            )
        mapping = dict if state_dict["mapping"] else None
        ella = self.backend.kron_laplace(mapping)
        ella.load_state_dict(state_dict["H"])
        super(laplace.KronLaplace, self).load_state_dict(state_dict)
        self._mapping, self.ella = mapping, ella
        self._hold()
