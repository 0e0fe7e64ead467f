"""polyphase_pool, polyphase_select and polyphase_scatter against slices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from .checking import DTYPES, LAYOUTS, arrange, in_every_order

SHAPES = [(1, 1, 2, 2), (3, 2, 4, 6), (2, 3, 80, 82)]
NORMS = [1.0, 2.0, float("inf")]


def components(x: Tensor) -> Tensor:
    """(4, N, C, h, w), in the order of the schema."""
    return torch.stack([x[:, :, ::2, ::2], x[:, :, 1::2, ::2], x[:, :, ::2, 1::2], x[:, :, 1::2, 1::2]])


def expected(x: Tensor, norm: float) -> tuple[Tensor, Tensor]:
    parts = components(x)
    index = torch.linalg.vector_norm(parts.double().flatten(2), norm, dim=2).argmax(0)
    return parts[index, torch.arange(x.shape[0])], index


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_pool(simulator, shape, dtype, norm):
    x = arrange(torch.randn(shape, dtype=dtype), "contiguous")
    out, index = in_every_order(simulator, lambda: simulator.ops.polyphase_pool(x, norm))
    chosen, which = expected(x, norm)
    assert torch.equal(index, which)
    assert torch.equal(out, chosen)
    assert out.is_contiguous()


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_layouts(simulator, layout):
    x = arrange(torch.randn(3, 2, 4, 6), layout)
    index = torch.tensor([3, -1, 0, -1, 2, -1])[::2]
    chosen, which = expected(x, 2.0)
    out, found = in_every_order(simulator, lambda: simulator.ops.polyphase_pool(x, 2.0))
    assert torch.equal(out, chosen)
    assert torch.equal(found, which)
    (selected,) = in_every_order(simulator, lambda: simulator.ops.polyphase_select(x, index))
    assert torch.equal(selected, components(x)[index, torch.arange(3)])
    (scattered,) = in_every_order(simulator, lambda: simulator.ops.polyphase_scatter(x, index))
    for i in range(4):
        kept = (index == i)[:, None, None, None]
        assert torch.equal(components(scattered)[i], torch.where(kept, x, torch.zeros_like(x)))


@pytest.mark.parametrize("norm", NORMS)
def test_the_first_of_equals_and_nan(simulator, norm):
    x = torch.ones(6, 1, 2, 2)
    x[1, 0, 1, 0] = x[1, 0, 1, 1] = -3.0  # components 1 and 3
    x[2, 0, 0, 1] = x[2, 0, 1, 1] = 3.0  # 2 and 3
    x[3, 0, 0, 1] = float("nan")  # 2
    x[4] = 0.0
    x[5] = float("nan")
    for _ in range(2):
        _, index = in_every_order(simulator, lambda: simulator.ops.polyphase_pool(x, norm))
        assert index.tolist() == [0, 1, 2, 2, 0, 0]


def test_a_component_that_does_not_exist_is_nan(simulator):
    x = torch.randn(3, 2, 4, 6)
    index = torch.tensor([1, 4, -1])
    selected, scattered = simulator.ops.polyphase_select(x, index), simulator.ops.polyphase_scatter(x, index)
    assert torch.equal(selected[0], components(x)[1, 0])
    assert bool(selected[1:].isnan().all())
    assert bool(scattered[1:].isnan().all())
    assert not bool(scattered[0].isnan().any())
