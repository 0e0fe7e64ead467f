"""The entry point: threads that fit the machine, streams and signals that end nothing badly."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import ella_cuda_command as command
from ella_cuda import cli
from ella_cuda.testing import KernelCheck
from python_tests.forked import Child

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's /proc")
TINY = "train --task digit --layer conv --objective map --width 1 --epochs 1 --burn-in 0 --frequency 1 --train-size 40 --test-size 40"


def environment(**more: str) -> dict[str, str]:
    """The same packages as here, and one thread, so that nothing is chosen."""
    path = os.pathsep.join(p for p in (more.pop("first", ""), *sys.path) if p)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "", **more}


# ---- threads ----


class Machine:
    """A /proc and /sys of two cores that were up for 100 ticks; sleeping adds the ticks given, (busy, idle) of each core."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, ticks: dict[int, tuple[int, int]]) -> None:
        self.root, self.counts = root, {core: [100, 0, 0, 100] for core in (0, 1, 2)}
        (root / "proc/self").mkdir(parents=True)
        self.write("proc/self/cgroup", "0::/a/b\n")
        self.show()
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2})
        monkeypatch.setattr(command.time, "sleep", lambda seconds: self.show(ticks))

    def write(self, name: str, text: str) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text)

    def show(self, ticks: dict[int, tuple[int, int]] | None = None) -> None:
        for core, (busy, idle) in (ticks or {}).items():
            self.counts[core][0] += busy
            self.counts[core][3] += idle
        lines = [f"cpu{core} {' '.join(map(str, c))} 7 0 0 0 5 5" for core, c in self.counts.items()]
        self.write("proc/stat", "\n".join(["cpu 1 2 3 4 5 6 7 8 9 10", *lines, "intr 5 0 0", "procs_running 9", ""]))


ALONE, ONE_BUSY = {0: (0, 15), 1: (15, 0), 2: (1, 14)}, {0: (15, 0), 1: (0, 15), 2: (0, 15)}


@linux
@pytest.mark.parametrize(
    ("ticks", "spin", "free"),
    [(ALONE, command.SPIN_ALONE, "1.9 of 2"), (ONE_BUSY, command.SPIN_BESIDE_OTHERS, "1.0 of 2")],
)
def test_how_threads_wait_follows_from_the_cores_that_are_free_and_allowed(tmp_path, monkeypatch, ticks, spin, free):
    Machine(tmp_path, monkeypatch, ticks)
    chosen = command.choose_threads({}, tmp_path)
    assert chosen.pop(command.NOTE) == f"GOMP_SPINCOUNT={spin}: {free} cores were free at the start"
    assert chosen == {"GOMP_SPINCOUNT": str(spin)}  # and torch's number of threads, whatever else runs


@linux
@pytest.mark.parametrize(
    "name", ["OMP_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME", "MKL_NUM_THREADS"]
)
def test_what_the_user_set_is_kept(tmp_path, monkeypatch, name):
    Machine(tmp_path, monkeypatch, ONE_BUSY)
    assert command.choose_threads({name: "3"}, tmp_path) == {command.NOTE: f"by the environment: {name}=3"}


@linux
@pytest.mark.parametrize(
    ("value", "ignored"),
    [("many", True), ("0", True), ("-2", True), ("2.5", True), ("2 ", False), ("4,2", False), ("16", False)],
)
def test_a_number_of_threads_that_is_none_is_said_to_be_ignored(tmp_path, monkeypatch, value, ignored):
    Machine(tmp_path, monkeypatch, ONE_BUSY)
    chosen = command.choose_threads({"OMP_NUM_THREADS": value}, tmp_path)
    why = "; OMP_NUM_THREADS is not a number of threads, and OpenMP ignores it" if ignored else ""
    assert chosen == {command.NOTE: f"by the environment: OMP_NUM_THREADS={value}{why}"}


@linux
@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_word_is_no_choice(tmp_path, monkeypatch, value):
    machine = Machine(tmp_path, monkeypatch, ALONE)
    machine.write("sys/fs/cgroup/cpu.max", "100000 100000\n")
    chosen = command.choose_threads({"OMP_NUM_THREADS": value}, tmp_path)
    assert chosen["OMP_NUM_THREADS"] == "1" and "were free at the start" in chosen[command.NOTE]


@linux
def test_what_says_nothing_of_threads_is_no_choice(tmp_path, monkeypatch):
    Machine(tmp_path, monkeypatch, ONE_BUSY)
    assert "GOMP_SPINCOUNT" in command.choose_threads({"KMP_DUPLICATE_LIB_OK": "True", "PATH": "/bin"}, tmp_path)
    assert command.choose_threads({command.NOTE: "chosen before"}, tmp_path) == {}


@linux
@pytest.mark.parametrize(
    ("groups", "limits", "threads"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, "1"),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "cpu.max": "50000 100000"}, "1"),
        ("0::/a/b\n", {"a/b/cpu.max": "150000 100000", "a/cpu.max": "800000 100000"}, "1"),
        ("0::/not/mounted\n", {"cpu.max": "100000 100000"}, "1"),
        ("2:cpu:/a\n1:name=x:/\n", {"cpu/a/cpu.cfs_quota_us": "100000", "cpu/a/cpu.cfs_period_us": "100000"}, "1"),
        ("2:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, None),
        ("0::/a/b\n", {"a/b/cpu.max": "800000 100000"}, None),
        ("", {}, None),
    ],
)
def test_a_quota_below_the_cores_limits_the_threads(tmp_path, monkeypatch, groups, limits, threads):
    machine = Machine(tmp_path, monkeypatch, ALONE)
    machine.write("proc/self/cgroup", groups)
    for name, text in limits.items():
        machine.write(f"sys/fs/cgroup/{name}", text + "\n")
    assert command.choose_threads({}, tmp_path).get("OMP_NUM_THREADS") == threads


@linux
@pytest.mark.parametrize("stat", [None, "", "cpu0 1 2 3 4 5 6 7 8\n", "cpu0 a b c d\ncpu2 1 2 3 4\n"])
def test_a_machine_that_tells_no_load_is_left_as_it_is(tmp_path, monkeypatch, stat):
    machine = Machine(tmp_path, monkeypatch, {})
    monkeypatch.setattr(command.time, "sleep", lambda seconds: None)
    (tmp_path / "proc/stat").unlink() if stat is None else machine.write("proc/stat", stat)
    chosen = command.choose_threads({}, tmp_path)
    assert list(chosen) == [command.NOTE] and "tells no load" in chosen[command.NOTE]


def test_other_systems_are_left_as_they_are(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert command.choose_threads({}) == {}


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
    assert math.isinf(command._quota(Path("/nowhere")))


@linux
@pytest.mark.parametrize("module", ["ella_cuda_command", "ella_cuda.cli"])
def test_torch_is_loaded_with_what_was_chosen(module, tmp_path):
    """GOMP_SPINCOUNT is read when libgomp is loaded: what the process has in its memory then is what was chosen."""
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os, sys\n"
        "def show():\n"
        "    environ = open('/proc/self/environ').read().split(chr(0))\n"
        "    at_start = [e for e in environ if e.startswith('GOMP_')]\n"
        "    print('AT EXIT', os.environ.get('GOMP_SPINCOUNT'), at_start, file=sys.stderr)\n"
        "atexit.register(show)\n"
    )
    env = {
        k: v
        for k, v in environment(first=str(tmp_path)).items()
        if not k.startswith(("OMP_", "GOMP_", "MKL_", "ELLA_"))
    }
    call = [sys.executable, "-m", module, "--version"]
    done = subprocess.run(call, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("AT EXIT"))
    spin = line.split()[2]
    assert spin in map(str, (command.SPIN_ALONE, command.SPIN_BESIDE_OTHERS))
    if module == "ella_cuda.cli":  # torch was there before the command's own code: Python starts anew, once
        assert f"GOMP_SPINCOUNT={spin}" in line


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


def shell(line: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    call = f"{sys.executable} -m ella_cuda_command {line}"
    return subprocess.run(
        call, shell=True, cwd=cwd, env=environment(**env), capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_closed_stream_is_no_failure(closed, tmp_path, forks):
    done = forks.start(["--version"], tmp_path, closed=[closed])
    out, err = done.communicate(timeout=60)
    assert (done.returncode, err) == (0, "")
    assert out.startswith("ella-cuda ") or closed == 1


def test_streams_that_were_closed_are_taken_and_inherited(tmp_path):
    """A file opened later gets none of their numbers, and a process that inherits everything has all three."""
    child = "import os; print([os.fstat(n).st_mode > 0 for n in (0, 1, 2)], file=open('child', 'w'))"
    code = f"""
import subprocess, sys
import ella_cuda_command as command
command.open_closed_streams()
with open("own", "w") as own:
    print(own.fileno() > 2, file=own)
subprocess.run([sys.executable, "-c", {child!r}], close_fds=False, check=True)
"""
    (tmp_path / "code.py").write_text(code)
    for closed in ("2>&-", "<&-", "<&- >&- 2>&-"):
        call = f"{sys.executable} code.py {closed}"
        assert subprocess.run(call, shell=True, cwd=tmp_path, env=environment(), timeout=60).returncode == 0
        assert (tmp_path / "own").read_text() == "True\n"
        assert (tmp_path / "child").read_text() == "[True, True, True]\n"
        (tmp_path / "child").unlink()


def test_with_all_streams_closed_a_run_writes_what_it_always_writes(tmp_path):
    done = shell(f"{TINY} --out dir --jobs 1 <&- >&- 2>&-", tmp_path)
    assert done.returncode == 0
    (row,) = json.loads((tmp_path / "dir/summary.json").read_text())
    assert 0 <= row["accuracy"] <= 100
    (session,) = json.loads((tmp_path / "dir/environment.json").read_text())
    assert session["threads_chosen"] == "by the environment: OMP_NUM_THREADS=1"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
@pytest.mark.parametrize(("line", "buffered"), [("--version", True), ("--version", False), ("train --help", False)])
def test_output_that_cannot_be_written_is_a_failure_in_one_line(line, buffered, tmp_path, forks):
    done = forks.start(line.split(), tmp_path, out="/dev/full", buffered=buffered)
    _, err = done.communicate(timeout=60)
    assert done.returncode == 1
    assert err.count("\n") == 1 and "the output could not be written" in err


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-16", "utf-8"])
def test_every_sign_is_printed_in_every_encoding(encoding, monkeypatch):
    signs = "−±–ω×°← \udce9"  # the last: of a file's name that is no UTF-8
    written = {}
    for name in ("stdout", "stderr"):
        written[name] = io.BytesIO()
        monkeypatch.setattr(sys, name, io.TextIOWrapper(written[name], encoding=encoding))
    command.protect_streams()
    print(signs, flush=True)
    print(signs, file=sys.stderr, flush=True)
    assert cli.main(["train", "--help"]) == 0
    for stream in written.values():
        text = stream.getvalue().decode(encoding)
        assert text.startswith(
            "".join(s if _has(encoding, s) else s.encode("ascii", "backslashreplace").decode() for s in signs)
        )
    assert "180" + "°".encode(encoding, "backslashreplace").decode(encoding) in written["stdout"].getvalue().decode(
        encoding
    )


def _has(encoding: str, sign: str) -> bool:
    try:
        return bool(sign.encode(encoding))
    except UnicodeEncodeError:
        return False


@pytest.mark.parametrize("columns", ["1", "0", "-7", "many", "99999999999"])
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

# In short sleeps: a signal that comes just before one is handled after it.
WAIT = "import time\ndef wait(seconds):\n    for _ in range(round(10 * seconds)): time.sleep(0.1)\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_the_import_is_one_line(number, tmp_path):
    """A torch that says when its import has begun, and takes long."""
    begun = tmp_path / "begun"
    (tmp_path / "torch.py").write_text(f"{WAIT}open({str(begun)!r}, 'w').close()\nwait(60)\n")
    started = start(["info"], tmp_path, first=str(tmp_path))
    wait_for(begun, started)
    started.send_signal(number)
    out, err = started.communicate(timeout=60)
    assert (started.returncode, out, err) == (128 + number, "", "ella-cuda: interrupted\n")


# Packages that are imported late, each of which says when a signal is due; imports or calls go on for a minute.
LATE = {
    "an import that swallows": "try:\n    due()\nexcept BaseException:\n    pass\ndef load_digits(): wait(60)\n",
    "an import that converts": "try:\n    due()\nexcept BaseException:\n    raise ImportError('no') from None\n",
    "an import that ends soon": "due(1.0)\ndef load_digits(): wait(60)\n",
    "a destructor": "class A:\n    def __del__(self): due()\ndef load_digits():\n    A()\n    wait(60)\n",
    "a call that swallows": (
        "def load_digits():\n    try:\n        due()\n    except BaseException:\n        pass\n    wait(60)\n"
    ),
    "a call that converts": (
        "def load_digits():\n    try:\n        due()\n    except BaseException:\n        raise ValueError('no') from None\n"
    ),
    "a call that swallows and returns": (
        "def load_digits():\n    try:\n        due()\n    except BaseException:\n        raise SystemExit(0) from None\n"
    ),
}


@pytest.mark.parametrize(
    ("kind", "number"), [*zip(LATE, itertools.cycle([signal.SIGINT, signal.SIGTERM]), strict=False)]
)
def test_a_signal_that_gets_lost_or_converted_is_an_interruption(kind, number, tmp_path, forks):
    begun = tmp_path / "begun"
    due = f"{WAIT}def due(seconds=60):\n    open({str(begun)!r}, 'w').close()\n    wait(seconds)\n"
    (tmp_path / "sklearn").mkdir()
    (tmp_path / "sklearn/__init__.py").write_text("")
    (tmp_path / "sklearn/datasets.py").write_text(due + LATE[kind])
    before = "for name in [n for n in sys.modules if n.split('.')[0] == 'sklearn']: del sys.modules[name]\n"
    before += "command.PATIENCE = 0.2" if "soon" not in kind else ""
    started = forks.start(TINY.split(), tmp_path, before=before, first=tmp_path)
    wait_for(begun, started)
    started.send_signal(number)
    out, err = started.communicate(timeout=30)
    assert (started.returncode, out, err) == (128 + number, "", "ella-cuda: interrupted\n")


def test_an_interruption_leaves_imports_whole_and_what_is_tidied_up_alone(tmp_path):
    """It waits for an import to end, and does not come again in what is done because of it, however long that takes."""
    (tmp_path / "late.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\nwhole = True\n")
    code = """
import sys, time
import ella_cuda_command as command
stop = command.Stop()
stop.cleanly = True
try:
    try:
        import late
        time.sleep(60)
    finally:
        time.sleep(5 * command.AGAIN)
        print("tidied", sys.modules["late"].whole)
except KeyboardInterrupt:
    stop.end()
time.sleep(3 * command.AGAIN)
print(stop.came, stop.code)
"""
    call = [sys.executable, "-c", code]
    env = environment(first=str(tmp_path))
    done = subprocess.run(call, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=50)
    assert (done.stdout, done.stderr) == ("tidied True\nTrue 143\n", "")


def test_an_interruption_comes_again_until_it_has_arrived(tmp_path):
    """The first alarm after one that is swallowed gets lost, as before a call that blocks; the next does not."""
    code = """
import os, signal, time
import ella_cuda_command as command
stop = command.Stop()
stop.cleanly = True
try:
    os.kill(os.getpid(), signal.SIGINT)
except BaseException:
    pass
alarm = signal.signal(signal.SIGALRM, lambda *_: None)
time.sleep(1.5 * command.AGAIN)
signal.signal(signal.SIGALRM, alarm)
try:
    time.sleep(20)
    print("lost")
except KeyboardInterrupt:
    stop.end()
    print("arrived")
"""
    call = [sys.executable, "-c", code]
    done = subprocess.run(call, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=50)
    assert (done.stdout, done.stderr) == ("arrived\n", "")


def test_a_second_signal_ends_at_once_what_is_tidied_up_slowly(tmp_path):
    code = """
import os, signal, time
import ella_cuda_command as command
stop = command.Stop()
stop.cleanly = True
try:
    os.kill(os.getpid(), signal.SIGINT)
finally:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)
    print("tidied")
"""
    call = [sys.executable, "-c", code]
    done = subprocess.run(call, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "ella-cuda: interrupted\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_after_the_end_is_one_line(number, tmp_path):
    code = f"""
import os, signal
import ella_cuda_command as command
if signal.getsignal({int(number)}) is signal.SIG_IGN:  # as what nohup starts has it
    signal.signal({int(number)}, signal.SIG_DFL)
stop = command.Stop()
stop.cleanly = True
stop.end()
try:
    os.kill(os.getpid(), {int(number)})
finally:
    print("went on")
"""
    call = [sys.executable, "-c", code]
    done = subprocess.run(call, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", "ella-cuda: interrupted\n")


def test_an_interruption_is_found_behind_causes_and_contexts():
    def error(cause: BaseException | None, context: BaseException | None) -> ValueError:
        made = ValueError()
        made.__cause__, made.__context__ = cause, context
        return made

    stop, other = KeyboardInterrupt(), OSError()
    for found in (stop, error(stop, other), error(other, stop), error(error(None, stop), other)):
        assert command._on_its_way(found) and command._on_its_way(error(other, error(found, None)))
    circle = error(None, other)
    other.__context__ = circle
    for lost in (None, other, circle, error(other, circle)):
        assert not command._on_its_way(lost)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_is_ignored_at_the_start_stays_ignored(number, tmp_path):
    """As those of a shell's background jobs, or under nohup."""
    code = f"""
import os, signal
import ella_cuda_command as command
signal.signal({int(number)}, signal.SIG_IGN)
stop = command.Stop()
stop.cleanly = True
os.kill(os.getpid(), {int(number)})
print(stop.came)
try:
    os.kill(os.getpid(), signal.SIGTERM)
except KeyboardInterrupt:
    print("others are not")
"""
    call = [sys.executable, "-c", code]
    done = subprocess.run(call, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("False\nothers are not\n", "")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "forked"), [(signal.SIGTERM, False), (signal.SIGHUP, True)])
def test_a_signal_during_a_run_keeps_what_there_is_and_says_how_to_go_on(number, forked, tmp_path, forks):
    """Of two runs in processes of their own: ``test_cli`` by SIGINT. A process that is not forked ends as Python does."""
    options = [*TINY.replace("--objective map", "").split(), "--epochs", "1000", "--jobs", "1", "--out", "dir"]
    started = (forks.start if forked else start)(options, tmp_path)
    wait_for(tmp_path / "dir/digits-digit-conv-map-seed0/checkpoint.pt", started)
    started.send_signal(number)
    _, err = started.communicate(timeout=120)
    assert started.returncode == 128 + number
    assert err == "ella-cuda: interrupted; go on with: ella-cuda train --resume dir\n"


def start(options: list[str], cwd: Path, **env: str) -> subprocess.Popen[str]:
    """The command, in a process that loads what it needs."""
    code = "import sys\nimport ella_cuda_command as command\nsys.exit(command.main())"

    def defaults() -> None:  # what starts the tests may ignore them
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)

    return subprocess.Popen(
        [sys.executable, "-c", code, *options],
        cwd=cwd,
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=defaults,
    )


def wait_for(path: Path, process: subprocess.Popen[str] | Child) -> None:
    deadline = time.monotonic() + 240
    while not path.exists():
        assert process.poll() is None, process.communicate(timeout=60)
        assert time.monotonic() < deadline
        time.sleep(0.01)
