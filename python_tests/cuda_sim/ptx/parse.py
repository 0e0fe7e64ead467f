"""PTX text as instructions. Reads what nvcc writes for this library's kernels, not every PTX program.

Source: PTX ISA, "Syntax", "Instruction Statements", "Instruction Operands".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple


class Address(NamedTuple):
    """[base + offset]: base is a register or the name of a parameter or a shared array."""

    base: str
    offset: int


Operand = str | tuple[str, ...] | Address  # a register, number, name or label; {a, b, ...}; [a + 4]


@dataclass(frozen=True)
class Instruction:
    """`@guard name operands;`, the parts of the name (add, rn, f32), and its line in the file."""

    name: str
    operands: tuple[Operand, ...]
    guard: str | None
    negated: bool
    line: int

    @property
    def parts(self) -> list[str]:
        return self.name.replace("::", ".").split(".")

    def __str__(self) -> str:
        return f"{self.name} at line {self.line}"


@dataclass
class Kernel:
    """An entry: bytes of its parameters by name and in order, types of its registers, instructions, where labels point."""

    name: str
    parameters: dict[str, int]
    max_threads: int
    types: dict[str, str] = field(default_factory=dict)  # of registers declared one by one
    families: dict[str, str] = field(default_factory=dict)  # of those declared as %r<100>
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    def type_of(self, register: str) -> str | None:
        """Its declared type (f32, b64, pred, ...), None for what is no register."""
        return self.types.get(register) or self.families.get(register.rstrip("0123456789"))


WIDTHS = {"8": 1, "16": 2, "32": 4, "64": 8}
ENTRY = re.compile(r"\.entry\s+([\w$]+)\(")
PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z]+(\d+)\s+([\w$]+)(?:\[(\d+)\])?")
REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.+)")
LABEL = re.compile(r"([\w$]+):\s*")


def parse(text: str) -> dict[str, Kernel]:
    """All entries of a PTX file, by their names."""
    kernels = {}
    lines = enumerate((line.split("//")[0].strip() for line in text.splitlines()), 1)
    for _, line in lines:
        if entry := ENTRY.search(line):
            kernel = _head(entry[1], line[entry.end() :], lines)
            _body(kernel, lines)
            kernels[kernel.name] = kernel
    return kernels


def _head(name: str, rest: str, lines: Iterator[tuple[int, str]]) -> Kernel:
    text = rest
    for _, line in lines:
        if line == "{":
            break
        text += " " + line
    parameters = {parameter: WIDTHS[width] * int(count or 1) for width, parameter, count in PARAMETER.findall(text)}
    threads = re.search(r"\.(?:max|req)ntid (\d+)", text)
    return Kernel(name, parameters, int(threads[1]) if threads else 1024)


def _body(kernel: Kernel, lines: Iterator[tuple[int, str]]) -> None:
    depth = 1
    for number, line in lines:
        if line in ("{", "}"):  # scopes: names that inline assembly declares again are declared alike
            depth += 1 if line == "{" else -1
            if depth == 0:
                return
            continue
        if line.startswith("{") and line.endswith(";}"):  # a scope of one statement
            line = line[1:-1].strip()
        while match := LABEL.match(line):
            kernel.labels[match[1]] = len(kernel.code)
            line = line[match.end() :]
        if not line or line.startswith(".pragma"):
            continue
        assert line.endswith(";") and line.count(";") == 1, f"line {number} is not one statement: {line}"
        line = line[:-1].strip()
        if declared := REGISTERS.match(line):
            for name in declared[2].split(","):
                family, several, _ = name.strip().partition("<")
                (kernel.families if several else kernel.types)[family] = declared[1]
        else:
            kernel.code.append(_instruction(line, number))
    raise AssertionError(f"{kernel.name} has no end")


def _instruction(text: str, number: int) -> Instruction:
    guard = re.match(r"@(!?)([\w%$]+)\s+", text)
    if guard:
        text = text[guard.end() :]
    name, _, rest = text.partition(" " if " " in text.split("\t")[0] else "\t")
    operands = tuple(map(_operand, re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", rest)))
    return Instruction(name, operands, guard[2] if guard else None, bool(guard and guard[1]), number)


def _operand(text: str) -> Operand:
    if text.startswith("{"):
        return tuple(part.strip() for part in text[1:-1].split(","))
    if text.startswith("["):
        base, _, offset = text[1:-1].partition("+")
        return Address(base.strip(), int(offset or 0))
    return text
