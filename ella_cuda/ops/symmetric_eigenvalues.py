"""Eigenvalues of many symmetric matrices of different sizes by one call, which is ``ella_cuda.laplace.eigenvalues``'."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ella_cuda.ops import _lapack
from ella_cuda.ops._cases import KernelCase, cases, normal
from ella_cuda.ops._operator import operand_sizes

MOST_ROWS = 1024  # csrc/kron/checks.h knows it too
FEWER_ROWS = 640  # where a block of threads has less than SHARED bytes
SHARED = 140 << 10


@functools.cache
def most_rows(device: torch.device) -> int:
    """Rows of the largest matrices that the CUDA kernel takes on a device; any other device has its rows."""
    if device.type != "cuda":
        return MOST_ROWS
    shared = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", SHARED)
    return MOST_ROWS if shared >= SHARED else FEWER_ROWS


def symmetric_eigenvalues(sets: Sequence[Tensor], rows: Sequence[tuple[int, float]] = ()) -> Tensor:
    """Eigenvalues of every set of symmetric matrices, ascending, one matrix after the other, ``(sum G d,)``, float64, without derivatives.

    A matrix's error is some roundings of its largest eigenvalue. Its eigenvalues are NaN where a number is not finite. On the CPU threads
    share the matrices; large ones are decomposed without their rows of zeros, and by a basis of their range where that is small.

    Args:
        sets: each ``(G, d, d)``, float32 or float64, on one device; lower triangles are read. On CUDA ``d`` is at most :func:`most_rows`.
        rows: of each set, how many outer products its matrices are sums of, which are then positive semidefinite up to rounding, and
            their relative rounding error; empty where this is unknown.

    Raises:
        RuntimeError: a set has more rows.
        torch.linalg.LinAlgError: eigenvalues did not converge, on the CPU.

    Source: Dongarra, Sorensen and Hammarling, "Block reduction of matrices to condensed forms for eigenvalue computations",
    J. Comput. Appl. Math. 1989; Barth, Martin and Wilkinson, "Calculation of the eigenvalues of a symmetric tridiagonal matrix by the
    method of bisection", Numer. Math. 1967.
    """
    if not sets:
        return torch.empty(0, dtype=torch.float64)
    wide = [(blocks.detach() if blocks.requires_grad else blocks).double().contiguous() for blocks in sets]
    return torch.ops.ella_cuda.symmetric_eigenvalues(wide, [rank for rank, _ in rows], [error for _, error in rows])


def symmetric_eigenvalues_torch(sets: Sequence[Tensor]) -> Tensor:
    """Plain-torch reference of :func:`symmetric_eigenvalues`."""
    return torch.cat([torch.linalg.eigvalsh(blocks.detach().double()).flatten() for blocks in sets])


def _fake(sets: Sequence[Tensor], ranks: Sequence[int], errors: Sequence[float]) -> Tensor:
    """Refuses what the CUDA kernel refuses, in its words."""
    op, counts = "symmetric_eigenvalues", (len(ranks), len(errors))
    for blocks in sets:
        if blocks.dtype != torch.float64:
            raise RuntimeError(f"{op}: sets must be float64, got {str(blocks.dtype).removeprefix('torch.')}")
        if blocks.dim() != 3 or blocks.shape[1] != blocks.shape[2] or blocks.device != sets[0].device:
            operand_sizes(op, like=(sets[0], None), sets=(blocks, "G d d"))
        torch._check(blocks.is_contiguous(), lambda: f"{op}: sets must be contiguous")
    words = f"{op}: ranks and errors must have as many entries as sets ({len(sets)}), or none, got {counts[0]} and {counts[1]}"
    torch._check(counts in ((0, 0), (len(sets), len(sets))), lambda: words)
    return sets[0].new_empty(sum(blocks.shape[0] * blocks.shape[1] for blocks in sets))


def _on_cpu(sets: Sequence[Tensor], ranks: Sequence[int], errors: Sequence[float]) -> Tensor:
    _fake(sets, ranks, errors)
    parts = _lapack.parts_of(sets, list(zip(ranks, errors, strict=True)), _lapack.LARGE)
    return torch.cat([values.reshape(-1) for values in _lapack.by_threads(parts, _lapack.eigenvalues)])


torch.library.register_fake("ella_cuda::symmetric_eigenvalues", _fake)
torch.library.impl("ella_cuda::symmetric_eigenvalues", "CPU", _on_cpu)


def kernel_cases() -> list[KernelCase]:
    def matrices() -> tuple[Tensor, ...]:
        halves = normal(1, 301, 301), normal(2, 70, 70), normal(3, 64, 64), normal(3, 17, 17), normal(2, 1, 1)
        return tuple(half @ half.mT for half in halves)

    ours, plain = lambda *sets: symmetric_eigenvalues(sets), lambda *sets: symmetric_eigenvalues_torch(sets)
    return cases("symmetric_eigenvalues", matrices, ours, plain)
