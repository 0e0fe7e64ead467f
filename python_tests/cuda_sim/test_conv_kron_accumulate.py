"""conv_kron_accumulate_ by patches against torch's pad and unfold; by lags: test_lags.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from .checking import DTYPES, LAYOUTS, arrange, assert_accurate, guarded, in_every_order
from .simulator import Simulator

# shape, kernel, stride, padding, dilation
GEOMETRIES = [
    ((2, 3, 5, 4), (3, 3), (1, 1), (1, 1), (1, 1)),
    ((1, 1, 1, 1), (1, 1), (1, 1), (0, 0), (1, 1)),
    ((3, 2, 6, 7), (3, 2), (2, 3), (2, 1), (1, 2)),
    ((2, 2, 3, 3), (1, 3), (1, 2), (0, 3), (1, 2)),
    ((2, 4, 5, 5), (3, 3), (1, 1), (0, 0), (2, 2)),
    ((1, 8, 4, 3), (3, 3), (1, 1), (1, 1), (1, 1)),
    ((1, 12, 3, 3), (3, 3), (1, 1), (1, 1), (1, 1)),
    ((20, 3, 5, 4), (3, 3), (1, 1), (1, 1), (1, 1)),  # more images than are copied with their border at once
    ((1, 3, 40, 17), (3, 2), (1, 2), (1, 1), (1, 1)),  # not even one of them
    ((90, 4, 5, 5), (2, 2), (2, 1), (0, 0), (1, 1)),  # more numbers without a border than are read at once
    ((90, 1, 10, 10), (1, 1), (1, 1), (0, 0), (1, 1)),  # and positions
    ((1, 3, 40, 27), (3, 2), (1, 2), (1, 1), (1, 1)),  # an image with its border whose places are counted in 63 bits
]


@pytest.fixture(autouse=True)
def by_patches(simulator: Simulator) -> Iterator[None]:
    with simulator.path(lags="no"):
        yield


def exact(start: Tensor, x: Tensor, kernel, stride, padding, dilation, circular: bool, alpha: float) -> Tensor:
    pads = (padding[1], padding[1], padding[0], padding[0])
    padded = F.pad(x, pads, mode="circular" if circular else "constant")
    patches = F.unfold(padded, kernel, dilation=dilation, stride=stride)  # (N, C kh kw, positions)
    return start + alpha * torch.einsum("nip,njp->ij", patches, patches)


def accumulated(simulator: Simulator, start: Tensor, *arguments) -> Tensor:
    factor, check = guarded(start, fill=7.0)
    simulator.ops.conv_kron_accumulate_(factor, *arguments)
    check()
    return factor.clone()


def problem(geometry, dtype: torch.dtype, layout: str = "contiguous") -> tuple[Tensor, Tensor]:
    (shape, kernel, *_) = geometry
    d = shape[1] * kernel[0] * kernel[1]
    half = torch.randn(d, d, dtype=dtype)
    return half + half.T, arrange(torch.randn(shape, dtype=dtype), layout)


def check(simulator: Simulator, start: Tensor, x: Tensor, *call) -> None:
    """The sum in every order: accurate, and symmetric to the bit."""
    (got,) = in_every_order(simulator, lambda: accumulated(simulator, start, x, *call))
    assert_accurate(got, exact(start.double(), x.double(), *call), exact(start, x.to(start.dtype), *call))
    assert torch.equal(got, got.T)


@pytest.mark.parametrize("circular", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_accumulates(simulator, geometry, dtype, circular):
    check(simulator, *problem(geometry, dtype), *geometry[1:], circular, 0.7)


@pytest.mark.parametrize("circular", [True, False])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_a_float64_factor_loses_nothing_of_short_float32_sums(simulator, geometry, circular):
    start, _ = problem(geometry, torch.float64)
    start, x = start + 2.0**40, torch.randint(101, 128, geometry[0]).float()
    got = accumulated(simulator, start, x, *geometry[1:], circular, 0.5)
    assert torch.equal(got, exact(start, x.double(), *geometry[1:], circular, 0.5))


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_layouts(simulator, layout):
    check(simulator, *problem(GEOMETRIES[2], torch.float32, layout), *GEOMETRIES[2][1:], True, 1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("geometry", [0, 1, 2, 4, 7, 9, 11])
def test_images_of_16_bits(simulator, geometry, dtype):
    """In one copy and in several, with a border and without, in every layout."""
    shape, *rest = GEOMETRIES[geometry]
    start, _ = problem(GEOMETRIES[geometry], torch.float32)
    for layout in LAYOUTS:
        check(simulator, start, arrange(torch.randn(shape).to(dtype), layout), *rest, geometry % 2 == 0, 0.7)


def test_images_whose_rows_lie_far_apart(simulator):
    """Farther than distances are counted: they are copied."""
    start, x = problem(((3, 2, 4, 5), (3, 3)), torch.float32)
    by_rows = torch.full((3, 2, 4, 2600), float("nan"))[..., 7:12]
    by_channels = torch.full((2, 3, 4, 700), float("nan"))[..., 7:12].transpose(0, 1)
    call = (3, 3), (1, 1), (0, 0), (1, 1), False, 0.7
    for apart in (by_rows.copy_(x), by_channels.copy_(x)):
        simulator.launches()
        check(simulator, start, apart, *call)
        assert any("pad_kernel" in launch.kernel for launch in simulator.launches())
    accumulated(simulator, start, x, *call)
    assert not any("pad_kernel" in launch.kernel for launch in simulator.launches())


def test_bad_arguments_are_refused(simulator):
    with pytest.raises(RuntimeError, match=r"with its padding may have at most 8000 numbers, got 2 x 102 x 42"):
        simulator.ops.conv_kron_accumulate_(
            torch.zeros(2, 2), torch.zeros(1, 2, 100, 40), (1, 1), (1, 1), (1, 1), (1, 1), False, 1.0
        )
    with pytest.raises(RuntimeError, match="circular padding must not exceed the image"):
        simulator.ops.conv_kron_accumulate_(
            torch.zeros(9, 9), torch.zeros(1, 1, 2, 2), (3, 3), (1, 1), (3, 3), (1, 1), True, 1.0
        )
