"""Grids of several processes: the oracle is the grid of one."""

from __future__ import annotations

import pytest

from ella_cuda.run_folder import read_summary
from python_tests.distributed import works

pytestmark = pytest.mark.processes

RUNS = [{"seed": 0, "epochs": 1}, {"seed": 1, "epochs": 1, "objective": "map"}]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return works.grid(str(tmp_path_factory.mktemp("alone")), "runs", RUNS)["rows"]


def without_seconds(rows):
    return [{key: value for key, value in row.items() if key not in ("seconds", "digest")} for row in rows]


def test_runs_are_shared_out_and_are_those_of_one_process(processes, tmp_path, alone):
    first, second = processes.run("grid", 2, str(tmp_path), "runs", RUNS)
    assert sorted(first["did"] + second["did"]) == sorted(row["run"] for row in alone)
    assert sorted(first["seen"]) == sorted(row["run"] for row in alone) and not second["seen"]
    assert without_seconds(first["rows"]) == without_seconds(second["rows"]) == without_seconds(alone)
    assert without_seconds(read_summary(tmp_path)) == without_seconds(alone)
    again, _ = processes.run("grid", 2, str(tmp_path), "runs", RUNS)
    assert not again["did"] and again["rows"] == first["rows"]


def test_the_data_of_runs_are_shared_out(processes, tmp_path, alone):
    found = processes.run("grid", 2, str(tmp_path), "data", RUNS)
    for one in found:
        assert one["did"] == [row["run"] for row in alone] and one["rows"] == found[0]["rows"]
    for row, expected in zip(read_summary(tmp_path), alone, strict=True):
        assert row["neg_log_marginal_likelihood"] == pytest.approx(expected["neg_log_marginal_likelihood"], rel=1e-5)
        assert row["nll"] == pytest.approx(expected["nll"], rel=1e-4)
        assert row["layers"].keys() == expected["layers"].keys() if isinstance(row["layers"], dict) else row["layers"]


@pytest.mark.parametrize("spread", ["runs", "data"])
def test_a_run_that_fails_ends_all(processes, tmp_path, spread):
    for outcome in processes.fail("grid", 2, str(tmp_path), spread, RUNS, "fails"):
        assert outcome.error is not None and outcome.error[0] == "FloatingPointError", outcome
        assert "it diverged" in outcome.error[1]


@pytest.mark.parametrize("spread", ["runs", "data"])
def test_a_row_that_rank_0_cannot_record_ends_all(processes, tmp_path, spread):
    for outcome in processes.fail("grid", 2, str(tmp_path), spread, RUNS, "unrecorded"):
        assert outcome.error == ["OSError", "on rank 0 of 2: the disk is full"], outcome


def test_a_killed_process_ends_all_and_its_run_is_done_at_the_next_start(processes, tmp_path, alone):
    outcomes = processes.fail("grid", 2, str(tmp_path), "runs", RUNS, "killed")
    assert sorted(one.code for one in outcomes) == [-9, 1]
    first, _ = processes.run("grid", 2, str(tmp_path), "runs", RUNS)
    assert without_seconds(first["rows"]) == without_seconds(alone)


@pytest.mark.parametrize(("what", "words"), [("spread", "same spread"), ("configs", "same configs"), ("jobs", "on rank 1")])  # fmt: skip
def test_other_arguments_on_one_rank_are_refused_on_all(processes, tmp_path, what, words):
    for outcome in processes.fail("grid_apart", 2, str(tmp_path), what):
        assert outcome.error is not None and outcome.error[0] == "ValueError" and words in outcome.error[1], outcome
        assert outcome.seconds < 5


def test_a_folder_of_other_runs_is_refused_on_all(processes, tmp_path):
    works.grid(str(tmp_path), "runs", RUNS[1:])
    for outcome in processes.fail("grid", 2, str(tmp_path), "runs", RUNS[:1]):
        assert outcome.error is not None and "on rank 0 of 2" in outcome.error[1] and "other runs" in outcome.error[1]
