"""Symmetric accumulation ``factor[g] += rows[:, g]^T rows[:, g]``, blocks of 4 to 1024."""

from __future__ import annotations

import pytest
import torch

from ella_cuda import ops

SHAPES = [(2000, 64, 4), (2000, 64, 8), (2000, 64, 16), (4000, 32, 32), (4000, 16, 64), (4000, 8, 128), (4000, 4, 256)]
SHAPES += [(4000, 1, 512), (4000, 1, 1024), (150, 10, 1024), (1001, 3, 37)]


def baddbmm(factor, rows):
    rows = rows.transpose(0, 1)
    torch.baddbmm(factor, rows.mT, rows, out=factor)


def einsum(factor, rows):
    factor += torch.einsum("ngi,ngj->gij", rows, rows)


CANDIDATES = {"ella_cuda": ops.kron_accumulate_, "baddbmm_": baddbmm, "einsum": einsum}


@pytest.mark.parametrize("who", CANDIDATES)
@pytest.mark.parametrize(("n", "g", "d"), SHAPES)
def test_kron_accumulate(time, device, n, g, d, who):
    rows, factor = torch.randn(n, g, d, device=device), torch.zeros(g, d, d, device=device)
    call = CANDIDATES[who]
    call(factor, rows)
    exact = torch.einsum("ngi,ngj->gij", rows.double(), rows.double())
    torch.testing.assert_close(factor.double(), exact, rtol=1e-4, atol=1e-3 * n**0.5)
    time(
        lambda: call(factor, rows),
        work=f"kron_accumulate_, {n} rows, {g} blocks of {d}",
        who=who,
        flops=n * g * d * (d + 1),  # the upper triangle
        bytes=4 * (n * g * d + 2 * g * d * d),
    )
