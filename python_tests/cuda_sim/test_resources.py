"""What the table of kernel resources is made from: the compiler's reports read right, and the arithmetic of occupancy."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch

from . import nvcc as compiler
from . import simulator as build
from .resources import (
    MULTIPROCESSORS,
    Kernel,
    count_instructions,
    count_of,
    demangle,
    occupancy,
    parse_report,
    shorten,
)

# As ptxas 13.0 prints it, kernel names shortened.
REPORT = """\
ptxas info    : 28 bytes gmem, 224 bytes cmem[4]
ptxas info    : Compiling entry function '_Z1kPf' for 'sm_90'
ptxas info    : Function properties for _Z1kPf
    48 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 48 bytes cumulative stack size, 6144 bytes smem, 440 bytes cmem[0]
ptxas info    : Compile time = 284.593 ms
ptxas info    : Compiling entry function '_Z1lPf' for 'sm_90'
ptxas info    : Function properties for _Z1lPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers
"""

# As cuobjdump 12.8 prints it, abridged.
SASS = """\
arch = sm_80
\t\tFunction : _Z1kPf
\t.headerflags\t@"EF_CUDA_SM80 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM80)"
        /*0000*/                   IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28] ;     /* 0x00000a00ff017624 */
                                                                               /* 0x000fe400078e00ff */
        /*0010*/                   LDG.E.128 R4, [R2.64] ;                     /* 0x0000000402047981 */
        /*0020*/              @!P0 LDG.E R8, [R2.64] ;                         /* 0x0000000402087981 */
        /*0030*/              @UP1 LDS.U.128 R12, [R3] ;                       /* 0x0000000003007984 */
        /*0040*/                   HMMA.1688.F32.TF32 R4, R4, R8, R4 ;         /* 0x000000080404723c */
        /*0050*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;               /* 0x0000000000007b1d */
        /*12340*/                  FFMA R5, R6, R7, R5 ;                       /* 0x0000000706057223 */
arch = sm_90
\t\tFunction : _Z1kPf
        /*0000*/                   FFMA R5, R6, R7, R5 ;                       /* 0x0000000706057223 */
        /*0010*/                   FFMA.FTZ R5, R6, R7, R5 ;                   /* 0x0000000706057223 */
        /*0020*/                   FFMA2 R4, R6.F32x2, R8.F32x2, R4.F32x2 ;    /* 0x0000000706057223 */
"""

# (architecture, registers, threads, bytes of shared memory) -> blocks, as cuda_occupancy.h of CUDA 13.0 counts them.
KNOWN = {
    ("80", 32, 256, 0): 8,  # 64 warps
    ("80", 128, 256, 0): 2,  # 512 registers a warp of 512 * 8
    ("80", 129, 256, 0): 1,  # rounded up to 136
    ("80", 168, 128, 0): 3,  # 12 warps of 5376 registers
    ("80", 80, 160, 0): 4,  # 6 warps in each partition
    ("80", 65, 992, 0): 0,  # 31 warps are refused as 32 would be
    ("80", 16, 32, 0): 32,  # blocks
    ("80", 40, 256, 40 * 1024): 4,  # 164 KB / 41 KB
    ("90", 40, 256, 40 * 1024): 5,  # 228 KB / 41 KB
    ("100", 40, 256, 227 * 1024): 1,
    ("100", 40, 256, 227 * 1024 + 1): 0,
    ("80", 40, 256, 164 * 1024): 0,
}

ORACLE = """
#include <cuda_occupancy.h>
#include <cstdio>
int main() {
  int arch, registers, threads, sm_shared, block_shared;
  long shared;
  while (std::scanf("%d %d %d %ld %d %d", &arch, &registers, &threads, &shared, &sm_shared, &block_shared) == 6) {
    cudaOccDeviceProp device;
    device.computeMajor = arch / 10, device.computeMinor = arch % 10;
    device.maxThreadsPerBlock = 1024, device.maxThreadsPerMultiprocessor = 2048;
    device.regsPerBlock = device.regsPerMultiprocessor = 65536, device.warpSize = 32, device.numSms = 1;
    device.sharedMemPerBlock = 48 << 10, device.sharedMemPerMultiprocessor = sm_shared;
    device.sharedMemPerBlockOptin = block_shared, device.reservedSharedMemPerBlock = 1024;
    cudaOccFuncAttributes function;
    function.maxThreadsPerBlock = 1024, function.numRegs = registers, function.sharedSizeBytes = 0;
    function.partitionedGCConfig = PARTITIONED_GC_OFF, function.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    function.maxDynamicSharedSizeBytes = block_shared, function.numBlockBarriers = 1;
    cudaOccDeviceState state;
    cudaOccResult result;
    const cudaOccError error = cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &function, &state, threads, shared);
    std::printf("%d\\n", error ? -error : result.activeBlocksPerMultiprocessor);
  }
}
"""


def test_the_report_is_parsed() -> None:
    """Spills, frames and shared memory are seen where there are some."""
    assert parse_report(REPORT) == [Kernel("_Z1kPf", "90", 128, 48, 12, 6144), Kernel("_Z1lPf", "90", 32, 0, 0, 0)]


def test_instructions_are_counted() -> None:
    counts = count_instructions(SASS)
    assert set(counts) == {("80", "_Z1kPf"), ("90", "_Z1kPf")}
    on_80, on_90 = counts["80", "_Z1kPf"], counts["90", "_Z1kPf"]
    assert sum(on_80.values()) == 7 and sum(on_90.values()) == 3
    assert [count_of(on_80, *words) for words in (["LDG"], ["LDG", "128"], ["LDS", "128"])] == [2, 1, 1]
    assert [count_of(on_80, name) for name in ("HMMA", "BAR", "FFMA", "STS")] == [1, 1, 1, 0]
    assert count_of(on_80, "HMMA", "1688", "F32", "TF32") == 1
    assert [count_of(on_90, "FFMA"), count_of(on_90, "FFMA2")] == [2, 1]
    assert count_of(Counter(), "FFMA") == 0


@pytest.mark.parametrize("case", KNOWN, ids=str)
def test_known_occupancies(case: tuple[str, int, int, int]) -> None:
    got = occupancy(*case)
    assert got.blocks == KNOWN[case]
    assert got.share == KNOWN[case] * -(-case[2] // 32) / 64


def test_what_limits_the_occupancy() -> None:
    assert occupancy("80", 32, 256, 0).limit == "warps"
    assert occupancy("80", 16, 32, 0).limit == "blocks"
    assert occupancy("80", 128, 256, 0).limit == "registers"
    assert occupancy("80", 32, 256, 40 * 1024).limit == "shared memory"


def test_occupancy_is_that_of_the_toolkit(tmp_path: Path) -> None:
    """cuda_occupancy.h, NVIDIA's own, over all registers and many block sizes and shared memories."""
    nvcc, reason = compiler.find_nvcc()
    if nvcc is None or build.compiler() is None:
        pytest.skip(reason if nvcc is None else "no C++ compiler")
    include = nvcc.parent.parent / "include"
    if not (include / "cuda_occupancy.h").exists():
        pytest.skip(f"no cuda_occupancy.h in {include}")
    source, program = tmp_path / "oracle.cpp", tmp_path / "oracle"
    source.write_text(ORACLE)
    subprocess.run([str(build.compiler()), "-w", "-I", include, source, "-o", program], check=True)
    cases = [
        (arch, registers, threads, shared)
        for arch in MULTIPROCESSORS
        for registers in range(1, 256)
        for threads in (32, 96, 128, 160, 256, 512, 992, 1024)
        for shared in (0, 1, 20_000, 33_792, 48 << 10, 75_000, 113 << 10, 163 << 10, (163 << 10) + 1, 227 << 10)
        if registers * threads <= 65536
    ] + list(KNOWN)
    lines = []
    for case in cases:
        have = MULTIPROCESSORS[case[0]]
        lines.append(" ".join(map(str, [case[0].rstrip("a"), *case[1:], have.shared, have.block_shared])))
    result = subprocess.run([program], input="\n".join(lines), capture_output=True, text=True, check=True)
    expected = [int(line) for line in result.stdout.split()]
    assert [occupancy(*case).blocks for case in cases] == expected


@pytest.mark.skipif(shutil.which("c++filt") is None, reason="no c++filt")
def test_names_are_short() -> None:
    assert demangle(["_ZN4ella18syrk_finish_kernelIdLi64EEEvPT_PKS1_lllS1_"]) == {
        "_ZN4ella18syrk_finish_kernelIdLi64EEEvPT_PKS1_lllS1_": "syrk_finish_kernel<double, 64>"
    }
    long = "void ella::f<4, ella::(anonymous namespace)::Rows<float> >(ella::(anonymous namespace)::Rows<float>, long)"
    assert shorten(long) == "f<4, Rows<float>>"


@pytest.mark.simulator
def test_the_simulator_records_launches(simulator: build.Simulator) -> None:
    simulator.launches()
    x, index = torch.randn(2, 1, 2, 2), torch.zeros(2, dtype=torch.int64)
    for _ in range(2):
        simulator.ops.polyphase_select(x, index)
    (launch,) = simulator.launches()
    assert "select_kernel" in launch.kernel and (launch.threads, launch.shared) == (256, 0)
    assert simulator.launches() == []
    simulator.ops.kron_logdet(torch.rand(1, 2), torch.rand(1, 2), torch.tensor(1.0))
    seen = simulator.launches()
    names = demangle(launch.kernel for launch in seen)
    assert {(names[launch.kernel], launch.shared) for launch in seen} == {
        ("value_kernel<float>", 64),  # a double for each of 8 warps
        ("sum_all_kernel<float>", 64),
    }
