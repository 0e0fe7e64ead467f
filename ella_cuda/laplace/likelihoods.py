"""Likelihoods: log probability of the labels, and square roots of their Hessian in the network's outputs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Columns:
    """S, ``(columns, N, K)``, as slices that are computed when they are asked for: all of it has ``N K^2`` numbers.

    Args:
        count: how many columns.
        build: ``(begin, end) -> (end - begin, N, K)``.
        bytes_each: what building one takes at the most, temporaries included.
    """

    def __init__(self, count: int, build: Callable[[int, int], Tensor], bytes_each: int) -> None:
        self._count, self._build, self.bytes_each = count, build, bytes_each

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, part: slice) -> Tensor:
        begin, end, step = part.indices(self._count)
        if step != 1:
            raise ValueError(f"Columns: a slice must have step 1, got {step}.")
        return self._build(begin, max(begin, end))


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
    def columns(self, outputs: Tensor, tolerance: float = 0.0) -> Columns:
        """S with ``sum_k S[k,n,:] S[k,n,:]^T`` the Hessian of ``-log p`` in ``f_n`` (at sigma =
        1), up to columns whose share of the batch's total trace is at most ``tolerance``.
        """

    @abstractmethod
    def sampled_column(self, outputs: Tensor, generator: torch.Generator | None) -> Columns:
        """One random column, whose outer product is the Hessian on average."""


class Classification(Likelihood):
    """Softmax over K classes; targets ``(N,)``, integers in 0..K-1."""

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        if outputs.shape[1] < 2:
            raise ValueError("likelihood='classification' needs a model with at least 2 outputs (logits), got 1.")
        if targets.dim() != 1 or targets.shape[0] != outputs.shape[0]:
            if targets.shape == (len(outputs), 1):
                remedy = "; pass y.squeeze(1)"
            else:  # one column for each class
                remedy = "; of one-hot labels pass y.argmax(1)" if targets.shape == outputs.shape else ""
            raise ValueError(
                f"targets: expected class indices of shape ({outputs.shape[0]},), got shape {tuple(targets.shape)}{remedy}."
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

    def columns(self, outputs: Tensor, tolerance: float = 0.0) -> Columns:
        """The K-1 columns of the Cholesky factor of ``diag(p) - p p^T``, in closed form, each image's classes sorted from
        likely to unlikely.

        With tails ``s_j = p_j + ... + p_{K-1}``: ``L[j,j] = sqrt(p_j s_{j+1} / s_j)`` and ``L[i,j] = -p_i sqrt(p_j /
        (s_j s_{j+1}))`` below. In logarithms nothing underflows to 0/0, however certain the prediction. After j columns
        a trace below s_j is left, so that a network which is sure among a few classes needs a few columns.
        """
        log_p = F.log_softmax(outputs.double(), 1)  # (N, K)
        in_order, order = log_p.sort(1, descending=True)
        rank = torch.empty_like(order).scatter_(
            1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
        )
        tails, square_tails = (x.flip(1).logcumsumexp(1).flip(1)[:, 1:] for x in (in_order, 2 * in_order))
        here, p_j = torch.cat([in_order.logsumexp(1, keepdim=True), tails[:, :-1]], 1), in_order[:, :-1]
        # Where only classes of probability exactly 0 are left (logits of -inf), the formulas are inf - inf; the column is 0.
        nothing = tails.isneginf()
        below = (0.5 * (p_j - here - tails)).masked_fill(nothing, -torch.inf)  # log of L[i,j] / -p_i, (N, K-1)
        diagonal = (0.5 * (p_j + tails - here)).masked_fill(nothing, -torch.inf).exp()
        traces = diagonal.square() + (square_tails + 2 * below).masked_fill(nothing, -torch.inf).exp()
        left = traces.sum(0).flip(0).cumsum(0).flip(0)  # trace of this column and those after it
        count = max(1, int((~(left <= tolerance * left[:1])).sum()))  # nan is kept, to be found in the factors

        def build(begin: int, end: int) -> Tensor:
            columns = -(log_p + below.T[begin:end, :, None]).exp()  # (columns, N, K)
            places = torch.arange(begin, end, device=rank.device)[:, None, None]
            columns = columns.masked_fill(rank <= places, 0.0)
            return columns.scatter(2, order.T[begin:end, :, None], diagonal.T[begin:end, :, None]).to(outputs.dtype)

        return Columns(count, build, (3 * 8 + outputs.element_size()) * outputs.numel())

    def sampled_column(self, outputs: Tensor, generator: torch.Generator | None) -> Columns:
        p = torch.softmax(outputs, 1)
        drawn = torch.multinomial(_on_device_of(p, generator), 1, generator=generator).to(p.device)
        return _one(p.scatter_add(1, drawn, p.new_full((), -1.0).expand(drawn.shape)))


class Regression(Likelihood):
    """Gaussian with standard deviation sigma on every output; targets ``(N, K)``.

    Curvature is kept at sigma = 1: the precision 1/sigma^2 is applied when the evidence is evaluated, which keeps it
    differentiable.
    """

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        if targets.shape != outputs.shape:
            remedy = "; pass y[:, None]" if outputs.shape == (*targets.shape, 1) else ""
            raise ValueError(
                f"targets: expected the outputs' shape {tuple(outputs.shape)}, got {tuple(targets.shape)}{remedy}."
            )
        if not targets.is_floating_point():
            raise TypeError(
                f"targets: expected real numbers for likelihood='regression', got dtype {targets.dtype}; use .float()."
            )

    def statistic(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.double() - targets.double()).square().sum()

    def log_likelihood(self, statistic: Tensor, count: int, sigma_noise: Tensor) -> Tensor:
        return -0.5 * statistic / sigma_noise**2 - count * (sigma_noise.log() + 0.5 * math.log(2 * math.pi))

    def columns(self, outputs: Tensor, tolerance: float = 0.0) -> Columns:
        """The unit vectors; all of one size, so that none is left out."""
        n, k = outputs.shape

        def build(begin: int, end: int) -> Tensor:
            places = torch.arange(begin, end, device=outputs.device)
            return F.one_hot(places, k).to(outputs.dtype)[:, None].expand(-1, n, -1)

        return Columns(k, build, outputs.element_size() * k)

    def sampled_column(self, outputs: Tensor, generator: torch.Generator | None) -> Columns:
        device = outputs.device if generator is None else generator.device
        drawn = torch.randn(outputs.shape, dtype=outputs.dtype, device=device, generator=generator)
        return _one(drawn.to(outputs.device))


LIKELIHOODS: dict[str, type[Likelihood]] = {"classification": Classification, "regression": Regression}


def checked_outputs(outputs: Any) -> Tensor:
    """What a model returned, as a plain tensor ``(N, K)``.

    Raises:
        TypeError: it is no tensor.
        ValueError: it is not ``(N, K)``.
    """
    if not isinstance(outputs, Tensor):
        words = ", ".join(map(repr, outputs)) if isinstance(outputs, Mapping) else ""
        parts = (
            f" with the keys {words}" if words else f" of {len(outputs)}" if isinstance(outputs, (tuple, list)) else ""
        )
        raise TypeError(
            f"the model must return a tensor (N, K), got {type(outputs).__name__}{parts}; wrap it in a module whose forward returns the "
            "outputs alone."
        )
    if outputs.dim() != 2:
        remedy = "; of one output per image return outputs[:, None]" if outputs.dim() == 1 else ""
        raise ValueError(f"the model must return a tensor (N, K), got shape {tuple(outputs.shape)}{remedy}.")
    return outputs if type(outputs) is Tensor else outputs.as_subclass(Tensor)


def _one(column: Tensor) -> Columns:
    return Columns(1, lambda begin, end: column[None, :][begin:end], 0)


def _on_device_of(tensor: Tensor, generator: torch.Generator | None) -> Tensor:
    return tensor if generator is None else tensor.to(generator.device)
