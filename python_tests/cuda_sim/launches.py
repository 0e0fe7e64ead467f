"""Every kernel launched, by ops on shapes small enough to run and odd enough to reach all kernels."""

from __future__ import annotations

from typing import Any

import torch

from .simulator import Launch, Simulator

PROCESSORS = 64  # enough for the paths that share rows out over blocks


def launch_every_kernel(simulator: Simulator) -> list[Launch]:
    """How the launchers launch each kernel in the simulator: threads of a block and bytes of dynamic shared memory."""
    simulator.launches()
    with simulator.scheduled(multiprocessors=PROCESSORS):
        call_every_op(simulator.ops)
        accumulate_16_bits(simulator.ops)
    with simulator.scheduled(multiprocessors=PROCESSORS, warpgroups=True):
        accumulate(simulator.ops, torch.float32, [100])
    with simulator.scheduled(multiprocessors=PROCESSORS), simulator.path(product="scalar"):
        accumulate(simulator.ops, torch.float32, [40])
    return simulator.launches()


def call_every_op(ops: Any) -> None:
    """Reaches every kernel that launchers choose themselves but those of warpgroups, on a device of PROCESSORS multiprocessors
    with a small cache."""
    for dtype in (torch.float32, torch.float64):
        precision = torch.tensor(0.5, dtype=dtype)
        eigenvalues = torch.rand(1, 3, dtype=dtype), torch.rand(1, 2, dtype=dtype)
        for channels in (1, 9):  # of nine the intermediate is too large to be stored
            x, weight = torch.randn(65, channels, 1, dtype=dtype), torch.randn(channels, channels, 1, dtype=dtype)
            ops.factored_linear(x, weight, weight, None, None)
            ops.factored_linear_backward(x, x, weight, weight, None, *[True] * 5)
            if dtype == torch.float32:  # rounded to TF32, which changes no small whole number
                x, weight = (torch.randint(-3, 4, values.shape).to(dtype) for values in (x, weight))
                ops.factored_linear(x, weight, weight, None, None, True)
                ops.factored_linear_backward(x, x, weight, weight, None, *[True] * 6)
        x, bank, bias = torch.randn(5, 4, dtype=dtype), torch.randn(3, 2, 4, dtype=dtype), torch.randn(2, dtype=dtype)
        for allow_tf32 in (False, True):  # of which float64 takes no notice
            y, _ = ops.averaged_filters(x, bank, bias, 2, False, allow_tf32)
            ops.averaged_filters_backward(y, x, bank, bias, None, 2, *[True] * 3, allow_tf32)
        accumulate(ops, dtype, [4, 20, 32, 40, 100])
        points = [torch.randn(n, 2, dtype=torch.float64) for n in (130, 3, 130, 3)]
        for rows in (1, 70):
            x, grad = torch.randn(rows, 130, dtype=dtype), torch.randn(rows, 3, dtype=dtype)
            ops.gaussian_project(x, *points[:2])
            ops.gaussian_project_tangent(x, *points)
            ops.gaussian_project_gradient(grad, x, *points[:2])
            ops.gaussian_project_hvp(grad, x, *points)
        ops.kron_logdet(*eigenvalues, precision)
        ops.kron_logdet_gradient(*eigenvalues, precision)
        ops.kron_logdet_hvp(*eigenvalues, precision, *eigenvalues, precision)
        variance, rows = torch.zeros(2, 3, 3, dtype=dtype), torch.randn(2, 2, 1, 3, dtype=dtype)
        outputs, known = torch.randn(3, 2, 2, 1, 2, dtype=dtype), [t.double() for t in (*eigenvalues, precision)]
        ops.kron_variance_(variance, outputs[:, :, :1], rows[:, :1], *known)
        ops.kron_variance_(variance, outputs, rows, *known)
        ops.kron_variance_(variance, torch.randn(3, 2, 1, 3, 2, dtype=dtype), None, *known)
        tile = torch.tensor([[0, 0, 3, 3, 2]])  # of the only tensor, the first three numbers times the next two
        spectra = torch.cat([side.flatten() for side in eigenvalues]), tile, torch.tensor([0, 1])
        norms = 20 * precision[None]  # so large that terms do not cancel
        ops.kron_evidence(*spectra, norms, precision[None], precision)
        ops.kron_evidence_bend(*spectra, precision[None])
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
        for side in (5, 60):  # places counted in 31 bits and in 63
            image, maps = torch.randn(1, 1, side, side, dtype=dtype), torch.eye(2, 3, dtype=dtype)[None, None] * 0.99
            for direction in (None, maps):
                copies = ops.affine_copies(image, maps, direction)
                ops.affine_copies_backward(copies, image, maps, direction, True, True)
        for width in (3, 5):  # by lags
            images, kernel = torch.randn(8, 2, 10, 10, dtype=dtype), (3, width)
            for total in {dtype, torch.float64}:
                factor = torch.zeros(6 * width, 6 * width, dtype=total)
                ops.conv_kron_accumulate_(factor, images, kernel, ones, (1, width // 2), ones, True, 1.0)
    half = torch.arange(18.0, dtype=torch.float64).view(2, 3, 3)
    blocks = torch.arange(65.0, dtype=torch.float64).diag(), half + half.mT  # of 65 rows by other threads than of three
    ops.symmetric_eigenvalues(torch.cat([block.reshape(-1) for block in blocks]), [1, 2], [65, 3])


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
