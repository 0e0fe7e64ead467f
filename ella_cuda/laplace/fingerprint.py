"""A number that moves with every parameter and buffer of a model, and what few operators read of many tensors."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

# Elements that are copied at a time, in float64, with as many weights: of a tensor at least.
AT_ONCE, AT_ONCE_ON_CUDA = 1 << 18, 1 << 24
SMALL, SMALL_AT_ONCE = 1 << 16, 1 << 17  # of buffers whose sums are taken together, by weights that are kept
IDLE = 32  # arrangements of tensors that are kept


class _SideBySide:
    """Float64 memory of tensors of these shapes, one after the other, which is there between :meth:`fill` and :meth:`release`. Views of it
    stay, so that few operators fill it.

    Attributes:
        whole: all of it. parts: of each tensor.
        lengths, weights: of the parts, and uneven ones of the elements, which begin anew with each part; None before :meth:`sums`.
    """

    def __init__(self, shapes: Sequence[torch.Size], device: torch.device) -> None:
        self._sizes = [math.prod(shape) for shape in shapes]
        with torch.inference_mode(False):  # or nobody else could fill it
            self.whole = torch.empty(sum(self._sizes), dtype=torch.float64, device=device)
            split = zip(self.whole.split(self._sizes), shapes, strict=True)
            self.parts = [part.view(shape) for part, shape in split]
        self._storage, self._bytes = self.whole.untyped_storage(), self.whole.untyped_storage().nbytes()
        self.lengths: Tensor | None = None
        self.weights: Tensor | None = None

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copy tensors of these shapes."""
        self._storage.resize_(self._bytes)
        torch._foreach_copy_(self.parts, tensors)

    def release(self) -> None:
        """Give the memory back."""
        self._storage.resize_(0)

    def sums(self) -> Tensor:
        """A weighted sum of the elements of each part, ``(parts,)``."""
        if self.weights is None:
            with torch.inference_mode(False):
                self.lengths = torch.tensor(self._sizes, device="cpu").to(self.whole.device)
                weights = _uneven(max(self._sizes), self.whole.device)
                self.weights = torch.cat([weights[:size] for size in self._sizes])
        return torch.segment_reduce(self.whole * self.weights, "sum", lengths=self.lengths, unsafe=True)


_idle: dict[tuple[torch.device, tuple[torch.Size, ...]], _SideBySide] = {}


@torch.no_grad()
def side_by_side(tensors: Sequence[Tensor], at_once: int | None = None) -> Iterator[_SideBySide]:
    """Copies of tensors in float64, in their order, those of one device and of ``at_once`` elements, or one tensor, at a time. Each is there
    until the next."""
    groups: list[list[Tensor]] = []
    most, count = 0, 0
    for tensor in tensors:
        if not groups or tensor.device != groups[-1][0].device or count + tensor.numel() > most:
            groups.append([])
            most, count = at_once or (AT_ONCE_ON_CUDA if tensor.is_cuda else AT_ONCE), 0
        groups[-1].append(tensor)
        count += tensor.numel()
    for group in groups:
        key = group[0].device, tuple(tensor.shape for tensor in group)
        memory = _idle.pop(key, None) or _SideBySide(key[1], key[0])  # another thread has its own
        try:
            memory.fill(group)
            yield memory
        finally:
            memory.release()
            _idle[key] = memory
            while len(_idle) > IDLE:
                _idle.pop(next(iter(_idle)), None)


def fingerprint_of(model: nn.Module, without: Collection[str] = ()) -> Tensor:
    """A number that moves with every parameter and buffer, frozen ones too, 0-dim float64: a sum with uneven weights. ``without``: names of
    buffers that do not move it."""
    return fingerprint_and_buffers(model, without)[0]


@torch.no_grad()
def fingerprint_and_buffers(model: nn.Module, without: Collection[str] = ()) -> tuple[Tensor, dict[str, Tensor | None]]:
    """:func:`fingerprint_of` and :func:`buffer_sums`; each tensor is read once."""
    kept, buffers = model.state_dict(keep_vars=True), buffer_sums(model)
    for name, module in model.named_modules():
        key = f"{name}.weight".removeprefix(".")
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None and key in kept:
            kept[key] = _as_looked_up(module)
    named = dict(model.named_buffers(remove_duplicate=False))
    apart = [t for name, t in kept.items() if named.get(name) is not t and t.is_floating_point()]
    sums = [total for name, total in buffers.items() if total is not None and name not in without]
    weights: dict[torch.device, Tensor] = {}
    for memory in side_by_side(apart):
        whole, its = memory.whole, weights.get(memory.whole.device)
        if its is None or len(its) < len(whole):
            its = weights[whole.device] = _uneven(len(whole), whole.device)
        sums.append(whole @ (its if len(its) == len(whole) else its[: len(whole)]))
    if not sums:
        return torch.zeros((), dtype=torch.float64, device="cpu"), buffers
    found = torch.stack([total.to(sums[-1].device) for total in sums])
    return found @ torch.arange(1, len(sums) + 1, dtype=torch.float64, device=found.device), buffers


def _as_looked_up(embedding: nn.Embedding | nn.EmbeddingBag) -> Tensor:
    """The weight as calls leave it, which shorten the rows that they look up to ``max_norm``; rounding has come to rest."""
    weight = embedding.weight.detach().clone()
    rows = torch.arange(len(weight), device=weight.device)
    for _ in range(3):
        torch.embedding_renorm_(weight, rows, embedding.max_norm, embedding.norm_type)
    return weight


def buffer_sums(model: nn.Module) -> dict[str, Tensor | None]:
    """A number that moves with each buffer; None for buffers that are in no fingerprint."""
    named = dict(model.named_buffers(remove_duplicate=False))
    sums: dict[str, Tensor | None] = dict.fromkeys(named)
    floating = {name: buffer for name, buffer in named.items() if buffer.is_floating_point()}
    small = {name: buffer for name, buffer in floating.items() if buffer.numel() <= SMALL}
    found = [sums for memory in side_by_side([*small.values()], SMALL_AT_ONCE) for sums in memory.sums().unbind()]
    return (
        sums | {n: uneven_sum(b) for n, b in floating.items() if n not in small} | dict(zip(small, found, strict=True))
    )


def filled_since(model: nn.Module, before: Mapping[str, Tensor | None]) -> frozenset[str]:
    """The buffers that are others than they were when their sums were these: tables and masks that a forward makes. Waits for the device."""
    now = buffer_sums(model)
    compared = {name: total for name, total in now.items() if name in before and total is not None}
    new = {name for name in now if name not in before or (name in compared and before[name] is None)}
    old = [name for name in compared if name not in new]
    if not old:
        return frozenset(new)
    device = now[old[0]].device
    same = torch.stack([now[n].to(device) for n in old]) == torch.stack([before[n].to(device) for n in old])
    return frozenset(new | {name for name, is_same in zip(old, same.tolist(), strict=True) if not is_same})


@torch.no_grad()
def uneven_sum(tensor: Tensor) -> Tensor:
    """A weighted sum of the elements, 0-dim float64: permutations move it, and changes that cancel in a plain sum."""
    flat = tensor.reshape(-1)
    return flat.double() @ _uneven(len(flat), flat.device)


def _uneven(count: int, device: torch.device) -> Tensor:
    """Weights between 0.5 and 1.5, ``(count,)`` float64: multiples of the golden ratio, no two close ones alike."""
    return torch.arange(1, count + 1, dtype=torch.float64, device=device).mul_(0.6180339887498949).frac_().add_(0.5)
