"""Eigenvalues and eigenvectors of symmetric blocks, in float64, by torch's LAPACK or cuSOLVER, or by our kernel."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from ella_cuda._extension import build_info
from ella_cuda.ops.symmetric_eigenvalues import most_rows, symmetric_eigenvalues

Item = TypeVar("Item")
Result = TypeVar("Result")
Found = TypeVar("Found", Tensor, tuple[Tensor, Tensor])  # of blocks: eigenvalues, or eigenvectors too

# Blocks of at least so many rows, which are more than so many times as many as their rank, have their eigenvalues by a basis of so many
# vectors more.
LARGE, LOW_RANK, SPARE = 256, 4, 8
TRACE = 16  # times the relative rounding error: what such eigenvalues may leave out of the trace

OWN_KERNEL = 1024  # rows of the largest blocks that our kernel decomposes on CUDA

# Numbers of blocks at once (on the CPU in each thread), of which the copies in float64 take 8 times as many bytes.
AT_ONCE_ON_CPU, AT_ONCE_ELSEWHERE = 1 << 20, 1 << 27


def eigenvalues(blocks: Tensor) -> Tensor:
    """The eigenvalues of symmetric blocks ``(G, d, d)``, ascending, ``(G, d)``, float64, differentiable.

    Those that are to be differentiated are torch's; others are those of :func:`eigenvalues_of_all`.

    Raises:
        torch.linalg.LinAlgError: where a block's do not converge.
    """
    if torch.is_grad_enabled() and blocks.requires_grad:
        return torch.cat([torch.linalg.eigvalsh(part.double()) for part in _split(blocks)])
    return eigenvalues_of_all([blocks])[0]


def own_rows(device: torch.device) -> int:
    """Rows of the largest blocks that our kernel decomposes on a CUDA device; 0 where this build has no such kernel."""
    return min(OWN_KERNEL, most_rows(device)) if build_info()["cuda"] else 0


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
    """The eigenvalues of each set of symmetric blocks ``(G, d, d)``, ascending, ``(G, d)``, float64, as constants.

    On the CPU threads share the blocks, a few at once: the copies in float64 would take several times the memory of what is decomposed. On
    CUDA our kernel takes blocks of one dtype and device together, up to :func:`own_rows`; torch takes larger ones one by one, for cuSOLVER's
    routine for many takes longer. Our kernel's are nan where a block has a number that is not finite. A sum of few outer products, compared
    with its size, has as many eigenvalues that are not zero: see :func:`of_rank`.

    Args:
        sets: of symmetric blocks, positive semidefinite up to rounding where their rows are known.
        rows: of each set, how many outer products its blocks are sums of, and their relative rounding error; empty where this is unknown.

    Raises:
        torch.linalg.LinAlgError: where a block's do not converge, torch's.
    """
    sets = [blocks.detach() for blocks in sets]
    found = _of_low_rank(sets, rows, vectors=False)
    on_cpu: list[int] = []
    own: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place in (place for place in range(len(sets)) if place not in found):
        blocks = sets[place]
        if blocks.is_cpu:
            on_cpu.append(place)
        elif blocks.is_cuda and blocks.shape[1] <= own_rows(blocks.device):
            own.setdefault((blocks.device, blocks.dtype), []).append(place)
        else:
            each = [torch.linalg.eigvalsh(block.double())[None] for block in blocks]
            found[place] = torch.cat([blocks.new_empty(0, blocks.shape[1], dtype=torch.float64), *each])
    for places in own.values():
        found |= zip(places, _by_own_kernel([sets[p] for p in places]), strict=True)
    found |= zip(on_cpu, _by_threads([sets[p] for p in on_cpu], _values), strict=True)
    return [found[place] for place in range(len(sets))]


def eigenbases_of_all(sets: Sequence[Tensor], rows: Sequence[tuple[int, float]] = ()) -> list[tuple[Tensor, Tensor]]:
    """Eigenvalues ``(G, d)`` and eigenvectors ``(G, d, d)``, columns, float64, of each set of blocks, by torch; otherwise as
    :func:`eigenvalues_of_all`.

    Raises:
        torch.linalg.LinAlgError: where a block's do not converge.
    """
    sets = [blocks.detach() for blocks in sets]
    found = _of_low_rank(sets, rows, vectors=True)
    dense = [place for place in range(len(sets)) if place not in found]
    if all(blocks.is_cpu for blocks in sets):
        found |= zip(dense, _by_threads([sets[place] for place in dense], _bases), strict=True)
    else:
        found |= {place: _joined([_bases(part) for part in _split(sets[place])]) for place in dense}
    return [found[place] for place in range(len(sets))]


def _of_low_rank(sets: Sequence[Tensor], rows: Sequence[tuple[int, float]], vectors: bool) -> dict[int, Found]:
    """The results of :func:`of_rank` for sets whose blocks are large compared with their rank, by place."""
    large = [place for place, (rank, _) in enumerate(rows) if sets[place].shape[1] >= max(LOW_RANK * rank, LARGE)]
    found = {place: of_rank(sets[place], *rows[place], vectors) for place in large}
    return {place: few for place, few in found.items() if few is not None}


def of_rank(blocks: Tensor, rank: int, error: float, vectors: bool = False) -> Found | None:
    """Eigenvalues of symmetric positive semidefinite blocks ``(G, d, d)`` of at most this rank, ascending, ``(G, d)``, float64: those of
    ``Q^T A Q`` with Q an orthonormal basis of A's products with ``rank + SPARE`` random vectors, and zeros. What that leaves out of the
    trace, which is the sum of the other eigenvalues, says whether the rank is right.

    Source: Halko, Martinsson and Tropp, "Finding structure with randomness", SIAM Review 2011, algorithm 4.1.

    Args:
        blocks: the matrices.
        rank: the bound.
        error: relative rounding error of their entries, of which up to ``TRACE`` times may be left out.
        vectors: whether to find eigenvectors ``(G, d, d)`` too, columns; those of the zeros complete the others.

    Returns:
        None where more is left out of a block.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    random = torch.randn(blocks.shape[1], rank + SPARE, dtype=torch.float64, generator=generator, device="cpu")
    random, found = random.to(blocks.device), []
    for block in blocks:
        block = block.double()
        basis = torch.linalg.qr(block @ random).Q
        inside = basis.T @ (block @ basis)
        trace = block.trace()
        if not trace - inside.trace() <= TRACE * error * trace:
            return None
        zeros = block.new_zeros(len(block) - len(inside))
        if not vectors:
            found.append(torch.cat([zeros, torch.linalg.eigvalsh(inside)]).sort().values[None])
            continue
        values, few = torch.linalg.eigh(inside)
        # The first columns but for signs, and what completes them.
        whole = torch.linalg.qr(basis @ few, mode="complete").Q
        values, order = torch.cat([values, zeros]).sort()
        found.append((values[None], whole[None, :, order]))
    return _joined(found)


def workspace(blocks: Iterable[tuple[int, int]], device: torch.device) -> int:
    """Bytes that :func:`eigenvalues_of_all` takes for sums of so many blocks of so many rows each: what is decomposed at once, and as
    much again for the solver's copy and its scratch.
    """
    sizes = [(groups * rows**2, rows**2) for groups, rows in blocks]
    at_once = AT_ONCE_ON_CPU * calls_at_once() if device.type == "cpu" else AT_ONCE_ELSEWHERE
    most = max(max(one for _, one in sizes), min(sum(every for every, _ in sizes), at_once))
    return 3 * torch.float64.itemsize * most


def calls_at_once() -> int:
    """The number of torch's threads, where the threads of a call can be limited; otherwise one, which then has them all."""
    return torch.get_num_threads() if _limits() is not None else 1


def map_at_once(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """``function`` of each item, :func:`calls_at_once` at a time; where one raises, or is interrupted, what has not begun is left out.

    Most of a decomposition of some hundred rows does not gain from a second thread, so threads are better spent on another one. Not in
    ``at::parallel_for``: called in a parallel region, torch's MKL returns wrong eigenvalues once ``torch.set_num_threads`` was used.

    Args:
        function: its modes and derivatives are those of a new thread, not the caller's.
        items: the longest first.
    """
    items = list(items)
    threads = min(calls_at_once(), len(items))
    if threads < 2:
        return [function(item) for item in items]
    pool = ThreadPoolExecutor(threads, initializer=_limit_to_one)
    try:
        futures = [pool.submit(function, item) for item in items]
        failed = [future for future in wait(futures, return_when=FIRST_EXCEPTION).done if future.exception()]
        return [future.result() for future in failed or futures]
    finally:
        pool.shutdown(cancel_futures=True)


def _limit_to_one() -> None:
    """Have this thread's calls of LAPACK and of torch use no other thread."""
    torch.get_num_threads()  # gives a new thread torch's number, which would otherwise happen later and undo the limit
    for limit in _limits() or ():
        limit(1)


@functools.cache
def _limits() -> tuple[Callable[[int], object], ...] | None:
    """Functions that limit the threads of the calling thread, in MKL and OpenMP as torch has loaded them; None where LAPACK is not MKL."""
    if not (torch.backends.mkl.is_available() and torch.backends.openmp.is_available()):
        return None
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return library.MKL_Set_Num_Threads_Local, library.omp_set_num_threads
    except (OSError, AttributeError):  # another system, or another way of linking MKL
        return None


def _by_threads(sets: Sequence[Tensor], decompose: Callable[[Tensor], Found]) -> list[Found]:
    """The results of ``decompose`` for each set, on the CPU: some blocks a thread. All threads have, one after the other, blocks so large
    that a thread may not hold one, and what would otherwise keep one thread busy when the others are done."""
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


def _values(blocks: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(blocks.double())


def _bases(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(torch.linalg.eigh(blocks.double()))


def _split(blocks: Tensor) -> tuple[Tensor, ...]:
    """The blocks in parts that are decomposed at once."""
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
    """The solver of many blocks on that device, in words."""
    if device.type != "cuda":
        at_once = calls_at_once()
        return f"torch's LAPACK, {at_once} at once" if at_once > 1 else "torch's LAPACK, one after the other"
    rows = own_rows(device)
    one_by_one = "torch's cuSOLVER, one after the other"
    return f"our kernel up to {rows} rows, all sizes at once; above {one_by_one}" if rows else one_by_one
