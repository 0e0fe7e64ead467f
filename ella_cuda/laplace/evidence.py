"""The Laplace evidence of a fit as a function of its hyperparameters, and the data fit's gradient in buffers of the model."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ella_cuda import ops
from ella_cuda.laplace.fingerprint import side_by_side
from ella_cuda.laplace.likelihoods import Likelihood
from ella_cuda.laplace.parameters import Value, as_float64, check_choice, check_positive, positive_number
from ella_cuda.nn import SpatialBasis


def hyperparameters(model: nn.Module) -> dict[str, Tensor]:
    """The model's buffers that require a gradient, by name."""
    return {name: buffer for name, buffer in model.named_buffers() if buffer.requires_grad}


class DataFitGradient:
    """Sum over batches, in float64, of the gradient of a batch's statistic in :func:`hyperparameters`.

    The matrix of a basis is as large as hundreds of images and costs more to build than a batch takes, so batches give the gradient in
    the matrix, and :meth:`total` goes through the basis once.

    Args:
        model: in evaluation mode when batches are added.

    Attributes:
        sums: so far, of the buffers that no basis has, then of the matrices of bases; None where there is nothing.

    Raises:
        ValueError: a buffer that requires a gradient is not a leaf, or has none in torch: running statistics of its norms.
    """

    def __init__(self, model: nn.Module) -> None:
        self.buffers = hyperparameters(model)
        for name, buffer in self.buffers.items():
            if not buffer.is_leaf:
                raise ValueError(
                    f"the buffer {name!r} requires a gradient but is not a leaf of the graph: it was computed from another tensor. Give the "
                    "model a leaf (tensor.detach().requires_grad_()) and go on from its gradient by hand, or use marglik_training's `learn`."
                )
        _require_constant_statistics(model)
        self.bases = [m for m in model.modules() if isinstance(m, SpatialBasis) and m.learns()]
        own = {id(b) for basis in self.bases for b in basis.buffers(recurse=False)}
        self.others = {name: b for name, b in self.buffers.items() if id(b) not in own}
        self.sums: list[Tensor | None] = [None] * (len(self.others) + len(self.bases))

    def add(self, statistic: Callable[[], Tensor], beside: Sequence[Tensor] = ()) -> list[Tensor | None]:
        """Differentiate what ``statistic`` computes by running the model on a batch; returns its gradients in tensors beside the buffers."""
        if not self.buffers:
            return [None] * len(beside)
        with ExitStack() as stack, torch.enable_grad():
            matrices = [stack.enter_context(basis.held()) for basis in self.bases]
            wanted = [*self.others.values(), *matrices]
            value = statistic()
            if not value.requires_grad:  # it depends on none of them
                return [None] * len(beside)
            found = torch.autograd.grad(value, [*wanted, *beside], torch.ones_like(value), allow_unused=True)
            found, others = found[: len(wanted)], found[len(wanted) :]
        self.sums = [
            old if new is None else new.double() if old is None else old + new
            for old, new in zip(self.sums, found, strict=True)
        ]
        return list(others)

    def total(self) -> dict[str, Tensor]:
        """The gradient of the sum of all batches' statistics in float64, by the buffers' names; zeros where nothing depends on one."""
        gradients = {id(b): s for b, s in zip(self.others.values(), self.sums, strict=False)}
        for basis, slope in zip(self.bases, self.sums[len(self.others) :], strict=True):
            own = [b for b in basis.buffers(recurse=False) if b.requires_grad]
            if slope is not None:
                with torch.enable_grad():
                    matrix = basis.matrix()
                    found = torch.autograd.grad(matrix, own, slope.to(matrix.dtype))
                gradients |= {id(b): g.double() for b, g in zip(own, found, strict=True)}
        return {
            name: torch.zeros_like(b, dtype=torch.float64) if gradients.get(id(b)) is None else gradients[id(b)]
            for name, b in self.buffers.items()
        }


def _require_constant_statistics(model: nn.Module) -> None:
    """ValueError where running statistics that a function of torch normalises by require a gradient, which it does not have."""
    for module_name, module in model.named_modules():
        if not isinstance(module, _NormBase) or not module.forward.__module__.startswith("torch."):
            continue
        for name in ("running_mean", "running_var"):
            buffer = getattr(module, name)
            if buffer is not None and buffer.requires_grad:
                raise ValueError(
                    f"layer {module_name or type(module).__name__!r} ({type(module).__name__}): its {name} requires a gradient, for which "
                    f"torch has no derivative. Leave it out of what is learned, {name}.requires_grad_(False); the layer's weight and bias do "
                    "the same, and are trained."
                )


if TYPE_CHECKING:
    from ella_cuda.laplace.fitted_model import FittedModel
    from ella_cuda.laplace.posterior import Posterior

MODES = ("network", "linear")
# Below this many in all, the data determine less than a single one of the layer's parameters: it does nothing that a type could name.
MIN_EFFECTIVE_PARAMETERS = 1.0


class Evidence:
    """An approximation: the attributes, documented at :class:`ella_cuda.laplace.KronLaplace`, from which the evidence follows.

    Attributes:
        statistic: what the log likelihood is a function of, 0-dim float64.
        square_norms: of each parameter tensor, the squared distance from the prior's mean, float64.
        n_targets: entries of all data's targets.
        counts: elements of each parameter tensor that have a posterior.
        free_elements: one where an element has a posterior and zero elsewhere, ``(P,)`` float64; None where all have one.
        element_norms: as square_norms, of each precision of the finer structure; None where precisions are of tensors alone.
        statistic_gradients: of the statistic, in the buffers that required a gradient at the fit.
        linear_fit: a LinearMode once it was found.
        fitted_likelihood: that of the curvature; None before a fit.
    """

    # Whether ``_terms`` are a function of static shapes that the host reads nothing of, once they were there.
    _records_steps: ClassVar[bool] = False
    # Whether each element may have a prior precision of its own.
    _elementwise_priors: ClassVar[bool] = False
    # The number of precisions of each parameter tensor where they are not of tensors: of elements or of output units.
    _finer_counts: list[int] | None
    model: nn.Module
    fitted_model: FittedModel
    likelihood: str
    likelihood_function: Likelihood
    fitted_likelihood: Likelihood | None
    parameter_names: list[str]
    n_params: int
    n_data: int
    n_targets: int
    counts: list[int]
    free_elements: Tensor | None
    temperature: float
    prior_precision: Tensor
    prior_mean: Tensor
    sigma_noise: Tensor
    statistic: Tensor
    square_norms: Tensor
    statistic_gradients: dict[str, Tensor]
    element_norms: Tensor | None
    memory_budget: int
    enable_backprop: bool
    linear_fit: Any
    posterior_precision: Posterior

    @abstractmethod
    def _penalty(self, log_precision: Tensor, log_scale: Tensor, square_norms: Tensor) -> Tensor:
        """``sum_l log|c H_l / delta_l + I| + delta_l square_norms_l``, c the exponential of log_scale, of a fit."""

    @abstractmethod
    def _norms_of_finer(self) -> Tensor:
        """``element_norms``, of a fit."""

    @abstractmethod
    def _terms(self, log_precision: Tensor, log_scale: Tensor, square_norms: Tensor) -> ops.KronEvidence:
        """:meth:`_penalty`, its slopes in the log precisions, and how many elements of each parameter tensor the data determine; float64,
        constants in the model's buffers."""


def evidence_at(la: Evidence, log_precision: Tensor, log_sigma: Tensor | None = None, at: str = "network") -> Tensor:
    """``la.log_marginal_likelihood`` as a function of the logarithms of the precisions and of sigma, None for that of ``la.sigma_noise``,
    float64. Nothing is checked; the derivatives in log_precision, ``(gamma_l - delta_l ||theta_l||^2) / 2``, come with the value."""
    sigma = la.sigma_noise if log_sigma is None else log_sigma.exp()
    penalty = la._penalty(log_precision, log_scale(la, log_sigma), norms_at(la, log_precision, at))
    return torch.add(log_likelihood(la, sigma, at), penalty, alpha=-0.5)


def share_of(la: Evidence, n_data: int) -> float:
    """The fit's share of so many data points; ValueError where the fit has more, RuntimeError before it."""
    la.fitted_model.require_fit()
    if n_data < la.n_data:
        raise ValueError(f"n_data must be at least the {la.n_data} data points of the fit, got {n_data}.")
    return la.n_data / n_data


@contextmanager
def sharing_prior(la: Evidence, n_data: int) -> Iterator[None]:
    """For the duration of the context the data of a fit bear their share of the prior: la's evidence is that share of
    :func:`evidence_bound`, and what raises the one raises the other."""
    before, share = (la.square_norms, la.element_norms), share_of(la, n_data)
    la.square_norms = la.square_norms * share
    if is_finer(la, la.prior_precision):
        la.element_norms = la._norms_of_finer() * share
    try:
        yield
    finally:
        la.square_norms, la.element_norms = before


def evidence_bound(
    la: Evidence, n_data: int, prior_precision: Value | None = None, sigma_noise: Value | None = None
) -> Tensor:
    r"""An estimate of the Laplace evidence of ``n_data`` data points from a fit to M of them, 0-dim float64, differentiable as
    :meth:`ella_cuda.laplace.KronLaplace.log_marginal_likelihood`:

    .. math::
        \tfrac{N}{M} \left[ \log p(B | \theta) - \tfrac12 \log|H_B \Lambda^{-1} + I| \right] - \tfrac12 \|\theta\|^2_\Lambda

    For random subsets B, or batches of a partition whose chances are in proportion to their sizes (of one class each, balanced ones), its
    mean is a lower bound of the evidence of all data, closer with larger M, and equal to it at M = N, where :math:`H_B` is a sum over data
    points: the log determinant is submodular in B. So it is for :class:`~ella_cuda.laplace.NTKLaplace`,
    :class:`~ella_cuda.laplace.FullLaplace` and :class:`~ella_cuda.laplace.DiagLaplace`. Kronecker factors are no such sums: with
    :class:`~ella_cuda.laplace.KronLaplace` the mean may lie on either side of the evidence with all data's factors.

    Args:
        la: fitted to the subset.
        n_data: N.
        prior_precision, sigma_noise: as of ``log_marginal_likelihood``, None is la's; la keeps its own.

    Raises:
        ValueError: N is less than M, or a value does not fit.
        RuntimeError: la is not fitted.

    Source: Immer et al., "Stochastic marginal likelihood gradients using neural tangent kernels", ICML 2023.
    """
    share, (precision, sigma) = share_of(la, n_data), resolved(la, prior_precision, sigma_noise)
    scale = log_scale(la, None if sigma_noise is None else sigma.log())
    penalty = la._penalty(precision.log(), scale, norms_at(la, precision) * share)
    return torch.add(log_likelihood(la, sigma), penalty, alpha=-0.5) / share


def mean_at(la: Evidence, at: str) -> Any:
    """What has the ``statistic`` and ``square_norms`` of the network's parameters, "network", or of the linearised network's mode, "linear";
    RuntimeError before a fit, or where the mode was not found."""
    la.fitted_model.require_fit()
    return la if check_choice("at", at, MODES) == "network" else linear_fit_of(la, "at")


def norms_at(la: Evidence, precision: Tensor, at: str = "network") -> Tensor:
    """The ``square_norms`` of :func:`mean_at`, of elements or units where the precisions are of these."""
    mean = mean_at(la, at)
    if not is_finer(la, precision):
        return mean.square_norms
    if at == "linear":
        require_of_tensors(la, precision)
    return la._norms_of_finer()


def require_of_tensors(la: Evidence, precision: Tensor) -> None:
    """ValueError where the precisions are of elements or units."""
    if is_finer(la, precision):
        raise ValueError(
            f"prior_precision: the linearised network's mode takes a number or {len(la.parameter_names)} values, one per parameter tensor, "
            f"got {len(precision)}, one per {la._finer_word}; set prior_precision before."
        )


def is_finer(la: Evidence, precision: Tensor) -> bool:
    """Whether the precisions, a vector, are of elements or output units; of tensors with one each both are the same."""
    return len(precision) != len(la.parameter_names)


def of_tensors(la: Evidence, precision: Tensor) -> Tensor:
    """One precision per parameter tensor, which of elements or units is the geometric mean."""
    if not is_finer(la, precision):
        return precision
    parts = precision.log().split(la._finer_counts)
    return torch.stack([part.mean() if len(part) else part.new_zeros(()) for part in parts]).exp()


def finer(la: Evidence, precision: Tensor) -> Tensor:
    """One precision per element or output unit, whichever la may have; each tensor's own where there is one per tensor."""
    if is_finer(la, precision):
        return precision
    counts = torch.tensor(la._finer_counts, device=precision.device)
    return precision.repeat_interleave(counts, output_size=sum(la._finer_counts))


def linear_fit_of(la: Evidence, argument: str) -> Any:
    """The linearised network's mode at the fit; RuntimeError where it was not found, with the argument that asks for it."""
    if la.linear_fit is None:
        raise RuntimeError(
            f"{type(la).__name__}: {argument}='linear' needs the linearised network's mode at this fit; call fit_linear_mode(loader)."
        )
    return la.linear_fit


def require_likelihood_of_fit(la: Evidence) -> None:
    """RuntimeError where the likelihood is another one than that of the curvature."""
    if la.fitted_likelihood is not la.likelihood_function:
        raise RuntimeError(
            f"{type(la).__name__}: the likelihood was {la.fitted_likelihood!r} at the fit and is {la.likelihood_function!r}; call fit again."
        )


def log_likelihood(la: Evidence, sigma: Tensor, at: str = "network") -> Tensor:
    """``log p(D | theta)`` divided by the temperature, but for a Gaussian's normaliser, 0-dim float64."""
    statistic = mean_at(la, at).statistic
    require_likelihood_of_fit(la)
    if torch.is_grad_enabled() and la.fitted_model.has_hyperparameters():
        if at == "linear":
            raise RuntimeError(
                f"{type(la).__name__}: the evidence at='linear' has no derivatives in buffers; evaluate it under torch.no_grad()."
            )
        for name, b in hyperparameters(la.model).items():
            if name not in la.statistic_gradients:
                raise RuntimeError(
                    f"{type(la).__name__}: the buffer {name!r} requires a gradient, but did not at the fit; call fit again."
                )
            # Adds nothing but the gradient.
            statistic = statistic + (la.statistic_gradients[name] * (b - b.detach())).sum()
    statistic = statistic if la.temperature == 1 else statistic / la.temperature
    return la.likelihood_function.log_likelihood(statistic, la.n_targets, sigma)


def log_scale(la: Evidence, log_sigma: Tensor | None = None) -> Tensor:
    """Logarithm of the curvature's factor, which is kept at sigma = 1; None: at ``la.sigma_noise``."""
    scale = la.fitted_model.zero
    if la.temperature != 1:
        scale = scale - math.log(la.temperature)
    if log_sigma is None and not (la.fitted_likelihood or la.likelihood_function).has_noise:
        return scale
    return torch.sub(scale, la.sigma_noise.log() if log_sigma is None else log_sigma, alpha=2)


def data_weight(la: Evidence) -> Tensor:
    """The factor of the likelihood and of the curvature at sigma = 1, ``1 / (sigma^2 T)``, 0-dim float64."""
    return log_scale(la).exp().detach()


@torch.no_grad()
def present_terms(la: Evidence) -> ops.KronEvidence:
    """:meth:`Evidence._terms` at la's values; ``effective`` is ``la.effective_parameters()`` in ``parameter_names`` order."""
    la.fitted_model.require_fit()
    la.fitted_model.bases.check()
    terms = la._terms(la.prior_precision.log(), log_scale(la), norms_at(la, la.prior_precision))
    if len(terms.effective) == len(la.parameter_names):
        return terms
    parts = terms.effective.split(la._finer_counts)
    return terms._replace(effective=torch.stack([part.sum() for part in parts]))


def elements(la: Evidence, precision: Tensor | None = None) -> Tensor:
    """How many elements each of these precisions is of, or each parameter tensor has; float64, on the model's device."""
    counts = torch.tensor(la.counts, dtype=torch.float64, device=la.fitted_model.device)
    if precision is None or not is_finer(la, precision):
        return counts
    return finer(la, counts / torch.tensor(la._finer_counts, device=counts.device).clamp(min=1))


def square_distances(la: Evidence, parameters: Iterable[Tensor], mean: Tensor | None = None) -> Tensor:
    """The squared distance of each parameter tensor's elements with a posterior from the prior's mean, ``la.prior_mean`` unless given;
    float64."""
    parameters = list(parameters)
    device, sizes = parameters[0].device, [p.numel() for p in parameters]
    mean = (la.prior_mean if mean is None else mean).to(device)
    if not mean.dim() and la.free_elements is None:
        norms: list[Tensor] = []
        for memory in side_by_side(parameters):
            memory.whole.sub_(mean)
            norms += torch._foreach_norm(memory.parts)
        return torch.stack(norms).square()
    means = mean.split(sizes) if mean.dim() else [mean] * len(sizes)
    free = [1.0] * len(sizes) if la.free_elements is None else la.free_elements.to(device).split(sizes)
    parts = zip(parameters, means, free, strict=True)
    return torch.stack([((p.detach().double().flatten() - m).square() * f).sum() for p, m, f in parts])


def precisions_of(la: Evidence, value: Value, name: str = "prior_precision") -> Tensor:
    """One precision per parameter tensor, float64, of an argument that is a number or such a vector, or one per element or output unit
    where la has ``_finer_counts``; ValueError where it has another shape, or an entry is not positive and finite."""
    count, others = len(la.parameter_names), None if la._finer_counts is None else sum(la._finer_counts)
    found = as_float64(name, value, la.fitted_model.device)
    shapes = [(), (1,), (count,), *([] if others is None else [(others,)])]
    if tuple(found.shape) not in shapes:
        each = "" if others is None else f", or {others}, one per {la._finer_word}"
        raise ValueError(
            f"{name}: expected a number or a vector of {count} values, one per trainable parameter tensor "
            f"({', '.join(la.parameter_names[:3])}, ...){each}, got shape {tuple(found.shape)}."
        )
    check_positive(name, found.flatten().tolist() if isinstance(value, Tensor) else [float(value)])
    return found.reshape(()).expand(count) if found.numel() == 1 else found


def set_values(la: Evidence, precision: Tensor, sigma: Tensor, checked: bool = False) -> None:
    """Give la one precision per parameter tensor and sigma, 0-dim, float64. Unless they are known to be positive and finite, or checked by
    whoever reads them, ValueError where one is not: the device is waited for once."""
    if not checked:
        *precisions, noise = torch.cat([precision, sigma[None]]).tolist()
        check_positive("prior_precision", precisions)
        check_positive("sigma_noise", [noise])
    la._prior_precision, la._sigma_noise, la._predictive_prior_precision = precision, sigma, None


def sigma_of(la: Evidence, value: Value) -> Tensor:
    """The argument ``sigma_noise`` as a 0-dim float64 tensor; ValueError where it is not one positive finite number, or not 1 though the
    likelihood has no noise."""
    sigma = positive_number("sigma_noise", value)
    if not la.likelihood_function.has_noise and sigma != 1:
        raise ValueError(
            f"sigma_noise belongs to likelihood='regression'; it must be 1 for {la.likelihood}, got {sigma}."
        )
    return as_float64("sigma_noise", value, la.fitted_model.device).reshape(())


def resolved(la: Evidence, prior_precision: Value | None, sigma_noise: Value | None) -> tuple[Tensor, Tensor]:
    """Given hyperparameters, or la's where None: one precision per parameter tensor and sigma, float64, checked."""
    precision = la.prior_precision if prior_precision is None else precisions_of(la, prior_precision)
    return precision, la.sigma_noise if sigma_noise is None else sigma_of(la, sigma_noise)


def layer_type(effective_parameters: Mapping[str, float]) -> str | None:
    r"""The path with the most effective parameters :math:`\gamma`, the first of equals; None where all paths together have fewer than one.

    Source: van der Ouderaa et al., NeurIPS 2023, section 5.2 (the type); MacKay, "Bayesian interpolation", 1992 (:math:`\gamma` as the
    number of parameters that the data determine).
    """
    if not math.fsum(effective_parameters.values()) >= MIN_EFFECTIVE_PARAMETERS:
        return None
    return max(effective_parameters, key=lambda path: effective_parameters[path])
