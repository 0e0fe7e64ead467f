"""The network of the deep image prior."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ella_cuda.training.checks import positive_integer

SLOPE = 0.2  # of leaky ReLUs below 0


class UNet(nn.Module):
    """A U-Net without normalisation: ``(N, in_channels, H, W) -> (N, 1, H, W)``, of any size from ``2**(scales - 1)`` on.

    A 3x3 convolution ``inc``; blocks ``down``, which halve the sides and have two 3x3 convolutions each; blocks ``up``, which double the
    sides, add ``skip`` channels of the finer scale by a 1x1 convolution and have two 3x3 convolutions each; a 1x1 convolution ``outc``.
    Leaky ReLUs have slope 0.2. The default, with ``channels=32``, has 76,905 parameters.

    Args:
        in_channels: of the images.
        channels: of every scale.
        scales: resolutions, at least 1.
        skip_channels: for each scale, how many of its channels ``up`` blocks take over; a scale's number is that of the block that ends one
            scale finer, so the first has no meaning. 0 is no skip connection.
        sigmoid: whether outputs are in (0, 1).
        dropout: probability after every activation, for Monte Carlo dropout.

    Raises:
        ValueError: an argument is out of range; in ``forward``, an image is smaller than the coarsest scale allows.

    Source: Antoran, Barbano, Leuschner, Hernandez-Lobato, Jin, "Uncertainty estimation for computed tomography with a linearised deep image
    prior", TMLR 2023, appendix; the architecture is that of Ulyanov et al., "Deep image prior", CVPR 2018.
    """

    def __init__(
        self,
        in_channels: int = 1,
        channels: int = 32,
        scales: int = 3,
        skip_channels: Sequence[int] = (0, 4, 4),
        sigmoid: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        positive_integer("scales", scales, "UNet")
        channels, skips = positive_integer("channels", channels, "UNet"), tuple(skip_channels)
        if len(skips) != scales or min(skips) < 0:
            raise ValueError(f"UNet: skip_channels must be {scales} numbers from 0 on, got {skip_channels!r}.")
        if not 0 <= dropout < 1:
            raise ValueError(f"UNet: dropout must be at least 0 and below 1, got {dropout!r}.")
        self.scales, self.sigmoid = scales, sigmoid
        self.inc = nn.Sequential(*_activated(nn.Conv2d(in_channels, channels, 3, padding=1), dropout))
        self.down = nn.ModuleList(_Down(channels, dropout) for _ in range(1, scales))
        self.up = nn.ModuleList(_Up(channels, skips[i], dropout) for i in range(scales - 1, 0, -1))
        self.outc = nn.Conv2d(channels, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 4 or min(x.shape[2:]) < 2 ** (self.scales - 1):
            least = 2 ** (self.scales - 1)
            raise ValueError(f"UNet: x must have shape (N, C, H, W) with sides from {least} on, got {tuple(x.shape)}.")
        finer = [self.inc(x)]
        for block in self.down:
            finer.append(block(finer[-1]))
        x = finer.pop()
        for block in self.up:
            x = block(x, finer.pop())
        x = self.outc(x)
        return torch.sigmoid(x) if self.sigmoid else x


class _Down(nn.Module):
    def __init__(self, channels: int, dropout: float) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            *_activated(nn.Conv2d(channels, channels, 3, stride=2, padding=1), dropout),
            *_activated(nn.Conv2d(channels, channels, 3, padding=1), dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.convs(x)


class _Up(nn.Module):
    def __init__(self, channels: int, skip_channels: int, dropout: float) -> None:
        super().__init__()
        self.skip = nn.Conv2d(channels, skip_channels, 1) if skip_channels else None
        self.convs = nn.Sequential(
            *_activated(nn.Conv2d(channels + skip_channels, channels, 3, padding=1), dropout),
            *_activated(nn.Conv2d(channels, channels, 3, padding=1), dropout),
        )

    def forward(self, x: Tensor, finer: Tensor) -> Tensor:
        x = F.interpolate(x, finer.shape[2:], mode="bilinear", align_corners=True)
        return self.convs(x if self.skip is None else torch.cat([x, self.skip(finer)], 1))


def _activated(conv: nn.Module, dropout: float) -> list[nn.Module]:
    return [conv, nn.LeakyReLU(SLOPE), *([nn.Dropout(dropout)] if dropout else [])]
