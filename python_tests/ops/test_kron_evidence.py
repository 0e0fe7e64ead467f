"""ella_cuda.ops.kron_evidence against dense determinants and, for derivatives, differences and the products written out."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ella_cuda import ops
from ella_cuda.ops.kron_evidence import _bend
from python_tests.ops import checks

SPECTRA = [("E",), ("T 5", torch.int64), ("S", torch.int64)]
OPERANDS = {
    "kron_evidence": checks.Operands([*SPECTRA, ("B",), ("B",), ("",)], contiguous=True),
    "kron_evidence_bend": checks.Operands([*SPECTRA, ("B",)], contiguous=True),
}
REFUSALS = [
    ("kron_evidence_bend", [("4",), ("1 5", torch.int64), ("0", torch.int64), ("0",)], (), "B + 1 entries, got none"),
    ("kron_evidence_bend", [("4",), ("1 5", torch.int64), ("2", torch.int64), ("2",)], (), "(B,) = (1,), got (2,)"),
]

# (G, a, H, b) of each tensor: groups that share mu, groups of their own, a bias, a single number, nothing, more than one tile's columns.
NETWORK = [(3, 4, 1, 2), (3, 2, 3, 4), (1, 1, 1, 5), (1, 1, 1, 1), (2, 0, 1, 3)]


def network(
    device: torch.device, shapes: list[tuple[int, int, int, int]] = NETWORK, dtype: torch.dtype = torch.float64
) -> tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor, Tensor]]:
    """Eigenvalues, and square norms, log precisions and log scale."""

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, dtype=torch.float64).to(device, dtype)

    pairs = [(3 * rand(g, a), 2 * rand(h, b)) for g, a, h, b in shapes]
    return pairs, (5 * rand(len(pairs)), 3 * rand(len(pairs)) - 1, rand() - 0.5)


def dense(pairs: list[tuple[Tensor, Tensor]], norms: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """The value by determinants of matrices."""
    total = (u.exp() * norms).sum()
    for (l, m), precision in zip(pairs, u.exp(), strict=True):
        for g in range(len(l)):
            block = v.exp() * torch.kron(torch.diag(l[g]), torch.diag(m[g % len(m)]))
            identity = precision * torch.eye(len(block), dtype=l.dtype, device=l.device)
            total = total + torch.logdet(block + identity) - torch.logdet(identity)
    return total


def by_products(pairs: list[tuple[Tensor, Tensor]], norms: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Value, slope, effective parameters and their slope in log(s / delta), in float64."""
    norms, u, v = norms.double(), u.double(), v.double()
    q = [r * l.double()[:, :, None] * m.double()[:, None] for (l, m), r in zip(pairs, (v - u).exp(), strict=True)]
    effective, bend = (torch.stack([(x / (1 + x) ** k).sum() for x in q]) for k in (1, 2))
    prior = u.exp() * norms
    return sum(x.log1p().sum() for x in q) + prior.sum(), prior - effective, effective, bend


def test_equals_dense_determinants_and_their_derivatives(device):
    pairs, args = network(device)
    args = tuple(a.requires_grad_() for a in args)
    expected = dense(pairs, *args)
    slope = torch.autograd.grad(expected, args, retain_graph=True)
    found = ops.kron_evidence(ops.pack_spectra(pairs), *args)
    checks.assert_same(found.value, expected)
    checks.assert_same(torch.autograd.grad(found.value, args, retain_graph=True), slope)
    checks.assert_same(found.slope, slope[1])
    checks.assert_same(found.effective, by_products(pairs, *args)[2])
    plain = ops.kron_evidence(ops.pack_spectra(pairs), *args[:2])
    checks.assert_same(plain.value, dense(pairs, *args[:2], torch.zeros_like(args[2])))


def test_tiles_hold_every_product_once(device):
    """More rows, columns and groups than one tile takes."""
    shapes = [(1, 2600, 1, 30), (7, 300, 1, 11), (2, 180, 2, 190), (1, 1, 1, 5000), (1, 3, 1, 1025)]
    pairs, args = network(device, shapes)
    spectra = ops.pack_spectra(pairs)
    assert len(spectra.tiles) > len(shapes) + 5
    sizes = spectra.tiles[:, 2] * spectra.tiles[:, 4]
    assert sizes.max() <= 16384 and spectra.tiles[:, 4].max() <= 1024
    for b, (g, a, _, columns) in enumerate(shapes):
        assert sizes[spectra.starts[b] : spectra.starts[b + 1]].sum() == g * a * columns
    value, slope, effective, bend = by_products(pairs, *args)
    found = ops.kron_evidence(spectra, *args)
    checks.assert_same(found.value, value, rtol=1e-12, atol=0)
    checks.assert_same(found.effective, effective, rtol=1e-12, atol=0)
    checks.assert_same(found.slope, slope, rtol=1e-11, atol=0)
    checks.assert_same(_bend(*spectra[:3], args[2] - args[1]), bend, rtol=1e-12, atol=0)


@pytest.mark.parametrize("log_precision", [-700.0, -300.0, -20.0, 0.0, 20.0, 300.0, 700.0])
def test_extreme_ranges(device, log_precision):
    """Ratios and products beyond float64, alone or of several terms, beside zeros."""
    l = torch.tensor([[0.0, 1e-200, 1e-30, 1.0, 1e30, 1e150]], dtype=torch.float64, device=device)
    m = torch.tensor([[0.0, 1e-100, 1e-8, 1e8, 1e140]], dtype=torch.float64, device=device)
    u, zero = torch.full((1,), log_precision, dtype=torch.float64, device=device), torch.zeros_like(l[0, :1])
    y = (l[0, :, None].log() + m[0].log()).flatten() - u
    spectra = ops.pack_spectra([(l, m)])
    found = ops.kron_evidence(spectra, zero, u)
    checks.assert_same(found.value, torch.logaddexp(y, torch.zeros_like(y)).sum(), rtol=1e-13, atol=1e-14)
    checks.assert_same(found.effective, torch.sigmoid(y).sum()[None], rtol=1e-12, atol=0)
    bend = torch.sigmoid(y) * torch.sigmoid(-y)
    checks.assert_same(_bend(*spectra[:3], -u), bend.sum()[None], rtol=1e-12, atol=1e-250)


def test_small_effective_numbers_do_not_cancel(device):
    pairs, (norms, _, v) = network(device)
    found = ops.kron_evidence(ops.pack_spectra(pairs), norms, torch.full_like(norms, 60.0), v)
    traces = torch.stack([v.exp() * (l[:, :, None] * m[:, None]).sum() for l, m in pairs])
    checks.assert_same(found.effective, traces * torch.tensor(-60.0).double().exp(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), -2.0])
def test_no_number_comes_out_as_one(device, bad):
    l = torch.tensor([[0.5, bad, 0.0]], dtype=torch.float64, device=device)
    zero, one = torch.zeros(2, dtype=torch.float64, device=device), torch.ones_like(l[:, :1])
    found = ops.kron_evidence(ops.pack_spectra([(one, one), (l, one)]), zero, zero)
    assert found.value.isnan()
    assert found.slope.isnan().tolist() == found.effective.isnan().tolist() == [False, True]


def test_float32_sums_in_double(device):
    pairs, args = network(device, [(1, 300, 1, 400)], torch.float32)
    exact = ops.kron_evidence_torch(
        ops.pack_spectra([(l.double(), m.double()) for l, m in pairs]), *(a.double() for a in args)
    )
    for found, expected in zip(ops.kron_evidence(ops.pack_spectra(pairs), *args), exact, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)


def outputs(spectra):
    return lambda *args: tuple(ops.kron_evidence(spectra, *args))


def test_derivatives(device):
    pairs, args = network(device, NETWORK[:2])
    spectra = ops.pack_spectra(pairs)
    args = tuple(a.requires_grad_() for a in args)
    checks.check_derivatives(outputs(spectra), args, second=False)
    checks.check_derivatives(lambda *a: ops.kron_evidence(spectra, *a).value, args)


def test_second_derivatives_of_the_determinants(device):
    pairs, (norms, u, v) = network(device)
    spectra = ops.pack_spectra(pairs)
    found, expected = (
        torch.autograd.functional.hessian(f, (norms, u, v))
        for f in (lambda *a: ops.kron_evidence(spectra, *a).value, lambda *a: dense(pairs, *a))
    )
    checks.assert_same(found, expected)


FURTHER = "differentiable twice in value and once in slope and effective.* use kron_evidence_torch"


@pytest.mark.parametrize(("part", "order"), [("value", 2), ("slope", 1), ("effective", 1)])
def test_a_further_derivative_raises(device, part, order):
    """Where it is taken, in reverse or forward mode or under vmap; the derivatives before come out, with a graph."""
    pairs, (norms, u, v) = network(device)
    spectra = ops.pack_spectra(pairs)

    def differentiated(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda w: torch.func.grad(function)(w).sum()

    def last(op: Callable[..., ops.KronEvidence], u: Tensor) -> Tensor:
        """The sum of the last derivatives there are."""

        def function(w: Tensor) -> Tensor:
            return getattr(op(spectra, norms, w, v), part).sum()

        for _ in range(order):
            function = differentiated(function)
        return function(u)

    def found(u: Tensor) -> Tensor:
        return last(ops.kron_evidence, u)

    expected = last(ops.kron_evidence_torch, u)
    checks.assert_same((found(u), torch.func.vjp(found, u)[0]), (expected, expected))
    leaf, weights = u.clone().requires_grad_(), norms.clone().requires_grad_()
    eager = getattr(ops.kron_evidence(spectra, weights, leaf, v), part).sum()
    for _ in range(order):
        eager = torch.autograd.grad(eager, leaf, create_graph=True)[0].sum()
    checks.assert_same(eager.detach(), expected)
    if part != "effective":  # in square norms the bend is constant
        checks.assert_same(torch.autograd.grad(eager, weights, retain_graph=True)[0], u.exp())
    for further in (
        lambda: torch.autograd.grad(eager, leaf),
        lambda: torch.func.grad(found)(u),
        lambda: torch.func.jvp(found, (u,), (u,)),
        lambda: torch.func.vmap(torch.func.grad(found))(torch.stack([u, u + 1])),
    ):
        with pytest.raises(RuntimeError, match=FURTHER):
            further()


def test_func_transforms(device):
    pairs, args = network(device)
    spectra = ops.pack_spectra(pairs)
    for part in ("value", "slope", "effective"):

        def function(*a: Tensor, part=part) -> Tensor:
            return getattr(ops.kron_evidence(spectra, *a), part)

        def reference(*a: Tensor, part=part) -> Tensor:
            return getattr(ops.kron_evidence_torch(spectra, *a), part)

        if part == "effective":  # in square norms it is constant, which torch.func.jacrev finds unused
            function, reference = (lambda *a, f=f: f(*a) + 0 * a[0] for f in (function, reference))
        checks.check_func_transforms(function, reference, args, second=part == "value")
    third = torch.func.jacfwd(torch.func.hessian(lambda u: ops.kron_evidence(spectra, args[0], u).value))(args[1])
    reference = torch.func.jacfwd(torch.func.hessian(lambda u: ops.kron_evidence_torch(spectra, args[0], u).value))
    checks.assert_same(third, reference(args[1]))


def test_vmap(device):
    pairs, args = network(device)
    spectra = ops.pack_spectra(pairs)
    for part in range(3):
        checks.check_vmap(lambda *a, part=part: ops.kron_evidence(spectra, *a)[part], args)
    checks.check_vmap(lambda u, v: _bend(*spectra[:3], v - u), args[1:])


def test_every_layout(device):
    pairs, (norms, u, v) = network(device)
    spectra = ops.pack_spectra(pairs)
    for _, laid_out in checks.layouts(norms):
        checks.assert_same(ops.kron_evidence(spectra, laid_out, u, v), ops.kron_evidence_torch(spectra, laid_out, u, v))
    for _, laid_out in checks.layouts(u):
        checks.assert_same(
            ops.kron_evidence(spectra, norms, laid_out, v), ops.kron_evidence_torch(spectra, norms, laid_out, v)
        )
        checks.assert_same(_bend(*spectra[:3], laid_out), _bend(*spectra[:3], laid_out.contiguous()))
    for _, laid_out in checks.layouts(spectra.eigenvalues):
        strided = spectra._replace(eigenvalues=laid_out)
        checks.assert_same(ops.kron_evidence(strided, norms, u, v), ops.kron_evidence_torch(strided, norms, u, v))


def test_opcheck_and_compile(device):
    pairs, args = network(device)
    spectra = ops.pack_spectra(pairs)
    args = tuple(a.requires_grad_() for a in args)
    torch.library.opcheck(torch.ops.ella_cuda.kron_evidence.default, (*spectra[:3], *args))
    torch.library.opcheck(torch.ops.ella_cuda.kron_evidence_bend.default, (*spectra[:3], args[1].detach()))
    for part in range(2):
        checks.check_compile(lambda *a, part=part: ops.kron_evidence(spectra, *a)[part], args)


def test_no_product_is_stored():
    """40,000 x 400 products would be 128 MB."""
    spectra = ops.pack_spectra([tuple(torch.rand(1, n, dtype=torch.float64) for n in (40_000, 400))])
    norms, u = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64, requires_grad=True)
    peak = checks.peak_bytes(lambda: torch.autograd.grad(ops.kron_evidence(spectra, norms, u).value, u))
    assert peak < 16 * spectra.eigenvalues.numel() * 8


def test_results_do_not_depend_on_threads():
    pairs, args = network(torch.device("cpu"), [(7, 300, 1, 110), (1, 2600, 1, 30)])
    spectra = ops.pack_spectra(pairs)
    checks.same_for_any_number_of_threads(lambda: ops.kron_evidence(spectra, *args), (1, 3))


def test_errors(device):
    pairs, (norms, u, _) = network(device)
    spectra = ops.pack_spectra(pairs)
    with pytest.raises(ValueError, match="log_scale must have one element"):
        ops.kron_evidence(spectra, norms, u, u)
    with pytest.raises(ValueError, match="at least one tensor"):
        ops.pack_spectra([])
    with pytest.raises(ValueError, match=r"the first of pair 1 must have shape \(groups, eigenvalues\), got \(2,\)"):
        ops.pack_spectra([pairs[0], (torch.ones(2, dtype=u.dtype, device=device), pairs[0][1])])
    with pytest.raises(ValueError, match=r"the second of pair 0 must be torch\.float64"):
        ops.pack_spectra([(pairs[0][0], pairs[0][1].float())])
    with pytest.raises(ValueError, match="requires grad"):
        ops.pack_spectra([(pairs[0][0].clone().requires_grad_(), pairs[0][1])])
    with pytest.raises(ValueError, match=r"the first of pair 0 must be float32 or float64, got torch\.int64"):
        ops.pack_spectra([(pairs[0][0].long(), pairs[0][1].long())])
    with pytest.raises(ValueError, match="must have 1 or 3 groups, as many as the first, got 2"):
        ops.pack_spectra([(pairs[0][0], pairs[1][1][:2])])


def test_eigenvalues_that_are_differentiated_in_are_refused():
    pairs, args = network(torch.device("cpu"))
    spectra = ops.pack_spectra(pairs)
    with pytest.raises(
        ValueError, match=r"the first of pair 0 .* tangent, but kron_evidence has no derivative in eigenvalues"
    ):
        torch.func.jvp(lambda l: ops.pack_spectra([(l, pairs[0][1])]).eigenvalues, (pairs[0][0],), (pairs[0][0],))

    def value(eigenvalues: Tensor) -> Tensor:
        return ops.kron_evidence(spectra._replace(eigenvalues=eigenvalues), *args).value

    for differentiate in (torch.func.grad(value), torch.func.jacfwd(value)):
        with pytest.raises(ValueError, match=r"spectra\.eigenvalues requires grad or carries"):
            differentiate(spectra.eigenvalues)
    with pytest.raises(ValueError, match=r"spectra\.eigenvalues requires grad or carries"):
        value(spectra.eigenvalues.clone().requires_grad_())


@pytest.mark.parametrize("entry", [0, 1, 2, 3, 4])
def test_tiles_outside_the_eigenvalues_are_refused(entry):
    pairs, args = network(torch.device("cpu"))
    spectra = ops.pack_spectra(pairs)
    for wrong in (-1, 1000):
        tiles = spectra.tiles.clone()
        tiles[1, entry] = wrong
        with pytest.raises(RuntimeError, match="tiles and starts do not fit together"):
            ops.kron_evidence(spectra._replace(tiles=tiles), *args)


@pytest.mark.parametrize("starts", [[0, 2, 1, 3], [1, 2, 3, 3], [0, 1, 2, 2], [0, 1, 2, 4]])
def test_starts_that_do_not_count_the_tiles_are_refused(starts):
    pairs, args = network(torch.device("cpu"), [(1, 2, 1, 3)] * 3)
    spectra = ops.pack_spectra(pairs)
    assert spectra.starts.tolist() == [0, 1, 2, 3]
    wrong = spectra._replace(starts=torch.tensor(starts))
    with pytest.raises(RuntimeError, match="tiles and starts do not fit together"):
        ops.kron_evidence(wrong, *args)
    with pytest.raises(RuntimeError, match="tiles and starts do not fit together"):
        _bend(*wrong[:3], args[1])
    tiles = spectra.tiles.clone()
    tiles[0, 2] = 1000
    with pytest.raises(RuntimeError, match="tiles and starts do not fit together"):
        _bend(spectra.eigenvalues, tiles, spectra.starts, args[1])


def test_tiles_of_any_size(device):
    """Larger than any that pack_spectra makes."""
    pairs, args = network(device, [(1, 300, 1, 2100)])
    spectra = ops.pack_spectra(pairs)
    whole = torch.tensor([[0, 0, 300, 300, 2100]], device=device)
    found = ops.kron_evidence(spectra._replace(tiles=whole, starts=torch.tensor([0, 1], device=device)), *args)
    q = (args[2] - args[1]).exp() * torch.outer(pairs[0][0][0], pairs[0][1][0])
    checks.assert_same(found.value, q.log1p().sum() + (args[1].exp() * args[0]).sum(), rtol=1e-12, atol=0)
    checks.assert_same(found.effective, (q / (1 + q)).sum()[None], rtol=1e-12, atol=0)


@pytest.mark.parametrize("q", [-0.5, -1e-3, 1e-12, 0.3, 3e6, 1e30, 1e100, 1e140, 1e170])
def test_equal_products_of_any_size(q, device):
    """The sum of 37 * 41 equal terms; those of 1e-12 are exact to 2e-16 in the value."""

    def full(*shape: int, value: float = 0.0) -> Tensor:
        return torch.full(shape, value, dtype=torch.float64, device=device)

    found = ops.kron_evidence(ops.pack_spectra([(full(1, 37, value=q), full(1, 41, value=1.0))]), full(1), full(1))
    count, close = 37 * 41, 1e-3 if q == 1e-12 else 1e-12
    checks.assert_same(found.value, full(value=count * math.log1p(q)), rtol=close, atol=0)
    checks.assert_same(found.effective, full(1, value=count * q / (1 + q)), rtol=1e-12, atol=0)


def test_forward_over_forward():
    pairs, args = network(torch.device("cpu"))
    spectra = ops.pack_spectra(pairs)
    functions = [lambda *a, f=f: tuple(f(spectra, *a)) for f in (ops.kron_evidence, ops.kron_evidence_torch)]
    checks.check_forward_over_forward(*functions, args)
