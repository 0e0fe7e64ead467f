"""conv_kron_accumulate_ by lags, with circular padding, against torch's circular pad and unfold in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from .checking import DTYPES, LAYOUTS, assert_accurate, in_every_order
from .simulator import Simulator
from .test_conv_kron_accumulate import accumulated, exact, problem

# shape, kernel: one channel and one group of them, several, more tasks than a block has threads; images that fill a unit, that are
# cut into bands, narrower and lower than the lags, of widths that are no multiple of four
PROBLEMS = [
    ((3, 1, 5, 4), (3, 3)), ((2, 7, 6, 9), (3, 3)), ((1, 2, 3, 2), (3, 3)), ((40, 2, 6, 7), (3, 3)),
    ((2, 1, 37, 33), (3, 3)), ((1, 21, 4, 5), (3, 3)), ((2, 4, 7, 10), (5, 5)), ((2, 2, 2, 3), (3, 5)),
    ((3, 3, 4, 6), (1, 3)), ((2, 2, 9, 8), (7, 3)),
]  # fmt: skip


def circular(shape: tuple[int, ...], kernel: tuple[int, int], dtype: torch.dtype, layout: str = "contiguous"):
    """The factor to start from, and the arguments of the op but the last, alpha."""
    start, x = problem((shape, kernel), dtype, layout)
    return start, (x, kernel, (1, 1), (kernel[0] // 2, kernel[1] // 2), (1, 1), True)


def by_lags(simulator: Simulator) -> bool:
    """Of the launches since the last call: whether any was of lags; all are, or none."""
    names = [launch.kernel for launch in simulator.launches()]
    lags = ["lag_" in name for name in names]
    assert len(set(lags)) == 1, names
    return lags[0]


def checked(simulator: Simulator, start: Tensor, call, alpha: float) -> None:
    simulator.launches()
    with simulator.path(lags="yes"):
        (got,) = in_every_order(simulator, lambda: accumulated(simulator, start, *call, alpha))
    assert by_lags(simulator)
    x, *rest = call
    assert_accurate(got, exact(start.double(), x.double(), *rest, alpha), exact(start, x, *rest, alpha))
    assert torch.equal(got, got.T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "kernel"), PROBLEMS)
def test_accumulates(simulator, shape, kernel, dtype):
    start, call = circular(shape, kernel, dtype)
    checked(simulator, start, call, 0.7)


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_layouts(simulator, layout):
    start, call = circular((3, 4, 5, 6), (3, 3), torch.float32, layout)
    checked(simulator, start, call, -1.5)


@pytest.mark.parametrize(("shape", "kernel"), PROBLEMS)
def test_a_float64_factor_loses_nothing_of_short_float32_sums(simulator, shape, kernel):
    start, (_, *rest) = circular(shape, kernel, torch.float64)
    start, x = start + 2.0**40, torch.randint(101, 128, shape).float()
    with simulator.path(lags="yes"):
        got = accumulated(simulator, start, x, *rest, 0.5)
    assert torch.equal(got, exact(start, x.double(), *rest, 0.5))


def test_the_workspace_of_a_float64_factor_is_bounded(simulator):
    """Its 60 sums, of 900 numbers each, come 22 at a time, or as many as there are blocks."""
    start, (_, *rest) = circular((60, 6, 22, 22), (3, 3), torch.float64)
    x = torch.randint(101, 128, (60, 6, 22, 22)).float()
    for multiprocessors, launches in ((4, 3), (20, 2)):
        before = simulator.launch_count()
        with simulator.path(lags="yes"), simulator.scheduled(multiprocessors=multiprocessors):
            got = accumulated(simulator, start, x, *rest, 1.0)
        assert simulator.launch_count() - before == 2 * launches + 1  # of sums, of totals, of the factor
        assert torch.equal(got, exact(start, x.double(), *rest, 1.0))


@pytest.mark.parametrize("split", [1, 3])
def test_shares(simulator, split):
    start, (x, *rest) = circular((30, 2, 6, 20), (3, 3), torch.float32)
    with simulator.path(lags="yes", split=split):
        (got,) = in_every_order(simulator, lambda: accumulated(simulator, start, x, *rest, 0.3))
    assert_accurate(got, exact(start.double(), x.double(), *rest, 0.3), exact(start, x, *rest, 0.3))


@pytest.mark.parametrize("where", [(0, 0), (3, 4), (2, 2)])
def test_what_is_not_finite_shows(simulator, where):
    """In the rows and columns of its channel and nowhere else."""
    start, (x, *rest) = circular((2, 3, 4, 5), (3, 3), torch.float32)
    x[1, 1, where[0], where[1]] = float("nan")
    with simulator.path(lags="yes"):
        got = accumulated(simulator, start, x, *rest, 1.0)
    there = torch.zeros(27, 27, dtype=torch.bool)
    there[9:18], there[:, 9:18] = True, True
    assert got[there].isnan().all() and got[~there].isfinite().all()


def test_the_count_chooses(simulator):
    """Lags for the convolutions of a network, patches where the workspace outweighs the products or a path of products is fixed."""
    many, few = circular((40, 2, 10, 10), (3, 3), torch.float32), circular((1, 6, 1, 1), (3, 3), torch.float32)
    other = (*many[1][:3], (0, 0), *many[1][4:])  # not circular
    for (start, call), path, lags in [
        (many, {}, True),
        (few, {}, False),
        (few, {"lags": "yes"}, True),
        (many, {"lags": "no"}, False),
        (many, {"product": "mma"}, False),
        (many, {"tile": 64}, False),
        ((many[0], other), {}, False),
    ]:
        simulator.launches()
        with simulator.path(**path):
            accumulated(simulator, start, *call, 1.0)
        names = [launch.kernel for launch in simulator.launches()]
        assert any("lag_kernel" in name for name in names) == lags, (path, names)
    with simulator.path(lags="yes"), pytest.raises(RuntimeError, match="lags=yes is for stride 1"):
        accumulated(simulator, many[0], *other, 1.0)
