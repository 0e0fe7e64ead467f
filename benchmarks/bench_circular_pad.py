"""Circular padding by a pixel, forward and backward, of the largest and the smallest images that the paper's network convolves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from benchmarks.compiling import compiled
from ella_cuda import ops


def by_torch(x):
    return F.pad(x, (1, 1, 1, 1), mode="circular")


CANDIDATES = {
    "ella_cuda": lambda x: ops.circular_pad2d(x, 1, 1),
    "torch, F.pad": by_torch,
    "torch, by indices": lambda x: ops.circular_pad2d_torch(x, 1, 1),
    "torch.compile of F.pad": compiled(by_torch),
}
SHAPES = {"alpha 10, stage 2": (128, 10, 32, 32), "alpha 10, stage 8": (128, 80, 4, 4)}


@pytest.mark.parametrize("who", CANDIDATES)
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_and_backward(time, device, shape, who):
    x = torch.randn(SHAPES[shape], device=device, requires_grad=True)
    expected = by_torch(x)
    grad = torch.randn_like(expected)
    call = CANDIDATES[who]
    y = call(x)
    assert torch.equal(y, expected)
    (wanted,) = torch.autograd.grad(expected, x, grad)
    torch.testing.assert_close(torch.autograd.grad(y, x, grad)[0], wanted)
    time(
        lambda: torch.autograd.grad(call(x), x, grad),
        work=f"circular padding forward + backward, {shape}",
        who=who,
        flops=grad.numel(),
        bytes=2 * 4 * (x.numel() + grad.numel()),
    )
