"""Which data a run is of, where loaders tell, and what a run does that is resumed with others, by others, or on other threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from ella_cuda import marglik_training
from ella_cuda.data import TensorLoader
from ella_cuda.training.checkpoint import read_checkpoint
from ella_cuda.training.data import data_digest
from python_tests.ops.checks import threads

X, Y = torch.linspace(-1, 1, 48).view(12, 4), torch.arange(12) % 2


class Plain:
    """A loader that says nothing of its data but their number."""

    dataset_size = 12

    def __init__(self, x=X, y=Y):
        self.x, self.y = x, y

    def __iter__(self):
        return zip(self.x.split(4), self.y.split(4), strict=True)


class Named(Plain):
    def __init__(self, name):
        super().__init__()
        self.data_digest = name


def train(loader, checkpoint, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    return marglik_training(model, loader, n_epochs=2, progress_bar=False, checkpoint=checkpoint, **options)


def stop(evaluation):
    if evaluation.epoch == 2:
        raise KeyboardInterrupt


def test_loaders_whose_data_can_be_had():
    whole = TensorDataset(X, Y)
    found = [
        TensorLoader(X, Y, 4),
        TensorLoader(X.flip(0), Y, 4),
        TensorLoader(X, 1 - Y, 4),
        DataLoader(Subset(whole, [0, 1, 2])),
        DataLoader(Subset(whole, [0, 1, 3])),
        DataLoader(Subset(Subset(whole, [0, 1, 3]), [0, 2])),
        Named("mine"),
        Named("other"),
    ]
    digests = [data_digest(loader) for loader in found]
    assert None not in digests and len(set(digests)) == len(digests)
    assert data_digest(DataLoader(whole, 3, shuffle=True)) == digests[0] == data_digest(TensorLoader(X, Y, 5, True))
    assert data_digest(TensorLoader(X, Y, 4, data_digest="theirs")) == "theirs"


def test_loaders_whose_data_cannot_be_had_still_work(tmp_path):
    class Own(TensorDataset):
        def __getitem__(self, index):
            return torch.zeros(4), 0

    for loader in (Plain(), DataLoader(Own(X, Y)), Named(None)):
        assert data_digest(loader) is None
    _, _, _, losses = train(Plain(), tmp_path / "run.pt")
    assert train(Plain(X.flip(0)), tmp_path / "run.pt")[3] == losses  # nobody can tell
    with pytest.raises(TypeError, match="data_digest must be a string or None, got int"):
        data_digest(Named(3))


@pytest.mark.parametrize("other", [(X.flip(0), Y), (X, 1 - Y)], ids=["images", "labels"])
def test_a_checkpoint_of_other_data_is_refused(tmp_path, other):
    *_, losses = train(TensorLoader(X, Y, 4), tmp_path / "run.pt")
    with pytest.raises(ValueError, match="written with other training data, although equally many"):
        train(TensorLoader(*other, 4), tmp_path / "run.pt")
    with pytest.raises(ValueError, match="written with other evidence data"):
        train(TensorLoader(X, Y, 4), tmp_path / "run.pt", marglik_loader=TensorLoader(*other, 4))
    assert train(TensorLoader(X.clone(), Y, 4), tmp_path / "run.pt")[3] == losses


def test_a_checkpoint_of_what_else_a_run_depends_on_is_refused(tmp_path):
    train(Plain(), tmp_path / "run.pt", depends_on={"flips": True, "size": 32})
    train(Plain(), tmp_path / "run.pt", depends_on={"size": 32, "flips": True})
    for others in ({"flips": True, "size": 28}, {"flips": True}, {"flips": True, "size": 32, "crop": 4}, None):
        with pytest.raises(ValueError, match=r"depends_on\['(size|crop|flips)'\]="):
            train(Plain(), tmp_path / "run.pt", depends_on=others)


HOLD = """
import sys, time
from python_tests.training.test_data import Plain, train
def stay(evaluation):
    print("here", flush=True)
    time.sleep(600)
train(Plain(), sys.argv[1], on_evaluation=stay)
"""


def test_one_call_at_a_time_works_on_a_checkpoint(tmp_path, beside_the_tests):
    """Another process, which is killed then; and another thread of one process."""
    path = tmp_path / "new" / "run.pt"
    command = [sys.executable, "-c", HOLD, str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=beside_the_tests, env=environment) as holder:
        try:
            assert holder.stdout.readline() == b"here\n"
            with pytest.raises(RuntimeError, match=rf"run\.pt is in use by process {holder.pid} on "):
                train(Plain(), path)
        finally:
            holder.kill()
    (path.parent / f".run.{holder.pid}-0.tmp.pt").write_text("half")
    refused: list[Exception] = []

    def again(evaluation):
        def other():
            try:
                train(Plain(), path)
            except RuntimeError as error:
                refused.append(error)

        if not refused:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

    train(Plain(), path, on_evaluation=again)
    assert f"in use by process {os.getpid()} on " in str(refused[0])
    assert os.listdir(path.parent) == ["run.pt"]


def test_a_checkpoint_of_other_threads_goes_on_and_says_so(tmp_path):
    with threads(1), pytest.raises(KeyboardInterrupt):
        train(Plain(), tmp_path / "run.pt", on_evaluation=stop)
    assert read_checkpoint(tmp_path / "run.pt")["threads"] == 1
    with threads(2):
        with pytest.warns(UserWarning, match=r"2 thread\(s\), before it had 1: .* up to rounding, not bit for bit"):
            train(Plain(), tmp_path / "run.pt")
        with warnings.catch_warnings(action="error"):
            train(Plain(), tmp_path / "run.pt")


def test_rates_that_rounding_changed_are_no_other_run(tmp_path):
    """As they are where a rate follows from a solve, which hangs on the number of threads."""

    def optimizer(factor):
        def make(parameters, **options):
            groups = [{"params": [p], "lr": 1e-3 * factor} for p in parameters]
            return torch.optim.Adam(groups, **options)

        return make

    *_, whole = train(Plain(), None, optimizer_cls=optimizer(1.0))
    with pytest.raises(KeyboardInterrupt):
        train(Plain(), tmp_path / "run.pt", optimizer_cls=optimizer(1.0), on_evaluation=stop)
    *_, resumed = train(Plain(), tmp_path / "run.pt", optimizer_cls=optimizer(1 + 1e-9))
    assert resumed == whole  # the rates go on as they were
    with pytest.raises(ValueError, match=r"optimizer_groups\[0\]\['lr'\]='0\.001', this run has '0\.0010"):
        train(Plain(), tmp_path / "run.pt", optimizer_cls=optimizer(1.001))
    assert json.loads(json.dumps(read_checkpoint(tmp_path / "run.pt")["settings"]))  # plain values
