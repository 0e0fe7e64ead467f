"""Preprocessing of a data set before training: choosing images, resizing, normalising."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ella_cuda.data.dataset import Dataset
from ella_cuda.data.draws import stratified_order

RESIZE_CHUNK = 4096  # images at a time: bounds the scratch memory of interpolation


def resize(images: Tensor, size: int) -> Tensor:
    """Resize bilinearly; when shrinking, with the antialiasing filter, without which pixels would be skipped.

    Args:
        images: ``(N, C, h, w)``.
        size: the new height and width, in pixels.

    Returns:
        ``(N, C, size, size)``; the input itself where it already has that size.
    """
    if tuple(images.shape[-2:]) == (size, size):
        return images
    out = images.new_empty(*images.shape[:2], size, size)
    for start in range(0, len(images), RESIZE_CHUNK):
        part = slice(start, start + RESIZE_CHUNK)
        out[part] = F.interpolate(images[part], (size, size), mode="bilinear", align_corners=False, antialias=True)
    return out


def normalize(dataset: Dataset) -> Dataset:
    """Shift and scale each channel to mean 0 and variance 1 over the training images; the test images by the same
    numbers.

    Raises:
        ValueError: a channel is constant over all training images.
    """
    total = dataset.train_images.sum(dim=(0, 2, 3), dtype=torch.float64)
    count = dataset.train_images[:, 0].numel()
    mean = (total / count).to(torch.float32)[:, None, None]
    squares = sum(
        (chunk - mean).square().sum(dim=(0, 2, 3), dtype=torch.float64)
        for chunk in dataset.train_images.split(RESIZE_CHUNK)
    )
    std = torch.as_tensor(squares / count).sqrt().to(torch.float32)[:, None, None]
    if not bool((std > 0).all()):
        constant = torch.nonzero(std.flatten() == 0).flatten().tolist()
        raise ValueError(
            f"train_images: channel(s) {constant} are constant over the {len(dataset.train_images)} training images; "
            f"nothing to learn."
        )
    return replace(
        dataset,
        train_images=(dataset.train_images - mean) / std,
        test_images=(dataset.test_images - mean) / std,
        black=(dataset.black - mean.flatten()) / std.flatten(),
        white=(dataset.white - mean.flatten()) / std.flatten(),
    )


def black_as_zero(dataset: Dataset) -> Dataset:
    """The images shifted so that black is 0, which is what an augmentation puts where a copy shows what is outside of its image."""
    black = dataset.black[:, None, None]
    return replace(
        dataset,
        train_images=dataset.train_images - black,
        test_images=dataset.test_images - black,
        black=torch.zeros_like(dataset.black),
        white=dataset.white - dataset.black,
    )


def normalized_as(images: Tensor, dataset: Dataset) -> Tensor:
    """Images ``(N, C, h, w)`` with pixels in 0..1, shifted and scaled as a data set's were."""
    black = dataset.black[:, None, None]
    return black + (dataset.white[:, None, None] - black) * images


def subsample(dataset: Dataset, size: int, seed: int = 0, part: str = "train") -> Dataset:
    """Keep ``size`` images of a part, "train" or "test", classes in proportion, in their old order; smaller choices lie in larger
    ones.

    Raises:
        ValueError: ``size`` is not in 1..N.
    """
    parts = {"train": "training", "test": "test"}
    images, labels, ids = (getattr(dataset, f"{part}_{kind}") for kind in ("images", "labels", "ids"))
    if not 1 <= size <= len(images):
        raise ValueError(f"{part}_size must be in 1..{len(images)}, the number of {parts[part]} images, got {size}.")
    some = stratified_order(labels, ids, seed, "subsample")[:size].sort().values
    kept = {f"{part}_images": images[some], f"{part}_labels": labels[some], f"{part}_ids": ids[some]}
    return replace(dataset, **kept)


def holdout(dataset: Dataset, fraction: float, seed: int = 0) -> Dataset:
    """Put a part of the training images, classes in proportion, in place of the test images.

    The test images are left out altogether: this is for choosing a recipe without looking at them.

    Args:
        dataset: the full data.
        fraction: of the training images to evaluate on, above 0 and below 1.
        seed: chooses the images.

    Raises:
        ValueError: ``fraction`` is out of range, or leaves one of the two parts empty.
    """
    n = len(dataset.train_images)
    if not 0 < fraction < 1 or not 1 <= round(fraction * n) < n:
        raise ValueError(f"fraction must lie between 0 and 1 and leave images on both sides of {n}, got {fraction}.")
    order = stratified_order(dataset.train_labels, dataset.train_ids, seed, "holdout")
    held, kept = (part.sort().values for part in (order[: round(fraction * n)], order[round(fraction * n) :]))
    return replace(
        dataset,
        test_images=dataset.train_images[held],
        test_labels=dataset.train_labels[held],
        test_ids=dataset.train_ids[held],
        train_images=dataset.train_images[kept],
        train_labels=dataset.train_labels[kept],
        train_ids=dataset.train_ids[kept],
    )
