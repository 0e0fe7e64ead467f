"""N: what every kind of loader yields in a pass, by counting it here, and what becomes of passes that yield something else."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from ella_cuda import marglik_training
from ella_cuda.data import TensorLoader
from ella_cuda.training.points import points_of

N = 24
X = torch.randn(N, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(N) % 3
DATA = TensorDataset(X, Y)


class Stream(IterableDataset):
    """Single examples, the same in every worker."""

    def __init__(self, count: int = N) -> None:
        self.count = count

    def __iter__(self):
        return iter([DATA[i] for i in range(self.count)])


class Sized(Stream):
    """A stream that says how long it is."""

    claim = N

    def __len__(self) -> int:
        return self.claim


class Buckets:
    """A batch sampler of one's own: batches of several sizes, image 0 twice, in an order drawn anew."""

    def __iter__(self):
        parts = [[0, 1, 2], [3, 4, 5, 6, 0], list(range(7, 20))]
        random.shuffle(parts)
        return iter(parts)


class Batches:
    """An iterable of one's own, which draws from every global generator."""

    def __iter__(self):
        sizes = (3, int(torch.randint(4, 5, ())), int(np.random.randint(2, 3)))
        return (DATA[:size] for size in sizes)


class Filtering:
    """Makes batches of the images below a number."""

    def __init__(self, below: int) -> None:
        self.below = below

    def __call__(self, pairs):
        kept = [(x, y) for x, y in pairs if (x == X[: self.below]).all(1).any()]
        return torch.utils.data.default_collate(kept) if kept else (X[:0], Y[:0])


LOADERS = {
    "default": DataLoader(DATA, 7),
    "shuffled": DataLoader(DATA, 7, shuffle=True),
    "drop_last": DataLoader(DATA, 7, shuffle=True, drop_last=True),
    "subset": DataLoader(DATA, 7, sampler=SubsetRandomSampler(range(17))),
    "weighted, more than there are": DataLoader(DATA, 7, sampler=WeightedRandomSampler(torch.ones(N), 50)),
    "weighted, drop_last": DataLoader(DATA, 7, sampler=WeightedRandomSampler(torch.ones(N), 50), drop_last=True),
    "some of them": DataLoader(DATA, 7, sampler=RandomSampler(DATA, num_samples=11)),
    "torch's batch sampler": DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 7, True)),
    "own batch sampler": DataLoader(DATA, batch_sampler=Buckets()),
    "own order, no sampler": DataLoader(DATA, batch_size=5, sampler=[3, 1, 2]),
    "whole batches": DataLoader([DATA[:5], DATA[5:24]], batch_size=None),
    "stream": DataLoader(Stream(), 7),
    "stream, drop_last": DataLoader(Stream(), 7, drop_last=True),
    "stream with a length": DataLoader(Sized(), 7),
    "stream with a length, drop_last": DataLoader(Sized(), 7, drop_last=True),
    "stream of two workers": DataLoader(Stream(), 7, num_workers=2),
    "stream with a length of two workers, drop_last": DataLoader(Sized(), 5, num_workers=2, drop_last=True),
    "list": [DATA[:5], DATA[5:24]],
    "iterable": Batches(),
    "tensors": TensorLoader(X, Y, 7, shuffle=True),
    "with an empty batch": [DATA[:5], DATA[:0], DATA[5:9]],
}
LOADERS["stream with a length of two workers, drop_last"].dataset.claim = 2 * N


def seeded() -> None:
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(3)


def drawn() -> list[float]:
    return [float(torch.rand(())), np.random.rand(), random.random()]


def objective(loader, precision: float = 7.0, **options) -> tuple[float, float]:
    """The first epoch's loss with weights that stay, less the mean loss of the images as they came: the prior's part; and what it is
    without 1/N."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    seeded()
    with torch.no_grad():
        pairs = [(model(x), y) for x, y in loader]
        data = nn.functional.cross_entropy(torch.cat([f for f, _ in pairs]), torch.cat([y for _, y in pairs]))
        norm = sum(p.square().sum() for p in model.parameters())
    seeded()
    *_, losses = marglik_training(
        model, loader, n_epochs=1, objective="map", prior_prec_init=precision, optimizer_cls=torch.optim.SGD,
        optimizer_kwargs={"lr": 0.0}, progress_bar=False, **options,
    )  # fmt: skip
    return losses[0] - float(data), precision / 2 * float(norm)


@pytest.mark.parametrize("kind", LOADERS)
def test_the_prior_weighs_against_what_a_pass_yields(kind):
    """And the loss that is reported is the images' mean, however uneven the batches are."""
    loader = LOADERS[kind]
    seeded()
    seen = sum(len(y) for _, y in loader)
    seeded()
    expected = drawn()
    seeded()
    assert points_of(loader, "train_loader").count == seen
    assert drawn() == expected  # counting takes nothing from the generators
    prior, weight = objective(loader)
    assert prior == pytest.approx(weight / seen, rel=1e-4)


def train(loader, n_epochs: int = 2, **options) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    marglik_training(model, loader, n_epochs=n_epochs, progress_bar=False, **({"objective": "map"} | options))
    return model


class Claiming(list):
    """Batches that say how many points they have."""

    def __init__(self, batches, dataset_size) -> None:
        super().__init__(batches)
        self.dataset_size = dataset_size


MORE = "must yield 20 data points in every pass.*a pass yielded 24"
FEWER = "must yield 30 data points in every pass.*a pass yielded 24 "


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (Claiming([DATA[:12], DATA[12:]], 20), MORE),
        (Claiming([DATA[:12], DATA[12:]], 30), FEWER),
        (DataLoader(DATA, 7, collate_fn=Filtering(9)), "must yield 24 data points .*a pass yielded 9 "),
        (DataLoader(Sized(19), 7), "must yield 24 data points .*a pass yielded 19 "),
    ],
    ids=["more than declared", "fewer than declared", "filtered", "a stream's false length"],
)
def test_another_number_than_declared_is_refused(loader, message):
    evaluations = []
    with pytest.raises(ValueError, match=f"train_loader {message}.*n_data=N"):
        train(loader, on_evaluation=evaluations.append)
    assert evaluations == []
    prior, weight = objective(loader, n_data=21)
    assert prior == pytest.approx(weight / 21, rel=1e-4)


def test_passes_that_differ_are_refused_when_they_do():
    class Growing:
        passes = 0

        def __iter__(self):
            self.passes += 1
            return iter([DATA[: 9 + (self.passes == 4)]])

    seen = []
    with pytest.raises(ValueError, match=r"must yield 9 data points .*a pass yielded 10"):
        train(Growing(), 5, on_evaluation=seen.append)
    assert [e.epoch for e in seen] == [1, 2]  # the first pass counts
    train(Growing(), 5, n_data=9)


def test_evidence_of_other_data_is_refused_unless_n_is_given():
    evidence, half = {"objective": "evidence"}, TensorLoader(X[:12], Y[:12], 7)
    with pytest.raises(ValueError, match="must yield as many data points as train_loader, got 12 and 24"):
        train(TensorLoader(X, Y, 7), marglik_loader=half, **evidence)
    with pytest.raises(ValueError, match=r"marglik_loader must yield 24 .*a pass yielded 12 "):
        train(TensorLoader(X, Y, 7), marglik_loader=Claiming([DATA[:12]], 24), **evidence)
    train(TensorLoader(X, Y, 7), marglik_loader=half, n_data=24, **evidence)
    train(TensorLoader(X, Y, 7), marglik_loader=half)  # no evidence is asked for


@pytest.mark.parametrize(
    "loader", [[], Claiming([], 0), [DATA[:0]], DataLoader(DATA, 30, drop_last=True), DataLoader(Stream(0), 3)]
)
def test_no_data(loader):
    with pytest.raises(ValueError, match="train_loader has no data points"):
        train(loader)
    with pytest.raises(ValueError, match="train_loader yielded no data in epoch 1"):
        train(loader, n_data=5)


def test_a_pass_that_cannot_be_repeated_is_found_before_a_step():
    class Once(IterableDataset):
        def __init__(self) -> None:
            self.examples = iter([DATA[i] for i in range(N)])

        def __iter__(self):
            return self.examples

    torch.manual_seed(0)
    before = nn.Linear(5, 3)
    model = nn.Linear(5, 3)
    model.load_state_dict(before.state_dict())
    with pytest.raises(ValueError, match=r"train_loader yielded no data in epoch 1.*__iter__ starts a new pass"):
        marglik_training(model, DataLoader(Once(), 7), n_epochs=3, objective="map", progress_bar=False)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))
