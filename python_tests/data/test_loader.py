"""The loader: every image once an epoch, in an order that the generator's state decides."""

from __future__ import annotations

import pytest
import torch

from ella_cuda.data import TensorLoader


def labels_of(loader: TensorLoader) -> list[int]:
    return [int(y) for _, batch in loader for y in batch]


def loader(n: int = 23, batch_size: int = 5, **kwargs) -> TensorLoader:
    return TensorLoader(torch.arange(n)[:, None].float() * 2, torch.arange(n), batch_size, **kwargs)


def test_without_shuffle_in_order_and_again():
    it = loader()
    assert labels_of(it) == list(range(23)) == labels_of(it)
    assert [len(y) for _, y in it] == [5, 5, 5, 5, 3]
    assert len(it) == 5
    assert it.dataset_size == 23
    assert len(loader(n=20)) == 4


def test_shuffled_epochs_are_permutations_and_differ():
    it = loader(shuffle=True)
    first, second = labels_of(it), labels_of(it)
    assert sorted(first) == sorted(second) == list(range(23))
    assert first != second
    assert first != list(range(23))


def test_images_stay_with_their_labels():
    for x, y in loader(shuffle=True):
        assert torch.equal(x[:, 0], 2.0 * y)


@pytest.mark.parametrize("own", [False, True])
def test_restoring_the_generator_repeats_the_epochs(own):
    generator = torch.Generator().manual_seed(5) if own else None
    it = loader(shuffle=True, generator=generator)
    labels_of(it)
    state = generator.get_state() if own else torch.get_rng_state()
    epochs = [labels_of(it) for _ in range(3)]
    generator.set_state(state) if own else torch.set_rng_state(state)
    assert [labels_of(it) for _ in range(3)] == epochs


def test_an_own_generator_leaves_torchs_alone():
    before = torch.get_rng_state()
    labels_of(loader(shuffle=True, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), before)


def test_batches_live_where_the_data_are(device):
    it = TensorLoader(
        torch.zeros(6, 1, device=device), torch.zeros(6, dtype=torch.int64, device=device), 4, shuffle=True
    )
    assert {x.device.type for x, _ in it} == {device.type}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((torch.zeros(0, 1), torch.zeros(0), 1), "at least one image"),
        ((torch.zeros(2, 1), torch.zeros(3), 1), "got 2 and 3"),
        ((torch.zeros(2, 1), torch.zeros(2), 0), "batch_size must be at least 1"),
        ((torch.zeros(2, 1), torch.zeros(2, device="meta"), 1), "one device"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(args, message):
    with pytest.raises(ValueError, match=message):
        TensorLoader(*args)
