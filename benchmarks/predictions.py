"""What are predictions worth without held-out data, and with? A trained network's softmax, la(x) by default, and what people do instead.

    python -m benchmarks.predictions --out DIR [--tasks NAME ...] [--train-size N ...] [--ways NAME ...] [--seeds N] [--epochs N]

Tasks:

digits, fashion-mnist   a CONV network (8, 16 and 16 channels on 28x28 images, BatchNorm, a linear head), 30 epochs of Adam without a prior,
                        on as many training images as --train-size says (digits: 500); 360 and 1,000 test images
quadrants               runs of ``ella-cuda train`` on the digits: tasks "digit" and "quadrant", CONV and F-FC+CONV, MAP and evidence

300 further training images are held out: ways that use them say so in the column "held out", the others do not train on them. Ways:

softmax           of the network
default           la(x) as ``ella-cuda train`` leaves it: "folds" where the network knows its images by heart, else "leave-one-out"; of
                  the CONV network at precisions that start from 1
leave-one-out     la(x) after ``la.calibrate()``
folds             la(x) after ``la.calibrate(folds=...)`` by one network more, trained on two thirds of the images
evidence          la(x) at the precisions that the evidence chose (MacKay's fixed points, or the run's), not calibrated
temperature       softmax of logits divided by the temperature that is best on the held-out images
gridsearch, ...   one prior precision, best on the held-out images of 17 powers of ten from 1e-2 to 1e6: of Kronecker factors of all
                  layers or the last one, of the diagonal, of the full matrix of 400 parameters of the largest variance, or drawn
laplace-torch     laplace-torch's Kronecker factors of the last layer, its precision by the evidence
ensemble          mean softmax of five networks

DIR is gone on with where it has results, and keeps those of other tasks and ways. rows.csv has all numbers; table.md means over seeds with
their standard error; predictions.png shows NLL and ECE:

NLL, ECE, Brier   nats; expected calibration error of 15 bins; Brier score. Accuracy in percent
AUROC             of the entropy, by which the other data set's test images are told from the task's own (28x28 images)
"""

from __future__ import annotations

import argparse
import copy
import csv
import dataclasses
import functools
import io
import itertools
import json
import math
import re
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from ella_cuda import metrics
from ella_cuda.data import Dataset, TensorLoader, load, make_task, normalized_as, subsample
from ella_cuda.experiments import configure, load_run, prepare_for, run_one
from ella_cuda.experiments.run import PARTS
from ella_cuda.files import write_file
from ella_cuda.laplace import (
    DiagLaplace,
    KronLaplace,
    LargestVarianceDiagLaplaceSubnetMask,
    RandomSubnetMask,
    SubnetLaplace,
)
from ella_cuda.laplace.leave_one_out import knows_by_heart
from ella_cuda.reports.pictures.page import logarithmic_scale

TEST = {"digits": None, "fashion-mnist": 1000}  # images; None is all
SIZE, HELD_OUT, SUBNET, EPOCHS, BATCH, GRID, MEMBERS = 28, 300, 400, 30, 64, 17, 5
MEASURES = {"nll": "NLL", "ece": "ECE", "brier": "Brier", "accuracy": "accuracy, %", "auroc": "AUROC"}
Predict = Callable[[Tensor], Tensor]
Pair = tuple[Tensor, Tensor]


@dataclasses.dataclass
class Trained:
    """A network and its data: pairs of images and labels, and images of another data set. ``la`` is that of a run, fitted and calibrated;
    ``again`` trains another network, ``folds`` calibrates by one more, of two thirds of the data."""

    model: nn.Module
    train: Pair
    held: Pair
    test: Pair
    others: Tensor | None
    again: Callable[[int], nn.Module]
    folds: Callable[[], KronLaplace]
    la: KronLaplace | None = None

    @property
    def loader(self) -> TensorLoader:
        return TensorLoader(*self.train, 100)

    @functools.cached_property
    def kron(self) -> KronLaplace:
        """Of all layers, to be copied."""
        return KronLaplace(self.model).fit(self.loader)


def images(name: str, train: int) -> Dataset:
    """Not normalised, with so many training images."""
    made = subsample(make_task(load(name), "plain", SIZE), train, 0)
    fewer = {key: getattr(made, key)[: TEST[name]] for key in ("test_images", "test_labels", "test_ids")}
    return dataclasses.replace(made, **fewer)


def network() -> nn.Sequential:
    """28x28 images of one channel to ten logits."""
    stages = []
    for channels, width in ((1, 8), (8, 16), (16, 16)):
        stages += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*stages, nn.Flatten(), nn.Linear(16 * 9, 10))


def fitted_network(x: Tensor, y: Tensor, epochs: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * math.ceil(len(x) / BATCH))
    for _ in range(epochs):
        for xs, ys in TensorLoader(x, y, BATCH, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(model(xs), ys).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def conv(name: str, train: int, seed: int, epochs: int | None, _: Path) -> Trained:
    """The CONV network on a data set."""
    data = images(name, train + HELD_OUT)
    other = images(next(n for n in TEST if n != name), 10)
    mean, std = data.train_images.mean(), data.train_images.std()
    x, test, others = ((t - mean) / std for t in (data.train_images, data.test_images, other.test_images))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    x, y = x[order], data.train_labels[order]
    kept, held = (x[HELD_OUT:], y[HELD_OUT:]), (x[:HELD_OUT], y[:HELD_OUT])

    def again(number: int) -> nn.Module:
        return fitted_network(*kept, epochs or EPOCHS, seed + 1000 * number)

    @functools.cache
    def folds() -> KronLaplace:
        is_unseen = torch.arange(len(kept[0])) % PARTS == 0
        seen, unseen = ([t[some] for t in kept] for some in (~is_unseen, is_unseen))
        other = KronLaplace(fitted_network(*seen, epochs or EPOCHS, seed)).fit(TensorLoader(*seen, 100))
        la = copy.copy(made.kron)
        la.calibrate(folds=[(other, TensorLoader(*unseen, 100))])
        return la

    made = Trained(again(0), kept, held, (test, data.test_labels), others, again, folds)
    return made


def quadrants(task: str, layer: str, objective: str, seed: int, epochs: int | None, folder: Path) -> Trained:
    """A run of ``ella-cuda train``."""
    shorter = {"epochs": epochs, "burn_in": epochs // 6, "frequency": max(epochs // 3, 1)} if epochs else {}
    whole = configure("digits", task, layer, objective, seed, device="cpu", **shorter)
    everything = prepare_for(whole)
    config = dataclasses.replace(whole, holdout=HELD_OUT / len(everything.train_images))
    data = prepare_for(config)
    scale = (everything.white - everything.black)[:, None, None]
    test = normalized_as((everything.test_images - everything.black[:, None, None]) / scale, data)

    def again(number: int) -> Any:
        own = dataclasses.replace(config, seed=seed + 1000 * number)
        run_one(own, folder / own.name, progress=False)
        return load_run(folder / own.name, fit=not number)

    @functools.cache
    def folds() -> KronLaplace:
        own = folder / config.name  # whose network is trained
        run_one(dataclasses.replace(config, calibration="folds"), own, progress=False)
        return load_run(own, fit=True).la

    run = again(0)
    pairs = (data.train_images, data.train_labels), (data.test_images, data.test_labels)
    return Trained(run.model, *pairs, (test, everything.test_labels), None, lambda k: again(k).model, folds, run.la)


def softmax(model: nn.Module, temperature: float = 1.0) -> Predict:
    return lambda x: torch.softmax(model(x).detach() / temperature, 1)


def with_temperature(made: Trained) -> Predict:
    with torch.no_grad():
        logits = made.model(made.held[0])
    tried = torch.logspace(-1, 1, 401).tolist()
    return softmax(made.model, min(tried, key=lambda t: F.cross_entropy(logits / t, made.held[1]).item()))


def searched(fit: Callable[[Trained, int], Any]) -> Callable[[Trained, int], Predict]:
    """By a grid of precisions on the held-out images."""

    def predict(made: Trained, seed: int) -> Predict:
        la, grid = fit(made, seed), {"log_prior_prec_min": -2, "log_prior_prec_max": 6, "grid_size": GRID}
        validation = TensorLoader(*made.held, 100)
        la.optimize_prior_precision(method="gridsearch", prior_structure="scalar", val_loader=validation, **grid)
        return la

    return predict


def subnet(mask: Callable[[Trained, int], Any]) -> Callable[[Trained, int], Any]:
    def fit(made: Trained, seed: int) -> Any:
        chosen = mask(made, seed).select(made.loader)
        return SubnetLaplace(made.model, subnetwork_indices=chosen).fit(made.loader)

    return fit


def at_evidence(made: Trained) -> KronLaplace:
    """At the precisions of a run, or of a network without a prior at the evidence's."""
    la = copy.copy(made.la or made.kron)
    if made.la is None:
        la.optimize_prior_precision(method="mackay", n_steps=300)
    la.predictive_prior_precision = None
    return la


def left_out(made: Trained) -> KronLaplace:
    la = copy.copy(made.la or made.kron)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "calibrate: .* by heart", UserWarning)
        la.calibrate(made.loader)
    return la


def by_default(made: Trained) -> KronLaplace:
    return made.la or (made.folds() if knows_by_heart(made.kron) else left_out(made))


def of_laplace_torch(made: Trained) -> Predict:
    from laplace import Laplace

    la = Laplace(made.model, "classification", subset_of_weights="last_layer", hessian_structure="kron")
    la.fit(DataLoader(TensorDataset(*made.train), 100))
    la.optimize_prior_precision(method="marglik")
    return lambda x: la(x, link_approx="probit").detach()


def ensemble(made: Trained) -> Predict:
    members = [softmax(made.model), *(softmax(made.again(number)) for number in range(1, MEMBERS))]
    return lambda x: sum(member(x) for member in members) / MEMBERS


WAYS: dict[str, tuple[int, Callable[[Trained, int], Predict]]] = {  # held-out images, and what makes predictions
    "softmax": (0, lambda made, _: softmax(made.model)),
    "default": (0, lambda made, _: by_default(made)),
    "leave-one-out": (0, lambda made, _: left_out(made)),
    "folds": (0, lambda made, _: made.folds()),
    "evidence": (0, lambda made, _: at_evidence(made)),
    "laplace-torch": (0, lambda made, _: of_laplace_torch(made)),
    "ensemble": (0, lambda made, _: ensemble(made)),
    "temperature": (HELD_OUT, lambda made, _: with_temperature(made)),
    "gridsearch": (HELD_OUT, searched(lambda made, _: copy.copy(made.kron))),
    "gridsearch, last layer": (
        HELD_OUT,
        searched(lambda made, _: KronLaplace(made.model, subset_of_weights="last_layer").fit(made.loader)),
    ),
    "gridsearch, diagonal": (HELD_OUT, searched(lambda made, _: DiagLaplace(made.model).fit(made.loader))),
    "gridsearch, subnetwork of variance": (
        HELD_OUT,
        searched(subnet(lambda made, _: LargestVarianceDiagLaplaceSubnetMask(made.model, SUBNET))),
    ),
    "gridsearch, subnetwork drawn": (
        HELD_OUT,
        searched(subnet(lambda made, s: RandomSubnetMask(made.model, SUBNET, torch.Generator().manual_seed(s)))),
    ),
}
LONG = ("ensemble", "gridsearch, diagonal", "gridsearch, subnetwork of variance", "gridsearch, subnetwork drawn")
USUAL = [way for way in WAYS if way not in LONG]


def measured(predict: Predict, made: Trained) -> dict[str, float | None]:
    def all_of(x: Tensor) -> Tensor:
        return torch.cat([predict(part) for part in x.split(200)]).double()

    y, p = made.test[1], all_of(made.test[0])
    found = {"nll": metrics.nll, "ece": metrics.expected_calibration_error, "brier": metrics.brier_score}
    row = {key: float(of(p, y)) for key, of in found.items()} | {"accuracy": 100 * float(metrics.accuracy(p, y))}
    others = None if made.others is None else metrics.entropy(all_of(made.others))
    return row | {"auroc": None if others is None else float(metrics.auroc(metrics.entropy(p), others))}


def tasks(
    names: Iterable[str], sizes: Iterable[int]
) -> Iterator[tuple[str, Callable[[int, int | None, Path], Trained]]]:
    """What trains a network of a seed, so many epochs, in a folder, by the task's name."""
    for name in names:
        if name == "quadrants":
            kinds = itertools.product(("digit", "quadrant"), ("conv", "f_fc+conv"), ("map", "evidence"))
            for task, layer, objective in kinds:
                yield f"{task} {layer} {objective}", lambda *how, of=(task, layer, objective): quadrants(*of, *how)
        for size in {"digits": [500], "fashion-mnist": sizes}.get(name, ()):
            yield f"{name} {size:,}", lambda *how, of=(name, size): conv(*of, *how)


def rows_of(
    task: str, make: Callable[..., Trained], ways: Iterable[str], seed: int, epochs: int | None, out: Path
) -> None:
    """Keep a row for each way in the task's file; those that it has stay."""
    task += f", {epochs} epochs" if epochs else ""
    file = out / "rows" / f"{task.replace(' ', '-').replace(',', '')}-{seed}.json"
    found = {row["way"]: row for row in json.loads(file.read_text())} if file.exists() else {}
    made = None
    for way in ways:
        if way in found:
            continue
        made = make(seed, epochs, out / "runs") if made is None else made
        held, how = WAYS[way]
        found[way] = {"task": task, "seed": seed, "way": way, "held_out": held, **measured(how(made, seed), made)}
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, json.dumps(list(found.values()), indent=1) + "\n")


def mean(rows: list[dict[str, Any]], key: str) -> tuple[float, float] | None:
    """With its standard error."""
    values = [row[key] for row in rows]
    if None in values:
        return None
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)) if values[1:] else math.nan


def grouped(rows: list[dict[str, Any]]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """By task and way."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        found.setdefault(row["task"], {}).setdefault(row["way"], []).append(row)
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each task and way."""
    lines = [["task", "predictions", "held out", "seeds", *MEASURES.values()]]
    lines.append(["---"] * len(lines[0]))
    for task, ways in grouped(rows).items():
        for way, some in ways.items():
            cells = [task, way, str(some[0]["held_out"]), str(len(some))]
            for key in MEASURES:
                digits, found = 1 if key == "accuracy" else 3, mean(some, key)
                cells.append("–" if found is None else _with_error(*found, digits))
            lines.append(cells)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _with_error(value: float, error: float, digits: int) -> str:
    return f"{value:.{digits}f}" + ("" if math.isnan(error) else f" ± {error:.{digits}f}")


def picture(rows: list[dict[str, Any]], file: Path) -> None:
    """NLL and ECE of every way, a row of panels for each task; a line at the softmax'."""
    by_task = grouped(rows)
    names = list(dict.fromkeys(row["way"] for row in rows))
    size = 7.5, 0.6 + len(by_task) * (0.5 + 0.17 * len(names))
    figure, axes = plt.subplots(len(by_task), 2, figsize=size, sharey=True, squeeze=False, layout="constrained")
    for line, (task, ways) in zip(axes, by_task.items(), strict=True):
        for axis, key in zip(line, ("nll", "ece"), strict=True):
            for place, way in enumerate(names):
                if found := mean(ways[way], key) if way in ways else None:
                    colour = "C1" if ways[way][0]["held_out"] else "C0"
                    axis.errorbar(
                        found[0],
                        place,
                        xerr=None if math.isnan(found[1]) else found[1],
                        fmt="o",
                        markersize=4,
                        color=colour,
                    )
            if "softmax" in ways:
                axis.axvline(mean(ways["softmax"], key)[0], color="0.6", linewidth=0.8, zorder=0)
            logarithmic_scale(axis, "x")
            axis.set_yticks(range(len(names)), names, fontsize=7)
            axis.tick_params(axis="x", labelsize=6, which="both")
            axis.set_title(f"{task}: {MEASURES[key]}", fontsize=8)
            axis.grid(axis="x", alpha=0.3)
    axes[0, 0].invert_yaxis()  # which all share
    handles = [plt.Line2D([], [], marker="o", linestyle="", color=c) for c in ("C0", "C1")]
    figure.legend(
        handles, ["no held-out images", f"{HELD_OUT} held-out images"], fontsize=7, loc="outside lower center", ncols=2
    )
    figure.savefig(file, dpi=150)
    plt.close(figure)


def save(out: Path) -> str:
    """Write the three files of all rows that the folder has; returns the table."""

    def place(row: dict[str, Any]) -> tuple[str, int, int]:
        task = re.sub(r"[\d,]+", lambda number: number[0].replace(",", "").zfill(9), row["task"])
        return task, row["seed"], [*WAYS].index(row["way"])

    rows = sorted((row for file in (out / "rows").iterdir() for row in json.loads(file.read_text())), key=place)
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    found = table(rows)
    write_file(out / "rows.csv", text.getvalue())
    write_file(out / "table.md", found)
    picture(rows, out / "predictions.png")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    named = ("digits", "fashion-mnist", "quadrants")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder of the results, gone on with if it has some"
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        choices=named,
        default=named[:2],
        metavar="NAME",
        help="digits fashion-mnist, or quadrants",
    )
    parser.add_argument(
        "--train-size",
        nargs="+",
        type=int,
        default=[250, 1000, 3000],
        metavar="N",
        help="of Fashion-MNIST (250 1000 3000)",
    )
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=WAYS,
        default=USUAL,
        metavar="NAME",
        help=f"of {', '.join(WAYS)} (without the ensemble, diagonal and subnetworks)",
    )
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="networks of each task (3)")
    parser.add_argument("--epochs", type=int, metavar="N", help="of a training (30; quadrants 60)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    works = itertools.product(range(args.seeds), tasks(args.tasks, args.train_size))
    for seed, (task, make) in tqdm([*works], desc="networks"):
        rows_of(task, make, args.ways, seed, args.epochs, args.out)
        text = save(args.out)
    print(text)


if __name__ == "__main__":
    main()
