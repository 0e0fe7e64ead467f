"""Embeddings: linear layers on one-hot vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ella_cuda.laplace.factors import FactorShape
from ella_cuda.laplace.jacobian import Jacobian
from ella_cuda.laplace.rules.base import Rule, register


@register(nn.Embedding)
class EmbeddingRule(Rule):
    """:class:`torch.nn.Embedding` on ``(N, ...)`` indices, with T shared positions.

    ``weight``: A = mean over data of the sum over positions of the one-hot vectors' outer products, which is diagonal and stored so: one
    block of size 1 for every row of the table, how often data points look it up. B = sum over data, mean over a data point's positions of
    g gᵀ, shared by all blocks. Block index (row of the table, 1, entry of the row). Positions of ``padding_idx`` count for neither side, so
    that it does not matter how far a batch is padded.

    With "reduce" A is the diagonal of the mean over data of m mᵀ, m the mean of a data point's one-hot vectors: what is between two rows of
    the table would take the square of its rows. B = sum over data of s sᵀ with s the sum of g over positions.

    Raises:
        ValueError: the layer has ``max_norm``, which changes its weight when it is called.
    """

    reduces = True

    def __init__(self, module: nn.Module, name: str, resolution: str = "shared") -> None:
        super().__init__(module, name, resolution)
        if module.max_norm is not None:
            raise ValueError(
                f"{self.label} has max_norm={module.max_norm}, by which a call changes its weight; build it with max_norm=None, or freeze it."
            )

    def shapes(self) -> dict[str, FactorShape]:
        m = self.module
        return {"weight": FactorShape(m.num_embeddings, 1, m.embedding_dim, 1, layout="gab")}

    def inputs(self, indices: Tensor) -> None:
        m, self.positions = self.module, math.prod(indices.shape[1:])
        padding = -1 if m.padding_idx is None else m.padding_idx
        counts = (indices != padding).double()
        each = counts.flatten(1).sum(1).clamp(min=1) if indices.dim() > 1 else counts.new_ones(len(indices))
        if self.approximation == "reduce":
            self.kept = counts[..., None]
            images = torch.arange(len(indices), device=indices.device).view(-1, *[1] * (indices.dim() - 1))
            looked_up = (images * m.num_embeddings + indices)[indices != padding]
            pairs, times = torch.unique(looked_up, return_counts=True)
            shares = times / each[pairs // m.num_embeddings]
            seen = shares.new_zeros(m.num_embeddings)
            seen.index_put_((pairs % m.num_embeddings,), shares.square(), accumulate=True)  # in a fixed order on CUDA
        else:
            # Squared, the weights of a data point's positions are those of a mean.
            self.kept = (counts / each.sqrt().view(-1, *[1] * (indices.dim() - 1)))[..., None]
            seen = torch.bincount(indices[indices != padding], minlength=m.num_embeddings)
        if "weight" not in self.factors:
            return
        moment = self.factors["weight"].input_moment
        moment.add_counts(seen)
        # Several calls share the output side by their positions, padding included: how much of a batch is padding must not matter.
        moment.count(int((indices == padding).sum()))

    def outputs(self, gradient: Tensor) -> None:
        rows = gradient * self.kept.to(gradient.dtype)
        if self.approximation == "reduce" and rows.dim() > 3:
            rows = rows.flatten(2, -2).sum(2)
        self.factors["weight"].output_moment.add(rows.reshape(-1, 1, rows.shape[-1]))

    def jacobians(self, arguments: Sequence[Any], gradient: Tensor) -> dict[str, Jacobian]:
        indices = arguments[0]
        rows = gradient.flatten(2, -2) if gradient.dim() > 3 else gradient[:, :, None]  # (K, N, T, b)
        return self._looked_up(indices.reshape(len(indices), -1), rows)

    def _looked_up(self, indices: Tensor, rows: Tensor) -> dict[str, Jacobian]:
        """From gradients at the look-ups, ``(K, N, T, b)``; none goes to ``padding_idx``."""
        if self.module.padding_idx is not None:
            rows = rows.masked_fill((indices == self.module.padding_idx)[None, :, :, None], 0)
        return {"weight": Jacobian(rows[:, :, :, None], index=indices)}


@register(nn.EmbeddingBag)
class EmbeddingBagRule(EmbeddingRule):
    """:class:`torch.nn.EmbeddingBag` on bags of indices ``(N, L)``, mode "sum" or "mean": an embedding with L shared positions and their sum
    or mean behind it.

    ``weight``: A as that of :class:`EmbeddingRule`; B = sum over data of g gᵀ, with g the gradient at a look-up: in mode "mean" the bag's
    divided by its length. With "reduce" B = sum over data of s sᵀ with s the sum of g over the bag.

    Raises:
        ValueError: ``max_norm``, another mode, or a call with offsets or weights.
    """

    reduces = True

    def __init__(self, module: nn.Module, name: str, resolution: str = "shared") -> None:
        super().__init__(module, name, resolution)
        if module.mode not in ("sum", "mean"):
            raise ValueError(
                f"{self.label}: mode must be 'sum' or 'mean', got {module.mode!r}; freeze the layer, or use one of these."
            )

    def inputs(self, indices: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> None:
        if indices.dim() != 2 or offsets is not None or per_sample_weights is not None:
            raise ValueError(
                f"{self.label}: expected bags of one length as indices (N, L), without offsets and per_sample_weights; pad shorter ones with "
                "padding_idx."
            )
        super().inputs(indices)
        counted = (self.kept != 0).sum(1).double()
        each = 1 / counted.clamp(min=1) if self.module.mode == "mean" else torch.ones_like(counted)
        self.kept = each * counted if self.approximation == "reduce" else each

    def jacobians(self, arguments: Sequence[Any], gradient: Tensor) -> dict[str, Jacobian]:
        indices = arguments[0]
        if self.module.mode == "mean":
            counted = indices != (-1 if self.module.padding_idx is None else self.module.padding_idx)
            gradient = gradient / counted.sum(1).clamp(min=1)[:, None]
        return self._looked_up(indices, gradient[:, :, None].expand(-1, -1, indices.shape[1], -1))
