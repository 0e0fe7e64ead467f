"""Packing of symmetric matrices, shares of work and of data: against what numpy, brute force and counting say."""

from __future__ import annotations

import random

import pytest
import torch

from ella_cuda.data import TensorLoader
from ella_cuda.distributed import Shard, owners, pack, packed_numbers, slice_of, unpack
from python_tests.laplace.checks import Reusing


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 3, 27, 64, 255, 1024])
def test_packing_keeps_every_number(size, dtype):
    groups = 2 if size < 1000 else 1
    half = torch.randn(groups, size, size, dtype=dtype).tril()
    matrices = half + half.tril(-1).mT
    packed = pack(matrices)
    assert packed.numel() == groups * size * (size + 1) // 2 == packed_numbers(groups, size)
    lower = torch.tril_indices(size, size)
    assert torch.equal(packed.flatten(1).sort().values, matrices[:, lower[0], lower[1]].sort().values)
    out = torch.full_like(matrices, float("nan"))
    assert unpack(packed, out) is out and torch.equal(out, matrices)


def test_packed_matrices_add_up():
    one, other = (torch.randn(3, 5, 5, dtype=torch.float64) for _ in range(2))
    one, other = one + one.mT, other + other.mT
    assert torch.equal(unpack(pack(one) + pack(other), torch.empty_like(one)), one + other)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 64])
def test_no_owner_has_more_than_four_thirds_of_what_cannot_be_avoided(ranks):
    draw = random.Random(0)
    for count in (0, 1, 5, 40, 200):
        costs = [float(draw.choice([27, 64, 255, 1024]) ** 3) for _ in range(count)]
        owner = owners(costs, ranks)
        load = [sum(c for c, o in zip(costs, owner, strict=True) if o == rank) for rank in range(ranks)]
        assert sum(load) == sum(costs) and max(load) <= 4 / 3 * max(sum(costs) / ranks, max(costs, default=0.0))
        assert owner == owners(costs, ranks)


def test_a_piece_goes_to_whom_has_the_least_work_not_the_fewest_pieces():
    assert owners([1, 1, 7, 1, 1, 1, 1, 1, 1], 2) == [1, 1, 0, 1, 1, 1, 1, 1, 0]


@pytest.mark.parametrize("count", [0, 1, 2, 10, 11])
def test_slices_are_a_partition(count):
    parts = [range(count)[slice_of(count, rank, 3)] for rank in range(3)]
    assert [i for part in parts for i in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_shards_are_whole_batches_of_one_plan():
    loader = TensorLoader(torch.arange(11), torch.arange(11), 2)
    shards = [Shard(loader, rank, 4) for rank in range(4)]
    assert [len(one) for one in shards] == [2, 2, 1, 1] and {one.dataset_size for one in shards} == {11}
    found = [[x.tolist() for x, _ in one] for one in shards]
    assert found == [[[0, 1], [8, 9]], [[2, 3], [10]], [[4, 5]], [[6, 7]]]
    assert [len(list(one)) for one in shards] == [2, 2, 1, 1]  # every pass begins anew
    assert shards[0].data_digest == loader.data_digest


def test_the_first_batch_of_a_plan_outlives_its_memory():
    batches = [(torch.full((2,), float(i)), torch.full((2,), i)) for i in range(3)]
    one = Shard(Reusing(batches), 1, 2)
    assert len(list(one)) == 1 and [part.tolist() for part in one.taken_first()] == [[0, 0], [0, 0]]
