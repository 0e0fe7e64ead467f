"""The machine of a benchmark: what it is called, and the peaks that the floors are counted against."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ella_cuda import __version__, build_info
from ella_cuda.experiments.device import device_name


@dataclass(frozen=True)
class Peaks:
    """Float32 rates that this machine reaches on what it does best.

    Attributes:
        flops: floating point operations a second of a large square matrix product or, where it is faster, of a large convolution (CPU)
            or of three products in TF32 (CUDA), which together are as accurate.
        bandwidth: bytes a second of a large copy, read and written.
    """

    flops: float
    bandwidth: float

    def floor(self, flops: float, bytes: float) -> float:
        """Seconds that so much work takes at the least: the slower of its arithmetic and its traffic."""
        return max(flops / self.flops, bytes / self.bandwidth)


def _best_seconds(call: Callable[[], Any], device: torch.device, rounds: int = 9) -> float:
    best = float("inf")
    for _ in range(rounds + 2):  # the first two warm up
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def measure_peaks(device: torch.device) -> Peaks:
    """Both peaks, measured with torch's present number of threads."""
    size, words = (8192, 1 << 28) if device.type == "cuda" else (2048, 1 << 25)
    a, b = torch.randn(size, size, device=device), torch.randn(size, size, device=device)
    out = torch.empty_like(a)
    flops = 2 * size**3 / _best_seconds(lambda: torch.mm(a, b, out=out), device)
    if device.type == "cpu":
        # The product is MKL's, which leaves more than half of an AMD processor's rate unused; the convolution is oneDNN's, which does not.
        x = torch.randn(4, 256, 66, 66).to(memory_format=torch.channels_last)
        weight = torch.randn(256, 256, 3, 3).to(memory_format=torch.channels_last)
        operations = 2 * 4 * 64**2 * weight.numel()
        flops = max(flops, operations / _best_seconds(lambda: torch.conv2d(x, weight), device))
    elif torch.cuda.get_device_capability(device) >= (8, 0):
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        flops = max(flops, 2 * size**3 / _best_seconds(lambda: torch.mm(a, b, out=out), device) / 3)
        torch.backends.cuda.matmul.allow_tf32 = before
    source = torch.randn(words, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * 4 * words / _best_seconds(lambda: target.copy_(source), device)
    return Peaks(flops, bandwidth)


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's model, with the numbers of its family and model where Linux tells: virtual machines name the maker alone."""
    name, known = device_name(torch.device("cpu")), {}
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            known.setdefault(key.strip(), value.strip())
    numbers = [f"{short} {known[key]}" for key, short in (("cpu family", "family"), ("model", "model")) if key in known]
    return f"{name} ({' '.join(numbers)})" if numbers else name


def describe(device: torch.device) -> dict[str, Any]:
    """What the numbers were measured on and with."""
    return {
        "ella_cuda": __version__,
        "build": {key: str(value) for key, value in build_info().items()},
        "torch": torch.__version__,
        "cpu": processor(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": device_name(device) if device.type == "cuda" else "cpu",
    }


def told_commit() -> dict[str, Any]:
    """What the environment's COMMIT says that this is a copy of, where it has no history; else nothing."""
    return {"id": os.environ["COMMIT"], "dirty": False} if "COMMIT" in os.environ else {}
