"""Resizing, normalising and choosing images; the checks of a data set."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ella_cuda.data import Dataset, holdout, load, normalize, resize, subsample


def small(n: int = 10) -> Dataset:
    images = torch.arange(n * 4, dtype=torch.float32).view(n, 1, 2, 2)
    return Dataset(images, torch.arange(n) % 3, images[:4].clone(), torch.arange(4) % 3, 3)


def test_normalising_uses_training_statistics_for_both_parts():
    data = load("digits")
    shifted = replace(data, test_images=data.test_images + 5)
    made = normalize(shifted)
    train = data.train_images.double().numpy()
    mean, std = np.mean(train), np.std(train)
    assert np.allclose(made.train_images.numpy(), (train - mean) / std, atol=1e-5)
    assert np.allclose(made.test_images.numpy(), (data.test_images.double().numpy() + 5 - mean) / std, atol=1e-4)


def test_normalising_is_per_channel():
    images = (
        torch.randn(300, 3, 4, 4) * torch.tensor([1.0, 5.0, 0.2])[:, None, None]
        + torch.tensor([0.0, 7.0, -3.0])[:, None, None]
    )
    labels = torch.zeros(300, dtype=torch.int64)
    made = normalize(Dataset(images, labels, images[:5], labels[:5], 1)).train_images
    assert torch.allclose(made.mean(dim=(0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(made.std(dim=(0, 2, 3), unbiased=False), torch.ones(3), atol=1e-5)


def test_a_constant_channel_is_an_error():
    images = torch.randn(5, 2, 4, 4)
    images[:, 1] = 2
    labels = torch.zeros(5, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"channel\(s\) \[1\] are constant"):
        normalize(Dataset(images, labels, images, labels, 1))


def test_resizing_in_chunks_is_resizing_at_once(monkeypatch):
    images = torch.rand(10, 2, 28, 28)
    whole = resize(images, 16)
    monkeypatch.setattr("ella_cuda.data.preprocess.RESIZE_CHUNK", 3)
    assert torch.equal(resize(images, 16), whole)


def test_shrinking_averages_all_pixels():
    """The antialiasing filter: a checkerboard becomes grey, where skipping pixels would give black or white."""
    board = ((torch.arange(32)[:, None] + torch.arange(32)) % 2).float()[None, None]
    inner = resize(board, 8)[0, 0, 1:-1, 1:-1]
    assert (inner - 0.5).abs().max() < 0.02


def test_subsample_keeps_proportions_order_and_nests():
    data = load("digits")
    some, more = subsample(data, 200, seed=1), subsample(data, 400, seed=1)
    assert len(some.train_images) == 200
    counts = some.train_labels.bincount()
    assert (counts - data.train_labels.bincount() * 200 / 1437).abs().max() < 1.5
    assert set(some.train_ids.tolist()) < set(more.train_ids.tolist())
    assert some.train_ids.tolist() == sorted(some.train_ids.tolist())
    assert torch.equal(some.test_images, data.test_images)
    assert set(subsample(data, 200, seed=2).train_ids.tolist()) != set(some.train_ids.tolist())
    for i, k in ((0, 17), (1, 150)):
        j = data.train_ids.tolist().index(some.train_ids[k])
        assert torch.equal(some.train_images[k], data.train_images[j]), i
        assert some.train_labels[k] == data.train_labels[j]


def test_subsample_of_the_test_images_leaves_the_others():
    data = load("digits")
    some = subsample(data, 100, 3, "test")
    assert torch.equal(some.train_images, data.train_images) and len(some.test_images) == len(some.test_labels) == 100
    assert ((some.test_labels.bincount() - data.test_labels.bincount() * 100 / 360).abs() < 1.5).all()
    positions = torch.searchsorted(data.test_ids, some.test_ids)
    assert torch.equal(data.test_images[positions], some.test_images)
    with pytest.raises(ValueError, match=r"test_size must be in 1\.\.360, the number of test images, got 361"):
        subsample(data, 361, 0, "test")


@pytest.mark.parametrize("size", [0, -1, 11])
def test_subsample_refuses_sizes_out_of_range(size):
    with pytest.raises(ValueError, match=r"train_size must be in 1\.\.10"):
        subsample(small(), size)


def test_holdout_splits_the_training_images_and_forgets_the_test_images():
    data = load("digits")
    split = holdout(data, 0.2, seed=0)
    kept, held = set(split.train_ids.tolist()), set(split.test_ids.tolist())
    assert len(held) == 287
    assert kept | held == set(data.train_ids.tolist())
    assert not kept & held
    assert not held & set(data.test_ids.tolist())
    assert (split.test_labels.bincount() - data.train_labels.bincount() * 0.2).abs().max() < 1.5
    j = data.train_ids.tolist().index(split.test_ids[5])
    assert torch.equal(split.test_images[5], data.train_images[j])
    assert torch.equal(holdout(data, 0.2, seed=0).test_ids, split.test_ids)
    assert not torch.equal(holdout(data, 0.2, seed=1).test_ids, split.test_ids)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 0.01, 0.99, float("nan")])
def test_holdout_refuses_to_leave_nothing(fraction):
    with pytest.raises(ValueError, match="fraction must lie between 0 and 1"):
        holdout(small(), fraction)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"train_images": torch.zeros(10, 2, 2)}, ValueError, r"train_images must have shape \(N, C, h, w\)"),
        ({"test_images": torch.zeros(4, 1, 3, 3)}, ValueError, r"must agree in \(C, h, w\)"),
        ({"train_images": torch.zeros(10, 1, 2, 2).double()}, TypeError, "train_images must be float32"),
        ({"train_labels": torch.zeros(9).long()}, ValueError, r"train_labels must have shape \(10,\)"),
        ({"test_labels": torch.zeros(4)}, TypeError, "test_labels must be int64"),
        ({"train_labels": torch.full((10,), 3)}, ValueError, r"train_labels must lie in 0\.\.2"),
        ({"test_labels": torch.full((4,), -1)}, ValueError, r"test_labels must lie in 0\.\.2"),
        ({"test_ids": torch.arange(4)}, ValueError, "an id twice"),
    ],
)
def test_a_data_set_that_does_not_fit_together_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        replace(small(), **change)
