"""Local deformations: strength and smoothness that the evidence learns of deformed images."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ella_cuda.augment import LocalDeformation
from ella_cuda.data import Dataset
from ella_cuda.digest import tensors_digest
from ella_cuda.experiments.run import sampled
from ella_cuda.papers.invariances.images import (
    HIDDEN,
    data_of,
    measured,
    mlp,
    schedule,
    settings_of,
    sizes_said,
    small_said,
    trained,
)
from ella_cuda.papers.invariances.pictures import draw_first_copies
from ella_cuda.papers.invariances.ranges import EPOCHS
from ella_cuda.papers.studies import Part, Study, Work, share
from ella_cuda.papers.studies.text import seeds_said, table, with_error
from ella_cuda.reports.pictures.amounts import draw_amounts

AMOUNTS = ("strength", "smoothness")
TRUE = {  # of images; half images
    "weak": {"strength": 0.1, "smoothness": 0.4},
    "strong": {"strength": 0.25, "smoothness": 0.4},
    "smooth": {"strength": 0.25, "smoothness": 0.8},
    "plain": {},
}
METHODS = {"evidence": "evidence", "map": "MAP"}
SAMPLED, COPIES = 3, 6  # images, and copies of each, in a picture
CHUNK = 1000


def plan(seeds: Sequence[int], scale: float, data: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A study for each data set, kind of deformation, method and seed."""
    made = {}
    for name in data:
        common = settings_of(name, scale) | schedule(share(scale, EPOCHS, 3))
        common["hidden"] = share(scale, HIDDEN, 8)
        for kind in TRUE:
            for method in METHODS:
                for seed in seeds:
                    varied = {"task": "plain", "deformation": kind, "method": method, "seed": seed}
                    made[f"local-{name}-{kind}-{method}-seed{seed}"] = {**common, **varied}
    return made


def deformed(dataset: Dataset, kind: str) -> Dataset:
    """The images of training and test, each deformed once."""
    if not TRUE[kind]:
        return dataset
    make = LocalDeformation(1, TRUE[kind])

    @torch.no_grad()
    def of(images: Tensor, seed: int) -> Tensor:
        eps = make.draw(len(images), "independent", torch.Generator().manual_seed(seed))
        made = [make(x.cpu(), e)[:, 0] for x, e in zip(images.split(CHUNK), eps.split(CHUNK), strict=True)]
        return torch.cat(made).to(images.device)

    train, test = of(dataset.train_images, 0), of(dataset.test_images, 1)
    strength = torch.tensor([TRUE[kind][name] for name in AMOUNTS])
    digest = f"{dataset.digest}-{tensors_digest(strength)}"
    return dataclasses.replace(dataset, train_images=train, test_images=test, digest=digest)


def run(study: Study, work: Work) -> dict[str, Any]:
    """Train in one way on images that are deformed in one way."""
    s = study.settings
    dataset = deformed(data_of(s, work), s["deformation"])
    augment = LocalDeformation(s["copies"]) if s["method"] == "evidence" else None
    found = trained(
        lambda: mlp(s["hidden"], dataset.channels, s["image_size"], dataset.num_classes),
        dataset,
        s,
        work,
        s["method"],
        augment=augment,
    )
    result = {**measured(found, dataset), "trajectory": {"epochs": found.epochs, "amounts": found.amounts}}
    if augment is None:
        return result | {"samples": []}
    draws = augment.draw(SAMPLED * COPIES, "independent", torch.Generator().manual_seed(0))[:, :1]
    eps = draws.unflatten(0, (SAMPLED, COPIES)).flatten(1, 2).to(dataset.train_images.device)
    return result | {"samples": sampled(found.model.augment, dataset, SAMPLED, COPIES, eps)}


def rows(study: Study, result: dict[str, Any]) -> list[dict[str, Any]]:
    """One row."""
    s = study.settings
    row = {**s, **{key: result[key] for key in ("accuracy", "nll", "neg_log_marginal_likelihood")}}
    row |= {name: result["amounts"].get(name) for name in AMOUNTS}
    return [row | {f"true_{name}": TRUE[s["deformation"]].get(name) for name in AMOUNTS}]


def text(rows: Sequence[dict[str, Any]]) -> str:
    """For people: a table for each data set."""
    blocks = []
    for data in dict.fromkeys(r["data"] for r in rows):
        some, lines = [r for r in rows if r["data"] == data], []
        for kind in [kind for kind in TRUE if any(r["deformation"] == kind for r in some)]:
            for method in [m for m in METHODS if any((r["deformation"], r["method"]) == (kind, m) for r in some)]:
                here = [r for r in some if (r["deformation"], r["method"]) == (kind, method)]
                cells = [kind, METHODS[method]]
                for name in AMOUNTS:
                    cells.append(f"{TRUE[kind][name]:g}" if name in TRUE[kind] else "-")
                    cells.append(with_error([r[name] for r in here if r[name] is not None], "{:.2f}"))
                cells += [
                    with_error([r[key] for r in here], style)
                    for key, style in (
                        ("accuracy", "{:.1f}"),
                        ("nll", "{:.3f}"),
                        ("neg_log_marginal_likelihood", "{:.3f}"),
                    )
                ]
                lines.append(cells)
        head = ["images", "method", "strength", "learned", "smoothness", "learned", "accuracy, %", "NLL", "-log q/N"]
        one, seeds = some[0], sorted({r["seed"] for r in some})
        title = (
            f"{sizes_said(one)}: {one['train_size']:,} images, {one['epochs']} epochs, {one['hidden']:,} hidden units"
        )
        blocks.append(table(f"{title}; {seeds_said(seeds)}", head, lines, [], left=2).rstrip())
    notes = (
        "Every image is deformed once, by a smooth random displacement of every pixel, whose deviation is the strength and whose neighbours "
        "within about the smoothness move together, both in half images. Evidence: a network averaged over deformed copies, whose two "
        "amounts the evidence learns; MAP: the network alone, one precision by the evidence."
    )
    return "\n\n".join([PART.title, *blocks, small_said(rows) + notes])


def draw(found: Sequence[tuple[Study, dict[str, Any]]]) -> Any:
    """Trajectories of the amounts."""
    lines: dict[str, list[Any]] = {}
    for study, result in found:
        trajectory = result["trajectory"]
        runs = lines.setdefault(study.settings["deformation"], [])
        runs += [(trajectory["epochs"], trajectory["amounts"])] if trajectory["amounts"] else []
    data = ", ".join(dict.fromkeys(study.settings["data"] for study, _ in found))
    return draw_amounts(lines, f"{PART.title}; {data}", "half images", TRUE)


def draw_copies(found: Sequence[tuple[Study, dict[str, Any]]]) -> Any:
    """Test images of the first seed, and copies at the learned amounts."""
    return draw_first_copies(found, lambda s: s["deformation"])


PART = Part(
    "local",
    "Local deformations: strength and smoothness that the evidence learns of deformed images",
    plan,
    run,
    rows,
    text,
    draw,
    data=("fashion-mnist",),
    pictures={"local-samples": draw_copies},
)
