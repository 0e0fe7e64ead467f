"""The convolutional path."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ella_cuda import ops
from ella_cuda.nn._autocast import full_precision
from ella_cuda.nn._sizes import Size, as_count, as_kernel_size, check_image


class CircularConv2d(nn.Conv2d):
    """A 'same' convolution with circular padding: ``(N, C, H, W) -> (N, D, H, W)``.

    The map, the parameters, their initialisation and the state dict of ``torch.nn.Conv2d(in_channels, out_channels, kernel_size,
    padding="same", padding_mode="circular")``, computed by :func:`ella_cuda.ops.circular_conv2d`.

    Args:
        in_channels: C.
        out_channels: D.
        kernel_size: odd height and width, or one odd number for both.
        bias: whether the layer has a bias.
        device, dtype: of the parameters, float32 or float64; None is torch's default.

    Raises:
        ValueError: a size is not positive or kernel_size even; in forward, the input does not fit.
        TypeError: in forward, the input is no tensor.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size = 3,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        channels = as_count("in_channels", in_channels), as_count("out_channels", out_channels)
        same = {"padding": "same", "padding_mode": "circular"}
        super().__init__(*channels, as_kernel_size(kernel_size), **same, bias=bias, device=device, dtype=dtype)

    @full_precision
    def forward(self, x: Tensor) -> Tensor:
        """``(N, C, H, W) -> (N, D, H, W)``."""
        check_image("CircularConv2d", x, self.in_channels, None, self.weight)
        return ops.circular_conv2d(x, self.weight, self.bias)
