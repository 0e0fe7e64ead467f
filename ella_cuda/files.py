"""Files that are whole at any moment, and files of JSON that may be damaged."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TEMPORARY = re.compile(r"\.(?P<stem>.+)\.\d+-\d+\.tmp(?P<suffix>\.[^.]*)?")
_numbers = itertools.count()


def write_file(path: str | os.PathLike[str], content: str | Callable[[str], None]) -> None:
    """Write a file beside ``path``, flush it to the disk, then rename it over ``path``.

    The temporary file has the process's number in its name, so that several processes can write at once. It is removed if writing
    fails; :func:`remove_temporary_files` removes that of a process which was killed.

    Args:
        path: the file; its folder must exist.
        content: the text, or a function that writes the file under the name it is given (which keeps ``path``'s
            suffix).

    Raises:
        OSError: the disk is full or the folder cannot be written; what was at ``path`` before is untouched.
    """
    path = Path(path)
    beside = path.with_name(f".{path.stem[:200]}.{os.getpid()}-{next(_numbers)}.tmp{path.suffix}")
    try:
        if callable(content):
            content(str(beside))
        else:
            beside.write_text(content, encoding="utf-8", errors="surrogateescape")  # names of files as they are
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        raise OSError(
            error.errno,
            f"{path} could not be written ({error.strerror or error}); free space or choose another folder. "
            "What was there before is untouched.",
        ) from error
    finally:
        with contextlib.suppress(OSError):  # the error above says what matters
            beside.unlink(missing_ok=True)


def remove_temporary_files(folder: Path, of: str | None = None) -> None:
    """Remove what :func:`write_file` left in a folder when its process was killed. Only for who has claimed the folder or the file: those
    of a process at work have the same names.

    Args:
        folder: that holds them; folders in it are left alone.
        of: the name of the only file whose temporary files are removed; None for all files'.
    """
    for file in folder.iterdir():
        found = _TEMPORARY.fullmatch(file.name)
        if found and (of is None or (Path(of).stem[:200], Path(of).suffix) == (found["stem"], found["suffix"] or "")):
            file.unlink(missing_ok=True)


def read_json(path: Path, advice: str) -> Any:
    """The content of a file of JSON.

    Args:
        path: the file.
        advice: what to do if it is damaged, the message's end.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not UTF-8, not JSON, whose numbers are finite, or no file; the message names it.
    """
    try:
        if what := no_file(path):
            raise ValueError(what)
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:  # a ValueError of its own kind or, for too many digits, of int's
        raise damaged(path, error, advice) from error


def no_file(path: str | os.PathLike[str]) -> str | None:
    """The kind of what is there in place of a file, in words; None where it is a file. Opening a pipe waits for who writes to it; a device
    may never end.

    Raises:
        FileNotFoundError: there is nothing.
    """
    mode = os.stat(path).st_mode
    return None if stat.S_ISREG(mode) else "a folder" if stat.S_ISDIR(mode) else "a pipe or device"


def path_part(name: Any) -> str:
    """The name of a folder, as one that a file names must be: ValueError where it would lead elsewhere, or is none."""
    if not isinstance(name, str) or name in ("", ".", "..") or {"/", "\\"} & {*name} or not name.isprintable():
        raise ValueError(f"a name must be one part of a path, of printable characters without / and \\, got {name!r}")
    return name


def require_inside(folder: Path) -> None:
    """ValueError where a folder of a folder's is a link: what is written there would be elsewhere."""
    if folder.is_symlink():
        raise ValueError(
            f"{folder} is a link to {os.path.realpath(folder)}: what is written there would be outside of {folder.parent}. Put a folder in "
            "the link's place."
        )


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def damaged(path: Path, why: object, advice: str) -> ValueError:
    """The error that says that a file is damaged, why, and what to do."""
    return ValueError(f"{path} is damaged or of another version ({why}); {advice}.")


def _finite(digits: str) -> float:
    if math.isinf(value := float(digits)):
        raise ValueError(f"{digits} is no finite number")
    return value
