"""averaged_filters and its gradients against float64 sums."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ella_cuda.ops import averaged_filters_torch
from ella_cuda.ops.averaged_filters import ACTIVATIONS
from python_tests.ops import test_averaged_filters as averaged
from python_tests.ops.test_averaged_filters import by_sums

from .checking import DTYPES, LAYOUTS, arrange, assert_accurate, in_every_order
from .simulator import Simulator

# N, S, H, D. Tiles are 64 x 64 of images and filters, slabs 16 deep and five at a time, copies of 4 where sizes allow; the simulator
# writes up to 6,000 slopes, or activations in float64, at a time: those of all transforms, of some, or of one.
SHAPES = [
    (1, 1, 1, 1), (5, 3, 9, 10), (68, 2, 4, 20), (3, 5, 66, 37), (65, 3, 67, 100), (64, 4, 64, 8), (30, 7, 40, 3),
    (3, 2, 2, 0),
]  # fmt: skip


def arguments(shape: tuple[int, ...], dtype: torch.dtype, layout: str = "contiguous") -> tuple[Tensor, ...]:
    return tuple(arrange(t, layout) for t in averaged.arguments(shape, torch.device("cpu"), dtype))


def in_torch(grad: Tensor, x: Tensor, bank: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, ...]:
    """The averages, and the gradients of x, bank and bias, in the arguments' precision."""
    leaves = [t.detach().requires_grad_() for t in (x, bank, torch.zeros_like(grad[0]) if bias is None else bias)]
    y = averaged_filters_torch(*leaves, activation)
    return y.detach(), *torch.autograd.grad(y, leaves, grad)


def run(
    simulator: Simulator,
    grad: Tensor,
    x: Tensor,
    bank: Tensor,
    bias: Tensor | None,
    activation: str = "tanh",
    tf32: bool = False,
) -> tuple[Tensor, ...]:
    number = ACTIVATIONS[activation]
    y, kept = simulator.ops.averaged_filters(x, bank, bias, number, True, tf32)
    assert kept.shape == (0,)
    wanted = True, True, True
    return y, *simulator.ops.averaged_filters_backward(grad, x, bank, bias, kept, number, *wanted, tf32)


def check(simulator: Simulator, given: tuple[Tensor, ...], activation: str) -> None:
    got = in_every_order(simulator, lambda: run(simulator, *given, activation))
    for ours, right, own in zip(got, by_sums(*given, activation), in_torch(*given, activation), strict=True):
        assert ours.is_contiguous()
        assert_accurate(ours, right, own)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_averages_and_gradients(simulator, shape, activation, dtype):
    grad, x, bank, bias = arguments(shape, dtype)
    check(simulator, (grad, x, bank, bias if activation != "tanh" else None), activation)


@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(simulator, layout, dtype):
    check(simulator, arguments((5, 3, 9, 12), dtype, layout), "relu")
    grad, x, bank, bias = arguments((65, 5, 20, 8), dtype)  # some transforms at a time, of a bank that lies by filters
    by_filter = bank.transpose(0, 1).contiguous().transpose(0, 1)
    check(simulator, (grad, x, by_filter, bias), "gaussian")


@pytest.mark.parametrize("multiprocessors", [1, 4, 64])
def test_transforms_that_blocks_share_out(simulator, multiprocessors):
    """One block for all, some with one more transform than others, and one for each."""
    given = arguments((70, 5, 8, 40), torch.float32)
    with simulator.scheduled(multiprocessors=multiprocessors):
        got = run(simulator, *given, "relu")
    for ours, right, own in zip(got, by_sums(*given, "relu"), in_torch(*given, "relu"), strict=True):
        assert_accurate(ours, right, own)


def test_numbers_rounded_to_tf32(simulator):
    """Where it is allowed products have TF32's accuracy, and of small whole numbers they are exact."""
    n, s, h, d = 20, 4, 9, 30
    whole = [torch.randint(-3, 4, size).float() for size in ((n, h), (n, d), (s, h, d), (h,))]
    for ours, right in zip(run(simulator, *whole, "identity", True), by_sums(*whole, "identity"), strict=True):
        assert torch.equal(ours.double(), right)
    given = arguments((n, s, h, d), torch.float32)
    for ours, right in zip(run(simulator, *given, "tanh", True), by_sums(*given, "tanh"), strict=True):
        error = float((ours - right).abs().max() / right.abs().max())
        assert 1e-5 < error < 3e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_gradient_alone(simulator, dtype):
    given = arguments((30, 7, 40, 3), dtype)
    everything = run(simulator, *given, "relu")[1:]
    for place in range(3):
        wanted = [i == place for i in range(3)]
        got = simulator.ops.averaged_filters_backward(*given, None, ACTIVATIONS["relu"], *wanted)
        for part, whole, want in zip(got, everything, wanted, strict=True):
            assert torch.equal(part, whole) if want else part.shape == (0,)


def test_numbers_that_are_not_finite(simulator):
    x = torch.tensor([[float("nan")], [0.0], [3.0], [-3.0]])
    y, by_x, _, _ = run(simulator, torch.ones(4, 1), x, torch.ones(1, 1, 1), None, "relu")
    assert y[0].isnan() and y[1:].flatten().tolist() == [0, 3, 0]
    assert by_x.flatten().tolist() == [1, 0, 1, 0]
