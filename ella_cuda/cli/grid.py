"""What the commands that do grids of runs share: options, folders, resuming, and doing the runs."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import itertools
import re
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from ella_cuda import experiments
from ella_cuda.cli.common import UsageError, grid_of, named_device
from ella_cuda.data import AUGMENTATIONS
from ella_cuda.experiments import DENSE_PATH, RECIPES, RESTARTS, Recipe, RunConfig
from ella_cuda.groups import GROUPS
from ella_cuda.models import GROUP_PATH, INITS
from ella_cuda.nn.group_conv import VARIANTS
from ella_cuda.nn.group_layers import FRAMES
from ella_cuda.reports.text import OBJECTIVE_TITLES, columns, counted, network_title, number
from ella_cuda.workers import default_jobs, prepare_process

# Options that are attributes of RunConfig: flag, type, help. None given means the recipe's.
NUMBERS: tuple[tuple[str, Any, str], ...] = (
    ("width", int, "network width, the multiple of all channel counts"),
    ("epochs", int, "passes over the training data"),
    ("batch_size", int, "images in a minibatch"),
    ("lr", float, "Adam's learning rate at the start"),
    ("fan_in_limit", int, "weights with more inputs than this learn at rates lower in proportion (- below: no limit)"),
    (
        "cooldown",
        float,
        "share of the steps, or of each cycle, the last, in which lr falls linearly (- below: a cosine over all)",
    ),
    ("prior_prec_init", float, "prior precision: MAP's, and evidence's at the start"),
    ("lr_hyp", float, "Adam's learning rate on log prior precisions"),
    ("burn_in", int, "epochs before the first evidence step"),
    ("frequency", int, "epochs between evidence steps"),
    ("hypersteps", int, "steps on the prior precisions in each"),
    ("lr_lengthscales", float, "Adam's learning rate on the logarithms of lengthscales that --learn names"),
    ("lr_anchors", float, "Adam's learning rate on anchors that --learn names, in pixels"),
    ("inverse_lengthscale", float, "of s_fc paths at the start, per pixel"),
    ("column_tolerance", float, "share of the output Hessian's trace that curvature may leave out"),
    ("train_size", int, "use only so many training images, classes in proportion"),
    ("holdout", float, "keep this fraction of the training images to evaluate on, instead of the test images"),
    ("data_seed", int, "of what the task draws for each image, the subsample and the hold-out split"),
)
WORDS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("init", INITS, "initial weights: as published, or with only the equivariant paths on"),
    ("fisher", ("exact", "mc"), "curvature: exact GGN or one sampled column"),
    ("resolution", ("shared", "per_channel"), "output factors of F-FC"),
    ("basis", ("interpolating", "exponential"), "of sparsified layers"),
    ("group", tuple(GROUPS), "of gconv paths: rotations by 90 degrees, or with mirror images"),
    ("group_conv", VARIANTS, "how filters of gconv paths are factored"),
    (
        "frames",
        FRAMES,
        "how gconv paths mix the slices of the group: as they are, as published, or turned back to one frame",
    ),
    (
        "restarts",
        RESTARTS,
        "with a cooldown: lr falls at the end only, or also before every evidence step but the first, and starts anew; of MAP too",
    ),
    ("augment", AUGMENTATIONS, "of the images that weights learn from; none where labels say where things are"),
    ("prior_structure", ("layerwise", "module", "scalar"), "which parameter tensors share a precision"),
)
MOST_JOBS = 4096  # runs at once
# What may differ between the sessions of one grid.
PER_SESSION = ("cuda_graph", "data_dir", "download", "jobs", "resume", "tensorboard", "verbose")


def flag(name: str) -> str:
    """The option of that attribute."""
    return "--" + name.replace("_", "-")


def add_attributes(command: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """The options that are attributes of runs, but for those named, and below all options the recipes of their defaults."""
    varying = [name for name, values in _recipe_values().items() if len(set(values)) > 1]

    def default(name: str) -> str:
        if name in varying:
            return " (by --data)"
        value = getattr(next(iter(RECIPES.values())), name, getattr(RunConfig, name, None))
        return "" if value is None else f" ({value})"

    for name, kind, text in NUMBERS:
        if name not in without:
            command.add_argument(flag(name), type=kind, metavar="N" if kind is int else "X", help=text + default(name))
    for name, words, text in WORDS:
        if name not in without:
            command.add_argument(flag(name), choices=words, help=text + default(name))
    command.formatter_class = _KeepTables
    command.epilog = "defaults by --data:\n" + recipe_table([name for name in varying if name not in without])


class _KeepTables(argparse.HelpFormatter):
    """Help whose descriptions are wrapped, but for those of several lines."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


def _recipe_values() -> dict[str, list[Any]]:
    """Of every attribute of a recipe, what the data sets' recipes say."""
    return {field.name: [getattr(r, field.name) for r in RECIPES.values()] for field in dataclasses.fields(Recipe)}


def recipe_table(names: Sequence[str]) -> str:
    """Those attributes of the recipes as options: a column for each, headed by its data sets; ``-`` is None."""
    titles = {
        "tasks": "--task",
        "fc_fan_in_limit": "--fan-in-limit, FC",
        "prior_prec_init": "--prior-prec-init",
        "map_prior_prec": "--prior-prec-init, MAP",
    }
    recipes: dict[Recipe, list[str]] = {}
    for data, recipe in RECIPES.items():
        recipes.setdefault(recipe, []).append(data)
    lines = [["", *(", ".join(sets) for sets in recipes.values())]]
    for name in names:
        values = (getattr(recipe, name) for recipe in recipes)
        cells = ("-" if v is None else " ".join(v) if isinstance(v, tuple) else f"{v}" for v in values)
        lines.append([titles.get(name, flag(name)), *cells])
    return columns(lines)


def add_session(command: argparse.ArgumentParser, all_too: str = "") -> None:
    """The options of seeds and dense evidence, and those that say where runs are done and their results go; ``all_too`` is what else
    the help of --all says."""
    command.add_argument("--seed", nargs="+", type=int, help="one or several; tables show means (0)")
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


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options that the command line names.

    Raises:
        UsageError: a number of jobs that no machine can do, or a folder without a name.
    """
    for name in ("out", "resume"):
        if getattr(args, name) == "":
            raise UsageError(f"--{name} must name a folder, got an empty string.")
    if args.jobs is not None and not 1 <= args.jobs <= MOST_JOBS:
        raise UsageError(f"--jobs must be at least 1 and at most {MOST_JOBS}, got {args.jobs}.")
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
    return {name: options[name] for name, *_ in (*NUMBERS, *WORDS) if name in options}


def wrong_attributes(error: ValueError, given: Collection[str]) -> UsageError:
    """What :class:`RunConfig` says is wrong with attributes, with the options that set those it names: which were given, and
    which have their defaults."""
    options = (*(name for name, *_ in (*NUMBERS, *WORDS)), "seed")
    names = [name for name in options if re.search(rf"(?<![\w-]){name}(?![\w-])", str(error))]
    sides = (
        (what, [flag(name) for name in names if (name in given) is here])
        for what, here in (("given", True), ("by default", False))
    )
    words = "; ".join(f"{what}: {', '.join(flags)}" for what, flags in sides if flags)
    return UsageError(f"{error} ({words})" if names else str(error))


def check_effect(options: dict[str, Any], configs: Sequence[RunConfig]) -> None:
    """Raise UsageError for an option that none of the runs heeds."""
    for kind in ("lengthscales", "anchors"):
        if f"lr_{kind}" in options and not any(kind in c.learn for c in configs):
            raise UsageError(f"--lr-{kind} is a rate of what is learned; no run learns {kind} (--learn {kind}).")
    if "inverse_lengthscale" in options and not any("s_fc" in c.layer.split("+") for c in configs):
        raise UsageError(
            "--inverse-lengthscale is that of s_fc paths, of which there are none; kernels of s_conv start at 1."
        )
    if {"group", "group_conv", "frames"} & options.keys() and not any(c.over_group for c in configs):
        raise UsageError(
            f"--group, --group-conv and --frames are those of {GROUP_PATH} paths, of which there are none."
        )


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
    if "device" in given:
        given = {**given, "device": str(named_device(given["device"]))}
    for name, value in given.items():
        if name not in PER_SESSION and options.get(name) != value:
            raise UsageError(
                f"{'table' if name == 'table' else flag(name)} {shown(value)} does not fit --resume {out_dir}, which was started with "
                f"{shown(options.get(name))}; leave it out, or start anew with --out."
            )
    experiments.resolve_device(configs[0].device)
    return configs, options


def shown(value: Any) -> str:
    """An option's value in words."""
    if value is None:
        return "the recipe's"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def results_folder(args: argparse.Namespace, configs: Sequence[RunConfig], name: str) -> Path:
    """The folder that the options name, or the next free one of today of that name, which is made here: no other process takes it too.

    Raises:
        UsageError: --out holds runs already, or is a file; CUDA graphs on another device.
        FileNotFoundError: the data are missing; then no folder is made. OSError: it cannot be made.
    """
    device = configs[0].device
    if args.cuda_graph and not device.startswith("cuda"):
        raise UsageError(f"--cuda-graph needs a CUDA device, got {device}; leave it out, or name another --device.")
    if args.resume is not None:
        return Path(args.resume)
    if args.out is not None:
        path = Path(args.out)
        if (path / experiments.CONFIG_FILE).exists():
            raise UsageError(
                f"--out {path} holds runs already; go on with them by --resume {path}, or name another folder."
            )
        if path.exists() and not path.is_dir():
            raise UsageError(f"--out {path} is a file; name a folder.")
        return path
    if args.tensorboard:
        experiments.require_tensorboard()
    experiments.prepare_for(configs[0], args.data_dir, bool(args.download))
    stem = Path("runs") / f"{name}-{datetime.date.today().isoformat()}"
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
) -> list[dict[str, Any]]:
    """Do the runs that are not done yet, and print a line for each.

    Args:
        args: of the command; ``go_on`` becomes what an interruption says of how to go on.
        on_row: called after each, when the folder's summary has it.

    Returns:
        All rows.
    """
    interactive = sys.stderr.isatty()
    device = configs[0].device
    jobs = args.jobs if args.jobs is not None else default_jobs(len(configs)) if device == "cpu" else 1
    if device == "cpu" and jobs == 1:
        prepare_process()  # the runs are done here; workers prepare themselves

    def begin(before: int) -> None:
        print(
            f"{counted(len(configs), 'run')} on {device}, {jobs} at once, {before} done before; results in {out_dir}",
            flush=True,
        )

    def finish(row: dict[str, Any]) -> None:
        _print_row(row)
        on_row()

    where = f" --data-dir {shlex.quote(args.data_dir)}" if args.data_dir else ""
    args.go_on = f"go on with: ella-cuda {command} --resume {shlex.quote(str(out_dir))}{where}"
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
        f"-log q/N {number(row['neg_log_marginal_likelihood'])}, {row['seconds']:.0f} s",
        flush=True,
    )
