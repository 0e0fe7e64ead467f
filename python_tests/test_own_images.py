"""Images of one's own: a person's walk from a folder to answers, networks by name, and what is refused before the first step."""

import base64
import csv
import dataclasses
import io
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision import models

from ella_cuda import cli, experiments
from ella_cuda.data import SOURCES
from ella_cuda.data.labelled import image_files
from ella_cuda.experiments import RunConfig, configure, load_run, prepare_for
from ella_cuda.experiments.error_bars import by_last_layer, described, of_last_layer
from ella_cuda.experiments.examples import thumbnail
from ella_cuda.experiments.networks import build_network, load_weights, require_network
from ella_cuda.experiments.predictions import threshold
from ella_cuda.experiments.run import _on_training_images
from ella_cuda.laplace import KronLaplace
from ella_cuda.reports.text import doubt_of_order, error_bars_note
from ella_cuda.run_folder import LAPLACE_FILE, read_predictions, read_summary, write_predictions

SIZE, CLASSES = 8, ("blue", "green", "red ä")
NETWORKS = f"""
from torch import nn
def small(in_channels, num_classes):
    return nn.Sequential(nn.Conv2d(in_channels, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(16, num_classes))
def linear(in_channels, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * {SIZE**2}, num_classes))
def pair(in_channels, num_classes):
    class Pair(nn.Linear):
        def forward(self, x):
            return (x, x)
    return Pair(1, 1)
"""
MODEL = ["--model", "own_networks:small"]
SHORT = ("--image-size", str(SIZE), "--epochs", "2", "--jobs", "1", "--device", "cpu")


def write_photos(root, seed=0, count=12):
    rng = np.random.default_rng(seed)
    for c, name in enumerate(CLASSES):
        (root / name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(0, 120, (16, 12, 3), dtype=np.uint8)
            pixels[..., 2 - c] += 120
            Image.fromarray(pixels).save(root / name / f"{i}.png")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with photos, others, networks and, in ``run``, a trained run."""
    root = tmp_path_factory.mktemp("own images")
    write_photos(root / "photos")
    write_photos(root / "new", seed=1, count=4)
    (root / "own_networks.py").write_text(NETWORKS)
    (root / "broken").mkdir()
    (root / "broken" / "x.png").write_text("no image")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert cli.main(["train", "photos/", "--model", "own_networks:small", *SHORT, "--out", "run"]) == 0
    return root


@pytest.fixture
def there(place, monkeypatch):
    monkeypatch.chdir(place)
    return place


def run_of(there):
    (config,) = experiments.read_grid(there / "run")[0]
    return there / "run" / config.name, config


def test_from_a_folder_of_images_to_a_table_of_answers(there, capsys):
    (row,) = read_summary(there / "run")
    assert (row["data"], row["model"], row["objective"]) == ("photos", "own_networks:small", "evidence")
    assert (row["train_size"], row["evaluated_size"]) == (30, 6) and row["neg_log_marginal_likelihood"] > 0
    page = (run_of(there)[0] / "report.html").read_text(encoding="utf-8")
    for name in read_predictions(run_of(there)[0])["names"]:
        assert f'<span class="file">{name.replace("/", "/<wbr>")}</span>' in page
    assert page.count('class="picture"') == len([*run_of(there)[0].glob("*.png")])
    own = ["--model", "own_networks:small"]
    assert cli.main(["evaluate", "run", "new", "--ood", "photos", *own, "--wrong-labels", "2"]) == 0
    said = capsys.readouterr().out
    for title in ("accuracy, %", "ECE", "AURC", "FPR at 95 %, entropy", "least sure images", "wrong ones come first"):
        assert title in said
    assert cli.main(["predict", "run", "new", "broken/x.png", "--csv", "out.csv", "--skip-unreadable", *own]) == 0
    with open("out.csv", encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["file"] for line in lines] == [f"new/{c}/{i}.png" for c in CLASSES for i in range(4)] + [
        "broken/x.png"
    ]
    assert lines[-1]["label"] == "" and lines[-1]["ask"] == "yes"
    assert all(0 <= float(line["epistemic"]) <= math.log(3) for line in lines[:-1])


def test_predictions_are_those_of_the_approximation_that_the_training_data_give(there):
    folder, config = run_of(there)
    run = load_run(folder, model=config.model)
    data = prepare_for(config)
    files = [there / "photos" / data.names[i] for i in data.test_ids.tolist()]
    found = run.predict(files)
    plain = folder.with_name("refitted")
    shutil.copytree(folder, plain, ignore=shutil.ignore_patterns(LAPLACE_FILE))
    diary = json.loads((plain / "progress.json").read_text())
    assert diary["run"] == config.name
    shutil.move(plain, there / "alone")  # outside of the grid, in a folder of any name
    with pytest.raises(RuntimeError, match="keeps no factors"):
        load_run(there / "alone", model=config.model).predict(files)
    again = load_run(there / "alone", model=config.model, fit=True)
    shutil.rmtree(there / "alone")
    with torch.no_grad():
        expected = again.la(data.test_images).double()
    torch.testing.assert_close(found.probabilities, expected, rtol=1e-4, atol=1e-5)
    kept = read_predictions(folder)
    assert (
        kept["names"] == [data.names[i] for i in data.test_ids.tolist()] and kept["labels"] == data.test_labels.tolist()
    )
    torch.testing.assert_close(torch.tensor(kept["probabilities"], dtype=torch.float64), expected, rtol=1e-4, atol=1e-5)
    assert found.classes == [CLASSES[i] for i in expected.argmax(1).tolist()]


def test_evaluation_counts_what_predictions_say(there):
    folder, config = run_of(there)
    run = load_run(folder, model=config.model)
    assert [note for note in run.evaluate("photos")[0].notes if "learned from 30 of these images" in note]
    found, scores = run.evaluate("new")
    assert not [note for note in found.notes if "learned from" in note]
    labels = torch.arange(3).repeat_interleave(4)
    assert torch.equal(found.labels, labels) and scores["images"] == 12
    p = run.predict(["new"]).probabilities
    assert scores["accuracy"] == pytest.approx(100 * float((p.argmax(1) == labels).double().mean()))
    assert scores["nll"] == pytest.approx(-float(p[torch.arange(12), labels].log().mean()))


def test_images_that_a_run_learned_from_are_known_under_other_names(there):
    folder, config = run_of(there)
    data = prepare_for(config)
    for number, i in enumerate(data.train_ids[:5].tolist()):
        name = data.names[i]
        (there / "copies" / name.split("/")[0]).mkdir(parents=True, exist_ok=True)
        shutil.copy(there / "photos" / name, there / "copies" / name.split("/")[0] / f"copy {number}.png")
    shutil.copytree(there / "new", there / "copies", dirs_exist_ok=True)
    found, _ = load_run(folder, model=config.model).evaluate("copies")
    assert len(found.names) == 17 and [note for note in found.notes if "learned from 5 of these images" in note]


@pytest.mark.parametrize("objective", ["evidence", "map"])
def test_error_bars_of_the_last_layer_are_those_of_its_kronecker_posterior(there, objective, capsys):
    how = ["--error-bars", "last-layer", "--objective", objective, "--out", objective]
    assert cli.main(["train", "photos/", "--model", "own_networks:small", *SHORT, *how]) == 0
    assert "error bars of the last layer, 5, calibrated to" in capsys.readouterr().out
    ((config,), (row,)) = experiments.read_grid(objective)[0], read_summary(objective)
    run = load_run(f"{objective}/{config.name}", model=config.model)
    found = run.predict(["new"])
    data, net = prepare_for(config), run.model.double()
    with torch.no_grad():
        seen, p = net[:-1](data.train_images.double()), net(data.train_images.double()).softmax(1)
        pixels = np.stack([np.array(Image.open(name).resize((SIZE, SIZE), Image.BILINEAR)) for name in found.names])
        x = (
            run.black[:, None, None]
            + (run.white - run.black)[:, None, None] * torch.tensor(pixels).permute(0, 3, 1, 2) / 255
        )
        new, logits = net[:-1](x.double()), net(x.double())
    hessian = (torch.diag_embed(p) - p[:, :, None] * p[:, None]).sum(0)
    history = json.loads((there / objective / config.name / "history.json").read_text())["evaluations"]
    learned = history[-1]["prior_precision"]
    of = {name: row["error_bars"]["factor"] * learned[name] for name in ("5.weight", "5.bias")}
    weight = torch.kron(seen.T @ seen / len(seen), hessian) + of["5.weight"] * torch.eye(48)
    bias = torch.linalg.inv(hessian + of["5.bias"] * torch.eye(3)).diag()
    jacobian = torch.einsum("nd,kj->nkdj", new, torch.eye(3, dtype=torch.float64)).flatten(2)
    variance = (jacobian * torch.linalg.solve(weight, jacobian.mT).mT).sum(2) + bias
    assert row["error_bars"]["layer"] == "5" and variance.max() > 1e-6
    expected = (logits / (1 + math.pi / 8 * variance).sqrt()).softmax(1)
    torch.testing.assert_close(found.probabilities, expected, rtol=1e-4, atol=1e-5)


def test_large_networks_have_error_bars_of_the_last_layer_unless_told_otherwise():
    def chosen(model, **how):
        config = configure("/photos", "plain", "", "map", model=model, **how)
        return by_last_layer(config, build_network(config, 3, 10), 10)

    with torch.device("meta"):
        assert chosen("resnet18") and not chosen("resnet18", error_bars="all")
        assert not chosen("shufflenet_v2_x0_5", error_bars="all") and chosen(
            "shufflenet_v2_x0_5", error_bars="last-layer"
        )
    of_the_paper = configure("digits", "digit", "f_fc", "map")
    assert not by_last_layer(of_the_paper, nn.Linear(10**4, 10**3), 10)


@pytest.mark.parametrize(
    "model, expected",
    [
        (nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)), ["0.weight", "0.bias"]),
        (nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3).requires_grad_(False)), ["0.weight", "0.bias"]),
        (nn.Sequential(nn.Conv2d(1, 3, 1), nn.Conv2d(3, 3, 1, bias=False), nn.Flatten()), ["1.weight"]),
        (nn.Sequential(nn.LayerNorm(3)), ["0.weight", "0.bias"]),
    ],
)
def test_the_last_layer_is_that_of_the_last_matrix_with_a_row_for_each_class(model, expected):
    precision = torch.arange(1.0, 1 + len([p for p in model.parameters() if p.requires_grad]))
    la = KronLaplace(model, "classification", prior_precision=precision)
    found = of_last_layer(configure("/photos", "plain", "", "map", model="resnet18"), la, 3)
    assert list(found.parameter_names) == expected and found.fisher == "exact"
    known = dict(zip(la.parameter_names, la.prior_precision.tolist(), strict=True))
    assert found.prior_precision.tolist() == [known[name] for name in expected]


@pytest.mark.parametrize("content", [b"garbage", {"run": None}, {"run": None, "learned": "x"}])
def test_factors_that_cannot_be_read_are_named_in_a_line(there, content):
    folder, config = run_of(there)
    spoiled = there / "spoiled"
    shutil.copytree(folder, spoiled, dirs_exist_ok=True)
    if isinstance(content, bytes):
        (spoiled / LAPLACE_FILE).write_bytes(content)
    else:
        torch.save({**content, "run": config.name}, spoiled / LAPLACE_FILE)
    with pytest.raises(ValueError, match="delete it to have the factors computed") as caught:
        load_run(spoiled, model=config.model, fit=True)
    shutil.rmtree(spoiled)
    assert len(str(caught.value)) < 300


def test_wrong_labels_need_the_images_that_the_run_learned_from(there):
    folder, config = run_of(there)
    run = load_run(folder, model=config.model)
    run.predict(["new"])
    run.learned = run.learned.clone()
    run.learned[:2] += 1
    with pytest.raises(ValueError, match="has 28 of the 30 images that the run"):
        run.wrong_labels()


def test_a_run_that_the_caller_fits_predicts_and_knows_no_images(there):
    folder, config = run_of(there)
    run, data = load_run(folder, model=config.model), prepare_for(config)
    run.la.fit([(data.train_images, data.train_labels)])
    found, scores = run.evaluate("photos")
    assert (
        run.learned is None and scores["images"] == 36 and not [note for note in found.notes if "learned from" in note]
    )
    assert len(run.wrong_labels(5)) == 5


def test_files_of_a_folder_that_are_no_images_by_their_names_are_counted(tmp_path):
    for name in ("a.png", "b.gif", "c.gif", "notes.txt"):
        (tmp_path / name).touch()
    found = image_files([tmp_path, tmp_path / "b.gif"])
    assert [Path(name).name for name in found.names] == ["a.png", "b.gif"]
    assert found.notes == [
        "not read: 2 .gif, 1 .txt: images are .jpg, .jpeg, .png, .ppm, .bmp, .pgm, .tif, .tiff, .webp"
    ]


def test_a_networks_augmentation_is_learned_from_a_folder_and_shown(there, capsys):
    how = [
        "--learn",
        "augmentation",
        "--generators",
        "tx",
        "rotation",
        "--lr-aug",
        "1",
        "--image-size",
        str(SIZE),
        "--epochs",
        "4",
    ]
    assert cli.main(["train", "photos/", *MODEL, *how, "--jobs", "1", "--device", "cpu", "--out", "turned"]) == 0
    assert "becomes GroupNorm" in capsys.readouterr().out
    (row,), ((config,), _) = read_summary("turned"), experiments.read_grid("turned")
    assert set(row["augmentation"]) == {"tx", "rotation"} and all(
        abs(v - 0.1) > 1e-3 for v in row["augmentation"].values()
    )
    folder = there / "turned" / config.name
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "Learned augmentation" in page and "copies at the learned amounts" in page
    (shown, *_), *_ = json.loads((folder / "samples.json").read_text())["images"]
    data = prepare_for(config)
    own = 255 * (data.test_images - data.black[:, None, None]) / (data.white - data.black)[:, None, None]
    gaps = np.abs(own.movedim(1, -1).numpy() - np.array(shown)).max((1, 2, 3))
    assert gaps.min() <= 0.51, "none of the images, in its colours"
    run = load_run(folder, model=config.model)
    kept = read_predictions(folder)
    found = run.predict([there / "photos" / name for name in kept["names"]])
    torch.testing.assert_close(
        found.probabilities, torch.tensor(kept["probabilities"], dtype=torch.float64), rtol=1e-4, atol=1e-5
    )
    assert not any(isinstance(m, nn.BatchNorm2d) for m in run.model.modules()) and len(data.test_images) == 6


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small"])
def test_networks_that_learn_an_augmentation_have_norms_of_single_images(name):
    config = configure("/photos", "plain", "", "evidence", model=name, learn="augmentation")
    net = build_network(config, 3, 4).train()
    kinds = {type(m) for m in net.modules()}
    assert nn.GroupNorm in kinds and not kinds & {nn.BatchNorm2d}
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.manual_seed(0)
        net.classifier = net.classifier.eval() if hasattr(net, "classifier") else nn.Identity()  # dropout
        torch.testing.assert_close(net(x)[:1], net(x[:1]), rtol=1e-4, atol=1e-4)


def test_images_in_a_report_are_small():
    noise = torch.rand(1, 3, 1024, 1024)
    png = base64.b64decode(thumbnail(noise[0], torch.zeros(3), torch.ones(3)))
    shown = np.asarray(Image.open(io.BytesIO(png)))
    assert shown.shape == (128, 128, 3) and len(png) < 60_000
    whole = noise.unflatten(2, (128, 8)).unflatten(4, (128, 8)).mean((3, 5))[0].permute(1, 2, 0)
    np.testing.assert_allclose(shown, 255 * whole.numpy(), atol=0.51)


def test_a_run_says_that_calibration_turned_its_error_bars_off(there):
    folder, config = run_of(there)
    la = load_run(folder, model=config.model, fit=True).la
    assert "calibrated to" in error_bars_note(described(la)) and "all layers" in error_bars_note(described(la))
    la.predictive_prior_precision = 1e7 * la.prior_precision
    assert described(la)["off"] and "turned off by calibration, which took 10,000,000 times" in error_bars_note(
        described(la)
    )
    la.predictive_prior_precision = None
    assert "not calibrated" in error_bars_note(described(la))


def test_the_first_training_images_have_all_classes_in_proportion(there):
    data = prepare_for(run_of(there)[1])
    assert all(len(set(some.tolist())) == 3 for some in data.train_labels.split(3))
    assert all(
        CLASSES[label] == data.names[i].split("/")[0]
        for label, i in zip(data.train_labels, data.train_ids, strict=True)
    )


def test_where_leaving_one_out_and_the_evidence_disagree_it_is_said():
    rows = [
        {"model": "a", "nll_leave_one_out": 0.5},
        {"model": "b", "nll_leave_one_out": 0.4},
        {"model": "c", "nll_leave_one_out": None},
    ]
    assert "puts b first" in doubt_of_order(rows) and doubt_of_order(rows[1:]) == doubt_of_order(rows[2:]) == ""


def test_labels_that_all_others_contradict_come_first(there):
    folder, config = run_of(there)
    run = load_run(folder, model=config.model)
    suspects = run.wrong_labels(30)
    data = prepare_for(config)
    probabilities = [p for *_, p in suspects]
    assert sorted(name for name, *_ in suspects) == sorted(data.names[i] for i in data.train_ids.tolist())
    assert all(name.startswith(label) for name, label, _ in suspects) and probabilities == sorted(probabilities)


@pytest.mark.parametrize("risk", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_the_threshold_keeps_errors_of_held_out_images_below_the_risk(tmp_path, risk, seed):
    p = torch.rand(60, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    p[::3] = p[0]  # equal ones
    p = p / p.sum(1, keepdim=True)
    labels = (torch.rand(60, generator=torch.Generator().manual_seed(9 + seed)) > p.amax(1)).long() ^ p.argmax(1)
    kept = {"names": [""] * 60, "labels": labels.tolist(), "probabilities": p.tolist(), "class_names": []}
    write_predictions(tmp_path, {"run": "r", "evaluated_on": "test", **kept})
    confidence, wrong = p.amax(1), p.argmax(1) != labels
    fine = [
        c for c in confidence.tolist() if (wrong[confidence >= c].sum() + 1) / ((confidence >= c).sum() + 1) <= risk
    ]
    assert threshold(tmp_path, risk)[0] == (min(fine) if fine else math.inf)


def test_equal_probabilities_are_on_one_side_of_the_threshold(tmp_path):
    p = [[0.9, 0.1], *[[0.8, 0.2]] * 4]
    kept = {"names": [""] * 5, "labels": [0, 0, 0, 1, 1], "probabilities": p, "class_names": []}
    write_predictions(tmp_path, {"run": "r", "evaluated_on": "test", **kept})
    assert threshold(tmp_path, 0.45)[0] == math.inf  # two of five wrong, and one image alone shows 1/2 at most
    assert threshold(tmp_path, 0.5)[0] == 0.8


def test_without_held_out_images_the_threshold_is_of_calibrated_probabilities(tmp_path):
    write_predictions(tmp_path, {"run": "r", "evaluated_on": "train"})
    limit, why = threshold(tmp_path, 0.1)
    assert limit == 0.9 and "calibration" in why


def test_training_images_that_a_run_is_evaluated_on_keep_their_names(there):
    data = prepare_for(dataclasses.replace(run_of(there)[1], split=0.0, train_size=9))
    both, names = _on_training_images(data), [data.names[i] for i in data.train_ids.tolist()]
    assert [both.names[i] for i in both.test_ids.tolist()] == [both.names[i] for i in both.train_ids.tolist()] == names
    assert len({*both.test_ids.tolist(), *both.train_ids.tolist()}) == 18


def test_networks_side_by_side_without_a_split(there, capsys):
    models = ["own_networks:small", "own_networks:linear"]
    assert cli.main(["compare", "photos", "--model", *models, *SHORT, "--out", "compared"]) == 0
    rows = {row["model"]: row for row in read_summary("compared")}
    with open("compared/compare.csv", encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert sorted(rows) == sorted(models) == sorted(line["network"] for line in lines)
    evidence = [float(line["-log q/N, nats"]) for line in lines]
    assert evidence == sorted(row["neg_log_marginal_likelihood"] for row in rows.values())
    for row in rows.values():
        assert (row["train_size"], row["evaluated_size"], row["evaluated_on"]) == (36, 36, "train")
        loaded = load_run(f"compared/{row['run']}", model=row["model"], fit=True)
        data = prepare_for(loaded.config)
        loaded.la.prior_precision = loaded.la.predictive_prior_precision
        found = loaded.la.leave_one_out([(data.train_images, data.train_labels)])
        assert row["nll_leave_one_out"] == pytest.approx(-float(found.log_density.mean()), rel=1e-4)

    page = Path("compared/report.html").read_text(encoding="utf-8")
    order = sorted(rows.values(), key=lambda row: row["neg_log_marginal_likelihood"])
    assert [page.index(f'href="{quote(row["run"])}/') for row in order] == sorted(
        page.index(f'href="{quote(row["run"])}/') for row in order
    )
    assert "best by the evidence" in page and all(f"<td>{row['nll_leave_one_out']:.3f}</td>" in page for row in order)


WALK = """
set -e
ella() { python -m ella_cuda.cli "$@"; }
ella check --device cpu
ella train "my photos" --model own_networks:small --image-size 8 --epochs 2 --device cpu --jobs 1 --out run
ella evaluate run new --ood other --model own_networks:small
ella predict run new/*/*.png --model own_networks:small --csv out.csv
ella compare "my photos" --model own_networks:small own_networks:linear --image-size 8 --epochs 2 --device cpu --jobs 1 --out compared
ella report run
"""


def test_a_person_walks_from_a_folder_to_answers_in_a_shell(tmp_path):
    write_photos(tmp_path / "my photos")
    write_photos(tmp_path / "new", seed=1, count=3)
    (tmp_path / "other").mkdir()
    Image.effect_noise((8, 8), 90).save(tmp_path / "other" / "noise.png")
    (tmp_path / "own_networks.py").write_text(NETWORKS)
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    places = {
        "PATH": path,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), *map(os.path.abspath, sys.path)])),
    }
    done = subprocess.run(
        ["bash", "-c", WALK], cwd=tmp_path, env={**os.environ, **places}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    for said in ("checks ok, CPU:", "36 images of 3 classes", "AURC", "ask a person about", "leave-one-out NLL, nats"):
        assert said in done.stdout
    with (tmp_path / "out.csv").open(encoding="utf-8", newline="") as file:
        answers = list(csv.DictReader(file))
    assert [answer["file"] for answer in answers] == [f"new/{c}/{i}.png" for c in CLASSES for i in range(3)]
    assert {answer["label"] for answer in answers} <= {*CLASSES} and (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize("data", [*SOURCES, "/photos"])
@pytest.mark.parametrize("epochs", range(1, 8))
def test_few_epochs_leave_time_for_evidence(data, epochs):
    layer = {"layer": "", "model": "resnet18"} if data == "/photos" else {"layer": "conv"}
    config = configure(data, "plain", **layer, objective="evidence", epochs=epochs)
    assert config.burn_in < epochs
    if epochs > 1:
        assert configure(
            data, "plain", **layer, objective="evidence", epochs=epochs, learn="augmentation"
        )._evidence_steps()


def network(name="shufflenet_v2_x0_5", in_channels=3, num_classes=5):
    config = configure("/photos", "plain", "", "map", model=name)
    return build_network(config, in_channels, num_classes).eval()


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_weights_of_colour_networks_start_grey_ones_of_other_classes(tmp_path, suffix):
    colour = models.get_model("shufflenet_v2_x0_5", weights=None, num_classes=7).eval()
    path = str(tmp_path / f"w{suffix}")
    if suffix == ".pt":
        torch.save({"state_dict": colour.state_dict()}, path)
    else:
        pytest.importorskip("safetensors.torch").save_file(colour.state_dict(), path)
    grey = network(in_channels=1)
    load_weights(grey, path, 5)
    x = torch.randn(2, 1, 32, 32)
    torch.testing.assert_close(grey.conv1(x), colour.conv1(x.expand(-1, 3, -1, -1)), rtol=1e-4, atol=1e-4)
    ours, theirs = grey.state_dict(), colour.state_dict()
    others = [name for name in theirs if not name.startswith(("conv1.0", "fc"))]
    assert all(torch.equal(ours[name], theirs[name]) for name in others) and len(others) > 100


class Harmful:
    def __reduce__(self):
        return (exec, ("raise SystemExit('code of the file was run')",))


@pytest.mark.parametrize(
    "content, words",
    [
        (None, "do not exist"),
        (b"no weights", "cannot be read"),
        (Harmful(), "cannot be read without running code"),
        ({"a": 1}, "must hold tensors by name"),
        ({"fc.weight": torch.zeros(5, 3)}, "of another network"),
        (nn.Linear(3, 5).state_dict(), "of another network"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path, content, words):
    path = tmp_path / "w.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        load_weights(network(), str(path), 5)


@pytest.mark.parametrize("name", ["resnet18", "timm:resnet10t", "own_networks:small"])
@pytest.mark.parametrize("channels", [1, 3])
def test_networks_by_name_take_the_datas_channels_and_classes(there, name, channels):
    if name.startswith("timm"):
        pytest.importorskip("timm")
    images, state = torch.randn(2, channels, 32, 32), torch.random.get_rng_state()
    require_network(configure("/photos", "plain", "", "map", model=name), images, 4)
    assert torch.equal(state, torch.random.get_rng_state())
    assert network(name, channels, 4)(torch.randn(2, channels, 32, 32)).shape == (2, 4)


@pytest.mark.parametrize(
    "name, words",
    [
        ("resnet81", "did you mean resnet18"),
        ("timm:resnet10", "timm"),
        ("own_networks:none", "no attribute 'none'"),
        ("nowhere:small", "No module named 'nowhere'"),
        ("own_networks:pair", "must give one tensor"),
        ("builtins:dict", "must give a torch.nn.Module, got a dict"),
        ("inception_v3", "does not take images of shape"),
    ],
)
def test_networks_that_cannot_be_trained_are_refused(there, name, words):
    with pytest.raises(ValueError, match=words):
        require_network(configure("/photos", "plain", "", "map", model=name), torch.randn(2, 3, 16, 16), 4)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"model": "resnet18"}, "one of layer and model"),
        ({"layer": ""}, "one of layer and model"),
        ({"layer": "", "model": "../resnet18"}, "model must be a network's name"),
        ({"weights": "w.pt"}, "weights must be of a network of model"),
        ({"data": "photos-that-are-not-there"}, "data must be one of"),
        ({"split": 0.95}, "split must be at least 0 and at most 0.9"),
    ],
)
def test_runs_that_name_no_network_or_data_are_refused(change, words):
    given = {"data": "digits", "task": "plain", "layer": "conv", "objective": "map", "seed": 0, **change}
    with pytest.raises(ValueError, match=words):
        configure(**given)


def test_names_of_runs_are_one_part_of_a_path():
    config = configure("/a b/ö\nphotos (1)", "plain", "", "map", model="m.n:f")
    assert config.name == "ö_photos_1-plain-m.n:f-map-seed0" and config.data == "/a b/ö\nphotos (1)"
    assert RunConfig(**{**vars(config)}) == config


@pytest.mark.parametrize(
    "command, code, words",
    [
        (["train", "photo"], 2, "'photo' is none of digits"),
        (["train", "nowhere/"], 1, "nowhere does not exist"),
        (["train", "photos", "--data", "digits"], 2, "name two data sets"),
        (["train", "--split", "0.1"], 2, "--split: of images of one's own"),
        (["train", "--skip-unreadable"], 2, "--unreadable: of images of one's own"),
        (["train", "--weights", "w.pt"], 2, "--weights: of networks"),
        (["train", "broken"], 1, "1 images and no folders"),
        (["train", "broken", "--model", "resnet81"], 2, "did you mean resnet18"),  # before images are read
        (["train", "broken", "--model", "timm:resnet81"], 2, "timm"),
        (["train", "photos", "--model", "alexnet", "--image-size", "8"], 1, "does not take images"),
        (["train", "broken", "--weights", "w.pt"], 2, "w.pt do not exist"),
        (["train", "broken", "--out", "run"], 2, "holds runs already"),
        (["train", "photos", "--out", "photos/../photos/runs"], 2, "would be among the images of"),
        (
            ["compare", "photos", "--model", "alexnet", "vgg11", "--out", "photos"],
            2,
            "name a folder elsewhere by --out",
        ),
        (["train", "photos", "--layer", "conv", "--image-size", "16"], 2, "multiple of 32"),
        (["train", "--resume", "run"], 2, "name them by --model own_networks:small"),
        (["compare", "photos", *MODEL], 2, "two networks at least"),
        (["predict", "run", "new"], 1, "whose code is run"),
        (["predict", "run", "new/none.png", *MODEL], 1, "none.png does not exist"),
        (["predict", "run", "broken/x.png", *MODEL], 1, "1 of 1 images cannot be read"),
        (["predict", "run", "new", "--risk", "2", *MODEL], 2, "--risk must be above 0"),
        (["predict", "run", "new", "--csv", "none/out.csv", *MODEL], 2, "--csv must be a file in a folder"),
        (["predict", "new", "new", *MODEL], 1, "is not the folder of a run"),
        (["predict", "nowhere", "new", *MODEL], 1, "it does not exist"),
        (["predict", "run/report.html", "new", *MODEL], 1, "it is a file"),
        (["evaluate", "run", "new", "--wrong-labels", "-1", *MODEL], 2, "--wrong-labels must be at least 0"),
        (["train", "photos", "--error-bars", "lastlayer"], 2, "Did you mean last-layer?"),
        (["evaluate", "run", "other", *MODEL], 1, "knows no class 'a', 'b'"),
        (["evaluate", "run", "new", "--ood", "broken", *MODEL], 1, "1 of 1 images cannot be read"),
    ],
)
def test_wrong_commands_end_before_the_first_step(there, capsys, command, code, words):
    for label in "ab":
        (there / "other" / label).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(there / "other" / label / "x.png")
    before = sorted(p for p in there.rglob("*") if "__pycache__" not in p.parts)
    assert cli.main(command) == code
    assert words in " ".join(capsys.readouterr().err.split())
    assert before == sorted(p for p in there.rglob("*") if "__pycache__" not in p.parts)


def test_a_begun_run_goes_on_where_its_network_is_named(there):
    assert cli.main(["train", "--resume", "run", *MODEL]) == 0
