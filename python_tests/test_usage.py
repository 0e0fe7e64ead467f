"""What the command says before anything runs: help, and what is wrong with options."""

from __future__ import annotations

import re

import pytest

from ella_cuda import cli
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
