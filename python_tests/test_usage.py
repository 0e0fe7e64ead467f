"""What the command says before anything runs: help, and what is wrong with options."""

from __future__ import annotations

import re
import shlex
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from ella_cuda import cli
from ella_cuda.cli import train
from ella_cuda.experiments import configure, recipe
from ella_cuda.experiments.grid import _run_quietly
from python_tests.data.test_sources import write_mnist
from python_tests.reports.rows import row


@pytest.mark.parametrize("command", ["train", "reproduce"])
def test_help_shows_what_every_data_set_has_of_its_own(command, capsys):
    assert cli.main([command, "--help-all"]) == 0
    options, _, table = capsys.readouterr().out.partition("\ndefaults by --data:\n")
    head, *lines = [re.split(r"\s{2,}", line) for line in table.splitlines()]
    shown = {option: dict(zip(head[1:], cells, strict=True)) for option, *cells in lines if cells}
    own = {"folder": "30"} if command == "train" else {}
    assert shown["--epochs"] == {
        "digits": "60",
        "mnist": "12",
        "fashion-mnist": "12",
        "cifar10, cifar100": "100",
        **own,
    }
    assert shown["--cooldown"]["digits"] == "0.3" and shown["--cooldown"]["mnist"] == "-"
    assert ("--task" in shown) == (command == "train")
    assert shown["--fan-in-limit"]["digits"] == "256" and shown["--fan-in-limit, FC"]["digits"] == "64"
    for option in shown:
        assert f"\n  {option.partition(',')[0]} " in options
    for name in ("width", "lr", "burn_in", "hypersteps", "column_tolerance", "init", "augment"):
        option = "--" + name.replace("_", "-")
        for heading, cell in shown[option].items():
            recipes = [recipe("/folder" if data == "folder" else data) for data in heading.split(", ")]
            assert {cell} == {str(found[name]) for found in recipes}
        about = options.rpartition(f"\n  {option} ")[2].split("\n  --")[0].split("\n\n")[0]
        assert " ".join(about.split()).endswith("(by --data)")
    assert ("--fisher" in shown) == (command == "train")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("", None),
        ("--layer fc conv", "not run: FC (evidence): the curvature of an FC path is large; --all runs it."),
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
def test_train_says_what_it_left_out_after_the_table(options, said, asked, capsys):
    assert cli.main(["train", *options.split()]) == 0
    lines = [
        line for line in capsys.readouterr().out.partition("no finished run\n")[2].splitlines() if "not run" in line
    ]
    assert lines == ([said] if said else [])


def test_train_says_why_an_evidence_was_not_computed(asked, capsys, monkeypatch):
    without = {"neg_log_marginal_likelihood": None, "neg_log_marginal_likelihood_reason": "its factors need 2 MB"}
    monkeypatch.setattr(train, "do_runs", lambda *_, **__: [row(), row(layer="fc", objective="map", **without)])
    monkeypatch.setattr(train, "say_written", lambda *_: None)
    assert cli.main(["train"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("no -log q/N")]
    assert said == ["no -log q/N for digits-digit-fc-map-seed0: its factors need 2 MB."]


def test_help_of_all_says_what_else_is_enough(capsys):
    for command, expected in (("train", True), ("reproduce", False)):
        assert cli.main([command, "--help-all"]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert ("curvature is large; naming --objective is enough" in text) == expected


@pytest.mark.parametrize("args", [[], ["--help"]])
def test_the_overview_fits_a_screen_and_names_every_command(args, capsys):
    assert cli.main(args) == 0
    out, err = capsys.readouterr()
    assert err == "" and len(out.splitlines()) <= 24 and max(map(len, out.splitlines())) <= 120
    assert all(f"\n  {name} " in out for name in ("train", "check", "report", "reproduce"))


@pytest.mark.parametrize(("command", "most"), [("train", 20), ("reproduce", 20), ("inspect", 20)])
def test_help_is_short_and_all_of_it_one_option_away(command, most, capsys):
    assert cli.main([command, "--help"]) == 0
    brief = capsys.readouterr().out
    options = re.findall(r"^  --[\w-]+", brief, re.MULTILINE)
    assert len(brief.splitlines()) <= most and len(options) <= 10
    if "--help-all" in brief:
        assert cli.main([command, "--help-all"]) == 0
        everything = capsys.readouterr().out
        assert all(re.search(rf"^{option}\b", everything, re.MULTILINE) for option in options)
        assert "\nThe network:\n  --" in everything and "{" not in everything.partition("The images:")[2]


@pytest.mark.parametrize(
    ("args", "wrong", "advice"),
    [
        ("trian", "ella-cuda: COMMAND 'trian' is none of train,", "Did you mean train? See: ella-cuda --help"),
        ("train --epohcs=3", "ella-cuda train: unrecognized arguments: --epohcs=3", "Did you mean --epochs?"),
        ("train --bach-size=3", "unrecognized arguments: --bach-size=3", "Did you mean --batch-size?"),
        ("train --epocs 3", "ella-cuda train: unrecognized arguments: --epocs", "Did you mean --epochs?"),
        ("train --data fashion-mnits", "--data 'fashion-mnits' is none of digits,", "Did you mean fashion-mnist?"),
        ("train --data photo", "--data 'photo' is none of digits,", "See: ella-cuda train --help"),
        ("train --epochs five", "--epochs must be a whole number, got 'five'", "See: ella-cuda train --help"),
        ("train --lr x", "--lr must be a number, got 'x'", "See: ella-cuda train --help"),
        ("train --epochs", "--epochs: expected one argument", "See: ella-cuda train --help"),
        ("train --dat digits", "ambiguous option: --dat could match --data, --data-", "See: ella-cuda train --help"),
        ("reproduce toy --sclae 0.1", "unrecognized arguments: --sclae", "Did you mean --scale?"),
        ("inspect dir --picture-folder x", "unrecognized arguments: --picture-folder", "Did you mean --pictures?"),
        ("info everything", "unrecognized arguments: everything", "See: ella-cuda info --help"),
        ("train --config none.toml", "none.toml: No such file", "See: ella-cuda train --help"),
        ("train --config epoch.toml", "epoch.toml: epoch is no setting", "Did you mean epochs?"),
        ("train --config word.toml", "word.toml: --epochs must be a whole number, got 'x'", "See:"),
        ("train --config list.toml", "list.toml: width must be a single value, got [1, 2]", "See:"),
        ("train --config table.toml", "table.toml: seed must be text or a number, got {'a': 1}", "See:"),
        ("train --config flag.toml", "flag.toml: all must be true or false, got 1", "See:"),
        ("train --config broken.toml", "broken.toml: no TOML: ", "See:"),
    ],
)
def test_wrong_usage_is_two_lines_with_the_nearest_word(args, wrong, advice, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    files = {"epoch": "epoch = 3", "word": 'epochs = "x"', "list": "width = [1, 2]", "table": "seed = {a = 1}"}
    for name, text in {**files, "flag": "all = 1", "broken": "epochs ="}.items():
        (tmp_path / f"{name}.toml").write_text(text)
    assert cli.main(args.split()) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert wrong in first and advice in second


@pytest.mark.parametrize(
    "args",
    [
        "",
        "--all --seed 3 4 --data-dir 'my data'",  # recipes differ by layer
        "--layer conv s_fc gconv --learn none anchors --group p4m --task plain digit --ood rotated fashion-mnist",
        "--learn augmentation --generators rotation tx --copies 3 --task rotated --lr-aug 0.1",
    ],
)
def test_settings_written_to_a_file_are_those_read_from_it(args, asked, capsys):
    words = ["train", *shlex.split(args)]
    assert cli.main([*words, "--write-config", "a.toml"]) == 0 and not asked
    assert cli.main(words) == cli.main(["train", "--config", "a.toml"]) == 0
    assert asked[1].configs == asked[0].configs
    assert (asked[1].folder / "config.toml").read_text() == Path("a.toml").read_text()
    assert cli.main(["train", "--config", "a.toml", "--epochs", "33"]) == 0  # the command line wins
    assert {c.epochs for c in asked[2].configs} == {33}
    assert [replace(c, epochs=a.epochs) for c, a in zip(asked[2].configs, asked[0].configs, strict=True)] == asked[
        0
    ].configs


@pytest.mark.parametrize(
    ("args", "words", "options"),
    [
        (["train", "--burn-in", "60"], "burn_in must be less than epochs", "(given: --burn-in; by default: --epochs)"),
        (
            ["reproduce", "toy", "--burn-in", "60"],
            "burn_in must be less than epochs",
            "(given: --burn-in; by default: --epochs)",
        ),
        (["train", "--lr-hyp", "-1"], "lr_hyp must be positive", "(given: --lr-hyp)"),
        (
            ["train", "--prior-prec-init", "-1"],
            "prior_prec_init must be positive",
            "positive and finite, got -1.0. (given: --prior-prec-init)",
        ),
        (["train", "--holdout", "1e-30"], "holdout must be at least 1e-06", "(given: --holdout)"),
        (
            ["train", "--layer", "s_fc", "--inverse-lengthscale", "1e300"],
            "inverse_lengthscale must be positive and at most 1e+30",
            "(given: --inverse-lengthscale)",
        ),
        (["train", "--seed", "-1"], "seed must be at least 0", "(given: --seed)"),
        (["train", "--seed", str(2**64)], "seed must be at most 18446744073709551615", f"got {2**64}. (given: --seed)"),
        (["train", "--column-tolerance", "2"], "column_tolerance must be at least 0", "(given: --column-tolerance)"),
        (["reproduce", "group-convs", "--row", "x"], "the rows of group-convs are", "got x."),
    ],
)
def test_what_is_wrong_with_an_attribute_names_its_option(args, words, options, asked, capsys):
    assert cli.main(args) == 2
    err = capsys.readouterr().err
    assert words in err and err.endswith(f"{options}\n") and err.count("\n") == 1


@pytest.mark.parametrize(
    "args", [["inspect"], ["train", "--resume"], ["reproduce", "--resume"]], ids=lambda args: " ".join(args)
)
@pytest.mark.parametrize(
    ("folder", "words"),
    [("missing", "does not exist"), ("empty", "has no config.json"), ("file", "is a file"), ("damaged", "is damaged")],
)
def test_a_folder_that_is_none_of_ours_is_wrong_usage(args, folder, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text("{")
    assert cli.main([*args, folder]) == 2
    err = capsys.readouterr().err
    assert err.startswith("ella-cuda: wrong usage: ") and words in err and err.count("\n") == 1


def test_a_device_that_is_none_is_wrong_usage_also_on_resuming(asked, capsys):
    assert cli.main(["train", "--out", "dir"]) == 0
    assert cli.main(["train", "--resume", "dir", "--device", "tpu"]) == 2
    assert "device must be" in capsys.readouterr().err


def test_no_folder_is_named_where_data_are_missing_and_one_run_is_not_runs(asked, capsys):
    assert cli.main(["train", "--data", "mnist"]) == 1
    assert capsys.readouterr().out == ""
    assert cli.main(["train", "--task", "digit", "--layer", "conv", "--objective", "map", "--out", "dir"]) == 0
    assert capsys.readouterr().out.startswith("1 run on ")
    assert cli.main(["inspect", "dir"]) == 0
    assert capsys.readouterr().out == "dir: 0 runs finished, 0 begun, 1 waiting\n"


@pytest.mark.parametrize("args", [["train", "--task", "plain"], ["reproduce", "toy", "--row", "digit-conv"]])
def test_files_that_are_not_as_published_are_said_once_in_a_line(args, asked, tmp_path, capsys):
    write_mnist(tmp_path / args[0])
    assert cli.main([*args, "--data", "mnist", "--data-dir", str(tmp_path / args[0])]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ella-cuda: warning: mnist: not as published, by MD5: train-images-idx3-ubyte, ")


def test_workers_leave_that_to_the_process_that_loaded_first(tmp_path):
    write_mnist(tmp_path)
    config = configure("mnist", "plain", "conv", "map", width=1, epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _run_quietly(config, tmp_path / "run", {"data_dir": str(tmp_path)})
    assert not [str(w.message) for w in caught if "published" in str(w.message)]
