"""Leave-one-out of a network's training images, beside an epoch of training and beside laplace-torch's variances of outputs.

    python -m benchmarks.leave_one_out [--network NAME] [--images N] [--theirs N] [--size N] [--threads N] [--out FILE]

A network of torchvision (resnet18), not trained, 10 classes, its norms frozen, Kronecker factors of all layers from the same random images. A
line for each: what, images, seconds, and seconds for 1,000 images if these were in proportion. Each call is timed the second time, when
the factors are decomposed. laplace-torch's functional variance has all Jacobians in memory, 450 MB for an image of resnet18, so that it gets
few images.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch.utils.data import DataLoader, TensorDataset

from ella_cuda.data import TensorLoader
from ella_cuda.files import write_file
from ella_cuda.laplace import KronLaplace
from ella_cuda.reports.text import columns

CLASSES, BATCH = 10, 64


def seconds(call: Callable[[], Any]) -> float:
    """Of a second call."""
    call()
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def works(args: argparse.Namespace) -> Iterator[tuple[str, int, Callable[[], Any]]]:
    torch.manual_seed(0)
    model = getattr(torchvision.models, args.network)(num_classes=CLASSES)
    x, y = torch.randn(args.images, 3, args.size, args.size), torch.randint(CLASSES, (args.images,))
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.requires_grad_(False)  # which laplace-torch's backend refuses
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def epoch() -> None:
        model.train()
        for xs, ys in TensorLoader(x, y, BATCH, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(model(xs), ys).backward()
            optimizer.step()
        model.eval()

    yield "epoch of training", args.images, epoch
    loader = TensorLoader(x, y, BATCH)
    la = KronLaplace(model, fisher="mc", prior_precision=100.0).fit(loader)
    yield "leave-one-out, ella_cuda", args.images, lambda: la.leave_one_out(loader)
    yield "functional variance, ella_cuda", args.images, lambda: [la.functional_variance(xs) for xs, _ in loader]
    if args.theirs:
        from laplace import Laplace

        few = x[: args.theirs]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = Laplace(model, "classification", "all", "kron", prior_precision=100.0)
            theirs.fit(DataLoader(TensorDataset(few, y[: args.theirs]), BATCH))
        yield (
            "functional variance, laplace-torch",
            args.theirs,
            lambda: [theirs.functional_variance(theirs.backend.jacobians(one[None])[0]) for one in few],
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="resnet18", metavar="NAME", help="of torchvision (resnet18)")
    parser.add_argument("--images", type=int, default=256, metavar="N", help="of the fit (256)")
    parser.add_argument("--theirs", type=int, default=2, metavar="N", help="of laplace-torch (2; 0 leaves it out)")
    parser.add_argument("--size", type=int, default=32, metavar="N", help="pixels a side (32)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of torch (1)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table there too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    lines = [("what", "images", "seconds", "of 1,000 images")]
    for what, images, call in works(args):
        took = seconds(call)
        lines.append((what, f"{images:,}", f"{took:.2f}", f"{1000 * took / images:.1f}"))
        print(what, lines[-1][2], flush=True)
    text = columns(lines)
    print(text)
    if args.out is not None:
        write_file(args.out, text + "\n")


if __name__ == "__main__":
    main()
