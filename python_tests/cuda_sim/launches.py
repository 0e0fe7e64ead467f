"""Every kernel launched: by the self-check's cases, and by ops on small shapes that take other paths."""

from __future__ import annotations

from typing import Any

import torch

from ella_cuda.testing import check_kernel, kernel_cases

from .simulator import Launch, Simulator

PROCESSORS = 64  # enough for the paths that share rows out over blocks


def launch_every_kernel(simulator: Simulator) -> list[Launch]:
    """How the launchers launch each kernel in the simulator: threads of a block and bytes of dynamic shared memory."""
    simulator.launches()
    with simulator.scheduled(multiprocessors=PROCESSORS):
        with simulator.on_cpu_tensors():
            for case in kernel_cases():
                assert all(check.ok for check in check_kernel(case, "cpu"))
        call_ops_by_other_paths(simulator.ops)
        accumulate_16_bits(simulator.ops)
    with simulator.scheduled(multiprocessors=PROCESSORS, warpgroups=True):
        accumulate(simulator.ops, torch.float32, [100])
    with simulator.scheduled(multiprocessors=PROCESSORS), simulator.path(product="scalar"):
        accumulate(simulator.ops, torch.float32, [40])
    return simulator.launches()


def call_ops_by_other_paths(ops: Any) -> None:
    """Reaches the kernels that launchers choose themselves, but for those of warpgroups, beside those of the self-check: of other norms,
    of places counted in 63 bits, of a large intermediate, of TF32."""
    for dtype in (torch.float32, torch.float64):
        for channels in (1, 9):  # of nine the intermediate is too large to be stored
            x, weight = torch.randn(65, channels, 1, dtype=dtype), torch.randn(channels, channels, 1, dtype=dtype)
            ops.factored_linear(x, weight, weight, None, None)
            ops.factored_linear_backward(x, x, weight, weight, None, *[True] * 5)
            if dtype == torch.float32:  # rounded to TF32, which changes no small whole number
                x, weight = (torch.randint(-3, 4, values.shape).to(dtype) for values in (x, weight))
                ops.factored_linear(x, weight, weight, None, None, True)
                ops.factored_linear_backward(x, x, weight, weight, None, *[True] * 6)
        accumulate(ops, dtype, [4, 20, 32, 40, 100])
        for norm in (1.0, 2.0, float("inf")):
            for side in (1, 56):  # places counted in 31 bits and in 63
                _, index = ops.polyphase_pool(torch.randn(1, 1, 2 * side, 2 * side, dtype=dtype), norm)
        for side in (1, 56):
            ops.polyphase_scatter(torch.randn(1, 1, side, side, dtype=dtype), index)
            image = torch.randn(1, 1, side, side, dtype=dtype)
            ops.circular_fold2d(ops.circular_pad2d(image, 1, 1, None), 1, 1, None)
            for circular in (True, False):
                ones = (1, 1)
                ops.conv_kron_accumulate_(torch.zeros(1, 1, dtype=dtype), image, ones, ones, ones, ones, circular, 1.0)
        image, maps = torch.randn(1, 1, 60, 60, dtype=dtype), torch.eye(2, 3, dtype=dtype)[None, None] * 0.99
        for direction in (None, maps):
            copies = ops.affine_copies(image, maps, direction)
            ops.affine_copies_backward(copies, image, maps, direction, True, True)
        for total in {dtype, torch.float64}:  # by lags
            images, factor = torch.randn(8, 2, 10, 10, dtype=dtype), torch.zeros(30, 30, dtype=total)
            ops.conv_kron_accumulate_(factor, images, (3, 5), ones, (1, 2), ones, True, 1.0)
    x, bank, bias = torch.randn(5, 4), torch.randn(3, 2, 4), torch.randn(2)
    y, _ = ops.averaged_filters(x, bank, bias, 2, False, True)
    ops.averaged_filters_backward(y, x, bank, bias, None, 2, *[True] * 3, True)


def accumulate_16_bits(ops: Any) -> None:
    """Copies whose places are counted in 31 bits and in 63."""
    for dtype in (torch.bfloat16, torch.float16):
        for d in (4, 100):
            ops.kron_accumulate_(torch.zeros(1, d, d), torch.randn(d, 1, d).to(dtype), 1.0)


def accumulate(ops: Any, dtype: torch.dtype, sizes: list[int]) -> None:
    """Both Kronecker accumulations on blocks of those sizes, rows of every layout, with and without shares of them; in float32 also of
    rows that are rounded to TF32, which changes no bfloat16 number."""
    for d in sizes:
        for rows in (1, 600 if d < 40 else 150):  # several shares
            aligned = torch.randn(rows, 1, d, dtype=dtype)
            unaligned = torch.randn(rows * d + 1, dtype=dtype)[1:].view(rows, 1, d)
            adjacent = torch.randn(1, d, rows, dtype=dtype).permute(2, 0, 1)
            for values in (aligned, unaligned, adjacent):
                for total in {dtype, torch.float64}:
                    ops.kron_accumulate_(torch.zeros(1, d, d, dtype=total), values, 1.0)
                if dtype == torch.float32 and d >= 32 and rows > 1:
                    exact = values[:20].copy_(values[:20].bfloat16())
                    ops.kron_accumulate_(torch.zeros(1, d, d, dtype=dtype), exact, 1.0, True)
            image, ones = torch.randn(rows, d, 1, 1, dtype=dtype), (1, 1)
            patches = ones, ones, (0, 0), ones, True, 1.0
            ops.conv_kron_accumulate_(torch.zeros(d, d, dtype=dtype), image, *patches)
            if dtype == torch.float32 and d >= 32 and rows > 1:
                ops.conv_kron_accumulate_(torch.zeros(d, d), image[:20].bfloat16().float(), *patches, True)
