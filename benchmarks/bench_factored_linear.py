"""F-FC forward and backward, all five gradients, at every stage of the paper's network.

The published formulation copies the activations into dense block-diagonal ones, G times as many numbers for G channels; it is
run where a copy and its gradient fit in ``DENSE_BYTES``.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.compiling import compiled
from benchmarks.dense_formulation import factored_linear_dense
from ella_cuda import ops
from ella_cuda.models import STAGES
from ella_cuda.ops.factored_linear import factored_linear_torch

BATCH = 128
DENSE, DENSE_BYTES = "published, dense", 4 << 30
LINEAR, LINEAR_MOST = "one linear layer", 4  # of its operations to those of the two factors; beyond, it is far behind


def stages(width: int) -> list[tuple[int, int, int, int]]:
    """``(C, D, X, Y)`` of the eight stages on 32x32 images of three channels."""
    out, channels, size = [], 3, 32
    for multiple, shrink in STAGES:
        out.append((channels, multiple * width, size * size, (size // shrink) ** 2))
        channels, size = multiple * width, size // shrink
    return out


def bmm(x, weight_in, weight_out, bias_in, bias_out):
    """As two batched products over channels."""
    z = torch.bmm(x.transpose(0, 1), weight_in.permute(1, 2, 0)) + bias_in  # (C, N, D)
    return torch.bmm(z.permute(2, 1, 0), weight_out).transpose(0, 1) + bias_out


def linear(x, weight_in, weight_out, bias_in, bias_out):
    """As a linear layer, by the weights' product."""
    weight = (weight_out.transpose(1, 2).unsqueeze(3) * weight_in.unsqueeze(1)).flatten(2)  # (D, Y, C X)
    bias = bias_in[:, None] * weight_out.sum(1) + bias_out
    y = torch.nn.functional.linear(x.flatten(1), weight.flatten(0, 1), bias.flatten())
    return y.unflatten(1, bias.shape)


CANDIDATES = {
    "ella_cuda": ops.factored_linear,
    "einsum": factored_linear_torch,
    "bmm": bmm,
    LINEAR: linear,
    "torch.compile of einsum": compiled(factored_linear_torch),
    "torch.compile of bmm": compiled(bmm),
    DENSE: factored_linear_dense,
}
SHAPES = [(f"alpha {width}, stage {i}", *s) for width in (10, 40) for i, s in enumerate(stages(width), 1)]
SHAPES += [("odd", 7, 13, 27 * 31, 5 * 3), ("one channel", 1, 1, 1024, 1024)]


@pytest.mark.parametrize("who", CANDIDATES)
@pytest.mark.parametrize("shape", SHAPES, ids=[s[0] for s in SHAPES])
def test_forward_and_backward(time, device, shape, who):
    name, C, D, X, Y = shape
    dense_bytes = 2 * 4 * BATCH * (C * C * X + D * D * C)
    if who == DENSE and dense_bytes > DENSE_BYTES:
        pytest.skip(f"dense activations and their gradients need {dense_bytes / 1e9:.1f} GB")
    if who == LINEAR and X * Y > LINEAR_MOST * (X + Y):
        pytest.skip(f"the weights' product takes {X * Y / (X + Y):.0f} times the operations")
    sizes = ((BATCH, C, X), (D, C, X), (D, C, Y), (D,), (Y,))
    arguments = [torch.randn(s, device=device, requires_grad=True) for s in sizes]
    grad = torch.randn(BATCH, D, Y, device=device)
    call = CANDIDATES[who]
    exact = [a.detach().double().requires_grad_() for a in arguments]
    expected = factored_linear_torch(*exact)
    output = call(*arguments)
    for ours, theirs in zip(
        (output, *torch.autograd.grad(output, arguments, grad)),
        (expected, *torch.autograd.grad(expected, exact, grad.double())),
        strict=True,
    ):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=1e-3 * float(theirs.square().mean().sqrt()))
    time(
        lambda: torch.autograd.grad(call(*arguments), arguments, grad),
        work=f"F-FC forward + backward, {name}",
        who=who,
        flops=6 * BATCH * D * C * min(X + Y, X * Y),  # z and y; dz and dx; dU and dV; or those of one linear layer
        # x and its gradient, y's gradient and y; the weights twice and their gradients
        bytes=4 * (2 * BATCH * (C * X + D * Y) + 3 * D * C * (X + Y)),
        **({"rounds": 3, "warmups": 0} if who == DENSE else {}),
    )
