"""ella_cuda.ops.polyphase_pool against strided slices chosen one image at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ella_cuda import ops
from python_tests.ops import checks

IMAGE = ("1 1 4 4",)
CHOICE = ("1", torch.int64)
OPERANDS = {
    "polyphase_pool": checks.Operands([("N C H H",)], (2.0,)),
    "polyphase_select": checks.Operands([("N C H H",), ("N", torch.int64)]),
    "polyphase_scatter": checks.Operands([("N C H W",), ("N", torch.int64)]),
}
REFUSALS = [
    ("polyphase_pool", [IMAGE], (3.0,), "norm must be 1, 2 or inf, got 3"),
    ("polyphase_pool", [IMAGE], (-math.inf,), "norm must be 1, 2 or inf, got -inf"),
    ("polyphase_pool", [IMAGE], (math.nan,), "norm must be 1, 2 or inf, got nan"),
    ("polyphase_pool", [("1 1 3 4",)], (2.0,), "x must have even height and width"),
    ("polyphase_select", [("1 1 4 3",), CHOICE], (), "x must have even height and width"),
]

OFFSETS = [(0, 0), (1, 0), (0, 1), (1, 1)]


def explicit(x: Tensor, norm: float = 2) -> Tensor:
    chosen = []
    for image in x:
        components = [image[:, r::2, s::2] for r, s in OFFSETS]
        flat = [c.detach().double().abs().flatten() for c in components]
        sizes = [float({1: f.sum(), 2: f.square().sum(), math.inf: f.max()}[norm]) for f in flat]
        chosen.append(components[sizes.index(max(sizes))])
    return torch.stack(chosen)


DIFFERENTIABLE = {
    "polyphase_pool": checks.Case(
        ops.polyphase_pool,
        ops.polyphase_pool_torch,
        explicit,
        lambda shape, device, dtype: (torch.randn(shape, dtype=dtype, device=device),),
        small=[(2, 2, 4, 2)],
        laid_out=[(3, 2, 4, 6)],
        empty=[(0, 2, 4, 4)],
    )
}


@pytest.mark.parametrize("norm", [1, 2, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chooses_per_image(norm, dtype, device):
    x = torch.randn(7, 3, 6, 4, dtype=torch.float64).to(device, dtype)
    assert torch.equal(ops.polyphase_pool(x, norm), explicit(x, norm))
    assert torch.equal(ops.polyphase_pool_torch(x, norm), explicit(x, norm))
    alone = torch.cat([ops.polyphase_pool(image[None], norm) for image in x])
    assert torch.equal(alone, ops.polyphase_pool(x, norm))


@pytest.mark.parametrize("norm", [1, 2, math.inf])
@pytest.mark.parametrize("width", [14, 16, 18, 30, 32, 46])
def test_every_column_counts(width, norm, device):
    """Whole vectors, rows that follow one another or do not, and what is left after them: one large number, wherever it is, decides."""
    x = torch.rand(6 * width, 2, 6, width, device=device)
    image, place = torch.arange(6 * width), torch.arange(6 * width)
    x[image, 1, place // width, place % width] = 1000
    gaps = torch.full((6 * width, 2, 6, width + 3), 1e6, device=device)[..., 1:-2]
    last = torch.full((6 * width, 3, 6, width), 1e6, device=device)[:, :2]
    for laid_out in (
        x,
        x.to(memory_format=torch.channels_last),
        x[:, 1:].expand(-1, 3, -1, -1),
        gaps.copy_(x),
        last.copy_(x),
    ):
        out = ops.polyphase_pool(laid_out, norm)
        assert (out.flatten(1).amax(1) == 1000).all()
        assert torch.equal(out, explicit(laid_out, norm))


def test_every_row_of_a_high_image_counts(device):
    x = torch.rand(80 * 16, 1, 80, 16, device=device)
    x.flatten(1).fill_diagonal_(1000)
    assert (ops.polyphase_pool(x).flatten(1).amax(1) == 1000).all()


@pytest.mark.parametrize("norm", [1, 2, math.inf])
@pytest.mark.parametrize("width", [4, 16, 18])
@pytest.mark.parametrize("component", range(4))
def test_nan_is_larger_than_any_number(component, width, norm, device):
    row, column = OFFSETS[component]
    x = torch.randn(1, 2, 4, width, device=device)
    x[0, 1, 2 + row, width - 2 + column] = math.nan
    x[0, 0, 1 - row, 1 - column] = math.inf
    out, index = torch.ops.ella_cuda.polyphase_pool(x, float(norm))
    assert index.item() == component and out.isnan().sum() == 1


@pytest.mark.parametrize("component", range(4))
def test_order_of_the_components(component, device):
    x = torch.zeros(1, 1, 4, 4, device=device)
    row, column = OFFSETS[component]
    x[0, 0, 2 + row, column] = 1
    out, index = torch.ops.ella_cuda.polyphase_pool(x, 2.0)
    assert index.item() == component and out.sum() == 1 and out[0, 0, 1, 0] == 1


def test_of_equals_the_first(device):
    assert torch.ops.ella_cuda.polyphase_pool(torch.ones(2, 1, 4, 4, device=device), 2.0)[1].tolist() == [0, 0]


@pytest.mark.parametrize("shift", [(1, 0), (0, 1), (3, 2), (5, 5)])
def test_moves_with_the_image(shift, device):
    """A circular translation translates the output by a whole number of its own positions."""
    x = torch.randn(5, 2, 8, 8, dtype=torch.float64, device=device)
    before, after = ops.polyphase_pool(x), ops.polyphase_pool(x.roll(shift, (2, 3)))
    for a, b in zip(before, after, strict=True):
        rolled = [a.roll((r, s), (1, 2)) for r in range(4) for s in range(4)]
        assert any(torch.equal(b, candidate) for candidate in rolled)


def test_vmap_of_choices(device):
    index = torch.tensor([3, 1], device=device)
    for name, size in (("select", (4, 2)), ("scatter", (2, 1))):
        op = getattr(torch.ops.ella_cuda, f"polyphase_{name}")
        images = torch.randn(3, 2, 2, *size, dtype=torch.float64, device=device)
        found = torch.func.vmap(op, (0, None))(images, index)
        checks.assert_same(found, torch.stack([op(i, index) for i in images]))


def test_scatter_is_the_transpose_of_select(device):
    index = torch.tensor([2, 0, 3], device=device)
    x = torch.randn(3, 2, 4, 6, dtype=torch.float64, device=device)
    y = torch.randn(3, 2, 2, 3, dtype=torch.float64, device=device)
    select, scatter = torch.ops.ella_cuda.polyphase_select, torch.ops.ella_cuda.polyphase_scatter
    checks.assert_same((select(x, index) * y).sum(), (x * scatter(y, index)).sum())


def test_errors_of_the_norm(device):
    with pytest.raises(ValueError, match="norm"):
        ops.polyphase_pool(torch.zeros(1, 1, 4, 4, device=device), 3)
