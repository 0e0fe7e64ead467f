"""``ella-cuda compact``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ella_cuda.cli.common import DONE, UsageError
from ella_cuda.cli.runs import run_folder
from ella_cuda.compaction import compact
from ella_cuda.experiments import load_run, prepare_for
from ella_cuda.files import write_file
from ella_cuda.reports.text import columns

PROGRAM, ONNX, TABLE = "compact.pt2", "compact.onnx", "compact.json"


def add_compact(commands: Any) -> None:
    """The command ``compact``, among the parser's others."""
    command = commands.add_parser(
        "compact",
        help="a smaller network out of a run: without the paths and units that the evidence switched off",
        description="Remove the paths and units of a run's network that the evidence switched off, and write what is left, torch's own "
        f"modules, as a program ({PROGRAM}, for torch.export.load) to the run's folder. Compares parameters, operations, latency of one "
        "image on one thread, accuracy and NLL of the softmax on the test images.",
    )
    command.add_argument("run", metavar="RUN", help="a run's folder, or one of `train` with a single run by evidence")
    command.add_argument(
        "--threshold",
        type=float,
        default=0.5,
        metavar="T",
        help="a unit is off where the data determine fewer elements of one of its weights (0.5)",
    )
    command.add_argument("--onnx", action="store_true", help=f"write {ONNX} too, which needs onnx and onnxscript")
    command.add_argument("--out", metavar="DIR", help="folder for the files (the run's)")
    command.add_argument(
        "--model", metavar="module:function", help="of a run of such a network, its name again: its code is run"
    )
    command.add_argument("--data-dir", metavar="DIR", help="folder with the data that a named data set was trained on")
    command.set_defaults(command=_compact)


def _compact(args: argparse.Namespace) -> int:
    if not args.threshold > 0:
        raise UsageError(f"--threshold must be positive, got {args.threshold}.")
    if args.onnx:
        missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
        if missing:
            raise UsageError(f"--onnx needs {' and '.join(missing)}: pip install 'ella_cuda[onnx]'.")
    folder = run_folder(args.run)
    out = folder if args.out is None else Path(args.out)
    if not out.is_dir():
        raise UsageError(f"--out must be a folder that is there, got {str(out)!r}.")
    run = load_run(folder, fit=True, model=args.model, data_dir=args.data_dir)
    data = prepare_for(run.config, args.data_dir)
    try:
        small, report = compact(run.model, run.la, data.train_images[:500], threshold=args.threshold)
    except TypeError as error:
        raise UsageError(str(error)) from error
    before, after = (_measured(m, data.test_images, data.test_labels) for m in (run.model, small))
    rows = {
        "parameters": [*report.parameters],
        "operations of an image": [*report.flops],
        **{key: [before[key], after[key]] for key in before},
    }
    style = {"latency of an image, ms": "{:.2f}", "accuracy, %": "{:.2f}", "NLL, nats": "{:.4f}"}
    print(
        columns(
            [
                ["", "before", "after"],
                *([k, *(style.get(k, "{:,}").format(v) for v in pair)] for k, pair in rows.items()),
            ]
        )
    )
    layers = [
        [
            entry.name,
            "+".join(p for p in entry.paths[1] if p),
            f"{entry.units[1]} of {entry.units[0]}",
            "{:,}, {:,}".format(*entry.parameters),
        ]
        for entry in report.layers
    ]
    print("\n" + columns([["layer", "paths", "units", "parameters before, after"], *layers], left=2))
    dynamic = ({0: torch.export.Dim("images", min=1)},)
    images = data.test_images[:2]
    torch.export.save(torch.export.export(small, (images,), dynamic_shapes=dynamic), str(out / PROGRAM))
    written = [PROGRAM, TABLE]
    if args.onnx:
        torch.onnx.export(small, (images,), out / ONNX, dynamo=True, dynamic_shapes=dynamic, verbose=False)
        written.append(ONNX)
    found = {"threshold": args.threshold, **rows, "layers": [vars(entry) for entry in report.layers]}
    write_file(out / TABLE, json.dumps(found, indent=1))
    print("\n" + "\n".join(f"written to {out / name}" for name in written))
    return DONE


@torch.no_grad()
def _measured(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, float]:
    logits = torch.cat([model(x) for x in images.split(500)])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        took = []
        for _ in range(20):
            begin = time.perf_counter()
            model(images[:1])
            took.append(1e3 * (time.perf_counter() - begin))
    finally:
        torch.set_num_threads(threads)
    right = (logits.argmax(1) == labels).float().mean().item()
    nll = F.cross_entropy(logits, labels).item()
    return {"latency of an image, ms": sorted(took)[len(took) // 2], "accuracy, %": 100 * right, "NLL, nats": nll}
