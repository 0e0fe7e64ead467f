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
    runs = [{"seed": 3}]
    diary = {"run": tmp_path.name, "seconds": 1.5, "layout": {}, "evaluations": [EVALUATION]}
    run_folder.write_config(tmp_path, runs, {"device": "cpu"})
    rows = [run_folder.sealed_row(row(), tmp_path)]
    run_folder.write_summary(tmp_path, rows)
    run_folder.write_diary(tmp_path, diary)
    assert run_folder.read_config(tmp_path) == (runs, {"device": "cpu"})
    assert run_folder.read_summary(tmp_path) == rows
    read = run_folder.read_diary(tmp_path)
    assert {key: read[key] for key in diary} == diary and read.keys() - diary.keys() == {"digest"}
    assert run_folder.read_history(tmp_path)["evaluations"] == [EVALUATION]
    run_folder.write_history(tmp_path, "a", [0.5, 0.25], [], {"w": 0.1})
    history, known = run_folder.read_history(tmp_path), {"predictive_prior_precision": {"w": 0.1}}
    assert history.pop("digest") and history == {"run": "a", "losses": [0.5, 0.25], "evaluations": [], **known}
    run_folder.write_samples(tmp_path, "a", [[1]], [[0.5]])
    assert run_folder.read_samples(tmp_path)["draws"] == [[0.5]]


@pytest.mark.parametrize(
    ("file", "read", "change", "refused"),
    [
        ("config.json", run_folder.read_config, lambda content: content["options"].update(device="cuda"), True),
        ("summary.json", run_folder.read_summary, lambda content: content[0].update(accuracy=100.0), True),
        ("summary.json", run_folder.read_summary, lambda content: content[0].update(seconds=9.0), False),
        ("summary.json", run_folder.read_summary, lambda content: content[0].pop("digest"), True),
        ("progress.json", run_folder.read_diary, lambda content: content["evaluations"][0].update(loss=0.1), True),
        ("progress.json", run_folder.read_diary, lambda content: content.update(seconds=9.0), False),
        ("history.json", run_folder.read_history, lambda content: content["losses"].append(0.1), True),
        ("samples.json", run_folder.read_samples, lambda content: content["draws"].append(0.1), True),
        *(
            (file, read, lambda content: content.pop("digest"), True)
            for file, read in {
                "config.json": run_folder.read_config,
                "progress.json": run_folder.read_diary,
                "history.json": run_folder.read_history,
                "samples.json": run_folder.read_samples,
            }.items()
        ),
    ],
)
def test_an_edit_is_told_by_the_digest_but_of_seconds(tmp_path, file, read, change, refused):
    write_all(tmp_path, "a")
    content = json.loads((tmp_path / file).read_text())
    change(content)
    (tmp_path / file).write_text(json.dumps(content))
    if refused:
        with pytest.raises(ValueError, match=rf"{file} was edited.* Undo the edit"):
            read(tmp_path)
    else:
        read(tmp_path)


def write_all(folder: Path, run: str, seed: int = 3) -> None:
    """A folder of a grid and of a run in one."""
    run_folder.write_config(folder, [{"seed": seed}], {"device": "cpu"})
    run_folder.write_summary(folder, [run_folder.sealed_row(row(), folder)])
    run_folder.write_diary(folder, {"run": run, "seconds": 1.5, "layout": {}, "evaluations": [EVALUATION]})
    run_folder.write_history(folder, run, [0.5], [EVALUATION])
    run_folder.write_samples(folder, run, [], [])


@pytest.mark.parametrize(
    ("file", "read"),
    [
        ("progress.json", run_folder.read_diary),
        ("history.json", run_folder.read_history),
        ("samples.json", run_folder.read_samples),
    ],
)
def test_a_file_of_another_run_of_the_grid_is_refused(tmp_path, file, read):
    for run in ("a", "b"):
        (tmp_path / run).mkdir()
        write_all(tmp_path / run, run)
    (tmp_path / "b" / file).write_bytes((tmp_path / "a" / file).read_bytes())
    read(tmp_path / "b")  # of a run alone, whose folder may have any name
    run_folder.write_config(tmp_path, [{"seed": 3}], {})
    read(tmp_path / "a")
    with pytest.raises(ValueError, match=rf"b/{file} is of the run 'a'. Put it back there, or "):
        read(tmp_path / "b")


def test_a_row_of_another_grid_and_one_that_is_there_twice_are_refused(tmp_path):
    for name, seed in (("here", 3), ("there", 4)):
        (tmp_path / name).mkdir()
        write_all(tmp_path / name, name, seed)
    summary = tmp_path / "here" / "summary.json"
    rows = json.loads(summary.read_text())
    summary.write_text(json.dumps(rows * 2))
    with pytest.raises(ValueError, match=r"summary\.json is damaged .*two rows of .*; delete one of them"):
        run_folder.read_summary(tmp_path / "here")
    summary.write_bytes((tmp_path / "there" / "summary.json").read_bytes())
    with pytest.raises(ValueError, match=r"summary\.json was edited.* its digest does not fit"):
        run_folder.read_summary(tmp_path / "here")


@pytest.mark.parametrize("name", ["", ".", "..", "../up", "/tmp/away", "a/b", "a\\b", "a\0", "a\n", "\ud800", 3, None])
def test_rows_lead_nowhere_else(tmp_path, name):
    one = run_folder.sealed_row({**row(), "run": name}, tmp_path)
    run_folder.write_summary(tmp_path, [one])
    with pytest.raises(ValueError, match=r"summary\.json is damaged"):
        run_folder.read_summary(tmp_path)
