"""Print what every CUDA kernel takes of a multiprocessor and which instructions it is made of. Needs nvcc and g++, no GPU.

    python -m benchmarks.kernel_resources [--out FILE]      default: benchmarks/results/cuda-resources/table.txt

Registers, static shared memory, stack and spills are the compiler's (`ptxas -v`), instruction counts those of its machine
code (`cuobjdump -sass`; CUOBJDUMP names the tool where it is neither beside nvcc nor in the triton package). Threads and
dynamic shared memory are what the launchers ask for, recorded while the simulator of the tests runs every op. Occupancy
is counted from these by the limits printed above the table. Nothing here is a time.
"""

from __future__ import annotations

import argparse
import subprocess
from collections import Counter
from pathlib import Path

from python_tests.cuda_sim import nvcc as compiler
from python_tests.cuda_sim import resources
from python_tests.cuda_sim import simulator as build
from python_tests.cuda_sim.launches import launch_every_kernel

DEFAULT = build.ROOT / "benchmarks" / "results" / "cuda-resources" / "table.txt"
# Name and modifiers of the instructions that matter. FFMA2 is two FFMA at once; HMMA, HGMMA (of a warpgroup) and DMMA are the
# tensor cores'; LDGSTS copies from global to shared memory past the registers; LDL and STL are local memory, that is spills.
INSTRUCTIONS = ["FFMA", "FFMA2", "DFMA", "HMMA", "HGMMA", "DMMA", "LDG", "LDG.128", "STG", "LDS", "LDS.128", "STS"]
INSTRUCTIONS += ["LDGSTS", "SHFL", "BAR", "LDL", "STL"]


def commit() -> str:
    """The checkout's commit, and whether the sources of the kernels differ from it."""
    git = ["git", "-C", str(build.ROOT)]
    name = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
    if name.returncode:
        return "unknown"
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "csrc"]).returncode
    return name.stdout.strip() + (", csrc changed" if changed else "")


def header(nvcc: Path, cuobjdump: Path) -> list[str]:
    """What the table was made with and the limits that occupancy is counted by."""
    versions = [
        subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout.strip().splitlines()[-2]
        for tool in (nvcc, cuobjdump)
    ]
    lines = [f"nvcc: {versions[0]}", f"cuobjdump: {versions[1]}", f"commit: {commit()}", ""]
    lines.append("limits of a multiprocessor (CUDA C++ Programming Guide, Compute Capabilities):")
    for arch, have in resources.MULTIPROCESSORS.items():
        lines.append(
            f"  sm_{arch}: {have.warps} warps, {have.blocks} blocks, {have.registers} registers, "
            f"{have.shared >> 10} KB of shared memory, {have.block_shared >> 10} KB for one block"
        )
    lines.append(
        f"  registers come in {resources.REGISTER_UNIT} a warp, from the quarter of them that its partition has; shared memory "
        f"in {resources.SHARED_UNIT} bytes,"
    )
    lines.append(f"  {resources.SHARED_RESERVED} of them more a block than the kernel asks for")
    return [*lines, ""]


def tables(compiled: list[compiler.Compiled], sass: list[str], launches: list[build.Launch]) -> list[str]:
    """Both tables, a line for each kernel, launch and architecture; KeyError where a kernel was never launched."""
    kernels = [[kernel for kernel in resources.parse_report(one.report)] for one in compiled]
    names = resources.demangle([k.name for of_one in kernels for k in of_one] + [launch.kernel for launch in launches])
    launched: dict[str, set[tuple[int, int]]] = {}
    for launch in launches:
        launched.setdefault(names[launch.kernel], set()).add((launch.threads, launch.shared))
    width = max(map(len, names.values()))
    upper = [
        f"{'kernel':{width}s} {'arch':>6s} {'regs':>4s} {'spill':>5s} {'stack':>5s} {'static':>6s} {'dynamic':>7s} {'threads':>7s} "
        f"{'blocks':>6s} {'occupancy':>9s}  limited by",
    ]
    lower = [f"{'kernel':{width}s} {'arch':>6s}" + "".join(f" {name:>7s}" for name in INSTRUCTIONS)]
    for one, of_one, text in zip(compiled, kernels, sass, strict=True):
        counts = resources.count_instructions(text)
        for table in (upper, lower):
            table.append(f"{one.name}.cu")
        for kernel in sorted(of_one, key=lambda k: (names[k.name], int(k.arch.rstrip("a")))):
            name = names[kernel.name]
            left = f"{name:{width}s} {'sm_' + kernel.arch:>6s}"
            for threads, dynamic in sorted(launched[name]):
                fits = resources.occupancy(kernel.arch, kernel.registers, threads, kernel.shared + dynamic)
                upper.append(
                    f"{left} {kernel.registers:4d} {kernel.spills:5d} {kernel.stack:5d} {kernel.shared:6d} {dynamic:7d} "
                    f"{threads:7d} {fits.blocks:6d} {fits.share:9.1%}  {fits.limit}"
                )
            instructions: Counter[str] = counts[kernel.arch, kernel.name]
            found = (resources.count_of(instructions, *instruction.split(".")) for instruction in INSTRUCTIONS)
            lower.append(left + "".join(f" {n:7d}" for n in found))
    return [
        "Resources: registers, spills and stack (bytes) a thread; static and dynamic shared memory (bytes) and threads a block;",
        "blocks that fit on a multiprocessor at once.",
        *upper,
        "",
        "Instructions in the machine code (each once, however often it is executed).",
        *lower,
    ]


def start(tool: str, description: str | None, default: Path) -> tuple[Path, Path]:
    """The file that the command line names and nvcc, for a tool that writes a table; SystemExit where there is no nvcc."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=default, metavar="FILE")
    out = parser.parse_args().out
    nvcc, reason = compiler.find_nvcc()
    if nvcc is None:
        raise SystemExit(f"{tool}: {reason}. Install a CUDA toolkit or set CUDA_HOME")
    return out, nvcc


def finish(out: Path, lines: list[str]) -> None:
    """Writes the table and prints it."""
    text = "".join(f"{line.rstrip()}\n" for line in lines)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    print(text, end="")


def main() -> None:
    out, nvcc = start("kernel_resources", __doc__, DEFAULT)
    cuobjdump = compiler.find_cuobjdump(nvcc)
    if cuobjdump is None:
        raise SystemExit(
            "kernel_resources: no cuobjdump beside nvcc, on the path or in a triton package; set CUOBJDUMP"
        )
    compiled = compiler.compile_all(nvcc)
    sass = [compiler.disassemble(cuobjdump, one.fatbin) for one in compiled]
    launches = launch_every_kernel(build.Simulator(build.build(build.all_sources())))
    finish(out, header(nvcc, cuobjdump) + tables(compiled, sass, launches))


if __name__ == "__main__":
    main()
