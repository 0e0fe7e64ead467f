"""One step's evidence and its gradient in the log precisions: of a whole network, and of one tensor by ``kron_logdet``.

The network is the paper's F-FC+CONV, alpha 10, its 52 tensors' eigenvalues from a fit. Ours is the function of the logarithms, by the op of
``marglik_training``, and the public function of the precisions, which checks them. Beside it: the products of every tensor's eigenvalues
written out, differentiated by autograd; products stored once per fit, which leaves their logarithms to a step; and the gradient in closed
form, compiled, so that one pass gives both. The compiled value differentiated by autograd is not among them: with torch 2.13 on the CPU its
gradient is wrong.
"""

from __future__ import annotations

import functools

import pytest
import torch

from benchmarks.compiling import compiled
from ella_cuda import ops
from ella_cuda.laplace import KronLaplace
from ella_cuda.laplace.evidence import evidence_at
from ella_cuda.models import neyshabur

SHAPES = [(10, 1024, 20), (20, 10, 1024), (40, 64, 80), (1, 720, 80), (1, 2560, 640)]


def expression(eigenvalues_in, eigenvalues_out, precision):
    return torch.log(eigenvalues_in[:, :, None] * eigenvalues_out[:, None, :] + precision).sum()


CANDIDATES = {
    "ella_cuda": ops.kron_logdet,
    "outer product": expression,
    "torch.compile of it": compiled(expression),
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


@functools.cache
def fitted(device):
    x, y = torch.randn(20, 3, 32, 32, device=device), torch.arange(20, device=device) % 10
    return KronLaplace(neyshabur("f_fc+conv", 3, 10, 10).to(device)).fit([(x, y)])


def written_out(la):
    """The evidence as a function of the log precisions, and its gradient in closed form beside it, in plain torch."""
    pairs = [f.eigenvalues() for f in la.factors.values()]
    sizes = torch.tensor([f.shape.numel for f in la.factors.values()], dtype=torch.float64, device=pairs[0][0].device)
    norms = torch.stack([la.model.get_parameter(n).detach().double().square().sum() for n in la.factors])
    data_fit = la.log_likelihood.detach()

    def from_log_dets(log_precision, log_det, spectra):
        precision = log_precision.exp()
        log_dets = [log_det(*spectrum, p) for spectrum, p in zip(spectra, precision.unbind(), strict=True)]
        ratio = torch.stack(log_dets).sum() - (sizes * log_precision).sum()
        value = data_fit - 0.5 * (ratio + (precision * norms).sum())
        return value, *torch.autograd.grad(value, log_precision)

    def by_autograd(log_precision):
        return from_log_dets(log_precision, expression, pairs)

    def closed(log_precision):
        precision = log_precision.exp()
        ratios, effective = [], []
        for (l, m), p in zip(pairs, precision.unbind(), strict=True):
            q = l[:, :, None] * m[:, None, :] / p
            ratios.append(torch.log1p(q).sum())
            effective.append((q / (1 + q)).sum())
        penalty = precision * norms
        value = data_fit - 0.5 * (torch.stack(ratios).sum() + penalty.sum())
        return value, 0.5 * (torch.stack(effective) - penalty)

    products = [(l[:, :, None] * m[:, None, :],) for l, m in pairs]

    def stored(log_precision):
        return from_log_dets(log_precision, lambda s, p: torch.log(s + p).sum(), products)

    return by_autograd, closed, stored


NETWORK = [
    "ella_cuda",
    "log_marginal_likelihood",
    "outer products",
    "products stored",
    "torch.compile, closed form",
]


@pytest.mark.parametrize("who", NETWORK)
def test_network(time, device, who):
    la = fitted(device)
    by_autograd, closed, stored = written_out(la)
    log_precision = torch.linspace(-3, 4, len(la.factors), dtype=torch.float64, device=device).requires_grad_()

    upward = torch.ones((), dtype=torch.float64, device=device)

    def ours(log_precision):
        value = evidence_at(la, log_precision)
        return value, *torch.autograd.grad(value, log_precision, upward)

    def public(log_precision):
        value = la.log_marginal_likelihood(log_precision.exp())
        return value, *torch.autograd.grad(value, log_precision)

    one_pass = compiled(closed)

    def in_one_pass(log_precision):
        with torch.no_grad():
            return one_pass(log_precision)

    call = dict(zip(NETWORK, (ours, public, by_autograd, stored, in_one_pass), strict=True))[who]
    torch.testing.assert_close(call(log_precision), by_autograd(log_precision), rtol=1e-9, atol=1e-6)
    elements = sum(f.shape.numel for f in la.factors.values())
    time(
        lambda: call(log_precision),
        work="evidence step of F-FC+CONV, alpha 10",
        who=who,
        # For each product q of eigenvalues over a precision: q itself, the running product of 1 + q and the numerator of the sum of
        # q / (1 + q), a multiplication and an addition each; twice the time in float64.
        flops=2 * 6 * elements,
        bytes=8 * sum(side.numel() for f in la.factors.values() for side in f.eigenvalues()),
        rounds=31,
    )
