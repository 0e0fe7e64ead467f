"""Self-check of the kernels: each against its plain-torch reference, on the device it will run on."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ella_cuda import ops
from ella_cuda.ops._cases import KernelCase, Tensors

PRECISIONS = (torch.float32, torch.float64)
# In float64 the reference is no better than what is checked: allow rounding of sums of this many terms.
FLOAT64_TERMS = 1000


@dataclass(frozen=True)
class KernelCheck:
    """One kernel in one precision.

    Attributes:
        name: of the op, with ``backward`` for its derivative.
        dtype: the precision checked.
        error: largest error against the reference in float64 on the CPU, over the largest reference value; nan if anything
            is nan.
        bound: what is allowed: twice the reference's own error in this precision, and some rounding units.
        ok: whether the error is within the bound.
        failure: the exception's text, where the kernel raised.
    """

    name: str
    dtype: torch.dtype
    error: float
    bound: float
    ok: bool
    failure: str | None = None


@contextmanager
def float32_convolutions() -> Iterator[None]:
    """For the duration of the context cuDNN convolves in float32, not in TF32 as torch lets it by default."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


@contextmanager
def float32_products() -> Iterator[None]:
    """For the duration of the context CUDA's float32 products are products of float32 numbers, not in TF32 where the user lets them."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def check_kernels(device: torch.device | str) -> list[KernelCheck]:
    """Run every op, forward and backward, in float32 and float64 on ``device`` and compare it with its reference.

    A kernel passes in float32 if its error against a float64 reference is at most twice that of the same computation
    by torch in float32, or below the rounding of the result. NaN never passes.
    """
    with float32_products():
        return [check for case in kernel_cases() for check in check_kernel(case, device)]


@float32_convolutions()
def check_kernel(
    case: KernelCase, device: torch.device | str, dtypes: Sequence[torch.dtype] = PRECISIONS
) -> list[KernelCheck]:
    """One of :func:`kernel_cases`, as :func:`check_kernels` does all."""
    name, inputs, op, reference = case
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # the CPU's alone
        exact_inputs = inputs()
    expected = reference(*(t.clone() for t in exact_inputs))
    checks = []
    for dtype in dtypes:
        bound = float("nan")
        try:  # all of it: after some failures nothing works any more on a device, and the table names the first
            given = tuple(t.to(device, dtype) if t.is_floating_point() else t.to(device) for t in exact_inputs)
            own = _error(reference(*(t.clone() for t in given)), expected)
            bound = 2 * own + torch.finfo(dtype).eps * (4 if dtype == torch.float32 else FLOAT64_TERMS)
            error = _error(op(*(t.clone() for t in given)), expected)
            checks.append(KernelCheck(name, dtype, error, bound, error <= bound))
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as raised:
            checks.append(KernelCheck(name, dtype, float("nan"), bound, False, str(raised).splitlines()[0]))
    return checks


def _error(values: Tensors, reference: Tensors) -> float:
    worst = 0.0
    for value, expected in zip(values, reference, strict=True):
        if value.shape != expected.shape:
            return float("nan")
        difference = (value.detach().cpu().double() - expected.double()).abs()
        if not bool(torch.isfinite(difference).all()):
            return float("nan")
        scale = float(expected.abs().max()) or 1.0
        worst = max(worst, float(difference.max()) / scale)
    return worst


def kernel_cases() -> list[KernelCase]:
    """Those that the ops' modules list: (name, makes float64 inputs, the op, its reference); op and reference take the inputs, some of
    which they change, and return the results to compare."""
    names = [module.name for module in pkgutil.iter_modules(ops.__path__) if not module.name.startswith("_")]
    modules = [importlib.import_module(f"{ops.__name__}.{name}") for name in names]
    return [case for module in modules if hasattr(module, "kernel_cases") for case in module.kernel_cases()]
