"""factored_linear and its backward against sums over explicit products."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from python_tests.ops.checks import before_a_guard_page

from .checking import DTYPES, LAYOUTS, arrange, assert_accurate, in_every_order, same_bits
from .simulator import FEW_AT_A_TIME, Simulator

pytestmark = pytest.mark.simulator

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
# In float32.
FUSED = [(35, 17, 5, 70, 1), (64, 40, 9, 60, 1), (33, 37, 1, 19, 2)]
MANY = (4100, 1, 70, 2, 3)
EMPTY = [(0, 3, 4, 5, 6), (3, 0, 4, 5, 6), (3, 4, 0, 5, 6), (3, 4, 5, 0, 6), (3, 4, 5, 6, 0)]


def arguments(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> tuple[Tensor, ...]:
    """x, weight_in, weight_out, bias_in, bias_out, grad."""
    N, C, X, D, Y = shape
    sizes = [(N, C, X), (D, C, X), (D, C, Y), (D,), (Y,), (N, D, Y)]
    return tuple(arrange(torch.randn(size, dtype=dtype), layout) for size in sizes)


def forward(x: Tensor, u: Tensor, v: Tensor, b_in: Tensor | None, b_out: Tensor | None) -> Tensor:
    z = (x[:, None] * u[None]).sum(-1)  # (N, D, C)
    if b_in is not None:
        z = z + b_in[:, None]
    y = (z[..., None] * v[None]).sum(2)
    return y if b_out is None else y + b_out


def backward(x: Tensor, u: Tensor, v: Tensor, b_in: Tensor | None, g: Tensor) -> tuple[Tensor, ...]:
    z = (x[:, None] * u[None]).sum(-1)
    if b_in is not None:
        z = z + b_in[:, None]
    dz = (g[:, :, None] * v[None]).sum(-1)  # (N, D, C)
    return (
        (dz[..., None] * u[None]).sum(1),
        (dz[..., None] * x[:, None]).sum(0),
        (z[..., None] * g[:, :, None]).sum(0),
        dz.sum((0, 2)),
        g.sum((0, 1)),
    )


def doubles(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.double() for t in tensors]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, *FUSED])
def test_forward(simulator: Simulator, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, u, v, b_in, b_out, _ = arguments(shape, dtype, "contiguous")
    for biases in ((b_in, b_out), (None, b_out), (None, None)):
        (y,) = in_every_order(simulator, lambda biases=biases: simulator.ops.factored_linear(x, u, v, *biases))
        assert y.is_contiguous()
        assert_accurate(y, forward(*doubles(x, u, v, *biases)), forward(x, u, v, *biases))


@pytest.mark.parametrize(("shape", "dtype"), [*itertools.product([*SHAPES, *FUSED], DTYPES), (MANY, torch.float32)])
def test_backward(simulator: Simulator, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, u, v, b_in, _, g = arguments(shape, dtype, "contiguous")
    got = in_every_order(simulator, lambda: simulator.ops.factored_linear_backward(g, x, u, v, b_in, *[True] * 5))
    for result, exact, torchs in zip(
        got, backward(*doubles(x, u, v, b_in, g)), backward(x, u, v, b_in, g), strict=True
    ):
        assert result.is_contiguous()
        assert_accurate(result, exact, torchs)


def lay_out(values: Tensor, layout: str) -> Tensor:
    """As `arrange`; "offset" begins 4 or 8 bytes behind a 16-byte boundary, "padded" has rows that are no multiple of 16 bytes."""
    if layout == "offset":
        storage = torch.full((values.numel() + 1,), float("nan"), dtype=values.dtype)
        return storage[1:].view(values.shape).copy_(values)
    if layout == "padded":
        storage = torch.full((*values.shape[:-1], values.shape[-1] + 1), float("nan"), dtype=values.dtype)
        return storage[..., :-1].copy_(values)
    return arrange(values, layout)


@pytest.mark.parametrize("layout", [*LAYOUTS[1:], "offset", "padded"])
@pytest.mark.parametrize("shape", [(5, 3, 9, 10, 7), (8, 4, 20, 12, 8)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(simulator: Simulator, shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> None:
    x, u, v, b_in, b_out, g = (lay_out(a, layout) for a in arguments(shape, dtype, "contiguous"))
    (y,) = in_every_order(simulator, lambda: simulator.ops.factored_linear(x, u, v, b_in, b_out))
    assert_accurate(y, forward(*doubles(x, u, v, b_in, b_out)), forward(x, u, v, b_in, b_out))
    got = in_every_order(simulator, lambda: simulator.ops.factored_linear_backward(g, x, u, v, b_in, *[True] * 5))
    for result, exact, torchs in zip(
        got, backward(*doubles(x, u, v, b_in, g)), backward(x, u, v, b_in, g), strict=True
    ):
        assert_accurate(result, exact, torchs)


@pytest.mark.skipif(os.name != "posix", reason="needs mprotect")
@pytest.mark.parametrize("shape", [(5, 3, 9, 10, 7), (8, 4, 20, 12, 8), (17, 33, 3, 2, 33), FUSED[2]])
def test_nothing_past_the_end_is_read(simulator: Simulator, shape: tuple[int, ...]) -> None:
    args = [before_a_guard_page(a) for a in arguments(shape, torch.float32, "contiguous")]
    x, u, v, b_in, b_out, g = args
    y = simulator.ops.factored_linear(x, u, v, b_in, b_out)
    assert_accurate(y, forward(*doubles(x, u, v, b_in, b_out)), forward(x, u, v, b_in, b_out))
    got = simulator.ops.factored_linear_backward(g, x, u, v, b_in, *[True] * 5)
    for result, exact, torchs in zip(
        got, backward(*doubles(x, u, v, b_in, g)), backward(x, u, v, b_in, g), strict=True
    ):
        assert_accurate(result, exact, torchs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", EMPTY)
def test_empty(simulator: Simulator, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, u, v, b_in, b_out, g = arguments(shape, dtype, "contiguous")
    (y,) = in_every_order(simulator, lambda: simulator.ops.factored_linear(x, u, v, b_in, b_out))
    assert_accurate(y, forward(x, u, v, b_in, b_out))
    got = in_every_order(simulator, lambda: simulator.ops.factored_linear_backward(g, x, u, v, b_in, *[True] * 5))
    for result, exact in zip(got, backward(x, u, v, b_in, g), strict=True):
        assert_accurate(result, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wanted", range(5))
def test_only_what_is_asked_for(simulator: Simulator, wanted: int, dtype: torch.dtype) -> None:
    x, u, v, b_in, _, g = arguments((5, 3, 9, 10, 7), dtype, "contiguous")
    asked = [i == wanted for i in range(5)]
    got = simulator.ops.factored_linear_backward(g, x, u, v, b_in, *asked)
    assert_accurate(got[wanted], backward(x, u, v, b_in, g)[wanted])
    assert all(result.shape == (0,) for i, result in enumerate(got) if i != wanted)


@pytest.mark.parametrize("multiprocessors", [1, 5, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_work_split_over_blocks(simulator: Simulator, multiprocessors: int, dtype: torch.dtype) -> None:
    """More multiprocessors: y in more parts, and sums over images in shares that are added up afterwards."""
    x, u, v, b_in, b_out, g = arguments((100, 3, 5, 2, 70), dtype, "contiguous")
    for schedule in ("forward", "reverse", "random"):
        with simulator.scheduled(threads=schedule, blocks=schedule, multiprocessors=multiprocessors):
            y = simulator.ops.factored_linear(x, u, v, b_in, b_out)
            got = simulator.ops.factored_linear_backward(g, x, u, v, b_in, *[True] * 5)
        assert_accurate(y, forward(*doubles(x, u, v, b_in, b_out)), forward(x, u, v, b_in, b_out))
        for result, exact, torchs in zip(
            got, backward(*doubles(x, u, v, b_in, g)), backward(x, u, v, b_in, g), strict=True
        ):
            assert_accurate(result, exact, torchs)


@pytest.mark.parametrize("split", [1, 2, 3, 100])
@pytest.mark.parametrize("layout", ["contiguous", "expanded", "offset"])
@pytest.mark.parametrize("shape", [(35, 3, 70, 18, 40), (36, 20, 36, 3, 84)])
def test_depth_split_over_blocks(simulator: Simulator, shape: tuple[int, ...], layout: str, split: int) -> None:
    """Depths of up to 6 slabs, the last of them not whole: a share of several slabs, of one, more asked for than there are slabs."""
    x, u, v, b_in, b_out, g = (lay_out(a, layout) for a in arguments(shape, torch.float32, "contiguous"))
    with simulator.path(intermediate="stored", split=split):
        (y,) = in_every_order(simulator, lambda: simulator.ops.factored_linear(x, u, v, b_in, b_out))
        got = in_every_order(simulator, lambda: simulator.ops.factored_linear_backward(g, x, u, v, b_in, *[True] * 5))
    assert_accurate(y, forward(*doubles(x, u, v, b_in, b_out)), forward(x, u, v, b_in, b_out))
    for result, exact, torchs in zip(
        got, backward(*doubles(x, u, v, b_in, g)), backward(x, u, v, b_in, g), strict=True
    ):
        assert_accurate(result, exact, torchs)


def blocks_of(simulator: Simulator, call: Callable[[], object]) -> int:
    before = simulator.block_count()
    call()
    return simulator.block_count() - before


def test_how_many_blocks_share_a_depth(simulator: Simulator) -> None:
    """So many as the path says, at most one a slab; else many where multiprocessors would be left without a tile, and so many that
    none adds up more than 4,096 numbers."""
    x, u, v, b_in, b_out, _ = arguments(
        (3, 2, 1000, 4, 5), torch.float32, "contiguous"
    )  # 2 tiles of 63 slabs, then 4 of one
    call = partial(simulator.ops.factored_linear, x, u, v, b_in, b_out)
    for split, shares in ((1, 1), (2, 2), (63, 63), (64, 63)):
        with simulator.path(split=split):
            assert blocks_of(simulator, call) == 2 * shares + 4, split
    with simulator.scheduled(multiprocessors=132):
        assert 2 * 4 + 4 <= blocks_of(simulator, call) <= 2 * 16 + 4
    x, u, v, b_in, b_out, _ = arguments((640, 40, 20, 4, 5), torch.float32, "contiguous")  # enough tiles of few slabs
    with simulator.path(intermediate="stored"):
        assert blocks_of(simulator, partial(simulator.ops.factored_linear, x, u, v, None, None)) == 40 * 10 + 4 * 10
    x, u, v, b_in, _, g = arguments((4097, 2, 1, 65, 1), torch.float32, "contiguous")
    weight_in = False, True, False, False, False
    with simulator.scheduled(multiprocessors=1), simulator.path(intermediate="stored"):
        blocks = blocks_of(simulator, partial(simulator.ops.factored_linear_backward, g, x, u, v, b_in, *weight_in))
    assert blocks == 65 * 65 + 2 * 2 * 2  # dz; dU in two shares of each tile


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        (5, 3, 9, 10, 7),
        (6, 3, 10, 10, 7),
        (2, 3, 34, 51, 1),
        (2, 3, 34, 54, 1),
        (35, 2, 70, 3, 5),
        (4, 2, 31, 40, 3),  # larger than x: y counts from 32 positions on
        (4, 2, 32, 40, 3),
        (8, 4, 20, 12, 8),
        FUSED[2],
    ],
)
def test_a_kept_intermediate(simulator: Simulator, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """It is z, where that is small; from it the gradients are the same to the bit."""
    x, u, v, b_in, b_out, g = arguments(shape, dtype, "contiguous")
    N, C, X, D, Y = shape
    kept = dtype == torch.float32 and C * X + (X >= 32) * D * Y >= D * C
    y, intermediate = simulator.ops.factored_linear_keeping(x, u, v, b_in, b_out)
    assert same_bits(y, simulator.ops.factored_linear(x, u, v, b_in, b_out))
    assert intermediate.shape == ((D, C, N) if kept else (0,))
    again = simulator.ops.factored_linear_backward(g, x, u, v, b_in, *[True] * 5)
    got = in_every_order(
        simulator, lambda: simulator.ops.factored_linear_backward_keeping(g, x, u, v, b_in, intermediate, *[True] * 5)
    )
    assert all(same_bits(a, b) for a, b in zip(got, again, strict=True))
    if kept:
        exact = torch.einsum("ncx,dcx->dcn", x.double(), u.double()) + b_in.double()[:, None, None]
        assert_accurate(intermediate, exact, torch.einsum("ncx,dcx->dcn", x, u) + b_in[:, None, None])
        doubled = simulator.ops.factored_linear_backward_keeping(g, x, u, v, b_in, 2 * intermediate, *[True] * 5)
        assert same_bits(doubled[2], 2 * again[2]) and same_bits(doubled[1], again[1])
        for other, words in (
            (intermediate[:, :, :-1], "intermediate must have shape"),
            (intermediate.permute(1, 0, 2).contiguous().permute(1, 0, 2), "intermediate must be contiguous"),
        ):
            with pytest.raises(RuntimeError, match=words):
                simulator.ops.factored_linear_backward_keeping(g, x, u, v, b_in, other, *[True] * 5)


def kernels(simulator: Simulator, call: Callable[[], object]) -> set[str]:
    """Which of F-FC's kernels a call launches: of a stored intermediate, of a fused one."""
    simulator.launches()
    call()
    names = {"intermediates_kernel": "stored", "apply_kernel": "fused", "backward_kernel": "fused"}
    return {way for launch in simulator.launches() for name, way in names.items() if name in launch.kernel}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES[:3], SHAPES[-1], *FUSED, MANY])
def test_the_intermediate_is_stored_where_it_is_small(
    simulator: Simulator, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """In float32, unless the path says otherwise; float64 launches none of our kernels."""
    x, u, v, b_in, b_out, g = arguments(shape, dtype, "contiguous")
    own = {"fused" if shape in FUSED else "stored"}

    def backward(*wanted: bool) -> None:
        simulator.ops.factored_linear_backward(g, x, u, v, b_in, *wanted)

    for call in (
        lambda: simulator.ops.factored_linear(x, u, v, b_in, b_out),
        lambda: backward(*[True] * 5),
        lambda: backward(True, *[False] * 4),
    ):
        assert kernels(simulator, call) == (own if dtype == torch.float32 else set())


WAYS = [
    ({"intermediate": "stored"}, "stored"),
    ({"intermediate": "fused"}, "fused"),
    ({"product": "mma"}, "stored"),
    ({"product": "scalar"}, "fused"),
]


@pytest.mark.parametrize(("path", "way"), WAYS)
@pytest.mark.parametrize("shape", [SHAPES[1], FUSED[2]])
def test_the_path_says_whether_the_intermediate_is_stored(
    simulator: Simulator, shape: tuple[int, ...], path: dict[str, str], way: str
) -> None:
    x, u, v, b_in, b_out, g = arguments(shape, torch.float32, "contiguous")
    calls = (
        lambda: (simulator.ops.factored_linear(x, u, v, b_in, b_out),),
        lambda: simulator.ops.factored_linear_backward(g, x, u, v, b_in, *[True] * 5),
    )
    wanted = (
        ((forward(*doubles(x, u, v, b_in, b_out)),), (forward(x, u, v, b_in, b_out),)),
        (backward(*doubles(x, u, v, b_in, g)), backward(x, u, v, b_in, g)),
    )
    with simulator.path(**path):
        for call, (exact, torchs) in zip(calls, wanted, strict=True):
            assert kernels(simulator, call) == {way}
            for got, one, other in zip(call(), exact, torchs, strict=True):
                assert_accurate(got, one, other)


def test_paths_that_there_are_not(simulator: Simulator) -> None:
    for path, dtype, words in (
        ({"product": "scalar", "intermediate": "stored"}, torch.float32, "product=mma goes with intermediate=stored"),
        ({"product": "mma", "intermediate": "fused"}, torch.float32, "product=mma goes with intermediate=stored"),
        ({"intermediate": "fused"}, torch.float64, "float64 has no intermediate=fused"),
    ):
        x, u, v, b_in, b_out, g = arguments(SHAPES[1], dtype, "contiguous")
        with simulator.path(**path):
            with pytest.raises(RuntimeError, match=words):
                simulator.ops.factored_linear(x, u, v, b_in, b_out)
            with pytest.raises(RuntimeError, match=words):
                simulator.ops.factored_linear_backward(g, x, u, v, b_in, *[True] * 5)


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3]])
def test_float64_has_few_numbers_of_the_intermediate_at_a_time(simulator: Simulator, shape: tuple[int, ...]) -> None:
    """At most so many as the build allows: by output channels forward, by input channels backward."""
    N, C, _, D, _ = shape
    x, u, v, _, _, g = arguments(shape, torch.float64, "contiguous")
    at_a_time = int(FEW_AT_A_TIME.split("=")[1])
    for call, channels, each in (
        (lambda: simulator.ops.factored_linear(x, u, v, None, None), D, C * N),
        (lambda: simulator.ops.factored_linear_backward(g, x, u, v, None, *[True] * 3, False, False), C, D * N),
    ):
        with torch.profiler.profile() as profile:
            call()
        products = sum(event.name == "aten::bmm" for event in profile.events())
        pieces = -(-channels // max(at_a_time // each, 1))
        assert pieces > 1 and products == pieces * (2 if channels == D else 5)


@pytest.mark.parametrize("shape", [(40, 3, 5, 2, 70), (3, 2, 4, 3, 5), *EMPTY])
@pytest.mark.parametrize("way", ["stored", "fused"])
def test_the_backward_takes_two_launches(simulator: Simulator, way: str, shape: tuple[int, ...]) -> None:
    """Fused: one for what is asked for, a second for biases and for weights whose sums over images are shared out over blocks.

    With a stored intermediate: one for that, one for what is asked for.
    """
    x, u, v, b_in, _, g = arguments(shape, torch.float32, "contiguous")
    for asked in itertools.product([False, True], repeat=5):
        _, weight_in, weight_out, bias_in, bias_out = asked
        with simulator.scheduled(multiprocessors=64), simulator.path(intermediate=way):
            before = simulator.launch_count()
            simulator.ops.factored_linear_backward(g, x, u, v, b_in, *asked)
            launches = simulator.launch_count() - before
        if 0 in shape:
            assert launches <= 2
        elif way == "stored":
            assert launches == 2 * any(asked)
        else:
            shared = (weight_in or weight_out) and shape[0] > 32
            assert launches == any(asked) + (bias_in or bias_out or shared)


def test_bad_arguments_are_refused(simulator: Simulator) -> None:
    x, u, v, b_in, b_out, _ = arguments((5, 3, 9, 10, 7), torch.float32, "contiguous")
    with pytest.raises(RuntimeError, match="weight_in must have shape"):
        simulator.ops.factored_linear(x, u[:, :2], v, b_in, b_out)
    with pytest.raises(RuntimeError, match="bias_in must have the dtype of x"):
        simulator.ops.factored_linear(x, u, v, b_in.double(), b_out)
