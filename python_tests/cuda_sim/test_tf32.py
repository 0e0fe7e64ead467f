"""Products of float32 numbers rounded to TF32, where a call allows them: what tensor cores multiply, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from . import test_conv_kron_accumulate as conv
from . import test_factored_linear as factored
from . import test_kron_accumulate as strided
from .checking import arrange, assert_accurate, guarded, in_every_order, rounded_to_tf32, same_bits
from .simulator import Simulator

EPS = torch.finfo(torch.float32).eps
ROUNDING = 2.0**-11  # of a number, relative
PRODUCT = 2 * ROUNDING + ROUNDING**2  # of a product of two
PATHS = [{"product": "mma", "tile": 32}, {"product": "mma", "tile": 64}, {"product": "mma", "tile": 128}]
PATHS += [{"product": "wgmma"}]


def accumulated(
    simulator: Simulator, start: Tensor, rows: Tensor, allowed: bool, op: str = "kron", *rest: Any
) -> Tensor:
    factor, check = guarded(start, fill=7.0)
    call = simulator.ops.kron_accumulate_ if op == "kron" else simulator.ops.conv_kron_accumulate_
    call(factor, rows, *rest, 0.3, allowed)
    check()
    return factor.clone()


@pytest.mark.parametrize("layout", ["contiguous", "strided", "permuted"])
@pytest.mark.parametrize("path", PATHS, ids=str)
def test_rows_are_rounded_to_nearest(simulator, path, layout):
    """The result is that of rounded rows, at float32's accuracy; of the rows as they are, within the bound and beyond float32's."""
    d = min(path.get("tile", 128), 70) + (path.get("tile") != 32)
    start, rows = strided.symmetric(1, d, torch.float32), arrange(torch.randn(90, 1, d), layout)
    rows[::7] = rounded_to_tf32(rows[::7]) * (1 + 2.0**-11)  # some halfway between two numbers, up to their last bits
    with simulator.path(**path):
        (got,) = in_every_order(simulator, partial(accumulated, simulator, start, rows, True), warpgroups=True)
    rounded = rounded_to_tf32(rows)
    assert_accurate(got, strided.exact(start.double(), rounded.double(), 0.3), strided.exact(start, rounded, 0.3))
    assert torch.equal(got, got.mT)
    error = (got.double() - strided.exact(start.double(), rows.double(), 0.3)).abs()
    sums = strided.exact(start.double().abs(), rows.double().abs(), 0.3)
    assert (error <= (PRODUCT + 8 * EPS) * sums).all() and (error > 8 * EPS * sums).any()


@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.parametrize("bits", [0x7F800000, 0x7FFFFFFF, 0x7F800001], ids=["infinity", "largest NaN", "smallest NaN"])
def test_what_is_not_finite_shows(simulator, path, bits):
    """In its row and column of the factor and nowhere else, NaN as NaN, whatever its bits."""
    rows = torch.randn(20, 1, 32)
    rows[3, 0, 5] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    with simulator.path(**path), simulator.scheduled(warpgroups=True):
        got = accumulated(simulator, torch.zeros(1, 32, 32), rows, True)
    there = torch.zeros(1, 32, 32, dtype=torch.bool)
    there[:, 5], there[:, :, 5] = True, True
    assert got[~there].isfinite().all() and not got[there].isfinite().any()
    assert bits == 0x7F800000 or got[there].isnan().all()


def test_patches(simulator):
    """By tensor cores rounded; by lags, which are sums of ordinary products, as ever."""
    geometry = ((3, 12, 5, 4), (3, 3), (1, 1), (1, 1), (1, 1))
    start, x = conv.problem(geometry, torch.float32)
    call = (*geometry[1:], True)
    for warpgroups in (False, True):
        with simulator.path(lags="no"), simulator.scheduled(warpgroups=warpgroups):
            got = accumulated(simulator, start, x, True, "conv", *call)
        rounded = rounded_to_tf32(x)
        exact = conv.exact(start.double(), rounded.double(), *call, 0.3)
        assert_accurate(got, exact, conv.exact(start, rounded, *call, 0.3))
    with simulator.path(lags="yes"):
        results = [accumulated(simulator, start, x, allowed, "conv", *call) for allowed in (False, True)]
    assert same_bits(*results) and not same_bits(results[0], got)


# (N, C, X, D, Y) of test_factored_linear.py: one tile and several, vectors and none.
SHAPES = [(5, 3, 9, 10, 7), (35, 2, 70, 3, 5), (8, 4, 20, 12, 8), (68, 2, 100, 72, 4)]


def bounds(x: Tensor, u: Tensor, v: Tensor, b_in: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """How far y and the gradients of x, weight_in and weight_out may be from the exact ones: each product's numbers are rounded, the
    intermediate, which is off already, among them."""
    x, u, v, b_in, g = (t.double().abs() for t in (x, u, v, b_in, g))
    z, dz = torch.einsum("ncx,dcx->ndc", x, u), torch.einsum("ndy,dcy->ndc", g, v)
    z_off, dz_off = (PRODUCT + 8 * EPS) * z, (PRODUCT + 8 * EPS) * dz
    z, dz = z + b_in[:, None] + z_off, dz + dz_off  # at the most
    z_off, dz_off = z_off + (PRODUCT + 8 * EPS) * z, dz_off + (PRODUCT + 8 * EPS) * dz
    return (
        torch.einsum("ndc,dcy->ndy", z_off, v),
        torch.einsum("ndc,dcx->ncx", dz_off, u),
        torch.einsum("ndc,ncx->dcx", dz_off, x),
        torch.einsum("ndc,ndy->dcy", z_off, g),
    )


def results(simulator: Simulator, arguments: tuple[Tensor, ...], *allowed: bool) -> tuple[Tensor, ...]:
    """y, and the gradients of x, weight_in, weight_out, bias_in, bias_out."""
    x, u, v, b_in, b_out, g = arguments
    y = simulator.ops.factored_linear(x, u, v, b_in, b_out, *allowed)
    return (y, *simulator.ops.factored_linear_backward(g, x, u, v, b_in, *[True] * 5, *allowed))


@pytest.mark.parametrize("layout", ["contiguous", "permuted"])
@pytest.mark.parametrize("shape", SHAPES)
def test_factored_linear(simulator, shape, layout):
    """Within the bound, and beyond what float32's products would give."""
    arguments = tuple(arrange(t, layout) for t in factored.arguments(shape, torch.float32, "contiguous"))
    x, u, v, b_in, b_out, g = arguments
    got = in_every_order(simulator, lambda: results(simulator, arguments, True))
    exact = (factored.forward(*factored.doubles(x, u, v, b_in, b_out)),)
    exact += factored.backward(*factored.doubles(x, u, v, b_in, g))
    for result, wanted, bound in zip(got, exact, bounds(x, u, v, b_in, g), strict=False):
        error = (result.double() - wanted).abs()
        assert (error <= bound + 8 * EPS * wanted.abs()).all()
        assert error.max() > 64 * EPS * wanted.abs().max()
    for result, wanted in zip(got[4:], exact[4:], strict=True):  # of the biases: without tensor cores
        assert_accurate(result, wanted)


def test_not_unless_allowed(simulator):
    """Without a word the results are those of False to the bit, and others than those of True."""
    rows, start = torch.randn(40, 1, 130), torch.zeros(1, 130, 130)
    arguments = factored.arguments((8, 4, 20, 12, 8), torch.float32, "contiguous")

    def sums(*allowed: bool) -> tuple[Tensor, ...]:
        factor = start.clone()
        simulator.ops.kron_accumulate_(factor, rows, 0.3, *allowed)
        return (factor,)

    calls: list[Callable[..., tuple[Tensor, ...]]] = [
        sums,
        lambda *allowed: results(simulator, arguments, *allowed)[:4],
    ]
    for warpgroups in (False, True):
        with simulator.scheduled(warpgroups=warpgroups):
            for call in calls:
                plain, refused, allowed = call(), call(False), call(True)
                assert all(same_bits(*pair) for pair in zip(plain, refused, strict=True))
                assert not any(same_bits(*pair) for pair in zip(plain, allowed, strict=True))
