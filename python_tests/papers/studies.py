"""Experiments in parts from end to end: the command, and the files that it leaves."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

from ella_cuda import cli
from python_tests.interrupting import interrupted


def run(*args: str) -> None:
    """``ella-cuda reproduce`` with these."""
    assert cli.main(["reproduce", *args]) == 0


def table(folder: Path, part: str) -> list[dict[str, str]]:
    """A part's rows."""
    with (folder / f"{part}.csv").open() as file:
        return list(csv.DictReader(file))


def files(folder: Path) -> dict[str, bytes]:
    """Tables, pictures and results; not what says when it was done."""
    kept = [p for p in folder.rglob("*") if p.suffix in (".txt", ".csv", ".png", ".svg", ".json")]
    return {str(p.relative_to(folder)): p.read_bytes() for p in kept if p.name != "environment.json"}


def check_goes_on(
    options: list[str], folder: Path, stops: list[tuple[type, str, Callable[..., bool]]], capsys: pytest.CaptureFixture
) -> str:
    """A session that is killed at each stop, a method before which its condition holds, goes on to the files of one that is not.

    Returns what is printed by the last part of it.
    """
    run(*options, "--out", str(folder / "whole"))
    capsys.readouterr()
    killed = str(folder / "killed")
    command = [*options, "--out", killed]
    for kind, name, condition in stops:
        with interrupted(kind, name, condition):
            assert cli.main(["reproduce", *command]) == 130
        assert f"go on with: ella-cuda reproduce --resume {killed}" in capsys.readouterr().err
        command = ["--resume", killed]
    run(options[0], *command)
    assert files(folder / "killed") == files(folder / "whole")
    return capsys.readouterr().out
