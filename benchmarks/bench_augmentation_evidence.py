"""One pass of the evidence's gradient in the amounts of an augmentation: ours, and the published formulation written in torch.

The network is LILA's for (Fashion-)MNIST, tanh, 1,000 images of 28 x 28, S = 8 copies, 10 classes, six affine generators. Both have the
cotangents of the factors from a fit before, and go over all data once, in batches of 250, the size of the publication's partial batches.
The published formulation: patches of all copies by ``unfold``, gradients of all classes at the layers' outputs with a graph, both factors
of the batch, their inner products with the cotangents, and autograd of these; no gradients of weights. "One column" is an unbiased estimate,
by a sum of the columns with random signs.

Each candidate is a process of its own, which compares its gradient with the other's on a few images first. On one thread of a CPU its time
is the processor's, so that it does not wait for other work of the machine; caches are shared all the same. The floor counts the products
forward and back, and for each of nine columns those back and, for the second derivative, forward again.

A fit and a gradient of two images with more and more copies have their rows too: in chunks that a memory budget of 4 MiB has room for, and
all copies together. ``benchmarks.compare`` prints how their memory grows.

    pytest benchmarks/bench_augmentation_evidence.py --threads 2
    python -m benchmarks.bench_augmentation_evidence ella_cuda 2 time    # one process; or memory, or a number of copies
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from time import perf_counter, process_time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.bench_networks import CLOCK
from benchmarks.counting import count
from benchmarks.memory import in_a_process, peak_bytes
from ella_cuda.augment import AffineAugment, AveragedFunction, lie_generators
from ella_cuda.laplace import KronLaplace, evidence_gradient
from ella_cuda.laplace.posterior import eigenbases_of

IMAGES, SIZE, COPIES, CLASSES, BATCH = 1000, 28, 8, 10, 250
OURS, PUBLISHED, ONE = "ella_cuda", "published formulation in torch", "ella_cuda, one column"
CANDIDATES = (OURS, PUBLISHED, ONE)
TOGETHER = "ella_cuda, all copies together"
BUDGETS = {OURS: 4 << 20, TOGETHER: 1 << 40}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 3), nn.Tanh(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 120, 5), nn.Tanh(), nn.Flatten()),
        *(nn.Linear(480, 84), nn.Tanh(), nn.Linear(84, CLASSES)),
    )


def problem(device: torch.device, copies: int = COPIES) -> tuple[AveragedFunction, Tensor, Tensor]:
    """Smooth images."""
    model = AveragedFunction(network(), AffineAugment(copies, init=0.2, sampling="shared")).to(device)
    generator = torch.Generator().manual_seed(1)
    coarse = torch.randn(IMAGES, 1, 7, 7, generator=generator)
    x = F.interpolate(coarse, size=(SIZE, SIZE), mode="bicubic", align_corners=True)
    return model, x.to(device), torch.randint(CLASSES, (IMAGES,), generator=generator).to(device)


def batches(x: Tensor, y: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(x.split(size), y.split(size), strict=True)


class Published:
    """The gradient by factors with a graph."""

    def __init__(self, la: KronLaplace) -> None:
        self.model, self.draws, self.n_data = la.model, la.state_dict()["draws"], la.n_data
        self.layers = [m for m in self.model.network if isinstance(m, (nn.Conv2d, nn.Linear))]
        names = {id(p): n for n, p in self.model.named_parameters()}
        precision = dict(zip(la.parameter_names, la.prior_precision.tolist(), strict=True))
        self.cotangents = {}
        for layer in self.layers:
            for parameter in (layer.weight, layer.bias):
                name = names[id(parameter)]
                a, u = torch.linalg.eigh(la.factors[name].inputs[0])
                b, v = torch.linalg.eigh(la.factors[name].outputs[0])
                each = 1 / (a[:, None] * b + precision[name])
                of_a, of_b = (u * (each @ b)) @ u.T, (v * (a @ each)) @ v.T
                self.cotangents[parameter] = of_a.to(parameter.dtype), of_b.to(parameter.dtype)

    def __call__(self, x: Tensor, y: Tensor, size: int) -> Tensor:
        raw = self.model.augment.raw.detach().clone().requires_grad_()
        parameters = list(self.model.parameters())
        for p in parameters:
            p.requires_grad_(False)
        total = torch.zeros(len(raw), dtype=torch.float64, device=raw.device)
        for images, labels in batches(x, y, size):
            total += torch.autograd.grad(self.value(images, labels, raw), raw)[0]
        for p in parameters:
            p.requires_grad_(True)
        return total * (self.n_data / len(x))

    def value(self, x: Tensor, y: Tensor, raw: Tensor) -> Tensor:
        n, s = len(x), COPIES
        generators = lie_generators(x.device, x.dtype)
        maps = torch.matrix_exp(torch.einsum("sk,kij->sij", self.draws[0] * F.softplus(raw), generators))[:, :2]
        grid = F.affine_grid(maps.repeat(n, 1, 1), [n * s, *x.shape[1:]], align_corners=True)
        images = F.grid_sample(x.repeat_interleave(s, 0), grid, align_corners=True)
        inputs, outputs = [], []

        def keep(module: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
            inputs.append(args[0])
            outputs.append(out)

        handles = [layer.register_forward_hook(keep) for layer in self.layers]
        mean = self.model.network(images).unflatten(0, (n, s)).mean(1)
        for handle in handles:
            handle.remove()
        p = mean.softmax(1)
        root = torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None]
        rows = [torch.autograd.grad(mean, outputs, root[:, :, k], create_graph=True) for k in range(CLASSES)]
        total = -F.cross_entropy(mean, y, reduction="sum")
        for i, layer in enumerate(self.layers):
            g = torch.stack([r[i] for r in rows]).unflatten(1, (n, s)).sum(2)  # (K, N, D, ...)
            if isinstance(layer, nn.Conv2d):
                patches = F.unfold(inputs[i], layer.kernel_size, padding=layer.padding).unflatten(0, (n, s)).mean(1)
                a = torch.einsum("nat,nbt->ab", patches, patches)
                g = g.flatten(3)
                b, bias = torch.einsum("kndt,knet->de", g, g) / g.shape[3], g.sum(3)
            else:
                seen = inputs[i].unflatten(0, (n, s)).mean(1)
                a = seen.T @ seen
                b, bias = torch.einsum("knd,kne->de", g, g), g
            of_a, of_b = self.cotangents[layer.weight]
            of_bias = self.cotangents[layer.bias][1]
            both = (of_a * a).sum() / self.n_data + (of_b * b).sum()
            total = total - 0.5 * (both + (of_bias * torch.einsum("knd,kne->de", bias, bias)).sum())
        return total


def measure(who: str, part: str, device: torch.device) -> dict[str, Any]:
    """``part`` is "time" or "memory"."""
    model, x, y = problem(device)
    la = KronLaplace(model, prior_precision=10.0).fit(list(batches(x, y, BATCH)))
    by_hand = Published(la)
    eigenbases_of(la)

    def run(count: int = IMAGES) -> Tensor:
        if who == PUBLISHED:
            return by_hand(x[:count], y[:count], BATCH)
        loader = list(batches(x[:count], y[:count], BATCH))
        return evidence_gradient(la, loader, columns="one" if who == ONE else "all")["augment.raw"]

    few = 20
    ours, theirs = evidence_gradient(la, [(x[:few], y[:few])])["augment.raw"], by_hand(x[:few], y[:few], few)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * theirs.abs().max().item())
    if part == "memory":
        # More batches take no more.
        return {"bytes": peak_bytes(lambda: run(2 * BATCH), device, once=True)}
    run(BATCH)
    return {"seconds": min(_seconds(run, device) for _ in range(3 if who == OURS else 2))}


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    clock = process_time if device.type == "cpu" and torch.get_num_threads() == 1 else perf_counter
    start = clock()
    call()
    return clock() - start


def measure_copies(who: str, copies: int, device: torch.device) -> dict[str, Any]:
    """A fit of two images and the gradient, with so many copies."""
    model, x, y = problem(device, copies)
    loader = [(x[:2], y[:2])]

    def run(budget: int) -> Tensor:
        la = KronLaplace(model, prior_precision=10.0, memory_budget=budget).fit(loader)
        return evidence_gradient(la, loader)["augment.raw"]

    with model.augment.held():
        expected = run(BUDGETS[TOGETHER])
        torch.testing.assert_close(run(BUDGETS[who]), expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())
        seconds = _seconds(lambda: run(BUDGETS[who]), device)
        return {"seconds": seconds, "bytes": peak_bytes(lambda: run(BUDGETS[who]), device, once=True)}


@functools.cache
def found(who: str, threads: int, device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        return measure(who, "memory", device) | measure(who, "time", device)
    parts = [
        in_a_process("benchmarks.bench_augmentation_evidence", who, str(threads), part) for part in ("memory", "time")
    ]
    return parts[0] | parts[1]


@pytest.mark.benchmark(timer=CLOCK, disable_gc=False)
@pytest.mark.parametrize("who", CANDIDATES)
def test_gradient_in_amounts(benchmark: Any, peaks: Any, threads: int, device: torch.device, who: str) -> None:
    own = found(who, threads, device)

    def passed() -> None:
        CLOCK.now += own["seconds"]

    columns = 1 if who == ONE else CLASSES - 1
    work = f"evidence's gradient in six amounts, LILA's CNN, {IMAGES} images, S = {COPIES}" + (
        ", one column" if who == ONE else ""
    )
    benchmark.group = work
    benchmark.pedantic(passed, rounds=1)
    of_image = count(network(), torch.randn(COPIES, 1, SIZE, SIZE))
    flops = IMAGES * (2 * of_image.forward + 2 * columns * of_image.activations)
    benchmark.extra_info.update(
        work=work,
        who=who,
        flops=flops,
        bytes=0,
        floor_seconds=peaks.floor(flops, 0),
        peak_bytes=own["bytes"],
        remark=f"batches of {BATCH}",
        peak_flops=peaks.flops,
        peak_bandwidth=peaks.bandwidth,
    )
    print(f"\n{work} | {who}: {own['seconds']:.3f} s, {(own['bytes'] or 0) / 1e6:.0f} MB", flush=True)


@pytest.mark.benchmark(timer=CLOCK, disable_gc=False)
@pytest.mark.parametrize("who", BUDGETS)
@pytest.mark.parametrize("copies", [30, 100, 300, 1000])
def test_memory_of_copies(
    benchmark: Any, peaks: Any, threads: int, device: torch.device, copies: int, who: str
) -> None:
    if device.type == "cuda":
        own = measure_copies(who, copies, device)
    else:
        own = in_a_process("benchmarks.bench_augmentation_evidence", who, str(threads), str(copies))

    def passed() -> None:
        CLOCK.now += own["seconds"]

    of = "fit and gradient in six amounts, LILA's CNN, 2 images"
    benchmark.group = f"{of}, S = {copies}"
    benchmark.pedantic(passed, rounds=1)
    of_image = count(network(), torch.randn(copies, 1, SIZE, SIZE))
    flops = 2 * (3 * of_image.forward + 3 * (CLASSES - 1) * of_image.activations)
    benchmark.extra_info.update(
        work=benchmark.group,
        who=who,
        flops=flops,
        bytes=0,
        floor_seconds=peaks.floor(flops, 0),
        peak_bytes=own["bytes"],
        remark="budget of 4 MiB" if who == OURS else "",
        peak_flops=peaks.flops,
        peak_bandwidth=peaks.bandwidth,
        series={"of": of, "in": "copies", "size": copies},
    )


if __name__ == "__main__":
    who, threads, part = sys.argv[1:]
    torch.set_num_threads(int(threads))
    torch.set_flush_denormal(True)
    cpu = torch.device("cpu")
    print(json.dumps(measure_copies(who, int(part), cpu) if part.isdigit() else measure(who, part, cpu)))
