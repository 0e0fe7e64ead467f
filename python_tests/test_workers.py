"""Calls in processes of their own: what a failure may touch."""

from __future__ import annotations

import multiprocessing
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
