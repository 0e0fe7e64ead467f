"""Several calls at once, each in a process of its own with its share of the threads."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any

import torch
from tqdm import tqdm


def threads_note() -> str:
    """How it was settled how many threads there are and how they wait for each other."""
    return os.environ.get("ELLA_CUDA_THREADS", "as torch has them")


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
                    with _interrupts_held():  # by the workers that this starts for ever: this process ends them
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


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C, which a terminal sends to all processes, comes when the context ends; processes started in it never get it, and have no
    traceback to show while they import."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
