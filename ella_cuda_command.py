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
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

# Threads of GNU's OpenMP that have no work spin so many turns before they sleep. By default that is longer than a time slice: a thread
# that waits for one which shares its core with another process keeps that one from moving to the waiting thread's core.
SPIN_ALONE = 10_000  # as fast as the default, and ends within a time slice
SPIN_BESIDE_OTHERS = 0
# What says that the user has chosen already, but for what says nothing of threads, which scikit-learn sets too.
CHOICES, OTHERS = (
    ("OMP_", "GOMP_", "KMP_", "MKL_NUM_THREADS", "MKL_DYNAMIC"),
    ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),
)
THREADS = re.compile(r"\+?0*[1-9]\d*(\s*,\s*\+?0*[1-9]\d*)*")  # what OpenMP takes: one number for each level of nesting
NOTE = "ELLA_CUDA_THREADS"  # the environment variable that says what was chosen and why, for `info` and the folder of a run
SAMPLE = 0.15  # seconds
BUSY = 0.3  # cores; less is what any system does by itself
PATIENCE = 3.0  # seconds that an interruption waits for an import to end
AGAIN = 0.1  # seconds after which an interruption that got lost comes again
TIMERS = hasattr(signal, "setitimer")


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
        note = f"by the environment: {', '.join(f'{n}={environ[n]}' for n in set_by_user)}"
        threads = environ.get("OMP_NUM_THREADS", "").strip()
        if threads and not THREADS.fullmatch(threads):
            note += "; OMP_NUM_THREADS is not a number of threads, and OpenMP ignores it"
        return {NOTE: note}
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
    """How many cores' time the control groups of this process may use; infinite without a limit."""
    quota = math.inf
    try:
        groups = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return quota
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / controllers
        group = top / path.strip("/")
        for folder in (group, *group.parents):  # in a container its own group may be the top
            with contextlib.suppress(OSError, ValueError):
                if controllers:
                    numbers = [
                        (folder / f"cpu.cfs_{name}_us").read_text(encoding="ascii") for name in ("quota", "period")
                    ]
                else:
                    numbers = (folder / "cpu.max").read_text(encoding="ascii").split()
                limit, period = map(float, numbers)  # without a limit: "max", or -1
                if limit > 0 and period > 0:
                    quota = min(quota, limit / period)
            if folder == top:
                break
    return quota


class Stop:
    """Signals that end the command: the first as an interruption that can be tidied up after, a second at once.

    Until :attr:`cleanly` is set there is nothing to tidy up, and the first ends the command at once too.

    An interruption waits until an import has ended, at most :data:`PATIENCE`: in the middle of one it may come out as anything. Where it
    gets lost, in what catches everything or in a destructor, it comes again.

    Attributes:
        cleanly: whether the first signal is an interruption.
        came: whether one was.
        code: the exit code, 128 and the number of the signal that came; that of SIGINT if none did.
    """

    def __init__(self) -> None:
        self.cleanly = self.came = False
        self.code = 128 + signal.SIGINT
        self._patient_until = math.inf
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            # Ignored signals stay ignored: of a shell's background jobs, or under nohup.
            if number is not None and signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(number, self._received)

    def end(self) -> None:
        """Have no interruption come from here on, nor come again: the command has ended."""
        self.cleanly = False
        if TIMERS and self.came:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _received(self, number: int, frame: FrameType | None) -> None:
        self.code = 128 + number
        if self.came or not self.cleanly:
            with contextlib.suppress(OSError):
                os.write(2, b"ella-cuda: interrupted\n")
            os._exit(self.code)
        self.came = True
        self._patient_until = time.monotonic() + PATIENCE
        sys.unraisablehook = _quiet_hook(sys.unraisablehook)
        sys.excepthook = _quiet_hook(sys.excepthook)
        if TIMERS:
            signal.signal(signal.SIGALRM, self._interrupt)
        self._interrupt(number, frame)

    def _interrupt(self, _: int, frame: FrameType | None) -> None:
        """Raise the interruption, unless it is on its way, and look again later whether it has arrived."""
        if not self.cleanly:
            return
        if TIMERS:
            # Again and again: one that comes just before a call blocks is handled once the call has ended.
            signal.setitimer(signal.ITIMER_REAL, AGAIN, AGAIN)
            if _on_its_way(sys.exc_info()[1]) or (_imports(frame) and time.monotonic() < self._patient_until):
                return
        raise KeyboardInterrupt


def _on_its_way(error: BaseException | None) -> bool:
    """Whether an exception that is being handled is an interruption, or came of one."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        error = waiting.pop()
        if isinstance(error, KeyboardInterrupt):
            return True
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            waiting += (error.__cause__, error.__context__)
    return False


def _imports(frame: FrameType | None) -> bool:
    """Whether a frame is within an import."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _quiet_hook(hook: Callable[..., None]) -> Callable[..., None]:
    """A hook that shows exceptions which are lost, but for interruptions: those come again."""

    def show(*lost: Any) -> None:
        kind = lost[0] if isinstance(lost[0], type) else lost[0].exc_type  # excepthook's, or unraisablehook's
        if not issubclass(kind, KeyboardInterrupt):
            hook(*lost)

    return show


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
