"""Calls in processes of their own: what a failure may touch."""

from __future__ import annotations

import dataclasses
import multiprocessing
import platform
import signal
import time
from typing import Any

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


# Expressions that a worker evaluates by itself: nothing of the tests needs to be importable there.
BLOCKED = "__import__('signal').pthread_sigmask(0, [])"
FLUSHED = "float(__import__('torch').full((64,), 1e-30).mul(1e-12).sum())"
KEPT = (
    "(lambda torch, rss: (lambda low: (torch.ones(16 << 20).sum(), rss() - low)[1])(rss()))"
    "(__import__('torch'), lambda: int(open('/proc/self/status').read().split('VmRSS:')[1].split()[0]) * 1024)"
)


@dataclasses.dataclass(frozen=True)
class Asked:
    """What one worker answered, by the question; the order of the answers; signals that this process blocked before and after."""

    answers: dict[str, Any]
    order: list[int]
    before: set[signal.Signals]
    after: set[signal.Signals]


@pytest.fixture(scope="module")
def asked() -> Asked:
    questions = ["2**3", FLUSHED, "3**2"]
    questions += [KEPT] if platform.libc_ver()[0] == "glibc" else []
    can_block = hasattr(signal, "pthread_sigmask")
    questions += [BLOCKED] if can_block else []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, []) if can_block else set()
    found = list(run_at_once(eval, [(q,) for q in questions], 1, 1, lambda: None))
    after = signal.pthread_sigmask(signal.SIG_BLOCK, []) if can_block else set()
    return Asked({questions[i]: answer for i, answer in found}, [i for i, _ in found], before, after)


def test_calls_are_begun_in_their_order(asked):
    assert asked.order == list(range(len(asked.answers)))
    assert (asked.answers["2**3"], asked.answers["3**2"]) == (8, 9)


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="signals cannot be blocked here")
def test_ctrl_c_reaches_this_process_alone(asked):
    """A terminal sends it to workers too, which would show where they were while they import."""
    assert signal.SIGINT in asked.answers[BLOCKED] and signal.SIGINT not in asked.before
    assert asked.after == asked.before


def test_workers_flush_subnormal_numbers(asked):
    assert asked.answers[FLUSHED] == 0.0


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's heap is told to keep memory")
def test_workers_keep_freed_memory(asked):
    assert asked.answers[KEPT] > 32 << 20  # 64 MiB were taken and given back, to the heap
