"""Subsampling that keeps a network strictly equivariant."""

from __future__ import annotations

from torch import Tensor, nn

from ella_cuda import ops
from ella_cuda.nn._autocast import full_precision
from ella_cuda.ops.polyphase_pool import check_norm


class PolyphasePool2d(nn.Module):
    """Adaptive polyphase sampling, which keeps of each image the polyphase component with the largest norm:
    ``(N, C, H, W) -> (N, C, H/2, W/2)``.

    See :func:`ella_cuda.ops.polyphase_pool` for the arguments, errors and source; a norm that there is not is refused at once.
    """

    def __init__(self, norm: float = 2) -> None:
        super().__init__()
        check_norm("PolyphasePool2d", norm)
        self.norm = norm

    @full_precision
    def forward(self, x: Tensor) -> Tensor:
        """``(N, C, H, W) -> (N, C, H/2, W/2)``."""
        return ops.polyphase_pool(x, self.norm)

    def extra_repr(self) -> str:
        return f"norm={self.norm}"
