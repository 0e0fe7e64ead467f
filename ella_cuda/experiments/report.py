"""``report.html``: a trained run as one page for the browser."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

from ella_cuda.experiments.declaring import settings_of, titled_settings
from ella_cuda.experiments.folder import read_grid
from ella_cuda.experiments.hyperparameters import RunConfig, configure
from ella_cuda.files import write_file
from ella_cuda.reports.html import overview_page, run_page
from ella_cuda.run_folder import REPORT_FILE, read_diary, read_examples, read_history, read_summary


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Write ``report.html`` to the folder of a finished run: one file that needs no other and no network. Its pictures are those in the
    folder, see :func:`ella_cuda.reports.save_pictures`.

    Returns:
        The file.

    Raises:
        ValueError: the folder is not that of a finished run of a grid, or a file in it is damaged. OSError: it cannot be written.
    """
    run_dir = Path(run_dir).resolve()
    row = next((row for row in read_summary(run_dir.parent) if row["run"] == run_dir.name), None)
    if row is None:
        raise ValueError(f"{run_dir} is not the folder of a finished run: {run_dir.parent} has no summary of it.")
    config = RunConfig(**read_diary(run_dir)["config"])
    known = settings_of(RunConfig)
    settings = {
        title: [(name, getattr(config, name), known[name].help) for name in names]
        for title, names in titled_settings(RunConfig).items()
    }
    page = run_page(row, read_history(run_dir), read_examples(run_dir), run_dir, settings, command_of(config))
    write_file(run_dir / REPORT_FILE, page)
    return run_dir / REPORT_FILE


def write_overview(out_dir: str | os.PathLike[str]) -> Path:
    """Write ``report.html`` to a folder of runs: a table of those that are finished, with links to their reports.

    Returns:
        The file.

    Raises:
        ValueError: the folder is not one of runs, or a file in it is damaged. OSError: it cannot be written.
    """
    out_dir = Path(out_dir)
    configs, _ = read_grid(out_dir)
    page = overview_page(read_summary(out_dir), len(configs), out_dir)
    write_file(out_dir / REPORT_FILE, page)
    return out_dir / REPORT_FILE


def command_of(config: RunConfig) -> str:
    """The command that does the run again, on the run's device; empty where a setting is None and its recipe's is not, for which there is no
    option."""
    usual = configure(config.data, config.task, config.layer, config.objective, config.seed, **_network(config))
    words = ["ella-cuda", "train"]
    for name, one in settings_of(RunConfig).items():
        value: Any = getattr(config, name)
        if (
            not (one.option or name == "device")
            or (one.axis and value == "")
            or (not one.axis and value == getattr(usual, name))
        ):
            continue
        if value is None:
            return ""
        words += [f"--{name.replace('_', '-')}", *(value.split("+") if one.several else [str(value)])]
    return shlex.join(words)


def _network(config: RunConfig) -> dict[str, Any]:
    """The axes beside those that :func:`configure` names."""
    named = ("data", "task", "layer", "objective", "seed")
    return {
        name: getattr(config, name) for name, one in settings_of(RunConfig).items() if one.axis and name not in named
    }
