"""Table of what a call of CUDA ops launches: kernels, clearings of memory, blocks of all kernels.

``python -m benchmarks.launches`` counts in the test suite's simulator, without a GPU. Blocks do not run, so that sizes are real.
What torch's operations launch inside an op is not counted; "by torch" marks calls that the Python function leaves to torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import torch

from benchmarks.bench_basis_project import SHAPES as BASIS_SHAPES
from benchmarks.bench_evidence_step import SHAPES as LOGDET_SHAPES
from benchmarks.bench_factored_linear import BATCH, stages
from benchmarks.bench_kron_variance import SHAPES as VARIANCE_SHAPES
from ella_cuda import ops
from ella_cuda._extension import _C
from python_tests.cuda_sim.simulator import FLAGS, SOURCES, Simulator, build

NAMES = ["factored_linear", "kron_variance", "kron_logdet", "kron_evidence", "gaussian_project"]
Call = tuple[str, Callable[..., object], tuple]  # name, op, arguments


def spectra(*sizes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.rand(size, dtype=torch.float64) for size in sizes]


def factored(sim: torch._ops._OpNamespace, width: int) -> Iterator[Call]:
    for i, (c, d, x, y) in enumerate(stages(width), 1):
        sizes = (BATCH, c, x), (d, c, x), (d, c, y), (d,), (y,), (BATCH, d, y)
        *args, grad = (torch.zeros(size) for size in sizes)
        name = f"F-FC, alpha {width}, stage {i}" + ", by torch" * _C.factored_linear_by_torch(
            BATCH, c, x, d, y, 4, True
        )
        kept = sim.factored_linear_keeping(*args)[1]
        yield f"{name}, forward", sim.factored_linear_keeping, tuple(args)
        yield f"{name}, backward", sim.factored_linear_backward_keeping, (grad, *args[:4], kept, *[True] * 5)


def others(sim: torch._ops._OpNamespace) -> Iterator[Call]:
    for n, k, t, g, a, b in VARIANCE_SHAPES:
        rows = torch.zeros(k, n, t, g, b), torch.zeros(n, t, g, a)
        name = f"kron_variance_, {n} points, {t} positions, {g} of {a} x {b}"
        yield name, sim.kron_variance_, (torch.zeros(n, k, k), *rows, *spectra((g, a), (g, b), ()))
    for g, a, b in LOGDET_SHAPES:
        sides = tuple(spectra((g, a), (1, b), ()))
        yield f"kron_logdet, {g} of {a} x {b}", sim.kron_logdet, sides
        yield f"kron_logdet, {g} of {a} x {b}, gradient", sim.kron_logdet_gradient, sides
    packed = ops.pack_spectra([tuple(spectra((1, 512), (1, 64)))] * 52)
    given = packed.eigenvalues, packed.tiles, packed.starts
    yield "kron_evidence of 52 tensors", sim.kron_evidence, (*given, *spectra((52,), (52,), ()))
    yield "kron_evidence of 52 tensors, second derivative", sim.kron_evidence_bend, (*given, *spectra((52,)))
    for c, x in BASIS_SHAPES:
        m, anchors = BATCH * c, (x + 1) // 2
        points = tuple(spectra((x, 2), (anchors, 2)))
        rows, grad = torch.zeros(m, x), torch.zeros(m, anchors)
        name = f"basis_project, {m} rows, {x} positions"
        yield name, sim.gaussian_project, (rows, *points)
        yield f"{name}, gradient of positions", sim.gaussian_project_gradient, (grad, rows, *points)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--multiprocessors", type=int, default=132, help="of the device (default: %(default)s)")
    parser.add_argument("--csrc", default=SOURCES, help="folder of the sources (default: this checkout's)")
    options = parser.parse_args()
    FLAGS[:] = [flag for flag in FLAGS if "ELLA_MAX_" not in flag]  # small limits, which the tests cross
    simulator = Simulator(build(NAMES, Path(options.csrc)))
    simulator.schedule(multiprocessors=options.multiprocessors, warpgroups=True, runs=False)
    print(f"{'call':70} {'launches':>8} {'clears':>6} {'blocks':>7}")
    total = [0, 0]
    for name, op, args in chain(factored(simulator.ops, 10), factored(simulator.ops, 40), others(simulator.ops)):
        before = simulator.counts()
        op(*args)
        launches, blocks, clears = (now - then for now, then in zip(simulator.counts(), before, strict=True))
        print(f"{name:70} {launches:8} {clears:6} {blocks:7}")
        if name.startswith("F-FC, alpha 10"):
            total = [total[0] + launches, total[1] + clears]
    print(f"F-FC, alpha 10, all stages: {total[0]} launches, {total[1]} clears")


if __name__ == "__main__":
    main()
