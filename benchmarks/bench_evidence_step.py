"""One gradient of the evidence in log precision: ``kron_logdet`` forward and backward."""

from __future__ import annotations

import pytest
import torch

from ella_cuda import ops

SHAPES = [(10, 1024, 20), (20, 10, 1024), (40, 64, 80), (1, 720, 80), (1, 2560, 640)]


def expression(eigenvalues_in, eigenvalues_out, precision):
    return torch.log(eigenvalues_in[:, :, None] * eigenvalues_out[:, None, :] + precision).sum()


CANDIDATES = {
    "ella_cuda": ops.kron_logdet,
    "outer product": expression,
    "torch.compile of it": torch.compile(expression, dynamic=False),
}


@pytest.mark.parametrize("who", CANDIDATES)
@pytest.mark.parametrize(("g", "a", "b"), SHAPES)
def test_evidence_gradient(time, device, g, a, b, who):
    inputs, outputs = (torch.rand(n, k, dtype=torch.float64, device=device) for n, k in ((g, a), (1, b)))
    log_precision = torch.tensor(0.3, dtype=torch.float64, device=device, requires_grad=True)
    call = CANDIDATES[who]

    def value_and_gradient(function):
        value = function(inputs, outputs, log_precision.exp())
        return value, *torch.autograd.grad(value, log_precision)

    torch.testing.assert_close(value_and_gradient(call), value_and_gradient(expression), rtol=1e-10, atol=0)
    time(
        lambda: value_and_gradient(call),
        work=f"evidence gradient, {g} blocks of {a} x {b}",
        who=who,
        flops=2 * 6 * g * a * b,  # l m + p, its logarithm taken as one, 1 / t and the sums; twice the time in float64
        bytes=8 * (g * a + b),
    )
