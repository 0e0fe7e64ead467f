"""The command as people run it: its own process, exit codes, files."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ella_cuda import __version__, cli, experiments
from ella_cuda.reports.pictures import Drawn
from ella_cuda.testing import KernelCheck, kernel_cases
from python_tests.forked import wait_for
from python_tests.ops.checks import threads

CODE = "import sys; from ella_cuda_command import main; sys.exit(main())"
SMALL = shlex.split("--width 1 --epochs 2 --burn-in 0 --frequency 1 --hypersteps 2 --train-size 40 --test-size 40")


def command(*args: str) -> list[str]:
    return [sys.executable, "-c", CODE, *args]


def environment() -> dict[str, str]:
    """The same package as here, one thread for equal numbers, and a window for pictures that nobody can open."""
    path = os.pathsep.join(p for p in sys.path if p)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MPLBACKEND": "tkagg"}


def run(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*args), capture_output=True, text=True, cwd=cwd, env=environment(), timeout=300)


def run_here(*args: str) -> None:
    """As :func:`run` computes, in this process and without pictures: the numbers to compare a run of another process with."""
    with threads(1), pytest.MonkeyPatch.context() as patch:
        patch.setattr("ella_cuda.reports.results.save_pictures", lambda *_: Drawn())
        assert cli.main([*args]) == 0


def test_a_reader_that_leaves_early_is_no_complaint(tmp_path, asked):
    assert cli.main(["train", "--task", "digit", "--layer", "conv", "--out", "dir"]) == 0
    reading, writing = os.pipe()
    os.close(reading)
    call, buffered = command("inspect", str(tmp_path / "dir")), {**environment(), "PYTHONUNBUFFERED": ""}
    with os.fdopen(writing, "wb") as left:
        done = subprocess.run(call, stdout=left, stderr=subprocess.PIPE, text=True, env=buffered, timeout=300)
    assert (done.returncode, done.stderr) == (1, "")


def rows_of(folder: Path) -> list[dict]:
    rows = json.loads((folder / "summary.json").read_text())
    return [{k: v for k, v in row.items() if k not in ("seconds", "digest")} for row in rows]


def test_train_then_inspect_then_resume(tmp_path, monkeypatch, capsys):
    done = run("train", "--task", "digit", "--layer", "conv", *SMALL, "--seed", "0", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("digits-20")
    assert folder.name.endswith("-1")
    assert f"results in runs/{folder.name}" in done.stdout
    rows = rows_of(folder)
    assert [(r["objective"], r["seed"]) for r in rows] == [("map", 0), ("evidence", 0), ("map", 1), ("evidence", 1)]
    for row in rows:
        assert set(shlex.split("task layer objective seed accuracy nll neg_log_marginal_likelihood layers")) <= set(row)
        assert 0 <= row["accuracy"] <= 100
        assert len(row["layers"]) == 8
    assert "mean over seeds 0, 1" in done.stdout
    mean = (rows[1]["nll"] + rows[3]["nll"]) / 2
    assert f"{mean:.3f}" in done.stdout
    with (folder / "summary.csv").open() as file:
        assert [float(r["nll"]) for r in csv.DictReader(file)] == [r["nll"] for r in rows]
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / rows[0]["run"] / "checkpoint.pt").exists()

    monkeypatch.chdir(tmp_path)
    assert cli.main(["inspect", str(folder)]) == 0
    seen = capsys.readouterr().out
    assert "4 runs finished, 0 begun, 0 waiting" in seen
    (drawn,) = (Path(line.split()[2].rstrip(",")) for line in seen.splitlines() if line.startswith("Pictures in"))
    assert (drawn / "curves.png").exists()

    assert cli.main(["compact", str(folder / rows[1]["run"]), "--out", str(tmp_path)]) == 0
    assert "paths" in capsys.readouterr().out
    loaded = experiments.load_run(folder / rows[1]["run"])
    table, images = (
        json.loads((tmp_path / "compact.json").read_text()),
        experiments.prepare_for(loaded.config).test_images,
    )
    program = torch.export.load(tmp_path / "compact.pt2").module()
    labels, was, now = experiments.prepare_for(loaded.config).test_labels, loaded.model(images), program(images)
    for logits, accuracy, nll in zip((was, now), table["accuracy, %"], table["NLL, nats"], strict=True):
        assert accuracy == pytest.approx(100 * (logits.argmax(1) == labels).double().mean().item(), abs=1e-3)
        assert nll == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), abs=1e-4)
    assert table["parameters"][0] == sum(p.numel() for p in loaded.model.parameters())
    assert table["parameters"][1] == sum(p.numel() for p in program.parameters())
    assert cli.main(["compact", str(folder / rows[1]["run"]), "--threshold", "0"]) == 2
    assert cli.main(["compact", str(folder / rows[1]["run"]), "--out", "nowhere"]) == 2
    capsys.readouterr()
    assert cli.main(["inspect", str(folder), "--json"]) == 0
    before = (folder / "summary.json").read_text()
    state = json.loads(capsys.readouterr().out)
    assert state["finished"] == json.loads(before)
    assert [e["epoch"] for e in state["evaluations"][rows[1]["run"]]] == [1, 2]
    assert "pictures" not in state
    assert cli.main(["inspect", str(folder), "--json", "--pictures", "drawn"]) == 0
    state = json.loads(capsys.readouterr().out)
    # PNG and SVG: curves, every run's curves, filters, reliability and points left out, evidence's precisions.
    assert len(state["pictures"]) == 2 * (1 + 4 + 5 + 4 + 5)
    assert {Path(p) for p in state["pictures"]} == {p.relative_to(tmp_path) for p in (tmp_path / "drawn").rglob("*.*")}

    assert cli.main(["train", "--resume", str(folder), "--width", "1", "--device", "auto"]) == 0
    assert "4 done before" in capsys.readouterr().out
    assert (folder / "summary.json").read_text() == before
    for clash in (["--width", "2"], ["--layer", "fc"], ["--lr", "0.1"], ["--all"]):
        assert cli.main(["train", "--resume", str(folder), *clash]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert clash[0] in err
    assert cli.main(["train", "--out", str(folder)]) == 2
    assert f"--resume {folder}" in capsys.readouterr().err
    assert (folder / "summary.json").read_text() == before


@pytest.mark.slow
def test_a_killed_grid_resumes_to_the_numbers_of_one_that_was_not(tmp_path, capsys, forks):
    options = ["train", "--task", "digit", "--layer", "conv", *SMALL, "--epochs", "4"]
    run_here(*options, "--out", str(tmp_path / "whole"))
    started = forks.start([*options, "--out", "killed"], tmp_path)
    second = tmp_path / "killed" / "digits-digit-conv-evidence-seed0"
    wait_for(second / "checkpoint.pt", started)
    started.send_signal(signal.SIGKILL)
    started.communicate(timeout=60)
    assert len(rows_of(tmp_path / "killed")) == 1  # the first run is done, the second is not
    assert cli.main(["inspect", str(tmp_path / "killed"), "--pictures", str(tmp_path / "drawn")]) == 0
    seen = capsys.readouterr().out
    assert f"Pictures in {tmp_path / 'drawn'}" in seen
    assert {p.name for p in (tmp_path / "drawn" / second.name).iterdir()} == {
        f"{name}.{kind}" for name in ("curves", "precisions", "filters") for kind in ("png", "svg")
    }
    assert "1 run finished, 1 begun, 0 waiting" in seen
    assert "of 4)" in seen and "running" not in seen
    assert re.search(rf"\n{second.name}: begun, last written \d+ s ago; epoch \d of 4, ", seen)
    os.utime(second / "progress.json", (0, time.time() - 3 * 3600))
    assert cli.main(["inspect", str(tmp_path / "killed")]) == 0
    assert "begun, last written 3 h ago; " in capsys.readouterr().out
    run_here("train", "--resume", str(tmp_path / "killed"))
    assert rows_of(tmp_path / "killed") == rows_of(tmp_path / "whole")


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on(tmp_path, forks):
    options = ["train", "--task", "digit", "--layer", "conv", *SMALL, "--epochs", "1000", "--jobs", "2", "--out", "dir"]
    started = forks.start(options, tmp_path)
    wait_for(tmp_path / "dir" / "digits-digit-conv-map-seed0" / "checkpoint.pt", started)
    started.send_signal(signal.SIGINT)
    _, errors = started.communicate(timeout=120)
    assert started.returncode == 130
    assert errors == "ella-cuda: interrupted; go on with: ella-cuda train --resume dir\n"


def test_info_checks_every_kernel(tmp_path, forks):
    done = forks.start(["info"], tmp_path)
    out, err = done.communicate(timeout=300)
    assert done.returncode == 0, out + err
    assert torch.__version__ in out
    assert all(name in out for name, *_ in kernel_cases())
    assert "FAILED" not in out


def test_check_is_one_line(monkeypatch, capsys):
    right = KernelCheck("kron_logdet", torch.float32, 0.0, 1e-6, True)
    monkeypatch.setattr("ella_cuda.cli.check.check_kernels", lambda device: [right, right])
    assert cli.main(["check", "--device", "cpu"]) == 0
    assert re.fullmatch(r"2 checks ok, CPU: (AVX-512|AVX2|NEON|baseline), CUDA: \S+\n", capsys.readouterr().out)


@pytest.mark.parametrize("command", ["info", "check"])
def test_a_kernel_that_is_wrong_fails(command, monkeypatch, capsys):
    wrong = KernelCheck("kron_logdet", torch.float32, 0.5, 1e-6, False)
    monkeypatch.setattr(f"ella_cuda.cli.{command}.check_kernels", lambda device: [wrong])
    assert cli.main([command]) == 1
    out, err = capsys.readouterr()
    assert ("FAILED" in out) == (command == "info")
    assert err.count("\n") == 1
    assert "kron_logdet disagree" in err


@pytest.mark.parametrize(
    "args",
    [
        ["fly"],
        ["train", "--task", "upside-down"],
        ["train", "--layer", "dense"],
        ["train", "--width", "none"],
        ["train", "--width", "0"],
        ["train", "--holdout", "2"],
        ["train", "--objective", "elbo"],
        ["train", "--device", "tpu"],
        ["train", "--out", "a", "--resume", "b"],
        ["train", "--out", ""],
        ["train", "--resume", ""],
        ["reproduce", "group-convs", "--out", ""],
        ["inspect", ""],
        ["train", "--seed", str(2**64)],
        ["train", "--resume", "not-there"],
        ["inspect"],
        ["info", "--device", "tpu"],
    ],
)
def test_wrong_usage_is_2_and_writes_nothing(args, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(args) == 2
    assert capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"ella-cuda {__version__}"


def one_line(capsys) -> str:
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith("ella-cuda: failed: ")
    return err


def test_failures_are_1_and_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "--data", "mnist"]) == 1
    assert "train-images-idx3-ubyte" in one_line(capsys)
    (tmp_path / "file").write_text("")
    assert cli.main(["train", "--out", "file/dir"]) == 1
    assert "cannot be made" in one_line(capsys)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_verbose_adds_the_traceback(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "--data", "mnist", "--verbose"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "FileNotFoundError" in err


def test_a_defect_is_named_by_its_type(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(experiments, "run_grid", lambda *a, **k: {}["missing"])
    assert cli.main(["train"]) == 1
    assert "KeyError: 'missing'" in one_line(capsys)


def test_a_full_disk_fails_and_keeps_the_finished_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = ["--task", "digit", "--layer", "conv", "--objective", "map", *SMALL, "--epochs", "1", "--out", "dir"]
    assert cli.main(["train", *options]) == 0
    capsys.readouterr()
    before = (tmp_path / "dir" / "summary.json").read_text()

    def full(self, *args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    assert cli.main(["train", "--resume", "dir"]) == 1
    assert "No space left on device" in one_line(capsys)
    assert (tmp_path / "dir" / "summary.json").read_text() == before


@pytest.mark.parametrize(("jobs", "prepared"), [("1", 1), ("2", 0)])
def test_runs_in_this_process_have_the_settings_of_workers(asked, monkeypatch, jobs, prepared):
    calls = []
    monkeypatch.setattr("ella_cuda.cli.grid.prepare_process", lambda: calls.append(None))
    assert cli.main(["train", "--device", "cpu", "--jobs", jobs]) == 0
    assert len(calls) == prepared


def kinds(configs: list[experiments.RunConfig]) -> list[tuple[str, str, str, int]]:
    return [(c.task, c.layer, c.objective, c.seed) for c in configs]


def test_without_arguments_the_papers_table_but_fc(asked):
    assert cli.main(["train"]) == 0
    table = [("conv", "map"), ("f_fc+conv", "map"), ("conv", "evidence"), ("f_fc+conv", "evidence")]
    assert kinds(asked[0].configs) == [
        (task, layer, objective, 0) for task in ("digit", "quadrant") for layer, objective in table
    ]
    assert {c.data for c in asked[0].configs} == {"digits"}


def test_named_runs_only(asked):
    assert cli.main(shlex.split("train --task plain --layer fc --objective evidence --seed 3 4")) == 0
    assert kinds(asked[0].configs) == [("plain", "fc", "evidence", 3), ("plain", "fc", "evidence", 4)]


def test_what_is_learned_is_a_run_of_its_own_where_there_is_something_to_learn(asked):
    command = shlex.split("train --task digit --layer conv s_fc --learn none anchors lengthscales")
    assert cli.main(command) == cli.main(["train", "--layer", "s_conv", "--objective", "evidence"]) == 0
    assert [(c.layer, c.objective, c.learn) for c in asked[0].configs] == [
        ("conv", "map", ""),
        ("s_fc", "map", ""),
        ("conv", "evidence", ""),
        ("s_fc", "evidence", ""),
        ("s_fc", "evidence", "anchors"),
        ("s_fc", "evidence", "lengthscales"),
    ]
    assert {c.learn for c in asked[1].configs} == {""}


def test_a_folder_without_an_evaluation_has_nothing_to_draw(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(experiments, "read_grid", lambda folder: ([], {}))
    monkeypatch.setattr(experiments, "read_running", lambda folder: [])
    assert cli.main(["inspect", str(tmp_path)]) == 0
    assert cli.main(["inspect", str(tmp_path), "--pictures", str(tmp_path / "drawn")]) == 1
    assert "nothing to draw" in one_line(capsys)
    assert not (tmp_path / "drawn").exists()


def test_the_order_of_what_is_learned_does_not_matter(asked, capsys):
    command = shlex.split("train --layer s_fc --objective evidence --task digit --learn")
    assert cli.main([*command, "lengthscales+anchors", "anchors+lengthscales"]) == 0
    assert [c.learn for c in asked[0].configs] == ["anchors+lengthscales"]  # one run, not the same one twice
    assert cli.main([*command, "anchors+anchors"]) == 2
    assert "--learn 'anchors+anchors' is none of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--layer f_fc+conv --learn lengthscales", "needs evidence runs of a layer with s_conv or s_fc"),
        ("--layer s_fc --objective map --learn anchors", "needs evidence runs"),
        ("--layer s_fc --lr-anchors 0.1", "--learn"),
        ("--layer s_fc --learn anchors --lr-lengthscales 0.1", "no run learns lengthscales"),
        ("--layer s_conv --inverse-lengthscale 0.3", "s_fc paths"),
    ],
)
def test_options_without_effect_are_refused(asked, capsys, options, words):
    assert cli.main(["train", *options.split()]) == 2
    assert words in capsys.readouterr().err and not asked


def test_numbers_given_reach_the_run(asked):
    given = {
        "batch_size": 7,
        "lr": 0.5,
        "prior_prec_init": 2.0,
        "lr_hyp": 0.3,
        "frequency": 4,
        "fisher": "mc",
        "burn_in": 1,
    }
    given |= {"resolution": "per_channel", "approximation": "reduce", "holdout": 0.2, "data_seed": 9, "epochs": 3}
    given |= {"prior_structure": "module", "width": 6, "train_size": 99, "init": "published", "cooldown": 0.5}
    given |= {"hyper_optimizer": "mackay", "hyper_step_limit": 1.5, "restarts": "evidence", "fan_in_limit": 77}
    given |= {"augment": "flips-shifts", "hypersteps": 5, "device": "cpu"}
    words = (word for name, value in given.items() for word in ("--" + name.replace("_", "-"), str(value)))
    args = ["--task", "rotated", *words]
    assert cli.main(["train", *args]) == 0
    assert len(asked[0].configs) == 4
    for config in asked[0].configs:
        assert {name: getattr(config, name) for name in given} == given


def test_every_run_folder_is_new(asked, capsys):
    for n in (1, 2, 3):
        assert cli.main(["train"]) == 0
        assert capsys.readouterr().out.splitlines()[0].endswith(f"-{n}")
