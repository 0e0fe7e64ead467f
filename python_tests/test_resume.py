"""Folders of runs that are gone on with: by two at once, with other data, edited, damaged."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import shlex
import signal
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from ella_cuda import cli, experiments, run_folder
from ella_cuda.cli.grid import results_folder
from ella_cuda.digest import sealed
from ella_cuda.experiments import RunConfig, configure, prepare, prepare_for, run_grid, run_one
from ella_cuda.experiments.diary import Diary
from ella_cuda.experiments.folder import read_running
from ella_cuda.training.checkpoint import read_checkpoint
from python_tests.interrupting import interrupted
from python_tests.ops.checks import threads

pytestmark = pytest.mark.usefixtures("without_pictures")  # what is gone on with are numbers

SMALL = {"width": 1, "epochs": 3, "burn_in": 0, "frequency": 1, "hypersteps": 2, "train_size": 40, "test_size": 40}


def small(layer: str = "conv", objective: str = "map", seed: int = 0, data: str = "digits", **changes) -> RunConfig:
    return configure(data, "digit", layer, objective, seed, **{**SMALL, **changes})


def begun(config: RunConfig, folder: Path, **options) -> None:
    """The run in its grid's folder, interrupted at its second evaluation: its checkpoint is of the first."""
    with interrupted(Diary, "record", lambda _, e: e.epoch == 2), pytest.raises(KeyboardInterrupt):
        run_grid([config], folder, progress=False, **options)


def test_nothing_is_written_through_a_link_in_a_run_s_place(tmp_path):
    (tmp_path / "away").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / small().name).symlink_to(tmp_path / "away", target_is_directory=True)
    with pytest.raises(ValueError, match=r"is a link to .*away: what is written there would be outside of"):
        run_grid([small()], tmp_path / "out", progress=False)
    assert not [*(tmp_path / "away").iterdir()]


def hidden(folder: Path) -> list[Path]:
    return [p for p in folder.rglob(".*")]


def test_many_that_name_no_folder_get_one_each(tmp_path, monkeypatch):
    """Forks that are let go at one moment; the data are there already, so that all ask at once."""
    monkeypatch.chdir(tmp_path)
    config = small()
    prepare_for(config)
    context = multiprocessing.get_context("fork")
    barrier, found = context.Barrier(8), context.SimpleQueue()
    args = Namespace(cuda_graph=None, resume=None, out=None, tensorboard=None, data_dir=None, download=None)

    def ask() -> None:
        barrier.wait()
        for _ in range(5):
            found.put(str(results_folder(args, [config], "digits")))

    processes = [context.Process(target=ask) for _ in range(8)]
    for process in processes:
        process.start()
    folders = [found.get() for _ in range(40)]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert len(set(folders)) == 40 == len(list(Path("runs").iterdir()))
    assert {folder.rpartition("-")[2] for folder in folders} == {str(n) for n in range(1, 41)}


def test_a_file_in_the_place_of_the_results_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("")
    assert cli.main(["train", "--task", "digit"]) == 1
    assert "a folder in runs cannot be made (File exists); name another by --out" in capsys.readouterr().err


def test_two_that_go_on_with_one_folder(tmp_path, monkeypatch, capsys, forks):
    """The second ends at once and says who is first, inspect shows the folder, a killed first leaves its place, and nothing is lost."""
    monkeypatch.setattr("ella_cuda.claim.PATIENCE", 0.2)
    options = shlex.split(
        "--task digit --layer conv --objective map --width 1 --train-size 40 --test-size 40 --burn-in 0"
    )
    options += shlex.split("--frequency 1 --hypersteps 2 --epochs 30 --jobs 1")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "dir"
    first = forks.start(["train", *options, "--out", "dir"], tmp_path)
    try:
        while not list(folder.glob("*/checkpoint.pt")):
            assert first.poll() is None, first.communicate(timeout=60)
        first.send_signal(signal.SIGSTOP)  # at work as long as we look
        assert cli.main(["inspect", "dir", "--json"]) == 0
        (running,) = json.loads(capsys.readouterr().out)["running"]
        assert running["epoch"] >= 1
        for again in (["--resume", "dir"], [*options, "--out", "dir"]):
            assert cli.main(["train", *again]) in (1, 2)
            err = capsys.readouterr().err
            assert err.count("\n") == 1
            assert (
                "holds runs already" if "--out" in again else f"the folder dir is in use by process {first.pid} on "
            ) in err
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate(timeout=60)
    (checkpoint,) = folder.glob("*/checkpoint.pt")
    before = read_checkpoint(checkpoint)["epoch"]
    assert 1 <= before < 30
    for place in (folder, checkpoint.parent):
        (place / f".history.{first.pid}-7.tmp.json").write_text("half")
    with threads(1):
        assert cli.main(["train", "--resume", "dir"]) == 0
    assert "0 done before" in capsys.readouterr().out
    history = json.loads((checkpoint.parent / "history.json").read_text())
    assert [e["epoch"] for e in history["evaluations"]] == list(range(1, 31)) and len(history["losses"]) == 30
    assert not hidden(folder)


def test_two_calls_of_run_one_on_one_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("ella_cuda.claim.PATIENCE", 0.2)
    record, refused = Diary.record, []

    def again(self, evaluation):
        if evaluation.epoch == 1 and not refused:
            with pytest.raises(
                RuntimeError, match=f"the run's folder .* is in use by process {os.getpid()} on"
            ) as raised:
                run_one(small(), tmp_path, progress=False)
            refused.append(raised.value)
        record(self, evaluation)

    monkeypatch.setattr(Diary, "record", again)
    run_one(small(), tmp_path, progress=False)
    assert refused and not hidden(tmp_path)


def test_runs_go_on_with_other_threads_and_say_so(tmp_path, monkeypatch):
    """S-FC's learning rates follow from solves: here they come out otherwise in the ninth digit, as they do with other threads."""
    config = small("s_fc", "evidence", fan_in_limit=8)
    reach = experiments.optimizer._reach
    with threads(1):
        whole = run_one(config, tmp_path / "whole", progress=False)
        begun(config, tmp_path / "dir")
    monkeypatch.setattr(experiments.optimizer, "_reach", lambda basis: reach(basis) * (1 + 3e-9))
    words = r"2 thread\(s\), before it had 1: the same run up to rounding"
    with threads(2), pytest.warns(UserWarning, match=words) as said:
        (row,) = run_grid([config], tmp_path / "dir", progress=False)
    assert len([w for w in said if "thread" in str(w.message)]) == 1
    assert row["nll"] == pytest.approx(whole["nll"], rel=1e-3)
    sessions = json.loads((tmp_path / "dir" / "environment.json").read_text())
    assert [(s["threads"], s["jobs"], s["threads_per_run"]) for s in sessions] == [(1, 1, 1), (2, 1, 2)]
    groups = read_checkpoint(tmp_path / "dir" / config.name / "checkpoint.pt")["settings"]["optimizer_groups"]
    assert groups == read_checkpoint(tmp_path / "whole" / "checkpoint.pt")["settings"]["optimizer_groups"]


def test_workers_leave_the_word_of_other_threads_to_the_grid(tmp_path, monkeypatch):
    config = small()
    begun(config, tmp_path)
    path = tmp_path / config.name / "progress.json"
    run_folder.write_diary(path.parent, {**json.loads(path.read_text()), "threads": 7})
    monkeypatch.setattr("ella_cuda.experiments.grid.run_at_once", lambda *_: iter(()))
    with (
        pytest.warns(UserWarning, match=r"1 run begun with 7 thread\(s\) go on with 1: the same run"),
        pytest.raises(KeyError),
    ):
        run_grid([config], tmp_path, jobs=10_000, progress=False)


def write_mnist(root: Path, flip: bool = False) -> None:
    """60 images and their labels; the other ones have two of the labels exchanged."""
    pixels = np.random.default_rng(0).integers(0, 256, (60, 28, 28), dtype=np.uint8)
    labels = (np.arange(60) % 10).astype(np.uint8)
    if flip:
        labels[[0, 1]] = labels[[1, 0]]
    for name in ("train", "t10k"):
        for kind, array in (("images-idx3", pixels), ("labels-idx1", labels)):
            header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
            (root / f"{name}-{kind}-ubyte").write_bytes(header + array.tobytes())


@pytest.mark.filterwarnings("ignore:.*not as published")
def test_other_data_of_the_same_size_are_found(tmp_path):
    config = small(data="mnist", train_size=None)
    write_mnist(tmp_path)
    begun(config, tmp_path / "dir", data_dir=str(tmp_path))
    write_mnist(tmp_path, flip=True)
    prepare.cache_clear()
    with pytest.raises(ValueError, match="written with other training data, although equally many"):
        run_grid([config], tmp_path / "dir", progress=False, data_dir=str(tmp_path))
    write_mnist(tmp_path)
    prepare.cache_clear()
    run_grid([config], tmp_path / "dir", progress=False, data_dir=str(tmp_path))


def edit(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("done", [False, True])
def test_an_edited_configuration_is_refused(tmp_path, capsys, done):
    config = small(epochs=1 if done else 3)
    if done:
        run_grid([config], tmp_path / "dir", progress=False)
    else:
        begun(config, tmp_path / "dir")
    edit(tmp_path / "dir" / "config.json", lambda c: c["runs"][0].update(batch_size=32))
    before = {p: p.read_bytes() for p in tmp_path.rglob("*.*") if p.is_file()}
    assert cli.main(["train", "--resume", str(tmp_path / "dir")]) == 2
    err = capsys.readouterr().err
    assert "config.json was edited" in err and "its digest does not fit. Undo the edit" in err and err.count("\n") == 1
    assert {p: p.read_bytes() for p in tmp_path.rglob("*.*") if p.is_file()} == before


def test_what_another_run_left_is_refused_and_a_diary_that_is_gone_warns(tmp_path):
    config, other = small(), small(lr=0.05)
    assert config.name == other.name  # in grids of their own
    begun(config, tmp_path / "a")
    begun(other, tmp_path / "b")
    path = tmp_path / "a" / config.name / "progress.json"
    path.write_bytes((tmp_path / "b" / config.name / "progress.json").read_bytes())
    for call in (lambda: run_grid([config], tmp_path / "a", progress=False), lambda: read_running(tmp_path / "a")):
        with pytest.raises(ValueError, match=r"progress\.json is of a run with lr="):
            call()
    path.unlink()
    with pytest.warns(
        UserWarning, match=r"has a checkpoint\.pt but no progress\.json: its run goes on, and its evaluations"
    ):
        run_grid([config], tmp_path / "a", progress=False)


@pytest.mark.parametrize(
    ("change", "why"), [(lambda r: r.clear(), "no run is in it"), (lambda r: r.append(r[0]), "twice")]
)
def test_a_configuration_without_runs_or_with_one_twice_is_named(tmp_path, capsys, change, why):
    runs = [dataclasses.asdict(small())]
    change(runs)
    run_folder.write_config(tmp_path, runs, {})
    for args in (["train", "--resume", str(tmp_path)], ["inspect", str(tmp_path)]):
        assert cli.main(args) == 2
        err = capsys.readouterr().err
        assert "config.json is damaged or of another version (" in err and why in err and "start anew" in err


def test_a_run_is_asked_whether_it_is_of_the_configuration(tmp_path):
    """Whatever the folder says: a run of another batch size, seed, augmentation or choice of images has another checkpoint."""
    config = small()
    begun(config, tmp_path)
    changes = [
        {"batch_size": 32}, {"seed": 3}, {"augment": "flips-shifts"}, {"data_seed": 5}, {"train_size": 41}, {"width": 2},
    ]  # fmt: skip
    for change in changes:
        with pytest.raises(ValueError, match=rf"progress\.json is of a run with {next(iter(change))}="):
            run_one(dataclasses.replace(config, **change), tmp_path / config.name, progress=False)
    (tmp_path / config.name / "progress.json").unlink()
    for change in changes:
        with (
            pytest.raises(ValueError, match=r"checkpoint\.pt (was written with|has blocks)"),
            pytest.warns(UserWarning, match=r"no progress\.json"),
        ):
            run_one(dataclasses.replace(config, **change), tmp_path / config.name, progress=False)


def test_edited_numbers_of_finished_runs_are_refused(tmp_path, capsys):
    configs = [small(epochs=1), small(epochs=1, seed=1)]
    rows = run_grid(configs, tmp_path, progress=False)
    summary = tmp_path / "summary.json"
    for change in (
        lambda r: r[1].update(accuracy=99.0),
        lambda r: r[1]["layers"][0]["paths"]["conv"]["prior_precision"].update(weight=1.0),
        lambda r: (r[1].update(nll=0.1), r[1].pop("digest")),
        lambda r: r[1].pop("digest"),
    ):
        edit(summary, change)
        for args in (["train", "--resume", str(tmp_path)], ["inspect", str(tmp_path)]):
            assert cli.main(args) == 1
            err = capsys.readouterr().err
            assert "summary.json was edited, or is of another version: in row 2 its digest" in err
            assert "Undo the edit, or delete the row to do its run again" in err
        summary.write_text(json.dumps(rows))
    edit(summary, lambda r: r.pop(1))  # what the message advises
    again = run_grid(configs, tmp_path, progress=False)
    assert [r["digest"] for r in again] == [r["digest"] for r in rows]


def test_an_edited_diary_is_refused(tmp_path):
    config = small()
    begun(config, tmp_path)
    edit(tmp_path / config.name / "progress.json", lambda d: d["evaluations"][0].update(loss=0.0))
    with pytest.raises(
        ValueError, match=r"progress\.json was edited, .* Undo the edit, or move .* away to do that run again"
    ):
        run_grid([config], tmp_path, progress=False)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", b"\xff\xfe"),
        ("config.json", b"[]"),
        ("config.json", b'{"runs": 1, "options": {}}'),
        ("config.json", json.dumps(sealed({"runs": [3], "options": {}}, ["config.json"])).encode()),
        ("summary.json", b"\xff\xfe"),
        ("summary.json", b"{}"),
        ("summary.json", b"[1]"),
        ("progress.json", b"\xff\xfe"),
        ("progress.json", b"[]"),
        ("progress.json", b'{"seconds": 1.0, "layout": {}, "evaluations": []}'),
    ],
)
def test_a_damaged_file_is_named_with_what_to_do(tmp_path, capsys, file, content):
    config = small()
    begun(config, tmp_path)
    path = tmp_path / (config.name if file == "progress.json" else ".") / file
    path.write_bytes(content)
    for args in (["train", "--resume", str(tmp_path)], ["inspect", str(tmp_path)]):
        assert cli.main(args) in (1, 2)
        err = capsys.readouterr().err
        assert (
            f"{file} " in err
            and "or is of another version" in err.replace("damaged or", "or is")
            and err.count("\n") == 1
        )
        assert any(advice in err for advice in ("start anew", "move ", "delete the row"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("width", "4"), ("epochs", 2.0), ("lr", "0.1"), ("layer", 3), ("seed", True), ("device", None),
        ("task", ["digit"]),
    ],
)  # fmt: skip
def test_a_value_of_another_type_names_the_attribute_and_the_file(tmp_path, capsys, key, value):
    run = {**dataclasses.asdict(small()), key: value}
    with pytest.raises(ValueError, match=f"^{key} must be "):
        RunConfig(**run)
    run_folder.write_config(tmp_path, [run], {})
    assert cli.main(["inspect", str(tmp_path)]) == 2
    assert f"config.json is damaged or of another version ({key} must be" in capsys.readouterr().err


def test_a_note_of_the_environment_in_another_encoding_is_written_anew(tmp_path):
    for content in (b"\xff\xfe", b"{}"):
        run_grid([small(epochs=1)], tmp_path, progress=False)
        (tmp_path / "environment.json").write_bytes(content)
        run_grid([small(epochs=1)], tmp_path, progress=False)
        assert len(json.loads((tmp_path / "environment.json").read_text())) == 1


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(RunConfig) if f.type in ("int", "int | None")])
def test_every_whole_number_of_a_run_has_its_bounds(name):
    with pytest.raises(ValueError, match=f"^{name} must be at most "):
        dataclasses.replace(small(), **{name: 2**64})
    with pytest.raises(ValueError, match=f"^{name} must be at least "):
        dataclasses.replace(small(), **{name: -(2**64)})
