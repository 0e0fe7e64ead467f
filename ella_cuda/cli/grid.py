"""Commands that do grids of runs: options, folders, resuming, and doing the runs."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import itertools
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ella_cuda import experiments
from ella_cuda.cli.common import UsageError, flag, grid_of, named_device
from ella_cuda.cli.config import NOT_IN_FILES, settings_text
from ella_cuda.data import SOURCES, TASKS
from ella_cuda.distributed import Ranks
from ella_cuda.experiments import DENSE_PATH, RunConfig
from ella_cuda.experiments.declaring import settings_of, titled_settings
from ella_cuda.experiments.hyperparameters import FOLDER, RECIPES, ROTATED, AmountsConfig, recipe_of
from ella_cuda.experiments.networks import runs_code
from ella_cuda.files import write_file
from ella_cuda.reports.text import OBJECTIVE_TITLES, columns, counted, layer_title, network_title, number
from ella_cuda.training.learners import WORDS
from ella_cuda.training.processes import OneProcess, Processes
from ella_cuda.workers import default_jobs, prepare_process

NOTHING = "none"  # the option's word for an empty value
MAX_JOBS = 4096  # runs at once
# What may differ between the sessions of one grid.
PER_SESSION = tuple(
    [
        "config",
        "cuda_graph",
        "data_dir",
        "download",
        "jobs",
        "resume",
        "spread",
        "tensorboard",
        "verbose",
        "write_config",
    ]
)

RUNS = Path("runs")  # the folder of results that --out does not name


class DataSets:
    """The values of ``--data``: names, and paths that are there."""

    def __iter__(self) -> Iterator[str]:
        return iter((*SOURCES, "a folder, .npz or .csv that is there"))

    def __contains__(self, value: object) -> bool:
        return value in SOURCES or (isinstance(value, str) and recipe_of(value) == FOLDER)


def add_attributes(command: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """The options that are settings of runs, but for those named, and below all options the recipes of their defaults."""
    known = {n: one for n, one in settings_of(RunConfig).items() if one.option and n not in without}
    recipes = RECIPES if "data" in known else tuple(SOURCES)
    titles = {name: title for title, names in titled_settings(RunConfig).items() for name in names}
    groups = {title: command.add_argument_group(title) for title in dict.fromkeys(titles[name] for name in known)}
    for name, one in known.items():
        values = dict.fromkeys(one.in_recipe(data) for data in recipes)
        default = "by --data" if len(values) > 1 else "-" if one.several else _cell(*values)
        choices = [choice or NOTHING for choice in one.choices]
        named = all(choice in one.help for choice in choices)
        groups[titles[name]].add_argument(
            flag(name),
            choices=DataSets() if name == "data" else choices or None,
            metavar={int: "N", float: "X", str: name.upper()}[one.kind],
            type=one.read or one.kind,
            nargs="+" if one.several or isinstance(next(iter(values)), tuple) else None,
            help=one.help + ("" if named else f": {', '.join(choices)}") + ("" if default == "-" else f" ({default})"),
        )
    command.formatter_class = _KeepTables
    command.epilog = "defaults by --data:\n" + _recipe_table(known, recipes)


class _KeepTables(argparse.HelpFormatter):
    """Help whose descriptions are wrapped, but for those of several lines."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


def _cell(value: Any) -> str:
    """A default in words; ``-`` is None."""
    if isinstance(value, tuple):
        return " ".join(map(_cell, value))
    return "-" if value is None else str(value) or NOTHING


def _recipe_table(names: Collection[str], of: Sequence[str]) -> str:
    """The settings of those names in which recipes differ, as options: a column for each recipe, headed by its data sets."""
    rows = [
        (name, layer, [_cell(one.in_recipe(data, layer)) for data in of])
        for name, one in settings_of(RunConfig).items()
        for layer in ("", *one.by_layer)
    ]
    recipes: dict[tuple[str, ...], list[str]] = {}
    for i, data in enumerate(of):
        recipes.setdefault(tuple(cells[i] for *_, cells in rows), []).append(data)
    lines = [["", *map(", ".join, recipes.values())]]
    for (name, layer, cells), *shown_cells in zip(rows, *recipes, strict=True):
        if name in names and len(set(cells)) > 1:
            lines.append([flag(name) + (f", {layer_title(layer)}" if layer else ""), *shown_cells])
    return columns(lines)


def add_session(command: argparse.ArgumentParser, all_too: str = "") -> None:
    """The options of dense evidence, and those that say where runs are done and their results go; ``all_too`` is what else
    the help of --all says."""
    command.add_argument(
        "--all",
        action="store_true",
        default=None,
        help=f"evidence for layers with an {DENSE_PATH} path too, whose curvature is large{all_too}",
    )
    command.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="runs at once (CPU: one per thread, OMP_NUM_THREADS sets how many; GPU: 1)",
    )
    command.add_argument("--device", help="auto, cpu, cuda or cuda:<index> (auto: the GPU if there is one)")
    command.add_argument(
        "--cuda-graph",
        action="store_true",
        default=None,
        help="record the steps on the weights as CUDA graphs, so that a GPU does not wait for Python between small kernels",
    )
    where = command.add_mutually_exclusive_group()
    where.add_argument("--out", metavar="DIR", help="folder for the results (runs/<name>-<date>-<n>)")
    where.add_argument("--resume", metavar="DIR", help="go on with the runs of this folder; its options hold")
    command.add_argument("--data-dir", metavar="DIR", help="folder with the data, laid out as torchvision does (data)")
    command.add_argument("--download", action="store_true", default=None, help="fetch missing data through torchvision")
    command.add_argument(
        "--tensorboard",
        action="store_true",
        default=None,
        help="write event files to each run's folder, for tensorboard --logdir DIR (needs the package tensorboard)",
    )


def add_spread(command: argparse.ArgumentParser) -> None:
    """The option of several processes."""
    command.add_argument(
        "--spread",
        choices=experiments.SPREADS,
        help="under torchrun: what its processes share out, the data of each run, or the runs",
    )


@contextlib.contextmanager
def processes(args: argparse.Namespace, device: str) -> Iterator[Processes]:
    """For the duration of the context, the processes that ``torchrun`` started, which ``--spread`` asks for, or this one.

    Raises:
        UsageError: one without the other, or with ``--jobs``.
    """
    started = "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if args.spread is None:
        if started:
            raise UsageError(
                f"this is one of {os.environ['WORLD_SIZE']} processes of torchrun, each of which would do all runs: say by --spread data or "
                "--spread runs what they share out."
            )
        yield OneProcess()
        return
    if "RANK" not in os.environ:
        raise UsageError(
            f"--spread {args.spread} needs processes that torchrun starts: torchrun --nproc-per-node 2 -m ella_cuda.cli train --spread "
            f"{args.spread} ..."
        )
    if args.jobs not in (None, 1):
        raise UsageError(
            f"--spread {args.spread} shares out the work of torchrun's processes; leave out --jobs {args.jobs}."
        )
    import torch.distributed as dist

    cuda = device.startswith("cuda")
    # A rank that waits while others do their runs waits for all of one.
    timeout = datetime.timedelta(days=7) if args.spread == "runs" else datetime.timedelta(hours=1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout)
    try:
        ranks = Ranks(dist.group.WORLD, "train")
        ranks.together(lambda: experiments.device_of_process(torch.device(device)))
        yield ranks
    finally:
        dist.destroy_process_group()
        gc.collect()  # approximations in cycles hold loaders that hold the group, whose threads end with it


@contextlib.contextmanager
def failure_noted(out_dir: Path, ranks: Processes) -> Iterator[None]:
    """Where several processes work, what one fails with goes to a file of its own in the folder: all raise, and only one says why."""
    try:
        yield
    except Exception:
        if ranks.group is not None:
            with contextlib.suppress(OSError):
                write_file(out_dir / f"failure-rank-{ranks.rank}.txt", traceback.format_exc())
        raise


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options that the command line names.

    Raises:
        UsageError: a number of jobs that no machine can do, or a folder without a name.
    """
    for name in ("out", "resume"):
        if getattr(args, name) == "":
            raise UsageError(f"--{name} must name a folder, got an empty string.")
    if args.jobs is not None and not 1 <= args.jobs <= MAX_JOBS:
        raise UsageError(f"--jobs must be at least 1 and at most {MAX_JOBS}, got {args.jobs}.")
    return {k: v for k, v in vars(args).items() if v is not None and k not in ("command", "verbose")}


def grid_options(given: dict[str, Any]) -> dict[str, Any]:
    """Those that belong to the grid, with its device and seeds resolved, for ``config.json``.

    Raises:
        UsageError: not the name of a device.
    """
    options = {k: v for k, v in given.items() if k not in ("out", *PER_SESSION)}
    options["device"] = str(named_device(given.get("device", "auto")))
    return options | {"seed": list(dict.fromkeys(given.get("seed", [0]))), "all": given.get("all", False)}


def attributes(options: dict[str, Any]) -> dict[str, Any]:
    """The attributes of runs among the options, in place of the recipe's."""
    return {
        name: "+".join(options[name]) if one.several else options[name]
        for name, one in settings_of(RunConfig).items()
        if name in options and not one.axis
    }


def wrong_attributes(error: ValueError, given: Collection[str]) -> UsageError:
    """What :class:`RunConfig` says is wrong with attributes, with the options that set those it names: which were given, and
    which have their defaults."""
    # Those of axes but the seed's are words of any error.
    options = (name for name, one in settings_of(RunConfig).items() if one.option and (not one.axis or name == "seed"))
    names = [name for name in options if re.search(rf"(?<![\w-]){name}(?![\w-])", str(error))]
    sides = (
        (what, [flag(name) for name in names if (name in given) is here])
        for what, here in (("given", True), ("by default", False))
    )
    words = "; ".join(f"{what}: {', '.join(flags)}" for what, flags in sides if flags)
    return UsageError(f"{error} ({words})" if names else str(error))


def check_effect(options: dict[str, Any], configs: Sequence[RunConfig]) -> None:
    """Raise UsageError for an option that none of the runs heeds."""
    for names, what in _idle(configs):
        if given := [flag(name) for name in names if name in options]:
            raise UsageError(f"{', '.join(given)}: of {what}.")
    if ROTATED in options.get("ood", []) and not any(ROTATED in c.ood.split("+") for c in configs):
        others = " or ".join(name for name, task in TASKS.items() if not task.positional)
        raise UsageError(f"--ood {ROTATED} needs a task whose labels do not say where things are: --task {others}.")


def _idle(configs: Sequence[RunConfig]) -> Iterator[tuple[Collection[str], str]]:
    """The settings that none of the runs heeds, with what they are of."""
    known, words = settings_of(RunConfig), {word for c in configs for word in c.learn.split("+")}
    paths: frozenset[str] = frozenset().union(*(c.paths for c in configs))
    needs = [
        *(
            (learner.run_settings, word in words, f"what is learned; no run learns {word} (--learn {word})")
            for word, learner in WORDS.items()
        ),
        (
            settings_of(AmountsConfig),
            "augmentation" in words,
            "a learned augmentation; no run learns one (--learn augmentation)",
        ),
        *(
            ([name for name, one in known.items() if one.path == path], path in paths, f"{path} paths; there are none")
            for path in dict.fromkeys(one.path for one in known.values() if one.path)
        ),
        (["ood_size"], any(c.ood for c in configs), "the data that --ood names; there are none"),
        (
            ["split", "unreadable"],
            any(recipe_of(c.data) == FOLDER for c in configs),
            "images of one's own; the data set has a split of its own",
        ),
        (["weights"], any(c.model for c in configs), "networks that --model names; there are none"),
    ]
    return ((names, what) for names, there, what in needs if not there)


def config_toml(options: dict[str, Any], configs: Sequence[RunConfig], given: dict[str, Any]) -> str:
    """All settings of a grid as TOML, with what ``given`` has of a session."""
    idle = {name for names, _ in _idle(configs) for name in names}
    session = {name: given[name] for name in PER_SESSION if name in given and name not in (*NOT_IN_FILES, "resume")}
    return settings_text({**options, **session}, configs, idle, NOTHING)


def resumed(command: str, out_dir: Path, given: dict[str, Any]) -> tuple[list[RunConfig], dict[str, Any]]:
    """The runs and the options of a folder that this command started, for it to go on.

    Raises:
        UsageError: not such a folder, or options that are not those it was started with.
    """
    configs, options = grid_of(out_dir)
    starter = "reproduce" if "table" in options else "train"
    if starter != command:
        raise UsageError(
            f"{out_dir} was started by `ella-cuda {starter}`; go on with: ella-cuda {starter} --resume {out_dir}"
        )
    require_same(out_dir, given, options)
    if named := sorted({c.model for c in configs if runs_code(c.model)} - {*given.get("model", ())}):
        raise UsageError(
            f"{out_dir} has networks whose code is run: name them by --model {shown(options.get('model'))}, if you trust "
            f"{' and '.join(named)}."
        )
    experiments.resolve_device(configs[0].device)
    return configs, options


def require_same(out_dir: Path, given: dict[str, Any], options: dict[str, Any]) -> None:
    """Raise UsageError for an option of a resumed folder's that is not the one it was started with."""
    if "device" in given:
        given = {**given, "device": str(named_device(given["device"]))}
    for name, value in given.items():
        if name not in PER_SESSION and options.get(name) != value:
            raise UsageError(
                f"{'table' if name == 'table' else flag(name)} {shown(value)} does not fit --resume {out_dir}, which was started with "
                f"{shown(options.get(name))}; leave it out, or start anew with --out."
            )


def go_on_with(command: str, args: argparse.Namespace, out_dir: Path) -> str:
    """What an interruption says of how to go on."""
    where = f" --data-dir {shlex.quote(args.data_dir)}" if args.data_dir else ""
    named = getattr(args, "model", None) or []
    where += f" --model {shlex.join(named)}" if any(map(runs_code, named)) else ""
    return f"go on with: ella-cuda {command} --resume {shlex.quote(str(out_dir))}{where}"


def jobs_of(args: argparse.Namespace, device: str, calls: int) -> int:
    """How many are done at once; where it is one on the CPU, this process is made ready for it, for workers prepare themselves."""
    jobs = args.jobs if args.jobs is not None else default_jobs(calls) if device == "cpu" else 1
    if device == "cpu" and jobs == 1:
        prepare_process()
    return jobs


def shown(value: Any) -> str:
    """An option's value in words."""
    if value is None:
        return "the recipe's"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def results_folder(args: argparse.Namespace, configs: Sequence[RunConfig], name: str) -> Path:
    """:func:`folder_for` of runs.

    Raises:
        UsageError: as there, and CUDA graphs on another device. FileNotFoundError: the data are missing; then no folder is made.
        OSError: it cannot be made.
    """
    device = configs[0].device
    if args.cuda_graph and not device.startswith("cuda"):
        raise UsageError(f"--cuda-graph needs a CUDA device, got {device}; leave it out, or name another --device.")

    def require() -> None:
        if args.tensorboard:
            experiments.require_tensorboard()
        experiments.require_data(configs[0], args.data_dir, bool(args.download))

    return folder_for(args, name, require)


def shared_folder(args: argparse.Namespace, configs: Sequence[RunConfig], name: str, ranks: Processes) -> Path:
    """:func:`results_folder`, which rank 0 chooses where there are several."""
    found = ranks.together(lambda: str(results_folder(args, configs, name)) if ranks.is_first else None)
    return Path(ranks.exchange(found)[0])


def require_new(args: argparse.Namespace, images: str | None = None) -> None:
    """UsageError where --out holds runs already or is a file, or results would be in a folder of ``images``, whose pictures the next
    training would take for theirs."""
    path = RUNS if args.out is None else Path(args.out)
    if args.out is not None and (path / experiments.CONFIG_FILE).exists():
        raise UsageError(
            f"--out {path} holds runs already; go on with them by --resume {path}, or name another folder."
        )
    if args.out is not None and path.exists() and not path.is_dir():
        raise UsageError(f"--out {path} is a file; name a folder.")
    if images is not None and path.resolve().is_relative_to(Path(images).resolve()):
        raise UsageError(f"results in {path} would be among the images of {images}; name a folder elsewhere by --out.")


def folder_for(args: argparse.Namespace, name: str, require: Callable[[], None]) -> Path:
    """The folder that the options name, or the next free one of today of that name, which is made here: no other process takes it too.

    Args:
        args: of the command.
        name: of the folder.
        require: called before a folder is made; raises where what the command needs is missing.

    Raises:
        UsageError: --out holds runs already, or is a file. OSError: it cannot be made. What ``require`` raises.
    """
    if args.resume is not None:
        return Path(args.resume)
    require_new(args)
    if args.out is not None:
        return Path(args.out)
    require()
    stem = RUNS / f"{name}-{datetime.date.today().isoformat()}"
    try:
        stem.parent.mkdir(exist_ok=True)
        for n in itertools.count(1):
            path = stem.with_name(f"{stem.name}-{n}")
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                return path
    except OSError as error:
        raise OSError(
            error.errno, f"a folder in {stem.parent} cannot be made ({error.strerror}); name another by --out."
        ) from error


def do_runs(
    command: str,
    args: argparse.Namespace,
    configs: Sequence[RunConfig],
    options: dict[str, Any],
    out_dir: Path,
    on_row: Callable[[], object] = lambda: None,
    ranks: Processes | None = None,
    on_begin: Callable[[], object] = lambda: None,
) -> list[dict[str, Any]]:
    """Do the runs that are not done yet, and print a line for each.

    Args:
        args: of the command; ``go_on`` becomes what an interruption says of how to go on.
        on_row: called after each, when the folder's summary has it.
        ranks: the processes that share out the work; rank 0 prints.
        on_begin: called once the folder is this grid's.

    Returns:
        All rows.
    """
    interactive = sys.stderr.isatty()
    device = configs[0].device
    group = None if ranks is None else ranks.group
    if group is not None:
        args.jobs = 1
    jobs = jobs_of(args, device, len(configs))
    at_once = f"{jobs} at once" if group is None else f"by {ranks.size} processes that share out {args.spread}"

    def begin(before: int) -> None:
        print(
            f"{counted(len(configs), 'run')} on {device}, {at_once}, {before} done before; results in {out_dir}",
            flush=True,
        )
        on_begin()

    def finish(row: dict[str, Any]) -> None:
        _print_row(row)
        on_row()

    args.go_on = go_on_with(command, args, out_dir)
    return experiments.run_grid(
        configs,
        out_dir,
        options=options,
        jobs=jobs,
        progress=interactive,
        data_dir=args.data_dir,
        download=bool(args.download),
        tensorboard=bool(args.tensorboard),
        cuda_graph=bool(args.cuda_graph),
        on_begin=begin,
        on_row=finish,
        group=group,
        spread="data" if group is None else args.spread,
    )


def say_written(out_dir: Path) -> None:
    """Print which files the folder holds."""
    print(f"\nWritten to {out_dir}: {', '.join(sorted(p.name for p in out_dir.iterdir() if p.is_file()))}")


def _print_row(row: dict[str, Any]) -> None:
    name = (
        f"{row['data']}, {row['task']}, {network_title(row)}, {OBJECTIVE_TITLES[row['objective']]}, seed {row['seed']}"
    )
    print(
        f"{name}: accuracy {row['accuracy']:.2f} %, NLL {row['nll']:.3f}, "
        f"-log q/N {number(row['neg_log_marginal_likelihood'])}, NLL of the predictive {number(row.get('nll_predictive'))}, "
        f"{row['seconds']:.0f} s",
        flush=True,
    )
