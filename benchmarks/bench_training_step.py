"""One training step of the F-FC+CONV network, batch 128: loss, backward, Adam; on CUDA as it comes and recorded as a graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from benchmarks.counting import count
from ella_cuda import models, ops
from ella_cuda.ops.circular_conv2d import circular_conv2d_torch
from ella_cuda.ops.circular_conv2d_pool import circular_conv2d_pool_torch
from ella_cuda.ops.factored_linear import factored_linear_torch
from ella_cuda.ops.polyphase_pool import polyphase_pool_torch
from ella_cuda.recording import CudaGraphs
from ella_cuda.testing import float32_convolutions

BATCH, WIDTH = 128, 10
REFERENCES = {
    "factored_linear": factored_linear_torch,
    "circular_conv2d": circular_conv2d_torch,
    "circular_conv2d_pool": circular_conv2d_pool_torch,
    "polyphase_pool": polyphase_pool_torch,
}


@pytest.mark.parametrize("graph", [False, True], ids=["as it comes", "CUDA graph"])
@pytest.mark.parametrize("who", ["ella_cuda", "the same on torch ops"])
def test_training_step(time, device, monkeypatch, who, graph):
    if graph and device.type != "cuda":
        pytest.skip("graphs are CUDA's")
    model = models.neyshabur("f_fc+conv", 3, 10, WIDTH).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True, capturable=graph)
    x, y = torch.randn(BATCH, 3, 32, 32, device=device), torch.randint(10, (BATCH,), device=device)
    weights = list(model.parameters())

    def loss_and_gradients():
        loss = F.cross_entropy(model(x), y)
        # A graph that is kept binds the weights' gradients to the stream it was made on, where nothing can be recorded.
        return loss.detach(), *torch.autograd.grad(loss, weights)

    with float32_convolutions():
        expected = loss_and_gradients()
    operations = count(model, x).step
    if who != "ella_cuda":
        for name, reference in REFERENCES.items():
            monkeypatch.setattr(ops, name, reference)
    with float32_convolutions():
        own = loss_and_gradients()
    for found, wanted in zip(own, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2 * float(wanted.square().mean().sqrt()))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    def recorded() -> Callable[[], None]:
        graphs = CudaGraphs(device)
        graphs.warm_up(step)
        replay = graphs.record(step)
        replay()
        return replay

    time(
        recorded() if graph else step,
        work="training step, F-FC+CONV, alpha 10, batch 128",
        who=f"{who}, in a CUDA graph" if graph else who,
        flops=operations,
        bytes=7 * 4 * sum(p.numel() for p in weights),
        memory_of=recorded if graph else None,
    )
