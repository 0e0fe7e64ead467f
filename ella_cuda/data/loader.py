"""Minibatches out of tensors that live on one device."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ella_cuda.data.augment import FlipsShifts
from ella_cuda.digest import tensors_digest
from ella_cuda.distributed import slice_of


class TensorLoader:
    """Iterates over minibatches ``(images, labels)`` of data that stay where they are; only the minibatch is copied.

    Every iteration is one epoch. Its permutation and the augmentation's draws are drawn on the CPU when the iteration
    starts, from ``generator`` or else torch's global CPU generator: restoring that generator's state at an epoch
    boundary repeats the epochs after it, on any device. They go to the data's device together, once an epoch; nothing
    else does.

    Args:
        images: ``(N, ...)``, N at least 1.
        labels: ``(N, ...)``, on the images' device.
        batch_size: images in a minibatch, at least 1; the last one may be smaller.
        shuffle: whether each epoch has an order of its own.
        generator: a CPU generator.
        augment: what is done to the images of each minibatch, such as :class:`ella_cuda.data.FlipsShifts`; None is nothing.
            Curvature and evidence want the images as they are: give them a loader without it.
        data_digest: what tells these data apart from others, see :func:`ella_cuda.marglik_training`; None takes it from the tensors.

    Attributes:
        dataset_size: N.

    Raises:
        ValueError: no data, lengths or devices that differ, a batch size below 1, a generator that is not on the CPU.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        batch_size: int,
        shuffle: bool = False,
        generator: torch.Generator | None = None,
        augment: FlipsShifts | None = None,
        data_digest: str | None = None,
    ) -> None:
        if len(images) == 0:
            raise ValueError("images must hold at least one image, got none.")
        if len(images) != len(labels):
            raise ValueError(f"images and labels must be equally many, got {len(images)} and {len(labels)}.")
        if images.device != labels.device:
            raise ValueError(f"images and labels must be on one device, got {images.device} and {labels.device}.")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
        if generator is not None and generator.device.type != "cpu":
            raise ValueError(f"generator must be a CPU generator, got one on {generator.device}.")
        self.images, self.labels, self.batch_size = images, labels, operator.index(batch_size)
        self.shuffle, self.generator, self.augment = shuffle, generator, augment
        self.dataset_size = len(images)
        self._data_digest = data_digest

    @property
    def data_digest(self) -> str:
        """Other for other data, augmentation and order aside."""
        return tensors_digest(self.images, self.labels) if self._data_digest is None else self._data_digest

    def __len__(self) -> int:
        """The number of minibatches of an epoch."""
        return -(-self.dataset_size // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if not self.shuffle and self.augment is None:
            size = min(self.batch_size, self.dataset_size)  # torch takes no size of more than 64 bits
            yield from zip(self.images.split(size), self.labels.split(size), strict=True)
            return
        for part in self._plan():
            yield self._made(part)

    def parts(self, rank: int, ranks: int) -> Iterator[tuple[Tensor, Tensor, int]]:
        """As an iteration, of one of several processes: its slice of every minibatch, and how many images that has. All have the same plan
        where generators are in the same state; a process makes its own images alone."""
        for part in self._plan():
            yield *self._made(part[slice_of(len(part), rank, ranks)]), len(part)

    def _plan(self) -> Sequence[Tensor]:
        """Of an epoch's minibatches, the images' numbers and what is drawn for each, on the images' device."""
        n = self.dataset_size
        plan = (torch.randperm(n, generator=self.generator) if self.shuffle else torch.arange(n))[:, None]
        if self.augment is not None:
            plan = torch.cat([plan, self.augment.draw(n, self.generator)], dim=1)
        return plan.to(self.images.device).split(min(self.batch_size, n))

    def _made(self, part: Tensor) -> tuple[Tensor, Tensor]:
        index, images = part[:, 0], self.images[part[:, 0]]
        return images if self.augment is None else self.augment(images, part[:, 1:]), self.labels[index]
