"""Exit codes, wrong usage, devices and folders, for all commands."""

from __future__ import annotations

import os
from typing import Any

import torch

from ella_cuda import experiments
from ella_cuda.papers import filter_banks, invariances, linearised, tomography
from ella_cuda.papers.studies import experiment_of

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
EXPERIMENTS = {  # of `ella-cuda reproduce`
    one.name: one
    for one in (linearised.EXPERIMENT, invariances.EXPERIMENT, filter_banks.EXPERIMENT, tomography.EXPERIMENT)
}


class UsageError(Exception):
    """Options that do not fit together."""


def flag(name: str) -> str:
    """The option of that attribute."""
    return "--" + name.replace("_", "-")


def named_device(name: str) -> torch.device:
    """The device of that name.

    Raises:
        UsageError: not the name of a device. RuntimeError: it is not there.
    """
    try:
        return experiments.resolve_device(name)
    except ValueError as error:
        raise UsageError(str(error)) from error


def grid_of(folder: str | os.PathLike[str]) -> tuple[list[experiments.RunConfig], dict[str, Any]]:
    """The runs and the options of a folder.

    Raises:
        UsageError: not the folder of runs.
    """
    if (name := experiment_of(folder)) in EXPERIMENTS:
        raise UsageError(
            f"{folder} was started by `ella-cuda reproduce {name}` and holds no such runs; its tables are files in it. Go on with: "
            f"ella-cuda reproduce --resume {folder}"
        )
    try:
        return experiments.read_grid(folder)
    except ValueError as error:
        raise UsageError(str(error)) from error
