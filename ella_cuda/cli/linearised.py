"""``ella-cuda reproduce linearised``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ella_cuda.cli.common import DONE, UsageError, named_device
from ella_cuda.cli.grid import PER_SESSION, flag, folder_for, go_on_with, jobs_of, require_same, say_written
from ella_cuda.experiments.linearised import (
    PARTS,
    TABLE,
    Study,
    is_study_folder,
    plan_studies,
    read_studies,
    require_study_data,
    run_studies,
    save_parts,
)
from ella_cuda.reports.text import counted, duration

DESCRIPTION = (
    f"{TABLE}: the evidence at the network's weights and at the linear model's mode (Antorán et al., ICML 2022), in parts, each with a table "
    "and a picture; of the options it has --part, --scale, --data, --seed and those of a session, and --scale is the share of "
    "widths and epochs, and of networks' images and parameters. Seeds are 0 1 2 unless said; --data is of the networks (both unless said). "
    + "; ".join(f"{part.name}: {part.title}" for part in PARTS.values())
    + "."
)
OPTIONS = ("table", "part", "scale", "data", "seed", "device", "out", "resume", *PER_SESSION)
OF_TRAINING = ("cuda_graph", "tensorboard")  # of a session, but of the paper's runs alone


def add_options(command: argparse.ArgumentParser) -> None:
    """Those of this experiment alone."""
    command.add_argument("--part", nargs="+", choices=PARTS, help=f"only these parts of {TABLE} (all)")


def asked(given: dict[str, Any]) -> bool:
    """Whether the options are of this experiment: by its name, or by the folder to go on with."""
    return given.get("table") == TABLE or (
        "resume" in given and "table" not in given and is_study_folder(given["resume"])
    )


def reproduce(args: argparse.Namespace, given: dict[str, Any]) -> int:
    """The command.

    Raises:
        UsageError: an option that the experiment does not have, or that does not fit.
    """
    if others := [name for name in given if name not in OPTIONS or name in OF_TRAINING]:
        raise UsageError(
            f"{', '.join(map(flag, others))}: of the paper's tables; `ella-cuda reproduce {TABLE}` has no such option."
        )
    studies, options = _resumed(Path(args.resume), given) if "resume" in given else _planned(given)
    device = options["device"]
    out_dir = folder_for(args, TABLE, lambda: require_study_data(studies, args.data_dir, bool(args.download)))
    jobs = jobs_of(args, device, len(studies))
    args.go_on = go_on_with("reproduce", args, out_dir)
    run_studies(
        studies,
        out_dir,
        options=options,
        device=device,
        jobs=jobs,
        progress=sys.stderr.isatty(),
        data_dir=args.data_dir,
        download=bool(args.download),
        on_begin=lambda done: print(
            f"{counted(len(studies), 'network')} on {device}, {jobs} at once, {done} done before; results in {out_dir}",
            flush=True,
        ),
        on_result=lambda study, seconds: print(f"{study.name}: done in {duration(seconds)}", flush=True),
    )
    print("\n" + save_parts(out_dir))
    say_written(out_dir)
    return DONE


def _planned(given: dict[str, Any]) -> tuple[list[Study], dict[str, Any]]:
    options = {
        "table": TABLE,
        "part": [name for name in PARTS if name in given.get("part", PARTS)],
        "scale": given.get("scale", 1.0),
        "seed": list(dict.fromkeys(given.get("seed", [0, 1, 2]))),
        "device": str(named_device(given.get("device", "auto"))),
    }
    if "data" in given:
        if not any(PARTS[name].data for name in options["part"]):
            raise UsageError(
                f"--data is of the part {' and '.join(part.name for part in PARTS.values() if part.data)}."
            )
        options["data"] = given["data"]
    try:
        return plan_studies(
            options["part"], options["seed"], options["scale"], [given["data"]] if "data" in given else None
        ), options
    except ValueError as error:
        raise UsageError(str(error)) from error


def _resumed(out_dir: Path, given: dict[str, Any]) -> tuple[list[Study], dict[str, Any]]:
    try:
        studies, options = read_studies(out_dir)
    except ValueError as error:
        raise UsageError(str(error)) from error
    require_same(out_dir, given, options)
    named_device(options["device"])
    return studies, options
