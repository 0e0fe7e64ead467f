"""Work on several processes of one group over gloo: forked from a process that has imported what they need, and has no threads."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

LIMIT = 60.0  # seconds that any work may take

SERVER = """
import gc, importlib, json, os, sys, time
import torch
import torch.distributed as dist
import torch._dynamo
import python_tests.distributed.works as works
import ella_cuda.cli

torch.set_num_threads(1)
gc.freeze()
for line in sys.stdin:
    asked = json.loads(line)
    children = []
    for rank in range(asked["ranks"]):
        child = os.fork()
        if not child:
            break
        children.append(child)
    else:
        print(json.dumps(children), flush=True)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(codes), flush=True)
        continue
    break
else:
    os._exit(0)

folder = asked["folder"]
log = os.open(f"{folder}/{rank}.log", os.O_RDWR | os.O_CREAT)
os.dup2(log, 1)
os.dup2(log, 2)
import datetime, traceback
begun = time.monotonic()
try:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=asked["ranks"],
                            timeout=datetime.timedelta(seconds=30))
    begun = time.monotonic()
    found = {"value": getattr(works, asked["work"])(*asked["args"])}
except Exception as error:
    traceback.print_exc()
    found = {"error": [type(error).__name__, str(error)]}
found["seconds"] = time.monotonic() - begun
torch.save(found, f"{folder}/{rank}.begun")
os.rename(f"{folder}/{rank}.begun", f"{folder}/{rank}.pt")
sys.stdout.flush()
sys.stderr.flush()
os._exit(0 if "value" in found else 1)
"""


@dataclasses.dataclass
class Outcome:
    """What became of a process: its work's value, or the name and the message of what it raised; None of one that was killed."""

    value: Any = None
    error: list[str] | None = None
    seconds: float = 0.0
    code: int = 0


class Processes:
    """The process that is forked.

    Args:
        folder: for what processes write.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.numbers = folder, itertools.count()
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([*(p for p in sys.path if p), root])
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.server = subprocess.Popen([sys.executable, "-c", SERVER], cwd=folder, env=env, text=True, **pipes)
        self.children: list[int] = []

    def start(self, work: str, ranks: int, *args: Any) -> Path:
        """Begin the function of that name in :mod:`python_tests.distributed.works` on so many processes; returns their folder."""
        folder = self.folder / str(next(self.numbers))
        folder.mkdir()
        asked = {"work": work, "ranks": ranks, "args": args, "folder": str(folder)}
        print(json.dumps(asked), file=self.server.stdin, flush=True)
        self.children = json.loads(self.server.stdout.readline())
        return folder

    def end(self, folder: Path, ranks: int) -> list[Outcome]:
        """Wait for what was started."""
        killer = subprocess.Popen(["sleep", str(LIMIT)])
        try:
            while not _readable(self.server.stdout, 0.05):
                if killer.poll() is not None:
                    for child in self.children:
                        os.kill(child, signal.SIGKILL)
                    logs = "\n".join((folder / f"{rank}.log").read_text() for rank in range(ranks))
                    self.server.stdout.readline()
                    raise TimeoutError(f"processes went on for {LIMIT} s: {logs}")
        finally:
            killer.kill()
            killer.wait()
        codes = json.loads(self.server.stdout.readline())
        found = []
        for rank, code in enumerate(codes):
            path = folder / f"{rank}.pt"
            found.append(
                Outcome(**torch.load(path, weights_only=True), code=code) if path.exists() else Outcome(code=code)
            )
        return found

    def run(self, work: str, ranks: int, *args: Any) -> list[Any]:
        """The values of all ranks; RuntimeError with its log where one failed."""
        folder = self.start(work, ranks, *args)
        outcomes = self.end(folder, ranks)
        for rank, one in enumerate(outcomes):
            if one.code or one.error:
                raise RuntimeError(f"rank {rank}: {(folder / f'{rank}.log').read_text()}")
        return [one.value for one in outcomes]

    def fail(self, work: str, ranks: int, *args: Any) -> list[Outcome]:
        """What became of all ranks of a work that is to fail."""
        return self.end(self.start(work, ranks, *args), ranks)

    def close(self) -> None:
        self.server.stdin.close()
        try:
            self.server.wait(timeout=10)
        finally:
            self.server.kill()


def _readable(file: Any, seconds: float) -> bool:
    import select

    begun = time.monotonic()
    ready, _, _ = select.select([file], [], [], seconds)
    return bool(ready) and time.monotonic() >= begun
