"""What a fit and its evidence are said to take of memory, beside what a process took."""

from __future__ import annotations

import gc
import itertools
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ella_cuda.laplace import KronLaplace, curvature, memory, recorded_batches
from ella_cuda.laplace.rules import Rule, rules_for
from python_tests.laplace.checks import Function

# A process for each, forked from one that has loaded what all need, but has no threads yet.
PROCESSES = """
import json, os, sys, torch, torch._dynamo
from pathlib import Path
from torch import nn
from ella_cuda.laplace import KronLaplace, memory
CASES = {
    "classes": lambda: (nn.Linear(16, 1000), (16,), torch.randint(1000, (64,))),
    "positions": lambda: (nn.Linear(16, 200), (50, 16), torch.randint(200, (64, 50)).index_fill_(1, torch.arange(2, 50), -100)),
    "wide": lambda: (nn.Sequential(nn.Linear(2000, 2000), nn.ReLU(), nn.Linear(2000, 10)), (2000,), torch.randint(10, (64,))),
    "images": lambda: (nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 128, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
                       nn.Flatten(), nn.Linear(128, 10)), (3, 32, 32), torch.randint(10, (64,))),
}
def status(key):
    return next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
def measure(name):
    torch.manual_seed(0)
    model, shape, labels = CASES[name]()
    x, y = torch.randn(64, *shape), labels
    KronLaplace(nn.Linear(16, 3)).fit([(torch.randn(4, 16), torch.tensor([0, 1, 2, 0]))]).log_marginal_likelihood()  # what is loaded once
    la = KronLaplace(model)
    said = la.memory_estimate(x)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    la.fit([(x, y)]).log_marginal_likelihood()
    print(json.dumps([name, said, status("VmHWM") - before]), flush=True)
for name in CASES:
    if not os.fork():
        measure(name)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, tuple[int, int]], str]:
    """What was said and taken, by name; the errors."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", PROCESSES]
    outside = tmp_path_factory.mktemp("outside")  # of the checkout, which would hide the installed package
    done = subprocess.run(command, cwd=outside, env=env, capture_output=True, text=True, timeout=300)
    return {name: sizes for name, *sizes in map(json.loads, done.stdout.splitlines())}, done.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("name", ["classes", "positions", "wide", "images"])
def test_the_estimate_is_about_what_a_process_takes(name, measured):
    """The sides of it: columns of many classes, the root of the Hessian at many positions, eigenvalues of large blocks, activations."""
    sizes, errors = measured
    assert name in sizes, errors
    said, taken = sizes[name]
    assert 0.5 < said / taken < 2, (said, taken)


def network():
    return nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(16, 3)).double()


def test_its_parts():
    model = network()
    la = KronLaplace(model, memory_budget=1 << 22).fit([(torch.randn(3, 2, 4, 4).double(), torch.randint(3, (3,)))])
    moments = {m for f in la.factors.values() for m in (f.input_moment, f.output_moment) if m is not None}
    factors = sum(m.total.numel() * 8 for m in moments)
    rules = rules_for(model, "shared")
    assert factors == sum(rule.bytes() for rule in rules)
    assert sorted(b for rule in rules for b in rule.blocks()) == sorted((*m.total.shape[:2],) for m in moments)
    assert la.memory_estimate() == factors + memory.ROUND * (1 << 22)


@pytest.mark.parametrize(("shape", "largest"), [((1,), "factors"), ((300,), "columns"), ((60, 5), "columns")])
def test_a_batch_adds_what_its_graph_keeps_and_its_columns(shape, largest):
    """Kept are a ReLU's signs alone: nothing of layers, nor of what is flattened. A column has the larger layer's gradients twice, and
    the square root of the output Hessian takes its part."""
    model = nn.Sequential(nn.Linear(3, 50), nn.ReLU(), nn.Flatten(-1), nn.Dropout(), nn.Linear(50, 3))
    la = KronLaplace(model, memory_budget=1 << 30)
    before = [p.requires_grad for p in model.parameters()], model.training
    rows, columns = torch.Size(shape).numel(), 3 * torch.Size(shape[1:]).numel()
    kept, gradients = rows * (50 + 3 * memory.ROOT), columns * rows * 2 * (3 + 50) * 4
    factors = sum(rule.bytes() for rule in rules_for(model, "shared"))
    needs = {"columns": memory.ROUND * gradients + kept, "factors": 3 * factors}
    assert max(needs, key=needs.get) == largest
    assert la.memory_estimate(torch.randn(*shape, 3)) == factors + needs[largest]
    assert ([p.requires_grad for p in model.parameters()], model.training) == before
    assert la.n_data == 0


@pytest.mark.parametrize("rows", [500, 3000])
def test_eigenvalues_of_large_blocks_are_what_takes_most(rows):
    """What is decomposed at once, thrice: the largest block, or as many of them as threads have."""
    la = KronLaplace(nn.Linear(rows, 2), memory_budget=1)
    block = 8 * rows**2
    assert la.memory_estimate(torch.randn(1, rows)) == pytest.approx(block + 3 * block, rel=1e-2)


@pytest.mark.parametrize(("layers", "shape"), [("linear", (100,)), ("convolutions", (3, 16, 16))])
def test_a_graph_of_a_batch_is_counted_beside_batches(layers, shape, monkeypatch):
    """A capture takes what a run of the batch's tape has at a time."""
    monkeypatch.setattr(recorded_batches, "PATIENCE", {"cpu": 2})
    monkeypatch.setattr(recorded_batches, "LARGE", 1 << 30)
    linear = [nn.Linear(100, 300), nn.ReLU(), nn.Linear(300, 10)]
    images = [
        nn.Conv2d(3, 16, 3),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    ]
    la = KronLaplace(nn.Sequential(*(linear if layers == "linear" else images)), memory_budget=8 << 20)
    x, peaks = torch.randn(64, *shape), []

    def loader():
        for _ in range(4):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as told:
                yield torch.randn_like(x), torch.arange(64) % 10
            events = [e for e in told.profiler.kineto_results.events() if e.name() == "[memory]"]
            held = itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
            peaks.append(max(held))

    la.fit(loader())
    assert set(la.recorded.values()) == {"recorded"}
    without = la.memory_estimate(x)
    monkeypatch.setattr(memory, "has_graphs", lambda device: True)
    graph = la.memory_estimate(x) - without
    assert 0.8 * peaks[-1] < graph - 4 * x.numel() < 4 * peaks[-1], (graph, peaks)


def test_it_knows_where_the_batch_is():
    layers = {"embed": nn.Linear(6, 4), "last": nn.Linear(4, 3)}
    sequence_first = Function(lambda m, x: m.last(torch.relu(m.embed(x.transpose(0, 1))).mean(0)), **layers)
    assert KronLaplace(sequence_first).memory_estimate(torch.randn(4, 9, 6)) > 0


# what a device has available --------------------------------------------------------------------------------------------

# Of nn.Linear(3, 4) in float64, whose bias shares the weight's output side; eigenvalues take both sides three times.
FACTORS = 8 * (3 * 3 + 4 * 4)
NEEDED = FACTORS + 3 * FACTORS
BATCH = torch.randn(5, 3), torch.randint(4, (5,))


def test_a_fit_without_room_is_refused_before_it_allocates(monkeypatch):
    la, asked, read = KronLaplace(nn.Linear(3, 4)), [], []
    allocate = Rule.allocate

    def allocated(rule: Rule, *args: object) -> None:
        asked.append(rule)
        allocate(rule, *args)

    def loader():
        read.append(True)
        yield BATCH

    monkeypatch.setattr(Rule, "allocate", allocated)
    monkeypatch.setattr(memory, "available_bytes", lambda device: NEEDED - 1)
    with pytest.raises(MemoryError) as error:
        la.fit(loader())
    for words in (f"take {NEEDED:,} bytes, and cpu has {NEEDED - 1:,} available", "summary()", "requires_grad_(False)"):
        assert words in str(error.value)
    assert not asked and not read
    monkeypatch.setattr(memory, "available_bytes", lambda device: NEEDED)
    assert la.fit(loader()).n_data == 5 and asked and read
    monkeypatch.setattr(memory, "available_bytes", lambda device: 0)
    assert la.fit([BATCH], override=False).n_data == 10  # which allocates nothing
    with pytest.raises(MemoryError):
        la.fit([BATCH])
    assert la.n_data == 10 and la.log_marginal_likelihood().isfinite()  # it is as it was


def test_where_nothing_tells_there_is_no_check(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: None)
    assert KronLaplace(nn.Linear(3, 4)).fit([BATCH]).n_data == 5


def test_the_largest_factors_are_named(monkeypatch):
    layers = nn.Linear(3, 50), nn.Tanh(), nn.Linear(50, 20), nn.Tanh(), nn.Linear(20, 7), nn.Linear(7, 4)
    monkeypatch.setattr(memory, "available_bytes", lambda device: 100)
    with pytest.raises(MemoryError) as error:
        KronLaplace(nn.Sequential(*layers)).fit([BATCH])
    sizes = [("2.weight", 50**2 + 20**2), ("0.weight", 3**2 + 50**2), ("4.weight", 20**2 + 7**2)]
    assert f"in bytes: {', '.join(f'{n!r} {8 * s:,}' for n, s in sizes)}. Freeze" in str(error.value)


MEMINFO = "MemTotal:       10 kB\nMemFree:        3 kB\nMemAvailable:   8 kB\nSwapTotal: 0 kB\n"


def group(limit: str, used: int, stat: str = "") -> dict[str, str]:
    return {"memory.max": limit, "memory.current": f"{used}\n", "memory.stat": stat}


@pytest.mark.parametrize(
    ("meminfo", "name", "groups", "available"),
    [
        ("", "", {}, None),
        (MEMINFO, "", {}, 8192),
        ("MemTotal: 10 kB\n", "", {}, None),
        (MEMINFO, "/", {}, 8192),
        (MEMINFO, "/", {"": group("5000\n", 1500)}, 3500),
        (MEMINFO, "/", {"": group("max\n", 1500)}, 8192),
        ("", "/a/b", {"a/b": group("5000\n", 1500)}, 3500),
        ("", "/a/b", {"a": group("5000\n", 1500), "a/b": group("2000\n", 500)}, 1500),
        ("", "/a/b", {"a": group("5000\n", 4500), "a/b": group("max\n", 500)}, 500),
        ("", "/a", {"": group("5000\n", 1500)}, 3500),  # a container, with the name from outside
        ("", "/", {"": group("5000\n", 6000)}, 0),
        ("", "/", {"": group("5000\n", 1500, "anon 900\nfile 9\ninactive_file 70\nactive_file 8\n")}, 3578),
    ],
)
def test_what_the_system_says(meminfo, name, groups, available, tmp_path):
    files = {"proc/meminfo": meminfo, "proc/self/cgroup": f"9:name=systemd:/x\n0::{name}\n" if name else ""}
    files |= {f"sys/fs/cgroup/{folder}/{file}": t for folder, of in groups.items() for file, t in of.items()}
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    assert memory._of_the_system(tmp_path) == available


def test_this_system():
    total = next(int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line)
    assert 0 < memory.available_bytes(torch.device("cpu")) < total * 1024
    assert memory.available_bytes(torch.device("meta")) is None


def test_a_gpu_has_what_the_allocator_keeps_too(monkeypatch):
    for name, answer in (("mem_get_info", (1000, 5000)), ("memory_reserved", 300), ("memory_allocated", 120)):
        monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)
    assert memory.available_bytes(torch.device("cuda", 0)) == 1000 + 300 - 120


# errors in the middle of a fit ------------------------------------------------------------------------------------------


class Greedy(nn.Module):
    """Fails where a batch has more images than it has room for."""

    def __init__(self, room: int, error: Exception | None) -> None:
        super().__init__()
        self.room, self.error, self.held = room, error, None

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.room:
            work = x + 1
            self.held = weakref.ref(work)
            if self.error is None:
                torch.empty(1 << 60)  # what the CPU's allocator says of it
            raise self.error
        return x


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried"), None], ids=["cuda", "cpu"])
def test_an_error_in_the_middle_says_what_the_batch_takes(error):
    model = nn.Sequential(Greedy(4, error), nn.Linear(3, 4))
    la, x = KronLaplace(model, memory_budget=1 << 10), torch.randn(9, 3)
    with pytest.raises(RuntimeError) as raised:
        la.fit([BATCH, (x, torch.randint(4, (9,)))])
    assert raised.type is (RuntimeError if error is None else torch.OutOfMemoryError)
    said = "DefaultCPUAllocator: can't allocate memory" if error is None else "CUDA out of memory. Tried"
    assert said in str(raised.value) and f"{FACTORS:,} of them for factors" in str(raised.value)
    assert "With batches of 5 " in str(raised.value) and "smaller memory_budget" in str(raised.value)
    assert f"take about {la.memory_estimate(BATCH[0]):,} bytes" in str(raised.value)
    gc.collect()
    assert model[0].held() is None  # what the pass held is free, though the error is still there
    assert la.n_data == 0


def test_where_not_even_one_image_has_room():
    la = KronLaplace(nn.Sequential(Greedy(0, torch.OutOfMemoryError("none left")), nn.Linear(3, 4)))
    with pytest.raises(torch.OutOfMemoryError, match=f"none left.*take {FACTORS:,} bytes for factors, and more than"):
        la.fit([BATCH])


def test_other_errors_are_left_alone():
    error = RuntimeError("something else")
    with pytest.raises(RuntimeError, match=r"^something else$") as raised:
        KronLaplace(nn.Sequential(Greedy(3, error), nn.Linear(3, 4))).fit([BATCH])
    assert raised.value is error


@pytest.mark.parametrize("images", [1, 7, 26, 27, 53, 60])
def test_images_go_through_the_network_in_parts(images, monkeypatch):
    """Of a batch whose layers' outputs take more than the budget; the factors are those of the whole batch."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)).double()
    x, y = torch.randn(images, 2, 6, 6).double(), torch.arange(images) % 3
    seen = []
    model.register_forward_hook(lambda module, args, out: seen.append(len(args[0])))
    monkeypatch.setattr(curvature, "FEW_IMAGES", 8)
    most = max(8, sum(rule.bytes() for rule in rules_for(model, "shared")) // 2 // (8 * (48 + 3)))
    parts = KronLaplace(model, memory_budget=1).fit([(x, y)])
    first = 2 + 2 * (images > 3)  # the probe's, and two parts whose outputs are compared with the first batch's
    at_once = seen[first:]
    assert sum(at_once) == images and max(at_once) <= most and max(at_once) - min(at_once) <= max(at_once) // 2
    whole = KronLaplace(model).fit([(x, y)])
    assert most == 26 and seen[len(at_once) + 2 * first :] == [images]
    for found, expected in zip(parts.factors.values(), whole.factors.values(), strict=True):
        torch.testing.assert_close(found.inputs, expected.inputs)
        torch.testing.assert_close(found.outputs, expected.outputs)
    torch.testing.assert_close(parts.log_marginal_likelihood(), whole.log_marginal_likelihood())


def test_the_estimate_is_of_a_part():
    """More images than go together add nothing."""
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3))
    la = KronLaplace(model, memory_budget=1 << 20)
    room = (1 << 20) // (4 * (3 * 1024 + 3))  # more than half of the factors
    x = torch.randn(3 * room, 2, 32, 32)
    assert la.memory_estimate(x) == la.memory_estimate(x[:room]) > la.memory_estimate(x[: room // 2])
