"""Partitions of labelled data by class, and the bounds of the evidence on them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ella_cuda.laplace import FullLaplace, NTKLaplace
from ella_cuda.training import ClassBatches, EvidenceCallback
from python_tests.laplace.checks import drawn, randomised

LABELS = torch.tensor([0] * 12 + [1] * 7 + [2] * 5)[torch.randperm(24, generator=torch.Generator().manual_seed(0))]


@pytest.mark.parametrize("kind", ["balanced", "single"])
def test_a_pass_has_each_data_point_once(kind):
    batches = ClassBatches(LABELS, 5, kind, torch.Generator().manual_seed(1))
    passes = [list(batches) for _ in range(2)]
    assert passes[0] != passes[1]
    for found in passes:
        assert sorted(i for batch in found for i in batch) == list(range(24)) and len(found) == len(batches)
        assert max(map(len, found)) <= 5
        counts = [torch.bincount(LABELS[batch], minlength=3) for batch in found]
        if kind == "single":
            assert [int((count > 0).sum()) for count in counts] == [1] * 6
            assert sorted(map(len, found)) == [3, 4, 4, 4, 4, 5]
        else:
            expected = [torch.bincount(LABELS) * len(batch) / 24 for batch in found]
            assert all((c - e).abs().max() < 1.5 for c, e in zip(counts, expected, strict=True))


@pytest.mark.parametrize("kind", ["balanced", "single"])
def test_each_data_point_has_equal_chances_to_be_in_the_first_batch(kind):
    """Its weight is N over the batch's size: the sum of weights where a point is in has mean 1."""
    batches, weights, n = ClassBatches(LABELS, 5, kind, torch.Generator().manual_seed(2)), torch.zeros(24), 4000
    for _ in range(n):
        first = next(iter(batches))
        weights[first] += 24 / len(first) / n
    assert (weights - 1).abs().max() < 5 * (5 / n) ** 0.5  # standard deviations of a mean


@pytest.mark.parametrize("kind", ["balanced", "single"])
def test_the_evidence_over_such_batches_is_a_bound_and_a_loop_takes_them(kind):
    model = randomised(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    data = TensorDataset(drawn(24, 4), LABELS)
    whole = FullLaplace(model).fit(DataLoader(data, 24)).log_marginal_likelihood()
    loader = DataLoader(data, batch_sampler=ClassBatches(LABELS, 12, kind))
    assert NTKLaplace(model).fit(loader).log_marginal_likelihood() < whole - 1
    evidence = EvidenceCallback(model, loader, form="ntk", batches=1)
    assert evidence.n_data == 24 and evidence.step(0) > 0 and evidence.la.n_data <= 12


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="ClassBatches: kind must be"):
        ClassBatches(LABELS, 5, "random")
    with pytest.raises(ValueError, match="ClassBatches: batch_size must be a positive integer"):
        ClassBatches(LABELS, 0)
    with pytest.raises(ValueError, match=r"one for each data point, got shape \(0,\)"):
        ClassBatches([], 5)
