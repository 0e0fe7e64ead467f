"""Several calls at once, each in a process of its own with its share of the threads."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any

import torch
from tqdm import tqdm


def default_jobs(calls: int) -> int:
    """As many jobs as torch has threads, at most one per call: small networks use one thread best."""
    return max(1, min(torch.get_num_threads(), calls))


def run_at_once(
    function: Callable[..., Any],
    arguments: Sequence[tuple[Any, ...]],
    jobs: int,
    threads: int,
    on_tick: Callable[[], None],
) -> Iterator[tuple[int, Any]]:
    """Call ``function(*a)`` for every ``a`` of ``arguments``, ``jobs`` at a time, in their order.

    Workers end with this process, however it ends. When a call fails, the calls still running are stopped.

    Args:
        function: importable by name.
        arguments: one tuple a call, picklable.
        jobs: processes.
        threads: torch's threads in each.
        on_tick: called about once a second while waiting.

    Yields:
        ``(index, result)`` in the order in which calls finish.

    Raises:
        RuntimeError: a worker was killed. What a call raises.
    """
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")  # a forked copy of torch's thread pools would hang
    waiting = deque(enumerate(arguments))
    futures: dict[Future[Any], int] = {}
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_start_worker, initargs=(threads,)) as pool:
        try:
            while waiting or futures:
                while waiting and len(futures) < jobs:
                    index, call = waiting.popleft()
                    futures[pool.submit(function, *call)] = index
                finished, _ = wait(futures, timeout=1.0, return_when=FIRST_COMPLETED)
                on_tick()
                for future in finished:
                    yield futures.pop(future), future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            raise


def prepare_process() -> None:
    """Make this process one for training on the CPU: subnormal numbers are flushed to zero (weights that a prior switches
    off fade into them, and they are many times slower), and freed memory is kept."""
    torch.set_flush_denormal(True)
    _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Have glibc reuse large blocks instead of returning them: a step's gradients are as large as those of the last one,
    and fresh memory costs a page fault for every 4 KiB. Other C libraries are left as they are."""
    libc = ctypes.CDLL(None) if os.name == "posix" else None
    if hasattr(libc, "gnu_get_libc_version"):
        m_trim_threshold, m_mmap_max = -1, -4
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, 2**31 - 1)


def _start_worker(threads: int) -> None:
    torch.set_num_threads(threads)
    prepare_process()
    tqdm.set_lock(threading.RLock())  # not a semaphore of the system's, which an interrupted worker would leave behind
    parent = multiprocessing.parent_process()

    def follow() -> None:
        parent.join()
        os._exit(1)  # the parent was killed; a resumed session must not meet us at work

    threading.Thread(target=follow, daemon=True).start()
