"""Local deformations of images."""

from __future__ import annotations

from numbers import Integral

import torch
import torch.nn.functional as F
from torch import Tensor

from ella_cuda.augment.base import Augment, Init
from ella_cuda.ops._precision import in_own_precision


class LocalDeformation(Augment):
    r"""S locally deformed copies of each image: ``(N, C, H, W) -> (N, S, C, H, W)``, with a learned strength and smoothness.

    A suggestion of this package: no published formula. Every pixel of a copy is looked up at its own place plus a smooth random
    displacement :math:`u`. On a coarse grid of g x g points :math:`u = \alpha\, K_\tau z K_\tau^T` for each of the two coordinates, with
    normal z and the rows of :math:`K_\tau` Gaussian in the points' distance, of norm 1: the displacement has standard deviation
    :math:`\alpha` at every point whatever :math:`\tau`, neighbours within about :math:`\tau` move together. Between points it is bilinear.
    As :math:`\tau` grows, copies become translations.

    Amounts: ``strength`` :math:`\alpha` and ``smoothness`` :math:`\tau`, both in half images. Draws ``eps`` are ``(N or 1, S, 2, g, g)``.

    Args:
        n_samples: S.
        init: strength and smoothness at the start.
        sampling: "independent" or "shared", see :class:`Augment`.
        grid_size: g.
        device, dtype: of the amounts, float32 or float64; None is torch's default.

    Raises:
        TypeError, ValueError: an argument does not fit; in forward, x is no tensor ``(N, C, H, W)`` of the amounts' dtype and device.
    """

    def __init__(
        self,
        n_samples: int,
        init: Init = (0.05, 0.5),
        sampling: str = "independent",
        grid_size: int = 8,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not isinstance(grid_size, Integral) or isinstance(grid_size, bool) or grid_size < 2:
            raise ValueError(f"{type(self).__name__}: grid_size must be an integer of at least 2, got {grid_size!r}.")
        kind = {"samplings": ("independent", "shared"), "device": device, "dtype": dtype}
        super().__init__(n_samples, ("strength", "smoothness"), init, sampling, "softplus", **kind)
        self.grid_size = int(grid_size)

    def eps_shape(self) -> tuple[int, ...]:
        return (2, self.grid_size, self.grid_size)

    def sample(self, n: int, sampling: str, generator: torch.Generator | None) -> Tensor:
        on = self.raw.device if generator is None else generator.device
        shape = (n, self.n_samples, *self.eps_shape())
        return torch.randn(shape, generator=generator, device=on, dtype=self.raw.dtype).to(self.raw.device)

    def check_input(self, x: Tensor) -> None:
        if x.dim() != 4:
            raise ValueError(f"{self._name}: x must have shape (N, C, H, W), got {tuple(x.shape)}.")

    @in_own_precision
    def displacement(self, eps: Tensor, eta: Tensor, size: tuple[int, int]) -> Tensor:
        """Displacements in normalised coordinates, x then y: ``(M, 2, g, g), (2,) -> (M, 2, H, W)``."""
        strength, smoothness = eta.unbind()
        points = torch.arange(self.grid_size, device=eps.device, dtype=eps.dtype) * (2 / (self.grid_size - 1)) - 1
        kernel = (-(((points[:, None] - points) / smoothness) ** 2) / 2).exp()
        kernel = kernel / kernel.square().sum(1, keepdim=True).sqrt()
        return F.interpolate(strength * (kernel @ eps @ kernel.T), size, mode="bilinear", align_corners=True)

    def transform(self, x: Tensor, eps: Tensor, eta: Tensor) -> Tensor:
        n, s, size = len(x), eps.shape[1], tuple(x.shape[2:])
        moved = self.displacement(eps.flatten(0, 1), eta, size).unflatten(0, eps.shape[:2]).expand(n, -1, -1, -1, -1)
        columns, rows = (torch.linspace(-1, 1, side, device=x.device, dtype=x.dtype) for side in (size[1], size[0]))
        places = torch.stack([columns.expand(size), rows[:, None].expand(size)])
        grid = (places + moved).flatten(0, 1).permute(0, 2, 3, 1)
        copies = x[:, None].expand(-1, s, -1, -1, -1).flatten(0, 1)
        return F.grid_sample(copies, grid, align_corners=True).unflatten(0, (n, s))
