"""The evidence with its curvature inside the graph: exact gradients in whatever shapes the network, for small networks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ella_cuda.augment import AveragedFunction
from ella_cuda.laplace.batches import Inputs, data_points, inputs_on, plain_tensor, shapes_of, tensors_of
from ella_cuda.laplace.check_model import probe
from ella_cuda.laplace.evidence import resolved, square_distances
from ella_cuda.laplace.factors import KroneckerFactor, by_parameter
from ella_cuda.laplace.interception import hooks
from ella_cuda.laplace.kronecker_sums import KroneckerSums
from ella_cuda.laplace.layer_pass import GraphPass
from ella_cuda.laplace.parameters import Value
from ella_cuda.laplace.rows import Rows
from ella_cuda.laplace.second_moment import SecondMoment
from ella_cuda.laplace.test_time import at_test_time, refusing_reentrant, requiring_grad
from ella_cuda.modes import exclusively
from ella_cuda.ops._precision import without_autocast

if TYPE_CHECKING:
    from ella_cuda.laplace.kron import KronLaplace
    from ella_cuda.laplace.rules.base import Rule


class _GraphMoment(SecondMoment):
    """A second moment whose total is in a graph."""

    def _learns(self) -> bool:
        return True


class _GraphSums(KroneckerSums):
    """Adds both sides to factors, in the graph of the rows."""

    takes_samples = False

    def add(self, factor: KroneckerFactor, side: str, rows: Rows, alpha: float = 1.0) -> None:
        moment = getattr(factor, f"{side}_moment")
        products = rows.products(moment.total.shape[0])
        if products is None:
            rows.gram_(moment, alpha)
            return
        moment.total = moment.total + alpha * products
        moment.count(rows.count)


def exact_log_marginal_likelihood(
    la: KronLaplace, x: Inputs, y: Tensor, prior_precision: Value | None = None, sigma_noise: Value | None = None
) -> Tensor:
    """The evidence of :meth:`KronLaplace.log_marginal_likelihood` on one batch, with everything that depends on the network inside
    the graph.

    The same number as ``la.fit([(x, y)]).log_marginal_likelihood()``. That one is differentiable in the network's hyperparameters (its
    buffers) with the unprojected factors held; this one also through the factors, by double backward: outputs, their Hessian, the
    activations and the gradients that the factors are made of. Memory grows with the number of outputs times all activations: for
    small networks, and to see what holding the factors costs. The model's parameters are constants.

    Args:
        la: of the model; neither needs a fit nor changes. Its ``resolution`` and ``approximation`` are followed, its column tolerance and
            ``fisher`` are not: all columns are used.
        x: ``(N, ...)``, all data; moved to the model's device, as ``la.fit`` does. A tuple, list or mapping has the model's arguments.
        y: targets, as for ``la.fit``, moved likewise.
        prior_precision: a number, or one value per parameter tensor; None is la's.
        sigma_noise: None is la's.

    Returns:
        0-dim float64, differentiable in the model's buffers that require a gradient and in the two hyperparameters.

    Raises:
        TypeError: la is no :class:`KronLaplace`, x or y no tensor, or y of a wrong dtype.
        ValueError: no data, an x that the model cannot be evaluated at, targets that do not fit, a layer that was never called, parameters
            without a rule, or a model that calls :func:`torch.utils.checkpoint.checkpoint`.

    Source: van der Ouderaa et al., NeurIPS 2023, section 4; Immer et al., "Invariance learning in deep neural networks with
    differentiable Laplace approximations", NeurIPS 2022 (gradients through the curvature).
    """
    if not hasattr(type(la), "factors"):
        raise TypeError(
            f"exact_log_marginal_likelihood: la must be a KronLaplace, got {type(la).__name__}; pass KronLaplace(model), fitted or not."
        )
    device = next(iter(la.fitted_model.present_parameters().values())).device
    x = inputs_on(x, device, "exact_log_marginal_likelihood")
    if not isinstance(y, Tensor):
        raise TypeError(
            f"exact_log_marginal_likelihood: y must be a tensor with all data along its first axis, got {type(y).__name__}; concatenate a "
            "loader's batches with torch.cat."
        )
    if isinstance(la.model, AveragedFunction):
        raise ValueError(
            "exact_log_marginal_likelihood: an AveragedFunction's factors are those of means over copies; use KronLaplace.fit, and "
            "ella_cuda.laplace.evidence_gradient for gradients in its amounts."
        )
    precision, sigma = (value.to(device) for value in resolved(la, prior_precision, sigma_noise))
    rules = la.fitted_model.present_rules()
    for rule in rules:
        if not rule.sees_calls():
            raise ValueError(
                f"exact_log_marginal_likelihood: {rule.label} has no rule of its own; use KronLaplace.fit, or freeze its parameters."
            )
        rule.allocate(_GraphMoment)
    if not data_points(x):
        raise ValueError(
            f"exact_log_marginal_likelihood: x has no data points; it must have shape (N, ...), got {shapes_of(x)}."
        )
    y = plain_tensor(y).to(device)
    with exclusively(la.model), without_autocast(precision.device.type):
        return _evidence(la, rules, x, y, precision, sigma)


def _evidence(la: KronLaplace, rules: list[Rule], x: Inputs, y: Tensor, precision: Tensor, sigma: Tensor) -> Tensor:
    """Of checked arguments."""
    dtype = next(p for p in la.model.parameters() if p.requires_grad).dtype
    likelihood, run = la.likelihood_function, GraphPass(la.model, rules, _GraphSums())
    parameters = [p for p in la.model.parameters() if p.requires_grad]
    with at_test_time(la.model):
        with _in_words(x, dtype):
            run.findings = probe(la.model, rules, x, several=False)
        with hooks(la.model.modules(), before=_require_no_checkpoint), requiring_grad(parameters, False), run.layers():
            with _in_words(x, dtype), torch.enable_grad():
                outputs = run.forward(x)
            for rule in rules:
                if all(noted.call.rule is not rule for noted in run.noted):
                    raise ValueError(
                        f"{rule.label} has trainable parameters but was never called; freeze it with requires_grad_(False) if the model "
                        "does not use it."
                    )
            with torch.no_grad():
                likelihood.check(outputs, y)
            gradients = run.gradients(outputs, likelihood.columns(outputs, y)[:], keep=True)
    with torch.enable_grad(), _in_words(x, dtype):
        run.hand_on(gradients)
    for factor in (f for rule in rules for f in rule.factors.values()):
        factor.n_data = data_points(x)
    factors = by_parameter(rules)
    statistic = likelihood.statistic(outputs, y)
    statistic = statistic if la.temperature == 1 else statistic / la.temperature
    total = likelihood.log_likelihood(statistic, y.numel(), sigma)
    norms = square_distances(la, la.fitted_model.parameters())
    for name, delta, norm in zip(la.parameter_names, precision.unbind(), norms.unbind(), strict=True):
        factor, size = factors[name], la.model.get_parameter(name).numel()
        log_det_ratio = factor.logdet(delta, sigma**-2 / la.temperature) - size * delta.log()
        total = total - 0.5 * (log_det_ratio + delta * norm)
    return total


def _require_no_checkpoint(*_: Any) -> None:
    """ValueError inside of a checkpoint, which would compute a layer anew for a gradient that is taken when no layer is seen any more."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        raise ValueError(
            "exact_log_marginal_likelihood: the model calls torch.utils.checkpoint, which computes layers anew; call it without."
        )


@contextmanager
def _in_words(x: Inputs, dtype: torch.dtype) -> Iterator[None]:
    """Have torch's own errors, which name no argument, say what was done."""
    try:
        with refusing_reentrant("exact_log_marginal_likelihood"):
            yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError) as error:
        dtypes = ", ".join(str(tensor.dtype) for tensor in tensors_of(x))
        raise ValueError(
            f"exact_log_marginal_likelihood: the model cannot be evaluated at x of shape {shapes_of(x)}, {dtypes}; pass what the "
            f"model takes, all data along the first axis (the parameters are {dtype}). It failed with: {error}"
        ) from error
