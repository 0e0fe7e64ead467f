"""Event files for TensorBoard: what is logged against the diary, each step once."""

from __future__ import annotations

import builtins
import json

import pytest

from ella_cuda import cli
from ella_cuda.experiments import configure, run_grid, run_one
from ella_cuda.experiments.diary import Diary
from ella_cuda.experiments.tensorboard import TensorBoardLog
from ella_cuda.training import checkpoint
from python_tests.interrupting import interrupted

SMALL = {"width": 1, "epochs": 4, "burn_in": 1, "frequency": 1, "hypersteps": 2, "train_size": 40, "test_size": 40}


class Writer:
    """Stands in for SummaryWriter; keeps what the files on a disk would show."""

    events: dict[str, dict[tuple[str, int], float]]

    def __init__(self, folder: str, purge_step: int) -> None:
        kept = Writer.events.setdefault(folder, {})
        for key in [k for k in kept if k[1] >= purge_step]:
            del kept[key]
        self.kept, self.unflushed = kept, {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        assert (tag, step) not in self.kept and (tag, step) not in self.unflushed
        self.unflushed[tag, step] = value

    def flush(self) -> None:
        self.kept.update(self.unflushed)
        self.unflushed.clear()

    close = flush


@pytest.fixture
def writer(monkeypatch) -> type[Writer]:
    Writer.events = {}
    for where in ("tensorboard", "run", "grid"):
        monkeypatch.setattr(f"ella_cuda.experiments.{where}.require_tensorboard", lambda: Writer)
    return Writer


def config(**changes):
    return configure("digits", "digit", "s_conv+conv", "evidence", learn="anchors+lengthscales", **{**SMALL, **changes})


def check(events: dict[tuple[str, int], float], row: dict, evaluations: list[dict]) -> None:
    """Every number of a diary is there once, and nothing else."""
    once = ("accuracy", "nll", "nll_predictive", "ece", "ece_plugin", "brier", "brier_plugin")
    expected = {(f"{key}/test", 4): row[key] for key in once}
    for e in evaluations:
        step = e["epoch"]
        expected["loss", step] = e["loss"]
        expected["accuracy/train", step] = 100 * e["accuracy"]
        expected |= {(f"prior_precision/{n}", step): v for n, v in e["prior_precision"].items()}
        expected |= {(f"inverse_lengthscale/{n}", step): v for n, v in e["inverse_lengthscale"].items()}
        expected |= {(f"anchors_moved/{n}", step): v["mean_displacement"] for n, v in e["anchors"].items()}
        if step > SMALL["burn_in"]:
            expected["neg_log_marginal_likelihood", step] = e["neg_log_marginal_likelihood"]
            gamma = e["effective_parameters"]
            for i in range(8):
                sums = {
                    p: sum(v for n, v in gamma.items() if n.startswith(f"blocks.{i}.{p}.")) for p in ("s_conv", "conv")
                }
                for path, value in sums.items():
                    tag = f"relative_effective_parameters/blocks.{i}.{path}"
                    expected[tag, step] = value / sum(sums.values())
    assert events == pytest.approx(expected, rel=1e-6)
    assert {step for _, step in events} == {1, 2, 3, 4}


def test_a_run_logs_what_its_diary_has(tmp_path, writer):
    row = run_one(config(), tmp_path, progress=False, tensorboard=True)
    history = json.loads((tmp_path / "history.json").read_text())
    check(writer.events[str(tmp_path / "tensorboard")], row, history["evaluations"])


def test_a_resumed_run_has_every_step_once(tmp_path, writer):
    """Killed between the log and the checkpoint of epoch 3, which is repeated; and begun without a log."""
    for name, logged in (("logged", True), ("plain", False)):
        stop = interrupted(checkpoint, "save_checkpoint", lambda _, state: state["epoch"] == 3)
        with stop, pytest.raises(KeyboardInterrupt):
            run_one(config(), tmp_path / name, progress=False, tensorboard=logged)
    assert {step for _, step in writer.events[str(tmp_path / "logged" / "tensorboard")]} == {1, 2, 3}
    for name in ("logged", "plain"):
        row = run_one(config(), tmp_path / name, progress=False, tensorboard=True)
        history = json.loads((tmp_path / name / "history.json").read_text())
        check(writer.events[str(tmp_path / name / "tensorboard")], row, history["evaluations"])
        # Killed after its last checkpoint: nothing is left to train.
        row = run_one(config(), tmp_path / name, progress=False, tensorboard=True)
        check(writer.events[str(tmp_path / name / "tensorboard")], row, history["evaluations"])


def test_the_numbers_do_not_depend_on_it(tmp_path, writer, monkeypatch):
    monkeypatch.setattr("ella_cuda.experiments.grid.save_report", lambda rows, out_dir: None)
    rows = [run_grid([config(epochs=3)], tmp_path / str(t), progress=False, tensorboard=t)[0] for t in (False, True)]
    plain, logged = ({k: v for k, v in row.items() if k != "seconds"} for row in rows)
    assert plain == logged
    assert list(writer.events) == [str(tmp_path / "True" / config().name / "tensorboard")]


def test_without_the_package_nothing_begins(tmp_path, monkeypatch, capsys):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith(("tensorboard", "torch.utils.tensorboard")):
            raise ModuleNotFoundError("No module named 'tensorboard'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "--layer", "conv", "--tensorboard", "--out", "dir"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "pip install tensorboard" in error
    with pytest.raises(RuntimeError, match="needs the package tensorboard"):
        run_one(config(), tmp_path / "dir", tensorboard=True)
    assert not list(tmp_path.iterdir())


def test_it_may_be_asked_for_in_any_session(tmp_path, monkeypatch):
    asked = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ella_cuda.experiments.run_grid", lambda *a, tensorboard, **k: asked.append(tensorboard) or [])
    (tmp_path / "dir").mkdir()
    options = ["train", "--task", "digit", "--layer", "conv", "--out", "dir"]
    assert cli.main(options) == cli.main([*options, "--tensorboard"]) == 0
    assert asked == [False, True]
    from ella_cuda.cli.grid import PER_SESSION

    assert "tensorboard" in PER_SESSION


def test_the_real_files_have_every_step_once(tmp_path):
    """Read back by TensorBoard's own reader, after a session that was killed before its last checkpoint."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with interrupted(Diary, "record", lambda _, e: e.epoch == 3), pytest.raises(KeyboardInterrupt):
        run_one(config(), tmp_path, progress=False, tensorboard=True)
    row = run_one(config(), tmp_path, progress=False, tensorboard=True)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    events = [(tag, e.step, e.value) for tag in read.Tags()["scalars"] for e in read.Scalars(tag)]
    assert len({(tag, step) for tag, step, _ in events}) == len(events)
    history = json.loads((tmp_path / "history.json").read_text())
    check({(tag, step): value for tag, step, value in events}, row, history["evaluations"])


def test_scalars_are_flushed_at_every_evaluation(tmp_path, writer):
    log = TensorBoardLog(tmp_path, {"layers": [], "others": {}})
    entry = {"epoch": 1, "loss": 2.0, "accuracy": 0.5, "neg_log_marginal_likelihood": None, "prior_precision": {}}
    log.write([{**entry, "effective_parameters": None, "inverse_lengthscale": {}, "anchors": {}}])
    assert writer.events[str(tmp_path)] == {("loss", 1): 2.0, ("accuracy/train", 1): 50.0}
