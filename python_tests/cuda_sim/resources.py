"""What kernels take of a multiprocessor, read from the compiler's reports, and how many of their warps fit on one."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

REPORT = re.compile(
    r"Compiling entry function '(?P<kernel>\S+)' for 'sm_(?P<arch>\w+)'"
    r"[\s\S]*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r"[\s\S]*?Used (?P<registers>\d+) registers(?P<used>.*)"
)
SASS_ARCH, SASS_FUNCTION = re.compile(r"^arch = sm_(\w+)$"), re.compile(r"^\s*Function : (\S+)$")
SASS_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")

WARP = 32
REGISTER_UNIT = 256  # registers are handed out to a warp in such units
PARTITIONS = 4  # of a multiprocessor, each with a quarter of the registers; warps of a block are spread over them
SHARED_UNIT, SHARED_RESERVED = 128, 1024  # bytes; the second is the system's share of every block's shared memory


@dataclass(frozen=True)
class Kernel:
    """One kernel in one architecture's report of ptxas; shared memory and stack in bytes a block and a thread."""

    name: str
    arch: str
    registers: int
    stack: int
    spills: int
    shared: int = 0


def parse_report(text: str) -> list[Kernel]:
    """What `-Xptxas -v` printed."""
    kernels = []
    for m in REPORT.finditer(text):
        shared = re.search(r"(\d+) bytes smem", m["used"])
        spills = int(m["stores"]) + int(m["loads"])
        static = int(shared[1]) if shared else 0
        kernels.append(Kernel(m["kernel"], m["arch"], int(m["registers"]), int(m["stack"]), spills, static))
    return kernels


def count_instructions(sass: str) -> dict[tuple[str, str], Counter[str]]:
    """How often each instruction (with its modifiers) stands in each (architecture, kernel) of cuobjdump's text."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    arch, current = "", Counter()
    for line in sass.splitlines():
        if found := SASS_INSTRUCTION.match(line):
            current[found[1]] += 1
        elif found := SASS_ARCH.match(line):
            arch = found[1]
        elif found := SASS_FUNCTION.match(line):
            current = counts.setdefault((arch, found[1]), Counter())
    return counts


def count_of(counts: Counter[str], name: str, *modifiers: str) -> int:
    """Instructions of that name (before the first dot) that carry all the modifiers."""
    return sum(n for word, n in counts.items() if word.split(".")[0] == name and {*modifiers} <= {*word.split(".")[1:]})


@dataclass(frozen=True)
class Multiprocessor:
    """What one multiprocessor has: warps, blocks and registers at most, bytes of shared memory in all and for one block."""

    warps: int
    blocks: int
    registers: int
    shared: int
    block_shared: int


# CUDA C++ Programming Guide, "Compute Capabilities", table "Technical Specifications per Compute Capability".
MULTIPROCESSORS = {
    "80": Multiprocessor(64, 32, 65536, 164 << 10, 163 << 10),
    "90": Multiprocessor(64, 32, 65536, 228 << 10, 227 << 10),
    "90a": Multiprocessor(64, 32, 65536, 228 << 10, 227 << 10),
    "100": Multiprocessor(64, 32, 65536, 228 << 10, 227 << 10),
}


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


@dataclass(frozen=True)
class Occupancy:
    """Blocks that one multiprocessor holds at once, their warps as a share of what it could hold, and what sets the limit."""

    blocks: int
    share: float
    limit: str


def occupancy(arch: str, registers: int, threads: int, shared: int) -> Occupancy:
    """Theoretical occupancy of a kernel with `threads` a block and `shared` bytes of shared memory, static and dynamic.

    Raises KeyError for an architecture that is not in MULTIPROCESSORS.
    """
    have = MULTIPROCESSORS[arch]
    warps = -(-threads // WARP)
    a_warp = round_up(max(registers, 1) * WARP, REGISTER_UNIT)
    by_registers = have.registers // PARTITIONS // a_warp * PARTITIONS // warps
    if (
        a_warp * round_up(warps, PARTITIONS) > have.registers
    ):  # a launch is refused as if all partitions got equally many
        by_registers = 0
    block_bytes = round_up(shared + SHARED_RESERVED, SHARED_UNIT)
    limits = {
        "warps": have.warps // warps,
        "blocks": have.blocks,
        "registers": by_registers,
        "shared memory": have.shared // block_bytes if shared <= have.block_shared else 0,
    }
    limit = min(limits, key=lambda name: limits[name])
    return Occupancy(limits[limit], limits[limit] * warps / have.warps, limit)


def demangle(names: Iterable[str]) -> dict[str, str]:
    """Short names without namespaces and arguments: `syrk_kernel<float, 64, StridedRows<float>>`; needs c++filt."""
    mangled = list(dict.fromkeys(names))
    listed = subprocess.run(
        ["c++filt", "-n"], input="\n".join(mangled), capture_output=True, text=True, check=True
    ).stdout
    return dict(zip(mangled, map(shorten, listed.splitlines()), strict=True))


def shorten(demangled: str) -> str:
    """The name in a demangled signature, its template arguments kept."""
    text = re.sub(r"\(anonymous namespace\)::|\b\w+::", "", demangled).replace("> >", ">>")
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "<") - (letter == ">")
        if depth == 0 and letter == "(":
            text = text[:at]
            break
    return text.removeprefix("void ")
