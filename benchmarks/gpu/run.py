"""Steps with limits of time, and the processes that they start: what fails or hangs costs itself alone, and every result is on disk as
soon as there is one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MAX_FILES, MAX_BYTES = 8, 15 << 20
WORKER = (sys.executable, "-m", "benchmarks.gpu.work")
BEGIN, ROW = "@begin ", "@row "  # a worker's lines: an item that it begins, and a result, in JSON
TEST = "@test "  # a line of the pytest plugin, in JSON
LOST = 3  # a worker's exit code where the device is lost after an item: the rest needs a new process
GOOD = {"ok", "refused", "skipped", "not run"}  # of a row's status; all others are failures
Row = dict[str, Any]


class Folder:
    """The results: at most eight files of at most 15 MiB. What is too much goes to log.txt, or is cut off with a sentence."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._sizes = {file.name: file.stat().st_size for file in path.iterdir() if file.is_file()}
        self._sizes.setdefault("log.txt", 0)
        self._full: set[str] = set()

    def append(self, name: str, text: str) -> None:
        data = text.encode(errors="replace")
        with self._lock:
            if name not in self._sizes and len(self._sizes) >= MAX_FILES:
                name = "log.txt"
            size = self._sizes.get(name, 0)
            if name in self._full:
                return
            if size + len(data) > MAX_BYTES:
                self._full.add(name)
                data = b"(what follows is left out: the file is full)\n"
            with open(self.path / name, "ab") as file:
                file.write(data)
            self._sizes[name] = size + len(data)

    def take(self, file: Path, name: str | None = None) -> bool:
        """Copy a whole file, if it fits, under its own name or another."""
        name = name or file.name
        with self._lock:
            if file.stat().st_size > MAX_BYTES or (name not in self._sizes and len(self._sizes) >= MAX_FILES):
                return False
            shutil.copyfile(file, self.path / name)
            self._sizes[name] = file.stat().st_size
            return True


@dataclass
class Ended:
    """How a process ended. ``status`` is "ok", "failed", "crashed" or "timeout"."""

    status: str
    code: int | None
    seconds: float
    tail: list[str] = field(default_factory=list)

    @property
    def message(self) -> str:
        said = " | ".join(line for line in self.tail if line.strip())[-600:]
        if self.status == "crashed":
            with contextlib.suppress(ValueError):
                return f"{signal.Signals(-self.code).name}: {said}"
        return f"after {self.seconds:.0f} s: {said}" if self.status == "timeout" else f"exit code {self.code}: {said}"


class Stopped(Exception):
    """Nothing that follows can work."""


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
        folder: Folder,
        seconds: float,
        scratch: Path,
        env: Mapping[str, str] = os.environ,
        worker: Sequence[str] = WORKER,
        scale: float = 1,
        rehearsal: bool = False,
    ) -> None:
        self.rehearsal = rehearsal
        self.folder, self.scratch, self.env, self.worker, self.scale = (
            folder,
            scratch,
            dict(env),
            [*worker, *(["--rehearse"] if rehearsal else [])],
            scale,
        )
        self.start = time.monotonic()
        self.end = self.start + seconds
        self.step_end = self.end
        self.step_name = ""
        self.rows: list[Row] = []
        self.items: dict[str, list[str] | str] = {}  # of every kind, once the worker has said so; or why there are none
        self._lock = threading.RLock()
        self._groups: set[int] = set()

    def left(self) -> float:
        """Seconds that the present step has."""
        return min(self.step_end, self.end) - time.monotonic()

    def row(self, **values: Any) -> Row:
        """A result: to rows.jsonl, and to the output in a line."""
        row = {"step": self.step_name, "at": round(time.monotonic() - self.start, 2), **values}
        line = json.dumps(row)
        with self._lock:
            self.rows.append(row)
            self.folder.append("rows.jsonl", line + "\n")
            print(line if len(line) < 400 else line[:397] + "...", flush=True)
        return row

    def step(self, name: str, limit: float, function: Callable[[Call], None]) -> None:
        """Run a step within its limit and the call's; what it raises is a row, except for :class:`Stopped`."""
        began = time.monotonic()
        self.step_name, self.step_end = name, began + limit * self.scale
        stopped = None
        if self.left() < 1:
            self.row(status="not run", message="the call's time is over")
            return
        try:
            function(self)
        except Stopped as error:
            stopped = error
            self.row(status="failed", message=str(error))
        except Exception as error:
            self.folder.append("log.txt", traceback.format_exc())
            self.row(status="failed", message=f"{type(error).__name__}: {error}")
        finally:
            self.kill_all()
        self.row(status="ok", seconds=round(time.monotonic() - began, 1), step_done=True)
        if stopped:
            raise stopped

    def run(
        self,
        command: Sequence[str],
        seconds: float | None = None,
        *,
        line: Callable[[str], bool] | None = None,
        env: Mapping[str, str] | None = None,
        file: str = "log.txt",
        overdue: Callable[[], bool] | None = None,
        interrupt: float = 0,
    ) -> Ended:
        """Run a process, with all that it starts in a group of its own, which is ended with it.

        Args:
            command: of the process.
            seconds: its limit; never more than the step has left.
            line: takes every line of its output; those for which it returns True are not written to ``file``.
            env: variables beside the call's.
            file: of the results, for its output.
            overdue: is asked now and then whether it hangs.
            interrupt: where its time is over, seconds between SIGINT, on which pytest writes its report, and the end.
        """
        began = time.monotonic()
        deadline = min(began + (seconds or float("inf")), began + self.left())
        tail: list[str] = []
        self.folder.append(file, f"\n$ {' '.join(command)}\n"[:2000])
        process = subprocess.Popen(
            list(command),
            cwd=self.scratch,
            env={**self.env, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        with self._lock:
            self._groups.add(process.pid)

        def read() -> None:
            with contextlib.suppress(ValueError, OSError):  # closed meanwhile
                for data in iter(lambda: process.stdout.readline(1 << 20), b""):
                    text = data.decode(errors="replace")
                    if line is None or not line(text.rstrip("\n")):
                        tail.append(text.rstrip("\n")[:500])
                        del tail[:-8]
                        self.folder.append(file, text)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        late = False
        try:
            while process.poll() is None and not late:
                time.sleep(0.02)
                soft = deadline - interrupt
                late = time.monotonic() > soft or (overdue is not None and overdue())
            if late and interrupt and process.poll() is None:
                _signal(process.pid, signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(interrupt)
        finally:
            self._kill(process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that the driver holds on to is left behind
            process.wait(3)
        reader.join(2)
        code = process.returncode
        how = "ok" if code == 0 else "crashed" if code is not None and code < 0 else "failed"
        return Ended("timeout" if late else how, code, time.monotonic() - began, list(tail))

    def series(
        self,
        kind: str,
        items: Iterable[str],
        each: float,
        *,
        prefix: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        file: str = "log.txt",
        family: Callable[[str], str | None] = lambda item: None,
        complaint: Callable[[list[str]], bool] = lambda lines: True,
        **more: Any,
    ) -> list[Row]:
        """Have the worker run items, one after the other in one process, each within its limit in seconds. After an item that ends the
        process or hangs, a new one goes on with the next. After one of a family that hangs, or two that end their processes, the rest of
        the family is left out, for each costs the start of a process.

        The worker is called with the kind and the items; it prints ``@begin ITEM`` before and ``@row JSON`` after each, on lines of
        their own. What compute-sanitizer prints meanwhile is a failure of the present item.

        Args:
            kind: of the items.
            items: their names.
            each: seconds an item, the start of a process included.
            prefix: a command that runs the worker's, such as compute-sanitizer.
            env: variables beside the call's.
            file: of the results, for other output.
            family: the name of an item's family, if it has one.
            complaint: whether a report of compute-sanitizer, by its lines, is one.
            more: what every row says too.

        Returns:
            The rows.
        """
        rest, rows, idle = list(items), [], 0
        strikes: Counter[str] = Counter()
        while rest:
            if self.left() < 1:
                rows.append(self.row(**more, status="not run", items=rest, message=f"{len(rest)} items: no time left"))
                break
            watch = _Watch(self, more, each * self.scale)
            command = [*prefix, *self.worker, kind, *rest]
            ended = self.run(command, line=watch.line, env=env, file=file, overdue=watch.overdue)
            rows += watch.rows
            complaints = {item: [said for said in those if complaint(said)] for item, those in watch.complaints.items()}
            for item, those in complaints.items():
                if those:
                    found = " | ".join(text for said in those for text in said)[:600]
                    rows.append(self.row(**more, item=item, status="sanitizer", message=found))
            rest = [item for item in rest if item not in watch.done]
            hit = watch.item if watch.item in rest else None
            if ended.status == "timeout" and self.left() < 1:
                if hit:
                    message = f"the step's time was over {watch.seconds():.1f} s after its beginning"
                    rows.append(self.row(**more, item=hit, status="timeout", message=message))
                    rest.remove(hit)
                if rest:
                    message = f"{len(rest)} items: no time left"
                    rows.append(self.row(**more, status="not run", items=rest, message=message))
                break
            idle = 0 if watch.done or hit else idle + 1
            if rest and (hit or not watch.done):  # the process ended within an item, or before the first
                status = "failed" if ended.status == "ok" else ended.status
                rows.append(self.row(**more, item=hit or rest[0], status=status, message=ended.message))
                rest.remove(hit or rest[0])
            elif ended.status != "ok" and ended.code != LOST and not any(complaints.values()):
                message = f"afterwards, {ended.message}"
                rows.append(self.row(**more, item=watch.item, status=ended.status, message=message))
            kin = family(hit or watch.item) if hit or watch.item else None
            if kin is not None and ended.status != "ok" and (hit or ended.code == LOST):
                strikes[kin] += 2 if ended.status == "timeout" else 1
                left_out = [item for item in rest if strikes[kin] >= 2 and family(item) == kin]
                if left_out:
                    message = f"{len(left_out)} items: {kin} hangs or ends its process"
                    rows.append(self.row(**more, status="not run", items=left_out, message=message))
                    rest = [item for item in rest if item not in left_out]
            if rest and idle == 2:
                rows.append(self.row(**more, status="not run", items=rest, message="no process starts"))
                break
        return rows

    def pool(self, function: Callable[[Any], Any], of: Iterable[Any], at_once: int = 8) -> list[Any]:
        """The function of each, so many at once."""
        with ThreadPoolExecutor(at_once) as threads:
            try:
                return list(threads.map(function, of))
            except KeyboardInterrupt:
                self.end = self.start  # no thread starts another process
                threads.shutdown(wait=False, cancel_futures=True)
                self.kill_all()
                raise

    def ask(self, *words: str, seconds: float = 30) -> Any:
        """What the worker answers to a question: the JSON of its last row.

        Raises:
            TimeoutError: it does not within its limit.
            RuntimeError: it fails.
        """
        answers: list[Any] = []

        def line(text: str) -> bool:
            if text.startswith(ROW):
                answers.append(json.loads(text.removeprefix(ROW)))
            return text.startswith(ROW)

        ended = self.run([*self.worker, *words], seconds, line=line)
        if ended.status != "ok" or not answers:
            error = TimeoutError if ended.status == "timeout" else RuntimeError
            raise error(f"{' '.join(words)}: {ended.status}, {ended.message}")
        return answers[-1]

    def tool(self, name: str) -> str | None:
        """Where a program is on the processes' path; where it is not, a row says so."""
        found = shutil.which(name, path=self.env.get("PATH"))
        if found is None:
            self.row(status="skipped", message=f"{name} is not on the path")
        return found

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


class _Watch:
    """What a worker has said so far."""

    def __init__(self, call: Call, more: Mapping[str, Any], each: float) -> None:
        self._call, self._more, self._each = call, more, each
        self._since = time.monotonic()
        self.item: str | None = None
        self.rows: list[Row] = []
        self.done: set[str] = set()
        self.complaints: dict[str | None, list[list[str]]] = defaultdict(list)  # reports of several lines

    def line(self, text: str) -> bool:
        if text.startswith(BEGIN):
            self.item, self._since = text.removeprefix(BEGIN), time.monotonic()
        elif text.startswith(ROW):
            try:
                row = json.loads(text.removeprefix(ROW))
            except ValueError:  # torn by another's output
                return False
            self.rows.append(self._call.row(**{**self._more, **row}))
            self.done.add(row.get("item"))
            self._since = time.monotonic()
            return True
        elif text.startswith("=========") and "SUMMARY: 0 " not in text and "COMPUTE-SANITIZER" not in text:
            said, reports = text.strip("= "), self.complaints[self.item]
            if reports and text.startswith("=========  "):  # further lines of a report are indented
                reports[-1] += [said]
            elif said:
                reports.append([said])
        return False

    def seconds(self) -> float:
        """Since the present item's beginning."""
        return time.monotonic() - self._since

    def overdue(self) -> bool:
        return self.seconds() > self._each


def _signal(group: int, which: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, which)
