"""How kernels are checked: awkward inputs, every order of threads and blocks, an error bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .simulator import Simulator

SCHEDULES = [
    {"threads": "forward", "blocks": "forward"},
    {"threads": "reverse", "blocks": "reverse"},
    {"threads": "random", "blocks": "random", "seed": 3},
    {"threads": "forward", "blocks": "reverse"},
]
LAYOUTS = ["contiguous", "strided", "permuted", "expanded"]
DTYPES = [torch.float32, torch.float64]
GUARD = 64


def guarded(values: Tensor, fill: float = float("nan")) -> tuple[Tensor, Callable[[], None]]:
    """A contiguous copy with GUARD elements of `fill` on both sides, and a check that those are untouched."""
    storage = torch.full((values.numel() + 2 * GUARD,), fill, dtype=values.dtype)
    inner = storage[GUARD : GUARD + values.numel()].view(values.shape)
    inner.copy_(values)

    def check() -> None:
        edges = torch.cat([storage[:GUARD], storage[GUARD + values.numel() :]])
        untouched = edges.isnan() if fill != fill else edges == fill
        assert bool(untouched.all()), "a kernel wrote outside its tensor"

    return inner, check


def arrange(values: Tensor, layout: str) -> Tensor:
    """The values in a layout, with NaN wherever a kernel has no business; "expanded" repeats the last axis' first."""
    if layout == "contiguous":
        return guarded(values)[0]
    if layout == "strided":
        big = torch.full([2 * size + 1 for size in values.shape], float("nan"), dtype=values.dtype)
        view = big[tuple(slice(1, 2 * size + 1, 2) for size in values.shape)]
        return view.copy_(values)
    if layout == "permuted":
        axes = list(reversed(range(values.dim())))
        return values.permute(axes).contiguous().permute(axes)
    assert layout == "expanded"
    if values.dim() == 0 or values.shape[-1] == 0:
        return values
    return values[..., :1].contiguous().expand(values.shape)


def rounded_to_tf32(values: Tensor) -> Tensor:
    """float32 values to 11 significant bits, to nearest, ties away from zero."""
    mantissa, exponent = torch.frexp(values.double())
    mantissa = torch.copysign(torch.floor(mantissa.abs() * 2**11 + 0.5), mantissa) / 2**11
    return torch.ldexp(mantissa, exponent).to(values.dtype)


def tuple_of(result: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def same_bits(first: Tensor, second: Tensor) -> bool:
    return (
        first.shape == second.shape
        and torch.equal(first.isnan(), second.isnan())
        and torch.equal(torch.nan_to_num(first, nan=0.0), torch.nan_to_num(second, nan=0.0))
    )


def in_every_order(
    simulator: Simulator, call: Callable[[], Tensor | Sequence[Tensor]], **device: Any
) -> tuple[Tensor, ...]:
    """The results of a call, which must be the same to the bit in every order of threads and blocks.

    `device`: what launchers are told about it, as :meth:`Simulator.schedule` takes it.
    """
    results = []
    for schedule in SCHEDULES:
        with simulator.scheduled(**schedule, **device):
            results.append(tuple_of(call()))
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            assert same_bits(first, second), "the result depends on the order of threads or blocks"
    return results[0]


def assert_accurate(got: Tensor, exact: Tensor, same_precision: Tensor | None = None) -> None:
    """`got` against float64 values: at most twice torch's own error in got's dtype, and some roundings of the largest.

    NaN passes only where the exact value is NaN too.
    """
    assert got.shape == exact.shape, f"shape {tuple(got.shape)}, expected {tuple(exact.shape)}"
    if got.numel() == 0:
        return
    got64, finite = got.double(), exact.isfinite()
    assert torch.equal(got64.isnan(), exact.isnan()), "NaN where it should not be, or none where it should"
    assert torch.equal(got64[~finite & ~exact.isnan()], exact[~finite & ~exact.isnan()])
    if not finite.any():
        return
    torch_error = 0.0
    if same_precision is not None:
        torch_error = (same_precision.double() - exact)[finite].abs().max().item()
    allowed = 2 * torch_error + 16 * torch.finfo(got.dtype).eps * exact[finite].abs().max().item()
    error = (got64 - exact)[finite].abs().max().item()
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"
