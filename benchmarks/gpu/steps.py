"""The steps of the calls. The limits are seconds; together they are no more than a call's."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu import build, report
from benchmarks.gpu.run import GOOD, ROOT, START, WORKER, Call, Stopped

SECONDS = 565  # of a call, at most: five seconds are for what is printed last
LOAD = 260  # to compile where no build is carried along
EACH = 20  # an item
Step = tuple[str, float, Callable[[Call], None]]
# Reports of our kernels alone; initcheck must see the writes of all kernels.
OURS = ["--error-exitcode", "9", "--print-limit", "20", "--kernel-regex", "kns=ella"]
SANITIZERS = {
    "memcheck": OURS,
    "racecheck": [*OURS, "--check-warpgroup-mma", "yes"],
    "synccheck": OURS,
    "initcheck": ["--print-limit", "10000"],
}
ALONE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # every tensor an allocation, whose bounds memcheck knows
# Of ncu's several hundred numbers those that the rows have too.
NCU = ["Duration", "Registers Per Thread", "Achieved Occupancy", "DRAM Throughput", "L2 Hit Rate"]
NCU += ["Compute (SM) Throughput"]
# A kernel of a work, by the number of our kernels that run before it.
PROFILED = [
    ("F-FC, stage 1", 0),
    ("F-FC, stage 1", 1),
    ("F-FC, stage 2", 0),
    ("F-FC with gradients, stage 1", 3),
    ("kron_accumulate_, 4000 rows, 1 blocks of 1024", 0),
    ("kron_accumulate_, 4000 rows, 8 blocks of 128", 0),
    ("conv_kron_accumulate_, stage 2", 0),
    ("kron_evidence of 52 tensors", 0),
]
TESTS = ["ops", "laplace", "nn", "data", "training/test_graph.py", "test_models.py", "test_testing.py"]
TABLES = ["training_step", "predictive", "evidence_step", "strided_conv", "circular_pad"]


def tool(call: Call, name: str) -> str | None:
    """Where a program is on the processes' path; where it is not, a row says so."""
    found = shutil.which(name, path=call.env["PATH"])
    if found is None:
        call.row(status="skipped", message=f"{name} is not on the path")
    return found


def facts(call: Call) -> None:
    """The machine, one small kernel, the ceilings of copies and products."""
    rows = {row["item"]: row for row in call.series("facts", EACH) if "item" in row}
    if any(rows.get(item, {}).get("status") != "ok" for item in ("machine", "tiny kernel")):
        raise Stopped("one small kernel does not work")
    call.env["ELLA_CEILINGS"] = json.dumps({item: row["rate"] for item, row in rows.items() if "rate" in row})


def series(kind: str) -> Callable[[Call], None]:
    """A step that runs all items of a kind in one process."""
    return lambda call: call.series(kind, EACH) and None


def cases(call: Call, sanitizer: str | None = None) -> None:
    """Every kernel against its reference, in eight processes, under one of compute-sanitizer's tools if any."""
    prefix, env = [], {}
    if sanitizer is not None:
        program = tool(call, "compute-sanitizer")
        if program is None:
            return
        prefix = [program, "--tool", sanitizer, "--report-api-errors", "no", *SANITIZERS[sanitizer]]
        env = ALONE if sanitizer in ("memcheck", "initcheck") else {}
    each, processes = EACH if sanitizer is None else 45, 2 if call.rehearsal else 8
    call.pool(lambda at: call.series("case", each, part=(at, processes), prefix=prefix, env=env), range(processes))


def ncu(call: Call) -> None:
    """Nsight Compute's numbers of some kernels."""
    program = tool(call, "ncu")
    if program is None:
        return
    options = ["--kernel-name-base", "demangled", "--kernel-name", "regex:ella", "--set", "full"]
    options += ["--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "details"]
    for name, skip in PROFILED[: 1 if call.rehearsal else None]:
        table: list[str] = []
        keep = lambda text, table=table: text.startswith('"') and table.append(text)  # noqa: E731
        command = [program, *options, "--launch-skip", str(skip), "-c", "1", *call.worker, "ncu", name]
        ended = call.run(command, 25 * call.scale, line=keep, file="ncu.csv")
        found = list(csv.DictReader(table))
        numbers = {row["Metric Name"]: f"{row['Metric Value']} {row['Metric Unit']}" for row in found}
        metrics = {key: numbers[key] for key in NCU if key in numbers}
        if ended.status == "ok" and metrics:
            call.row(item=f"{name}|{skip}", status="ok", kernel=found[0]["Kernel Name"][:90], **metrics)
        else:
            status = "failed" if ended.status == "ok" else ended.status
            call.row(item=f"{name}|{skip}", status=status, message=f"no numbers of a kernel; {ended.message}")


def _pytest(call: Call, arguments: Sequence[str]) -> None:
    """pytest on files of the checkout: a row for every failure of its summary, and one for the session."""

    def line(text: str) -> None:
        failed = re.fullmatch(r"(?:FAILED|ERROR) (.+?)(?: - (.*))?", text)
        if failed:
            call.row(status="failed", item=failed[1], message=failed[2] or "")

    command = [sys.executable, "-m", "pytest", "-v", "-rfE", "--tb=short", "-p", "no:cacheprovider", *arguments]
    ended = call.run(command, line=line, interrupt=min(8, call.left() / 3), env={"COLUMNS": "400"})
    call.row(item="pytest", status="not run" if ended.status == "timeout" else ended.status, message=ended.message)


def tests(call: Call) -> None:
    """The tests that run on a GPU, eight at once."""
    chosen, options = TESTS, ["-k", "cuda", "-n", "8"]
    # A process that a test ends, by its hang or a lost device, is replaced. A signal's handler would wait for the call that hangs.
    options += ["--max-worker-restart", "1000", "--timeout=30", "--timeout-method=thread"]
    if call.rehearsal:
        chosen, options = ["test_cuda_path.py"], ["-k", "refused"]
    _pytest(call, [*options, *(str(ROOT / "python_tests" / name) for name in chosen)])


def benchmarks(*names: str) -> Callable[[Call], None]:
    """A step that runs files of benchmarks; what torch.compile makes is left out of several."""

    def step(call: Call) -> None:
        files = [str(ROOT / "benchmarks" / f"bench_{name}.py") for name in names]
        if call.rehearsal:
            files = [str(ROOT / "benchmarks" / "bench_circular_pad.py"), "-k", "ella_cuda"]
        elif names == tuple(TABLES):
            files += ["-k", "not compile"]
        found = call.scratch / f"{call.step_name}.json"
        device = "cpu" if call.rehearsal else "cuda"
        _pytest(call, [*files, "--device", device, "--benchmark-json", str(found), "--rootdir", str(ROOT)])
        if not found.exists() or not found.stat().st_size:
            call.row(status="failed", item=found.name, message="no report was written")
            return
        call.write(found.name, found.read_text())
        call.run([sys.executable, "-m", "benchmarks.compare", str(found)], EACH, file="tables.txt")

    return step


def experiments(call: Call) -> None:
    """The main job on digits at the recipe's numbers, by MAP and by evidence: as it is, and in CUDA graphs, half of the time each."""
    code = "import sys; from ella_cuda.cli import main; sys.exit(main(sys.argv[1:]))"
    options = ["--device", "cuda", "--task", "digit", "--layer", "f_fc+conv"]
    variants = {"train": [], "train-graph": ["--cuda-graph"]}
    if call.rehearsal:
        variants = {"train": ["--device", "cpu", "--epochs", "1", "--width", "1", "--train-size", "50"]}
        variants["train"] += ["--objective", "map"]
    for at, (name, more) in enumerate(variants.items()):
        out, seconds = call.scratch / name, call.left() / (len(variants) - at)
        command = [sys.executable, "-c", code, "train", "--out", str(out), *options, *more]
        ended = call.run(command, seconds, interrupt=min(5, seconds / 3))
        runs: list[dict[str, Any]] = []
        if (out / "summary.json").exists():
            runs = json.loads((out / "summary.json").read_text())
            call.write("tables.txt", f"{name}\n{(out / 'table.txt').read_text()}\n")
            call.write(f"{name}.json", json.dumps(runs))
        status = "not run" if ended.status == "timeout" else ended.status
        kept = [{key: run[key] for key in ("run", "accuracy", "seconds")} for run in runs]
        call.row(item=name, status=status, runs=kept, message="" if status == "ok" else ended.message)


STEPS: dict[str, tuple[float, Callable[[Call], None]]] = {
    "facts": (25, facts),
    "cases": (50, cases),
    "tests": (120, tests),
    "timing": (130, series("timing")),
    "profile": (45, series("profile")),
    "networks": (90, benchmarks("factors", "networks")),
    "memcheck": (75, partial(cases, sanitizer="memcheck")),
    "racecheck": (75, partial(cases, sanitizer="racecheck")),
    "synccheck": (45, partial(cases, sanitizer="synccheck")),
    "initcheck": (60, partial(cases, sanitizer="initcheck")),
    "paper_scale": (90, benchmarks("paper_scale")),
    "tables": (80, benchmarks(*TABLES)),
    "ncu": (110, ncu),
    "sweep": (75, series("sweep")),
    "curvlinops": (150, benchmarks("curvlinops")),
    "experiments": (90, experiments),
}
CALLS = {
    "first": ("facts", "cases", "tests", "timing", "profile", "networks"),
    "second": ("facts", "memcheck", "racecheck", "synccheck", "initcheck", "paper_scale", "tables", "experiments"),
    "third": ("facts", "curvlinops", "sweep", "ncu", "experiments"),
}


def chosen(names: Sequence[str]) -> list[Step]:
    """Steps by name, each with its limit or, as NAME=SECONDS, another; the last has all the time that is left.

    Raises:
        ValueError: there is no such step, or no such limit.
    """
    found: list[Step] = []
    for one in names:
        name, _, seconds = one.partition("=")
        if name not in STEPS:
            raise ValueError(f"there is no step {name!r}; there are {', '.join(STEPS)}")
        limit, function = STEPS[name]
        found.append((name, float(seconds or limit), function))
    return [*found[:-1], (found[-1][0], SECONDS, found[-1][2])]


def environment(scratch: Path, rehearsal: bool) -> dict[str, str]:
    """The processes' variables: the present ones, the package and the checkout in front of the path that was there."""
    paths = [str(scratch / "site"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    programs = [str(Path(sys.executable).parent), os.environ["PATH"], "/usr/local/cuda/bin"]
    env = {"MPLBACKEND": "Agg", "OMP_NUM_THREADS": "2", **os.environ}
    env |= {"PYTHONPATH": os.pathsep.join(paths), "PATH": os.pathsep.join(programs)}
    env |= {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONFAULTHANDLER": "1"}
    return env | ({"ELLA_REHEARSAL": "1"} if rehearsal else {})


def load(call: Call, carried: Path) -> None:
    """Put the package where the processes find it: with the carried build or, where it does not fit, one made here."""
    folder, why = carried, build.misfit(carried)
    if why is not None and call.rehearsal:
        folder = ROOT / "ella_cuda"  # the module that is compiled in place
    elif why is not None:
        folder = call.scratch / "made"
        call.row(item="carried build", status="skipped", message=f"compiling, for {why}")
        ended = call.run([sys.executable, "-m", "benchmarks.gpu", "build", "--to", str(folder)], LOAD)
        if ended.status != "ok":
            raise Stopped(f"the build: {ended.message}")
    build.assemble(call.scratch / "site", folder)
    loaded = call.run([sys.executable, "-c", "import ella_cuda, torchvision; print(ella_cuda.build_info())"], START)
    if loaded.status != "ok":
        raise Stopped(f"the package does not load: {loaded.message}")


def carry_out(
    out: Path, carried: Path, scratch: Path, steps: list[Step], rehearse: float = 0, worker: Sequence[str] = WORKER
) -> int:
    """One call.

    Args:
        out: the results' folder.
        carried: a folder that ``build`` filled.
        scratch: a folder that is removed by the caller.
        steps: of the call.
        rehearse: seconds of a rehearsal on the CPU, 0 for the call itself.
        worker: the command that runs items.

    Returns:
        The exit code: 0, or 1 if anything failed.
    """
    scale, rehearsal = (rehearse / SECONDS, True) if rehearse else (1, False)
    call = Call(out, SECONDS * scale, scratch, environment(scratch, rehearsal), worker, scale, rehearsal)

    def end(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        for step in [("load", LOAD, partial(load, carried=carried)), *steps]:
            call.step(*step)
    except Stopped:
        pass
    except KeyboardInterrupt:
        call.row(step="end", status="failed", message="interrupted")
    finally:
        call.kill_all()
        signal.signal(signal.SIGTERM, before)
        text = report.text(call.rows)
        call.write("report.txt", text)
        print(text, flush=True)
    return int(any(row["status"] not in GOOD for row in call.rows))
