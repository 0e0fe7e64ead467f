"""When should the evidence be asked, and how far should a step go? Schedules of evidence steps by what they give for their passes.

    python -m benchmarks.evidence_schedules --out DIR [--data fashion-mnist] [--seed 0 1 2] [options of `ella-cuda train`]

Networks of `ella-cuda train` (digits: 60 epochs at most; Fashion-MNIST, all images: 12), evaluated on held-out training images, of a
quarter, half and all of the epochs:

map               no evidence step
adam              three evidence steps of 20 Adam steps of 0.1 each
mackay N, F       N evidence steps, to the evidence's optimum or to a factor F of each precision

A schedule's passes are its epochs and a pass for each evidence step, which the curvature takes. DIR has a folder for every schedule, as
`ella-cuda train` writes it, and is gone on with by the same command; rows.csv, table.txt and schedules.png are of the finished runs:

-log q/N          nats, of the Laplace evidence at the end
NLL, accuracy     of the softmax on held-out images; NLL of the predictive, with error bars
types             layers by their learned type, over seeds

Below the table stands by how much a schedule's NLL is lower than MAP's of as many epochs, the mean of the differences seed by seed.
"""

from __future__ import annotations

import argparse
import collections
import csv
import dataclasses
import io
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from ella_cuda.cli.common import named_device
from ella_cuda.cli.grid import add_attributes, attributes
from ella_cuda.experiments import RunConfig, configure, recipe, run_grid
from ella_cuda.files import write_file
from ella_cuda.reports.pictures.page import logarithmic_scale
from ella_cuda.reports.text import columns, layer_title
from ella_cuda.workers import default_jobs, prepare_process

EPOCHS = {"digits": 60, "fashion-mnist": 12}
SHARES = (0.25, 0.5, 1.0)  # of these epochs
STEPS = (1, 3, 6, 12)  # evidence steps in a training
FACTORS = {"2": math.log(2), "10": math.log(10), "any": 100.0}  # in an evidence step, and the limits of logarithms
MACKAY = {"hyper_optimizer": "mackay", "hypersteps": 50}
ADAM = {"hyper_optimizer": "adam", "hypersteps": 20, "lr_hyp": 0.1}
HELD_OUT = {"digits": 0.2, "fashion-mnist": 1 / 6}
# What a schedule sets.
SET = ("objective", "epochs", "burn_in", "frequency", "hyper_optimizer", "hyper_step_limit", "hypersteps", "lr_hyp")
MEASURES = {
    "neg_log_marginal_likelihood": "-log q/N",
    "nll": "NLL",
    "accuracy": "accuracy, %",
    "nll_predictive": "NLL, predictive",
}


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Of one training."""

    family: str
    epochs: int
    steps: int
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.family.replace(', ', '-').replace(' ', '-')}-{self.epochs}"

    @property
    def passes(self) -> int:
        """Over the training data."""
        return self.epochs + self.steps

    @property
    def changes(self) -> dict[str, Any]:
        """Attributes of its runs."""
        if not self.steps:
            return {"objective": "map", "epochs": self.epochs}
        frequency = self.epochs // self.steps
        # The first step comes after the first multiple of the frequency; what is left over of the epochs is before it.
        return {"objective": "evidence", "epochs": self.epochs, "burn_in": 0, "frequency": frequency, **self.settings}


def schedules(epochs: int) -> Iterator[Schedule]:
    """All of a data set whose longest training has so many epochs."""
    for share in SHARES:
        length = max(round(share * epochs), 1)
        yield Schedule("map", length, 0, {})
        if length % 3 == 0:
            yield Schedule("adam", length, 3, ADAM)
        for steps, (factor, limit) in itertools.product(STEPS, FACTORS.items()):
            if length % steps == 0:
                settings = {**MACKAY, "hyper_step_limit": limit}
                yield Schedule(f"mackay {steps}, {factor}", length, steps, settings)


def configs_of(schedule: Schedule, given: dict[str, Any], device: str) -> list[RunConfig]:
    """The runs of a schedule, of every task, layer and seed."""
    data = given.get("data", "digits")
    usual = recipe(data)
    axes = [given.get(axis, usual[axis]) for axis in ("seed", "task", "layer")]
    how = {"holdout": HELD_OUT[data], **attributes(given), **schedule.changes, "device": device}
    objective = how.pop("objective")
    return [configure(data, task, layer, objective, seed, **how) for seed, task, layer in itertools.product(*axes)]


def row_of(schedule: Schedule, row: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a run."""
    kept = {key: row.get(key) for key in ("data", "task", "layer", "seed", *MEASURES, "seconds")}
    types = collections.Counter(layer["type"] for layer in row["layers"] if layer["type"])
    evidence = {"schedule": schedule.family, "epochs": schedule.epochs, "evidence_steps": schedule.steps}
    return evidence | {"passes": schedule.passes} | kept | {"types": " ".join(f"{t}:{n}" for t, n in types.items())}


def grouped(rows: Sequence[dict[str, Any]], *keys: str) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """By the values of these, in the order of the rows."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


def mean(rows: Sequence[dict[str, Any]], key: str) -> tuple[float, float] | None:
    """With its standard error; None where there are no numbers."""
    values = [row[key] for row in rows if row[key] is not None]
    if not values:
        return None
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)) if values[1:] else math.nan


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each schedule and kind of network, by passes."""
    lines = [["task", "layer", "schedule", "epochs", "passes", "seeds", *MEASURES.values(), "types"]]
    kinds = grouped(
        sorted(rows, key=lambda r: (r["task"], r["layer"], r["passes"])), "task", "layer", "schedule", "epochs"
    )
    for (task, layer, schedule, epochs), some in kinds.items():
        found = [mean(some, key) for key in MEASURES]
        numbers = ["-" if m is None else f"{m[0]:.3f} ± {m[1]:.3f}" for m in found]
        types: collections.Counter[str] = collections.Counter()
        for row in some:
            types.update({word.split(":")[0]: int(word.split(":")[1]) for word in row["types"].split()})
        words = " ".join(f"{layer_title(name) if name != 'none' else name} {n}" for name, n in types.most_common())
        lines.append(
            [task, layer_title(layer), schedule, str(epochs), str(some[0]["passes"]), str(len(some)), *numbers, words]
        )
    return "\n".join([columns(lines, left=3), *_gains(kinds)])


def _gains(kinds: dict[tuple[Any, ...], list[dict[str, Any]]]) -> list[str]:
    """A sentence for each schedule with as many epochs as one of MAP: by how much its NLL is lower, seed by seed."""
    said = []
    for (task, layer, schedule, epochs), some in kinds.items():
        before = {row["seed"]: row["nll"] for row in kinds.get((task, layer, "map", epochs), ())}
        gains = [{"nll": before[row["seed"]] - row["nll"]} for row in some if row["seed"] in before]
        if schedule != "map" and (found := mean(gains, "nll")) is not None:
            said.append(
                f"{task}, {layer_title(layer)}, {schedule}, {epochs} epochs: NLL below MAP's by {found[0]:.4f} ± {found[1]:.4f}"
            )
    return ["", "Seed by seed:", *said] if said else []


def picture(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Every measure over passes: a column of panels for each kind of network."""
    kinds, shown = grouped(rows, "task", "layer"), list(MEASURES)[:3]
    figure, axes = plt.subplots(
        len(shown),
        len(kinds),
        figsize=(max(3.4 * len(kinds), 6), 6.5),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    families = list(dict.fromkeys(row["schedule"] for row in rows))
    markers = {family: marker for family, marker in zip(families, itertools.cycle("os^vDPX*<>"), strict=False)}
    for column, ((task, layer), of_kind) in enumerate(kinds.items()):
        for line, key in enumerate(shown):
            axis = axes[line, column]
            for number, family in enumerate(families):
                points = grouped([r for r in of_kind if r["schedule"] == family], "passes").items()
                found = sorted((passes, *m) for (passes,), some in points if (m := mean(some, key)) is not None)
                if found:
                    x, y, error = zip(*found, strict=True)
                    style = {"marker": markers[family], "markersize": 4, "linewidth": 0.8, "color": f"C{number % 10}"}
                    axis.errorbar(x, y, yerr=error, label=family, **style)
            axis.set_ylabel(MEASURES[key], fontsize=8)
            if key == "neg_log_marginal_likelihood" and all(row[key] is None or row[key] > 0 for row in rows):
                logarithmic_scale(axis, "y")
            axis.tick_params(labelsize=8, which="both")
            axis.grid(alpha=0.3)
        axes[0, column].set_title(f"{task}: {layer_title(layer)}", fontsize=9)
        axes[-1, column].set_xlabel("passes over the data", fontsize=8)
    handles = {label: h for axis in axes.flat for h, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), fontsize=7, loc="outside lower center", ncols=4)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def save(rows: Sequence[dict[str, Any]], out: Path) -> str:
    """Write the three files; returns the table."""
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_file(out / "rows.csv", text.getvalue())
    found = table(rows)
    write_file(out / "table.txt", found + "\n")
    picture(rows, out / "schedules.png")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_attributes(parser, without=(*SET, "learn"))
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder of the results, gone on with if it has some"
    )
    parser.add_argument(
        "--longest", type=int, metavar="N", help="epochs of the longest trainings (digits 60, fashion-mnist 12)"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="only schedules whose folder's name begins with one of these"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<index>")
    parser.add_argument("--cuda-graph", action="store_true", help="record the steps on the weights as CUDA graphs")
    parser.add_argument("--jobs", type=int, metavar="N", help="runs at once (CPU: one per thread; GPU: 1)")
    parser.add_argument("--data-dir", metavar="DIR", help="folder with the data (data)")
    args = parser.parse_args()
    given = {name: value for name, value in vars(args).items() if value is not None}
    data, device = given.get("data", "digits"), str(named_device(args.device))
    if data not in EPOCHS:
        parser.error(f"--data must be one of {', '.join(EPOCHS)}, got {data}.")
    chosen = [
        schedule
        for schedule in schedules(args.longest or EPOCHS[data])
        if not args.only or schedule.name.startswith(tuple(args.only))
    ]
    if not chosen:
        parser.error("--only names no schedule.")
    rows: list[dict[str, Any]] = []
    prepare_process()
    for schedule in chosen:
        configs = configs_of(schedule, given, device)
        jobs = args.jobs or (default_jobs(len(configs)) if device == "cpu" else 1)
        done = run_grid(
            configs,
            args.out / schedule.name,
            options={"schedule": schedule.family},
            jobs=jobs,
            data_dir=args.data_dir,
            cuda_graph=args.cuda_graph,
        )
        rows += [row_of(schedule, row) for row in done]
        save(rows, args.out)
    print(save(rows, args.out))


if __name__ == "__main__":
    main()
