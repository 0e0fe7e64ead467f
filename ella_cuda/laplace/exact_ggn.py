"""Laplace approximations whose curvature is a matrix or its diagonal, of all parameters or of some of their elements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ella_cuda import ops
from ella_cuda.laplace.base import BaseLaplace
from ella_cuda.laplace.batches import DEFAULT_KEYS, Inputs, data_points, require_loader
from ella_cuda.laplace.copies import fixed_draws, require_constant_amounts
from ella_cuda.laplace.factors import FactorShape
from ella_cuda.laplace.jacobian import Jacobian
from ella_cuda.laplace.jacobian_pass import JacobianConsumer, JacobianPass, running
from ella_cuda.laplace.likelihoods import IGNORED, Columns, Likelihood
from ella_cuda.laplace.memory import available_bytes
from ella_cuda.laplace.options import LaplaceOptions
from ella_cuda.laplace.parameters import FittedBases, buffer_sums, fingerprint_of, trainable
from ella_cuda.laplace.posterior import DiagonalPosterior, FullPosterior, Layout, Posterior, checked_indices
from ella_cuda.laplace.state import CHECKSUM, checked_tensor, require_moment
from ella_cuda.laplace.values import Value, check_choice
from ella_cuda.modes import running_the_model
from ella_cuda.ops._precision import without_autocast

STRUCTURES = ("full", "diag")


class _Curvature(JacobianConsumer, ABC):
    """The sum over the data of ``J^T S S^T J`` at sigma = 1, of some elements of the parameters.

    Attributes:
        total: the sum.
        most_rank: the number of outputs of all data, which bounds the sum's rank; None before a fit.
    """

    total: Tensor
    most_rank: int | None = None

    @abstractmethod
    def log_det_ratio(self, prior: Tensor, scale: Tensor) -> Tensor:
        """``log|scale H + prior| - log|prior|``, prior one value per element, differentiable in both."""

    @abstractmethod
    def shares(self, prior: Tensor, scale: Tensor) -> Tensor:
        """How far the data determine each element: ``1 - prior ((scale H + prior)^-1)_ii``."""

    @abstractmethod
    def posterior(self, prior: Tensor, scale: Tensor, dtype: torch.dtype) -> Posterior:
        """At these."""


class _Full(_Curvature):
    """All of the matrix, ``(S, S)``, float64."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        size = layout.count
        self.row_bytes = size * 8
        needed, available = 2 * 8 * size**2, available_bytes(device)
        if available is not None and needed > available:
            raise MemoryError(
                f"fit: the curvature of {size:,} parameters and its Cholesky factor take {needed:,} bytes, and {device} has {available:,} "
                "available. Use KronLaplace, DiagLaplace, or SubnetLaplace with fewer subnetwork_indices."
            )
        self.total = torch.zeros(size, size, dtype=torch.float64, device=device)
        self._root: Tensor | None = None

    def begin(self, outputs: Tensor, which: slice, columns: slice) -> None:
        self._rows = outputs.new_zeros(columns.stop - columns.start, len(outputs), self.layout.count)

    def take(self, name: str, jacobian: Jacobian) -> None:
        self.layout.add_to(self._rows, name, jacobian)

    def end(self) -> None:
        ops.kron_accumulate_(self.total[None], self._rows.flatten(0, 1)[:, None].double())
        self._root = None
        del self._rows

    def _low_rank(self) -> Tensor | None:
        """R, ``(r, S)``, whose ``R^T R`` is the matrix, where its rank is at most half of its size; None elsewhere.

        Eigenvalues below the rounding errors of the largest are zeros.
        """
        size = len(self.total)
        if self.most_rank is None or 2 * self.most_rank > size:
            return None
        if self._root is None:
            values, vectors = torch.linalg.eigh(self.total)
            kept = values > size * torch.finfo(values.dtype).eps * values[-1]
            self._root = (vectors[:, kept] * values[kept].sqrt()).t().contiguous()
        return self._root

    def log_det_ratio(self, prior: Tensor, scale: Tensor) -> Tensor:
        root, low = prior.rsqrt(), self._low_rank()
        inner = root[:, None] * self.total * root if low is None else low * root @ (low * root).t()
        unit = torch.eye(len(inner), dtype=prior.dtype, device=prior.device)
        return 2 * torch.linalg.cholesky(unit + scale * inner).diagonal().log().sum()

    def shares(self, prior: Tensor, scale: Tensor) -> Tensor:
        if (low := self._low_rank()) is not None:  # by Woodbury's identity
            rows = low * (scale / prior).sqrt()
            unit = torch.eye(len(rows), dtype=prior.dtype, device=prior.device)
            factor = torch.linalg.cholesky(unit + rows @ rows.t())
            return torch.linalg.solve_triangular(factor, rows, upper=False).square().sum(0)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(scale * self.total + prior.diag()))
        return 1 - prior * inverse.diagonal()

    def posterior(self, prior: Tensor, scale: Tensor, dtype: torch.dtype) -> FullPosterior:
        return FullPosterior(scale * self.total + prior.diag(), self.layout, dtype)


class _Diagonal(_Curvature):
    """The diagonal, ``(S,)``, float64."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self.total = torch.zeros(layout.count, dtype=torch.float64, device=device)

    def take(self, name: str, jacobian: Jacobian) -> None:
        shape = self.layout.shapes[name]
        squares = jacobian.square_sums(shape.groups)
        self.total[self.layout.where[name]] += self.layout.selected(name, shape.from_blocks(squares, (shape.numel,)))

    def log_det_ratio(self, prior: Tensor, scale: Tensor) -> Tensor:
        return (scale * self.total / prior).log1p().sum()

    def shares(self, prior: Tensor, scale: Tensor) -> Tensor:
        return scale * self.total / (scale * self.total + prior)

    def posterior(self, prior: Tensor, scale: Tensor, dtype: torch.dtype) -> DiagonalPosterior:
        return DiagonalPosterior(scale * self.total + prior, self.layout, dtype)


class UnfactoredLaplace(BaseLaplace):
    """A Laplace approximation with the generalised Gauss-Newton matrix itself, or its diagonal: exact, for networks with few parameters or a
    subnetwork. Arguments, attributes and methods are :class:`ella_cuda.laplace.KronLaplace`'s, but for what is about factors.

    Args:
        subnetwork_indices: of the elements that have a posterior, among all trainable parameters flattened one after the other in
            ``model.named_parameters()`` order, ascending, int64 ``(S,)``; the others are constants. None is all.
        hessian_structure: "full" or "diag".

    Raises:
        MemoryError: in :meth:`fit`, the device has no room for the matrix.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood = "classification",
        *,
        subnetwork_indices: Tensor | None = None,
        hessian_structure: str = "full",
        prior_precision: Value = 1.0,
        sigma_noise: Value = 1.0,
        prior_mean: Value = 0.0,
        temperature: float = 1.0,
        memory_budget: int | None = None,
        unknown: str = "error",
        subset_of_weights: str | Sequence[str] = "all",
        dict_key_x: str = DEFAULT_KEYS.x,
        dict_key_y: str = DEFAULT_KEYS.y,
        ignore_index: int = IGNORED,
    ) -> None:
        self.hessian_structure = check_choice("hessian_structure", hessian_structure, STRUCTURES)
        self._curvature: _Curvature | None = None
        self._layout: Layout | None = None
        options = LaplaceOptions(
            prior_precision=prior_precision,
            sigma_noise=sigma_noise,
            prior_mean=prior_mean,
            temperature=temperature,
            memory_budget=memory_budget,
            unknown="diagonal" if unknown == "error" else unknown,  # Jacobians of parameters without a rule are exact
            subset_of_weights=subset_of_weights,
            dict_key_x=dict_key_x,
            dict_key_y=dict_key_y,
            ignore_index=ignore_index,
        )
        super().__init__(model, likelihood, options)
        self._subnetwork_indices = subnetwork_indices
        self._layout = Layout(self._shapes(), self._among_served(subnetwork_indices))
        self._square_norms = self._statistic.new_zeros(len(self.parameter_names))

    def __repr__(self) -> str:
        of = "" if self._layout.indices is None else f"{self._layout.count} of "
        state = f"fitted to {self.n_data} data points" if self.n_data else "not fitted"
        return (
            f"{type(self).__name__}({type(self.model).__name__}, likelihood={repr(self.likelihood_function)!r}, "
            f"hessian_structure={self.hessian_structure!r}: {of}{self.n_params} parameters, {state})"
        )

    @property
    def subnetwork_indices(self) -> Tensor | None:
        """Of the elements that have a posterior, ``(S,)``, int64; None is all."""
        return self._subnetwork_indices

    def _among_served(self, indices: Tensor | None) -> Tensor | None:
        """Indices among all trainable parameters as indices among those of ``parameter_names``.

        Raises:
            ValueError: they are none, or one is of a parameter that has no posterior.
        """
        if indices is None:
            return None
        parameters = trainable(self.model)
        checked_indices(indices, sum(p.numel() for p in parameters.values()))
        served = torch.cat(
            [torch.full((p.numel(),), n in set(self.parameter_names), device="cpu") for n, p in parameters.items()]
        )
        owners = torch.arange(len(parameters), device="cpu").repeat_interleave(
            torch.tensor([p.numel() for p in parameters.values()], device="cpu")
        )
        here = indices.cpu()
        if not served[here].all():
            wrong = owners[here[~served[here]]].unique().tolist()
            raise ValueError(
                f"subnetwork_indices: some are elements of {', '.join([*parameters][i] for i in wrong)}, which subset_of_weights or "
                "unknown='freeze' leaves out; choose among the others."
            )
        return (served.cumsum(0) - 1)[here].to(indices.device)

    @property
    def H(self) -> Tensor:
        """The curvature at sigma = 1 of the elements that have a posterior: ``(S, S)``, or its diagonal ``(S,)``, float64."""
        self._fitted()
        return self._curvature.total

    def _shapes(self) -> dict[str, FactorShape]:
        found = {rule.full_name(n): s for rule in self._rules for n, s in rule.shapes().items() if n in rule.trainable}
        return {name: found[name] for name in self.parameter_names}

    def _no_curvature(self) -> _Curvature:
        """Of no data."""
        return (_Full if self.hessian_structure == "full" else _Diagonal)(self._layout, self._device)

    @running_the_model
    def fit(self, loader: Iterable[Any], override: bool = True, progress_bar: bool = False) -> UnfactoredLaplace:
        """One streaming pass over the data at the model's present parameters; see :meth:`ella_cuda.laplace.KronLaplace.fit`."""
        self._fit(loader, override, progress_bar)
        return self

    def _accumulate(
        self,
        loader: Iterable[Any],
        override: bool,
        progress_bar: bool,
        outputs_of: Callable[[Inputs], Tensor] | None = None,
    ) -> None:
        require_loader(loader, "fit: loader")
        rules, anew = self.present_rules(), override or self.n_data == 0
        parameters = self._checked_parameters(rules)
        require_constant_amounts(self.model)
        fingerprint, buffers = fingerprint_of(self.model, () if anew else self._filled), buffer_sums(self.model)
        if anew:
            self._describe(parameters)
            self._rules = rules
            self._forget()
            if outputs_of is None:
                self._draws = fixed_draws(self.model)
            self._hold_model()
            self._layout = Layout(self._shapes(), self._layout.indices)
            self._curvature = self._no_curvature()
            self.prior_precision, self.sigma_noise = self.prior_precision, self.sigma_noise  # the model may have moved
        else:
            self._require_same(fingerprint)
        n_data, n_targets, statistic = self.n_data, self._n_targets, self._statistic
        self.n_data = 0  # until the pass is complete
        seen = 0
        with running(JacobianPass(self.model, rules, self._layout.shapes, self.memory_budget)) as run:
            for batch in tqdm(loader, desc="curvature", disable=not progress_bar, leave=False):
                x, y = self.batch_of(batch, "fit")
                with without_autocast(self._device.type):
                    if data_points(x) and not seen:
                        self._try_out(run, x, y, several=True)
                    statistic = statistic + self._add(run, x, y, outputs_of)
                seen, n_targets = seen + data_points(x), n_targets + y.numel()
        if not seen:
            raise ValueError(
                "fit: the loader gave no data; an iterator can be consumed once only, pass a re-iterable loader such as a DataLoader."
            )
        if not (statistic.isfinite() and self._curvature.total.isfinite().all()):
            raise FloatingPointError(
                "fit: the log likelihood or the curvature is not finite. Check the data and the parameters, or use float64."
            )
        self.n_data, self._n_targets, self._statistic = n_data + seen, n_targets, statistic
        self._curvature.most_rank = self.n_data * self.n_outputs
        self._square_norms = self.norms(parameters)
        self._bases = FittedBases(self.model)
        self._settle(fingerprint.to(self._device), buffers)

    def _add(self, run: JacobianPass, x: Inputs, y: Tensor, outputs_of: Callable[[Inputs], Tensor] | None) -> Tensor:
        likelihood = self.likelihood_function
        others = None if outputs_of is None else outputs_of(x)

        def columns(outputs: Tensor, which: slice) -> Columns | Tensor:
            likelihood.check(outputs, y[which])
            at = outputs if others is None else others[which].to(outputs.dtype)
            return likelihood.columns(at, y[which])

        outputs = run.run(x, columns, self._curvature, each_alone=True)
        self.n_outputs = outputs[0].numel() if len(outputs) else self.n_outputs
        return likelihood.statistic(outputs, y)

    # evidence --------------------------------------------------------------------------------------------------------

    def norms(self, parameters: Mapping[str, Tensor], mean: Tensor | None = None) -> Tensor:
        if self._layout is None or self._layout.indices is None:
            return super().norms(parameters, mean)
        flat = torch.cat([p.detach().double().flatten() for p in parameters.values()])
        offsets = flat - (self._prior_mean if mean is None else mean).to(flat.device)
        squares = offsets[self._layout.indices.to(offsets.device)].square()
        return torch.stack([part.sum() for part in squares.split(self._layout.counts)])

    def _sizes(self) -> Tensor:
        return torch.tensor(self._layout.counts, dtype=torch.float64, device=self._device)

    def _elementwise(self, precision: Tensor) -> Tensor:
        """A precision for each element that has a posterior."""
        return precision.repeat_interleave(torch.tensor(self._layout.counts, device=precision.device))

    def _penalty(self, log_precision: Tensor, log_scale: Tensor, square_norms: Tensor) -> Tensor:
        self._fitted()
        precision = log_precision.exp()
        ratio = self._curvature.log_det_ratio(self._elementwise(precision), log_scale.exp())
        return ratio + (precision * square_norms).sum()

    def posterior_at(self, prior_precision: Value) -> Posterior:
        self._fitted()
        return self._posterior(self._precisions(prior_precision).detach(), self.data_weight())

    def _posterior(self, precision: Tensor, scale: Tensor) -> Posterior:
        dtype = self.model.get_parameter(self.parameter_names[0]).dtype
        return self._curvature.posterior(self._elementwise(precision), scale, dtype)

    def free_elements(self) -> Tensor | None:
        if self._layout.indices is None:
            return None
        return self._layout.spread(torch.ones(self._layout.count, dtype=torch.float64, device=self._device))

    def effective_parameters(self) -> dict[str, float]:
        """Parameter name -> how many of its elements the data determine.

        Source: MacKay, "Bayesian interpolation", 1992.
        """
        return dict(zip(self.parameter_names, self.effective_by_tensor().tolist(), strict=True))

    @torch.no_grad()
    def effective_by_tensor(self) -> Tensor:
        self._fitted()
        shares = self._curvature.shares(self._elementwise(self.prior_precision), self._log_scale(None).exp())
        return torch.stack([part.sum() for part in shares.split(self._layout.counts)])

    # saving ----------------------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        return self._shared_state() | {
            "hessian_structure": self.hessian_structure,
            "subnetwork_indices": None if self.subnetwork_indices is None else self.subnetwork_indices.clone(),
            "curvature": self._curvature.total.clone() if self.n_data else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave, for the same model and settings.

        Raises:
            TypeError: state is no mapping.
            ValueError: an entry is missing, unknown or does not fit this object; nothing is changed then.
        """
        state, n_data, restore = self._checked_state(state, ("hessian_structure",))
        given, here = state["subnetwork_indices"], self.subnetwork_indices
        same = here is None if given is None else isinstance(given, Tensor) and here is not None
        if not same or (given is not None and not torch.equal(given.cpu(), here.cpu())):
            raise ValueError("load_state_dict: subnetwork_indices of the state are others than here.")
        curvature = None
        if n_data:
            curvature = self._no_curvature()
            given = checked_tensor("curvature", state["curvature"], curvature.total.shape)
            require_moment(
                "curvature", given if given.dim() == 2 else given[:, None, None], exactly=CHECKSUM not in state
            )
            curvature.total.copy_(given)
        restore()  # the last that may fail
        self._curvature, self._statistic_gradients = curvature, {}
        if curvature is not None:
            curvature.most_rank = self.n_data * self.n_outputs


class FullLaplace(UnfactoredLaplace):
    """:class:`UnfactoredLaplace` with the whole matrix of all parameters, for some thousand of them."""

    def __init__(self, model: nn.Module, likelihood: str | Likelihood = "classification", **how: Any) -> None:
        super().__init__(model, likelihood, hessian_structure="full", **how)


class DiagLaplace(UnfactoredLaplace):
    """:class:`UnfactoredLaplace` with the matrix' diagonal, as many numbers as there are parameters."""

    def __init__(self, model: nn.Module, likelihood: str | Likelihood = "classification", **how: Any) -> None:
        super().__init__(model, likelihood, hessian_structure="diag", **how)


class SubnetLaplace(UnfactoredLaplace):
    """:class:`UnfactoredLaplace` of a subnetwork, which the masks of :mod:`ella_cuda.laplace.subnetwork` choose; the other elements of the
    parameters are constants.

    Source: Daxberger et al., "Bayesian deep learning via subnetwork inference", ICML 2021.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood = "classification",
        *,
        subnetwork_indices: Tensor,
        hessian_structure: str = "full",
        **how: Any,
    ) -> None:
        super().__init__(
            model, likelihood, subnetwork_indices=subnetwork_indices, hessian_structure=hessian_structure, **how
        )
