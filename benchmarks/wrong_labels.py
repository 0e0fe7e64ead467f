"""Which score finds wrong labels? Fashion-MNIST's training images, some of whose labels were replaced.

    python -m benchmarks.wrong_labels [--seeds N] [--images N] [--out DIR]

Of so many images (3,000) 5 % get another of the ten labels at random; the CONV network of ``benchmarks.predictions`` is trained on all for
10 epochs. A score ranks the images; its precision is the percentage of wrong labels among as many images as there are wrong labels.

loss                     of the trained network
TracIn                   squared norm of the loss' gradient in the last layer's parameters, summed over three checkpoints times their learning
                         rates: the self-influence of Pruthi et al., NeurIPS 2020
leave-one-out, last      ``la.influence()`` of Kronecker factors of the last layer, prior precision 1
leave-one-out, all       likewise of all layers
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.predictions import images, network
from ella_cuda.data import TensorLoader
from ella_cuda.files import write_file
from ella_cuda.laplace import KronLaplace
from ella_cuda.reports.text import columns

SHARE, EPOCHS, BATCH, RATE = 0.05, 10, 64, 3e-3
CHECKPOINTS = (4, 7, 10)  # epochs


def relabelled(y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Labels of which some are others, and which are."""
    wrong = torch.zeros(len(y), dtype=torch.bool)
    wrong[torch.randperm(len(y), generator=generator)[: round(SHARE * len(y))]] = True
    shift = torch.randint(1, 10, y.shape, generator=generator)
    return torch.where(wrong, (y + shift) % 10, y), wrong


@torch.no_grad()
def self_influence(model: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
    """The squared norms of gradients in the last layer's weight and bias, a product of those of its outputs and inputs."""
    training = model.training
    model.eval()
    inputs = model[:-1](x)
    error = torch.softmax(model[-1](inputs), 1) - F.one_hot(y, 10)
    model.train(training)
    return error.square().sum(1) * (inputs.square().sum(1) + 1)


def trained(x: Tensor, y: Tensor) -> tuple[nn.Sequential, Tensor]:
    """A network, from torch's global generator, and its images' scores by TracIn."""
    model, score = network(), torch.zeros(len(x))
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * math.ceil(len(x) / BATCH))
    for epoch in range(1, EPOCHS + 1):
        rate = schedule.get_last_lr()[0]
        for xs, ys in TensorLoader(x, y, BATCH, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(model(xs), ys).backward()
            optimizer.step()
            schedule.step()
        if epoch in CHECKPOINTS:
            score += rate * self_influence(model, x, y)
    return model.eval(), score


def rows(seed: int, count: int) -> list[dict[str, float | str]]:
    """Of one network."""
    data = images("fashion-mnist", count)
    x = (data.train_images - data.train_images.mean()) / data.train_images.std()
    y, wrong = relabelled(data.train_labels, torch.Generator().manual_seed(seed))
    torch.manual_seed(seed)
    model, tracin = trained(x, y)
    with torch.no_grad():
        loss = F.cross_entropy(model(x), y, reduction="none")
    found = [{"score": "loss", "seed": seed, "order": loss}, {"score": "TracIn", "seed": seed, "order": tracin}]
    loader = TensorLoader(x, y, 250)
    for name, subset in (("leave-one-out, last", "last_layer"), ("leave-one-out, all", "all")):
        begin = time.perf_counter()
        ranked = KronLaplace(model, subset_of_weights=subset).fit(loader).influence()
        seconds = time.perf_counter() - begin
        found.append({"score": name, "seed": seed, "order": ranked.score, "scale": ranked.scale, "seconds": seconds})
    for row in found:
        top = row.pop("order").argsort(descending=True)[: int(wrong.sum())]
        row["precision"] = 100 * float(wrong[top].double().mean())
    return found


def table(found: list[dict[str, float | str]]) -> str:
    """A line for each score: means over seeds, with the smallest and the largest precision."""
    lines = [("score", "precision, %", "from", "to", "factor of the precisions", "seconds")]
    for score in dict.fromkeys(row["score"] for row in found):
        own = [row for row in found if row["score"] == score]
        precisions = [row["precision"] for row in own]
        more = [f"{statistics.mean(r[k] for r in own):.3g}" if k in own[0] else "" for k in ("scale", "seconds")]
        lines.append((score, *(f"{f(precisions):.1f}" for f in (statistics.mean, min, max)), *more))
    return columns(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="networks (%(default)s)")
    parser.add_argument("--images", type=int, default=3000, metavar="N", help="of the training (%(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write rows and table there")
    args = parser.parse_args()
    found = [row for seed in range(args.seeds) for row in rows(seed, args.images)]
    text = table(found)
    print(text)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        write_file(args.out / "rows.json", json.dumps(found, indent=1) + "\n")
        write_file(args.out / "table.txt", text + "\n")


if __name__ == "__main__":
    main()
