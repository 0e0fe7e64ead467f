"""A Gaussian process averaged over transformed images: amounts that the bound on its evidence learns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ella_cuda.augment import AffineAugment
from ella_cuda.data import Dataset
from ella_cuda.experiments.run import sampled
from ella_cuda.papers.invariances.images import (
    AMOUNT_RATE,
    FULL_RANGE,
    INIT,
    REACH,
    data_of,
    settings_of,
    sizes_said,
)
from ella_cuda.papers.invariances.pictures import draw_first_copies
from ella_cuda.papers.invariances.processes import CHUNK, AveragedProcess, climbed, median_distance, targets
from ella_cuda.papers.invariances.ranges import GENERATORS, SHOWN, TRUE
from ella_cuda.papers.invariances.sizes import of_small
from ella_cuda.papers.studies import Part, Study, Work
from ella_cuda.papers.studies.text import seeds_said, table, with_error
from ella_cuda.reports.pictures.amounts import draw_amounts
from ella_cuda.run_folder import CHECKPOINT_FILE

TASKS = ("rotated-90", "rotated", "translated-8of14", "plain")
KERNELS = {"averaged": "averaged", "plain": "not averaged"}
HEADS = {"kernel": "kernel", "method": "trained"}  # of columns
IMAGES, INDUCING, STEPS = 1000, 100, 200
RATE, POINT_RATE = 0.05, 0.02
SAMPLED, COPIES = 3, 6  # images, and copies of each, in a picture


def sizes_of(name: str, scale: float) -> dict[str, Any]:
    """What studies of processes on a data set have in common: all images are in one bound, so there are at most :data:`IMAGES`."""
    common = settings_of(name, scale)
    del common["batch"]
    train = min(common["train_size"], of_small(scale, IMAGES, 40))
    return common | {"train_size": train, "inducing": of_small(scale, INDUCING, 10), "steps": of_small(scale, STEPS, 4)}


def plan(seeds: Sequence[int], scale: float, data: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A study for each data set, task, kernel and seed."""
    return {
        f"gp-{name}-{task}-{kernel}-seed{seed}": {**sizes_of(name, scale), "task": task, "kernel": kernel, "seed": seed}
        for name in data
        for task in TASKS
        for kernel in KERNELS
        for seed in seeds
    }


class OfImages(nn.Module):
    """Copies of images, what a process sees of them, and the process.

    Args:
        dataset: images of training and test. settings: ``copies, inducing``. averaged: whether there is more than the image itself.
        network: of images, features of which the process is one; None is the pixels.
    """

    def __init__(
        self, dataset: Dataset, settings: Mapping[str, Any], averaged: bool, network: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.augment = AffineAugment(settings["copies"], init=INIT, sampling="sobol") if averaged else None
        self.network = nn.Flatten() if network is None else network
        with torch.no_grad():
            some = self.network(dataset.train_images[: settings["inducing"]])
        self.process = AveragedProcess(some, median_distance(some))
        if self.augment is not None:
            self.augment.raw.requires_grad_()
        self.to(dataset.train_images.device)

    def copies(self, images: Tensor, draws: Tensor | None = None) -> Tensor:
        """Features, ``(N, C, H, W) -> (N, S, D)``, at given draws or new ones, which all images share."""
        made = images[:, None] if self.augment is None else self.augment(images, draws)
        return self.network(made.flatten(0, 1)).unflatten(0, made.shape[:2])

    def amounts(self) -> dict[str, float]:
        """By generator; none without copies."""
        return {} if self.augment is None else self.augment.amounts()

    @torch.no_grad()
    def measured(self, dataset: Dataset) -> dict[str, Any]:
        """Accuracy in percent, and the bound in nats of an image."""
        draws = None
        if self.augment is not None:
            draws = self.augment.draw(1, "sobol", torch.Generator().manual_seed(0))
        copies, y = self.copies(dataset.train_images, draws), targets(dataset.train_labels, dataset.num_classes)

        def others() -> Iterator[Tensor]:
            for images in dataset.test_images.split(CHUNK):
                yield self.copies(images, draws)

        right = self.process.predicted(copies, y, others()).argmax(1) == dataset.test_labels
        return {
            "accuracy": 100 * right.double().mean().item(),
            "bound": self.process.bound(copies, y).item() / len(y),
            "amounts": self.amounts(),
        }


def rates(model: OfImages, steps: int) -> list[dict[str, Any]]:
    """Groups of an optimizer: the kernel's numbers, the inducing points, the amounts."""
    process = model.process
    groups: list[dict[str, Any]] = [
        {"params": [process.log_amplitude, process.log_length, process.log_noise], "lr": RATE},
        {"params": [process.points], "lr": POINT_RATE},
    ]
    if model.augment is not None:
        groups.append({"params": [model.augment.raw], "lr": max(AMOUNT_RATE, REACH / steps)})
    return groups


def run(study: Study, work: Work) -> dict[str, Any]:
    """Raise the bound in the kernel's numbers, inducing points and amounts."""
    s = study.settings
    dataset = data_of(s, work)
    torch.manual_seed(s["seed"])
    order = torch.randperm(len(dataset.train_images))  # the first are inducing points at the start
    dataset = _in_order(dataset, order)
    model = OfImages(dataset, s, s["kernel"] == "averaged")
    y = targets(dataset.train_labels, dataset.num_classes)
    found = climbed(
        lambda: model.process.bound(model.copies(dataset.train_images), y) / len(y),
        rates(model, s["steps"]),
        s["steps"],
        work.folder / CHECKPOINT_FILE,
        model,
        model.amounts,
        progress=work.progress,
        description=study.name,
    )
    result = {**model.measured(dataset), "trajectory": trajectory_of(found)}
    return result | {"samples": [] if model.augment is None else sampled(model.augment, dataset, SAMPLED, COPIES)}


def _in_order(dataset: Dataset, order: Tensor) -> Dataset:
    order = order.to(dataset.train_images.device)
    kinds = ("train_images", "train_labels", "train_ids")
    return dataclasses.replace(dataset, **{kind: getattr(dataset, kind)[order] for kind in kinds})


def trajectory_of(found: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, Any]:
    """Steps, and amounts by generator at each."""
    return {
        "steps": [step for step, _ in found],
        "amounts": {name: [amounts[name] for _, amounts in found] for name in found[0][1]},
    }


def shares_of(trajectory: Mapping[str, Any]) -> list[tuple[list[int], dict[str, list[float]]]]:
    """Steps, and amounts over the full range; nothing where no amount is learned."""
    amounts = trajectory["amounts"]
    shares = {name: [v / FULL_RANGE[name] for v in amounts[name]] for name in GENERATORS if name in amounts}
    return [(trajectory["steps"], shares)] if shares else []


def rows(study: Study, result: dict[str, Any]) -> list[dict[str, Any]]:
    """One row."""
    row = {**study.settings, "accuracy": result["accuracy"], "bound": result["bound"]}
    shares = {f"share_{name}": value / FULL_RANGE[name] for name, value in result["amounts"].items()}
    return [row | {f"share_{name}": shares.get(f"share_{name}") for name in GENERATORS}]


def tables(rows: Sequence[dict[str, Any]], tasks: Iterable[str], key: str, titles: Mapping[str, str]) -> list[str]:
    """A table of shares and bounds for each data set: a line for each task and value of ``key``, which ``titles`` has."""
    blocks = []
    for data in dict.fromkeys(r["data"] for r in rows):
        some, lines = [r for r in rows if r["data"] == data], []
        for task in tasks:
            for value in titles:
                here = [r for r in some if (r["task"], r[key]) == (task, value)]
                if not here:
                    continue
                cells = [SHOWN[task], titles[value]]
                for name in GENERATORS:
                    cells.append(with_error([v for r in here if (v := r[f"share_{name}"]) is not None], "{:.2f}"))
                cells += [with_error([r[k] for r in here], f"{{:.{d}f}}") for k, d in (("accuracy", 1), ("bound", 2))]
                lines.append(cells)
        head = ["images", HEADS[key], *GENERATORS, "accuracy, %", "bound/N"]
        one = some[0]
        said = f"{sizes_said(one)}: {one['train_size']:,} images, {one['inducing']} inducing points, {one['steps']} steps; "
        blocks.append(table(said + seeds_said(sorted({r["seed"] for r in some})), head, lines, [], left=2).rstrip())
    return blocks


def text(rows: Sequence[dict[str, Any]]) -> str:
    """For people: a table for each data set."""
    notes = (
        "Regression on one-hot classes: the bound is that of ten Gaussian outputs, in nats of an image. Amounts over the full range, as of "
        "ranges; the data's own: 1 for rotated ±180° and translated, 0.5 for ±90°, 0 for plain. All of the kernel, the inducing points and "
        f"the amounts are learned by the bound, of at most {IMAGES:,} images, which are in one matrix."
    )
    return "\n\n".join([PART.title, *tables(rows, TASKS, "kernel", KERNELS), notes])


def draw(found: Sequence[tuple[Study, dict[str, Any]]]) -> Any:
    """Trajectories of the amounts."""
    lines: dict[str, list[Any]] = {}
    for study, result in found:
        lines.setdefault(study.settings["task"], []).extend(shares_of(result["trajectory"]))
    true = {SHOWN[task]: TRUE[task] for task in lines}
    shown = {SHOWN[task]: runs for task, runs in lines.items()}
    data = ", ".join(dict.fromkeys(study.settings["data"] for study, _ in found))
    return draw_amounts(shown, f"{PART.title}; {data}", "share of the full range", true, x="step")


def draw_copies(found: Sequence[tuple[Study, dict[str, Any]]]) -> Any:
    """Test images of the first seed, and copies at the learned amounts."""
    return draw_first_copies(found, lambda s: SHOWN[s["task"]])


PART = Part(
    "gp",
    "Gaussian process: amounts that the bound on its evidence learns of transformed images",
    plan,
    run,
    rows,
    text,
    draw,
    data=("fashion-mnist",),
    pictures={"gp-samples": draw_copies},
)
