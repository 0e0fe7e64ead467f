"""Steps with limits of time, and the processes that they start: a failure or a hang costs the item alone, and every result is on disk as
soon as there is one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MAX_BYTES = 15 << 20  # of a file of the results
WORKER = (sys.executable, "-m", "benchmarks.gpu.work")
BEGIN, ROW = "@begin ", "@row "  # a worker's lines: an item that it begins, and a result, in JSON
LOST = 3  # a worker's exit code after an item that failed: the rest needs a new process
START = 90  # seconds that a process has before its first item: the first import of torch reads gigabytes
GOOD = {"ok", "refused", "skipped", "not run"}  # of a row's status; all others are failures
OUR_KERNEL = re.compile(r"\bat .*\bella::")  # in a report of compute-sanitizer
Row = dict[str, Any]


class Stopped(Exception):
    """Nothing that follows can work."""


@dataclass
class Ended:
    """How a process ended. ``status`` is "ok", "failed" or "timeout"."""

    status: str
    code: int | None
    message: str


class Call:
    """One call: its time, its folder, its steps.

    Args:
        folder: of the results.
        seconds: until its end.
        scratch: a folder for files that are no results, where the processes run.
        env: the processes' environment.
        worker: the command that runs items; see :meth:`series`.
        scale: of all steps' limits, and of those within them.
        rehearsal: on the CPU, at small sizes.
    """

    def __init__(
        self,
        folder: Path,
        seconds: float,
        scratch: Path,
        env: dict[str, str],
        worker: Sequence[str] = WORKER,
        scale: float = 1,
        rehearsal: bool = False,
    ) -> None:
        self.folder, self.scratch, self.env, self.worker = folder, scratch, env, worker
        self.scale, self.rehearsal = scale, rehearsal
        self.start = time.monotonic()
        self.end = self.step_end = self.start + seconds
        self.step_name = ""
        self.rows: list[Row] = []
        self._lock = threading.RLock()
        self._groups: set[int] = set()
        folder.mkdir(parents=True, exist_ok=True)

    def left(self) -> float:
        """Seconds that the present step has."""
        return min(self.step_end, self.end) - time.monotonic()

    def write(self, name: str, text: str) -> None:
        """Append to a file of the results; what comes after 15 MiB is left out."""
        data = text.encode(errors="replace")
        with self._lock, open(self.folder / name, "ab") as file:
            if file.tell() + len(data) <= MAX_BYTES:
                file.write(data)

    def row(self, **values: Any) -> Row:
        """A result: to rows.jsonl, and to the output in a line."""
        row = {"step": self.step_name, "at": round(time.monotonic() - self.start, 2), **values}
        line = json.dumps(row)
        with self._lock:
            self.rows.append(row)
            self.write("rows.jsonl", line + "\n")
            print(line[:400], flush=True)
        return row

    def step(self, name: str, limit: float, function: Callable[[Call], None]) -> None:
        """Run a step within its limit and the call's. An error of the step is a row; :class:`Stopped` is raised."""
        began = time.monotonic()
        self.step_name, self.step_end = name, began + limit * self.scale
        if self.left() < 1:
            self.row(status="not run", message="the call's time is over")
            return
        try:
            function(self)
        except Stopped as error:
            self.row(status="failed", message=f"stopped: {error}")
            raise
        except Exception as error:
            self.write("log.txt", traceback.format_exc())
            self.row(status="failed", message=f"{type(error).__name__}: {error}")
        finally:
            self.kill_all()
            self.row(status="ok", seconds=round(time.monotonic() - began, 1), step_done=True)

    def run(
        self,
        command: Sequence[str],
        seconds: float = float("inf"),
        *,
        line: Callable[[str], object] = lambda text: None,
        env: dict[str, str] | None = None,
        file: str = "log.txt",
        overdue: Callable[[], bool] = lambda: False,
        interrupt: float = 0,
    ) -> Ended:
        """Run a process and all that it starts, in a group of its own, which is ended with it.

        Args:
            command: of the process.
            seconds: its limit; never more than the step has left.
            line: takes every line of its output.
            env: variables beside the call's.
            file: of the results, for its output.
            overdue: is asked now and then whether it hangs.
            interrupt: seconds between SIGINT, on which pytest writes its report, and the end, where its time is over.
        """
        deadline = time.monotonic() + min(seconds, self.left()) - interrupt
        tail: list[str] = []
        self.write(file, f"\n$ {' '.join(command)}\n")
        process = subprocess.Popen(
            command,
            cwd=self.scratch,
            env={**self.env, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        with self._lock:
            self._groups.add(process.pid)

        def read() -> None:
            with contextlib.suppress(ValueError, OSError):  # closed meanwhile
                for text in process.stdout:
                    self.write(file, text)
                    line(text.rstrip("\n"))
                    if text.strip("=- \n") and not text.startswith("@"):
                        tail.append(text.strip("=- \n")[:500])
                        del tail[:-8]

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        late = False
        try:
            while process.poll() is None and not late:
                time.sleep(0.02)
                late = time.monotonic() > deadline or overdue()
            if late and interrupt:
                _signal(process.pid, signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(interrupt)
        finally:
            self._kill(process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that the driver holds on to is left behind
            process.wait(3)
        reader.join(2)
        code = process.returncode
        said = f"exit code {code}: {' | '.join(tail)[-600:]}"
        return Ended("timeout" if late else "failed" if code else "ok", code, said)

    def series(
        self,
        kind: str,
        each: float,
        *,
        part: tuple[int, int] = (0, 1),
        prefix: Sequence[str] = (),
        env: dict[str, str] | None = None,
    ) -> list[Row]:
        """Rows of a kind's items, which a worker runs one after the other. After an item that fails, hangs or ends the worker, a new
        worker goes on with the next item.

        The worker is called with the kind, the part and the number of items that have been begun; it prints ``@begin ITEM`` before and
        ``@row JSON`` after each item. A report of compute-sanitizer on one of our kernels is a failure of the present item.

        Args:
            kind: of the items.
            each: seconds an item.
            part: index and number of the workers that share out the items.
            prefix: a command that runs the worker's, such as compute-sanitizer.
            env: variables beside the call's.
        """
        rows: list[Row] = []
        begun, item, since = 0, None, 0.0
        reports: list[str] = []

        def line(text: str) -> None:
            nonlocal begun, item, since
            if text.startswith(BEGIN):
                begun, item, since = begun + 1, text.removeprefix(BEGIN), time.monotonic()
            elif text.startswith(ROW) and text.endswith("}"):  # else torn by another's output
                finish(**json.loads(text.removeprefix(ROW)))
            elif text.startswith("=========  ") and reports:  # further lines of a report are indented
                reports[-1] += " | " + text.strip("= ")
            elif text.startswith("========="):
                reports.append(text.strip("= "))

        def finish(**row: Any) -> None:
            nonlocal item, since
            ours = [report for report in reports if OUR_KERNEL.search(report)]
            if ours:
                row |= {"status": "sanitizer", "message": " | ".join(ours)[:600]}
            rows.append(self.row(**row))
            item, since = None, time.monotonic()
            reports.clear()

        while self.left() > 1:
            before, since, item = begun, time.monotonic() + START, None
            reports.clear()
            command = [*prefix, *self.worker, kind, *map(str, part), str(begun)]
            overdue = lambda: time.monotonic() - since > each * self.scale  # noqa: B023, E731
            ended = self.run(command, line=line, env=env, overdue=overdue)
            if ended.status != "ok" and self.left() < 1:
                break
            whole = ended.code == 0 and item is None
            failed = ended.code not in (0, LOST) and all(row["status"] != "sanitizer" for row in rows)
            if item is not None or failed or any(map(OUR_KERNEL.search, reports)):
                status = "failed" if ended.status == "ok" else ended.status
                finish(item=item or f"{kind} after {begun} items", status=status, message=ended.message)
            if begun == before or whole:
                return rows
        rows.append(self.row(status="not run", message=f"no time left after {begun} items"))
        return rows

    def pool(self, function: Callable[[Any], Any], of: Iterable[Any], at_once: int = 8) -> None:
        """Call the function of each, so many at once."""
        with ThreadPoolExecutor(at_once) as threads:
            try:
                list(threads.map(function, of))
            except KeyboardInterrupt:
                self.end = self.start  # no thread starts another process
                threads.shutdown(wait=False, cancel_futures=True)
                self.kill_all()
                raise

    def kill_all(self) -> None:
        with self._lock:
            groups = list(self._groups)
        for group in groups:
            self._kill(group)

    def _kill(self, group: int) -> None:
        with self._lock:
            if group in self._groups:
                self._groups.remove(group)
                _signal(group, signal.SIGKILL)


def _signal(group: int, which: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, which)
