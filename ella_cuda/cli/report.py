"""``ella-cuda report``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ella_cuda import experiments
from ella_cuda.cli.common import DONE, UsageError, grid_of
from ella_cuda.reports import save_pictures
from ella_cuda.run_folder import DIARY_FILE


def add_report(commands: Any) -> None:
    """The command ``report``, among the parser's others."""
    report = commands.add_parser(
        "report",
        help="a finished run as one page for the browser",
        description="Write report.html to the folder of a finished run, or to each in a folder of runs: what was learned, training, "
        "calibration, confusion, images to look at, settings. Training has written it; this writes it again.",
    )
    report.add_argument("run", metavar="RUN", help="the folder of a run, or of runs")
    report.set_defaults(command=_report)


def _report(args: argparse.Namespace) -> int:
    run = Path(args.run)
    of_runs = not (run / DIARY_FILE).exists()
    folder = run if of_runs else run.resolve().parent
    grid_of(folder)  # wrong usage where it is none
    rows = [row for row in experiments.read_summary(folder) if of_runs or row["run"] == run.resolve().name]
    if not rows:
        raise UsageError(f"{run} has no finished run; see how far it is by: ella-cuda inspect {folder}")
    if of_runs:
        save_pictures(rows, folder, folder)
        pages = [experiments.write_report(folder / row["run"]) for row in rows]
        print(experiments.write_overview(folder))
    else:
        pages = [experiments.write_report(run)]
    print(*pages, sep="\n")
    return DONE
