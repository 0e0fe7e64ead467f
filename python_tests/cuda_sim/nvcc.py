"""Compiles csrc's CUDA sources with nvcc, device code only and with the flags of the build.

One fatbin and one report of ptxas per source, for every architecture that is shipped, kept under a hash of the sources.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from . import simulator as build

REPORT = re.compile(
    r"Compiling entry function '(?P<kernel>\S+)' for 'sm_(?P<arch>\w+)'"
    r"[\s\S]*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
)


@dataclass(frozen=True)
class Compiled:
    """Device code of one source: its name, nvcc's numbers of the architectures ("80", "90a"), ptxas's report (-v) and the file."""

    name: str
    architectures: frozenset[str]
    report: str
    fatbin: Path


@dataclass(frozen=True)
class Kernel:
    """One kernel in one architecture's report of ptxas; stack and spills in bytes a thread."""

    name: str
    arch: str
    stack: int
    spills: int


def parse_report(text: str) -> list[Kernel]:
    """What `-Xptxas -v` printed."""
    return [
        Kernel(m["kernel"], m["arch"], int(m["stack"]), int(m["stores"]) + int(m["loads"]))
        for m in REPORT.finditer(text)
    ]


def build_config() -> ModuleType:
    """The module of that name beside setup.py, which is not on the path."""
    spec = importlib.util.spec_from_file_location("build_config", build.ROOT / "build_config.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["build_config"] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def find_nvcc() -> tuple[Path | None, str]:
    """nvcc (None: there is none) and how it was found, whether or not this build of the package wants CUDA."""
    toolkit, reason = build_config().find_toolkit({k: v for k, v in os.environ.items() if k != "ELLA_CUDA"})
    return (toolkit.root / "bin" / "nvcc" if toolkit else None), reason


def flags(archs: list[str]) -> list[str]:
    """Those of the build for an arch list, and a report of ptxas."""
    options = ["-std=c++17", "-O3", build_config().TARGET_VERSION, "-DUSE_CUDA", "--expt-relaxed-constexpr"]
    options += ["-I", str(build.SOURCES), "-I", str(build.TORCH / "include"), "-Xptxas", "-v"]
    return [*options, *build_config().gencode_flags(archs)]


def compile_source(nvcc: Path, name: str, archs: list[str]) -> Compiled:
    """The device code of csrc/<family>/cuda/<name>.cu for an arch list; AssertionError with nvcc's words where it does not compile."""
    source, headers = build.source_of(name), build.headers_of(build.SOURCES)
    options = flags(archs)
    key = build.digest([source, *headers], str(nvcc.resolve()), build.torch.__version__, *options)
    report, fatbin = (build.cache_folder() / f"{name}-{key}.{kind}" for kind in ("ptxas", "fatbin"))
    with build.one_maker(fatbin):
        if not (report.exists() and fatbin.exists()):
            partial = fatbin.with_suffix(f".{os.getpid()}")
            command = [nvcc, *options, "-fatbin", source, "-o", partial]
            result = subprocess.run(command, capture_output=True, text=True)
            assert result.returncode == 0, f"nvcc cannot compile {name}.cu:\n{result.stderr}"
            os.replace(partial, fatbin)
            partial.write_text(result.stdout + result.stderr)
            os.replace(partial, report)
    numbers = frozenset(arch.removesuffix("+PTX").replace(".", "") for arch in archs)
    return Compiled(name, numbers, report.read_text(), fatbin)


def compile_all(nvcc: Path) -> list[Compiled]:
    """All sources for the architectures that are shipped, MAX_JOBS at once."""
    archs = build_config().arch_list({})
    with ThreadPoolExecutor(build.jobs()) as pool:
        return list(pool.map(lambda name: compile_source(nvcc, name, archs), build.all_sources()))
