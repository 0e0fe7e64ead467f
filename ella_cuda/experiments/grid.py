"""Grids of runs in a folder."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import platform
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from ella_cuda import __version__, build_info, run_folder
from ella_cuda.claim import LOCK_FILE, claim
from ella_cuda.data.checksums import NOT_AS_PUBLISHED
from ella_cuda.distributed import Ranks
from ella_cuda.experiments.device import device_name
from ella_cuda.experiments.diary import diary_of
from ella_cuda.experiments.folder import read_grid, read_running
from ella_cuda.experiments.hyperparameters import DENSE_PATH, RunConfig
from ella_cuda.experiments.report import write_overview, write_report
from ella_cuda.experiments.run import require_data, run_one
from ella_cuda.experiments.spread import SPREADS, Spread
from ella_cuda.experiments.tensorboard import require_tensorboard
from ella_cuda.files import read_json, remove_temporary_files, require_inside, write_file
from ella_cuda.laplace.parameters import check_choice
from ella_cuda.progress import bar_size
from ella_cuda.reports import save_report
from ella_cuda.reports.text import counted
from ella_cuda.training.checkpoint import OTHER_THREADS
from ella_cuda.workers import run_at_once, threads_note


def run_grid(
    configs: Sequence[RunConfig],
    out_dir: str | os.PathLike[str],
    *,
    options: dict[str, Any] | None = None,
    jobs: int = 1,
    progress: bool = True,
    data_dir: str | None = None,
    download: bool = False,
    tensorboard: bool = False,
    cuda_graph: bool = False,
    on_begin: Callable[[int], None] | None = None,
    on_row: Callable[[dict[str, Any]], None] | None = None,
    group: Any = None,
    spread: str = "data",
) -> list[dict[str, Any]]:
    """Do every run that is not done yet; after each, bring the folder's summary, table and pictures up to date.

    Args:
        configs: the runs, of different names.
        out_dir: the folder: ``config.json`` (the runs), ``environment.json`` (versions and device, one entry for each
            session), ``summary.json``, ``summary.csv``, ``table.txt``, pictures, and a folder for each run with its
            checkpoint. If it holds the same grid already, that grid is resumed. One call at a time works in a folder; meanwhile
            ``.lock`` says which, as JSON (``pid``, ``host``, ``since``).
        options: kept in ``config.json``, for whoever built ``configs``.
        jobs: runs at once, each in a process of its own with an equal share of torch's threads.
        progress: whether to show progress bars.
        data_dir: see :func:`ella_cuda.data.load`.
        download: see :func:`ella_cuda.data.load`.
        tensorboard: whether every run writes event files for TensorBoard, see :func:`run_one`.
        cuda_graph: whether steps are recorded as CUDA graphs, see :func:`run_one`.
        on_begin: called once the data are there and the folder is this grid's, with how many runs were done before.
        on_row: called with each new row.
        group: a ``torch.distributed`` group, all of whose processes call this with the same arguments; rank 0 alone writes and calls
            ``on_begin`` and ``on_row``, and all get the rows. Other machines need the folder too, with "runs".
        spread: what the group shares out, the "data" of every run, or the "runs".

    Returns:
        The rows of all finished runs, in the order of ``configs``.

    Raises:
        ValueError: two runs of one name, or the folder belongs to another grid, or what is in it was edited. What :func:`run_one` raises.
        OSError: the folder cannot be written.
        RuntimeError: ``tensorboard`` without the package of that name; somebody else works in the folder.

    Warns:
        UserWarning: begun runs go on with another number of threads: their numbers are the same up to rounding.
    """
    ranks = None if group is None else Ranks(group, "run_grid")
    how = {"data_dir": data_dir, "download": download, "tensorboard": tensorboard, "cuda_graph": cuda_graph}
    grid = _Grid(configs, Path(out_dir), options or {}, jobs, progress, how, on_begin, on_row)
    if ranks is None:
        _check(configs, jobs, spread, False)
        return grid.run(None)
    ranks.together(lambda: _check(configs, jobs, spread, True))
    found = ranks.exchange({"spread": spread, "cuda_graph": cuda_graph, "configs": [repr(c) for c in configs]})
    ranks.require_same_facts(found, "Pass all ranks the same arguments.")
    return grid.run_together(Spread(ranks, spread))


def _check(configs: Sequence[RunConfig], jobs: int, spread: str, together: bool) -> None:
    names = [c.name for c in configs]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"configs must be at least one run, each of another name, got {names}.")
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}.")
    if together and jobs != 1:
        raise ValueError(f"jobs must be 1 with a group, whose processes share out the work, got {jobs}.")
    check_choice("spread", spread, SPREADS)


@dataclasses.dataclass
class _Grid:
    """Arguments of :func:`run_grid`; ``how`` is for :func:`run_one`."""

    configs: Sequence[RunConfig]
    out_dir: Path
    options: dict[str, Any]
    jobs: int
    progress: bool
    how: dict[str, Any]
    on_begin: Callable[[int], None] | None
    on_row: Callable[[dict[str, Any]], None] | None

    def run(self, spread: Spread | None) -> list[dict[str, Any]]:
        """Do the runs in this process, or as rank 0."""
        if self.how["tensorboard"]:
            require_tensorboard()
        self._require_data()  # before anything is written: the data may be missing
        try:
            self.out_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                error.errno, f"the folder {self.out_dir} cannot be made ({error.strerror}); name another."
            ) from error
        with claim(self.out_dir / LOCK_FILE, f"the folder {self.out_dir}"):
            self._begin()
            return self._do(spread)

    def run_together(self, spread: Spread) -> list[dict[str, Any]]:
        """Do the runs as one of several processes."""
        rows = None
        if spread.ranks.is_first:
            try:
                rows = self.run(spread)
                spread.end()
            except Exception as error:
                spread.give_up(error)
                raise
        else:
            how = {**self.how, "progress": False}
            spread.follow(run_one, self.configs, self.out_dir, how, self._require_data)
        return spread.ranks.exchange(rows)[0]

    def _require_data(self) -> None:
        require_data(self.configs[0], self.how["data_dir"], self.how["download"])

    def _begin(self) -> None:
        """Make the folder this grid's, or see that it is."""
        config_path = self.out_dir / run_folder.CONFIG_FILE
        if config_path.exists():
            if read_grid(self.out_dir)[0] != list(self.configs):
                raise ValueError(f"{self.out_dir} belongs to other runs (see {config_path}); choose another folder.")
        else:
            if (self.out_dir / run_folder.SUMMARY_FILE).exists():
                raise ValueError(
                    f"{self.out_dir} has a {run_folder.SUMMARY_FILE} but no {run_folder.CONFIG_FILE}: not a folder of ella_cuda; choose "
                    "another."
                )
            run_folder.write_config(self.out_dir, [dataclasses.asdict(c) for c in self.configs], self.options)
        names = [c.name for c in self.configs]
        for name in names:
            require_inside(self.out_dir / name)
        _tidy(self.out_dir, names)

    def _do(self, spread: Spread | None) -> list[dict[str, Any]]:
        """The runs that are not done."""
        out_dir, names = self.out_dir, [c.name for c in self.configs]
        threads = max(1, torch.get_num_threads() // self.jobs)
        done = {row["run"]: row for row in run_folder.read_summary(out_dir)}
        note_environment(out_dir, self.configs[0].device, self.jobs, threads)
        if self.on_begin is not None:
            self.on_begin(len(done))
        if done:  # a session killed after writing the summary left the pictures behind it
            save_report([done[n] for n in names if n in done], out_dir)
            _write_pages(
                out_dir, *(n for n in names if n in done and not (out_dir / n / run_folder.REPORT_FILE).exists())
            )
        waiting = [c for c in self.configs if c.name not in done]
        if self.jobs > 1:
            _warn_of_other_threads(out_dir, waiting, threads)  # workers cannot
        epochs, desc = sum(c.epochs for c in self.configs), counted(len(names), "run")
        bar = tqdm(total=epochs, desc=desc, unit="epoch", disable=not self.progress, **bar_size())

        def show() -> None:
            of_done = sum(c.epochs for c in self.configs if c.name in done)
            bar.n = of_done + sum(r["epoch"] for r in read_running(out_dir))
            bar.set_postfix({"done": len(done)})

        def finish(row: dict[str, Any]) -> None:
            done[row["run"]] = run_folder.sealed_row(row, out_dir)
            save_report([done[n] for n in names if n in done], out_dir)
            _write_pages(out_dir, row["run"])
            show()
            if self.on_row is not None:
                with bar.external_write_mode():  # what it prints has lines of its own
                    self.on_row(row)

        how, in_order = {**self.how, "progress": self.progress}, sorted(waiting, key=_is_dense)  # the longest last
        with bar:
            show()
            if spread is not None:
                rows = spread.rows(run_one, in_order, out_dir, how)
                with contextlib.closing(rows):
                    for row in rows:
                        try:
                            finish(row)
                        except Exception as error:
                            rows.throw(error)
            elif self.jobs == 1:
                for config in in_order:
                    finish(run_one(config, out_dir / config.name, **how))
            elif waiting:
                calls = [(config, out_dir / config.name, self.how) for config in _spread(waiting)]
                for _, row in run_at_once(_run_quietly, calls, min(self.jobs, len(calls)), threads, show):
                    finish(row)
        return [done[n] for n in names]


def _write_pages(out_dir: Path, *runs: str) -> None:
    """Write the reports of these runs and of the folder; one that fails is a warning, for the runs are done."""
    for folder, write in (*((out_dir / run, write_report) for run in runs), (out_dir, write_overview)):
        try:
            write(folder)
        except Exception as error:  # whatever went wrong: results do not depend on it
            warnings.warn(
                f"{folder / run_folder.REPORT_FILE} could not be written ({type(error).__name__}: {error}); the results are whole. Write it "
                f"by: ella-cuda report {shlex.quote(str(folder))}",
                RuntimeWarning,
                stacklevel=2,
            )


def _tidy(out_dir: Path, names: Sequence[str]) -> None:
    """Remove what killed sessions left of temporary files in the folder and in those of its runs; a run's at which somebody works stay."""
    remove_temporary_files(out_dir)
    for name in names:
        if (out_dir / name).is_dir():
            with contextlib.suppress(RuntimeError), claim(out_dir / name / LOCK_FILE, name, patience=0.0):
                remove_temporary_files(out_dir / name)


def _warn_of_other_threads(out_dir: Path, waiting: Sequence[RunConfig], threads: int) -> None:
    begun = [
        c
        for c in waiting
        if all((out_dir / c.name / f).exists() for f in (run_folder.CHECKPOINT_FILE, run_folder.DIARY_FILE))
    ]
    before = {c.name: diary_of(out_dir / c.name, c).get("threads") for c in begun}
    others = sorted({count for count in before.values() if count not in (None, threads)})
    if others:
        warnings.warn(
            f"{counted(sum(count in others for count in before.values()), 'run')} begun with {', '.join(map(str, others))} thread(s) go on "
            f"with {threads}: {OTHER_THREADS}. To repeat them, set OMP_NUM_THREADS and --jobs as at first (environment.json).",
            stacklevel=4,  # whoever called run_grid
        )


def _spread(configs: Sequence[RunConfig]) -> list[RunConfig]:
    """An order for several runs at once: those of dense layers, the longest by far, first and then at even distances among the others.

    Every step of theirs reads and writes all weights several times: two of them side by side slow each other down, so this is made
    rare; and one that is started last runs on alone.
    """
    dense = [c for c in configs if _is_dense(c)]
    dense.sort(key=lambda c: c.objective != "evidence")
    others = [c for c in configs if not _is_dense(c)]
    places = [(i * len(others) / len(dense), c) for i, c in enumerate(dense)]
    places += [(i + 0.5, c) for i, c in enumerate(others)]
    return [c for _, c in sorted(places, key=lambda place: place[0])]


def _is_dense(config: RunConfig) -> bool:
    return DENSE_PATH in config.layer.split("+")


def _run_quietly(config: RunConfig, run_dir: Path, how: dict[str, Any]) -> dict[str, Any]:
    """A run in a worker, of whose data and threads the grid's own process has warned."""
    warnings.filterwarnings("ignore", message=NOT_AS_PUBLISHED)
    warnings.filterwarnings("ignore", message=f".*{OTHER_THREADS}")
    return run_one(config, run_dir, progress=False, **how)


def note_environment(out_dir: Path, device: str, jobs: int, threads: int) -> None:
    """Add versions and device of this session to the folder's ``environment.json``."""
    path = out_dir / run_folder.ENVIRONMENT_FILE
    try:
        sessions = read_json(path, "")
    except (FileNotFoundError, ValueError):  # a damaged note is no reason to refuse a resume
        sessions = []
    if not isinstance(sessions, list):
        sessions = []
    sessions.append(
        {
            "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "ella_cuda": __version__,
            "build": {
                k: v if isinstance(v, str | int | float | bool | list) else str(v) for k, v in build_info().items()
            },
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "device": device,
            "device_name": device_name(torch.device(device)),
            "threads": torch.get_num_threads(),
            "jobs": jobs,
            "threads_per_run": threads,
            "threads_chosen": threads_note(),
            "command": sys.argv,
        }
    )
    write_file(path, json.dumps(sessions, indent=1))
