"""Jacobians of a network's outputs in one parameter tensor, of single data points, in the layout of the tensor's factor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ella_cuda.laplace.factors import FactorShape
from ella_cuda.laplace.rows import OneHot, Rows
from ella_cuda.nn import SpatialBasis


class Jacobian(NamedTuple):
    r"""Of K outputs of each of N data points:
    :math:`M_{kngij} = \sum_t \mathtt{inputs}_{ntgi}\, \mathtt{outputs}_{kntgj}` over T shared positions.

    Attributes:
        outputs: ``(K, N, T, G, b)``; without ``inputs`` and ``index`` M itself, ``(K, N, G, a, b)``.
        inputs: ``(N, T, G, a)``, or None.
        index: ``(N, T)``, where the inputs are one-hot, as an embedding's: the block of each position, in the place of ``inputs``; a = 1
            and ``outputs`` is ``(K, N, T, 1, b)``.
        blocks: the blocks that g counts, of all that the tensor has; None is all.
    """

    outputs: Tensor
    inputs: Tensor | None = None
    index: Tensor | None = None
    blocks: range | None = None

    @classmethod
    def of_bias(cls, rows: Tensor) -> Jacobian:
        """Of a parameter without an input side: ``rows`` ``(K, N, b)``."""
        return cls(rows[:, :, None, None])

    @classmethod
    def of_rows(cls, shape: FactorShape, inputs: Rows | None, outputs: Rows, columns: int) -> Jacobian:
        """Of a parameter with a factor of this shape, from the rows of a call and of so many columns."""
        if shape.constant_input:
            return cls.of_bias(outputs.summed().dense()[:, 0, 0].unflatten(0, (columns, -1)))
        g = on_basis(outputs.dense(), shape.output_basis).unflatten(0, (columns, -1))
        if isinstance(inputs, OneHot):
            return cls(g, index=inputs.values)
        a = on_basis(inputs.dense(), shape.input_basis)
        return cls(g, a.expand(-1, -1, g.shape[3], -1), blocks=inputs.blocks)

    def dense(self, groups: int) -> Tensor:
        """M, ``(K, N, groups, a, b)``."""
        if self.index is not None:
            columns, n, _, _, b = self.outputs.shape
            whole = self.outputs.new_zeros(columns, n, groups, b)
            return whole.scatter_add(
                2, self.index[None, :, :, None].expand(columns, -1, -1, b), self.outputs[:, :, :, 0]
            )[:, :, :, None]
        m = self.outputs if self.inputs is None else torch.einsum("ntgi,kntgj->kngij", self.inputs, self.outputs)
        return self._among_all(m, groups)

    def square_sums(self, groups: int) -> Tensor:
        """``sum_kn M^2``, ``(groups, a, b)``, float64."""
        if self.index is not None:
            rows = without_repeats(self)
            sums = rows.double().square().sum(0)  # (N, T, b)
            whole = sums.new_zeros(groups, sums.shape[2]).index_add_(0, self.index.flatten(), sums.flatten(0, 1))
            return whole[:, None]
        if self.inputs is not None and self.inputs.shape[1] == 1:
            of_inputs, of_outputs = self.inputs[:, 0].double().square(), self.outputs[:, :, 0].double().square().sum(0)
            found = torch.einsum("ngi,ngj->gij", of_inputs, of_outputs)
        else:
            # Written out for one data point at a time.
            parts = (
                self.outputs.split(1, 1),
                self.inputs.split(1) if self.inputs is not None else [None] * self.outputs.shape[1],
            )
            found = sum(
                Jacobian(o, i).dense(o.shape[3])[:, 0].double().square().sum(0) for o, i in zip(*parts, strict=True)
            )
        return self._among_all(found, groups)

    def _among_all(self, of_blocks: Tensor, groups: int) -> Tensor:
        """``(..., G, a, b)`` of these blocks as ``(..., groups, a, b)``, zero in the others."""
        if self.blocks is None or len(self.blocks) == groups:
            return of_blocks
        whole = of_blocks.new_zeros(*of_blocks.shape[:-3], groups, *of_blocks.shape[-2:])
        whole[..., self.blocks.start : self.blocks.stop, :, :] = of_blocks
        return whole

    def over_copies(self, copies: int) -> Jacobian:
        """Of the mean over so many copies of each data point, one after the other, whose gradients are here as if they were data points: the
        outputs' gradients have the mean's weight already, and copies are positions."""
        if copies == 1:
            return self
        outputs = self.outputs.unflatten(1, (-1, copies))
        if self.inputs is None and self.index is None:
            return self._replace(outputs=outputs.sum(2))
        inputs, index = (
            t if t is None else t.unflatten(0, (-1, copies)).flatten(1, 2) for t in (self.inputs, self.index)
        )
        return self._replace(outputs=outputs.flatten(2, 3), inputs=inputs, index=index)

    def in_shape(self, shape: FactorShape, other: FactorShape, parameter: Tensor) -> Jacobian:
        """The same Jacobian by the blocks of another factor of the parameter."""
        if shape == other:
            return self
        tensor = shape.from_blocks(self.dense(shape.groups), parameter.shape)
        return Jacobian(other.to_blocks(tensor, 2))


def on_basis(rows: Tensor, basis: SpatialBasis | None) -> Tensor:
    """Rows at the positions of a basis as a weight at the basis' anchors sees them."""
    if basis is None:
        return rows
    psi = basis.matrix().to(rows)
    return (rows.unflatten(-1, (-1, psi.shape[1])) @ psi.T).flatten(-2)


def without_repeats(jacobian: Jacobian) -> Tensor:
    """The rows ``(K, N, T, b)`` of a Jacobian with an index, where those of a data point's positions of one block are summed at the first
    of these, and zero at the others."""
    rows, index = jacobian.outputs[:, :, :, 0], jacobian.index
    first = (index[:, :, None] == index[:, None]).to(torch.uint8).argmax(2)  # (N, T)
    return torch.zeros_like(rows).scatter_add(2, first[None, :, :, None].expand(rows.shape), rows)


def total(parts: Sequence[Jacobian], groups: int) -> Jacobian:
    """The sum of Jacobians in the same blocks: positions of several calls are positions of one."""
    first = parts[0]
    if len(parts) == 1:
        return first
    kinds = {(part.inputs is None, part.index is None, part.blocks) for part in parts}
    if len(kinds) == 1 and first.inputs is not None:
        inputs = torch.cat([part.inputs for part in parts], 1)
        return first._replace(outputs=torch.cat([part.outputs for part in parts], 2), inputs=inputs)
    if len(kinds) == 1 and first.index is not None:
        index = torch.cat([part.index for part in parts], 1)
        return first._replace(outputs=torch.cat([part.outputs for part in parts], 2), index=index)
    if len(kinds) == 1:
        return first._replace(outputs=torch.stack([part.outputs for part in parts]).sum(0))
    return Jacobian(torch.stack([part.dense(groups) for part in parts]).sum(0))
