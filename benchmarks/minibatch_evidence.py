"""Evidence steps from subsets of the training images beside steps from all, in one training each.

    python -m benchmarks.minibatch_evidence [--images N] [--epochs N] [--ways WAY...] [--out FILE]

A convolutional network (2 convolutions, 2 linear layers, 19,858 parameters) on Fashion-MNIST, trained by Adam with EvidenceCallback: the
prior in the loss, and after each epoch from the third an evidence step, 10 steps on the precisions. A line for each way: CPU seconds of an
evidence step on one thread (median), how many times as fast as the first line's, ``-log q / N`` of its last step, mean of the log
precisions and their mean distance from the first line's, NLL and accuracy of test images at the trained weights.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ella_cuda.data import TensorLoader, load
from ella_cuda.files import write_file
from ella_cuda.reports.text import columns
from ella_cuda.training import EvidenceCallback

WAYS: dict[str, tuple[int, dict[str, Any]]] = {  # the loader's batch size, and arguments
    "Kronecker, all": (256, {}),
    "Kronecker, all, one sampled column": (256, {"fisher": "mc"}),
    "Kronecker, 4096 images, one sampled column": (256, {"batches": 16, "fisher": "mc"}),
    "Kronecker, 2048 images, one sampled column": (256, {"batches": 8, "fisher": "mc"}),
    "Kronecker, 4096 images": (256, {"batches": 16}),
    "Kronecker, 512 images": (512, {"batches": 1}),
    "Kronecker, 256 images": (256, {"batches": 1}),
    "diagonal, 256 images": (256, {"batches": 1, "form": "diag"}),
    "NTK, 128 images, columns apart": (128, {"batches": 1, "form": "ntk", "outputs": "apart"}),
    "NTK, 64 images": (64, {"batches": 1, "form": "ntk"}),
    "NTK, 16 images": (16, {"batches": 1, "form": "ntk"}),
}
BURN_IN = 2


def network() -> nn.Module:
    torch.manual_seed(0)
    first = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*first, nn.MaxPool2d(4), nn.Flatten(), nn.Linear(144, 120), nn.ReLU(), nn.Linear(120, 10))


def train(images: torch.Tensor, labels: torch.Tensor, epochs: int, size: int, how: dict[str, Any]) -> tuple[Any, ...]:
    """The model, its evidence, and the seconds of each evidence step."""
    model, loader = network(), TensorLoader(images, labels, 128, shuffle=True)
    of_evidence = TensorLoader(images, labels, size, shuffle=True)
    evidence = EvidenceCallback(model, of_evidence, burn_in=BURN_IN, n_hypersteps=10, lr_hyp=0.3, **how)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    torch.manual_seed(1)
    took = []
    for epoch in range(epochs):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            evidence.penalised(F.cross_entropy(model(x), y)).backward()
            optimizer.step()
        schedule.step()
        model.eval()
        begin = time.process_time()
        if evidence.step(epoch) is not None:
            took.append(time.process_time() - begin)
    return model, evidence, took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000, metavar="N", help="to train on, the first (2000)")
    parser.add_argument("--epochs", type=int, default=12, metavar="N", help="of each training (12)")
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=WAYS,
        default=list(WAYS),
        metavar="WAY",
        help="the first is what others are compared with (all)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table there too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = load("fashion-mnist")
    images, labels = data.train_images[: args.images], data.train_labels[: args.images]
    lines = [("way", "s a step", "times", "-log q/N", "log δ", "off", "test NLL", "accuracy")]
    first: tuple[float, torch.Tensor] | None = None
    for way in args.ways:
        size, how = WAYS[way]
        if size * how.get("batches", 0) > len(images):
            continue  # no subset
        model, evidence, took = train(images, labels, args.epochs, size, how)
        with torch.no_grad():
            logits = torch.cat([model(x) for x in data.test_images.split(1000)])
        step, logs = statistics.median(took), evidence.prior_precision.log()
        first = (step, logs) if first is None else first
        values = (evidence.margliks[-1] / len(images), logs.mean(), (logs - first[1]).abs().mean())
        nll, accuracy = (
            F.cross_entropy(logits, data.test_labels),
            (logits.argmax(1) == data.test_labels).double().mean(),
        )
        shown = (f"{step:.3f}", f"{first[0] / step:.1f}", *(f"{float(v):.2f}" for v in values))
        lines.append((way, *shown, f"{nll:.4f}", f"{100 * accuracy:.1f} %"))
        print(*lines[-1], flush=True)
    text = columns(lines)
    print(text)
    if args.out is not None:
        write_file(args.out, text + "\n")


if __name__ == "__main__":
    main()
