"""Circular convolution with the polyphase choice behind it, forward and backward, at the stages of the paper's network that halve the
image.

Of the gradient at the convolution's output three quarters are zeros; the floor counts a quarter of the products on the way back.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.bench_factored_linear import BATCH, stages
from benchmarks.compiling import compiled
from ella_cuda import ops
from ella_cuda.testing import float32_convolutions


def two(x, weight, bias):
    return ops.polyphase_pool(ops.circular_conv2d(x, weight, bias))


CANDIDATES = {
    "ella_cuda": ops.circular_conv2d_pool,
    "the two ops apart": two,
    "torch, F.pad, conv2d": ops.circular_conv2d_pool_torch,
    "torch.compile of it": compiled(ops.circular_conv2d_pool_torch),
}
SHAPES = {f"alpha 10, stage {i}": (BATCH, C, D, round(X**0.5)) for i, (C, D, X, Y) in enumerate(stages(10), 1) if Y < X}


@pytest.mark.parametrize("who", CANDIDATES)
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_and_backward(time, device, shape, who):
    N, C, D, side = SHAPES[shape]
    arguments = [torch.randn(s, device=device, requires_grad=True) for s in ((N, C, side, side), (D, C, 3, 3), (D,))]
    grad = torch.randn(N, D, side // 2, side // 2, device=device)

    def results(call, arguments, grad):
        y = call(*arguments)
        return (y, *torch.autograd.grad(y, arguments, grad))

    exact = [a.detach().double().requires_grad_() for a in arguments]
    expected = results(ops.circular_conv2d_pool_torch, exact, grad.double())
    with float32_convolutions():
        found = results(CANDIDATES[who], arguments, grad)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=1e-3 * float(theirs.square().mean().sqrt()))
    images, weights = N * (C + D / 4) * side**2, D * C * 9
    time(
        lambda: results(CANDIDATES[who], arguments, grad),
        work=f"strided conv forward + backward, {shape}",
        who=who,
        flops=2 * N * side**2 * weights * (1 + 2 / 4),
        bytes=4 * (2 * images + 3 * weights),
    )
