"""``ella-cuda compare``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ella_cuda.cli.common import DONE, UsageError
from ella_cuda.cli.grid import add_attributes, add_session, do_runs, results_folder, resumed, say_written
from ella_cuda.cli.train import add_path, asked, grid, say_data
from ella_cuda.experiments.hyperparameters import data_title
from ella_cuda.experiments.predictions import write_table
from ella_cuda.reports.text import OBJECTIVE_TITLES, columns, doubt_of_order, network_title, number

FILE = "compare.csv"
NUMBERS = {  # of a row: title of the column
    "neg_log_marginal_likelihood": "-log q/N, nats",
    "nll_leave_one_out": "leave-one-out NLL, nats",
    "accuracy": "accuracy, %",
    "parameters": "parameters",
    "seconds": "seconds",
}


def add_compare(commands: Any) -> None:
    """The command ``compare``, among the parser's others."""
    compare = commands.add_parser(
        "compare",
        help="networks side by side, by evidence, leave-one-out and time, without a split",
        description="Train several networks on all images, as `train` does with --objective evidence --split 0, and list them by the "
        "evidence: best first. Options are those of `train`.",
    )
    add_path(compare)
    add_attributes(compare)
    add_session(compare)
    compare.set_defaults(command=_compare)


def _compare(args: argparse.Namespace) -> int:
    given = asked(args)
    args.spread = None
    if "resume" in given:
        configs, options = resumed("train", Path(args.resume), given)
    else:
        if len({*given.get("model", ()), *given.get("layer", ())}) < 2:
            raise UsageError("compare needs two networks at least: --model A B, or --layer A B.")
        path = {"split": 0.0} if "data" in given and "holdout" not in given else {}
        configs, options = grid({"objective": ["evidence"], **path, **given})
    say_data(args, configs)
    out_dir = results_folder(args, configs, f"compare-{data_title(configs[0].data)}")
    rows = do_runs("compare", args, configs, options, out_dir)
    rows.sort(key=lambda row: (row["neg_log_marginal_likelihood"] is None, row["neg_log_marginal_likelihood"]))
    keys = [key for key in NUMBERS if any(key in row for row in rows)]
    names = [[network_title(row), OBJECTIVE_TITLES[row["objective"]], str(row["seed"])] for row in rows]
    head = ["network", "by", "seed", *(NUMBERS[key] for key in keys)]
    head[head.index("accuracy, %")] += f" ({rows[0]['evaluated_on']})"
    whole = {"parameters": "{:,}", "seconds": "{:.0f}", "accuracy": "{:.2f}"}
    cells = [
        [*name, *(whole[key].format(row[key]) if key in whole else number(row.get(key)) for key in keys)]
        for name, row in zip(names, rows, strict=True)
    ]
    print("\n" + columns([head, *cells], left=2))
    write_table(
        out_dir / FILE, [head, *([*name, *(row.get(k) for k in keys)] for name, row in zip(names, rows, strict=True))]
    )
    if doubt := doubt_of_order(rows):
        print(f"\n{doubt}.")
    say_written(out_dir)
    return DONE
