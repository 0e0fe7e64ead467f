"""What a fit takes back through an F-FC layer: the gradients at its input and, for several output positions, between its two maps."""

from __future__ import annotations

import pytest
import torch

from benchmarks.bench_factored_linear import stages
from benchmarks.compiling import compiled
from ella_cuda.ops import factored_linear_vjp, factored_linear_vjp_torch

ROWS = 3 * 125  # three columns of the Hessian's root, a batch of 125 images


def einsum(grad, weight_in, weight_out, grad_intermediate):
    intermediate = torch.einsum("ndy,dcy->dcn", grad, weight_out)
    return torch.einsum("dcn,dcx->ncx", intermediate, weight_in), intermediate if grad_intermediate else None


CANDIDATES = {
    "ella_cuda": factored_linear_vjp,
    "bmm": factored_linear_vjp_torch,
    "einsum": einsum,
    "torch.compile of bmm": compiled(factored_linear_vjp_torch),
}
SHAPES = [(f"alpha {width}, stage {i}", *s) for width in (10, 40) for i, s in enumerate(stages(width), 1)]


@pytest.mark.parametrize("who", CANDIDATES)
@pytest.mark.parametrize("shape", SHAPES, ids=[s[0] for s in SHAPES])
def test_vjp(time, device, shape, who):
    name, C, D, X, Y = shape
    args = [torch.randn(s, device=device) for s in ((ROWS, D, Y), (D, C, X), (D, C, Y))]
    call, intermediate = CANDIDATES[who], Y > 1
    with torch.no_grad():
        found, exact = (
            call(*args, grad_intermediate=intermediate),
            einsum(*(a.double() for a in args), grad_intermediate=intermediate),
        )
        for ours, sums in zip(found[: 1 + intermediate], exact[: 1 + intermediate], strict=True):
            torch.testing.assert_close(ours.double(), sums, rtol=1e-3, atol=1e-3 * float(sums.square().mean().sqrt()))
        del found, exact, ours, sums
        time(
            lambda: call(*args, grad_intermediate=intermediate),
            work=f"vector-Jacobian product of F-FC, {name}",
            who=who,
            flops=2 * ROWS * D * C * min(X + Y, X * Y),
            bytes=4 * (ROWS * (D * Y + C * X + intermediate * D * C) + D * C * (X + Y)),
        )
