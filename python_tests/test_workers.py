"""Calls in processes of their own: what a failure may touch."""

from __future__ import annotations

import multiprocessing
import platform
import signal
import time

import pytest

from ella_cuda.workers import run_at_once


def test_a_failing_call_leaves_other_children_of_the_caller_alone():
    """int("x") fails in its worker; the worker that sleeps is stopped, the caller's own process is not."""
    mine = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    mine.start()
    try:
        start = time.monotonic()
        with pytest.raises(ValueError, match="invalid literal"):
            list(run_at_once(int, [("x",)], 1, 1, lambda: None))
        assert mine.is_alive() and time.monotonic() - start < 50
    finally:
        mine.kill()
        mine.join()


def test_results_come_with_their_index():
    assert sorted(run_at_once(pow, [(2, 3), (3, 2), (2, 5)], 2, 1, lambda: None)) == [(0, 8), (1, 9), (2, 32)]


def test_calls_are_begun_in_their_order():
    assert list(run_at_once(pow, [(2, 3), (3, 2), (2, 5)], 1, 1, lambda: None)) == [(0, 8), (1, 9), (2, 32)]


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="signals cannot be blocked here")
def test_ctrl_c_reaches_this_process_alone():
    """A terminal sends it to workers too, which would show where they were while they import."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    ((_, blocked),) = run_at_once(eval, [("__import__('signal').pthread_sigmask(0, [])",)], 1, 1, lambda: None)
    assert signal.SIGINT in blocked and signal.SIGINT not in before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


# Expressions that a worker evaluates by itself: nothing of the tests needs to be importable there.
FLUSHED = "float(__import__('torch').full((64,), 1e-30).mul(1e-12).sum())"
KEPT = (
    "(lambda torch, rss: (lambda low: (torch.ones(16 << 20).sum(), rss() - low)[1])(rss()))"
    "(__import__('torch'), lambda: int(open('/proc/self/status').read().split('VmRSS:')[1].split()[0]) * 1024)"
)


def test_workers_flush_subnormal_numbers():
    assert list(run_at_once(eval, [(FLUSHED,)], 1, 1, lambda: None)) == [(0, 0.0)]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's heap is told to keep memory")
def test_workers_keep_freed_memory():
    ((_, kept),) = run_at_once(eval, [(KEPT,)], 1, 1, lambda: None)
    assert kept > 32 << 20  # 64 MiB were taken and given back, to the heap
