"""Factors and evidence of networks in torch's own modules: ours, laplace-torch on curvlinops and on ASDL (asdfghjkl 0.1a4).

On the CPU every candidate is a process of its own, so that none has another's memory or caches, and they take turns. A process fits and
asks for the evidence. One says how much memory both took above the model's for two batches, others how long for all: the least of two runs
after a first, where these are short. Then they say the log determinants of all weights, which are compared with ours where nothing is drawn.
On a GPU, whose allocator counts memory itself, one process does all that.
The floor counts products, and of eigenvalues those of a tridiagonal form, in float64; that of our memory is the factors, which the table
remarks.
Norms and positions are frozen for all, since the peers have no factors for them; biases are not compared, for which the peers take the
weight's output factor.

    pytest benchmarks/bench_networks.py --threads 2 [--device cuda]
    python -m benchmarks.bench_networks vgg16 ella_cuda 2 time    # one process; or memory
"""

from __future__ import annotations

import functools
import gc
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from benchmarks.bench_factors import PEERS, CircularPad, batches, log_determinants
from benchmarks.counting import count
from benchmarks.machine import measure_peaks
from benchmarks.memory import in_a_process, peak_bytes
from benchmarks.torchvision_networks import small_resnet18
from ella_cuda.laplace import KronLaplace

CLASSES, OURS = 10, "ella_cuda"
LONG = 10  # seconds of a run that is not repeated
CANDIDATES = (OURS, *PEERS)


@dataclass(frozen=True)
class Case:
    """A network on images; ``columns`` is "exact", or "mc" for one sampled column of a data point."""

    title: str
    images: int
    columns: str
    size: int = 32
    batch: int = 125
    rounds: int = 2


CASES = {
    "vgg16": Case("VGG, W = 16", 500, "exact"),
    "vgg32": Case("VGG, W = 32", 500, "exact"),
    "vgg64": Case("VGG, W = 64", 500, "exact", rounds=1),
    "conv": Case("CONV in torch's layers", 1000, "exact"),
    "vit": Case("ViT", 500, "mc"),
    "resnet18": Case("resnet18", 512, "mc", batch=128, rounds=1),
    "resnet18_exact": Case("resnet18", 512, "exact", batch=128, rounds=1),
    "resnet50": Case("resnet50", 64, "mc", size=64, batch=64, rounds=1),
}


def vgg(width: int) -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for index, factor in enumerate((1, 1, 2, 2, 4, 4)):
        layers += [nn.Conv2d(channels, factor * width, 3, padding=1), nn.ReLU()]
        channels = factor * width
        if index % 2:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * channels, CLASSES))


class EverySecond(nn.Module):
    """Strides by a slice."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, ::2, ::2]


def conv(width: int = 10) -> nn.Module:
    """The convolutional network of the paper's experiments as a user writes it: circular padding by ``F.pad``, strides by slices."""
    layers: list[nn.Module] = []
    channels = 3
    for stage in range(4):
        for half in range(2):
            layers += [CircularPad(), nn.Conv2d(channels, width << stage, 3), nn.ReLU()]
            layers += [EverySecond()] if half else []
            channels = width << stage
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * channels, CLASSES))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class ViT(nn.Module):
    """Patches of 4x4 pixels, linear layers, a mean over positions."""

    def __init__(self, width: int = 96, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.positions = nn.Parameter(0.02 * torch.randn(64, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(x)).mean(1))


MAKE: dict[str, Callable[[], nn.Module]] = {
    "vgg16": lambda: vgg(16),
    "vgg32": lambda: vgg(32),
    "vgg64": lambda: vgg(64),
    "conv": conv,
    "vit": ViT,
    "resnet18": small_resnet18,
    "resnet18_exact": small_resnet18,
    "resnet50": lambda: torchvision.models.resnet50(num_classes=CLASSES),
}


def network(name: str) -> nn.Module:
    """With convolutions and linear layers alone to be learned."""
    torch.manual_seed(0)
    model = MAKE[name]().requires_grad_(False)
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.requires_grad_(True)
    return model.eval()


def candidate(who: str, model: nn.Module, columns: str) -> Callable[[], Any]:
    """What makes an unfitted approximation."""
    if who == OURS:
        return lambda: KronLaplace(model, fisher=columns)
    import laplace

    backend = getattr(laplace.curvature, PEERS[who])
    settings = {"stochastic": columns == "mc"}
    return lambda: laplace.KronLaplace(model, "classification", backend=backend, backend_kwargs=settings)


def measure(name: str, who: str, part: str, device: torch.device) -> dict[str, Any]:
    """``part`` is "time" or "memory"."""
    case, model = CASES[name], network(name).to(device)
    # A fit takes no more memory for more batches.
    images = min(case.images, 2 * case.batch) if part == "memory" else case.images
    x, y = torch.randn(images, 3, case.size, case.size).to(device), torch.randint(CLASSES, (images,)).to(device)
    make, loader, held = candidate(who, model, case.columns), batches(x, y, case.batch), []

    def evidence() -> None:
        held.clear()
        la = make()
        la.fit(loader)
        assert torch.isfinite(la.log_marginal_likelihood())  # and waits for the device
        held.append(la)

    def timed() -> float:
        start = perf_counter()
        evidence()
        return perf_counter() - start

    found: dict[str, Any] = {}
    if part == "memory":
        toy = nn.Sequential(nn.Flatten(), nn.Linear(3, CLASSES)).to(device)
        small = batches(torch.randn(4, 3).to(device), torch.randint(CLASSES, (4,)).to(device), 4)
        loads = candidate(who, toy, case.columns)()  # what is loaded once
        loads.fit(small)
        loads.log_marginal_likelihood()
        found["bytes"] = peak_bytes(evidence, device, once=True)
    else:
        first = timed()
        found["seconds"] = first if first > LONG else min(timed(), timed())
        if who == OURS:
            factors = held[0].factors.values()
            moments = {id(m): m for f in factors for m in (f.input_moment, f.output_moment) if m is not None}
            sides = [(len(m.total), m.total.shape[1], m.rows) for m in moments.values()]
            found["factors"] = sum(groups * size**2 for groups, size, _ in sides) * torch.float64.itemsize
            found["eigenvalues"] = sum(groups * 4 / 3 * min(size, rows) ** 3 for groups, size, rows in sides)
        found["log determinants"] = [float(value) for value in log_determinants(held[0], model)]
    return found


@functools.cache
def in_turns(name: str, threads: int, device: torch.device) -> dict[str, dict[str, Any]]:
    """What all candidates took on a network, one after the other; one that cannot has its error's last line."""
    runs: dict[str, list[dict[str, Any]]] = {who: [] for who in CANDIDATES}
    for part in ["memory", *["time"] * (CASES[name].rounds if device.type == "cpu" else 1)]:
        for who in CANDIDATES:
            if not any("error" in run for run in runs[who]):
                runs[who].append(_run(name, who, threads, part, device))
    return {who: _joined(of) for who, of in runs.items()}


def _run(name: str, who: str, threads: int, part: str, device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        try:
            return measure(name, who, part, device)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        finally:
            gc.collect()
            torch.cuda.empty_cache()
    try:
        return in_a_process("benchmarks.bench_networks", name, who, str(threads), part)
    except RuntimeError as error:
        return {"error": str(error)}


def _joined(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of a candidate's runs: the least time."""
    joined = {key: value for run in runs for key, value in run.items()}
    seconds = [run["seconds"] for run in runs if "seconds" in run]
    return joined | ({"seconds": min(seconds)} if seconds else {})


class Elapsed:
    """A clock that moves by what was measured before."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


CLOCK = Elapsed()


@pytest.mark.benchmark(timer=CLOCK, disable_gc=False)
@pytest.mark.parametrize("who", CANDIDATES)
@pytest.mark.parametrize("name", CASES)
def test_networks(benchmark, peaks, threads, device, name, who):
    check(benchmark, peaks, threads, device, name, who)


@pytest.mark.benchmark(timer=CLOCK, disable_gc=False)
@pytest.mark.parametrize("who", CANDIDATES)
def test_one_thread(benchmark, device, who):
    if device.type != "cpu":
        pytest.skip("it is about the CPU")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        peaks = measure_peaks(device)
    finally:
        torch.set_num_threads(before)
    check(benchmark, peaks, 1, device, "vgg32", who)


def check(benchmark: Any, peaks: Any, threads: int, device: torch.device, name: str, who: str) -> None:
    """Report a candidate's row, after its log determinants were compared with ours."""
    case, found = CASES[name], in_turns(name, threads, device)
    own, ours = found[who], found[OURS]
    if "error" in own:
        assert who != OURS, own["error"]
        pytest.skip(own["error"])
    if case.columns == "exact":
        wanted, values = (torch.tensor(one["log determinants"]) for one in (ours, own))
        torch.testing.assert_close(values, wanted, rtol=1e-3, atol=1e-3 * float(wanted.max()))

    def passed() -> None:
        CLOCK.now += own["seconds"]

    work = f"factors + evidence of {case.title}, {case.images} images, {case.columns}"
    benchmark.group = work = work if threads != 1 else f"{work}, one thread"
    benchmark.pedantic(passed, rounds=1)
    columns = CLASSES - 1 if case.columns == "exact" else 1
    flops = case.images * count(network(name), torch.randn(1, 3, case.size, case.size)).fit(columns)
    flops += 2 * ours["eigenvalues"]  # in float64, at half the speed
    benchmark.extra_info.update(
        work=work,
        who=who,
        flops=flops,
        bytes=0,
        floor_seconds=peaks.floor(flops, 0),
        peak_bytes=own["bytes"],
        **({"remark": f"{ours['factors'] / 1e6:.1f} MB of factors"} if who == OURS else {}),
        peak_flops=peaks.flops,
        peak_bandwidth=peaks.bandwidth,
    )
    print(f"\n{work} | {who}: {own['seconds']:.3f} s, {(own['bytes'] or 0) / 1e6:.0f} MB", flush=True)


if __name__ == "__main__":
    name, who, threads, part = sys.argv[1:]
    torch.set_num_threads(int(threads))
    torch.set_flush_denormal(True)
    print(json.dumps(measure(name, who, part, torch.device("cpu"))))
