"""The convolutional path where a stage halves the size."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from ella_cuda import ops
from ella_cuda.nn._autocast import full_precision
from ella_cuda.nn._sizes import Size, check_image
from ella_cuda.nn.circular_conv import CircularConv2d
from ella_cuda.nn.pooling import PolyphasePool2d


class StridedCircularConv2d(nn.Sequential):
    """A convolution on a torus followed by the polyphase choice: ``(N, C, H, W) -> (N, D, H/2, W/2)``, equivariant to translations.

    The map, the parameters and the state dict of ``nn.Sequential(CircularConv2d(in_channels, out_channels, kernel_size, bias),
    PolyphasePool2d(norm))``, computed by :func:`ella_cuda.ops.circular_conv2d_pool`, which stores nothing of what is between the two.
    Where something else sees that (a hook on one of the two, a global one, a module of another class in its place) both are called.

    Args:
        in_channels: C.
        out_channels: D.
        kernel_size: odd height and width, or one odd number for both.
        bias: whether the convolution has a bias.
        norm: that decides, 1, 2 or ``math.inf``.
        device, dtype: of the parameters, float32 or float64; None is torch's default.

    Raises:
        ValueError: a size is not positive, kernel_size even, or ``norm`` none of these; in forward, the input has other channels, dtype or
            device.
        TypeError: in forward, the input is no tensor.
        RuntimeError: in forward, H or W is odd.
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
        conv = CircularConv2d(in_channels, out_channels, kernel_size, bias, device, dtype)
        super().__init__(conv, PolyphasePool2d(norm))

    def __getitem__(self, index: slice | int) -> nn.Module:
        """A part, or some in a row as an ``nn.Sequential``."""
        if isinstance(index, slice):
            return nn.Sequential(OrderedDict(list(self._modules.items())[index]))
        return super().__getitem__(index)

    @full_precision
    def forward(self, x: Tensor) -> Tensor:
        """``(N, C, H, W) -> (N, D, H/2, W/2)``."""
        if not self._closed():
            return super().forward(x)
        conv, pool = self
        check_image("StridedCircularConv2d", x, conv.in_channels, None, conv.weight)
        return ops.circular_conv2d_pool(x, conv.weight, conv.bias, pool.norm)

    def _closed(self) -> bool:
        """Whether nobody sees what is between the two."""
        if [type(part) for part in self] != [CircularConv2d, PolyphasePool2d]:
            return False
        if torch.nn.modules.module._has_any_global_hook():
            return False
        return all("forward" not in part.__dict__ and not _has_hooks(part) for part in self)


def _has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module is more than its forward, by what :meth:`torch.nn.Module.__call__` looks at."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
