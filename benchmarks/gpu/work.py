"""What the processes of a call run: ``python -m benchmarks.gpu.work [--rehearse] KIND ITEM ...``; ``hello`` says which there are.

Before an item comes ``@begin ITEM`` on a line of its own, after it ``@row JSON``. Where the device is lost, or a CUDA graph's capture
failed, the process ends with a code of its own, so that another takes the next item.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import DeviceType

from benchmarks.gpu.device import CaptureFailed, Device, capture, tf32
from benchmarks.gpu.run import BEGIN, LOST, ROW
from benchmarks.machine import Peaks

PRECISIONS = {"float32": torch.float32, "float64": torch.float64, "TF32": torch.float32}
# Of the largest result, with each number of a product rounded to TF32: twice the error of a product, 2^-10. Torch's own error is no
# measure, for cuBLAS takes TF32 at sizes of its choice.
TF32_ERROR = 2.0**-9
PATHS: list[dict[str, Any]] = [{}]
PATHS += [{"product": name} for name in ("wgmma", "mma", "scalar")]
PATHS += [{"split": count} for count in (1, 4, 8, 16)]
PATHS += [{"intermediate": name} for name in ("stored", "fused")]
PATHS += [{"tile": size} for size in (32, 64, 128)]
PATHS += [{"product": "mma", "tile": 128}]  # beside wgmma, which has no other tile
REFUSED = "ELLA_CUDA_PATH: "  # is in the message of an op that has no such path
MAX_SETS, CALLS = 400, 20  # of inputs in rotation; calls in a graph at the least
# What ncu looks at: a work, and how many of our kernels run before the one of interest.
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


@functools.cache
def device() -> Device:
    return Device(OPTIONS.rehearse)


@functools.cache
def all_works() -> dict[str, Any]:
    from benchmarks.gpu.works import works

    return works(OPTIONS.rehearse)


def peaks(work: Any, allowed: bool) -> Peaks | None:
    """The ceilings that the environment names, of a work's arithmetic."""
    rates = json.loads(os.environ.get("ELLA_CEILINGS", "{}"))
    if not rates:
        return None
    if work.reduced:
        rate = rates["bfloat16"]
    elif work.wide:
        rate = rates["float64"]
    else:
        rate = rates["tf32"] if allowed else max(rates["float32"], rates["tf32"] / 3)
    return Peaks(1e12 * rate, 1e9 * rates["copy"])


# facts


def facts(item: str) -> dict[str, Any]:
    name, on = device(), device().device
    if item == "machine":
        from benchmarks.machine import describe

        out = describe(on) | {"python": sys.version.split()[0]}
        if not name.rehearse:
            properties = torch.cuda.get_device_properties(0)
            out |= {
                "multiprocessors": properties.multi_processor_count,
                "L2_bytes": properties.L2_cache_size,
                "memory_bytes": properties.total_memory,
                "capability": ".".join(map(str, torch.cuda.get_device_capability())),
            }
        return out
    if item == "tiny kernel":
        from ella_cuda import ops

        factor, rows = torch.zeros(2, 5, 5, device=on), torch.randn(7, 2, 5, device=on)
        ops.kron_accumulate_(factor, rows)
        expected = torch.einsum("ngi,ngj->gij", rows.double().cpu(), rows.double().cpu())
        torch.testing.assert_close(factor.double().cpu(), expected, rtol=1e-5, atol=1e-5)
        return {}
    if item == "copy":
        source = torch.randn(1 << (16 if name.rehearse else 28), device=on)
        target = torch.empty_like(source)
        seconds = name.seconds(lambda: target.copy_(source))
        return {"rate": round(8 * source.numel() / seconds / 1e9, 1), "unit": "GB/s read plus written"}
    size = 64 if name.rehearse else 4096 if item == "float64" else 8192
    dtype = {"bfloat16": torch.bfloat16, "float64": torch.float64}.get(item, torch.float32)
    a, b = (torch.randn(size, size, device=on).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    with tf32(item == "tf32"):
        seconds = name.seconds(lambda: torch.mm(a, b, out=out), 5)
    return {"rate": float(f"{2 * size**3 / seconds / 1e12:.4g}"), "unit": "TFLOP/s"}  # small ones are not zero


def hello() -> dict[str, Any]:
    """What was loaded, where it fits the device, and the items of every kind."""
    from ella_cuda import build_info

    info = {key: str(value) for key, value in build_info().items()}
    if not OPTIONS.rehearse:
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        archs = [arch.removesuffix("+PTX").rstrip("af") for arch in info["cuda_archs"].split(";")]
        if capability not in archs:
            raise RuntimeError(f"built for {info['cuda_archs'] or 'the CPU alone'}, the device has {capability}")
    items: dict[str, Any] = {}
    for kind, (those, _) in KINDS.items():
        try:
            items[kind] = those()
        except Exception as error:  # its own steps say so
            items[kind] = f"{type(error).__name__}: {error}"
    items["plugins"] = [name for name in ("xdist", "pytest_timeout") if importlib.util.find_spec(name)]
    return info | {"torch": torch.__version__, "python": sys.version.split()[0], "items": items}


# kernels against their references


def cases() -> list[str]:
    from ella_cuda.testing import kernel_cases

    names = [case[0] for case in kernel_cases()]
    return names[::40] if OPTIONS.rehearse else names


def case(item: str) -> dict[str, Any]:
    from ella_cuda.testing import check_kernel, kernel_cases

    name, _, precision = item.rpartition(", ")
    chosen = next(one for one in kernel_cases() if one[0] == name)
    allows = precision == "TF32"
    with tf32(allows):
        (check,) = check_kernel(chosen, device().device, [PRECISIONS[precision]])
        device().synchronize()
    bound = max(check.bound, TF32_ERROR) if allows else check.bound
    row: dict[str, Any] = {"error": check.error, "allowed": bound}
    if check.error <= bound:
        return row
    if check.failure:
        return row | {"status": "refused" if REFUSED in check.failure else "failed", "message": check.failure}
    return row | {"status": "wrong", "message": f"the error {check.error:.1e} is above {bound:.1e}"}


# times


def timing_items() -> list[str]:
    """Ours and what takes no compilation, work by work; what torch compiles last."""
    from benchmarks.gpu.works import COMPILED

    pairs = [(name, who) for name, work in all_works().items() for who in work.candidates]
    if OPTIONS.rehearse:
        return ["|".join(pair) for pair in pairs if not pair[1].startswith(COMPILED)][::3]
    return ["|".join(pair) for pair in sorted(pairs, key=lambda pair: pair[1].startswith(COMPILED))]


def _doubled(args: tuple[Any, ...]) -> tuple[Any, ...]:
    floating = lambda a: isinstance(a, torch.Tensor) and a.is_floating_point()  # noqa: E731
    return tuple(a.double() if floating(a) else a for a in args)


def _cloned(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)


def _tuple(found: Any) -> tuple[torch.Tensor, ...]:
    return (found,) if isinstance(found, torch.Tensor) else tuple(found)


@functools.lru_cache(maxsize=1)
def given(name: str) -> tuple[list[tuple[Any, ...]], tuple[Any, ...], tuple[torch.Tensor, ...]]:
    """Sets of inputs that with their results take more than twice the cache, as far as so many do; one that no timed call changes, and its
    exact results."""
    torch.manual_seed(0)
    work = all_works()[name]
    count = min(MAX_SETS, 1 + int(2.2 * device().cache_bytes / max(work.bytes, 1)))
    checked, *sets = (work.make(device().device) for _ in range(count + 1))
    with tf32(False):
        return sets, checked, tuple(t.detach() for t in _tuple(work.exact(*_doubled(_cloned(checked)))))


def rotation(work: Any, who: str, sets: list[Any]) -> tuple[list[Any], dict[str, Any]]:
    """The inputs of a graph's calls, every set as often as any other; and what a row says where they stay in the cache."""
    if who in work.long:
        sets = sets[:CALLS]
    row: dict[str, Any] = {}
    if len(sets) * work.bytes < 2 * device().cache_bytes:
        row["in_cache"] = f"{len(sets)} sets of {work.bytes / 1e6:.2g} MB, less than twice the cache"
    return sets * math.ceil(CALLS / len(sets)), row


def measure(name: str, who: str) -> dict[str, Any]:
    """Error and time of a candidate."""
    work = all_works()[name]
    function, allowed = work.candidates[who], who.endswith(", TF32")
    sets, checked, expected = given(name)
    with tf32(allowed):
        worst = 0.0
        for found, exact in zip(_tuple(function(*_cloned(checked))), expected, strict=True):
            scale = float(exact.norm()) or 1.0
            error = float((found.detach().double() - exact).norm()) / scale
            worst = max(worst, error) if error == error else float("inf")
        inputs, cached = rotation(work, who, sets)
        calls = [functools.partial(function, *args) for args in inputs]
        if OPTIONS.rehearse:
            calls = calls[:2]
        seconds = device().seconds(device().record(calls)) / len(calls)
    row: dict[str, Any] = {"microseconds": round(1e6 * seconds, 2), "error": worst, **cached}
    most = 1e-10 if work.wide else 1e-2 if allowed else 1e-4
    if not worst <= most:
        row |= {"status": "wrong", "message": f"the relative error {worst:.1e} is above {most:.0e}"}
    ceilings = peaks(work, allowed)
    if ceilings is not None:
        floor = ceilings.floor(work.flops, work.bytes)
        row |= {"floor": round(1e6 * floor, 2), "ratio": round(seconds / floor, 2)}
    return row


def timing(item: str) -> dict[str, Any]:
    name, who = item.split("|")
    return {"work": name, "who": who} | measure(name, who)


def sweep_items() -> list[str]:
    chosen = [name for name in all_works() if name.startswith(("F-FC", "kron_accumulate_"))]
    paths = PATHS[:2] if OPTIONS.rehearse else PATHS
    text = [",".join(f"{key}={value}" for key, value in path.items()) or "automatic" for path in paths]
    return [f"{name}|{path}" for name in chosen for path in text]


def sweep(item: str) -> dict[str, Any]:
    from ella_cuda.cuda_path import cuda_path

    name, path = item.split("|")
    choices = {} if path == "automatic" else dict(one.split("=") for one in path.split(","))
    row: dict[str, Any] = {"work": name, "path": path}
    try:
        with cuda_path(**choices):
            return row | measure(name, "ella_cuda")
    except RuntimeError as error:
        if REFUSED not in str(error):
            raise
        return row | {"status": "refused", "message": str(error).splitlines()[0][:200]}


def eigenvalue_items() -> list[str]:
    sizes = ((2, 8),) if OPTIONS.rehearse else ((8, 1024), (2, 720), (64, 256), (512, 64))
    who = ("ella_cuda", "torch", "torch, float32")
    return [f"{count} blocks of {d}|{one}" for count, d in sizes for one in who]


def eigenvalues(item: str) -> dict[str, Any]:
    from ella_cuda.ops.symmetric_eigenvalues import symmetric_eigenvalues

    size, who = item.split("|")
    count, d = map(int, size.split(" blocks of "))
    torch.manual_seed(0)
    root = torch.randn(count, d, d, device=device().device) / d**0.5
    blocks = root @ root.mT
    candidates: dict[str, Callable[[], torch.Tensor]] = {
        "ella_cuda": lambda: symmetric_eigenvalues([blocks])[0],
        "torch": lambda: torch.linalg.eigvalsh(blocks.double()),
        "torch, float32": lambda: torch.linalg.eigvalsh(blocks),
    }
    call = candidates[who]
    values, exact = call().double(), blocks.double()
    # Sums of the eigenvalues and of their squares are the matrix's own.
    sums = values.sum(1) - exact.diagonal(dim1=1, dim2=2).sum(1), values.square().sum(1) - exact.square().sum((1, 2))
    error = max(float(s.abs().max()) for s in sums) / d
    row: dict[str, Any] = {"work": f"eigenvalues, {size}", "who": who, "error": error}
    row["microseconds"] = round(1e6 * device().seconds(call, 3), 1)
    most = 1e-3 if who.endswith("float32") else 1e-9
    return row if error <= most else row | {"status": "wrong", "message": f"the error {error:.1e} is above {most:.0e}"}


# profiles


def profile_items() -> list[str]:
    return ["training step", *([] if OPTIONS.rehearse else ["training step in a CUDA graph"]), "evidence update"]


def kernels(averages: Iterable[Any]) -> list[Any]:
    """A profile's events on the device: an op of the CPU has its kernels' time as well, as has a range that the user names."""
    on = DeviceType.CPU if OPTIONS.rehearse else DeviceType.CUDA
    return [event for event in averages if event.device_type == on and not event.is_user_annotation]


def profile(item: str) -> dict[str, Any]:
    """A table of the kernels that take most."""
    from torch.nn.functional import cross_entropy
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    from ella_cuda.laplace import KronLaplace
    from ella_cuda.models import neyshabur
    from ella_cuda.training.graph import CudaGraphs

    on, count = device().device, 4 if OPTIONS.rehearse else 128
    torch.manual_seed(0)
    model = neyshabur("f_fc+conv", 3, 10, 1 if OPTIONS.rehearse else 10).to(on)
    if item == "evidence update":
        x, y = torch.randn(count, 3, 32, 32, device=on), torch.arange(count, device=on) % 10
        log_precision = torch.zeros(len(list(model.parameters())), dtype=torch.float64, device=on, requires_grad=True)

        def call() -> None:
            la = KronLaplace(model).fit([(x, y)])
            for _ in range(1 if OPTIONS.rehearse else 20):
                torch.autograd.grad(la.log_marginal_likelihood(log_precision.exp()), log_precision)
    else:
        graph = item.endswith("graph")
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True, capturable=graph)
        x, y = torch.randn(count, 3, 32, 32, device=on), torch.randint(10, (count,), device=on)

        def call() -> None:
            optimizer.zero_grad(set_to_none=True)
            cross_entropy(model(x), y).backward()
            optimizer.step()

        if graph:
            graphs = CudaGraphs(on)
            graphs.warm_up(call)
            with capture():
                call = graphs.record(call)
    call()
    seconds = device().seconds(call, 3)
    kinds = [ProfilerActivity.CPU, *([] if OPTIONS.rehearse else [ProfilerActivity.CUDA])]
    with profiler(activities=kinds) as profiled:
        call()
        device().synchronize()
    order = "self_cpu_time_total" if OPTIONS.rehearse else "self_device_time_total"
    averages = profiled.key_averages()
    print(f"== {item}: {1e6 * seconds:.0f} us\n{averages.table(sort_by=order, row_limit=25, max_name_column_width=70)}")
    events = sorted(kernels(averages), key=lambda e: -getattr(e, order))
    top = [[e.key[:90], round(getattr(e, order), 1), e.count] for e in events[:25]]
    total = round(sum(getattr(e, order) for e in events), 1)
    return {"microseconds": round(1e6 * seconds, 1), "in_kernels": total, "kernels": top}


def ncu_items() -> list[str]:
    if OPTIONS.rehearse:
        return [f"{name}|0" for name in list(all_works())[:1]]
    return [f"{name}|{skip}" for name, skip in PROFILED]


def ncu(item: str) -> dict[str, Any]:
    """Run ours once for ncu, which looks on between the profiler's start and stop."""
    work = all_works()[item.split("|")[0]]
    torch.manual_seed(0)
    args = work.make(device().device)
    work.candidates["ella_cuda"](*args)
    device().synchronize()
    if not OPTIONS.rehearse:
        torch.cuda.profiler.start()
    work.candidates["ella_cuda"](*args)
    device().synchronize()
    if not OPTIONS.rehearse:
        torch.cuda.profiler.stop()
    return {}


CEILINGS = ["copy", "float32", "tf32", "bfloat16", "float64"]
KINDS: dict[str, tuple[Callable[[], list[str]], Callable[[str], dict[str, Any]]]] = {
    "facts": (lambda: ["machine", "tiny kernel", *CEILINGS], facts),
    "case": (cases, case),
    "timing": (timing_items, timing),
    "sweep": (sweep_items, sweep),
    "eigenvalues": (eigenvalue_items, eigenvalues),
    "profile": (profile_items, profile),
    "ncu": (ncu_items, ncu),
}
OPTIONS = argparse.Namespace(rehearse=False)


def lost() -> bool:
    """Whether nothing works any more on the device."""
    try:
        device().synchronize()
    except RuntimeError:
        return True
    return False


def say(marker: str, text: str) -> None:
    print(f"{marker}{text}", flush=True)


def run_items(kind: str, items: list[str]) -> int:
    for item in items:
        say(BEGIN, item)
        captured = True
        try:
            row = {"item": item, "status": "ok", **KINDS[kind][1](item)}
        except Exception as error:
            said = (str(error).splitlines() or [""])[0]
            row = {"item": item, "status": "failed", "message": f"{type(error).__name__}: {said}"[:600]}
            captured = not isinstance(error, CaptureFailed)
        say(ROW, json.dumps(row))
        if not captured or (row["status"] in ("failed", "wrong") and lost()):
            return LOST
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, at small sizes")
    parser.add_argument("kind", choices=["hello", *KINDS])
    parser.add_argument("items", nargs="*")
    args = parser.parse_args()
    OPTIONS.rehearse = args.rehearse
    if args.kind == "hello":
        say(ROW, json.dumps(hello()))
        return 0
    return run_items(args.kind, args.items)


if __name__ == "__main__":
    sys.exit(main())
