"""ella_cuda.ops.kron_logdet against the log determinant of the dense Kronecker product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ella_cuda import ops
from ella_cuda.ops.kron_logdet import _gradient, _hvp
from python_tests.ops import checks

OPERANDS = {
    "kron_logdet": checks.Operands([("G a",), ("G b",), ("",)]),
    "kron_logdet_gradient": checks.Operands([("G a",), ("G b",), ("",)]),
    "kron_logdet_hvp": checks.Operands([("G a",), ("G b",), ("",)] * 2),
}
VECTORISED = ["test_equals_the_dense_log_determinant"]


def eigenvalues(
    shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, ...]:
    g, a, h, b = shape
    return tuple(torch.rand(s, dtype=torch.float64).to(device, dtype) + 0.1 for s in ((g, a), (h, b), ()))


DIFFERENTIABLE = {
    "kron_logdet": checks.Case(
        ops.kron_logdet,
        ops.kron_logdet_torch,
        lambda l, m, delta: torch.log(l[:, :, None] * m[:, None] + delta).sum(),
        eigenvalues,
        small=[(2, 2, 1, 3), (1, 3, 1, 2), (2, 2, 2, 2)],
        laid_out=[(4, 5, 4, 3)],
        empty=[(0, 3, 1, 2), (2, 0, 2, 2)],
        threaded=[(40, 300, 1, 70)],
    )
}


@pytest.mark.parametrize("shape", [(1, 4, 1, 5), (3, 4, 1, 2), (3, 2, 3, 4), (1, 1, 1, 1), (2, 40, 1, 70)])
def test_equals_the_dense_log_determinant(shape, device):
    l, m, delta = eigenvalues(shape, device)
    identity = torch.eye(l.shape[1] * m.shape[1], dtype=torch.float64, device=device)
    blocks = [torch.kron(torch.diag(l[g]), torch.diag(m[g % len(m)])) for g in range(len(l))]
    dense = sum(torch.logdet(block + delta * identity) for block in blocks)
    checks.assert_same(ops.kron_logdet(l, m, delta), dense)
    if len(l) == 1:
        checks.assert_same(ops.kron_logdet(l[0], m[0], float(delta)), dense)


def test_extreme_ranges(device):
    """Products that under- or overflow float64 in any grouping of factors, and zero eigenvalues."""
    l = torch.tensor([[0.0, 1e-200, 1e-30, 1.0, 1e30, 1e150]], dtype=torch.float64, device=device)
    m = torch.tensor([[0.0, 1e-100, 1e-8, 1e8, 1e140]], dtype=torch.float64, device=device)
    for delta in (1e-300, 1e-12, 1.0, 1e12, 1e200):
        exact = torch.log(l[:, :, None] * m[:, None] + delta).sum()
        checks.assert_same(ops.kron_logdet(l, m, delta), exact)


def test_float32_sums_in_double(device):
    l, m, delta = eigenvalues((1, 300, 1, 400), device, torch.float32)
    exact = torch.log(l.double()[:, :, None] * m.double()[:, None] + delta.double()).sum()
    assert abs(float(ops.kron_logdet(l, m, delta)) - float(exact)) <= 1e-6 * abs(float(exact))


@pytest.mark.parametrize("shape", [(1, 3, 1, 2), (2, 2, 1, 3), (2, 2, 2, 2)])
def test_derivatives(shape, device):
    args = tuple(t.requires_grad_() for t in eigenvalues(shape, device))
    checks.check_derivatives(_gradient, args)
    directions = tuple(torch.randn_like(t).requires_grad_() for t in args)
    checks.check_derivatives(_hvp, args + directions)


def test_third_derivatives(device):
    args = eigenvalues((2, 2, 1, 3), device)
    third = torch.func.jacfwd(torch.func.hessian(ops.kron_logdet, (0, 1, 2)), (0, 1, 2))(*args)
    checks.assert_same(third, torch.func.jacfwd(torch.func.hessian(ops.kron_logdet_torch, (0, 1, 2)), (0, 1, 2))(*args))


def test_the_outer_product_is_never_stored():
    """40,000 x 400 products would be 128 MB."""
    l = torch.rand(1, 40_000, dtype=torch.float64, requires_grad=True)
    m = torch.rand(1, 400, dtype=torch.float64, requires_grad=True)
    peak = checks.peak_bytes(lambda: torch.autograd.grad(ops.kron_logdet(l, m, 0.5), (l, m)))
    assert 0.9 * l.nbytes < peak < 16 * l.nbytes


def test_more_scratch_than_there_is():
    one = torch.ones(1, 1, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=f"the system has no {8 * 2**45} bytes of scratch memory left"):
        torch.ops.ella_cuda.kron_logdet(one.expand(1, 2**45), one, one[0, 0])


def test_a_precision_of_several_numbers_is_refused(device):
    l, m, _ = eigenvalues((3, 2, 3, 4), device)
    with pytest.raises(ValueError, match="precision"):
        ops.kron_logdet(l, m, torch.ones(2, dtype=torch.float64, device=device))
