"""``ella-cuda train --learn augmentation``: rows, files, resuming, refusals."""

from __future__ import annotations

import csv
import json
import math

import pytest
import torch

from ella_cuda import cli
from ella_cuda.augment import GENERATORS, AveragedFunction
from ella_cuda.data import black_as_zero, load, make_task, normalize, normalized_as, rotated, subsample
from ella_cuda.data.draws import uniform
from ella_cuda.experiments import configure, evaluate, load_run, prepare_for, read_evaluations, run_one
from ella_cuda.experiments.run import SAMPLED, SHOWN_COPIES
from ella_cuda.metrics import nll
from ella_cuda.training.trainer import MarglikTrainer
from python_tests.interrupting import interrupted

SMALL = {"width": 1, "epochs": 3, "burn_in": 1, "frequency": 1, "hypersteps": 2, "train_size": 30, "test_size": 20}
SMALL |= {"copies": 2}
OPTIONS = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
OPTIONS += ["--learn", "augmentation", "--jobs", "1", "--device", "cpu"]


def small(**changes):
    return configure("digits", "rotated", "conv", "evidence", 0, **{"learn": "augmentation", **SMALL, **changes})


@pytest.fixture
def undrawn(monkeypatch):
    """No picture, which takes longer than small networks do."""
    monkeypatch.setattr("ella_cuda.reports.pictures.folder.add_picture", lambda *_: None)


def test_amounts_are_in_rows_tables_pictures_and_inspect(tmp_path, capsys):
    folder = tmp_path / "out"
    options = "--task rotated --layer conv --objective map evidence --generators shear rotation"
    assert cli.main(["train", *OPTIONS, *options.split(), "--amount-init", "0.2", "--out", str(folder)]) == 0
    printed = capsys.readouterr().out
    plain, row = json.loads((folder / "summary.json").read_text())
    assert "augmentation" not in plain and plain["learn"] == ""
    assert list(row["augmentation"]) == ["rotation", "shear"] and row["learn"] == "augmentation"
    degrees = math.degrees(row["augmentation"]["rotation"])
    (line,) = [
        line for line in printed.splitlines() if "digits, task rotated, CONV, augmentation, evidence, seed 0  " in line
    ]
    assert [float(cell) for cell in line.split()[-2:]] == pytest.approx(
        [degrees, row["augmentation"]["shear"]], rel=5e-3
    )
    assert line.strip() in (folder / "table.txt").read_text()
    with (folder / "summary.csv").open() as file:
        cells = list(csv.DictReader(file))
    assert float(cells[1]["augmentation rotation"]) == row["augmentation"]["rotation"]
    assert not cells[0]["augmentation shear"]
    run = folder / row["run"]
    for name in ("amounts", "samples", "filters", "precisions"):
        assert {p.suffix for p in run.glob(f"{name}.*")} >= {".png", ".svg"}
    evaluations = read_evaluations(run)
    amounts = [e["learned"]["augmentation"]["rotation"] for e in evaluations]
    # None moves before the first evidence step's end, or after the last epoch.
    assert amounts[:2] == pytest.approx([0.2, 0.2]) and amounts[2] == row["augmentation"]["rotation"] != amounts[1]
    assert set(evaluations[-1]["effective_parameters"]) == set(evaluations[-1]["prior_precision"])
    assert cli.main(["inspect", str(folder), "--pictures", str(tmp_path / "pictures")]) == 0
    assert line.strip() in capsys.readouterr().out
    assert (tmp_path / "pictures" / row["run"] / "amounts.png").exists()


@pytest.mark.usefixtures("undrawn")
def test_a_running_run_shows_its_amounts(tmp_path, capsys):
    folder = tmp_path / "out"
    options = ["train", *OPTIONS, "--task", "plain", "--layer", "conv", "--objective", "evidence"]
    with interrupted(MarglikTrainer, "epoch", lambda self: self.epochs == 2):
        assert cli.main([*options, "--out", str(folder)]) == 130
    capsys.readouterr()
    assert cli.main(["inspect", str(folder), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["running"]
    assert row["augmentation"] == pytest.approx(dict.fromkeys(GENERATORS, 0.1))
    assert cli.main(["train", "--resume", str(folder)]) == 0
    whole = tmp_path / "whole"
    assert cli.main([*options, "--out", str(whole)]) == 0
    one, two = (json.loads((path / "summary.json").read_text())[0] for path in (folder, whole))
    assert {k: v for k, v in one.items() if k != "seconds"} == {k: v for k, v in two.items() if k != "seconds"}
    name = one["run"]
    assert (folder / name / "samples.json").read_bytes() == (whole / name / "samples.json").read_bytes()


def test_a_loaded_run_predicts_as_its_row_says(tmp_path):
    config = small(train_size=24, generators="rotation+tx")
    row = run_one(config, tmp_path, progress=False)
    model, la, found, _ = load_run(tmp_path, fit=True)
    assert isinstance(model, AveragedFunction) and model.augment.amounts() == row["augmentation"]
    data = prepare_for(found)
    assert not data.black.any() and float(data.train_images.min()) >= 0
    assert float(la.log_marginal_likelihood()) / la.n_data == pytest.approx(
        -row["neg_log_marginal_likelihood"], rel=1e-6
    )
    assert float(nll(la(data.test_images), data.test_labels)) == pytest.approx(row["nll_predictive"], rel=1e-5)
    draws = torch.tensor(json.loads((tmp_path / "samples.json").read_text())["draws"])
    assert draws.shape == (1, 2, 2)
    with model.augment.held(draws):
        assert evaluate(model, data.test_images, data.test_labels) == pytest.approx((row["accuracy"], row["nll"]))
    images = torch.tensor(json.loads((tmp_path / "samples.json").read_text())["images"])
    assert images.shape == (SAMPLED, 1 + SHOWN_COPIES, 32, 32) and images.min() >= 0 and images.max() <= 255
    (tmp_path / "samples.json").write_text("{}")
    with pytest.raises(ValueError, match=r"samples\.json was edited"):
        load_run(tmp_path, fit=True)


@pytest.mark.usefixtures("undrawn")
def test_other_layers_and_several_words_are_runs_of_their_own(tmp_path):
    folder = tmp_path / "out"
    options = ["--task", "plain", "--layer", "s_conv", "--objective", "map", "evidence", "--generators", "rotation"]
    options += ["--learn", "none", "augmentation"]
    assert cli.main(["train", *OPTIONS, *options, "--epochs", "2", "--burn-in", "0", "--out", str(folder)]) == 0
    rows = json.loads((folder / "summary.json").read_text())
    expected = [("map", "", False), ("evidence", "", False), ("evidence", "augmentation", True)]
    assert [(r["objective"], r["learn"], "augmentation" in r) for r in rows] == expected


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--learn", "augmentation"], "task must be one whose labels do not say where things are"),
        (["--learn", "augmentation", "--task", "quadrant"], "such as plain or digit or rotated"),
        (["--learn", "augmentation", "--task", "plain", "--objective", "map"], "--learn augmentation needs evidence runs."),
        (["--learn", "augmentation", "--task", "plain", "--layer", "fc"], "evidence runs; of layers with fc paths --all"),
        (["--learn", "augmentation", "lengthscales", "--task", "plain"], "--learn lengthscales needs evidence runs of a"),
        (["--learn", "augmentation", "--task", "plain", "--generators", "warp"], "generators must be names out of tx"),
        (["--learn", "augmentation", "--task", "plain", "--copies", "0"], "copies must be at least 1"),
        (["--learn", "augmentation", "--task", "plain", "--amount-init", "0"], "amount_init must be positive"),
        (["--learn", "augmentation", "--task", "plain", "--augment", "flips-shifts"], "augment must be none"),
        (["--learn", "augmentation", "--task", "plain", "--epochs", "3", "--burn-in", "3"], "burn_in must be less than epochs"),
        (["--task", "plain", "--copies", "3"], "--copies: of a learned augmentation"),
        (["--task", "plain", "--lr-aug", "0.1"], "--lr-aug: of what is learned; no run learns augmentation"),
    ],
)  # fmt: skip
def test_wrong_usage_is_2_and_says_what_to_do(args, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", *args]) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_ranges_of_tasks():
    digits = subsample(subsample(load("digits"), 12), 5, part="test")
    plain, turned = (make_task(digits, task) for task in ("plain", "rotated-90"))
    angles = uniform(digits.train_ids, 0, "angle", -math.pi / 2, math.pi / 2)
    assert angles.abs().max() > 0.9
    assert torch.equal(turned.train_images, rotated(plain.train_images, angles * 180 / math.pi))
    near, far = (make_task(digits, task) for task in ("translated", "translated-8of14"))
    drawn = [uniform(digits.train_ids, 0, f"shift {way}", -1, 1) for way in ("right", "down")]

    def centre(images):
        mass = images[:, 0] / images[:, 0].sum((1, 2), keepdim=True)
        places = torch.arange(32.0)
        return torch.stack([(mass.sum(1) * places).sum(1), (mass.sum(2) * places).sum(1)], 1)

    inside = [i for i in range(12) if all(abs(float(d[i])) < 0.2 for d in drawn)] or [
        min(range(12), key=lambda i: max(abs(float(d[i])) for d in drawn))
    ]
    for i in inside:
        moved = torch.stack([d[i] for d in drawn])
        for task, most in ((near, 8.0), (far, 32 * 8 / 28)):
            shift = (centre(task.train_images) - centre(plain.train_images))[i]
            assert shift.tolist() == pytest.approx((most * moved).tolist(), abs=0.35)
    assert not torch.equal(near.train_images, far.train_images)


def test_black_is_zero_and_nothing_else_changes():
    data = normalize(subsample(load("digits"), 20))
    moved = black_as_zero(data)
    assert not moved.black.any() and data.black.any()
    torch.testing.assert_close(moved.train_images, data.train_images - data.black[:, None, None])
    raw = torch.rand(3, 1, 8, 8)
    torch.testing.assert_close(normalized_as(raw, moved), normalized_as(raw, data) - data.black[:, None, None])
