"""Laplace approximations whose curvature is a matrix or its diagonal, of all parameters or of some of their elements, or the matrix by
kernels of outputs."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ella_cuda import ops
from ella_cuda.laplace.base import BaseLaplace, LaplaceOptions
from ella_cuda.laplace.batches import Inputs
from ella_cuda.laplace.distributed_fit import FitSums
from ella_cuda.laplace.evidence import DataFitGradient, finer, is_finer
from ella_cuda.laplace.factors import FactorShape, Jacobian, checked_tensor
from ella_cuda.laplace.jacobian_pass import JacobianConsumer, JacobianPass
from ella_cuda.laplace.likelihoods import Columns, Likelihood
from ella_cuda.laplace.memory import available_bytes
from ella_cuda.laplace.parameters import check_choice, checked_names, is_inside, trainable
from ella_cuda.laplace.posterior import Contraction, Posterior
from ella_cuda.modes import running_the_model
from ella_cuda.nn._sizes import as_count
from ella_cuda.ops._precision import without_autocast

if TYPE_CHECKING:
    from ella_cuda.laplace.rules import Rule


STRUCTURES = ("full", "diag")
OUTPUTS = ("together", "apart")


class Layout:
    """The places of the elements that have a posterior among all elements, flattened one after the other.

    Attributes:
        counts: of the elements of each parameter. count: S, of all.
        n_params: how many elements there are, with a posterior or without.
        where: by parameter name, the slice of the S elements that are the parameter's.

    Args:
        shapes: of the factors that Jacobians come in, by parameter name, in order.
        indices: of the elements, ascending, int64 ``(S,)``; None is all.
    """

    def __init__(self, shapes: Mapping[str, FactorShape], indices: Tensor | None = None) -> None:
        self.shapes, self.indices = dict(shapes), indices
        sizes = [shape.numel for shape in self.shapes.values()]
        self.n_params = sum(sizes)
        chosen = [None] * len(sizes)  # of each parameter
        if indices is not None:
            mask = torch.zeros(self.n_params, dtype=torch.bool, device=indices.device).index_fill_(0, indices, True)
            chosen = [part.nonzero().flatten() for part in mask.split(sizes)]
        self._chosen = dict(zip(self.shapes, chosen, strict=True))
        self.counts = [size if some is None else len(some) for size, some in zip(sizes, chosen, strict=True)]
        ends = list(itertools.accumulate(self.counts))
        self.count = ends[-1]
        self.where = {n: slice(e - c, e) for n, e, c in zip(self.shapes, ends, self.counts, strict=True)}

    def tensors(self) -> list[Tensor]:
        """The indices of the elements."""
        return [t for t in (self.indices, *self._chosen.values()) if t is not None]

    def selected(self, name: str, values: Tensor) -> Tensor:
        """The values of a parameter ``(..., numel)`` whose elements have a posterior."""
        chosen = self._chosen[name]
        return values if chosen is None else values[..., chosen.to(values.device)]

    def rows(self, name: str, jacobian: Jacobian) -> Tensor:
        """A Jacobian in the parameter's elements that have a posterior, ``(K, N, count)``."""
        shape = self.shapes[name]
        return self.selected(name, shape.from_blocks(jacobian.dense(shape.groups), (shape.numel,)))

    def add_to(self, rows: Tensor, name: str, jacobian: Jacobian) -> None:
        """Add a Jacobian to its columns of ``rows`` ``(K, N, S)``."""
        where = self.where[name]
        if where.stop > where.start:
            rows[:, :, where] += self.rows(name, jacobian)

    def restricted(self, vectors: Tensor) -> Tensor:
        """The elements of vectors ``(..., P)`` that have a posterior; vectors ``(..., S)`` as they are."""
        if self.indices is None or vectors.shape[-1] == self.count:
            return vectors
        return vectors[..., self.indices.to(vectors.device)]

    def spread(self, vectors: Tensor) -> Tensor:
        """Vectors ``(..., S)`` as ``(..., P)``, zero elsewhere."""
        if self.indices is None:
            return vectors
        whole = vectors.new_zeros(*vectors.shape[:-1], self.n_params)
        whole[..., self.indices.to(vectors.device)] = vectors
        return whole


class _OfElements(Posterior):
    """A posterior of a layout's elements, of a precision ``(S, S)``, or its diagonal ``(S,)``, float64; samples are of ``dtype``.

    Functions of torch take the precision in its place, and the precision's attributes and methods are its own where it has none of that
    name, as in ``torch.allclose(la.posterior_precision, matrix)`` and ``la.posterior_precision.shape``.
    """

    def __init__(self, precision: Tensor, layout: Layout, dtype: torch.dtype) -> None:
        self.precision, self.layout, self.dtype = precision, layout, dtype
        self.shapes, self.n_params, self.device = layout.shapes, layout.count, precision.device

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "precision":  # as copies ask for before there is one
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.precision, name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(_OfElements, lambda one: one.precision, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)

    def own(self) -> list[Tensor]:
        return [self.precision]

    def held(self) -> list[Tensor]:
        return self.layout.tensors()

    def of(self, own: Sequence[Tensor]) -> Posterior:
        return type(self)(*own, self.layout, self.dtype)

    def bmm(self, vectors: Tensor, exponent: float = -1) -> Tensor:
        found = self._power(self.layout.restricted(vectors).double(), exponent)
        return (found if vectors.shape[-1] == self.n_params else self.layout.spread(found)).to(vectors.dtype)

    @abstractmethod
    def _power(self, vectors: Tensor, exponent: float) -> Tensor:
        """``P^exponent`` times float64 vectors ``(..., S)``."""

    @staticmethod
    def _add(variance: Tensor, white: Tensor, joint: bool) -> None:
        """Add the products of rows ``(K, N, S)`` times a square root of the covariance."""
        rows = white.transpose(0, 1).flatten(0, 1) if joint else white.transpose(0, 1)
        alone = variance.dim() == 2 and not joint
        variance.add_(rows.square().sum(2, dtype=torch.float64) if alone else rows @ rows.mT)


class FullPosterior(_OfElements):
    """A posterior of a matrix; torch.linalg.LinAlgError where it is not positive definite. ``factor``: its Cholesky factor, where it is
    known."""

    def __init__(self, precision: Tensor, layout: Layout, dtype: torch.dtype, factor: Tensor | None = None) -> None:
        super().__init__(precision, layout, dtype)
        self.row_bytes = 2 * torch.float64.itemsize * layout.count
        self.factor = torch.linalg.cholesky(precision) if factor is None else factor

    def own(self) -> list[Tensor]:
        return [self.factor]

    def of(self, own: Sequence[Tensor]) -> FullPosterior:
        return FullPosterior(self.precision, self.layout, self.dtype, *own)

    def logdet(self) -> Tensor:
        return 2 * self.factor.diagonal().log().sum()

    def contraction(self, variance: Tensor, joint: bool = False) -> Contraction:
        rows: list[Tensor] = []  # of all parameters together, (K, N, S)

        def take(name: str, _: slice, jacobian: Jacobian) -> None:
            if not rows:
                rows.append(jacobian.outputs.new_zeros(*jacobian.outputs.shape[:2], self.n_params))
            self.layout.add_to(rows[0], name, jacobian)

        def finish() -> None:
            for each in rows:
                flat = each.flatten(0, 1).double()
                white = torch.linalg.solve_triangular(self.factor, flat.mT, upper=False).mT
                self._add(variance, white.view_as(each), joint)

        return Contraction(take, finish)

    def diag(self, exponent: float = 1) -> Tensor:
        inverse = exponent == -1
        values = torch.cholesky_inverse(self.factor).diagonal() if inverse else self.to_matrix(exponent).diagonal()
        return self.layout.spread(values.to(self.dtype))

    def _power(self, vectors: Tensor, exponent: float) -> Tensor:
        if exponent == 1:
            return vectors @ self.precision
        if exponent == -1:
            return torch.cholesky_solve(vectors.reshape(-1, self.n_params).mT, self.factor).mT.view_as(vectors)
        values, basis = torch.linalg.eigh(self.precision)
        return (vectors @ basis * values.pow(exponent)) @ basis.mT

    def _coloured(self, white: Tensor) -> Tensor:
        found = torch.linalg.solve_triangular(self.factor.mT, white.double().mT, upper=True).mT
        return self.layout.spread(found.to(self.dtype))


class DiagonalPosterior(_OfElements):
    """A posterior of a diagonal, whose contractions keep nothing of all parameters."""

    def logdet(self) -> Tensor:
        return self.precision.log().sum()

    def diag(self, exponent: float = 1) -> Tensor:
        return self.layout.spread(self.precision.pow(exponent).to(self.dtype))

    def _power(self, vectors: Tensor, exponent: float) -> Tensor:
        return vectors * self.precision.pow(exponent)

    def _coloured(self, white: Tensor) -> Tensor:
        return self.layout.spread(white * self.precision.rsqrt().to(self.dtype))

    def of_linear(self, features: Tensor, names: Mapping[str, str], diagonal: bool) -> Tensor:
        variances = self.layout.spread(self.precision.reciprocal()).split([s.numel for s in self.shapes.values()])
        by_name = dict(zip(self.shapes, variances, strict=True))
        rows = {"weight": features.double().square(), "bias": features.new_ones(len(features), 1).double()}
        found = sum(rows[name] @ by_name[own].view(-1, rows[name].shape[1]).T for name, own in names.items())
        return found if diagonal else found.diag_embed()

    def contraction(self, variance: Tensor, joint: bool = False) -> Contraction:
        def take(name: str, _: slice, jacobian: Jacobian) -> None:
            where = self.layout.where[name]
            if where.stop > where.start:
                rows = self.layout.rows(name, jacobian)
                self._add(variance, rows * self.precision[where].rsqrt().to(rows.dtype), joint)

        return Contraction(take)


class _Curvature(JacobianConsumer, ABC):
    """The sum ``total`` over the data of ``J^T S S^T J`` at sigma = 1, of a layout's elements. ``most_rank``, after a fit, is the number of
    outputs of all data, which bounds the sum's rank."""

    total: Tensor
    most_rank: int | None = None

    @abstractmethod
    def log_det_ratio(self, prior: Tensor, scale: Tensor) -> Tensor:
        """``log|scale H + prior| - log|prior|``, of a prior precision for each element, differentiable in both."""

    @abstractmethod
    def shares(self, prior: Tensor, scale: Tensor) -> Tensor:
        """The share of each element that the data determine: ``1 - prior ((scale H + prior)^-1)_ii``."""

    @abstractmethod
    def posterior(self, prior: Tensor, scale: Tensor, dtype: torch.dtype) -> Posterior:
        """The posterior at these."""


class _Full(_Curvature):
    """All of the matrix, ``(S, S)``, float64."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout, size = layout, layout.count
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
        """R, ``(r, S)``, whose ``R^T R`` is the matrix, where its rank is at most half of its size; None elsewhere. Eigenvalues below the
        rounding errors of the largest are zeros."""
        size = len(self.total)
        if self.most_rank is None or 2 * self.most_rank > size:
            return None
        if self._root is None:
            values, vectors = torch.linalg.eigh(self.total)
            kept = values > size * torch.finfo(values.dtype).eps * values[-1]
            self._root = (vectors[:, kept] * values[kept].sqrt()).t().contiguous()
        return self._root

    def log_det_ratio(self, prior: Tensor, scale: Tensor) -> Tensor:
        return _LogDetRatio.apply(prior, scale, self)

    def factor(self, prior: Tensor, scale: Tensor) -> Tensor:
        """The Cholesky factor of a matrix whose determinant is that of ``scale H / prior + I``."""
        root, low = prior.rsqrt(), self._low_rank()
        inner = root[:, None] * self.total * root if low is None else low * root @ (low * root).t()
        return _of_unit(scale * inner)

    def shares(self, prior: Tensor, scale: Tensor, factor: Tensor | None = None) -> Tensor:
        factor = self.factor(prior, scale) if factor is None else factor
        if (low := self._low_rank()) is not None:  # by Woodbury's identity
            rows = low * (scale / prior).sqrt()
            return torch.linalg.solve_triangular(factor, rows, upper=False).square().sum(0)
        return 1 - torch.cholesky_inverse(factor).diagonal()

    def posterior(self, prior: Tensor, scale: Tensor, dtype: torch.dtype) -> FullPosterior:
        return FullPosterior(scale * self.total + prior.diag(), self.layout, dtype)


class _LogDetRatio(torch.autograd.Function):
    """``log|scale H + prior| - log|prior|``, whose gradients are shares: an inverse takes less than the way back through a factor."""

    @staticmethod
    def forward(ctx: Any, prior: Tensor, scale: Tensor, curvature: _Full) -> Tensor:
        ctx.curvature, ctx.factor = curvature, curvature.factor(prior, scale)
        ctx.save_for_backward(prior, scale)
        return 2 * ctx.factor.diagonal().log().sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        prior, scale = ctx.saved_tensors
        # Where gradients are to have some themselves, the factor is made anew in their graph.
        shares = ctx.curvature.shares(prior, scale, None if torch.is_grad_enabled() else ctx.factor)
        return -gradient * shares / prior, gradient * shares.sum() / scale, None


def _of_unit(matrix: Tensor) -> Tensor:
    """The Cholesky factor of the matrix and the unit matrix."""
    return torch.linalg.cholesky(matrix + torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device))


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


def _require_indices(indices: Tensor, n_params: int) -> None:
    """ValueError where these are no ascending indices of so many parameters."""
    if not isinstance(indices, Tensor) or indices.dtype != torch.int64 or indices.dim() != 1 or not len(indices):
        got = f"{tuple(indices.shape)} {indices.dtype}" if isinstance(indices, Tensor) else type(indices).__name__
        raise ValueError(f"subnetwork_indices: expected an int64 tensor (S,) with S > 0, got {got}.")
    in_order = (indices[1:] > indices[:-1]).all()
    if not in_order or indices[0] < 0 or indices[-1] >= n_params:
        raise ValueError(
            f"subnetwork_indices: expected ascending indices, each once, below the {n_params} trainable parameters, got "
            f"{indices.min().item()} to {indices.max().item()}{'' if in_order else ', not in order'}."
        )


class UnfactoredLaplace(BaseLaplace):
    """A Laplace approximation with the generalised Gauss-Newton matrix itself, or its diagonal: exact, for networks with few parameters or a
    subnetwork. Arguments, attributes and methods are :class:`ella_cuda.laplace.KronLaplace`'s, but for what is about factors.

    Args:
        subnetwork_indices: of the elements that have a posterior, among all trainable parameters flattened one after the other in
            ``model.named_parameters()`` order, ascending, int64 ``(S,)``; the others are constants. None is all.
        hessian_structure: "full" or "diag".
        options: see :class:`ella_cuda.laplace.base.LaplaceOptions`.

    Raises:
        MemoryError: in :meth:`fit`, the device has no room for the matrix.
    """

    _settings = ("hessian_structure",)
    _elementwise_priors = True

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood = "classification",
        *,
        subnetwork_indices: Tensor | None = None,
        hessian_structure: str = "full",
        **options: Any,
    ) -> None:
        self.hessian_structure = check_choice("hessian_structure", hessian_structure, STRUCTURES)
        if options.get("unknown", "error") == "error":
            options["unknown"] = "diagonal"  # Jacobians of parameters without a rule are exact
        prior_precision = options.pop("prior_precision", 1.0)
        super().__init__(model, likelihood, LaplaceOptions(**options))
        self.subnetwork_indices = subnetwork_indices
        self._indices = self._among_served(subnetwork_indices)
        self._lay_out()
        self.prior_precision = prior_precision  # of elements, too, which are known now

    def _described(self) -> str:
        of = "" if self._indices is None else f"{self._layout.count} of "
        return f"hessian_structure={self.hessian_structure!r}: {of}{self.n_params} parameters"

    def _lay_out(self) -> None:
        """Find the elements that have a posterior, and have no curvature."""
        found = {rule.full_name(n): s for rule in self._rules for n, s in rule.shapes().items() if n in rule.trainable}
        self._layout = Layout({name: found[name] for name in self.parameter_names}, self._indices)
        self._curvature: _Curvature | None = None
        self.counts = self._layout.counts
        if self._indices is not None:
            self.free_elements = self._layout.spread(self.fitted_model.zero.new_ones(self._layout.count))

    def _among_served(self, indices: Tensor | None) -> Tensor | None:
        """Indices among all trainable parameters as indices among those of ``parameter_names``; ValueError where they are none, or one is of
        a parameter that has no posterior."""
        if indices is None:
            return None
        parameters = trainable(self.model)
        sizes = [p.numel() for p in parameters.values()]
        _require_indices(indices, sum(sizes))
        chosen = torch.zeros(sum(sizes), dtype=torch.bool, device="cpu").index_fill_(0, indices.cpu(), True)
        parts = dict(zip(parameters, chosen.split(sizes), strict=True))
        if wrong := [name for name, part in parts.items() if part.any() and name not in self.parameter_names]:
            raise ValueError(
                f"subnetwork_indices: some are elements of {', '.join(wrong)}, which subset_of_weights or unknown='freeze' leaves out."
            )
        served = torch.cat([parts[name] for name in self.parameter_names])
        return served.nonzero().flatten().to(indices.device)

    @property
    def H(self) -> Tensor:
        """The curvature at sigma = 1 of the elements that have a posterior: ``(S, S)``, or its diagonal ``(S,)``, float64."""
        self.fitted_model.require_fit()
        return self._curvature.total

    def _no_curvature(self) -> _Curvature:
        """A curvature of no data."""
        return (_Full if self.hessian_structure == "full" else _Diagonal)(self._layout, self._device)

    @running_the_model
    def fit(self, loader: Iterable[Any], override: bool = True, progress_bar: bool = False) -> UnfactoredLaplace:
        """One streaming pass over the data at the model's present parameters; see :meth:`ella_cuda.laplace.KronLaplace.fit`."""
        self._fit(loader, override, progress_bar)
        return self

    def _data_fit(self) -> DataFitGradient:
        return DataFitGradient(nn.Module())  # without gradients in the model's buffers

    def _allocate(self, rules: Sequence[Rule]) -> None:
        self._lay_out()
        self._curvature = self._no_curvature()

    def _pass_over(
        self,
        sums: FitSums,
        loader: Iterable[Any],
        progress_bar: bool,
        hessian_at: Callable[[Inputs], Tensor] | None = None,
    ) -> None:
        with JacobianPass(self.model, self._rules, self._layout.shapes, self.memory_budget).running() as run:
            for x, y in self._batches(sums, loader, progress_bar, run, several=True):
                with without_autocast(self._device.type):
                    sums.statistic = sums.statistic + self._add(run, x, y, hessian_at)

    def _check_finite(self, sums: FitSums) -> None:
        if not (sums.statistic.isfinite() and self._curvature.total.isfinite().all()):
            raise FloatingPointError(
                "fit: the log likelihood or the curvature is not finite. Check the data and the parameters, or use float64."
            )

    def _hold(self) -> None:
        if self.n_data:
            self._curvature.most_rank = self.n_data * self.n_outputs

    def _weigh_elements(self) -> None:
        theta = torch.cat([p.detach().double().flatten() for p in self.fitted_model.parameters()])
        self.element_norms = self._layout.restricted((theta - self.prior_mean).square())

    def _add(self, run: JacobianPass, x: Inputs, y: Tensor, hessian_at: Callable[[Inputs], Tensor] | None) -> Tensor:
        likelihood = self.likelihood_function
        others = None if hessian_at is None else hessian_at(x)

        def columns(outputs: Tensor, which: slice) -> Columns | Tensor:
            likelihood.check(outputs, y[which])
            at = outputs if others is None else others[which].to(outputs.dtype)
            return likelihood.columns(at, y[which])

        outputs = run.run(x, columns, self._curvature, **self._passes())
        self.n_outputs = outputs[0].numel() if len(outputs) else self.n_outputs
        return likelihood.statistic(outputs, y)

    def _passes(self) -> dict[str, bool]:
        """How :meth:`JacobianPass.run` hands Jacobians out."""
        return {"each_alone": True}

    def _elementwise(self, precision: Tensor) -> Tensor:
        """A precision for each element that has a posterior."""
        return finer(self, precision)

    def _penalty(self, log_precision: Tensor, log_scale: Tensor, square_norms: Tensor) -> Tensor:
        precision = log_precision.exp()
        ratio = self._curvature.log_det_ratio(self._elementwise(precision), log_scale.exp())
        return ratio + (precision * square_norms).sum()

    def _terms(self, log_precision: Tensor, log_scale: Tensor, square_norms: Tensor) -> ops.KronEvidence:
        value, precision = self._penalty(log_precision, log_scale, square_norms), log_precision.exp()
        shares = self._curvature.shares(self._elementwise(precision), log_scale.exp())
        effective = torch.stack([part.sum() for part in shares.split(self.counts)])
        slope = precision * square_norms - (shares if is_finer(self, precision) else effective)
        return ops.KronEvidence(value, slope, effective)

    def _posterior(self, precision: Tensor, scale: Tensor) -> Posterior:
        return self._curvature.posterior(self._elementwise(precision), scale, self.fitted_model.dtype)

    def _curvature_state(self) -> dict[str, Any]:
        indices = None if self.subnetwork_indices is None else self.subnetwork_indices.clone()
        return {
            "subnetwork_indices": indices,
            "curvature": self._curvature.total.clone() if self.n_data else None,
            "element_norms": self.element_norms.clone() if self.n_data else None,
        }

    def _read(self, state: Mapping[str, Any], n_data: int) -> Callable[[], None]:
        given, here = state["subnetwork_indices"], self.subnetwork_indices
        if (given is None) != (here is None) or (given is not None and not torch.equal(given.cpu(), here.cpu())):
            raise ValueError("load_state_dict: subnetwork_indices of the state are others than here.")
        curvature = norms = None
        if n_data:
            norms = checked_tensor("element_norms", state["element_norms"], (self._layout.count,))
            curvature = self._no_curvature()
            curvature.total.copy_(checked_tensor("curvature", state["curvature"], curvature.total.shape))

        def take() -> None:
            self._lay_out()
            self._curvature, self.element_norms = (
                curvature,
                None if norms is None else norms.to(self._device, copy=True),
            )
            self._hold()

        return take


class FullLaplace(UnfactoredLaplace):
    """:class:`UnfactoredLaplace` with the whole matrix of all parameters, for some thousand of them."""


class DiagLaplace(UnfactoredLaplace):
    """:class:`UnfactoredLaplace` with the matrix' diagonal, as many numbers as there are parameters."""

    def __init__(self, model: nn.Module, likelihood: str | Likelihood = "classification", **how: Any) -> None:
        super().__init__(model, likelihood, hessian_structure="diag", **how)


class SubnetLaplace(UnfactoredLaplace):
    """:class:`UnfactoredLaplace` of a subnetwork, which the masks of :mod:`ella_cuda.laplace.exact_ggn` choose; the other elements of the
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


class _Kernels(JacobianConsumer):
    """Of each block of outputs, the products of Jacobians in each parameter tensor.

    Attributes:
        blocks: ``(L, B, R, R)`` float64: of L tensors, B blocks of R outputs.
    """

    def __init__(self, layout: Layout, apart: bool, memory_budget: int) -> None:
        self.layout, self._apart, self._budget = layout, apart, memory_budget
        self.places = {name: i for i, name in enumerate(layout.shapes)}
        self.blocks: list[Tensor] = []

    def begin(self, outputs: Tensor, which: slice, columns: slice) -> None:
        count, points = columns.stop - columns.start, len(outputs)
        sizes = (count, points, points) if self._apart else (1, count * points, count * points)
        needed = 8 * (len(self.places) + 2) * math.prod(sizes)  # with their sum and its factor
        available = available_bytes(outputs.device)
        if available is not None and needed > available:
            raise MemoryError(
                f"fit: the kernels of {points} data points with {count} columns take {needed:,} bytes, and {outputs.device} has "
                f"{available:,} available. Pass smaller batches, or outputs='apart'."
            )
        self._now = outputs.new_zeros(len(self.places), *sizes, dtype=torch.float64)
        self._largest = self._budget // max(8 * count * points, 1)

    def take(self, name: str, jacobian: Jacobian) -> None:
        kernel = self._now[self.places[name]]
        of_all = self.layout.indices is None and jacobian.index is None and jacobian.inputs is not None
        if of_all and jacobian.inputs.shape[1:3] == (1, 1):
            # A linear layer's: the products of inputs times those of outputs.
            inputs, outputs = jacobian.inputs[:, 0, 0].double(), self._in_blocks(jacobian.outputs[:, :, 0, 0].double())
            of_inputs = inputs @ inputs.T
            repeats = kernel.shape[1] // max(len(inputs), 1)
            kernel += outputs @ outputs.mT * of_inputs.repeat(repeats, repeats)
            return
        rows = self._in_blocks(self.layout.rows(name, jacobian))
        for part in rows.split(max(self._largest, 1), 2):
            kernel += part.double() @ part.double().mT

    def end(self) -> None:
        self.blocks.append(self._now)
        del self._now

    def _in_blocks(self, rows: Tensor) -> Tensor:
        """``(K, N, p)`` as ``(B, R, p)``."""
        return rows if self._apart else rows.flatten(0, 1)[None]

    def factors(self, weights: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Cholesky factors ``(B, R, R)`` of the unit matrix and the weighted sum of kernels, with the kernels."""
        for block in self.blocks:
            unit = torch.eye(block.shape[-1], dtype=block.dtype, device=block.device)
            yield torch.linalg.cholesky(torch.einsum("l,lbij->bij", weights, block) + unit), block


class NTKLaplace(UnfactoredLaplace):
    r"""The Laplace evidence with the whole generalised Gauss-Newton matrix, by the neural tangent kernel of each batch, for any number of
    parameters:

    .. math::
        \log|H + \Lambda| - \log|\Lambda| = \log|I + S^T J \Lambda^{-1} J^T S| \le \sum_b \log|I + S_b^T J_b \Lambda^{-1} J_b^T S_b|

    with J the Jacobian of all outputs in the parameters, S a square root of the likelihood's Hessian and :math:`\Lambda` the prior's
    precision. Each batch of :meth:`fit` is a block b: the evidence of one batch of all data is exact, and by Fischer's inequality that of
    several is a lower bound, tighter with larger batches. Each kernel is kept for each parameter tensor, so that the evidence, its
    gradient and :meth:`optimize_prior_precision` take any precisions without another pass. Time for C columns and batches of M points is
    :math:`(C M)^2 P` a batch for the kernels, memory :math:`8 (C M)^2` bytes for each batch and parameter tensor, and once :math:`C M` times
    the largest tensor. Predictions are of :class:`~ella_cuda.laplace.KronLaplace` and others.

    Args:
        outputs: "together", or "apart": each column of S is a block of its own, C kernels of M points. Bound and time are lower. A
            classification has the K - 1 columns of the Cholesky factor of :math:`diag(p) - p p^T`, classes from likely to unlikely.
        Others: see :class:`~ella_cuda.laplace.KronLaplace`.

    Source: Immer, van der Ouderaa, van der Wilk, Rätsch, Schölkopf, "Stochastic marginal likelihood gradients using neural tangent
    kernels", ICML 2023.
    """

    _elementwise_priors = False

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood = "classification",
        *,
        outputs: str = "together",
        **how: Any,
    ) -> None:
        self.outputs = check_choice("outputs", outputs, OUTPUTS)
        super().__init__(model, likelihood, hessian_structure="full", **how)

    def _described(self) -> str:
        return f"kernels of outputs {self.outputs}: {self._layout.count} parameters"

    @property
    def H(self) -> NoReturn:
        """Not held."""
        raise NotImplementedError("NTKLaplace holds kernels, not the matrix H; FullLaplace has H, for few parameters.")

    def _no_curvature(self) -> _Kernels:
        return _Kernels(self._layout, self.outputs == "apart", self.memory_budget)

    def _check_finite(self, sums: FitSums) -> None:
        if not (sums.statistic.isfinite() and all(block.isfinite().all() for block in self._curvature.blocks)):
            raise FloatingPointError(
                "fit: the log likelihood or a kernel is not finite. Check the data and the parameters, or use float64."
            )

    def _hold(self) -> None:
        pass

    def _weigh_elements(self) -> None:
        pass

    def _passes(self) -> dict[str, bool]:
        return {"all_data": True, "each_alone": self.outputs == "apart"}

    def _penalty(self, log_precision: Tensor, log_scale: Tensor, square_norms: Tensor) -> Tensor:
        weights = (log_scale - log_precision).exp()
        ratio = sum(2 * factor.diagonal(0, 1, 2).log().sum() for factor, _ in self._curvature.factors(weights))
        return ratio + (log_precision.exp() * square_norms).sum()

    def _terms(self, log_precision: Tensor, log_scale: Tensor, square_norms: Tensor) -> ops.KronEvidence:
        weights = (log_scale - log_precision).exp()
        value = (log_precision.exp() * square_norms).sum()
        effective = torch.zeros_like(weights)
        for factor, kernels in self._curvature.factors(weights):
            value = value + 2 * factor.diagonal(0, 1, 2).log().sum()
            inverse = torch.cholesky_inverse(factor)
            effective = effective + weights * torch.einsum("bij,lbij->l", inverse, kernels)
        return ops.KronEvidence(value, log_precision.exp() * square_norms - effective, effective)

    def _posterior(self, precision: Tensor, scale: Tensor) -> NoReturn:
        raise NotImplementedError(
            "NTKLaplace has the evidence alone; for a posterior fit KronLaplace, DiagLaplace or FullLaplace at la.prior_precision."
        )

    def _curvature_state(self) -> NoReturn:
        raise NotImplementedError(
            "NTKLaplace: kernels of batches are not saved; save la.prior_precision, and fit again."
        )

    def _read(self, state: Mapping[str, Any], n_data: int) -> NoReturn:
        self._curvature_state()


# masks of the parameters that have a posterior, by laplace-torch's names ----------------------------------------------


class SubnetMask(ABC):
    """A choice among the elements of a model's trainable parameters, flattened one after the other in ``model.named_parameters()`` order."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.parameters = model, trainable(model)
        self._indices: Tensor | None = None

    @property
    def indices(self) -> Tensor:
        """The indices that :meth:`select` chose, int64, ascending; AttributeError before it did."""
        if self._indices is None:
            raise AttributeError(f"{type(self).__name__}: call select first.")
        return self._indices

    @property
    def n_params_subnet(self) -> int:
        """The number of elements that are chosen."""
        return len(self.indices)

    def select(self, train_loader: Iterable[Any] | None = None) -> Tensor:
        """Choose, and return the indices ``(S,)``; masks that look at data need a loader of ``(x, y)``."""
        self._indices = self._mask(train_loader).nonzero().flatten()
        return self._indices

    @abstractmethod
    def _mask(self, train_loader: Iterable[Any] | None) -> Tensor:
        """Bool, one entry for each element."""


class ScoreBasedSubnetMask(SubnetMask):
    """The ``n_params_subnet`` elements with the largest scores; ValueError where there are not that many."""

    def __init__(self, model: nn.Module, n_params_subnet: int) -> None:
        super().__init__(model)
        self._total = sum(p.numel() for p in self.parameters.values())
        if not 0 < as_count("n_params_subnet", n_params_subnet) <= self._total:
            raise ValueError(
                f"n_params_subnet must be from 1 to the model's {self._total} trainable parameters, got {n_params_subnet!r}."
            )
        self._count = n_params_subnet

    def _mask(self, train_loader: Iterable[Any] | None) -> Tensor:
        scores = self.scores(train_loader)
        return torch.zeros_like(scores, dtype=torch.bool).index_fill_(0, scores.topk(self._count).indices, True)

    @abstractmethod
    def scores(self, train_loader: Iterable[Any] | None) -> Tensor:
        """A score for each element."""


class RandomSubnetMask(ScoreBasedSubnetMask):
    """Elements drawn from torch's global generator, or from ``generator``."""

    def __init__(self, model: nn.Module, n_params_subnet: int, generator: torch.Generator | None = None) -> None:
        super().__init__(model, n_params_subnet)
        self._generator = generator

    def scores(self, train_loader: Iterable[Any] | None) -> Tensor:
        on = self._generator
        return torch.rand(self._total, generator=on, device=on.device if on else "cpu")


class LargestMagnitudeSubnetMask(ScoreBasedSubnetMask):
    """The elements with the largest magnitudes."""

    def scores(self, train_loader: Iterable[Any] | None) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.parameters.values()]).abs()


class LargestVarianceDiagLaplaceSubnetMask(ScoreBasedSubnetMask):
    """The elements with the largest marginal variances under an approximation of all parameters, ``diag_laplace_model``, which is fitted to
    the loader where it is not yet; None makes a :class:`DiagLaplace` for classification. Under independent marginals the choice is the
    nearest to the whole posterior in the 2-Wasserstein distance.

    Source: Daxberger et al., "Bayesian deep learning via subnetwork inference", ICML 2021, section 4.
    """

    def __init__(self, model: nn.Module, n_params_subnet: int, diag_laplace_model: BaseLaplace | None = None) -> None:
        super().__init__(model, n_params_subnet)
        self.diag_laplace_model = DiagLaplace(model) if diag_laplace_model is None else diag_laplace_model
        if self.diag_laplace_model.parameter_names != list(self.parameters):
            raise ValueError("diag_laplace_model: expected an approximation of all trainable parameters of the model.")

    def scores(self, train_loader: Iterable[Any] | None) -> Tensor:
        if not self.diag_laplace_model.n_data:
            if train_loader is None:
                raise ValueError(f"{type(self).__name__}.select: pass train_loader, or a fitted diag_laplace_model.")
            self.diag_laplace_model.fit(train_loader)
        return self.diag_laplace_model.posterior_precision.diag(-1)


class ParamNameSubnetMask(SubnetMask):
    """All elements of named parameters; ValueError where no name is given, or one is no trainable parameter's."""

    def __init__(self, model: nn.Module, parameter_names: Sequence[str]) -> None:
        super().__init__(model)
        self._names = checked_names("parameter_names", parameter_names, self.parameters)

    def _mask(self, train_loader: Iterable[Any] | None) -> Tensor:
        parts = [torch.full((p.numel(),), name in self._names, device=p.device) for name, p in self.parameters.items()]
        return torch.cat(parts)


class ModuleNameSubnetMask(ParamNameSubnetMask):
    """All elements of the parameters inside of named modules; ValueError where no name is given, or one is no module's that has trainable
    parameters."""

    def __init__(self, model: nn.Module, module_names: Sequence[str]) -> None:
        parameters = trainable(model)
        known = {m for m, _ in model.named_modules() if any(is_inside(p, m) for p in parameters)}
        names = checked_names("module_names", module_names, known)
        super().__init__(model, [p for p in parameters if any(is_inside(p, name) for name in names)])


class LastLayerSubnetMask(ModuleNameSubnetMask):
    """All elements of the last layer's parameters: of ``last_layer_name``, or of the last module of ``model.named_modules()`` that itself has
    trainable parameters."""

    def __init__(self, model: nn.Module, last_layer_name: str | None = None) -> None:
        name = list(trainable(model))[-1].rpartition(".")[0] if last_layer_name is None else last_layer_name
        super().__init__(model, [name])
