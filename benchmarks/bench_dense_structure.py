"""Factors and evidence of F-FC+CONV: input sides in their blocks, or as the dense matrices of the published structure.

Whole networks first. At width 10 the dense matrices have up to 12,800 rows, some minutes each; where one is above
``--dense-limit`` the network is not run with them, and its F-FC weights are, one by one: accumulation over the images and
eigenvalues in float64, both sides of the comparison with the package's solver. Of a weight above the limit a part of its
groups is run, and extrapolated: G groups of k make a matrix of G k rows from N G rows of data, so that accumulation and
decomposition both grow with G cubed, memory with its square. ``benchmarks.compare`` adds the weights up beside the whole of ours,
from which they lack the output sides, the backward passes, the CONV paths and the head; ``-k "alpha and 4"`` is measured alone.

``--dense-limit 12800`` extrapolates nothing.
"""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.counting import count
from benchmarks.dense_formulation import kron_accumulate_dense_, with_dense_factors
from ella_cuda.laplace import KronLaplace, SecondMoment
from ella_cuda.models import neyshabur
from ella_cuda.testing import float32_convolutions

IMAGES, BATCH, CLASSES, WIDTH = 1000, 125, 10, 10
DENSE = "published, dense"


def sizes(width: int) -> dict[str, tuple[int, int]]:
    """F-FC weight -> the number of its input side's blocks and their size."""
    out = {}
    for stage, block in enumerate(neyshabur("f_fc", 3, CLASSES, width).blocks, 1):
        layer = block.f_fc
        out[f"{stage} weight_in"] = (layer.in_channels, prod(layer.in_size))
        out[f"{stage} weight_out"] = (layer.out_channels, layer.in_channels)
    return out


def whole(width: int) -> str:
    return f"factors + evidence of F-FC+CONV, alpha {width}"


@pytest.mark.parametrize("who", ["ella_cuda", DENSE])
@pytest.mark.parametrize("width", [2, 4, WIDTH], ids="alpha {}".format)
def test_network(time, request, device, width, who):
    largest, limit = max(g * k for g, k in sizes(width).values()), request.config.getoption("--dense-limit")
    if who == DENSE and largest > limit:
        pytest.skip(f"a dense matrix of {largest} rows is above --dense-limit {limit}: see the weights one by one")
    model = neyshabur("f_fc+conv", 3, CLASSES, width).to(device)
    x, y = torch.randn(IMAGES, 3, 32, 32, device=device), torch.randint(CLASSES, (IMAGES,), device=device)
    candidate = with_dense_factors(model) if who == DENSE else model
    few = DataLoader(TensorDataset(x[:8], y[:8]), 4)
    with float32_convolutions():
        expected, found = KronLaplace(model).fit(few).factors, KronLaplace(candidate).fit(few).factors
    for name, factor in expected.items():
        matches = torch.block_diag(*factor.inputs) if who == DENSE else factor.inputs[0]
        torch.testing.assert_close(found[name].inputs[0], matches, rtol=1e-3, atol=1e-5)
    del expected, found, factor, matches
    loader, evidence = DataLoader(TensorDataset(x, y), BATCH), []

    def run() -> None:
        evidence.append(KronLaplace(candidate).fit(loader).log_marginal_likelihood())

    operations = IMAGES * count(model, x[:1]).fit(CLASSES - 1)
    time(run, work=whole(width), who=who, flops=operations, bytes=0, rounds=2, warmups=0, once=who == DENSE)
    if who == DENSE:
        exact = KronLaplace(model).fit(loader).log_marginal_likelihood()
        torch.testing.assert_close(evidence[-1], exact, rtol=1e-4, atol=0)


def blocks(rows: torch.Tensor) -> torch.Tensor:
    """Eigenvalues of the input side of ``rows`` ``(N, G, k)``, ``(G, k)``."""
    moment = SecondMoment(*rows.shape[1:], rows, "blocks")
    for batch in rows.split(BATCH):
        moment.add(batch)
    return moment.eigenvalues()


def dense(rows: torch.Tensor) -> torch.Tensor:
    """The same as one dense matrix, ``(1, G*k)``."""
    n, g, k = rows.shape
    moment = SecondMoment(1, g * k, rows, "dense")
    for batch in rows.split(BATCH):
        kron_accumulate_dense_(moment.total[0], batch)
    moment.count(n * g)
    return moment.eigenvalues()


def log_determinant(eigenvalues: torch.Tensor) -> torch.Tensor:
    return torch.log1p(eigenvalues / IMAGES).sum()


@pytest.mark.parametrize("who", ["ella_cuda", DENSE])
@pytest.mark.parametrize("weight", sizes(WIDTH))
def test_input_side(time, request, device, weight, who):
    groups, size = sizes(WIDTH)[weight]
    # Laid out as the package's rule has them: images, or z with the images innermost but one.
    if weight.endswith("in"):
        rows = torch.randn(IMAGES, groups, size, device=device)
    else:
        rows = torch.randn(size, IMAGES, groups, device=device).permute(1, 2, 0)
    few = rows[:40, :3, :48].double()
    total = few.new_zeros((few[0].numel(),) * 2)
    kron_accumulate_dense_(total, few)
    torch.testing.assert_close(total, torch.block_diag(*[x.T @ x for x in few.unbind(1)]))
    torch.testing.assert_close(dense(few).view(-1), blocks(few).flatten().sort().values, rtol=1e-9, atol=1e-9)

    run_groups = min(groups, max(1, request.config.getoption("--dense-limit") // size)) if who == DENSE else groups
    part, found = rows[:, :run_groups], []
    call = dense if who == DENSE else blocks
    scale = groups / run_groups
    note = f"run at {run_groups} of {groups} groups"
    extra = {"extrapolation": {"seconds": scale**3, "bytes": scale**2, "note": note}} if scale > 1 else {}
    time(
        lambda: found.append(log_determinant(call(part))),
        work=f"F-FC+CONV, alpha {WIDTH}, input side of {weight}",
        who=who,
        flops=IMAGES * groups * size * (size + 1),  # the upper triangles; decompositions are not counted
        bytes=4 * (IMAGES * groups * size + 2 * groups * size**2),
        rounds=3,
        warmups=0,
        once=who == DENSE,
        part_of=whole(WIDTH),
        part_name="input sides of F-FC alone",
        parts=len(sizes(WIDTH)),
        kept_bytes=4 * groups * size**2 * (groups if who == DENSE else 1),
        **extra,
    )
    torch.testing.assert_close(found[-1], log_determinant(blocks(part)), rtol=1e-5, atol=0)
