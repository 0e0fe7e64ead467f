"""Block-Kronecker algebra: sums of outer products, their eigenvalues, and the products of two of them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ella_cuda import ops


class FactorShape(NamedTuple):
    """Sizes of one parameter tensor's block-Kronecker factor; the tensor has ``groups * inputs * outputs`` elements.

    ``output_groups`` is ``groups``, or 1 where all blocks share one output-side factor. ``constant_input`` says that
    the input side is the number one, as for a bias: see :meth:`bias`.
    """

    groups: int
    inputs: int
    outputs: int
    output_groups: int
    constant_input: bool = False

    @classmethod
    def bias(cls, size: int) -> FactorShape:
        """Of a parameter that is added to the output: no input side, one dense block."""
        return cls(1, 1, size, 1, True)

    @property
    def numel(self) -> int:
        """Elements of the parameter tensor."""
        return self.groups * self.inputs * self.outputs


class SecondMoment:
    """A streaming sum of outer products in blocks: ``total[g] = sum_rows alpha * row[g] row[g]^T``, ``(G, d, d)``.

    Args:
        groups: G.
        size: d.
        like: a tensor whose dtype (float32 or float64) and device the sum takes.
        name: what it belongs to, for error messages.
    """

    def __init__(self, groups: int, size: int, like: Tensor, name: str) -> None:
        self.total = torch.zeros(groups, size, size, dtype=like.dtype, device=like.device)
        self.rows = 0
        self.name = name
        self._eigenvalues: Tensor | None = None

    def add(self, rows: Tensor, alpha: float = 1.0) -> None:
        """Add ``alpha`` times the outer products of ``rows``, ``(R, G, d)``, any strides."""
        ops.kron_accumulate_(self.total, rows, alpha)
        self.count(rows.shape[0])

    def count(self, rows: int) -> None:
        """Say that this many rows were added to ``total`` by other means."""
        self.rows += rows
        self._eigenvalues = None

    def clone(self, name: str) -> SecondMoment:
        """An independent copy under another name."""
        other = SecondMoment(0, 0, self.total, name)
        other.total, other.rows = self.total.clone(), self.rows
        return other

    def eigenvalues(self) -> Tensor:
        """Eigenvalues of every block of ``total``, ascending, ``(G, d)``, float64; computed once and kept until rows
        are added.

        The decomposition is in float64 whatever the sum's dtype. An eigensolver's error is eps times the *largest*
        eigenvalue, in every eigenvalue; the evidence compares products of small ones with the prior precision. Inputs
        of very different scales (a nearly dead channel beside a live one) give sums whose small eigenvalues float32
        stores to full relative accuracy, and a float32 solver replaces by noise of either sign.

        Raises:
            FloatingPointError: the sum is not finite.
            ArithmeticError: an eigenvalue is negative beyond rounding; the sum is then no sum of outer products.
        """
        if self._eigenvalues is None:
            if not torch.isfinite(self.total).all():
                raise FloatingPointError(
                    f"{self.name}: the factor has entries that are not finite; the activations or gradients of this "
                    "layer overflowed. Check the inputs and the parameters for inf and nan, or use float64."
                )
            values = torch.linalg.eigvalsh(self.total.double())
            # A sum of R rounded terms carries an error of about sqrt(R) eps relative to the largest eigenvalue, d eps
            # at the least. Below the smallest normal number, where the moments of a layer that was switched off end,
            # rounding is absolute: a product can lose up to that number, in each of R terms and d entries.
            number = torch.finfo(self.total.dtype)
            size = self.total.shape[-1]
            tolerance = number.eps * (size + math.sqrt(self.rows)) * values.amax(-1).clamp(min=0)
            tolerance = tolerance + number.tiny * size * max(self.rows, 1)
            beyond = values.amin(-1) < -tolerance
            if beyond.any():
                block = int(beyond.nonzero()[0])
                raise ArithmeticError(
                    f"{self.name}: block {block} of the factor has the eigenvalue {values[block].min().item():.6g}, "
                    f"negative beyond rounding (tolerance {tolerance[block].item():.3g}); a sum of outer products "
                    "cannot. If a rule of your own filled it, check that only positive multiples of outer products are "
                    "added."
                )
            self._eigenvalues = values.clamp(min=0)
        return self._eigenvalues


class KroneckerFactor:
    r"""Curvature of one parameter tensor: ``G`` blocks, block g being :math:`A_g \otimes B_g`.

    The sum over data is included: A averages over the data, B sums over it, so that a tensor's Hessian is the product.
    Raw sums are kept and divided when read, so more data can be added at any time and nothing depends on the batch
    size.

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
        """A, the input side, ``(G, a, a)``: mean over the data of the sum over shared positions; ones ``(1, 1, 1)`` for
        a bias.
        """
        if self.input_moment is None:
            return self.output_moment.total.new_ones(1, 1, 1)
        return self.input_moment.total / self.n_data

    @property
    def outputs(self) -> Tensor:
        """B, the output side, ``(G, b, b)`` or ``(1, b, b)``: sum over the data, mean over shared positions."""
        return self.output_moment.total

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

    def effective_parameters(self, precision: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        r""":math:`\gamma = \sum \lambda\mu / (\lambda\mu + \delta)`, between 0 and the number of parameters; 0-dim
        float64.

        Computed as :math:`\sum_i \lambda_i\, \partial \log\det / \partial \lambda_i`, which does not cancel for small
        values as :math:`P - \delta\, \mathrm{tr}(H + \delta)^{-1}` would.
        """
        inputs, outputs = self.eigenvalues()
        with torch.enable_grad():
            inputs = inputs.detach().clone().requires_grad_()
            value = ops.kron_logdet(inputs, (outputs * scale).detach(), precision.detach().double())
            (gradient,) = torch.autograd.grad(value, inputs)
        return (inputs.detach() * gradient).sum()

    def to_dense(self) -> Tensor:
        """All blocks as matrices, ``(G, a*b, a*b)``; index ``i * b + j`` is input i, output j. For small layers and
        tests.
        """
        inputs, outputs = self.inputs, self.outputs
        outputs = outputs.expand(inputs.shape[0], -1, -1)
        return torch.stack([torch.kron(a, b) for a, b in zip(inputs, outputs, strict=True)])
