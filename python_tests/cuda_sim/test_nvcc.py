"""Every CUDA source compiles for the architectures we ship, and no kernel uses local memory.

A spill or a local stack frame is memory traffic in the middle of an inner loop, and a sign that an array was indexed by
a variable; the kernels' tiles are chosen so that everything stays in registers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from . import nvcc as compiler
from .nvcc import parse_report

pytestmark = [pytest.mark.nvcc, pytest.mark.slow]


@pytest.fixture(scope="module")
def compiled(nvcc: Path) -> list[compiler.Compiled]:
    return compiler.compile_all(nvcc)


def test_no_kernel_uses_local_memory(compiled):
    for one in compiled:
        kernels = parse_report(one.report)
        assert len(kernels) == one.report.count("Compiling entry function") > 0, (
            f"report of {one.name}.cu not understood:\n{one.report}"
        )
        for kernel in kernels:
            assert kernel.stack == 0 and kernel.spills == 0, f"{kernel} uses local memory"
        assert {kernel.arch for kernel in kernels} == one.architectures
    assert {one.architectures for one in compiled} == {frozenset({"80", "90a", "100"})}


def test_products_of_warpgroups_run_side_by_side(compiled):
    """ptxas says so where it makes them wait for each other or waits itself, which costs what they are there for."""
    reports = [one.report for one in compiled if "syrk_warpgroup_kernel" in one.report]
    assert len(reports) == 2
    for report in reports:
        assert "wgmma" not in report and "warpgroup.wait" not in report, report
