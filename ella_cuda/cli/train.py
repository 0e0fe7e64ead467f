"""``ella-cuda train``."""

from __future__ import annotations

import argparse
import datetime
import itertools
import shlex
import sys
from pathlib import Path
from typing import Any

from ella_cuda import experiments
from ella_cuda.cli.common import DONE, INTERRUPTED, UsageError
from ella_cuda.data import AUGMENTATIONS, SOURCES, TASKS
from ella_cuda.experiments import LEARN, OBJECTIVES, RECIPES, RunConfig, as_learn
from ella_cuda.groups import GROUPS
from ella_cuda.models import GROUP_PATH, INITS, PATHS, SPARSE_PATHS
from ella_cuda.nn.group_conv import VARIANTS
from ella_cuda.nn.group_layers import FRAMES
from ella_cuda.reports import layer_table, results_table
from ella_cuda.reports.results import learned
from ella_cuda.reports.text import OBJECTIVE_TITLES, network_title, number
from ella_cuda.workers import default_jobs, prepare_process

DEFAULT_LAYERS = ("fc", "conv", "f_fc+conv")
NOTHING = "none"  # of --learn
DENSE_PATH = "fc"  # its curvature costs more than all else together: by evidence only on request
# Options of `train` that are attributes of RunConfig: flag, type, help. None given means the recipe's.
NUMBERS: tuple[tuple[str, Any, str], ...] = (
    ("width", int, "network width, the multiple of all channel counts"),
    ("epochs", int, "passes over the training data"),
    ("batch_size", int, "images in a minibatch"),
    ("lr", float, "Adam's learning rate at the start"),
    ("fan_in_limit", int, "weights with more inputs than this learn at rates lower in proportion"),
    ("cooldown", float, "share of the steps, the last, in which lr falls linearly to 0 (without: a cosine over all)"),
    ("prior_prec_init", float, "prior precision: MAP's, and evidence's at the start"),
    ("lr_hyp", float, "Adam's learning rate on log prior precisions"),
    ("burn_in", int, "epochs before the first evidence step"),
    ("frequency", int, "epochs between evidence steps"),
    ("hypersteps", int, "steps on the prior precisions in each"),
    (
        "lr_shape",
        float,
        "Adam's learning rate on what --learn names, on log lengthscales and in pixels (that on precisions)",
    ),
    ("inverse_lengthscale", float, "of s_fc paths at the start, per pixel (1)"),
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
    ("augment", AUGMENTATIONS, "of the images that weights learn from; cifar10, cifar100: flips-shifts"),
    ("prior_structure", ("layerwise", "module", "scalar"), "which parameter tensors share a precision"),
)
# What may differ between the sessions of one grid.
PER_SESSION = ("data_dir", "download", "jobs", "resume", "verbose")


def add_train(commands: Any) -> None:
    """The command ``train``, among the parser's others."""
    train = commands.add_parser(
        "train",
        help="train networks and learn their layers' symmetries",
        description="Train networks by MAP and by the marginal likelihood, and print accuracy, NLL, -log q/N and every "
        "layer's learned type. Without options: the two quadrant tasks on scikit-learn's digits. Numbers not given are "
        "the data set's recipe's.",
    )
    tasks = "; ".join(f"{name}: {task.description}" for name, task in TASKS.items())
    train.add_argument("--data", choices=SOURCES, help="data set (digits)")
    train.add_argument("--task", nargs="+", choices=TASKS, help=f"{tasks} (the data set's recipe's)")
    train.add_argument(
        "--layer",
        nargs="+",
        metavar="LAYER",
        help=f"sums of {', '.join(PATHS)}, such as f_fc+conv ({' '.join(DEFAULT_LAYERS)})",
    )
    train.add_argument("--objective", nargs="+", choices=OBJECTIVES, help="map, evidence or both (both)")
    train.add_argument(
        "--all",
        action="store_true",
        default=None,
        help="evidence for layers with an fc path too, whose curvature is large",
    )
    train.add_argument(
        "--learn",
        nargs="+",
        type=as_learn,
        choices=[learn or NOTHING for learn in LEARN],
        help="what of sparsified layers (s_fc, s_conv) the evidence learns beside the precisions; of several words each is a run of its "
        "own (none)",
    )
    train.add_argument("--seed", nargs="+", type=int, help="one or several; tables show means (0)")
    for name, kind, text in NUMBERS:
        default = getattr(RECIPES["digits"], name, None)
        text = text if default is None else f"{text} (digits: {default:g})"
        train.add_argument(_flag(name), type=kind, metavar="N" if kind is int else "X", help=text)
    for name, words, text in WORDS:
        train.add_argument(
            _flag(name),
            choices=words,
            help=f"{text} (digits: {getattr(RECIPES['digits'], name, None) or getattr(RunConfig, name)})",
        )
    train.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="runs at once (CPU: one per thread, OMP_NUM_THREADS sets how many; GPU: 1)",
    )
    train.add_argument("--device", help="auto, cpu, cuda or cuda:<index> (auto: the GPU if there is one)")
    where = train.add_mutually_exclusive_group()
    where.add_argument("--out", metavar="DIR", help="folder for the results (runs/<data>-<date>-<n>)")
    where.add_argument("--resume", metavar="DIR", help="go on with the runs of this folder; its options hold")
    train.add_argument("--data-dir", metavar="DIR", help="folder with the data, laid out as torchvision does (data)")
    train.add_argument("--download", action="store_true", default=None, help="fetch missing data through torchvision")
    train.set_defaults(command=_train)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _train(args: argparse.Namespace) -> int:
    given = {k: v for k, v in vars(args).items() if v is not None and k not in ("command", "verbose")}
    if args.jobs is not None and args.jobs < 1:
        raise UsageError(f"--jobs must be at least 1, got {args.jobs}.")
    if "resume" in given:
        out_dir = Path(args.resume)
        configs, options = _resumed(out_dir, given)
    else:
        options = {k: v for k, v in given.items() if k not in ("out", *PER_SESSION)}
        configs, options = _grid(options)
        out_dir = _new_folder(args.out, options["data"])
    interactive = sys.stderr.isatty()
    device = configs[0].device
    jobs = args.jobs if args.jobs is not None else default_jobs(len(configs)) if device == "cpu" else 1
    if device == "cpu" and jobs == 1:
        prepare_process()  # the runs are done here; workers prepare themselves
    rows = experiments.read_summary(out_dir)
    print(
        f"{len(configs)} runs on {device}, {jobs} at once, {len(rows)} done before; results in {out_dir}",
        flush=True,
    )
    try:
        rows = experiments.run_grid(
            configs,
            out_dir,
            options=options,
            jobs=jobs,
            progress=interactive,
            data_dir=args.data_dir,
            download=bool(args.download),
            on_row=_print_row,
        )
    except KeyboardInterrupt:
        where = f" --data-dir {shlex.quote(args.data_dir)}" if args.data_dir else ""
        print(
            f"ella-cuda: interrupted; go on with: ella-cuda train --resume {shlex.quote(str(out_dir))}{where}",
            file=sys.stderr,
        )
        return INTERRUPTED
    print()
    print(results_table(rows))
    if learned(rows):
        print()
        print(layer_table(learned(rows)))
    print(f"\nWritten to {out_dir}: {', '.join(sorted(p.name for p in out_dir.iterdir() if p.is_file()))}")
    return DONE


def _grid(given: dict[str, Any]) -> tuple[list[RunConfig], dict[str, Any]]:
    """The runs that the options ask for, and the options completed by the defaults that chose them."""
    data = given.get("data", "digits")
    options = {
        **given,
        "data": data,
        "task": list(dict.fromkeys(given.get("task", RECIPES[data].tasks))),
        "layer": list(dict.fromkeys(given.get("layer", DEFAULT_LAYERS))),
        "objective": [o for o in OBJECTIVES if o in given.get("objective", OBJECTIVES)],
        "learn": list(dict.fromkeys(given.get("learn", [NOTHING]))),
        "seed": list(dict.fromkeys(given.get("seed", [0]))),
        "all": given.get("all", False),
    }
    dense_too = options["all"] or "objective" in given
    try:
        options["device"] = str(experiments.resolve_device(given.get("device", "auto")))
    except ValueError as error:
        raise UsageError(str(error)) from error
    changes = {name: given[name] for name, *_ in (*NUMBERS, *WORDS) if name in given}
    configs: list[RunConfig] = []
    try:
        for seed, task, objective, layer in itertools.product(
            *(options[k] for k in ("seed", "task", "objective", "layer"))
        ):
            paths = set(layer.split("+"))
            if objective == "evidence" and DENSE_PATH in paths and not dense_too:
                continue
            learns = objective == "evidence" and paths & SPARSE_PATHS  # others have nothing to learn: one run
            for learn in options["learn"] if learns else [NOTHING]:
                common = {"device": options["device"], "learn": "" if learn == NOTHING else learn}
                configs.append(experiments.configure(data, task, layer, objective, seed, **common, **changes))
    except ValueError as error:
        raise UsageError(str(error)) from error
    if set(options["learn"]) != {NOTHING} and not any(c.learn for c in configs):
        raise UsageError(
            f"--learn {_shown(options['learn'])} needs evidence runs of a layer with {' or '.join(sorted(SPARSE_PATHS))}."
        )
    if "lr_shape" in given and not any(c.learn for c in configs):
        raise UsageError("--lr-shape is the rate of what --learn names; name it.")
    if "inverse_lengthscale" in given and not any("s_fc" in c.layer.split("+") for c in configs):
        raise UsageError(
            "--inverse-lengthscale is that of s_fc paths, of which there are none; kernels of s_conv start at 1."
        )
    if {"group", "group_conv", "frames"} & given.keys() and not any(GROUP_PATH in c.layer.split("+") for c in configs):
        raise UsageError(
            f"--group, --group-conv and --frames are those of {GROUP_PATH} paths, of which there are none."
        )
    return configs, options


def _resumed(out_dir: Path, given: dict[str, Any]) -> tuple[list[RunConfig], dict[str, Any]]:
    try:
        configs, options = experiments.read_grid(out_dir)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if "device" in given:
        given = {**given, "device": str(experiments.resolve_device(given["device"]))}
    for name, value in given.items():
        if name not in PER_SESSION and options.get(name) != value:
            raise UsageError(
                f"{_flag(name)} {_shown(value)} does not fit --resume {out_dir}, which was started with "
                f"{_shown(options.get(name))}; leave the option out, or start anew with --out."
            )
    experiments.resolve_device(configs[0].device)
    return configs, options


def _shown(value: Any) -> str:
    if value is None:
        return "the recipe's"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _new_folder(out: str | None, data: str) -> Path:
    if out is None:
        today = datetime.date.today().isoformat()
        return next(p for n in itertools.count(1) if not (p := Path("runs") / f"{data}-{today}-{n}").exists())
    path = Path(out)
    if (path / experiments.CONFIG_FILE).exists():
        raise UsageError(
            f"--out {path} holds runs already; go on with them by --resume {path}, or name another folder."
        )
    if path.exists() and not path.is_dir():
        raise UsageError(f"--out {path} is a file; name a folder.")
    return path


def _print_row(row: dict[str, Any]) -> None:
    name = f"{row['task']}, {network_title(row)}, {OBJECTIVE_TITLES[row['objective']]}, seed {row['seed']}"
    print(
        f"{name}: accuracy {row['accuracy']:.2f} %, NLL {row['nll']:.3f}, "
        f"-log q/N {number(row['neg_log_marginal_likelihood'])}, {row['seconds']:.0f} s",
        flush=True,
    )
