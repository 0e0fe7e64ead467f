"""Ablation of a fit's special paths: a fit as it is, and with a path replaced by the general one, in turns.

The paths are the batched vector-Jacobian products of functions without parameters, their fusion with those of layers, the layers' own
vector-Jacobian products, and for evidence gradients the chain of layers. A variant switches them off in its own process, and must find the
same numbers. The time is the processor's, the least of the rounds; times and memory are over those of the fit as it is.

    python -m benchmarks.ablation [--threads 2] [--rounds 3] [CASE ...]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from time import process_time
from typing import Any

import torch

from benchmarks import bench_augmentation_evidence as augmentation
from benchmarks.bench_factors import batches
from benchmarks.bench_networks import CASES, CLASSES, network
from benchmarks.memory import peak_bytes
from ella_cuda.laplace import KronLaplace, Rule, curvature, evidence_gradient, hypergradients
from ella_cuda.laplace.column_functions import Before

FITS = ("vgg16", "vgg32", "resnet18", "resnet18_exact", "conv")
GRADIENT = "evidence_gradient"


def unfused() -> None:
    """Every call takes its gradients back by itself."""

    def look_before(self: Any, outputs: torch.Tensor) -> None:
        for tell, _ in self._with_input:
            tell(Before())
        self._with_input.clear()
        self._hooked.clear()

    curvature.CurvaturePass._look_before = look_before


def autograd_functions() -> None:
    """Functions without parameters are autograd's, under vmap."""
    unfused()
    curvature.CurvaturePass._wants_nodes = lambda self: False


def unfused_autograd_layers() -> None:
    """Layers of torch are autograd's; functions have their own vector-Jacobian products, each by itself."""
    unfused()
    autograd_layers()


def autograd() -> None:
    """Nothing is ours but what rules make of gradients."""
    autograd_functions()
    autograd_layers()


def autograd_layers() -> None:
    """Rules see gradients alone."""
    Rule.has_input_gradient = lambda self: False


def without_chains() -> None:
    """Evidence gradients are autograd's of every column's graph."""
    hypergradients.chain_of_average = lambda model: None


ALL = "as it is"
OF_FITS: dict[str, Callable[[], None]] = {
    ALL: lambda: None,
    "unfused": unfused,
    "unfused, layers by autograd": unfused_autograd_layers,
    "functions by autograd": autograd_functions,
    "functions and layers by autograd": autograd,
}
OF_GRADIENTS: dict[str, Callable[[], None]] = {
    ALL: lambda: None,
    "without chains": without_chains,
}


def variants(case: str) -> dict[str, Callable[[], None]]:
    return OF_GRADIENTS if case == GRADIENT else OF_FITS


def work_of(case: str) -> Callable[[], Any]:
    """What is timed."""
    if case == GRADIENT:
        model, x, y = augmentation.problem(torch.device("cpu"))
        loader = [*augmentation.batches(x[:500], y[:500], augmentation.BATCH)]
        la = KronLaplace(model).fit(loader)
        return lambda: evidence_gradient(la, loader)
    given = CASES[case]
    model = network(case)
    images = 2 * given.batch
    x, y = torch.randn(images, 3, given.size, given.size), torch.randint(CLASSES, (images,))
    loader = batches(x, y, given.batch)
    return lambda: KronLaplace(model, fisher=given.columns).fit(loader)


def numbers_of(case: str, found: Any) -> list[float]:
    """What all variants must agree on."""
    if case == GRADIENT:
        return torch.cat([g.flatten() for g in found.values()]).tolist()
    return [float(f.outputs.double().norm()) for f in found.factors.values()]


def measure(case: str, variant: str, threads: int, part: str) -> tuple[float, list[float]]:
    """The processor's seconds, or bytes, and numbers."""
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    variants(case)[variant]()
    with contextlib.redirect_stdout(sys.stderr):
        work = work_of(case)
        if part == "memory":
            return peak_bytes(work, torch.device("cpu"), once=True), []
        torch.manual_seed(0)
        numbers = numbers_of(case, work())
        found = []
        for _ in range(2):
            start = process_time()
            work()
            found.append(process_time() - start)
    return min(found), numbers


def in_a_process(*arguments: str) -> tuple[float, list[float]]:
    command = [sys.executable, "-m", "benchmarks.ablation", "--one", *arguments]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=[*FITS, GRADIENT], metavar="CASE")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        case, variant, part = args.cases
        print(json.dumps(measure(case, variant, args.threads, part)))
        return
    print(f"| case | variant | time, of {ALL!r} | memory |\n| --- | --- | --- | --- |")
    for case in args.cases:
        threads = ("--threads", str(args.threads))
        seconds: dict[str, list[float]] = {variant: [] for variant in variants(case)}
        numbers: dict[str, list[float]] = {}
        for _ in range(args.rounds):
            for variant, found in seconds.items():
                time, numbers[variant] = in_a_process(case, variant, "time", *threads)
                found.append(time)
                expected = torch.tensor(numbers[ALL])
                torch.testing.assert_close(torch.tensor(numbers[variant]), expected, rtol=1e-3, atol=1e-3)
        memory = {variant: in_a_process(case, variant, "memory", *threads)[0] for variant in seconds}
        for variant, found in seconds.items():
            time, size = min(found) / min(seconds[ALL]), memory[variant] / memory[ALL]
            print(f"| {case} | {variant} | {time:.2f} | {size:.2f} |", flush=True)


if __name__ == "__main__":
    main()
