"""Code that sees torch calls through __torch_function__, or traces them, sees the op, and its own gradients survive."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ella_cuda import ops
from ella_cuda.nn import CircularConv2d, FactoredLinear2d, PolyphasePool2d
from python_tests.ops import checks


class Scaled(torch.Tensor):
    """A weight that is multiplied by a learnable number wherever it is used."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            plain = [a.as_subclass(torch.Tensor) * a.scale if isinstance(a, Scaled) else a for a in args]
            return function(*plain, **(kwargs or {}))


def test_a_subclass_keeps_the_gradient_of_what_it_computes():
    x, weight = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 3, 3)
    scaled, scale = weight.as_subclass(Scaled), torch.tensor(1.5, requires_grad=True)
    scaled.scale = scale
    (ours,) = torch.autograd.grad(ops.circular_conv2d(x, scaled).square().sum(), scale)
    (expected,) = torch.autograd.grad(ops.circular_conv2d_torch(x, weight * scale).square().sum(), scale)
    torch.testing.assert_close(ours, expected)


class Watched(torch.Tensor):
    """Sees nothing but what reaches the dispatcher."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor, seen: list) -> Watched:
        outer = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        outer.inner, outer.seen = inner, seen
        return outer

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        for a in args:
            if isinstance(a, Watched):
                a.seen.append(function)
        return function(*(a.inner if isinstance(a, Watched) else a for a in args), **(kwargs or {}))


def test_a_subclass_of_the_dispatcher_sees_the_op_itself():
    """Not the one by which eager autograd keeps an intermediate, which has no rules for others."""
    x, weight_in, weight_out = (torch.randn(*shape) for shape in ((4, 2, 6), (3, 2, 6), (3, 2, 5)))
    seen = []
    y = ops.factored_linear(Watched(x, seen), weight_in, weight_out.requires_grad_())
    assert seen == [torch.ops.ella_cuda.factored_linear.default]
    checks.assert_same(y, ops.factored_linear_torch(x, weight_in, weight_out))


@pytest.mark.parametrize("weight_needs_gradient", [True, False])
def test_a_mode_keeps_the_gradient_of_what_it_puts_in(weight_needs_gradient):
    scale, seen = torch.tensor(2.0, requires_grad=True), []

    class Replace(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.ella_cuda.circular_conv2d.default:
                seen.append(function)
                return ops.circular_conv2d_torch(*args) * scale
            return function(*args, **(kwargs or {}))

    x, weight = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 3, 3, requires_grad=weight_needs_gradient)
    with Replace():
        y = ops.circular_conv2d(x, weight)
    assert len(seen) == 1
    (gradient,) = torch.autograd.grad(y.sum(), scale)
    torch.testing.assert_close(gradient, ops.circular_conv2d_torch(x, weight).sum().detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_traced_network_can_be_saved():
    model = nn.Sequential(CircularConv2d(2, 3), PolyphasePool2d(), FactoredLinear2d(3, 2, (2, 4), (2, 2)))
    x = torch.randn(3, 2, 4, 8)
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(model, x), file)
    file.seek(0)
    checks.assert_same(torch.jit.load(file)(x), model(x))
