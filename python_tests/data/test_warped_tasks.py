"""Rotated, translated and scaled images: against rot90, slicing and scipy; what is drawn, measured on the images."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import ndimage, stats

from ella_cuda.data import Dataset, load, make_task, rotated, subsample

WARPED = ("rotated", "translated", "scaled")


def dataset(images: torch.Tensor, first_id: int = 0) -> Dataset:
    labels, one = torch.arange(len(images)) % 3, images[:1].clone()
    ids = torch.arange(first_id, first_id + len(images))
    return Dataset(images, labels, one, labels[:1].clone(), 3, ids, torch.tensor([10**6]))


def warped(task: str, monkeypatch, images: torch.Tensor, **drawn: float) -> torch.Tensor:
    """The images of a task whose draws are given by their purpose, the same for every image."""
    values = {purpose.replace("_", " "): value for purpose, value in drawn.items()}

    def fixed(ids, seed, purpose, low, high):
        assert low <= values[purpose] <= high
        return torch.full((len(ids),), values[purpose], dtype=torch.float64)

    monkeypatch.setattr("ella_cuda.data.tasks.uniform", fixed)
    return make_task(dataset(images), task, images.shape[-1]).train_images


@pytest.mark.parametrize("size", [32, 28, 9])
@pytest.mark.parametrize("turns", [-2, -1, 0, 1, 2])
def test_quarter_turns_are_rot90(monkeypatch, device, turns, size):
    images = torch.rand(5, 3, size, size, device=device)
    made = warped("rotated", monkeypatch, images, angle=turns * math.pi / 2)
    assert torch.allclose(made, images.rot90(turns, (2, 3)), atol=1e-5)


@pytest.mark.parametrize(("right", "down"), [(0, 0), (8, 0), (0, -8), (3, -5), (-7, 2)])
def test_whole_pixels_are_slices(monkeypatch, right, down):
    images = torch.rand(5, 3, 32, 32)
    made = warped("translated", monkeypatch, images, shift_right=right, shift_down=down)
    expected = torch.zeros_like(images)
    for row in range(32):
        for column in range(32):
            if 0 <= row - down < 32 and 0 <= column - right < 32:
                expected[:, :, row, column] = images[:, :, row - down, column - right]
    assert torch.allclose(made, expected, atol=1e-5)


CASES = [
    ("rotated", {"angle": angle}, (angle, 0.0, 0.0, 1.0)) for angle in (-3.0, -1.1, -0.2, 0.01, 0.7853981633974483, 2.5)
]
CASES += [
    ("translated", {"shift_right": right, "shift_down": down}, (0.0, right, down, 1.0))
    for right, down in ((0.5, 0.0), (-7.9, 3.3), (2.25, -0.75))
]
CASES += [("scaled", {"log_scale": value}, (0.0, 0.0, 0.0, math.exp(value))) for value in (-0.69, -0.3, 0.2, 0.69)]


@pytest.mark.parametrize(("task", "drawn", "numbers"), CASES)
def test_every_map_is_scipys(monkeypatch, task, drawn, numbers):
    """scipy counts rows and columns from the first pixel and interpolates in float64, with zeros around the image."""
    images = torch.rand(3, 2, 32, 32)
    made = warped(task, monkeypatch, images, **drawn)
    angle, right, down, factor = numbers
    forward = factor * np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    back = np.linalg.inv(forward)
    offset = np.array([15.5, 15.5]) - back @ (np.array([15.5, 15.5]) + np.array([down, right]))
    for image, result in zip(images.flatten(0, 1), made.flatten(0, 1), strict=True):
        expected = ndimage.affine_transform(
            image.double().numpy(), back, offset, order=1, mode="grid-constant", cval=0.0
        )
        assert np.abs(result.numpy() - expected).max() < 2e-5


def blobs(n: int, *centres: tuple[float, float]) -> torch.Tensor:
    """n equal images with a Gaussian of standard deviation 1.5 pixels at each (right, down) from the centre."""
    at = torch.arange(32.0) - 15.5
    image = sum(torch.exp(-((at[None] - r) ** 2 + (at[:, None] - d) ** 2) / 4.5) for r, d in centres)
    return image.expand(n, 1, 32, 32).contiguous()


def centroids(images: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    at, mass = torch.arange(32.0, dtype=torch.float64) - 15.5, images[:, 0].double()
    total = mass.sum((1, 2))
    return ((mass.sum(1) @ at) / total).numpy(), ((mass.sum(2) @ at) / total).numpy()


def is_uniform(values: np.ndarray, low: float, high: float) -> bool:
    assert low - 0.02 < values.min() < low + 0.05 * (high - low)
    assert high + 0.02 > values.max() > high - 0.05 * (high - low)
    return bool(stats.kstest(values, stats.uniform(low, high - low).cdf).pvalue > 0.01)


def test_angles_are_uniform_over_the_whole_circle():
    right, down = centroids(make_task(dataset(blobs(2000, (8, 0))), "rotated").train_images)
    assert np.allclose(np.hypot(right, down), 8, atol=0.05)
    assert is_uniform(np.arctan2(-down, right), -math.pi, math.pi)


def test_shifts_are_uniform_in_eight_pixels_and_independent():
    right, down = centroids(make_task(dataset(blobs(2000, (0, 0))), "translated").train_images)
    assert is_uniform(right, -8, 8)
    assert is_uniform(down, -8, 8)
    assert stats.spearmanr(right, down).pvalue > 0.01


def test_magnifications_are_uniform_in_logarithm():
    images = make_task(dataset(blobs(2000, (5, 0))), "scaled").train_images
    right, down = centroids(images)
    assert np.allclose(down, 0, atol=1e-3)
    assert is_uniform(np.log(right / 5), -math.log(2), math.log(2))


@pytest.mark.parametrize("task", WARPED)
def test_an_image_depends_on_seed_and_id_alone(monkeypatch, task):
    """To the last bit: not on the order, on which others are there, on chunks, nor on torch's generator."""
    data = load("digits")
    torch.manual_seed(1)
    whole = make_task(data, task, seed=4)
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(1).get_state())
    place = {int(i): k for k, i in enumerate(data.train_ids)}
    part = subsample(data, 101, seed=2)
    order = torch.randperm(101)
    shuffled = Dataset(
        part.train_images[order], part.train_labels[order], data.test_images, data.test_labels, 10,
        part.train_ids[order], data.test_ids,
    )  # fmt: skip
    monkeypatch.setattr("ella_cuda.data.warp.AT_ONCE", 7)
    made = make_task(shuffled, task, seed=4)
    index = torch.tensor([place[int(i)] for i in made.train_ids])
    assert torch.equal(made.train_images, whole.train_images[index])
    assert torch.equal(made.test_images, whole.test_images)
    assert not torch.equal(make_task(shuffled, task, seed=5).train_images, made.train_images)


@pytest.mark.parametrize("task", WARPED)
def test_both_parts_are_transformed_and_keep_their_labels(task):
    data = load("digits")
    made, plain = make_task(data, task), make_task(data, "plain")
    for part in ("train", "test"):
        images, before = getattr(made, f"{part}_images"), getattr(plain, f"{part}_images")
        assert images.shape == before.shape
        assert ((images - before).abs().amax((1, 2, 3)) > 0.05).float().mean() > 0.98
        assert torch.equal(getattr(made, f"{part}_labels"), getattr(data, f"{part}_labels"))
    assert made.num_classes == 10
    same = [make_task(dataset(blobs(3, (8, 0)), first_id=i), task).train_images for i in (0, 500)]
    assert not torch.equal(*same)


@pytest.mark.parametrize("size", [32, 9])
@pytest.mark.parametrize("turns", [-1, 0, 1, 2])
def test_right_angles_in_degrees_are_rot90(device, turns, size):
    images = torch.rand(3, 2, size, size, device=device)
    assert torch.allclose(rotated(images, 90 * turns), images.rot90(turns, (2, 3)), atol=1e-5)


def test_an_angle_for_each_image_turns_it_alone():
    images, degrees = torch.rand(4, 1, 20, 20), torch.tensor([0.0, 15.0, 90.0, 137.5])
    made = rotated(images, degrees)
    for image, turned, angle in zip(images, made, degrees.tolist(), strict=True):
        assert torch.equal(rotated(image[None], angle)[0], turned)
        padded = np.pad(image[0].double().numpy(), 1)  # scipy leaves out what is less than a pixel outside
        expected = ndimage.rotate(padded, angle, reshape=False, order=1)[1:-1, 1:-1]
        assert np.allclose(turned[0], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("images", "degrees", "words"),
    [
        (torch.rand(2, 8, 8), 15, r"images must have shape \(N, C, S, S\), got \(2, 8, 8\)"),
        (torch.rand(2, 1, 8, 9), 15, r"images must have shape \(N, C, S, S\)"),
        (torch.rand(2, 1, 8, 8), math.inf, "degrees must be finite"),
    ],
)
def test_what_cannot_be_turned_is_refused(images, degrees, words):
    with pytest.raises(ValueError, match=f"rotated: {words}"):
        rotated(images, degrees)
