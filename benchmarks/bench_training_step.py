"""One training step of the F-FC+CONV network, batch 128: loss, backward, Adam."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ella_cuda import models, ops
from ella_cuda.nn import CircularConv2d, FactoredLinear2d
from ella_cuda.ops.circular_conv2d import circular_conv2d_torch
from ella_cuda.ops.factored_linear import factored_linear_torch
from ella_cuda.ops.polyphase_pool import polyphase_pool_torch

BATCH, WIDTH = 128, 10
TWINS = {
    "factored_linear": factored_linear_torch,
    "circular_conv2d": circular_conv2d_torch,
    "polyphase_pool": polyphase_pool_torch,
}


def flops(model: torch.nn.Module, x: torch.Tensor) -> int:
    """Of forward and backward, multiply and add counted apart: three products for each weight, two where the input is the image
    (of F-FC's two weights only the first meets it)."""
    total = 0

    def count(module, args, out):
        nonlocal total
        products = 2 if args[0] is x else 3
        if isinstance(module, CircularConv2d):
            total += 2 * products * out.numel() * module.weight[0].numel()
        elif isinstance(module, FactoredLinear2d):
            d, c = module.weight_in.shape[:2]
            total += (
                2 * len(out) * d * c * (products * module.weight_in[0, 0].numel() + 3 * module.weight_out[0, 0].numel())
            )
        elif isinstance(module, torch.nn.Linear):
            total += 2 * products * len(out) * module.weight.numel()

    kinds = (CircularConv2d, FactoredLinear2d, torch.nn.Linear)
    handles = [m.register_forward_hook(count) for m in model.modules() if isinstance(m, kinds)]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return total


@pytest.mark.parametrize("who", ["ella_cuda", "the same on torch ops"])
def test_training_step(time, device, monkeypatch, who):
    model = models.neyshabur("f_fc+conv", 3, 10, WIDTH).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    x, y = torch.randn(BATCH, 3, 32, 32, device=device), torch.randint(10, (BATCH,), device=device)
    weights = list(model.parameters())

    def loss_and_gradients():
        loss = F.cross_entropy(model(x), y)
        return loss, *torch.autograd.grad(loss, weights)

    expected = loss_and_gradients()
    count = flops(model, x)
    if who != "ella_cuda":
        for name, twin in TWINS.items():
            monkeypatch.setattr(ops, name, twin)
    for found, wanted in zip(loss_and_gradients(), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2 * float(wanted.square().mean().sqrt()))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    parameters = sum(p.numel() for p in weights)
    time(step, work="training step, F-FC+CONV, alpha 10, batch 128", who=who, flops=count, bytes=7 * 4 * parameters)
