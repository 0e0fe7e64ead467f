"""The calls of ``benchmarks.gpu`` without a GPU: their own scheduling, on processes that fail in every way there is, and all calls whole
on the CPU."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

import ella_cuda
from ella_cuda import testing
from ella_cuda.cuda_path import cuda_path
from python_tests.benchmark_files import importable

importable()
from benchmarks.gpu import build, report, run, steps, work, works  # noqa: E402
from benchmarks.gpu.device import CaptureFailed, Device  # noqa: E402
from benchmarks.gpu.run import Call, Folder, Stopped  # noqa: E402

# A worker whose items behave as their names say.
WORKER = """
import json, os, signal, subprocess, sys, time
arguments = [a for a in sys.argv[1:] if a != "--rehearse"]
kind, items = arguments[0], arguments[1:]
say = lambda marker, text: print(marker + text, flush=True)
if kind == "hello":
    first = os.environ.get("SLOW")
    if first and not os.path.exists(first):
        open(first, "w").close()
        time.sleep(300)
    say("@row ", json.dumps({"items": json.loads(os.environ["ITEMS"])}))
    sys.exit(0)
if os.environ.get("NEVER"):
    sys.exit("cannot import torch")
for item in items:
    say("@begin ", item)
    how = item.replace(',', ' ').replace('|', ' ').split()[0]
    row = {"item": item, "status": "ok", "pid": os.getpid()}
    if how == "hangs":
        with open(os.environ["CHILDREN"], "a") as file:
            print(os.getpid(), subprocess.Popen(["sleep", "300"]).pid, file=file)
        time.sleep(300)
    if how == "crashes":
        print("about to crash", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "leaves":
        sys.exit(0)
    if how == "invalid":
        print("========= COMPUTE-SANITIZER\\n========= Invalid __global__ read of size 4\\n========= ERROR SUMMARY: 1 error")
    if how == "reads":
        where = "void cublas::gemm<float>(int)" if "theirs" in item else "void ella::kernel<float>(float*)"
        for line in [
            "Uninitialized __global__ memory read of size 4 bytes",
            "    at 0x70 in " + where,
            "    Host Frame: torch::call [0x1] in /site/ella_cuda/_C.so",
            "",
            "ERROR SUMMARY: 1 error",
        ]:
            print("========= " + line, flush=True)
    if how == "refuses" and "ELLA_CUDA_PATH" in os.environ:
        row |= {"status": "refused"}
    if how == "scalar" and os.environ.get("ELLA_CUDA_PATH") != "product=scalar":
        row |= {"status": "wrong"}
    if how in ("fails", "loses"):
        row |= {"status": "failed", "message": "no kernel"}
    say("@row ", json.dumps(row))
    if how == "loses":
        sys.exit(3)
sys.exit(9 if any(item.startswith("invalid") for item in items) else 0)
"""
FORWARDING = """#!/usr/bin/env bash
# In compute-sanitizer's and ncu's place: options, then a command.
if [[ $1 == --help ]]; then echo "  --check-warpgroup-mma"; exit; fi
while [[ $1 == -* ]]; do if [[ $1 == --csv ]]; then shift; else shift 2; fi; done
"$@" || exit
"""
NCU_TABLE = """echo '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
echo '"0","ella::kernel","Duration","us","12"'
"""

pytestmark = pytest.mark.simulator


@pytest.fixture
def worker(tmp_path: Path) -> list[str]:
    file = tmp_path / "worker.py"
    file.write_text(WORKER)
    return [sys.executable, str(file)]


@pytest.fixture
def call(tmp_path: Path, worker: list[str]):
    """``call(seconds)``: a call on the worker above."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    def make(seconds: float = 60) -> Call:
        env = {**os.environ, "CHILDREN": str(tmp_path / "children")}
        return Call(Folder(tmp_path / "out"), seconds, scratch, env, worker)

    return make


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def statuses(rows: list[dict]) -> list[tuple]:
    return [(row.get("item"), row["status"]) for row in rows if not row.get("step_done")]


def alive(pid: int) -> bool:
    """Whether it still runs; one whose parent has not noticed its end does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_ended(children: Path) -> None:
    """That no process of that list runs; a signal has come when the kernel has carried it out."""
    end = time.monotonic() + 20
    while running := [pid for pid in children.read_text().split() if alive(int(pid))]:
        assert time.monotonic() < end, running
        time.sleep(0.05)


def tool(folder: Path, name: str, text: str) -> str:
    """A program of that name in a folder, which is put in front of the path."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_an_item_that_fails_hangs_or_ends_its_process_costs_itself_alone(call, tmp_path):
    items = ["a", "hangs", "b", "crashes", "c", "fails", "d", "loses", "e", "leaves", "f"]
    began, one = time.monotonic(), call()
    one.step("s", 60, lambda c: c.series("kind", items, 2))
    assert time.monotonic() - began < 15
    expected = dict.fromkeys("abcdef", "ok")
    expected |= {"hangs": "timeout", "crashes": "crashed", "fails": "failed", "loses": "failed", "leaves": "failed"}
    rows = rows_of(tmp_path / "out")
    assert statuses(rows) == [(item, expected[item]) for item in items]
    by_item = {row["item"]: row for row in rows if "item" in row}
    assert (
        "SIGSEGV: about to crash" in by_item["crashes"]["message"] or "about to crash" in by_item["crashes"]["message"]
    )
    assert by_item["fails"]["message"] == "no kernel" and by_item["c"]["pid"] == by_item["d"]["pid"]
    assert by_item["loses"]["pid"] != by_item["e"]["pid"]
    pids = [int(pid) for pid in (tmp_path / "children").read_text().split()]
    assert len(pids) == 2 and not any(map(alive, pids))


def test_items_that_were_not_run_are_no_success(call):
    one = call(3)
    one.step("s", 1.5, lambda c: c.series("kind", ["a"], 5))
    assert report.text(one.rows).startswith("no failures\n")
    one.rows.append({"step": "s", "status": "not run", "items": ["b", "c"], "message": "2 items: no time left"})
    one.rows.append({"step": "t", "status": "not run", "message": "the call's time is over"})
    assert report.text(one.rows).startswith("no failures in what ran, but not all ran; see below\n")


def test_of_a_family_that_hangs_or_ends_its_process_twice_the_rest_is_left_out(call, tmp_path):
    items = ["hangs 1|ella_cuda", "hangs 2|ella_cuda", "crashes 1|ella_cuda", "loses 1|ella_cuda", "crashes 2|bmm"]
    items += [
        "loses 2|ella_cuda",
        "crashes 2|ella_cuda",
        "crashes 3|ella_cuda",
        "loses 3|ella_cuda, TF32",
        "a 1|ella_cuda",
    ]
    one = call()
    one.step("s", 60, lambda c: c.series("kind", items, 2, family=steps._our_op))
    rows = rows_of(tmp_path / "out")
    left_out = [item for row in rows if row["status"] == "not run" for item in row["items"]]
    assert left_out == ["hangs 2|ella_cuda", "loses 3|ella_cuda, TF32", "crashes 3|ella_cuda"]
    assert [row["item"] for row in rows if "item" in row] == [item for item in items if item not in left_out]


def test_an_op_that_hung_in_its_cases_is_timed_last_and_once(call, tmp_path):
    one = call()
    one.scale = 0.1  # 20 seconds an item are 2
    works = ["hangs, stage 1", "hangs, stage 2", "bfloat16 hangs, stage 2", "good, stage 1"]
    one.items = {"case": ["hangs backward", "good"], "timing": [f"{work}|ella_cuda" for work in works]}
    one.items["sweep"] = [f"{work}|product=mma" for work in works]
    one.step("cases", 100, steps.cases)
    for name in ("timing", "sweep"):
        one.step(name, 200, getattr(steps, name))
        rows = [row for row in rows_of(tmp_path / "out") if row["step"] == name and "seconds" not in row]
        assert [row["status"] for row in rows] == ["ok", "timeout", "not run"]
        assert [row.get("item", "").split(",")[0] for row in rows] == ["good", "hangs", ""]
        assert len(rows[-1]["items"]) == 2


def test_every_work_belongs_to_an_op_that_has_cases():
    cases = {steps._op(name) for name in work.cases()} | {steps._op(case[0]) for case in testing.kernel_cases()}
    assert {steps._op(name) for name in works.works(False)} <= cases
    assert (
        steps._our_op("F-FC, stage 1|ella_cuda, TF32") == "factored_linear"
        and steps._our_op("F-FC, stage 1|bmm") is None
    )


@pytest.mark.parametrize(
    ("said", "status"),
    [("factored_linear: ELLA_CUDA_PATH: float64 has no such path", "refused"), ("no memory", "failed")],
)
def test_a_path_that_an_op_does_not_have_is_refused(monkeypatch, said, status):
    name, inputs, _, reference = testing.kernel_cases()[0]

    def raises(*_: torch.Tensor) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(work.OPTIONS, "rehearse", True)
    monkeypatch.setattr(testing, "kernel_cases", lambda: [(name, inputs, raises, reference)])
    assert work.case(f"{name}, float64")["status"] == status
    monkeypatch.setattr(work, "measure", raises)
    if status == "refused":
        assert work.sweep("F-FC, stage 1|product=mma")["status"] == "refused"
    else:
        with pytest.raises(RuntimeError, match=said):
            work.sweep("F-FC, stage 1|product=mma")


@pytest.mark.parametrize("error", [CaptureFailed("x"), ValueError("x")], ids=["capture", "other"])
def test_a_failed_capture_ends_the_process(monkeypatch, capsys, error):
    def fails(item: str) -> dict:
        raise error

    monkeypatch.setitem(work.KINDS, "timing", (list, fails))
    monkeypatch.setattr(work, "device", lambda: Device(True))
    captured = isinstance(error, CaptureFailed)
    assert work.run_items("timing", ["a", "b"]) == (run.LOST if captured else 0)
    assert capsys.readouterr().out.count(run.ROW) == (1 if captured else 2)


def test_whatever_fails_in_a_capture_is_a_failed_capture():
    device = Device(True)
    device.rehearse = False

    def fails() -> None:
        raise KeyError("on a GPU; elsewhere there is not even a stream")

    with pytest.raises(CaptureFailed):
        device.record([fails])


@pytest.mark.parametrize("sets", [1, 3, 13, 20, 21, 400])
def test_every_set_of_inputs_is_as_long_away_as_any_other(monkeypatch, sets):
    monkeypatch.setattr(work, "device", lambda: SimpleNamespace(cache_bytes=50_000_000))
    one = works.Work("a work", None, {}, None, 0, 300_000, long=frozenset({"torch"}))
    rotated, row = work.rotation(one, "ella_cuda", list(range(sets)))
    assert (
        len(rotated) >= work.CALLS and rotated == [i % sets for i in range(len(rotated))] and len(rotated) % sets == 0
    )
    assert ("in_cache" in row) == (sets < 400)
    rotated, row = work.rotation(one, "torch", list(range(sets)))
    assert len(rotated) < 2 * work.CALLS and "in_cache" in row


def test_a_graph_of_the_network_evidence_by_torch_is_short():
    assert works.network_evidence(52).long == {"torch"}


def test_time_in_kernels_is_counted_once(monkeypatch):
    def event(key: str, kind: str, annotation: bool = False) -> SimpleNamespace:
        return SimpleNamespace(key=key, device_type=getattr(DeviceType, kind), is_user_annotation=annotation)

    found = [event("ella_cuda::op", "CPU"), event("ella::kernel", "CUDA"), event("a range", "CUDA", annotation=True)]
    monkeypatch.setattr(work.OPTIONS, "rehearse", False)
    assert [one.key for one in work.kernels(found)] == ["ella::kernel"]


def test_all_paths_are_paths():
    for path in [*steps.PATHS, *(",".join(f"{k}={v}" for k, v in path.items()) for path in work.PATHS if path)]:
        with cuda_path(**dict(one.split("=") for one in path.split(","))):
            pass


def test_a_worker_that_never_starts_is_given_up(call, tmp_path):
    one = call()
    one.env["NEVER"] = "1"
    one.step("s", 60, lambda c: c.series("kind", ["a", "b", "c", "d"], 5))
    rows = rows_of(tmp_path / "out")
    assert statuses(rows) == [("a", "failed"), ("b", "failed"), (None, "not run")]
    assert "cannot import torch" in rows[0]["message"] and rows[2]["items"] == ["c", "d"]


def test_what_a_step_raises_is_a_row_and_the_next_step_runs(call, tmp_path):
    one = call()

    def broken(c: Call) -> None:
        raise KeyError("missing")

    def stops(c: Call) -> None:
        raise Stopped("enough")

    one.step("broken", 10, broken)
    one.step("next", 10, lambda c: c.series("kind", ["a"], 5))
    with pytest.raises(Stopped):
        one.step("stops", 10, stops)
    found = [(row["step"], row["status"]) for row in rows_of(tmp_path / "out") if not row.get("step_done")]
    assert found == [("broken", "failed"), ("next", "ok"), ("stops", "failed")]
    assert "KeyError" in (tmp_path / "out" / "log.txt").read_text()


def test_no_step_outlasts_its_limit_nor_all_of_them_the_call(call, tmp_path):
    began, one = time.monotonic(), call(20)
    one.step("first", 6, lambda c: c.pool(lambda i: c.series("kind", [f"hangs {i}", "a"], 60), range(3)))
    assert 5.5 < time.monotonic() - began < 60  # what hangs sleeps for 300
    one.step("second", 60, lambda c: c.series("kind", ["hangs", "a"], 60))
    assert 19 < time.monotonic() - began < 60
    one.step("third", 60, lambda c: c.series("kind", ["a"], 60))
    assert time.monotonic() - began < 60
    rows = rows_of(tmp_path / "out")
    first = [row["status"] for row in rows if row["step"] == "first"]
    assert sorted(first[:-1]) == ["not run"] * 3 + ["timeout"] * 3 and first[-1] == "ok"
    later = [(row.get("item"), row["status"]) for row in rows if row["step"] in ("second", "third")]
    assert later == [("hangs", "timeout"), (None, "not run"), (None, "ok"), (None, "not run")]
    assert_ended(tmp_path / "children")


@pytest.mark.parametrize("name", steps.CALLS)
def test_the_limits_add_up(name):
    planned = steps.chosen(steps.CALLS[name])
    assert len({step for step, *_ in planned}) == len(planned)
    before_the_last = steps.LOAD + sum(limit for _, limit, _ in planned[:-1])
    assert before_the_last + steps.REST <= steps.SECONDS <= 9.5 * 60


def test_steps_are_chosen_by_name():
    chosen = steps.chosen(["cases", "facts=7", "tests"])
    assert [name for name, *_ in chosen] == ["cases", "facts", "tests"]
    assert [limit for _, limit, _ in chosen] == [steps.STEPS["cases"][0], 7, steps.SECONDS]
    with pytest.raises(ValueError, match="there is no step 'case'; there are facts, cases"):
        steps.chosen(["case"])


def test_a_folder_keeps_to_its_limits(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "MAX_BYTES", 1000)
    folder = Folder(tmp_path / "out")
    for i in range(12):
        folder.append(f"file{i}.txt", f"text {i}\n")
        folder.append("log.txt", "x" * 90 + "\n")
    (tmp_path / "more.json").write_text("1")
    (tmp_path / "file0.txt").write_text("y" * 1001)
    assert not folder.take(tmp_path / "more.json") and not folder.take(tmp_path / "file0.txt")
    files = list((tmp_path / "out").iterdir())
    assert len(files) == run.MAX_FILES and all(file.stat().st_size < 1100 for file in files)
    said = (tmp_path / "out" / "log.txt").read_text()
    assert "text 11" in said or "left out" in said
    assert run.MAX_FILES <= 8
    monkeypatch.undo()
    assert run.MAX_BYTES < 16 << 20


def test_variables_are_extended(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "/carried/packages")
    monkeypatch.setenv("PATH", "/carried/programs")
    env = steps.environment(tmp_path)
    assert env["PYTHONPATH"].split(os.pathsep) == [str(tmp_path / "site"), str(run.ROOT), "/carried/packages"]
    assert "/carried/programs" in env["PATH"].split(os.pathsep)
    monkeypatch.delenv("PYTHONPATH")
    assert "" not in steps.environment(tmp_path)["PYTHONPATH"].split(os.pathsep)


def test_a_missing_tool_skips_its_step(call, tmp_path):
    one = call()
    one.env["PATH"] = str(tmp_path)
    one.items = {"ncu": ["a|0"], "case": ["b"]}
    one.step("ncu", 10, steps.ncu)
    one.step("memcheck", 10, steps.sanitizer("memcheck", alone=True))
    assert statuses(rows_of(tmp_path / "out")) == [(None, "skipped")] * 2
    assert "ncu is not on the path" in report.text(one.rows)


def test_what_a_sanitizer_says_is_the_present_items_failure(call, tmp_path):
    one = call()
    one.env["PATH"] = tool(tmp_path / "tools", "compute-sanitizer", FORWARDING)
    one.items = {"case": ["a", "invalid", "b"]}
    one.step("racecheck", 30, steps.sanitizer("racecheck", alone=False))
    rows = rows_of(tmp_path / "out")
    bad = {row["item"]: row["message"] for row in rows if row["status"] not in run.GOOD}
    assert set(bad) == {"invalid, float32", "invalid, float64"}
    assert all("Invalid __global__ read of size 4" in message for message in bad.values())
    good = {row["item"] for row in rows if row["status"] == "ok" and "item" in row}
    assert {"a, float32", "b, float64", "b, float32"} <= good
    log = (tmp_path / "out" / "log.txt").read_text()
    assert "--check-warpgroup-mma yes" in log and "kns=ella" in log


def test_initcheck_looks_at_all_writes_and_tells_of_our_reads(call, tmp_path):
    one = call()
    one.env["PATH"] = tool(tmp_path / "tools", "compute-sanitizer", FORWARDING)
    one.items = {"case": ["reads ours", "reads theirs"]}
    one.step("initcheck", 30, steps.sanitizer("initcheck", alone=True))
    bad = {row["item"]: row["message"] for row in rows_of(tmp_path / "out") if row["status"] not in run.GOOD}
    assert set(bad) == {"reads ours, float32", "reads ours, float64"}
    assert all("ella::kernel" in message and "SUMMARY" not in message for message in bad.values())
    assert "kns=ella" not in (tmp_path / "out" / "log.txt").read_text()


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (FORWARDING + NCU_TABLE, "ok"),
        (FORWARDING, "failed"),  # it met no kernel
        ("#!/usr/bin/env bash\necho no permission; exit 1\n", "failed"),
        ("#!/usr/bin/env bash\nsleep 300\n", "timeout"),
    ],
    ids=["works", "empty", "fails", "hangs"],
)
def test_ncu(call, tmp_path, text, status):
    one = call()
    one.scale = 0.06  # 25 seconds a kernel are 1.5
    one.env["PATH"] = tool(tmp_path / "tools", "ncu", text)
    one.items = {"ncu": ["a|0", "b|1"]}
    one.step("ncu", 300, steps.ncu)
    rows = rows_of(tmp_path / "out")
    assert statuses(rows) == [("a|0", status), ("b|1", status)]
    if status == "ok":
        assert rows[0]["Duration"] == "12 us" and "ella::kernel" in (tmp_path / "out" / "ncu.csv").read_text()


TESTS_THAT_HANG = """
import pytest, signal, time

@pytest.mark.parametrize("i", range(20))
def test_that_fails(i):
    assert i < 0, "first line\\nsecond"

def test_that_hears_no_signal():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(300)

def test_that_never_begins():
    pass
"""


@pytest.mark.parametrize("options", [[], ["-n", "1"]], ids=["alone", "xdist"])
def test_tests_that_fail_before_one_that_hangs_have_a_row_each(call, tmp_path, options):
    if options:
        pytest.importorskip("xdist")
    one = call()
    one.env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(run.ROOT), one.env.get("PYTHONPATH")]))
    folder = tmp_path / "checkout"  # the processes run elsewhere
    folder.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -ra\n")
    (folder / "test_hanging.py").write_text(TESTS_THAT_HANG)
    one.step("tests", 9, lambda step: steps._pytest(step, [*options, str(folder / "test_hanging.py")], hangs=2))
    rows = [row for row in rows_of(tmp_path / "out") if "item" in row]
    failed = rows[:-3]
    assert [row["item"] for row in failed] == [f"test_hanging.py::test_that_fails[{i}]" for i in range(20)]
    assert all(row["status"] == "failed" and "first line" in row["message"] for row in failed)
    assert statuses(rows[-3:]) == [
        ("test_hanging.py::test_that_hears_no_signal", "timeout"),
        ("pytest", "not run"),
        ("pytest", "failed"),
    ]
    assert failed[-1]["at"] < rows[-1]["at"] - 2 and rows[-2]["message"].startswith("1 of 22 tests")
    assert "second" in (tmp_path / "out" / "log.txt").read_text()


def test_every_failure_of_a_session_has_one_row_with_what_it_says(call, tmp_path):
    one = call()
    one.env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(run.ROOT), one.env.get("PYTHONPATH")]))
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -ra --continue-on-collection-errors\n")
    (folder / "test_a.py").write_text(
        "def test_a(there_is_none): pass\ndef test_b(): raise KeyError('b')\ndef test_c(): pass\n"
    )
    (folder / "test_b.py").write_text("import there_is_none\n")
    one.step("tests", 30, lambda step: steps._pytest(step, [str(folder)]))
    said = {row["item"]: row["message"] for row in rows_of(tmp_path / "out") if "item" in row}
    assert len(rows_of(tmp_path / "out")) == len(said) + 1 == 5
    assert (
        "fixture 'there_is_none' not found" in said["test_a.py::test_a"]
        and said["test_a.py::test_b"] == "KeyError: 'b'"
    )
    assert "No module named 'there_is_none'" in said["test_b.py"]
    assert said["pytest"].startswith("3 of 3 tests failed")


def test_a_test_that_ends_its_session_has_crashed(call, tmp_path):
    one = call()
    one.env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(run.ROOT), one.env.get("PYTHONPATH")]))
    (tmp_path / "test_ending.py").write_text("import os\ndef test_a(): os.kill(os.getpid(), 11)\ndef test_b(): pass\n")
    one.step("tests", 30, lambda step: steps._pytest(step, [str(tmp_path / "test_ending.py")]))
    rows = [row for row in rows_of(tmp_path / "out") if "item" in row]
    assert statuses(rows) == [("test_ending.py::test_a", "crashed"), ("pytest", "not run"), ("pytest", "failed")]
    assert "SIGSEGV" in rows[0]["message"] and rows[1]["message"].startswith("1 of 2 tests")


@pytest.mark.parametrize("hangs", [2, float("inf")])
def test_a_long_benchmark_that_is_cut_off_is_no_failure(call, tmp_path, hangs):
    one = call()
    one.env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(run.ROOT), one.env.get("PYTHONPATH")]))
    (tmp_path / "test_long.py").write_text("import time\ndef test_a(): time.sleep(300)\n")
    one.step("tables", 6, lambda step: steps._pytest(step, [str(tmp_path / "test_long.py")], hangs=hangs))
    rows = [row for row in rows_of(tmp_path / "out") if "item" in row]
    expected = (
        [("pytest", "not run")] * 2 if hangs > 10 else [("test_long.py::test_a", "timeout"), ("pytest", "failed")]
    )
    assert statuses(rows) == expected
    assert "test_long.py::test_a" in rows[0]["message"] + rows[0]["item"]


LOSING = """
import torch

LOST = []

def synchronize():
    if LOST:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

torch.cuda.is_available = lambda: True
torch.cuda.synchronize = synchronize
"""
TESTS_THAT_LOSE = """
import losing, pytest

@pytest.mark.parametrize("i", range(9))
def test(i):
    if i == 2:
        losing.LOST.append(i)
    assert not losing.LOST, "CUDA error: illegal"
"""


@pytest.mark.parametrize("how", ["alone", "worker", "xdist"])
def test_a_lost_device_ends_its_process_alone(call, tmp_path, how):
    if how == "xdist":
        pytest.importorskip("xdist")
    one = call()
    paths = [str(tmp_path), str(Path(ella_cuda.__file__).parents[1]), str(run.ROOT), one.env.get("PYTHONPATH")]
    one.env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if how == "worker":  # as xdist marks its processes
        one.env["PYTEST_XDIST_WORKER"] = "gw0"
    (tmp_path / "losing.py").write_text(LOSING)
    (tmp_path / "test_losing.py").write_text(TESTS_THAT_LOSE)
    options = ["-p", "losing", "-p", "python_tests.conftest", *["-n", "2"] * (how == "xdist")]
    one.step("tests", 60, lambda step: steps._pytest(step, [*options, str(tmp_path / "test_losing.py")]))
    rows = [row for row in rows_of(tmp_path / "out") if "item" in row]
    (lost,) = (row for row in rows if row["item"] == "test_losing.py::test[2]")
    assert lost["status"] == "failed" and "CUDA error: illegal" in lost["message"]
    missing = [row["message"] for row in rows if row["status"] == "not run"]
    assert missing == ([] if how == "xdist" else ["6 of 9 tests did not run to their end"])
    assert ("the GPU is lost" in (tmp_path / "out" / "log.txt").read_text()) == (how == "alone")


def test_failing_cases_are_bisected(call, tmp_path):
    one = call()
    one.env["PATH"] = tool(tmp_path / "tools", "compute-sanitizer", FORWARDING)
    one.items = {"case": ["scalar op", "good op"]}
    one.step("cases", 30, steps.cases)
    one.step("bisect", 30, steps.bisect)
    rows = [row for row in rows_of(tmp_path / "out") if row["step"] == "bisect"]
    verdicts = {row["item"]: row for row in rows if "right_by" in row}
    assert set(verdicts) == {"scalar op, float32", "scalar op, float64"}
    for verdict in verdicts.values():
        assert verdict["right_by"] == ["product=scalar"]
        assert set(verdict["wrong_by"]) == {"memcheck", *steps.PATHS} - {"product=scalar"}


def test_a_device_without_one_small_kernel_ends_the_call(call, tmp_path):
    one = call()
    one.items = {"facts": ["machine", "crashes tiny kernel"]}
    with pytest.raises(Stopped):
        one.step("facts", 10, steps.facts)


def test_the_report_is_short_and_begins_with_the_failures():
    rows = [{"step": "cases", "item": f"case {i}", "status": "crashed", "message": "m" * 500} for i in range(300)]
    for i in range(300):
        row = {"step": "timing", "work": f"work {i}", "status": "ok", "floor": 1.0, "ratio": 2.0}
        rows += [
            row | {"who": who, "microseconds": float(us)} for who, us in (("ella_cuda", 2), ("bmm", 5), ("einsum", 4))
        ]
    text = report.text(rows)
    assert len(text) < 12_000 and text.startswith("FAILURES: 300")
    (line,) = (line for line in text.splitlines() if line.startswith("work 7 "))
    assert line.split() == ["work", "7", "2", "1", "2", "-", "4", "einsum;", "-"]
    assert report.text([{"step": "s", "status": "ok", "seconds": 1.0, "step_done": True}]).startswith("no failures")


def full_rows() -> list[dict]:
    """Results of a first call in which nothing fails, as many and as long as they are."""
    rows = [{"step": "facts", "item": "copy", "status": "ok", "rate": 3000.0, "unit": "GB/s read plus written"}]
    for name, one in works.works(False).items():
        row = {"step": "timing", "work": name, "status": "ok", "floor": 123.45, "ratio": 12.34, "microseconds": 1234.56}
        rows += [row | {"who": who} for who in one.candidates]
        if name.startswith(("F-FC", "kron_accumulate_")):
            paths = [",".join(f"{k}={v}" for k, v in path.items()) or "automatic" for path in work.PATHS]
            rows += [row | {"step": "sweep", "path": path} for path in paths]
    row = {"step": "profile", "status": "ok", "microseconds": 5e3, "in_kernels": 4e3}
    for at, item in enumerate(("training step", "training step in a CUDA graph", "evidence update")):
        kernels = [["void some::kernel" + "<T>" * 30, 1e3 * at + i, 52] for i in range(25)]
        rows.append(row | {"item": item, "kernels": kernels})
    for name, skip in work.PROFILED:
        rows.append(
            {"step": "ncu", "status": "ok", "item": f"{name}|{skip}", **dict.fromkeys(steps.NCU, "123.45 unit")}
        )
    values = {"accuracy": {"run": 98.5}, "seconds": {"run": 12.3}}
    rows.append({"step": "experiments", "status": "ok", "item": "ella-cuda train --cuda-graph", "runs": values})
    return rows


@pytest.mark.parametrize("failures", [0, 300])
def test_the_report_has_a_part_of_every_table_and_says_what_is_left_out(failures):
    rows = full_rows() + [
        {"step": "cases", "item": f"case {i}", "status": "crashed", "message": "m" * 500} for i in range(failures)
    ]
    text = report.text(rows)
    assert len(text) < 12_000
    for begins in (
        "copy ",
        "us a call",
        "F-FC, stage 1 ",
        "path ",
        "training step: ",
        "ncu F-FC, stage 1|0: ",
        "run in CUDA",
    ):
        assert any(line.startswith(begins) for line in text.splitlines()), begins
    whole = [report._times, report._paths, report._profiles, report._ncu]
    said = [line for line in text.splitlines() if "more lines are in rows.jsonl" in line]
    left_out = sum(int(line.split()[0][1:]) for line in said)
    missing = sum(line not in text.splitlines() for table in whole for line in table(rows))
    if failures:
        assert said and left_out > missing
    else:
        assert left_out == missing > 0 and len(text) > 10_500


def test_tables_share_what_room_there_is():
    assert report._shares([100, 10, 200, 0], 90) == [40, 10, 40, 0] and report._shares([5, 10], 90) == [5, 10]


def test_a_bisected_failure_is_one_line(call):
    rows = [{"step": "cases", "item": "op, float32", "status": "wrong", "message": "the error"}]
    rows += [
        {"step": "bisect", "item": "op, float32", "path": path, "status": "wrong"} for path in ("split=1", "memcheck")
    ]
    rows += [{"step": "bisect", "item": "op, float32", "status": "ok", "right_by": ["product=scalar"], "wrong_by": []}]
    lines = [line for line in report.text(rows).splitlines() if line.startswith("  ")]
    assert lines == [
        "  cases op, float32: wrong; right by product=scalar: the error",
        "  bisect op, float32 memcheck: wrong: ",
    ]


@pytest.mark.parametrize("ends", [True, False])
def test_experiments_share_the_time_and_keep_their_results(call, tmp_path, ends):
    """A package whose command finishes one run and then ends, or goes on for ever."""
    package = tmp_path / "package" / "ella_cuda"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "cli.py").write_text(f"""
import json, time
from pathlib import Path
def main(arguments):
    out = Path(arguments[arguments.index("--out") + 1])
    out.mkdir()
    (out / "summary.json").write_text(json.dumps([{{"run": "a", "accuracy": 98.5, "seconds": 1.5}}]))
    (out / "table.txt").write_text("accuracy 98.5\\n")
    time.sleep(0 if {ends} else 300)
""")
    one = call()
    one.env["PYTHONPATH"] = str(tmp_path / "package")
    one.step("experiments", 6, steps.experiments)
    rows = [row for row in rows_of(tmp_path / "out") if "runs" in row]
    assert [row["status"] for row in rows] == ["ok" if ends else "not run"] * 2
    assert all(row["runs"]["accuracy"] == {"a": 98.5} for row in rows)
    if not ends:
        assert all(1.5 < row["took"] < 5 for row in rows) and "1 runs finished" in rows[1]["message"]
    assert {"train.json", "train-graph.json"} <= {file.name for file in (tmp_path / "out").iterdir()}
    assert (tmp_path / "out" / "tables.txt").read_text().count("accuracy 98.5") == 2


def carried(folder: Path) -> Path:
    """The checkout's own compiled module as if it had been carried along."""
    folder.mkdir()
    module = Path(ella_cuda._C.__file__)
    shutil.copy(module, folder / module.name)
    (folder / build.NOTE).write_text(json.dumps({"sources": build.digest(), "python": "3"}))
    return folder


def test_whether_a_build_fits(tmp_path):
    assert "holds no build" in build.misfit(tmp_path)
    good = carried(tmp_path / "good")
    assert build.misfit(good) is None
    build.assemble(tmp_path / "site", good)
    assert build.module_of(tmp_path / "site" / "ella_cuda") is not None
    here = (run.ROOT / "ella_cuda" / "__init__.py").read_text()
    assert (tmp_path / "site" / "ella_cuda" / "__init__.py").read_text() == here
    (good / build.NOTE).write_text(json.dumps({"sources": "others", "python": "3"}))
    assert "of other sources" in build.misfit(good)
    shutil.rmtree(good)
    good.mkdir()
    (good / "_C.cpython-27-none.so").touch()
    (good / build.NOTE).write_text(json.dumps({"sources": build.digest(), "python": "2.7"}))
    assert "for Python 2.7" in build.misfit(good)


def test_a_first_import_may_be_slow(call, tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "FIRST_LOAD", 1)
    one = call()
    one.env |= {"SLOW": str(tmp_path / "slow"), "ITEMS": "{}"}
    one.step("load", 60, steps.load(carried(tmp_path / "build")))
    rows = [row for row in rows_of(tmp_path / "out") if "item" in row]
    assert statuses(rows) == [("carried build", "skipped"), ("carried build", "ok")]
    assert "asked once more, for hello: timeout" in rows[0]["message"]


def test_a_module_that_does_not_load_ends_the_call(call, tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "ROOT", tmp_path)
    carried(tmp_path / "ella_cuda")
    one = call()
    one.rehearsal = True
    one.env.pop("ITEMS", None)  # the worker's hello fails
    with pytest.raises(Stopped, match="KeyError"):
        one.step("load", 60, steps.load(tmp_path / "none"))


def test_a_rehearsal_takes_the_checkouts_module(tmp_path, worker, monkeypatch):
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("ITEMS", "{}")
    monkeypatch.setattr(steps, "ROOT", tmp_path)
    carried(tmp_path / "ella_cuda")
    folders = tmp_path / "out", tmp_path / "none", tmp_path / "scratch"
    assert steps.carry_out("first", *folders, rehearse=60, steps=[("no step", 1, lambda c: None)], worker=worker) == 0
    rows = [row for row in rows_of(tmp_path / "out") if "item" in row]
    assert statuses(rows) == [("carried build", "skipped"), ("the checkout's module", "ok")]
    assert build.module_of(tmp_path / "scratch" / "site" / "ella_cuda") is not None


def test_a_call_says_why_the_carried_build_is_not_used(tmp_path, worker, monkeypatch, capsys):
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(steps, "ROOT", tmp_path)  # without a module in place
    code = steps.carry_out(
        "first", tmp_path / "out", tmp_path / "none", tmp_path / "scratch", rehearse=60, steps=[], worker=worker
    )
    assert code == 1
    assert "building here, for" in capsys.readouterr().out


def test_a_call_in_which_all_hangs_ends_in_time(tmp_path, worker, monkeypatch, capsys):
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("CHILDREN", str(tmp_path / "children"))
    kinds = {kind: ["hangs|0", "hangs too|1"] for kind in ("case", "timing", "ncu", "sweep")}
    monkeypatch.setenv("ITEMS", json.dumps({**kinds, "facts": ["machine", "tiny kernel"]}))
    monkeypatch.setenv("PATH", tool(tmp_path / "tools", "ncu", FORWARDING))
    planned = [("facts", 200, steps.facts), ("cases", 40, steps.cases), ("timing", 40, steps.timing)]
    planned += [("ncu", 40, steps.ncu), ("sweep", 565, steps.sweep)]
    build_folder = carried(tmp_path / "build")
    began = time.monotonic()
    code = steps.carry_out(
        "first", tmp_path / "out", build_folder, tmp_path / "scratch", rehearse=30, steps=planned, worker=worker
    )
    assert code == 1 and time.monotonic() - began < 90  # what hangs sleeps for 300
    assert_ended(tmp_path / "children")
    rows = rows_of(tmp_path / "out")
    begun = [row["step"] for row in rows if row.get("step_done") or row["status"] == "not run"]
    assert list(dict.fromkeys(begun)) == ["load", *(name for name, *_ in planned)]
    assert "sweep hangs|0: timeout" in capsys.readouterr().out


def test_a_call_that_is_ended_prints_its_report_and_leaves_no_process(tmp_path, worker):
    (tmp_path / "scratch").mkdir()
    code = f"""
from pathlib import Path
from benchmarks.gpu import steps
t = Path({str(tmp_path)!r})
planned = [("cases", 565, steps.cases)]
steps.carry_out("first", t / "out", t / "build", t / "scratch", rehearse=565, steps=planned, worker={worker!r})
"""
    carried(tmp_path / "build")
    env = os.environ | {"CHILDREN": str(tmp_path / "children"), "ITEMS": json.dumps({"case": ["hangs a", "hangs b"]})}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(run.ROOT), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen([sys.executable, "-c", code], env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    end = time.monotonic() + 30
    while not (tmp_path / "children").exists() or len((tmp_path / "children").read_text().splitlines()) < 2:
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=20)
    assert "stopped: interrupted" in said
    assert_ended(tmp_path / "children")


@pytest.fixture(scope="module")
def rehearsals(tmp_path_factory):
    """All calls whole, at the same time: their outputs, exit codes and folders."""
    folder = tmp_path_factory.mktemp("rehearsals")
    carried(folder / "build")
    path = tool(folder / "tools", "compute-sanitizer", FORWARDING)
    tool(folder / "tools", "ncu", FORWARDING + NCU_TABLE)
    env = os.environ | {"PATH": path, "PYTHONPATH": f"{run.ROOT}{os.pathsep}/was/there", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.gpu"]
    options = ["--rehearse", str(steps.SECONDS), "--build", str(folder / "build")]
    started = {
        name: subprocess.Popen(
            [*command, name, *options, "--out", str(folder / name)],
            env=env,
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in steps.CALLS
    }
    return {
        name: (*process.communicate(timeout=590), process.returncode, folder / name)
        for name, process in started.items()
    }


@pytest.mark.parametrize("name", steps.CALLS)
def test_no_step_fails_for_reasons_of_its_own(rehearsals, name):
    said, _, code, folder = rehearsals[name]
    rows = rows_of(folder)
    assert [row for row in rows if row["status"] not in ("ok", "skipped")] == []
    assert code == 0 and "no failures" in said[-12_000:]
    done = [row["step"] for row in rows if row.get("step_done")]
    assert done == ["load", *steps.CALLS[name]]
    without_rows = set(done) - {row["step"] for row in rows if not row.get("step_done")}
    assert without_rows <= {"bisect"}  # nothing failed
    assert {row["step"] for row in rows if row["status"] == "skipped"} <= {"paper_scale", "networks", "curvlinops"}
    files = list(folder.rglob("*"))
    assert len(files) <= 8 and all(file.stat().st_size < 16 << 20 for file in files)


def test_a_rehearsal_measures_with_floors(rehearsals):
    rows = rows_of(rehearsals["first"][-1])
    timed = [row for row in rows if row["step"] == "timing" and "work" in row]
    assert {"F-FC, stage 7", "F-FC with gradients, stage 7"} <= {row["work"] for row in timed}
    assert all(row["microseconds"] > 0 and row["error"] < 1e-5 and "ratio" in row for row in timed)


def test_the_image_has_the_versions_that_the_build_is_made_for():
    docker = run.ROOT / "docker"
    pinned = (docker / "requirements.txt").read_text().splitlines()
    assert {f"torch=={build.TORCH}", *(need for need in build.NEEDED if need.startswith("torch"))} <= set(pinned)
    major, minor = build.PYTHON.split(".")
    assert f"(({major}, {minor}), '{build.TORCH}+cu130')" in (docker / "Dockerfile").read_text()
