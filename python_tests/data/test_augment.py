"""Flips and shifts against a loop over images; what the loader does with them, and what it moves between devices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ella_cuda.data import Dataset, FlipsShifts, TensorLoader, load, make_task, normalize


def by_loop(images: np.ndarray, draws: list[list[int]], fill: np.ndarray, reach: int) -> np.ndarray:
    """One image after the other: mirror it, lay it on a larger canvas, cut the canvas."""
    _, channels, height, width = images.shape
    out = np.empty_like(images)
    for n, (flip, right, down) in enumerate(draws):
        image = images[n, :, :, ::-1] if flip else images[n]
        canvas = np.empty((channels, height + 2 * reach, width + 2 * reach), images.dtype)
        canvas[:] = fill[:, None, None]
        canvas[:, reach : reach + height, reach : reach + width] = image
        out[n] = canvas[:, reach - down : reach - down + height, reach - right : reach - right + width]
    return out


@pytest.mark.parametrize(
    ("shape", "reach"), [((50, 3, 32, 32), 4), ((40, 1, 5, 9), 4), ((20, 2, 3, 3), 5), ((9, 1, 8, 8), 0)]
)
def test_a_batch_is_its_images_one_by_one(device, shape, reach):
    images, fill = torch.randn(shape), torch.randn(shape[1])
    augment = FlipsShifts(fill.to(device), reach)
    draws = augment.draw(shape[0])
    made = augment(images.to(device), draws.to(device))
    assert np.array_equal(made.cpu().numpy(), by_loop(images.numpy(), draws.tolist(), fill.numpy(), reach))


def test_draws_are_uniform_and_independent():
    n = 162 * 400
    flip, right, down = FlipsShifts(torch.zeros(1)).draw(n).unbind(1)
    assert (flip.min(), flip.max(), right.min(), right.max(), down.min(), down.max()) == (0, 1, -4, 4, -4, 4)
    counts = (81 * flip + 9 * (right + 4) + down + 4).bincount(minlength=162)
    assert float(((counts - 400) ** 2 / 400).sum()) < 235  # 161 degrees of freedom: above once in ten thousand


def test_the_border_is_black_as_before_normalising():
    """Padding raw zeros and then normalising, as is usual, gives the same images; padding with 0 afterwards would be grey."""
    raw = Dataset(torch.rand(60, 3, 8, 8), torch.zeros(60).long(), torch.rand(2, 3, 8, 8), torch.zeros(2).long(), 1)
    made = normalize(raw)
    after, before = FlipsShifts(made.black), FlipsShifts(torch.zeros(3))
    draws = after.draw(60)
    std = raw.train_images.double().std(dim=(0, 2, 3), unbiased=False)[:, None, None]
    mean = raw.train_images.double().mean(dim=(0, 2, 3))[:, None, None]
    expected = (before(raw.train_images, draws) - mean) / std
    assert torch.allclose(after(made.train_images, draws).double(), expected, atol=1e-5)
    assert torch.allclose(made.black.double(), (-mean / std).flatten(), atol=1e-5)
    assert made.black.max() < -0.5


def test_black_goes_with_the_data(monkeypatch):
    data = load("digits")
    assert data.black.tolist() == [0.0]
    with monkeypatch.context() as patched:
        patched.setattr(Dataset, "__post_init__", lambda self: None)  # its checks read values, a meta tensor has none
        assert normalize(data).to("meta").black.device.type == "meta"
    with pytest.raises(ValueError, match=r"black must have shape \(1,\)"):
        Dataset(
            *(getattr(data, f"{p}_{k}") for p in ("train", "test") for k in ("images", "labels")),
            10,
            black=torch.zeros(3),
        )
    with pytest.raises(ValueError, match="not be normalised yet"):
        make_task(normalize(data), "digit")


def numbered(n: int = 23, **kwargs) -> TensorLoader:
    """Images whose middle pixels all have the image's number."""
    images = torch.arange(1.0, n + 1)[:, None, None, None].expand(n, 1, 12, 12).contiguous()
    return TensorLoader(images, torch.arange(1, n + 1), 5, augment=FlipsShifts(torch.tensor([-1.0])), **kwargs)


@pytest.mark.parametrize("shuffle", [False, True])
def test_augmented_images_keep_their_labels_and_differ_between_epochs(shuffle):
    loader = numbered(shuffle=shuffle)
    before = loader.images.clone()
    epochs = [list(loader) for _ in range(2)]
    for epoch in epochs:
        labels = torch.cat([y for _, y in epoch])
        assert sorted(labels.tolist()) == list(range(1, 24))
        assert shuffle != (labels.tolist() == list(range(1, 24)))
        for x, y in epoch:
            assert torch.equal(x[:, 0, 5, 5], y.float())
            assert set(x.unique().tolist()) <= {-1.0, *y.tolist()}
    borders = [
        sorted((int(label), int((x == -1).sum())) for xs, ys in e for x, label in zip(xs, ys, strict=True))
        for e in epochs
    ]
    assert borders[0] != borders[1]
    assert torch.equal(loader.images, before)


class Transfers(TorchDispatchMode):
    """Counts what goes from one device to another; on the meta device, reading a value back is an error of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [a for a in torch.utils._pytree.tree_leaves((args, out)) if isinstance(a, torch.Tensor) and a.dim()]
        self.count += len({t.device for t in tensors}) > 1
        return out


@pytest.mark.parametrize("augmented", [False, True])
def test_an_epoch_moves_one_tensor_to_the_data(augmented):
    """A meta tensor has no values: whatever is done to it is done where it is."""
    augment = FlipsShifts(torch.zeros(3, device="meta")) if augmented else None
    images, labels = torch.zeros(100, 3, 8, 8, device="meta"), torch.zeros(100, dtype=torch.int64, device="meta")
    loader = TensorLoader(images, labels, 10, shuffle=True, augment=augment)
    with Transfers() as transfers:
        assert [x.shape for x, _ in loader] == [(10, 3, 8, 8)] * 10
    assert transfers.count == 1
