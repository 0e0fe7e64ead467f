"""``ella-cuda inspect``."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from ella_cuda import experiments
from ella_cuda.cli.common import DONE
from ella_cuda.reports import draw_layers, layer_table, results_table
from ella_cuda.reports.text import number


def add_inspect(commands: Any) -> None:
    """The command ``inspect``, among the parser's others."""
    inspect = commands.add_parser(
        "inspect",
        help="show a finished or running run",
        description="Show results, prior precisions, effective parameters and layer types of a folder of `train`, "
        "running or finished, and draw them.",
    )
    inspect.add_argument("dir", metavar="DIR", help="the folder")
    inspect.add_argument("--json", action="store_true", help="print everything as JSON instead")
    inspect.add_argument("--picture", metavar="FILE", help="where to draw the layers (a new temporary folder)")
    inspect.set_defaults(command=_inspect)


def _counted(row: dict[str, Any]) -> bool:
    """Whether the row knows effective parameters, as it does from the first evidence step on."""
    return all(p["effective_parameters"] is not None for layer in row["layers"] for p in layer["paths"].values())


def _inspect(args: argparse.Namespace) -> int:
    folder = Path(args.dir)
    configs, _ = experiments.read_grid(folder)
    finished, running = experiments.read_summary(folder), experiments.read_running(folder)
    waiting = [c.name for c in configs if c.name not in {r["run"] for r in (*finished, *running)}]
    if args.json:
        print(json.dumps({"finished": finished, "running": running, "waiting": waiting}, indent=1, allow_nan=False))
        return DONE
    print(f"{folder}: {len(finished)} runs finished, {len(running)} begun, {len(waiting)} waiting")
    if finished:
        print("\n" + results_table(finished))
    for row in running:
        print(
            f"\n{row['run']}: epoch {row['epoch']} of {row['epochs']}, {row['seconds']:.0f} s, "
            f"loss {number(row['loss'])}, training accuracy {row['train_accuracy']:.1f} %, "
            f"-log q/N {number(row['neg_log_marginal_likelihood'])}"
        )
    rows = [*finished, *running]
    if rows:
        print("\n" + layer_table(rows))
    drawn = [r for r in rows if "+" in r["layer"] and _counted(r)]
    if drawn:
        path = args.picture or str(Path(tempfile.mkdtemp(prefix="ella-cuda-")) / "layers.png")
        draw_layers(drawn, path)
        print(f"\nPicture: {path}")
    elif args.picture:
        raise ValueError(
            f"{folder} has no run of a layer with several paths and known effective parameters; nothing to draw yet."
        )
    return DONE
