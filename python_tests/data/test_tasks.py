"""The tasks: where the pixels go, what the labels say, and what a draw depends on."""

from __future__ import annotations

import math

import pytest
import torch

from ella_cuda.data import TASKS, Dataset, load, make_task, subsample

CORNERS = ((0, 0), (0, 16), (16, 0), (16, 16))


def dataset(n: int = 200, m: int = 50, size: int = 16, channels: int = 2) -> Dataset:
    """Images without a zero pixel, so that whatever is zero afterwards was put there."""
    return Dataset(
        torch.rand(n, channels, size, size) + 0.1,
        torch.randint(0, 10, (n,)),
        torch.rand(m, channels, size, size) + 0.1,
        torch.randint(0, 10, (m,)),
        10,
    )


@pytest.mark.parametrize("task", ["digit", "quadrant"])
def test_an_image_fills_one_quadrant_and_nothing_else(task):
    data = dataset()
    made = make_task(data, task)
    assert made.train_images.shape == (200, 2, 32, 32)
    seen = set()
    for before, after in zip(data.train_images, made.train_images, strict=True):
        cells = [after[:, r : r + 16, c : c + 16] for r, c in CORNERS]
        filled = [i for i, cell in enumerate(cells) if bool(cell.any())]
        assert len(filled) == 1
        assert torch.equal(cells[filled[0]], before)  # 16x16 already: not resized
        seen.add(filled[0])
    assert seen == {0, 1, 2, 3}


def test_quadrant_labels_are_label_plus_ten_times_the_quadrant():
    data = dataset()
    made = make_task(data, "quadrant")
    assert made.num_classes == 40
    for part in ("train", "test"):
        images, labels = getattr(made, f"{part}_images"), getattr(made, f"{part}_labels")
        where = [
            next(i for i, (r, c) in enumerate(CORNERS) if bool(x[:, r : r + 16, c : c + 16].any())) for x in images
        ]
        assert (labels // 10).tolist() == where
        assert torch.equal(labels % 10, getattr(data, f"{part}_labels"))


def test_digit_and_quadrant_have_the_same_images():
    data = dataset()
    digit, quadrant = make_task(data, "digit", seed=3), make_task(data, "quadrant", seed=3)
    assert torch.equal(digit.train_images, quadrant.train_images)
    assert torch.equal(digit.test_images, quadrant.test_images)
    assert torch.equal(digit.train_labels, data.train_labels)
    assert digit.num_classes == 10


def test_quadrants_depend_on_the_seed_and_not_on_torchs_generator():
    data = dataset(n=200, m=200)
    torch.manual_seed(1)
    first = make_task(data, "quadrant", seed=7)
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(1).get_state())
    torch.manual_seed(2)
    again, other = (make_task(data, "quadrant", seed=s) for s in (7, 8))
    assert torch.equal(first.train_labels, again.train_labels)
    for one in (other.train_labels, first.test_labels):  # training and test images are drawn apart
        agree = float((first.train_labels // 10 == one // 10).double().mean())
        assert 0.1 < agree < 0.4  # a quarter by chance


def test_reordering_the_images_reorders_the_task():
    data = dataset()
    order = torch.randperm(200)
    shuffled = Dataset(
        data.train_images[order],
        data.train_labels[order],
        data.test_images,
        data.test_labels,
        10,
        data.train_ids[order],
        data.test_ids,
    )
    whole, permuted = make_task(data, "quadrant"), make_task(shuffled, "quadrant")
    assert torch.equal(permuted.train_images, whole.train_images[order])
    assert torch.equal(permuted.train_labels, whole.train_labels[order])


def test_leaving_images_out_leaves_the_others_where_they_were():
    data = load("digits")
    whole, part = make_task(data, "quadrant"), make_task(subsample(data, 100), "quadrant")
    position = {int(i): k for k, i in enumerate(whole.train_ids)}
    index = torch.tensor([position[int(i)] for i in part.train_ids])
    assert torch.equal(part.train_images, whole.train_images[index])
    assert torch.equal(part.train_labels, whole.train_labels[index])


def test_quadrants_are_balanced_and_neighbouring_images_drawn_independently():
    n = 40000
    ones, zero = torch.ones(n, 1, 1, 1), torch.zeros(1, dtype=torch.int64)
    quadrant = make_task(Dataset(ones, zero.expand(n), ones[:1], zero, 1), "quadrant", image_size=2).train_labels
    counts = quadrant.bincount()
    assert len(counts) == 4
    assert (counts - n / 4).abs().max() < 4 * math.sqrt(n * 3 / 16)
    pairs = (4 * quadrant[:-1] + quadrant[1:]).bincount(minlength=16)
    chi_squared = float(((pairs - n / 16) ** 2 / (n / 16)).sum())
    assert chi_squared < 45  # 15 degrees of freedom: above 45 once in ten thousand


def test_small_images_are_resized_into_the_quadrant():
    data = dataset(n=20, m=2, size=8, channels=1)
    made = make_task(data, "quadrant")
    for before, after, label in zip(data.train_images, made.train_images, made.train_labels, strict=True):
        r, c = CORNERS[int(label) // 10]
        cell = after[0, r : r + 16, c : c + 16]
        # Bilinear at factor 2 with half-pixel centres: the corner is the corner, and inner pixels are 9:3:3:1 averages.
        assert torch.allclose(cell[0, 0], before[0, 0, 0])
        a, b, d, e = before[0, 2, 3], before[0, 2, 4], before[0, 3, 3], before[0, 3, 4]
        assert torch.allclose(cell[5, 7], (9 * a + 3 * b + 3 * d + e) / 16)


def test_plain_keeps_content_and_labels():
    data = dataset(size=32)
    made = make_task(data, "plain")
    assert torch.equal(made.train_images, data.train_images)
    assert torch.equal(made.test_labels, data.test_labels)
    assert make_task(dataset(size=28), "plain").train_images.shape[-2:] == (32, 32)


@pytest.mark.parametrize("task", list(TASKS))
def test_every_task_describes_itself_and_checks_its_size(task):
    assert TASKS[task].description
    with pytest.raises(ValueError, match="image_size"):
        make_task(dataset(n=2, m=2), task, image_size=1)


def test_an_unknown_task_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"plain, digit, quadrant.*got 'upside-down'"):
        make_task(dataset(n=2, m=2), "upside-down")
    with pytest.raises(ValueError, match="even"):
        make_task(dataset(n=2, m=2), "digit", image_size=31)
