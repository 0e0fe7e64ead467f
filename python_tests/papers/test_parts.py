"""What ``ella-cuda reproduce`` says of wrong usage, missing data and other folders, and means over seeds, for every paper."""

from __future__ import annotations

import statistics

import pytest

from ella_cuda import cli
from ella_cuda.papers.filter_banks import layers
from ella_cuda.papers.invariances import subsets
from ella_cuda.papers.linearised import EXPERIMENT, toy
from python_tests.papers.studies import run


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("", "name a table"),
        ("table-3", "is none of"),
        ("toy --scale 0", "scale must be above 0"),
        ("toy --row conv", "digit-conv"),
        ("toy --train-size 5", "unrecognized arguments"),
        ("group-convs --group-conv full", "unrecognized arguments"),
        ("toy --lr-anchors 0.1", "--lr-anchors"),
        ("toy --burn-in 60", "burn_in must be less than epochs"),
        ("toy --device tpu", "device must be"),
        ("toy --jobs 0", "--jobs"),
        ("toy --part toy", "--part is of `ella-cuda reproduce linearised`"),
        ("--resume not-there", "not-there is not a folder of runs"),
        ("linearised --scale 0", "scale must be above 0"),
        ("linearised --part toy sweep --data digits", "--data is of the parts networks and unet"),
        ("linearised --part rings", "--part must be some of toy, sweep, stopping, networks, unet for linearised"),
        ("linearised --part rings unets", "is none of"),
        ("linearised --row conv", "--row: of the paper's tables"),
        ("linearised --tensorboard", "--tensorboard: of the paper's tables"),
        ("linearised --all", "--all: of the paper's tables"),
        ("linearised --lr 0.1", "--lr: of the paper's tables"),
        ("linearised --device tpu", "device must be"),
        ("linearised --jobs 0", "--jobs"),
        (
            "invariances --part toy",
            "some of rings, ranges, subsets, sampling, lengthscale, gp, local, lastlayer for invariances, got toy",
        ),
        (
            "invariances --part rings --data digits",
            "--data is of the parts ranges and subsets and gp and local and lastlayer",
        ),
        ("invariances --copies 3", "unrecognized arguments: --copies"),
        ("filter-banks --part rings", "must be some of recovery, amounts, layers for filter-banks, got rings"),
        ("filter-banks --part recovery --data digits", "--data is of the parts amounts and layers"),
    ],
)
def test_wrong_usage_is_2_and_writes_nothing(args, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["reproduce", *args.split()]) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "args", ["linearised --part networks", "invariances --part ranges", "filter-banks --part amounts"]
)
def test_missing_data_are_a_failure_and_nothing_is_written(args, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["reproduce", *args.split(), "--data", "mnist"]) == 1
    assert "MNIST" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("undrawn")
def test_a_folder_is_resumed_with_its_own_options_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(toy, "TRIED", [0.1, 1.0, 10.0])
    folder = tmp_path / "out"
    small = ["--scale", "0.06", "--seed", "0", "--jobs", "1", "--device", "cpu"]
    run("linearised", "--part", "toy", *small, "--out", str(folder))
    for clash, words in (
        (["--scale", "0.5"], "--scale 0.5 does not fit"),
        (["--part", "sweep"], "--part sweep does not fit"),
        (["--seed", "4"], "--seed 4 does not fit"),
    ):
        assert cli.main(["reproduce", "--resume", str(folder), *clash]) == 2
        assert words in capsys.readouterr().err
    assert cli.main(["reproduce", "linearised", "--out", str(folder)]) == 2
    assert "holds runs already" in capsys.readouterr().err
    for command in (["train", "--resume"], ["reproduce", "toy", "--resume"], ["inspect"]):
        assert cli.main([*command, str(folder)]) == 2
        assert f"Go on with: ella-cuda reproduce --resume {folder}" in capsys.readouterr().err
    assert cli.main(["reproduce", "invariances", "--resume", str(folder)]) == 2
    with pytest.raises(ValueError, match="belongs to other studies"):
        EXPERIMENT.run(EXPERIMENT.plan(["sweep"]), folder, options={}, progress=False)


@pytest.mark.parametrize("part", [layers, subsets])
def test_means_and_errors_are_over_seeds(part):
    sizes = ("image_size", "copies", "filters", "size", "train_size", "batch", "epochs")
    row = dict.fromkeys(sizes, 16) | {"data": "digits", "task": "plain", "layer": "conv", "method": "map"}
    row |= {"bound": -1.0, "nll": 0.5, "neg_log_marginal_likelihood": 2.0, "rotation": None}
    accuracies = (50.0, 60.0, 64.0)
    text = part.text([row | {"seed": seed, "accuracy": a} for seed, a in enumerate(accuracies)])
    error = statistics.stdev(accuracies) / 3**0.5
    assert f"58.0 ± {error:.1f}" in text and "mean ± standard error over seeds 0, 1, 2" in text
