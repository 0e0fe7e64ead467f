"""An experiment: parts with studies, which are done in a folder, with a table and a picture for each part."""

from __future__ import annotations

import dataclasses
import os
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ella_cuda import run_folder
from ella_cuda.claim import LOCK_FILE, claim
from ella_cuda.data import load
from ella_cuda.data.checksums import NOT_AS_PUBLISHED
from ella_cuda.experiments.grid import note_environment
from ella_cuda.experiments.run import own_random_state
from ella_cuda.files import remove_temporary_files, require_inside, write_file
from ella_cuda.papers.studies.study import Part, Study, Work, read_result, write_result
from ella_cuda.papers.studies.text import csv_of
from ella_cuda.progress import bar_size
from ella_cuda.reports.pictures import Drawn, add_picture
from ella_cuda.reports.text import counted
from ella_cuda.workers import run_at_once


class Experiment:
    """What `ella-cuda reproduce <name>` does.

    The folder: ``config.json``, ``environment.json``, each part's ``.txt``, ``.csv`` and picture, and a folder for each study with its
    checkpoints and what was measured.

    Args:
        name: of the command, and in the options of its folders.
        title: what it is on, in the command's help.
        scales: what the share ``scale`` is of, in the command's help.
        parts: in the order of their tables.
        scale: the usual share of the full sizes.

    Attributes:
        parts: by name.
    """

    def __init__(self, name: str, title: str, scales: str, parts: Iterable[Part], scale: float = 1.0) -> None:
        self.name, self.title, self.scales, self.scale = name, title, scales, scale
        self.parts = {part.name: part for part in parts}

    def plan(
        self,
        parts: Sequence[str],
        seeds: Sequence[int] = (0,),
        scale: float | None = None,
        data: Sequence[str] | None = None,
    ) -> list[Study]:
        """The studies of some parts, in the parts' order.

        Args:
            parts: their names.
            seeds: of weights and data; every part has a study of each.
            scale: share of the full sizes, above 0 and at most 1; None is the experiment's usual one.
            data: data sets; None is each part's own.

        Raises:
            ValueError: an unknown part, no seed, or a scale out of range.
        """
        scale = self.scale if scale is None else scale
        if unknown := [name for name in parts if name not in self.parts]:
            raise ValueError(f"part must be one of {', '.join(self.parts)}, got {', '.join(unknown)}.")
        if not seeds:
            raise ValueError("seeds must hold at least one, got none.")
        if not 0 < scale <= 1:
            raise ValueError(f"scale must be above 0 and at most 1, got {scale}.")
        return [
            Study(part.name, name, settings)
            for part in self.parts.values()
            if part.name in parts
            for name, settings in part.plan(
                list(dict.fromkeys(seeds)), scale, part.data if data is None else data
            ).items()
        ]

    def read(self, out_dir: str | os.PathLike[str]) -> tuple[list[Study], dict[str, Any]]:
        """The studies and the options that a folder was started with.

        Raises:
            ValueError: the folder has no readable ``config.json``, or one that was edited, or of something else.
        """
        return run_folder.read_config(out_dir, self._studies)

    def _studies(self, runs: list[dict[str, Any]]) -> list[Study]:
        studies = [Study(**run) for run in runs]
        if unknown := [study.part for study in studies if study.part not in [*self.parts]]:
            raise ValueError(f"there is no part {unknown[0]!r}")
        if not studies or len({study.name for study in studies}) < len(studies):
            raise ValueError("a study is in it twice" if studies else "no study is in it")
        return studies

    def save_parts(self, out_dir: str | os.PathLike[str]) -> str:
        """Bring every part's ``.txt``, ``.csv`` and picture up to date with its finished studies.

        A picture that cannot be drawn is a ``RuntimeWarning`` and costs nothing else.

        Returns:
            The texts, one after the other.

        Raises:
            ValueError: the folder is damaged. OSError: it cannot be written; what was there is untouched.
        """
        out_dir = Path(out_dir)
        studies, _ = self.read(out_dir)
        drawn, texts = Drawn(), []
        for part in self.parts.values():
            planned = [s for s in studies if s.part == part.name]
            found = [(s, result) for s in planned if (result := read_result(out_dir / s.name, s)) is not None]
            if not found:
                continue
            rows = [row for study, result in found for row in part.rows(study, result)]
            text = part.text(rows)
            if len(found) < len(planned):
                text += f"\n{len(found)} of {len(planned)} networks are done."
            write_file(out_dir / f"{part.name}.txt", text + "\n")
            write_file(out_dir / f"{part.name}.csv", csv_of(rows))
            for name, draw in {part.name: part.draw, **part.pictures}.items():
                add_picture(drawn, out_dir / name, lambda draw=draw, found=found: draw(found))
            texts.append(text)
        for failure in drawn.failures:
            warnings.warn(failure, RuntimeWarning, stacklevel=2)
        return "\n\n\n".join(texts)

    def run(
        self,
        studies: Sequence[Study],
        out_dir: str | os.PathLike[str],
        *,
        options: dict[str, Any],
        device: str = "cpu",
        jobs: int = 1,
        progress: bool = True,
        data_dir: str | None = None,
        download: bool = False,
        on_begin: Callable[[int], None] = lambda done: None,
        on_result: Callable[[Study, float], None] = lambda study, seconds: None,
    ) -> None:
        """Do every study that is not done yet; after each, bring the tables and pictures up to date.

        A killed study goes on: networks from their last checkpoint, and what was measured of them is in a file.

        Args:
            studies: of different names.
            out_dir: the folder. One call at a time works in it.
            options: kept in ``config.json``, the experiment's name under ``table``.
            device: a name of torch's.
            jobs: studies at once, each in a process of its own with an equal share of torch's threads.
            progress: whether to show progress bars.
            data_dir, download: see :func:`ella_cuda.data.load`.
            on_begin: called with how many studies were done before.
            on_result: called with each study that is done, and the seconds that it took in this session.

        Raises:
            ValueError: the folder belongs to something else, or what is in it was edited.
            OSError: the folder cannot be written.
            RuntimeError: somebody else works in the folder.
        """
        out_dir = Path(out_dir)
        require_study_data(studies, data_dir, download)
        try:
            out_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                error.errno, f"the folder {out_dir} cannot be made ({error.strerror}); name another."
            ) from error
        threads = torch.get_num_threads() if jobs == 1 else max(1, torch.get_num_threads() // jobs)
        with claim(out_dir / LOCK_FILE, f"the folder {out_dir}"):
            config = out_dir / run_folder.CONFIG_FILE
            if not config.exists():
                run_folder.write_config(out_dir, [dataclasses.asdict(s) for s in studies], options)
            elif self.read(out_dir)[0] != list(studies):
                raise ValueError(f"{out_dir} belongs to other studies (see {config}); choose another folder.")
            for study in studies:
                require_inside(out_dir / study.name)
            remove_temporary_files(out_dir)
            waiting = [s for s in studies if read_result(out_dir / s.name, s) is None]
            note_environment(out_dir, device, jobs, threads)
            on_begin(len(studies) - len(waiting))
            calls = [
                (self.parts[s.part], s, Work(out_dir / s.name, device, progress and jobs == 1, data_dir, download, s))
                for s in waiting
            ]
            bar = tqdm(
                total=len(studies), initial=len(studies) - len(waiting), desc=counted(len(studies), "study"),
                unit="study", disable=not progress, **bar_size()
            )  # fmt: skip
            with bar:
                done = (
                    ((i, do_study(*call)) for i, call in enumerate(calls))
                    if jobs == 1
                    else run_at_once(_do_quietly, calls, min(jobs, len(calls)), threads, bar.refresh)
                    if calls
                    else ()
                )
                for i, seconds in done:
                    bar.update()
                    self.save_parts(out_dir)
                    with bar.external_write_mode():
                        on_result(waiting[i], seconds)
            self.save_parts(out_dir)


def experiment_of(out_dir: str | os.PathLike[str]) -> str | None:
    """What the options of a folder of runs or studies call its table; None where there is no such folder, or it is of none."""
    try:
        name = run_folder.read_config(out_dir)[1].get("table")
    except (OSError, ValueError):
        return None
    return name if isinstance(name, str) else None


def require_study_data(studies: Sequence[Study], data_dir: str | None = None, download: bool = False) -> None:
    """Raise what loading raises where a study's data are not there, before anything is written."""
    for name in dict.fromkeys(s.settings["data"] for s in studies if "data" in s.settings):
        load(name, data_dir, download)


@own_random_state()
def do_study(part: Part, study: Study, work: Work) -> float:
    """Do a study, or go on with it, and keep its result; returns the seconds that it took. The caller's random state is left as it was."""
    begin = time.monotonic()
    work.folder.mkdir(parents=True, exist_ok=True)
    with claim(work.folder / LOCK_FILE, f"the folder {work.folder}"):
        remove_temporary_files(work.folder)
        write_result(work.folder, study, part.run(study, work))
    return time.monotonic() - begin


def _do_quietly(part: Part, study: Study, work: Work) -> float:
    """A study in a worker, of whose data the command's own process has warned."""
    warnings.filterwarnings("ignore", message=NOT_AS_PUBLISHED)
    return do_study(part, study, work)
