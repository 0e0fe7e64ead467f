"""What every benchmark shares: threads and device, the machine's measured peaks, and one way to time a candidate.

    pytest benchmarks --benchmark-json bench.json && python -m benchmarks.compare bench.json

runs all rows; a file, ``-k``, or both choose some, and ``--collect-only -q`` lists them: ``pytest benchmarks/bench_factored_linear.py
-k "ella_cuda and stage"``. ``--dense-limit`` says up to which size the published dense matrices are run; larger ones are
extrapolated and say so.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import pytest
import torch

from benchmarks.machine import Peaks, describe, measure_peaks, told_commit
from benchmarks.memory import peak_bytes


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ella_cuda benchmarks")
    group.addoption("--threads", type=int, default=2, help="torch's threads (2)")
    group.addoption("--device", default="cpu", help="cpu, cuda or cuda:<index> (cpu)")
    group.addoption(
        "--dense-limit",
        type=int,
        default=5120,
        help="rows of the largest dense Kronecker factor to run; the published structure has up to 12800 (5120)",
    )


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.config.getoption("--device"))


@pytest.fixture(scope="session", autouse=True)
def threads(request: pytest.FixtureRequest) -> int:
    torch.set_num_threads(request.config.getoption("--threads"))
    torch.set_flush_denormal(True)
    return torch.get_num_threads()


@pytest.fixture(scope="session")
def peaks(threads: int, device: torch.device) -> Peaks:
    return measure_peaks(device)


@pytest.fixture(autouse=True)
def fresh() -> None:
    """The same random numbers for every candidate, and what torch.compile made for one shape not used for the next."""
    torch.manual_seed(0)
    torch.compiler.reset()


Time = Callable[..., Any]
# What takes less is repeated for so many seconds, at most so often: single runs of what is short scatter most.
SHORT, MAX_ROUNDS = 0.3, 100


def _seconds(call: Callable[[], Any]) -> float:
    start = perf_counter()
    call()
    return perf_counter() - start


@pytest.fixture
def time(benchmark: Any, peaks: Peaks, device: torch.device, pytestconfig: pytest.Config) -> Time:
    """``time(call, work=..., who=..., flops=..., bytes=...)``: run the candidate ``who`` of the comparison ``work``.

    ``flops`` and ``bytes`` are counted from the mathematics, the same for every candidate of one work; with the peaks
    measured in the same session they give the floor. ``once`` is for what takes long: one call, timed while its memory is
    watched. Else there are at least ``rounds`` of them after ``warmups``. ``memory_of`` is what takes the memory where the call
    itself takes none, for it was made ready before; ``peak`` knows of its peak otherwise. Everything lands in ``extra_info``, where
    ``compare.py`` finds it, with what else it is told to note (``info``). The median is printed at once: a session that does not end
    leaves no report.
    """

    def run(
        call: Callable[[], Any],
        *,
        work: str,
        who: str,
        flops: float,
        bytes: float,
        rounds: int = 7,
        warmups: int = 3,
        once: bool = False,
        memory_of: Callable[[], Any] | None = None,
        peak: Callable[[], int | None] | None = None,
        **info: Any,
    ) -> None:
        def whole() -> None:
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        # What runs a smaller problem, to be extrapolated, is not to be compared with those that run the whole one.
        benchmark.group = f"{work}, {info['extrapolation']['note']}" if "extrapolation" in info else work
        if peak is not None:
            used = peak()
            benchmark.pedantic(whole, rounds=1)
        elif once:
            used = peak_bytes(lambda: benchmark.pedantic(whole, rounds=1), device, once=True)
        else:
            used = peak_bytes(memory_of or whole, device)
            seconds = min((_seconds(whole) for _ in range(warmups)), default=SHORT)
            benchmark.pedantic(whole, rounds=max(rounds, min(int(SHORT / seconds), MAX_ROUNDS)))
        benchmark.extra_info.update(
            work=work,
            who=who,
            flops=flops,
            bytes=bytes,
            floor_seconds=peaks.floor(flops, bytes),
            peak_bytes=used,
            peak_flops=peaks.flops,
            peak_bandwidth=peaks.bandwidth,
            **info,
        )
        if benchmark.stats is not None:  # benchmarks may be disabled
            with pytestconfig.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
                print(f"\n{work} | {who}: {1e6 * benchmark.stats.stats.median:.1f} us", flush=True)

    return run


@pytest.hookimpl(tryfirst=True)
def pytest_benchmark_generate_json(benchmarks: list[Any]) -> None:
    """Of an interrupted session the report has the candidates that were done."""
    benchmarks[:] = [one for one in benchmarks if one and "work" in one.extra_info]


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    machine_info["ella_cuda"] = describe(torch.device(config.getoption("--device")))


def pytest_benchmark_update_commit_info(config: pytest.Config, commit_info: dict[str, Any]) -> None:
    commit_info.update(told_commit())
