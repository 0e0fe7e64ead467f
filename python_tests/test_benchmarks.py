"""What the benchmarks compute besides times: counted operations, the dense formulation, extrapolations, sums, exponents."""

from __future__ import annotations

import ctypes
import json
import math
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ella_cuda import ops
from ella_cuda.laplace import KronLaplace
from ella_cuda.nn import CircularConv2d, FactoredLinear2d, RelaxedEquivariance
from ella_cuda.ops.circular_conv2d import circular_conv2d_torch
from ella_cuda.ops.factored_linear import factored_linear_torch
from python_tests.benchmark_files import FOLDER, load

compare, counting, dense = load("compare"), load("counting"), load("dense_formulation")
machine, schedules = load("machine"), load("evidence_schedules")


def network() -> nn.Sequential:
    blocks = [
        RelaxedEquivariance({"f_fc": FactoredLinear2d(c, d, 6, 6), "conv": CircularConv2d(c, d)})
        for c, d in ((2, 3), (3, 5))
    ]
    return nn.Sequential(blocks[0], nn.ReLU(), blocks[1], nn.Flatten(), nn.Linear(5 * 36, 4)).double()


def test_counted_passes_are_those_that_torch_counts(monkeypatch):
    monkeypatch.setattr(ops, "factored_linear", factored_linear_torch)
    monkeypatch.setattr(ops, "circular_conv2d", circular_conv2d_torch)
    model, x = network(), torch.randn(3, 2, 6, 6, dtype=torch.float64)
    work = counting.count(model, x)
    with FlopCounterMode(display=False) as forward:
        out = model(x)
    weights = [p for p in model.parameters() if p.dim() > 1 and p.shape != (6, 6)]
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(out.sum(), weights)
    assert work.forward == forward.get_total_flops()
    assert work.activations + work.weights == backward.get_total_flops()
    assert work.step == forward.get_total_flops() + backward.get_total_flops()


ENDED = """
import os

import pytest

from benchmarks.machine import Peaks

@pytest.fixture(scope="session")
def peaks():
    return Peaks(1e9, 1e9)

def test_sums(time):
    time(lambda: sum(range(9)), work="sums", who="python", flops=9, bytes=8)

def test_that_ends_it():
    os._exit(5)
"""


def test_a_median_is_printed_before_the_session_ends(tmp_path):
    file = tmp_path / "bench_sums.py"
    file.write_text(ENDED)
    # Without the checkout's package, which need not be built.
    (tmp_path / "benchmarks").symlink_to(FOLDER, target_is_directory=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.conftest", "-p", "no:cacheprovider"]
    command += ["--rootdir", str(tmp_path), str(file)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 5, done.stdout + done.stderr
    assert "\nsums | python: " in done.stdout


def test_counted_factors_are_the_upper_triangles_of_all_rows():
    model, x = network(), torch.randn(3, 2, 6, 6, dtype=torch.float64)
    la = KronLaplace(model).fit([(x, torch.tensor([0, 1, 3]))])
    inputs = outputs = 0
    for name, factor in la.factors.items():
        if "weight" not in name:
            continue
        shape = factor.shape
        outputs += shape.outputs * (shape.outputs + 1) * factor.output_moment.rows
        if "conv" in name:  # 25 lags for each pair of channels, half of them transposes of the others
            channels = shape.inputs // 9
            inputs += 25 * channels**2 * factor.input_moment.rows
        else:
            inputs += shape.groups * shape.inputs * (shape.inputs + 1) * factor.input_moment.rows
    work = counting.count(model, x)
    assert work.inputs == inputs
    assert 3 * work.outputs == outputs  # K - 1 columns
    assert work.fit(3) == work.forward + inputs + outputs + 3 * work.activations


def test_positions_of_a_linear_layer_are_counted():
    model, x = nn.Sequential(nn.Identity(), nn.Linear(4, 3)), torch.randn(2, 5, 4)
    work = counting.count(model, x)
    with FlopCounterMode(display=False) as forward:
        model(x)
    assert work.forward == forward.get_total_flops() == work.shared
    assert (work.inputs, work.outputs, work.alone) == (10 * 4 * 5, 10 * 3 * 4, 0)


def test_a_kernel_folds_on_a_small_image():
    conv, x = CircularConv2d(1, 1, bias=False), torch.randn(1, 1, 2, 2)
    assert counting.count(nn.Sequential(nn.Identity(), conv), x).forward == 2 * 4 * 4


def test_dense_formulation_is_the_same_layer_and_the_same_evidence():
    shapes = ((4, 2, 9), (3, 2, 9), (3, 2, 5), (3,), (5,))
    arguments = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    expected, found = factored_linear_torch(*arguments), dense.factored_linear_dense(*arguments)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(*(torch.autograd.grad(y.sin().sum(), arguments) for y in (found, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)

    model = network()
    x, y = torch.randn(7, 2, 6, 6, dtype=torch.float64), torch.tensor([0, 1, 3, 2, 2, 0, 1])
    batches = [(x[:4], y[:4]), (x[4:], y[4:])]
    blocks, matrices = (KronLaplace(m).fit(batches) for m in (model, dense.with_dense_factors(model)))
    for name in ("0.f_fc.weight_in", "0.f_fc.weight_out", "2.f_fc.weight_in", "2.f_fc.weight_out"):
        assert blocks.factors[name].inputs.shape[0] > 1
        torch.testing.assert_close(matrices.factors[name].inputs[0], torch.block_diag(*blocks.factors[name].inputs))
    torch.testing.assert_close(matrices.log_marginal_likelihood(0.3), blocks.log_marginal_likelihood(0.3))


def test_dense_accumulation_is_cubic_in_the_groups():
    counted = []
    for groups in (3, 6):
        with FlopCounterMode(display=False) as mode:
            dense.kron_accumulate_dense_(torch.zeros(groups * 4, groups * 4), torch.randn(5, groups, 4))
        counted.append(mode.get_total_flops())
    assert counted[1] == 8 * counted[0] > 0


def test_exponent():
    sizes = [1, 3, 10, 40]
    assert compare.exponent(sizes, [7 * s**1.5 for s in sizes]) == pytest.approx(1.5)
    assert compare.exponent(sizes, [2.0] * 4) == pytest.approx(0, abs=1e-12)
    assert compare.exponent([1, 2, 4], [1, 2, 1]) == pytest.approx(0, abs=1e-12)  # the middle of three does not tilt
    assert math.isnan(compare.exponent([5, 5], [1, 2])) and math.isnan(compare.exponent([1, 2], [0, 1]))


def entry(work: str, who: str, seconds: float, megabytes: float | None, **info) -> dict:
    peak = None if megabytes is None else megabytes * 1e6
    return {
        "stats": {"median": seconds},
        "extra_info": {"work": work, "who": who, "floor_seconds": 0.5, "peak_bytes": peak} | info,
    }


def table(*entries: dict) -> list[str]:
    return compare.lines({"benchmarks": [*entries, {"stats": {"median": 1.0}, "extra_info": {}}]})[1:]


def test_table_extrapolates_and_says_so():
    scale = {"seconds": 27, "bytes": 9, "note": "run at 1 of 3 groups"}
    ours, theirs = table(entry("w", "dense", 2, 3, extrapolation=scale), entry("w", compare.OURS, 4, 5))
    assert ours.split() == ["w", "ella_cuda", "1.00", "8.00", "5.0"]
    assert theirs.split(maxsplit=5) == ["w", "dense", "13.50", "108.00", "27.0", "extrapolated, run at 1 of 3 groups"]


def test_table_adds_parts_up_when_all_are_there():
    whole = entry("w", compare.OURS, 2, 9)
    scale = {"seconds": 2, "bytes": 4, "note": "run at half"}
    part = {"part_of": "w", "parts": 2, "part_name": "sides"}
    parts = [
        entry("a", "dense", 10, 100, kept_bytes=60e6, **part),
        entry("b", "dense", 1, 10, kept_bytes=25e6, extrapolation=scale, **part),
    ]
    own = entry("a", compare.OURS, 1, 1, kept_bytes=1e6, **part)
    found = [line for line in table(whole, own, *parts) if line.startswith("w ")]
    # 10 + 2 * 1 seconds; 60 + 25 MB stay, and the first part needs 40 more, the second 15
    assert found[1].split(maxsplit=5) == ["w", "dense", "6.00", "24.00", "125.0", "sides, sum of 2, 1 extrapolated"]
    assert len([line for line in table(whole, parts[0]) if line.startswith("w ")]) == 1
    unknown = [{**p, "extra_info": {**p["extra_info"], "peak_bytes": None}} for p in parts]
    assert [line for line in table(whole, *unknown) if line.startswith("w ")][1].split()[4] == "-"


def test_table_sums_over_stages():
    """The best of the others may be another one at every stage; a stage without others, and other works, do not count."""
    first = (
        entry("conv, stage 1", compare.OURS, 2, 1),
        entry("conv, stage 1", "a", 3, 1),
        entry("conv, stage 1", "b", 9, 1),
    )
    second = (
        entry("conv, stage 2", compare.OURS, 1, 1),
        entry("conv, stage 2", "a", 8, 1),
        entry("conv, stage 2", "b", 6, 1),
    )
    lone, other = entry("conv, stage 3", compare.OURS, 5, 1), entry("conv", "a", 5, 1)
    floor = first[0]["extra_info"]["floor_seconds"]
    assert table(*first, *second, lone, other)[-1] == (
        "conv, sum over 2 stages: the best of the others 3.00 x ours (1.50 to 6.00 a stage), ours "
        f"{3 / (2 * floor):.2f} x floor"
    )
    assert "sum over" not in table(lone, other)[-1]


def test_table_prints_growth():
    def series(size, seconds, megabytes):
        info = {"of": "fit", "in": "images", "size": size}
        return entry(f"fit, {size}", compare.OURS, seconds, megabytes, series=info)

    last = table(series(40, 8, 3), series(10, 2, 2), series(20, 4, 2))[-1]
    assert last == "fit, ella_cuda, from 10 to 40 images: time grows with exponent 1.00, peak memory 0.29, 1.50 times"
    assert "time grows" not in table(series(10, 2, 2))[-1]


HELD_HEAP = """
import ctypes, sys, torch
from benchmarks.memory import peak_bytes
libc = ctypes.CDLL(None)
libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
libc.mmap.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t] * 5]
mmap_threshold, mmap_max, private_anonymous_there = -3, -4, 0x100022
libc.mallopt(mmap_threshold, 32 << 20)
if sys.argv[1:] == ["none on its own"]:
    libc.mallopt(mmap_max, 0)
libc.mmap(libc.sbrk(0) + 4095 & ~4095, 4096, 0, private_anonymous_there, -1, 0)
for _ in range(20):
    torch.ones(500_000)
print(peak_bytes(lambda: torch.ones(2_500_000), torch.device("cpu")))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="without glibc free blocks are not held")
@pytest.mark.parametrize("how", ["", "none on its own"])
def test_peak_memory_counts_blocks_in_a_heap_that_is_not_given_back(how):
    """A page beyond the heap's end lets glibc have a second piece, of which it gives nothing back. Also where no block was mapped on its
    own, as in what trains."""
    call = [sys.executable, "-c", HELD_HEAP, how]
    found = subprocess.run(call, capture_output=True, text=True, check=True, cwd=FOLDER.parent).stdout.strip()
    if found == "None":
        pytest.skip("the system does not tell a peak")
    assert 9e6 < int(found) < 12e6  # the system counts pages to some dozens a core


def test_a_copy_without_history_is_told_its_commit(monkeypatch):
    monkeypatch.delenv("COMMIT", raising=False)
    assert machine.told_commit() == {}
    monkeypatch.setenv("COMMIT", "0123456")
    assert machine.told_commit() == {"id": "0123456", "dirty": False}


def test_a_processor_is_told_from_others_of_its_maker(tmp_path):
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: X\n\ncpu family\t: 6\n"
    )
    assert machine.processor(tmp_path / "cpuinfo").endswith(" (family 25 model 17)")
    assert "family" not in machine.processor(tmp_path / "none")


def test_least_of_several_runs():
    def run(commit: str, *seconds: float, peak: float | None = 1, floor: float = 1) -> dict:
        entries = [
            entry("w", who, s, peak, floor_seconds=floor) for who, s in zip(("ella_cuda", "bmm"), seconds, strict=True)
        ]
        named = [{**e, "fullname": e["extra_info"]["who"]} for e in entries]
        other = {"fullname": "no work", "stats": {"median": 1.0}, "extra_info": {}}
        return {"machine_info": {"ella_cuda": {}}, "commit_info": {"id": commit}, "benchmarks": [*named, other]}

    runs = [run("a", 4, 8, floor=2), run("a", 5, 6, peak=3), run("a", 2, 9, floor=3)]
    ours, theirs = compare.lines(compare.least(runs))[1:]
    assert ours.split() == ["w", "ella_cuda", "1.00", "2.00", "3.0"]
    assert theirs.split() == ["w", "bmm", "3.00", "6.00", "3.0"]
    assert compare.lines(compare.least([runs[0], run("a", 1, 1, peak=None)]))[1].split()[-1] == "-"
    for other in (run("b", 4, 8), {**runs[0], "benchmarks": runs[0]["benchmarks"][1:]}):
        with pytest.raises(ValueError, match="same benchmarks on the same machine and commit"):
            compare.least([runs[0], other])


INTERRUPTED = """
import functools
import os
import signal

from benchmarks import machine

machine._best_seconds = functools.partial(machine._best_seconds, rounds=-1)  # peaks by one call each
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it


def test_whole(time):
    time(lambda: None, work="w", who="whole", flops=1, bytes=1)


def test_not_by_time(benchmark):
    benchmark.pedantic(lambda: None, rounds=1)


def test_cut_short(time):
    time(lambda: os.kill(os.getpid(), signal.SIGINT), work="w", who="cut short", flops=1, bytes=1, once=True)
"""


def test_an_interrupted_session_reports_what_was_done(tmp_path):
    """As ``benchmarks.gpu`` interrupts a step whose time is over."""
    shutil.copytree(FOLDER, tmp_path / "benchmarks", ignore=shutil.ignore_patterns("bench_*", "results"))
    (tmp_path / "benchmarks" / "bench_interrupted.py").write_text(INTERRUPTED)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "benchmarks/bench_interrupted.py"]
    command += ["--rootdir", ".", "--benchmark-json", "report.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert [one["extra_info"]["who"] for one in report["benchmarks"]] == ["whole"]


def test_errors_of_large_outputs(tmp_path, monkeypatch):
    """Columns and errors of a few classes: all columns have none, fewer have more."""
    module, file = load("large_outputs"), tmp_path / "new" / "table.txt"
    arguments = ["--classes", "20", "--images", "60", "--out", str(file)]
    monkeypatch.setattr(sys, "argv", ["large_outputs", *arguments])
    module.main()
    head, names, *lines = file.read_text().splitlines()
    assert head == "20 classes, 60 data points" and names.split()[:3] == ["state", "setting", "columns"]
    rows = [line.replace(" %", "").split() for line in lines]
    assert [row[0] for row in rows] == ["initial"] * 5 + ["trained"] * 5
    for state in (rows[:5], rows[5:]):
        columns, log_q, log_det = ([float(row[i]) for row in state] for i in (2, 3, 4))
        assert columns[0] == 19 and columns[:4] == sorted(columns[:4], reverse=True) and columns[4] == 1
        assert log_q[0] == log_det[0] == 0 and log_det[:4] == sorted(log_det[:4]) and log_det[3] > 0
        assert log_q[4] > 0 and log_det[4] > 0


@pytest.mark.parametrize("data", ["digits", "fashion-mnist"])
def test_a_schedule_has_as_many_evidence_steps_as_it_says(data):
    found = list(schedules.schedules(schedules.EPOCHS[data]))
    assert len({schedule.name for schedule in found}) == len(found) > 30
    for schedule in found:
        for config in schedules.configs_of(schedule, {"data": data, "seed": [0, 1], "width": 2}, "cpu"):
            epochs = [e for e in range(1, config.epochs + 1) if e % config.frequency == 0 or e == config.epochs]
            steps = [e for e in epochs if e > config.burn_in] if config.objective == "evidence" else []
            assert schedule.passes == config.epochs + len(steps) and config.width == 2
            assert config.objective == ("evidence" if steps else "map") and config.holdout == schedules.HELD_OUT[data]
    (today,) = (s for s in found if s.name == f"adam-{schedules.EPOCHS[data]}")
    assert today.passes == schedules.EPOCHS[data] + 3


def test_means_over_seeds_have_their_standard_error():
    rows = [{"nll": 1.0}, {"nll": 2.0}, {"nll": 3.0}, {"nll": None}]
    assert schedules.mean(rows, "nll") == (2.0, pytest.approx(1 / math.sqrt(3)))
    assert schedules.mean(rows[3:], "nll") is None
