"""Likelihoods: log probability of the labels, and square roots of their Hessian in the network's outputs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor


class Likelihood(ABC):
    """What the curvature pass needs to know about p(y | f), f the outputs ``(N, K)``."""

    @abstractmethod
    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise TypeError or ValueError where outputs and targets do not fit the likelihood."""

    @abstractmethod
    def statistic(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The sum over the batch that :meth:`log_likelihood` is a function of, 0-dim float64."""

    @abstractmethod
    def log_likelihood(self, statistic: Tensor, count: int, sigma_noise: Tensor) -> Tensor:
        """``sum_n log p(y_n | f_n)`` from the sum of the statistics; ``count`` is the number of targets' entries."""

    @abstractmethod
    def columns(self, outputs: Tensor, tolerance: float = 0.0) -> Tensor:
        """S, ``(columns, N, K)``, with ``sum_k S[k,n,:] S[k,n,:]^T`` the Hessian of ``-log p`` in ``f_n`` (at sigma =
        1), up to columns whose share of the batch's total trace is at most ``tolerance``.
        """

    @abstractmethod
    def sampled_column(self, outputs: Tensor, generator: torch.Generator | None) -> Tensor:
        """One random column, ``(1, N, K)``, whose outer product is the Hessian on average."""


class Classification(Likelihood):
    """Softmax over K classes; targets ``(N,)``, integers in 0..K-1."""

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        _check_outputs(outputs)
        if outputs.shape[1] < 2:
            raise ValueError("likelihood='classification' needs a model with at least 2 outputs (logits), got 1.")
        if targets.dim() != 1 or targets.shape[0] != outputs.shape[0]:
            raise ValueError(
                f"targets: expected class indices of shape ({outputs.shape[0]},), got shape {tuple(targets.shape)}."
            )
        if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
            raise TypeError(
                f"targets: expected integer class indices, got dtype {targets.dtype}; for real targets use "
                "likelihood='regression'."
            )
        low, high = (
            torch.stack(torch.aminmax(targets)).tolist() if targets.numel() else (0, 0)
        )  # one wait for the device
        if low < 0 or high >= outputs.shape[1]:
            raise ValueError(
                f"targets: labels must lie in 0..{outputs.shape[1] - 1} (the model has {outputs.shape[1]} outputs), "
                f"got {low}..{high}."
            )

    def statistic(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return -F.cross_entropy(outputs.double(), targets.long(), reduction="sum")

    def log_likelihood(self, statistic: Tensor, count: int, sigma_noise: Tensor) -> Tensor:
        return statistic

    def columns(self, outputs: Tensor, tolerance: float = 0.0) -> Tensor:
        """The K-1 columns of the Cholesky factor of ``diag(p) - p p^T``, in closed form, each image's classes sorted from
        likely to unlikely.

        With tails ``s_j = p_j + ... + p_{K-1}``: ``L[j,j] = sqrt(p_j s_{j+1} / s_j)`` and ``L[i,j] = -p_i sqrt(p_j /
        (s_j s_{j+1}))`` below. In logarithms nothing underflows to 0/0, however certain the prediction. After j columns
        a trace below s_j is left, so that a network which is sure among a few classes needs a few columns.
        """
        log_p, order = F.log_softmax(outputs.double(), 1).sort(1, descending=True)
        tails = log_p.flip(1).logcumsumexp(1).flip(1)
        here, after, p_j = tails[:, :-1], tails[:, 1:], log_p[:, :-1]
        factor = -torch.exp(log_p[:, :, None] + 0.5 * (p_j - here - after)[:, None, :]).tril(-1)  # (N, K, K-1)
        # Where only classes of probability exactly 0 are left (logits of -inf), the formula is inf - inf; the column is 0.
        factor.masked_fill_(after.isneginf()[:, None, :], 0.0)
        factor.diagonal(dim1=1, dim2=2).copy_(torch.exp(0.5 * (p_j + after - here)).masked_fill(after.isneginf(), 0.0))
        left = factor.square().sum((0, 1)).flip(0).cumsum(0).flip(0)  # trace of this column and those after it
        count = max(1, int((~(left <= tolerance * left[:1])).sum()))  # nan is kept, to be found in the factors
        factor = factor[:, :, :count]
        unsorted = torch.empty_like(factor).scatter_(1, order[:, :, None].expand_as(factor), factor)
        return unsorted.permute(2, 0, 1).to(outputs.dtype)

    def sampled_column(self, outputs: Tensor, generator: torch.Generator | None) -> Tensor:
        p = torch.softmax(outputs, 1)
        drawn = torch.multinomial(_on_device_of(p, generator), 1, generator=generator).to(p.device)
        return p.scatter_add(1, drawn, p.new_full((), -1.0).expand(drawn.shape))[None]


class Regression(Likelihood):
    """Gaussian with standard deviation sigma on every output; targets ``(N, K)``.

    Curvature is kept at sigma = 1: the precision 1/sigma^2 is applied when the evidence is evaluated, which keeps it
    differentiable.
    """

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        _check_outputs(outputs)
        if targets.shape != outputs.shape:
            raise ValueError(
                f"targets: expected the outputs' shape {tuple(outputs.shape)}, got {tuple(targets.shape)}."
            )
        if not targets.is_floating_point():
            raise TypeError(
                f"targets: expected real numbers for likelihood='regression', got dtype {targets.dtype}; use .float()."
            )

    def statistic(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.double() - targets.double()).square().sum()

    def log_likelihood(self, statistic: Tensor, count: int, sigma_noise: Tensor) -> Tensor:
        return -0.5 * statistic / sigma_noise**2 - count * (sigma_noise.log() + 0.5 * math.log(2 * math.pi))

    def columns(self, outputs: Tensor, tolerance: float = 0.0) -> Tensor:
        """The unit vectors; all of one size, so that none is left out."""
        n, k = outputs.shape
        return torch.eye(k, dtype=outputs.dtype, device=outputs.device)[:, None].expand(k, n, k)

    def sampled_column(self, outputs: Tensor, generator: torch.Generator | None) -> Tensor:
        device = outputs.device if generator is None else generator.device
        return torch.randn(1, *outputs.shape, dtype=outputs.dtype, device=device, generator=generator).to(
            outputs.device
        )


LIKELIHOODS: dict[str, type[Likelihood]] = {"classification": Classification, "regression": Regression}


def _check_outputs(outputs: Tensor) -> None:
    if not isinstance(outputs, Tensor) or outputs.dim() != 2:
        got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(f"the model must return a tensor (N, K), got {got}.")


def _on_device_of(tensor: Tensor, generator: torch.Generator | None) -> Tensor:
    return tensor if generator is None else tensor.to(generator.device)
