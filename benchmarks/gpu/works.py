"""What is timed: every op at the sizes of the paper's network (alpha 10, F-FC also 40, batches of 128), its candidates, and what the
mathematics needs at the least: operations, the same for every candidate, and bytes read and written once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import bench_augment, bench_circular_pad, bench_strided_conv
from benchmarks.bench_basis_project import arguments as basis_arguments
from benchmarks.bench_basis_project import expression as basis_expression
from benchmarks.bench_basis_project import work as basis_work
from benchmarks.bench_evidence_step import SHAPES as LOGDET_SHAPES
from benchmarks.bench_evidence_step import expression as logdet
from benchmarks.bench_factored_linear import bmm, linear, stages
from benchmarks.bench_kron_accumulate import SHAPES as BLOCKS
from benchmarks.bench_kron_variance import SHAPES as VARIANCE_SHAPES
from benchmarks.bench_kron_variance import rank_one
from benchmarks.compiling import compiled
from ella_cuda import ops
from ella_cuda.ops.symmetric_eigenvalues import symmetric_eigenvalues

OURS, TF32, COMPILED = "ella_cuda", ", TF32", "torch.compile of "
Function = Callable[..., Any]


@dataclass(frozen=True)
class Work:
    """One op at one size.

    Attributes:
        make: inputs on a device.
        candidates: functions of these by name. Those that end in ", TF32" run where TF32 is allowed.
        exact: the same by torch, for inputs in float64.
        flops: of the mathematics.
        bytes: read and written.
        wide: the arithmetic is float64's.
        reduced: the inputs are bfloat16, whose products tensor cores sum in float32.
        long: candidates of hundreds of kernels a call, whose graphs hold the fewest calls.
        eager: waits for the device, so that no graph can record it.
    """

    name: str
    make: Callable[[torch.device], tuple[Tensor, ...]]
    candidates: dict[str, Function]
    exact: Function
    flops: float
    bytes: float
    wide: bool = False
    reduced: bool = False
    long: frozenset[str] = frozenset()
    eager: bool = False


def normal(*sizes: tuple[int, ...]) -> Callable[[torch.device], tuple[Tensor, ...]]:
    return lambda device: tuple(torch.randn(size, device=device) for size in sizes)


def with_gradients(function: Function) -> Function:
    """The function of all but the last argument, and its gradients for the last as the one that comes in."""

    def call(*args: Tensor) -> tuple[Tensor, ...]:
        leaves = [a.detach().requires_grad_() for a in args[:-1]]
        y = function(*leaves)
        return (y.detach(), *torch.autograd.grad(y, leaves, args[-1]))

    return call


def peers(**functions: Function) -> dict[str, Function]:
    """Each in float32, and where TF32 is allowed."""
    named = {name.replace("_", " ") if name != OURS else name: function for name, function in functions.items()}
    return named | {name + TF32: function for name, function in named.items()}


def factored(batch: int, stage: int, alpha: int = 10) -> list[Work]:
    C, D, X, Y = stages(alpha)[stage - 1]
    wide = f", alpha {alpha}" * (alpha != 10)
    sizes = ((batch, C, X), (D, C, X), (D, C, Y), (D,), (Y,))
    functions = peers(ella_cuda=ops.factored_linear, bmm=bmm, einsum=ops.factored_linear_torch)
    if X * Y <= 4 * (X + Y):
        functions |= peers(one_linear_layer=linear)
    functions[f"{COMPILED}bmm"] = compiled(bmm)
    flops, numbers = 2 * batch * D * C * min(X + Y, X * Y), batch * (C * X + D * Y)
    weights = D * C * (X + Y)
    both = {name: with_gradients(function) for name, function in functions.items()}
    exact = ops.factored_linear_torch
    return [
        Work(f"F-FC, stage {stage}{wide}", normal(*sizes), functions, exact, flops, 4 * (numbers + weights)),
        Work(
            f"F-FC with gradients, stage {stage}{wide}",
            normal(*sizes, (batch, D, Y)),
            both,
            with_gradients(exact),
            3 * flops,
            4 * (2 * numbers + 3 * weights),
        ),
    ]


def baddbmm(factor: Tensor, rows: Tensor, **options: Any) -> Tensor:
    rows = rows.transpose(0, 1)
    return torch.baddbmm(factor, rows.mT, rows, out=factor, **options)


def accumulate(n: int, g: int, d: int) -> Work:
    return Work(
        f"kron_accumulate_, {n} rows, {g} blocks of {d}",
        lambda device: (torch.zeros(g, d, d, device=device), torch.randn(n, g, d, device=device)),
        peers(ella_cuda=ops.kron_accumulate_, baddbmm=baddbmm)
        | {"einsum": lambda factor, rows: factor.add_(torch.einsum("ngi,ngj->gij", rows, rows))},
        lambda factor, rows: factor + torch.einsum("ngi,ngj->gij", rows, rows),
        n * g * d * (d + 1),
        4 * (n * g * d + 2 * g * d * d),
    )


def unfold_and_addmm(factor: Tensor, x: Tensor, **options: Any) -> Tensor:
    patches = F.unfold(F.pad(x, (1, 1, 1, 1), mode="circular"), 3).transpose(1, 2).flatten(0, 1)
    return torch.addmm(factor, patches.T, patches, out=factor, **options)


def accumulate_patches(batch: int, stage: int) -> Work:
    C, _, X, _ = stages(10)[stage - 1]
    side = round(X**0.5)
    return Work(
        f"conv_kron_accumulate_, stage {stage}",
        lambda device: (torch.zeros(9 * C, 9 * C, device=device), torch.randn(batch, C, side, side, device=device)),
        peers(ella_cuda=lambda factor, x: ops.conv_kron_accumulate_(factor, x, 3), unfold_and_addmm=unfold_and_addmm),
        lambda factor, x: ops.conv_kron_accumulate_torch_(factor, x, 3),
        2 * batch * X * min(13, X) * C * C,  # of 25 distances between two pixels of a patch, and symmetry leaves 13
        4 * (batch * C * X + 2 * 81 * C * C),
    )


def in_bfloat16(full: Work, function: Function, rehearse: bool) -> Work:
    """A sum of bfloat16 rows or images by ours and by that function. The CPU has no product of them into float32."""

    def make(device: torch.device) -> tuple[Tensor, ...]:
        factor, x = full.make(device)
        return factor, x.bfloat16()

    name = function.__name__.replace("_", " ")
    candidates = {OURS: full.candidates[OURS], f"float32 copy, {name}": lambda f, x: function(f, x.float())}
    if not rehearse:
        candidates[f"{name} into float32"] = partial(function, out_dtype=torch.float32)
    saved = 2 * full.make(torch.device("meta"))[1].numel()
    renamed = {"name": f"bfloat16 {full.name}", "bytes": full.bytes - saved}
    return replace(full, make=make, candidates=candidates, reduced=True, **renamed)


def images(batch: int, stage: int) -> list[Work]:
    C, D, X, Y = stages(10)[stage - 1]
    side = round(X**0.5)
    out = []
    if side >= 2:
        pad = {n: with_gradients(f) for n, f in bench_circular_pad.CANDIDATES.items() if not n.startswith(COMPILED)}
        numbers = batch * C * (X + (side + 2) ** 2)
        shapes = (batch, C, side, side), (batch, C, side + 2, side + 2)
        exact = with_gradients(bench_circular_pad.by_torch)
        out.append(Work(f"circular_pad2d with gradients, stage {stage}", normal(*shapes), pad, exact, 0, 8 * numbers))
    if Y < X and side % 2 == 0:
        conv = bench_strided_conv.CANDIDATES
        functions = {n: with_gradients(f) for n, f in conv.items() if not n.startswith(COMPILED)}
        sizes = (batch, C, side, side), (D, C, 3, 3), (D,), (batch, D, side // 2, side // 2)
        numbers, weights = batch * (C + D / 4) * X, 9 * D * C
        exact = with_gradients(ops.circular_conv2d_pool_torch)
        flops = 2 * batch * X * weights * (1 + 2 / 4)
        name = f"circular_conv2d_pool with gradients, stage {stage}"
        out.append(Work(name, normal(*sizes), functions, exact, flops, 4 * (2 * numbers + 3 * weights)))
        pool = {OURS: with_gradients(ops.polyphase_pool), "torch": with_gradients(ops.polyphase_pool_torch)}
        sizes = (batch, D, side, side), (batch, D, side // 2, side // 2)
        numbers = batch * D * (2 * X + 2 * X // 4)
        name = f"polyphase_pool with gradients, stage {stage}"
        out.append(Work(name, normal(*sizes), pool, pool["torch"], 0, 4 * numbers))
    return out


def basis(stage: int) -> Work:
    C, _, X, _ = stages(10)[stage - 1]
    rows, anchors = 128 * C, (X + 1) // 2

    def kind(function: Function) -> Function:
        return lambda *args: function(*args, "exponential")

    return Work(
        f"basis_project, stage {stage}",
        lambda device: basis_arguments(C, X, device),
        peers(ella_cuda=kind(ops.basis_project), product_with_the_basis=kind(basis_expression)),
        kind(basis_expression),
        basis_work("exponential", rows, X, anchors, backward=False),
        4 * rows * (X + anchors),
    )


def evidence(g: int, a: int, b: int) -> Work:
    def make(device: torch.device) -> tuple[Tensor, ...]:
        sides = (torch.rand(n, k, dtype=torch.float64, device=device) for n, k in ((g, a), (1, b)))
        return *sides, torch.tensor(0.3, dtype=torch.float64, device=device)

    def gradient(function: Function) -> Function:
        def call(inputs: Tensor, outputs: Tensor, log_precision: Tensor) -> tuple[Tensor, ...]:
            leaf = log_precision.detach().requires_grad_()
            value = function(inputs, outputs, leaf.exp())
            return (value.detach(), *torch.autograd.grad(value, leaf))

        return call

    return Work(
        f"kron_logdet with gradient, {g} blocks of {a} x {b}",
        make,
        {OURS: gradient(ops.kron_logdet), "outer product": gradient(logdet)},
        gradient(logdet),
        6 * g * a * b,
        8 * (g * a + b),
        wide=True,
    )


def block_variance(n: int, k: int, t: int, g: int, a: int, b: int) -> Work:
    def make(device: torch.device) -> tuple[Tensor, ...]:
        rows = torch.randn(n, t, g, a, device=device), torch.randn(k, n, t, g, b, device=device)
        return *rows, *(torch.rand(size, dtype=torch.float64, device=device) for size in ((g, a), (g, b), ()))

    def added(function: Function) -> Function:
        return lambda inputs, *others: function(inputs.new_zeros(n, k, k), inputs, *others)

    candidates = {OURS: added(ops.kron_variance_), "einsum": added(ops.kron_variance_torch_)}
    if t == 1:
        candidates["rank one"] = lambda inputs, *others: rank_one(inputs.new_zeros(n, k, k), inputs, *others)
    return Work(
        f"kron_variance_, {n} points, {k} outputs, {t} positions, {g} blocks of {a} x {b}",
        make,
        candidates,
        added(ops.kron_variance_torch_),
        2 * n * g * a * b * (1 if t == 1 else t * k + k * (k + 1) // 2),
        4 * n * t * g * (a + k * b),
    )


def network_evidence(count: int) -> Work:
    """Of so many pairs of sides, about those of the paper's network."""
    sizes = [(1, max(2, 1024 >> i % 8), max(2, 640 >> i % 6)) for i in range(count)]

    def make(device: torch.device) -> tuple[Any, ...]:
        rand = lambda *size: torch.rand(size, dtype=torch.float64, device=device) + 0.1  # noqa: E731
        return ops.pack_spectra([(rand(1, a), rand(1, b)) for _, a, b in sizes]), rand(count), rand(count).log()

    products = sum(a * b for _, a, b in sizes)
    numbers = sum(a + b for _, a, b in sizes)
    candidates = {OURS: ops.kron_evidence, "torch": ops.kron_evidence_torch}
    name = f"kron_evidence of {count} tensors"
    return Work(
        name, make, candidates, candidates["torch"], 6 * products, 8 * numbers, wide=True, long=frozenset({"torch"})
    )


def eigenvalues(count: int, d: int) -> Work:
    def make(device: torch.device) -> tuple[Tensor, ...]:
        root = torch.randn(count, d, d, device=device) / d**0.5
        return (root @ root.mT,)

    candidates = {OURS: lambda blocks: symmetric_eigenvalues([blocks]).view(blocks.shape[:2])}
    candidates |= {
        "torch": lambda blocks: torch.linalg.eigvalsh(blocks.double()),
        "torch, float32": torch.linalg.eigvalsh,
    }
    name, exact = f"eigenvalues of {count} blocks of {d}", torch.linalg.eigvalsh
    return Work(name, make, candidates, exact, 4 / 3 * count * d**3, 4 * count * d * d, wide=True, eager=True)


def affine_copies(shape: tuple[int, ...]) -> list[Work]:
    n, c, h, w = shape
    size = (n, bench_augment.COPIES, c, h, w)
    places, images = n * bench_augment.COPIES * h * w, n * c * h * w
    functions = {name: f for name, f in bench_augment.CANDIDATES.items() if not name.startswith(COMPILED)}

    def make(device: torch.device) -> tuple[Tensor, ...]:
        maps = bench_augment.maps_of(n, device)
        return torch.rand(shape, device=device), maps, torch.randn(size, device=device)

    def of_maps(function: Function) -> Function:
        def call(x: Tensor, maps: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
            leaf = maps.detach().requires_grad_()
            y = function(x, leaf)
            return y.detach(), *torch.autograd.grad(y, leaf, grad)

        return call

    out = []
    for gradients, wrap, passes in (("maps", of_maps, 0), ("maps and image", with_gradients, 1)):
        candidates = {name: wrap(function) for name, function in functions.items()}
        bytes_ = 4 * (2 * places * c + (2 + passes) * images)
        name = f"affine_copies of {' x '.join(map(str, shape))} with gradient in {gradients}"
        exact = wrap(bench_augment.by_torch)
        out.append(Work(name, make, candidates, exact, bench_augment.work(shape, gradients), bytes_))
    return out


def averaged_filters(n: int, s: int, h: int, d: int) -> Work:
    """Forward and all gradients: three products of all inputs with all filters."""

    def linear_mean(x: Tensor, bank: Tensor, bias: Tensor) -> Tensor:
        return (F.linear(x, bank.flatten(0, 1)).unflatten(1, (s, h)) + bias).relu().mean(1)

    candidates = peers(ella_cuda=ops.averaged_filters, linear_and_mean=linear_mean)
    candidates |= {COMPILED + "linear and mean": compiled(linear_mean)}
    numbers = 2 * (n * d + s * h * d + n * h)
    name = f"averaged_filters of {n} x {d} by {s} x {h} filters with gradients"
    return Work(
        name,
        normal((n, d), (s, h, d), (h,), (n, h)),
        {who: with_gradients(function) for who, function in candidates.items()},
        with_gradients(ops.averaged_filters_torch),
        3 * 2 * n * s * h * d,
        4 * numbers,
    )


def works(rehearse: bool) -> dict[str, Work]:
    """By name, the most telling first."""
    batch, chosen = (2, (7,)) if rehearse else (128, range(1, 9))
    layers = [factored(batch, stage) for stage in chosen]
    out = [forward for forward, _ in layers] + [gradients for _, gradients in layers]
    out += [] if rehearse else [factored(batch, stage, 40)[1] for stage in chosen]
    blocks = [(5, 2, 8)] if rehearse else sorted(BLOCKS, key=lambda s: -s[0] * s[1] * s[2] ** 2)
    out += [accumulate(*sizes) for sizes in blocks]
    out += [accumulate_patches(batch, stage) for stage in chosen]
    out += [in_bfloat16(accumulate(*sizes), baddbmm, rehearse) for sizes in blocks[::4]]
    patches = [accumulate_patches(batch, stage) for stage in ((7,) if rehearse else (2, 5))]
    out += [in_bfloat16(full, unfold_and_addmm, rehearse) for full in patches]
    out += [network_evidence(3 if rehearse else 52)]
    out += [
        block_variance(*sizes) for sizes in ([(2, 2, 1, 2, 3, 4), (2, 2, 3, 1, 3, 4)] if rehearse else VARIANCE_SHAPES)
    ]
    out += [eigenvalues(*sizes) for sizes in ([(2, 8)] if rehearse else [(8, 1024), (2, 720), (64, 256), (512, 64)])]
    out += [evidence(*sizes) for sizes in ([(2, 4, 3)] if rehearse else LOGDET_SHAPES)]
    out += [work for stage in chosen for work in images(batch, stage)]
    copied = [(2, 1, 5, 6)] if rehearse else [(250, 1, 28, 28), (128, 3, 32, 32), (1000, 1, 28, 28)]
    out += [work for shape in copied for work in affine_copies(shape)]
    out += [averaged_filters(*((3, 2, 5, 4) if rehearse else (512, 31, 256, 784)))]
    out += [basis(stage) for stage in ((8,) if rehearse else (1, 3, 5))]
    return {work.name: work for work in out}
