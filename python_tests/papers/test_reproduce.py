"""``ella-cuda reproduce`` as people run it."""

from __future__ import annotations

import pytest

from ella_cuda import cli
from ella_cuda.experiments.diary import Diary
from ella_cuda.papers import equivariances
from python_tests.interrupting import interrupted
from python_tests.test_cli import one_line, rows_of, run_here

# Two rows of the toy table at a size for tests: 43 images, 2 epochs, an evidence step after each but the first.
SMALL = "--scale 0.03 --epochs 2 --burn-in 1 --width 1 --test-size 40 --row digit-conv quadrant-conv"


@pytest.mark.slow
def test_runs_are_those_of_train_beside_the_papers_numbers(tmp_path, monkeypatch, capsys, without_pictures):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["reproduce", "toy", *SMALL.split(), "--hypersteps", "3", "--out", "table", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    same = "--epochs 2 --burn-in 1 --frequency 1 --width 1 --test-size 40 --hypersteps 3 --device cpu"
    run_here("train", "--layer", "conv", "--train-size", "43", *same.split(), "--out", "same")
    order = sorted(rows_of(tmp_path / "same"), key=lambda r: r["run"])
    assert sorted(rows_of(tmp_path / "table"), key=lambda r: r["run"]) == order
    written = (tmp_path / "table" / "comparison.txt").read_text()
    assert written in text
    assert f"{order[0]['accuracy']:.2f}  99.23" in written.replace("   ", "  ")
    assert "43 of 1,437 training images, 2 epochs (recipe: 60), width 1, evidence every epoch after 1" in written
    assert (tmp_path / "table" / "comparison.csv").read_text().count("\n") == 5
    picture = {p.suffix: p.read_bytes() for p in (tmp_path / "table").glob("comparison.[ps]*g")}
    assert set(picture) == {".png", ".svg"}

    capsys.readouterr()
    before = (tmp_path / "table" / "summary.json").read_text()
    (tmp_path / "table" / "comparison.txt").unlink()
    assert cli.main(["reproduce", "--resume", "table"]) == cli.main(["reproduce", "toy", "--resume", "table"]) == 0
    assert "4 done before" in capsys.readouterr().out
    assert (tmp_path / "table" / "comparison.txt").read_text() == written
    assert {p.suffix: p.read_bytes() for p in (tmp_path / "table").glob("comparison.[ps]*g")} == picture
    assert (tmp_path / "table" / "summary.json").read_text() == before
    for clash, words in (
        (["layers"], "table layers does not fit --resume table, which was started with toy"),
        (["--scale", "0.5"], "--scale 0.5 does not fit"),
        (["--data", "mnist"], "--data mnist does not fit"),
    ):
        assert cli.main(["reproduce", "--resume", "table", *clash]) == 2
        assert words in capsys.readouterr().err
    assert cli.main(["train", "--resume", "table"]) == 2
    assert "go on with: ella-cuda reproduce --resume table" in capsys.readouterr().err
    assert cli.main(["reproduce", "--resume", "same"]) == 2
    assert "go on with: ella-cuda train --resume same" in capsys.readouterr().err
    assert cli.main(["inspect", "table"]) == 0
    assert "4 runs finished" in capsys.readouterr().out


@pytest.mark.usefixtures("without_pictures")
def test_an_interrupted_table_resumes_to_the_numbers_of_one_that_was_not(tmp_path, capsys):
    options = f"reproduce toy {SMALL} --epochs 3 --row digit-conv --device cpu --jobs 1".split()
    run_here(*options, "--out", str(tmp_path / "whole"))
    assert f"results in {tmp_path / 'whole'}" in capsys.readouterr().out
    with interrupted(Diary, "record", lambda diary, e: "evidence" in diary.folder.name and e.epoch == 3):
        assert cli.main([*options, "--out", str(tmp_path / "killed")]) == 130
    assert len(rows_of(tmp_path / "killed")) == 1
    partly = (tmp_path / "killed" / "comparison.txt").read_text()
    assert partly.count("waiting") == 1
    run_here("reproduce", "--resume", str(tmp_path / "killed"), "--jobs", "1")
    assert rows_of(tmp_path / "killed") == rows_of(tmp_path / "whole")
    tables = [(tmp_path / folder / "comparison.txt").read_text() for folder in ("killed", "whole")]
    assert tables[0] == tables[1] != partly


def test_missing_and_damaged_data_are_failures_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["reproduce", "layers", "--scale", "0.1"]) == 1
    error = one_line(capsys)
    assert "cifar10: " in error and "--data-dir" in error and "stand in for it with --data" in error
    assert not list(tmp_path.iterdir())
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (tmp_path / f"{name}-ubyte").write_bytes(b"not idx at all")
    assert cli.main(["reproduce", "toy", "--data", "mnist", "--data-dir", "."]) == 1
    assert "idx" in one_line(capsys)
    assert len(list(tmp_path.iterdir())) == 4


def test_options_reach_the_runs_and_the_folder(asked, tmp_path, capsys):
    args = ["--data", "digits", "--scale", "0.5", "--all", "--seed", "1", "1", "2", "--lr", "0.5", "--fisher", "mc"]
    assert cli.main(["reproduce", "layers", *args]) == 0
    (grid,) = asked
    configs, plan = grid.configs, equivariances.Plan.from_json(grid.options["plan"])
    assert (plan.table, plan.scale, plan.images) == ("layers", 0.5, {"digits": 1437})
    assert [len(cell.runs) for cell in plan.cells] == [2] * 22
    assert len(configs) == 2 * (8 + 11)  # S-FC, S-CONV and their sum have one MAP run for two rows
    assert {(c.data, c.lr, c.fisher, c.train_size, c.epochs) for c in configs} == {("digits", 0.5, "mc", 719, 30)}
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("layers-20")
    assert capsys.readouterr().out.count("waiting") == 22
