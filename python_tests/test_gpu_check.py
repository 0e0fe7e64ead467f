"""``benchmarks.gpu`` without a GPU: its scheduling, on processes that fail, hang or end, and its calls whole on the CPU."""

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

import ella_cuda
from ella_cuda.cuda_path import cuda_path
from python_tests.benchmark_files import importable

importable()
from benchmarks.gpu import build, device, report, run, steps, work, works  # noqa: E402
from benchmarks.gpu.run import Call, Stopped  # noqa: E402

# A worker whose items behave as their names say.
WORKER = """
import json, os, signal, subprocess, sys, time
kind, part, of, skip = sys.argv[1], *map(int, sys.argv[2:])
for item in os.environ["ITEMS"].split(",")[part::of][skip:]:
    print("@begin " + item, flush=True)
    how, row = item.split()[0], {"item": item, "status": "ok", "pid": os.getpid()}
    if how == "hangs":
        with open(os.environ["CHILDREN"], "a") as file:
            print(os.getpid(), subprocess.Popen(["sleep", "300"]).pid, file=file)
        time.sleep(300)
    if how == "crashes":
        print("about to crash", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "leaves":
        sys.exit(0)
    if how == "reads":
        print("========= Invalid __global__ read of size 4 bytes")
        print("=========     at void " + item.split()[1] + "::kernel<float>(float*)+0x70", flush=True)
        print("=========     Host Frame: torch::call [0x1] in /site/ella_cuda/_C.so", flush=True)
    if how == "fails":
        row |= {"status": "failed", "message": "no kernel"}
    print("@row " + json.dumps(row), flush=True)
    if how == "fails":
        sys.exit(3)
"""
FORWARDING = """#!/usr/bin/env bash
# In place of compute-sanitizer and ncu: options, then a command.
while [[ $1 == -* ]]; do if [[ $1 == --csv ]]; then shift; else shift 2; fi; done
"$@" || exit
"""
NCU_TABLE = """echo '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
echo '"0","ella::kernel","Duration","us","12"'
"""

pytestmark = pytest.mark.simulator


@pytest.fixture
def call(tmp_path: Path):
    """``call(items, seconds)``: a call on the worker above."""
    (tmp_path / "worker.py").write_text(WORKER)

    def make(items: str = "", seconds: float = 60) -> Call:
        paths = f"{run.ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        env = {**os.environ, "CHILDREN": str(tmp_path / "children"), "ITEMS": items, "PYTHONPATH": paths}
        return Call(tmp_path / "out", seconds, tmp_path, env, [sys.executable, str(tmp_path / "worker.py")])

    return make


def rows_of(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    return [row for row in rows if not row.get("step_done")]


def statuses(rows: list[dict]) -> list[tuple]:
    return [(row.get("item"), row["status"]) for row in rows]


def alive(pid: str) -> bool:
    """Whether it still runs; one whose parent has not noticed its end does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_ended(children: Path, count: int) -> None:
    """That no process of that list runs; a signal has come when the kernel has carried it out."""
    pids, end = children.read_text().split(), time.monotonic() + 20
    assert len(pids) == count
    while any(map(alive, pids)):
        assert time.monotonic() < end, pids
        time.sleep(0.05)


def program(folder: Path, name: str, text: str) -> str:
    """The path with a program of that name in front."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_an_item_that_fails_hangs_or_ends_its_process_costs_itself_alone(call, tmp_path):
    items = ["a", "hangs", "b", "crashes", "c", "fails", "d", "leaves", "e"]
    call(",".join(items)).step("s", 60, lambda c: c.series("kind", 2))
    rows = rows_of(tmp_path / "out")
    bad = {"hangs": "timeout", "crashes": "failed", "fails": "failed", "leaves": "failed"}
    assert statuses(rows) == [(item, bad.get(item, "ok")) for item in items]
    by_item = {row["item"]: row for row in rows}
    assert by_item["crashes"]["message"] == f"exit code -{signal.SIGSEGV.value}: about to crash"
    assert by_item["fails"]["message"] == "no kernel"
    assert_ended(tmp_path / "children", 2)


def test_a_worker_that_never_starts_is_given_up(call, tmp_path):
    one = call("a,b")
    one.worker = [sys.executable, "-c", "raise ImportError('no torch')"]
    one.step("s", 60, lambda c: c.series("kind", 5))
    (row,) = rows_of(tmp_path / "out")
    assert row["status"] == "failed" and "no torch" in row["message"]


def test_no_step_outlasts_its_limit_nor_all_of_them_the_call(call, tmp_path):
    began, one = time.monotonic(), call("hangs,hangs,a,a,a", 9)
    for limit in (4, 60, 60):
        one.step("step", limit, lambda c: c.pool(lambda at: c.series("kind", 60, part=(at, 3)), range(3)))
    assert 8 < time.monotonic() - began < 60  # what hangs sleeps for 300
    found = statuses(rows_of(tmp_path / "out"))
    assert found == [("a", "ok"), (None, "not run"), (None, "not run")] * 2 + [(None, "not run")]
    assert_ended(tmp_path / "children", 8)


def test_what_a_step_raises_is_a_row_and_the_next_step_runs(call, tmp_path):
    def raises(error: Exception) -> None:
        raise error

    one = call("a")
    one.step("broken", 10, lambda c: raises(KeyError("missing")))
    one.step("next", 10, lambda c: c.series("kind", 5))
    with pytest.raises(Stopped):
        one.step("facts", 10, steps.facts)  # the worker has no small kernel
    found = [(row["step"], row["status"]) for row in rows_of(tmp_path / "out")]
    assert found == [("broken", "failed"), ("next", "ok"), ("facts", "ok"), ("facts", "failed")]
    assert "KeyError" in (tmp_path / "out" / "log.txt").read_text()


def test_files_keep_to_their_limit(call, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "MAX_BYTES", 1000)
    one = call()
    for _ in range(12):
        one.write("log.txt", "x" * 99 + "\n")
    assert (tmp_path / "out" / "log.txt").stat().st_size == 1000


@pytest.mark.parametrize("name", steps.CALLS)
def test_the_limits_add_up(name):
    load, last = 60, 30
    before = sum(limit for _, limit, _ in steps.chosen(steps.CALLS[name])[:-1])
    assert load + before + last <= steps.SECONDS <= 9.5 * 60


def test_steps_are_chosen_by_name():
    chosen = [(name, limit) for name, limit, _ in steps.chosen(["cases", "facts=7", "tests"])]
    assert chosen == [("cases", steps.STEPS["cases"][0]), ("facts", 7), ("tests", steps.SECONDS)]
    with pytest.raises(ValueError, match="there is no step 'case'; there are facts, cases"):
        steps.chosen(["case"])


def test_a_missing_program_skips_its_step(call, tmp_path):
    one = call("a")
    one.env["PATH"] = str(tmp_path)
    for name in ("ncu", "memcheck"):
        one.step(name, 10, steps.STEPS[name][1])
    assert statuses(rows_of(tmp_path / "out")) == [(None, "skipped")] * 2
    assert "ncu is not on the path" in report.text(one.rows)


@pytest.mark.parametrize("sanitizer", ["racecheck", "initcheck"])
def test_a_sanitizers_report_on_our_kernel_is_the_present_items_failure(call, tmp_path, sanitizer):
    one = call("a,reads ella,b,reads cublas")
    one.env["PATH"] = program(tmp_path / "tools", "compute-sanitizer", FORWARDING)
    one.step(sanitizer, 30, steps.STEPS[sanitizer][1])
    found = {row["item"]: row for row in rows_of(tmp_path / "out")}
    assert {item for item, row in found.items() if row["status"] != "ok"} == {"reads ella"} and len(found) == 4
    assert "Invalid __global__ read of size 4" in found["reads ella"]["message"]


@pytest.mark.parametrize(
    ("text", "status"), [(FORWARDING + NCU_TABLE, "ok"), (FORWARDING, "failed"), ("#!/bin/sh\nsleep 300\n", "timeout")]
)
def test_ncu(call, tmp_path, monkeypatch, text, status):
    monkeypatch.setattr(steps, "PROFILED", [("a", 0), ("b", 1)])
    one = call("a,b")
    one.worker, one.scale = ["true"], 0.05  # 25 seconds a kernel are 1.25
    one.env["PATH"] = program(tmp_path / "tools", "ncu", text)
    one.step("ncu", 300, steps.ncu)
    rows = rows_of(tmp_path / "out")
    assert statuses(rows) == [("a|0", status), ("b|1", status)]
    assert status != "ok" or (rows[0]["Duration"] == "12 us" and rows[0]["kernel"] == "ella::kernel")


@pytest.mark.parametrize("options", [[], ["-n", "1"]], ids=["alone", "xdist"])
def test_every_failure_of_a_session_that_is_cut_off_has_a_row(call, tmp_path, options):
    text = "import time\ndef test_a(none): pass\ndef test_b(): raise KeyError('b')\ndef test_c(): pass\n"
    (tmp_path / "test_a.py").write_text(f"{text}\ndef test_d(): time.sleep({300 * (not options)})\n")
    call().step("tests", 9, lambda c: steps._pytest(c, [*options, "--rootdir", str(tmp_path), str(tmp_path)]))
    *failed, session = rows_of(tmp_path / "out")
    said = {row["item"]: row["message"] for row in failed}
    assert set(said) == {"test_a.py::test_a", "test_a.py::test_b"} and said["test_a.py::test_b"] == "KeyError: 'b'"
    assert session["status"] == ("failed" if options else "not run")
    assert ("1 failed, 2 passed" if options else "1 failed, 1 passed") in session["message"]


def test_the_report_is_short_and_begins_with_the_failures():
    rows = [{"step": "cases", "item": f"case {i}", "status": "wrong", "message": "m" * 500} for i in range(300)]
    for i in range(300):
        row = {"step": "timing", "work": f"work {i}", "status": "ok", "floor": 1.0, "ratio": 2.0}
        rows += [row | {"who": who, "microseconds": us} for who, us in (("ella_cuda", 2), ("bmm", 5), ("einsum", 4))]
    text = report.text(rows)
    assert len(text) < 12_000 and text.startswith("FAILURES: 300") and "more lines are in rows.jsonl" in text
    (line,) = (line for line in text.splitlines() if line.startswith("work 7 "))
    assert line.split() == ["work", "7", "2", "1", "2", "-", "4", "einsum;", "-"]
    assert report.text([]).startswith("no failures\n")
    assert report.text([{"step": "s", "status": "not run"}]).startswith("no failures in what ran, but not all ran")


@pytest.mark.parametrize("sets", [1, 3, 13, 20, 21, 400])
def test_every_set_of_inputs_is_as_long_away_as_any_other(monkeypatch, sets):
    monkeypatch.setattr(device, "cache_bytes", lambda: 50_000_000)
    one = SimpleNamespace(bytes=300_000, long={"torch"})
    rotated, row = work.rotation(one, "ella_cuda", list(range(sets)))
    assert len(rotated) >= work.CALLS and rotated == [i % sets for i in range(len(rotated))]
    assert len(rotated) % sets == 0 and ("in_cache" in row) == (sets < 400)
    rotated, row = work.rotation(one, "torch", list(range(sets)))
    assert len(rotated) < 2 * work.CALLS and "in_cache" in row


def test_all_paths_and_profiled_works_exist():
    assert {name for name, _ in steps.PROFILED} <= set(works.works(False))
    for path in work.PATHS[1:]:
        with cuda_path(**dict(one.split("=") for one in path.split(","))):
            pass


def carried(folder: Path) -> Path:
    """The checkout's own compiled module as if it had been carried along."""
    folder.mkdir()
    shutil.copy(ella_cuda._C.__file__, folder)
    (folder / build.NOTE).write_text(json.dumps(build.note()))
    return folder


def test_whether_a_build_fits(tmp_path):
    assert "holds no build" in build.misfit(tmp_path)
    good = carried(tmp_path / "good")
    assert build.misfit(good) is None
    (good / build.NOTE).write_text(json.dumps(build.note() | {"torch": "1.0"}))
    assert "torch 1.0 instead of" in build.misfit(good)


def test_a_call_that_is_ended_prints_its_report_and_leaves_no_process(call, tmp_path):
    code = f"""
from pathlib import Path
from benchmarks.gpu import steps
t, planned = Path({str(tmp_path)!r}), [("cases", 565, steps.cases)]
steps.carry_out(t / "out", t / "build", t, planned, worker={call().worker!r})
"""
    carried(tmp_path / "build")
    env = call("hangs a,hangs b").env
    process = subprocess.Popen([sys.executable, "-c", code], env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not (tmp_path / "children").exists() or len((tmp_path / "children").read_text().split()) < 4:
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=20)
    assert process.returncode == 0 and "FAILURES: 1\n  end: failed: interrupted" in said
    assert_ended(tmp_path / "children", 4)


@pytest.mark.parametrize("name", steps.CALLS)
def test_no_step_fails_for_reasons_of_its_own(tmp_path, name):
    """A call whole, on the CPU."""
    path = program(tmp_path / "tools", "compute-sanitizer", FORWARDING)
    program(tmp_path / "tools", "ncu", FORWARDING + NCU_TABLE)
    env = os.environ | {"PATH": path, "PYTHONPATH": str(run.ROOT), "OMP_NUM_THREADS": "1"}
    folders = ["--build", str(carried(tmp_path / "build")), "--out", str(tmp_path / "out")]
    command = [sys.executable, "-m", "benchmarks.gpu", name, "--rehearse", str(steps.SECONDS), *folders]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0 and "no failures\n" in done.stdout[-12_000:], done.stdout
    rows = rows_of(tmp_path / "out")
    assert {row["status"] for row in rows} == {"ok"} and {row["step"] for row in rows} == set(steps.CALLS[name])
    timed = {row["work"]: row for row in rows if row["step"] == "timing"}
    assert (name == "first") == ("F-FC with gradients, stage 7" in timed)
    assert all(row["microseconds"] > 0 and row["error"] < 1e-4 and "ratio" in row for row in timed.values())
    assert len(list((tmp_path / "out").iterdir())) <= 8
