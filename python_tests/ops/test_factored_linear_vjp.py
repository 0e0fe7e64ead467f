"""The gradients of a factored map that curvature takes, against sums written out."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from ella_cuda.laplace import KronLaplace
from ella_cuda.nn import FactoredLinear2d
from ella_cuda.ops import factored_linear_vjp, factored_linear_vjp_torch
from python_tests.ops import checks
from python_tests.ops.test_factored_linear import GUARDED, ONE_OUTPUT, SHAPES, calls

OPERANDS = {
    "factored_linear_vjp": checks.Operands([("N D Y",), ("D C X",), ("D C Y",)], (True, True)),
}

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
    exact, reference = written_out(*args), factored_linear_vjp_torch(*args)
    for found, theirs, sums in zip(factored_linear_vjp(*args), reference, exact, strict=True):
        assert found.is_contiguous() or device.type == "cuda"
        checks.error_at_most_twice(found, theirs, sums)
        torch.testing.assert_close(theirs.double(), sums, rtol=1e-4, atol=1e-3)
    alone = factored_linear_vjp(*args, grad_intermediate=False)[0]  # by other ways where Y is 1
    checks.error_at_most_twice(alone, reference[0], exact[0])


@pytest.mark.parametrize("way", [factored_linear_vjp, factored_linear_vjp_torch])
@pytest.mark.parametrize("shape", [(7, 5, 6, 70, 65), (3, 2, 4, 5, 3), (67, 41, 100, 6, 2), *ONE_OUTPUT[:2], *EMPTY])
def test_only_what_is_asked_for_is_computed(shape, way, device):
    args = arguments(shape, device)
    dx, dz = written_out(*args)
    for want_x in (True, False):
        for want_intermediate in (True, False):
            found = way(*args, grad_x=want_x, grad_intermediate=want_intermediate)
            assert [f is not None for f in found] == [want_x, want_intermediate]
            for f, e in zip(found, (dx, dz), strict=True):
                if f is not None:
                    checks.assert_same(f, e)


@pytest.mark.parametrize("shape", [(4, 3, 5, 6, 7), (5, 3, 2, 64, 48), (67, 41, 100, 6, 2), ONE_OUTPUT[0]])
@pytest.mark.parametrize("position", range(3))
def test_every_layout(shape, position, device):
    args = list(arguments(shape, device))
    for _, laid_out in checks.layouts(args[position]):
        call = [*args[:position], laid_out, *args[position + 1 :]]
        checks.assert_same(factored_linear_vjp(*call), written_out(*call))
        checks.assert_same(factored_linear_vjp(*call, grad_intermediate=False)[0], written_out(*call)[0])


@pytest.mark.skipif(os.name != "posix", reason="needs mprotect")
@pytest.mark.parametrize("shape", GUARDED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_past_the_end_is_read(shape, dtype):
    args = arguments(shape, torch.device("cpu"), dtype)
    guarded = [checks.before_a_guard_page(a) for a in args]
    for intermediate in (True, False):
        ours, expected = (factored_linear_vjp(*a, grad_intermediate=intermediate) for a in (guarded, args))
        assert all(o is e is None or torch.equal(o, e) for o, e in zip(ours, expected, strict=True))


@pytest.mark.parametrize(
    "shape", [(64, 8, 16, 40, 24), (150, 41, 6, 5, 33), (67, 110, 8, 32, 224), (35, 110, 160, 33, 8), ONE_OUTPUT[1]]
)
@pytest.mark.parametrize("intermediate", [True, False])
def test_same_numbers_for_any_number_of_threads(shape, intermediate):
    args = arguments(shape, torch.device("cpu"), torch.float32)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append([t for t in factored_linear_vjp(*args, grad_intermediate=intermediate) if t is not None])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("shape", [(2, 2, 3, 3, 2), (2, 2, 3, 40, 20)])  # pairs of positions multiplied out, and not
def test_who_differentiates_gets_what_torch_differentiates(shape, device):
    args = tuple(a.requires_grad_() for a in arguments(shape, device))
    if shape[3] == 3:
        checks.check_derivatives(factored_linear_vjp, args)
    grads = torch.func.grad(lambda *a: sum(t.square().sum() for t in factored_linear_vjp(*a)), (0, 1, 2))(*args)
    exact = torch.autograd.grad(sum(t.square().sum() for t in written_out(*args)), args)
    checks.assert_same(grads, exact)
    with torch.no_grad():
        assert op_calls(lambda: factored_linear_vjp(*args)) == (device.type == "cpu")


def op_calls(call) -> int:
    """How often the op runs during a call."""
    return calls(call, "ella_cuda::factored_linear_vjp")["ella_cuda::factored_linear_vjp"]


@pytest.mark.parametrize("outputs", [2, 5])  # one column of the Hessian's root, and several under vmap
def test_a_fit_calls_the_op(outputs, device):
    layers = FactoredLinear2d(3, 4, 6, 5), torch.nn.ReLU(), FactoredLinear2d(4, 2, 5, 1), torch.nn.Flatten()
    model = torch.nn.Sequential(*layers, torch.nn.Linear(2, outputs)).to(device)
    batch = torch.randn(7, 3, 6, 6, device=device), torch.randint(outputs, (7,), device=device)
    assert op_calls(lambda: KronLaplace(model).fit([batch])) == (2 if device.type == "cpu" else 0)


def test_memory_beside_the_results_has_a_bound():
    """With many inputs: the intermediate would take six times as much as the result."""
    grad, u, v = arguments((60_000, 39, 6, 1, 2), torch.device("cpu"), torch.float32)
    size = 60_000 * 39 * 4
    peak = checks.peak_bytes(lambda: factored_linear_vjp(grad, u, v, grad_intermediate=False))
    assert 0.9 * size < peak < 2 * size + (8 << 20)


def test_opcheck():
    args = arguments((2, 2, 3, 3, 2), torch.device("cpu"))
    for asked in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(torch.ops.ella_cuda.factored_linear_vjp.default, (*args, *asked))


@pytest.mark.parametrize(
    ("position", "bad", "words"),
    [
        (0, lambda t: t[0], "grad must"),
        (0, lambda t: t.long(), "grad must be float32"),
        (1, lambda t: t[:-1], "weight_in must"),
        (1, lambda t: t[:1], "weight_in must"),  # which products would broadcast
        (1, lambda t: t[:, :-1], "weight_out must"),
        (1, lambda t: t[:, :1], "weight_out must"),
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


@pytest.mark.parametrize("position", range(1, 3))
def test_errors_of_the_op_itself(position):
    args = list(arguments((3, 2, 4, 5, 3), torch.device("cpu")))
    args[position] = args[position][:-1]
    with pytest.raises(RuntimeError, match=f"{('grad', 'weight_in', 'weight_out')[position]} must"):
        torch.ops.ella_cuda.factored_linear_vjp(*args, True, True)


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
