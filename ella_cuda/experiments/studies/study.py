"""A study: one network with the measurements on it, each of which is kept in a file as soon as it is there."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ella_cuda.digest import fits_seal, sealed
from ella_cuda.files import damaged, read_json, write_file

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
    """

    part: str
    name: str
    settings: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Work:
    """Where a study is done.

    Attributes:
        folder: of the study.
        device: a name of torch's.
        progress: whether to show progress bars.
        data_dir, download: see :func:`ella_cuda.data.load`.
    """

    folder: Path
    device: str = "cpu"
    progress: bool = False
    data_dir: str | None = None
    download: bool = False

    def kept(self, name: str, measure: Callable[[], Any]) -> Any:
        """What ``measure`` returns, as JSON gives it back; from the study's file where an earlier session measured it.

        Raises:
            ValueError: the file is damaged, or was edited.
            FloatingPointError: a number is not finite. What ``measure`` raises.
        """
        path, found = self.folder / MEASURED_FILE, self._all()
        if name not in found:
            measured = measure()
            try:
                found[name] = json.loads(json.dumps(measured, allow_nan=False))
            except ValueError as error:
                raise FloatingPointError(f"{self.folder}: {name} has a number that is not finite.") from error
            write_file(path, json.dumps(sealed(found), allow_nan=False))
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
        return _read(path) if path.exists() else {}


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


def read_result(folder: Path) -> dict[str, Any] | None:
    """A finished study's; None before.

    Raises:
        ValueError: the file is damaged, or was edited.
    """
    path = folder / RESULT_FILE
    return _read(path) if path.exists() else None


def write_result(folder: Path, result: Mapping[str, Any]) -> None:
    """Keep what a study found."""
    write_file(folder / RESULT_FILE, json.dumps(sealed(result), allow_nan=False))


def _read(path: Path) -> dict[str, Any]:
    found = read_json(path, ADVICE)
    if not isinstance(found, dict):
        raise damaged(path, f"a {type(found).__name__}, not a mapping", ADVICE)
    if not fits_seal(found):
        raise ValueError(f"{path} was edited: its digest does not fit. Undo the edit, or {ADVICE}.")
    found.pop("digest", None)
    return found


def share(scale: float, full: int, least: int) -> int:
    """That part of a number, rounded, at least ``least``."""
    return max(least, int(scale * full + 0.5))
