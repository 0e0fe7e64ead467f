"""The convolutional path where a stage halves the size."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ella_cuda import ops
from ella_cuda.nn._autocast import full_precision
from ella_cuda.nn._sizes import Size, as_count, as_kernel_size, check_image
from ella_cuda.ops.polyphase_pool import check_norm


class StridedCircularConv2d(nn.Module):
    """A strided convolution that is equivariant to translations: ``(N, C, H, W) -> (N, D, H/2, W/2)``.

    The map and the parameters of ``nn.Sequential(CircularConv2d(in_channels, out_channels, kernel_size, bias), PolyphasePool2d(norm))``:
    circular padding, a convolution, adaptive polyphase sampling. It is one op, :func:`ella_cuda.ops.circular_conv2d_pool`, which stores
    nothing between these steps; use the ``nn.Sequential`` to see what is between them.

    Parameters:
        weight: ``(D, C, kh, kw)``. bias: ``(D,)`` or None. Both with torch's default initialisation of a convolution.

    Args:
        in_channels: C.
        out_channels: D.
        kernel_size: odd height and width, or one odd number for both.
        bias: whether the layer has a bias.
        norm: of a component, which decides: 1, 2 or ``math.inf``.
        device, dtype: of the parameters, float32 or float64; None is torch's default.

    Raises:
        ValueError: a size is not positive, kernel_size even, or ``norm`` none of these; in forward, the input has other channels, dtype or
            device.
        TypeError: in forward, the input is no tensor.
        RuntimeError: in forward, H or W is odd.

    Source: Chaman and Dokmanic, "Truly shift-invariant convolutional neural networks", CVPR 2021, section 4.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size = 3,
        bias: bool = True,
        norm: float = 2,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_norm("StridedCircularConv2d", norm)
        self.in_channels = as_count("in_channels", in_channels)
        self.out_channels = as_count("out_channels", out_channels)
        self.kernel_size, self.norm = as_kernel_size(kernel_size), norm
        kind = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(self.out_channels, self.in_channels, *self.kernel_size, **kind))
        self.bias = nn.Parameter(torch.empty(self.out_channels, **kind)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew, from torch's global generator."""
        nn.Conv2d.reset_parameters(self)

    @full_precision
    def forward(self, x: Tensor) -> Tensor:
        """``(N, C, H, W) -> (N, D, H/2, W/2)``."""
        check_image("StridedCircularConv2d", x, self.in_channels, None, self.weight)
        return ops.circular_conv2d_pool(x, self.weight, self.bias, self.norm)

    def extra_repr(self) -> str:
        sizes = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"
        return f"{sizes}, bias={self.bias is not None}, norm={self.norm}"
