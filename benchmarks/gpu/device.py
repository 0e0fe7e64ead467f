"""Times on a GPU without Python in between: graphs of many calls, measured by events. In a rehearsal the CPU and the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

ROUNDS, ROUND_SECONDS = 11, 3e-4  # measured, the median counts; a round replays a short graph several times


class CaptureFailed(Exception):
    """No item of the process can be trusted after it: torch's random generators go on as if a graph were captured."""


@contextmanager
def capture() -> Iterator[None]:
    """What is raised within is a :class:`CaptureFailed`."""
    try:
        yield
    except Exception as error:
        raise CaptureFailed(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}") from error


class Device:
    """A CUDA device, or the CPU in its place.

    Attributes:
        device: torch's name of it.
        cache_bytes: of its second-level cache.
    """

    def __init__(self, rehearse: bool) -> None:
        self.rehearse = rehearse
        self.device = torch.device("cpu" if rehearse else "cuda")
        self.cache_bytes = 1 << 12 if rehearse else torch.cuda.get_device_properties(0).L2_cache_size

    def synchronize(self) -> None:
        if not self.rehearse:
            torch.cuda.synchronize()

    @capture()
    def record(self, calls: Sequence[Callable[[], Any]]) -> Callable[[], None]:
        """All calls as one CUDA graph. Their results stay, so that each has memory of its own.

        Raises:
            CaptureFailed: anything fails in it.
        """
        if self.rehearse:
            return lambda: [call() for call in calls] and None
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
        replay = graph.replay
        return lambda kept=kept: replay()

    def seconds(self, call: Callable[[], Any], rounds: int = ROUNDS) -> float:
        """Median seconds of a call, which is warmed up before."""
        if self.rehearse:
            return self._once(call, 1)
        call()
        first = self._once(call, 1)
        repeat = max(1, min(100, round(ROUND_SECONDS / max(first, 1e-7))))
        return statistics.median(self._once(call, repeat) for _ in range(rounds))

    def _once(self, call: Callable[[], Any], repeat: int) -> float:
        if self.rehearse:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
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
