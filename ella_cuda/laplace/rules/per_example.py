"""Parameters that no rule knows: blocks from the gradients of single data points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ella_cuda.laplace.factors import FactorShape
from ella_cuda.laplace.rows import Dense, Diagonal, Rows
from ella_cuda.laplace.rules.base import Rule


class PerExampleRule(Rule):
    """Parameters that a module's forward uses in a way no rule knows, whatever it is.

    Parameters without or with one axis, such as FixUp's scales and biases, get their exact GGN block: B = sum over data of g gᵀ, with g
    the gradient of a data point's column. Others get the block's exact diagonal: A has one block of size 1 for every entry, the mean over
    data of the squares of g's entry, and B is the number of data. The pass takes these gradients by itself, see
    :mod:`ella_cuda.laplace.per_example`; the module takes no hook.

    Args:
        module, name, resolution: as of :class:`Rule`.
        names: the parameters that it serves.
    """

    def __init__(self, module: nn.Module, name: str, resolution: str, names: Sequence[str]) -> None:
        self._names = tuple(names)
        super().__init__(module, name, resolution)

    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in super().parameters().items() if name in self._names}

    @staticmethod
    def is_exact(parameter: Tensor) -> bool:
        """Whether the parameter's whole block is computed, not its diagonal alone."""
        return parameter.dim() < 2

    def shapes(self) -> dict[str, FactorShape]:
        return {
            name: FactorShape.bias(p.numel()) if self.is_exact(p) else FactorShape(p.numel(), 1, 1, 1)
            for name, p in self.parameters().items()
        }

    def sees_calls(self) -> bool:
        return False

    def input_rows(self, *arguments: Any) -> dict[str, Rows]:
        raise NotImplementedError("PerExampleRule takes gradients, not inputs.")

    def output_rows(self, gradient: Tensor, kept: Any) -> dict[str, Rows]:
        raise NotImplementedError("PerExampleRule takes gradients, not inputs.")

    def rows(self, name: str, gradients: Tensor, data_too: bool) -> tuple[Rows | None, Rows | None]:
        """Rows of both sides of a parameter's factor, from the gradients of K columns of N data points, ``(K, N, *parameter.shape)``.

        Args:
            name: of the parameter.
            gradients: theirs.
            data_too: whether these are the data points' last columns, with which the points are counted.
        """
        rows = gradients.reshape(-1, self.module.get_parameter(name).numel())
        if self.shapes()[name].constant_input:
            return None, Dense(rows[:, None, None])
        squares = Diagonal(rows.double().square().sum(0), len(rows))
        count = gradients.shape[1]
        return squares, Diagonal(rows.new_full((1,), count), count) if data_too else None
