"""``ella-cuda`` in processes of its own that need not load torch: forked from one that has done so, and has no threads."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# Streams are made as Python makes them at its start: none where the file descriptor is closed. At its end a child does what Python does
# that can be seen; to free what torch holds takes a second.
SERVER = """
import atexit, gc, io, json, os, sys
import matplotlib.backends.backend_agg, matplotlib.figure, sklearn.datasets, torch._dynamo
import ella_cuda.cli
import ella_cuda_command as command

def stream(number, buffered):
    try:
        raw = io.FileIO(number, "w", closefd=False)
    except OSError:
        return None
    raw.name = f"<{('stdin', 'stdout', 'stderr')[number]}>"
    binary = io.BufferedWriter(raw) if buffered else raw
    errors = "strict" if number == 1 else "backslashreplace"
    return io.TextIOWrapper(binary, errors=errors, line_buffering=number == 2 or raw.isatty(), write_through=not buffered)

gc.freeze()
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if not child:
        break
    print(child, flush=True)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with open(asked["status"] + ".begun", "w") as file:
        file.write(str(code))
    os.rename(file.name, asked["status"])
else:
    os._exit(0)

files = [os.open(name, os.O_RDWR | os.O_CREAT) for name in asked["streams"]]
for number, file in enumerate(files):
    os.dup2(file, number)
    os.close(file)
for number in asked["closed"]:
    os.close(number)
sys.stdin = sys.__stdin__ = None if 0 in asked["closed"] else open(0, closefd=False)
sys.stdout = sys.__stdout__ = stream(1, asked["buffered"])
sys.stderr = sys.__stderr__ = stream(2, asked["buffered"])
os.chdir(asked["cwd"])
sys.path[:0] = asked["first"]
sys.argv[1:] = asked["options"]
exec(asked["before"])
code = command.main()
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)
"""


@dataclasses.dataclass
class Child:
    """As much of ``subprocess.Popen`` as tests use."""

    pid: int
    status: Path
    out: Path
    err: Path
    returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and self.status.exists():
            self.returncode = int(self.status.read_text())
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it wrote to its files."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                self.send_signal(signal.SIGKILL)
                raise TimeoutError(f"the process went on for {timeout} s: {self.err.read_text()}")
            time.sleep(0.01)
        return tuple(file.read_text() if file.is_file() else "" for file in (self.out, self.err))


class Forks:
    """The process that is forked, one child at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.numbers = folder, itertools.count()
        path = os.pathsep.join(p for p in sys.path if p)
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}

        def defaults() -> None:  # what starts the tests may ignore them
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)

        call = [sys.executable, "-c", SERVER]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.last: Child | None = None
        self.server = subprocess.Popen(call, cwd=folder, env=env, text=True, preexec_fn=defaults, **pipes)

    def start(
        self,
        options: Sequence[str],
        cwd: Path,
        *,
        before: str = "",
        first: Path | None = None,
        terminal: str | None = None,
        out: str | None = None,
        closed: Sequence[int] = (),
        buffered: bool = True,
    ) -> Child:
        """The command with those options in ``cwd``, after the statements ``before``.

        Args:
            first: where packages are looked for first.
            terminal: of all three streams; else they are files.
            out: another file in place of the output's.
            closed: streams that are closed at the start.
            buffered: False as where ``PYTHONUNBUFFERED`` is set.
        """
        stem = self.folder / str(next(self.numbers))
        status, own_out, err = (stem.with_suffix(f".{kind}") for kind in ("status", "out", "err"))
        streams = [terminal] * 3 if terminal else [os.devnull, out or str(own_out), str(err)]
        asked = {"options": list(options), "cwd": str(cwd), "before": before, "first": [str(first)] if first else []}
        asked |= {"status": str(status), "streams": streams, "closed": list(closed), "buffered": buffered}
        self._kill_last()
        print(json.dumps(asked), file=self.server.stdin, flush=True)
        self.last = Child(int(self.server.stdout.readline()), status, Path(out or own_out), err)
        return self.last

    def _kill_last(self) -> None:
        """A test that failed leaves its child, for whose end the server waits."""
        if self.last is not None:
            self.last.send_signal(signal.SIGKILL)

    def end(self) -> None:
        self._kill_last()
        try:
            self.server.communicate(timeout=60)
        finally:
            self.server.kill()


def wait_for(path: Path, process: subprocess.Popen[str] | Child) -> None:
    """Until there is that file, which the process makes."""
    deadline = time.monotonic() + 240
    while not path.exists():
        assert process.poll() is None, process.communicate(timeout=60)
        assert time.monotonic() < deadline
        time.sleep(0.01)
