"""Streaming accumulation of Kronecker factors, in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ella_cuda.ops._cases import KernelCase, cases, few_bits, normal
from ella_cuda.ops._operator import (
    begin_together,
    operand_sizes,
    refuse_graph,
    register_in_place,
    require_backend,
    require_factor,
    require_weight_of_sum,
    summands,
)
from ella_cuda.ops._precision import allows_tf32


def kron_accumulate_(factor: Tensor, rows: Tensor, alpha: float = 1.0) -> Tensor:
    """Add the second moment of ``rows`` to every block of ``factor``: ``factor[g] += alpha * rows[:, g].T @ rows[:, g]``.

    Equivalent to :func:`kron_accumulate_torch_`, at half the products: only one triangle is computed, then mirrored. On CUDA,
    float32 blocks from 32 on run on tensor cores at float32 accuracy: each value is split in two TF32 numbers, and an infinite one,
    or one within 2^-12 of overflow, gives NaN. Where torch may multiply float32 matrices in TF32
    (``torch.backends.cuda.matmul.fp32_precision``) each value is rounded to one TF32 number instead, a relative error of at most 2^-11
    in each factor of a product; sums stay as accurate as float32's.

    Args:
        factor: ``(G, d, d)``, contiguous, symmetric; changed in place. G = 1 is the usual KFAC factor, G > 1 its exact blocks.
        rows: ``(N, G, d)``, any strides, of the factor's dtype, float32 beside a float64 factor, or bfloat16 or float16. Numbers of 16 bits
            are multiplied as float32, in which their products are exact, and are never all copied: on CUDA 16 MiB or as many bytes as
            the factor has are copied to float32 at a time. Beside a float64 factor products of float32 are summed in float32 over at
            most 1,024 rows (256 on the CPU), and these sums in float64.
        alpha: weight of the sum, finite in the factor's dtype. What is not finite in the rows shows even at 0.

    Returns:
        ``factor``.

    Raises:
        ValueError: a tensor carries a graph or a tangent; the op has no derivative.
        RuntimeError: a shape, dtype or device does not fit; the message names the argument.

    Source: Martens and Grosse, "Optimizing neural networks with Kronecker-factored approximate curvature", ICML 2015, eq. 1.
    """
    refuse_graph("kron_accumulate_", factor=factor, rows=rows)
    require_backend("kron_accumulate_", factor)
    _accumulate(factor, rows, float(alpha), allows_tf32(rows))
    return factor


def kron_accumulate_torch_(factor: Tensor, rows: Tensor, alpha: float = 1.0) -> Tensor:
    """Plain-torch reference of :func:`kron_accumulate_`; its products have the factor's dtype."""
    blocks = rows.to(factor.dtype).movedim(1, 0)
    return factor.baddbmm_(blocks.transpose(1, 2), blocks, alpha=alpha)


def _fake(factor: Tensor, rows: Tensor, alpha: float, allow_tf32: bool = False) -> None:
    operand_sizes("kron_accumulate_", factor=(factor, "G d d"), rows=(rows, "N G d", summands(factor)))
    require_factor("kron_accumulate_", factor)
    require_weight_of_sum("kron_accumulate_", alpha, factor)


def _vmap(
    info: Any, in_dims: tuple[int | None, ...], factor: Tensor, rows: Tensor, alpha: float, allow_tf32: bool = False
) -> tuple[None, None]:
    """The batch joins the blocks: every entry has its own factor."""
    factor = factor.movedim(in_dims[0], 0)
    rows = rows.expand(info.batch_size, *rows.shape) if in_dims[1] is None else rows.movedim(in_dims[1], 0)
    joined = factor.reshape(-1, *factor.shape[2:]).contiguous()
    torch.ops.ella_cuda.kron_accumulate_(joined, rows.movedim(0, 1).flatten(1, 2), alpha, allow_tf32)
    if not begin_together(
        joined, factor
    ):  # torch refuses a copy onto itself where axes of one entry have other strides
        factor.copy_(joined.view_as(factor))
    return None, None


_accumulate = register_in_place("kron_accumulate_", fake=_fake, vmap=_vmap)


def _many_on_cpu(factors: list[Tensor], rows: list[Tensor], alphas: list[float], allow_tf32: bool = False) -> None:
    for factor, some, alpha in zip(factors, rows, alphas, strict=True):
        torch.ops.ella_cuda.kron_accumulate_(factor, some, alpha, allow_tf32)


torch.library.impl("ella_cuda::kron_accumulate_many_", "CPU", _many_on_cpu)


def kernel_cases() -> list[KernelCase]:
    def rows(count: int, d: int) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: (torch.zeros(3, d, d, dtype=torch.float64), normal(count, 3, d))

    def reduced(function: Callable[..., Tensor], dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda factor, numbers: function(factor, numbers.to(dtype))

    name, op, reference, found = "kron_accumulate_", kron_accumulate_, kron_accumulate_torch_, []
    for more, count, d in (
        ("", 50, 20),
        (" blocks of 32", 600, 32),  # CUDA: tensor cores in float32 from here on
        (" blocks of 61", 600, 61),
        (" blocks of 100", 600, 100),  # and tiles of 128 here, one and
        (" blocks of 230", 200, 230),  # several
        (" blocks of 132", 50, 132),
    ):
        found += cases(name + more, rows(count, d), op, reference)
    for dtype, d in ((torch.bfloat16, 100), (torch.float16, 20), (torch.float16, 40)):
        words = f"{name} of {str(dtype).removeprefix('torch.')}, blocks of {d}"
        found += cases(words, few_bits(rows(600, d), dtype), reduced(op, dtype), reduced(reference, dtype))
    return found
