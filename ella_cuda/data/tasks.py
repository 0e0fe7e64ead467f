"""Tasks made from a data set: what is done to each image, and what is asked about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ella_cuda.data.dataset import Dataset
from ella_cuda.data.draws import integers
from ella_cuda.data.preprocess import resize

QUADRANTS = 4


@dataclass(frozen=True)
class Task:
    """A task: how images and labels are made from a data set's.

    Attributes:
        description: one line, for help texts.
        transform: ``(images, labels, ids, num_classes, image_size, seed) -> (images, labels)``; whatever it draws for
            an image, it draws from the image's id (:mod:`ella_cuda.data.draws`).
        classes_per_class: the task's number of classes over the data set's.
    """

    description: str
    transform: Callable[[Tensor, Tensor, Tensor, int, int, int], tuple[Tensor, Tensor]]
    classes_per_class: int = 1


def make_task(dataset: Dataset, task: str, image_size: int = 32, seed: int = 0) -> Dataset:
    """Make the images and labels of a task.

    ``plain``: each image resized. ``digit``: each image resized to half the size and put into one of the four
    quadrants of an image that is 0 elsewhere, its class unchanged. ``quadrant``: the same images, with class ``label +
    num_classes * quadrant``; quadrants are numbered in reading order (0 upper left, 1 upper right, 2 lower left, 3
    lower right).

    An image's quadrant depends on ``seed`` and on its id only.

    Args:
        dataset: images in 0..1, of any size.
        task: ``plain``, ``digit`` or ``quadrant``.
        image_size: height and width of the new images, in pixels; even for the quadrant tasks.
        seed: chooses the quadrants.

    Returns:
        A :class:`Dataset` of ``(N, C, image_size, image_size)`` images, not normalised.

    Raises:
        ValueError: an unknown task or an image size that does not fit.

    Source: the toy problem of van der Ouderaa et al., NeurIPS 2023, section 6.1.
    """
    if task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {task!r}.")
    if image_size < 2 or (image_size % 2 and task != "plain"):
        raise ValueError(f"image_size must be a positive even number of pixels, got {image_size}.")
    chosen = TASKS[task]

    def made(images: Tensor, labels: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return chosen.transform(images, labels, ids, dataset.num_classes, image_size, seed)

    train_images, train_labels = made(dataset.train_images, dataset.train_labels, dataset.train_ids)
    test_images, test_labels = made(dataset.test_images, dataset.test_labels, dataset.test_ids)
    num_classes = dataset.num_classes * chosen.classes_per_class
    return Dataset(
        train_images, train_labels, test_images, test_labels, num_classes, dataset.train_ids, dataset.test_ids
    )


def _plain(
    images: Tensor, labels: Tensor, ids: Tensor, num_classes: int, size: int, seed: int
) -> tuple[Tensor, Tensor]:
    return resize(images, size), labels


def _placed(images: Tensor, ids: Tensor, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images in their quadrants, ``(N, C, size, size)``, and the quadrants, ``(N,)``."""
    quadrant = integers(ids, seed, "quadrant", QUADRANTS).to(images.device)
    half = size // 2
    small = resize(images, half)
    canvas = images.new_zeros(*images.shape[:2], size, size)
    for q in range(QUADRANTS):
        row, column = half * (q // 2), half * (q % 2)
        canvas[quadrant == q, :, row : row + half, column : column + half] = small[quadrant == q]
    return canvas, quadrant


def _digit(
    images: Tensor, labels: Tensor, ids: Tensor, num_classes: int, size: int, seed: int
) -> tuple[Tensor, Tensor]:
    return _placed(images, ids, size, seed)[0], labels


def _quadrant(
    images: Tensor, labels: Tensor, ids: Tensor, num_classes: int, size: int, seed: int
) -> tuple[Tensor, Tensor]:
    canvas, quadrant = _placed(images, ids, size, seed)
    return canvas, labels + num_classes * quadrant


TASKS: dict[str, Task] = {
    "plain": Task("the images as they are, resized", _plain),
    "digit": Task("each image in one of four quadrants; which class?", _digit),
    "quadrant": Task("each image in one of four quadrants; which class, and which quadrant?", _quadrant, QUADRANTS),
}
