"""Averages of a bank's activations against float64 sums, finite differences and plain torch."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch
from torch import Tensor

from ella_cuda import ops
from ella_cuda.ops.averaged_filters import ACTIVATIONS, RELU, _forward, _gradients
from python_tests.ops import checks

OPERANDS = {
    "averaged_filters": checks.Operands([("N D",), ("S H D",)], (None, 1, False)),
    "averaged_filters_backward": checks.Operands([("N H",), ("N D",), ("S H D",)], (None, None, 1, True, True, True)),
}
REFUSALS = [
    (
        "averaged_filters",
        [("2 3",), ("0 5 3",)],
        (None, 1, False),
        "bank must have at least one transform, got (0, 5, 3)",
    ),
    ("averaged_filters", [("2 3",), ("4 5 3",), ("4",)], (1, False), "bias must have shape (H,) = (5,), got (4,)"),
    ("averaged_filters", [("2 3",), ("4 5 3",)], (None, 4, False), "activation must be from 0 to 3, got 4"),
    ("averaged_filters", [("2 3",), ("4 5 3",)], (None, -1, False), "activation must be from 0 to 3, got -1"),
]
VECTORISED = ["test_sums", "test_the_accuracy_of_torch"]

# N, S, H, D: single numbers, panels and tiles that are whole, less than whole and one more than whole, several groups of panels, more
# transforms than are summed at once, sums of nothing.
SHAPES = [
    (3, 4, 5, 7), (1, 1, 1, 1), (64, 2, 64, 64), (65, 3, 65, 65), (300, 2, 3, 9), (5, 70, 3, 4), (2, 2, 130, 20),
    (4, 3, 2, 0),
]  # fmt: skip
NAMES = [name for name in ACTIVATIONS if name != "identity"]


def arguments(
    shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """grad, x, bank and bias, of activations of either sign and of saturated ones."""
    n, s, h, d = shape
    made = torch.randn(n, h), torch.randn(n, d), 2 * torch.randn(s, h, d) / max(d, 1) ** 0.5, torch.randn(h)
    return tuple(t.double().to(device, dtype) for t in made)


DIFFERENTIABLE = {
    f"averaged_filters {activation}": checks.Case(
        partial(ops.averaged_filters, activation=activation),
        partial(ops.averaged_filters_torch, activation=activation),
        partial(ops.averaged_filters_torch, activation=activation),
        lambda *made: arguments(*made)[1:],
        small=[(3, 2, 2, 3)],
        empty=[(0, 2, 3, 4), (2, 2, 0, 4), (0, 1, 0, 0)],
        optional=1,
    )
    for activation in ACTIVATIONS
}


def value_and_slope(z: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    if activation == "relu":
        return z.clamp(min=0), (z > 0).double()
    if activation == "tanh":
        return (2 / (1 + (-2 * z).exp()) - 1), 1 / z.cosh().square()
    if activation == "gaussian":
        return (-z * z / 2).exp(), -z * (-z * z / 2).exp()
    return z, torch.ones_like(z)


def by_sums(grad: Tensor, x: Tensor, bank: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, ...]:
    """The averages and the gradients of x, bank and bias, in float64."""
    grad, x, bank = (t.double().cpu() for t in (grad, x, bank))
    z = (x[:, None, None] * bank).sum(-1) + (0 if bias is None else bias.double().cpu())
    value, slope = value_and_slope(z, activation)
    inner = grad[:, None] * slope / len(bank)
    return (
        value.mean(1),
        torch.einsum("nsh,shd->nd", inner, bank),
        torch.einsum("nsh,nd->shd", inner, x),
        inner.sum((0, 1)),
    )


def found(
    grad: Tensor, x: Tensor, bank: Tensor, bias: Tensor | None, activation: str, keeps: bool = False
) -> tuple[Tensor, ...]:
    number = ACTIVATIONS[activation]
    y, kept = _forward(x, bank, bias, number, keeps, False)
    return y, *_gradients(grad, x, bank, bias, kept if keeps else None, number, True, True, True, False)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("biased", [False, True])
def test_sums(shape, activation, biased, device):
    grad, x, bank, bias = arguments(shape, device)
    bias = bias if biased else None
    expected = by_sums(grad, x, bank, bias, activation)
    got = found(grad, x, bank, bias, activation)
    assert all(t.is_contiguous() for t in got)
    checks.assert_same([t.cpu() for t in got], expected)
    for function in (ops.averaged_filters, ops.averaged_filters_torch):
        leaves = [t.clone().requires_grad_() for t in (x, bank, bias) if t is not None]
        y = function(*leaves, *([] if biased else [None]), activation)
        results = y.detach(), *torch.autograd.grad(y, leaves, grad)
        checks.assert_same([t.cpu() for t in results], expected[: len(results)])


@pytest.mark.parametrize("shape", SHAPES[:-1])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_accuracy_of_torch(shape, activation, device):
    """In float32, beside torch's own error."""
    given = arguments(shape, device, torch.float32)
    grad, _, bank, bias = given
    results = []
    for function, dtype in (
        (ops.averaged_filters, torch.float32),
        (ops.averaged_filters_torch, torch.float32),
        (ops.averaged_filters_torch, torch.float64),
    ):
        leaves = [t.to(dtype).requires_grad_() for t in given[1:]]
        y = function(*leaves, activation)
        results.append((y.detach(), *torch.autograd.grad(y, leaves, grad.to(dtype))))
    x = given[1]
    inner = x.abs() @ bank.abs().flatten(0, 1).mT  # terms of the sums that are activated, and that of gradients
    terms = inner.amax() + bias.abs(), grad.abs().sum(1) * bank.abs().max(), grad.abs().mT @ x.abs(), grad.abs().sum(0)
    for ours, theirs, exact, sizes in zip(*results, terms, strict=True):
        checks.error_at_most_twice(ours, theirs, exact, sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("activation", NAMES)
def test_activations_of_every_size(activation, dtype, device):
    """Value and slope from subnormal to overflowing arguments, each to a few units in the last place of its own size, or of one."""
    sizes = torch.cat([10.0 ** torch.arange(-40, 39).double(), torch.linspace(0.01, 12, 400).double()])
    z = torch.cat([sizes, -sizes, torch.zeros(1)]).to(dtype).to(device)
    one = torch.ones(1, 1, dtype=dtype, device=device)
    y, by_z, _, _ = found(one.expand(len(z), 1), z[:, None], one[None], None, activation)
    exact = z.double().cpu()
    wide = exact.clone().requires_grad_()
    value = {"relu": torch.relu, "tanh": torch.tanh, "gaussian": lambda t: torch.exp(-0.5 * t * t)}[activation](wide)
    (slope,) = torch.autograd.grad(value.sum(), wide)
    slope = torch.where(exact.abs() > 1e30, slope.nan_to_num(0.0), slope)
    eps = torch.finfo(dtype).eps
    own = 0.0 if activation == "gaussian" else 1.0  # tanh and ReLU of small numbers are as exact as these
    floor = torch.finfo(dtype).tiny
    bound = 6 * eps * torch.where(torch.tensor(own > 0), value.detach().abs(), 1.0) + floor
    assert ((y.double().cpu()[:, 0] - value.detach()).abs() <= bound).all()
    assert ((by_z.double().cpu()[:, 0] - slope).abs() <= 12 * eps * exact.abs().clamp(1, 40)).all()


def test_numbers_that_are_not_finite(device):
    """As in torch: NaN stays, and its ReLU lets gradients through; infinite ones saturate."""
    x = torch.tensor([[math.nan], [math.inf], [-math.inf], [0.0]], device=device)
    one = torch.ones(1, 1, 1, device=device)
    for activation in NAMES:
        y = ops.averaged_filters(x, one, None, activation)
        expected = ops.averaged_filters_torch(x, one, None, activation)
        torch.testing.assert_close(y, expected, equal_nan=True, rtol=0, atol=0)
    for keeps in (False, True):
        by_x = found(torch.ones_like(x), x, one, None, "relu", keeps)[1]
        assert by_x.flatten().tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("biased", [False, True])
def test_derivatives_of_the_gradients(activation, biased, device):
    grad, *args = arguments((3, 2, 2, 4), device)
    args = tuple(t.requires_grad_() for t in args[: 2 + biased])
    rest = () if biased else (None,)
    number = ACTIVATIONS[activation]
    checks.check_derivatives(
        lambda g, *a: _gradients(g, *a, *rest, None, number, True, True, True, False),
        (grad.requires_grad_(), *args),
        second=False,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_kept_bits_change_nothing(shape, dtype):
    """Gradients by ReLU's bits are those by sums that are computed again, to the bit; eager autograd keeps bits alone."""
    grad, x, bank, bias = arguments(shape, torch.device("cpu"), dtype)
    kept, anew = (found(grad, x, bank, bias, "relu", keeps) for keeps in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(kept, anew, strict=True))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ops.averaged_filters(x, bank.clone().requires_grad_(), bias)
    assert all(
        t.numel() == 0 for t in saved if t.dtype == torch.uint8
    )  # what a checkpoint counts is the same each time
    y = ops.averaged_filters(x, bank.clone().requires_grad_(), bias)
    (bits,) = (t for t in y.grad_fn.saved_tensors if t is not None and t.dtype == torch.uint8)
    n, s, h, _ = shape
    assert bits.numel() == s * h * (-(-n // (256 // x.element_size())) * 32 // x.element_size())


def test_bits_of_another_call_are_refused(device):
    grad, x, bank, bias = arguments(SHAPES[0], torch.device("cpu"))
    _, kept = _forward(x, bank, bias, RELU, True, False)
    op = torch.ops.ella_cuda.averaged_filters_backward
    with pytest.raises(RuntimeError, match="kept must be what the forward pass kept"):
        op(grad, x, bank[:2], bias, kept, RELU, True, True, True)
    with pytest.raises(RuntimeError, match="kept must be empty, or bits of activation 1"):
        op(grad, x, bank, bias, kept, ACTIVATIONS["tanh"], True, True, True)


@pytest.mark.parametrize("keeps", [False, True])
def test_only_what_is_asked_for_is_computed(keeps, device):
    grad, x, bank, bias = arguments(SHAPES[3], device)
    everything = found(grad, x, bank, bias, "relu", keeps)[1:]
    _, kept = _forward(x, bank, bias, RELU, keeps, False)
    for wanted in itertools.product((False, True), repeat=3):
        got = torch.ops.ella_cuda.averaged_filters_backward(grad, x, bank, bias, kept, RELU, *wanted)
        for part, whole, want in zip(got, everything, wanted, strict=True):
            assert torch.equal(part, whole) if want else part.shape == (0,)


@pytest.mark.parametrize("shape", [(3, 4, 5, 7), (65, 2, 65, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_layout(shape, dtype, device):
    given = arguments(shape, device, dtype)
    for number, argument in enumerate(given):
        for _, laid_out in checks.layouts(argument):
            args = [laid_out if i == number else t for i, t in enumerate(given)]
            for keeps in (False, True):
                got, dense = (found(*a, "relu", keeps) for a in (args, [t.contiguous() for t in args]))
                checks.assert_same(got, dense, rtol=0, atol=0)
    by_filter = torch.randn(shape[2], shape[1], shape[3], dtype=dtype, device=device)  # as copies of filters lie
    args = given[0], given[1], by_filter.transpose(0, 1), given[3]
    checks.assert_same(found(*args, "tanh"), found(*(t.contiguous() for t in args), "tanh"), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES[:-1])
def test_nothing_is_read_past_the_end(shape, dtype):
    given = [checks.before_a_guard_page(t) for t in arguments(shape, torch.device("cpu"), dtype)]
    for keeps in (False, True):
        assert all(torch.isfinite(t).all() for t in found(*given, "relu", keeps))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_same_numbers_for_any_number_of_threads(activation):
    given = arguments((300, 5, 130, 70), torch.device("cpu"), torch.float32)
    kept = {False, activation == "relu"}
    checks.same_for_any_number_of_threads(lambda: [found(*given, activation, keeps) for keeps in kept])


def test_an_image_does_not_depend_on_its_neighbours(device):
    _, x, bank, bias = arguments((65, 3, 5, 7), device)
    y = ops.averaged_filters(x, bank, bias)
    checks.assert_same(torch.cat([ops.averaged_filters(row[None], bank, bias) for row in x]), y)


def test_activations_are_not_stored():
    """Neither the (N, S, H) numbers nor, with a gradient in the bank, more than its own size and bits of them."""
    x, bank, bias = torch.randn(2048, 64), torch.randn(31, 128, 64), torch.randn(128)
    grad = torch.randn(2048, 128)
    numbers = 2048 * 31 * 128 * 4
    assert checks.peak_bytes(lambda: found(grad, x, bank, bias, "tanh")) < 0.25 * numbers
    assert checks.peak_bytes(lambda: found(grad, x, bank, bias, "relu", True)) < 0.25 * numbers
    assert checks.peak_bytes(lambda: ops.averaged_filters_torch(x, bank, bias)) > 0.9 * numbers


def test_an_activation_that_there_is_not(device):
    x, bank = torch.zeros(2, 3, device=device), torch.zeros(2, 5, 3, device=device)
    for function in (ops.averaged_filters, ops.averaged_filters_torch):
        with pytest.raises(
            ValueError, match="activation must be one of 'identity', 'relu', 'tanh', 'gaussian', got 'sine'"
        ):
            function(x, bank, None, "sine")
