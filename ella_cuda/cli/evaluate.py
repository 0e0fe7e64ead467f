"""``ella-cuda evaluate``."""

from __future__ import annotations

import argparse
from typing import Any

from ella_cuda.cli.common import DONE, UsageError
from ella_cuda.cli.runs import add_run, asked_run, interactive
from ella_cuda.data.labelled import labelled
from ella_cuda.experiments.predictions import write_table
from ella_cuda.reports.text import columns, error_bars_note

SHOWN = 10
TITLES = {
    "images": ("images", "{:.0f}"),
    "accuracy": ("accuracy, %", "{:.2f}"),
    "nll": ("NLL, nats", "{:.3f}"),
    "ece": ("ECE", "{:.3f}"),
    "brier": ("Brier score", "{:.3f}"),
    "aurc": ("AURC", "{:.4f}"),
    "ood_images": ("other images", "{:.0f}"),
    "auroc_entropy": ("AUROC, entropy", "{:.3f}"),
    "auroc_max_probability": ("AUROC, largest probability", "{:.3f}"),
    "fpr95_entropy": ("FPR at 95 %, entropy", "{:.3f}"),
    "fpr95_max_probability": ("FPR at 95 %, largest probability", "{:.3f}"),
}


def add_evaluate(commands: Any) -> None:
    """The command ``evaluate``, among the parser's others."""
    evaluate = commands.add_parser(
        "evaluate",
        help="what a run's predictions are worth on labelled images",
        description="Accuracy, NLL, calibration, risk-coverage and, with --ood, detection of other images, of a run's predictive; the "
        "images that it is least sure of; and training images whose labels all others contradict.",
    )
    evaluate.add_argument("run", metavar="RUN", help="a run's folder, or one of `train` with a single run by evidence")
    evaluate.add_argument(
        "path", metavar="PATH", help="labelled images, as for `train`; their test part where they have one"
    )
    evaluate.add_argument("--ood", metavar="PATH", help="images of something else, which the run should be unsure of")
    evaluate.add_argument(
        "--wrong-labels",
        type=int,
        default=SHOWN,
        metavar="N",
        help=f"training images to name whose labels may be wrong, by leave-one-out; a pass over the training images; 0 for none ({SHOWN})",
    )
    add_run(evaluate, "file for the table of images (evaluation.csv in the run's folder)")
    evaluate.set_defaults(command=_evaluate)


def _evaluate(args: argparse.Namespace) -> int:
    if args.wrong_labels < 0:
        raise UsageError(f"--wrong-labels must be at least 0, got {args.wrong_labels}.")
    labelled(args.path)  # before what takes long
    run = asked_run(args)
    found, scores = run.evaluate(args.path, args.ood, skip_unreadable=args.skip_unreadable, progress=interactive())
    print(f"{run.config.name} on {args.path}")
    print(columns([[title, style.format(scores[key])] for key, (title, style) in TITLES.items() if key in scores]))
    for note in (error_bars_note(run.error_bars), *found.notes):
        print(note)
    labels = [found.class_names[i] for i in found.labels.tolist()]
    own = found.probabilities.gather(1, found.labels[:, None])[:, 0].tolist()
    lines = [
        [name, label, predicted, f"{p:.6f}", f"{epistemic:.6f}", f"{q:.6f}"]
        for name, label, predicted, p, epistemic, q in zip(
            found.names, labels, found.classes, found.probability.tolist(), found.epistemic.tolist(), own, strict=True
        )
    ]
    head = ["file", "label", "predicted", "probability", "epistemic", "probability of label"]
    unsure = found.probability.argsort(stable=True)[:SHOWN].tolist()
    print("\nleast sure images\n" + columns([head, *(lines[i] for i in unsure)], left=3))
    if args.wrong_labels > 0:
        _show_wrong_labels(args, run)
    out = args.csv or run.run_dir / "evaluation.csv"
    write_table(out, [head, *lines])
    print(f"\nwritten to {out}")
    return DONE


def _show_wrong_labels(args: argparse.Namespace, run: Any) -> None:
    try:
        suspects = run.wrong_labels(args.wrong_labels, data_dir=args.data_dir, progress=interactive())
    except (FileNotFoundError, ValueError, MemoryError) as error:
        print(f"\nno labels that all others expect least: {error}")
        return
    head = ["file", "label", "probability of label by all others"]
    lines = [[name, label, f"{probability:.6f}"] for name, label, probability in suspects]
    print(
        "\ntraining images whose labels all others expect least: wrong ones come first\n"
        + columns([head, *lines], left=2)
    )
