"""Embeddings: linear layers on one-hot vectors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ella_cuda.laplace.factors import FactorShape
from ella_cuda.laplace.rules.base import Rule, register


@register(nn.Embedding)
class EmbeddingRule(Rule):
    """:class:`torch.nn.Embedding` on ``(N, ...)`` indices, with T shared positions (KFAC-expand).

    ``weight``: A = mean over data of the sum over positions of the one-hot vectors' outer products, which is diagonal and stored so: one
    block of size 1 for every row of the table, how often data points look it up. B = sum over data, mean over a data point's positions of
    g gᵀ, shared by all blocks. Block index (row of the table, 1, entry of the row). Positions of ``padding_idx`` count for neither side, so
    that it does not matter how far a batch is padded.

    Raises:
        ValueError: the layer has ``max_norm``, which changes its weight when it is called.
    """

    def __init__(self, module: nn.Module, name: str, resolution: str = "shared") -> None:
        super().__init__(module, name, resolution)
        if module.max_norm is not None:
            raise ValueError(
                f"{self.label} has max_norm={module.max_norm}, by which a call changes its weight; build it with max_norm=None, or freeze it."
            )

    def shapes(self) -> dict[str, FactorShape]:
        m = self.module
        return {"weight": FactorShape(m.num_embeddings, 1, m.embedding_dim, 1)}

    def inputs(self, indices: Tensor) -> None:
        padding = -1 if self.module.padding_idx is None else self.module.padding_idx
        counts = (indices != padding).double()
        each = counts.flatten(1).sum(1).clamp(min=1) if indices.dim() > 1 else counts.new_ones(len(indices))
        # Squared, the weights of a data point's positions are those of a mean.
        self.kept = (counts / each.sqrt().view(-1, *[1] * (indices.dim() - 1)))[..., None]
        seen = torch.bincount(indices[indices != padding], minlength=self.module.num_embeddings)
        self.factors["weight"].input_moment.add_counts(seen)

    def outputs(self, gradient: Tensor) -> None:
        rows = gradient * self.kept.to(gradient.dtype)
        self.factors["weight"].output_moment.add(rows.reshape(-1, 1, rows.shape[-1]))


@register(nn.EmbeddingBag)
class EmbeddingBagRule(EmbeddingRule):
    """:class:`torch.nn.EmbeddingBag` on bags of indices ``(N, L)``, mode "sum" or "mean": an embedding with L shared positions and their sum
    or mean behind it (KFAC-expand over the look-ups).

    ``weight``: A as that of :class:`EmbeddingRule`; B = sum over data of g gᵀ, with g the gradient at a look-up: in mode "mean" the bag's
    divided by its length.

    Raises:
        ValueError: ``max_norm``, another mode, or a call with offsets or weights.
    """

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
        counted = (self.kept != 0).sum(1).clamp(min=1).double()
        self.kept = 1 / counted if self.module.mode == "mean" else torch.ones_like(counted)
