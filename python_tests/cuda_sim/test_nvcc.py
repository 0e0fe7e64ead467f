"""Every CUDA source compiles for the architectures we ship, and no kernel uses local memory.

A spill or a local stack frame is memory traffic in the middle of an inner loop, and a sign that an array was indexed by
a variable; the kernels' tiles are chosen so that everything stays in registers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from . import nvcc as compiler
from . import simulator as build
from .launches import launch_every_kernel
from .nvcc import Kernel, demangle, parse_report

pytestmark = [pytest.mark.nvcc, pytest.mark.slow]


@pytest.fixture(scope="module")
def compiled(nvcc: Path) -> list[compiler.Compiled]:
    return compiler.compile_all(nvcc)


@pytest.fixture(scope="module")
def kernels(compiled: list[compiler.Compiled]) -> list[Kernel]:
    return [kernel for one in compiled for kernel in parse_report(one.report)]


def test_no_kernel_uses_local_memory(compiled: list[compiler.Compiled]) -> None:
    for one in compiled:
        kernels = parse_report(one.report)
        assert len(kernels) == one.report.count("Compiling entry function") > 0, (
            f"report of {one.name}.cu not understood:\n{one.report}"
        )
        for kernel in kernels:
            assert kernel.stack == 0 and kernel.spills == 0, f"{kernel} uses local memory"
        assert {kernel.arch for kernel in kernels} == one.architectures
    assert {one.architectures for one in compiled} == {frozenset({"80", "90a", "100"})}


def test_products_of_warpgroups_run_side_by_side(compiled: list[compiler.Compiled]) -> None:
    """ptxas says so where it makes them wait for each other or waits itself, which costs what they are there for."""
    reports = [one.report for one in compiled if "syrk_warpgroup_kernel" in one.report]
    assert len(reports) == 2
    for report in reports:
        assert "wgmma" not in report and "warpgroup.wait" not in report, report


@pytest.mark.simulator
def test_every_kernel_is_launched_by_some_op(kernels: list[Kernel], simulator: build.Simulator) -> None:
    """Code that no launcher reaches is dead."""
    launches = launch_every_kernel(simulator)
    names = demangle([kernel.name for kernel in kernels] + [launch.kernel for launch in launches])
    assert {names[kernel.name] for kernel in kernels} == {names[launch.kernel] for launch in launches}
