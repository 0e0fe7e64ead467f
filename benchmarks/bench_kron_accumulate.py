"""Symmetric accumulation ``factor[g] += rows[:, g]^T rows[:, g]``, blocks of 4 to 1024; where there are several blocks also the
published structure, one dense matrix from block-diagonal copies of the rows."""

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
