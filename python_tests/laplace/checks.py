"""What several tests of fits need."""

from __future__ import annotations

import torch
from torch import Tensor

from ella_cuda.laplace import KronLaplace


def image_batches(device: torch.device, side: int) -> list[tuple[Tensor, Tensor]]:
    """Seven images of two channels with one of three labels, float64, in two batches."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(7, 2, side, side, generator=generator, dtype=torch.float64).to(device)
    y = torch.randint(3, (7,), generator=generator).to(device)
    return [(x[:4], y[:4]), (x[4:], y[4:])]


def assert_same_factors(one: KronLaplace, other: KronLaplace) -> None:
    """Equal up to rounding in float64."""
    assert len(one.factors) == len(other.factors) > 0
    for ours, theirs in zip(one.factors.values(), other.factors.values(), strict=True):
        torch.testing.assert_close(ours.outputs, theirs.outputs, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(ours.inputs, theirs.inputs, rtol=1e-11, atol=1e-13)
