"""Commands that ask a trained run: the run that a folder names, options that these have in common."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ella_cuda.cli.common import UsageError, grid_of, named_device
from ella_cuda.experiments import LoadedRun, load_run
from ella_cuda.run_folder import CHECKPOINT_FILE, CONFIG_FILE


def add_run(command: argparse.ArgumentParser, csv: str) -> None:
    """The options of a command that asks a run; ``csv`` is what the help of --csv says."""
    command.add_argument("--csv", metavar="OUT", help=csv)
    command.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<index> (auto)")
    command.add_argument(
        "--model", metavar="module:function", help="of a run of such a network, its name again: its code is run"
    )
    command.add_argument("--data-dir", metavar="DIR", help="folder with the data that a named data set was trained on")
    command.add_argument(
        "--skip-unreadable", action="store_true", help="leave out images that cannot be read, and name them"
    )


def asked_run(args: argparse.Namespace) -> LoadedRun:
    """The run that the command is of, ready to predict.

    Raises:
        UsageError: no folder of a run, or one of several; --csv is a folder or in none.
    """
    folder = run_folder(args.run)
    if args.csv is not None and (Path(args.csv).is_dir() or not Path(args.csv).absolute().parent.is_dir()):
        raise UsageError(f"--csv must be a file in a folder that is there, got {args.csv!r}.")
    device = str(named_device(args.device))
    return load_run(folder, device, fit=True, model=args.model, data_dir=args.data_dir)


def run_folder(name: str) -> Path:
    """A run's own folder: that one, or of a folder of runs the only one, or the only one by evidence.

    Raises:
        UsageError: no folder of a run, or of several.
    """
    folder = Path(name)
    if (folder / CHECKPOINT_FILE).exists() or not (folder / CONFIG_FILE).exists():
        return folder
    runs = [config for config in grid_of(folder)[0] if (folder / config.name / CHECKPOINT_FILE).exists()]
    for chosen in (runs, [config for config in runs if config.objective == "evidence"]):
        if len(chosen) == 1:
            return folder / chosen[0].name
    names = ", ".join(config.name for config in runs)
    raise UsageError(
        f"{folder} holds several runs; name the folder of one: {names}."
        if runs
        else f"{folder} has no run with a checkpoint yet."
    )


def interactive() -> bool:
    """Whether progress is shown."""
    return sys.stderr.isatty()
