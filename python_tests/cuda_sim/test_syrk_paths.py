"""Both Kronecker accumulations on each code path that ELLA_CUDA_PATH can fix, whatever the launchers would choose."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from . import test_conv_kron_accumulate as conv
from . import test_kron_accumulate as strided
from .checking import arrange, assert_accurate, in_every_order
from .simulator import Simulator

# product, tile, the kernel
TILES = [("scalar", tile, f"syrk_scalar_kernelIfLi{tile}E") for tile in (16, 32, 64)]
TILES += [("mma", tile, f"syrk_tensor_kernelILi{tile}E") for tile in (32, 64, 128)]
TILES += [("wgmma", 128, "syrk_warpgroup_kernel")]


def kernels(simulator: Simulator) -> set[str]:
    """Those launched since the last call."""
    return {launch.kernel for launch in simulator.launches()}


@pytest.mark.parametrize("layout", ["contiguous", "strided", "permuted"])
@pytest.mark.parametrize(("product", "tile", "kernel"), TILES)
def test_each_product_and_tile(simulator, product, tile, kernel, layout):
    """Blocks narrower than a tile, as wide, and of several tiles where the path has them."""
    for N, G, d in [(70, 2, 7), (37, 1, tile)] + [(45, 1, tile + 9), (33, 1, 2 * tile + 94)] * (tile >= 64):
        start, rows = strided.symmetric(G, d, torch.float32), arrange(torch.randn(N, G, d), layout)
        accumulated = partial(strided.accumulated, simulator, start, rows, 0.3)
        kernels(simulator)
        with simulator.path(product=product, tile=tile):
            (got,) = in_every_order(simulator, accumulated, warpgroups=True)
        assert all(kernel in name for name in kernels(simulator))
        assert_accurate(got, strided.exact(start.double(), rows.double(), 0.3), strided.exact(start, rows, 0.3))
        assert torch.equal(got, got.mT)


@pytest.mark.parametrize(("product", "tile", "kernel"), TILES)
def test_each_product_and_tile_of_patches(simulator, product, tile, kernel):
    geometry = ((3, 4, 5, 4), (2, 2), (1, 1), (1, 1), (1, 1))
    start, x = conv.problem(geometry, torch.float32)
    call = (x, *geometry[1:], True, 0.7)
    kernels(simulator)
    with simulator.path(product=product, tile=tile, split=2), simulator.scheduled(warpgroups=True):
        got = conv.accumulated(simulator, start, *call)
    assert any(kernel in name for name in kernels(simulator))
    assert_accurate(got, conv.exact(start.double(), x.double(), *call[1:]), conv.exact(start, x, *call[1:]))
    assert torch.equal(got, got.T)


@pytest.mark.parametrize("product", ["scalar", "mma", "wgmma"])
@pytest.mark.parametrize("split", [1, 2, 5, 1000])
def test_rows_are_cut_into_so_many_shares(simulator, product, split):
    """Of float32 rows a float64 factor takes no more than 1,024 a share, so that the shares tell how many launches there are."""
    start, rows = strided.symmetric(1, 34, torch.float64) + 2.0**40, strided.integers(2500, 1, 34)
    with (
        simulator.scheduled(threads="random", blocks="random", warpgroups=True),
        simulator.path(product=product, split=split),
    ):
        before = simulator.launch_count()
        got = strided.accumulated(simulator, start, rows, 0.5)
    launches = -(-2500 // (1024 * split))
    assert simulator.launch_count() - before == launches * (1 if split == 1 else 2)
    assert torch.equal(got, strided.exact(start, rows.double(), 0.5))


@pytest.mark.parametrize("split", [1, 3])
def test_shares_of_float32_factors(simulator, split):
    start, rows = strided.symmetric(2, 40, torch.float32), torch.randn(300, 2, 40)
    kernels(simulator)
    with simulator.path(split=split):
        (got,) = in_every_order(simulator, lambda: strided.accumulated(simulator, start, rows, 0.3))
    assert any("syrk_finish_kernel" in name for name in kernels(simulator)) == (split > 1)
    assert_accurate(got, strided.exact(start.double(), rows.double(), 0.3), strided.exact(start, rows, 0.3))
