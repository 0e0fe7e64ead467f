"""What each instruction does to a block: registers by arithmetic.py, memories by the files so named, tensor cores by products.py.

Source: PTX ISA, "Data Movement and Conversion Instructions", "Warp Level Matrix Instructions", "Asynchronous Warpgroup Level Matrix
Instructions".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from . import products
from .arithmetic import DTYPES, operation
from .fault import Array, Fault
from .parse import Address, Instruction, Operand

if TYPE_CHECKING:
    from .machine import Block

WARP = 32
WARPGROUP = 4 * WARP
Step = Callable[["Block", Array], None]  # of the threads whose numbers are given


def is_together(instruction: Instruction) -> bool:
    """Whether warps, warpgroups or blocks execute it as one."""
    return instruction.parts[0] in ("bar", "shfl", "mma", "wgmma")


def step_of(instruction: Instruction) -> Step:
    """What the instruction does to a block's active threads."""
    parts, operands = instruction.parts, instruction.operands
    assert not (is_together(instruction) and instruction.guard), f"{instruction} for some threads is not known"
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
        if space != "param":
            block.count(f"{space} read", active, at, width * count)
        if space == "param":
            places = at.astype(np.int64)[:, None] + np.arange(width * count)
            values = np.ascontiguousarray(block.parameters[places]).view(f"u{width}")
        elif space == "global":
            values = block.memory.load(active, at, width, count, coherent="nc" not in parts)
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
        block.count(f"{space} write", active, at, values[0].nbytes)
        if space == "global":
            block.memory.store(active, at, values)
        else:
            block.shared.store(active, at, values)

    return step


def _atomic(instruction: Instruction) -> Step:
    assert instruction.parts[1:] == ["global", "add", "u32"], instruction
    target, address, source = instruction.operands
    assert isinstance(address, Address)

    def step(block: Block, active: Array) -> None:
        values = block.read(str(source), DTYPES["u32"])[active]
        block.count("global write", active, block.addresses(address, active), values.itemsize)
        block.write(str(target), block.memory.add(active, block.addresses(address, active), values), active)

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
        lane, step_ = block.all % WARP, block.read(by, DTYPES["u32"]).astype(np.int64) & 31
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
        if reading.any():
            block.count("global read", active[reading], addresses[reading], count)
        block.count("shared write", active, block.addresses(target, active), count)
        width = min(count, 8)
        read = block.memory.load(active[reading], addresses[reading], width, count // width)
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

        def fence(block: Block, active: Array) -> None:
            block.fenced[np.unique(active // WARPGROUP)] = True

        return fence
    if kind == "commit_group":

        def commit(block: Block, active: Array) -> None:
            block.product_groups[np.unique(active // WARPGROUP)] += 1

        return commit
    if kind == "wait_group":
        pending = int(str(instruction.operands[0]))

        def wait(block: Block, active: Array) -> None:
            rest, waits = [], set((active // WARPGROUP).tolist())
            for product in block.products:
                warpgroup, group, words, _ = product
                if warpgroup in waits and group < block.product_groups[warpgroup] - pending:
                    block.shared.end_product(words)
                else:
                    rest.append(product)
            block.products = rest
            block.in_flight = {name for *_, names in rest for name in names}
            block.fenced[list(waits)] = False  # what follows may touch the accumulators

        return wait
    assert instruction.name == "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32", instruction
    results, left = (_vector(operand) for operand in instruction.operands[:2])
    descriptor, add, *scales = (str(operand) for operand in instruction.operands[2:])
    assert scales == ["1", "1"], instruction
    rows, columns = products.WIDE_PLACES

    def step(block: Block, active: Array) -> None:
        _whole(active, WARPGROUP)
        block.in_flight -= set(results)  # a product may add to what the one before it adds to
        c, a = (_matrices(block, names, DTYPES[kind], active) for names, kind in ((results, "f32"), (left, "b32")))
        answers = []
        for i, mine in enumerate(active.reshape(-1, WARPGROUP)):
            if not block.fenced[mine[0] // WARPGROUP]:
                raise Fault("a product of a warpgroup without a fence before it")
            described = set(block.read(descriptor, DTYPES["u64"])[mine].tolist())
            adding = set(block.read(add, DTYPES["pred"])[mine].tolist())
            if len(described) > 1 or len(adding) > 1:
                raise Fault("the threads of a warpgroup ask for different products")
            operand, words = block.shared.start_product(mine, products.operand_bytes(described.pop()))
            warpgroup, warps = int(mine[0]) // WARPGROUP, slice(4 * i, 4 * i + 4)
            block.products.append((warpgroup, int(block.product_groups[warpgroup]), words, results))
            sums, matrix = np.zeros((4, 16, 64), np.float32), np.zeros((4, 16, 8), np.uint32)
            if adding.pop():
                sums[:, rows, columns] = c[warps]
            matrix[:, products.A_PLACES[0], products.A_PLACES[1]] = a[warps]
            answers.append(products.multiply(sums, matrix, operand)[:, rows, columns].reshape(WARPGROUP, -1))
        for name, column in zip(results, np.concatenate(answers).T, strict=True):
            block.write(name, np.ascontiguousarray(column), active)
        block.in_flight |= set(results)

    return step


def _barrier(instruction: Instruction) -> Step:
    assert instruction.name == "bar.sync" and instruction.operands == ("0",), (
        f"only bar.sync 0 is known, not {instruction}"
    )
    return lambda block, active: None  # Block.run does what it does


def _fence(instruction: Instruction) -> Step:
    if instruction.name == "fence.proxy.async.shared::cta":
        return lambda block, active: block.shared.show_to_products(active)
    assert instruction.name == "membar.gl", instruction
    return lambda block, active: block.memory.fence(active)


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
    "bar": _barrier,
    "bra": lambda instruction: lambda block, active: None,  # Block.run does what these do
    "ret": lambda instruction: lambda block, active: None,
}
