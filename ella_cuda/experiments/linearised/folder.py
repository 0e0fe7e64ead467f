"""The folder of the experiment: its studies, their results, and the tables and pictures made of them."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from ella_cuda import run_folder
from ella_cuda.experiments.linearised.parts import PARTS
from ella_cuda.experiments.linearised.study import Study, read_result
from ella_cuda.experiments.linearised.text import csv_of
from ella_cuda.files import write_file
from ella_cuda.reports.pictures import Drawn, add_picture

TABLE = "linearised"  # of the command, and in the options of the folder


def is_study_folder(out_dir: str | os.PathLike[str]) -> bool:
    """Whether the folder is one of this experiment, and no other."""
    try:
        return run_folder.read_config(out_dir)[1].get("table") == TABLE
    except (OSError, ValueError):
        return False


def read_studies(out_dir: str | os.PathLike[str]) -> tuple[list[Study], dict[str, Any]]:
    """The studies and the options that a folder was started with.

    Raises:
        ValueError: the folder has no readable ``config.json``, or one that was edited, or of something else.
    """
    return run_folder.read_config(out_dir, lambda runs: [_study(**run) for run in runs])


def _study(part: str, name: str, settings: dict[str, Any]) -> Study:
    if part not in PARTS:
        raise ValueError(f"there is no part {part!r}")
    return Study(part, name, settings)


def save_parts(out_dir: str | os.PathLike[str]) -> str:
    """Bring every part's ``.txt``, ``.csv`` and picture up to date with its finished studies.

    A picture that cannot be drawn is a ``RuntimeWarning`` and costs nothing else.

    Returns:
        The texts, one after the other.

    Raises:
        ValueError: the folder is damaged. OSError: it cannot be written; what was there is untouched.
    """
    out_dir = Path(out_dir)
    studies, _ = read_studies(out_dir)
    drawn, texts = Drawn(), []
    for part in PARTS.values():
        planned = [s for s in studies if s.part == part.name]
        found = [(s, result) for s in planned if (result := read_result(out_dir / s.name)) is not None]
        if not found:
            continue
        rows = [row for study, result in found for row in part.rows(study, result)]
        text = part.text(rows)
        if len(found) < len(planned):
            text += f"\n{len(found)} of {len(planned)} networks are done."
        write_file(out_dir / f"{part.name}.txt", text + "\n")
        write_file(out_dir / f"{part.name}.csv", csv_of(rows))
        add_picture(drawn, out_dir / part.name, lambda part=part, found=found: part.draw(found))
        texts.append(text)
    for failure in drawn.failures:
        warnings.warn(failure, RuntimeWarning, stacklevel=2)
    return "\n\n\n".join(texts)
