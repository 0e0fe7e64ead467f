"""``ella-cuda train``."""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ella_cuda.cli.common import DONE, UsageError
from ella_cuda.cli.config import CONFIG_TOML, add_config
from ella_cuda.cli.grid import (
    NOTHING,
    DataSets,
    add_attributes,
    add_session,
    add_spread,
    attributes,
    check_effect,
    config_toml,
    do_runs,
    failure_noted,
    given_options,
    grid_options,
    processes,
    require_new,
    resumed,
    say_written,
    shared_folder,
    shown,
    wrong_attributes,
)
from ella_cuda.experiments import DENSE_PATH, DENSE_REASON, OBJECTIVES, RunConfig, configure, recipe, require_data
from ella_cuda.experiments.declaring import settings_of
from ella_cuda.experiments.hyperparameters import FOLDER, ROTATED, as_data, can_learn, data_title, recipe_of
from ella_cuda.experiments.networks import require_named
from ella_cuda.files import write_file
from ella_cuda.reports import layer_table
from ella_cuda.reports.results import learned, run_tables
from ella_cuda.reports.text import error_bars_note, layer_title
from ella_cuda.run_folder import LAPLACE_FILE
from ella_cuda.training.learners import WORDS


def add_train(commands: Any) -> None:
    """The command ``train``, among the parser's others."""
    train = commands.add_parser(
        "train",
        help="train networks and learn their layers' symmetries",
        description="Train networks by MAP and by the marginal likelihood, and print accuracy, NLL, -log q/N and every "
        "layer's learned type. Without options: the two quadrant tasks on scikit-learn's digits. Numbers not given are "
        "the data set's recipe's. Images of one's own train torchvision's resnet18 on all that no test part needs; the evidence of these "
        "learns weight decay, a prior precision of every tensor.",
    )
    add_path(train)
    add_attributes(train)
    add_spread(train)
    add_session(train, f"; naming --objective is enough. Without --layer, the network of {DENSE_PATH} paths too")
    add_config(train)
    train.set_defaults(command=_train)


def add_path(command: argparse.ArgumentParser) -> None:
    """The options of images of one's own."""
    command.add_argument(
        "path", nargs="?", type=as_data, choices=DataSets(), metavar="PATH", help="short for --data PATH"
    )
    command.add_argument(
        "--skip-unreadable",
        dest="unreadable",
        action="store_const",
        const="skip",
        help="short for --unreadable skip",
    )


def asked(args: argparse.Namespace) -> dict[str, Any]:
    """The options that the command line names, PATH as --data.

    Raises:
        UsageError: both, and they differ. What :func:`given_options` raises.
    """
    given = given_options(args)
    if (path := given.pop("path", None)) is not None and given.setdefault("data", path) != path:
        raise UsageError(f"PATH {path} and --data {given['data']} name two data sets; leave one out.")
    return given


def _train(args: argparse.Namespace) -> int:
    given = asked(args)
    if "resume" in given:
        configs, options = resumed("train", Path(args.resume), given)
    else:
        configs, options = grid(given)
    settings = config_toml(options, configs, given)
    if args.write_config:
        write_file(args.write_config, settings)
        print(
            f"Settings written to {args.write_config}; train with them by: ella-cuda train --config {args.write_config}"
        )
        return DONE
    with processes(args, configs[0].device) as ranks:
        if ranks.is_first:
            say_data(args, configs)
        out_dir = shared_folder(args, configs, data_title(configs[0].data), ranks)
        with failure_noted(out_dir, ranks):
            keep = functools.partial(write_file, out_dir / CONFIG_TOML, settings)
            rows = do_runs("train", args, configs, options, out_dir, ranks=ranks, on_begin=keep)
    if ranks.is_first:
        _show(rows, configs, options, out_dir)
    return DONE


def say_data(args: argparse.Namespace, configs: Sequence[RunConfig]) -> None:
    """Print what is to be known of images of one's own before training, and raise what runs on them would raise, what takes no reading
    of them first."""
    try:
        for config in configs:
            require_named(config)
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(str(error)) from error
    data = configs[0].data
    if args.resume is None:
        require_new(args, data if recipe_of(data) == FOLDER and Path(data).is_dir() else None)
    found = None
    for config in {c.model: c for c in configs}.values():
        if recipe_of(config.data) == FOLDER:
            found = require_data(config, args.data_dir, bool(args.download))
    if found is not None:
        notes = [*found.notes]
        if any(config.model and config.learns_amounts for config in configs):
            notes.append(
                "BatchNorm of networks that learn an augmentation becomes GroupNorm: a batch's statistics would mix copies of images"
            )
        print(f"{configs[0].data}:\n" + "\n".join(f"  {note}" for note in notes), flush=True)


def _show(rows: list[dict[str, Any]], configs: Sequence[RunConfig], options: dict[str, Any], out_dir: Path) -> None:
    """Print the tables of a folder."""
    print("\n" + "\n\n".join(run_tables(rows)))
    if missing := _left_out(configs, options):
        print(f"\nnot run: {', '.join(map(layer_title, missing))} (evidence): {DENSE_REASON}.")
    for row in rows:
        if how := row.get("calibrated_by"):
            print(f"\nerror bars of {row['run']} by {how}: {row['calibrated_by_reason']}.")
        if reason := row.get("neg_log_marginal_likelihood_reason"):
            print(f"\nno -log q/N for {row['run']}: {reason}.")
        if (kept := out_dir / row["run"] / LAPLACE_FILE).exists():
            print(
                f"\n{row['run']}: {error_bars_note(row['error_bars'])} ({LAPLACE_FILE}, {kept.stat().st_size / 1e3:,.0f} kB)."
            )
    if any(ROTATED in options.get("ood", []) and ROTATED not in c.ood.split("+") for c in configs):
        tasks = dict.fromkeys(c.task for c in configs if ROTATED not in c.ood.split("+"))
        print(f"\nnot rotated: task {', '.join(tasks)}, whose labels say where things are.")
    if learned(rows):
        print("\n" + layer_table(learned(rows)))
    say_written(out_dir)


def _left_out(configs: Sequence[RunConfig], options: dict[str, Any]) -> list[str]:
    """The layers whose evidence the options name, and :func:`grid` leaves out."""
    run = {c.layer for c in configs if c.objective == "evidence"}
    asked = (
        options.get("layer", []) if "evidence" in options.get("objective", []) else []
    )  # none of a grid begun by run_grid
    return [layer for layer in asked if layer not in run]


def grid(given: dict[str, Any]) -> tuple[list[RunConfig], dict[str, Any]]:
    """The runs that the options ask for, and the options completed by the defaults that chose them."""
    data = given.get("data", settings_of(RunConfig)["data"].recipe)
    try:
        usual = recipe(data)
    except ValueError as error:
        raise wrong_attributes(error, given) from error
    if given.get("all") and usual["layer"] != ("",):
        usual["layer"] = (DENSE_PATH, *usual["layer"])
    for one, other in (("layer", "model"), ("model", "layer")):
        if one in given and other not in given:
            usual[other] = ("",)
    axes = {k: list(dict.fromkeys(given.get(k, usual[k]))) for k in ("task", "layer", "model", "learn")}
    axes |= {k: [name for name in axes[k] if name] for k in ("layer", "model")}
    networks = [*((layer, "") for layer in axes["layer"]), *(("", model) for model in axes["model"])]
    axes["learn"] = [learn or NOTHING for learn in axes["learn"]]
    axes["objective"] = [o for o in OBJECTIVES if o in given.get("objective", usual["objective"])]
    options = {**grid_options(given), "data": data, **axes}
    dense_too = options["all"] or "objective" in given
    configs: list[RunConfig] = []
    lacking = [word for word in options["learn"] if word != NOTHING]
    try:
        for seed, task, objective, (layer, model) in itertools.product(
            *(options[k] for k in ("seed", "task", "objective")), networks
        ):
            paths = set(layer.split("+"))
            if objective == "evidence" and DENSE_PATH in paths and not dense_too:
                continue
            for learn in _learned_by(options["learn"], objective, paths):
                word = "" if learn == NOTHING else learn
                lacking = [other for other in lacking if other != learn]
                own = {"learn": word, "model": model, **attributes(options)}
                if not model:
                    own.pop("weights", None)
                configs.append(configure(data, task, layer, objective, seed, **own))
    except ValueError as error:
        raise wrong_attributes(error, given) from error
    if lacking:
        needed = sorted(frozenset().union(*(WORDS[word].paths for words in lacking for word in words.split("+"))))
        of = f" of a layer with {' or '.join(needed)}" if needed else ""
        dense = f"; of layers with {DENSE_PATH} paths --all makes them" if not (of or dense_too) else ""
        raise UsageError(f"--learn {shown(lacking)} needs evidence runs{of}{dense}.")
    check_effect(options, configs)
    return configs, options


def _learned_by(words: Sequence[str], objective: str, paths: set[str]) -> list[str]:
    """What the runs of a network learn beside the precisions: one run, of nothing, where it has nothing of what is asked for."""
    here = [word for word in words if objective == "evidence" and (word == NOTHING or can_learn(word, paths))]
    return here or [NOTHING]
