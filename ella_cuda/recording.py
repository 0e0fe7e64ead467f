"""CUDA graphs of functions of static shapes, so that a GPU does not wait for Python between small kernels."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

MAX_SHAPES = 8  # of batches that have a graph; each graph takes host memory and a capture's time


def has_graphs(device: torch.device) -> bool:
    """Whether work on a device can be recorded as a graph."""
    return device.type == "cuda"


def recorded_or_told(graphs: CudaGraphs, work: Callable[[], None], what: str) -> Callable[[], None]:
    """:meth:`CudaGraphs.record`, or the work itself where it cannot be captured.

    Args:
        what: begins the warning: whose work it is, and what it is.

    Warns:
        UserWarning: the work cannot be captured.
    """
    try:
        return graphs.record(work)
    except RuntimeError as error:
        warnings.warn(
            f"{what} cannot be captured as a CUDA graph ({error}); its operators run one by one.", stacklevel=3
        )
        return work


class CudaGraphs:
    """CUDA graphs of one device. They share their memory: at most one may be running.

    Raises:
        ValueError: the device is no CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(
                f"marglik_training: cuda_graph=True needs a model on a CUDA device, got {device}; move it there, or pass cuda_graph=False."
            )
        self._device, self._stream = device, torch.cuda.Stream(device)
        self.begin_anew()

    def begin_anew(self) -> None:
        """What was recorded so far is not run again."""
        # The allocator takes no new graph into a pool whose graphs are gone and whose memory is not.
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, work: Callable[[], None]) -> None:
        """Do the work as it will be recorded later on."""
        with torch.cuda.device(self._device):
            here = torch.cuda.current_stream()
            self._stream.wait_stream(here)
            with torch.cuda.stream(self._stream):
                work()
            here.wait_stream(self._stream)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record the work's kernels without running them; returns what runs them, on the same memory."""
        graph = torch.cuda.CUDAGraph()
        # "thread_local": a loader's thread may pin memory meanwhile.
        with (
            torch.cuda.device(self._device),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            work()
        return graph.replay
