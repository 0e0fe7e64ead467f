"""``ella-cuda reproduce``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ella_cuda.cli import studies
from ella_cuda.cli.common import DONE, EXPERIMENTS, UsageError
from ella_cuda.cli.grid import (
    add_attributes,
    add_session,
    attributes,
    check_effect,
    do_runs,
    given_options,
    grid_options,
    results_folder,
    resumed,
    say_written,
    wrong_attributes,
)
from ella_cuda.data import SOURCES, load
from ella_cuda.experiments import RunConfig
from ella_cuda.experiments.declaring import settings_of
from ella_cuda.experiments.hyperparameters import AmountsConfig, GridConfig, StartConfig
from ella_cuda.papers.equivariances import TABLES, plan_table, read_comparison, save_comparison
from ella_cuda.papers.equivariances.tables import WHOSE


def add_reproduce(commands: Any) -> None:
    """The command ``reproduce``, among the parser's others."""
    tables = "; ".join(f"{table.name}: {table.title}" for table in TABLES.values())
    reproduce = commands.add_parser(
        "reproduce",
        help="a table of a paper at any scale, beside the paper's numbers",
        description=f"Run a table of the paper (van der Ouderaa et al., NeurIPS 2023) and print our numbers beside its. {tables}. Numbers "
        f"not given are the data set's recipe's. {studies.description()}",
    )
    choices = (*TABLES, *EXPERIMENTS)
    reproduce.add_argument("table", nargs="?", choices=choices, metavar="TABLE", help=", ".join(choices))
    reproduce.add_argument(
        "--scale",
        type=float,
        metavar="S",
        help="share of the training images and of the recipe's epochs, above 0 and at most 1; burn-in and frequency follow the "
        "epochs, those of --epochs too (1)",
    )
    reproduce.add_argument(
        "--data",
        choices=SOURCES,
        help="the data set that stands in for the paper's (toy: digits; others: the paper's). In groups, digits and fashion-mnist stand in "
        "for mnist, cifar100 for cifar10",
    )
    reproduce.add_argument(
        "--recipe",
        choices=WHOSE,
        help="what numbers not given follow: the data set's recipe or the paper's, a share of 1,000 epochs (MNIST) or 4,000 (CIFAR-10) at "
        "the paper's width (data)",
    )
    rows = "; ".join(f"{name}: {' '.join(row.key for row in table.rows)}" for name, table in TABLES.items())
    reproduce.add_argument("--row", nargs="+", metavar="ROW", help=f"only these rows of the table (all). {rows}")
    studies.add_options(reproduce)
    add_attributes(
        reproduce,
        without=(
            *(name for part in (GridConfig, AmountsConfig, StartConfig) for name in settings_of(part)),
            *("train_size", "holdout", "image_size", "split", "group", "group_conv"),
        ),
    )
    widths = ", ".join(f"{table.name}: {table.width}" for table in TABLES.values() if table.width)
    reproduce.epilog += f"\nwidth whatever the data: {widths}"
    add_session(reproduce)
    reproduce.set_defaults(command=_reproduce)


def _reproduce(args: argparse.Namespace) -> int:
    given = given_options(args)
    if (experiment := studies.asked(given)) is not None:
        return studies.reproduce(experiment, args, given)
    if "part" in given:
        raise UsageError(f"--part is of {' and '.join(f'`ella-cuda reproduce {name}`' for name in EXPERIMENTS)}.")
    if "resume" in given:
        configs, options = resumed("reproduce", Path(args.resume), given)
        read_comparison(args.resume)  # before the runs
    else:
        configs, options = _table(given, args)
    out_dir = results_folder(args, configs, options["table"])
    do_runs("reproduce", args, configs, options, out_dir, on_row=lambda: save_comparison(out_dir))
    print("\n" + save_comparison(out_dir))
    say_written(out_dir)
    return DONE


def _table(given: dict[str, Any], args: argparse.Namespace) -> tuple[list[RunConfig], dict[str, Any]]:
    """The runs of the table, and the options completed by the plan that says what they answer."""
    if "table" not in given:
        raise UsageError(f"name a table ({', '.join((*TABLES, *EXPERIMENTS))}), or a folder to go on with by --resume.")
    options = grid_options(given) | {"scale": given.get("scale", 1.0)}

    def images_of(data: str) -> int:
        try:
            return len(load(data, args.data_dir, bool(args.download)).train_images)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{error} Or let another data set stand in for it with --data.") from error
        except ValueError as error:  # damaged files are no wrong usage
            raise RuntimeError(str(error)) from error

    try:
        configs, plan = plan_table(
            options["table"],
            images_of,
            data=given.get("data"),
            scale=options["scale"],
            rows=given.get("row"),
            seeds=options["seed"],
            dense=options["all"],
            whose=options.get("recipe", WHOSE[0]),
            **attributes(options),
        )
    except ValueError as error:
        raise wrong_attributes(error, given) from error
    check_effect(options, configs)
    return configs, options | {"plan": plan.to_json()}
