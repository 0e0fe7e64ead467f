"""What nvcc makes of the kernels, inline assembly included, computes what the package's CPU ops compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ella_cuda  # noqa: F401, registers the CPU ops

from ..checking import arrange, assert_accurate, guarded, tuple_of
from ..launches import PROCESSORS, accumulate, call_every_op
from .device import PtxDevice

pytestmark = [pytest.mark.nvcc, pytest.mark.slow]


class Checked:
    """A device's ops; every call is held against the CPU op of that name, in float64 and in the same precision."""

    def __init__(self, device: PtxDevice) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            reference = getattr(torch.ops.ella_cuda, name)
            if name.endswith("_"):
                factor, *rest = arguments
                got, untouched = guarded(factor, fill=7.0)
                getattr(self._device.ops, name)(got, *rest)
                untouched()
                got, same, exact = (got,), (factor.clone(),), (factor.double(),)
                reference(*same, *rest)
                reference(*exact, *map(_double, rest))
            else:
                got = tuple_of(getattr(self._device.ops, name)(*arguments))
                same, exact = tuple_of(reference(*arguments)), tuple_of(reference(*map(_double, arguments)))
            single = any(isinstance(argument, Tensor) and argument.dtype == torch.float32 for argument in arguments)
            for one, expected, other in zip(got, exact, same, strict=True):
                if one.is_floating_point():  # a result in float64 of numbers in float32 is as accurate as those
                    assert_accurate(one.float() if single else one, expected, other)
                else:
                    assert torch.equal(one, other), name
            return got[0] if len(got) == 1 else got

        return call


def _double(argument: Any) -> Any:
    return argument.double() if isinstance(argument, Tensor) and argument.is_floating_point() else argument


def test_every_kernel(ampere: PtxDevice) -> None:
    ampere.launched.clear()
    with ampere.scheduled(multiprocessors=PROCESSORS):
        call_every_op(Checked(ampere))
    assert ampere.launched == set(ampere.kernels)


def test_products_of_warpgroups(hopper: PtxDevice) -> None:
    hopper.launched.clear()
    with hopper.scheduled(multiprocessors=PROCESSORS):
        accumulate(Checked(hopper), torch.float32, [100])
    with hopper.scheduled(blocks="reverse"):
        for d, layout in ((128, "contiguous"), (130, "permuted"), (200, "strided")):
            Checked(hopper).kron_accumulate_(torch.randn(2, d, d), arrange(torch.randn(70, 2, d), layout), 0.3)
    known = {name for name in hopper.kernels if "syrk_warpgroup_kernel" in name}
    assert known and known <= hopper.launched


# (N, C, D, X, Y): tiles that are not full, several tiles, one position, a middle that is stored and one that is not.
SHAPES = [(5, 3, 4, 7, 6), (70, 2, 9, 33, 20), (3, 6, 66, 5, 18), (66, 5, 3, 1, 9), (2, 20, 33, 4, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_factored_linear(ampere: PtxDevice, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    N, C, D, X, Y = shape
    x, grad = (arrange(torch.randn(N, c, n, dtype=dtype), "strided") for c, n in ((C, X), (D, Y)))
    weight_in, weight_out = (arrange(torch.randn(D, C, n, dtype=dtype), "contiguous") for n in (X, Y))
    bias_in, bias_out = torch.randn(D, dtype=dtype), torch.randn(Y, dtype=dtype)
    for cache_bytes in (1024, 1 << 20):
        with ampere.scheduled("reverse", cache_bytes=cache_bytes):
            ops = Checked(ampere)
            ops.factored_linear(x, weight_in, weight_out, bias_in, bias_out)
            ops.factored_linear_backward(grad.contiguous(), x, weight_in, weight_out, bias_in, *[True] * 5)


@pytest.mark.parametrize("shape", [(70, 2, 33), (37, 1, 133), (9, 3, 64), (300, 2, 32)])
def test_kron_accumulate(ampere: PtxDevice, shape: tuple[int, int, int]) -> None:
    rows = torch.randn(shape)
    with ampere.scheduled("random"):
        for layout in ("contiguous", "strided", "permuted", "expanded"):
            Checked(ampere).kron_accumulate_(torch.randn(shape[1], *shape[2:] * 2), arrange(rows, layout), -1.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kron_logdet(ampere: PtxDevice, dtype: torch.dtype) -> None:
    """Several tiles of eigenvalues in both directions."""
    sides = torch.rand(2, 300, dtype=dtype), torch.rand(2, 70, dtype=dtype)
    precision = torch.tensor(0.3, dtype=dtype)
    with ampere.scheduled("reverse"):
        ops = Checked(ampere)
        ops.kron_logdet(*sides, precision)
        ops.kron_logdet_gradient(*sides, precision)
        ops.kron_logdet_hvp(*sides, precision, *map(torch.randn_like, (*sides, precision)))
