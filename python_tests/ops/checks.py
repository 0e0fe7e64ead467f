"""What every op must satisfy, written once: layouts, accuracy, derivatives, transforms, compilation."""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ella_cuda
from python_tests.benchmark_files import load

# What kernels are called by what ATEN_CPU_CAPABILITY holds them to, of the values that do not make torch itself run instructions
# which this processor lacks.
KERNEL_SETS = {"default": "neon" if platform.machine() in ("aarch64", "arm64") else "baseline"}
for _capability in ("AVX2", "AVX512"):
    if torch.backends.cpu.get_cpu_capability() in (_capability, "AVX512"):
        KERNEL_SETS[_capability.lower()] = _capability.lower()
# Those that this process, and so the suite, does not run anyway.
OTHER_KERNEL_SETS = [held for held, name in KERNEL_SETS.items() if name != ella_cuda.build_info()["cpu_kernels"]]


class Operands(NamedTuple):
    """The arguments of an op, by which ``test_refusals.py`` makes right and wrong ones. A test's module has ``OPERANDS`` by its ops' names.

    Attributes:
        tensors: for each its axes, as in ``"N C 3 3"``, equal letters for equal sizes; and its dtype where it is not float32.
        rest: the arguments that follow.
        contiguous: whether the op takes contiguous tensors alone. listed: whether it takes them as a list.
    """

    tensors: list[tuple[Any, ...]]
    rest: tuple[Any, ...] = ()
    contiguous: bool = False
    listed: bool = False


class Case(NamedTuple):
    """A differentiable op, of which ``test_conformance.py`` tests what all must satisfy. Modules of tests list theirs in ``DIFFERENTIABLE``.

    Attributes:
        op: a function of tensors alone.
        reference: the same in torch.
        exact: the oracle.
        make: arguments by shape, device and dtype.
        small: shapes of derivatives; the first one of transforms too.
        laid_out, empty, threaded: shapes of arguments in every layout, of nothing, and of sums that threads share.
        optional: how many of the last arguments may be left out.
        ways: whether CUDA computes it otherwise, which the fixture ``way`` has on every device.
    """

    op: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    exact: Callable[..., Tensor]
    make: Callable[[Any, torch.device, torch.dtype], tuple[Tensor, ...]]
    small: list[Any]
    laid_out: list[Any] = []  # noqa: RUF012
    empty: list[Any] = []  # noqa: RUF012
    threaded: list[Any] = []  # noqa: RUF012
    optional: int = 0
    ways: bool = False

    def calls(self, shape: Any, device: torch.device) -> Iterator[tuple[Tensor, ...]]:
        """Arguments in double precision, all of them and without the optional ones."""
        args = self.make(shape, device, torch.float64)
        yield args
        if self.optional:
            yield args[: -self.optional]


def assert_same(actual: Any, expected: Any, **tolerances: float) -> None:
    """Equal structure and close numbers; NaN never passes."""
    actual, expected = tree_leaves(actual), tree_leaves(expected)
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert torch.isfinite(e).all()
        torch.testing.assert_close(a, e, **tolerances)


def layouts(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The same numbers in every memory layout a user may pass, and (last) numbers repeated with stride 0."""
    between = math.nan if tensor.is_floating_point() else 99
    yield "contiguous", tensor.contiguous()
    order = list(range(tensor.dim()))[::-1]
    yield "reversed axes", tensor.permute(order).contiguous().permute(order)
    padded = torch.full([2 * s + 1 for s in tensor.shape], between, dtype=tensor.dtype, device=tensor.device)
    window = padded[tuple(slice(1, 2 * s + 1, 2) for s in tensor.shape)]
    window.copy_(tensor)
    yield "every second element of a larger tensor", window
    if tensor.dim():
        padded = torch.full(
            (*tensor.shape[:-1], tensor.shape[-1] + 3), between, dtype=tensor.dtype, device=tensor.device
        )
        window = padded[..., 1 : 1 + tensor.shape[-1]]
        window.copy_(tensor)
        yield "rows of a larger tensor", window
    if tensor.dim() == 4:
        yield "channels last", tensor.contiguous(memory_format=torch.channels_last)
    if tensor.dim() and tensor.shape[0]:
        yield "first axis expanded", tensor[:1].expand_as(tensor)


def before_a_guard_page(tensor: Tensor) -> Tensor:
    """The same numbers, contiguous, right before memory that cannot be read: reading past their end kills the process."""
    page = mmap.PAGESIZE
    size = tensor.numel() * tensor.element_size()
    pages = mmap.mmap(-1, -(-size // page) * page + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(start + len(pages) - page), ctypes.c_size_t(page), 0) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    guarded = torch.frombuffer(pages, dtype=tensor.dtype, count=tensor.numel(), offset=len(pages) - page - size)
    return guarded.view_as(tensor).copy_(tensor)


def error_at_most_twice(actual: Tensor, reference: Tensor, exact: Tensor, terms: Tensor | None = None) -> None:
    """The accuracy rule: error against float64 at most twice that of plain torch in the same precision.

    Where torch happens to round luckily on a handful of numbers, a few units in the last place are allowed: of the result, or of the
    sum of its terms' absolute values, which cancel in a result of few.
    """
    assert torch.isfinite(actual).all()
    if actual.dtype == torch.float64:  # nothing more precise to compare with
        assert_same(actual, exact, rtol=1e-11, atol=1e-13 * float(exact.abs().max()) if exact.numel() else 0.0)
        return
    error, allowed = (actual.double() - exact).abs().max(), (reference.double() - exact).abs().max()
    floor = 4 * torch.finfo(actual.dtype).eps * (exact if terms is None else terms).abs().max()
    assert error <= max(2 * allowed, floor), f"error {error:.3e}, torch's {allowed:.3e}"


def close_in_another_order(actual: Tensor, exact: Tensor) -> None:
    """Another library's sums of products, in its own order: within 30 units in the last place of the largest."""
    largest = float(exact.abs().max()) if exact.numel() else 0.0
    torch.testing.assert_close(
        actual.double(), exact.double(), rtol=0, atol=30 * torch.finfo(actual.dtype).eps * largest
    )


@contextmanager
def threads(number: int) -> Iterator[None]:
    """So many of torch's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def same_for_any_number_of_threads(call: Callable[[], Any], numbers: tuple[int, ...] = (1, 2, 3)) -> None:
    """A call's tensors to the bit, on the CPU."""
    results = []
    for number in numbers:
        with threads(number):
            results.append(tree_leaves(call()))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def check_gradients(
    function: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    exact: Callable[..., Tensor],
    args: tuple[Tensor, ...],
    grad: Tensor,
    compare: Callable[[Tensor, Tensor, Tensor], None] = error_at_most_twice,
) -> None:
    """A function's gradients beside those of torch in the same precision and the exact ones in float64."""
    args = [a.detach().requires_grad_() for a in args]
    wide = [a.detach().double().requires_grad_() for a in args]
    ours, theirs = (torch.autograd.grad(f(*args), args, grad) for f in (function, reference))
    for o, t, e in zip(ours, theirs, torch.autograd.grad(exact(*wide), wide, grad.double()), strict=True):
        compare(o, t, e)


def runs_during(call: Callable[[], Any], *names: str) -> tuple[Any, dict[str, int]]:
    """The result of a call, and how often ops of these names run during it. A batched op runs itself and, inside, the physical one."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = call()
    return result, {name: sum(e.name == name for e in profile.events()) for name in names}


class Largest(TorchDispatchMode):
    """The most numbers that a tensor's memory has which an operation returns."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        self.numbers = max([self.numbers, *(t.untyped_storage().nbytes() // t.element_size() for t in made)])
        return result


def peak_bytes(call: Callable[[], Any]) -> int:
    """What a call on two threads of the CPU needs at a time, scratch included; skips where the system does not tell."""
    with threads(2):
        peak = load("memory").peak_bytes(call, torch.device("cpu"))
    if peak is None:
        pytest.skip("the system does not tell a peak")
    return peak


def check_derivatives(function: Callable[..., Any], args: tuple[Tensor, ...], second: bool = True) -> None:
    """First and, if asked for, second derivatives in reverse and forward mode against finite differences, batched gradients included."""
    torch.autograd.gradcheck(
        function, args, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    if second:
        torch.autograd.gradgradcheck(function, args, check_batched_grad=True, check_fwd_over_rev=True)


def check_func_transforms(
    function: Callable[..., Tensor], reference: Callable[..., Tensor], args: tuple[Tensor, ...], second: bool = True
) -> None:
    """jvp, vjp, jacrev, jacfwd and, of functions with a second derivative, hessian and reverse over reverse agree with the reference's."""
    where = tuple(range(len(args)))
    tangents = tuple(torch.randn_like(a) for a in args)

    def cubed(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *a: (f(*a) ** 3).sum()

    assert_same(torch.func.jvp(function, args, tangents), torch.func.jvp(reference, args, tangents))
    cotangent = torch.randn_like(function(*args))
    assert_same(torch.func.vjp(function, *args)[1](cotangent), torch.func.vjp(reference, *args)[1](cotangent))
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        assert_same(transform(function, where)(*args), transform(reference, where)(*args))
    if second:
        expected = torch.func.hessian(cubed(reference), where)(*args)
        assert_same(torch.func.hessian(cubed(function), where)(*args), expected)
        assert_same(torch.func.jacrev(torch.func.jacrev(cubed(function), where), where)(*args), expected)
    zero = tuple(torch.zeros_like(a) for a in args)
    assert torch.func.jvp(function, args, tangents)[1].abs().max() > 0, "a tangent was lost"
    assert_same(torch.func.jvp(function, args, zero)[1], torch.zeros_like(cotangent))


def check_forward_over_forward(
    function: Callable[..., Any], reference: Callable[..., Any], args: tuple[Tensor, ...]
) -> None:
    """The second derivative along two directions is the reference's, and that the difference of first ones. Torch runs an op's jvp rule
    there with forward mode off."""
    first, second = (tuple(torch.randn_like(a) for a in args) for _ in range(2))
    jvp, step, found = torch.func.jvp, 1e-5, []
    for call in (function, reference):

        def slope(*at: Tensor, call=call) -> Tensor:
            square = lambda *a: sum(part.square().sum() for part in tree_leaves(call(*(t.square() for t in a))))  # noqa: E731
            return jvp(square, at, first)[1]

        found.append(jvp(slope, args, second)[1])
    torch.testing.assert_close(*found, rtol=1e-9, atol=0)
    ahead, behind = (slope(*(a + sign * s for a, s in zip(args, second, strict=True))) for sign in (step, -step))
    torch.testing.assert_close(found[0], (ahead - behind) / (2 * step), rtol=1e-5, atol=1e-6)


def check_vmap(function: Callable[..., Tensor], args: tuple[Tensor, ...], batch: int = 3) -> None:
    """vmap over every subset of the arguments, with the axis in front and at the back, equals a loop."""
    for subset in itertools.product((False, True), repeat=len(args)):
        if not any(subset):
            continue
        for last in (False, True):
            batched = [
                torch.stack([a + 0.1 * i * torch.rand_like(a) for i in range(batch)], dim=-1 if last else 0)
                if chosen
                else a
                for a, chosen in zip(args, subset, strict=True)
            ]
            dims = tuple((-1 if last else 0) if chosen else None for chosen in subset)
            loop = [
                function(*(b.select(d, i) if d is not None else b for b, d in zip(batched, dims, strict=True)))
                for i in range(batch)
            ]
            assert_same(torch.func.vmap(function, dims)(*batched), torch.stack(loop))


def check_compile(function: Callable[..., Tensor], args: tuple[Tensor, ...]) -> None:
    """One graph, forward and backward, same numbers as eager."""
    args = tuple(a.detach().clone().requires_grad_() for a in args)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *a: function(*a) * 2, fullgraph=True, backend="aot_eager")
    assert_same(compiled(*args), function(*args) * 2)
    gradients = torch.autograd.grad(compiled(*args).square().sum(), args)
    assert_same(gradients, torch.autograd.grad((function(*args) * 2).square().sum(), args))
