"""Derivatives along directions of parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ella_cuda.laplace.tangent import jvp

POINTS = torch.tensor([[0.0, 1.0], [2.0, -1.0], [0.5, 0.5]], dtype=torch.float64)
OTHERS = torch.tensor([[1.0, 1.0], [-2.0, 0.3]], dtype=torch.float64)


def _pulled(x: Tensor) -> Tensor:
    """Linear in x, and wrong under torch.func.vmap."""
    return torch.ops.aten._cdist_backward(x.contiguous(), POINTS, OTHERS, 2.0, torch.cdist(POINTS, OTHERS))


class Pulled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return _pulled(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return _pulled(tangent)


def test_derivatives_that_vmap_gets_wrong_are_taken_one_by_one():
    directions = torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = torch.stack([_pulled(direction) for direction in directions])
    assert not torch.allclose(torch.func.vmap(_pulled)(directions), expected)
    found = jvp(lambda values: Pulled.apply(values["w"]), {"w": torch.ones(3, 2).double()}, {"w": directions})
    torch.testing.assert_close(found, expected)
