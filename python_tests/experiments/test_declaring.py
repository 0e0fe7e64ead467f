"""A hyperparameter is declared once: one more field, that of CONTRIBUTING.md, and what follows from it."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import sys
import textwrap
from pathlib import Path

import pytest

from ella_cuda import cli
from ella_cuda.experiments import RunConfig, hyperparameters, run_one
from ella_cuda.experiments.declaring import setting, settings_of
from ella_cuda.experiments.folder import read_grid
from ella_cuda.training.checkpoint import read_checkpoint

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
TINY = shlex.split("--task digit --layer conv --objective map --epochs 1 --width 1 --train-size 20 --test-size 20")


@pytest.fixture
def extended(monkeypatch: pytest.MonkeyPatch) -> type[RunConfig]:
    """RunConfig with the page's field, in its place in the package."""
    (field,) = re.findall(r"<!-- the test suite adds this field -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    names = {"__name__": __name__, "RunConfig": RunConfig, "setting": setting}
    exec(f"class Extended(RunConfig):\n{textwrap.indent(field, '    ')}", names)
    found = dataclasses.dataclass(frozen=True, kw_only=True)(names["Extended"])
    for module in [module for name, module in sys.modules.items() if name.startswith("ella_cuda.")]:
        if getattr(module, "RunConfig", None) is RunConfig:
            monkeypatch.setattr(module, "RunConfig", found)
    return found


@pytest.mark.parametrize("command", ["train", "reproduce"])
def test_its_option_and_help_follow(extended, command, capsys):
    assert cli.main([command, "--help-all"]) == 0
    options, _, table = capsys.readouterr().out.partition("\ndefaults by --data:\n")
    about = " ".join(options.rpartition("\n  --label-smoothing X")[2].split("\n  --")[0].split())
    assert about == "share of every label that goes to all classes alike (by --data)"
    (line,) = (line for line in table.splitlines() if line.startswith("--label-smoothing "))
    assert line.split() == ["--label-smoothing", "0.1", *["0.0"] * (4 if command == "train" else 3)]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.6, "label_smoothing must be at least 0 and at most 0.5, got 0.6."),
        (float("nan"), "label_smoothing must be at least 0 and at most 0.5, got nan."),
        ("0.1", "label_smoothing must be a real number, got '0.1'."),
        (None, "label_smoothing must be a real number, got None."),
    ],
)
def test_its_validation_follows(extended, asked, value, words, capsys):
    with pytest.raises(ValueError, match=re.escape(words)):
        hyperparameters.configure("digits", "digit", "conv", "map", label_smoothing=value)
    if isinstance(value, float):
        assert cli.main(["train", "--label-smoothing", str(value)]) == 2
        assert capsys.readouterr().err == f"ella-cuda: wrong usage: {words} (given: --label-smoothing)\n"
    assert not asked


def test_its_default_by_data_set_and_its_place_in_the_name_follow(extended, asked):
    assert cli.main(["train", "--layer", "conv"]) == cli.main(["reproduce", "toy", "--label-smoothing", "0"]) == 0
    assert {c.label_smoothing for c in asked[0].configs} == {0.1} and {c.label_smoothing for c in asked[1].configs} == {
        0
    }
    assert asked[0].configs[0].name == "digits-digit-conv-map-seed0-smoothing0.1"
    assert hyperparameters.configure("mnist", "plain", "conv", "map").label_smoothing == 0


def test_its_record_and_checkpoint_follow(extended, tmp_path, capsys):
    assert cli.main(["train", *TINY, "--label-smoothing", "0.2", "--jobs", "1", "--out", str(tmp_path)]) == 0
    stored = json.loads((tmp_path / "config.json").read_text())
    ((run,), (row,)) = stored["runs"], json.loads((tmp_path / "summary.json").read_text())
    assert run["label_smoothing"] == stored["options"]["label_smoothing"] == row["label_smoothing"] == 0.2
    ((found,), _) = read_grid(tmp_path)
    assert found == extended(**run)
    folder = tmp_path / found.name
    assert read_checkpoint(folder / "checkpoint.pt")["settings"]["depends_on"]["label_smoothing"] == "0.2"
    with pytest.raises(ValueError, match="label_smoothing"):
        run_one(dataclasses.replace(found, label_smoothing=0.3), folder, progress=False)
    del run["label_smoothing"]  # as in a folder from before it
    before = extended(**run)
    assert before.label_smoothing == 0 and before.chosen == RunConfig(**run).chosen


def test_a_field_of_a_type_without_an_option_is_refused():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Wrong(RunConfig):
        mirrored: bool = setting(False, help="no")

    with pytest.raises(TypeError, match=r"^mirrored must be int, float or str, or one of these and None, got bool"):
        settings_of(Wrong)


@pytest.mark.parametrize("name", ["epochs", "width", "lr_hyp", "data", "seed"])
def test_a_field_without_a_default_has_to_be_there(name):
    values = dataclasses.asdict(hyperparameters.configure("digits", "digit", "conv", "map"))
    del values[name]
    with pytest.raises(TypeError, match=name):
        RunConfig(**values)
