"""Runs a kernel's PTX: all threads of a block in step, those furthest behind first, one block after another.

Instructions that warps or blocks execute together wait for every thread that has not ended; where some cannot come, that is
an error. Registers of a thread start as bits that are a NaN, and large as a number.

Not covered: more than one kernel at a time, timing, bounds of global memory (tests surround inputs with NaN), what ptxas makes
of the PTX, copies in bulk, clusters, results of asynchronous products that are touched before they are waited for.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from . import products
from .arithmetic import DTYPES, operation
from .memory import SHARED_BEGIN, Array, Fault, GlobalMemory, SharedMemory
from .parse import Address, Instruction, Kernel, Operand

WARP = 32
WARPGROUP = 4 * WARP
POISON = 0xFFF8DEADFFC0DEAD
Step = Callable[["Block", Array], None]  # of the threads whose numbers are given


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
        self.steps = [_step(self, instruction) for instruction in kernel.code]
        self.together = [_is_together(instruction) for instruction in kernel.code]

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
            return SHARED_BEGIN
        value, bits = int(text, 0), 8 * dtype.itemsize
        if dtype.kind == "i" and value >= 1 << (bits - 1):
            return value - (1 << bits)
        return value % (1 << bits) if dtype.kind == "u" else value

    def run(self, blocks: int, threads: int, shared_bytes: int, arguments: list[bytes], order: str = "forward") -> None:
        """One launch; `arguments` are the bytes of each parameter, `order` of blocks is forward, reverse or random."""
        if threads > self.kernel.most_threads:
            raise Fault(f"{threads} threads a block, where the kernel is compiled for {self.kernel.most_threads}")
        memory = np.zeros(-(-self.parameter_bytes // 8) * 8, np.uint8)
        for name, argument in zip(self.kernel.parameters, arguments, strict=True):
            memory[self.begins[name] :][: len(argument)] = np.frombuffer(argument, np.uint8)
        numbers = list(range(blocks))
        if order == "reverse":
            numbers.reverse()
        elif order == "random":
            random.Random(blocks).shuffle(numbers)
        for number in numbers:
            with np.errstate(all="ignore"):
                Block(self, number, blocks, threads, shared_bytes, memory).run()


class Block:
    """A block under way: where each thread is, its registers, the block's shared memory."""

    def __init__(
        self, program: Program, number: int, blocks: int, threads: int, shared_bytes: int, parameters: Array
    ) -> None:
        self.program, self.number, self.threads = program, number, threads
        self.parameters = parameters
        self.memory, self.shared = GlobalMemory(), SharedMemory(shared_bytes, threads)
        self.all = np.arange(threads)
        self.registers: dict[str, Array] = {}
        self.special = {
            "%tid.x": self.all.astype(np.uint32),
            "%ntid.x": np.full(threads, threads, np.uint32),
            "%ctaid.x": np.full(threads, number, np.uint32),
            "%nctaid.x": np.full(threads, blocks, np.uint32),
        }
        self._constants: dict[tuple[str, np.dtype], Array] = {}
        # Of products under way: their warpgroup, the group that they will be committed with, the words that they read.
        self.products: list[tuple[int, int, Array]] = []
        self.product_groups = np.zeros(-(-threads // WARPGROUP), int)

    # ---- registers ----

    def read(self, operand: str, dtype: np.dtype) -> Array:
        """All threads' values of a register or number."""
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
                        late = self._late(instruction, active)
                        if len(late):
                            at[active] = here
                            waiting[late] = True
                            active = np.setdiff1d(active, late)
                            if not len(active):
                                break
                        if instruction.parts[0] == "bar":
                            at[active] = here
                            waiting[active] = True
                            break
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
        alive = self.all[~self.ended]
        places = np.unique(at[alive])
        if len(places) > 1 or self.program.kernel.code[places[0]].parts[0] != "bar":
            names = ", ".join(str(self.program.kernel.code[place]) for place in places)
            raise Fault(f"threads wait for others that cannot come, at {names}")
        waiting[:] = False
        at[alive] += 1
        self.shared.barrier()


def _is_together(instruction: Instruction) -> bool:
    return instruction.parts[0] in ("bar", "shfl", "mma", "wgmma")


# ---- instructions that do more than arithmetic ----


def _step(program: Program, instruction: Instruction) -> Step:
    parts, operands = instruction.parts, instruction.operands
    special = SPECIAL.get(parts[0]) or SPECIAL.get(".".join(parts[:2])) or SPECIAL.get(".".join(parts[:3]))
    if parts[0] == "mov" and any(isinstance(operand, tuple) for operand in operands):
        return _pack(instruction)
    if special:
        return special(instruction)
    op = operation(parts)
    assert op is not None and len(op.sources) == len(operands) - 1, f"unknown instruction {instruction}"
    target, *sources = (str(operand) for operand in operands)
    reads = list(zip(sources, op.sources, strict=True))

    def step(block: Block, active: Array) -> None:
        values = [block.read(source, dtype) for source, dtype in reads]
        block.write(target, op.compute(*values).astype(op.result, copy=False), active)

    return step


def _vector(operand: Operand) -> tuple[str, ...]:
    return operand if isinstance(operand, tuple) and not isinstance(operand, Address) else (str(operand),)


def _pack(instruction: Instruction) -> Step:
    """mov between a register and the vector of its parts, the lowest first."""
    target, source = (_vector(operand) for operand in instruction.operands)
    whole = DTYPES[instruction.parts[-1]]
    part = np.dtype(f"u{whole.itemsize // max(len(target), len(source))}")

    def step(block: Block, active: Array) -> None:
        if len(source) > 1:
            values = np.stack([block.read(name, part) for name in source], 1)
            block.write(target[0], np.ascontiguousarray(values).view(whole)[:, 0], active)
        else:
            values = np.ascontiguousarray(block.read(source[0], whole))[:, None].view(part)
            for name, column in zip(target, values.T, strict=True):
                block.write(name, np.ascontiguousarray(column), active)

    return step


def _count(parts: list[str]) -> int:
    return next((int(part[1:]) for part in parts if part in ("v2", "v4")), 1)


def _load(instruction: Instruction) -> Step:
    parts = instruction.parts
    space, count, dtype = parts[1], _count(parts), DTYPES[parts[-1]]
    targets, address = _vector(instruction.operands[0]), instruction.operands[1]
    assert isinstance(address, Address) and space in ("param", "global", "shared"), instruction

    def step(block: Block, active: Array) -> None:
        if not len(active):
            return
        at = block.addresses(address, active)
        width = dtype.itemsize
        if space == "param":
            places = at.astype(np.int64)[:, None] + np.arange(width * count)
            values = np.ascontiguousarray(block.parameters[places]).view(f"u{width}")
        elif space == "global":
            values = block.memory.load(at, width, count)
        else:
            values = block.shared.load(active, at, width, count)
        for target, column in zip(targets, values.T, strict=True):
            block.write(target, np.ascontiguousarray(column).view(dtype), active)

    return step


def _store(instruction: Instruction) -> Step:
    parts = instruction.parts
    space, dtype = parts[1], DTYPES[parts[-1]]
    address, sources = instruction.operands[0], _vector(instruction.operands[1])
    assert isinstance(address, Address) and space in ("global", "shared"), instruction
    word = np.dtype(f"u{dtype.itemsize}")

    def step(block: Block, active: Array) -> None:
        if not len(active):
            return
        values = np.stack([block.read(source, dtype)[active].view(word) for source in sources], 1)
        at = block.addresses(address, active)
        if space == "global":
            block.memory.store(at, values)
        else:
            block.shared.store(active, at, values)

    return step


def _atomic(instruction: Instruction) -> Step:
    assert instruction.parts[1:] == ["global", "add", "u32"], instruction
    target, address, source = instruction.operands
    assert isinstance(address, Address)

    def step(block: Block, active: Array) -> None:
        values = block.read(str(source), DTYPES["u32"])[active]
        block.write(str(target), block.memory.add(block.addresses(address, active), values), active)

    return step


def _shuffle(instruction: Instruction) -> Step:
    mode = instruction.parts[2]
    targets, source, by, clamp, members = (str(operand) for operand in instruction.operands)
    target, _, found = targets.partition("|")
    assert mode in ("bfly", "idx", "down", "up"), instruction

    def step(block: Block, active: Array) -> None:
        if np.any(block.read(members, DTYPES["u32"])[active] != 0xFFFFFFFF):
            raise Fault("a shuffle of less than a whole warp is not known here")
        values = block.read(source, DTYPES["b32"])
        lane, step_ = block.all % WARP, block.read(by, DTYPES["u32"]).astype(np.int64)
        limits = block.read(clamp, DTYPES["u32"]).astype(np.int64)
        segment, most = limits >> 8 & 31, limits & 31
        least = lane & segment
        last = least | (most & ~segment)
        if mode == "bfly":
            other = lane ^ step_
        elif mode == "idx":
            other = least | (step_ & ~segment)
        else:
            other = lane + (step_ if mode == "down" else -step_)
        inside = other >= last if mode == "up" else other <= last
        other = np.where(inside, other, lane) + block.all // WARP * WARP
        if np.any(other[active] >= block.threads) or np.any(block.ended[other[active] % block.threads]):
            raise Fault("a shuffle with a thread that is not there")
        block.write(target, values[np.minimum(other, block.threads - 1)], active)
        if found:
            block.write(found, inside, active)

    return step


def _copy_async(instruction: Instruction) -> Step:
    if instruction.parts[2] == "commit_group":
        return lambda block, active: block.shared.commit_copies(active)
    if instruction.parts[2] == "wait_group":
        pending = int(str(instruction.operands[0]))
        return lambda block, active: block.shared.wait_for_copies(active, pending)
    target, source, size, valid = instruction.operands
    count, kind = int(str(size)), instruction.parts[2]
    assert isinstance(target, Address) and isinstance(source, Address), instruction
    assert (kind == "cg" and count == 16) or (kind == "ca" and count in (4, 8, 16)), instruction

    def step(block: Block, active: Array) -> None:
        if not len(active):
            return
        there = block.read(str(valid), DTYPES["u32"])[active]
        if np.any((there != 0) & (there != count)):
            raise Fault("an asynchronous copy of a part")
        data = np.zeros((len(active), count // 4), np.uint32)
        reading = there > 0
        addresses = block.addresses(source, active)
        width = min(count, 8)
        read = block.memory.load(addresses[reading], width, count // width)
        data[reading] = np.ascontiguousarray(read).view(np.uint32)
        block.shared.start_copy(active, block.addresses(target, active), data)

    return step


def _matrices(block: Block, names: tuple[str, ...], dtype: np.dtype, active: Array) -> Array:
    """(warps, lanes, registers)."""
    return np.stack([block.read(name, dtype)[active] for name in names], 1).reshape(-1, WARP, len(names))


def _whole(active: Array, group: int) -> None:
    if len(active) % group or np.any(active.reshape(-1, group) != active.reshape(-1, group)[:, :1] + np.arange(group)):
        raise Fault(f"a product by less than all of {group} threads")


def _mma(instruction: Instruction) -> Step:
    assert instruction.name == "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", instruction
    results, left, right, sums = (_vector(operand) for operand in instruction.operands)

    def step(block: Block, active: Array) -> None:
        _whole(active, WARP)
        c = _matrices(block, sums, DTYPES["f32"], active)
        a, b = (_matrices(block, names, DTYPES["b32"], active) for names in (left, right))
        values = products.warp_product(c, a, b).reshape(len(active), 4)
        for name, column in zip(results, values.T, strict=True):
            block.write(name, np.ascontiguousarray(column), active)

    return step


def _warpgroup(instruction: Instruction) -> Step:
    kind = instruction.parts[1]
    if kind == "fence":
        return lambda block, active: None
    if kind == "commit_group":

        def commit(block: Block, active: Array) -> None:
            block.product_groups[np.unique(active // WARPGROUP)] += 1

        return commit
    if kind == "wait_group":
        pending = int(str(instruction.operands[0]))

        def wait(block: Block, active: Array) -> None:
            rest, waits = [], set((active // WARPGROUP).tolist())
            for product in block.products:
                warpgroup, group, words = product
                if warpgroup in waits and group < block.product_groups[warpgroup] - pending:
                    block.shared.end_product(words)
                else:
                    rest.append(product)
            block.products = rest

        return wait
    assert instruction.name == "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32", instruction
    results, left = (_vector(operand) for operand in instruction.operands[:2])
    descriptor, add, *scales = (str(operand) for operand in instruction.operands[2:])
    assert scales == ["1", "1"], instruction
    rows, columns = products.WIDE_PLACES

    def step(block: Block, active: Array) -> None:
        _whole(active, WARPGROUP)
        c, a = (_matrices(block, names, DTYPES[kind], active) for names, kind in ((results, "f32"), (left, "b32")))
        answers = []
        for i, mine in enumerate(active.reshape(-1, WARPGROUP)):
            described = set(block.read(descriptor, DTYPES["u64"])[mine].tolist())
            adding = set(block.read(add, DTYPES["pred"])[mine].tolist())
            if len(described) > 1 or len(adding) > 1:
                raise Fault("the threads of a warpgroup ask for different products")
            operand, words = block.shared.start_product(mine, products.operand_bytes(described.pop()))
            warpgroup, warps = int(mine[0]) // WARPGROUP, slice(4 * i, 4 * i + 4)
            block.products.append((warpgroup, int(block.product_groups[warpgroup]), words))
            sums, matrix = np.zeros((4, 16, 64), np.float32), np.zeros((4, 16, 8), np.uint32)
            if adding.pop():
                sums[:, rows, columns] = c[warps]
            matrix[:, products.A_PLACES[0], products.A_PLACES[1]] = a[warps]
            answers.append(products.multiply(sums, matrix, operand)[:, rows, columns].reshape(WARPGROUP, -1))
        for name, column in zip(results, np.concatenate(answers).T, strict=True):
            block.write(name, np.ascontiguousarray(column), active)

    return step


def _fence(instruction: Instruction) -> Step:
    if instruction.name == "fence.proxy.async.shared::cta":
        return lambda block, active: block.shared.show_to_products(active)
    assert instruction.parts[0] == "membar", instruction
    return lambda block, active: None  # blocks run one after another


SPECIAL = {
    "ld": _load,
    "st": _store,
    "atom": _atomic,
    "shfl": _shuffle,
    "cp": _copy_async,
    "mma": _mma,
    "wgmma": _warpgroup,
    "membar": _fence,
    "fence": _fence,
    "bar": lambda instruction: lambda block, active: None,  # Block.run does what these do
    "bra": lambda instruction: lambda block, active: None,
    "ret": lambda instruction: lambda block, active: None,
}
