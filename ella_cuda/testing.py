"""Self-check of the kernels: each against its plain-torch reference, on the device it will run on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ella_cuda import ops
from ella_cuda.ops.symmetric_eigenvalues import symmetric_eigenvalues, symmetric_eigenvalues_torch

Tensors = tuple[Tensor, ...]
KernelCase = tuple[str, Callable[[], Tensors], Callable[..., Tensors], Callable[..., Tensors]]
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
    """What is checked: (name, makes float64 inputs, the op, its reference); op and reference take the inputs, some of which they change, and
    return the results to compare."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    def moved_images(n: int, m: int) -> Callable[[], Tensors]:
        return lambda: (normal(n, 6, 9, 11), torch.eye(2, 3, dtype=torch.float64) + 0.3 * normal(m, 5, 2, 3))

    def filters(n: int, s: int, h: int, d: int) -> Callable[[], Tensors]:
        return lambda: (normal(n, d), normal(s, h, d) / d**0.5, normal(h))

    def averages(activation: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *inputs: function(*inputs, activation)

    def layer(n: int, c: int, x: int, d: int, y: int) -> Callable[[], Tensors]:
        return lambda: (normal(n, c, x), normal(d, c, x), normal(d, c, y), normal(d), normal(y))

    def incoming() -> Tensors:
        return normal(70, 12, 9), normal(12, 5, 40), normal(12, 5, 9)

    def spectrum() -> Tensors:
        positive = (normal(3, 17).square() + 0.1, normal(1, 9).square() + 0.1)
        return *positive, torch.tensor(0.7, dtype=torch.float64)

    def matrices() -> Tensors:
        halves = normal(1, 301, 301), normal(2, 70, 70), normal(3, 64, 64), normal(3, 17, 17), normal(2, 1, 1)
        return tuple(half @ half.mT for half in halves)

    def spectra_of(function: Callable[[Tensors], list[Tensor]]) -> Callable[..., Tensors]:
        return lambda *sets: tuple(function(sets))

    def block(n: int, k: int, t: int, g: int, a: int, b: int) -> Callable[[], Tensors]:
        spectra = lambda: (normal(g, a).square() + 0.1, normal(1, b).square() + 0.1)  # noqa: E731
        precision = torch.tensor(0.7, dtype=torch.float64)
        return lambda: (torch.zeros(n, k, k).double(), normal(n, t, g, a), normal(k, n, t, g, b), *spectra(), precision)

    def variance(function: Callable[..., Tensor], given: bool = False) -> Callable[..., Tensors]:
        def call(total: Tensor, rows: Tensor, outputs: Tensor, *spectra: Tensor) -> Tensors:
            spectra = tuple(t.double() for t in spectra)
            if given:
                rows, outputs = None, torch.einsum("ntgi,kntgj->kngij", rows, outputs)
            diagonal = total.new_zeros(total.shape[:2])
            return function(total, rows, outputs, *spectra, 1.5), function(diagonal, rows, outputs, *spectra, 1.5)

        return call

    def one(function: Callable[..., Tensor]) -> Callable[..., Tensors]:
        return lambda *inputs: (function(*inputs),)

    def gradients(function: Callable[..., Tensor]) -> Callable[..., Tensors]:
        def call(*inputs: Tensor) -> Tensors:
            leaves = [t.requires_grad_() for t in inputs]
            y = function(*leaves)
            weight = (  # not symmetric: the gradients of biases would vanish
                torch.linspace(-1, 2, y.numel(), dtype=torch.float64, device=y.device).to(y.dtype).view_as(y)
                if y.dim()
                else torch.ones_like(y)
            )
            return torch.autograd.grad(y, leaves, weight)

        return call

    def curvature(function: Callable[..., Tensor]) -> Callable[..., Tensors]:
        def call(*inputs: Tensor) -> Tensors:
            leaves = [t.requires_grad_() for t in inputs]
            grads = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
            return torch.autograd.grad(sum(g.sum() for g in grads), leaves)

        return call

    def network() -> Tensors:  # eigenvalues of two tensors, square norms, log precisions
        sides = (normal(3, 17), normal(1, 9), normal(1, 300), normal(1, 70))
        return *(side.square() + 0.1 for side in sides), normal(2).square(), normal(2)

    def evidence(function: Callable[..., Tensors]) -> Callable[..., Tensors]:
        return lambda l, m, n, o, *rest: tuple(function(ops.pack_spectra([(l, m), (n, o)]), *rest))

    def bend(function: Callable[..., Tensors]) -> Callable[..., Tensors]:
        def call(*inputs: Tensor) -> Tensors:
            leaf = inputs[-1].requires_grad_()
            return torch.autograd.grad(evidence(function)(*inputs[:-1], leaf)[1].sum(), leaf)

        return call

    def conv(function: Callable[..., Tensor], mode: str) -> Callable[..., Tensors]:
        return lambda factor, x: (function(factor, x, 3, mode, 0.5),)

    def basis() -> Tensors:
        scale = torch.tensor(0.6, dtype=torch.float64)
        return normal(50, 40), 3 * normal(40, 2), 3 * normal(20, 2), scale

    def bumps(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *inputs: function(*inputs, "exponential")  # the other kind is torch's own on every device

    def moved(function: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        # Each of the four images by another component.
        return lambda x: function(x, 1, 9, torch.arange(4, device=x.device))

    move, move_reference = moved(ops.circular_pad2d), moved(ops.circular_pad2d_torch)
    project, project_reference = bumps(ops.basis_project), bumps(ops.basis_project_torch)
    circular = lambda: (normal(5, 3, 8, 16), normal(4, 3, 3, 3), normal(4))  # noqa: E731
    strided = lambda: (normal(19, 3, 8, 6), normal(4, 3, 3, 3), normal(4))  # noqa: E731
    image = lambda: (normal(4, 6, 8, 8),)  # noqa: E731
    pad = lambda x: ops.circular_pad2d(x, 1, 9)  # noqa: E731  (once around and a pixel)
    pad_reference = lambda x: ops.circular_pad2d_torch(x, 1, 9)  # noqa: E731
    pool = lambda x: ops.polyphase_pool(x, 2)  # noqa: E731
    pool_reference = lambda x: ops.polyphase_pool_torch(x, 2)  # noqa: E731

    def rows(count: int, d: int) -> Callable[[], Tensors]:
        return lambda: (torch.zeros(3, d, d, dtype=torch.float64), normal(count, 3, d))

    def patches(channels: int) -> Callable[[], Tensors]:
        return lambda: (torch.zeros(*[9 * channels] * 2, dtype=torch.float64), normal(4, channels, 9, 7))

    def of_16_bits(make: Callable[[], Tensors], dtype: torch.dtype) -> Callable[[], Tensors]:
        """The same factor, and integers of as many bits as the type has, so few of them that no sum is rounded in either precision."""
        largest, every = (255, 1) if dtype == torch.bfloat16 else (2047, 200)

        def made() -> Tensors:
            factor, like = make()
            numbers = torch.zeros_like(like)
            numbers[::every] = torch.randint(-largest, largest + 1, numbers[::every].shape).double()
            return factor, numbers

        return made

    def reduced(function: Callable[..., Tensor], dtype: torch.dtype) -> Callable[..., Tensor]:
        return lambda factor, numbers: function(factor, numbers.to(dtype))

    def conv_reduced(function: Callable[..., Tensor]) -> Callable[..., Tensors]:
        return conv(lambda factor, x, *rest: function(factor, x.bfloat16(), *rest), "circular")

    return [
        *(
            (f"affine_copies{more}{which}", moved_images(n, m), take(ops.affine_copies), take(ops.affine_copies_torch))
            for which, take in (("", one), (" backward", gradients), (" second derivative", curvature))
            for more, n, m in (("", 4, 4), (" of shared maps", 4, 1))
        ),
        *(
            (
                f"averaged_filters {activation}{which}",
                filters(*sizes),
                take(averages(activation, ops.averaged_filters)),
                take(averages(activation, ops.averaged_filters_torch)),
            )
            for which, take in (("", one), (" backward", gradients))
            # CUDA in float32: copies of four numbers, and of one.
            for activation, sizes in (
                ("relu", (70, 5, 68, 132)),
                ("tanh", (9, 3, 66, 37)),
                ("gaussian", (130, 4, 5, 20)),
            )
        ),
        (
            "averaged_filters second derivative",
            filters(6, 3, 5, 7),
            curvature(averages("tanh", ops.averaged_filters)),
            curvature(averages("tanh", ops.averaged_filters_torch)),
        ),
        *(
            (f"factored_linear{which}{more}", layer(*sizes), take(ops.factored_linear), take(ops.factored_linear_torch))
            for which, take in (("", one), (" backward", gradients))
            for more, sizes in (
                ("", (6, 3, 40, 5, 12)),
                (" sizes of 4", (72, 4, 132, 68, 20)),  # CUDA in float32: copies of four numbers
                (" many images", (4200, 3, 7, 5, 3)),  # and a backward that does not store the intermediate
            )
        ),
        ("factored_linear_vjp", incoming, ops.factored_linear_vjp, ops.factored_linear_vjp_torch),
        *(
            (name, rows(count, d), one(ops.kron_accumulate_), one(ops.kron_accumulate_torch_))
            for name, count, d in [
                ("kron_accumulate_", 50, 20),
                ("kron_accumulate_ blocks of 32", 600, 32),  # CUDA: tensor cores in float32 from here on
                ("kron_accumulate_ blocks of 61", 600, 61),
                ("kron_accumulate_ blocks of 100", 600, 100),  # and tiles of 128 here, one and
                ("kron_accumulate_ blocks of 230", 200, 230),  # several
                ("kron_accumulate_ blocks of 132", 50, 132),
            ]
        ),
        *(
            (
                f"kron_accumulate_ of {str(dtype).removeprefix('torch.')}, blocks of {d}",
                of_16_bits(rows(600, d), dtype),
                one(reduced(ops.kron_accumulate_, dtype)),
                one(reduced(ops.kron_accumulate_torch_, dtype)),
            )
            for dtype, d in ((torch.bfloat16, 100), (torch.float16, 20), (torch.float16, 40))
        ),
        (
            "conv_kron_accumulate_ of bfloat16",
            of_16_bits(patches(4), torch.bfloat16),
            conv_reduced(ops.conv_kron_accumulate_),
            conv_reduced(ops.conv_kron_accumulate_torch_),
        ),
        *(
            (
                f"conv_kron_accumulate_ {mode}{more}",
                patches(channels),
                conv(ops.conv_kron_accumulate_, mode),
                conv(ops.conv_kron_accumulate_torch_, mode),
            )
            for mode in ("circular", "zeros")
            for channels, more in ((3, ""), (4, ", 4 channels"), (12, ", 12 channels"), (15, ", 15 channels"))
        ),
        ("circular_conv2d", circular, one(ops.circular_conv2d), one(ops.circular_conv2d_torch)),
        ("circular_conv2d backward", circular, gradients(ops.circular_conv2d), gradients(ops.circular_conv2d_torch)),
        ("circular_conv2d_pool", strided, one(ops.circular_conv2d_pool), one(ops.circular_conv2d_pool_torch)),
        (
            "circular_conv2d_pool backward",
            strided,
            gradients(ops.circular_conv2d_pool),
            gradients(ops.circular_conv2d_pool_torch),
        ),
        ("circular_pad2d", image, one(pad), one(pad_reference)),
        ("circular_pad2d backward", image, gradients(pad), gradients(pad_reference)),
        ("circular_pad2d of moved images", image, one(move), one(move_reference)),
        ("circular_pad2d of moved images backward", image, gradients(move), gradients(move_reference)),
        ("basis_project", basis, one(project), one(project_reference)),
        ("basis_project backward", basis, gradients(project), gradients(project_reference)),
        ("basis_project second derivative", basis, curvature(project), curvature(project_reference)),
        ("kron_evidence", network, evidence(ops.kron_evidence), evidence(ops.kron_evidence_torch)),
        ("kron_evidence second derivative", network, bend(ops.kron_evidence), bend(ops.kron_evidence_torch)),
        ("kron_logdet", spectrum, one(ops.kron_logdet), one(ops.kron_logdet_torch)),
        ("kron_logdet backward", spectrum, gradients(ops.kron_logdet), gradients(ops.kron_logdet_torch)),
        ("kron_logdet second derivative", spectrum, curvature(ops.kron_logdet), curvature(ops.kron_logdet_torch)),
        *(
            (f"kron_variance_{more}", block(*sizes), variance(function, given), variance(reference, given))
            for function, reference in ((ops.kron_variance_, ops.kron_variance_torch_),)
            for more, sizes, given in (
                (" at one position", (70, 3, 1, 2, 40, 130), False),
                (" at several positions", (5, 7, 20, 2, 33, 18), False),
                (" of a Jacobian", (5, 7, 1, 2, 33, 18), True),
            )
        ),
        ("symmetric_eigenvalues", matrices, spectra_of(symmetric_eigenvalues), spectra_of(symmetric_eigenvalues_torch)),
        ("polyphase_pool", image, one(pool), one(pool_reference)),
        ("polyphase_pool backward", image, gradients(pool), gradients(pool_reference)),
    ]
