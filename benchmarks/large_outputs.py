"""What leaving out columns of many classes' Hessian costs: errors of the evidence, beside the columns that go back through the network.

    python -m benchmarks.large_outputs [--classes K] [--images N] [--out FILE]

Inputs of 24 numbers around a centre for each class, and a network with one hidden layer of 64, as initialised and once Adam has brought the
loss below 1 nat. A line for each state and setting of ``KronLaplace``; errors are relative to the exact curvature, at the prior precisions
that its evidence chooses. For fisher="mc", the largest of five draws.

columns          that go back for a batch of 250, on average
log q            |log q - exact| / |exact|, of the evidence
log determinant  the same of ``log_det_ratio``, the part of it that is made of the curvature
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from ella_cuda.data import TensorLoader
from ella_cuda.laplace import KronLaplace
from ella_cuda.reports.text import columns

SIZE, HIDDEN, BATCH, TRAINED, DRAWS = 24, 64, 250, 1.0, 5
TOLERANCES = (0.01, 0.05, 0.1)
HEADINGS = ("state", "setting", "columns", "log q", "log determinant")


def networks(classes: int, images: int) -> Iterator[tuple[str, nn.Module, Tensor, Tensor]]:
    """The network in both states, with the data."""
    torch.manual_seed(0)
    centres, y = torch.randn(classes, SIZE), torch.arange(images) % classes
    x = centres[y] + 0.3 * torch.randn(images, SIZE)
    model = nn.Sequential(nn.Linear(SIZE, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, classes))
    yield "initial", model, x, y
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    while (loss := nn.functional.cross_entropy(model(x), y)) > TRAINED:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    yield "trained", model, x, y


def numbers(la: KronLaplace) -> Tensor:
    """The evidence and the log determinant."""
    return torch.stack([la.log_marginal_likelihood(), la.log_det_ratio])


def count(la: KronLaplace, loader: TensorLoader) -> float:
    """Columns of a batch, on average."""
    if la.fisher == "mc":
        return 1.0
    with torch.no_grad():
        each = [len(la.likelihood_function.columns(la.model(x), y, la.column_tolerance)) for x, y in loader]
    return sum(each) / len(each)


def compare(model: nn.Module, loader: TensorLoader) -> Iterator[tuple[str, float, Tensor]]:
    """Setting, columns, the two relative errors."""
    exact = KronLaplace(model).fit(loader)
    exact.optimize_prior_precision()
    expected, precision = numbers(exact), exact.prior_precision
    yield "exact", count(exact, loader), torch.zeros(2)
    for tolerance in TOLERANCES:
        la = KronLaplace(model, column_tolerance=tolerance, prior_precision=precision).fit(loader)
        yield f"column_tolerance={tolerance}", count(la, loader), ((numbers(la) - expected) / expected).abs()
    la = KronLaplace(model, fisher="mc", prior_precision=precision)
    draws = [numbers(la.fit(loader, generator=torch.Generator().manual_seed(seed))) for seed in range(DRAWS)]
    yield 'fisher="mc"', count(la, loader), ((torch.stack(draws) - expected) / expected).abs().amax(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=1000, metavar="K", help="outputs (1000)")
    parser.add_argument("--images", type=int, default=300, metavar="N", help="data points (300)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table there too")
    args = parser.parse_args()
    lines = [list(HEADINGS)]
    for state, model, x, y in networks(args.classes, args.images):
        for setting, each, errors in compare(model, TensorLoader(x, y, BATCH)):
            lines.append([state, setting, f"{each:.0f}", *(f"{100 * e:.2g} %" for e in errors.tolist())])
    text = f"{args.classes} classes, {args.images} data points\n" + columns(lines, left=2) + "\n"
    print(text, end="")
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
