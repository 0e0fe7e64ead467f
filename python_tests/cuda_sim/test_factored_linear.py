"""factored_linear and its backward against sums over explicit products."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from python_tests.ops.checks import before_a_guard_page

from .checking import DTYPES, LAYOUTS, arrange, assert_accurate, in_every_order, same_bits
from .simulator import Simulator

# (N, C, X, D, Y). Float32 products on tensor cores (of a stored intermediate) have tiles of 64 x 64, slabs of 16 and five of them at
# a time, copies of 4 where sizes allow. Fused tiles are 32 images x 8 channels; slabs hold 64 (c, x) pairs, inner tiles 16
# channels; results come in columns of 1, 2 or 4 x 32. Float64 is torch's, for a few channels at a time. Every shape crosses some
# of these by a little, or stays far below.
SHAPES = [
    (1, 1, 1, 1, 1),
    (5, 3, 9, 10, 7),
    (35, 2, 70, 3, 5),
    (3, 19, 4, 9, 1),
    (17, 33, 3, 2, 33),
    (2, 2, 3, 9, 70),
    (3, 1, 130, 5, 140),
    (8, 4, 20, 12, 8),
    (68, 2, 100, 72, 4),
    (65, 1, 66, 67, 70),
    (8, 16, 1, 12, 1),  # an intermediate that is large, but not for the cache
]
FUSED = [(35, 17, 5, 70, 1), (64, 40, 9, 60, 1), (33, 37, 1, 19, 2)]  # in float32, by the launcher's own choice
EMPTY = [(0, 3, 4, 5, 6), (3, 0, 4, 5, 6), (3, 4, 0, 5, 6), (3, 4, 5, 0, 6), (3, 4, 5, 6, 0)]


def arguments(shape: tuple[int, ...], dtype: torch.dtype, layout: str = "contiguous") -> tuple[Tensor, ...]:
    """x, weight_in, weight_out, bias_in, bias_out, grad."""
    N, C, X, D, Y = shape
    sizes = [(N, C, X), (D, C, X), (D, C, Y), (D,), (Y,), (N, D, Y)]
    return tuple(lay_out(torch.randn(size, dtype=dtype), layout) for size in sizes)


def lay_out(values: Tensor, layout: str) -> Tensor:
    """As `arrange`; "offset" begins 4 or 8 bytes behind a 16-byte boundary, "padded" has rows that are no multiple of 16 bytes."""
    if layout == "offset":
        storage = torch.full((values.numel() + 1,), float("nan"), dtype=values.dtype)
        return storage[1:].view(values.shape).copy_(values)
    if layout == "padded":
        storage = torch.full((*values.shape[:-1], values.shape[-1] + 1), float("nan"), dtype=values.dtype)
        return storage[..., :-1].copy_(values)
    return before_a_guard_page(values) if layout == "guard page" else arrange(values, layout)


def forward(x: Tensor, u: Tensor, v: Tensor, b_in: Tensor | None, b_out: Tensor | None) -> Tensor:
    z = (x[:, None] * u[None]).sum(-1)  # (N, D, C)
    if b_in is not None:
        z = z + b_in[:, None]
    y = (z[..., None] * v[None]).sum(2)
    return y if b_out is None else y + b_out


def backward(x: Tensor, u: Tensor, v: Tensor, b_in: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    z = (x[:, None] * u[None]).sum(-1) + b_in[:, None]
    dz = (g[:, :, None] * v[None]).sum(-1)  # (N, D, C)
    return (
        (dz[..., None] * u[None]).sum(1),
        (dz[..., None] * x[:, None]).sum(0),
        (z[..., None] * g[:, :, None]).sum(0),
        dz.sum((0, 2)),
        g.sum((0, 1)),
    )


def doubles(*tensors: Tensor) -> list[Tensor]:
    return [t.double() for t in tensors]


def check(simulator: Simulator, given: tuple[Tensor, ...], **device: Any) -> None:
    """y and all gradients, in every order."""
    x, u, v, b_in, b_out, g = given

    def call() -> tuple[Tensor, ...]:
        y = simulator.ops.factored_linear(x, u, v, b_in, b_out)
        return y, *simulator.ops.factored_linear_backward(g, x, u, v, b_in, *[True] * 5)

    def by_sums(x: Tensor, u: Tensor, v: Tensor, b_in: Tensor, b_out: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        return forward(x, u, v, b_in, b_out), *backward(x, u, v, b_in, g)

    got = in_every_order(simulator, call, **device)
    for result, exact, torchs in zip(got, by_sums(*doubles(*given)), by_sums(*given), strict=True):
        assert result.is_contiguous()
        assert_accurate(result, exact, torchs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, *FUSED, *EMPTY])
def test_forward_and_backward(simulator, shape, dtype):
    check(simulator, arguments(shape, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biases", [(False, True), (False, False)])
def test_without_biases(simulator, biases, dtype):
    x, u, v, *both, _ = arguments(SHAPES[1], dtype)
    chosen = [bias if there else None for bias, there in zip(both, biases, strict=True)]
    y = simulator.ops.factored_linear(x, u, v, *chosen)
    exact = forward(*doubles(x, u, v), *(None if bias is None else bias.double() for bias in chosen))
    assert_accurate(y, exact, forward(x, u, v, *chosen))


GUARD = pytest.param("guard page", marks=pytest.mark.skipif(os.name != "posix", reason="needs mprotect"))


@pytest.mark.parametrize("layout", [*LAYOUTS[1:], "offset", "padded", GUARD])
@pytest.mark.parametrize("shape", [(5, 3, 9, 10, 7), (8, 4, 20, 12, 8), FUSED[2]])
def test_layouts(simulator, shape, layout):
    check(simulator, arguments(shape, torch.float32, layout))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wanted", range(5))
def test_only_what_is_asked_for(simulator, wanted, dtype):
    x, u, v, b_in, _, g = arguments((5, 3, 9, 10, 7), dtype)
    asked = [i == wanted for i in range(5)]
    got = simulator.ops.factored_linear_backward(g, x, u, v, b_in, *asked)
    assert_accurate(got[wanted], backward(x, u, v, b_in, g)[wanted])
    assert all(result.shape == (0,) for i, result in enumerate(got) if i != wanted)


@pytest.mark.parametrize("multiprocessors", [1, 5, 64])
def test_work_split_over_blocks(simulator, multiprocessors):
    """More multiprocessors: y in more parts, and sums over images in shares that are added up afterwards."""
    check(simulator, arguments((100, 3, 5, 2, 70), torch.float32), multiprocessors=multiprocessors)


@pytest.mark.parametrize("split", [1, 3, 100])
@pytest.mark.parametrize("layout", ["contiguous", "offset"])
@pytest.mark.parametrize("shape", [(35, 3, 70, 18, 40), (36, 20, 36, 3, 84)])
def test_depth_split_over_blocks(simulator, shape, layout, split):
    """Depths of up to 6 slabs, the last of them not whole: a share of several slabs, of one, more asked for than there are slabs."""
    with simulator.path(intermediate="stored", split=split):
        check(simulator, arguments(shape, torch.float32, layout))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 3, 9, 10, 7), (2, 3, 34, 54, 1), (4, 2, 32, 40, 3), FUSED[2]])
def test_a_kept_intermediate(simulator, shape, dtype):
    """It is z, where that is small; from it the gradients are the same to the bit."""
    x, u, v, b_in, b_out, g = arguments(shape, dtype)
    N, C, X, D, Y = shape
    kept = dtype == torch.float32 and C * X + (X >= 32) * D * Y >= D * C
    y, intermediate = simulator.ops.factored_linear_keeping(x, u, v, b_in, b_out)
    assert same_bits(y, simulator.ops.factored_linear(x, u, v, b_in, b_out))
    assert intermediate.shape == ((D, C, N) if kept else (0,))
    again = simulator.ops.factored_linear_backward(g, x, u, v, b_in, *[True] * 5)
    got = simulator.ops.factored_linear_backward_keeping(g, x, u, v, b_in, intermediate, *[True] * 5)
    assert all(same_bits(a, b) for a, b in zip(got, again, strict=True))
    if kept:
        exact = torch.einsum("ncx,dcx->dcn", x.double(), u.double()) + b_in.double()[:, None, None]
        assert_accurate(intermediate, exact, torch.einsum("ncx,dcx->dcn", x, u) + b_in[:, None, None])


def kernels(simulator: Simulator, call: Callable[[], object]) -> set[str]:
    """Which of F-FC's kernels a call launches: of a stored intermediate, of a fused one."""
    simulator.launches()
    call()
    names = {"intermediates_kernel": "stored", "apply_kernel": "fused", "backward_kernel": "fused"}
    return {way for launch in simulator.launches() for name, way in names.items() if name in launch.kernel}


@pytest.mark.parametrize("path", [{}, {"intermediate": "stored"}, {"intermediate": "fused"}], ids=str)
@pytest.mark.parametrize("shape", [SHAPES[1], FUSED[2]])
def test_the_intermediate_is_stored_where_it_is_small(simulator, shape, path):
    """Unless the path says otherwise."""
    given = arguments(shape, torch.float32)
    way = path.get("intermediate", "fused" if shape in FUSED else "stored")
    with simulator.path(**path):
        assert kernels(simulator, lambda: check(simulator, given)) == {way}
