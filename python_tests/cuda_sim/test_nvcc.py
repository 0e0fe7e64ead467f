"""Every CUDA source compiles for the architectures we ship, and no kernel uses local memory.

A spill or a local stack frame is memory traffic in the middle of an inner loop, and a sign that an array was indexed by
a variable; the kernels' tiles are chosen so that everything stays in registers. Only the device code is compiled here
(-fatbin, with the flags of the build), one nvcc per source, MAX_JOBS at once; reports are kept for the next run.
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

import pytest

from . import simulator as build

pytestmark = [pytest.mark.nvcc, pytest.mark.slow]

ARCHITECTURES = ["8.0", "9.0", "10.0+PTX"]
REPORT = re.compile(
    r"Compiling entry function '(?P<kernel>\S+)' for 'sm_(?P<arch>\w+)'"
    r".*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r".*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


@dataclass(frozen=True)
class Kernel:
    """One kernel in one architecture's report of ptxas."""

    name: str
    arch: str
    registers: int
    stack: int
    spills: int


def parse_report(text: str) -> list[Kernel]:
    """What `-Xptxas -v` printed."""
    return [
        Kernel(m["kernel"], m["arch"], int(m["registers"]), int(m["stack"]), int(m["stores"]) + int(m["loads"]))
        for m in REPORT.finditer(text)
    ]


def build_config() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_config", build.ROOT / "build_config.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["build_config"] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def nvcc() -> Path:
    config = build_config()
    environment = {key: value for key, value in os.environ.items() if key != "ELLA_CUDA"}
    toolkit, reason = config.find_toolkit(environment)
    if toolkit is None:
        pytest.skip(reason)
    return toolkit.root / "bin" / "nvcc"


def compile_device_code(nvcc: Path, name: str) -> str:
    """ptxas's report for one source and all architectures, kept under a hash of the sources."""
    config = build_config()
    source = build.SOURCES / "cuda" / f"{name}.cu"
    headers = [*(build.SOURCES / "common").glob("*.h"), *(build.SOURCES / "cuda").glob("*.cuh")]
    flags = ["-std=c++17", "-O3", config.TARGET_VERSION, "-DUSE_CUDA", "-Xptxas", "-v"]
    flags += config.gencode_flags(ARCHITECTURES)
    key = build.digest([source, *headers], str(nvcc.resolve()), build.torch.__version__, *flags)
    report = build.cache_folder() / f"{name}-{key}.ptxas"
    if not report.exists():
        target = build.cache_folder() / f"{name}-{key}.fatbin"
        command = [nvcc, *flags, "-I", build.TORCH / "include", "-fatbin", source, "-o", target]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, f"nvcc cannot compile {name}.cu:\n{result.stderr}"
        partial = report.with_suffix(f".{os.getpid()}")
        partial.write_text(result.stdout + result.stderr)
        os.replace(partial, report)
    return report.read_text()


def test_no_kernel_uses_local_memory(nvcc: Path) -> None:
    names = build.all_sources()
    with ThreadPoolExecutor(build.jobs()) as pool:
        reports = list(pool.map(lambda name: compile_device_code(nvcc, name), names))
    for name, text in zip(names, reports, strict=True):
        kernels = parse_report(text)
        assert len(kernels) == text.count("Compiling entry function") > 0, (
            f"report of {name}.cu not understood:\n{text}"
        )
        for kernel in kernels:
            assert kernel.stack == 0 and kernel.spills == 0, f"{kernel} uses local memory"
        assert {kernel.arch for kernel in kernels} == {"80", "90", "100"}


def test_the_report_is_parsed() -> None:
    """Spills and frames are seen where there are some."""
    text = (
        "ptxas info    : Compiling entry function '_Z1kPf' for 'sm_90'\n"
        "ptxas info    : Function properties for _Z1kPf\n"
        "    48 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\n"
        "ptxas info    : Used 128 registers, used 1 barriers, 48 bytes cumulative stack size\n"
        "ptxas info    : Compiling entry function '_Z1lPf' for 'sm_90'\n"
        "ptxas info    : Function properties for _Z1lPf\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 32 registers, used 0 barriers\n"
    )
    assert parse_report(text) == [Kernel("_Z1kPf", "90", 128, 48, 12), Kernel("_Z1lPf", "90", 32, 0, 0)]
