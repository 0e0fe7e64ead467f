"""Fully connected layers, and tables: linear layers on one-hot vectors."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor, nn

from ella_cuda.laplace.call import Call
from ella_cuda.laplace.factors import FactorShape
from ella_cuda.laplace.rows import Dense, OneHot, Rows
from ella_cuda.laplace.rules.base import Rule, register, register_by_name
from ella_cuda.nn._autocast import full


@register(nn.Linear)
class LinearRule(Rule):
    """:class:`torch.nn.Linear` on ``(N, in)``, or on ``(N, ..., in)`` or ``(T, N, ..., in)`` with T shared positions.

    ``weight``: A = mean over data of the sum over positions of x xᵀ, B = sum over data, 1/T of the sum over positions of g gᵀ; with
    "reduce" A = mean over data of m mᵀ with m the mean of x over positions, B = sum over data of s sᵀ with s the sum of g. Block index
    (input, output). ``bias``: B = sum over data of s sᵀ, the exact GGN block.
    """

    def shapes(self) -> dict[str, FactorShape]:
        a, b = self.module.in_features, self.module.out_features
        return {"weight": FactorShape(1, a, b, 1), "bias": FactorShape.bias(b)}

    def shares_outputs(self) -> dict[str, str]:
        # Without shared positions, or with "reduce", both sides are the same sum.
        return {"bias": "weight"} if {"bias", "weight"} <= set(self.trainable) else {}

    def input_rows(self, x: Tensor) -> dict[str, Rows]:
        if x.dim() < 2:
            raise ValueError(
                f"{self.label}: expected an input (N, ..., {self.shapes()['weight'].inputs}), got shape {tuple(x.shape)}; add "
                "a batch axis."
            )
        return {"weight": at_positions(x)}

    def output_rows(self, gradient: Tensor, kept: None) -> dict[str, Rows]:
        rows = at_positions(gradient.flatten(0, 1))
        return {"weight": rows, "bias": rows}

    def input_gradient(self, gradient: Tensor, call: Call) -> Tensor:
        return gradient @ self.module.weight.detach()


def at_positions(x: Tensor) -> Dense:
    """The last axis of ``(R, ..., d)`` as rows, the axes between as positions."""
    return Dense(x.reshape(x.shape[0], math.prod(x.shape[1:-1]), 1, x.shape[-1]))


@register_by_name("transformers.pytorch_utils.Conv1D")
class Conv1DRule(LinearRule):
    """``transformers.pytorch_utils.Conv1D``, GPT-2's linear layer, whose weight is ``(in, out)``: as :class:`LinearRule`."""

    def shapes(self) -> dict[str, FactorShape]:
        a, b = self.module.weight.shape
        return {"weight": FactorShape(1, a, b, 1, layout="gab"), "bias": FactorShape.bias(b)}

    def input_gradient(self, gradient: Tensor, call: Call) -> Tensor:
        return gradient @ self.module.weight.detach().mT


@register(nn.Bilinear)
class BilinearRule(Rule):
    """:class:`torch.nn.Bilinear` on two inputs ``(N, ..., in1)`` and ``(N, ..., in2)``: a linear layer on all products of their entries.

    ``weight``: A = mean over data of the sum over positions of a aᵀ, a the products ``x1[i] x2[j]``; B = sum over data, mean over positions
    of g gᵀ; with "reduce" those of the mean of a and of the sum of g, as for a linear layer. Block index (i and j, output). ``bias``: the
    exact GGN block, as that of a linear layer.
    """

    sees_copies = True  # where a subclass adds to moments: rows are not linear in inputs

    def shapes(self) -> dict[str, FactorShape]:
        m = self.module
        weight = FactorShape(1, m.in1_features * m.in2_features, m.out_features, 1)
        return {"weight": weight, "bias": FactorShape.bias(m.out_features)}

    def input_rows(self, x1: Tensor, x2: Tensor) -> dict[str, Rows]:
        if "weight" not in self.trainable:
            return {}
        x1, x2 = full(x1), full(x2)
        return {"weight": at_positions((x1[..., :, None] * x2[..., None, :]).flatten(-2))}

    def output_rows(self, gradient: Tensor, kept: None) -> dict[str, Rows]:
        rows = at_positions(gradient.flatten(0, 1))
        return {"weight": rows, "bias": rows}


class Weights(NamedTuple):
    """Weights of a table's output rows ``(R, T, 1, d)`` at the positions of N data points: ``mean`` ``(N, T)``, squared those of the mean of
    outer products over the positions that are no padding; ``sum`` ``(N, T)``, those of the sum over these; ``each`` ``(N, L)``, those of
    every look-up. T is L, or 1 where the rows of all look-ups are the same."""

    mean: Tensor
    sum: Tensor
    each: Tensor


class LookedUp(Dense):
    """Output rows ``(K N, T, 1, d)`` of a table, with weights of the positions: padding has none."""

    def __init__(self, values: Tensor, weights: Weights) -> None:
        super().__init__(values)
        self.weights = weights

    @property
    def positions(self) -> int:
        return 1  # the weights are those of a mean

    def _times(self, weights: Tensor) -> Tensor:
        apart = self.values.unflatten(0, (-1, len(weights)))
        return (apart * weights.to(self.values.dtype)[:, :, None, None]).flatten(0, 1)

    def _weighted(self) -> Tensor:
        return self._times(self.weights.mean)

    def dense(self) -> Tensor:
        return self._times(self.weights.each)

    def summed(self) -> Rows:
        return Dense(self._times(self.weights.sum).sum(1, keepdim=True))


@register(nn.Embedding)
class EmbeddingRule(Rule):
    """:class:`torch.nn.Embedding` on ``(N, ...)`` indices, with T shared positions.

    ``weight``: A = mean over data of the sum over positions of the one-hot vectors' outer products, a diagonal: one block of size 1 for every
    row of the table, how often data points look it up. B = sum over data, mean over a data point's positions of g gᵀ, shared by all blocks.
    Block index (row of the table, 1, entry of the row). Positions of ``padding_idx`` count for neither side.

    With "reduce" A is the diagonal of the mean over data of m mᵀ, m the mean of a data point's one-hot vectors: what is between two rows of
    the table would take the square of its rows. B = sum over data of s sᵀ with s the sum of g over positions.

    Raises:
        ValueError: the layer has ``max_norm``, which changes its weight when it is called.
    """

    def __init__(self, module: nn.Module, name: str, resolution: str = "shared") -> None:
        super().__init__(module, name, resolution)
        if module.max_norm is not None:
            raise ValueError(
                f"{self.label} has max_norm={module.max_norm}, by which a call changes its weight; build it with max_norm=None, or freeze it."
            )

    def serves_copies(self) -> bool:
        return False  # indices have no mean

    def shapes(self) -> dict[str, FactorShape]:
        m = self.module
        return {"weight": FactorShape(m.num_embeddings, 1, m.embedding_dim, 1, layout="gab")}

    def _counted(self, indices: Tensor) -> Tensor:
        """A mask of look-ups that are no padding."""
        return indices != (-1 if self.module.padding_idx is None else self.module.padding_idx)

    def input_rows(self, indices: Tensor) -> dict[str, Rows]:
        flat = indices.reshape(len(indices), math.prod(indices.shape[1:]))
        return {"weight": OneHot(flat, self._counted(flat), self.module.num_embeddings)}

    def keep(self, indices: Tensor) -> Weights:
        counted = self._counted(indices.reshape(len(indices), math.prod(indices.shape[1:]))).double()
        return Weights(counted / counted.sum(1, keepdim=True).clamp(min=1).sqrt(), counted, counted)

    def output_rows(self, gradient: Tensor, kept: Weights) -> dict[str, Rows]:
        rows = gradient.flatten(0, 1)
        return {"weight": LookedUp(rows.reshape(len(rows), kept.sum.shape[1], 1, rows.shape[-1]), kept)}


@register(nn.EmbeddingBag)
class EmbeddingBagRule(EmbeddingRule):
    """:class:`torch.nn.EmbeddingBag` on bags of indices ``(N, L)``, mode "sum" or "mean": an embedding with L shared positions and their sum
    or mean behind it.

    ``weight``: A as that of :class:`EmbeddingRule`; B = sum over data of g gᵀ, with g the gradient at a look-up: in mode "mean" the bag's
    divided by its length. With "reduce" B = sum over data of s sᵀ with s the sum of g over the bag.

    Raises:
        ValueError: ``max_norm``, another mode, or a call with offsets or weights.
    """

    def __init__(self, module: nn.Module, name: str, resolution: str = "shared") -> None:
        super().__init__(module, name, resolution)
        if module.mode not in ("sum", "mean"):
            raise ValueError(
                f"{self.label}: mode must be 'sum' or 'mean', got {module.mode!r}; freeze the layer, or use one of these."
            )

    def input_rows(
        self, indices: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> dict[str, Rows]:
        if indices.dim() != 2 or offsets is not None or per_sample_weights is not None:
            raise ValueError(
                f"{self.label}: expected bags of one length as indices (N, L), without offsets and per_sample_weights; pad shorter ones with "
                "padding_idx."
            )
        return super().input_rows(indices)

    def keep(self, indices: Tensor, *_: object) -> Weights:
        counted = self._counted(indices).double()
        length = counted.sum(1, keepdim=True)
        each = 1 / length.clamp(min=1) if self.module.mode == "mean" else (length >= 0).double()
        return Weights(each * (length > 0), each * length, each * counted)
