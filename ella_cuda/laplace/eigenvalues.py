"""Eigenvalues and eigenvectors of the symmetric blocks of all factors, in float64: by LAPACK, on CUDA by our kernel or cuSOLVER."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from ella_cuda._extension import build_info
from ella_cuda.ops import _lapack
from ella_cuda.ops.symmetric_eigenvalues import most_rows, symmetric_eigenvalues

# Seconds, measured on an H200 at 64 to 1,024 rows: our kernel takes all blocks at once, until the largest of d rows is done
# max(OWN_SQUARE d^2, OWN_CUBE d^3); cuSOLVER takes CUSOLVER_ROW d for each, one after the other.
OWN_SQUARE, OWN_CUBE, CUSOLVER_ROW = 28e-9, 42e-12, 9.7e-6


def own_rows(device: torch.device) -> int:
    """Rows of the largest blocks that our kernel decomposes on a CUDA device; 0 where this build has no such kernel."""
    return most_rows(device) if build_info()["cuda"] else 0


def eigenvalues_of_all(sets: Sequence[Tensor], rows: Sequence[tuple[int, float]] = ()) -> Tensor:
    """The eigenvalues of all symmetric blocks of sets ``(G, d, d)`` of one device, each block's ascending, one block after the other,
    ``(sum G d,)``, float64, as constants; NaN where a block has a number that is not finite.

    Rows of zeros are not decomposed; of a sum of few outer products, compared with its size, a basis of its range is (see
    :func:`ella_cuda.ops._lapack.within_range`). On the CPU threads share the blocks. On CUDA our kernel takes blocks of up to
    :func:`own_rows` together, but for the largest where cuSOLVER is sooner done with them. Those and larger ones go to cuSOLVER one by one:
    its routine for many takes longer. The host waits once for what is zero in larger blocks, and in each of cuSOLVER's calls.

    Args:
        sets: of symmetric blocks, positive semidefinite up to rounding where their rows are known.
        rows: of each set, how many outer products its blocks are sums of, and their relative rounding error; empty where this is unknown.

    Raises:
        torch.linalg.LinAlgError: where a block's do not converge, torch's.
    """
    if not sets or sets[0].is_cpu:
        return symmetric_eigenvalues(sets, rows)
    sets = [blocks.detach() if blocks.requires_grad else blocks for blocks in sets]
    own = own_rows(sets[0].device) if sets[0].is_cuda else 0
    parts = _lapack.parts_of(sets, rows, own + 1)
    order = sorted(range(len(parts)), key=lambda at: -parts[at].rows)
    taken = [at for at in order if parts[at].rows <= own and parts[at].finite is not False]
    taken = taken[left_to_cusolver([(len(parts[at].blocks), parts[at].rows) for at in taken]) :]
    before = itertools.accumulate((parts[at].blocks.numel() for at in taken), initial=0)
    found: dict[int, Tensor] = {}
    for _, some in itertools.groupby(
        zip(taken, before, strict=False), lambda pair: pair[1] // _lapack.AT_ONCE_ELSEWHERE
    ):
        given = {at: parts[at].nonzero() for at, _ in some}
        values = symmetric_eigenvalues([*given.values()])
        split = values.split([blocks.shape[0] * blocks.shape[1] for blocks in given.values()])
        found |= zip(given, split, strict=True)
    for at, part in enumerate(parts):
        if at not in found:
            each = [_lapack.eigenvalues(part._replace(blocks=block)) for block in part.blocks.split(1)]
            found[at] = torch.cat(each).flatten()
        elif part.places is not None:
            found[at] = part.padded(found[at][None])[0]
    return torch.cat([found[at] for at in range(len(parts))])


def left_to_cusolver(shapes: Sequence[tuple[int, int]]) -> int:
    """How many of the first of these sets of blocks ``(G, d)``, the largest first, cuSOLVER had better take from our kernel."""
    before = itertools.accumulate((CUSOLVER_ROW * groups * d for groups, d in shapes), initial=0.0)
    own = [max(OWN_SQUARE * d**2, OWN_CUBE * d**3) for _, d in shapes]
    seconds = [one + rest for one, rest in zip(before, [*own, 0.0], strict=True)]
    return seconds.index(min(seconds))


def eigenbases_of_all(sets: Sequence[Tensor], rows: Sequence[tuple[int, float]] = ()) -> tuple[Tensor, list[Tensor]]:
    """Eigenvalues as :func:`eigenvalues_of_all`, and eigenvectors ``(G, d, d)``, columns, float64, of each set of blocks, by torch: small
    blocks of one size together. What takes more than two seconds shows how far it is on a terminal.

    Raises:
        torch.linalg.LinAlgError: where a block's do not converge.
    """
    sets = [blocks.detach() if blocks.requires_grad else blocks for blocks in sets]
    parts = _lapack.parts_of(sets, rows, _lapack.LARGE)
    groups = _lapack.of_one_size(parts)
    wholes = [parts[its[0]] if len(its) == 1 else _lapack.joined([parts[at] for at in its]) for its in groups]
    on_cpu = all(blocks.is_cpu for blocks in sets)
    with tqdm(total=len(wholes), desc="eigenvectors", delay=_lapack.PATIENCE, leave=False, disable=None) as bar:

        def decompose(part: _lapack.Part) -> tuple[Tensor, Tensor]:
            found = _lapack.eigenbasis(part)
            bar.update()
            return found

        found = _lapack.by_threads(wholes, decompose) if on_cpu else [*map(decompose, wholes)]
    of_part: dict[int, tuple[Tensor, Tensor]] = {}
    for its, both in zip(groups, found, strict=True):
        sizes = [len(parts[at].blocks) for at in its]
        of_part |= zip(its, zip(*(t.split(sizes) for t in both), strict=True) if its[1:] else [both], strict=True)
    vectors: list[list[Tensor]] = [[] for _ in sets]
    for at, part in enumerate(parts):
        vectors[part.place].append(of_part[at][1])
    own = [of_part[at][0] for at in range(len(parts))]
    alone = all(len(values) == 1 for values in own)  # which need no view each
    values = torch.cat(own, 1)[0] if alone else torch.cat([values.flatten() for values in own])
    return values, [own[0] if len(own) == 1 else torch.cat(own) for own in vectors]


def workspace(blocks: Iterable[tuple[int, int]], device: torch.device) -> int:
    """Bytes that :func:`eigenvalues_of_all` takes for sums of so many blocks of so many rows each: what is decomposed at once, and as
    much again for the solver's copy and its scratch."""
    sizes = [(groups * rows**2, rows**2) for groups, rows in blocks]
    on_cpu = _lapack.AT_ONCE_ON_CPU * _lapack.calls_at_once()
    at_once = on_cpu if device.type == "cpu" else _lapack.AT_ONCE_ELSEWHERE
    most = max(max(one for _, one in sizes), min(sum(every for every, _ in sizes), at_once))
    return 3 * torch.float64.itemsize * most


def solver(device: torch.device) -> str:
    """The solver of many blocks on that device, in words."""
    if device.type != "cuda":
        at_once = _lapack.calls_at_once()
        return f"torch's LAPACK, {at_once} at once" if at_once > 1 else "torch's LAPACK, one after the other"
    rows = own_rows(device)
    ours = f"our kernel up to {rows} rows, all sizes at once; above " if rows else ""
    return f"{ours}torch's cuSOLVER, one after the other"
