"""ella_cuda.ops.kron_variance_ against the dense Jacobian times the inverse of the dense block, in float64."""

from __future__ import annotations

import math
import os

import pytest
import torch
from torch import Tensor

from ella_cuda import ops
from python_tests.ops import checks

SPECTRUM = [("G a", torch.float64), ("G b", torch.float64), ("", torch.float64)]
OPERANDS = {"kron_variance_": checks.Operands([("N K K",), ("K N T G b",), ("N T G a",), *SPECTRUM])}
VECTORISED = ["test_equals_the_dense_product"]

# N, K, T, G, a, b
SHAPES = [
    (4, 3, 1, 1, 5, 7),
    (1, 1, 1, 1, 1, 1),
    (5, 1, 1, 3, 4, 2),
    (3, 10, 1, 40, 1, 6),  # an embedding
    (1, 2, 1, 1, 1100, 300),  # several tiles in rows and columns
    (3, 2, 1, 60, 60, 100),  # several tiles of groups
    (600, 2, 1, 1, 4, 520),  # several of data points
    (4, 3, 6, 1, 5, 7),
    (3, 2, 5, 4, 3, 2),
    (2, 1, 1030, 2, 3, 4),  # more positions than one product sums
    (2, 3, 2, 1, 1400, 70),
    (20, 3, 2, 3, 60, 50),
    (2, 3, 300, 1, 40, 5),  # more positions than are packed at once, few rows
    (2, 9, 3, 2, 33, 2),  # more outputs than rows
    (3, 5, 1, 3, 300, 37),  # more rows than inverses of a panel, groups of no whole vectors
    (1, 700, 2, 1, 9, 40),
    (2, 1100, 1, 1, 3, 2),  # a data point's sums fill the memory for them
]


def tensors(
    shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float64, shared: bool = False
) -> tuple[Tensor, ...]:
    n, k, t, g, a, b = shape
    inputs, outputs = torch.randn(n, t, g, a), torch.randn(k, n, t, g, b)
    spectra = torch.rand(g, a, dtype=torch.float64), torch.rand(1 if shared else g, b, dtype=torch.float64)
    precision = torch.tensor(0.3, dtype=torch.float64)
    return (inputs.to(device, dtype), outputs.to(device, dtype), *(x.to(device) for x in (*spectra, precision)))


def exact(inputs: Tensor | None, outputs: Tensor, l: Tensor, m: Tensor, precision: Tensor, scale: float = 1) -> Tensor:
    """(N, K, K) by the eigenvalues' Kronecker product."""
    l, m, outputs = l.double().cpu(), m.double().cpu().expand(l.shape[0], -1), outputs.double().cpu()
    variance = 0
    for g in range(l.shape[0]):
        if inputs is None:
            jacobian = outputs[:, :, g].movedim(0, 1).flatten(2)
        else:
            left = inputs[:, :, g].double().cpu().mT[:, None]  # n 1 a t
            jacobian = (left @ outputs[:, :, :, g].movedim(0, 1)).flatten(2)
        variance = variance + jacobian / (scale * torch.kron(l[g], m[g]) + precision.cpu()) @ jacobian.mT
    return variance


def diagonal_of(variance: Tensor) -> Tensor:
    return variance.diagonal(dim1=1, dim2=2)


def start(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype, diagonal: bool = False) -> Tensor:
    n, k = shape[:2]
    return torch.randn((n, k) if diagonal else (n, k, k), dtype=dtype, device=like.device)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_dense_product(shape, shared, diagonal, dtype, device):
    args = tensors(shape, device, dtype, shared)
    before = start(shape, args[0], dtype, diagonal)
    ours, reference = before.clone(), before.clone()
    assert ops.kron_variance_(ours, *args, 1.7) is ours
    ops.kron_variance_torch_(reference, *args, 1.7)
    added = exact(*args, scale=1.7)
    wanted = before.double().cpu() + (diagonal_of(added) if diagonal else added)
    checks.error_at_most_twice(ours.cpu(), reference.cpu(), wanted)


@pytest.mark.parametrize("shape", [s for s in SHAPES if s[2] != 1030])
@pytest.mark.parametrize("diagonal", [False, True])
def test_of_a_jacobian(shape, diagonal, device):
    inputs, outputs, *rest = tensors(shape, device)
    jacobian = torch.einsum("ntgi,kntgj->kngij", inputs, outputs)
    before = start(shape, inputs, torch.float64, diagonal)
    added = exact(None, jacobian, *rest)
    ours = ops.kron_variance_(before.clone(), None, jacobian, *rest)
    checks.error_at_most_twice(ours.cpu(), ours, before.cpu() + (diagonal_of(added) if diagonal else added))


@pytest.mark.parametrize("shape", [(4, 3, 1, 2, 5, 7), (4, 3, 6, 2, 5, 7), (3, 2, 1, 40, 1, 6)])
def test_every_layout(shape, device):
    inputs, outputs, l, m, p = tensors(shape, device)
    before = start(shape, inputs, torch.float64)

    def check(*args: Tensor | None) -> None:
        ours = ops.kron_variance_(before.clone(), *args)
        checks.assert_same(ours.cpu(), before.cpu() + exact(*args))

    args = inputs, outputs, l, m
    for position, argument in enumerate(args):
        for _, laid_out in checks.layouts(argument):
            check(*args[:position], laid_out, *args[position + 1 :], p)
    for _, jacobian in checks.layouts(torch.einsum("ntgi,kntgj->kngij", inputs, outputs)):
        check(None, jacobian, l, m, p)


@pytest.mark.parametrize("shape", [(6, 3, 1, 2, 300, 70), (6, 3, 4, 2, 300, 70)])
@pytest.mark.parametrize("total", [torch.float32, torch.float64])
def test_float32_with_a_tiny_precision_and_a_wide_spectrum(shape, total, device):
    """Eigenvalues over 12 decades, whose products times the squared rows add to one another over as many."""
    inputs, outputs, l, m, _ = tensors(shape, device, torch.float32)
    l, m = (torch.logspace(-9, 3, x.shape[1], dtype=torch.float64, device=device).expand_as(x) for x in (l, m))
    precision = torch.tensor(1e-6, dtype=torch.float64, device=device)
    wanted = exact(inputs, outputs, l, m, precision)
    ours = ops.kron_variance_(torch.zeros(6, 3, 3, dtype=total, device=device), inputs, outputs, l, m, precision)
    size = diagonal_of(wanted).sqrt()
    error = (ours.double().cpu() - wanted).abs() / (size[:, :, None] * size[:, None])
    assert error.max() < (5e-7 if shape[2] == 1 else 2e-6)


@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("diagonal", [False, True])
def test_float32_rows_beside_a_float64_variance(positions, diagonal, device):
    shape = (5, 3, positions, 2, 9, 8)
    args = tensors(shape, device, torch.float32)
    before = 1e9 + start(shape, args[0], torch.float64, diagonal)
    added = exact(*args)
    ours = ops.kron_variance_(before.clone(), *args) - before
    wanted = diagonal_of(added) if diagonal else added
    torch.testing.assert_close(ours.cpu(), wanted.double(), rtol=0, atol=float(3e-6 * wanted.abs().max()))


@pytest.mark.parametrize("shape", [(0, 2, 1, 1, 3, 4), (2, 0, 1, 1, 3, 4), (2, 2, 0, 1, 3, 4), (2, 2, 1, 0, 3, 4)])
@pytest.mark.parametrize("diagonal", [False, True])
def test_nothing_is_added_where_there_is_nothing(shape, diagonal, device):
    args = tensors(shape, device)
    before = start(shape, args[0], torch.float64, diagonal)
    assert torch.equal(ops.kron_variance_(before.clone(), *args), before)
    for a, b in ((0, 4), (3, 0)):
        args = tensors((2, 2, 3, 1, a, b), device)
        before = start((2, 2), args[0], torch.float64, diagonal)
        assert torch.equal(ops.kron_variance_(before.clone(), *args), before)


@pytest.mark.parametrize("shape", [SHAPES[4], SHAPES[6], SHAPES[10], SHAPES[11]])
def test_results_do_not_depend_on_threads(shape):
    args = tensors(shape, torch.device("cpu"), torch.float32)
    checks.same_for_any_number_of_threads(lambda: ops.kron_variance_(torch.zeros(*shape[:2], shape[1]), *args), (1, 3))


@pytest.mark.skipif(os.name != "posix", reason="needs mprotect")
@pytest.mark.parametrize("shape", [(2, 3, 1, 2, 5, 7), (2, 3, 4, 2, 5, 7), (2, 3, 4, 1, 33, 70), (3, 5, 1, 1, 21, 37)])
def test_nothing_past_the_end_is_read_or_written(shape):
    inputs, outputs, *rest = tensors(shape, torch.device("cpu"), torch.float32)
    jacobian = torch.einsum("ntgi,kntgj->kngij", inputs, outputs)
    for args in ((inputs, outputs), (None, jacobian)):
        guarded = [a if a is None else checks.before_a_guard_page(a) for a in (*args, *rest)]
        zeros = torch.zeros(shape[0], shape[1], shape[1])
        found = ops.kron_variance_(checks.before_a_guard_page(zeros), *guarded)
        assert torch.equal(found, ops.kron_variance_(zeros, *args, *rest))


@pytest.mark.parametrize("shape", [SHAPES[6], SHAPES[11]])
def test_the_same_from_run_to_run(shape, device):
    args = tensors(shape, device, torch.float32)
    first, second = (ops.kron_variance_(torch.zeros(*shape[:2], shape[1], device=device), *args) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("shape", "diagonal"),
    [((50, 2, 1, 1, 3000, 1000), False), ((20, 10, 16, 1, 1500, 300), False), ((4, 500, 2, 1, 300, 200), True)],
)
def test_memory_is_bounded(shape, diagonal):
    """By a few MiB: less than a hundredth of M and, at one position, of the denominators."""
    n, k, _, g, a, b = shape
    args = tensors(shape, torch.device("cpu"), torch.float32)
    variance = torch.zeros((n, k) if diagonal else (n, k, k))
    peak = checks.peak_bytes(lambda: ops.kron_variance_(variance, *args))
    assert peak < 5 << 20
    assert peak < 4 * n * k * g * a * b / 100


def test_scale_may_be_a_tensor(device):
    args = tensors((4, 3, 1, 2, 5, 7), device)
    scale = torch.tensor(3.0, dtype=torch.float64, device=device)
    one, other = (ops.kron_variance_(torch.zeros(4, 3, 3, device=device).double(), *args, s) for s in (3.0, scale))
    assert torch.equal(one, other)
    checks.assert_same(one.cpu(), exact(*args, scale=3))


@pytest.mark.parametrize("scale", [0, -1.0, math.nan, math.inf])
def test_a_scale_that_is_not_positive_is_refused(scale):
    with pytest.raises(ValueError, match="scale must be a positive, finite number, got"):
        ops.kron_variance_(torch.zeros(4, 3, 3), *tensors((4, 3, 1, 2, 5, 7), torch.device("cpu")), scale)


CHANGES = {  # which tensors, made what; what a wrong shape, dtype or device alone is called, all ops' refusals test
    "outputs must have shape .K, N, G, a, b": {"inputs": lambda t: None, "outputs": lambda t: t[:, 1:]},
    r"outputs must have the dtype of variance \(float32\), got float64": {"variance": Tensor.float},
    r"outputs must have the dtype of variance \(float64\) or be float32, got float16": {
        "inputs": Tensor.half,
        "outputs": Tensor.half,
    },
    "inputs must have the dtype of outputs": {"inputs": Tensor.float},
    "variance must be contiguous": {"variance": lambda t: t.mT},
}
NAMES = ("variance", "inputs", "outputs", "eigenvalues_in", "eigenvalues_out", "precision")


@pytest.mark.parametrize("words", CHANGES)
def test_what_does_not_fit_is_refused(words):
    given = (torch.zeros(4, 3, 3, dtype=torch.float64), *tensors((4, 3, 1, 2, 5, 7), torch.device("cpu")))
    args = [CHANGES[words].get(name, lambda t: t)(t) for name, t in zip(NAMES, given, strict=True)]
    with pytest.raises(RuntimeError, match=words):
        ops.kron_variance_(*args)


@pytest.mark.parametrize("name", ["inputs", "outputs"])
def test_what_shares_memory_with_the_variance_is_refused(name):
    variance, *rest = (torch.zeros(4, 3, 3).double(), *tensors((4, 3, 1, 2, 5, 7), torch.device("cpu")))
    place = NAMES.index(name) - 1
    rest[place] = variance.flatten()[:1].expand(rest[place].shape)
    with pytest.raises(RuntimeError, match=f"{name} must not share memory with variance"):
        ops.kron_variance_(variance, *rest)


@pytest.mark.parametrize("place", range(6))
def test_a_graph_is_refused(place):
    args = [torch.zeros(4, 3, 3).double(), *tensors((4, 3, 1, 2, 5, 7), torch.device("cpu"))]
    args[place].requires_grad_()
    with pytest.raises(ValueError, match=f"{NAMES[place]} requires grad, but kron_variance_ writes in place"):
        ops.kron_variance_(*args)
    if place:  # read only
        with torch.no_grad():
            ops.kron_variance_(*args)


@pytest.mark.parametrize("positions", [1, 3])
def test_under_vmap(positions, device):
    shape = (4, 3, positions, 2, 5, 7)
    inputs, outputs, l, m, p = tensors(shape, device)
    variance = torch.zeros(2, 4, 3, 3, device=device).double()
    torch.vmap(lambda v, o: ops.kron_variance_(v, inputs, o, l, m, p))(variance, torch.stack([outputs, 2 * outputs]))
    wanted = exact(inputs, outputs, l, m, p)
    checks.assert_same(variance.cpu(), torch.stack([wanted, 4 * wanted]))
    torch.vmap(lambda v, o: ops.kron_variance_(v, None, o, l, m, p))(
        variance, torch.zeros(2, 3, 4, 2, 5, 7, device=device).double()
    )
    with pytest.raises(ValueError, match="must have the vmapped axis too"):
        torch.vmap(lambda o: ops.kron_variance_(variance[0], inputs, o, l, m, p))(outputs[None])


def test_compiled_as_a_whole(device):
    args = tensors((4, 3, 2, 2, 5, 7), device)
    compiled = torch.compile(lambda v, *a: ops.kron_variance_(v * 1, *a, 2.0) + 1, fullgraph=True, backend="aot_eager")
    ours = compiled(torch.zeros(4, 3, 3, device=device).double(), *args)
    checks.assert_same(ours.cpu(), 1 + exact(*args, scale=2))


def test_autocast_and_the_version_counter(device):
    args = tensors((4, 3, 2, 2, 5, 7), device, torch.float32)
    variance = torch.zeros(4, 3, 3, device=device)
    version = variance._version
    with torch.autocast(device.type, dtype=torch.bfloat16):
        ops.kron_variance_(variance, *args)
    assert variance._version > version
    torch.testing.assert_close(variance.double().cpu(), exact(*args).double(), rtol=1e-5, atol=1e-4)
