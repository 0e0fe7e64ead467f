"""Curvature of parameter tensors as blocks of Kronecker products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ella_cuda import ops
from ella_cuda.nn import SpatialBasis

if TYPE_CHECKING:
    from ella_cuda.laplace.second_moment import SecondMoment


class FactorShape(NamedTuple):
    """Sizes of one parameter tensor's block-Kronecker factor; the tensor has ``groups * inputs * outputs`` elements.

    ``output_groups`` is ``groups``, or 1 where all blocks share one output-side factor. ``constant_input`` says that
    the input side is the number one, as for a bias: see :meth:`bias`. A side whose numbers are values at the anchors of a
    basis names it; its rows are then collected at the basis' positions, :attr:`row_inputs` or :attr:`row_outputs` of them.
    ``layout`` is the order in which the tensor's elements have block g, input a and output b, the last fastest: "gba" as a linear layer's or
    a convolution's weight, "bga" or "gab"; see :meth:`to_blocks`.
    """

    groups: int
    inputs: int
    outputs: int
    output_groups: int
    constant_input: bool = False
    input_basis: SpatialBasis | None = None
    output_basis: SpatialBasis | None = None
    layout: str = "gba"

    @classmethod
    def bias(cls, size: int) -> FactorShape:
        """Of a parameter that is added to the output: no input side, one dense block."""
        return cls(1, 1, size, 1, True)

    @classmethod
    def of_convolution(cls, m: nn.Module) -> FactorShape:
        """Of a convolution's weight: one block per group."""
        a = m.in_channels // m.groups * math.prod(m.kernel_size)
        return cls(m.groups, a, m.out_channels // m.groups, m.groups)

    def is_transpose_of(self, other: FactorShape) -> bool:
        """Whether a matrix with this factor could be the transpose of one with the other: the block structure of the one's input side,
        written as one block, is that of the other's output side.
        """
        if self.constant_input or other.constant_input or (self.input_basis or self.output_basis) is not None:
            return False
        sizes = [(s.groups * s.inputs, s.outputs) for s in (self, other) if s.output_groups == 1]
        # Of a square, the sizes do not tell; the tensor's first axis is the one's inputs and the other's outputs.
        apart = (self.layout == "gab") != (other.layout == "gab") or len({*sizes}) == 2
        return apart and len(sizes) == 2 and sizes[0] == sizes[1][::-1]

    @property
    def numel(self) -> int:
        """Elements of the parameter tensor."""
        return self.groups * self.inputs * self.outputs

    def to_blocks(self, tensor: Tensor, axes: int = 0) -> Tensor:
        """The parameter tensor, or what belongs to its elements, as ``(..., G, inputs, outputs)``; a view where torch allows for one.

        Args:
            tensor: ``(..., *parameter.shape)``.
            axes: how many axes are in front.
        """
        sizes = {"g": self.groups, "a": self.inputs, "b": self.outputs}
        split = tensor.reshape(*tensor.shape[:axes], *(sizes[axis] for axis in self.layout))
        return split.permute(*range(axes), *(axes + self.layout.index(axis) for axis in "gab"))

    def from_blocks(self, blocks: Tensor, shape: Sequence[int]) -> Tensor:
        """The inverse of :meth:`to_blocks`: ``(..., G, inputs, outputs) -> (..., *shape)``, shape that of the parameter tensor."""
        axes = blocks.dim() - 3
        split = blocks.permute(*range(axes), *(axes + "gab".index(axis) for axis in self.layout))
        return split.reshape((*blocks.shape[:axes], *shape))

    @property
    def row_inputs(self) -> int:
        """Length of the input side's rows, per block."""
        return _at_positions(self.inputs, self.input_basis)

    @property
    def row_outputs(self) -> int:
        """Length of the output side's rows, per block."""
        return _at_positions(self.outputs, self.output_basis)


def _at_positions(size: int, basis: SpatialBasis | None) -> int:
    return size if basis is None else size // basis.num_anchors * basis.num_points


class KroneckerFactor:
    r"""Curvature of one parameter tensor: ``G`` blocks, block g being :math:`A_g \otimes B_g`.

    The sum over data is included: A averages over the data, B sums over it, so that a tensor's Hessian is the product.
    Raw sums are kept in float64 and divided when read, so more data can be added at any time and nothing depends on
    the batch size beyond what single products of the parameters' dtype lose.

    Attributes:
        input_moment: raw sum of the input side, or None for a bias (whose input is the constant one).
        output_moment: raw sum of the output side; may be one object with another tensor's.
        n_data: data points in the sums.

    Source: Martens and Grosse, ICML 2015 (KFAC); the exact blocks of factored layers: van der Ouderaa et al., NeurIPS
    2023, appendix.
    """

    def __init__(self, shape: FactorShape, input_moment: SecondMoment | None, output_moment: SecondMoment) -> None:
        self.shape = shape
        self.input_moment = input_moment
        self.output_moment = output_moment
        self.n_data = 0

    @property
    def inputs(self) -> Tensor:
        """A, the input side, ``(G, a, a)``, float64: mean over the data of the sum over shared positions; ones ``(1, 1,
        1)`` for a bias.
        """
        if self.input_moment is None:
            return self.output_moment.total.new_ones(1, 1, 1)
        return self.input_moment.projected() / self.n_data

    @property
    def outputs(self) -> Tensor:
        """B, the output side, ``(G, b, b)`` or ``(1, b, b)``, float64: sum over the data, mean over shared positions."""
        return self.output_moment.projected()

    def eigenvalues(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues of both sides, ``(G, a)`` and ``(G or 1, b)``, float64, ascending, not negative.

        Raises:
            FloatingPointError: a factor is not finite.
            ArithmeticError: an eigenvalue is negative beyond rounding.
        """
        outputs = self.output_moment.eigenvalues()
        if self.input_moment is None:
            return outputs.new_ones(1, 1), outputs
        return self.input_moment.eigenvalues() / self.n_data, outputs

    def logdet(self, precision: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        r"""``log|scale * (A x B) + precision * I|`` over all blocks, a 0-dim float64 tensor, differentiable in both
        arguments.

        Args:
            precision: 0-dim, positive.
            scale: factor on the curvature, e.g. :math:`1/\sigma^2` of a Gaussian likelihood.
        """
        inputs, outputs = self.eigenvalues()
        return ops.kron_logdet(inputs, outputs * scale, precision.double())

    def to_dense(self) -> Tensor:
        """All blocks as matrices, ``(G, a*b, a*b)``; index ``i * b + j`` is input i, output j. For small layers and
        tests.
        """
        inputs, outputs = self.inputs, self.outputs
        outputs = outputs.expand(inputs.shape[0], -1, -1)
        return torch.stack([torch.kron(a, b) for a, b in zip(inputs, outputs, strict=True)])
