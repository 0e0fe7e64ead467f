"""Block-Kronecker algebra: sums of outer products and the products of two of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ella_cuda import ops
from ella_cuda.laplace.eigenvalues import eigenvalues, eigenvalues_of_all
from ella_cuda.nn import SpatialBasis


class FactorShape(NamedTuple):
    """Sizes of one parameter tensor's block-Kronecker factor; the tensor has ``groups * inputs * outputs`` elements.

    ``output_groups`` is ``groups``, or 1 where all blocks share one output-side factor. ``constant_input`` says that
    the input side is the number one, as for a bias: see :meth:`bias`. A side whose numbers are values at the anchors of a
    basis names it; its rows are then collected at the basis' positions, :attr:`row_inputs` or :attr:`row_outputs` of them.
    """

    groups: int
    inputs: int
    outputs: int
    output_groups: int
    constant_input: bool = False
    input_basis: SpatialBasis | None = None
    output_basis: SpatialBasis | None = None

    @classmethod
    def bias(cls, size: int) -> FactorShape:
        """Of a parameter that is added to the output: no input side, one dense block."""
        return cls(1, 1, size, 1, True)

    @property
    def numel(self) -> int:
        """Elements of the parameter tensor."""
        return self.groups * self.inputs * self.outputs

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


class SecondMoment:
    """A streaming sum of outer products in blocks: ``total[g] = sum_rows alpha * row[g] row[g]^T``, ``(G, d, d)``.

    Where weights are given at the A anchors of a basis, rows are collected at its X positions, as for a layer without one, and
    ``total`` is projected when it is read: d is then a multiple of X.

    Args:
        groups: G.
        size: d.
        like: a tensor whose dtype (float32 or float64) and device the sum takes.
        name: what it belongs to, for error messages.
        basis: of the weights, or None.
    """

    def __init__(self, groups: int, size: int, like: Tensor, name: str, basis: SpatialBasis | None = None) -> None:
        self.total = torch.zeros(groups, size, size, dtype=like.dtype, device=like.device)
        self.rows = 0
        self.name = name
        self.basis = basis
        self._eigenvalues: Tensor | None = None
        self._decomposed_on: Tensor | None = None  # the basis' matrix that they belong to

    def add(self, rows: Tensor, alpha: float = 1.0) -> None:
        """Add ``alpha`` times the outer products of ``rows``, ``(R, G, d)``, any strides."""
        ops.kron_accumulate_(self.total, rows, alpha)
        self.count(rows.shape[0])

    def add_weighted(self, rows: Tensor, weights: Tensor) -> None:
        """Add ``weights`` ``(G, d, d)``, symmetric, times the sum of the outer products of ``rows``, ``(R, d)``, entry by entry. Where
        the weights are sums of outer products too, so is what is added (Schur).
        """
        total = ops.kron_accumulate_(torch.zeros_like(self.total[:1]), rows[:, None], 1.0)
        self.total += total * weights
        self.count(rows.shape[0])

    def add_patches(
        self,
        x: Tensor,
        kernel_size: int | tuple[int, int],
        padding_mode: str = "circular",
        alpha: float = 1.0,
        **geometry: Any,
    ) -> None:
        """Add the outer products of the patches of x, ``(N, G*C, H, W)``, block g those of its g-th C channels; see
        :func:`ella_cuda.ops.conv_kron_accumulate_`. :meth:`count` them.
        """
        for block, part in zip(self.total, x.chunk(self.total.shape[0], 1), strict=True):
            ops.conv_kron_accumulate_(block, part, kernel_size, padding_mode, alpha, **geometry)

    def count(self, rows: int) -> None:
        """Say that this many rows were added to ``total`` by other means."""
        self.rows += rows
        self._eigenvalues = None

    def clone(self, name: str) -> SecondMoment:
        """An independent copy under another name."""
        other = type(self)(0, 0, self.total, name, self.basis)
        other.total, other.rows = self.total.clone(), self.rows
        return other

    def projected(self) -> Tensor:
        r"""``total``, or on a basis :math:`(I \otimes \Psi)\, total\, (I \otimes \Psi)^T` at its present state in float64.

        ``(G, d, d)``, or ``(G, d/X * A, d/X * A)``, differentiable in the basis' anchors and inverse lengthscale.

        Source: van der Ouderaa et al., NeurIPS 2023, section 4 and appendix, on sparsified layers.
        """
        if self.basis is None:
            return self.total
        psi, groups = self.basis.matrix().double(), self.total.shape[0]
        half = self.total.double().unflatten(2, (-1, psi.shape[1])) @ psi.T  # (G, d, d/X, A)
        whole = half.flatten(2).mT.unflatten(2, (-1, psi.shape[1])) @ psi.T  # (G, d/X * A, d/X, A)
        return whole.reshape(groups, half[0, 0].numel(), -1)

    def eigenvalues(self) -> Tensor:
        """Eigenvalues of every block of :meth:`projected`, ascending, ``(G, a)``, float64.

        Computed once and kept until rows are added or the basis changes; where the basis' anchors or inverse lengthscale require a
        gradient, anew at every call and differentiable in them.

        The decomposition is in float64 whatever the sum's dtype. An eigensolver's error is eps times the *largest*
        eigenvalue, in every eigenvalue; the evidence compares products of small ones with the prior precision. Inputs
        of very different scales (a nearly dead channel beside a live one) give sums whose small eigenvalues float32
        stores to full relative accuracy, and a float32 solver replaces by noise of either sign.

        Raises:
            FloatingPointError: the sum is not finite.
            ArithmeticError: an eigenvalue is negative beyond rounding; the sum is then no sum of outer products.
            torch.linalg.LinAlgError: a block's eigenvalues did not converge.
        """
        if self._learns():
            return self._checked(eigenvalues(self._blocks()))
        if self._eigenvalues is None or self._matrix() is not self._decomposed_on:
            self._keep(eigenvalues(self._blocks()))
        return self._eigenvalues

    @staticmethod
    def decompose_all(moments: Iterable[SecondMoment]) -> None:
        """Compute what :meth:`eigenvalues` of each keeps, of many at once: see :func:`ella_cuda.laplace.eigenvalues.eigenvalues_of_all`.

        Raises:
            What :meth:`eigenvalues` raises; other moments may have theirs.
        """
        lacking = [m for m in moments if m._eigenvalues is None or m._matrix() is not m._decomposed_on]
        # On the CPU one projection after the other: they are copies, in float64.
        apart = [m for m in lacking if m.total.is_cpu and m.basis is not None]
        for together in ([m for m in lacking if m not in apart], *([m] for m in apart)):
            for moment, values in zip(together, eigenvalues_of_all([m._blocks() for m in together]), strict=True):
                moment._keep(values)

    def _learns(self) -> bool:
        """Whether the eigenvalues are wanted as a function of the basis."""
        return self.basis is not None and torch.is_grad_enabled() and self.basis.learns()

    def _matrix(self) -> Tensor | None:
        return None if self.basis is None else self.basis.matrix()

    def _keep(self, values: Tensor) -> None:
        self._eigenvalues, self._decomposed_on = self._checked(values), self._matrix()

    def _blocks(self) -> Tensor:
        """:meth:`projected`, once the sum is found to be finite."""
        if not torch.isfinite(self.total).all():
            raise FloatingPointError(
                f"{self.name}: the factor has entries that are not finite; the activations or gradients of this "
                "layer overflowed. Check the inputs and the parameters for inf and nan, or use float64."
            )
        return self.projected()

    def _checked(self, values: Tensor) -> Tensor:
        """Eigenvalues without what rounding took below zero; ArithmeticError where it was more, LinAlgError where there are none."""
        with torch.no_grad():
            if values.isnan().any():
                block = int(values.isnan().any(-1).nonzero()[0])
                raise torch.linalg.LinAlgError(
                    f"{self.name}: the eigenvalues of block {block} of the factor did not converge; use float64 parameters, or fit on "
                    "data of another scale."
                )
            # A sum of R rounded terms carries an error of about sqrt(R) eps relative to the largest eigenvalue, d eps
            # at the least. Below the smallest normal number, where the moments of a layer that was switched off end,
            # rounding is absolute: a product can lose up to that number, in each of R terms and d entries.
            number = torch.finfo(self.total.dtype)
            size = self.total.shape[-1]
            largest, growth = values.amax(-1).clamp(min=0), 1.0
            if self.basis is not None:
                # The error is that of the sum before it was projected, times |Psi|^2 at most. Sums of rows and columns bound the norms.
                psi = self.basis.matrix().double().abs()
                growth = psi.sum(0).amax() * psi.sum(1).amax()
                largest = self.total.double().abs().sum(-1).amax(-1) * growth
            tolerance = number.eps * (size + math.sqrt(self.rows)) * largest
            tolerance = tolerance + number.tiny * size * max(self.rows, 1) * growth
            beyond = values.amin(-1) < -tolerance
            if beyond.any():
                block = int(beyond.nonzero()[0])
                raise ArithmeticError(
                    f"{self.name}: block {block} of the factor has the eigenvalue {values[block].min().item():.6g}, "
                    f"negative beyond rounding (tolerance {tolerance[block].item():.3g}); a sum of outer products "
                    "cannot. If a rule of your own filled it, check that only positive multiples of outer products are "
                    "added."
                )
        return values.clamp(min=0)


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
        return self.input_moment.projected().to(self.input_moment.total.dtype) / self.n_data

    @property
    def outputs(self) -> Tensor:
        """B, the output side, ``(G, b, b)`` or ``(1, b, b)``: sum over the data, mean over shared positions."""
        return self.output_moment.projected().to(self.output_moment.total.dtype)

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
