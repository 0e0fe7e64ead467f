"""Precisions chosen at the network's weights and at the linear mode, one of all tensors and one of every normalised group."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from ella_cuda.laplace import prior_groups
from ella_cuda.laplace.base import BaseLaplace

LOWEST, HIGHEST = 1e-4, 1e4  # where searches may start
ROUNDS, UPDATES = 100, 1000  # at the linear mode, and at the network's weights, at most
RESTLESS = ".*the fixed points do not rest"


class Chosen(NamedTuple):
    """An approximation with the precisions that the evidence chooses, and whether these rest."""

    la: BaseLaplace
    at: str
    structure: str
    rest: bool

    def described(self) -> dict[str, Any]:
        """Where and in how many groups the precisions were chosen, these by tensor, and the evidence per data point."""
        la = self.la
        return {
            "at": self.at,
            "structure": self.structure,
            "rest": self.rest,
            "precision": dict(zip(la.parameter_names, la.prior_precision.tolist(), strict=True)),
            "neg_log_marginal_likelihood": -la.log_marginal_likelihood(at=self.at).item() / la.n_data,
            "effective_parameters": sum(la.effective_parameters().values()),
        }


def chosen(
    fitted: BaseLaplace,
    loader: Iterable[Any],
    at: str,
    structure: str,
    progress: bool = False,
    rounds: int = ROUNDS,
    tol: float = 1e-3,
) -> Chosen:
    """Precisions for a copy of a fitted approximation; the noise stays.

    The search starts where a tensor's precision is its entries over its squared norm; that at the linear mode starts at the network's
    choice, for its evidence can have several maxima. Both places follow a change of a tensor's scale.

    Args:
        fitted: with its curvature at the network's weights.
        loader: of the fit's data.
        at: a key of :data:`ella_cuda.reports.text.EVIDENCE_AT`.
        structure: of :data:`ella_cuda.reports.text.SHARED`.
        progress: whether to show progress bars.
        rounds: of the linear mode and the precisions, at most.
        tol: the largest change of a precision's logarithm in a round that is none.
    """
    la = copy.copy(fitted)
    sizes = torch.tensor([la.model.get_parameter(name).numel() for name in la.parameter_names]).to(la.square_norms)
    start = (sizes / la.square_norms).clamp(LOWEST, HIGHEST)
    with warnings.catch_warnings(record=True) as said:
        warnings.filterwarnings("always", message=RESTLESS)
        for where in dict.fromkeys(("network", at)):
            said.clear()
            la.optimize_prior_precision(
                method="mackay",
                n_steps=rounds if where == "linear" else UPDATES,
                init_prior_prec=start,
                prior_structure=structure,
                tune_sigma=False,
                at=where,
                train_loader=loader,
                tol=tol,
                progress_bar=progress,
            )
            start = la.prior_precision
    restless = [w for w in said if re.match(RESTLESS, str(w.message))]
    for w in said:
        if w not in restless:
            warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)
    return Chosen(la, at, structure, not restless)


def grouped_structure(model: torch.nn.Module) -> str:
    """ "normalised" for a network with a normalised group, "layerwise" for others, whose normalised groups are one."""
    return "normalised" if any(normalised for *_, normalised in prior_groups(model)) else "layerwise"
