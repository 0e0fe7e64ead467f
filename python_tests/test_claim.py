"""One process at a time, by real processes that are killed."""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from ella_cuda import claim as module
from ella_cuda.claim import claim

# The module by itself: importing torch would take most of the time.
HEAD = f"""
import importlib.util, os, pathlib, sys, time
spec = importlib.util.spec_from_file_location("claim", {module.__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
folder = pathlib.Path(sys.argv[1])
"""
HOLD = """
with module.claim(folder / ".lock", "it"):
    if "fork" in sys.argv and os.fork() == 0:
        os.write(1, b"%d\\n" % os.getpid())
        time.sleep(600)
    os.write(1, b"held\\n")
    time.sleep(600)
"""
COUNT = """
for _ in range(25):
    with module.claim(folder / ".lock", "it", patience=100.0):
        value = int((folder / "count").read_text())
        time.sleep(0.001)
        (folder / "count").write_text(str(value + 1))
"""


@contextlib.contextmanager
def started(code: str, *args: object) -> Iterator[subprocess.Popen[str]]:
    """A process that ends with the context at the latest."""
    with subprocess.Popen(
        [sys.executable, "-c", HEAD + code, *map(str, args)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_many_processes_take_turns(tmp_path):
    (tmp_path / "count").write_text("0")
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(started(COUNT, tmp_path)) for _ in range(6)]
        assert [p.wait(timeout=200) for p in processes] == [0] * 6
    assert (tmp_path / "count").read_text() == str(6 * 25)
    assert os.listdir(tmp_path) == ["count"]


def test_the_second_learns_who_is_first_and_a_killed_one_leaves_its_place(tmp_path):
    with started(HOLD, tmp_path) as holder:
        assert holder.stdout.readline() == "held\n"
        said = json.loads((tmp_path / ".lock").read_text())
        assert (said["pid"], said["host"]) == (holder.pid, socket.gethostname())
        words = rf"^the folder is in use by process {holder.pid} on {socket.gethostname()} since {said['since'][:10]}"
        with pytest.raises(RuntimeError, match=words), claim(tmp_path / ".lock", "the folder", patience=0.1):
            pass
        holder.kill()
        holder.wait()
    assert os.listdir(tmp_path) == [".lock"]
    with claim(tmp_path / ".lock", "the folder"):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
    assert os.listdir(tmp_path) == []


def test_a_fork_does_not_keep_its_parents_claim(tmp_path):
    with started(HOLD, tmp_path, "fork") as holder:
        said = {holder.stdout.readline().strip() for _ in range(2)}
        (child,) = (int(word) for word in said - {"held"})
        try:
            holder.kill()
            holder.wait()
            with claim(tmp_path / ".lock", "the folder"):
                os.kill(child, 0)  # it lives
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_fork_that_ends_does_not_end_its_parents_claim(tmp_path):
    """Nor does it close a file of its own, which may have the number that the claim's had."""

    def leave() -> None:
        (number,) = numbers
        os.dup2(os.open(tmp_path / "own", os.O_RDWR | os.O_CREAT), number)
        held.__exit__(None, None, None)
        os.write(number, b"still open")

    held = claim(tmp_path / ".lock", "the folder")
    with held:
        numbers = set(module._held)
        child = multiprocessing.get_context("fork").Process(target=leave)
        child.start()
        child.join()
        assert child.exitcode == 0 and (tmp_path / "own").read_text() == "still open"
        with pytest.raises(RuntimeError, match="in use"), claim(tmp_path / ".lock", "the folder", patience=0.0):
            pass
        assert (tmp_path / ".lock").exists()


def test_a_lock_file_that_its_holder_has_just_removed_is_no_claim(tmp_path, monkeypatch):
    lock, flock = tmp_path / ".lock", module.fcntl.flock
    removed = []

    def late(descriptor: int, how: int) -> None:
        if not removed:
            removed.append(lock.unlink())
        flock(descriptor, how)

    monkeypatch.setattr(module.fcntl, "flock", late)
    with claim(lock, "the folder"):
        assert removed and lock.exists()
        with pytest.raises(RuntimeError, match="in use"), claim(lock, "the folder", patience=0.0):
            pass


def test_threads_of_one_process_exclude_each_other_and_wait_a_while(tmp_path):
    entered, order = threading.Event(), []

    def first() -> None:
        with claim(tmp_path / ".lock", "it"):
            entered.set()
            time.sleep(0.3)
            order.append(1)

    other = threading.Thread(target=first)
    other.start()
    entered.wait()
    with claim(tmp_path / ".lock", "it", patience=60.0):
        order.append(2)
    other.join()
    assert order == [1, 2]


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(module.fcntl, "flock", refuse)
    with (
        pytest.warns(
            RuntimeWarning, match=r"the folder cannot be locked \(No locks available\): make sure that no other"
        ),
        claim(tmp_path / ".lock", "the folder"),
    ):
        pass
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with (
        warnings.catch_warnings(action="error"),
        pytest.raises(OSError, match=r"it cannot be worked on: .*none/\.lock cannot be written \(No such file"),
        claim(Path(tmp_path / "none" / ".lock"), "it"),
    ):
        pass


def test_a_link_in_the_lock_s_place_leaves_its_file_alone(tmp_path):
    (tmp_path / "other").write_text("kept")
    (tmp_path / ".lock").symlink_to(tmp_path / "other")
    with (
        pytest.raises(OSError, match=r"it cannot be worked on: .*\.lock cannot be written"),
        claim(tmp_path / ".lock", "it"),
    ):
        pass
    assert (tmp_path / "other").read_text() == "kept"
