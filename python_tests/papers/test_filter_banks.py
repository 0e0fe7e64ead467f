"""``ella-cuda reproduce filter-banks``: its parts at the size of a test, from end to end."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ella_cuda.augment import AffineAugment
from ella_cuda.invariance import ElboTrainer
from ella_cuda.papers.filter_banks import EXPERIMENT, amounts, layers, networks, recovery
from ella_cuda.papers.invariances import images
from ella_cuda.papers.invariances.sizes import TWO_CORES
from ella_cuda.papers.studies import study
from ella_cuda.training.checkpoint import read_checkpoint
from python_tests.papers.studies import check_goes_on, run, table

SMALL = ["--data", "digits", "--scale", "0.002", "--jobs", "1", "--device", "cpu"]
GENERATORS = ("tx", "ty", "rotation", "sx", "sy", "shear")


@pytest.fixture
def few(monkeypatch):
    """Fewer angles and tasks than people look at."""
    monkeypatch.setattr(recovery, "TRUE", (0, 60))
    monkeypatch.setattr(amounts, "SHOWN", {name: amounts.SHOWN[name] for name in ("plain", "rotated")})
    monkeypatch.setattr(layers, "SHOWN", {"rotated": layers.SHOWN["rotated"]})


@pytest.mark.usefixtures("few")
def test_parts_are_tables_and_pictures(tmp_path, capsys):
    folder = tmp_path / "out"
    run("filter-banks", *SMALL, "--seed", "0", "--out", str(folder))
    printed = capsys.readouterr().out
    assert "8 networks on cpu, 1 at once, 0 done before" in printed
    for part in ("recovery", "amounts", "layers"):
        assert (folder / f"{part}.txt").read_text().strip() in printed
        assert {p.suffix for p in folder.glob(f"{part}.*")} == {".txt", ".csv", ".png", ".svg"}
    assert {p.suffix for p in folder.glob("filters.*")} == {".png", ".svg"}
    check_recovery(folder)
    check_amounts(folder)
    check_layers(folder)


def check_recovery(folder: Path) -> None:
    found = json.loads((folder / "recovery-seed0" / "result.json").read_text())["found"]
    rows = table(folder, "recovery")
    assert [(r["true"], r["objective"]) for r in rows] == [(t, o) for t in ("0", "60") for o in ("bound", "point")]
    for r, one in zip(rows, found, strict=True):
        assert one["angles"][0] == recovery.START and float(r["angle"]) == one["angles"][-1]
        assert len(one["angles"]) == 1 + int(r["epochs"])
    line = next(line for line in (folder / "recovery.txt").read_text().splitlines() if line.startswith("60°"))
    assert line.split() == ["60°", *(f"{float(r['angle']):.0f}°" for r in rows[2:])]


def check_amounts(folder: Path) -> None:
    """A row's amounts, accuracy, NLL and bound are those of the network in the study's checkpoint."""
    rows = table(folder, "amounts")
    assert [(r["task"], r["objective"]) for r in rows] == [(t, o) for t in amounts.SHOWN for o in ("bound", "point")]
    assert [bool(r["bound"]) for r in rows] == [True, False] * 2
    for r in rows:
        name = f"amounts-digits-{r['task']}-{r['objective']}-seed0"
        state = read_checkpoint(folder / name / "checkpoint.pt")["model"]
        eta = F.softplus(state["features.augment.raw"])
        assert [float(r[n]) for n in GENERATORS] == pytest.approx(eta.tolist())
        assert float(r["share_rotation"]) == pytest.approx(float(r["rotation"]) / math.pi)
        assert float(r["share_tx"]) == pytest.approx(float(r["tx"]) * 14 / 8)
        (planned,) = (s for s in EXPERIMENT.read(folder)[0] if s.name == name)
        data = images.data_of(planned.settings, study.Work(folder / name))
        augment = AffineAugment(planned.settings["copies"], init=eta.tolist())
        eps = augment.draw(1, "sobol", torch.Generator().manual_seed(0))
        copies = augment(data.test_images, eps).flatten(2)
        phi = (copies @ state["features.weight"].flatten(1).T + state["features.bias"]).relu().mean(1)
        mean = phi @ state["layer.mean"].T
        if r["objective"] == "point":
            assert float(r["nll"]) == pytest.approx(F.cross_entropy(mean, data.test_labels).item(), rel=1e-4)
            assert float(r["accuracy"]) == pytest.approx(
                100 * (mean.argmax(1) == data.test_labels).double().mean().item()
            )
            continue
        root = state["layer.lower"].tril(-1) + torch.diag_embed(state["layer.log_scale"].exp())
        deviation = torch.einsum("nd,kde->nke", phi, root).norm(dim=2)
        drawn = (mean + deviation * torch.randn(2000, *mean.shape)).softmax(2).mean(0)
        assert float(r["nll"]) == pytest.approx(F.nll_loss(drawn.log(), data.test_labels).item(), abs=0.1)
        result = json.loads((folder / name / "result.json").read_text())
        shapes = torch.tensor(result["filters"]).shape
        assert shapes == (amounts.FILTERS, 1 + amounts.COPIES, 1, 16, 16)
        assert result["trajectory"]["amounts"]["rotation"][-1] == pytest.approx(float(r["rotation"]))
        assert len(result["trajectory"]["epochs"]) == int(r["epochs"])
    text = (folder / "amounts.txt").read_text().splitlines()
    line = next(line for line in text if line.startswith("rotated ±180°")).split()
    assert line[3] == f"{float(rows[2]['share_rotation']):.2f}" and line[-3] == f"{float(rows[2]['bound']):.3f}"


def check_layers(folder: Path) -> None:
    rows = table(folder, "layers")
    assert [r["layer"] for r in rows] == ["fc", "conv", "learned"]
    for r, name in zip(rows, networks.LAYERS.values(), strict=True):
        line = next(x for x in (folder / "layers.txt").read_text().splitlines() if re.match(rf"rotated.* {name} ", x))
        assert line.split()[-3:] == [
            f"{float(r['bound']):.3f}",
            f"{float(r['accuracy']):.1f}",
            f"{float(r['nll']):.3f}",
        ]


@pytest.mark.usefixtures("few", "undrawn")
def test_a_killed_session_goes_on_to_the_files_of_one_that_was_not(tmp_path, capsys):
    def at(name: str):
        return ElboTrainer, "epoch", lambda self: self.epochs == 17 and name in self._bar["desc"]

    stops = [
        (study.Work, "kept", lambda _, name, measured: name == "60-bound"),
        at("rotated-bound"),
        at("rotated-conv"),
    ]
    check_goes_on(["filter-banks", *SMALL, "--seed", "0"], tmp_path, stops, capsys)


def test_the_bound_of_images_is_that_of_all_of_them(tmp_path):
    """However they are split: the divergence counts once."""
    (planned,) = (s for s in EXPERIMENT.plan(["layers"], (0,), 0.002, ["digits"]) if "plain-fc" in s.name)
    work = study.Work(tmp_path)
    data = images.data_of(planned.settings, work)
    trainer = networks.trained("fc", data, planned.settings, work, "bound")
    found = networks.measured(trainer, data)["bound"]
    exact = trainer.model.elbo(data.train_images, data.train_labels, n_samples=3000).item() / len(data.train_images)
    assert found == pytest.approx(exact, abs=0.02)


def test_problems_are_of_networks_with_the_true_angle():
    settings = {"seed": 3, "points": 200, "filters": 8}
    x, y, model = recovery.problem(60, settings)
    assert math.degrees(model.features.augment.eta.item()) == pytest.approx(60)
    with torch.no_grad():
        features = model.features(x)
    rest = y - features @ torch.linalg.lstsq(features, y).solution
    assert rest.std().item() == pytest.approx(recovery.NOISE, rel=0.1)
    turned = recovery.problem(0, settings)
    assert torch.equal(turned[0], x) and not torch.allclose(turned[1], y)


def test_filters_start_smooth_and_of_one_size():
    """Neighbouring pixels are alike, or every transformation would first of all be a smoothing."""
    data = images.prepare("digits", "plain", 16, train_size=60, test_size=40)
    settings = {"image_size": 16, "filters": 20, "copies": 3}
    weights = {name: networks.network(name, data, settings).features for name in networks.LAYERS}
    learned, dense = weights["learned"].weight, weights["fc"][1].weight.view(20, 1, 16, 16)
    for w in (learned, dense):
        assert (w[..., 1:] - w[..., :-1]).square().mean() < 0.3 * w.square().mean()
        assert w.square().mean().item() == pytest.approx(2 / 256, rel=1e-5)
    assert networks.network("conv", data, settings).features[0].weight.shape == (20, 1, 5, 5)


def test_plans_follow_the_scale():
    full, usual, small = (EXPERIMENT.plan(EXPERIMENT.parts, (0,), scale) for scale in (1.0, None, 0.001))
    first = {s.part: s.settings for s in reversed(full)}
    sizes = {
        "image_size": 28,
        "train_size": 60_000,
        "test_size": 10_000,
        "copies": 31,
        "filters": 256,
        "batch": 500,
        "epochs": 200,
    }
    for part in ("amounts", "layers"):
        assert {**first[part], **sizes} == first[part]
    assert next(s for s in usual if s.part == "amounts").settings["train_size"] == round(TWO_CORES * 60_000)
    assert [s for s in full if s.part == "recovery"] == [s for s in usual if s.part == "recovery"]
    assert len({s.name for s in small}) == len(small) == len(full) == 1 + 8 + 9
    digits = EXPERIMENT.plan(["amounts"], (0,), None, ["digits"])
    assert digits[0].settings["train_size"] == 1437
