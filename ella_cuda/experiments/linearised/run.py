"""Doing the studies of a folder."""

from __future__ import annotations

import dataclasses
import os
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ella_cuda import run_folder
from ella_cuda.claim import LOCK_FILE, claim
from ella_cuda.data import load
from ella_cuda.data.checksums import NOT_AS_PUBLISHED
from ella_cuda.experiments.grid import note_environment
from ella_cuda.experiments.linearised.folder import read_studies, save_parts
from ella_cuda.experiments.linearised.parts import PARTS
from ella_cuda.experiments.linearised.study import Study, Work, read_result, write_result
from ella_cuda.experiments.run import own_random_state
from ella_cuda.files import remove_temporary_files
from ella_cuda.progress import bar_size
from ella_cuda.reports.text import counted
from ella_cuda.workers import run_at_once


def require_study_data(studies: Sequence[Study], data_dir: str | None = None, download: bool = False) -> None:
    """Raise what loading raises where a study's data are not there, before anything is written."""
    for name in dict.fromkeys(s.settings["data"] for s in studies if "data" in s.settings):
        load(name, data_dir, download)


def run_studies(
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
        out_dir: the folder: ``config.json``, ``environment.json``, each part's table and picture, and a folder for each study. One call at a
            time works in it.
        options: kept in ``config.json``.
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
        raise OSError(error.errno, f"the folder {out_dir} cannot be made ({error.strerror}); name another.") from error
    threads = torch.get_num_threads() if jobs == 1 else max(1, torch.get_num_threads() // jobs)
    with claim(out_dir / LOCK_FILE, f"the folder {out_dir}"):
        config = out_dir / run_folder.CONFIG_FILE
        if not config.exists():
            run_folder.write_config(out_dir, [dataclasses.asdict(s) for s in studies], options)
        elif read_studies(out_dir)[0] != list(studies):
            raise ValueError(f"{out_dir} belongs to other studies (see {config}); choose another folder.")
        remove_temporary_files(out_dir)
        waiting = [s for s in studies if read_result(out_dir / s.name) is None]
        note_environment(out_dir, device, jobs, threads)
        on_begin(len(studies) - len(waiting))
        calls = [(s, Work(out_dir / s.name, device, progress and jobs == 1, data_dir, download)) for s in waiting]
        bar = tqdm(
            total=len(studies), initial=len(studies) - len(waiting), desc=counted(len(studies), "study"), unit="study",
            disable=not progress, **bar_size()
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
                save_parts(out_dir)
                with bar.external_write_mode():
                    on_result(waiting[i], seconds)
        save_parts(out_dir)


@own_random_state()
def do_study(study: Study, work: Work) -> float:
    """Do a study, or go on with it, and keep its result; returns the seconds that it took. The caller's random state is left as it was."""
    begin = time.monotonic()
    work.folder.mkdir(parents=True, exist_ok=True)
    with claim(work.folder / LOCK_FILE, f"the folder {work.folder}"):
        remove_temporary_files(work.folder)
        write_result(work.folder, PARTS[study.part].run(study, work))
    return time.monotonic() - begin


def _do_quietly(study: Study, work: Work) -> float:
    """A study in a worker, of whose data the command's own process has warned."""
    warnings.filterwarnings("ignore", message=NOT_AS_PUBLISHED)
    return do_study(study, work)
