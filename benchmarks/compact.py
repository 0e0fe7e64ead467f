"""Accuracy and NLL of compacted networks against the share of weights that are gone, and their latency.

    ella-cuda train --data fashion-mnist --train-size 3000 --task digit --layer conv f_fc+conv --objective evidence map --epochs 30 \\
        --width 2 --prior-structure unit --hyper-optimizer mackay --burn-in 6 --frequency 4 --calibration none --out RUNS
    python -m benchmarks.compact RUNS --out DIR

Each run's network loses the units of which the data determine the fewest elements, by ``ella_cuda.compact`` at rising thresholds, and, for
comparison, those whose weights have the smallest root mean square. Nothing is trained after units have left. table.md has for each way the
network of the fewest parameters whose accuracy on the 10,000 test images is at most 0.3 points below the whole network's: latency of one
image is the median of 200 on one thread, of the run's network, of the compacted one in torch, and of that in onnxruntime. rows.csv has
every threshold; compact.png draws them.
"""

from __future__ import annotations

import argparse
import csv
import io
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from ella_cuda import compact
from ella_cuda.cli.common import grid_of
from ella_cuda.experiments import load_run, prepare_for
from ella_cuda.files import write_file

LOSS = 0.3  # points of accuracy
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)  # of units that are off
WAYS = ("elements determined", "root mean square")


def scores(la: Any, way: str) -> dict[str, Tensor]:
    """Of each output unit, by parameter; those of the fewest leave first."""
    if way == WAYS[0]:
        return la.effective_parameters(per_unit=True)
    found = {}
    for (name, p), gamma in zip(la.model.named_parameters(), la.unit_precisions.values(), strict=True):
        found[name] = p.detach().double().flatten(1).square().mean(1).sqrt() if p.dim() > 1 else torch.ones_like(gamma)
    return found


@torch.no_grad()
def measured(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    logits = torch.cat([model(x) for x in images.split(500)])
    return 100 * (logits.argmax(1) == labels).double().mean().item(), F.cross_entropy(logits, labels).item()


def latency(call: Callable[[], Any]) -> float:
    """Milliseconds."""
    took = []
    for _ in range(220):
        begin = time.perf_counter()
        call()
        took.append(time.perf_counter() - begin)
    return 1e3 * sorted(took[20:])[100]


def in_onnx(model: nn.Module, image: Tensor) -> Callable[[], Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        torch.onnx.export(model, (image,), file, dynamo=True, verbose=False)
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    (found,) = session.run(None, {name: image.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(image).detach(), rtol=1e-3, atol=1e-3)
    return lambda: session.run(None, {name: image.numpy()})


def of_run(folder: Path, name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of all thresholds, and of the networks that are kept."""
    run = load_run(folder / name, fit=True)
    data = prepare_for(run.config)
    test, image = (data.test_images, data.test_labels), data.test_images[:1]
    whole, title = measured(run.model, *test), f"{run.config.layer}, {run.config.objective}"
    rows, best = [], []
    for way in WAYS:
        found, kept = scores(run.la, way), None
        run.la.effective_parameters = lambda per_unit, found=found: found
        values = torch.cat([v for n, v in found.items() if len(v) > 1]).sort().values
        for share in tqdm(SHARES, desc=f"{title}, {way}"):
            threshold = max(values[int(share * (len(values) - 1))].item(), 1e-12) if share else 1e-12
            small, report = compact(run.model, run.la, data.train_images[:500], threshold=threshold)
            accuracy, nll = measured(small, *test)
            row = {"network": title, "way": way, "threshold": threshold, "parameters": report.parameters[1]}
            row |= {"operations": report.flops[1], "accuracy": accuracy, "nll": nll, "gone": 100 * report.sparsity}
            rows.append(row)
            if accuracy >= whole[0] - LOSS and (kept is None or row["parameters"] < kept[0]["parameters"]):
                kept = row, small
        del run.la.effective_parameters
        line = {
            "network": title,
            "way": way,
            "accuracy": whole[0],
            "nll": whole[1],
            "run's, ms": latency(lambda: run.model(image)),
        }
        if kept is not None:
            row, small = kept
            line |= {"accuracy after": row["accuracy"], "nll after": row["nll"], "gone": row["gone"]}
            line |= {
                "torch, ms": latency(lambda small=small: small(image)),
                "onnxruntime, ms": latency(in_onnx(small, image)),
            }
        best.append(line)
    return rows, best


def table(lines: list[dict[str, Any]]) -> str:
    columns = {
        "network": "{}",
        "way": "{}",
        "gone": "{:.1f}",
        "accuracy": "{:.2f}",
        "accuracy after": "{:.2f}",
        "nll": "{:.3f}",
        "nll after": "{:.3f}",
        "run's, ms": "{:.2f}",
        "torch, ms": "{:.2f}",
        "onnxruntime, ms": "{:.2f}",
    }
    titles = {"way": "units leave by", "gone": "weights gone, %", "nll": "NLL", "nll after": "NLL after"}
    head = [titles.get(name, name) for name in columns]
    body = [[style.format(line[name]) if name in line else "–" for name, style in columns.items()] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in [head, ["---"] * len(head), *body])


def picture(rows: list[dict[str, Any]], file: Path) -> None:
    titles = [*dict.fromkeys(row["network"] for row in rows)]
    figure, axes = plt.subplots(1, len(titles), figsize=(3.6 * len(titles), 3.2), sharey=True, layout="constrained")
    for axis, title in zip(axes, titles, strict=True):
        for way in WAYS:
            points = sorted((r["gone"], r["accuracy"]) for r in rows if r["network"] == title and r["way"] == way)
            axis.plot(*zip(*points, strict=True), ".-", label=way)
        axis.set(title=title, xlabel="weights gone, %", xlim=(-5, 100))
    axes[0].set_ylabel("accuracy, %")
    axes[0].legend(title="units leave by", fontsize=8, title_fontsize=8)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, metavar="RUNS", help="folder of `ella-cuda train`")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="of the results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    rows, best = [], []
    for config in grid_of(args.runs)[0]:
        of_all, kept = of_run(args.runs, config.name)
        rows, best = rows + of_all, best + kept
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_file(args.out / "rows.csv", text.getvalue())
    write_file(args.out / "table.md", table(best))
    picture(rows, args.out / "compact.png")
    print(table(best))


if __name__ == "__main__":
    main()
