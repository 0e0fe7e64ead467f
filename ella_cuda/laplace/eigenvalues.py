"""Eigenvalues of symmetric blocks, in float64, by LAPACK or cuSOLVER."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ella_cuda.laplace.cusolver import BATCHED_IN_TORCH, batched_eigenvalues

# Numbers of blocks at once, of which the copies in float64 take 8 times as many bytes.
AT_ONCE_ON_CPU, AT_ONCE_ELSEWHERE = 1 << 20, 1 << 27


def eigenvalues(blocks: Tensor) -> Tensor:
    """Of symmetric blocks ``(G, d, d)``, ascending, ``(G, d)``, float64, differentiable.

    On the CPU, where they are decomposed one after the other anyway, a few at once: the copies in float64 would take several times the
    memory of what is decomposed. Not one block a thread: called in a parallel region, torch's MKL returns wrong eigenvalues once
    ``torch.set_num_threads`` was used. On CUDA many at once, by torch from version 2.12 on, by cuSOLVER itself before.

    Where a block's do not converge, cuSOLVER's are nan.

    Raises:
        torch.linalg.LinAlgError: where a block's do not converge, torch's.
    """
    at_once = max((AT_ONCE_ON_CPU if blocks.is_cpu else AT_ONCE_ELSEWHERE) // max(blocks.shape[1] ** 2, 1), 1)
    solve = batched_eigenvalues(blocks.device) if blocks.is_cuda else None
    if solve is None or (torch.is_grad_enabled() and blocks.requires_grad):
        return torch.cat([torch.linalg.eigvalsh(part.double()) for part in blocks.split(at_once)])
    return torch.cat(
        [
            solve(part.detach().to(torch.float64, copy=True, memory_format=torch.contiguous_format))
            for part in blocks.split(at_once)
        ]
    )


def eigenvalues_of_all(sets: Sequence[Tensor]) -> list[Tensor]:
    """:func:`eigenvalues` of each; blocks of one size, dtype and device are decomposed together."""
    found: dict[int, Tensor] = {}
    sizes: dict[tuple[int, torch.device, torch.dtype], list[int]] = {}
    for place, blocks in enumerate(sets):
        sizes.setdefault((blocks.shape[1], blocks.device, blocks.dtype), []).append(place)
    for (size, *_), places in sizes.items():
        for together in _parts(places, [sets[p].shape[0] * size**2 for p in places]):
            values = eigenvalues(torch.cat([sets[p] for p in together]) if together[1:] else sets[together[0]])
            found |= zip(together, values.split([sets[p].shape[0] for p in together]), strict=True)
    return [found[place] for place in range(len(sets))]


def _parts(items: Sequence[int], sizes: Sequence[int]) -> Iterable[list[int]]:
    """The items in lists whose sizes sum to what is decomposed at once, or of one item."""
    part: list[int] = []
    total = 0
    for item, size in zip(items, sizes, strict=True):
        if part and total + size > AT_ONCE_ELSEWHERE:
            yield part
            part, total = [], 0
        part.append(item)
        total += size
    yield part


def solver(device: torch.device) -> str:
    """What decomposes many blocks on that device, in words."""
    if device.type != "cuda":
        return "torch's LAPACK, one after the other"
    if torch.__version__ >= BATCHED_IN_TORCH:
        return "torch's cuSOLVER, many at once"
    if batched_eigenvalues(device) is not None:
        return "cuSOLVER, many at once"
    return "torch's cuSOLVER, one after the other above 32 rows; torch 2.12 or cuSOLVER 11.7.1 (CUDA 12.6.2) take many at once"
