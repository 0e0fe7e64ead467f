"""Tasks made from a data set: what is done to each image, and what is asked about it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ella_cuda.data.dataset import Dataset
from ella_cuda.data.draws import integers, uniform
from ella_cuda.data.preprocess import resize
from ella_cuda.data.warp import turned, warp

QUADRANTS = 4
MAX_TRANSLATION = 8 / 32  # of the image's size, each way
FAR_TRANSLATION = 8 / 28  # 8/14 of half the size
MAX_MAGNIFICATION = 2.0  # and its inverse


@dataclass(frozen=True)
class Task:
    """A task: how images and labels are made from a data set's.

    Attributes:
        description: one line, for help texts.
        transform: ``(images, ids, image_size, seed) -> images``; whatever it draws for an image, it draws from the image's id
            (:mod:`ella_cuda.data.draws`).
        halved: whether images are made of halves, so that their size must be even.
        positional: whether labels say in which quadrant an image is, so that flips and shifts would change them.
    """

    description: str
    transform: Callable[[Tensor, Tensor, int, int], Tensor]
    halved: bool = False
    positional: bool = False


def make_task(dataset: Dataset, task: str, image_size: int = 32, seed: int = 0) -> Dataset:
    """Make the images and labels of a task.

    ``plain``: each image resized. ``digit``: each image resized to half the size and put into one of the four
    quadrants of an image that is 0 elsewhere, its class unchanged. ``quadrant``: the same images, with class ``label +
    num_classes * quadrant``; quadrants are numbered in reading order (0 upper left, 1 upper right, 2 lower left, 3
    lower right).

    ``rotated``, ``translated``, ``scaled``: each image resized, then turned about its centre by a uniform angle in
    ±180°, moved right and down by two uniform real numbers in ±8 pixels of 32 (in proportion at other sizes), or
    magnified about its centre by a factor whose logarithm is uniform in ±log 2, so 1/2 to 2. Interpolation is bilinear.
    What comes from outside the image is 0, black, as around a digit, and what leaves it is lost: of an MNIST digit,
    which fills 20 of 28 pixels, that begins at magnification 1.4. Ranges, interpolation and border are those of the
    published experiments. ``rotated-90`` has angles in ±90°, ``translated-8of14`` shifts of up to 8/14 of half the image's size: those of
    learned augmentation. Translation is not circular, though that would be a convolution's exact symmetry here:
    invariance would then hold by construction, and a photograph would get a seam. The two agree while nothing but
    black crosses the edge.

    Whatever is drawn for an image depends on ``seed`` and on its id only, not on which other images there are.

    Args:
        dataset: images in 0..1, of any size, not normalised: what comes from outside an image is 0.
        task: a name of :data:`TASKS`.
        image_size: height and width of the new images, in pixels, at least 2; even for the quadrant tasks.
        seed: chooses the quadrants, angles, shifts and factors.

    Returns:
        A :class:`Dataset` of ``(N, C, image_size, image_size)`` images, not normalised.

    Raises:
        ValueError: an unknown task, an image size that does not fit, or images that are normalised already.

    Source: the toy problem of van der Ouderaa et al., NeurIPS 2023, section 6.1; the transformed data sets are those
    of its experiments on several groups, and of Immer et al., "Invariance learning in deep neural networks with
    differentiable Laplace approximations", NeurIPS 2022.
    """
    if task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {task!r}.")
    chosen = TASKS[task]
    if image_size < 2 or (image_size % 2 and chosen.halved):
        even = ", and even" if chosen.halved else ""
        raise ValueError(f"image_size must be at least 2 pixels{even} for the task {task}, got {image_size}.")

    if dataset.black.any():
        raise ValueError(
            "dataset must not be normalised yet, or black would not be 0; call normalize on what this returns."
        )

    made, classes = {}, dataset.num_classes
    for part in ("train", "test"):
        images, labels, ids = (getattr(dataset, f"{part}_{kind}") for kind in ("images", "labels", "ids"))
        made[f"{part}_images"] = chosen.transform(images, ids, image_size, seed)
        made[f"{part}_labels"] = labels + classes * _quadrants(ids, seed).to(labels) if chosen.positional else labels
        made[f"{part}_ids"] = ids
    known = {name: getattr(dataset, name) for name in ("names", "notes")}
    if chosen.positional:
        return Dataset(**made, **known, num_classes=classes * QUADRANTS)
    return Dataset(**made, **known, num_classes=classes, class_names=dataset.class_names)


def _plain(images: Tensor, ids: Tensor, size: int, seed: int) -> Tensor:
    return resize(images, size)


def _quadrants(ids: Tensor, seed: int) -> Tensor:
    return integers(ids, seed, "quadrant", QUADRANTS)


def _placed(images: Tensor, ids: Tensor, size: int, seed: int) -> Tensor:
    """Images in their quadrants."""
    quadrant, half = _quadrants(ids, seed).to(images.device), size // 2
    small = resize(images, half)
    canvas = images.new_zeros(*images.shape[:2], size, size)
    for q in range(QUADRANTS):
        row, column = half * (q // 2), half * (q % 2)
        canvas[quadrant == q, :, row : row + half, column : column + half] = small[quadrant == q]
    return canvas


def _turned_by(most: float) -> Callable[[Tensor, Tensor, int, int], Tensor]:
    """Each image turned counter-clockwise, as it is looked at, by its angle of at most so many radians."""

    def transform(images: Tensor, ids: Tensor, size: int, seed: int) -> Tensor:
        return turned(resize(images, size), uniform(ids, seed, "angle", -most, most))

    return transform


def _moved_by(share: float) -> Callable[[Tensor, Tensor, int, int], Tensor]:
    """Each image moved by at most that share of its size each way."""

    def transform(images: Tensor, ids: Tensor, size: int, seed: int) -> Tensor:
        ways = [uniform(ids, seed, f"shift {way}", -share * size, share * size) for way in ("right", "down")]
        same = torch.eye(2, dtype=torch.float64).expand(len(ids), 2, 2)
        return warp(resize(images, size), same, -torch.stack(ways, dim=-1))

    return transform


def _scaled(images: Tensor, ids: Tensor, size: int, seed: int) -> Tensor:
    most = math.log(MAX_MAGNIFICATION)
    back = torch.eye(2, dtype=torch.float64) / uniform(ids, seed, "log scale", -most, most).exp()[:, None, None]
    return warp(resize(images, size), back, torch.zeros(len(ids), 2, dtype=torch.float64))


TASKS: dict[str, Task] = {
    "plain": Task("the images as they are, resized", _plain),
    "digit": Task("each image in one of four quadrants; which class?", _placed, halved=True),
    "quadrant": Task(
        "each image in one of four quadrants; which class, and which quadrant?", _placed, halved=True, positional=True
    ),
    "rotated": Task("each image turned by up to 180° either way", _turned_by(math.pi)),
    "rotated-90": Task("each image turned by up to 90° either way", _turned_by(math.pi / 2)),
    "translated": Task("each image moved by up to 8 of 32 pixels in each direction", _moved_by(MAX_TRANSLATION)),
    "translated-8of14": Task(
        "each image moved by up to 8/14 of half its size in each direction", _moved_by(FAR_TRANSLATION)
    ),
    "scaled": Task("each image at 1/2 to 2 times its size", _scaled),
}
