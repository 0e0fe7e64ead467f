"""Imports go one way: the library knows nothing of the application, and what only the application needs is loaded by it alone."""

from __future__ import annotations

import ast
import graphlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ella_cuda

PACKAGE = Path(ella_cuda.__file__).parent
APPLICATION = ("data", "experiments", "reports", "papers", "cli")
HEAVY = ("matplotlib", "sklearn", "torchvision")
# Each package may import those before it, and modules beside the packages.
ORDER = (
    "ops",
    "nn",
    "augment",
    "laplace",
    "training",
    "invariance",
    "tomography",
    "compat",
    "data",
    "experiments",
    "reports",
    "papers",
    "cli",
)
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def imported(module: Path) -> Iterator[str]:
    """Names of all modules that a module imports, at its head or in its functions."""
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_of(name: str) -> str | None:
    """The package of ella_cuda that a module's name is in; None for others, and for modules beside the packages."""
    words = name.split(".")
    return words[1] if len(words) > 1 and words[0] == "ella_cuda" and words[1] in ORDER else None


LIBRARY = [p for p in MODULES if p.relative_to(PACKAGE).parts[0] not in APPLICATION]


@pytest.mark.parametrize("module", LIBRARY, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_the_library_imports_nothing_of_the_application(module):
    names = set(imported(module))
    assert {part_of(name) for name in names}.isdisjoint(APPLICATION)
    assert {name.split(".")[0] for name in names}.isdisjoint(HEAVY)


@pytest.mark.parametrize("part", ORDER[:8])
def test_packages_of_the_library_import_those_before_them(part):
    later = set(ORDER[ORDER.index(part) + 1 :])
    for module in (PACKAGE / part).rglob("*.py"):
        assert {part_of(name) for name in imported(module)}.isdisjoint(later), module


@pytest.fixture(scope="module")
def architecture():
    spec = importlib.util.spec_from_file_location("architecture", Path(__file__).parent.parent / ".ci/architecture.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_files_of_laplace_import_each_other_in_a_circle():
    """Nor for type hints or in functions: who reads one file of a circle has to read all."""
    paths = [p for p in (PACKAGE / "laplace").rglob("*.py") if p.name != "__init__.py"]
    files = {".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts): p for p in paths}
    needs = {
        name: {found for one in imported(path) for found in (one, one.rpartition(".")[0]) if found in files} - {name}
        for name, path in files.items()
    }
    assert {"ella_cuda.laplace.base", "ella_cuda.laplace.posterior"} <= needs["ella_cuda.laplace.kron"]
    assert [*graphlib.TopologicalSorter(needs).static_order()]  # CycleError names a circle


@pytest.mark.parametrize("name", [name for name in ella_cuda.laplace.__all__ if name.endswith("Laplace")])
def test_no_approximation_has_more_than_44_public_methods_and_properties(name):
    public = [word for word in dir(getattr(ella_cuda.laplace, name)) if not word.startswith("_")]
    assert len(public) <= 44, public


def test_sizes_and_import_floors_are_within_their_bounds(architecture):
    found = architecture.measured()
    assert {name: number for name, number in found.items() if number > architecture.BOUNDS[name]} == {}


def test_what_the_bounds_are_compared_with(architecture, tmp_path, monkeypatch):
    laplace, tests = tmp_path / "ella_cuda/laplace", tmp_path / "python_tests"
    for folder in (laplace / "rules", tmp_path / "ella_cuda/papers", tmp_path / "csrc", tests):
        folder.mkdir(parents=True)
    files = {
        "ella_cuda/laplace/low.py": "import torch\n",
        "ella_cuda/laplace/rules/__init__.py": "from ella_cuda.laplace.low import thing\n",
        "ella_cuda/laplace/high.py": "from ella_cuda.laplace import rules\nmodule.register_full_backward_hook(print)\n",
        "ella_cuda/papers/paper.py": "a = 1\n" * 9,
        "csrc/op.cpp": "\n" * 3,
        "python_tests/test_op.py": "\n" * 5,
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(architecture, "ROOT", tmp_path)
    monkeypatch.setattr(architecture, "LAPLACE", laplace)
    assert [*architecture.measured().values()] == [4, 3, 3, 0, 4, 3, 5, 1]
    (laplace / "low.py").write_text("class Mode(torch.overrides.TorchFunctionMode):\n    from a import b\n")
    assert architecture.measured()["files of ella_cuda with hooks or modes"] == 2
    (laplace / "low.py").write_text("from ella_cuda.laplace.high import module\n")
    assert architecture.measured()["files of ella_cuda/laplace in a circle"] == 3


def test_only_the_command_imports_the_papers():
    of_others = [p for p in MODULES if p.relative_to(PACKAGE).parts[0] not in ("papers", "cli")]
    assert not [p for p in of_others if "papers" in {part_of(name) for name in imported(p)}]


def test_importing_the_package_loads_nothing_that_only_the_application_needs(beside_the_tests):
    code = f"import ella_cuda, ella_cuda.testing, sys; print([m for m in {HEAVY} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], cwd=beside_the_tests, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
