"""What the command says before anything runs: help, and what is wrong with options."""

from __future__ import annotations

import re

import pytest

from ella_cuda import cli, experiments
from ella_cuda.experiments import RECIPES


@pytest.mark.parametrize("command", ["train", "reproduce"])
def test_help_shows_what_every_data_set_has_of_its_own(command, capsys):
    assert cli.main([command, "--help"]) == 0
    options, _, table = capsys.readouterr().out.partition("\ndefaults by --data:\n")
    head, *lines = [re.split(r"\s{2,}", line) for line in table.splitlines()]
    shown = {option: dict(zip(head[1:], cells, strict=True)) for option, *cells in lines if cells}
    assert shown["--epochs"] == {"digits": "45", "mnist": "20", "fashion-mnist": "20", "cifar10, cifar100": "100"}
    assert shown["--cooldown"]["digits"] == "0.3" and shown["--cooldown"]["mnist"] == "-"
    assert ("--task" in shown) == (command == "train")
    for name in ("width", "lr", "burn_in", "hypersteps", "column_tolerance", "init", "augment"):
        option = "--" + name.replace("_", "-")
        for heading, cell in shown[option].items():
            assert {cell} == {str(getattr(RECIPES[data], name)) for data in heading.split(", ")}
        about = options.rpartition(f"\n  {option} ")[2].split("\n  --")[0]
        assert " ".join(about.split()).endswith("(by --data)")
    assert "--fisher" not in shown and "one sampled column (exact)" in options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("", "not run: FC (evidence): the curvature of an FC path is large; --all runs it."),
        (
            "--layer conv fc+conv fc",
            "not run: FC+CONV, FC (evidence): the curvature of an FC path is large; --all runs it.",
        ),
        ("--all", None),
        ("--objective evidence", None),
        ("--objective map", None),
        ("--layer conv", None),
    ],
)
def test_train_says_what_it_left_out_after_the_table(options, said, tmp_path, monkeypatch, capsys):
    def nothing(configs, out_dir, **_):
        out_dir.mkdir(parents=True)
        return []

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(experiments, "run_grid", nothing)
    assert cli.main(["train", *options.split()]) == 0
    lines = [
        line for line in capsys.readouterr().out.partition("no finished run\n")[2].splitlines() if "not run" in line
    ]
    assert lines == ([said] if said else [])


def test_help_of_all_says_what_else_is_enough(capsys):
    for command, expected in (("train", True), ("reproduce", False)):
        assert cli.main([command, "--help"]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert ("curvature is large; naming --objective is enough" in text) == expected
