"""The input-side Kronecker factor of a convolution, without storing patches."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ella_cuda.ops._cases import KernelCase, cases, few_bits, normal
from ella_cuda.ops._operator import (
    operand_sizes,
    refuse_graph,
    register_in_place,
    require_backend,
    require_factor,
    require_pair,
    require_weight_of_sum,
    summands,
)
from ella_cuda.ops._precision import allows_tf32

Size = int | tuple[int, int]


def conv_kron_accumulate_(
    factor: Tensor,
    x: Tensor,
    kernel_size: Size,
    padding_mode: str = "circular",
    alpha: float = 1.0,
    *,
    stride: Size = 1,
    padding: Size | None = None,
    dilation: Size = 1,
) -> Tensor:
    """Add ``alpha`` times the sum of ``a a^T`` over all patches ``a`` of ``x`` that a convolution reads.

    Equivalent to :func:`conv_kron_accumulate_torch_`; patches exist one cache-sized tile at a time. TF32 on CUDA, if torch allows it:
    as for :func:`ella_cuda.ops.kron_accumulate_`, where patches are multiplied by tensor cores.

    Args:
        factor: ``(C*kh*kw, C*kh*kw)``, contiguous, symmetric, in the order of :func:`torch.nn.functional.unfold`; changed in place.
        x: ``(N, C, H, W)``, the convolution's input, of the factor's dtype, float32 beside a float64 factor, or bfloat16 or float16; see
            :func:`ella_cuda.ops.kron_accumulate_`.
        kernel_size: ``k`` or ``(kh, kw)``.
        padding_mode: "circular" (positions wrap) or "zeros".
        alpha: weight of the sum, finite in the factor's dtype. What is not finite in ``x`` shows even at 0.
        stride: of the convolution.
        padding: per side; None is ``dilation * (kernel_size - 1) // 2``, which keeps the size for odd kernels.
        dilation: of the convolution.

    Returns:
        ``factor``.

    Raises:
        ValueError: an unknown ``padding_mode``, or a tensor carries a graph or a tangent.
        RuntimeError: a shape, dtype or device does not fit, or on CUDA an image with its padding has more than 2^30 numbers; the
            message names the argument.

    Source: Grosse and Martens, "A Kronecker-factored approximate Fisher matrix for convolution layers", ICML 2016, eq. 33 (the
    expanded sum over positions, KFAC-expand).
    """
    geometry = _geometry(kernel_size, padding_mode, stride, padding, dilation)
    refuse_graph("conv_kron_accumulate_", factor=factor, x=x)
    require_backend("conv_kron_accumulate_", factor)
    _accumulate(factor, x, *geometry, float(alpha), allows_tf32(x))
    return factor


def conv_kron_accumulate_torch_(
    factor: Tensor,
    x: Tensor,
    kernel_size: Size,
    padding_mode: str = "circular",
    alpha: float = 1.0,
    *,
    stride: Size = 1,
    padding: Size | None = None,
    dilation: Size = 1,
) -> Tensor:
    """Plain-torch reference of :func:`conv_kron_accumulate_`; its products have the factor's dtype."""
    x = x.to(factor.dtype)
    kernel, strides, pads, dilations, circular = _geometry(kernel_size, padding_mode, stride, padding, dilation)
    padded = F.pad(x, (pads[1], pads[1], pads[0], pads[0]), mode="circular" if circular else "constant")
    patches = F.unfold(padded, kernel, dilation=dilations, stride=strides).movedim(1, 2).flatten(0, 1)
    return factor.addmm_(patches.T, patches, alpha=alpha)


def _pair(name: str, value: Size, least: int) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, Integral) else tuple(value)
    if len(pair) != 2 or any(not isinstance(v, Integral) or v < least for v in pair):
        raise ValueError(
            f"conv_kron_accumulate_: {name} must be an integer >= {least} or a pair of them, got {value!r}."
        )
    return int(pair[0]), int(pair[1])


def _geometry(
    kernel_size: Size, padding_mode: str, stride: Size = 1, padding: Size | None = None, dilation: Size = 1
) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int], tuple[int, int], bool]:
    if padding_mode not in ("circular", "zeros"):
        raise ValueError(f"conv_kron_accumulate_: padding_mode must be 'circular' or 'zeros', got {padding_mode!r}.")
    kernel, dilations = _pair("kernel_size", kernel_size, 1), _pair("dilation", dilation, 1)
    same = tuple(d * (k - 1) // 2 for k, d in zip(kernel, dilations, strict=True))
    pads = same if padding is None else _pair("padding", padding, 0)
    return kernel, _pair("stride", stride, 1), pads, dilations, padding_mode == "circular"


def _fake(
    factor: Tensor,
    x: Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    circular: bool,
    alpha: float,
    allow_tf32: bool = False,
) -> None:
    op = "conv_kron_accumulate_"
    s = operand_sizes(op, factor=(factor, None), x=(x, "N C H W", summands(factor)))
    require_weight_of_sum(op, alpha, factor)
    named = {"kernel_size": (kernel_size, 1), "stride": (stride, 1), "padding": (padding, 0), "dilation": (dilation, 1)}
    for name, (pair, least) in named.items():
        require_pair(op, name, pair, least)
    side = "C*kh*kw"
    operand_sizes(op, {side: s["C"] * kernel_size[0] * kernel_size[1]}, factor=(factor, f"{side} {side}"))
    require_factor(op, factor)
    image, padded = (s["H"], s["W"]), tuple(s[axis] + 2 * pad for axis, pad in zip("HW", padding, strict=True))
    for size, pad in zip(image, padding, strict=True) if circular else ():
        torch._check(
            pad <= size, lambda: f"{op}: circular padding must not exceed the image {image}, got {tuple(padding)}"
        )
    for whole, kernel, step in zip(padded, kernel_size, dilation, strict=True):
        torch._check(
            step * (kernel - 1) < whole,
            lambda: (
                f"{op}: kernel_size {tuple(kernel_size)} with dilation {tuple(dilation)} does not fit the padded image {padded}"
            ),
        )


_accumulate = register_in_place("conv_kron_accumulate_", fake=_fake)


def _many_on_cpu(
    factors: list[Tensor], xs: list[Tensor], geometries: list[int], alphas: list[float], allow_tf32: bool = False
) -> None:
    for i, (factor, x, alpha) in enumerate(zip(factors, xs, alphas, strict=True)):
        *pairs, circular = geometries[9 * i : 9 * (i + 1)]
        sizes = [pairs[at : at + 2] for at in range(0, 8, 2)]
        torch.ops.ella_cuda.conv_kron_accumulate_(factor, x, *sizes, bool(circular), alpha, allow_tf32)


torch.library.impl("ella_cuda::conv_kron_accumulate_many_", "CPU", _many_on_cpu)


def _version(rows: Tensor) -> int:
    """How often a tensor was changed in place, where that is counted."""
    return -1 if rows.is_inference() else rows._version


class GroupedSums:
    """Sums of outer products that wait for each other: on CUDA they take fewer launches together. Each is, to the bit, what it is alone.

    Args:
        most_bytes: of rows and images that wait. They must not change until then.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._waiting: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}  # by what sums of one call have in common
        self._bytes: dict[int, int] = {}  # of each memory that waits

    def kron_accumulate_(self, factor: Tensor, rows: Tensor, alpha: float = 1.0) -> None:
        """:func:`ella_cuda.ops.kron_accumulate_`, by the next :meth:`launch`."""
        self._wait("kron_accumulate_", factor, rows, (), alpha)

    def conv_kron_accumulate_(
        self,
        factor: Tensor,
        x: Tensor,
        kernel_size: Size,
        padding_mode: str = "circular",
        alpha: float = 1.0,
        **more: Any,
    ) -> None:
        """:func:`ella_cuda.ops.conv_kron_accumulate_`, by the next :meth:`launch`."""
        *pairs, circular = _geometry(kernel_size, padding_mode, **more)
        self._wait("conv_kron_accumulate_", factor, x, (*itertools.chain(*pairs), int(circular)), alpha)

    def launch(self) -> None:
        """Add what waits.

        Raises:
            RuntimeError: rows have changed since they were given.
        """
        waiting, self._waiting = self._waiting, {}
        self._bytes.clear()
        for (name, allow_tf32, _), sums in waiting.items():
            factors, rows, geometries, alphas, versions = (list(of) for of in zip(*sums, strict=True))
            if [_version(r) for r in rows] != versions:
                raise RuntimeError(
                    f"{name}: rows were changed in place before they were added, as autograd does not allow of a layer's input either; "
                    "change a clone."
                )
            numbers = [list(itertools.chain(*geometries))] if geometries[0] else []
            getattr(torch.ops.ella_cuda, f"{name}many_")(factors, rows, *numbers, alphas, allow_tf32)
            torch.autograd.graph.increment_version(factors)

    def drop(self) -> None:
        """Forget what waits, as of a pass that was given up."""
        self._waiting.clear()
        self._bytes.clear()

    def _wait(self, name: str, factor: Tensor, rows: Tensor, geometry: tuple[int, ...], alpha: float) -> None:
        refuse_graph(name, factor=factor, rows=rows)
        require_backend(name, factor)
        waiting = self._waiting.setdefault((name, allows_tf32(rows), rows.device), [])
        waiting.append((factor, rows, geometry, float(alpha), _version(rows)))
        storage = rows.untyped_storage()
        self._bytes[storage.data_ptr()] = storage.nbytes()
        if sum(self._bytes.values()) > self._most:
            self.launch()


def kernel_cases() -> list[KernelCase]:
    def patches(channels: int) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: (torch.zeros(*[9 * channels] * 2, dtype=torch.float64), normal(4, channels, 9, 7))

    def of(function: Callable[..., Tensor], mode: str) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda factor, x: function(factor, x, 3, mode, 0.5)

    def reduced(function: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda factor, x: function(factor, x.bfloat16(), 3, "circular", 0.5)

    op, reference = conv_kron_accumulate_, conv_kron_accumulate_torch_
    name, narrow = "conv_kron_accumulate_", few_bits(patches(4), torch.bfloat16)
    return [
        *cases(f"{name} of bfloat16", narrow, reduced(op), reduced(reference)),
        *(
            case
            for mode in ("circular", "zeros")
            for channels, more in ((3, ""), (4, ", 4 channels"), (12, ", 12 channels"), (15, ", 15 channels"))
            for case in cases(f"{name} {mode}{more}", patches(channels), of(op, mode), of(reference, mode))
        ),
    ]
