"""The folder of a grid of runs has one owner: names, keys and digests are in one module."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import ella_cuda
from ella_cuda import run_folder
from python_tests.reports.rows import row

PACKAGE = Path(ella_cuda.__file__).parent
EVALUATION = {
    "epoch": 1, "loss": 0.5, "accuracy": 0.9, "neg_log_marginal_likelihood": None, "prior_precision": {}, "effective_parameters": None,
    "inverse_lengthscale": {}, "anchors": {},
}  # fmt: skip


def test_no_other_module_spells_the_names_of_its_files():
    names = {value for name, value in vars(run_folder).items() if name.endswith("_FILE")}
    assert {"config.json", "summary.json", "progress.json", "history.json", "checkpoint.pt"} <= names
    for path in PACKAGE.rglob("*.py"):
        spelled = {
            node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)
        } & names
        assert spelled == (names if path.name == "run_folder.py" else set()), path


def test_reports_read_it_without_the_experiments(beside_the_tests):
    code = "import sys, ella_cuda.reports; print([m for m in sys.modules if m.startswith('ella_cuda.experiments')])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=beside_the_tests, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_what_was_written_is_read(tmp_path):
    runs, rows = [{"seed": 3}], [run_folder.sealed_row(row())]
    diary = {"seconds": 1.5, "layout": {}, "evaluations": [EVALUATION]}
    run_folder.write_config(tmp_path, runs, {"device": "cpu"})
    run_folder.write_summary(tmp_path, rows)
    run_folder.write_diary(tmp_path, diary)
    assert run_folder.read_config(tmp_path) == (runs, {"device": "cpu"})
    assert run_folder.read_summary(tmp_path) == rows
    read = run_folder.read_diary(tmp_path)
    assert {key: read[key] for key in diary} == diary and read.keys() - diary.keys() == {"digest"}
    assert run_folder.read_history(tmp_path)["evaluations"] == [EVALUATION]
    run_folder.write_history(tmp_path, [0.5, 0.25], [])
    assert run_folder.read_history(tmp_path) == {"losses": [0.5, 0.25], "evaluations": []}


@pytest.mark.parametrize(
    ("file", "read", "change", "refused"),
    [
        ("config.json", run_folder.read_config, lambda content: content["options"].update(device="cuda"), True),
        ("summary.json", run_folder.read_summary, lambda content: content[0].update(accuracy=100.0), True),
        ("summary.json", run_folder.read_summary, lambda content: content[0].update(seconds=9.0), False),
        ("summary.json", run_folder.read_summary, lambda content: content[0].pop("digest"), True),
        ("progress.json", run_folder.read_diary, lambda content: content["evaluations"][0].update(loss=0.1), True),
        ("progress.json", run_folder.read_diary, lambda content: content.update(seconds=9.0), False),
    ],
)
def test_an_edit_is_told_by_the_digest_but_of_seconds(tmp_path, file, read, change, refused):
    run_folder.write_config(tmp_path, [{"seed": 3}], {"device": "cpu"})
    run_folder.write_summary(tmp_path, [run_folder.sealed_row(row())])
    run_folder.write_diary(tmp_path, {"seconds": 1.5, "layout": {}, "evaluations": [EVALUATION]})
    content = json.loads((tmp_path / file).read_text())
    change(content)
    (tmp_path / file).write_text(json.dumps(content))
    if refused:
        with pytest.raises(ValueError, match=rf"{file} was edited.* Undo the edit"):
            read(tmp_path)
    else:
        read(tmp_path)
