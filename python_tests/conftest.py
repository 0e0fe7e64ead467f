"""Fixtures of the whole suite: the same tests run on every device there is."""

from __future__ import annotations

import dataclasses
import gc
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ella_cuda
from ella_cuda import experiments, run_folder
from ella_cuda.reports.pictures import Drawn
from python_tests.forked import Forks

IN_WORKER = "PYTEST_XDIST_WORKER" in os.environ  # a process that pytest-xdist has started
SUITE = Path(__file__).parent
# Options by which a person looks at some tests or at their output.
CHOSEN = (
    "keyword",
    "lf",
    "usepdb",
    "trace",
    "stepwise",
    "collectonly",
    "setupplan",
    "setuponly",
    "setupshow",
    "showfixtures",
)


# How pytest-xdist hands out the tests of a stage, by its marker expression. The simulator's files compile: each is one process' work.
STAGES = {"not simulator and not processes": "worksteal", "processes": "loadfile", "simulator": "loadfile"}
# The workers' environment. Where a test takes two threads, one that waits sleeps at once: the other's core belongs to another worker, and
# a thread that spins holds its own core from the thread it waits for, a time slice in each loop.
WORKERS = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0"}


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """A whole stage runs on all cores, a process with one thread on each, where pytest-xdist is there and no option says else: most
    tests keep one core busy. Parts of it run in one process, with the threads that torch chooses.
    """
    whole = [Path(a).resolve() for a in config.args] == [SUITE] and config.option.markexpr in STAGES
    chosen = any(getattr(config.option, name, False) for name in CHOSEN)
    free = getattr(config.option, "numprocesses", 0) is None and config.option.dist == "no"
    worker = hasattr(config, "workerinput")  # which has all arguments, and would start workers of its own
    shown = config.option.capture == "no"
    if whole and free and not (chosen or shown or worker or torch.cuda.is_available()):
        config.option.numprocesses = config.hook.pytest_xdist_auto_num_workers(config=config)
        config.option.dist = STAGES[config.option.markexpr]
        before = {name: os.environ.get(name) for name in WORKERS}
        os.environ.update(WORKERS)  # this process has loaded torch already
        config.add_cleanup(lambda: _restore(before))


def _restore(before: dict[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def pytest_collection_finish() -> None:
    """What was imported and collected stays: the garbage collector need not look at all of it again and again. It looks at what tests
    keep more rarely than by default, for a forked process copies all that its collector looks at."""
    gc.collect()
    gc.freeze()
    often, seldom, _ = gc.get_threshold()
    gc.set_threshold(often, seldom, 100)


@pytest.fixture(params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device of this machine."""
    if request.param == "cuda" and not ella_cuda.build_info()["cuda"]:
        pytest.skip("this machine has a GPU, but ella_cuda was built without CUDA")
    return torch.device(request.param)


@pytest.fixture(autouse=True, scope="session")
def children_are_no_workers() -> None:
    """A pytest that a test starts would take itself for a worker of this one; a command that it starts would say that the user has chosen
    how threads wait."""
    for name in [name for name in os.environ if name.startswith(("PYTEST_XDIST", "GOMP_SPINCOUNT"))]:
        del os.environ[name]


@pytest.fixture(autouse=True)
def subnormal_numbers() -> None:
    """Every test has them, whatever ran before: the command flushes those of its process."""
    torch.set_flush_denormal(False)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Every test starts from the same random state."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def float32_convolutions() -> None:
    """cuDNN computes in float32, not in TF32 as it may by default, for tests compare to float32 accuracy; and twice the same, as
    gradcheck demands."""
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    """Nothing works on a GPU after a kernel went wrong in some ways: the process ends with the test that shows it. That is the run, or
    one of pytest-xdist's workers, in whose place xdist starts another."""
    report = yield
    if report.failed and torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except RuntimeError as lost:
            if IN_WORKER:
                report.lost_device = True
            else:
                item.session.shouldstop = f"the GPU is lost since {item.nodeid}: {lost}"
    return report


@pytest.hookimpl(trylast=True)  # xdist's worker has sent the report by then
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if IN_WORKER and getattr(report, "lost_device", False):
        os._exit(1)


@pytest.fixture(params=["the device's", "by torch's convolutions"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """How strided convolutions are computed and differentiated: as the device does, and as CUDA does, whatever the device."""
    if request.param == "the device's":
        yield request.param
        return
    if getattr(request.node, "callspec", None) and request.node.callspec.params.get("device") == "cuda":
        pytest.skip("is the device's own way")
    strided, plain = (op.__globals__ for op in (ella_cuda.ops.circular_conv2d_pool, ella_cuda.ops.circular_conv2d))

    def circular_conv2d(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return plain["circular_conv2d_torch" if plain["nested_forward_mode"]() else "_padded"](x, weight, bias)

    monkeypatch.setitem(strided, "COMPILED_FOR", ())
    monkeypatch.setitem(strided, "circular_conv2d", circular_conv2d)
    registered = torch.library.Library("ella_cuda", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is a kernel already
        registered.impl("circular_conv2d_pool", strided["_pool_of_two"], "CPU", allow_override=True)
    yield request.param
    registered._destroy()


@pytest.fixture(scope="session")
def inductor() -> None:
    """torch.compile to machine code, which takes a C++ compiler that has OpenMP."""
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(1 << 16))
    except RuntimeError as error:
        cause = getattr(error, "inner_exception", error)
        if not isinstance(cause, (CppCompileError, InvalidCxxCompiler)):
            raise
        pytest.skip(f"torch.compile has no compiler here: {str(cause).splitlines()[0]}")


@pytest.fixture
def beside_the_tests(tmp_path: Path) -> Path:
    """A working directory for a new Python process that can import ``python_tests`` but not the checkout's unbuilt package."""
    folder = tmp_path / "beside"
    folder.mkdir()
    (folder / "python_tests").symlink_to(Path(__file__).parent, target_is_directory=True)
    return folder


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """A process that has loaded torch, and of which the command is forked."""
    found = Forks(tmp_path_factory.mktemp("forks"))
    yield found
    found.end()


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grids draw none, which takes longer than small runs do."""
    monkeypatch.setattr("ella_cuda.reports.results.save_pictures", lambda *_: Drawn())


@dataclasses.dataclass(frozen=True)
class Asked:
    """A grid that the command wants run."""

    configs: list[experiments.RunConfig]
    options: dict[str, Any]
    folder: Path


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """The grids that the command, in a working directory of its own, wants run. Their data are loaded and their folders begun, but
    nothing is run."""
    calls: list[Asked] = []

    def record(configs, out_dir, *, options, data_dir, download, on_begin, **_):
        experiments.require_data(configs[0], data_dir, download)
        out_dir.mkdir(parents=True, exist_ok=True)  # one without a name is made already
        run_folder.write_config(out_dir, [dataclasses.asdict(c) for c in configs], options)
        on_begin(0)
        calls.append(Asked(list(configs), options, out_dir))
        return []

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(experiments, "run_grid", record)
    return calls


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """No picture, which takes longer than small networks do."""
    monkeypatch.setattr("ella_cuda.papers.studies.experiment.add_picture", lambda *_: None)
