"""``ella-cuda reproduce invariances``: its parts at the size of a test, from end to end."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import MultivariateNormal

from ella_cuda.augment import AffineAugment, AveragedFunction
from ella_cuda.data import Dataset, TensorLoader
from ella_cuda.laplace import FullLaplace, KronLaplace, evidence_gradient
from ella_cuda.papers.invariances import EXPERIMENT, images, points, ranges, rings, sampling, subsets
from ella_cuda.papers.invariances.sizes import TWO_CORES
from ella_cuda.papers.studies import Work, study
from ella_cuda.training.checkpoint import read_checkpoint
from ella_cuda.training.trainer import MarglikTrainer
from python_tests.papers.studies import check_goes_on, run, table

SMALL = ["--data", "digits", "--scale", "0.002", "--jobs", "1", "--device", "cpu"]


@pytest.fixture
def few(monkeypatch):
    """Fewer angles, tasks and sizes than people look at."""
    monkeypatch.setattr(rings, "ANGLES", (0, 90))
    monkeypatch.setattr(sampling, "COPIES", (4,))
    monkeypatch.setattr(sampling, "ANGLES", (0, 30, 60, 90))
    monkeypatch.setattr(ranges, "SHOWN", {name: ranges.SHOWN[name] for name in ("rotated-90", "plain")})
    monkeypatch.setattr(subsets, "SIZES", (24,))


@pytest.mark.usefixtures("few")
def test_parts_are_tables_and_pictures(tmp_path, capsys):
    folder = tmp_path / "out"
    run("invariances", "--part", "sampling", "ranges", "rings", *SMALL, "--seed", "0", "--out", str(folder))
    printed = capsys.readouterr().out
    assert "4 networks on cpu, 1 at once, 0 done before" in printed
    for part in ("rings", "ranges", "sampling"):
        assert (folder / f"{part}.txt").read_text().strip() in printed
        assert {p.suffix for p in folder.glob(f"{part}.*")} == {".txt", ".csv", ".png", ".svg"}
    assert {p.suffix for p in folder.glob("ranges-samples.*")} == {".png", ".svg"}

    kinds = [r["kind"] for r in table(folder, "rings")]
    assert kinds == ["fixed", "fixed", "learned, full", "learned, kron", "learned, second", "training loss"]
    reference = [(float(r["angle"]), float(r["reference_second"])) for r in table(folder, "rings")[:2]]
    assert reference == [(0, -46.3), (90, -52.3)]
    check_ranges(folder)
    check_sampling(folder)


def check_ranges(folder: Path) -> None:
    """A row's amounts and accuracy are those of the network in the study's checkpoint."""
    rows = table(folder, "ranges")
    assert [r["task"] for r in rows] == ["rotated-90", "plain"]
    for r in rows:
        name = f"ranges-digits-{r['task']}-seed0"
        state = read_checkpoint(folder / name / "checkpoint.pt")
        amounts = F.softplus(state["model"]["augment.raw"])
        assert [float(r[n]) for n in ("tx", "ty", "rotation", "sx", "sy", "shear")] == pytest.approx(amounts.tolist())
        assert float(r["share_rotation"]) == pytest.approx(float(r["rotation"]) / math.pi)
        assert float(r["share_tx"]) == pytest.approx(float(r["tx"]) * 14 / 8)
        (planned,) = (s for s in EXPERIMENT.read(folder)[0] if s.name == name)
        data = images.data_of(planned.settings, study.Work(folder / name))
        network = images.mlp(planned.settings["hidden"], 1, 16, 10)
        network.load_state_dict(
            {k.removeprefix("network."): v for k, v in state["model"].items() if k != "augment.raw"}
        )
        augment = AffineAugment(planned.settings["copies"], init=amounts.tolist())
        eps = augment.draw(1, "sobol", torch.Generator().manual_seed(0))
        with torch.no_grad():
            copies = augment(data.test_images, eps)
            outputs = torch.stack([network(copies[:, i]) for i in range(copies.shape[1])]).mean(0)
        assert float(r["accuracy"]) == pytest.approx(
            100 * (outputs.argmax(1) == data.test_labels).double().mean().item()
        )
        assert float(r["nll"]) == pytest.approx(F.cross_entropy(outputs, data.test_labels).item(), rel=1e-5)
        assert float(r["neg_log_marginal_likelihood"]) == pytest.approx(state["margliks"][-1] / len(data.train_images))
    lines = (folder / "ranges.txt").read_text().splitlines()
    shown = next(line for line in lines if line.startswith("rotated ±90°")).split()
    assert shown[2] == f"{float(rows[0]['share_rotation']):.2f}"
    figure = lines[next(i for i, line in enumerate(lines) if line.startswith("rotated ±90°")) + 1].split()
    assert figure == ["read", "off", "a", "figure", "(MNIST)", "0.52", "0.00", "0.00", "-", "0.04", "0.02"]


def check_sampling(folder: Path) -> None:
    """The evidence of a shared draw, by torch's own normal distribution, and where its maximum is."""
    result = json.loads((folder / "sampling-seed0" / "result.json").read_text())
    (planned,) = (s for s in EXPERIMENT.read(folder)[0] if s.part == "sampling")
    rows = table(folder, "sampling")
    assert len(rows) == 2 * 3
    for r in rows:
        (way,) = (w for w in result["ways"] if w["sampling"] == r["sampling"])
        values = way["evidence"][sampling.TRUE.index(int(r["true"]))]
        assert values[sampling.ANGLES.index(int(r["best"]))] == max(values) == float(r["evidence"])
        # Gibbs' inequality.
        assert max(values) <= float(r["evidence_of_data"]) + 1e-9
    assert planned.settings["points"] == 12


@pytest.mark.usefixtures("few", "undrawn")
def test_a_killed_session_goes_on_to_the_files_of_one_that_was_not(tmp_path, capsys):
    def at(name: str):
        return MarglikTrainer, "epoch", lambda self: self.epochs == 2 and name in self._bar["desc"]

    stops = [
        (study.Work, "kept", lambda _, name, measured: name == "learned-kron"),
        at("24-augerino"),
        at("60-evidence"),
    ]
    options = ["invariances", "--part", "rings", "subsets", *SMALL, "--seed", "0"]
    assert "8 done before" in check_goes_on(options, tmp_path, stops, capsys)
    check_subsets(tmp_path / "whole")


def check_subsets(folder: Path) -> None:
    rows = table(folder, "subsets")
    assert [(r["size"], r["method"]) for r in rows] == [(s, m) for s in ("24", "60") for m in subsets.METHODS]
    assert [bool(r["rotation"]) for r in rows[:4]] == [False, False, True, True]
    text = (folder / "subsets.txt").read_text()
    for r in rows:
        line = next(
            line for line in text.splitlines() if re.match(rf"{r['size']} +{subsets.METHODS[r['method']]} ", line)
        )
        assert f"{float(r['accuracy']):.1f}" in line and f"{float(r['nll']):.3f}" in line
        assert f"{float(r['neg_log_marginal_likelihood']):.3f}" in line


def averaged(copies: int = 7, angle: float = 0.7) -> tuple[AveragedFunction, points.Points]:
    return AveragedFunction(points.network(5, 0), points.Turn(copies, angle)), points.rings(30, 120.0, 0)


def test_the_rings_evidence_is_the_librarys():
    model, data = averaged()
    for factors, kind in (("full", FullLaplace), ("kron", KronLaplace)):
        la = kind(model, "classification", prior_precision=0.3).fit([tuple(data)])
        found = points.evidence(model, data, model.augment.raw, 0.3, factors)
        assert found.item() == pytest.approx(la.log_marginal_likelihood().item(), rel=1e-9)
    raw = model.augment.raw.clone().requires_grad_()
    (mine,) = torch.autograd.grad(points.evidence(model, data, raw, 0.3, "kron"), raw)
    torch.testing.assert_close(mine, evidence_gradient(la, [tuple(data)])["augment.raw"])
    wrong = points.evidence(model, data, model.augment.raw, 0.3, "second")
    assert wrong.item() < found.item() - 0.1
    with pytest.raises(ValueError, match="factors must be one of full, kron, second"):
        points.evidence(model, data, raw, 0.3, "diagonal")


def test_second_moments_of_copies_that_are_the_same_are_means():
    model, data = averaged()
    model.augment.set_eta(0.0)
    values = [points.evidence(model, data, model.augment.raw, 0.3, factors).item() for factors in ("kron", "second")]
    assert values[0] == pytest.approx(values[1], rel=1e-12)


@pytest.mark.parametrize("factors", points.FACTORS)
def test_the_best_precision_is_the_evidences_maximum(factors):
    model, data = averaged()
    best = points.best_precision(model, data, factors)
    values = [points.evidence(model, data, model.augment.raw, best * k, factors).item() for k in (0.9, 1.0, 1.1)]
    assert values[1] > max(values[0], values[2])


def test_curvatures_of_the_rings_move_the_angle_in_their_directions():
    """At the weights of a trained network the evidence of means over copies rises with a small angle, that of second moments falls."""
    (planned,) = EXPERIMENT.plan(["rings"], scale=0.02)
    settings = {**planned.settings, "width": 50, "copies": 15, "steps": 400, "burn_in": 100}
    found = rings.fixed(30, points.rings(rings.POINTS, rings.ARC, 0), settings)
    assert found["slope_full"] > 0.5 and found["slope_kron"] > 0.5 and found["slope_second"] < -0.5


def test_rings_lie_under_their_arc():
    x, y = points.rings(600, 120.0, 1)
    radius, angle = x.norm(dim=1), torch.atan2(x[:, 1], x[:, 0])
    assert (y == 0).sum() == 300 and ((radius - 0.5)[y == 0]).abs().max() < 0.3
    assert ((y == 1) & (radius < 0.3)).sum() == 100
    assert angle[radius > 0.8].abs().max() < math.radians(60) + 0.3
    assert not torch.equal(x, points.rings(600, 120.0, 2).x)


def test_the_expected_evidence_is_that_of_the_normal_distribution():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 2, generator=generator, dtype=torch.float64)
    copies = sampling.copies_of(x, 3, 50.0, "independent", generator)
    kernel = torch.zeros(4, 4, dtype=torch.float64)
    for i in range(4):
        for j in range(4):
            for s in range(3):
                for t in range(3):
                    square = (copies[i, s] - copies[j, t]).square().sum()
                    kernel[i, j] += (-square / (2 * sampling.LENGTH**2)).exp() / 9
    kernel += sampling.NOISE**2 * torch.eye(4)
    torch.testing.assert_close(sampling.covariance(copies), kernel)
    true = sampling.covariance(sampling.copies_of(x, 5, 20.0, "grid", generator))
    one = MultivariateNormal(torch.zeros(4).double(), true)
    entropy = sampling.expected_evidence(true, true).item()
    assert entropy == pytest.approx(-one.entropy().item())
    other = torch.distributions.kl_divergence(one, MultivariateNormal(torch.zeros(4).double(), kernel))
    assert sampling.expected_evidence(kernel, true).item() == pytest.approx(entropy - other.item())


def test_independent_draws_push_the_angle_down(tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "COPIES", (4,))
    (planned,) = EXPERIMENT.plan(["sampling"], scale=0.02)
    result = sampling.run(planned, study.Work(tmp_path))
    best = {(r["true"], r["sampling"]): r["best"] for r in sampling.rows(planned, result)}
    assert best[90, "independent"] < 60 <= best[90, "shared"] and best[90, "grid"] == 90 and best[30, "grid"] == 30


def test_augerino_widens_what_its_loss_alone_would_not(tmp_path):
    augment = AffineAugment(2, "rotation", 0.1, constraint="raw")
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = images.Augerino([weight], augment, lr=0.1)
    optimizer.zero_grad()
    (weight.sum() + 0 * augment.raw.sum()).backward()
    optimizer.step()
    assert augment.raw.item() == pytest.approx(0.1 + images.Augerino.AMOUNT_RATE) and weight[0].item() == pytest.approx(
        0.9
    )


def test_one_draw_is_one_copy_at_fixed_amounts():
    one = images.OneDraw({"rotation": math.pi})
    x = torch.rand(5, 1, 9, 9)
    draws = one.draw(5, torch.Generator().manual_seed(0))
    assert draws.dtype == torch.int64 and draws.shape == (5, 1)
    eps = 2 * draws.float() / images.OneDraw.STEPS - 1
    expected = AffineAugment(1, "rotation", math.pi, constraint="raw")(x, eps[:, None])[:, 0]
    torch.testing.assert_close(one(x, draws), expected)
    loader = TensorLoader(x, torch.zeros(5, dtype=torch.int64), 5, augment=one)
    ((seen, _),) = loader
    assert seen.shape == x.shape and not torch.equal(seen, x)


def test_networks_are_the_published_ones():
    mlp, cnn = images.mlp(1000, 1, 28, 10), images.cnn(1, 28, 10)
    assert [tuple(p.shape) for p in mlp.parameters()] == [(1000, 784), (1000,), (10, 1000), (10,)]
    shapes = [tuple(p.shape) for p in cnn.parameters() if p.dim() > 1]
    assert shapes == [(6, 1, 5, 5), (16, 6, 3, 3), (120, 16, 5, 5), (84, 120), (10, 84)]
    for size in (16, 28):
        assert images.cnn(1, size, 10)(torch.randn(2, 1, size, size)).shape == (2, 10)


def test_plans_follow_the_scale():
    full, usual, small = (EXPERIMENT.plan(EXPERIMENT.parts, (0,), scale) for scale in (1.0, None, 0.001))
    first = {s.part: s.settings for s in reversed(full)}
    recipe = {"image_size": 28, "train_size": 60_000, "test_size": 10_000, "copies": 31, "epochs": 1000, "burn_in": 10}
    assert {**first["ranges"], **recipe, "hidden": 1000, "batch": 1000} == first["ranges"]
    sizes = [(s.settings["train_size"], s.settings["epochs"]) for s in full if s.part == "subsets"]
    assert list(dict.fromkeys(sizes)) == [(312, 1000), (1250, 1000), (5000, 1000), (60_000, 300)]
    at_usual = [s.settings["train_size"] for s in usual if s.part == "subsets"]
    assert list(dict.fromkeys(at_usual)) == [312, 1250, round(TWO_CORES * 60_000)]
    assert [s for s in full if s.part in ("rings", "sampling")] == [s for s in usual if s.part in ("rings", "sampling")]
    assert len({s.name for s in small}) == len(small)
    for s in (*full, *usual, *small):
        if s.settings.keys() >= {"burn_in", "epochs"}:
            assert s.settings["burn_in"] < s.settings["epochs"]
    digits = EXPERIMENT.plan(["ranges"], (0,), None, ["digits"])
    assert digits[0].settings["train_size"] == 1437


def test_amounts_have_a_constant_rate(monkeypatch, tmp_path):
    made, settings = {}, {"seed": 0, "copies": 2, "batch": 8, "epochs": 21, "burn_in": 9}
    monkeypatch.setattr(images, "MarglikTrainer", lambda *_, **options: made.update(options) or 1 / 0)
    dataset = Dataset(*[torch.rand(8, 1, 16, 16), torch.arange(8) % 2] * 2, 2)
    with pytest.raises(ZeroDivisionError):
        images.trained(lambda: torch.nn.Linear(2, 2), dataset, settings, Work(tmp_path), "evidence")
    assert made["lr_aug"] == images.amount_rate(11) and "lr_aug_min" not in made


@pytest.mark.parametrize("steps", [9, 11, 39, 990])
def test_amounts_can_come_to_the_full_circle(steps):
    """Adam goes the sum of its rates in ``raw`` at most: the way is that between the inverse softplus of both ends."""
    way = math.log(math.expm1(math.pi)) - math.log(math.expm1(images.INIT))
    assert steps * images.amount_rate(steps) >= way
