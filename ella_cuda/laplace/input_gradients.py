"""Predictions with gradients in their inputs, by Jacobians of single data points."""

from __future__ import annotations

import torch
from torch import Tensor

from ella_cuda.laplace.batches import Inputs, map_tensors, model_outputs, tensors_of
from ella_cuda.laplace.evidence import Evidence
from ella_cuda.laplace.posterior import Posterior
from ella_cuda.laplace.tangent import ReplacedParameters, Values
from ella_cuda.laplace.test_time import at_test_time, in_plain_products
from ella_cuda.modes import running_the_model
from ella_cuda.ops._precision import without_autocast


def is_wanted(la: Evidence, x: Inputs) -> bool:
    """Whether predictions at x are to have a graph."""
    return la.enable_backprop and torch.is_grad_enabled() and any(t.requires_grad for t in tensors_of(x))


@running_the_model
def outputs_and_jacobians(la: Evidence, x: Inputs) -> tuple[Tensor, Tensor]:
    """The network's outputs ``(N, ...)`` and their Jacobians ``(N, E, P)`` in the parameters with a posterior, both in the graph of x; E
    entries of a data point's outputs."""
    parameters = ReplacedParameters(la.model, la.parameter_names)
    parts = list(x.values()) if isinstance(x, dict) else [x] if isinstance(x, Tensor) else list(x)

    def one(values: Values, *given: object) -> tuple[Tensor, Tensor]:
        some = dict(zip(x, given, strict=True)) if isinstance(x, dict) else given[0] if isinstance(x, Tensor) else given
        with parameters.replaced(values):
            outputs = model_outputs(la.model, map_tensors(some, lambda t: t[None]))[0]
        return outputs.flatten(), outputs

    axes = [0 if isinstance(part, Tensor) else None for part in parts]
    jacobians = torch.func.vmap(torch.func.jacrev(one, has_aux=True), (None, *axes))
    filling, plain = la.fitted_model.filling(), without_autocast(la.fitted_model.device.type)
    with filling, at_test_time(la.model), in_plain_products(), plain:
        by_name, outputs = jacobians(parameters.values(), *parts)
    return outputs, torch.cat([by_name[name].flatten(2) for name in la.parameter_names], 2)


def moments(la: Evidence, x: Inputs, posterior: Posterior, joint: bool, diagonal: bool) -> tuple[Tensor, Tensor]:
    """:func:`ella_cuda.laplace.predictive.moments` in the graph of x."""
    outputs, rows = outputs_and_jacobians(la, x)
    rows = rows.flatten(0, 1)[None] if joint else rows
    white = posterior.bmm(rows.double(), -1).to(rows.dtype)
    if diagonal:
        return outputs, (rows * white).sum(2)
    covariance = rows @ white.mT
    return outputs, covariance[0] if joint else covariance
