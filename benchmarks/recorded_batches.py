"""A batch of a fit, and a prediction, as it runs by hooks and autograd, and recorded, in turns: milliseconds of the processor, the least of
the rounds.

    python -m benchmarks.recorded_batches [--threads 1] [--rounds 5] [CASE ...]
    python -m benchmarks.recorded_batches --counts

Sums and covariances must be the same to the last bit. "pays after" is the number of batches after which recording one has paid.

``--counts``: what torch dispatches in fits of resnet18, norms frozen, one sampled column, counted on the CPU in the branches of CUDA, with a
stand-in for its graphs whose ops are not counted when they are replayed. Batches are of 8 images; the bound below which sums are float64's
is that of 512 images over 64.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from itertools import pairwise
from time import process_time
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks.bench_networks import CLASSES, network
from benchmarks.counted_ops import NETWORKS, Counted, as_on_cuda
from ella_cuda.laplace import KronLaplace, known_model, recorded_batches
from ella_cuda.models import neyshabur

BATCHES = 14


def _paper(layer: str) -> nn.Module:
    return neyshabur(layer=layer, in_channels=1, num_classes=10, width=4, image_size=32)


CASES = {  # network, images of a batch
    "resnet18": (lambda: network("resnet18"), (3, 32, 32), 8),
    "vgg16": (lambda: network("vgg16"), (3, 32, 32), 8),
    "conv": (lambda: _paper("conv"), (1, 32, 32), 16),
    "f_fc+conv": (lambda: _paper("f_fc+conv"), (1, 32, 32), 16),
    "s_fc+s_conv": (lambda: _paper("s_fc+s_conv"), (1, 32, 32), 16),
    "perceptron": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10)),
        (1, 28, 28),
        64,
    ),
}


def fit(model: nn.Module, x: Tensor, y: Tensor, fisher: str, patience: float) -> tuple[list[float], list[Tensor]]:
    """Times of the batches, and the sums."""
    times: list[float] = []

    def loader():
        for _ in range(BATCHES):
            times.append(process_time())
            yield x, y

    known_model._known.clear()
    torch.manual_seed(0)
    anything = patch.object(recorded_batches, "LARGE", 1 << 40)
    with patch.object(recorded_batches, "PATIENCE", {"cpu": patience}), anything:
        la = KronLaplace(model, fisher=fisher).fit(loader())
    sums = [side for factor in la.factors.values() for side in (factor.inputs, factor.outputs)]
    return [after - before for before, after in pairwise(times)], sums


def predict(model: nn.Module, x: Tensor, y: Tensor, _: str, patience: float) -> tuple[list[float], list[Tensor]]:
    """Times of covariances, and these."""
    known_model._known.clear()
    torch.manual_seed(0)
    la = KronLaplace(model, fisher="mc").fit([(x, y)])
    times = [process_time()]
    anything = patch.object(recorded_batches, "LARGE", 1 << 40)
    with patch.object(recorded_batches, "PATIENCE", {"cpu": patience}), anything:
        for number in range(BATCHES):
            covariances = la.functional_variance(x * (1 + number / BATCHES))
            times.append(process_time())
    return [after - before for before, after in pairwise(times)], [covariances]


def counts() -> None:
    """Print what is dispatched in three fits, phase by phase."""
    model, likelihood, _ = NETWORKS["resnet18"]()

    def fit() -> dict[str, Counted]:
        found = {}

        class Loader:
            def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
                for number in range(4):
                    found[f"batch {number + 1}"] = counted - Counted()
                    yield torch.randn(8, 3, 32, 32), torch.arange(8) % 10
                found["end"] = counted - Counted()

        with Counted() as counted:
            KronLaplace(model, likelihood, fisher="mc").fit(Loader())
        found["after"] = counted - Counted()
        begin = found["batch 1"]
        phases = {name: found[after] - found[name] for name, after in pairwise(found)}
        return {"begin": begin, **phases, "whole fit": found["after"]}

    with as_on_cuda():
        for word in ("first", "second", "third"):
            for phase, found in fit().items():
                print(f"{word} fit, {phase:10}{found}  {dict(found.reads) or ''}", flush=True)
    operators = [kind.tape.operators for kind in known_model.known_of(model).kinds.values() if kind.tape]
    print("operators of a recorded batch, views apart:", *operators)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", default=[*CASES])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--counts", action="store_true", help="count instead")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.counts:
        return counts()
    print(f"{'network':14}{'columns':9}{'as it is':>10}{'recorded':>10}{'times':>7}{'pays after':>12}")
    for name in args.cases:
        make, shape, count = CASES[name]
        torch.manual_seed(0)
        model, x, y = make().eval(), torch.randn(count, *shape), torch.arange(count) % min(CLASSES, 10)
        for fisher in ("mc", "exact", "predict"):
            of = predict if fisher == "predict" else fit
            least = {"as it is": math.inf, "recorded": math.inf, "recording": math.inf}
            for _ in range(args.rounds):
                plain, sums = of(model, x, y, fisher, math.inf)
                again, others = of(model, x, y, fisher, 3)
                assert all(map(torch.equal, sums, others)), name
                found = {"as it is": min(plain[2:]), "recorded": min(again[-5:]), "recording": max(again[1:5])}
                least = {key: min(value, found[key]) for key, value in least.items()}
            gain = least["as it is"] - least["recorded"]
            pays = math.ceil((least["recording"] - least["as it is"]) / gain) if gain > 0 else "never"
            numbers = f"{1e3 * least['as it is']:>10.2f}{1e3 * least['recorded']:>10.2f}{least['as it is'] / least['recorded']:>7.2f}"
            print(f"{name:14}{fisher:9}{numbers}{pays:>12}", flush=True)


if __name__ == "__main__":
    main()
