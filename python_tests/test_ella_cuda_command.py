"""The entry point: threads that fit the machine, streams and signals that end nothing badly."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ella_cuda_command as command
from ella_cuda import cli
from ella_cuda.testing import KernelCheck
from python_tests.forked import wait_for

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's /proc")
TINY = "train --task digit --layer conv --objective map --width 1 --epochs 1 --burn-in 0 --frequency 1 --train-size 40 --test-size 40"


def environment(**more: str) -> dict[str, str]:
    """The same packages as here, and one thread, so that nothing is chosen."""
    path = os.pathsep.join(p for p in (more.pop("first", ""), *sys.path) if p)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "", **more}


# ---- threads ----


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """``machine(ticks)``: the root of a /proc and /sys whose process may use cores 0 and 2; sleeping adds (busy, idle) ticks of each core."""

    def make(ticks: dict[int, tuple[int, int]], groups: str = "0::/a/b\n", **limits: str) -> Path:
        def show(more: dict[int, tuple[int, int]]) -> None:
            counts = {core: (100 + more.get(core, (0, 0))[0], 100 + more.get(core, (0, 0))[1]) for core in (0, 1, 2)}
            lines = [f"cpu{core} {busy} 0 0 {idle} 7 0 0 0 5 5" for core, (busy, idle) in counts.items()]
            (tmp_path / "proc/stat").write_text("\n".join(["cpu 1 2 3 4 5 6 7 8 9 10", *lines, "intr 5 0 0", ""]))

        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(groups)
        for folder, text in limits.items():
            (tmp_path / "sys/fs/cgroup" / folder.strip("_").replace("_", "/")).mkdir(parents=True, exist_ok=True)
            (tmp_path / "sys/fs/cgroup" / folder.strip("_").replace("_", "/") / "cpu.max").write_text(text + "\n")
        show({})
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2})
        monkeypatch.setattr(command.time, "sleep", lambda seconds: show(ticks))
        return tmp_path

    return make


ALONE, ONE_BUSY = {0: (0, 15), 1: (15, 0), 2: (1, 14)}, {0: (15, 0), 1: (0, 15), 2: (0, 15)}


@linux
@pytest.mark.parametrize(
    ("ticks", "spin", "free"),
    [(ALONE, command.SPIN_ALONE, "1.9 of 2"), (ONE_BUSY, command.SPIN_BESIDE_OTHERS, "1.0 of 2")],
)
def test_how_threads_wait_follows_from_the_cores_that_are_free_and_allowed(machine, ticks, spin, free):
    chosen = command.choose_threads({"KMP_DUPLICATE_LIB_OK": "True", "OMP_NUM_THREADS": " "}, machine(ticks))
    assert chosen.pop(command.NOTE) == f"GOMP_SPINCOUNT={spin}: {free} cores were free at the start"
    assert chosen == {"GOMP_SPINCOUNT": str(spin)}  # and torch's number of threads, whatever else runs


@linux
@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "MKL_NUM_THREADS"])
def test_what_the_user_set_is_kept(machine, name):
    root = machine(ONE_BUSY)
    assert command.choose_threads({name: "3"}, root) == {command.NOTE: f"by the environment: {name}=3"}
    assert command.choose_threads({command.NOTE: "chosen before"}, root) == {}


@linux
@pytest.mark.parametrize(
    ("limits", "threads"),
    [
        ({"a_b": "max 100000", "a": "150000 100000"}, "1"),
        ({"a_b": "max 100000", "_": "50000 100000"}, "1"),
        ({"a_b": "150000 100000", "a": "800000 100000"}, "1"),
        ({"groups": "0::/not/mounted\n", "_": "100000 100000"}, "1"),
        ({"a_b": "800000 100000"}, None),
        ({"groups": ""}, None),
    ],
)
def test_a_quota_below_the_cores_limits_the_threads(machine, limits, threads):
    assert command.choose_threads({}, machine(ALONE, **limits)).get("OMP_NUM_THREADS") == threads


@linux
@pytest.mark.parametrize("stat", ["", "cpu0 1 2 3 4 5 6 7 8\n", "cpu0 a b c d\ncpu2 1 2 3 4\n"])
def test_a_machine_that_tells_no_load_is_left_as_it_is(machine, monkeypatch, stat):
    root = machine({})
    monkeypatch.setattr(command.time, "sleep", lambda seconds: None)
    (root / "proc/stat").write_text(stat)
    (said,) = command.choose_threads({}, root).values()
    assert "tells no load" in said


@linux
def test_a_busy_process_is_seen():
    core = min(os.sched_getaffinity(0))
    burning = f"import os; os.sched_setaffinity(0, [{core}]); print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", burning], stdout=subprocess.PIPE) as neighbour:
        neighbour.stdout.readline()
        try:
            assert command._busy_cores(Path("/"), {core}) > 0.6
        finally:
            neighbour.kill()


@linux
@pytest.mark.parametrize("module", ["ella_cuda_command", "ella_cuda.cli"])
def test_torch_is_loaded_with_what_was_chosen(module, tmp_path):
    """GOMP_SPINCOUNT is read when libgomp is loaded, so that a process that has loaded torch before the command's code starts anew."""
    show = "import atexit, os\natexit.register(lambda: print(os.environ['GOMP_SPINCOUNT'], open('/proc/self/environ').read()))"
    (tmp_path / "sitecustomize.py").write_text(show)
    chosen_by_user = ("OMP_", "GOMP_", "MKL_", "ELLA_")
    env = {k: v for k, v in environment(first=str(tmp_path)).items() if not k.startswith(chosen_by_user)}
    call = [sys.executable, "-m", module, "--version"]
    done = subprocess.run(call, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=True)
    spin, at_start = done.stdout.splitlines()[1].split(" ", 1)
    assert int(spin) in (command.SPIN_ALONE, command.SPIN_BESIDE_OTHERS)
    assert (f"GOMP_SPINCOUNT={spin}\0" in at_start) == (module == "ella_cuda.cli")


def test_importing_the_package_or_the_entry_point_changes_nothing(tmp_path):
    code = "import os, sys\nbefore = dict(os.environ)\nimport ella_cuda_command\nassert 'torch' not in sys.modules\n"
    code += "import ella_cuda\nassert dict(os.environ) == before\nimport signal\n"
    code += "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\nassert sys.stdout is sys.__stdout__"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment(), check=True, timeout=300)


def test_info_says_what_was_chosen(monkeypatch, capsys):
    monkeypatch.setattr(
        "ella_cuda.cli.info.check_kernels", lambda device: [KernelCheck("op", torch.float32, 0.0, 1.0, True)]
    )
    monkeypatch.setenv(command.NOTE, "so, because")
    assert cli.main(["info"]) == 0
    assert "threads       so, because" in capsys.readouterr().out.splitlines()


# ---- streams ----


@pytest.mark.parametrize("closed", [[0], [1], [2], [0, 1, 2]])
def test_closed_streams_are_no_failure(closed, tmp_path, forks):
    done = forks.start([*TINY.split(), "--out", "dir", "--jobs", "1"], tmp_path, closed=closed)
    out, err = done.communicate(timeout=60)
    assert (done.returncode, err) == (0, "") and out.startswith("1 run on cpu") == (1 not in closed)
    (row,) = json.loads((tmp_path / "dir/summary.json").read_text())
    assert 0 <= row["accuracy"] <= 100
    (session,) = json.loads((tmp_path / "dir/environment.json").read_text())
    assert session["threads_chosen"] == "by the environment: OMP_NUM_THREADS=1"


def test_streams_that_were_closed_are_taken_and_inherited(tmp_path):
    """A file opened later gets none of their numbers, and a process that inherits everything has all three."""
    (tmp_path / "code.py").write_text("""
import subprocess, sys
import ella_cuda_command as command
command.open_closed_streams()
with open("own", "w") as own:
    child = f"import os; print([os.fstat(n).st_mode > 0 for n in (0, 1, 2)], file=open({own.fileno()}, 'w'))"
    assert own.fileno() > 2
    subprocess.run([sys.executable, "-c", child], close_fds=False, pass_fds=[own.fileno()], check=True)
""")
    call = f"{sys.executable} code.py <&- >&- 2>&-"
    assert subprocess.run(call, shell=True, cwd=tmp_path, env=environment(), timeout=60).returncode == 0
    assert (tmp_path / "own").read_text() == "[True, True, True]\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
@pytest.mark.parametrize(("line", "buffered"), [("--version", True), ("--version", False), ("train --help", False)])
def test_output_that_cannot_be_written_is_a_failure_in_one_line(line, buffered, tmp_path, forks):
    done = forks.start(line.split(), tmp_path, out="/dev/full", buffered=buffered)
    _, err = done.communicate(timeout=60)
    assert done.returncode == 1
    assert err.count("\n") == 1 and "the output could not be written" in err


@pytest.mark.parametrize(("encoding", "written"), [("ascii", r"\u2212\xb0"), ("latin-1", r"\u2212°"), ("utf-16", "−°")])
def test_every_sign_is_printed_in_every_encoding(encoding, written, monkeypatch):
    streams = {name: io.BytesIO() for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, io.TextIOWrapper(stream, encoding=encoding))
    command.protect_streams()
    for name in streams:
        print("−° \udce9", file=getattr(sys, name), flush=True)  # the last: of a file's name that is no UTF-8
    assert cli.main(["train", "--help"]) == 0
    assert all(stream.getvalue().decode(encoding).startswith(rf"{written} \udce9") for stream in streams.values())


@pytest.mark.parametrize("columns", ["1", "-7", "many"])
@pytest.mark.parametrize("which", ["train", "reproduce", "inspect", "info"])
def test_help_fits_any_terminal(which, columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    assert cli.main([which, "--help"]) == 0
    assert "usage: ella-cuda" in capsys.readouterr().out


def test_a_run_outlives_its_terminal(tmp_path, forks):
    """Both streams on a terminal that goes away after the first words; writing to it is an input/output error from then on."""
    shown, terminal = pty.openpty()
    options = [*TINY.split(), "--epochs", "30", "--out", "dir", "--jobs", "1"]
    started = forks.start(options, tmp_path, terminal=os.ttyname(terminal))
    assert b"1 run on cpu" in os.read(shown, 4096)
    os.close(terminal)
    os.close(shown)
    started.communicate(timeout=300)
    assert started.returncode == 0
    assert len(json.loads((tmp_path / "dir/summary.json").read_text())) == 1
    assert (tmp_path / "dir/table.txt").exists()


# ---- signals ----


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_the_import_is_one_line(number, tmp_path):
    """A torch that says when its import has begun, and takes long."""
    begun = tmp_path / "begun"
    (tmp_path / "torch.py").write_text(f"import time\nopen({str(begun)!r}, 'w').close()\ntime.sleep(60)\n")
    code = "import sys, signal; signal.signal(int(sys.argv[1]), signal.SIG_DFL); import ella_cuda_command; ella_cuda_command.main()"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    env = environment(first=str(tmp_path))
    started = subprocess.Popen([sys.executable, "-c", code, str(int(number))], cwd=tmp_path, env=env, **pipes)
    wait_for(begun, started)
    started.send_signal(number)
    out, err = started.communicate(timeout=60)
    assert (started.returncode, out, err) == (128 + number, "", "ella-cuda: interrupted\n")


@pytest.mark.parametrize("how", ["pass", "raise ValueError('no') from None", "raise SystemExit(0) from None"])
def test_a_signal_that_is_swallowed_or_converted_is_an_interruption(how, tmp_path, forks):
    before = f"""
import signal, sklearn.datasets
def load_digits(*_, **__):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except BaseException:
        {how}
    raise ValueError("the run goes on")
sklearn.datasets.load_digits = load_digits
"""
    started = forks.start(TINY.split(), tmp_path, before=before)
    out, err = started.communicate(timeout=30)
    assert (started.returncode, out, err) == (143, "", "ella-cuda: interrupted\n")


STOP = """
import os, signal, sys, time
import ella_cuda_command as command
number = int(sys.argv[1])
signal.signal(number, signal.SIG_IGN if {ignored} else signal.SIG_DFL)
stop = command.Stop()
stop.cleanly = {cleanly}
try:
    os.kill(os.getpid(), number)
    print("went on", stop.came)
except KeyboardInterrupt:
    print("tidied", stop.code, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    print("again")
"""


@pytest.mark.parametrize(
    ("ignored", "cleanly", "code", "out"),
    [(False, True, 143, "tidied {}\n"), (False, False, "{}", ""), (True, True, 0, "went on False\n")],
    ids=["while it runs, then while it tidies up", "before or after", "ignored at the start, as under nohup"],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal(number, ignored, cleanly, code, out):
    call = [sys.executable, "-c", STOP.format(ignored=ignored, cleanly=cleanly), str(int(number))]
    done = subprocess.run(call, env=environment(), capture_output=True, text=True, timeout=60)
    assert str(done.returncode) == str(code).format(128 + number) and done.stdout == out.format(128 + number)
    assert done.stderr == "ella-cuda: interrupted\n" * (not ignored)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_a_run_keeps_what_there_is_and_says_how_to_go_on(number, tmp_path, forks):
    """Of two runs in processes of their own: ``test_cli`` by SIGINT."""
    options = [*TINY.replace("--objective map", "").split(), "--epochs", "1000", "--jobs", "1", "--out", "dir"]
    started = forks.start(options, tmp_path)
    wait_for(tmp_path / "dir/digits-digit-conv-map-seed0/checkpoint.pt", started)
    started.send_signal(number)
    _, err = started.communicate(timeout=120)
    assert started.returncode == 128 + number
    assert err == "ella-cuda: interrupted; go on with: ella-cuda train --resume dir\n"
