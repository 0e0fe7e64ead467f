"""The eigenvalues of all factors as one array."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ella_cuda import ops
from ella_cuda.distributed import Ranks
from ella_cuda.laplace.factors import KroneckerFactor
from ella_cuda.laplace.second_moment import SecondMoment


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
        self._rows: list[int] = []  # in every moment when they were packed

    def decompose_together(self, ranks: Ranks) -> None:
        """Have the eigenvalues of all factors, each block's by one rank; raises as :meth:`packed`, on all ranks."""
        with torch.inference_mode(False), torch.no_grad():
            SecondMoment.decompose_together(self._moments, ranks)

    def packed(self) -> ops.KronSpectra:
        """Constants: no gradient leads to a basis, whose state is taken to be that of the first call.

        Raises:
            FloatingPointError, ArithmeticError: see :meth:`ella_cuda.laplace.second_moment.SecondMoment.eigenvalues`.
        """
        rows = [moment.rows for moment in self._moments]
        if self._packed is None or rows != self._rows:
            with torch.inference_mode(False), torch.no_grad():  # later calls may want gradients
                SecondMoment.decompose_all(self._moments)
                self._packed, self._rows = ops.pack_spectra([f.eigenvalues() for f in self._factors]), rows
        return self._packed
