"""Several processes as one: what they agree on before they sum, packed sums, shares of work and of data, over ``torch.distributed``.

Nothing here is done without a group that the caller names. Processes exchange a header before anything is summed, so that an error of
one is an error of all, and none waits for another that has left.
"""

from __future__ import annotations

import hashlib
import heapq
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

if torch.distributed.is_available():
    # Torch imports this module as late as an optimizer's first step. A function's default there is the group of that moment, which then
    # outlives its end, and gloo's threads wait for Python's lock while Python ends. Imported before there is a group, the default is none.
    import torch.distributed.nn.functional

T = TypeVar("T")
FRAME = 4096  # bytes of a header that travel at once; longer ones take a second exchange
AT_ONCE = 1 << 25  # numbers of packed matrices in one sum: 256 MiB of float64
# Errors that are raised as what they are on all ranks; others are RuntimeErrors there.
KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        ArithmeticError,
        AttributeError,
        FloatingPointError,
        LookupError,
        MemoryError,
        NotImplementedError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
    )
}


# symmetric matrices ---------------------------------------------------------------------------------------------------


def pack(matrices: Tensor) -> Tensor:
    """The lower triangles of symmetric matrices ``(G, d, d)`` as rectangles: ``(G, d+1, d/2)`` for even d, ``(G, d, (d+1)/2)`` for odd d.

    The first columns' lower triangle stays where it is, a row lower for even d. The upper triangle beside it is free, and takes that of
    the last columns.

    Source: Gustavson et al., "Rectangular full packed format for Cholesky's algorithm", ACM TOMS 2010.
    """
    d = matrices.shape[-1]
    half, even = (d + 1) // 2, d % 2 == 0
    first, last = matrices[..., :half].tril(), matrices[..., half:, half:].triu()
    if even:
        first = torch.cat([first.new_zeros(*first.shape[:-2], 1, half), first], -2)
    rest = last.shape[-1]
    first[..., :rest, half - rest :] += last
    return first


def unpack(packed: Tensor, out: Tensor) -> Tensor:
    """The matrices that :func:`pack` packed, written to ``out``, ``(G, d, d)``, which is returned."""
    d = out.shape[-1]
    half, even = (d + 1) // 2, d % 2 == 0
    rest = d - half
    last = packed[..., :rest, half - rest :].triu()
    first = (packed[..., 1:, :] if even else packed).tril()
    out[..., :half] = first
    out[..., :half, :half] += first[..., :half, :].tril(-1).mT
    out[..., :half, half:] = first[..., half:, :].mT
    out[..., half:, half:] = last + last.triu(1).mT
    return out


def packed_numbers(groups: int, size: int) -> int:
    """How many numbers :func:`pack` makes of that many matrices of that many rows."""
    return groups * size * (size + 1) // 2


# shares ---------------------------------------------------------------------------------------------------------------


def owners(costs: Sequence[float], ranks: int) -> list[int]:
    """Which rank does each piece of work: the dearest first, each to whom has the least so far. No rank has more than 4/3 of the best
    possible.

    Source: Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 1969 (longest processing time).
    """
    load = [(0.0, rank) for rank in range(ranks)]
    found = [0] * len(costs)
    for piece in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        least, found[piece] = load[0]
        heapq.heapreplace(load, (least + costs[piece], found[piece]))
    return found


def slice_of(count: int, rank: int, ranks: int) -> slice:
    """A rank's part of so many data points, as even as can be."""
    return slice(count * rank // ranks, count * (rank + 1) // ranks)


class Shard:
    """A rank's whole batches of a loader that all ranks have alike: batch i is rank ``i mod R``'s; see :func:`shard`.

    Attributes:
        loader: of all batches. rank, ranks: whose part it is. group: of these ranks, if it was given.
        dataset_size: data points of all ranks' batches together; None where the loader does not tell.
    """

    def __init__(self, loader: Iterable[Any], rank: int, ranks: int, group: Any = None) -> None:
        self.loader, self.rank, self.ranks, self.group = loader, rank, ranks, group
        self.dataset_size, self._first = dataset_size(loader), None

    def __iter__(self) -> Iterator[Any]:
        from ella_cuda.laplace.batches import kept

        for number, batch in enumerate(self.loader):
            if not number:
                self._first = kept(batch)
            if number % self.ranks == self.rank:
                yield batch

    def taken_first(self) -> Any:
        """The first of all ranks' batches in the pass that has begun, by which ranks compare their plans; once, it is not kept."""
        batch, self._first = self._first, None
        return batch

    def __len__(self) -> int:
        """The rank's number of batches, where the loader has a length."""
        return len(range(self.rank, len(self.loader), self.ranks))  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name in ("generator", "sampler", "batch_sampler", "data_digest", "num_workers"):
            return getattr(self.loader, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


def shard(loader: Iterable[Any], group: Any) -> Shard:
    """This process' batches of a loader that every process has alike, for ``KronLaplace.fit(shard(loader, group), group=group)``.

    Batches stay whole, as their composition matters to ``column_tolerance`` and to batches' own sums: batch i is that of rank ``i mod R``.
    The loader must yield the same batches in the same order on all ranks: no shuffling, or generators in the same state. A loader that
    reads its data from files reads all of them on every rank; one that knows the plan can yield its own batches alone instead.

    Args:
        loader: of whole batches. group: such as ``torch.distributed.group.WORLD``.

    Raises:
        TypeError: group is none. ValueError: the loader has a ``DistributedSampler``.
    """
    ranks = Ranks(group, "shard")
    require_whole(loader, ranks.size, "shard: loader")
    return Shard(loader, ranks.rank, ranks.size, group)


def dataset_size(loader: Any) -> int | None:
    """Data points of a loader's data set, by its attribute ``dataset_size`` or the length of a ``DataLoader``'s; None where neither tells."""
    declared = getattr(loader, "dataset_size", None)
    if declared is not None:
        return int(declared)
    if isinstance(loader, DataLoader):
        try:
            return len(loader.dataset)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None
    return None


def require_whole(loader: Any, ranks: int, where: str) -> None:
    """ValueError where a loader's sampler is a ``DistributedSampler``, which repeats data points to make all ranks' numbers equal."""
    from torch.utils.data.distributed import DistributedSampler

    batches = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            raise ValueError(
                f"{where} must yield whole batches of one plan, got a DistributedSampler, with which the {sampler.num_replicas} ranks see "
                f"{sampler.total_size} data points of the data set's {len(sampler.dataset)}: it repeats or drops some to make the ranks' "
                "numbers equal. Give every rank the same DataLoader without it; ella_cuda.distributed.shard(loader, group) takes the rank's "
                "batches."
            )


# a group --------------------------------------------------------------------------------------------------------------


class Ranks:
    """The processes of a group, as one of them sees them.

    Args:
        group: a process group of ``torch.distributed``, which this process is in.
        where: whose argument it is, for messages.

    Attributes:
        rank, size: this process' number in the group, and how many there are.

    Raises:
        TypeError: group is no process group. RuntimeError: torch was built without ``torch.distributed``.
        ValueError: this process is not in it.
    """

    def __init__(self, group: Any, where: str) -> None:
        import torch.distributed as dist

        if not dist.is_available():
            raise RuntimeError(f"{where}: group must be None, for this torch was built without torch.distributed.")
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(f"{where}: group must have this process in it; only its members may call {where}.")
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"{where}: group must be None or a process group such as torch.distributed.group.WORLD, which init_process_group makes, got "
                f"{type(group).__name__}."
            )
        self.group, self.where = group, where
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        config = str(dist.get_backend_config(group))  # such as "cpu:gloo,cuda:nccl"
        self._takes_cuda, self._takes_cpu = "nccl" in config, "cpu:" in config
        self._dist = dist

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def _there(self, tensor: Tensor) -> Tensor:
        """Where the group's backend takes it."""
        if tensor.is_cuda:
            return tensor if self._takes_cuda else tensor.cpu()
        return tensor if self._takes_cpu else tensor.cuda()

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place; all get the same bits. Numbers are sent in the order of indices, whatever a rank's layout."""
        there = self._there(tensor.contiguous())
        self._dist.all_reduce(there, group=self.group)
        return tensor if there is tensor else tensor.copy_(there)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, of one shape and type, on this rank's device."""
        there = self._there(tensor.contiguous())
        found = [torch.empty_like(there) for _ in range(self.size)]
        self._dist.all_gather(found, there, group=self.group)
        return [one.to(tensor.device) for one in found]

    def exchange(self, header: Any) -> list[Any]:
        """Every rank's header, plain values that JSON takes."""
        own = json.dumps(header).encode()
        frame = torch.zeros(FRAME, dtype=torch.uint8)
        frame[:8] = torch.tensor([len(own)], dtype=torch.int64).view(torch.uint8)
        first = own[: FRAME - 8]
        frame[8 : 8 + len(first)] = _bytes(first)
        frames = self.gather(frame)
        lengths = [int(one[:8].view(torch.int64)) for one in frames]
        wholes = [one[8:] for one in frames]
        if max(lengths) > FRAME - 8:
            padded = torch.zeros(max(lengths), dtype=torch.uint8)
            padded[: len(own)] = _bytes(own)
            wholes = self.gather(padded)
        return [json.loads(bytes(w[:n].tolist())) for w, n in zip(wholes, lengths, strict=True)]

    def agree(self, error: Exception | None = None, **facts: Any) -> list[dict[str, Any]]:
        """Every rank's facts; where a rank has an error, all raise one of its kind that names the rank."""
        header = {**facts, "error": None if error is None else [_kind(error), str(error)]}
        if error is not None:
            header = {"error": header["error"]}
        if getattr(error, "of_all_ranks", False):  # which have raised it here, all of them
            raise error
        headers = self.exchange(header)
        failed = [rank for rank, one in enumerate(headers) if isinstance(one, dict) and one.get("error") is not None]
        if not failed and any(not isinstance(one, dict) or one.keys() != header.keys() for one in headers):
            raise ValueError(
                f"{self.where}: all ranks must do the same steps, but another rank is at another one than rank {self.rank} of "
                f"{self.size}."
            )
        if failed:
            kind, text = headers[failed[0]]["error"]
            if error is not None and not isinstance(error, tuple(KINDS.values())):  # such as a command's own
                error.of_all_ranks = True  # type: ignore[attr-defined]
                raise error
            others = f" (so did {_named(failed[1:])})" if failed[1:] else ""
            raised = KINDS.get(kind, RuntimeError)(f"on {_named(failed[:1])} of {self.size}{others}: {text}")
            raised.of_all_ranks = True  # type: ignore[attr-defined]
            raise raised from error
        return headers

    def together(self, work: Callable[[], T]) -> T:
        """What ``work`` returns here, once no rank has failed at it; work must not wait for other ranks."""
        found, error = None, None
        try:
            found = work()
        except Exception as raised:
            error = raised
        self.agree(error)
        return found  # type: ignore[return-value]

    def require_same(self, values: Sequence[Any], what: str, do: str) -> None:
        """ValueError where ranks' values, in their order, are not equal; it names those that have not the commonest."""
        values = list(values)
        common = max(values, key=values.count)
        others = [rank for rank, value in enumerate(values) if value != common]
        if others:
            raise ValueError(
                f"{self.where}: all ranks must have the same {what}, but {_named(others)} of {self.size} "
                f"{'has' if len(others) == 1 else 'have'} another ({_short(values[others[0]])}) than {_named([values.index(common)])} "
                f"({_short(common)}). {do}"
            )

    def require_same_facts(self, found: Sequence[Mapping[str, Any]], do: str) -> None:
        """:meth:`require_same` for each name of ranks' facts, in an order that all have."""
        for name in {name: None for one in found for name in one}:
            self.require_same([one.get(name) for one in found], name, do)

    def wait_for_all(self) -> Callable[[], bool]:
        """Say that this rank is here; what is returned says whether all are, and raises where one has left."""
        # No barrier, which a group that has NCCL too makes on GPUs, where nobody hears of a rank that has left.
        handle = self._dist.all_reduce(self._there(torch.zeros(1)), group=self.group, async_op=True)

        def done() -> bool:
            if not handle.is_completed():
                return False
            handle.wait()
            return True

        return done

    def from_first(self, value: Any) -> Any:
        """Rank 0's value, tensors and plain values that ``torch.load`` takes with ``weights_only``, on the CPU elsewhere."""
        data = torch.zeros(0, dtype=torch.uint8)
        if self.is_first:
            file = io.BytesIO()
            torch.save(value, file)
            data = _bytes(file.getvalue())
        length = self._there(torch.tensor([len(data)]))
        self._dist.broadcast(length, group=self.group, group_src=0)
        there = self._there(data if self.is_first else torch.zeros(int(length), dtype=torch.uint8))
        self._dist.broadcast(there, group=self.group, group_src=0)
        if self.is_first:
            return value
        return torch.load(io.BytesIO(there.cpu().numpy().tobytes()), map_location="cpu", weights_only=True)

    # what a fit sums --------------------------------------------------------------------------------------------------

    def sum_matrices_(self, totals: Sequence[Tensor], extra: Tensor) -> Tensor:
        """Sum symmetric float64 matrices ``(G, d, d)`` over ranks in place, packed, and ``extra``, 1-D float64, which is returned: one sum
        where the packed numbers are at most :data:`AT_ONCE`.
        """
        parts: list[list[Tensor]] = [[]]
        count = len(extra)
        for total in totals:
            numbers = packed_numbers(*total.shape[:2])
            if parts[-1] and count + numbers > AT_ONCE:
                parts.append([])
                count = 0
            parts[-1].append(total)
            count += numbers
        for number, part in enumerate(parts):
            packed = [pack(total) for total in part]
            flat = torch.cat([*([extra] if number == 0 else []), *(one.flatten() for one in packed)])
            shapes = [one.shape for one in packed]
            del packed
            self.sum_(flat)
            if number == 0:
                extra, flat = flat[: len(extra)].clone(), flat[len(extra) :]
            for total, shape, piece in zip(part, shapes, flat.split([s.numel() for s in shapes]), strict=True):
                unpack(piece.view(shape), total)
        return extra

    def gather_uneven(self, own: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """Every rank's 1-D tensor, of so many numbers each."""
        padded = own.new_zeros(max(max(counts), 1))
        padded[: len(own)] = own
        return [one[:count] for one, count in zip(self.gather(padded), counts, strict=True)]


def gathered(own: Tensor, group: Any) -> Tensor:
    """All ranks' rows one after the other, ``(N, ...)``, on every rank: what each has of predictions for its part of the inputs, such as
    ``x[slice_of(len(x), rank, ranks)]``.

    Args:
        own: ``(n, ...)``, n of this rank's own, the other axes as on all ranks.
        group: such as ``torch.distributed.group.WORLD``.

    Raises:
        TypeError: group is none. ValueError: ranks' other axes or types differ.
    """
    ranks = Ranks(group, "gathered")
    headers = ranks.agree(rows=len(own), kind=[str(own.dtype), *own.shape[1:]])
    ranks.require_same([one["kind"] for one in headers], "type and shape of a row", "Convert or reshape before.")
    counts = [one["rows"] for one in headers]
    each = math.prod(own.shape[1:])
    found = ranks.gather_uneven(own.detach().flatten(), [count * each for count in counts])
    return torch.cat([one.view(count, *own.shape[1:]) for one, count in zip(found, counts, strict=True)])


def layout_hash(description: Any) -> str:
    """A digest by which ranks compare what they are about to sum."""
    return hashlib.blake2b(json.dumps(description).encode(), digest_size=16).hexdigest()


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)


def _kind(error: Exception) -> str:
    """The nearest of :data:`KINDS` that an error is."""
    return next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in KINDS), "RuntimeError")


def _named(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _short(value: Any) -> str:
    return repr(value) if len(repr(value)) <= 100 else f"{repr(value)[:97]}..."
