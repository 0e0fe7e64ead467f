"""The eigenvalues of all factors as one array."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ella_cuda import ops
from ella_cuda.laplace.factors import KroneckerFactor


class Spectra:
    """Eigenvalues of factors as :func:`ella_cuda.ops.kron_evidence` takes them, packed once for as long as no factor changes.

    Args:
        factors: of all parameter tensors, in their order.
    """

    def __init__(self, factors: Iterable[KroneckerFactor]) -> None:
        self._factors = list(factors)
        self._moments = list(
            {m: None for f in self._factors for m in (f.input_moment, f.output_moment) if m is not None}
        )
        self._packed: ops.KronSpectra | None = None
        self._packed_from: list[Tensor] = []

    def packed(self) -> ops.KronSpectra:
        """Constants: no gradient leads to a basis.

        Raises:
            FloatingPointError, ArithmeticError: see :meth:`ella_cuda.laplace.factors.SecondMoment.eigenvalues`.
        """
        with torch.no_grad():
            now = [moment.eigenvalues() for moment in self._moments]  # kept there until a moment changes
            if self._packed is None or any(a is not b for a, b in zip(now, self._packed_from, strict=True)):
                self._packed = ops.pack_spectra([factor.eigenvalues() for factor in self._factors])
                self._packed_from = now
        return self._packed
