"""What each CUDA kernel executes and moves, counted without a GPU, at the sizes of the paper's network, as a table.

    python -m benchmarks.kernel_traffic [--out FILE]

nvcc compiles csrc's CUDA sources to PTX and the machine of python_tests/cuda_sim/ptx runs a few thread blocks of every launch, on launchers
told that the device is an H200: from the middle of as many equal parts of them. Sectors are the 32 bytes in which global memory
moves, whatever cache they come from; turns are the accesses of shared memory with their bank conflicts. Each is followed by how many
times those that the same bytes need. Nothing here is a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.kernel_resources import commit, finish, start
from python_tests.cuda_sim import resources
from python_tests.cuda_sim import simulator as build
from python_tests.cuda_sim.ptx.device import Counted, PtxDevice

DEFAULT = build.ROOT / "benchmarks" / "results" / "cuda-resources" / "traffic.txt"
BLOCKS = 5  # of each launch, evenly spaced
H200 = {"multiprocessors": 132, "cache_bytes": 50 << 20}
KINDS = ("global read", "global write", "shared read", "shared write")
BATCH, ONE = 128, (1, 1)


def factored_linear(C: int, D: int, X: int, Y: int) -> Callable[[Any], None]:
    """Forward and backward of an F-FC layer."""
    x, grad = torch.randn(BATCH, C, X), torch.randn(BATCH, D, Y)
    weight_in, weight_out, bias_in, bias_out = (torch.randn(s) for s in ((D, C, X), (D, C, Y), D, Y))

    def run(ops: Any) -> None:
        ops.factored_linear(x, weight_in, weight_out, bias_in, bias_out)
        ops.factored_linear_backward(grad, x, weight_in, weight_out, bias_in, *[True] * 5)

    return run


def accumulate(rows: int, blocks: int, d: int) -> Callable[[Any], None]:
    """Blocks of a Kronecker factor."""
    values, factor = torch.randn(rows, blocks, d), torch.zeros(blocks, d, d)
    return lambda ops: ops.kron_accumulate_(factor, values, 1.0)


def patches(channels: int, side: int) -> Callable[[Any], None]:
    """The input side of a 3x3 convolution's factor."""
    image, d = torch.randn(BATCH, channels, side, side), 9 * channels
    factor = torch.zeros(d, d)
    return lambda ops: ops.conv_kron_accumulate_(factor, image, (3, 3), ONE, ONE, ONE, True, 1.0)


def images(channels: int, side: int) -> Callable[[Any], None]:
    """Padding and pooling, there and back."""
    image = torch.randn(BATCH, channels, side, side)

    def run(ops: Any) -> None:
        for index in (None, torch.zeros(BATCH, dtype=torch.int64)):
            ops.circular_fold2d(ops.circular_pad2d(image, 1, 1, index), 1, 1, index)
        pooled, _ = ops.polyphase_pool(image, 2.0)
        ops.polyphase_scatter(pooled, torch.zeros(BATCH, dtype=torch.int64))

    return run


def project(rows: int, points: int, anchors: int) -> Callable[[Any], None]:
    """On the exponential basis, and the gradient in its points and anchors."""
    x, grad = torch.randn(rows, points), torch.randn(rows, anchors)
    at, of = (8 * torch.rand(n, 2, dtype=torch.float64) for n in (points, anchors))

    def run(ops: Any) -> None:
        ops.gaussian_project(x, at, of)
        ops.gaussian_project_gradient(grad, x, at, of)

    return run


WORKS = {
    f"F-FC, {C} and {D} channels of {X} and {Y} positions": partial(factored_linear, C, D, X, Y)
    for C, D, X, Y in ((3, 10, 1024, 1024), (20, 40, 256, 64), (40, 40, 64, 64), (80, 160, 4, 1), (160, 160, 256, 64))
}
WORKS |= {
    f"kron_accumulate_, {rows} rows, {blocks} blocks of {d}": partial(accumulate, rows, blocks, d)
    for rows, blocks, d in ((2000, 64, 16), (4000, 32, 32), (4000, 16, 64), (4000, 8, 128), (4000, 1, 1024))
}
WORKS |= {
    f"conv_kron_accumulate_, {channels} channels, {side}x{side}": partial(patches, channels, side)
    for channels, side in ((10, 32), (40, 8))
}
WORKS |= {"padding and pooling, 20 channels, 16x16": partial(images, 20, 16)}
WORKS |= {"exponential basis, 1280 rows, 1024 points, 32 anchors": partial(project, 1280, 1024, 32)}


def lines(arch: str, device: PtxDevice, works: dict[str, Callable[[], Callable[[Any], None]]]) -> list[str]:
    """A line for each launch of each work."""
    table = []
    for name, make in works.items():
        with device.scheduled(**H200), device.counting(BLOCKS) as launches:
            make()(device.ops)
        names = resources.demangle([launch.kernel for launch in launches])
        table += ["", f"{name}, compute capability {arch}"]
        table += [_line(names[launch.kernel], launch) for launch in launches]
    return table


def _line(name: str, launch: Counted) -> str:
    traffic, ran = launch.traffic, launch.ran
    moved = "".join(
        f"{traffic.moved[kind] / ran:12.0f} {traffic.moved[kind] / traffic.needed[kind]:5.2f}"
        if traffic.needed[kind]
        else f"{0:12d} {'':5s}"
        for kind in KINDS
    )
    return f"  {name:58s} {launch.blocks:6d} {launch.threads:7d} {traffic.instructions / ran:12.0f} {traffic.products / ran:8.0f}{moved}"


def main() -> None:
    out, nvcc = start("kernel_traffic", __doc__, DEFAULT)
    heads = [f"{'sectors' if kind.startswith('global') else 'turns'} {kind.partition(' ')[2]}" for kind in KINDS]
    text = [
        f"commit: {commit()}",
        "",
        f"For a thread block, the mean of {BLOCKS}, evenly spaced, of each launch, whose blocks may differ: PTX instructions of its",
        "warps and those for tensor cores; sectors of global memory and turns of shared memory, each with how many times those that",
        "the bytes need.",
        f"  {'kernel':58s} {'blocks':>6s} {'threads':>7s} {'instructions':>12s} {'products':>8s}"
        + "".join(f"{head:>15s}   " for head in heads),
    ]
    torch.manual_seed(0)
    text += lines("8.0", PtxDevice(nvcc, "80", small=False), WORKS)
    wide = {
        name: work
        for name, work in WORKS.items()
        if "kron" in name and ("128" in name or "1024" in name or "conv" in name)
    }
    text += lines("9.0a", PtxDevice(nvcc, "90a", ["kron_accumulate", "conv_kron_accumulate"], small=False), wide)
    finish(out, text)


if __name__ == "__main__":
    main()
