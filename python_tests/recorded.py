"""A stand-in for CUDA graphs that runs on any device: the ops of a step, written down as they come and run again on the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
REFUSED = {
    aten._local_scalar_dense.default: "reads a value",
    aten.nonzero.default: "reads a value",
    aten.lift_fresh.default: "makes a tensor of Python's numbers, which for a GPU is a copy from the host",
}


class DevicesNamed(TorchFunctionMode):
    """Refuses functions that make a tensor and are not told where: that is on the host, from where it would have to be copied."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _device_constructors() and (kwargs or {}).get("device") is None:
            raise RuntimeError(f"{function.__name__} makes a tensor without being told on which device")
        return function(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):
    """Writes down every op with its very arguments and results. As a CUDA graph, it refuses ops that copy between host and device, and
    what Python computed is a constant in it. As one, it leaves the tensors as they were before the recording."""

    def __init__(self) -> None:
        super().__init__()
        self._before: list[tuple[Tensor, Tensor]] = []
        self.ops: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op in REFUSED:
            raise RuntimeError(f"{op} {REFUSED[op]}")
        self._before += [(t, t.clone()) for t in written(op, args, kwargs or {})]
        results = op(*args, **(kwargs or {}))
        self.ops.append((op, args, kwargs or {}, tensors(results)))
        return results

    def undo(self) -> None:
        """Every tensor that was written gets back what it held."""
        with torch.no_grad():
            for tensor, before in reversed(self._before):
                tensor.copy_(before)
        self._before.clear()

    def replay(self) -> None:
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            for op, args, kwargs, results in self.ops:
                for old, new in zip(results, tensors(op(*args, **kwargs)), strict=True):
                    if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                        old.copy_(new)


def tensors(results: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]


def written(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that the op writes, by its schema."""
    given = {
        argument.name: value for argument, value in zip(op._schema.arguments, args, strict=False)
    } | kwargs  # fmt: skip
    names = [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return tensors([given[name] for name in names if name in given])


class RecordedGraphs:
    """Has the methods of :class:`ella_cuda.recording.CudaGraphs`, and counts."""

    made: ClassVar[list[RecordedGraphs]] = []

    def __init__(self, device: torch.device) -> None:
        self.warmed = self.recorded = self.replayed = 0
        self.made.append(self)

    def begin_anew(self) -> None:
        pass

    def warm_up(self, work: Callable[[], None]) -> None:
        self.warmed += 1
        work()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        recorder = Recorder()
        with recorder, DevicesNamed():
            work()
        recorder.undo()

        def replay() -> None:
            self.replayed += 1
            recorder.replay()

        return replay
