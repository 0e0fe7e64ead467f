"""Files that are whole at any moment, and the names of those in a run's folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

CHECKPOINT_FILE = "checkpoint.pt"
HISTORY_FILE = "history.json"  # of a finished run
DIARY_FILE = "progress.json"


def write_file(path: str | os.PathLike[str], content: str | Callable[[str], None]) -> None:
    """Write a file beside ``path``, flush it to the disk, then rename it over ``path``.

    Args:
        path: the file; its folder must exist.
        content: the text, or a function that writes the file under the name it is given (which keeps ``path``'s
            suffix).

    Raises:
        OSError: the disk is full or the folder cannot be written; what was at ``path`` before is untouched.
    """
    path = Path(path)
    beside = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        if callable(content):
            content(str(beside))
        else:
            beside.write_text(content, encoding="utf-8")
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
