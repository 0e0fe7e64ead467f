"""What a fit takes back through an F-FC layer: the gradients at its input and between its two maps, without those of weights."""

from __future__ import annotations

import pytest
import torch

from benchmarks.bench_factored_linear import stages
from ella_cuda.ops import factored_linear_pull_back, factored_linear_pull_back_torch

ROWS = 3 * 125  # three columns of the Hessian's root, a batch of 125 images


def einsum(grad, weight_in, weight_out):
    middle = torch.einsum("ndy,dcy->dcn", grad, weight_out)
    return torch.einsum("dcn,dcx->ncx", middle, weight_in), middle


CANDIDATES = {
    "ella_cuda": factored_linear_pull_back,
    "bmm": factored_linear_pull_back_torch,
    "einsum": einsum,
    "torch.compile of bmm": torch.compile(factored_linear_pull_back_torch, dynamic=False),
}
SHAPES = [(f"alpha {width}, stage {i}", *s) for width in (10, 40) for i, s in enumerate(stages(width), 1)]


@pytest.mark.parametrize("who", CANDIDATES)
@pytest.mark.parametrize("shape", SHAPES, ids=[s[0] for s in SHAPES])
def test_pull_back(time, device, shape, who):
    name, C, D, X, Y = shape
    args = [torch.randn(s, device=device) for s in ((ROWS, D, Y), (D, C, X), (D, C, Y))]
    call = CANDIDATES[who]
    with torch.no_grad():
        for found, exact in zip(call(*args), einsum(*(a.double() for a in args)), strict=True):
            torch.testing.assert_close(
                found.double(), exact, rtol=1e-3, atol=1e-3 * float(exact.square().mean().sqrt())
            )
        time(
            lambda: call(*args),
            work=f"F-FC pulled back, {name}",
            who=who,
            flops=2 * ROWS * D * C * (X + Y),
            bytes=4 * (ROWS * (D * Y + C * X + D * C) + D * C * (X + Y)),
        )
