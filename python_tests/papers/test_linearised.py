"""``ella-cuda reproduce linearised``: its parts at the size of a test, from end to end."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
import torch

from ella_cuda import cli, run_folder
from ella_cuda.laplace import prior_groups
from ella_cuda.papers.linearised import (
    EXPERIMENT,
    architectures,
    networks,
    precisions,
    regression,
    stopping,
    sweep,
    toy,
)
from ella_cuda.papers.studies import study
from ella_cuda.training.trainer import MarglikTrainer
from python_tests.interrupting import interrupted
from python_tests.papers.studies import check_goes_on, files, run, table

SMALL = ["--scale", "0.06", "--seed", "0", "--jobs", "1", "--device", "cpu"]


@pytest.fixture
def few(monkeypatch):
    """Fewer precisions, scales and stops than people look at."""
    monkeypatch.setattr(toy, "TRIED", [0.1, 1.0, 10.0])
    monkeypatch.setattr(sweep, "SCALES", (0.1, 1.0, 10.0))
    monkeypatch.setattr(stopping, "DOUBLINGS", 2)


@pytest.mark.usefixtures("few")
def test_parts_are_tables_and_pictures(tmp_path, capsys):
    folder = tmp_path / "out"
    run("linearised", "--part", "stopping", "toy", "sweep", *SMALL, "--out", str(folder))
    printed = capsys.readouterr().out
    assert "5 networks on cpu, 1 at once, 0 done before" in printed
    for part in ("toy", "sweep", "stopping"):
        assert (folder / f"{part}.txt").read_text().strip() in printed
        assert {p.suffix for p in folder.glob(f"{part}.*")} == {".txt", ".csv", ".png", ".svg"}

    rows = table(folder, "toy")
    assert [(r["at"], r["structure"]) for r in rows] == [
        (at, structure) for structure in ("scalar", "normalised") for at in ("network", "linear")
    ]
    evidence = {(r["at"], r["structure"]): float(r["neg_log_marginal_likelihood"]) for r in rows}
    # Of a regression the linear mode's evidence is exact, and the best precision is the best of all: more of them do not lower it.
    assert evidence["linear", "scalar"] < evidence["network", "scalar"]
    assert evidence["linear", "normalised"] <= evidence["linear", "scalar"] + 1e-6

    for r in table(folder, "sweep"):
        ends = float(r["least_ratio"]), float(r["largest_ratio"])
        if r["structure"] == "normalised":
            assert ends == pytest.approx((1, 1), rel=2e-2), r
        elif float(r["k"]) != 1:
            assert max(abs(x - 1) for x in ends) > 2e-2, r
        assert float(r["moved"]) < 1e-6

    assert [int(r["epoch"]) for r in table(folder, "stopping")[::2]] == [2, 4, 8, 2, 4, 8]


@pytest.mark.usefixtures("few", "undrawn")
def test_a_killed_session_goes_on_to_the_files_of_one_that_was_not(tmp_path, capsys):
    kept, epochs = itertools.count(1), itertools.count(1)
    early = lambda trainer: trainer._steps.marglik_frequency == 2  # noqa: E731
    stops = [
        (study.Work, "kept", lambda *_: next(kept) == 6),  # among the toy's
        (MarglikTrainer, "epoch", lambda trainer: early(trainer) and next(epochs) == 6),  # of one that is stopped early
    ]
    options = ["linearised", "--part", "toy", "sweep", "stopping", *SMALL]
    assert "3 done before" in check_goes_on(options, tmp_path, stops, capsys)
    run("--resume", str(tmp_path / "killed"))
    assert "5 done before" in capsys.readouterr().out


@pytest.mark.usefixtures("few", "undrawn")
def test_an_edited_measurement_is_refused(tmp_path, capsys):
    folder = tmp_path / "out"
    run("linearised", "--part", "toy", *SMALL, "--out", str(folder))
    result = folder / "toy-seed0" / "result.json"
    result.write_text(result.read_text().replace('"at": "linear"', '"at": "network"'))
    assert cli.main(["reproduce", "--resume", str(folder)]) == 1
    assert "was edited" in capsys.readouterr().err


@pytest.mark.usefixtures("undrawn")
def test_studies_of_a_folder_are_its_own(tmp_path, capsys, monkeypatch):
    """Of a part that measures at once: what is kept is the study's by name and settings, and no name leads out of the folder."""

    def run_part(done, work):
        return {"value": work.kept("value", lambda: done.settings["seed"])}

    part = dataclasses.replace(EXPERIMENT.parts["toy"], run=run_part, rows=lambda done, result: [result], text=str)
    monkeypatch.setitem(EXPERIMENT.parts, "toy", part)

    def resume(name):
        code = cli.main(["reproduce", "--resume", str(tmp_path / name), "--jobs", "1"])
        return code, capsys.readouterr().err

    for name, seeds in (("out", "01"), ("other", "01")):
        scale = "0.1" if name == "out" else "0.2"
        options = f"linearised --part toy --scale {scale} --jobs 1 --seed".split()
        run(*options, *seeds, "--out", str(tmp_path / name))
    assert resume("out") == (0, "")
    first, second = (tmp_path / "out" / f"toy-seed{i}" for i in (0, 1))
    whole = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    def put_back():
        for path, content in whole.items():
            path.write_bytes(content)

    def without_digest(path):
        path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "digest"}))

    for file in ("result.json", "measured.json"):
        for change in (
            lambda path: path.write_bytes((first / path.name).read_bytes()),
            lambda path: path.write_bytes((tmp_path / "other" / "toy-seed1" / path.name).read_bytes()),
            without_digest,
        ):
            if file == "measured.json":
                (second / "result.json").unlink()  # so that it is read
            change(second / file)
            code, err = resume("out")
            assert code == 1 and f"{file} was edited, or is of another study" in err and err.count("\n") == 1
            put_back()
    config = tmp_path / "out" / "config.json"
    without_digest(config)
    code, err = resume("out")
    assert code == 2 and "config.json was edited, or is of another version: its digest is gone" in err

    runs, options = run_folder.read_config(tmp_path / "other")
    away = {"part": "toy", "name": "x", "settings": runs[0]["settings"]}
    for wrong, words in (
        ([{**away, "name": "../../x"}], "one part of a path"),
        ([{**away, "name": str(tmp_path / "away")}], "one part of a path"),
        ([{**away, "name": ""}], "one part of a path"),
        ([{**away, "settings": 5}], "settings of x must be a mapping"),
        ([{**away, "part": ["toy"]}], "there is no part"),
        ([{"part": "toy"}], "name"),
        ([5], "must be a mapping"),
        ([*runs, runs[0]], "a study is in it twice"),
        ([], "no study is in it"),
    ):
        run_folder.write_config(tmp_path / "out", wrong, options)
        before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
        code, err = resume("out")
        assert code == 2 and words in err and err.count("\n") == 1
        assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    put_back()

    (tmp_path / "away").mkdir()
    for name in ("result.json", "measured.json"):
        (second / name).unlink()
    second.rename(tmp_path / "away" / "was")
    second.symlink_to(tmp_path / "away", target_is_directory=True)
    code, err = resume("out")
    assert code == 1 and f"{second} is a link to {tmp_path / 'away'}" in err and err.count("\n") == 1
    assert [p.name for p in (tmp_path / "away").iterdir()] == ["was"]


@pytest.mark.usefixtures("few", "undrawn")
def test_studies_at_once_give_the_numbers_of_one_after_the_other(tmp_path):
    options = ["linearised", "--part", "stopping", "--scale", "0.04", "--seed", "1"]
    run(*options, "--jobs", "1", "--out", str(tmp_path / "one"))
    run(*options, "--jobs", "2", "--out", str(tmp_path / "two"))
    one, two = (table(tmp_path / name, "stopping") for name in ("one", "two"))
    assert one == two


def test_plans_name_every_study_once_and_follow_the_scale():
    whole, small = (EXPERIMENT.plan(EXPERIMENT.parts, (0, 1, 1), scale) for scale in (1.0, 0.1))
    assert len({s.name for s in whole}) == len(whole) == len(small)
    assert [s.name for s in whole] == [s.name for s in small]
    assert whole[0].settings["width"] == 50 and small[0].settings["width"] == 5
    for wrong, words in (({"parts": ["other"]}, "part must be"), ({"seeds": ()}, "seeds"), ({"scale": 2.0}, "scale")):
        with pytest.raises(ValueError, match=words):
            EXPERIMENT.plan(**{"parts": ["toy"], **wrong})


def test_the_talks_toy_has_2600_parameters():
    model = regression.normalised_mlp(50)
    assert sum(p.numel() for p in model.parameters()) == 2600


@pytest.mark.parametrize("norm", regression.NORMS)
def test_a_rescaled_network_is_the_same_function(norm):
    model = regression.normalised_mlp(6, norm)
    x = regression.two_clusters(20, 0).x
    model(x)  # statistics
    model.eval()
    for k in (0.1, 10.0):
        scaled = regression.rescaled(model, k)
        torch.testing.assert_close(scaled.middle.weight, k * model.middle.weight)
        torch.testing.assert_close(scaled(x), model(x), rtol=1e-6, atol=1e-6)
    names = [name for name, _, normalised in prior_groups(model) if normalised]
    assert names == ["first", "middle"]


def test_statistics_are_those_of_the_weights(tmp_path):
    looks = []

    def look(model, points, epoch):
        looks.append((epoch, model.first_norm.running_mean.clone(), model.first(points.x).mean(0).detach()))

    model, points = regression.trained(4, "batch", 0, 6, study.Work(tmp_path), 2, look)
    assert [epoch for epoch, *_ in looks] == [2, 4, 6]
    for _, kept, mean in looks:
        torch.testing.assert_close(kept, mean)
    assert not model.training
    torch.testing.assert_close(model.first_norm.running_mean, model.first(points.x).mean(0))


def test_clusters_are_of_their_ends_and_differ_by_seed():
    points = regression.two_clusters(200, 0)
    (a, b), (c, d) = regression.LEFT, regression.RIGHT
    x = points.x
    assert (((x >= a) & (x <= b)) | ((x >= c) & (x <= d))).all()
    assert (x < 0).sum() == 100
    assert ((points.y - 3 * torch.sin(2 * x)).std() - regression.NOISE).abs() < 0.05
    assert not torch.equal(points.y, regression.two_clusters(200, 1).y)


def test_the_distance_of_gaussians():
    one, other = {"mean": [0.0, 1.0], "deviation": [1.0, 2.0]}, {"mean": [3.0, 1.0], "deviation": [5.0, 2.0]}
    assert stopping.distance(one, other) == pytest.approx((25 / 2) ** 0.5)


def test_the_best_of_the_talks_precisions_lies_between_those_tried():
    tried = [{"precision": p, "network": -abs(p - 1), "linear": -abs(p - 100)} for p in (0.01, 0.1, 1.0, 10.0, 100.0)]
    assert (toy.best_of_talks(tried, "network"), toy.best_of_talks(tried, "linear")) == (1.0, 100.0)


def test_training_past_what_was_measured_is_an_error(tmp_path):
    work = study.Work(tmp_path)
    work.kept("2", lambda: 1.5)
    assert work.found("2") == 1.5
    with pytest.raises(ValueError, match="has no 4"):
        work.found("4")


@pytest.mark.parametrize("name", architectures.NETWORKS)
def test_networks_have_about_as_many_parameters_as_asked_for(name):
    for count in (2_000, 46_000):
        model = architectures.network(name, count, 8)
        found = sum(p.numel() for p in model.parameters())
        assert abs(found - count) < 0.4 * count if count < 10_000 else abs(found - count) < 0.1 * count
        assert model(torch.randn(3, 1, 8, 8)).shape == (3, 10)
    normalised = [name for name, _, normalised in prior_groups(model) if normalised]
    # Layers with a normalisation right behind them: all but the head; of a block's two, the first; none.
    expected = {"cnn": 4, "resnet": 9, "pre-resnet": 3}.get(name, 0)
    assert len(normalised) == expected
    assert precisions.grouped_structure(model) == ("normalised" if expected else "layerwise")


def test_fixup_starts_at_zero_outputs_that_learn():
    model = architectures.network("fixup", 2_000, 8)
    outputs = model(torch.randn(4, 1, 8, 8))
    assert not outputs.any()
    outputs.exp().sum().backward()
    assert model.get_parameter(list(dict(model.named_parameters()))[-1]).grad.any()


@pytest.mark.parametrize(
    ("args", "words"), [(("vgg", 100, 8), "network must be one of"), (("cnn", 100, 12), "multiple of 8")]
)
def test_wrong_networks_are_refused(args, words):
    with pytest.raises(ValueError, match=words):
        architectures.network(*args)


@pytest.mark.usefixtures("undrawn")
def test_networks_are_a_table_beside_the_talks_and_go_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(networks, "NETWORKS", dict.fromkeys(("cnn", "fixup")))
    monkeypatch.setattr(networks, "ROUNDS", 2)
    monkeypatch.setitem(networks.SIZES, "digits", {**networks.SIZES["digits"], "epochs": 2})
    options = ["linearised", "--part", "networks", "--data", "digits", "--scale", "0.02", "--seed", "0", "1"]
    options += ["--jobs", "1", "--device", "cpu"]
    run(*options, "--out", str(tmp_path / "whole"))
    text = (tmp_path / "whole" / "networks.txt").read_text()
    assert "digits: 50 images, 2 epochs" in text and "mean ± standard error over seeds 0, 1" in text
    assert "0.025 ± 0.000" in text and "T-Former" not in text
    assert "CNN: ours" in text and "talk linear single = linear several < network several < network single" in text
    assert "do not rest within 2 rounds" in text
    rows = table(tmp_path / "whole", "networks")
    assert len(rows) == 2 * 2 * 4
    assert {(r["network"], r["structure"]) for r in rows} == {
        ("cnn", "scalar"),
        ("cnn", "normalised"),
        ("fixup", "scalar"),
        ("fixup", "layerwise"),
    }
    assert len({r["nll"] for r in rows if r["network"] == "cnn"}) == 8

    def fourth(work, name, _):
        return work.folder.name.endswith("cnn-seed1") and name == "linear-normalised"

    with interrupted(study.Work, "kept", fourth):
        assert cli.main(["reproduce", *options, "--out", str(tmp_path / "killed")]) == 130
    assert "2 of 4 networks are done" in (tmp_path / "killed" / "networks.txt").read_text()
    run("--resume", str(tmp_path / "killed"), "--jobs", "1")
    assert files(tmp_path / "killed") == files(tmp_path / "whole")


def test_the_order_of_ways_has_ties_where_they_are_printed_alike():
    means = {("linear", "single"): 0.2001, ("network", "single"): 0.3, ("linear", "several"): 0.1999}
    assert networks._ordered(means) == "linear single = linear several < network single"


def test_measurements_are_taken_once_and_kept(tmp_path):
    taken = []

    def measure():
        taken.append(1)
        return {"value": (1.5, 2)}

    assert [study.Work(tmp_path).kept("a", measure) for _ in range(2)] == [{"value": [1.5, 2]}] * 2
    assert len(taken) == 1
    with pytest.raises(FloatingPointError, match="b has a number that is not finite"):
        study.Work(tmp_path).kept("b", lambda: [float("nan")])
    file = tmp_path / study.MEASURED_FILE
    file.write_text(file.read_text().replace("1.5", "1.25"))
    with pytest.raises(ValueError, match="was edited"):
        study.Work(tmp_path).kept("a", measure)


def test_precisions_are_those_of_the_evidence_and_say_whether_they_rest():
    points = regression.two_clusters(20, 0)
    model = regression.normalised_mlp(4)
    model(points.x)
    fitted, loader = regression.full_laplace(model.eval(), points), regression.loader_of(points)
    before = fitted.prior_precision.clone()
    for at in ("network", "linear"):
        one = precisions.chosen(fitted, loader, at, "normalised")
        found = one.described()
        assert found["rest"] and (found["at"], found["structure"]) == (at, "normalised")
        here, best = one.la.log_marginal_likelihood(at=at), one.la.prior_precision.clone()
        for factor in (0.8, 1.25):
            moved = best * torch.tensor([1.0, 1.0, factor])
            assert one.la.log_marginal_likelihood(moved, at=at) < here
    assert not precisions.chosen(fitted, loader, "linear", "scalar", rounds=1).described()["rest"]
    assert torch.equal(fitted.prior_precision, before) and fitted.linear_mode is None
