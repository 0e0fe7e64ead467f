"""``ella-cuda inspect``."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ella_cuda import experiments
from ella_cuda.cli.common import DONE, UsageError, grid_of
from ella_cuda.reports import layer_table, results_table, save_pictures
from ella_cuda.reports.results import amounts_table
from ella_cuda.reports.text import counted, duration, number


def add_inspect(commands: Any) -> None:
    """The command ``inspect``, among the parser's others."""
    inspect = commands.add_parser(
        "inspect",
        help="show runs, finished or begun",
        description="Show results, prior precisions, effective parameters, layer types, lengthscales, anchors and augmentations of "
        "a folder of `train` or `reproduce`, finished or not, and draw them.",
    )
    inspect.add_argument("dir", metavar="DIR", help="the folder")
    inspect.add_argument(
        "--json", action="store_true", help="print everything as JSON instead, and draw only if --pictures is given"
    )
    inspect.add_argument(
        "--pictures",
        metavar="DIR",
        help="folder for the pictures, as PNG and SVG (a new temporary folder, so that DIR stays as it is)",
    )
    inspect.set_defaults(command=_inspect)


def _inspect(args: argparse.Namespace) -> int:
    if not args.dir:
        raise UsageError("DIR must name a folder, got an empty string.")
    folder = Path(args.dir)
    configs, _ = grid_of(folder)
    finished, running = experiments.read_summary(folder), experiments.read_running(folder)
    rows = [*finished, *running]
    waiting = [c.name for c in configs if c.name not in {r["run"] for r in rows}]
    if args.json:
        state = {"finished": finished, "running": running, "waiting": waiting}
        state["evaluations"] = {r["run"]: experiments.read_evaluations(folder / r["run"]) for r in rows}
        state["anchors"] = {r["run"]: experiments.read_anchors(folder / r["run"]) for r in rows}
        if args.pictures:
            state["pictures"] = [str(p) for p in _draw(rows, folder, Path(args.pictures))]
        print(json.dumps(state, indent=1, allow_nan=False))
        return DONE
    print(f"{folder}: {counted(len(finished), 'run')} finished, {len(running)} begun, {len(waiting)} waiting")
    if finished:
        print("\n" + results_table(finished))
    if amounts := amounts_table(rows):
        print("\n" + amounts)
    for row in running:
        ago = duration(time.time() - row["last_written"])
        print(
            f"\n{row['run']}: begun, last written {ago} ago; epoch {row['epoch']} of {row['epochs']}, {row['seconds']:.0f} s, "
            f"loss {number(row['loss'])}, training accuracy {row['train_accuracy']:.1f} %, "
            f"-log q/N {number(row['neg_log_marginal_likelihood'])}"
        )
    if rows:
        print("\n" + layer_table(rows))
        out_dir = Path(args.pictures or tempfile.mkdtemp(prefix="ella-cuda-"))
        names = sorted(str(p.relative_to(out_dir)) for p in _draw(rows, folder, out_dir) if p.suffix == ".png")
        why = "" if args.pictures else "; new each time, so that DIR stays as it is (--pictures names a folder)"
        print(f"\nPictures in {out_dir}, as PNG and SVG{why}:")
        print("\n".join(f"  {name.removesuffix('.png')}" for name in names))
    elif args.pictures:
        raise ValueError(f"{folder} has no run with an evaluation yet; there is nothing to draw.")
    return DONE


def _draw(rows: list[dict[str, Any]], folder: Path, out_dir: Path) -> list[Path]:
    out_dir.mkdir(parents=True, exist_ok=True)
    drawn = save_pictures(rows, folder, out_dir)
    for failure in drawn.failures:
        print(f"ella-cuda: {failure}", file=sys.stderr)
    return drawn.files
