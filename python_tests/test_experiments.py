"""Runs and grids: what a row says, checked against what can be recomputed; resuming; recipes."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from ella_cuda import experiments, run_folder
from ella_cuda.data import SOURCES, TASKS, TensorLoader, load
from ella_cuda.experiments import (
    RunConfig,
    configure,
    evaluate,
    learning_rate_schedule,
    prepare,
    prepare_for,
    recipe,
    run_grid,
    run_one,
)
from ella_cuda.experiments.device import device_name
from ella_cuda.experiments.diary import Diary
from ella_cuda.laplace import KronLaplace
from ella_cuda.models import neyshabur
from ella_cuda.reports import layer_table
from ella_cuda.reports.text import number
from ella_cuda.training.checkpoint import read_checkpoint
from python_tests.interrupting import interrupted

SMALL = {"width": 1, "epochs": 2, "burn_in": 0, "frequency": 1, "hypersteps": 2, "train_size": 40, "test_size": 40}


def small(layer: str = "conv", objective: str = "evidence", seed: int = 0, **changes) -> RunConfig:
    return configure("digits", "quadrant", layer, objective, seed, **{**SMALL, **changes})


def without_seconds(row: dict) -> dict:
    return {k: v for k, v in row.items() if k != "seconds"}


def test_every_data_set_has_a_recipe_with_known_tasks():
    assert all(set(recipe(data)["task"]) <= set(TASKS) for data in SOURCES)
    assert recipe("digits")["task"] == ("digit", "quadrant")
    for data in SOURCES:  # nothing that a run needs is left unsaid
        assert configure(data, recipe(data)["task"][0], "conv", "evidence").data == data


def test_all_rows_of_a_table_share_the_recipe():
    """Only FC's rates may differ from the others', where the recipe says so."""
    common = recipe("digits")
    for layer in ("fc", "conv", "f_fc+conv"):
        for objective in ("map", "evidence"):
            config = dataclasses.asdict(configure("digits", "digit", layer, objective))
            axes = {"task": "digit", "layer": layer, "model": "", "objective": objective, "learn": "", "seed": 0}
            assert config == common | axes | {"fan_in_limit": 64 if layer == "fc" else 256}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": "svhn"}, "data must be one of"),
        ({"task": "x"}, "task must be one of"),
        ({"layer": "conv+conv"}, "layer must be different names"),
        ({"layer": "dense"}, "layer must be different names"),
        ({"objective": "elbo"}, "objective must be one of"),
        ({"width": 0}, "width must be at least 1"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"burn_in": -1}, "burn_in must be at least 0"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"prior_prec_init": math.inf}, "prior_prec_init must be positive and finite"),
        ({"lr_hyp": math.nan}, "lr_hyp must be positive and finite"),
        ({"train_size": 0}, "train_size must be at least 1"),
        ({"fan_in_limit": 0}, "fan_in_limit must be at least 1"),
        ({"holdout": 1.0}, "holdout must be at least 1e-06 and at most 0.999999, got 1.0"),
        ({"inverse_lengthscale": 1e300}, r"inverse_lengthscale must be positive and at most 1e\+30"),
        ({"cooldown": 0.0}, "cooldown must be positive"),
        ({"cooldown": 1.5}, "cooldown must be positive and at most 1, got 1.5"),
        ({"column_tolerance": 1.0}, "column_tolerance must be at least 0 and at most 0.999, got 1.0"),
        ({"column_tolerance": -1e-9}, "column_tolerance must be at least 0"),
        ({"restarts": "always"}, "restarts must be one of none, evidence"),
        ({"restarts": "evidence", "cooldown": None}, "restarts='evidence' needs a cooldown"),
        ({"fisher": "empirical"}, "fisher must be one of"),
        ({"augment": "mixup"}, "augment must be one of none, flips-shifts"),
        ({"layer": "s_fc", "learn": "omega"}, "learn must be one of"),
        ({"layer": "s_fc", "learn": "anchors+anchors"}, r"learn must be one of.*got 'anchors\+anchors'"),
        ({"layer": "s_fc", "learn": ("anchors",)}, "learn must be one of"),
        ({"lr_anchors": 0.0}, "lr_anchors must be positive"),
        ({"learn": "anchors"}, "needs evidence and a layer with a path out of s_conv, s_fc"),
        ({"layer": "s_fc", "learn": "anchors", "objective": "map"}, "needs evidence"),
        ({"layer": "s_fc", "learn": "anchors", "epochs": 1}, "before the last epoch"),
        (
            {"layer": "s_fc", "learn": "anchors", "epochs": 9, "burn_in": 5, "frequency": 5, "seed": 1},
            "before the last epoch",
        ),
    ],
)
def test_a_run_that_makes_no_sense_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(small(), **change)


def test_names_tell_runs_of_a_grid_apart():
    assert small("f_fc+conv", "map", seed=3, width=2).name == "digits-quadrant-f_fc+conv-map-seed3"
    group = {
        (variant, width): small("gconv", group_conv=variant, width=width)
        for variant in ("full", "separable")
        for width in (6, 10)
    }
    assert len({config.name for config in group.values()}) == 4
    assert group["full", 6].name == "digits-quadrant-gconv-evidence-p4-full-width6-seed0"
    assert (group["full", 6].described["group_conv"], small("conv").described["group_conv"]) == ("full", "")


def test_evaluate_by_hand():
    """Two classes, logits (x, 0): probabilities are the logistic function."""

    class Logits(torch.nn.Module):
        def forward(self, x):
            return torch.stack([x[:, 0, 0, 0], torch.zeros(len(x))], 1)

    values = [2.0, -1.0, 0.5, -3.0]
    labels = torch.tensor([0, 0, 1, 1])
    accuracy, nll = evaluate(Logits(), torch.tensor(values).view(4, 1, 1, 1), labels)
    assert accuracy == 50
    p = [1 / (1 + math.exp(-v)) for v in values]
    by_hand = -(math.log(p[0]) + math.log(p[1]) + math.log(1 - p[2]) + math.log(1 - p[3])) / 4
    assert nll == pytest.approx(by_hand, rel=1e-6)


@pytest.mark.parametrize(("layer", "objective"), [("f_fc+conv", "evidence"), ("conv", "map")])
def test_a_row_says_what_its_checkpoint_gives(tmp_path, layer, objective):
    config = small(layer, objective, column_tolerance=0.0)
    row = run_one(config, tmp_path, progress=False)
    state = read_checkpoint(tmp_path / "checkpoint.pt")
    data = prepare_for(config)
    model = neyshabur(layer, 1, 40, width=1)
    model.load_state_dict(state["model"])
    with torch.no_grad():
        log_p = model(data.test_images).log_softmax(1)
    assert row["accuracy"] == pytest.approx(100 * float((log_p.argmax(1) == data.test_labels).double().mean()))
    assert row["nll"] == pytest.approx(-float(log_p[torch.arange(40), data.test_labels].double().mean()), rel=1e-5)
    precision = state["learners"]["prior"]["log_precision"].exp()
    la = KronLaplace(model, prior_precision=precision).fit(TensorLoader(data.train_images, data.train_labels, 40))
    assert row["neg_log_marginal_likelihood"] == pytest.approx(-float(la.log_marginal_likelihood()) / 40, rel=1e-4)
    gamma = la.effective_parameters()
    first = row["layers"][0]["paths"]["conv"]
    assert first["effective_parameters"] == pytest.approx(
        gamma["blocks.0.conv.weight"] + gamma["blocks.0.conv.bias"], rel=1e-3
    )
    assert first["prior_precision"]["weight"] == pytest.approx(
        float(precision[la.parameter_names.index("blocks.0.conv.weight")])
    )
    if objective == "map":
        assert precision.tolist() == pytest.approx([config.prior_prec_init] * len(precision))
    assert row["parameters"] == sum(p.numel() for p in model.parameters())
    assert (row["task"], row["layer"], row["objective"], row["seed"]) == ("quadrant", layer, objective, 0)
    assert (row["train_size"], row["evaluated_on"], row["evaluated_size"]) == (40, "test", 40)
    history = json.loads((tmp_path / "history.json").read_text())
    assert len(history["losses"]) == 2
    assert [e["epoch"] for e in history["evaluations"]] == [1, 2]


def test_map_curvature_that_is_too_large_is_left_out_with_a_reason(tmp_path, monkeypatch):
    monkeypatch.setattr("ella_cuda.experiments.run.MAP_EVIDENCE_BYTES", 1000)
    row = run_one(small(objective="map", epochs=1), tmp_path, progress=False)
    assert row["neg_log_marginal_likelihood"] is None
    assert "MB" in row["neg_log_marginal_likelihood_reason"]
    assert row["layers"][0]["type"] is None
    assert row["layers"][0]["paths"]["conv"]["prior_precision"]["bias"] == pytest.approx(
        small(objective="map").prior_prec_init
    )


def rates(cooldown: float | None, *ends: int) -> list[float]:
    """The learning rate of every step of a run that starts at 2."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    schedule = learning_rate_schedule(cooldown, ends)
    scheduler = schedule["scheduler_cls"](optimizer, **schedule["scheduler_kwargs"])
    seen = []
    for _ in range(ends[-1]):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_learning_rates_of_a_run():
    assert rates(0.4, 10) == pytest.approx([2.0] * 7 + [1.5, 1.0, 0.5])
    assert rates(1.0, 4) == pytest.approx([2.0, 1.5, 1.0, 0.5])
    assert rates(0.01, 3) == pytest.approx([2.0] * 3)
    assert rates(0.4, 4) == pytest.approx([2.0, 2.0, 2.0, 1.0])  # 1.6 steps, and 2.4
    assert rates(0.4, 6) == pytest.approx([2.0] * 5 + [1.0])
    assert rates(None, 4) == pytest.approx([1 + math.cos(math.pi * i / 4) for i in range(4)])
    # Anew in every cycle.
    assert rates(0.4, 10, 15, 16) == pytest.approx([2.0] * 7 + [1.5, 1.0, 0.5] + [2.0] * 4 + [1.0] + [2.0])


@pytest.mark.parametrize(
    ("restarts", "epochs", "burn_in", "frequency", "ends"),
    [
        ("none", 7, 1, 2, [7]),
        ("evidence", 7, 1, 2, [4, 7]),  # 6 would leave one epoch
        ("evidence", 6, 2, 2, [6]),
        ("evidence", 8, 2, 2, [6, 8]),
        ("evidence", 6, 5, 4, [6]),
    ],
)
def test_cycles_end_where_the_evidence_is_asked(tmp_path, restarts, epochs, burn_in, frequency, ends):
    """But the first time. In minibatches, as the schedule in the checkpoint of a run holds them."""
    changes = {"epochs": epochs, "burn_in": burn_in, "frequency": frequency, "cooldown": 1.0, "restarts": restarts}
    config = small(**changes, train_size=50, batch_size=20, evidence_batch_size=50)
    assert config.cycle_ends == dataclasses.replace(config, objective="map").cycle_ends == ends
    run_one(config, tmp_path, progress=False)
    saved = read_checkpoint(tmp_path / "checkpoint.pt")
    assert [h["epoch"] for h in saved["history"] if h["neg_log_marginal_likelihood"] is not None] == [
        e for e in range(1, epochs + 1) if e > burn_in and (e % frequency == 0 or e == epochs)
    ]
    assert saved["scheduler"]["lr_lambdas"][0]["ends"] == tuple(3 * e for e in ends)
    assert saved["scheduler"]["last_epoch"] == 3 * epochs


def test_the_order_of_what_a_run_learns_does_not_matter():
    one, other = (small("s_fc", learn=words) for words in ("anchors+lengthscales", "lengthscales+anchors"))
    assert one == other and one.name == other.name and one.learn == "anchors+lengthscales"


def test_a_run_that_learns_lengthscales_says_so(tmp_path):
    config = small("s_fc+s_conv", learn="lengthscales")
    assert config.name == "digits-quadrant-s_fc+s_conv-evidence-lengthscales-seed0"
    row = run_one(config, tmp_path, progress=False)
    assert row["learn"] == "lengthscales"
    first = row["layers"][0]["paths"]
    assert first["s_fc"]["inverse_lengthscale"].keys() == {"basis_in", "basis_out"}
    assert first["s_conv"]["inverse_lengthscale"].keys() == {"basis"}
    saved = read_checkpoint(tmp_path / "checkpoint.pt")["model"]
    for entry in row["layers"]:
        for path, found in entry["paths"].items():
            for basis, value in found["inverse_lengthscale"].items():
                assert value == float(saved[f"{entry['name']}.{path}.{basis}.inverse_lengthscale"])
    assert first["s_fc"]["inverse_lengthscale"]["basis_in"] != 1
    assert row["layers"][1]["paths"]["s_conv"]["inverse_lengthscale"].keys() == {"0.basis"}


def test_a_run_that_learns_anchors_says_how_far_they_moved(tmp_path, without_pictures):
    config = small("s_conv", learn="anchors", epochs=3, lr_anchors=0.1)
    (row,) = run_grid([config], tmp_path, progress=False)
    saved = read_checkpoint(tmp_path / config.name / "checkpoint.pt")["model"]
    torch.manual_seed(config.seed)
    start = neyshabur("s_conv", 1, 40, width=1, init=config.init).state_dict()
    found = experiments.read_anchors(tmp_path / config.name)
    for i, layer in enumerate(row["layers"]):
        name = "basis" if i in (0, 2, 4) else "0.basis"
        key = f"blocks.{i}.s_conv.{name}.anchors"
        moved = (saved[key] - start[key]).norm(dim=1)
        described = layer["paths"]["s_conv"]["anchors"][name]
        assert described["count"] == 5
        assert described["mean_displacement"] == pytest.approx(float(moved.mean()), rel=1e-5)
        assert described["largest_displacement"] == pytest.approx(float(moved.max()), rel=1e-5)
        assert float(moved.min()) > 0.01
        assert found[key.removesuffix(".anchors")] == {"start": start[key].tolist(), "now": saved[key].tolist()}
    evaluations = experiments.read_evaluations(tmp_path / config.name)
    assert (
        evaluations[-1]["anchors"]["blocks.0.s_conv.basis"] == row["layers"][0]["paths"]["s_conv"]["anchors"]["basis"]
    )
    first = layer_table([row]).splitlines()[2]
    moved = row["layers"][0]["paths"]["s_conv"]["anchors"]["basis"]["mean_displacement"]
    assert first.endswith(f"; basis 1.00; basis {number(moved)}")
    assert "anchors moved by, mean, pixels" in layer_table([row])
    with (tmp_path / "summary.csv").open() as file:
        (line,) = csv.DictReader(file)
    assert float(line["blocks.0 s_conv basis mean_displacement"]) == moved


def test_learning_rates_fall_with_the_number_of_inputs():
    model = neyshabur("fc+f_fc+conv", 1, 10, width=4)
    names = {id(p): n for n, p in model.named_parameters()}
    optimizer = experiments.adam_for(model, 256)(list(model.parameters()), lr=0.1, eps=1e-3)
    rates = {names[id(p)]: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    expected = dict.fromkeys(names.values(), 0.1)  # biases, and what sums at most 256 numbers
    for block, inputs in enumerate((1024, 4 * 1024, 8 * 256, 8 * 256, 16 * 64, 16 * 64, 32 * 16, 32 * 4)):
        expected[f"blocks.{block}.fc.linear.weight"] = 0.1 * min(1, 256 / inputs)
    for block in (0, 1):
        expected[f"blocks.{block}.f_fc.weight_in"] = 0.1 * 256 / 1024
    expected["blocks.7.conv.0.weight"] = expected["blocks.6.conv.0.weight"] = 0.1 * 256 / 288
    assert rates == pytest.approx(expected)
    assert optimizer.defaults["eps"] == 1e-3
    (last,) = (g for g in experiments.adam_for(model, 16)([model.blocks[7].f_fc.weight_out], lr=0.1).param_groups)
    assert last["lr"] == pytest.approx(0.1 * 16 / 32)
    assert experiments.adam_for(model, None) is torch.optim.Adam
    sparse = neyshabur("s_fc", 1, 10, width=4)
    names = {id(p): n for n, p in sparse.named_parameters()}
    groups = experiments.adam_for(sparse, 256)(list(sparse.parameters()), lr=0.1).param_groups
    rates = {names[id(p)]: group["lr"] for group in groups for p in group["params"]}
    assert rates["blocks.0.s_fc.bias_in"] == 0.1
    for i, block in enumerate(sparse.blocks):
        inner, outer = block.s_fc.basis_in.matrix(), block.s_fc.basis_out.matrix()
        channels = (1, 4, 8, 8, 16, 16, 32, 32)[i]
        expected = {"weight_in": inner.abs().sum(), "weight_out": channels * outer.abs().sum(0).mean()}
        for name, inputs in expected.items():
            assert rates[f"blocks.{i}.s_fc.{name}"] == pytest.approx(0.1 * min(1, 256 / float(inputs)))
    conv = neyshabur("s_conv", 1, 10, width=4)
    groups = experiments.adam_for(conv, 16)([conv.blocks[4].s_conv.weight], lr=0.1).param_groups
    assert groups[0]["lr"] == pytest.approx(1.6 / (16 * float(conv.blocks[4].s_conv.basis.matrix().abs().sum())))


def test_a_run_starts_and_learns_as_its_config_says(tmp_path, monkeypatch):
    inits = []
    real = neyshabur
    monkeypatch.setattr(
        "ella_cuda.experiments.networks.neyshabur", lambda *a, **k: inits.append(k["init"]) or real(*a, **k)
    )
    run_one(small(objective="map", epochs=1, init="equivariant", fan_in_limit=8, lr=0.01), tmp_path, progress=False)
    assert inits == ["equivariant"]
    groups = read_checkpoint(tmp_path / "checkpoint.pt")["optimizer"]["param_groups"]
    assert len({g["initial_lr"] for g in groups}) > 2
    assert max(g["initial_lr"] for g in groups) == 0.01


def test_evidence_steps_of_a_run_are_those_that_its_config_says(tmp_path):
    """One at the only epoch: from the first precision, MacKay's update within its limit, whatever Adam's rate is."""
    common = {"epochs": 1, "prior_prec_init": 0.5, "hypersteps": 30}

    def ways(folder: str, **changes) -> torch.Tensor:
        run_one(small(**common, **changes), tmp_path / folder, progress=False)
        history = json.loads((tmp_path / folder / "history.json").read_text())
        return (
            (torch.tensor([*history["evaluations"][-1]["prior_precision"].values()], dtype=torch.float64) / 0.5)
            .log()
            .abs()
        )

    limited = ways("limited", hyper_optimizer="mackay", hyper_step_limit=0.25)
    assert limited.max() == pytest.approx(0.25)
    assert ways("default", hyper_optimizer="mackay", lr_hyp=7.0).max() == pytest.approx(2.3)
    assert ways("adam", hyper_step_limit=0.25).max() > 1
    alike = ways("normalised", hyper_optimizer="mackay", prior_structure="normalised")
    assert len(set(alike.tolist())) == 1


def test_weights_learn_from_augmented_images_and_the_evidence_from_the_images_as_they_are(tmp_path, monkeypatch):
    config = dataclasses.replace(small(epochs=1), task="digit", augment="flips-shifts")
    real, seen = experiments.run.marglik_training, []

    def train(model, train_loader, *args, **kwargs):
        seen.append((train_loader, kwargs["marglik_loader"]))
        return real(model, train_loader, *args, **kwargs)

    monkeypatch.setattr(experiments.run, "marglik_training", train)
    run_one(config, tmp_path / "augmented", progress=False)
    run_one(dataclasses.replace(config, augment="none"), tmp_path / "plain", progress=False)
    data = prepare_for(config)
    for train_loader, evidence_loader in seen:
        assert torch.equal(torch.cat([x for x, _ in evidence_loader]), data.train_images)
        images = sorted(x.sum().item() for batch, _ in train_loader for x in batch)
        same = images == pytest.approx(sorted(x.sum().item() for x in data.train_images), abs=1e-2)
        assert same == (train_loader is seen[1][0])
    assert torch.equal(seen[0][0].augment.fill, data.black) and float(data.black) < 0


def test_augmentation_is_cifars_as_published_and_never_changes_labels():
    for data in SOURCES:
        expected = "flips-shifts" if data.startswith("cifar") else "none"
        assert configure(data, "plain", "conv", "map").augment == expected
        assert configure(data, "quadrant", "conv", "map").augment == "none"
    assert configure("cifar10", "plain", "conv", "map", augment="none").augment == "none"
    assert configure("digits", "rotated", "conv", "map", augment="flips-shifts").augment == "flips-shifts"
    with pytest.raises(ValueError, match="augment must be none for the task quadrant"):
        configure("cifar10", "quadrant", "conv", "map", augment="flips-shifts")


def test_seeds_differ_and_repeat(tmp_path):
    rows = [
        run_one(small(objective="map", epochs=1, seed=s), tmp_path / str(i), progress=False)
        for i, s in enumerate((0, 0, 1))
    ]
    assert without_seconds(rows[0]) == without_seconds(rows[1])
    assert rows[0]["nll"] != rows[2]["nll"]


@pytest.mark.parametrize(
    ("objective", "change"),
    [("map", {"cooldown": 0.5}), ("evidence", {}), ("evidence", {"task": "digit", "augment": "flips-shifts"})],
)
def test_an_interrupted_run_resumes_to_the_same_numbers(tmp_path, objective, change):
    config = dataclasses.replace(small(objective=objective, epochs=4), **change)
    whole = run_one(config, tmp_path / "whole", progress=False)
    with interrupted(Diary, "record", lambda _, e: e.epoch == 3), pytest.raises(KeyboardInterrupt):
        run_one(config, tmp_path / "halves", progress=False)
    assert read_checkpoint(tmp_path / "halves" / "checkpoint.pt")["epoch"] == 2
    torch.manual_seed(123)
    resumed = run_one(config, tmp_path / "halves", progress=False)
    assert without_seconds(resumed) == without_seconds(whole)
    histories = [json.loads((tmp_path / d / "history.json").read_text()) for d in ("whole", "halves")]
    assert histories[0] == histories[1]


def test_seconds_count_earlier_sessions(tmp_path):
    config = small(objective="map", epochs=1)
    run_one(config, tmp_path, progress=False)
    diary = json.loads((tmp_path / "progress.json").read_text())
    (tmp_path / "progress.json").write_text(json.dumps({**diary, "seconds": 1000.0}))
    assert run_one(config, tmp_path, progress=False)["seconds"] > 1000


def test_a_grid_repeats_no_finished_run(tmp_path, monkeypatch):
    configs = [small(objective="map", epochs=1, seed=seed) for seed in (0, 1)]
    rows = run_grid(configs, tmp_path, progress=False)
    assert [r["seed"] for r in rows] == [0, 1]
    assert json.loads((tmp_path / "summary.json").read_text()) == rows
    summary = (tmp_path / "summary.json").read_text()
    (tmp_path / "summary.json").write_text(json.dumps(rows[:1]))
    (tmp_path / "curves.png").unlink()
    calls = []
    real = run_one
    monkeypatch.setattr(
        "ella_cuda.experiments.grid.run_one", lambda c, *a, **k: calls.append(c.seed) or real(c, *a, **k)
    )
    again = run_grid(configs, tmp_path, progress=False)
    assert calls == [1]
    assert [without_seconds(r) for r in again] == [without_seconds(r) for r in json.loads(summary)]
    assert (tmp_path / "curves.png").exists()
    sessions = json.loads((tmp_path / "environment.json").read_text())
    assert len(sessions) == 2
    assert sessions[0]["torch"] == torch.__version__
    assert sessions[0]["device"] == "cpu"
    assert sessions[0]["device_name"] == device_name(torch.device("cpu"))
    known = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    assert "model name" not in known or sessions[0]["device_name"] in known


def test_a_grid_refuses_another_grids_folder(tmp_path):
    run_folder.write_config(tmp_path, [dataclasses.asdict(small())], {})
    with pytest.raises(ValueError, match="belongs to other runs"):
        run_grid([small(seed=1)], tmp_path, progress=False)
    with pytest.raises(ValueError, match="each of another name"):
        run_grid([small(), small(epochs=7)], tmp_path / "new", progress=False)


def test_missing_data_leave_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    begun: list[int] = []
    with pytest.raises(FileNotFoundError):
        run_grid(
            [configure("mnist", "plain", "conv", "map")],
            tmp_path / "new",
            progress=False,
            data_dir=str(tmp_path),
            on_begin=begun.append,
        )
    assert not (tmp_path / "new").exists() and not begun
    for _ in range(2):
        run_grid([small()], tmp_path / "new", progress=False, on_begin=begun.append)
    assert begun == [0, 1]


def test_a_running_run_can_be_read(tmp_path):
    configs = [small(epochs=3), small(epochs=3, seed=1)]
    with interrupted(Diary, "record", lambda _, e: e.epoch == 3), pytest.raises(KeyboardInterrupt):
        run_grid(configs, tmp_path, progress=False)
    (row,) = experiments.read_running(tmp_path)
    assert (row["run"], row["epoch"], row["epochs"]) == (configs[0].name, 2, 3)
    assert row["layers"][7]["type"] == "conv"
    assert (
        0 < row["layers"][7]["paths"]["conv"]["effective_parameters"] < row["layers"][7]["paths"]["conv"]["parameters"]
    )
    assert row["neg_log_marginal_likelihood"] > 0
    assert [e["epoch"] for e in experiments.read_evaluations(tmp_path / configs[0].name)] == [1, 2]
    assert experiments.read_anchors(tmp_path / configs[0].name) == {}
    diary = tmp_path / configs[0].name / "progress.json"
    diary.write_text(diary.read_text()[:-40])
    with pytest.raises(ValueError, match=r"progress\.json is damaged .* to do that run again"):
        experiments.read_running(tmp_path)


def test_holdout_sees_no_test_image():
    everything = load("digits")
    data = prepare("digits", "digit", holdout_fraction=0.25)
    used = set(data.train_ids.tolist()) | set(data.test_ids.tolist())
    assert not used & set(everything.test_ids.tolist())
    assert len(data.test_ids) == 359
    # Normalised by the images it trains on, not by those it is evaluated on.
    assert abs(float(data.train_images.double().mean())) < 1e-5
    assert abs(float(data.train_images.double().var(unbiased=False)) - 1) < 1e-4


def test_devices():
    assert experiments.resolve_device("cpu") == torch.device("cpu")
    assert experiments.resolve_device("auto").type in ("cpu", "cuda")
    for name in ("gpu", "meta", "mps"):
        with pytest.raises(ValueError, match="device must be auto, cpu, cuda"):
            experiments.resolve_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_gpu_is_said():
    with pytest.raises(RuntimeError, match="finds no CUDA device"):
        experiments.resolve_device("cuda")


def test_a_build_without_cuda_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("ella_cuda.experiments.device.build_info", lambda: {"cuda": ""})
    assert experiments.resolve_device("auto") == torch.device("cpu")
    with pytest.raises(RuntimeError, match=r"built without CUDA; install it where nvcc is found"):
        experiments.resolve_device("cuda")
    with pytest.raises(ValueError, match="only 1 CUDA"):
        experiments.resolve_device("cuda:3")


def order(configs: list[RunConfig], folder: Path, monkeypatch) -> list[RunConfig]:
    """In which order a grid starts its runs, several at once."""
    seen: list[RunConfig] = []

    def record(function, arguments, *rest):
        seen.extend(config for config, *_ in arguments)
        return iter(())

    monkeypatch.setattr("ella_cuda.experiments.grid.run_at_once", record)
    with pytest.raises(KeyError):  # no run was done, so there is no row
        experiments.run_grid(configs, folder, jobs=2, progress=False)
    return seen


def test_dense_runs_are_spread_among_the_others(tmp_path, monkeypatch):
    """One at the start, the next after its share of the others, each with the evidence before MAP, whose runs are shorter."""
    layers = ["conv", "f_fc", "f_fc+conv", "fc", "fc+conv"]
    configs = [small(layer=layer, objective="map") for layer in layers]
    configs += [small(layer=layer, objective="evidence") for layer in ("conv", "f_fc", "fc")]
    started = order(configs, tmp_path / "grid", monkeypatch)
    assert sorted(c.name for c in started) == sorted(c.name for c in configs)
    dense = [i for i, c in enumerate(started) if "fc" in c.layer.split("+")]
    assert dense == [0, 3, 5]  # five others: after 0, 5/3 and 10/3 of them
    assert [started[i].objective for i in dense] == ["evidence", "map", "map"]
    assert [c for i, c in enumerate(started) if i not in dense] == [
        c for c in configs if "fc" not in c.layer.split("+")
    ]
