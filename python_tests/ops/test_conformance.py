"""What every differentiable op must satisfy: layouts, nothing at all, derivatives, transforms, compilation, any number of threads."""

from __future__ import annotations

import pytest
import torch

from python_tests.ops import checks
from python_tests.ops.test_refusals import OF_OPS, OPS, SMALL, tensors

CASES = {name: case for module in OF_OPS for name, case in getattr(module, "DIFFERENTIABLE", {}).items()}
WAYS = ["the device's", "by torch's convolutions"]


def each(shapes: str, first: bool = False) -> pytest.MarkDecorator:
    """Each case's shapes of a kind, or the first of them, in each way there is."""
    params = [
        pytest.param(case, way, shape, id=f"{name}-{shape}-{way}")
        for name, case in CASES.items()
        for way in WAYS[: 1 + (case.ways and shapes != "threaded")]  # threads share no sums of torch's
        for shape in getattr(case, shapes)[: 1 if first else None]
    ]
    return pytest.mark.parametrize(("case", "way", "shape"), params, indirect=["way"])


@each("laid_out")
def test_every_layout(case, way, shape, device):
    """Of each argument and of the incoming gradient."""
    args = case.make(shape, device, torch.float64)
    args = (*args, torch.randn_like(case.exact(*args)))
    for position, argument in enumerate(args):
        for _, laid_out in checks.layouts(argument):
            *call, grad = [*args[:position], laid_out, *args[position + 1 :]]
            leaves = [t.detach().requires_grad_() for t in call]
            plain = [t.detach().clone().requires_grad_() for t in call]
            y, exact = case.op(*leaves), case.exact(*plain)
            checks.assert_same(y, exact)
            checks.assert_same(
                torch.autograd.grad(y, leaves, grad, retain_graph=True), torch.autograd.grad(exact, plain, grad, True)
            )
            checks.assert_same(  # an expanded gradient
                torch.autograd.grad(y.sum(), leaves), torch.autograd.grad(exact.sum(), plain)
            )


@each("empty")
def test_empty(case, way, shape, device):
    args = [a.requires_grad_() for a in case.make(shape, device, torch.float64)]
    y, reference = case.op(*args), case.reference(*args)
    checks.assert_same(y, reference)
    checks.assert_same(torch.autograd.grad(y.sum(), args), torch.autograd.grad(reference.sum(), args))


@each("small")
def test_derivatives(case, way, shape, device):
    for args in case.calls(shape, device):
        checks.check_derivatives(case.op, tuple(a.requires_grad_() for a in args))


@each("small", first=True)
def test_transforms(case, way, shape, device):
    for args in case.calls(shape, device):
        checks.check_func_transforms(case.op, case.reference, args)
        checks.check_vmap(case.op, args, batch=2)
    checks.check_compile(case.op, args)


@each("threaded")
def test_same_numbers_for_any_number_of_threads(case, way, shape):
    args = [a.requires_grad_() for a in case.make(shape, torch.device("cpu"), torch.float32)]

    def results():
        y = case.op(*args)
        return y, *torch.autograd.grad(y.square().sum(), args)

    checks.same_for_any_number_of_threads(results, (1, 2, 3, 7, 16))


@pytest.mark.parametrize("some", [False, True], ids=["every gradient", "the last one's"])
@pytest.mark.parametrize("name", [name for name in OPS if not OPS[name].contiguous])
def test_opcheck(name, some, device):
    made = [
        torch.rand(t.shape, dtype=torch.float64) + 0.1 if t.is_floating_point() else t for t in tensors(name, SMALL)
    ]
    made = [t.contiguous().to(device) for t in made]
    for tensor in [t for t in made if t.is_floating_point() and not name.endswith("_")][-1 if some else 0 :]:
        tensor.requires_grad_()
    torch.library.opcheck(getattr(torch.ops.ella_cuda, name).default, (*made, *OPS[name].rest))
