"""Convolutions at chosen positions against products with unfolded patches, and their transposes against autograd of these."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ella_cuda.ops.conv2d_at import conv2d_at, conv2d_at_torch, conv2d_at_transpose, conv2d_at_transpose_torch
from python_tests.ops import checks
from python_tests.ops.test_factored_linear import calls

# K, N, C, D, M; H, W; kernel; stride, padding and dilation.
SHAPES = [
    ((9, 3, 6, 16, 9), (14, 13), (3, 3), 1, 0, 1),
    ((1, 2, 3, 2, 4), (6, 6), (3, 2), (2, 1), (1, 0), 1),  # a row is left over
    ((17, 2, 2, 3, 8), (9, 7), (2, 3), (1, 2), (0, 2), (2, 1)),
    ((4, 5, 1, 1, 1), (4, 4), (1, 1), 1, 0, 1),
    ((16, 1, 20, 5, 11), (6, 6), (5, 5), 1, (2, 3), 1),  # sums in several parts
    ((3, 2, 2, 2, 40), (3, 3), (3, 3), 1, 1, 1),  # more values than positions: some meet
]
EMPTY = [
    ((0, 2, 3, 2, 4), (5, 6), (3, 2), 1, 0, 1),
    ((3, 0, 3, 2, 4), (5, 6), (3, 2), 1, 0, 1),
    ((3, 2, 0, 2, 4), (5, 6), (3, 2), 1, 0, 1),
    ((3, 2, 3, 0, 4), (5, 6), (3, 2), 1, 0, 1),
    ((3, 2, 3, 2, 0), (5, 6), (3, 2), 1, 0, 1),
    ((3, 2, 3, 2, 4), (0, 2), (3, 2), 1, 2, 1),
]
Problem = tuple[Tensor, Tensor, Tensor, Tensor, tuple[int, int], tuple]


def problem(shape: tuple, device: torch.device, dtype: torch.dtype = torch.float64) -> Problem:
    """x, values, weight, places, the images' size and stride, padding and dilation."""
    (k, n, c, d, m), size, kernel, *geometry = shape
    x, values, weight = (
        torch.randn(s, dtype=torch.float64).to(device, dtype) for s in ((k, n, c, *size), (k, n, d, m), (d, c, *kernel))
    )
    sides = zip(size, kernel, *([g] * 2 if isinstance(g, int) else g for g in geometry), strict=True)
    positions = math.prod((n + 2 * p - d * (taps - 1) - 1) // s + 1 for n, taps, s, p, d in sides)
    return x, values, weight, torch.randint(positions, (n, d, m)).to(device), size, tuple(geometry)


def by_patches(x: Tensor, weight: Tensor, places: Tensor, stride, padding, dilation) -> Tensor:
    """Every patch times every filter, in float64, then the places one by one."""
    x, weight = x.double(), weight.double()
    (k, n), (d, m) = x.shape[:2], places.shape[1:]
    out = x.new_zeros(k, n, d, m)
    if not out.numel() or not x.numel():
        return out
    patches = F.unfold(x.flatten(0, 1), weight.shape[2:], dilation, padding, stride)  # (K N, C kh kw, T)
    results = (weight.flatten(1) @ patches).unflatten(0, (k, n))
    rows = [torch.stack([results[:, i, j, places[i, j]] for j in range(d)], 1) for i in range(n)]
    return torch.stack(rows, 1)


def transposed(values: Tensor, weight: Tensor, places: Tensor, size: tuple[int, int], *geometry) -> Tensor:
    k, n = values.shape[:2]
    x = torch.zeros(k, n, weight.shape[1], *size, dtype=torch.float64, device=values.device, requires_grad=True)
    y = by_patches(x, weight, places, *geometry)
    if not y.requires_grad:
        return x.detach()
    return torch.autograd.grad(y, x, values.double())[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_sums(shape, dtype, device):
    x, values, weight, places, size, geometry = problem(shape, device, dtype)
    given = weight, places
    found, reference = conv2d_at(x, *given, *geometry), conv2d_at_torch(x, *given, *geometry)
    exact = by_patches(x, *given, *geometry)
    checks.error_at_most_twice(found, reference, exact)
    torch.testing.assert_close(reference.double(), exact, rtol=1e-4, atol=1e-4)
    found = conv2d_at_transpose(values, *given, size, *geometry)
    reference = conv2d_at_transpose_torch(values, *given, size, *geometry)
    exact = transposed(values, *given, size, *geometry)
    checks.error_at_most_twice(found, reference, exact)
    torch.testing.assert_close(reference.double(), exact, rtol=1e-4, atol=1e-4)
    with torch.no_grad():  # what was seen is the op, not its reference
        assert op_calls(lambda: conv2d_at(x, *given, *geometry), "conv2d_at") == (device.type == "cpu")
        back = op_calls(lambda: conv2d_at_transpose(values, *given, size, *geometry), "conv2d_at_transpose")
        assert back == (device.type == "cpu")


def op_calls(call, name: str) -> int:
    return calls(call, f"ella_cuda::{name}")[f"ella_cuda::{name}"]


@pytest.mark.parametrize("shape", EMPTY)
def test_empty(shape):
    x, values, weight, places, size, geometry = problem(shape, torch.device("cpu"))
    checks.assert_same(conv2d_at(x, weight, places, *geometry), by_patches(x, weight, places, *geometry))
    found = conv2d_at_transpose(values, weight, places, size, *geometry)
    checks.assert_same(found, transposed(values, weight, places, size, *geometry))
    if weight.numel() and min(size):  # which torch takes too
        assert conv2d_at_torch(x, weight, places, *geometry).shape == places.expand(len(x), *places.shape).shape
        assert conv2d_at_transpose_torch(values, weight, places, size, *geometry).shape == x.shape


@pytest.mark.parametrize("shape", SHAPES[:3])
@pytest.mark.parametrize("position", range(3))
def test_every_layout(shape, position, device):
    x, values, weight, places, size, geometry = problem(shape, device)
    for first, call, exact, more in (
        (x, conv2d_at, by_patches, geometry),
        (values, conv2d_at_transpose, transposed, (size, *geometry)),
    ):
        args = [first, weight, places]
        for _, laid_out in checks.layouts(args[position]):
            given = [*args[:position], laid_out, *args[position + 1 :], *more]
            checks.assert_same(call(*given), exact(*given))


@pytest.mark.skipif(os.name != "posix", reason="needs mprotect")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_past_the_end_is_read(shape, dtype):
    x, values, weight, places, size, geometry = problem(shape, torch.device("cpu"), dtype)
    args = [weight, places]
    guarded = [checks.before_a_guard_page(a) for a in args]
    ours = conv2d_at(checks.before_a_guard_page(x), *guarded, *geometry)
    assert torch.equal(ours, conv2d_at(x, *args, *geometry))
    ours = conv2d_at_transpose(checks.before_a_guard_page(values), *guarded, size, *geometry)
    assert torch.equal(ours, conv2d_at_transpose(values, *args, size, *geometry))


def test_same_numbers_for_any_number_of_threads():
    x, values, weight, places, size, geometry = problem(SHAPES[0], torch.device("cpu"), torch.float32)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            back = conv2d_at_transpose(values, weight, places, size, *geometry)
            results.append((conv2d_at(x, weight, places, *geometry), back))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("capability", checks.OTHER_KERNEL_SETS)
def test_every_set_of_instructions(capability, beside_the_tests):
    """The vectors of each set this processor has, of other lengths than those of the running one."""
    code = """
import torch
from python_tests.ops.test_conv2d_at import *
for shape in SHAPES:
    for dtype, bound in ((torch.float32, 1e-5), (torch.float64, 1e-13)):
        x, values, weight, places, size, geometry = problem(shape, torch.device("cpu"), dtype)
        pairs = [
            (conv2d_at(x, weight, places, *geometry), by_patches(x, weight, places, *geometry)),
            (conv2d_at_transpose(values, weight, places, size, *geometry), transposed(values, weight, places, size, *geometry)),
        ]
        for found, exact in pairs:
            assert ((found - exact).abs() <= bound * max(1.0, exact.abs().max())).all(), (shape, dtype)
"""
    environment = os.environ | {"ATEN_CPU_CAPABILITY": capability}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=beside_the_tests, timeout=300)


def test_who_differentiates_gets_what_torch_differentiates(device):
    shape = ((2, 2, 2, 2, 3), (4, 3), (2, 2), 1, (1, 0), 1)
    x, values, weight, places, size, geometry = problem(shape, device)
    for first, call, more in ((x, conv2d_at, geometry), (values, conv2d_at_transpose, (size, *geometry))):
        leaves = first.requires_grad_(), weight.requires_grad_()

        def function(a, w, call=call, more=more):
            return call(a, w, places, *more)

        checks.check_derivatives(function, leaves)
        tangent = torch.func.jvp(
            lambda a, function=function: function(a, weight.detach()), (first.detach(),), (first.detach(),)
        )
        checks.assert_same(*tangent)


@pytest.mark.parametrize("wrong", [-1, 15])
def test_places_are_in_the_plane(wrong):
    x, values, weight, places, size, geometry = problem(SHAPES[1], torch.device("cpu"))
    places[1, 1, 2] = wrong
    with pytest.raises(RuntimeError, match=r"conv2d_at: places must be in 0\.\.14, those of image 1"):
        conv2d_at(x, weight, places, *geometry)
    with pytest.raises(RuntimeError, match=r"conv2d_at_transpose: places must be in 0\.\.14, those of image 1"):
        conv2d_at_transpose(values, weight, places, size, *geometry)


@pytest.mark.parametrize("differentiated", [False, True])
def test_errors_name_the_argument(differentiated):
    x, values, weight, places, size, geometry = problem(SHAPES[1], torch.device("cpu"))
    weight.requires_grad_(differentiated)
    for args, words in (
        ((x[0], weight, places), "x must have shape"),
        ((x, weight[:, :1], places), "weight must have shape"),
        ((x, weight, places[:, :1]), "places must have shape"),
        ((x, weight, places.int()), "places must be int64"),
        ((x, weight, places, 0), "stride must be at least 1"),
        ((x, weight, places, 1, 0, 9), "does not fit"),
    ):
        with pytest.raises(RuntimeError, match=words):
            conv2d_at(*args)
    with pytest.raises(RuntimeError, match="values must have shape"):
        conv2d_at_transpose(values[0], weight, places, size, *geometry)
    with pytest.raises(RuntimeError, match="size must be at least 0"):
        conv2d_at_transpose(values, weight, places, (-1, 3), *geometry)


def test_under_autocast():
    x, values, weight, places, size, geometry = problem(SHAPES[0], torch.device("cpu"), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        for w in (weight, weight.clone().requires_grad_()):
            found = conv2d_at(x, w, places, *geometry), conv2d_at_transpose(values, w, places, size, *geometry)
            assert [t.dtype for t in found] == [torch.float32] * 2
            exact = by_patches(x, weight, places, *geometry), transposed(values, weight, places, size, *geometry)
            checks.assert_same(found, tuple(t.float() for t in exact), rtol=1e-4, atol=1e-4)


def test_opcheck_and_compile():
    x, values, weight, places, size, geometry = problem(SHAPES[1], torch.device("cpu"))
    pairs = [[pair] * 2 if isinstance(pair, int) else list(pair) for pair in geometry]
    torch.library.opcheck(torch.ops.ella_cuda.conv2d_at.default, (x, weight, places, *pairs))
    torch.library.opcheck(torch.ops.ella_cuda.conv2d_at_transpose.default, (values, weight, places, list(size), *pairs))
    compiled = torch.compile(conv2d_at, fullgraph=True, backend="aot_eager")
    checks.assert_same(compiled(x, weight, places, *geometry), by_patches(x, weight, places, *geometry))
    compiled = torch.compile(conv2d_at_transpose, fullgraph=True, backend="aot_eager")
    found = compiled(values, weight, places, size, *geometry)
    checks.assert_same(found, transposed(values, weight, places, size, *geometry))
