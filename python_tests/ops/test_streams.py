"""Every op, and its derivatives, as a user's own graphs and streams run them: on the memory it was recorded with, on the stream and the
device it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from ella_cuda import build_info, ops
from ella_cuda.recording import CudaGraphs
from ella_cuda.testing import kernel_cases
from python_tests.recorded import RecordedGraphs

CASES = [case for case in kernel_cases() if "many images" not in case[0]]
DTYPES = [torch.float32, torch.float64]

# Packing spectra, once a fit, copies from the host; the op on what was packed has a test of its own.
RECORDED = [case for case in CASES if not case[0].startswith("kron_evidence")]


def given(case, device: torch.device, dtype: torch.dtype, seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    return [t.to(device, dtype) if t.is_floating_point() else t.to(device) for t in case[1]()]


def results(case, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    return case[2](*(t.clone() for t in inputs))


def assert_all_close(found, expected) -> None:
    for a, b in zip(found, expected, strict=True):
        assert bool(b.isfinite().all()) and bool((b != 0).any())
        assert a.device == b.device
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.detach().abs().max()))


@pytest.fixture
def graphs(device: torch.device, monkeypatch: pytest.MonkeyPatch):
    """CUDA graphs; on the CPU a stand-in that refuses ops that read values."""
    monkeypatch.setattr(RecordedGraphs, "made", [], raising=False)
    return (CudaGraphs if device.type == "cuda" else RecordedGraphs)(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", RECORDED, ids=[case[0].replace(" ", "-") for case in RECORDED])
def test_a_recorded_op_computes_anew(graphs, device, dtype, case):
    places, kept = given(case, device, dtype, 0), []

    def work() -> None:
        kept[:] = results(case, places)

    graphs.warm_up(work)
    replay = graphs.record(work)
    for seed in (1, 2):
        inputs = given(case, device, dtype, seed)
        for place, value in zip(places, inputs, strict=True):
            place.copy_(value)
        replay()
        assert_all_close(kept, results(case, inputs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_recorded_evidence_step_follows_the_precisions(graphs, device, dtype):
    """Value and gradient, as an optimizer's recorded step would want them."""

    def made(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return [torch.randn(2, device=device, dtype=dtype).square() + 0.1, torch.randn(2, device=device, dtype=dtype)]

    spectra = [torch.rand(3, 17), torch.rand(1, 9), torch.rand(1, 300), torch.rand(1, 70)]
    l, m, n, o = (s.to(device, dtype) for s in spectra)
    packed, places, kept = ops.pack_spectra([(l, m), (n, o)]), made(0), []

    def step(norms: Tensor, log_precision: Tensor) -> list[Tensor]:
        leaf = log_precision.clone().requires_grad_()
        value = ops.kron_evidence(packed, norms, leaf)[0]
        return [value.detach(), *torch.autograd.grad(value.sum(), leaf)]

    def work() -> None:
        kept[:] = step(*places)

    graphs.warm_up(work)
    replay = graphs.record(work)
    for seed in (1, 2):
        inputs = made(seed)
        for place, value in zip(places, inputs, strict=True):
            place.copy_(value)
        replay()
        assert_all_close(kept, step(*inputs))


@contextmanager
def late_stream(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """A stream that has other work first: what runs on another one runs before it."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # cycles: 10 ms
        yield stream
    stream.synchronize()


@pytest.mark.parametrize(
    ("gpu", "dtype", "case"),
    [
        pytest.param(torch.device("cuda", i), dtype, case, id=f"cuda:{i}-{case[0]}-{dtype}".replace(" ", "-"))
        for i in range(torch.cuda.device_count())
        for dtype in DTYPES
        for case in CASES
    ],
)
def test_an_op_runs_on_its_tensors_device_and_the_stream_there(gpu, dtype, case):
    """Whatever device is the present one."""
    if not build_info()["cuda"]:
        pytest.skip("this machine has a GPU, but ella_cuda was built without CUDA")
    inputs, places = given(case, gpu, dtype, 1), given(case, gpu, dtype, 0)
    with torch.cuda.device(gpu):
        expected = results(case, inputs)
    torch.cuda.synchronize(gpu)
    with late_stream(gpu), torch.cuda.device(0):
        for place, value in zip(places, inputs, strict=True):
            place.copy_(value)
        found = results(case, places)
    assert_all_close(found, expected)
