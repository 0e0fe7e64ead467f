"""Eigenvalues and eigenvectors of symmetric blocks by torch, of large ones without their rows of zeros or by a basis of their range; on
the CPU several calls of LAPACK at once."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

Item, Result = TypeVar("Item"), TypeVar("Result")

# Blocks of at least so many rows are made smaller: by their rows of zeros, and where they have at least so many times as many rows as
# their rank, or where vectors are wanted too, by a basis of so many vectors more.
LARGE, LOW_RANK, LOW_RANK_OF_VECTORS, SPARE = 256, 4, 2, 8
PATIENCE = 2.0  # seconds of eigenvectors before a bar tells how far they are
TRACE = 16  # times the relative rounding error: what these may leave out of the trace

# Numbers of blocks at once (on the CPU in each thread), of which the copies in float64 take 8 times as many bytes.
AT_ONCE_ON_CPU, AT_ONCE_ELSEWHERE = 1 << 20, 1 << 27


class Part(NamedTuple):
    """What is decomposed by one call.

    Attributes:
        place: of its set. blocks: ``(G, d, d)``.
        rank: what bounds it. error: relative rounding error of the entries.
        rows: how many are not zero. places: of these rows, and then of the others; None where there are no others.
        finite: whether all numbers are; None where nobody looked.
    """

    place: int
    blocks: Tensor
    rank: int
    error: float
    rows: int
    places: Tensor | None = None
    finite: bool | None = None

    @property
    def is_thin(self) -> bool:
        """Whether the rank is known to be small beside the rows."""
        return self.is_small_beside(LOW_RANK)

    def is_small_beside(self, times: int) -> bool:
        """Whether so many times the rank, which is known, are no more than the rows."""
        return self.rows >= max(times * self.rank, LARGE)

    @property
    def cost(self) -> int:
        """Multiply-adds, but for a factor."""
        return len(self.blocks) * self.rows**2 * (4 * (self.rank + SPARE) if self.is_thin else self.rows)

    def nonzero(self) -> Tensor:
        """The blocks without their rows of zeros, float64."""
        if self.places is None:
            return self.blocks.double()
        kept = self.places[: self.rows]
        return self.blocks[:, kept[:, None], kept].double()

    def padded(self, found: Tensor) -> Tensor:
        """Eigenvalues ``(G, r)``, and zeros for the other rows, ascending."""
        zeros = self.blocks.shape[1] - found.shape[1]
        return torch.cat([found.new_zeros(len(found), zeros), found], 1).sort(1).values if zeros else found


def parts_of(sets: Sequence[Tensor], known: Sequence[tuple[int, float]], large: int) -> list[Part]:
    """The sets in parts, with their ranks and rounding errors where these are known; blocks of at least so many rows alone, without their
    rows of zeros, for which a device is waited for once."""
    norms = [torch.linalg.vector_norm(blocks, 1, -1).flatten() for blocks in sets if blocks.shape[1] >= large]
    read, at = torch.cat(norms).cpu().numpy() if norms else np.empty(0), 0
    parts: list[Part] = []
    for place, blocks in enumerate(sets):
        rows = blocks.shape[1]
        rank, error = known[place] if known else (rows, 0.0)
        if rows < large:
            most = max((AT_ONCE_ON_CPU if blocks.is_cpu else AT_ONCE_ELSEWHERE) // max(rows**2, 1), 1)
            some = blocks.split(most) if len(blocks) > most else [blocks]
            parts += [Part(place, part, rank, error, rows) for part in some]
            continue
        for number in range(len(blocks)):
            own, at = read[at : at + rows], at + rows
            order = None if own.all() else torch.from_numpy(np.argsort(own == 0, kind="stable")).to(blocks.device)
            count, finite = np.count_nonzero(own), bool(np.isfinite(own).all())
            block = blocks[number : number + 1] if len(blocks) > 1 else blocks
            parts.append(Part(place, block, rank, error, count, order, finite))
    return parts


def of_one_size(parts: Sequence[Part]) -> list[list[int]]:
    """The numbers of parts that one call decomposes: small blocks of the same size, as many as go together."""
    groups: list[list[int]] = []
    last: dict[tuple[int, torch.dtype], list[int]] = {}
    for at, part in enumerate(parts):  # those of more than one call's matrices are apart already
        rows, most = part.blocks.shape[1], AT_ONCE_ON_CPU if part.blocks.is_cpu else AT_ONCE_ELSEWHERE
        group = last.get((rows, part.blocks.dtype))
        count = len(part.blocks) + sum(len(parts[one].blocks) for one in group or ())
        if rows >= LARGE or group is None or count * rows**2 > most:
            groups.append(group := [])
            if rows < LARGE:
                last[rows, part.blocks.dtype] = group
        group.append(at)
    return groups


def joined(parts: Sequence[Part]) -> Part:
    """Small parts of one size as one."""
    return parts[0]._replace(blocks=torch.cat([part.blocks for part in parts]))


def eigenvalues(part: Part) -> Tensor:
    """Ascending, ``(G, d)``, float64; NaN where a block is not finite."""
    if part.blocks.shape[1] == 1:  # of which there may be millions
        return part.blocks[:, 0].double().where(part.blocks[:, 0].isfinite(), torch.nan)
    blocks = part.nonzero().squeeze(0)
    if part.is_thin and part.finite:
        inside, _, fine = within_range(blocks, part.rank, part.error)
        blocks = inside if fine else blocks
    found = _solved(torch.linalg.eigvalsh, blocks, part.finite)
    return part.padded(found if found.dim() == 2 else found[None])


def eigenbasis(part: Part) -> tuple[Tensor, Tensor]:
    """The eigenvalues as :func:`eigenvalues`, and the eigenvectors ``(G, d, d)``, columns; unit vectors of rows of zeros are some."""
    block, rows, basis = part.nonzero(), part.blocks.shape[1], None
    if part.is_small_beside(LOW_RANK_OF_VECTORS) and part.finite:
        block = block[0]
        inside, basis, fine = within_range(block, part.rank, part.error)
        block, basis = (inside, basis) if fine else (block, None)
    found, vectors = _solved(lambda blocks: tuple(torch.linalg.eigh(blocks)), block, part.finite)
    if basis is not None:  # the first columns but for signs, and what completes them
        vectors = completed(basis @ vectors)
    if found.shape[-1] < rows:
        found = found.view(-1)
        found, order = torch.cat([found, found.new_zeros(rows - len(found))]).sort(stable=True)
        places = torch.arange(rows, device=order.device) if part.places is None else part.places
        whole = torch.zeros_like(part.blocks[0], dtype=torch.float64).mT  # as LAPACK has the vectors
        sizes = [part.rows, rows - part.rows]
        (live, zero), (columns, others) = places.split(sizes), order.argsort().split(sizes)
        whole[live[:, None], columns] = vectors
        whole[zero, others] = 1.0
        vectors = whole
    return found if found.dim() == 2 else found[None], vectors if vectors.dim() == 3 else vectors[None]


def completed(columns: Tensor) -> Tensor:
    r"""An orthogonal matrix ``(d, d)``, the first columns of which are these orthonormal ones ``(d, r)`` but for signs.

    The Householder reflectors :math:`I - \tau_i v_i v_i^T` of their QR decomposition together are :math:`I - V T V^T`, with
    :math:`T^{-1}` the upper triangle of :math:`V^T V` and :math:`1 / \tau` on the diagonal: one product. ``torch.linalg.qr`` of 3,446 rows
    and 40 columns takes 8 times as long, of 4,500 and 400 twice.

    Source: Schreiber and Van Loan, "A storage-efficient WY representation for products of Householder transformations", 1989.
    """
    reflectors, tau = torch.geqrf(columns)
    v = reflectors.tril(-1)
    v.diagonal().fill_(1.0)
    inverse = (v.mT @ v).triu(1)
    # A column that is a unit vector already has tau = 0 and v another one, whose reflection is as good.
    inverse.diagonal().copy_(tau.masked_fill(tau == 0, 2.0).reciprocal())
    found = (v @ torch.linalg.solve_triangular(inverse, v.mT, upper=True)).neg_()
    found.diagonal().add_(1.0)
    return found


def _solved(solver: Callable[[Tensor], Any], blocks: Tensor, finite: bool | None) -> Any:
    """What LAPACK or cuSOLVER find; NaN for eigenvalues of blocks that are not finite, which they refuse."""
    if finite or (finite is None and bool(blocks.sum().isfinite())):
        return solver(blocks)
    fine = blocks.tril().isfinite().flatten(-2).all(-1)
    found = solver(blocks.where(fine[..., None, None], 0.0))
    values = (found if isinstance(found, Tensor) else found[0]).masked_fill_(~fine[..., None], torch.nan)
    return values if isinstance(found, Tensor) else (values, found[1])


def within_range(block: Tensor, rank: int, error: float) -> tuple[Tensor, Tensor, bool]:
    """``Q^T A Q`` of a positive semidefinite matrix ``(d, d)`` of at most this rank, with Q ``(d, rank + SPARE)`` an orthonormal basis of
    A's products with random vectors; Q; and whether that leaves no more than rounding out of the trace, which is the sum of the other
    eigenvalues.

    Source: Halko, Martinsson and Tropp, "Finding structure with randomness", SIAM Review 2011, algorithm 4.1.
    """
    basis = torch.linalg.qr(block @ _random(len(block), rank + SPARE, block.device)).Q
    inside = basis.T @ (block @ basis)
    trace = block.trace()
    return inside, basis, bool(trace - inside.trace() <= TRACE * error * trace)


@functools.lru_cache(8)
def _random(rows: int, columns: int, device: torch.device) -> Tensor:
    """Normal numbers, the same at every call."""
    with torch.inference_mode(False):
        generator = torch.Generator(device).manual_seed(0)
        return torch.randn(rows, columns, dtype=torch.float64, generator=generator, device=device)


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


def by_threads(parts: Sequence[Part], decompose: Callable[[Part], Result]) -> list[Result]:
    """``decompose`` of each part, on the CPU: some blocks a thread. All threads have, one after the other, blocks so large that a thread may
    not hold one, and what would otherwise keep one thread busy when the others are done."""
    most = sum(part.cost for part in parts) / calls_at_once()
    found: dict[int, Result] = {}
    shared = []
    for at in sorted(range(len(parts)), key=lambda at: parts[at].cost, reverse=True):
        if parts[at].rows ** 2 > AT_ONCE_ON_CPU or parts[at].cost > most:
            found[at] = decompose(parts[at])
        else:
            shared.append(at)
    found |= zip(shared, map_at_once(decompose, [parts[at] for at in shared]), strict=True)
    return [found[at] for at in range(len(parts))]
