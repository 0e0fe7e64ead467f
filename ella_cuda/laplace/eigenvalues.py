"""Eigenvalues of symmetric blocks, in float64, by torch's LAPACK or cuSOLVER, or by our kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ella_cuda._extension import build_info
from ella_cuda.laplace.lapack import calls_at_once, map_at_once
from ella_cuda.ops.symmetric_eigenvalues import most_rows, symmetric_eigenvalues

Found = TypeVar("Found", Tensor, tuple[Tensor, Tensor])  # of blocks: eigenvalues, or eigenvectors too

# Blocks of at least so many rows, which are more than so many times as many as their rank, have their eigenvalues by a basis of so many
# vectors more.
LARGE, LOW_RANK, SPARE = 256, 4, 8
TRACE = 16  # times the relative rounding error: what such eigenvalues may leave out of the trace

OWN_KERNEL = 1024  # rows of the largest blocks that our kernel decomposes on CUDA

# Numbers of blocks at once (on the CPU in each thread), of which the copies in float64 take 8 times as many bytes.
AT_ONCE_ON_CPU, AT_ONCE_ELSEWHERE = 1 << 20, 1 << 27


def eigenvalues(blocks: Tensor) -> Tensor:
    """Of symmetric blocks ``(G, d, d)``, ascending, ``(G, d)``, float64, differentiable.

    On the CPU, where they are decomposed one after the other, a few at once: the copies in float64 would take several times the memory
    of what is decomposed. On CUDA many at once by our kernel up to :func:`own_rows`. Larger ones one by one by torch, for
    cuSOLVER's routine for many takes longer. Those that are to be differentiated are torch's. Our kernel's are nan where a block has a
    number that is not finite.

    Raises:
        torch.linalg.LinAlgError: where a block's do not converge.
    """
    if torch.is_grad_enabled() and blocks.requires_grad:
        return torch.cat([torch.linalg.eigvalsh(part.double()) for part in _split(blocks)])
    if _is_own(blocks):
        return _by_own_kernel([blocks])[0]
    parts = _split(blocks) if blocks.is_cpu else blocks.detach().unbind()
    found = [torch.linalg.eigvalsh(part.double()).view(-1, blocks.shape[1]) for part in parts]
    return torch.cat(found) if found else blocks.new_empty(blocks.shape[:2], dtype=torch.float64)


def own_rows(device: torch.device) -> int:
    """Rows of the largest blocks that our kernel decomposes on a CUDA device; 0 where this build has no such kernel."""
    return min(OWN_KERNEL, most_rows(device)) if build_info()["cuda"] else 0


def _is_own(blocks: Tensor) -> bool:
    return blocks.is_cuda and blocks.shape[1] <= own_rows(blocks.device)


def _by_own_kernel(sets: Sequence[Tensor]) -> list[Tensor]:
    """The sets' eigenvalues, of one device, by as few launches as memory allows; the largest blocks come first, as they take longest."""
    order = sorted(range(len(sets)), key=lambda place: -sets[place].shape[1])
    pieces = [(place, piece) for place in order for piece in _split(sets[place])]
    found: list[list[Tensor]] = [[] for _ in sets]
    for part in _parts(range(len(pieces)), [piece.numel() for _, piece in pieces]):
        for at, values in zip(part, symmetric_eigenvalues([pieces[at][1] for at in part]), strict=True):
            found[pieces[at][0]].append(values)
    return [_joined(values) for values in found]


def eigenvalues_of_all(sets: Sequence[Tensor], rows: Sequence[tuple[int, float]] = ()) -> list[Tensor]:
    """:func:`eigenvalues` of each, as constants. On the CPU threads share the blocks; elsewhere blocks of one dtype and device are
    decomposed together, of all sizes that our kernel takes. A sum of few outer products, compared with its size,
    has as many eigenvalues that are not zero: see :func:`eigenvalues_of_rank`.

    Args:
        sets: of symmetric blocks, positive semidefinite up to rounding.
        rows: of each set, how many outer products its blocks are sums of, and their relative rounding error; empty where this is unknown.

    Raises:
        torch.linalg.LinAlgError: where a block's do not converge, torch's.
    """
    sets = [blocks.detach() for blocks in sets]
    found = _of_low_rank(sets, rows, eigenvalues_of_rank)
    own: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, blocks in enumerate(sets):
        if place not in found and _is_own(blocks):
            own.setdefault((blocks.device, blocks.dtype), []).append(place)
        elif place not in found and not blocks.is_cpu:
            found[place] = eigenvalues(blocks)
    for places in own.values():
        found |= zip(places, _by_own_kernel([sets[p] for p in places]), strict=True)
    on_cpu = [place for place, blocks in enumerate(sets) if blocks.is_cpu and place not in found]
    found |= zip(on_cpu, _by_threads([sets[p] for p in on_cpu], _decompose), strict=True)
    return [found[place] for place in range(len(sets))]


def _of_low_rank(
    sets: Sequence[Tensor],
    rows: Sequence[tuple[int, float]],
    decompose: Callable[[Tensor, int, float], Found | None],
) -> dict[int, Found]:
    """What ``decompose`` finds of those sets whose blocks are large compared with their rank, by place."""
    found = {}
    for place, (rank, error) in enumerate(rows):
        if (
            sets[place].shape[1] >= max(LOW_RANK * rank, LARGE)
            and (few := decompose(sets[place], rank, error)) is not None
        ):
            found[place] = few
    return found


def eigenvalues_of_rank(blocks: Tensor, rank: int, error: float) -> Tensor | None:
    """Of symmetric positive semidefinite blocks ``(G, d, d)`` of at most this rank, ascending, ``(G, d)``, float64: those of ``Q^T A Q`` with
    Q an orthonormal basis of A's products with ``rank + SPARE`` random vectors, and zeros. What that leaves out of the trace, which is
    the sum of the other eigenvalues, says whether the rank is right.

    Source: Halko, Martinsson and Tropp, "Finding structure with randomness", SIAM Review 2011, algorithm 4.1.

    Args:
        blocks: the matrices.
        rank: the bound.
        error: relative rounding error of their entries, of which up to ``TRACE`` times may be left out.

    Returns:
        None where more is left out of a block.
    """
    inside = _inside(blocks, rank, error)
    if inside is None:
        return None
    values = [torch.linalg.eigvalsh(small) for _, small in inside]
    return torch.stack([torch.cat([v.new_zeros(blocks.shape[1] - len(v)), v]).sort().values for v in values])


def eigenbases_of_rank(blocks: Tensor, rank: int, error: float) -> tuple[Tensor, Tensor] | None:
    """As :func:`eigenvalues_of_rank`, with eigenvectors ``(G, d, d)``, columns; those of the zeros complete the others."""
    inside = _inside(blocks, rank, error)
    if inside is None:
        return None
    found = []
    for basis, small in inside:
        values, vectors = torch.linalg.eigh(small)
        whole = torch.linalg.qr(
            basis @ vectors, mode="complete"
        ).Q  # the first columns but for signs, and what completes them
        values, order = torch.cat([values, values.new_zeros(len(whole) - len(values))]).sort()
        found.append((values[None], whole[None, :, order]))
    return _joined(found)


def _inside(blocks: Tensor, rank: int, error: float) -> list[tuple[Tensor, Tensor]] | None:
    """Of each block Q and ``Q^T A Q``, see :func:`eigenvalues_of_rank`."""
    found = []
    generator = torch.Generator("cpu").manual_seed(0)
    vectors = torch.randn(blocks.shape[1], rank + SPARE, dtype=torch.float64, generator=generator, device="cpu").to(
        blocks.device
    )
    for block in blocks:
        block = block.double()
        basis = torch.linalg.qr(block @ vectors).Q
        inside = basis.T @ (block @ basis)
        trace = block.trace()
        if not trace - inside.trace() <= TRACE * error * trace:
            return None
        found.append((basis, inside))
    return found


def eigenbases_of_all(sets: Sequence[Tensor], rows: Sequence[tuple[int, float]] = ()) -> list[tuple[Tensor, Tensor]]:
    """Eigenvalues ``(G, d)`` as :func:`eigenvalues` and eigenvectors ``(G, d, d)``, columns, float64, of each set of blocks, as constants.
    On the CPU threads share the blocks. Rows as for :func:`eigenvalues_of_all`.

    Raises:
        torch.linalg.LinAlgError: where a block's do not converge.
    """
    sets = [blocks.detach() for blocks in sets]
    found = _of_low_rank(sets, rows, eigenbases_of_rank)
    dense = [place for place in range(len(sets)) if place not in found]
    if all(blocks.is_cpu for blocks in sets):
        found |= zip(dense, _by_threads([sets[place] for place in dense], _decompose_whole), strict=True)
    else:
        found |= {place: _joined([_decompose_whole(part) for part in _split(sets[place])]) for place in dense}
    return [found[place] for place in range(len(sets))]


def workspace(blocks: Iterable[tuple[int, int]], device: torch.device) -> int:
    """Bytes that :func:`eigenvalues_of_all` takes for sums of so many blocks of so many rows each: what is decomposed at once, and as
    much again for the solver's copy and its scratch.
    """
    sizes = [(groups * rows**2, rows**2) for groups, rows in blocks]
    at_once = AT_ONCE_ON_CPU * calls_at_once() if device.type == "cpu" else AT_ONCE_ELSEWHERE
    most = max(max(one for _, one in sizes), min(sum(every for every, _ in sizes), at_once))
    return 3 * torch.float64.itemsize * most


def _by_threads(sets: Sequence[Tensor], decompose: Callable[[Tensor], Found]) -> list[Found]:
    """What ``decompose`` gives of each, on the CPU: some blocks a thread. All threads have, one after the other, blocks so large that a
    thread may not hold one, and what would otherwise keep one thread busy when the others are done."""
    parts = [(place, part) for place, blocks in enumerate(sets) for part in _split(blocks)]
    costs = [part.shape[0] * part.shape[1] ** 3 for _, part in parts]
    most = sum(costs) / calls_at_once()
    found: dict[int, Found] = {}
    shared = []
    for at in sorted(range(len(parts)), key=costs.__getitem__, reverse=True):
        if parts[at][1].shape[1] ** 2 > AT_ONCE_ON_CPU or costs[at] > most:
            found[at] = decompose(parts[at][1])
        else:
            shared.append(at)
    found |= zip(shared, map_at_once(decompose, [parts[at][1] for at in shared]), strict=True)
    by_set: list[list[Found]] = [[] for _ in sets]
    for at, (place, _) in enumerate(parts):
        by_set[place].append(found[at])
    return [_joined(values) for values in by_set]


def _joined(parts: Sequence[Found]) -> Found:
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    return tuple(torch.cat(each) for each in zip(*parts, strict=True))


def _decompose(blocks: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(blocks.double())


def _decompose_whole(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(torch.linalg.eigh(blocks.double()))


def _split(blocks: Tensor) -> tuple[Tensor, ...]:
    """What is decomposed at once."""
    numbers = AT_ONCE_ON_CPU if blocks.is_cpu else AT_ONCE_ELSEWHERE
    return blocks.split(max(numbers // max(blocks.shape[1] ** 2, 1), 1))


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
        at_once = calls_at_once()
        return f"torch's LAPACK, {at_once} at once" if at_once > 1 else "torch's LAPACK, one after the other"
    rows = own_rows(device)
    one_by_one = "torch's cuSOLVER, one after the other"
    return f"our kernel up to {rows} rows, all sizes at once; above {one_by_one}" if rows else one_by_one
