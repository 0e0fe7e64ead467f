"""Eigenvalues of all factors of the paper's network, F-FC+CONV, alpha 10, which every fit needs once: 76 sets of 1 to 160 blocks of 1
to 1,024 rows, 18 sizes. On the CPU all candidates are LAPACK's: numpy's is another build of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ella_cuda.laplace import KronLaplace, SecondMoment
from ella_cuda.models import neyshabur


def together(moments):
    for moment in moments:
        moment.count(0)  # as if something had been added
    SecondMoment.decompose_all(moments)
    return [moment.eigenvalues() for moment in moments]


def one_set_after_the_other(moments):
    return [torch.linalg.eigvalsh(moment.total.double()) for moment in moments]


def by_numpy(moments):
    return [torch.from_numpy(np.linalg.eigvalsh(moment.total.double().numpy())) for moment in moments]


CANDIDATES = {
    "ella_cuda": together,
    "torch.linalg.eigvalsh of each set": one_set_after_the_other,
    "numpy.linalg.eigvalsh of each set": by_numpy,
}


@pytest.mark.parametrize("who", CANDIDATES)
def test_eigenvalues_of_a_network(time, device, who):
    if device.type == "cuda" and who.startswith("numpy"):
        pytest.skip("numpy computes on the CPU")
    x, y = torch.randn(200, 3, 32, 32, device=device), torch.arange(200, device=device) % 10
    la = KronLaplace(neyshabur("f_fc+conv", 3, 10, 10).to(device), fisher="mc").fit([(x, y)])
    sides = (m for f in la.factors.values() for m in (f.input_moment, f.output_moment) if m is not None)
    moments = list(dict.fromkeys(sides))
    for found, expected in zip(CANDIDATES[who](moments), one_set_after_the_other(moments), strict=True):
        torch.testing.assert_close(
            found.clamp(min=0), expected.clamp(min=0), rtol=1e-6, atol=1e-12 * float(expected.max())
        )
    shapes = [moment.total.shape for moment in moments]
    time(
        lambda: CANDIDATES[who](moments),
        work="eigenvalues of F-FC+CONV's factors, alpha 10",
        who=who,
        flops=2 * sum(g * 4 / 3 * d**3 for g, d, _ in shapes),  # to tridiagonal form; twice the time in float64
        bytes=8 * sum(g * d**2 for g, d, _ in shapes),
        rounds=3,
        warmups=1,
    )
