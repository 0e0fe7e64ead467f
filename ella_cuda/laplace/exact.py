"""The evidence with its curvature inside the graph: exact gradients in whatever shapes the network, for small networks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ella_cuda import ops
from ella_cuda.laplace.curvature import hooked, run_as_written
from ella_cuda.laplace.kron import KronLaplace
from ella_cuda.laplace.likelihoods import checked_outputs
from ella_cuda.laplace.probe import probe
from ella_cuda.laplace.rules import Rule, rules_for
from ella_cuda.laplace.second_moment import SecondMoment
from ella_cuda.laplace.values import Value
from ella_cuda.modes import evaluation_mode
from ella_cuda.ops._autocast import without_autocast


class _GraphMoment(SecondMoment):
    """A second moment that is differentiable in its rows."""

    def add(self, rows: Tensor, alpha: float = 1.0) -> None:
        rows = rows.to(self.total.dtype)
        self.total = self.total + alpha * torch.einsum("rgi,rgj->gij", rows, rows)
        self.count(rows.shape[0])

    def add_weighted(self, rows: Tensor, weights: Tensor) -> None:
        rows = rows.to(self.total.dtype)
        self.total = self.total + rows.t() @ rows * weights
        self.count(rows.shape[0])

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
    la: KronLaplace, x: Tensor, y: Tensor, prior_precision: Value | None = None, sigma_noise: Value | None = None
) -> Tensor:
    """The evidence of :meth:`KronLaplace.log_marginal_likelihood` on one batch, with everything that depends on the network inside
    the graph.

    The same number as ``la.fit([(x, y)]).log_marginal_likelihood()``. That one is differentiable in the network's hyperparameters (its
    buffers) with the unprojected factors held; this one also through the factors, by double backward: outputs, their Hessian, the
    activations and the gradients that the factors are made of. Memory grows with the number of outputs times all activations: for
    small networks, and to see what holding the factors costs. The model's parameters are constants.

    Args:
        la: of the model; neither needs a fit nor changes. Its column tolerance and ``fisher`` are not used: all columns are.
        x: ``(N, ...)``, all data; moved to the model's device, as ``la.fit`` does.
        y: targets, as for ``la.fit``, moved likewise.
        prior_precision: a number, or one value per parameter tensor; None is la's.
        sigma_noise: None is la's.

    Returns:
        0-dim float64, differentiable in the model's buffers that require a gradient and in the two hyperparameters.

    Raises:
        TypeError: la is no :class:`KronLaplace`, x or y no tensor, or y of a wrong dtype.
        ValueError: no data, an x that the model cannot be evaluated at, targets that do not fit, or a layer that was called twice or
            never.

    Source: van der Ouderaa et al., NeurIPS 2023, section 4; Immer et al., "Invariance learning in deep neural networks with
    differentiable Laplace approximations", NeurIPS 2022 (gradients through the curvature).
    """
    if not isinstance(la, KronLaplace):
        raise TypeError(
            f"exact_log_marginal_likelihood: la must be a KronLaplace, got {type(la).__name__}; pass KronLaplace(model), fitted or not."
        )
    for name, value in (("x", x), ("y", y)):
        if not isinstance(value, Tensor):
            raise TypeError(
                f"exact_log_marginal_likelihood: {name} must be a tensor with all data along its first axis, got "
                f"{type(value).__name__}; concatenate a loader's batches with torch.cat."
            )
    device = next(iter(la.present_parameters().values())).device
    precision, sigma = (value.to(device) for value in la.resolve(prior_precision, sigma_noise))
    rules = rules_for(la.model, la.resolution)
    for rule in rules:
        rule.allocate(_GraphMoment)
    if not x.dim() or not x.shape[0]:
        raise ValueError(
            f"exact_log_marginal_likelihood: x has no data points; it must have shape (N, ...), got {tuple(x.shape)}."
        )
    x, y = x.to(precision.device), y.to(precision.device)
    with without_autocast(precision.device.type):
        return _evidence(la, rules, x, y, precision, sigma)


def _evidence(la: KronLaplace, rules: list[Rule], x: Tensor, y: Tensor, precision: Tensor, sigma: Tensor) -> Tensor:
    """Of checked arguments."""
    outputs, tapped, axes = _forward(la.model, rules, x)
    for rule in rules:
        if rule not in tapped:
            raise ValueError(
                f"{rule.label} has trainable parameters but was never called; freeze it with requires_grad_(False) if the model does not "
                "use it."
            )
    likelihood = la.likelihood_function
    with torch.no_grad():
        likelihood.check(outputs, y)
    layers = list(tapped)
    columns = [
        torch.autograd.grad(outputs, [tapped[r] for r in layers], column, create_graph=True)
        for column in likelihood.columns(outputs)[:]
    ]
    for rule, gradients in zip(layers, zip(*columns, strict=True), strict=True):
        gradient = torch.stack(gradients)
        if rule.differentiates:
            rule.pull_back(gradient.transpose(1, 2) if axes.get(rule) else gradient, None)
        else:
            rule.outputs(gradient)
    factors = {rule.full_name(n): f for rule in rules for n, f in rule.factors.items()}
    total = likelihood.log_likelihood(likelihood.statistic(outputs, y), outputs.numel(), sigma)
    for name, delta in zip(la.parameter_names, precision.unbind(), strict=True):
        factor, parameter = factors[name], la.model.get_parameter(name).detach().double()
        factor.n_data = x.shape[0]
        log_det_ratio = factor.logdet(delta, sigma**-2) - parameter.numel() * delta.log()
        total = total - 0.5 * (log_det_ratio + delta * parameter.square().sum())
    return total


def _forward(model: nn.Module, rules: list[Rule], x: Tensor) -> tuple[Tensor, dict[Rule, Tensor], dict[Rule, int]]:
    """The outputs in evaluation mode at constant parameters, every rule's layer's output in their graph, and the axis of the batch in it."""
    tapped: dict[Rule, Tensor] = {}
    parameters = [p for p in model.parameters() if p.requires_grad]
    anchor = torch.zeros((), dtype=parameters[0].dtype, device=x.device, requires_grad=True)
    axes: dict[Rule, int] = {}

    def tap(rule: Rule) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor:
            if rule in tapped:
                raise ValueError(f"{rule.label} was called twice in one forward pass; see KronLaplace.fit.")
            arguments = (*args, *kwargs.values())
            rule.inputs(*(a.transpose(0, 1) if axes.get(rule) and isinstance(a, Tensor) else a for a in arguments))
            tapped[rule] = out + anchor  # every output has a graph, the first layers' too
            return tapped[rule].clone()  # which the next layer may change in place

        return hook

    try:
        with evaluation_mode(model), run_as_written():
            axes.update(probe(model, rules, x, several=False).axes)
        with hooked(model, {rule: tap(rule) for rule in rules}, parameters), torch.enable_grad():
            return checked_outputs(model(x)), tapped, axes
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError) as error:  # torch's own words, which name no argument
        raise ValueError(
            f"exact_log_marginal_likelihood: the model cannot be evaluated at x of shape {tuple(x.shape)}, {x.dtype}; pass what the "
            f"model takes, all data along the first axis (the parameters are {parameters[0].dtype}). It failed with: {error}"
        ) from error
