"""Eigenvalues of many symmetric matrices of different sizes by one call, which is ``ella_cuda.laplace.eigenvalues``' on CUDA."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ella_cuda.ops._cases import KernelCase, cases, normal
from ella_cuda.ops._operator import require_countable

MOST_ROWS = 1024  # csrc/kron/checks.h knows it too
FEWER_ROWS = 640  # where a block of threads has less than SHARED bytes
SHARED = 140 << 10


@functools.cache
def most_rows(device: torch.device) -> int:
    """Rows of the largest matrices that :func:`symmetric_eigenvalues` takes on a device."""
    if device.type != "cuda":
        return MOST_ROWS
    shared = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", SHARED)
    return MOST_ROWS if shared >= SHARED else FEWER_ROWS


def symmetric_eigenvalues(sets: Sequence[Tensor]) -> list[Tensor]:
    """Eigenvalues of every set of symmetric matrices, ascending, ``(G, d)``, float64, without derivatives.

    A matrix's error is some roundings of its largest eigenvalue. Its eigenvalues are NaN where a number is not finite.

    Args:
        sets: each ``(G, d, d)``, float32 or float64, on one device; lower triangles are read. ``d`` is at most :func:`most_rows`. On
            CUDA the largest sets should come first, and those of one size side by side.

    Raises:
        RuntimeError: a set has more rows.

    Source: Dongarra, Sorensen and Hammarling, "Block reduction of matrices to condensed forms for eigenvalue computations",
    J. Comput. Appl. Math. 1989; Barth, Martin and Wilkinson, "Calculation of the eigenvalues of a symmetric tridiagonal matrix by the
    method of bisection", Numer. Math. 1967.
    """
    shapes = [blocks.shape[:2] for blocks in sets]
    sizes = [(sum(g for g, _ in same), d) for d, same in itertools.groupby(shapes, lambda shape: shape[1])]
    numbers = torch.cat([blocks.detach().reshape(-1) for blocks in sets]).double()
    values = torch.ops.ella_cuda.symmetric_eigenvalues(numbers, [g for g, _ in sizes], [d for _, d in sizes])
    return [part.view(shape) for part, shape in zip(values.split([g * d for g, d in shapes]), shapes, strict=True)]


def symmetric_eigenvalues_torch(sets: Sequence[Tensor]) -> list[Tensor]:
    """Plain-torch reference of :func:`symmetric_eigenvalues`."""
    return [torch.linalg.eigvalsh(blocks.detach().double()) for blocks in sets]


def _check(numbers: Tensor, groups: Sequence[int], rows: Sequence[int]) -> int:
    """Refuse what the CUDA kernel refuses, in its words; how many eigenvalues there are."""
    op = "symmetric_eigenvalues"

    def require(holds: bool, message: str) -> None:
        if not holds:
            raise RuntimeError(f"{op}: {message}")

    require(numbers.dtype == torch.float64, f"numbers must be float64, got {str(numbers.dtype).removeprefix('torch.')}")
    require(numbers.dim() == 1, f"numbers must have shape (E,), got {tuple(numbers.shape)}")
    require_countable(op, numbers=numbers)
    require(numbers.is_contiguous(), "numbers must be contiguous")
    require(len(groups) == len(rows), f"groups must have as many entries as rows ({len(rows)}), got {len(groups)}")
    for size, d in zip(groups, rows, strict=True):
        require(0 <= d <= MOST_ROWS, f"rows must be from 0 to {MOST_ROWS}, got {d}")
        require(0 <= size <= 1 << 53, f"groups must be from 0 to 2^53, got {size}")
    wanted = sum(size * d * d for size, d in zip(groups, rows, strict=True))
    amount = "fewer" if numbers.numel() < wanted else "more"
    require(
        numbers.numel() == wanted,
        f"numbers must have sum(groups * rows^2) entries, got {amount} ({numbers.numel()})",
    )
    return sum(size * d for size, d in zip(groups, rows, strict=True))


def _fake(numbers: Tensor, groups: Sequence[int], rows: Sequence[int]) -> Tensor:
    return numbers.new_empty(_check(numbers, groups, rows))


def _on_cpu(numbers: Tensor, groups: Sequence[int], rows: Sequence[int]) -> Tensor:
    _check(numbers, groups, rows)
    ends = itertools.accumulate(size * d * d for size, d in zip(groups, rows, strict=True))
    found = [numbers.new_empty(0)]
    for end, size, d in zip(ends, groups, rows, strict=True):
        blocks = numbers[end - size * d * d : end].view(size, d, d)
        found += [_or_nan(block) for block in blocks]
    return torch.cat(found)


def _or_nan(block: Tensor) -> Tensor:
    """A matrix's eigenvalues by LAPACK, which refuses what is not finite."""
    if block.tril().isfinite().all():
        return torch.linalg.eigvalsh(block)
    return block.new_full(block.shape[:1], float("nan"))


torch.library.register_fake("ella_cuda::symmetric_eigenvalues", _fake)
torch.library.impl("ella_cuda::symmetric_eigenvalues", "CPU", _on_cpu)


def kernel_cases() -> list[KernelCase]:
    def matrices() -> tuple[Tensor, ...]:
        halves = normal(1, 301, 301), normal(2, 70, 70), normal(3, 64, 64), normal(3, 17, 17), normal(2, 1, 1)
        return tuple(half @ half.mT for half in halves)

    def of(function: Callable[[Sequence[Tensor]], list[Tensor]]) -> Callable[..., list[Tensor]]:
        return lambda *sets: function(sets)

    return cases("symmetric_eigenvalues", matrices, of(symmetric_eigenvalues), of(symmetric_eigenvalues_torch))
