"""Experiments in parts from end to end: the command, and the files that it leaves."""

from __future__ import annotations

import csv
from pathlib import Path

from ella_cuda import cli


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
