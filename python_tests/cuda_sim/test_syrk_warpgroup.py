"""Both Kronecker accumulations by products of warpgroups, as on a device of compute capability 9.0 with a build for 9.0a."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from . import test_conv_kron_accumulate as conv
from . import test_kron_accumulate as strided
from .checking import arrange, assert_accurate, in_every_order
from .simulator import Simulator

pytestmark = pytest.mark.simulator

# (N, G, d): blocks that take tiles of 128, slabs of 32 rows: one slab, some, more than there are stages; one tile,
# three, six
SHAPES = [(1, 1, 128), (33, 2, 100), (70, 1, 240), (200, 1, 120), (150, 1, 250), (40, 1, 350)]
CONVOLUTIONS = [
    ((2, 12, 4, 5), (3, 3), (1, 1), (1, 1), (1, 1)),
    ((3, 28, 5, 5), (2, 2), (2, 1), (1, 0), (1, 2)),
]


@pytest.fixture
def hopper(simulator: Simulator) -> Iterator[Simulator]:
    with simulator.scheduled(warpgroups=True):
        yield simulator


def warpgroup_launches(simulator: Simulator) -> int:
    return sum("syrk_warpgroup_kernel" in launch.kernel for launch in simulator.launches())


@pytest.mark.parametrize("layout", ["contiguous", "strided", "permuted"])
@pytest.mark.parametrize("shape", SHAPES)
def test_accumulates(simulator: Simulator, shape: tuple[int, int, int], layout: str) -> None:
    """Vectors, single elements and neighbouring rows."""
    N, G, d = shape
    start, rows = strided.symmetric(G, d, torch.float32), arrange(torch.randn(N, G, d), layout)
    simulator.launches()
    (got,) = in_every_order(simulator, lambda: strided.accumulated(simulator, start, rows, 0.3), warpgroups=True)
    assert warpgroup_launches(simulator) == 1
    assert_accurate(got, strided.exact(start.double(), rows.double(), 0.3), strided.exact(start, rows, 0.3))
    assert torch.equal(got, got.mT)


@pytest.mark.parametrize("circular", [True, False])
@pytest.mark.parametrize("geometry", CONVOLUTIONS)
def test_accumulates_patches(simulator: Simulator, geometry, circular: bool) -> None:
    start, x = conv.problem(geometry, torch.float32)
    call = (x, *geometry[1:], circular, 0.7)
    simulator.launches()
    with simulator.path(lags="no"):
        (got,) = in_every_order(simulator, lambda: conv.accumulated(simulator, start, *call), warpgroups=True)
    assert warpgroup_launches(simulator) == 1
    assert_accurate(got, conv.exact(start.double(), x.double(), *call[1:]), conv.exact(start, x, *call[1:]))
    assert torch.equal(got, got.T)


def test_narrow_blocks_double_precision_and_other_devices_do_without(simulator: Simulator) -> None:
    for warpgroups, d, dtype in [(True, 64, torch.float32), (True, 128, torch.float64), (False, 128, torch.float32)]:
        simulator.launches()
        with simulator.scheduled(warpgroups=warpgroups):
            strided.accumulated(simulator, torch.zeros(1, d, d, dtype=dtype), torch.ones(3, 1, d, dtype=dtype), 1.0)
        assert warpgroup_launches(simulator) == 0


def test_rows_shared_out_over_blocks(simulator: Simulator) -> None:
    rows = torch.randn(700, 1, 230)
    results = []
    simulator.launches()
    for order in ("forward", "reverse", "random"):
        with simulator.scheduled(threads=order, blocks=order, multiprocessors=16, warpgroups=True):
            results.append(strided.accumulated(simulator, torch.zeros(1, 230, 230), rows, 0.01))
    assert warpgroup_launches(simulator) == 1
    assert all(torch.equal(results[0], other) for other in results[1:])
    exact = strided.exact(torch.zeros(1), rows.double(), 0.01)
    assert_accurate(results[0], exact, strided.exact(torch.zeros(1), rows, 0.01))


@pytest.mark.parametrize("kind", ["signed", "positive", "scaled"])
@pytest.mark.parametrize("count", [1, 33, 2000])
def test_as_accurate_as_float32(hopper: Simulator, count: int, kind: str) -> None:
    """A few roundings for any number of rows: neither a term of the split may be missing nor sums be cut again and again."""
    rows = torch.rand(count, 1, 100) + 0.5 if kind == "positive" else torch.randn(count, 1, 100)
    if kind == "scaled":
        rows = rows * 10 ** torch.empty(100).uniform_(-12, 12)
    error = strided.normalised_error(strided.accumulated(hopper, torch.zeros(1, 100, 100), rows, 1.0), rows)
    assert error <= 5 * torch.finfo(torch.float32).eps


def test_small_integers_are_exact(hopper: Simulator) -> None:
    """Where no product or sum is rounded, every element is right to the bit; each column's values are its own."""
    rows = torch.randint(-9, 10, (290, 1, 240)).float() + torch.arange(240) % 120
    hopper.launches()
    got = strided.accumulated(hopper, torch.zeros(1, 240, 240), rows, 1.0)
    assert warpgroup_launches(hopper) == 1
    assert torch.equal(got, torch.einsum("ngi,ngj->gij", rows.double(), rows.double()).float())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(hopper: Simulator, value: float) -> None:
    """In its row and column of the factor and nowhere else."""
    rows = torch.randn(40, 1, 100)
    rows[35, 0, 70] = value
    got = strided.accumulated(hopper, torch.zeros(1, 100, 100), rows, 1.0)
    there = torch.zeros(1, 100, 100, dtype=torch.bool)
    there[:, 70], there[:, :, 70] = True, True
    assert not got[there].isfinite().any() and got[~there].isfinite().all()
