"""Circular convolution with a 3x3 kernel, forward, and forward with all three gradients.

At the stages of the paper's network, and of wider layers from one image on, where neither images nor positions alone fill a
processor's vectors.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.bench_factored_linear import BATCH, stages
from benchmarks.compiling import compiled
from ella_cuda import ops
from ella_cuda.ops.circular_conv2d import circular_conv2d_torch

CHANNELS_LAST = "torch, channels last"
CANDIDATES = {
    "ella_cuda": ops.circular_conv2d,
    "torch, F.pad, conv2d": circular_conv2d_torch,
    CHANNELS_LAST: circular_conv2d_torch,  # of images and weights that lie so
    "torch.compile of these": compiled(circular_conv2d_torch),
}
# images, input and output channels, image's side
SHAPES = {f"alpha 10, stage {i}": (BATCH, C, D, round(X**0.5)) for i, (C, D, X, _) in enumerate(stages(10), 1)}
SHAPES |= {
    f"batch {N}, {side}x{side}, {channels} channels": (N, channels, channels, side)
    for channels, side in ((32, 32), (128, 8), (256, 4), (512, 4))
    for N in (1, 2, 8, 32)
}


@pytest.mark.parametrize("who", CANDIDATES)
@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "forward and backward"])
@pytest.mark.parametrize("shape", SHAPES)
def test_circular_conv2d(time, device, shape, gradients, who):
    N, C, D, side = SHAPES[shape]
    sizes = ((N, C, side, side), (D, C, 3, 3), (D,))
    arguments = [torch.randn(s, device=device) for s in sizes]
    if who == CHANNELS_LAST:
        arguments[:2] = (a.to(memory_format=torch.channels_last) for a in arguments[:2])
    for each in arguments:
        each.requires_grad_(gradients)
    grad = torch.randn(N, D, side, side, device=device)
    if who == CHANNELS_LAST:
        grad = grad.to(memory_format=torch.channels_last)

    def results(call, arguments, grad):
        y = call(*arguments)
        return (y, *torch.autograd.grad(y, arguments, grad)) if gradients else (y,)

    exact = [a.detach().double().requires_grad_(gradients) for a in arguments]
    for ours, theirs in zip(
        results(CANDIDATES[who], arguments, grad),
        results(circular_conv2d_torch, exact, grad.double()),
        strict=True,
    ):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=1e-3 * float(theirs.square().mean().sqrt()))
    passes = 3 if gradients else 1
    images, weights = N * (C + D) * side**2, D * C * 9
    time(
        lambda: results(CANDIDATES[who], arguments, grad),
        work=f"conv {'forward + backward' if gradients else 'forward'}, {shape}",
        who=who,
        flops=passes * 2 * N * side**2 * weights,
        # x and y; with the gradients both once more, and the weights twice and their gradient
        bytes=4 * ((2 * images + 3 * weights) if gradients else images + weights),
    )
