"""The evidence with its curvature inside the graph: exact gradients in whatever shapes the network, for small networks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ella_cuda import ops
from ella_cuda.augment import AveragedFunction
from ella_cuda.laplace.batches import Inputs, data_points, inputs_on, plain_tensor, run_model, shapes_of, tensors_of
from ella_cuda.laplace.check_model import Findings, probe
from ella_cuda.laplace.curvature import at_test_time, hooked, refusing_reentrant, requiring_grad
from ella_cuda.laplace.data_fit import hyperparameters
from ella_cuda.laplace.evidence import resolved, square_distances
from ella_cuda.laplace.kron import KronLaplace
from ella_cuda.laplace.likelihoods import checked_outputs
from ella_cuda.laplace.rules import PerExampleRule, Rule
from ella_cuda.laplace.rules.base import arguments_in_order
from ella_cuda.laplace.second_moment import SecondMoment
from ella_cuda.laplace.values import Value
from ella_cuda.laplace.weight_sharing import more_than_a_call
from ella_cuda.modes import exclusively
from ella_cuda.ops._precision import without_autocast


class _GraphMoment(SecondMoment):
    """A second moment that is differentiable in its rows."""

    def add(self, rows: Tensor, alpha: float = 1.0) -> None:
        rows = rows.to(self.total.dtype)
        self.total = self.total + alpha * torch.einsum("rgi,rgj->gij", rows, rows)
        self.count(rows.shape[0])

    def add_weighted(self, rows: Tensor, weights: Tensor) -> None:
        rows = rows.to(self.total.dtype)
        self.total = self.total + rows.t() @ rows * weights
        self.count(rows.shape[0] * weights.shape[-1])

    def add_patches(
        self,
        x: Tensor,
        kernel_size: int | tuple[int, int],
        padding_mode: str = "circular",
        alpha: float = 1.0,
        **geometry: Any,
    ) -> None:
        parts = x.chunk(self.total.shape[0], 1)
        zeros = [torch.zeros_like(self.total[0]) for _ in parts]
        blocks = [
            ops.conv_kron_accumulate_torch_(zero, part, kernel_size, padding_mode, alpha, **geometry)
            for zero, part in zip(zeros, parts, strict=True)
        ]
        self.total = self.total + torch.stack(blocks)

    def _learns(self) -> bool:
        return True


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
        0-dim float64, differentiable in the model's buffers that require a gradient and in the two hyperparameters; once only where the
        model calls :func:`torch.utils.checkpoint.checkpoint`, and for as long as its parameters and buffers stay as they are.

    Raises:
        TypeError: la is no :class:`KronLaplace`, x or y no tensor, or y of a wrong dtype.
        ValueError: no data, an x that the model cannot be evaluated at, targets that do not fit, a layer that was called twice or
            never, or a checkpoint with ``use_reentrant=True``.

    Source: van der Ouderaa et al., NeurIPS 2023, section 4; Immer et al., "Invariance learning in deep neural networks with
    differentiable Laplace approximations", NeurIPS 2022 (gradients through the curvature).
    """
    if not isinstance(la, KronLaplace):
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
        _require_served(rule)
        rule.allocate(_GraphMoment)
    if not data_points(x):
        raise ValueError(
            f"exact_log_marginal_likelihood: x has no data points; it must have shape (N, ...), got {shapes_of(x)}."
        )
    y = plain_tensor(y).to(device)
    with exclusively(la.model), without_autocast(precision.device.type):
        return _evidence(la, rules, x, y, precision, sigma)


def _require_served(rule: Rule) -> None:
    """ValueError where only a fit serves the layer."""
    reason = more_than_a_call(rule)
    if not reason and isinstance(rule, PerExampleRule):
        reason = "has no rule of its own"
    if reason:
        raise ValueError(
            f"exact_log_marginal_likelihood: {rule.label} {reason}; use KronLaplace.fit, or freeze its parameters."
        )


def _evidence(la: KronLaplace, rules: list[Rule], x: Inputs, y: Tensor, precision: Tensor, sigma: Tensor) -> Tensor:
    """Of checked arguments."""
    likelihood, run = la.likelihood_function, _Taps(la.model, rules)
    with at_test_time(la.model), _in_words(x, run.dtype):
        found = probe(la.model, rules, x, several=False)
        axes = _axes(found, rules)
    with run.hooked():  # the way back too: what a checkpoint computes anew must meet what its first forward met
        with _in_words(x, run.dtype):
            outputs = run.forward(x)
        for rule in rules:
            if rule not in run.tapped:
                raise ValueError(
                    f"{rule.label} has trainable parameters but was never called; freeze it with requires_grad_(False) if the model does "
                    "not use it."
                )
        with torch.no_grad():
            likelihood.check(outputs, y)
        columns = [
            torch.autograd.grad(outputs, list(run.tapped.values()), column, create_graph=True)
            for column in likelihood.columns(outputs, y)[:]
        ]
    given = (precision, sigma)
    if run.recomputes:  # what these were made from is not to be reached inside of _Recomputing
        precision, sigma = (t.detach().requires_grad_(t.requires_grad) for t in given)
    for rule, gradients in zip(run.tapped, zip(*columns, strict=True), strict=True):
        with torch.enable_grad(), _in_words(x, run.dtype):
            arguments, axis = run.arguments[rule], axes.get(rule, 0)
            rule.inputs(*(_batch_first(a, axis) if isinstance(a, Tensor) else a for a in arguments))
        gradient = torch.stack([_batch_first(g, axis) for g in gradients])
        if rule.differentiates:
            rule.vjp(gradient, None)
        else:
            rule.outputs(gradient)
    factors = {rule.full_name(n): f for rule in rules for n, f in rule.factors.items()}
    statistic = likelihood.statistic(outputs, y)
    statistic = statistic if la.temperature == 1 else statistic / la.temperature
    total = likelihood.log_likelihood(statistic, y.numel(), sigma)
    norms = square_distances(la, {name: la.model.get_parameter(name) for name in la.parameter_names})
    for name, delta, norm in zip(la.parameter_names, precision.unbind(), norms.unbind(), strict=True):
        factor, size = factors[name], la.model.get_parameter(name).numel()
        factor.n_data = data_points(x)
        log_det_ratio = factor.logdet(delta, sigma**-2 / la.temperature) - size * delta.log()
        total = total - 0.5 * (log_det_ratio + delta * norm)
    if not (run.recomputes and total.requires_grad):
        return total
    buffers = list(hyperparameters(la.model).values())
    return _Recomputing.apply(run, lambda: (total, (*buffers, precision, sigma)), *buffers, *given)


def _axes(found: Findings, rules: list[Rule]) -> dict[Rule, int]:
    """The axis of the images in a layer's input and output; ValueError where only a fit serves how the layer is used."""
    for rule in rules:
        if rule in found.by_function or any(place.folded > 1 for place in found.places.get(rule, ())):
            how = "is used by a function alone" if rule in found.by_function else "has positions folded into the batch"
            raise ValueError(
                f"exact_log_marginal_likelihood: {rule.label} {how}; use KronLaplace.fit, or freeze its parameters."
            )
    return {rule: places[0].axis for rule, places in found.places.items()}


def _batch_first(tensor: Tensor, axis: int) -> Tensor:
    return tensor.transpose(0, 1) if axis else tensor


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


class _Taps:
    """The layers of one evaluation.

    Attributes:
        tapped: the output of every rule's layer that was called, in the graph.
        arguments: copies of what these layers got, in the graph; what follows may work on the originals in place.
        recomputes: whether a part of the forward may be computed anew for a gradient, as :func:`torch.utils.checkpoint.checkpoint` does.
        dtype: the parameters'.
    """

    def __init__(self, model: nn.Module, rules: list[Rule]) -> None:
        self.model, self.rules = model, rules
        self.tapped: dict[Rule, Tensor] = {}
        self.arguments: dict[Rule, list[Any]] = {}
        self.recomputes = False
        first = next(p for p in model.parameters() if p.requires_grad)
        self.dtype, self._anchor = (
            first.dtype,
            torch.zeros((), dtype=first.dtype, device=first.device, requires_grad=True),
        )
        self._first_time = False

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """The model in evaluation mode at constant parameters, with taps on its layers, for the duration of the context."""
        parameters, taps = (
            [p for p in self.model.parameters() if p.requires_grad],
            {rule: self._tap(rule) for rule in self.rules},
        )
        with at_test_time(self.model), requiring_grad(parameters, False), hooked(taps):
            yield

    def forward(self, x: Inputs) -> Tensor:
        """The outputs."""
        handles = [module.register_forward_pre_hook(self._look) for module in self.model.modules()]
        self._first_time = True
        try:
            with torch.enable_grad():
                return checked_outputs(run_model(self.model, x), data_points(x))
        finally:
            self._first_time = False
            for handle in handles:
                handle.remove()

    def _look(self, module: nn.Module, args: Any) -> None:
        self.recomputes = self.recomputes or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None

    def _tap(self, rule: Rule) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor:
            kind, out = type(out), plain_tensor(out)
            tapped = out + self._anchor  # every output has a graph, the first layers' too
            if self._first_time:  # a checkpoint comes again; sums and copies save nothing, which it counts
                if rule in self.tapped:
                    raise ValueError(
                        f"exact_log_marginal_likelihood: {rule.label} was called twice in one forward pass; KronLaplace.fit serves it."
                    )
                arguments = arguments_in_order(module, args, kwargs)
                self.arguments[rule] = [plain_tensor(a).clone() if isinstance(a, Tensor) else a for a in arguments]
                self.tapped[rule] = tapped
            tapped = tapped.clone()  # which the next layer may change in place
            return tapped if kind is Tensor else tapped.as_subclass(kind)

        return hook


class _Recomputing(torch.autograd.Function):
    """The evidence of a model that computes layers anew whenever a gradient needs them: gradients of it are taken with the taps on."""

    @staticmethod
    def forward(
        ctx: Any, run: _Taps, inside: Callable[[], tuple[Tensor, tuple[Tensor, ...]]], *inputs: Tensor
    ) -> Tensor:
        ctx.run, ctx.inside = run, inside
        return inside()[0].detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ValueError(
                "exact_log_marginal_likelihood: the model calls torch.utils.checkpoint, so its evidence has first gradients only; take them "
                "without create_graph=True, or do not checkpoint."
            )
        total, inputs = ctx.inside()
        wanted = [t for t, needs in zip(inputs, ctx.needs_input_grad[2:], strict=True) if needs]
        with ctx.run.hooked(), without_autocast(total.device.type):
            found = iter(torch.autograd.grad(total, wanted, gradient, retain_graph=True, allow_unused=True))
        return None, None, *(next(found) if needs else None for needs in ctx.needs_input_grad[2:])
