"""The table of results, the CSV and the files of a folder."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from ella_cuda import run_folder
from ella_cuda.reports import results_table, save_report
from ella_cuda.reports.results import results_csv
from ella_cuda.reports.text import number
from python_tests.reports.rows import evaluations, row


def test_the_table_has_the_papers_columns():
    rows = [
        row(t, la, o, accuracy=a)
        for a, (t, o, la) in enumerate(
            (t, o, la)
            for t in ("digit", "quadrant")
            for o, la in (
                ("map", "fc"), ("map", "conv"), ("map", "f_fc+conv"), ("evidence", "conv"), ("evidence", "f_fc+conv"),
            )
        )
    ]  # fmt: skip
    lines = results_table(rows).splitlines()
    assert lines[1].split() == ["MAP", "evidence"]
    assert lines[2].split() == ["accuracy,", "%", "FC", "CONV", "F-FC+CONV", "CONV", "F-FC+CONV"]
    assert lines[3].split() == ["digit", "0.00", "1.00", "2.00", "3.00", "4.00"]
    assert lines[4].split() == ["quadrant", "5.00", "6.00", "7.00", "8.00", "9.00"]
    assert lines[5].startswith("NLL")
    assert lines[8].startswith("-log q/N")
    # A heading stands over the first of its columns.
    assert lines[1].index("MAP") + 3 == lines[2].index("FC") + 2
    assert lines[1].index("evidence") + 8 == lines[2].index("CONV", lines[2].index("F-FC+CONV") + 9) + 4


def test_what_was_learned_has_columns_of_its_own():
    rows = [row("digit", "s_fc", learn=learn, accuracy=a) for a, learn in ((70.0, ""), (80.0, "lengthscales"))]
    lines = results_table(rows).splitlines()
    assert lines[2].split() == ["accuracy,", "%", "S-FC", "S-FC,", "lengthscales"]
    assert lines[3].split() == ["digit", "70.00", "80.00"]


def test_seeds_are_averaged():
    text = results_table(
        [row(seed=s, accuracy=a, nll=n) for s, a, n in ((0, 90.0, 0.1), (1, 92.0, 0.2), (4, 97.0, 0.6))]
    )
    assert "mean over seeds 0, 1, 4" in text
    assert "93.00" in text
    assert "0.300" in text


def test_a_mean_over_fewer_seeds_is_marked():
    text = results_table([row(seed=0), row(seed=1), row(seed=0, layer="conv")])
    assert text.splitlines()[3].split() == ["digit", "90.00", "90.00*"]


def test_what_was_not_computed_is_a_dash():
    text = results_table([row(objective="map", neg_log_marginal_likelihood=None), row()])
    assert text.splitlines()[-1].split() == ["digit", "-", "1.250"]
    assert results_table([]) == "no finished run"


def test_csv_has_a_line_a_run_and_columns_of_every_layer():
    read = list(csv.DictReader(io.StringIO(results_csv([row(), row(layer="conv", objective="map")]))))
    assert len(read) == 2
    assert read[0]["accuracy"] == "90.0"
    assert read[0]["blocks.0 type"] == "conv"
    assert float(read[0]["blocks.1 f_fc share"]) == 0.5
    assert float(read[0]["blocks.2 conv weight prior_precision"]) == 100
    assert read[1]["blocks.1 f_fc share"] == ""
    assert read[1]["blocks.1 conv share"] == "1.0"


def folder_of(rows: list[dict], folder: Path) -> None:
    """The files of finished runs that a report reads, but for the checkpoints."""
    for r in rows:
        (folder / r["run"]).mkdir()
        run_folder.write_history(folder / r["run"], r["run"], [3.0, 2.5, 2.0, 1.5, 1.2, 1.0], evaluations(r))


def test_a_folder_gets_all_its_files(tmp_path):
    rows = [row(), row(layer="conv", objective="map")]
    folder_of(rows, tmp_path)
    save_report(rows, tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text()) == rows
    assert {p.name for p in tmp_path.iterdir() if p.is_file()} == {
        "summary.json", "summary.csv", "table.txt", "layers.png", "layers.svg", "curves.png", "curves.svg",
    }  # fmt: skip
    own = [{p.name for p in (tmp_path / r["run"]).iterdir()} for r in rows]
    both = {"history.json", "curves.png", "curves.svg"}
    assert own == [{*both, "precisions.png", "precisions.svg"}, both]
    text = (tmp_path / "table.txt").read_text()
    assert "accuracy, %" in text
    assert "prior precision" in text


def test_a_picture_that_fails_costs_nothing_else(tmp_path):
    rows = [row(), row(layer="conv", objective="map")]
    folder_of(rows, tmp_path)
    (tmp_path / rows[1]["run"] / "history.json").write_text("{")
    with pytest.warns(RuntimeWarning, match=r"curves could not be drawn \(ValueError: .*history\.json is damaged"):
        save_report(rows, tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text()) == rows
    assert (tmp_path / "table.txt").exists() and (tmp_path / "layers.svg").exists()
    assert (tmp_path / rows[0]["run"] / "precisions.png").exists()
    assert not (tmp_path / "curves.png").exists()


def test_a_folder_that_cannot_be_written_keeps_what_it_had(tmp_path, monkeypatch):
    (tmp_path / "summary.json").write_text("[]")

    def full(self, *args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(OSError, match=r"summary.json could not be written \(No space left on device\)"):
        save_report([row()], tmp_path)
    assert (tmp_path / "summary.json").read_text() == "[]"
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"), (0.0, "0.00"), (1.2345, "1.23"), (98.765, "98.8"), (12345.6, "12346"), (3e6, "3.00e+06"),
        (0.001, "1.00e-03"), (-2.5, "-2.50"),
    ],
)  # fmt: skip
def test_numbers_of_any_size(value, text):
    assert number(value) == text


def test_data_sets_and_group_convolutions_are_kept_apart():
    """They are no seeds of one another: nothing is averaged over them."""
    rows = [
        row("plain", "gconv", "map", data=data, group="p4", group_conv=variant, width=width, accuracy=accuracy)
        for data, variant, width, accuracy in (
            ("mnist", "full", 10, 10.0),
            ("mnist", "full", 6, 20.0),
            ("mnist", "pointwise", 10, 30.0),
            ("cifar10", "full", 10, 40.0),
        )
    ]
    rows[3]["evaluated_size"] = 77
    lines = results_table(rows).splitlines()
    assert lines[0] == "mnist, evaluated on 360 test images; cifar10, evaluated on 77 test images; seed 0"
    titles = ["GCONV (p4, full), width 10", "GCONV (p4, full), width 6", "GCONV (p4, pointwise), width 10"]
    assert [cell.strip() for cell in lines[2].split("  ") if cell.strip()][1:] == titles
    assert [line.split() for line in lines[3:5]] == [
        ["mnist,", "plain", "10.00", "20.00", "30.00"],
        ["cifar10,", "plain", "40.00", "-", "-"],
    ]
