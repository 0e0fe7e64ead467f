"""The entry point of ``ella-cuda``: what must be settled before torch is imported.

A module of its own, beside the package, whose import takes no time: the package imports torch, which reads how many threads it has and
how they wait when it is loaded. Importing ``ella_cuda`` as a library settles nothing.
"""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

# Threads of GNU's OpenMP that have no work spin so many turns before they sleep. By default that is longer than a time slice: a thread
# that waits for one which shares its core with another process keeps that one from moving to the waiting thread's core.
SPIN_ALONE = 10_000  # as fast as the default, and ends within a time slice
SPIN_BESIDE_OTHERS = 0
CHOICES = ("OMP_", "GOMP_", "KMP_", "MKL_NUM_THREADS", "MKL_DYNAMIC")  # variables by which users choose
OTHERS = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")  # say nothing of threads; scikit-learn sets them too
NOTE = "ELLA_CUDA_THREADS"  # the environment variable that says what was chosen and why, for `info` and the folder of a run
SAMPLE = 0.15  # seconds
BUSY = 0.3  # cores; less is what any system does by itself


def main() -> int:
    """Run the command: streams that cannot fail, signals that end it in one line, threads that fit the machine; then
    :func:`ella_cuda.cli.main`.

    Returns:
        The exit code; 128 and the signal's number where a signal ended it.
    """
    open_closed_streams()
    protect_streams()
    stop = Stop()
    os.environ.update(choose_threads())
    from ella_cuda import cli

    return cli.main(stop=stop)


def choose_threads(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> dict[str, str]:
    """The environment variables that fit torch's threads to the cores that are free now; none where the user has set one of them, to
    more than an empty word, or the system is not Linux.

    The number of threads follows from what this process may use alone, its CPU affinity and its control groups' quota: results depend on
    it by rounding, and are not to depend on what else runs. How threads wait follows from what else runs too.
    """
    if NOTE in environ or not sys.platform.startswith("linux"):
        return {}
    if set_by_user := sorted(n for n in environ if n.startswith(CHOICES) and n not in OTHERS and environ[n].strip()):
        return {NOTE: f"by the environment: {', '.join(f'{n}={environ[n]}' for n in set_by_user)}"}
    allowed = os.sched_getaffinity(0)
    quota = _quota(root)
    cores = min(len(allowed), quota)
    try:
        free = max(0.0, min(quota, len(allowed) - _busy_cores(root, allowed)))
    except (OSError, ValueError, IndexError) as error:  # /proc is hidden, or another system's
        return {NOTE: f"torch's own: {root / 'proc/stat'} tells no load ({error})"}
    alone = free > cores - BUSY
    chosen = {"GOMP_SPINCOUNT": str(SPIN_ALONE if alone else SPIN_BESIDE_OTHERS)}
    if quota < len(allowed):
        chosen["OMP_NUM_THREADS"] = str(max(1, int(quota)))
    settings = ", ".join(f"{name}={value}" for name, value in sorted(chosen.items()))
    return chosen | {NOTE: f"{settings}: {free:.1f} of {cores:g} cores were free at the start"}


def _busy_cores(root: Path, allowed: set[int]) -> float:
    """How many of these cores other processes use, while this one sleeps."""

    def ticks() -> dict[int, tuple[int, int]]:
        found = {}
        for line in (root / "proc/stat").read_text(encoding="ascii").splitlines():
            name, *numbers = line.split()
            if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in allowed:
                counts = [int(n) for n in numbers[:8]]  # user, nice, system, idle, iowait, irq, softirq, steal
                found[int(name[3:])] = (sum(counts), counts[3] + counts[4])
        return found

    before = ticks()
    time.sleep(SAMPLE)
    after = ticks()
    passed = {core: (after[core][0] - before[core][0], after[core][1] - before[core][1]) for core in before}
    if len(passed) < len(allowed):
        raise ValueError(f"it has {len(passed)} of {len(allowed)} cores")
    return sum(1 - idle / total for total, idle in passed.values() if total > 0)


def _quota(root: Path) -> float:
    """How many cores' time the control groups (version 2) of this process may use; infinite without a limit."""
    try:
        groups = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return math.inf
    top, quota = root / "sys/fs/cgroup", math.inf
    for path in (line.removeprefix("0::/") for line in groups if line.startswith("0::/")):
        for folder in (top / path, *(top / path).parents):  # in a container its own group may be the top
            with contextlib.suppress(OSError, ValueError):  # without a limit: "max"
                limit, period = map(float, (folder / "cpu.max").read_text(encoding="ascii").split())
                quota = min(quota, limit / period)
    return quota


class Stop:
    """Signals that end the command: the first as an interruption that can be tidied up after, a second at once.

    Until :attr:`cleanly` is set there is nothing to tidy up, and the first ends the command at once too.

    Attributes:
        cleanly: whether the first signal is an interruption.
        came: whether one was.
        code: the exit code, 128 and the number of the signal that came; that of SIGINT if none did.
    """

    def __init__(self) -> None:
        self.cleanly = self.came = False
        self.code = 128 + signal.SIGINT
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            # Ignored signals stay ignored: of a shell's background jobs, or under nohup.
            if number is not None and signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(number, self._received)

    def _received(self, number: int, _: FrameType | None) -> None:
        self.code = 128 + number
        if self.came or not self.cleanly:
            with contextlib.suppress(OSError):
                os.write(2, b"ella-cuda: interrupted\n")
            os._exit(self.code)
        self.came = True
        raise KeyboardInterrupt


def open_closed_streams() -> None:
    """Have standard streams that are closed lead nowhere: files opened later would take their place and get what is printed."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            with contextlib.suppress(OSError):
                found = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
                os.set_inheritable(found, True)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115


def protect_streams() -> None:
    """Have what is printed never fail for its signs, which come as escapes where the encoding has none of them, nor for a terminal that
    is gone."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):
            continue
        raw = getattr(stream.buffer, "raw", stream.buffer)
        if type(raw) is io.FileIO and stream.isatty():
            setattr(sys, name, _terminal(stream, raw.fileno()))
        else:
            stream.reconfigure(errors="backslashreplace")


def _terminal(stream: io.TextIOWrapper, number: int) -> TextIO:
    raw = _Terminal(number, "w", closefd=False)
    raw.name = stream.name
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Terminal(io.FileIO):
    """A terminal; once it is gone, what is written to it goes nowhere."""

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            lead_nowhere(self.fileno())
            return len(data)


def lead_nowhere(number: int) -> None:
    """Have what is written under that file descriptor go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
