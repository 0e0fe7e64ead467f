"""Times on a GPU without Python in between: graphs of many calls, measured by events. In a rehearsal the CPU and the clock."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

REHEARSAL = "ELLA_REHEARSAL" in os.environ  # on the CPU, at small sizes
DEVICE = torch.device("cpu" if REHEARSAL else "cuda")
ROUNDS, ROUND_SECONDS = 11, 3e-4  # measured, the median counts; a round replays a short graph several times


def cache_bytes() -> int:
    """Size of the second-level cache."""
    return 1 << 12 if REHEARSAL else torch.cuda.get_device_properties(0).L2_cache_size


def synchronize() -> None:
    if not REHEARSAL:
        torch.cuda.synchronize()


def record(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """All calls as one CUDA graph. Their results stay, so that each has memory of its own."""
    if REHEARSAL:
        return lambda: [call() for call in calls]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what is made at a first call cannot be recorded
        for call in calls[:3]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = [call() for call in calls]
    return lambda kept=kept: graph.replay()


def seconds(call: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """Median seconds of a call, which is warmed up before."""
    if REHEARSAL:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    call()
    repeat = max(1, min(100, round(ROUND_SECONDS / max(_once(call, 1), 1e-7))))
    return statistics.median(_once(call, repeat) for _ in range(rounds))


def _once(call: Callable[[], Any], repeat: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeat):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeat


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Whether torch's products and convolutions may take TF32."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
