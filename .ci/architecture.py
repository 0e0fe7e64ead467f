"""Table of the sizes and imports of the package beside their bounds; exit code 1 where a number is above its bound."""

from __future__ import annotations

import ast
import graphlib
import re
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAPLACE = ROOT / "ella_cuda/laplace"
# Lowered as the library gets smaller; raised for a new part of the public surface alone, by what that part takes.
BOUNDS = {
    "lines of ella_cuda/laplace": 19893,
    "files of ella_cuda/laplace": 57,
    "floors of imports in ella_cuda/laplace": 9,
    "files of ella_cuda/laplace in a circle": 0,
    "lines of ella_cuda without papers": 46720,
    "lines of csrc": 15986,
    "lines of python_tests": 51480,
    "files of ella_cuda with hooks or modes": 1,
}
PASSES = re.compile(
    r"\bregister_(full_|module_|multi_grad_|state_dict_|load_state_dict_)*(pre_|forward_|backward_)*hook\("
    r"|\bsaved_tensors_hooks\(|class \w+\([\w.]*Torch(Function|Dispatch)Mode\)"
)


def lines(paths: Iterable[Path]) -> int:
    """The number of lines of these files together."""
    return sum(path.read_bytes().count(b"\n") for path in paths)


def needs() -> dict[str, set[str]]:
    """By module of ella_cuda/laplace, the modules there that its head imports; the package's own ``__init__`` is none of them."""
    paths = [path for path in LAPLACE.rglob("*.py") if path != LAPLACE / "__init__.py"]
    names = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in paths}
    found = {}
    for name, path in names.items():
        nodes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        words = {f"{getattr(node, 'module', '')}.{alias.name}".strip(".") for node in nodes for alias in node.names}
        found[name] = {one for word in words for one in (word, word.rpartition(".")[0]) if one in names} - {name}
    return found


def floors(needed: dict[str, set[str]]) -> int:
    """The length of the longest chain of imports."""
    height: dict[str, int] = {}
    for name in graphlib.TopologicalSorter(needed).static_order():
        height[name] = 1 + max((height[one] for one in needed[name]), default=0)
    return max(height.values())


def measured() -> dict[str, int]:
    """The numbers, by the names of :data:`BOUNDS`; of a circle of imports its files, and no floors."""
    laplace = [*LAPLACE.rglob("*.py")]
    package = [path for path in (ROOT / "ella_cuda").rglob("*.py") if "papers" not in path.parts]
    sources = [p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".cpp", ".cu", ".cuh", ".h", ".inc"}]
    try:
        height, circle = floors(needs()), []
    except graphlib.CycleError as error:
        height, circle = 0, error.args[1][1:]
    numbers = (
        lines(laplace),
        len(laplace),
        height,
        len(circle),
        lines(package),
        lines(sources),
        lines(p for p in (ROOT / "python_tests").rglob("*") if p.suffix in {".py", ".h"}),
        sum(bool(PASSES.search(path.read_text())) for path in package),
    )
    return dict(zip(BOUNDS, numbers, strict=True))


if __name__ == "__main__":
    found = measured()
    for name, number in found.items():
        print(f"{name:42} {number:>7,} of {BOUNDS[name]:>7,}{'' if number <= BOUNDS[name] else '  TOO MANY'}")
    sys.exit(any(number > BOUNDS[name] for name, number in found.items()))
