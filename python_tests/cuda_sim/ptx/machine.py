"""Runs a kernel's PTX: all threads of a block in step, those furthest behind first, one block after another.

Instructions that warps or blocks execute together wait for every thread that has not ended; where some cannot come, that is
an error. Registers of a thread start as bits that are a NaN, and large as a number.

Not covered: more than one kernel at a time, timing, what ptxas makes of the PTX, copies in bulk, clusters.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from .arithmetic import DTYPES
from .fault import Array, Fault
from .global_memory import Elements, GlobalMemory
from .instructions import WARP, WARPGROUP, is_together, step_of
from .parse import Address, Instruction, Kernel
from .shared_memory import BEGIN, SharedMemory
from .traffic import Traffic

POISON = 0xFFF8DEADFFC0DEAD


class Program:
    """A kernel ready to run."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.begins: dict[str, int] = {}
        end = 0
        for name, size in kernel.parameters.items():
            end = -(-end // 16) * 16
            self.begins[name] = end
            end += size
        self.parameter_bytes = end
        self._dtypes: dict[str, np.dtype | None] = {}
        self.steps = [step_of(instruction) for instruction in kernel.code]
        self.together = [is_together(instruction) for instruction in kernel.code]

    def dtype_of(self, register: str) -> np.dtype | None:
        """How a register is kept, None for what is no register."""
        if register not in self._dtypes:
            kind = self.kernel.type_of(register)
            self._dtypes[register] = None if kind is None else DTYPES[kind]
        return self._dtypes[register]

    def number(self, text: str, dtype: np.dtype) -> int | float:
        """A literal, the address of a parameter or of the shared memory."""
        if text[:2] in ("0f", "0F", "0d", "0D"):
            word, real = (np.uint32, np.float32) if text[1] in "fF" else (np.uint64, np.float64)
            return np.array([int(text[2:], 16)], word).view(real)[0].astype(dtype)
        if text in self.begins:
            return self.begins[text]
        if text == "WARP_SZ":
            return WARP
        if text.endswith(("ella_shared_bytesE", "ella_swizzled_bytesE")):
            return BEGIN
        value, bits = int(text, 0), 8 * dtype.itemsize
        if dtype.kind == "i" and value >= 1 << (bits - 1):
            return value - (1 << bits)
        return value % (1 << bits) if dtype.kind == "u" else value

    def run(
        self,
        blocks: int,
        threads: int,
        shared_bytes: int,
        arguments: list[bytes],
        tensors: Sequence[Elements],
        order: str | Sequence[int] = "forward",
        traffic: Traffic | None = None,
    ) -> None:
        """One launch; `arguments` are the bytes of each parameter, `order` of blocks is forward, reverse or random, or says which
        of them run. `traffic` counts what they do."""
        if threads > self.kernel.max_threads:
            raise Fault(f"{threads} threads a block, where the kernel is compiled for {self.kernel.max_threads}")
        parameters = np.zeros(-(-self.parameter_bytes // 8) * 8, np.uint8)
        for name, argument in zip(self.kernel.parameters, arguments, strict=True):
            parameters[self.begins[name] :][: len(argument)] = np.frombuffer(argument, np.uint8)
        numbers = list(range(blocks)) if isinstance(order, str) else order
        if order == "reverse":
            numbers.reverse()
        elif order == "random":
            random.Random(blocks).shuffle(numbers)
        memory = GlobalMemory(tensors, threads)
        for number in numbers:
            memory.enter(number)
            with np.errstate(all="ignore"):
                Block(self, number, blocks, threads, shared_bytes, parameters, memory, traffic).run()


class Block:
    """A block under way: where each thread is, its registers, the block's shared memory."""

    def __init__(
        self,
        program: Program,
        number: int,
        blocks: int,
        threads: int,
        shared_bytes: int,
        parameters: Array,
        memory: GlobalMemory,
        traffic: Traffic | None,
    ) -> None:
        self.program, self.number, self.threads = program, number, threads
        self.parameters, self.traffic = parameters, traffic
        self.memory, self.shared = memory, SharedMemory(shared_bytes, threads)
        self.all = np.arange(threads)
        self.registers: dict[str, Array] = {}
        self.special = {
            "%tid.x": self.all.astype(np.uint32),
            "%ntid.x": np.full(threads, threads, np.uint32),
            "%ctaid.x": np.full(threads, number, np.uint32),
            "%nctaid.x": np.full(threads, blocks, np.uint32),
        }
        self._constants: dict[tuple[str, np.dtype], Array] = {}
        # Of products under way: their warpgroup, the group that they will be committed with, the words that they read, where
        # their results will be.
        self.products: list[tuple[int, int, Array, tuple[str, ...]]] = []
        self.in_flight: set[str] = set()  # their registers
        self.fenced = np.zeros(
            -(-threads // WARPGROUP), bool
        )  # whether a warpgroup's registers are ready for a product
        self.product_groups = np.zeros(-(-threads // WARPGROUP), int)

    # ---- registers ----

    def read(self, operand: str, dtype: np.dtype) -> Array:
        """All threads' values of a register or number."""
        if operand in self.in_flight:
            raise Fault(f"{operand} is used while a product under way adds to it")
        value = self.registers.get(operand)
        if value is None:
            return self._read_other(operand, dtype)
        if value.dtype == dtype:
            return value
        return value.view(dtype) if value.dtype.itemsize == dtype.itemsize else value.astype(dtype)

    def _read_other(self, operand: str, dtype: np.dtype) -> Array:
        if operand in self.special:
            return self.special[operand].astype(dtype)
        kept = self.program.dtype_of(operand)
        if kept is None:
            constant = self._constants.get((operand, dtype))
            if constant is None:
                constant = np.full(self.threads, self.program.number(operand, dtype), dtype)
                self._constants[operand, dtype] = constant
            return constant
        if kept.kind == "b":
            self.registers[operand] = np.ones(self.threads, bool)
        else:
            bits = np.full(self.threads, POISON % (1 << 8 * kept.itemsize), f"u{kept.itemsize}")
            self.registers[operand] = bits.view(kept)
        return self.read(operand, dtype)

    def write(self, register: str, value: Array, active: Array) -> None:
        """`value` of all threads, or of the active ones, into a register of the active ones."""
        if register == "_":
            return
        if register in self.in_flight:
            raise Fault(f"{register} is written while a product under way adds to it")
        kept = self.program.dtype_of(register)
        assert kept is not None, f"{register} is not declared"
        if value.dtype != kept:
            same = value.dtype.itemsize == kept.itemsize and kept.kind != "b"
            value = value.view(kept) if same else value.astype(kept)
        if len(active) == self.threads:
            self.registers[register] = value
            return
        new = self.read(register, kept).copy()
        new[active] = value if len(value) == len(active) else value[active]
        self.registers[register] = new

    def addresses(self, address: Address, active: Array) -> Array:
        base = self.read(address.base, DTYPES["u64"])[active]
        return base + np.uint64(address.offset % 2**64)

    def count(self, kind: str, active: Array, addresses: Array, size: int) -> None:
        """Notes an access for who counts them."""
        if self.traffic:
            self.traffic.access(kind, active, addresses, size)

    # ---- threads ----

    def run(self) -> None:
        code, steps, together = self.program.kernel.code, self.program.steps, self.program.together
        at = np.zeros(self.threads, np.int64)
        waiting = np.zeros(self.threads, bool)
        self.ended = np.zeros(self.threads, bool)
        self.instruction: Instruction | None = None
        try:
            while not self.ended.all():
                ready = ~(waiting | self.ended)
                if not ready.any():
                    self._release(at, waiting)
                    continue
                here = at[ready].min()
                mine = (at == here) & ~self.ended
                waiting[mine] = False
                active = self.all if mine.all() else np.flatnonzero(mine)
                others = at[ready & ~mine]
                join = int(others.min()) if len(others) else len(code)
                here = int(here)
                while True:
                    instruction = code[here]
                    self.instruction = instruction
                    if together[here]:
                        at[active] = here
                        active = np.flatnonzero((at == here) & ~self.ended)  # with those that wait here
                        waiting[active] = False
                        late = self._late(instruction, active)
                        if len(late):
                            waiting[late] = True
                            active = np.setdiff1d(active, late)
                            if not len(active):
                                break
                        if instruction.parts[0] == "bar":
                            if self.traffic:
                                self.traffic.step(instruction, active)
                            waiting[active] = True
                            break
                    if self.traffic:
                        self.traffic.step(instruction, active)
                    if instruction.parts[0] in ("bra", "ret"):
                        taken = self._guarded(instruction, active)
                        at[active] = here + 1
                        if instruction.parts[0] == "ret":
                            self.ended[taken] = True
                            break
                        target = self.program.kernel.labels[str(instruction.operands[0])]
                        at[taken] = target
                        if len(taken) == len(active) and target < join:
                            here = target
                            continue
                        if len(taken):
                            break
                        here += 1
                    else:
                        steps[here](self, self._guarded(instruction, active))
                        here += 1
                    if here >= join:
                        at[active] = here
                        break
            self.shared.finish()
        except Fault as fault:
            raise Fault(f"{self.program.kernel.name}, block {self.number}, {self.instruction}: {fault}") from None

    def _guarded(self, instruction: Instruction, active: Array) -> Array:
        """The active threads whose guard holds."""
        if instruction.guard is None:
            return active
        holds = self.read(instruction.guard, DTYPES["pred"])[active] != instruction.negated
        return active if holds.all() else active[holds]

    def _late(self, instruction: Instruction, active: Array) -> Array:
        """The active threads of an instruction for whole warps that have to wait for others of theirs."""
        if instruction.parts[0] == "bar":
            return active[:0]
        group = WARPGROUP if instruction.parts[0] == "wgmma" else WARP
        members = np.bincount(active // group, minlength=-(-self.threads // group))
        alive = np.bincount(self.all[~self.ended] // group, minlength=len(members))
        return active[(members < alive)[active // group]]

    def _release(self, at: Array, waiting: Array) -> None:
        """All threads wait: for a barrier, which opens, or for others of a warp, which may have ended since."""
        code, alive = self.program.kernel.code, self.all[~self.ended]
        places = np.unique(at[alive])
        if len(places) == 1 and code[places[0]].parts[0] == "bar":
            waiting[:] = False
            at[alive] += 1
            self.shared.barrier()
            self.memory.barrier()
            return
        for place in places:
            here = alive[at[alive] == place]
            complete = np.setdiff1d(here, self._late(code[place], here))
            if code[place].parts[0] != "bar" and len(complete):
                waiting[complete] = False
                return
        names = ", ".join(str(code[place]) for place in places)
        raise Fault(f"threads wait for others that cannot come, at {names}")
