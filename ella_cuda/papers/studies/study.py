"""A study: one network with the measurements on it, each of which is kept in a file as soon as it is there."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ella_cuda.digest import DIGEST, broken_seal, sealed
from ella_cuda.files import path_part, read_json, write_file

MEASURED_FILE = "measured.json"  # of a study, in a folder of its own
RESULT_FILE = "result.json"
ADVICE = "move its folder away to do that study again"


@dataclasses.dataclass(frozen=True)
class Study:
    """What is done once for a part of the experiment.

    Attributes:
        part: a name of its experiment's parts.
        name: of the study and its folder.
        settings: of its part, numbers and strings.

    Raises:
        ValueError: the name is not one part of a path, or the settings are no mapping.
    """

    part: str
    name: str
    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        path_part(self.name)
        if not isinstance(self.settings, Mapping):
            raise ValueError(f"settings of {self.name} must be a mapping, got {type(self.settings).__name__}")


@dataclasses.dataclass(frozen=True)
class Work:
    """Where a study is done.

    Attributes:
        folder: of the study.
        device: a name of torch's.
        progress: whether to show progress bars.
        data_dir, download: see :func:`ella_cuda.data.load`.
        study: that is done, which what is kept is of.
    """

    folder: Path
    device: str = "cpu"
    progress: bool = False
    data_dir: str | None = None
    download: bool = False
    study: Study | None = None

    def kept(self, name: str, measure: Callable[[], Any]) -> Any:
        """What ``measure`` returns, as JSON gives it back; from the study's file where an earlier session measured it.

        Raises:
            ValueError: the file is damaged, or was edited, or is of another study.
            FloatingPointError: a number is not finite. What ``measure`` raises.
        """
        path, found = self.folder / MEASURED_FILE, self._all()
        if name not in found:
            measured = measure()
            try:
                found[name] = json.loads(json.dumps(measured, allow_nan=False))
            except ValueError as error:
                raise FloatingPointError(f"{self.folder}: {name} has a number that is not finite.") from error
            write_file(path, json.dumps(sealed(found, _of(path, self.study)), allow_nan=False))
        return found[name]

    def found(self, name: str) -> Any:
        """What was kept.

        Raises:
            ValueError: nothing was, or the file is damaged, or was edited.
        """
        found = self._all()
        if name not in found:
            raise ValueError(f"{self.folder / MEASURED_FILE} has no {name}, which training went past; {ADVICE}.")
        return found[name]

    def _all(self) -> dict[str, Any]:
        path = self.folder / MEASURED_FILE
        return _read(path, self.study) if path.exists() else {}


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the experiment.

    Attributes:
        name: of the command's option.
        title: one line on what it shows.
        plan: the studies' settings by name, of ``(seeds, scale, data)``.
        run: does a study; returns its result, for :attr:`rows`, :attr:`text` and :attr:`draw`.
        rows: of a table, of ``(study, result)``.
        text: of all rows, for people.
        draw: a picture of all studies with their results, a matplotlib ``Figure``.
        data: the data sets that it needs.
        pictures: more of them, by the names of their files.
    """

    name: str
    title: str
    plan: Callable[[Sequence[int], float, Sequence[str]], dict[str, dict[str, Any]]]
    run: Callable[[Study, Work], dict[str, Any]]
    rows: Callable[[Study, dict[str, Any]], list[dict[str, Any]]]
    text: Callable[[Sequence[dict[str, Any]]], str]
    draw: Callable[[Sequence[tuple[Study, dict[str, Any]]]], Any]
    data: tuple[str, ...] = ()
    pictures: Mapping[str, Callable[[Sequence[tuple[Study, dict[str, Any]]]], Any]] = dataclasses.field(
        default_factory=dict
    )


def read_result(folder: Path, study: Study) -> dict[str, Any] | None:
    """A finished study's; None before.

    Raises:
        ValueError: the file is damaged, or was edited, or is of another study.
    """
    path = folder / RESULT_FILE
    return _read(path, study) if path.exists() else None


def write_result(folder: Path, study: Study, result: Mapping[str, Any]) -> None:
    """Keep what a study found."""
    path = folder / RESULT_FILE
    write_file(path, json.dumps(sealed(result, _of(path, study)), allow_nan=False))


def _of(path: Path, study: Study | None) -> list[Any]:
    """What a study's file is of, for its digest."""
    return [path.name, *([] if study is None else [study.part, study.name, dict(study.settings)])]


def _read(path: Path, study: Study | None) -> dict[str, Any]:
    found = read_json(path, ADVICE)
    if why := broken_seal(found, _of(path, study)):
        raise ValueError(f"{path} was edited, or is of another study or version: {why}. Undo the edit, or {ADVICE}.")
    found.pop(DIGEST)
    return found


def share(scale: float, full: int, least: int) -> int:
    """That part of a number, rounded, at least ``least``."""
    return max(least, int(scale * full + 0.5))
