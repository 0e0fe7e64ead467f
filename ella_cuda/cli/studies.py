"""``ella-cuda reproduce`` of experiments in parts."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ella_cuda.cli.common import DONE, EXPERIMENTS, UsageError, named_device
from ella_cuda.cli.grid import PER_SESSION, flag, folder_for, go_on_with, jobs_of, require_same, say_written
from ella_cuda.papers.studies import Experiment, Study, experiment_of, require_study_data
from ella_cuda.reports.text import counted, duration

OPTIONS = ("table", "part", "scale", "data", "seed", "device", "out", "resume", *PER_SESSION)
OF_TRAINING = ("cuda_graph", "tensorboard")  # of a session, but of the paper's runs alone


def description() -> str:
    """Of all experiments, for the command's help."""
    return " ".join(map(_description, EXPERIMENTS.values()))


def _description(experiment: Experiment) -> str:
    data = [part.name for part in experiment.parts.values() if part.data]
    usual = dict.fromkeys(name for part in experiment.parts.values() for name in part.data)
    return (
        f"{experiment.name}: {experiment.title}, in parts, each with a table and a picture; of the options it has --part, --scale, --data, "
        f"--seed and those of a session, and --scale is the share of {experiment.scales} ({experiment.scale:g} unless said). Seeds are 0 1 2 "
        f"unless said; --data is of the {' and '.join(data)} ({' and '.join(usual)} unless said). "
        + "; ".join(f"{part.name}: {part.title}" for part in experiment.parts.values())
        + "."
    )


def add_options(command: argparse.ArgumentParser) -> None:
    """Those of the experiments alone."""
    parts = "; ".join(f"{name}: {' '.join(experiment.parts)}" for name, experiment in EXPERIMENTS.items())
    choices = dict.fromkeys(part for experiment in EXPERIMENTS.values() for part in experiment.parts)
    command.add_argument("--part", nargs="+", choices=choices, metavar="PART", help=f"only these parts (all). {parts}")


def asked(given: dict[str, Any]) -> Experiment | None:
    """The experiment that the options are of: by its name, or by the folder to go on with."""
    name = given.get("table")
    if name is None and "resume" in given:
        name = experiment_of(given["resume"])
    return EXPERIMENTS.get(name)


def reproduce(experiment: Experiment, args: argparse.Namespace, given: dict[str, Any]) -> int:
    """The command.

    Raises:
        UsageError: an option that the experiment does not have, or that does not fit.
    """
    name = experiment.name
    if others := [option for option in given if option not in OPTIONS or option in OF_TRAINING]:
        raise UsageError(
            f"{', '.join(map(flag, others))}: of the paper's tables; `ella-cuda reproduce {name}` has no such option."
        )
    if "resume" in given:
        studies, options = _resumed(experiment, Path(args.resume), given)
    else:
        studies, options = _planned(experiment, given)
    device = options["device"]
    out_dir = folder_for(args, name, lambda: require_study_data(studies, args.data_dir, bool(args.download)))
    jobs = jobs_of(args, device, len(studies))
    args.go_on = go_on_with("reproduce", args, out_dir)
    experiment.run(
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
    print("\n" + experiment.save_parts(out_dir))
    say_written(out_dir)
    return DONE


def _planned(experiment: Experiment, given: dict[str, Any]) -> tuple[list[Study], dict[str, Any]]:
    parts = experiment.parts
    options = {
        "table": experiment.name,
        "part": [name for name in parts if name in given.get("part", parts)],
        "scale": given.get("scale", experiment.scale),
        "seed": list(dict.fromkeys(given.get("seed", [0, 1, 2]))),
        "device": str(named_device(given.get("device", "auto"))),
    }
    if others := [name for name in given.get("part", ()) if name not in parts]:
        raise UsageError(f"--part must be some of {', '.join(parts)} for {experiment.name}, got {' '.join(others)}.")
    if "data" in given:
        if not any(parts[name].data for name in options["part"]):
            of = [part.name for part in parts.values() if part.data]
            raise UsageError(f"--data is of the part{'s' if len(of) > 1 else ''} {' and '.join(of)}.")
        options["data"] = given["data"]
    try:
        return experiment.plan(
            options["part"], options["seed"], options["scale"], [given["data"]] if "data" in given else None
        ), options
    except ValueError as error:
        raise UsageError(str(error)) from error


def _resumed(experiment: Experiment, out_dir: Path, given: dict[str, Any]) -> tuple[list[Study], dict[str, Any]]:
    try:
        studies, options = experiment.read(out_dir)
    except ValueError as error:
        raise UsageError(str(error)) from error
    require_same(out_dir, given, options)
    named_device(str(options.get("device")))
    return studies, options
