"""What a run says of its predictions, against definitions written out here."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch import Tensor

from ella_cuda import cli
from ella_cuda.data import load, resize
from ella_cuda.experiments import LoadedRun, RunConfig, configure, load_run, prepare_for, run_one
from ella_cuda.experiments.evaluation import asked_images, describe_predictions
from ella_cuda.reports import results_table
from python_tests.data.test_sources import write_cifar, write_idx

pytestmark = pytest.mark.filterwarnings("ignore:.*not as published")
SMALL = {"width": 1, "epochs": 2, "burn_in": 0, "frequency": 1, "hypersteps": 2, "train_size": 40, "test_size": 60}


def small(objective: str = "evidence", **changes) -> RunConfig:
    return configure("digits", "plain", "conv", objective, 0, **{**SMALL, **changes})


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MNIST and CIFAR-10 as files of noise, MNIST's 30 test images in order of their labels."""
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for part, n in (("train", 4), ("t10k", 30)):
        write_idx(root / f"{part}-images-idx3-ubyte", rng.integers(0, 256, (n, 28, 28)), False)
        write_idx(root / f"{part}-labels-idx1-ubyte", np.arange(n) * 10 // n, False)
    write_cifar(root, False, 2)
    return root


def both(loaded: LoadedRun, images: Tensor) -> dict[str, np.ndarray]:
    with torch.no_grad():
        plugin = torch.softmax(loaded.model(images).double(), 1)
    return {"plugin": plugin.numpy(), "predictive": loaded.la(images).double().numpy()}


@pytest.fixture(scope="module", params=["evidence", "map"])
def asked(request: pytest.FixtureRequest, data_dir: Path, tmp_path_factory: pytest.TempPathFactory):
    """A run that was asked about other data and turned images: its configuration, row and network."""
    config, folder = small(request.param, ood="rotated+mnist", ood_size=20), tmp_path_factory.mktemp("run")
    row = run_one(config, folder, progress=False, data_dir=str(data_dir))
    loaded = load_run(folder, fit=True)
    assert float(loaded.la.log_marginal_likelihood()) / 40 == pytest.approx(
        -row["neg_log_marginal_likelihood"], rel=1e-9
    )
    return config, row, loaded


def test_calibration_is_that_of_the_loaded_network(asked):
    config, row, loaded = asked
    data = prepare_for(config)
    for way, p in both(loaded, data.test_images).items():
        key, labels = {"plugin": "_plugin", "predictive": ""}[way], data.test_labels.numpy()
        confidence, right = p.max(1), p.argmax(1) == labels
        error, bins = 0.0, row["reliability"][way]
        for m in range(15):
            inside = np.minimum(np.floor(confidence * 15), 14) == m
            assert bins["count"][m] == inside.sum()
            if inside.any():
                assert bins["accuracy"][m] == pytest.approx(right[inside].mean())
                assert bins["confidence"][m] == pytest.approx(confidence[inside].mean(), rel=1e-5)
                error += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
            else:
                assert bins["accuracy"][m] is bins["confidence"][m] is None
        assert row[f"ece{key}"] == pytest.approx(error, rel=1e-5)
        target = np.eye(10)[labels]
        assert row[f"brier{key}"] == pytest.approx(((p - target) ** 2).sum(1).mean(), rel=1e-5)
        nll = row["nll" if way == "plugin" else "nll_predictive"]
        assert nll == pytest.approx(-np.log(p[np.arange(len(p)), labels]).mean(), rel=1e-5)
    assert row["ece"] != row["ece_plugin"]


def test_histograms_of_images_that_are_left_out(asked):
    config, row, loaded = asked
    data, found = prepare_for(config), row["leave_one_out"]
    la, loader = loaded.la, [(data.train_images, data.train_labels)]
    edges = np.array([0, *(10.0 ** np.array(found["exponents"][1:-1])), np.inf])
    for name, precision in (("learned", la.prior_precision), ("predictions", la.predictive_prior_precision)):
        other = copy.copy(la)
        other.prior_precision = precision
        left, one = other.leave_one_out(loader), found[name]
        losses = -left.log_density.numpy()
        assert (one["points"], one["undefined"]) == (40, np.isnan(losses).sum())
        assert one["leverage"] == np.histogram(left.leverage.numpy(), edges)[0].tolist()
        assert one["loss"] == np.histogram(losses[~np.isnan(losses)], edges)[0].tolist()
        assert one["nll"] == pytest.approx(np.nanmean(losses), rel=1e-6)
    assert found["learned"]["nll"] != found["predictions"]["nll"]


def test_other_data_are_told_apart_by_their_uncertainty(asked, data_dir):
    config, row, loaded = asked
    digits, data, mnist = load("digits"), prepare_for(config), load("mnist", data_dir)
    own = prepare_for(config).test_images
    train = resize(digits.train_images, 32)
    kept = torch.isin(digits.train_ids, data.train_ids)
    mean, std = train[kept].mean(), train[kept].std(correction=0)
    # Twenty of thirty images in the order of their labels: two of every three.
    assert set(row["ood"]) == {"mnist"}
    found, chosen = row["ood"]["mnist"], None
    others = (resize(mnist.test_images, 32) - mean) / std
    p_own, p_all = both(loaded, own), both(loaded, others)
    for way, scores in found.items():
        inside, outside = p_own[way], p_all[way]
        measures = {"entropy": lambda p: -(p * np.log(p)).sum(1), "max_probability": lambda p: -p.max(1)}
        for name, of in measures.items():
            above = (of(outside)[:, None] > of(inside)).mean(1)
            # The AUROC is the mean of 20 of the 30.
            means = np.sort(above)
            assert means[:20].mean() - 1e-4 <= scores[name] <= means[-20:].mean() + 1e-4
    whole = dataclasses.replace(config, ood_size=30)
    chosen = asked_images(config, data, str(data_dir))
    assert len(chosen.others["mnist"]) == 20 and len(chosen.turned[0]) == len(chosen.turned[1]) == 20
    near = torch.cdist(chosen.others["mnist"].flatten(1), others.flatten(1)).argmin(1)
    assert mnist.test_labels[near].bincount(minlength=10).tolist() == [2] * 10
    everything, _ = describe_predictions(loaded.model, loaded.la, data, asked_images(whole, data, str(data_dir)), False)
    for way, scores in everything["ood"]["mnist"].items():
        entropy = [-(p * np.log(p)).sum(1) for p in (p_all[way], p_own[way])]
        assert scores["entropy"] == pytest.approx((entropy[0][:, None] > entropy[1]).mean(), abs=1e-4)
        confidence = [p.max(1) for p in (p_all[way], p_own[way])]
        assert scores["max_probability"] == pytest.approx((confidence[0][:, None] < confidence[1]).mean(), abs=1e-4)


def test_turned_images_are_turned_about_black(asked):
    config, row, loaded = asked
    data = prepare_for(config)
    assert [r["degrees"] for r in row["rotations"]["plugin"]] == [*range(0, 181, 15)]
    images, labels = asked_images(dataclasses.replace(config, ood="rotated"), data).turned
    for quarter in (0, 1, 2):
        for way, p in both(loaded, torch.rot90(images, quarter, (2, 3))).items():
            (found,) = (r for r in row["rotations"][way] if r["degrees"] == 90 * quarter)
            assert found["nll"] == pytest.approx(-np.log(p[np.arange(20), labels]).mean(), rel=1e-3)
            assert found["accuracy"] == pytest.approx(100 * (p.argmax(1) == labels.numpy()).mean())
            assert found["confidence"] == pytest.approx(100 * p.max(1).mean(), rel=1e-3)
            assert found["entropy"] == pytest.approx(-(p * np.log(p)).sum(1).mean(), rel=1e-3)
    # At 45 degrees a corner comes from outside: its pixels are black.
    turned = turned_by_scipy(images, 45, data.black)
    assert torch.allclose(turned[:, :, 0, 0], data.black.expand(20, 1)) and float(data.black) < 0
    assert row["rotations"]["plugin"][3]["nll"] == pytest.approx(
        -math.fsum(np.log(both(loaded, turned)["plugin"][np.arange(20), labels])) / 20, rel=1e-3
    )


def turned_by_scipy(images: Tensor, degrees: float, black: Tensor) -> Tensor:
    turned = ndimage.rotate(
        images[:, 0].double().numpy(), degrees, (1, 2), reshape=False, order=1, mode="grid-constant", cval=float(black)
    )
    return torch.from_numpy(turned)[:, None].to(images.dtype)


def test_without_curvature_the_softmax_is_described_and_the_rest_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr("ella_cuda.experiments.run.MAP_EVIDENCE_BYTES", 1000)
    row = run_one(small("map", ood="rotated", ood_size=10), tmp_path, progress=False)
    assert row["nll_predictive"] is row["ece"] is row["brier"] is None and row["ece_plugin"] >= 0 < row["brier_plugin"]
    assert {*row["reliability"]} == {*row["rotations"]} == {"plugin"}
    table = results_table([row])
    (line,) = (
        after for title, after in zip(table.splitlines(), table.splitlines()[1:], strict=False) if "NLL, pred" in title
    )
    assert line.split() == ["plain", "-"]


def test_a_run_goes_on_to_the_same_predictions_and_may_be_asked_more(tmp_path):
    config = small()
    row = run_one(config, tmp_path, progress=False)
    more = run_one(dataclasses.replace(config, ood="rotated", ood_size=10), tmp_path, progress=False)
    assert {k: v for k, v in more.items() if k not in ("rotations", "rotated_size", "seconds", "digest")} == {
        k: v for k, v in row.items() if k not in ("seconds", "digest")
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ood": "letters"}, "ood must be names out of digits, mnist, fashion-mnist, cifar10, cifar100, rotated, got 'letters'."),
        ({"ood": "mnist+digits"}, "ood must name other data than the run's own, digits; got 'digits+mnist'."),
        ({"task": "quadrant", "ood": "rotated"}, "ood must be without rotated for the task quadrant, whose labels say"),
        ({"ood": None}, "ood must be a string, got None."),
        ({"ood_size": 0}, "ood_size must be at least 1, got 0."),
    ],
)  # fmt: skip
def test_what_a_run_cannot_be_asked(change, words):
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        dataclasses.replace(small(), **change)


TINY = shlex.split("train --layer conv --objective map --task plain --epochs 1 --train-size 20 --test-size 40 --jobs 1")


def test_other_data_that_do_not_fit_are_refused_before_anything_is_written(data_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, code, words in (
        ("cifar10", 1, "ood must name data whose images have the 1 channel(s) of digits's, got cifar10 with 3."),
        ("mnist", 1, "ood: mnist: no folder holds"),
    ):
        where = str(data_dir if name == "cifar10" else tmp_path)
        for out in ([], ["--out", "there"]):
            assert cli.main([*TINY, "--ood", name, "--data-dir", where, *out]) == code
            assert words in capsys.readouterr().err
    assert cli.main([*TINY, "--ood", "letters"]) == 2 and "(given: --ood)" in capsys.readouterr().err
    assert cli.main(["train", "--task", "quadrant", "--ood", "rotated"]) == 2
    tasks = "plain or digit or rotated or rotated-90 or translated or translated-8of14 or scaled"
    assert f"do not say where things are: --task {tasks}." in capsys.readouterr().err
    assert cli.main([*TINY, "--ood-size", "5"]) == 2
    assert "--ood-size: of the data that --ood names" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_the_command_asks_and_its_files_answer(data_dir, tmp_path, capsys):
    folder = tmp_path / "out"
    args = [*TINY, "--width", "1", "--ood", "rotated", "mnist", "--ood-size", "10", "--data-dir", str(data_dir)]
    assert cli.main([*args, "--out", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "AUROC of mnist, maximum probability, predictive" in shown and "ECE, predictive" in shown
    assert (folder / "table.txt").read_text().strip() in shown
    kinds = ("turned images: ", "  digits, plain, CONV, MAP, softmax", "  digits, plain, CONV, MAP, predictive")
    lines = [line.split() for line in shown.splitlines() if line.startswith(kinds)]
    assert lines[0][-13:] == [f"{d}\u00b0" for d in range(0, 181, 15)]
    assert [line[-14] for line in lines[1:3]] == ["softmax", "predictive"]
    (row,) = json.loads((folder / "summary.json").read_text())
    assert lines[2][-13:] == [f"{r['accuracy']:.2f}" for r in row["rotations"]["predictive"]]
    assert lines[4][-13:] == [f"{r['nll']:.3f}" for r in row["rotations"]["plugin"]]
    assert row["rotated_size"] == 10
    assert json.loads((folder / "config.json").read_text())["options"]["ood"] == ["rotated", "mnist"]
    for name in ("reliability", "rotations"):
        assert (folder / row["run"] / f"{name}.png").stat().st_size > 1000
    head, line = (folder / "summary.csv").read_text().splitlines()
    cells = dict(zip(head.split(","), line.split(","), strict=True))
    assert float(cells["ood mnist entropy"]) == row["ood"]["mnist"]["predictive"]["entropy"]
    assert float(cells["rotated 15 nll plugin"]) == row["rotations"]["plugin"][1]["nll"]
    again = ["train", "--resume", str(folder), "--data-dir", str(data_dir), "--ood"]
    assert cli.main([*again, "rotated", "mnist"]) == 0 and cli.main([*again, "mnist"]) == 2
