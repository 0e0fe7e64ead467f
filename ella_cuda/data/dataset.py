"""A labelled image data set with its training and test part."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dataset:
    """Images and labels of a training and a test part, as tensors on one device.

    Attributes:
        train_images: ``(N, C, h, w)`` float32; as loaded, pixels are in 0..1.
        train_labels: ``(N,)`` int64 in ``0 .. num_classes - 1``.
        test_images: ``(M, C, h, w)`` float32.
        test_labels: ``(M,)`` int64.
        num_classes: K.
        train_ids: ``(N,)`` int64, the number of each image in the data set as published (training images first).
            Whatever is drawn per image is drawn from this number, so an image keeps its draw when the data are
            reordered, subsampled or split again.
        test_ids: ``(M,)`` int64, disjoint from ``train_ids``.
        black: ``(C,)`` float32, the value of a pixel that was 0 when loaded: 0 until the images are normalised.
        white: ``(C,)`` float32, that of a pixel that was 1.
        class_names: K names; empty where classes have numbers alone.
        names: of the images as published, by id: file names; empty where they have none.
        notes: what a person should know of the data before training, a line each.
        digest: tells what the images and labels were made from apart from other data, where somebody took it.

    Raises:
        ValueError: shapes that do not fit together, labels outside the classes, ids used twice.
        TypeError: images that are not float32, labels or ids that are not int64.
    """

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    num_classes: int
    train_ids: Tensor = field(default=None)  # type: ignore[assignment]
    test_ids: Tensor = field(default=None)  # type: ignore[assignment]
    black: Tensor = field(default=None)  # type: ignore[assignment]
    white: Tensor = field(default=None)  # type: ignore[assignment]
    digest: str | None = None
    class_names: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.train_images)
        if self.train_ids is None:
            object.__setattr__(self, "train_ids", torch.arange(n))
        if self.test_ids is None:
            object.__setattr__(self, "test_ids", n + torch.arange(len(self.test_images)))
        for part in ("train", "test"):
            self._check(part)
        if self.train_images.shape[1:] != self.test_images.shape[1:]:
            raise ValueError(
                f"train_images and test_images must agree in (C, h, w), got {tuple(self.train_images.shape[1:])} and "
                f"{tuple(self.test_images.shape[1:])}."
            )
        for name, value in (("black", 0.0), ("white", 1.0)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, self.train_images.new_full((self.channels,), value))
            if getattr(self, name).shape != (self.channels,):
                raise ValueError(
                    f"{name} must have shape ({self.channels},), one value for each channel, got {tuple(getattr(self, name).shape)}."
                )
        ids = torch.cat([self.train_ids, self.test_ids])
        if len(ids.unique()) != len(ids):
            raise ValueError("train_ids and test_ids must name every image once, got an id twice.")

    def _check(self, part: str) -> None:
        images, labels, ids = (getattr(self, f"{part}_{kind}") for kind in ("images", "labels", "ids"))
        if images.dim() != 4:
            raise ValueError(f"{part}_images must have shape (N, C, h, w), got {tuple(images.shape)}.")
        if images.dtype != torch.float32:
            raise TypeError(f"{part}_images must be float32, got {images.dtype}.")
        for name, values in (("labels", labels), ("ids", ids)):
            if values.shape != (len(images),):
                raise ValueError(
                    f"{part}_{name} must have shape ({len(images)},), one for each image, got {tuple(values.shape)}."
                )
            if values.dtype != torch.int64:
                raise TypeError(f"{part}_{name} must be int64, got {values.dtype}.")
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.num_classes:
            raise ValueError(
                f"{part}_labels must lie in 0..{self.num_classes - 1} for {self.num_classes} classes, got values from "
                f"{int(labels.min())} to {int(labels.max())}."
            )

    @property
    def channels(self) -> int:
        """C, the number of channels of an image."""
        return self.train_images.shape[1]

    def to(self, device: torch.device | str) -> Dataset:
        """The same data on another device."""
        names = [f"{part}_{kind}" for part in ("train", "test") for kind in ("images", "labels", "ids")]
        return replace(self, **{name: getattr(self, name).to(device) for name in [*names, "black", "white"]})
