"""The factored fully connected path (F-FC)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ella_cuda import ops
from ella_cuda.nn._autocast import full_precision
from ella_cuda.nn._sizes import Size, as_count, as_size, check_image


class FactoredLinear2d(nn.Module):
    """A fully connected layer on images whose weight is factored per pair of channels: ``(N, C, H, W) -> (N, D, H', W')``.

    It holds ``D*C*(H*W + H'*W')`` weights where a fully connected layer holds ``D*C*H*W*H'*W'``; see
    :func:`ella_cuda.ops.factored_linear` for the map.

    Parameters:
        weight_in: ``(D, C, H, W)``, initialised uniformly within ``sqrt(3 / (H*W))``.
        weight_out: ``(D, C, H', W')``, initialised uniformly within ``sqrt(3 / C)``.
        bias_in: ``(D,)``, zeros. bias_out: ``(H', W')``, zeros. Both None with ``bias=False``.

    Args:
        in_channels: C.
        out_channels: D.
        in_size: H and W, or one number for both.
        out_size: H' and W', or one number for both.
        bias: whether the layer has biases.
        device, dtype: of the parameters, float32 or float64; None is torch's default.

    Raises:
        ValueError: a size is not positive; in forward, the input does not fit.

    Source: van der Ouderaa et al., NeurIPS 2023, section 3.1 and eq. 5.
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
        kind = {"device": device, "dtype": dtype}
        self.weight_in = nn.Parameter(torch.empty(out_channels, in_channels, *self.in_size, **kind))
        self.weight_out = nn.Parameter(torch.empty(out_channels, in_channels, *self.out_size, **kind))
        self.bias_in = nn.Parameter(torch.empty(out_channels, **kind)) if bias else None
        self.bias_out = nn.Parameter(torch.empty(*self.out_size, **kind)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew, from torch's global generator."""
        bound_in, bound_out = math.sqrt(3 / math.prod(self.in_size)), math.sqrt(3 / self.in_channels)
        nn.init.uniform_(self.weight_in, -bound_in, bound_in)
        nn.init.uniform_(self.weight_out, -bound_out, bound_out)
        if self.bias_in is not None:
            nn.init.zeros_(self.bias_in)
            nn.init.zeros_(self.bias_out)

    @full_precision
    def forward(self, x: Tensor) -> Tensor:
        """``(N, C, H, W) -> (N, D, H', W')``."""
        check_image("FactoredLinear2d", x, self.in_channels, self.in_size, self.weight_in)
        y = ops.factored_linear(
            x.flatten(2),
            self.weight_in.flatten(2),
            self.weight_out.flatten(2),
            self.bias_in,
            None if self.bias_out is None else self.bias_out.flatten(),
        )
        return y.unflatten(2, self.out_size)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, in_size={self.in_size}, out_size={self.out_size}, bias={self.bias_in is not None}"
