"""Linear last layers: fits, predictions and the linear mode, beside laplace-torch's, and beside passes of the whole network.

    python -m benchmarks.last_layers [--threads N] [--images N] [--out FILE]

Kronecker factors of the last layer of torchvision's resnet18, not trained, with 10 and 100 classes, at images of 32x32 pixels; and of a
layer of 512 or 2,048 inputs and 1,000 classes, ResNet18's and ResNet50's, at given inputs. A line for each: who, seconds, and bytes at the
peak above what was there before. "passes" has the linear mode with the network run in every pass over the data, as of layers that are not
last. The linear mode has a residual of 1e-3 or less, or the passes that the line says. laplace-torch's prediction has all Jacobians of the
last layer in memory, 8.2 GB for an image of 1,000 classes, and is left out there.
"""

from __future__ import annotations

import argparse
import functools
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import resnet18

from benchmarks.memory import peak_bytes
from ella_cuda.data import TensorLoader
from ella_cuda.laplace import KronLaplace
from ella_cuda.laplace.last_layer import LastLayer
from ella_cuda.reports.text import columns

BATCH, TOLERANCE, MOST, LEFT_OUT, CLASSES, SMALL, LARGE = 64, 1e-3, 200, 4, 1000, 512, 2048
HEADINGS = ("layer", "what", "who", "seconds", "MB")


def measured(call: Callable[[], Any]) -> tuple[float, float | None]:
    """Seconds of a second call, and megabytes of a third."""
    call()
    begin = time.perf_counter()
    call()
    seconds = time.perf_counter() - begin
    peak = peak_bytes(call, torch.device("cpu"), once=True)
    return seconds, None if peak is None else peak / 1e6


def found(la: KronLaplace, loader: Any, features: bool) -> str:
    """Find the linear mode anew; returns the number of passes."""
    whole, la.linear_fit = LastLayer.of, None
    try:
        if not features:
            LastLayer.of = classmethod(lambda *_: None)
        la.fit_linear_mode(loader, TOLERANCE, max_passes=MOST)
    finally:
        LastLayer.of = whole
    return f"linear mode, {la.linear_fit.passes} passes"


def of_networks(images: int) -> Iterator[tuple[str, str, str, Callable[[], Any]]]:
    import laplace

    for classes in (10, 100):
        torch.manual_seed(0)
        model, name = resnet18(num_classes=classes).eval(), f"512 x {classes}"
        x, y = torch.randn(images, 3, 32, 32), torch.arange(images) % classes
        loader, few = TensorLoader(x, y, BATCH), x[:BATCH]
        theirs = laplace.Laplace(model, "classification", subset_of_weights="last_layer", hessian_structure="kron")
        ours = KronLaplace(model, subset_of_weights="last_layer")
        yield name, "fit", "ella_cuda", lambda ours=ours, loader=loader: ours.fit(loader)
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), BATCH)
        yield name, "fit", "laplace-torch", lambda theirs=theirs, data=data: theirs.fit(data)
        what = f"predict {BATCH} images"
        yield name, what, "ella_cuda", lambda ours=ours, few=few: ours(few)
        yield name, what, "laplace-torch", lambda theirs=theirs, few=few: theirs(few)
        if classes == 10:
            what = found(ours, loader, True)
            yield name, what, "ella_cuda", lambda ours=ours, loader=loader: found(ours, loader, True)
            yield name, what, "passes", lambda ours=ours, loader=loader: found(ours, loader, False)


def of_many_classes(images: int, features: int) -> Iterator[tuple[str, str, str, Callable[[], Any]]]:
    torch.manual_seed(0)
    model, name = nn.Sequential(nn.Flatten(), nn.Linear(features, CLASSES)), f"{features} x {CLASSES}"
    x, y = torch.randn(images, features).relu(), torch.arange(images) % CLASSES
    loader, la = TensorLoader(x, y, BATCH), KronLaplace(model, subset_of_weights="last_layer")

    def evidence() -> Tensor:
        la._hold()  # without the eigenvalues that are there
        for factor in la.factors.values():
            factor.output_moment.count(0)
            if factor.input_moment is not None:
                factor.input_moment.count(0)
        return la.log_marginal_likelihood()

    yield name, f"fit of {images} images", "ella_cuda", lambda: la.fit(loader)
    yield name, "evidence", "ella_cuda", evidence
    yield name, f"predict {BATCH} images", "ella_cuda", lambda: la(x[:BATCH])
    yield name, "covariances of 8 images", "ella_cuda", lambda: la.functional_variance(x[:8])
    few = [(x[:LEFT_OUT], y[:LEFT_OUT])]
    yield name, f"leave out {LEFT_OUT} images", "ella_cuda", lambda: la.leave_one_out(few)
    if features == SMALL:
        yield name, found(la, loader, True), "ella_cuda", lambda: found(la, loader, True)
    yield name, f"add {BATCH} images", "ella_cuda", lambda: la.update(x[:BATCH], y[:BATCH])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of torch (1)")
    parser.add_argument("--images", type=int, default=128, metavar="N", help="of a fit (128)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table there too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    lines = [list(HEADINGS)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resnet18s, resnet50s = (functools.partial(of_many_classes, features=width) for width in (SMALL, LARGE))
        for part in (of_networks, resnet18s, resnet50s):
            for layer, what, who, call in part(args.images):
                seconds, peak = measured(call)
                lines.append([layer, what, who, f"{seconds:.3g}", "-" if peak is None else f"{peak:.0f}"])
    text = f"{args.images} images, {args.threads} thread(s)\n" + columns(lines, left=3) + "\n"
    print(text, end="")
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
