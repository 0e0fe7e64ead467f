"""``ella-cuda predict``."""

from __future__ import annotations

import argparse
import csv
import sys
from typing import Any

from ella_cuda.cli.common import DONE, UsageError
from ella_cuda.cli.runs import add_run, asked_run, interactive
from ella_cuda.data.labelled import image_files
from ella_cuda.reports.text import counted, error_bars_note

RISK = 0.05


def add_predict(commands: Any) -> None:
    """The command ``predict``, among the parser's others."""
    predict = commands.add_parser(
        "predict",
        help="classes of new images, and which a person should look at",
        description="Predict the classes of images by a trained run: label, probability, epistemic part of the uncertainty (nats), and "
        "whether a person should be asked for errors among the others to stay below --risk.",
    )
    predict.add_argument("run", metavar="RUN", help="a run's folder, or one of `train` with a single run by evidence")
    predict.add_argument("files", metavar="FILE", nargs="+", help="images, or folders in and below which all are taken")
    predict.add_argument(
        "--risk",
        type=float,
        default=RISK,
        metavar="X",
        help="share of errors among the images that nobody is asked about, by the run's held-out images; without such by probabilities "
        f"as the run's calibration left them ({RISK})",
    )
    add_run(predict, "file for the table (standard output)")
    predict.set_defaults(command=_predict)


def _predict(args: argparse.Namespace) -> int:
    if not 0 < args.risk < 1:
        raise UsageError(f"--risk must be above 0 and below 1, got {args.risk}.")
    image_files(args.files)  # before what takes long
    run = asked_run(args)
    limit, why = run.threshold(args.risk)
    found = run.predict(args.files, skip_unreadable=args.skip_unreadable, progress=interactive())
    if args.csv:
        found.write_csv(args.csv, limit)
    else:
        csv.writer(sys.stdout, lineterminator="\n").writerows(found.table(limit))
    asked = int((found.probability < limit).sum())
    out = sys.stdout if args.csv else sys.stderr
    print(f"{len(found.names)} images by {run.config.name}", file=out)
    for note in found.notes:
        print(note, file=out)
    if found.unreadable:
        print(f"{counted(len(found.unreadable), 'unreadable file')}, without a label: a person is asked", file=out)
    print(error_bars_note(run.error_bars), file=out)
    print(f"ask a person about {asked}: {why}", file=out)
    if args.csv:
        print(f"written to {args.csv}")
    return DONE
