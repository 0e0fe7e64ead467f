"""The files of pictures: whole, the same when drawn again, and drawn only when they have changed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib import image

from ella_cuda.experiments import configure, run_grid
from ella_cuda.reports import save_picture, save_pictures
from ella_cuda.reports.pictures import folder as folder_module

SMALL = {"width": 1, "epochs": 2, "burn_in": 0, "frequency": 1, "hypersteps": 2, "train_size": 40, "test_size": 40}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, list[dict]]:
    """The folder of a run that learned anchors, and of one by MAP."""
    out = tmp_path_factory.mktemp("runs")
    configs = [
        configure("digits", "digit", "conv+s_conv", "evidence", learn="anchors", **SMALL),
        configure("digits", "digit", "conv", "map", **SMALL),
    ]
    return out, run_grid(configs, out, progress=False)


def test_a_finished_grid_has_all_its_pictures(finished):
    out, rows = finished
    expected = {
        "": {"curves", "layers"},
        rows[0]["run"]: {"curves", "precisions", "filters", "anchors", "reliability", "leave_one_out"},
        rows[1]["run"]: {"curves", "filters", "reliability", "leave_one_out"},
    }
    for where, names in expected.items():
        for suffix in (".png", ".svg"):
            assert {p.stem for p in (out / where).glob("*" + suffix)} == names
    for path in out.rglob("*.svg"):
        assert ElementTree.parse(path).getroot().tag.endswith("svg")
    for path in out.rglob("*.png"):
        assert min(image.imread(path).shape[:2]) > 100


def test_only_what_changed_is_drawn_again(finished, tmp_path, monkeypatch):
    out, rows = finished
    drawn = []
    real = save_picture
    monkeypatch.setattr(
        folder_module, "save_picture", lambda figure, stem: drawn.append(stem.name) or real(figure, stem)
    )
    files = sorted([*out.rglob("*.png"), *out.rglob("*.svg")])
    before = {p: p.read_bytes() for p in files}
    assert sorted(save_pictures(rows, out, out).files) == files
    assert drawn == ["layers", "curves"]  # of all runs, so of every new one
    assert {p: p.read_bytes() for p in files} == before
    drawn.clear()
    copied = save_pictures(rows, out, tmp_path)
    assert drawn == ["layers", "curves"]
    assert sorted(p.relative_to(tmp_path) for p in copied.files) == [p.relative_to(out) for p in files]
    assert all((tmp_path / p.relative_to(out)).read_bytes() == content for p, content in before.items())
    drawn.clear()
    run_dir = out / rows[0]["run"]
    (run_dir / "anchors.svg").unlink()
    save_pictures(rows, out, out)
    assert drawn == ["layers", "curves", "anchors"]
    drawn.clear()
    later = max(p.stat().st_mtime_ns for p in files) + 10**9
    os.utime(run_dir / "checkpoint.pt", ns=(later, later))
    save_pictures(rows, out, out)
    assert drawn == ["layers", "curves", "curves", "precisions", "filters", "anchors", "reliability", "leave_one_out"]
    assert {p: p.read_bytes() for p in files} == before


def test_a_picture_that_cannot_be_drawn_is_named_and_alone(finished, tmp_path, monkeypatch):
    out, rows = finished

    def broken(*args):
        raise KeyError("no such thing")

    monkeypatch.setattr(folder_module, "draw_curves", broken)
    drawn = save_pictures(rows, out, tmp_path)
    assert drawn.failures[0] == f"{tmp_path / 'curves'} could not be drawn (KeyError: 'no such thing')."
    assert not (tmp_path / "curves.png").exists()
    assert {p.stem for p in drawn.files} - {"curves"} == {
        "layers",
        "precisions",
        "filters",
        "anchors",
        "reliability",
        "leave_one_out",
    }


def test_a_full_disk_is_not_a_pictures_matter(finished, tmp_path, monkeypatch):
    out, rows = finished

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder_module, "save_picture", full)
    with pytest.raises(OSError, match="No space left"):
        save_pictures(rows, out, tmp_path)


def test_the_start_of_the_anchors_is_in_the_diary_of_runs_that_learn_them(finished):
    out, rows = finished
    diaries = [json.loads((out / r["run"] / "progress.json").read_text()) for r in rows]
    assert len(diaries[0]["anchors_at_start"]["blocks.0.s_conv.basis"]) == 5
    assert "anchors_at_start" not in diaries[1]
