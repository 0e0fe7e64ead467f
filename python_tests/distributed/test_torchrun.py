"""What ``torchrun`` starts: the command, and a training that it starts again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ella_cuda import cli
from ella_cuda.cli.grid import failure_noted
from ella_cuda.experiments import device_of_process
from ella_cuda.training.checkpoint import read_checkpoint
from ella_cuda.training.processes import OneProcess

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--task", "quadrant", "--layer", "conv", "--objective", "map", "--epochs", "1", "--width", "1"]
SMALL += ["--train-size", "40", "--test-size", "40"]


def torchrun(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """In ``folder``, within what a slow machine needs to import torch several times."""
    path = os.pathsep.join([*(p for p in sys.path if p), str(ROOT)])
    environ = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environ |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    call = [sys.executable, "-m", "torch.distributed.run", "--standalone", *options]
    for _ in range(3):
        run = subprocess.run(call, cwd=folder, env=os.environ | environ, capture_output=True, text=True, timeout=300)
        # torchrun looks for a free port, which any other process may have taken by the time that rank 0 listens there.
        if "EADDRINUSE" not in run.stderr:
            break
    return run


@pytest.mark.processes
@pytest.mark.parametrize(("spread", "seeds"), [("data", [0]), ("runs", [0, 1])])
def test_the_command_shares_out_its_work_and_prints_once(tmp_path, spread, seeds):
    options = ["train", "--spread", spread, *SMALL, "--seed", *map(str, seeds), "--out", "found"]
    run = torchrun(tmp_path, "--nproc-per-node", "2", "-m", "python_tests.distributed.ended", *options)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("by 2 processes that share out") == 1 and run.stdout.count("Written to found") == 1
    assert [row["seed"] for row in json.loads((tmp_path / "found/summary.json").read_text())] == seeds
    if spread == "data":
        refused = torchrun(tmp_path, "--nproc-per-node", "2", "-m", "ella_cuda.cli", *options)
        assert refused.returncode != 0 and "holds runs already" in refused.stderr


@pytest.mark.processes
def test_a_restarted_training_repeats_every_bit(processes, tmp_path):
    expected = processes.run("train_stoppably", 3, str(tmp_path / "uninterrupted.pt"))[0]
    call = ["--nproc-per-node", "3", "-m", "python_tests.distributed.restarted", str(tmp_path)]
    ended = torchrun(tmp_path, "--max-restarts", "0", *call)
    assert ended.returncode != 0 and read_checkpoint(tmp_path / "checkpoint.pt")["epoch"] == 2
    (tmp_path / "checkpoint.pt").unlink()
    run = torchrun(tmp_path, "--max-restarts", "1", *call)
    assert run.returncode == 0, run.stderr
    for rank in range(3):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert all(
            torch.equal(value, expected[key]) if isinstance(value, torch.Tensor) else value == expected[key]
            for key, value in found.items()
        )


def test_what_a_rank_fails_with_goes_to_a_file_of_its_own(tmp_path):
    with pytest.raises(ValueError, match="of rank 1"), failure_noted(tmp_path, SimpleNamespace(rank=1, group=1)):
        raise ValueError("of rank 1")
    assert (tmp_path / "failure-rank-1.txt").read_text().splitlines()[-1] == "ValueError: of rank 1"
    with pytest.raises(ValueError, match="alone"), failure_noted(tmp_path, OneProcess()):
        raise ValueError("alone")
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("name", "local", "together", "found"),
    [
        ("cuda", "1", True, "cuda:1"),
        ("cuda", "1", False, "cuda"),
        ("cuda", None, True, "cuda"),
        ("cuda:0", "1", True, "cuda:0"),
        ("cpu", "1", True, "cpu"),
    ],
)
def test_a_process_has_the_gpu_of_its_local_rank(monkeypatch, name, local, together, found):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: together)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_RANK", local)
    assert device_of_process(torch.device(name)) == torch.device(found)
    assert chosen == ([torch.device(found)] if found == "cuda:1" else [])


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="local rank 2 needs a GPU of its own, and there are 2"):
        device_of_process(torch.device("cuda"))


@pytest.mark.parametrize(
    ("environ", "options", "words"),
    [
        ({}, ["--spread", "data"], "needs processes that torchrun starts"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, [], "one of 2 processes of torchrun, each of which would do all runs"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["--spread", "runs", "--jobs", "2"], "leave out --jobs 2"),
    ],
)
def test_the_option_and_torchrun_need_each_other(tmp_path, monkeypatch, capsys, environ, options, words):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["train", *options, *SMALL]) == 2
    assert words in capsys.readouterr().err and not list(tmp_path.iterdir())
