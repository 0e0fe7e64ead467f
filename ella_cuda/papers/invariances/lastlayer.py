"""An invariant last layer: amounts that the evidence of a network's last layer learns, by what is trained at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from ella_cuda.data import Dataset, TensorLoader
from ella_cuda.papers.invariances.gp import OfImages, rates, rows, shares_of, sizes_of, tables, trajectory_of
from ella_cuda.papers.invariances.images import RATE, cnn, data_of
from ella_cuda.papers.invariances.processes import climbed, targets
from ella_cuda.papers.invariances.ranges import SHOWN, TRUE
from ella_cuda.papers.invariances.sizes import of_small
from ella_cuda.papers.studies import Part, Study, Work
from ella_cuda.progress import bar_size
from ella_cuda.reports.pictures.amounts import draw_amounts
from ella_cuda.run_folder import CHECKPOINT_FILE

TASKS = ("rotated", "plain")
METHODS = {
    "held": "network held",
    "together": "all together",
    "in-turns": "in turns",
    "plain": "network held, not averaged",
}
EPOCHS, BATCH = 30, 100  # of the network before, by the cross entropy
NETWORK_RATE = 1e-3  # by the bound
IMAGES, STEPS, TURN = 500, 120, 20  # at most; of the bound; of a turn


def plan(seeds: Sequence[int], scale: float, data: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A study for each data set, task, method and seed."""
    sizes: dict[str, Any] = {
        "epochs": of_small(scale, EPOCHS, 1),
        "steps": of_small(scale, STEPS, 4),
        "turn": of_small(scale, TURN, 1),
    }
    return {
        f"lastlayer-{name}-{task}-{method}-seed{seed}": {
            **sizes_of(name, scale),
            **sizes,
            "train_size": min(sizes_of(name, scale)["train_size"], of_small(scale, IMAGES, 40)),
            "task": task,
            "method": method,
            "seed": seed,
        }
        for name in data
        for task in TASKS
        for method in METHODS
        for seed in seeds
    }


def pretrained(dataset: Dataset, size: int, epochs: int, description: str, progress: bool) -> nn.Sequential:
    """The network without its last layer, after a training of both by the cross entropy."""
    network = cnn(dataset.channels, size, dataset.num_classes).to(dataset.train_images.device)
    loader = TensorLoader(dataset.train_images, dataset.train_labels, BATCH, shuffle=True)
    optimizer = torch.optim.Adam(network.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    for _ in tqdm(range(epochs), f"{description}, network", disable=not progress, leave=False, **bar_size()):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(network(x), y).backward()
            optimizer.step()
            schedule.step()
    return network[:-1]


def held_groups(method: str, step: int, turn: int) -> tuple[int, ...]:
    """Of :func:`groups_of`, the numbers of those that a step leaves: in turns it is the network, then the amounts."""
    if method == "in-turns":
        return (3,) if step // turn % 2 == 0 else (2,)
    return ()


def groups_of(model: OfImages, method: str, steps: int) -> list[dict[str, Any]]:
    """Groups of the optimizer: the kernel's numbers, the inducing points, the amounts, the network."""
    groups = rates(model, steps)
    if method in ("together", "in-turns"):
        groups.append({"params": [*model.network.parameters()], "lr": NETWORK_RATE})
    else:
        model.network.requires_grad_(False)
    return groups


def run(study: Study, work: Work) -> dict[str, Any]:
    """Train a network, then raise the bound of a process of its features."""
    s = study.settings
    dataset = data_of(s, work)
    torch.manual_seed(s["seed"])
    network = pretrained(dataset, s["image_size"], s["epochs"], study.name, work.progress)
    model = OfImages(dataset, s, s["method"] != "plain", network)
    y = targets(dataset.train_labels, dataset.num_classes)
    found = climbed(
        lambda: model.process.bound(model.copies(dataset.train_images), y) / len(y),
        groups_of(model, s["method"], s["steps"]),
        s["steps"],
        work.folder / CHECKPOINT_FILE,
        model,
        model.amounts,
        lambda step: held_groups(s["method"], step, s["turn"]),
        work.progress,
        study.name,
    )
    return {**model.measured(dataset), "trajectory": trajectory_of(found)}


def text(rows: Sequence[dict[str, Any]]) -> str:
    """For people: a table for each data set."""
    notes = (
        "A convolutional network is trained by the cross entropy; a Gaussian process of the features before its last layer, averaged over "
        "copies of the images, takes that layer's place, for regression on one-hot classes (Schwöbel et al., AISTATS 2022). Its bound learns "
        "kernel, inducing points and amounts (network held), the network too (all together), or network and amounts in turns. "
        "Amounts over the full range; the data's own: rotation 1 of rotated ±180°, 0 of plain."
    )
    return "\n\n".join([PART.title, *tables(rows, TASKS, "method", METHODS), notes])


def draw(found: Sequence[tuple[Study, dict[str, Any]]]) -> Any:
    """Trajectories of the amounts."""
    lines: dict[str, list[Any]] = {}
    true = {}
    for study, result in found:
        task = study.settings["task"]
        title = f"{SHOWN[task]}, {METHODS[study.settings['method']]}"
        true[title] = TRUE[task]
        lines.setdefault(title, []).extend(shares_of(result["trajectory"]))
    lines = {title: runs for title, runs in lines.items() if runs} or lines
    data = ", ".join(dict.fromkeys(study.settings["data"] for study, _ in found))
    return draw_amounts(lines, f"{PART.title}; {data}", "share of the full range", true, x="step")


PART = Part(
    "lastlayer",
    "Last layer: amounts that the evidence of a network's last layer learns",
    plan,
    run,
    rows,
    text,
    draw,
    data=("fashion-mnist",),
)
