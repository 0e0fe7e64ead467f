"""Symmetric accumulation ``factor[g] += rows[:, g]^T rows[:, g]``, blocks of 4 to 1024; where there are several blocks also the
published structure, one dense matrix from block-diagonal copies of the rows. Then float32 rows that join a float32 factor and a
float64 one, by the kernels and by a product of torch's that is added to it. At last bfloat16 rows that join a float32 factor."""

from __future__ import annotations

import pytest
import torch

from benchmarks.dense_formulation import kron_accumulate_dense_
from ella_cuda import ops

SHAPES = [(2000, 64, 4), (2000, 64, 8), (2000, 64, 16), (4000, 32, 32), (4000, 16, 64), (4000, 8, 128), (4000, 4, 256)]
SHAPES += [(4000, 1, 512), (4000, 1, 1024), (150, 10, 1024), (1001, 3, 37)]


def baddbmm(factor, rows):
    rows = rows.transpose(0, 1)
    torch.baddbmm(factor, rows.mT, rows, out=factor)


def einsum(factor, rows):
    factor += torch.einsum("ngi,ngj->gij", rows, rows)


DENSE = "published, dense"
CANDIDATES = {"ella_cuda": ops.kron_accumulate_, "baddbmm_": baddbmm, "einsum": einsum, DENSE: kron_accumulate_dense_}


@pytest.mark.parametrize(
    ("n", "g", "d", "who"), [(*s, w) for s in SHAPES for w in CANDIDATES if w != DENSE or s[1] > 1]
)
def test_kron_accumulate(time, device, n, g, d, who):
    rows = torch.randn(n, g, d, device=device)
    factor = torch.zeros((g * d, g * d) if who == DENSE else (g, d, d), device=device)
    call = CANDIDATES[who]
    call(factor, rows)
    exact = torch.einsum("ngi,ngj->gij", rows.double(), rows.double())
    matches = torch.block_diag(*exact.float()) if who == DENSE else exact.float()
    torch.testing.assert_close(factor, matches, rtol=1e-4, atol=1e-3 * n**0.5)
    del exact, matches
    time(
        lambda: call(factor, rows),
        work=f"kron_accumulate_, {n} rows, {g} blocks of {d}",
        who=who,
        flops=n * g * d * (d + 1),  # the upper triangle
        bytes=4 * (n * g * d + 2 * g * d * d),
        **({"rounds": 3, "warmups": 0} if who == DENSE else {}),
    )


SIZES = [(n, d) for d in (27, 64, 256, 785, 1152) for n in (128, 1000)]


def product_and_add(factor, rows):
    rows = rows.transpose(0, 1)
    factor += torch.bmm(rows.mT, rows)


TOTALS = {
    "ella_cuda, float32": (ops.kron_accumulate_, torch.float32),
    "ella_cuda, float64": (ops.kron_accumulate_, torch.float64),
    "baddbmm_, float32": (baddbmm, torch.float32),
    "bmm, then add_ to float64": (product_and_add, torch.float64),
}


@pytest.mark.parametrize(("n", "d", "who"), [(*s, w) for s in SIZES for w in TOTALS])
def test_factors_of_both_types(time, device, n, d, who):
    call, dtype = TOTALS[who]
    rows = torch.randn(n, 1, d, device=device)
    factor = torch.zeros(1, d, d, dtype=dtype, device=device)
    call(factor, rows)
    exact = torch.einsum("ngi,ngj->gij", rows.double(), rows.double())
    torch.testing.assert_close(factor.double(), exact, rtol=1e-4, atol=1e-3 * n**0.5)
    time(
        lambda: call(factor, rows),
        work=f"kron_accumulate_ of float32 rows, {n} rows, one block of {d}",
        who=who,
        flops=n * d * (d + 1),  # the upper triangle
        bytes=4 * n * d + 2 * dtype.itemsize * d * d,
    )


def copy_and_baddbmm(factor, rows):
    baddbmm(factor, rows.float())


def copy_and_ours(factor, rows):
    ops.kron_accumulate_(factor, rows.float())


def baddbmm_into_float32(factor, rows):
    """Torch's product of 16-bit matrices that is summed and added in float32; on CUDA only."""
    rows = rows.transpose(0, 1)
    torch.baddbmm(factor, rows.mT, rows, out_dtype=torch.float32, out=factor)


OF_16_BITS = {
    "ella_cuda": ops.kron_accumulate_,
    "float32 copy, then ella_cuda": copy_and_ours,
    "float32 copy, then baddbmm_": copy_and_baddbmm,
    "baddbmm into float32": baddbmm_into_float32,
}


@pytest.mark.parametrize(("n", "g", "d", "who"), [(*s, w) for s in SHAPES for w in OF_16_BITS])
def test_bfloat16_rows(time, device, n, g, d, who):
    if device.type == "cpu" and who == "baddbmm into float32":
        pytest.skip("torch has no such product on the CPU")
    call, rows = OF_16_BITS[who], torch.randn(n, g, d, device=device).bfloat16()
    factor = torch.zeros(g, d, d, device=device)
    call(factor, rows)
    exact = torch.einsum("ngi,ngj->gij", rows.double(), rows.double())
    torch.testing.assert_close(factor.double(), exact, rtol=1e-4, atol=1e-3 * n**0.5)
    time(
        lambda: call(factor, rows),
        work=f"kron_accumulate_ of bfloat16 rows, {n} rows, {g} blocks of {d}",
        who=who,
        flops=n * g * d * (d + 1),  # the upper triangle
        bytes=2 * n * g * d + 8 * g * d * d,
    )
