"""Random changes of training images that keep their labels, for whole minibatches at once."""

from __future__ import annotations

import torch
from torch import Tensor

AUGMENTATIONS = ("none", "flips-shifts")


class FlipsShifts:
    """Flips each image left to right with probability 1/2, then shifts it by whole pixels, uniformly in
    ``-max_shift .. max_shift`` right and down, as published for CIFAR-10 (van der Ouderaa et al., NeurIPS 2023).

    Args:
        fill: ``(C,)``, what each channel has outside the image: black, which after normalisation is not 0, see
            :attr:`ella_cuda.data.Dataset.black`.
        max_shift: in pixels, at least 0.
    """

    def __init__(self, fill: Tensor, max_shift: int = 4) -> None:
        self.fill, self.max_shift = fill, max_shift

    def draw(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Random numbers for ``count`` images: ``(count, 3)`` int64 on the CPU, whether to flip, pixels right, pixels
        down; from a CPU generator, by default torch's global one."""
        shifts = torch.randint(-self.max_shift, self.max_shift + 1, (count, 2), generator=generator)
        return torch.cat([torch.randint(2, (count, 1), generator=generator), shifts], dim=1)

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """The changed images.

        Args:
            images: ``(N, C, H, W)``, C as in ``fill``.
            draws: ``(N, 3)`` of :meth:`draw`, on the images' device.

        Returns:
            ``(N, C, H, W)``, a copy.
        """
        n, channels, height, width = images.shape
        flip, right, down = draws.unbind(1)
        rows = torch.arange(height, device=images.device) - down[:, None]  # (N, H): where each row comes from
        columns = torch.arange(width, device=images.device) - right[:, None]
        inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
        columns = torch.where(flip[:, None] == 1, width - 1 - columns, columns)
        picked = images[
            torch.arange(n, device=images.device)[:, None, None, None],
            torch.arange(channels, device=images.device)[:, None, None],
            rows.clamp(0, height - 1)[:, None, :, None],
            columns.clamp(0, width - 1)[:, None, None, :],
        ]
        return torch.where(inside[:, None], picked, self.fill.to(images.dtype)[:, None, None])
