"""Straight-line programs: the operators below autograd that a function calls, recorded once and run again on other tensors.

A batch of a fit is some hundred small operators between hooks, autograd and vmap, which take as long as the operators do. A tape is the
operators alone. What Python decides is constant in it, so a function that reads a tensor's numbers has no tape.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map

from ella_cuda.laplace.interception import FunctionMode, OperatorMode

aten = torch.ops.aten
RENAMES = {aten.detach.default, aten.alias.default}  # which return the argument below autograd
READS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
READS_OF_MEMORY = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__}
# Kernels that are no operators, as Triton's, read and write at addresses. Our own code compares them.
ADDRESSES = {Tensor.data_ptr, Tensor.__cuda_array_interface__.__get__}
RESHAPES = ("set_", "resize_", "resize_as_", "as_strided_", "transpose_", "t_", "squeeze_", "unsqueeze_")
DATA_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
MOST_STEPS = 1 << 14  # for which a tape takes about a second to make
# When a step runs: at once, for tensors that stay, for each run's draws, or in each run.
ONCE, STAYING, DRAWING, EACH = range(4)


class NotRecordable(RuntimeError):
    """A function has no tape; the message says why."""


class _Slot:
    """A tensor's number on the tape, in the place of the tensor."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class _Generator:
    """In the place of the generator that each run is given."""


class _Step(NamedTuple):
    """A call of an operator.

    Attributes:
        args, kwargs: with slots in the place of tensors.
        made: slots of the results, one or a list; None in the place of what is no new tensor.
        writes: slots of the arguments that it writes.
        mixed: whether it has tensors on several kinds of devices.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: int | list[int | None] | None
    writes: list[int]
    mixed: bool

    def reads(self) -> list[int]:
        return [leaf.number for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, _Slot)]

    def makes(self) -> list[int]:
        return [slot for slot in (self.made if isinstance(self.made, list) else [self.made]) if slot is not None]

    def is_random(self) -> bool:
        return torch.Tag.nondeterministic_seeded in self.op.tags


class _Recorder:
    """Writes down operators as they come. What writes tensors that were there before is written down alone, so that a recording changes
    nothing.

    Attributes:
        steps: the operators. storages: by slot, the number of its storage.
        given: by slot, tensors that were there before, inputs among them.
    """

    def __init__(
        self, inputs: Sequence[Tensor], generator: torch.Generator | None, there: Iterable[Tensor] = ()
    ) -> None:
        self.steps: list[_Step] = []
        self.storages: list[int] = []
        self.given: dict[int, Tensor] = {}
        self._generator = generator
        self._names: dict[int, tuple[Any, int]] = {}  # by a tensor's id, the tensor and its slot
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}  # by a storage's address, the storage and its number
        self._views: list[list[tuple[int, Any]]] = []  # by storage, slots and their geometries
        self._given: set[int] = set()  # storages
        self.inputs = [self.slot_of(tensor) for tensor in inputs]
        for tensor in there:  # each by itself, whatever memory it has in common with others
            if self._same(tensor) is None:
                self._give(tensor)

    def __call__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(self.steps) >= MOST_STEPS:
            raise NotRecordable(f"there are more than {MOST_STEPS} operators")
        if _reads_numbers(op, args):
            raise NotRecordable(f"{op} reads a tensor's numbers")
        if op._schema.name.split("::")[1] in RESHAPES:
            raise NotRecordable(f"{op} gives a tensor another shape in place")
        if op is aten.lift_fresh.default and self._find(args[0]) is None:  # a tensor of Python's numbers
            found = op(*args)
            self.steps.append(_Step(aten.clone.default, args, {}, self._new(found), [], False))
            return found
        written_args, written_kwargs = tree_map(self._written, (args, kwargs))
        writes = [
            leaf.number
            for leaf in tree_leaves(_written_by(op, written_args, written_kwargs))
            if isinstance(leaf, _Slot)
        ]
        lasts = any(self.storages[slot] in self._given for slot in writes)
        found = _results_among(op, args, kwargs) if lasts else op(*args, **kwargs)
        if op in RENAMES:
            self._name(found, written_args[0].number)
            return found
        before = {id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        results = list(found) if isinstance(found, (tuple, list)) else [found]
        made = [self._new(t) if isinstance(t, Tensor) and id(t) not in before else None for t in results]
        kinds = {leaf.device.type for leaf in tree_leaves((args, kwargs, results)) if isinstance(leaf, Tensor)}
        several = isinstance(found, (tuple, list))
        self.steps.append(_Step(op, written_args, written_kwargs, made if several else made[0], writes, len(kinds) > 1))
        return found

    def slot_of(self, tensor: Tensor) -> int:
        """The slot of a tensor, or of another name of its memory; a new one of a tensor that was there before."""
        slot = self._find(tensor)
        return self._give(tensor) if slot is None else slot

    def _give(self, tensor: Tensor) -> int:
        slot = self._new(tensor)
        self.given[slot] = tensor
        self._given.add(self.storages[slot])
        return slot

    def _same(self, tensor: Tensor) -> int | None:
        """The slot of a tensor, or of one with the same numbers of the same memory."""
        name, slot = self._names.get(id(tensor), (None, 0))
        if name is not None and name() is tensor:
            return slot
        its = geometry(tensor)
        for slot, of_slot in self._views[self._storage(tensor)]:
            if of_slot == its:
                self._name(tensor, slot)
                return slot
        return None

    def _find(self, tensor: Tensor) -> int | None:
        if (slot := self._same(tensor)) is not None:
            return slot
        views, its = self._views[self._storage(tensor)], geometry(tensor)
        if sum(slot in self.given for slot, _ in views) > 1:
            raise NotRecordable("a tensor is seen as a part of a memory that several tensors have in common")
        for slot, of_slot in views:
            if of_slot[3:] == its[3:]:  # what nobody dispatches, such as Tensor.data of a part
                view, (size, stride, offset) = self._new(tensor), its[:3]
                whole = _Slot(slot), [*size], [*stride], offset
                self.steps.append(_Step(aten.as_strided.default, whole, {}, view, [], False))
                return view
        if views:
            raise NotRecordable("a tensor is seen as one of another dtype")
        return None

    def _new(self, tensor: Tensor) -> int:
        slot, storage = len(self.storages), self._storage(tensor)
        self.storages.append(storage)
        self._views[storage].append((slot, geometry(tensor)))
        self._name(tensor, slot)
        return slot

    def _name(self, tensor: Tensor, slot: int) -> None:
        self._names[id(tensor)] = weakref.ref(tensor), slot

    def _storage(self, tensor: Tensor) -> int:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError) as error:
            raise NotRecordable(f"a tensor of layout {tensor.layout} has no memory of its own ({error})") from error
        known, number = self._known.get(storage._cdata, (None, 0))
        if known is None or known.expired():
            number = len(self._views)
            self._known[storage._cdata] = StorageWeakRef(storage), number
            self._views.append([])
        return number

    def _written(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return _Slot(self.slot_of(leaf))
        if isinstance(leaf, torch.Generator):
            if self._generator is None or leaf._cdata != self._generator._cdata:
                raise NotRecordable("random numbers come from a generator of the function's own")
            return _Generator()
        return leaf


class Tape:
    """A recorded function of inputs, of tensors that were there before, and of a generator.

    Attributes:
        drawn: how many random tensors a run has.
        operators: how many operators a run calls, views apart.
        mixed: whether a run copies between devices.
        draws_inside: whether a run draws random numbers that depend on its inputs.
        written: which of the tensors that were there before a run writes, by their numbers.

    Args:
        recorder: of the function.
        outputs: what the function returned.
        staying: tensors of ``given`` that are the same from one run to the next, as parameters are.
        always: how many of the outputs every run has; the others are those of runs that ask for them.
    """

    def __init__(
        self, recorder: _Recorder, outputs: Sequence[Tensor], staying: Iterable[Tensor], always: int | None = None
    ) -> None:
        self._inputs, self._outputs = recorder.inputs, [recorder.slot_of(tensor) for tensor in outputs]
        self._storages, self._given = recorder.storages, {recorder.storages[slot] for slot in recorder.given}
        steps = self._needed(recorder.steps, self._outputs, self._given, draws=True)
        used = {slot for step in steps for slot in step.reads()} | {*self._outputs}
        self._slots = [slot for slot in recorder.given if slot in used and slot not in self._inputs]
        same = {id(tensor) for tensor in staying}
        levels = self._levels(steps, {slot for slot in self._slots if id(recorder.given[slot]) in same})
        self._steps = [
            [step for step, of_step in zip(steps, levels, strict=True) if of_step == level] for level in range(EACH + 1)
        ]
        self._parts = [self._inputs, self._slots, *(self._handed(level) for level in (ONCE, STAYING, DRAWING))]
        once, staying_too, drawn = self._parts[2:]
        self._constants = _function(self._steps[ONCE], [], once)(None)
        self._of_staying = _function(self._steps[STAYING], [self._slots, once], staying_too)
        self._of_draws = _function(self._steps[DRAWING], [once], drawn)
        always = len(outputs) if always is None else always
        each = self._needed(self._steps[EACH], self._outputs[:always], self._given, draws=True)
        self._run = _function(each, self._parts, self._outputs[:always])
        self.drawn = len(drawn)
        self.operators = sum(not step.op.is_view for step in each)
        self.mixed = any(step.mixed for step in self._steps[EACH])
        self.draws_inside = any(step.is_random() for step in self._steps[EACH])
        written = {self._storages[slot] for step in each for slot in step.writes}
        self.written = [number for number, slot in enumerate(self._slots) if self._storages[slot] in written]

    def prepared(self, given: Sequence[Tensor]) -> Sequence[Tensor]:
        """What is made of tensors that stay, once for all runs with them."""
        return self._call(self._of_staying, None, given, self._constants)

    def draws(self, generator: torch.Generator | None) -> Sequence[Tensor]:
        """The random tensors of a run."""
        return self._call(self._of_draws, generator, self._constants)

    def run(
        self,
        inputs: Sequence[Tensor],
        given: Sequence[Tensor],
        prepared: Sequence[Tensor],
        draws: Sequence[Tensor],
        generator: torch.Generator | None = None,
        all_outputs: bool = False,
    ) -> list[Tensor]:
        """The function's outputs, those that every run has unless all are asked for; what it writes is written.

        Args:
            inputs: of the shapes, strides and dtypes of those that were recorded.
            given: in the place of those that were there before, in order.
            prepared: by :meth:`prepared`. draws: by :meth:`draws`.
            generator: of draws that depend on the inputs.
        """
        run = self._run_of_all if all_outputs else self._run
        return self._call(run, generator, inputs, given, self._constants, prepared, draws)

    @functools.cached_property
    def _run_of_all(self) -> Callable[..., list[Tensor]]:
        return _function(self._steps[EACH], self._parts, self._outputs)

    def part(self, outputs: Sequence[int]) -> Callable[..., list[Tensor]]:
        """``(inputs, given, prepared) -> outputs`` of some of the outputs alone; writes nothing that was there before.

        Raises:
            NotRecordable: they depend on random numbers.
        """
        slots = [self._outputs[output] for output in outputs]
        steps = self._needed(self._steps[EACH], slots, set())
        read = {slot for step in steps for slot in step.reads()} | {*slots}
        if read.intersection(self._parts[-1]) or any(step.is_random() for step in steps):
            raise NotRecordable("an output depends on random numbers")
        run = _function(steps, self._parts[:-1], slots)

        def of_run(inputs: Sequence[Tensor], given: Sequence[Tensor], prepared: Sequence[Tensor]) -> list[Tensor]:
            return self._call(run, None, [t.clone() for t in inputs], given, self._constants, prepared)

        return of_run

    @staticmethod
    def _call(function: Callable[..., list[Tensor]], *args: Any) -> list[Tensor]:
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            return function(*args)

    def _needed(
        self, steps: Sequence[_Step], outputs: Sequence[int], lasting: set[int], draws: bool = False
    ) -> list[_Step]:
        """The steps that these outputs, or writes to storages that last, come from; with ``draws`` all that move a generator on."""
        live, storages, kept = {*outputs}, {self._storages[slot] for slot in outputs} | lasting, []
        for step in reversed(steps):
            unread = live.isdisjoint(step.makes()) and storages.isdisjoint(self._storages[s] for s in step.writes)
            if unread and not (draws and step.is_random()):
                continue
            kept.append(step)
            live.update(step.reads())
            storages.update(self._storages[slot] for slot in step.reads())
        return kept[::-1]

    def _levels(self, steps: Sequence[_Step], staying: set[int]) -> list[int]:
        """When each step runs. Those that share memory that is written keep their order."""
        of_storage = dict.fromkeys((self._storages[slot] for slot in (*self._inputs, *self._slots)), EACH)
        of_storage |= {self._storages[slot]: STAYING for slot in staying}
        written = {self._storages[slot] for step in steps for slot in step.writes}
        of_storage |= dict.fromkeys(written & self._given, EACH)
        levels, before = [ONCE] * len(steps), None
        while levels != before:
            before, high = levels, {}  # by storage that is written, the latest of the steps that read it so far
            levels, drawn = [], False
            for step in steps:
                touched = {self._storages[slot] for slot in (*step.reads(), *step.makes())}
                found = {of_storage.get(storage, ONCE) for storage in touched}
                found |= {(EACH if drawn else DRAWING) if step.is_random() else ONCE}
                level = EACH if found >= {STAYING, DRAWING} else max(found)  # draws come from the generator alone
                changed = {self._storages[slot] for slot in step.writes}
                level = max([level, *(high.get(storage, ONCE) for storage in changed)])
                for storage in {*changed, *(self._storages[slot] for slot in step.makes())}:
                    of_storage[storage] = max(level, of_storage.get(storage, ONCE))
                high |= {storage: max(level, high.get(storage, ONCE)) for storage in touched & written}
                drawn = drawn or (step.is_random() and level == EACH)  # those that follow keep their order
                levels.append(level)
        return levels

    def _handed(self, level: int) -> list[int]:
        """Slots of one level's steps that later levels read."""
        later = {slot for steps in self._steps[level + 1 :] for step in steps for slot in step.reads()} | {
            *self._outputs
        }
        return sorted(later.intersection(slot for step in self._steps[level] for slot in step.makes()))


def record(
    function: Callable[[], Sequence[Tensor]],
    inputs: Sequence[Tensor],
    generator: torch.Generator | None = None,
    staying: Iterable[Tensor] = (),
    always: int | None = None,
    there: Iterable[Tensor] = (),
) -> tuple[Tape, list[Tensor]]:
    """The tape of a function that closes over its inputs, and the tensors that were there before. The function runs, but nothing that was
    there before changes, generators neither.

    Args:
        function: whose results are the tape's outputs.
        inputs: tensors, others in each run.
        generator: that the function draws from beside the global ones; others in each run.
        staying: tensors that are the same from one run to the next.
        always: how many of the outputs every run has; None is all.
        there: tensors that the function may find; those that have memory in common must be among them.

    Raises:
        NotRecordable: the function reads numbers, or does what cannot be run again.
        Exception: what the function raises.
    """
    recorder = _Recorder(inputs, generator, there)
    devices = [tensor.device for tensor in inputs if tensor.is_cuda]
    state = None if generator is None else generator.get_state()
    try:
        with torch.random.fork_rng(devices, enabled=True), FunctionMode(_refusing_reads), OperatorMode(recorder):
            outputs = function()
    finally:
        if generator is not None:
            generator.set_state(state)
    tape = Tape(recorder, outputs, staying, always)
    return tape, [recorder.given[slot] for slot in tape._slots]


def _refusing_reads(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if function in READS_OF_MEMORY or (function in ADDRESSES and not _is_called_here(function)):
        raise NotRecordable(f"Tensor.{function.__name__} reads a tensor's numbers")
    batched = function is torch.autograd.grad and (kwargs["is_grads_batched"] or kwargs["materialize_grads"])
    if function is torch.autograd.grad and kwargs["grad_outputs"] is not None and not batched:
        # A mode is off in a function that it handles, and so in all nodes of a graph.
        with FunctionMode(_refusing_reads):
            return _gradients(*args, **kwargs)
    return function(*args, **kwargs)


def _gradients(outputs: Any, inputs: Any, grad_outputs: Any, retain_graph: bool, create_graph: bool, **_: Any) -> Any:
    """:func:`torch.autograd.grad` past modes, with None for what is unused."""
    columns = grad_outputs if isinstance(grad_outputs, (tuple, list)) else [grad_outputs]
    retain = create_graph if retain_graph is None else retain_graph
    return _engine_run_backward(outputs, tuple(columns), retain, create_graph, inputs, True, accumulate_grad=False)


def _is_called_here(function: Any) -> bool:
    """Whether this package calls a function that modes have on its way."""
    frame = caller = sys._getframe(1)
    while frame is not None:
        if frame.f_code is FunctionMode.__torch_function__.__code__ and frame.f_locals["func"] == function:
            caller = frame.f_back
        frame = frame.f_back
    return caller.f_globals["__name__"].startswith("ella_cuda.")


def _reads_numbers(op: Any, args: tuple[Any, ...]) -> bool:
    if op is aten.index.Tensor:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return op in READS or not DATA_DEPENDENT.isdisjoint(op.tags)


def _written_by(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that the operator writes."""
    schema = op._schema.arguments
    values = dict(zip((argument.name for argument in schema), args, strict=False)) | kwargs
    return [values[a.name] for a in schema if a.alias_info is not None and a.alias_info.is_write and a.name in values]


def _results_among(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator that writes returns, where this is what it writes."""
    returns, written = op._schema.returns, _written_by(op, args, kwargs)
    if any(r.alias_info is None or not r.alias_info.is_write for r in returns) or len(returns) not in (0, len(written)):
        raise NotRecordable(f"{op} writes a tensor that was there before, and returns another")
    return None if not returns else written[0] if len(returns) == 1 else tuple(written)


def geometry(tensor: Tensor) -> tuple[Any, ...]:
    """Where a tensor's numbers are in its memory, and how to read them."""
    size, stride = tuple(tensor.shape), tensor.stride()
    return size, stride, tensor.storage_offset(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _function(
    steps: Sequence[_Step], parts: Sequence[Sequence[int]], results: Sequence[int]
) -> Callable[..., list[Tensor]]:
    """``(generator, *parts) -> results`` of these steps, each part a list of tensors by slot. Memory is freed after its last use."""
    names: dict[str, Any] = {}
    functions: dict[Any, str] = {}

    def word(value: Any) -> str:
        if isinstance(value, _Slot):
            return f"v{value.number}"
        if isinstance(value, _Generator):
            return "generator"
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(word, value))}]"
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        names[name := f"c{len(names)}"] = value
        return name

    there = {slot for part in parts for slot in part} | {*results}
    last = {
        slot: number
        for number, step in enumerate(steps)
        for slot in (*step.reads(), *step.makes())
        if slot not in there
    }
    lines = [f"{', '.join(f'v{slot}' for slot in part)}, = part{n}" for n, part in enumerate(parts) if part]
    for number, step in enumerate(steps):
        if step.op not in functions:
            names[name := f"f{len(names)}"] = getattr(step.op, "_op", step.op)
            functions[step.op] = name
        arguments = [*map(word, step.args), *(f"{key}={word(value)}" for key, value in step.kwargs.items())]
        call = f"{functions[step.op]}({', '.join(arguments)})"
        if isinstance(step.made, list) and step.made:
            targets = ", ".join("_" if slot is None else f"v{slot}" for slot in step.made)
            lines.append(f"{targets}, = {call}")
        else:
            lines.append(call if step.made is None or isinstance(step.made, list) else f"v{step.made} = {call}")
        if gone := [f"v{slot}" for slot, end in last.items() if end == number]:
            lines.append(f"del {', '.join(gone)}")
    lines.append(f"return [{', '.join(f'v{slot}' for slot in results)}]")
    head = ", ".join(["generator", *(f"part{n}" for n in range(len(parts)))])
    exec(compile("\n    ".join([f"def run({head}):", *lines]), "<tape>", "exec"), names)
    return names["run"]
