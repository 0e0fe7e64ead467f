"""What the calls do, the most telling first. The limits are seconds; together they are no more than a call's."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.gpu import build, report
from benchmarks.gpu.run import GOOD, ROOT, TEST, WORKER, Call, Folder, Row, Stopped

SECONDS = 565  # of a call, at most: five seconds are for what is printed last
REST = 30  # the least that the last step of a call has
Step = tuple[str, float, Callable[[Call], None]]
# The paths of CUDA launches by which a failing case is bisected.
PATHS = [
    "product=scalar",
    "product=mma",
    "product=wgmma",
    "intermediate=stored",
    "intermediate=fused",
    "split=1",
    "lags=no",
]
MAX_BISECTED = 12
MAX_FAILURES = 60  # rows of a pytest session; its last row has their number
HANGS = 20  # seconds; of tests that a step's end cuts off, those that ran for longer count as hanging
SANITIZER = ["--report-api-errors", "no"]
OURS = ["--error-exitcode", "9", "--print-limit", "20", "--kernel-regex", "kns=ella"]  # of our kernels alone
NO_CACHE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # every tensor an allocation, whose bounds memcheck knows
# Of ncu's several hundred numbers those that the rows have too.
NCU = [
    "Duration",
    "Registers Per Thread",
    "Achieved Occupancy",
    "DRAM Throughput",
    "L2 Hit Rate",
    "Compute (SM) Throughput",
]
TESTS = ["ops", "laplace", "nn", "data", "training/test_graph.py", "test_models.py", "test_testing.py"]
TABLES = ["training_step", "predictive", "evidence_step", "strided_conv", "circular_pad"]


def _items(call: Call, kind: str) -> list[str]:
    found = call.items[kind]
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


def _processes(call: Call) -> int:
    """So many share out what a step can share out: enough to keep a GPU busy, or few where each start is work for the CPU."""
    return 2 if call.rehearsal else 8


def _op(item: str) -> str:
    """The op of an item of cases or of works."""
    first = item.removeprefix("bfloat16 ").replace(",", " ").split("|")[0].split()[0]
    return "factored_linear" if first == "F-FC" else first


def _our_op(item: str) -> str | None:
    """The op of an item of times, if it is ours that is timed."""
    return _op(item) if item.partition("|")[2].startswith("ella_cuda") else None


def _hung_last(call: Call, items: Sequence[str], op: Callable[[str], str | None]) -> list[str]:
    """The items, those of ops that hung in the cases last."""
    hung = {_op(row["item"]) for row in call.rows if row["step"] == "cases" and row["status"] == "timeout"}
    return sorted(items, key=lambda item: op(item) in hung)


def facts(call: Call) -> None:
    """The machine, one small kernel, the ceilings of copies and products."""
    smi = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,mig.mode.current"]
    if shutil.which(smi[0], path=call.env["PATH"]):
        call.run([*smi, "--format=csv"], 5)
    rows = call.series("facts", _items(call, "facts"), 20)
    bad = [row for row in rows if row.get("item") in ("machine", "tiny kernel") and row["status"] != "ok"]
    if bad or not any(row.get("item") == "tiny kernel" for row in rows):
        raise Stopped("one small kernel does not work: nothing that follows can")
    ceilings = {row["item"]: row["rate"] for row in rows if "rate" in row}
    if len(ceilings) == 5:
        call.env["ELLA_CEILINGS"] = json.dumps(ceilings)


def _precisions(name: str) -> list[str]:
    """A case's items: of ops that take TF32 where torch allows it, a third."""
    takes_tf32 = name.startswith(("factored_linear", "kron_accumulate_", "conv_kron_accumulate_"))
    return [f"{name}, {precision}" for precision in ("float32", "float64", *["TF32"] * takes_tf32)]


def cases(call: Call) -> None:
    """Every kernel in a process of its own, eight at once."""

    def one(name: str) -> None:
        call.series("case", _precisions(name), 20)

    call.pool(one, _items(call, "case"))


def bisect(call: Call) -> None:
    """Cases that failed, under memcheck and by other paths."""
    failed = [
        row["item"] for row in call.rows if row["step"] == "cases" and row["status"] not in GOOD and "item" in row
    ]
    failed = list(dict.fromkeys(failed))[:MAX_BISECTED]
    if not failed:
        return
    sanitizer = call.tool("compute-sanitizer")
    tries = [(item, path) for item in failed for path in (["memcheck"] if sanitizer else []) + PATHS]

    def one(item: str, path: str) -> None:
        if path == "memcheck":
            prefix = [str(sanitizer), "--tool", "memcheck", *SANITIZER, *OURS]
            call.series("case", [item], 30, prefix=prefix, env=NO_CACHE, path=path)
        else:
            call.series("case", [item], 20, env={"ELLA_CUDA_PATH": path}, path=path)

    call.pool(lambda pair: one(*pair), tries)
    for item in failed:
        ways = [row for row in call.rows if row["step"] == "bisect" and row.get("item") == item]
        good = [row["path"] for row in ways if row["status"] == "ok" and row["path"] != "memcheck"]
        bad = [row["path"] for row in ways if row["status"] not in GOOD]
        call.row(item=item, status="ok", right_by=good, wrong_by=sorted(set(bad)))


def timing(call: Call) -> None:
    """Every op at the paper's sizes beside what torch offers."""
    call.series("timing", _hung_last(call, _items(call, "timing"), _our_op), 20, family=_our_op)


def profile(call: Call) -> None:
    """The kernels that take most of a training step and of an evidence update."""
    call.series("profile", _items(call, "profile"), 20, file="profile.txt")


def eigenvalues(call: Call) -> None:
    """Float64 eigenvalues of many blocks, which an evidence update needs."""
    call.series("eigenvalues", _items(call, "eigenvalues"), 20)


def ncu(call: Call) -> None:
    """Nsight Compute's numbers of eight kernels."""
    tool = call.tool("ncu")
    if tool is None:
        return
    kernels = ["--kernel-name-base", "demangled", "--kernel-name", "regex:ella"]
    options = ["--set", "full", "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "details"]
    for item in _hung_last(call, _items(call, "ncu"), _op):
        if call.left() < 1:
            call.row(item=item, status="not run", message="no time left")
            continue
        said: list[str] = []

        def line(text: str, said=said) -> bool:
            said.append(text)
            return text.startswith('"')

        skip = ["--launch-skip", item.split("|")[1], "-c", "1"]
        command = [tool, *kernels, *options, *skip, *call.worker, "ncu", item]
        ended = call.run(command, 25 * call.scale, line=line)
        table = [text for text in said if text.startswith('"')]
        call.folder.append("ncu.csv", f"# {item}\n" + "".join(text + "\n" for text in table))
        if ended.status != "ok":
            call.row(item=item, status=ended.status, message=ended.message)
            continue
        metrics = {}
        for values in csv.DictReader(io.StringIO("\n".join(table))):
            metrics["kernel"] = (values.get("Kernel Name") or "")[:90]
            if values.get("Metric Name") in NCU:
                metrics[values["Metric Name"]] = f"{values.get('Metric Value')} {values.get('Metric Unit')}"
        if metrics:
            call.row(item=item, status="ok", **metrics)
        else:
            call.row(item=item, status="failed", message=f"ncu met no kernel of ours; {ended.message}")


def sweep(call: Call) -> None:
    """The paths of launches, by time."""
    call.series("sweep", _hung_last(call, _items(call, "sweep"), _op), 20, family=_op)


def _pytest(call: Call, arguments: list[str], hangs: float = HANGS) -> None:
    """pytest on files of the checkout; a row for every failure, when it happens, and one for what did not run.

    Args:
        call: of the step.
        arguments: of pytest.
        hangs: seconds; where the step's end cuts a test off that ran for longer, the test hangs.
    """
    failures: set[str] = set()
    begun: dict[str, float] = {}
    ended: set[str] = set()
    collected, last = 0, ""

    def line(text: str) -> bool:
        nonlocal collected, last
        if not text.startswith(TEST):
            if re.search(r"\d+ [a-z]+.* in [\d.]+s", text):
                last = text.strip("= ")
            return not text
        try:
            said = json.loads(text.removeprefix(TEST))
        except ValueError:  # torn by another's output
            return False
        collected = max(collected, said.get("collected", 0))
        if "begun" in said:
            begun.setdefault(said["begun"], time.monotonic())
        ended.update(said[key] for key in ("ended", "failed") if key in said)
        if "failed" in said:
            item = said["failed"]
            if item not in failures and len(failures) < MAX_FAILURES:
                call.row(status="failed", item=item, message=said["message"])
                call.folder.append("log.txt", f"{item}\n{said['text']}\n")
            failures.add(item)  # its teardown may fail too
        return True

    plugins = ["-p", "no:cacheprovider", "-p", "benchmarks.gpu.failures"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, *arguments]
    session = call.run(command, line=line, interrupt=min(8, call.left() / 3))
    cut = session.status == "timeout" or session.code == 2  # pytest's, of an interrupted session
    now = time.monotonic()
    running = {item: now - since for item, since in begun.items() if item not in ended}
    for item, seconds in running.items():
        if seconds > hangs * call.scale:
            call.row(status="timeout", item=item, message=f"it ran for {seconds:.0f} s when the session ended")
            failures.add(item)
        elif not cut:
            call.row(status="crashed", item=item, message=f"it ended the session: {session.message}")
            failures.add(item)
    if missing := collected - len(ended & set(begun)) - len(failures & set(running)):
        message = f"{missing} of {collected} tests did not run to their end"
        within = [item for item in running if item not in failures]
        message += f", among them {', '.join(within[:3])}" if within else ""
        call.row(status="not run", item="pytest", message=message)
    status = "failed" if failures else "ok" if session.code == 0 else "not run" if cut and begun else session.status
    message = f"{len(failures)} of {collected} tests failed; {last}"
    call.row(
        status=status,
        item="pytest",
        message=message if session.code in (0, 1) else f"{message}; {session.message}"[:800],
    )


def tests(call: Call) -> None:
    """The tests that run on a GPU, where pytest-xdist is there eight at once."""
    there = call.items["plugins"]
    # Every process that a test ends, by its hang or a lost device, is replaced, whatever their number.
    options = ["-n", str(_processes(call)), "--max-worker-restart", "1000"] if "xdist" in there else []
    # By a thread: a signal's handler waits for the call that hangs on the device.
    timeout = ["--timeout=30", "--timeout-method=thread"]
    options += timeout if "pytest_timeout" in there else ["-o", "faulthandler_timeout=30"]
    chosen = ["test_cuda_path.py"] if call.rehearsal else TESTS
    files = [str(ROOT / "python_tests" / name) for name in chosen]
    _pytest(call, [*options, "--tb=short", "-k", "cuda and refused" if call.rehearsal else "cuda", *files])


def _in_ours(report: list[str]) -> bool:
    """Whether a report of compute-sanitizer is about one of our kernels; what called it is in lines of its own."""
    return any(line.startswith("at ") and "ella" in line for line in report)


def sanitizer(tool: str, alone: bool) -> Callable[[Call], None]:
    """A step that runs all cases under one of compute-sanitizer's tools, in eight processes at once."""

    def step(call: Call) -> None:
        program = call.tool("compute-sanitizer")
        if program is None:
            return
        prefix = [program, "--tool", tool, *SANITIZER]
        # initcheck must see the writes of all kernels; only its reports about ours count.
        prefix += ["--print-limit", "10000"] if tool == "initcheck" else OURS
        complaint = _in_ours if tool == "initcheck" else lambda lines: True
        if tool == "racecheck":
            said: list[str] = []
            call.run([program, "--help"], 10, line=lambda text: bool(said.append(text)) or True)
            if any("--check-warpgroup-mma" in text for text in said):
                prefix += ["--check-warpgroup-mma", "yes"]
        items = [item for name in _items(call, "case") for item in _precisions(name)]
        env, processes = NO_CACHE if alone else {}, _processes(call)

        def some(i: int) -> None:
            call.series("case", items[i::processes], 45, prefix=prefix, env=env, complaint=complaint, tool=tool)

        call.pool(some, range(processes))

    return step


def _benchmarks(call: Call, name: str, arguments: list[str]) -> None:
    """pytest-benchmark, its report, and the table that compare makes of it."""
    found = call.scratch / f"{name}.json"
    device = "cpu" if call.rehearsal else "cuda"
    options = ["--device", device, "--benchmark-json", str(found), "--rootdir", str(ROOT)]
    _pytest(call, [*arguments, *options], hangs=float("inf"))  # a benchmark may be long
    if not found.exists() or not found.stat().st_size:
        call.row(status="failed", item=name, message="no report was written")
        return
    if not call.folder.take(found):
        call.row(status="skipped", item=name, message="the report is too large, or there are too many files")
    call.run([sys.executable, "-m", "benchmarks.compare", str(found)], 20, file="tables.txt")


def tables(call: Call) -> None:
    """The benchmarks, eager calls and all."""
    if call.rehearsal:
        _benchmarks(call, "benchmarks", [str(ROOT / "benchmarks" / "bench_circular_pad.py"), "-k", "ella_cuda"])
        return
    files = [str(ROOT / "benchmarks" / f"bench_{name}.py") for name in TABLES]
    _benchmarks(call, "benchmarks", [*files, "-k", "not compile"])


def benchmarks_of(item: str, *names: str) -> Callable[[Call], None]:
    """A step that runs whole files of benchmarks, for which a rehearsal has no time."""

    def step(call: Call) -> None:
        if call.rehearsal:
            call.row(status="skipped", message="a rehearsal has no time for it")
        else:
            _benchmarks(call, item, [str(ROOT / "benchmarks" / f"bench_{name}.py") for name in names])

    return step


def experiments(call: Call) -> None:
    """The main job on digits at the recipe's numbers, by MAP and by evidence: as it is, and in CUDA graphs, half of the time each."""
    code = "import sys; from ella_cuda.cli import main; sys.exit(main(sys.argv[1:]))"
    options = ["--device", "cpu" if call.rehearsal else "cuda", "--task", "digit", "--layer", "f_fc+conv"]
    if call.rehearsal:
        options += ["--epochs", "1", "--width", "1", "--train-size", "50", "--objective", "map"]
    variants = {"train": []} if call.rehearsal else {"train": [], "train-graph": ["--cuda-graph"]}
    for at, (name, more) in enumerate(variants.items()):
        item = " ".join(["ella-cuda train", *options, *more])
        out = call.scratch / name
        command = [sys.executable, "-c", code, "train", "--out", str(out), *options, *more]
        seconds = call.left() / (len(variants) - at)
        ended = call.run(command, seconds, interrupt=min(5, seconds / 3))
        summary, table = out / "summary.json", out / "table.txt"
        runs: list[dict[str, Any]] = json.loads(summary.read_text()) if summary.exists() else []
        values = {key: {run["run"]: run[key] for run in runs} for key in ("accuracy", "seconds")}
        if runs and not call.folder.take(summary, f"{name}.json"):
            call.row(status="skipped", item=item, message="the summary is too large, or there are too many files")
        if table.exists():
            call.folder.append("tables.txt", f"{item}\n{table.read_text()}\n")
        status = "not run" if ended.status == "timeout" else ended.status
        message = f"{ended.seconds:.0f} s" if status == "ok" else f"{len(runs)} runs finished; {ended.message}"
        call.row(item=item, status=status, took=round(ended.seconds, 1), message=message, runs=values)


STEPS: dict[str, tuple[float, Callable[[Call], None]]] = {
    "facts": (25, facts),
    "cases": (50, cases),
    "bisect": (45, bisect),
    "tests": (120, tests),
    "timing": (105, timing),
    "profile": (45, profile),
    "eigenvalues": (45, eigenvalues),
    "networks": (90, benchmarks_of("networks", "factors", "networks")),
    "memcheck": (75, sanitizer("memcheck", alone=True)),
    "racecheck": (75, sanitizer("racecheck", alone=False)),
    "synccheck": (45, sanitizer("synccheck", alone=False)),
    "initcheck": (60, sanitizer("initcheck", alone=True)),
    "paper_scale": (90, benchmarks_of("paper_scale", "paper_scale")),
    "tables": (80, tables),
    "ncu": (110, ncu),
    "sweep": (75, sweep),
    "curvlinops": (150, benchmarks_of("curvlinops", "curvlinops")),
    "experiments": (90, experiments),
}
FIRST = ("facts", "cases", "bisect", "tests", "timing", "profile", "eigenvalues", "networks")
SECOND = ("facts", "memcheck", "racecheck", "synccheck", "initcheck", "paper_scale", "tables", "experiments")
THIRD = ("facts", "curvlinops", "sweep", "ncu", "experiments")
CALLS = {"first": FIRST, "second": SECOND, "third": THIRD}


def chosen(names: Sequence[str]) -> list[Step]:
    """Steps by name, each with its limit or, as NAME=SECONDS, another; the last has all the time that is left.

    Raises:
        ValueError: there is no such step, or no such limit.
    """
    found: list[Step] = []
    for at, one in enumerate(names):
        name, _, seconds = one.partition("=")
        if name not in STEPS:
            raise ValueError(f"there is no step {name!r}; there are {', '.join(STEPS)}")
        limit, function = STEPS[name]
        found.append((name, SECONDS if at == len(names) - 1 else float(seconds or limit), function))
    return found


# Seconds to load the carried build as a rule, where nothing of torch has been read yet, and to build where that fails.
LOAD, FIRST_LOAD, FALLBACK = 35, 90, 240


def environment(scratch: Path) -> dict[str, str]:
    """The processes' variables: the present ones, the package and the checkout in front of the path that was there."""
    env = dict(os.environ)
    paths = [str(scratch / "site"), str(ROOT), *filter(None, [env.get("PYTHONPATH")])]
    programs = [*filter(None, [str(Path(sys.executable).parent), env.get("PATH")]), "/usr/local/cuda/bin"]
    env |= {"PYTHONPATH": os.pathsep.join(paths), "PATH": os.pathsep.join(programs)}
    env |= {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONFAULTHANDLER": "1"}
    env.setdefault("MPLBACKEND", "Agg")
    env.setdefault("OMP_NUM_THREADS", "2")
    return env


def _greet(call: Call, item: str) -> None:
    """Note what the processes load, and what items there are. The first import of torch reads gigabytes, so that one that takes long
    says nothing about the build: the second finds them in memory."""
    try:
        said = call.ask("hello", seconds=FIRST_LOAD * call.scale)
    except TimeoutError as error:
        call.row(item=item, status="skipped", message=f"asked once more, for {error}")
        said = call.ask("hello", seconds=LOAD * call.scale)
    call.items = said.pop("items")
    call.row(item=item, status="ok", **said)


def load(carried: Path | None) -> Callable[[Call], None]:
    """A step that puts the package where the processes find it: the carried build, or one made here."""

    def step(call: Call) -> None:
        why = "no build was carried along" if carried is None else build.misfit(carried)
        in_place = call.rehearsal and why is not None and build.module_of(ROOT / "ella_cuda") is not None
        if why is None:
            build.assemble(call.scratch / "site", carried)
            try:
                _greet(call, "carried build")
                return
            except (RuntimeError, TimeoutError) as error:
                why = str(error)
        if in_place:
            item, folder, instead = "the checkout's module", ROOT / "ella_cuda", "the checkout's module instead"
        else:
            item, folder, instead = "build made here", call.scratch / "made", "building here"
        call.row(item="carried build", status="skipped", message=f"{instead}, for {why}")
        if call.rehearsal and not in_place:
            raise Stopped("a rehearsal builds nothing; python setup.py build_ext --inplace does")
        if not in_place:
            ended = call.run([sys.executable, "-m", "benchmarks.gpu", "build", "--here", "--to", str(folder)], FALLBACK)
            if ended.status != "ok":
                raise Stopped(f"the build: {ended.status}, {ended.message}")
        build.assemble(call.scratch / "site", folder)
        try:
            _greet(call, item)
        except (RuntimeError, TimeoutError) as error:
            raise Stopped(f"{item}: {error}") from error

    return step


def carry_out(
    name: str,
    out: Path | None,
    carried: Path | None,
    scratch: Path,
    *,
    rehearse: float = 0,
    steps: list[Step] | None = None,
    worker: Sequence[str] = WORKER,
) -> int:
    """One call.

    Args:
        name: of the call, which the results' folder is named after.
        out: the results' folder.
        carried: a folder that ``build`` filled, or None.
        scratch: a folder that is removed by the caller.
        rehearse: seconds of a rehearsal on the CPU, 0 for the call itself.
        steps: others than the call's own.
        worker: the command that runs items.

    Returns:
        The exit code: 0, or 1 if anything failed.
    """
    folder = Folder(out or ROOT / "benchmarks" / "results" / f"gpu-{date.today()}-{name}")
    scale = rehearse / SECONDS if rehearse else 1
    call = Call(folder, SECONDS * scale, scratch, environment(scratch), worker, scale, rehearsal=bool(rehearse))

    def end(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        for step in [("load", FIRST_LOAD + LOAD + FALLBACK, load(carried)), *(steps or chosen(CALLS[name]))]:
            call.step(*step)
    except (Stopped, KeyboardInterrupt) as error:
        call.row(step="end", status="failed", message=f"stopped: {str(error) or 'interrupted'}")
    finally:
        call.kill_all()
        signal.signal(signal.SIGTERM, before)
        text = report.text(call.rows)
        folder.append("report.txt", text)
        print(text, flush=True)
    return int(any(failed(row) for row in call.rows))


def failed(row: Row) -> bool:
    return row["status"] not in GOOD
