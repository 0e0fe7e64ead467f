"""The gradients of a factored map that curvature takes, against sums written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ella_cuda.ops import factored_linear_vjp
from python_tests.ops import checks
from python_tests.ops.test_factored_linear import ONE_OUTPUT, SHAPES

EMPTY = [(0, 2, 3, 4, 5), (2, 0, 3, 4, 5), (2, 2, 0, 4, 5), (2, 2, 3, 0, 5), (2, 2, 3, 4, 0)]


def arguments(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """grad, weight_in and weight_out for sizes N, C, D, X, Y."""
    n, c, d, x, y = shape
    return tuple(torch.randn(s, dtype=torch.float64).to(device, dtype) for s in ((n, d, y), (d, c, x), (d, c, y)))


def written_out(grad: Tensor, weight_in: Tensor, weight_out: Tensor) -> tuple[Tensor, Tensor]:
    grad, weight_in, weight_out = grad.double(), weight_in.double(), weight_out.double()
    intermediate = torch.einsum("ndy,dcy->ndc", grad, weight_out)
    return torch.einsum("ndc,dcx->ncx", intermediate, weight_in), intermediate.permute(1, 2, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_sums(shape, dtype, device):
    args = arguments(shape, device, dtype)
    for found, sums in zip(factored_linear_vjp(*args), written_out(*args), strict=True):
        checks.close_in_another_order(found, sums)


@pytest.mark.parametrize("shape", [(7, 5, 6, 70, 65), (3, 2, 4, 5, 3), (67, 41, 100, 6, 2), *ONE_OUTPUT[:2], *EMPTY])
def test_only_what_is_asked_for_is_computed(shape, device):
    args = arguments(shape, device)
    dx, dz = written_out(*args)
    for want_x in (True, False):
        for want_intermediate in (True, False):
            found = factored_linear_vjp(*args, grad_x=want_x, grad_intermediate=want_intermediate)
            assert [f is not None for f in found] == [want_x, want_intermediate]
            for f, e in zip(found, (dx, dz), strict=True):
                if f is not None:
                    checks.assert_same(f, e)


@pytest.mark.parametrize("shape", [(2, 2, 3, 3, 2), (2, 2, 3, 40, 20)])  # pairs of positions multiplied out, and not
def test_who_differentiates_gets_what_torch_differentiates(shape, device):
    args = tuple(a.requires_grad_() for a in arguments(shape, device))
    if shape[3] == 3:
        checks.check_derivatives(factored_linear_vjp, args)
    grads = torch.func.grad(lambda *a: sum(t.square().sum() for t in factored_linear_vjp(*a)), (0, 1, 2))(*args)
    exact = torch.autograd.grad(sum(t.square().sum() for t in written_out(*args)), args)
    checks.assert_same(grads, exact)


def test_memory_beside_the_results_has_a_bound():
    """With many inputs: the intermediate would take six times as much as the result."""
    grad, u, v = arguments((60_000, 39, 6, 1, 2), torch.device("cpu"), torch.float32)
    size = 60_000 * 39 * 4
    peak = checks.peak_bytes(lambda: factored_linear_vjp(grad, u, v, grad_intermediate=False))
    assert 0.9 * size < peak < 2 * size + (8 << 20)


@pytest.mark.parametrize(
    ("position", "bad", "words"),
    [
        (0, lambda t: t[0], "grad must"),
        (0, lambda t: t.long(), "grad must be float32"),
        (1, lambda t: t[:-1], "weight_in must"),
        (1, lambda t: t[:1], "weight_in must"),  # which products would broadcast
        (1, lambda t: t[:, :-1], "weight_in must"),
        (1, lambda t: t[:, :1], "weight_in must"),
        (1, lambda t: t.float(), "weight_in must"),
        (2, lambda t: t[:-1], "weight_out must"),
        (2, lambda t: t[:, :, :-1], "weight_out must"),
    ],
)
@pytest.mark.parametrize("differentiated", [False, True])
def test_errors_name_the_argument(position, bad, words, differentiated, device):
    args = list(arguments((3, 2, 4, 5, 3), device))
    args[position] = bad(args[position])
    args[2].requires_grad_(differentiated)
    with pytest.raises(RuntimeError, match=words):
        factored_linear_vjp(*args, grad_intermediate=False)


def test_under_autocast(device):
    args = arguments((3, 2, 4, 5, 3), device, torch.float32)
    with torch.autocast(device.type, torch.bfloat16):
        for leaf in (args[0], args[0].clone().requires_grad_()):
            found = factored_linear_vjp(leaf, *args[1:])
            assert [t.dtype for t in found] == [torch.float32, torch.float32]
            checks.assert_same(found, tuple(t.float() for t in written_out(*args)), rtol=1e-4, atol=1e-4)


def test_compile(device):
    args = arguments((3, 2, 4, 5, 3), device)
    compiled = torch.compile(factored_linear_vjp, fullgraph=True, backend="aot_eager")
    checks.assert_same(compiled(*args), written_out(*args))
