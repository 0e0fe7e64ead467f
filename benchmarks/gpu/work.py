"""The processes of a call: ``python -m benchmarks.gpu.work KIND PART OF SKIP`` runs a part of a kind's items, after so many of them;
``ncu WORK`` runs one for Nsight Compute.

Before an item comes ``@begin ITEM`` on a line of its own, after it ``@row JSON``. After an item that failed, the process ends with a code
of its own, for nothing may work any more on the device: another takes the next item.
"""

from __future__ import annotations

import functools
import json
import math
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType

from benchmarks.gpu import device
from benchmarks.gpu.device import DEVICE, REHEARSAL, tf32
from benchmarks.gpu.run import BEGIN, LOST, ROW
from benchmarks.machine import Peaks

PRECISIONS = {"float32": torch.float32, "float64": torch.float64, "TF32": torch.float32}
# Of the largest result, with each number of a product rounded to TF32: twice the error of a product, 2^-10. Torch's own error is no
# measure, for cuBLAS takes TF32 at sizes of its choice.
TF32_ERROR = 2.0**-9
TF32_OPS = ("factored_linear", "kron_accumulate_", "conv_kron_accumulate_")
PATHS = ["automatic", "product=wgmma", "product=mma", "product=scalar", "split=1", "split=4", "split=8", "split=16"]
PATHS += ["tile=32", "tile=64", "tile=128"]
PATHS += ["product=mma,tile=128"]  # beside wgmma, which has no other tile
REFUSED = "ELLA_CUDA_PATH: "  # is in the message of an op that has no such path
MAX_SETS, CALLS = 400, 20  # of inputs in rotation; calls in a graph at the least


@functools.cache
def all_works() -> dict[str, Any]:
    from benchmarks.gpu.works import works

    return works(REHEARSAL)


def facts() -> list[str]:
    return ["machine", "tiny kernel", "copy", "float32", "tf32", "bfloat16", "float64"]


def fact(item: str) -> dict[str, Any]:
    """The machine, a small kernel's result, or a ceiling."""
    if item == "machine":
        from benchmarks.machine import describe

        found = describe(DEVICE) | {"python": sys.version.split()[0]}
        return found if REHEARSAL else found | {"properties": str(torch.cuda.get_device_properties(0))}
    if item == "tiny kernel":
        from ella_cuda import ops

        factor, rows = torch.zeros(2, 5, 5, device=DEVICE), torch.randn(7, 2, 5, device=DEVICE)
        ops.kron_accumulate_(factor, rows)
        expected = torch.einsum("ngi,ngj->gij", rows.double().cpu(), rows.double().cpu())
        torch.testing.assert_close(factor.double().cpu(), expected, rtol=1e-5, atol=1e-5)
        return {}
    if item == "copy":
        source = torch.randn(1 << (16 if REHEARSAL else 28), device=DEVICE)
        target = torch.empty_like(source)
        seconds = device.seconds(lambda: target.copy_(source))
        return {"rate": round(8 * source.numel() / seconds / 1e9, 1), "unit": "GB/s read plus written"}
    size = 64 if REHEARSAL else 4096 if item == "float64" else 8192
    dtype = {"bfloat16": torch.bfloat16, "float64": torch.float64}.get(item, torch.float32)
    a, b = (torch.randn(size, size, device=DEVICE).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    with tf32(item == "tf32"):
        seconds = device.seconds(lambda: torch.mm(a, b, out=out), 5)
    return {"rate": float(f"{2 * size**3 / seconds / 1e12:.4g}"), "unit": "TFLOP/s"}  # small ones are not zero


def cases() -> list[str]:
    """Every kernel in every precision; TF32 of ops that take it where torch allows it."""
    from ella_cuda.testing import kernel_cases

    names = [case[0] for case in kernel_cases()][:: 40 if REHEARSAL else 1]
    return [f"{name}, {p}" for name in names for p in PRECISIONS if p != "TF32" or name.startswith(TF32_OPS)]


def case(item: str) -> dict[str, Any]:
    """A kernel against its reference."""
    from ella_cuda.testing import check_kernel, kernel_cases

    name, _, precision = item.rpartition(", ")
    chosen = next(one for one in kernel_cases() if one[0] == name)
    with tf32(precision == "TF32"):
        (check,) = check_kernel(chosen, DEVICE, [PRECISIONS[precision]])
        device.synchronize()
    bound = max(check.bound, TF32_ERROR) if precision == "TF32" else check.bound
    row: dict[str, Any] = {"error": check.error, "allowed": bound}
    if check.failure:
        return row | {"status": "refused" if REFUSED in check.failure else "failed", "message": check.failure}
    return row if check.error <= bound else row | wrong(check.error, bound)


def wrong(error: float, bound: float) -> dict[str, Any]:
    return {"status": "wrong", "message": f"the error {error:.1e} is above {bound:.1e}"}


def timings() -> list[str]:
    """Ours and what takes no compilation, work by work; what torch compiles last."""
    from benchmarks.gpu.works import COMPILED

    pairs = [(name, who) for name, work in all_works().items() for who in work.candidates]
    if REHEARSAL:
        return ["|".join(pair) for pair in pairs if not pair[1].startswith(COMPILED)][::3]
    return ["|".join(pair) for pair in sorted(pairs, key=lambda pair: pair[1].startswith(COMPILED))]


def _each(args: tuple[Any, ...], function: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
    return tuple(function(a) if isinstance(a, Tensor) else a for a in args)


def _doubled(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return _each(args, lambda a: a.double() if a.is_floating_point() else a.clone())


def _tuple(found: Any) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else tuple(found)


@functools.lru_cache(maxsize=1)
def given(name: str) -> tuple[list[tuple[Any, ...]], tuple[Any, ...], tuple[Tensor, ...]]:
    """Sets of inputs that with their results take more than twice the cache, as far as so many do; one that no timed call changes, and its
    exact results."""
    torch.manual_seed(0)
    work = all_works()[name]
    count = min(MAX_SETS, 1 + int(2.2 * device.cache_bytes() / max(work.bytes, 1)))
    checked, *sets = (work.make(DEVICE) for _ in range(count + 1))
    with tf32(False):
        return sets, checked, tuple(t.detach() for t in _tuple(work.exact(*_doubled(_each(checked, Tensor.clone)))))


def rotation(work: Any, who: str, sets: list[Any]) -> tuple[list[Any], dict[str, Any]]:
    """The inputs of a graph's calls, every set as often as any other; and what a row says where they stay in the cache."""
    if who in work.long:
        sets = sets[:CALLS]
    row: dict[str, Any] = {}
    if len(sets) * work.bytes < 2 * device.cache_bytes():
        row["in_cache"] = f"{len(sets)} sets of {work.bytes / 1e6:.2g} MB, less than twice the cache"
    return sets * math.ceil(CALLS / len(sets)), row


def measure(name: str, who: str) -> dict[str, Any]:
    """Error and time of a candidate."""
    work = all_works()[name]
    function, allowed = work.candidates[who], who.endswith(", TF32")
    sets, checked, expected = given(name)
    with tf32(allowed):
        worst = 0.0
        for found, exact in zip(_tuple(function(*_each(checked, Tensor.clone))), expected, strict=True):
            error = float((found.detach().double() - exact).norm()) / (float(exact.norm()) or 1.0)
            worst = max(worst, error) if error == error else float("inf")
        inputs, row = rotation(work, who, sets)
        calls = [functools.partial(function, *args) for args in inputs]
        if work.eager:
            seconds = device.seconds(calls[0], 3)
        else:
            calls = calls[: 2 if REHEARSAL else None]
            seconds = device.seconds(device.record(calls)) / len(calls)
    row |= {"microseconds": round(1e6 * seconds, 2), "error": worst}
    most = 1e-2 if allowed else 1e-4 if who.endswith(", float32") or not work.wide else 1e-10
    if not worst <= most:
        row |= wrong(worst, most)
    rates = json.loads(os.environ.get("ELLA_CEILINGS", "{}"))
    if rates and work.flops + work.bytes:
        exact_rate = max(rates["float32"], rates["tf32"] / 3)
        rate = rates["bfloat16"] if work.reduced else rates["float64"] if work.wide else exact_rate
        rate = rates["tf32"] if allowed and not work.reduced and not work.wide else rate
        floor = Peaks(1e12 * rate, 1e9 * rates["copy"]).floor(work.flops, work.bytes)
        row |= {"floor": round(1e6 * floor, 2), "ratio": round(seconds / floor, 2)}
    return row


def timing(item: str) -> dict[str, Any]:
    name, who = item.split("|")
    return {"work": name, "who": who} | measure(name, who)


def sweeps() -> list[str]:
    chosen = [name for name in all_works() if name.startswith(("F-FC", "kron_accumulate_"))]
    return [f"{name}|{path}" for name in chosen for path in PATHS[: 2 if REHEARSAL else None]]


def sweep(item: str) -> dict[str, Any]:
    """Time of a path of launches."""
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


def profiles() -> list[str]:
    return ["training step", *([] if REHEARSAL else ["training step in a CUDA graph"]), "evidence update"]


def kernels(averages: Iterable[Any]) -> list[Any]:
    """A profile's events on the device: an op of the CPU has its kernels' time as well, as has a range that the user names."""
    on = DeviceType.CPU if REHEARSAL else DeviceType.CUDA
    return [event for event in averages if event.device_type == on and not event.is_user_annotation]


def profile(item: str) -> dict[str, Any]:
    """The kernels that take most; torch's table of them goes to the output."""
    from torch.nn.functional import cross_entropy
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    from ella_cuda.laplace import KronLaplace
    from ella_cuda.models import neyshabur
    from ella_cuda.recording import CudaGraphs

    count = 4 if REHEARSAL else 128
    torch.manual_seed(0)
    model = neyshabur("f_fc+conv", 3, 10, 1 if REHEARSAL else 10).to(DEVICE)
    x, y = torch.randn(count, 3, 32, 32, device=DEVICE), torch.arange(count, device=DEVICE) % 10
    graph = item.endswith("graph")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True, capturable=graph)

    def training_step() -> None:
        optimizer.zero_grad(set_to_none=True)
        cross_entropy(model(x), y).backward()
        optimizer.step()

    def evidence_update() -> None:
        log_precision = torch.zeros(len(list(model.parameters())), dtype=torch.float64, device=DEVICE).requires_grad_()
        la = KronLaplace(model).fit([(x, y)])
        for _ in range(1 if REHEARSAL else 20):
            torch.autograd.grad(la.log_marginal_likelihood(log_precision.exp()), log_precision)

    call = evidence_update if item == "evidence update" else training_step
    if graph:
        graphs = CudaGraphs(DEVICE)
        graphs.warm_up(call)
        call = graphs.record(call)
    call()
    seconds = device.seconds(call, 3)
    with profiler(activities=[ProfilerActivity.CPU, *([] if REHEARSAL else [ProfilerActivity.CUDA])]) as profiled:
        call()
        device.synchronize()
    order = "self_cpu_time_total" if REHEARSAL else "self_device_time_total"
    averages = profiled.key_averages()
    print(f"== {item}: {1e6 * seconds:.0f} us\n{averages.table(sort_by=order, row_limit=25, max_name_column_width=70)}")
    events = sorted(kernels(averages), key=lambda e: -getattr(e, order))
    top = [[e.key[:90], round(getattr(e, order), 1), e.count] for e in events[:25]]
    total = round(sum(getattr(e, order) for e in events), 1)
    return {"microseconds": round(1e6 * seconds, 1), "in_kernels": total, "kernels": top}


def ncu(name: str) -> None:
    """Run ours once for ncu, which looks on between the profiler's start and stop."""
    work = all_works()[next(iter(all_works())) if REHEARSAL else name]
    torch.manual_seed(0)
    args = work.make(DEVICE)
    for profiled in (False, not REHEARSAL):
        if profiled:
            torch.cuda.profiler.start()
        work.candidates["ella_cuda"](*args)
        device.synchronize()
        if profiled:
            torch.cuda.profiler.stop()


KINDS: dict[str, tuple[Callable[[], list[str]], Callable[[str], dict[str, Any]]]] = {
    "facts": (facts, fact),
    "case": (cases, case),
    "timing": (timings, timing),
    "sweep": (sweeps, sweep),
    "profile": (profiles, profile),
}


def run_items(kind: str, part: int, of: int, skip: int) -> int:
    """The exit code, after the items of a part from that number on."""
    items, function = KINDS[kind]
    for item in items()[part::of][skip:]:
        print(f"{BEGIN}{item}", flush=True)
        try:
            row = {"item": item, "status": "ok", **function(item)}
        except Exception as error:
            said = (str(error).splitlines() or [""])[0]
            row = {"item": item, "status": "failed", "message": f"{type(error).__name__}: {said}"[:600]}
        print(f"{ROW}{json.dumps(row)}", flush=True)
        if row["status"] == "failed":
            return LOST
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "ncu":
        sys.exit(ncu(sys.argv[2]))
    sys.exit(run_items(sys.argv[1], *map(int, sys.argv[2:])))
