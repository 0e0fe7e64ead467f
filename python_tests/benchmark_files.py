"""Modules of the benchmarks, for tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


def importable() -> None:
    """Make ``benchmarks`` a package to import from, without the checkout's folder, whose ``ella_cuda`` need not be built."""
    if "benchmarks" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "benchmarks", FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
        )
        sys.modules["benchmarks"] = package = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)


def load(name: str) -> ModuleType:
    """A module of the benchmarks by its path: the checkout need not be importable."""
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
