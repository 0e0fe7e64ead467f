"""Precisions chosen at the network's weights and at the linear mode, one of all tensors and one of every normalised group."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from typing import Any

import torch

from ella_cuda.laplace import prior_groups
from ella_cuda.laplace.base import BaseLaplace

LOWEST, HIGHEST = 1e-4, 1e4  # where searches may start
ROUNDS = {"network": 1000, "linear": 100}


def chosen(fitted: BaseLaplace, loader: Iterable[Any], at: str, structure: str, progress: bool = False) -> BaseLaplace:
    """A copy of a fitted approximation with the precisions that the evidence chooses; the noise stays.

    The search starts where a tensor's precision is its entries over its squared norm, which follows a change of the tensor's scale.

    Args:
        fitted: with its curvature at the network's weights.
        loader: of the fit's data.
        at: a key of :data:`ella_cuda.reports.text.EVIDENCE_AT`.
        structure: of :data:`ella_cuda.reports.text.SHARED`.
        progress: whether to show progress bars.
    """
    la = copy.copy(fitted)
    sizes = torch.tensor([la.model.get_parameter(name).numel() for name in la.parameter_names]).to(la.square_norms)
    start = (sizes / la.square_norms).clamp(LOWEST, HIGHEST)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*the fixed points do not rest")  # said by the row
        la.optimize_prior_precision(
            method="mackay",
            n_steps=ROUNDS[at],
            init_prior_prec=start,
            prior_structure=structure,
            tune_sigma=False,
            at=at,
            train_loader=loader,
            progress_bar=progress,
        )
    return la


def described(la: BaseLaplace, at: str, structure: str) -> dict[str, Any]:
    """Of an approximation: where and in how many groups the precisions were chosen, these by tensor, and the evidence per data point."""
    return {
        "at": at,
        "structure": structure,
        "precision": dict(zip(la.parameter_names, la.prior_precision.tolist(), strict=True)),
        "neg_log_marginal_likelihood": -la.log_marginal_likelihood(at=at).item() / la.n_data,
        "effective_parameters": sum(la.effective_parameters().values()),
    }


def grouped_structure(model: torch.nn.Module) -> str:
    """ "normalised" for a network with a normalised group, "layerwise" for others, whose normalised groups are one."""
    return "normalised" if any(normalised for *_, normalised in prior_groups(model)) else "layerwise"
