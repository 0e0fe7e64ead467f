"""Calls of LAPACK at once, each in a thread that uses no other."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def calls_at_once() -> int:
    """As many as torch has threads, where the threads of a call can be limited; otherwise one, which then has them all."""
    return torch.get_num_threads() if _limits() is not None else 1


def map_at_once(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """``function`` of each item, :func:`calls_at_once` at a time; where one raises, or is interrupted, what has not begun is left out.

    Most of a decomposition of some hundred rows does not gain from a second thread, so threads are better spent on another one. Not in
    ``at::parallel_for``: called in a parallel region, torch's MKL returns wrong eigenvalues once ``torch.set_num_threads`` was used.

    Args:
        function: its modes and derivatives are those of a new thread, not the caller's.
        items: the longest first.
    """
    items = list(items)
    threads = min(calls_at_once(), len(items))
    if threads < 2:
        return [function(item) for item in items]
    pool = ThreadPoolExecutor(threads, initializer=_limit_to_one)
    try:
        futures = [pool.submit(function, item) for item in items]
        failed = [future for future in wait(futures, return_when=FIRST_EXCEPTION).done if future.exception()]
        return [future.result() for future in failed or futures]
    finally:
        pool.shutdown(cancel_futures=True)


def _limit_to_one() -> None:
    """Have this thread's calls of LAPACK and of torch use no other thread."""
    torch.get_num_threads()  # gives a new thread torch's number, which would otherwise happen later and undo the limit
    for limit in _limits() or ():
        limit(1)


@functools.cache
def _limits() -> tuple[Callable[[int], object], ...] | None:
    """What limits the threads of the calling thread alone, in MKL and OpenMP as torch has loaded them; None where LAPACK is not MKL."""
    if not (torch.backends.mkl.is_available() and torch.backends.openmp.is_available()):
        return None
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return library.MKL_Set_Num_Threads_Local, library.omp_set_num_threads
    except (OSError, AttributeError):  # another system, or another way of linking MKL
        return None
