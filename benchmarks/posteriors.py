"""Which posterior tells what a network does not know? On the digits' and Fashion-MNIST's networks, each asked about the other's images.

    python -m benchmarks.posteriors [--seeds N] [--out DIR]

A CONV network (8, 16 and 16 channels on 28x28 images, BatchNorm, a linear head) is trained by Adam on 500 of scikit-learn's digits,
enlarged to 28x28, or on 3,000 images of Fashion-MNIST. Each posterior is fitted to the training images, and gets the one prior precision
with which it predicts 300 held-out training images best (a grid of 17 powers of ten from 1e-2 to 1e6). Means over seeds with their
standard error, on the data's own test images (360, and 2,000):

NLL         nats; of the softmax that the logits' Gaussian gives (probit)
ECE, Brier  expected calibration error of 15 bins; Brier score
accuracy    percent
AUROC       of the entropy, by which the other data's test images (2,000, and 360) are told from the data's own

Posteriors: none (MAP); Kronecker factors of all parameters, and of the last layer; the full matrix of 400 parameters, those of the largest
variance under the diagonal posterior, or drawn; the diagonal.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from ella_cuda import metrics
from ella_cuda.data import Dataset, TensorLoader, load, make_task, subsample
from ella_cuda.files import write_file
from ella_cuda.laplace import (
    DiagLaplace,
    KronLaplace,
    LargestVarianceDiagLaplaceSubnetMask,
    RandomSubnetMask,
    SubnetLaplace,
)
from ella_cuda.reports.text import columns

SETS = {"digits": (800, None), "fashion-mnist": (3300, 2000)}  # training and test images; None is all
SIZE, HELD_OUT, SUBNET, EPOCHS, BATCH, GRID = 28, 300, 400, 30, 64, 17
MEASURES = {"nll": "NLL", "ece": "ECE", "brier": "Brier", "accuracy": "accuracy, %", "auroc": "AUROC"}
Loader = TensorLoader


def images(name: str) -> Dataset:
    """Not normalised."""
    train, test = SETS[name]
    made = make_task(load(name), "plain", SIZE)
    made = made if train is None else subsample(made, train, 0)
    fewer = {name: getattr(made, name)[:test] for name in ("test_images", "test_labels", "test_ids")}
    return dataclasses.replace(made, **fewer)


def network() -> nn.Sequential:
    """28x28 images of one channel to ten logits."""
    stages = []
    for channels, width in ((1, 8), (8, 16), (16, 16)):
        stages += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*stages, nn.Flatten(), nn.Linear(16 * 9, 10))


def trained(x: Tensor, y: Tensor) -> nn.Sequential:
    """From torch's global generator."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * math.ceil(len(x) / BATCH))
    for _ in range(EPOCHS):
        for xs, ys in TensorLoader(x, y, BATCH, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(model(xs), ys).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def posteriors(model: nn.Module, loader: Loader, seed: int) -> dict[str, Callable[[], Any]]:
    """By name, what fits one."""

    def subnet(mask: Any) -> SubnetLaplace:
        return SubnetLaplace(model, subnetwork_indices=mask.select(loader)).fit(loader)

    return {
        "Kronecker": lambda: KronLaplace(model).fit(loader),
        "last layer": lambda: KronLaplace(model, subset_of_weights="last_layer").fit(loader),
        "subnetwork, variance": lambda: subnet(LargestVarianceDiagLaplaceSubnetMask(model, SUBNET)),
        "subnetwork, random": lambda: subnet(RandomSubnetMask(model, SUBNET, torch.Generator().manual_seed(seed))),
        "diagonal": lambda: DiagLaplace(model).fit(loader),
    }


def measured(predict: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, other: Tensor) -> dict[str, float]:
    """Of predictions of the data's own test images and of the other's."""
    own, others = (torch.cat([predict(part) for part in some.split(200)]).double() for some in (x, other))
    return {
        "nll": float(metrics.nll(own, y)),
        "ece": float(metrics.expected_calibration_error(own, y)),
        "brier": float(metrics.brier_score(own, y)),
        "accuracy": 100 * float(metrics.accuracy(own, y)),
        "auroc": float(metrics.auroc(metrics.entropy(own), metrics.entropy(others))),
    }


def rows(name: str, seed: int) -> list[dict[str, Any]]:
    """Of one network."""
    data, other = images(name), images(next(n for n in SETS if n != name))
    mean, std = data.train_images.mean(), data.train_images.std()
    x, test, others = ((t - mean) / std for t in (data.train_images, data.test_images, other.test_images))
    torch.manual_seed(seed)
    order = torch.randperm(len(x))
    x, y = x[order], data.train_labels[order]
    model = trained(x[HELD_OUT:], y[HELD_OUT:])
    loader, validation = TensorLoader(x[HELD_OUT:], y[HELD_OUT:], 100), TensorLoader(x[:HELD_OUT], y[:HELD_OUT], 100)
    given = (test, data.test_labels, others)

    def softmax(part: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.softmax(model(part), 1)

    found = [{"data": name, "seed": seed, "posterior": "none (MAP)", **measured(softmax, *given)}]
    for posterior, fit in posteriors(model, loader, seed).items():
        la = fit()
        grid = {"log_prior_prec_min": -2, "log_prior_prec_max": 6, "grid_size": GRID}
        la.optimize_prior_precision(method="gridsearch", prior_structure="scalar", val_loader=validation, **grid)
        precision = float(la.prior_precision[0])
        found.append(
            {"data": name, "seed": seed, "posterior": posterior, "precision": precision, **measured(la, *given)}
        )
    return found


def table(found: list[dict[str, Any]]) -> str:
    """A line for each data set and posterior."""
    lines = [["data", "posterior", *MEASURES.values()]]
    for data in SETS:
        for posterior in dict.fromkeys(row["posterior"] for row in found):
            some = [row for row in found if (row["data"], row["posterior"]) == (data, posterior)]
            lines.append([data, posterior, *(_with_error([row[key] for row in some], key) for key in MEASURES)])
    return columns(lines)


def _with_error(values: list[float], key: str) -> str:
    mean, error = _mean(values)
    digits = 1 if key == "accuracy" else 3
    return f"{mean:.{digits}f} ± {error:.{digits}f}"


def _mean(values: list[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1))
    return mean, spread / math.sqrt(len(values))


def picture(found: list[dict[str, Any]], file: Path) -> None:
    """NLL, ECE and AUROC of every posterior, a row of panels for each data set."""
    names = list(dict.fromkeys(row["posterior"] for row in found))
    shown = ("nll", "ece", "auroc")
    figure, axes = plt.subplots(2, 3, figsize=(7, 4.2), sharey=True, layout="constrained")
    for line, data in zip(axes, SETS, strict=True):
        for axis, key in zip(line, shown, strict=True):
            points = [_mean([r[key] for r in found if (r["data"], r["posterior"]) == (data, n)]) for n in names]
            places = range(len(names))
            axis.errorbar([m for m, _ in points], places, xerr=[e for _, e in points], fmt="o", markersize=4)
            axis.set_yticks(places, names, fontsize=8)
            axis.tick_params(axis="x", labelsize=8)
            axis.set_title(f"{data}: {MEASURES[key]}", fontsize=8)
            axis.grid(axis="x", alpha=0.3)
    axes[0, 0].invert_yaxis()  # which all share
    figure.savefig(file, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="networks of each data set (3)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write rows, table and picture there")
    args = parser.parse_args()
    found = []
    for seed, name in tqdm([(seed, name) for seed in range(args.seeds) for name in SETS], desc="networks"):
        found += rows(name, seed)
    text = table(found)
    print(text)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        write_file(args.out / "rows.json", json.dumps(found, indent=1) + "\n")
        write_file(args.out / "table.txt", text + "\n")
        picture(found, args.out / "posteriors.png")


if __name__ == "__main__":
    main()
