"""Files of pictures, the same when drawn again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ella_cuda.files import write_file

DPI = 200
SUFFIXES = (".png", ".svg")


def picture_files(stem: Path) -> list[Path]:
    """The files of a picture: ``stem`` as PNG and SVG."""
    return [stem.with_name(stem.name + suffix) for suffix in SUFFIXES]


def save_picture(figure: Any, stem: Path) -> list[Path]:
    """Write a figure as PNG and SVG, byte for byte the same whenever the figure is.

    Returns:
        The files.

    Raises:
        OSError: a file cannot be written; what was there is untouched.
    """
    return list(_saved(figure, stem))


def _saved(figure: Any, stem: Path) -> Iterator[Path]:
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "ella_cuda"}):  # else the names inside an SVG file are drawn at random
        for file in picture_files(stem):
            metadata = {"Date": None} if file.suffix == ".svg" else None
            write_file(file, lambda path, metadata=metadata: figure.savefig(path, dpi=DPI, metadata=metadata))
            yield file
