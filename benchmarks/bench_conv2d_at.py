"""A convolution at the largest values of windows of 2 x 2, and its transpose, of columns that share these places: ours, which computes
these positions alone, and whole convolutions of torch.

    pytest benchmarks/bench_conv2d_at.py --threads 1
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.compiling import compiled
from ella_cuda.ops.conv2d_at import conv2d_at, conv2d_at_torch, conv2d_at_transpose, conv2d_at_transpose_torch

# Columns, images, channels in and out, size, kernel; the first is the second layer of LILA's CNN with nine columns.
SHAPES = {
    "6 to 16 channels of 14 x 14": (9, 144, 6, 16, 14, 3),
    "16 to 32 channels of 14 x 14": (9, 64, 16, 32, 14, 3),
    "16 to 32 channels of 14 x 14, 16 columns": (16, 64, 16, 32, 14, 3),
}
CANDIDATES = {
    "ella_cuda": (conv2d_at, conv2d_at_transpose),
    "torch": (conv2d_at_torch, conv2d_at_transpose_torch),
    "torch.compile": (compiled(conv2d_at_torch), compiled(conv2d_at_transpose_torch)),
}


def places(images: Tensor, weight: Tensor) -> Tensor:
    """Of the largest values of a convolution of images ``(N, C, H, W)``, ``(N, D, M)``."""
    return F.max_pool2d(F.conv2d(images, weight), 2, return_indices=True)[1].flatten(2)


@pytest.mark.parametrize("who", CANDIDATES)
@pytest.mark.parametrize("way", ["", ", transpose"])
@pytest.mark.parametrize("shape", SHAPES)
def test_at_largest_values(time, device, shape, way, who):
    columns, n, c, d, size, kernel = SHAPES[shape]
    x, weight = torch.randn(columns, n, c, size, size, device=device), torch.randn(d, c, kernel, kernel, device=device)
    where = places(x[0], weight)
    values = torch.randn(columns, *where.shape, device=device)
    first, more = (values, ((size, size),)) if way else (x, ())
    call, reference = CANDIDATES[who][bool(way)], CANDIDATES["torch"][bool(way)]
    with torch.no_grad():
        exact = reference(first.double(), weight.double(), where, *more)
        torch.testing.assert_close(call(first, weight, where, *more).double(), exact, rtol=1e-3, atol=1e-3)
        time(
            lambda: call(first, weight, where, *more),
            work=f"convolution at largest values{way}, {shape}",
            who=who,
            flops=2 * values.numel() * c * kernel**2,
            bytes=4 * (x.numel() + values.numel()) + 8 * where.numel(),
        )
