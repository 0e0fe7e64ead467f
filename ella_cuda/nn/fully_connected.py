"""The fully connected path (FC)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ella_cuda.nn._autocast import full_precision
from ella_cuda.nn._sizes import Size, as_count, as_size, check_image


class FullyConnected2d(nn.Module):
    """A dense linear layer between images: ``(N, C, H, W) -> (N, D, H', W')``.

    Parameters:
        linear: a :class:`torch.nn.Linear` from ``C*H*W`` to ``D*H'*W'`` numbers, with torch's default initialisation and zero bias.

    Args:
        in_channels: C.
        out_channels: D.
        in_size: H and W, or one number for both.
        out_size: H' and W', or one number for both.
        bias: whether the layer has a bias, one number per output channel and position.
        device, dtype: of the parameters; None is torch's default.

    Raises:
        ValueError: a size is not positive; in forward, the input does not fit.

    Source: van der Ouderaa et al., NeurIPS 2023, eq. 3.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        in_size: Size,
        out_size: Size,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_channels = as_count("in_channels", in_channels)
        self.out_channels = as_count("out_channels", out_channels)
        self.in_size, self.out_size = as_size("in_size", in_size), as_size("out_size", out_size)
        features = in_channels * math.prod(self.in_size), out_channels * math.prod(self.out_size)
        self.linear = nn.Linear(*features, bias=bias, device=device, dtype=dtype)
        self._zero_bias()

    def reset_parameters(self) -> None:
        """Draw the weight anew, from torch's global generator; zero bias."""
        self.linear.reset_parameters()
        self._zero_bias()

    def _zero_bias(self) -> None:
        if self.linear.bias is not None:
            nn.init.zeros_(self.linear.bias)

    @full_precision
    def forward(self, x: Tensor) -> Tensor:
        """``(N, C, H, W) -> (N, D, H', W')``."""
        check_image("FullyConnected2d", x, self.in_channels, self.in_size, self.linear.weight)
        return self.linear(x.flatten(1)).unflatten(1, (self.out_channels, *self.out_size))
