"""How a fit and its evidence would scale over processes, from times that one process measures here::

    python -m benchmarks.distributed_scaling --width 10 --layer f_fc+conv conv fc

Measured: seconds of a data point's part of a pass (the difference of two fits), of the eigenvalues of a block of every size, of the steps
on the precisions, and the packed bytes of the factors. Computed: R ranks pass over N/R data points each; one sum of all factors goes around
a ring, 2 (R-1)/R S/B; the blocks' eigenvalues are those of their owners, the longest list of which counts; steps on the precisions are
everybody's. Links have one bandwidth within a machine, of eight ranks, and another between machines. Latency, and waiting for a rank whose
batches are larger, are left out: the numbers are bounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence

import torch

from benchmarks.machine import processor
from ella_cuda.data import TensorLoader
from ella_cuda.distributed import owners, packed_numbers
from ella_cuda.laplace import KronLaplace
from ella_cuda.laplace.eigenvalues import eigenvalues_of_all
from ella_cuda.laplace.evidence import evidence_at
from ella_cuda.models import neyshabur

RANKS = (1, 2, 4, 8, 16, 64)
PER_MACHINE = 8
WITHIN, BETWEEN = 450e9, 50e9  # bytes a second
HYPERSTEPS = 10


@dataclasses.dataclass(frozen=True)
class Measured:
    """Of one process.

    Attributes:
        per_point: seconds of a data point in a pass.
        blocks: seconds of the eigenvalues of every block.
        steps: seconds of an evidence step's steps on the precisions.
        packed: bytes of the packed factors.
        values: bytes of all eigenvalues.
    """

    per_point: float
    blocks: Sequence[float]
    steps: float
    packed: int
    values: int


def predicted(measured: Measured, data_points: int, ranks: int) -> dict[str, float]:
    """Seconds of each part of a fit with its evidence on so many ranks."""
    bandwidth = WITHIN if ranks <= PER_MACHINE else BETWEEN
    owner = owners(measured.blocks, ranks)
    load = [0.0] * ranks
    for seconds, rank in zip(measured.blocks, owner, strict=True):
        load[rank] += seconds
    return {
        "pass": measured.per_point * -(-data_points // ranks),
        "sum": 2 * (ranks - 1) / ranks * measured.packed / bandwidth,
        "eigenvalues": max(load),
        "gather": (ranks - 1) / ranks * measured.values / bandwidth,
        "steps": measured.steps,
    }


def measure(width: int, layer: str, images: int, batch_size: int) -> Measured:
    torch.manual_seed(0)
    model = neyshabur(layer, in_channels=3, num_classes=10, width=width)
    x, y = torch.randn(2 * images, 3, 32, 32), torch.randint(10, (2 * images,))
    la = KronLaplace(model)
    la.fit(TensorLoader(x[:batch_size], y[:batch_size], batch_size))  # the first one allocates
    few, many = (
        _seconds(lambda count=count: la.fit(TensorLoader(x[:count], y[:count], batch_size)))
        for count in (images, 2 * images)
    )
    moments = {m for f in la.factors.values() for m in (f.input_moment, f.output_moment) if m is not None}
    of_size: dict[int, float] = {}
    blocks = []
    for moment in moments:
        total = moment.projected()
        if total.shape[1] not in of_size:
            eigenvalues_of_all([total[:1]])
            of_size[total.shape[1]] = _seconds(lambda total=total: eigenvalues_of_all([total[:1]]))
        blocks += [of_size[total.shape[1]]] * total.shape[0]
    log_precision = la.prior_precision.log().requires_grad_()

    def steps() -> None:
        for _ in range(HYPERSTEPS):
            evidence_at(la, log_precision).backward()

    steps()
    packed = 8 * sum(packed_numbers(*m.total.shape[:2]) for m in moments)
    values = 8 * sum(m.projected().shape[0] * m.projected().shape[1] for m in moments)
    return Measured(max(many - few, 0.0) / images, blocks, _seconds(steps), packed, values)


def _seconds(work) -> float:
    """The least of three."""
    found = []
    for _ in range(3):
        begun = time.perf_counter()
        work()
        found.append(time.perf_counter() - begun)
    return min(found)


def table(measured: Measured, data_points: int, ranks: Sequence[int] = RANKS) -> str:
    """The share of each part in so many ranks' time, and how many times as fast as one process they are."""
    rows = [predicted(measured, data_points, count) for count in ranks]
    names = list(rows[0])
    lines = [f"{'ranks':>6}" + "".join(f"{name + ', %':>16}" for name in names) + f"{'speed-up':>12}"]
    for count, row in zip(ranks, rows, strict=True):
        whole = sum(row.values())
        speed = sum(predicted(measured, data_points, 1).values()) / whole
        lines.append(
            f"{count:>6}" + "".join(f"{100 * row[name] / whole:>16.3g}" for name in names) + f"{speed:>11.1f}x"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--width", type=int, default=2)
    parser.add_argument("--layer", nargs="+", default=["f_fc+conv"])
    parser.add_argument("--data-points", type=int, default=50_000, help="N of the table (50000)")
    parser.add_argument("--images", type=int, default=100, help="that are measured, and twice as many (100)")
    parser.add_argument("--batch-size", type=int, default=50)
    args = parser.parse_args()
    print(
        f"times of one process: {processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}; N = {args.data_points}"
    )
    for layer in args.layer:
        measured = measure(args.width, layer, args.images, args.batch_size)
        print(f"\n{layer}, width {args.width}, {len(measured.blocks)} blocks, packed {measured.packed / 1e6:.3g} MB")
        print(table(measured, args.data_points))


if __name__ == "__main__":
    main()
