"""A network back from its run's folder is the one whose numbers are in the row."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F

from ella_cuda.digest import sealed
from ella_cuda.experiments import LoadedRun, RunConfig, configure, evaluate, load_run, prepare_for, run_grid, run_one
from ella_cuda.experiments import run as run_module
from ella_cuda.experiments.diary import Diary
from ella_cuda.laplace.evidence import of_tensors
from ella_cuda.models import BESIDE_GROUP, PATHS
from ella_cuda.nn import SpatialBasis
from python_tests.interrupting import interrupted

SMALL = {"width": 1, "epochs": 2, "burn_in": 0, "frequency": 1, "hypersteps": 2, "train_size": 40, "test_size": 40}


def small(layer: str = "conv", objective: str = "evidence", **changes) -> RunConfig:
    return configure("digits", "quadrant", layer, objective, 0, **{**SMALL, **changes})


@pytest.mark.parametrize(
    "config",
    [
        *(small(f"{path}+gconv" if path in BESIDE_GROUP else path, "map", epochs=1) for path in PATHS),
        small("f_fc+conv", prior_structure="module"),
        small("f_fc+s_conv", prior_structure="unit"),
        small("s_fc+s_conv", learn="anchors+lengthscales", basis="exponential", inverse_lengthscale=0.3),
        small("s_fc", learn="anchors", column_tolerance=0.05, resolution="per_channel"),
    ],
    ids=lambda c: f"{c.layer}-{c.objective}",
)
def test_a_loaded_network_gives_the_numbers_of_its_row(config, tmp_path):
    row = run_one(config, tmp_path, progress=False)
    before = torch.random.get_rng_state()
    loaded = load_run(tmp_path)
    assert torch.equal(torch.random.get_rng_state(), before)
    model, la, found, epoch = loaded
    assert (
        isinstance(loaded, LoadedRun)
        and found == dataclasses.replace(config, evidence_batch_size=150)
        and epoch == config.epochs
        and not model.training
    )
    data = prepare_for(found)
    assert evaluate(model, data.test_images, data.test_labels) == (row["accuracy"], row["nll"])
    for name, delta in zip(la.parameter_names, of_tensors(la, la.prior_precision).tolist(), strict=True):
        path = next((layer for layer in row["layers"] if name.startswith(f"{layer['name']}.")), None)
        if path is not None:
            kind, _, tensor = name.removeprefix(f"{path['name']}.").partition(".")
            assert path["paths"][kind]["prior_precision"][tensor] == delta
    if row["neg_log_marginal_likelihood"] is not None:
        la = load_run(tmp_path, fit=True).la
        evidence = float(la.log_marginal_likelihood()) / la.n_data
        assert evidence == pytest.approx(-row["neg_log_marginal_likelihood"], rel=1e-9)
        assert {n: t for n, t in la.layer_types().items() if t != "none"} == {
            layer["name"]: layer["type"] for layer in row["layers"] if layer["type"]
        }
    if config.learn:
        fresh = [m for m in run_start(config).modules() if isinstance(m, SpatialBasis)]
        learned = [m for m in model.modules() if isinstance(m, SpatialBasis)]
        assert not any(
            torch.equal(a.anchors, b.anchors) for a, b in zip(fresh, learned, strict=True) if len(b.points) > 1
        )


def test_a_fit_that_samples_columns_leaves_torchs_draws(tmp_path):
    run_one(small(objective="map", epochs=1, fisher="mc"), tmp_path, progress=False)
    before = torch.random.get_rng_state()
    la = load_run(tmp_path, fit=True).la
    assert la.n_data == 40 and torch.equal(torch.random.get_rng_state(), before)


def run_start(config: RunConfig) -> torch.nn.Module:
    from ella_cuda.experiments.run import build_network

    torch.manual_seed(config.seed)
    return build_network(config, 1, 40)


def test_a_run_that_is_not_finished_loads_as_of_its_checkpoint(tmp_path):
    with interrupted(Diary, "record", lambda _, e: e.epoch == 2), pytest.raises(KeyboardInterrupt):
        run_one(small(objective="map"), tmp_path, progress=False)
    assert load_run(tmp_path).epoch == 1


def test_folders_that_cannot_be_loaded(tmp_path):
    config = small(objective="map", epochs=1)
    run_grid([config], tmp_path / "grid", progress=False)
    with pytest.raises(ValueError, match=f"grid holds several runs; name the folder of one: {config.name}"):
        load_run(tmp_path / "grid")
    with pytest.raises(ValueError, match=r"nowhere is not the folder of a run: it does not exist"):
        load_run(tmp_path / "nowhere")
    folder = tmp_path / "grid" / config.name
    with pytest.raises(ValueError, match="is not the folder of a run"):
        load_run(folder / "checkpoint.pt")
    with pytest.raises(ValueError, match="device must be auto, cpu, cuda or cuda:<index>, got 'tpu'"):
        load_run(folder, "tpu")
    whole, checkpoint = (folder / "progress.json").read_text(), (folder / "checkpoint.pt").read_bytes()
    other = json.loads(whole)
    other["network"]["num_classes"] = 3
    for text, words in (
        (whole[:-20], r"progress\.json is damaged or of another version"),
        ("[]", "edited, or is of another version"),
        (json.dumps(other), r"progress\.json was edited"),
        (json.dumps(sealed(other, ["progress.json"], ["seconds"])), r"checkpoint\.pt has head\.2\.weight of shape"),
    ):
        (folder / "progress.json").write_text(text)
        with pytest.raises(ValueError, match=words):
            load_run(folder)
    (folder / "progress.json").write_text(whole)
    (folder / "checkpoint.pt").write_bytes(checkpoint[:-100])
    with pytest.raises(ValueError, match="not a readable checkpoint"):
        load_run(folder)
    (folder / "checkpoint.pt").unlink()
    with pytest.raises(ValueError, match="has not come to its first evaluation"):
        load_run(folder)


@pytest.mark.parametrize("objective", ["map", "evidence"])
@pytest.mark.parametrize("calibration", ["folds", "auto"])
def test_a_network_of_two_thirds_chooses_the_precisions_of_predictions(objective, calibration, tmp_path, monkeypatch):
    """By what it says of the others; a run that was killed before goes on, and a loaded one has them."""
    calls, training = [], run_module.marglik_training

    def watched(model, loader, *args, **options):
        calls.append((loader.images, options["checkpoint"]))
        found = training(model, loader, *args, **options)
        calls[-1] += found[:2]
        return found

    monkeypatch.setattr(run_module, "marglik_training", watched)
    monkeypatch.setattr("ella_cuda.laplace.leave_one_out.BY_HEART", 2.0)
    changes = {"calibration": calibration, "data_seed": 1, "train_size": 160, "epochs": 30, "width": 2}
    config = configure("digits", "plain", "conv", objective, **SMALL | changes)
    with interrupted(run_module, "marglik_training", lambda *_: len(calls) == 1), pytest.raises(KeyboardInterrupt):
        run_one(config, tmp_path, progress=False)
    calls.clear()
    row = run_one(config, tmp_path, progress=False)
    (images, _, whole, _), (seen, _, la, _) = calls
    assert len(seen) == 106
    known = {x.numpy().tobytes() for x in seen}
    labels = prepare_for(config).train_labels
    pairs = [(x, y) for x, y in zip(images, labels, strict=True) if x.numpy().tobytes() not in known]
    unseen, y = (torch.stack(part) for part in zip(*pairs, strict=True))
    assert len(unseen) == 54 and known < {x.numpy().tobytes() for x in images}
    assert (y.bincount(minlength=10) - labels.bincount() / 3).abs().max() < 1.5
    totals = torch.zeros(37, dtype=torch.float64)
    for k in range(37):
        la.predictive_prior_precision = whole.prior_precision * 10 ** (k / 4 - 2)
        totals[k] = la(unseen).double().log()[torch.arange(len(y)), y].sum()
    assert 0 < int(totals.argmax()) < 36
    chosen = whole.prior_precision * 10 ** (int(totals.argmax()) / 4 - 2)
    torch.testing.assert_close(whole.predictive_prior_precision, chosen, rtol=1e-12, atol=0)
    loaded = load_run(tmp_path, fit=True)
    torch.testing.assert_close(loaded.la.predictive_prior_precision, chosen, rtol=1e-12, atol=0)
    data = prepare_for(config)
    p = loaded.la(data.test_images).double()[torch.arange(40), data.test_labels]
    assert row["nll_predictive"] == pytest.approx(-float(p.log().mean()), rel=1e-5)
    nll = F.cross_entropy(loaded.model(data.train_images), data.train_labels).item()
    assert row["calibrated_by"] == "folds" and f"by heart ({nll:.2g} nats)" in row["calibrated_by_reason"]


@pytest.mark.parametrize("by_heart", [False, True])
def test_images_are_left_out_where_no_other_network_helps(by_heart, tmp_path, monkeypatch):
    """Where the network does not know them by heart, or two thirds are too few to learn."""
    trainings, training = [], run_module.marglik_training
    monkeypatch.setattr(
        run_module, "marglik_training", lambda *args, **how: trainings.append(how) or training(*args, **how)
    )
    if by_heart:
        monkeypatch.setattr(run_module, "knows_by_heart", lambda la: True)
        monkeypatch.setattr("ella_cuda.laplace.leave_one_out.ENOUGH", 0.0)
    config = configure("digits", "plain", "conv", "map", **SMALL | {"train_size": 160, "epochs": 8})
    row = run_one(config, tmp_path, progress=False)
    assert row["calibrated_by"] == "leave-one-out" and len(trainings) == 1 + by_heart
    assert ("has learned too little" in row["calibrated_by_reason"]) == by_heart
    other, data = load_run(tmp_path, fit=True).la, prepare_for(config)
    found, other.predictive_prior_precision = other.predictive_prior_precision, None
    torch.testing.assert_close(other.calibrate([(data.train_images, data.train_labels)]), found)
