"""A training of several processes is that of one: the oracle is the training of this process alone."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path

import pytest
import torch

from ella_cuda.training.checkpoint import read_checkpoint
from python_tests.distributed import works


def require_near(found, expected, of_losses: float = 1e-6, of_precisions: float = 1e-5) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=of_losses)
    assert found["margliks"] == pytest.approx(expected["margliks"], rel=of_losses) and expected["margliks"]
    assert found["accuracies"] == pytest.approx(expected["accuracies"])
    assert (found["log_precision"] - expected["log_precision"]).abs().max() <= of_precisions
    assert found["sigma"] == pytest.approx(expected["sigma"], rel=of_precisions)


def same(one, other) -> bool:
    return all(torch.equal(v, other[k]) if isinstance(v, torch.Tensor) else v == other[k] for k, v in one.items())


@pytest.mark.parametrize(("loader", "ranks"), [("tensors", 2), ("tensors", 3), ("torch's", 2), ("torch's", 3), ("reusing", 2)])  # fmt: skip
def test_a_training_of_several_processes_is_that_of_one(processes, ranks, loader):
    options = {"loader": loader, "same_loader": loader == "reusing"}
    expected = works.training("float32", None, **options)
    found = processes.run("train", ranks, "float32", options)
    for one in found:
        require_near(one, expected)
        assert same(one, found[0])


@pytest.mark.parametrize("options", [{}, {"batches": 3}, {"batches": 1}])
def test_a_plain_loop_of_several_processes_is_that_of_one(processes, options):
    expected = works.plain_loop(options, False)["found"]
    values = processes.run("plain_loop", 2, options)
    assert values[0]["drawn next"] != values[1]["drawn next"], "ranks keep their random states"
    assert values[0]["fits"] == values[1]["fits"]
    assert not options or values[0]["fits"][0] != values[0]["fits"][1], "the same subset twice"
    found = [value["found"] for value in values]
    for one in found:
        assert same(one, found[0]) and one["margliks"] == pytest.approx(expected["margliks"], rel=1e-9)
        for name in ("precision", "weights"):
            torch.testing.assert_close(one[name], expected[name], rtol=1e-8, atol=1e-10)


@pytest.mark.processes
@pytest.mark.parametrize(
    "options",
    [
        {"shifted": True, "keep": "best"},
        {"network": "sparse", "learn": ["lengthscales", "anchors"]},
        {"network": "sparse", "learn": ["lengthscales"], "hold_factors": False},
        {"averaged": True, "n_epochs": 3},
        {
            "network": "sparse",
            "learn": ["lengthscales"],
            "hold_factors": False,
            "same_loader": True,
            "evidence_batch": 50,
        },
        {"averaged": True, "n_epochs": 3, "same_loader": True, "loader": "torch's"},
        {"objective": "map", "other_seeds": True},
        {"hyper_optimizer": "mackay", "fisher": "exact", "column_tolerance": 0.05},
    ],
    ids=lambda options: "+".join(map(str, options)),
)
def test_whatever_the_evidence_learns(processes, options):
    expected = works.training("float64", None, **options)
    found = processes.run("train", 3, "float64", options)
    for one in found:
        assert same(one, found[0])
        assert one["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        assert one["margliks"] == pytest.approx(expected["margliks"], rel=1e-9)
        assert (one["log_precision"] - expected["log_precision"]).abs().max() <= 1e-8
        assert (one["buffers"] - expected["buffers"]).abs().max() <= 1e-8
        assert (one["weights"] - expected["weights"]).abs().max() <= 1e-8


def test_the_code_of_the_page_runs(processes):
    page = (Path(__file__).parents[2] / "docs/distributed.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    one, other = processes.run("documented", 2, block)
    assert one == other and math.isfinite(one)


REFUSED = {
    "batch norm": ("ValueError", "'1' is a BatchNorm1d"),
    "graph": ("ValueError", "cuda_graph must be False"),
    "sampler": ("ValueError", "DistributedSampler"),
    "argument": ("ValueError", "on rank 1 of 3: marglik_training: lr_hyp must be positive"),
    "checkpoint": ("OSError", "on rank 0 of 3: "),
    "callback": ("ArithmeticError", "on rank 0 of 3: division by zero"),
    "label": ("ValueError", "on rank 1 of 3: "),
    "nan": ("FloatingPointError", "on rank 1 of 3: marglik_training: the loss is nan at epoch 1, step 1; the batch itself is not finite"),
    "parameters": ("ValueError", "rank 1 of 3 has another"),
    "nan, and fails": ("OSError", "on rank 1 of 3: it fails"),
    "targets": ("ValueError", "a batch must have a target for each data point, got 2 and 3"),
    "ends": ("ValueError", "at epoch 1, step 5 it ended on 1 of 3"),
    "first batch": ("ValueError", "same first batch of train_loader, but ranks 1, 2 of 3 have another"),
    "settings": ("ValueError", "same lr_hyp, but rank 1 of 3 has another ('0.2') than rank 0 ('0.1')"),
    "data": ("ValueError", "same data, but rank 1 of 3 has another"),
    "loader": ("OSError", "on rank 1 of 3: a file is gone"),
    "checkpoint on rank 1": ("ValueError", "checkpoint must be given on rank 0, which writes it, but rank 1 of 3 has one"),
    "dtype": ("ValueError", "same dtype, but rank 1 of 3 has another ('\"torch.float64\"')"),
    "marglik_loader": ("ValueError", "same marglik_loader, but rank 1 of 3 has another ('false')"),
    "n_data": ("ValueError", "same n_data, but rank 1 of 3 has another"),
    "shuffle": ("ValueError", "same plan of train_loader, but rank 1 of 3 has another"),
    "learner": ("ArithmeticError", "on rank 1 of 3: no gradient"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_wrong_on_one_rank_is_refused_on_all(processes, tmp_path, what):
    kind, words = REFUSED[what]
    for outcome in processes.fail("train_wrongly", 3, what, str(tmp_path)):
        assert outcome.error is not None and outcome.error[0] == kind, outcome
        assert words in outcome.error[1], outcome.error[1]
        assert outcome.seconds < 5


@pytest.mark.parametrize(("what", "rank"), [("on_evaluation", 0), ("on_evaluation", 2), ("checkpoint", 0), ("progress_bar", 0)])  # fmt: skip
def test_what_one_rank_alone_is_given_changes_no_number(processes, tmp_path, what, rank):
    expected = works.training("float32", None, n_epochs=3)
    for number, one in enumerate(processes.run("train_alone", 3, what, rank, str(tmp_path))):
        require_near(one, expected)
        assert one["seen"] == ([1, 2, 3] if what == "on_evaluation" and number == rank else [])
    assert (tmp_path / "checkpoint.pt").exists() == (what == "checkpoint")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("loaded", "same number of epochs done, but rank 1 of 3 has another (0) than rank 0 (1)"),
        ("last", "same last, but rank 1 of 3 has another (True)"),
        ("moved", "same parameters and buffers, but rank 1 of 3 has another"),
    ],
)
def test_ranks_that_part_ways_in_a_loop_of_their_own_are_told(processes, how, words):
    for outcome in processes.fail("part_ways", 3, how):
        assert outcome.error is not None and outcome.error[0] == "ValueError" and words in outcome.error[1], outcome
        assert outcome.seconds < 5


def test_a_rank_that_does_another_epoch_is_told(processes):
    first, second, third = (outcome.error for outcome in processes.fail("part_ways", 3, "ahead"))
    assert second[0] == "ValueError" and "another rank is at another one than rank 1 of 3" in second[1]
    for one in (first, third):
        assert one[0] == "ValueError" and "same number of epochs done, but rank 1 of 3 has another" in one[1]


def test_what_a_learner_learned_on_rank_0_goes_to_all(processes):
    assert processes.run("train_drifting", 3, False) == [[2.0, 2.0]] * 3  # of two evidence steps that epochs follow


def test_gradients_of_a_rank_s_own_data_are_refused(processes):
    for outcome in processes.fail("train_drifting", 3, True):
        words = "must be the same on all ranks, but those in 'drifting' differ"
        assert outcome.error is not None and words in outcome.error[1]


def test_every_learner_begins_with_random_numbers_that_all_ranks_share(processes):
    first, *others = processes.run("train_drawing", 3)
    assert len(first[0]) == len(first[1]) == 2 and others == [first, first]


def test_a_step_is_one_sum(processes):
    for found in processes.run("count_steps", 2):
        sums = [size for name, size in found["calls"] if name == "all_reduce"]
        assert found["steps"] == 11 and sums == [found["bytes"]] * found["steps"]
        assert len(found["calls"]) - len(sums) <= 5  # an epoch's: random state and two headers


def test_rank_0_alone_shows_a_bar(processes):
    first, second = processes.run("shown", 2)
    assert "training" in first and second == ""


@pytest.fixture(scope="module")
def uninterrupted(processes, tmp_path_factory):
    """By the number of processes, what a training gives that nothing interrupts; of one alone, in this process."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    several = processes.run("train_stoppably", 3, str(folder / "3.pt"))
    return {1: works.stoppable(str(folder / "1.pt"), None), 3: several[0]}


@pytest.mark.processes
@pytest.mark.parametrize(("before", "after"), [(3, 2), (3, 1), (1, 3)])
def test_a_checkpoint_is_gone_on_with_by_another_number_of_processes(processes, tmp_path, uninterrupted, before, after):
    path = str(tmp_path / "checkpoint.pt")
    if before == 1:
        with pytest.raises(RuntimeError, match="interrupted"):
            works.stoppable(path, None, "interrupted")
    else:
        assert all("interrupted" in o.error[1] for o in processes.fail("train_stoppably", before, path, "interrupted"))
    assert read_checkpoint(path)["epoch"] == 2
    found = [works.stoppable(path, None)] if after == 1 else processes.run("train_stoppably", after, path)
    for one in found:
        require_near(one, uninterrupted[1])


@pytest.mark.processes
def test_a_killed_process_ends_all_and_the_next_start_repeats_every_bit(processes, tmp_path, uninterrupted):
    path = str(tmp_path / "checkpoint.pt")
    begun = time.monotonic()
    outcomes = processes.fail("train_stoppably", 3, path, "killed")
    assert [outcome.code for outcome in outcomes] == [1, -9, 1] and time.monotonic() - begun < 10
    assert read_checkpoint(path)["epoch"] == 2
    for one in processes.run("train_stoppably", 3, path):
        assert same(one, uninterrupted[3])


@pytest.mark.processes
def test_a_checkpoint_of_rank_0_alone_is_gone_on_with_by_all(processes, tmp_path, uninterrupted):
    path = str(tmp_path / "checkpoint.pt")
    for one in processes.fail("train_stoppably", 3, path, "interrupted", True):
        assert "on rank 0 of 3: interrupted" in one.error[1]
    for one in processes.run("train_stoppably", 3, path, "", True):
        assert same(one, uninterrupted[3])


@pytest.mark.processes
@pytest.mark.parametrize(("how", "epoch"), [("saved before", 2), ("saved after", 3)])
def test_a_checkpoint_is_whole_whenever_rank_0_is_killed(processes, tmp_path, uninterrupted, how, epoch):
    path = str(tmp_path / "checkpoint.pt")
    outcomes = processes.fail("train_stoppably", 3, path, how)
    assert outcomes[0].code == -9 and all(one.code == 1 for one in outcomes[1:])
    assert read_checkpoint(path)["epoch"] == epoch
    assert same(processes.run("train_stoppably", 3, path)[2], uninterrupted[3])


@pytest.mark.processes
def test_a_checkpoint_has_nothing_of_the_group(processes, tmp_path):
    paths = [str(tmp_path / f"{ranks}.pt") for ranks in (1, 3)]
    works.stoppable(paths[0], None)
    processes.run("train_stoppably", 3, paths[1])
    one, three = (read_checkpoint(path) for path in paths)
    assert one.keys() == three.keys() and one["settings"] == three["settings"]
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith(".")) == ["1.pt", "3.pt"]
