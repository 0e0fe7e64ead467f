"""ella_cuda.ops.factored_linear against the dense fully connected map it factors."""

from __future__ import annotations

import contextlib
import importlib
import os

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ella_cuda import ops
from ella_cuda.ops.factored_linear import _backward
from python_tests.ops import checks

OPERANDS = {
    "factored_linear": checks.Operands([("N C X",), ("D C X",), ("D C Y",)], (None, None)),
    "factored_linear_backward": checks.Operands([("N D Y",), ("N C X",), ("D C X",), ("D C Y",)], (None, *[True] * 5)),
}

factored_linear_module = importlib.import_module(
    "ella_cuda.ops.factored_linear"
)  # the package's attribute is the function

SHAPES = [
    (3, 2, 4, 5, 3),
    (1, 1, 1, 1, 1),
    (2, 3, 1, 7, 1),
    (5, 1, 3, 1, 9),
    (70, 3, 5, 1, 2),
    (5, 1, 2, 2080, 3),
    (33, 17, 9, 4, 1),
    (7, 5, 6, 70, 65),
    (7, 3, 2, 64, 48),  # whole vectors of positions on the CPU
    (7, 3, 2, 24, 40),  # beside register tiles of eight numbers a vector, some left over
    (7, 3, 2, 28, 44),  # of four
    (7, 3, 2, 30, 46),  # of two
    (67, 110, 8, 32, 224),  # and several blocks of images and of output channels
    (67, 110, 8, 33, 5),  # several blocks of output channels, packed positions
    (5, 2, 9, 300, 3),  # sums longer than those of one pass
    (1030, 2, 3, 7, 6),  # more blocks of images than are summed one after the other
    (150, 41, 3, 6, 2),  # few positions: a thread takes some input channels, not all of them equally many
    (3, 330, 4, 3, 2),  # and in more groups than there are threads
    (67, 41, 100, 6, 2),  # and several chunks of output channels
    (1030, 41, 3, 3, 5),  # and many blocks of images
    (1030, 41, 20, 30, 3),  # and both
    (150, 3, 40, 70, 9),  # few input channels: one's work is shared out
    (35, 110, 160, 33, 8),  # several chunks of output channels, packed positions
    (35, 110, 160, 32, 16),  # and whole vectors of positions
    (2100, 3, 7, 2, 3),  # images in several parts
    (1100, 41, 7, 32, 8),  # and few positions, read along the rows
    (7, 1, 2, 64, 96),  # the gradient too
    (140, 60, 70, 1, 4),  # multiplied out
    (140, 60, 70, 4, 1),
    (131, 67, 61, 7, 1),  # panels of channels that are not full
    (300, 30, 60, 70, 1),  # more positions than a panel has, and more images than weights are made for at once
    (600, 31, 29, 16, 1),  # more images than are summed at once
    (64, 300, 40, 5, 1),  # channels in several parts
    (131, 77, 61, 1, 1),
    (131, 77, 61, 4, 1),  # and some beyond whole vectors of them
    (70, 2, 7, 2048, 3),  # rows in several parts, of many images
    (70, 3, 40, 96, 1040),
]  # N, C, D, X, Y
ONE_OUTPUT = [(140, 60, 70, 4, 1), (131, 67, 61, 7, 1), (131, 77, 61, 1, 1), (131, 77, 61, 35, 1)]
# Whose rows end within a vector, or with it.
GUARDED = [(3, 2, 2, 5, 17), (3, 12, 2, 17, 33), (70, 12, 2, 33, 5), (3, 2, 2, 40, 40), *ONE_OUTPUT]


def arguments(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    n, c, d, x, y = shape
    sizes = ((n, c, x), (d, c, x), (d, c, y), (d,), (y,))
    return tuple(torch.randn(s, dtype=torch.float64).to(device, dtype) for s in sizes)


def dense(
    x: Tensor,
    weight_in: Tensor,
    weight_out: Tensor,
    bias_in: Tensor | None = None,
    bias_out: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The same map through the dense weight W[d,y,c,x] = V[d,c,y] U[d,c,x] of a fully connected layer."""
    x, u, v = x.to(dtype), weight_in.to(dtype), weight_out.to(dtype)
    w = v.permute(0, 2, 1)[:, :, :, None] * u[:, None]  # (D, Y, C, X)
    result = (w.flatten(2) @ x.flatten(1).T).permute(2, 0, 1)
    if bias_in is not None:
        result = result + (bias_in.to(dtype)[:, None, None] * v).sum(1)
    return result if bias_out is None else result + bias_out.to(dtype)


DIFFERENTIABLE = {
    "factored_linear": checks.Case(
        ops.factored_linear,
        ops.factored_linear_torch,
        dense,
        arguments,
        small=[(2, 2, 3, 3, 2)],
        laid_out=[(4, 3, 5, 6, 7), (5, 3, 2, 64, 48), *ONE_OUTPUT[:3]],
        empty=[(0, 2, 3, 4, 5), (2, 0, 3, 4, 5), (64, 0, 3, 99, 5), (2, 3, 0, 4, 5), (2, 3, 4, 0, 5), (2, 3, 4, 5, 0)],
        threaded=[
            (64, 8, 16, 40, 24), (150, 8, 6, 40, 24), (150, 41, 6, 5, 33), (67, 110, 8, 32, 224), (35, 110, 160, 33, 8),
            *ONE_OUTPUT,
        ],
        optional=2,
    )
}  # fmt: skip


def plain_torch(shape: tuple[int, ...], *args: Tensor | None) -> Tensor:
    """What a user could write in torch, in the arguments' precision; sums are as long as where weights are multiplied out."""
    n, c, d, x, y = shape
    multiplied_out = 1 in (x, y) and n * c * d >= 1 << 19
    return dense(*args, dtype=args[0].dtype) if multiplied_out else ops.factored_linear_torch(*args)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_dense_layer(shape, dtype, device):
    args = arguments(shape, device, dtype)
    for biases in ((None, None), (args[3], None), (None, args[4]), args[3:]):
        call = (*args[:3], *biases)
        terms = dense(*(None if a is None else a.abs() for a in call))
        checks.error_at_most_twice(ops.factored_linear(*call), plain_torch(shape, *call), dense(*call), terms)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_equal_the_dense_layers(shape, dtype, device):
    args = [a.requires_grad_() for a in arguments(shape, device, dtype)]
    grad = torch.randn(shape[0], shape[2], shape[4], dtype=torch.float64).to(device, dtype)
    ours = torch.autograd.grad(ops.factored_linear(*args), args, grad)
    reference = torch.autograd.grad(plain_torch(shape, *args), args, grad)
    wide = [a.detach().double().requires_grad_() for a in args]
    exact = torch.autograd.grad(dense(*wide), wide, grad.double())
    for o, t, e in zip(ours, reference, exact, strict=True):
        checks.error_at_most_twice(o, t, e)


def test_an_intermediate_larger_than_the_cache(device):
    """Which CUDA kernels compute in parts."""
    if device.type != "cuda":
        pytest.skip("one way for all sizes there")
    shape = (512, 300, 310, 3, 2)
    intermediate = shape[0] * shape[1] * shape[2] * 4
    assert intermediate > torch.cuda.get_device_properties(device).L2_cache_size
    args = [a.requires_grad_() for a in arguments(shape, device, torch.float32)]
    y, reference = ops.factored_linear(*args), ops.factored_linear_torch(*args)
    torch.testing.assert_close(y, reference, rtol=1e-4, atol=1e-4 * float(reference.square().mean().sqrt()))
    grad = torch.randn_like(y)
    for ours, theirs in zip(
        torch.autograd.grad(y, args, grad), torch.autograd.grad(reference, args, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.square().mean().sqrt()))


@pytest.mark.parametrize("infinite", [1, 2, 3])
@pytest.mark.parametrize("shape", [(3, 2, 2, 4, 1), (3, 2, 2, 4, 8), (3, 2, 2, 64, 48), (17, 1, 2, 3, 1)])
def test_infinities_stay_where_they_are(shape, infinite, device):
    """Lanes of vectors that hold no image must not turn an infinite weight into NaN where there is none."""
    args = [torch.ones_like(a) for a in arguments(shape, device, torch.float32)]
    args[infinite].view(-1)[0] = torch.inf
    leaves, plain = ([a.clone().requires_grad_() for a in args] for _ in range(2))
    results = ops.factored_linear(*leaves), ops.factored_linear_torch(*plain)
    ours, reference = (torch.autograd.grad(y.sum(), a) for y, a in zip(results, (leaves, plain), strict=True))
    for o, t in zip((results[0], *ours), (results[1], *reference), strict=True):
        if device.type == "cuda":  # NaN for infinity there, and nowhere else
            assert torch.equal(o.isfinite(), t.isfinite())
            o, t = o[o.isfinite()], t[t.isfinite()]
        torch.testing.assert_close(o, t, equal_nan=True)


@pytest.mark.parametrize("share", ["C", "C and N"])
def test_sums_over_many_images_are_short(share):
    """Numbers of one sign, whose sums grow: partial sums of few terms lose less of them."""
    n, c, d, x, y = {"C": (16384, 40, 4, 8, 8), "C and N": (16384, 12, 4, 8, 8)}[share]
    sizes = ((n, c, x), (d, c, x), (d, c, y), (d,), (y,))
    args = [torch.rand(s).requires_grad_() for s in sizes]
    grad = torch.rand(n, d, y)
    ours = torch.autograd.grad(ops.factored_linear(*args), args, grad)
    reference = torch.autograd.grad(ops.factored_linear_torch(*args), args, grad)
    wide = [a.detach().double().requires_grad_() for a in args]
    exact = torch.autograd.grad(ops.factored_linear_torch(*wide), wide, grad.double())
    for o, t, e in zip(ours, reference, exact, strict=True):
        checks.error_at_most_twice(o, t, e)


@pytest.mark.skipif(os.name != "posix", reason="needs mprotect")
@pytest.mark.parametrize("shape", GUARDED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_past_the_end_is_read(shape, dtype):
    args = arguments(shape, torch.device("cpu"), dtype)
    grad = torch.randn(shape[0], shape[2], shape[4], dtype=dtype)
    guarded = [checks.before_a_guard_page(a) for a in args]
    assert torch.equal(ops.factored_linear(*guarded), ops.factored_linear(*args))
    ours = _backward(checks.before_a_guard_page(grad), *guarded[:4], *[True] * 5)
    for o, e in zip(ours, _backward(grad, *args[:4], *[True] * 5), strict=True):
        assert torch.equal(o, e)


def test_derivatives_of_the_backward_op(device):
    args = tuple(a.requires_grad_() for a in arguments((2, 2, 3, 3, 2), device))
    grad = torch.randn(2, 3, 2, dtype=torch.float64, device=device, requires_grad=True)
    checks.check_derivatives(lambda *a: _backward(*a, *[True] * 5, False), (grad, *args[:4]))
    checks.check_derivatives(lambda *a: _backward(*a, True, False, True, True, False, False)[::2], (grad, *args[:4]))


@pytest.mark.parametrize(
    "shape",
    [(3, 2, 4, 5, 3), (35, 80, 110, 33, 5), (35, 80, 110, 32, 32), (3, 12, 4, 5, 3), ONE_OUTPUT[0], ONE_OUTPUT[2]],
)
def test_only_what_is_asked_for_is_computed(shape, device):
    args = arguments(shape, device)
    grad = torch.randn(shape[0], shape[2], shape[4], dtype=torch.float64, device=device)
    everything = _backward(grad, *args[:4], *[True] * 5)
    for i in range(5):
        mask = [j == i for j in range(5)]
        parts = _backward(grad, *args[:4], *mask)
        assert [p.numel() == 0 for p in parts] == [not m for m in mask]
        checks.assert_same(parts[i], everything[i])


# Kept: one block of images, a part of one, several and many; positions in the lanes or not; several chunks of output channels;
# input channels that would not all be there at a time, were their intermediate not kept.
KEPT = [
    (64, 2, 3, 40, 5),
    (10, 3, 1, 64, 7),
    (150, 12, 5, 33, 2),
    (1030, 2, 3, 17, 6),
    (70, 41, 30, 96, 48),
    (1030, 41, 20, 30, 3),
    (70, 90, 30, 64, 3),
    (64, 2, 40, 33, 5),
    (64, 3, 51, 34, 1),
    (64, 2, 40, 32, 5),
]

# Larger than x; than x and y; by lanes without an image; sums too short for y to count.
NOT_KEPT = [(64, 20, 10, 3, 5), (64, 3, 54, 34, 1), (1, 8, 8, 32, 1), (64, 2, 40, 3, 5), (64, 2, 40, 31, 5)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("shape", "kept"), [*((s, True) for s in KEPT), *((s, False) for s in NOT_KEPT)])
def test_a_backward_that_reads_what_the_forward_kept(shape, kept, dtype):
    """Its gradients are to the bit those of one that computes it again; autograd has it so wherever the intermediate is small."""
    args, kernels = arguments(shape, torch.device("cpu"), dtype), torch.ops.ella_cuda
    y, intermediate = kernels.factored_linear_keeping(*args)
    assert kept * (args[0].numel() + y.numel()) >= intermediate.numel() >= kept * shape[0] * shape[1] * shape[2]
    assert torch.equal(y, kernels.factored_linear(*args))
    grad = torch.randn_like(y)
    leaves = [a.requires_grad_() for a in args]
    again = kernels.factored_linear_backward(grad, *args[:4], *[True] * 5)
    for mask in ([True] * 5, [False, False, True, False, False], [True, False, True, False, True]):
        parts = kernels.factored_linear_backward_keeping(grad, *args[:4], intermediate, *mask)
        assert all(torch.equal(a, b) if m else a.numel() == 0 for a, b, m in zip(parts, again, mask, strict=True))
    own = torch.autograd.grad(ops.factored_linear(*leaves), leaves, grad)
    assert all(torch.equal(a, b) for a, b in zip(own, again, strict=True))
    if kept:  # and it is read: the gradient of weight_out is linear in it
        doubled = kernels.factored_linear_backward_keeping(grad, *args[:4], 2 * intermediate, *[True] * 5)
        assert torch.equal(doubled[2], 2 * again[2]) and torch.equal(doubled[1], again[1])


def keeping_calls(call, name: str = "factored_linear_backward_keeping") -> int:
    """How often an op of that name runs during a call."""
    name = f"ella_cuda::{name}"
    return checks.runs_during(call, name)[1][name]


def test_the_intermediate_is_kept(device):
    args = [a.requires_grad_() for a in arguments((8, 2, 1, 64, 3), device, torch.float32)]
    names = "ella_cuda::factored_linear_keeping", "ella_cuda::factored_linear_backward_keeping"
    _, found = checks.runs_during(lambda: torch.autograd.grad(ops.factored_linear(*args).sum(), args), *names)
    assert list(found.values()) == [1, 1]


def test_who_reads_what_was_kept():
    """A plain backward; not one that is differentiated again or mapped, nor one after a forward that somebody else sees."""
    args = [a.requires_grad_() for a in arguments((8, 2, 1, 64, 3), torch.device("cpu"))]
    y = ops.factored_linear(*args)
    grads = torch.randn(4, *y.shape, dtype=torch.float64)
    expected = [torch.autograd.grad(ops.factored_linear_torch(*args), args, grad) for grad in grads]
    results = {}

    def gradients(kind: str, **options) -> None:
        results[kind] = torch.autograd.grad(y, args, grads if kind == "batched" else grads[0], True, **options)

    assert keeping_calls(lambda: gradients("plain")) == 1
    assert keeping_calls(lambda: gradients("graph", create_graph=True)) == 0
    gradients("batched", is_grads_batched=True)
    mapped = torch.func.vmap(lambda grad: torch.autograd.grad(y, args, grad, retain_graph=True))
    assert keeping_calls(lambda: results.update(mapped=mapped(grads))) == 0
    for kind in ("plain", "graph"):
        checks.assert_same(results[kind], expected[0])
    for kind in ("batched", "mapped"):
        checks.assert_same(results[kind], tuple(torch.stack(parts) for parts in zip(*expected, strict=True)))

    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Mode():
        torch.autograd.grad(ops.factored_linear(*args), args, grads[0])
    kernels = torch.ops.ella_cuda
    assert kernels.factored_linear.default in seen and kernels.factored_linear_backward.default in seen
    assert kernels.factored_linear_keeping.default not in seen


def test_when_nothing_is_kept():
    """Where weight_out is fixed, which alone needs it; where no gradient is wanted; and on another device, whose op says what is wrong."""
    args = [a.requires_grad_(i != 2) for i, a in enumerate(arguments((8, 2, 1, 64, 3), torch.device("cpu")))]
    assert keeping_calls(lambda: ops.factored_linear(*args), "factored_linear_keeping") == 0
    args[2].requires_grad_()
    with torch.no_grad():
        assert keeping_calls(lambda: ops.factored_linear(*args), "factored_linear_keeping") == 0
    assert keeping_calls(lambda: ops.factored_linear(*args), "factored_linear_keeping") == 1
    elsewhere = [a.to("meta") if i == 2 else a for i, a in enumerate(args)]
    with pytest.raises(RuntimeError, match="weight_out must be on the device of x"):
        ops.factored_linear(*elsewhere)


def test_what_was_kept_is_freed_with_what_was_saved():
    args = [a.requires_grad_() for a in arguments((8, 2, 1, 64, 3), torch.device("cpu"))]
    y = ops.factored_linear(*args)
    *inputs, intermediate = y.grad_fn.saved_tensors
    assert all(a is b for a, b in zip(inputs, args[:4], strict=True)) and intermediate.numel() > 0
    y.sum().backward()
    with pytest.raises(RuntimeError, match="freed"):
        list(y.grad_fn.saved_tensors)


@pytest.mark.parametrize("where", ["nowhere", "forward", "backward"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_under_a_mode(where, reentrant):
    """A checkpoint runs the forward again in the backward and wants as many saved tensors, whoever looks on in one of the two."""
    args = [a.requires_grad_() for a in arguments((8, 2, 1, 64, 3), torch.device("cpu"))]
    expected = torch.autograd.grad(ops.factored_linear(*args).square().sum(), args)
    with FlopCounterMode(display=False) if where == "forward" else contextlib.nullcontext():
        y = checkpoint(ops.factored_linear, *args, use_reentrant=reentrant)
    with FlopCounterMode(display=False) if where == "backward" else contextlib.nullcontext():
        y.square().sum().backward()
    for arg, grad in zip(args, expected, strict=True):
        torch.testing.assert_close(arg.grad, grad)


def test_derivatives_where_the_intermediate_is_kept():
    args = tuple(a.requires_grad_() for a in arguments((3, 2, 1, 24, 2), torch.device("cpu")))
    assert torch.ops.ella_cuda.factored_linear_keeping(*args)[1].numel() > 0
    checks.check_derivatives(ops.factored_linear, args)


def test_another_intermediate_is_refused():
    args = arguments((8, 2, 1, 64, 3), torch.device("cpu"))
    y, intermediate = torch.ops.ella_cuda.factored_linear_keeping(*args)
    apart = torch.stack([intermediate, intermediate], 1)[:, 0]
    for wrong, words in [
        (intermediate[:-1], "have shape"),
        (intermediate.float(), "have the dtype"),
        (apart, "be contiguous"),
    ]:
        with pytest.raises(RuntimeError, match=f"intermediate must {words}"):
            torch.ops.ella_cuda.factored_linear_backward_keeping(y, *args[:4], wrong, *[True] * 5)


def test_vmap_of_the_input_gradient_joins_the_batch(device):
    """The K columns of the generalised Gauss-Newton are such a vmap; it must be one call, not K."""
    args = arguments((3, 2, 4, 5, 3), device)
    x = args[0].requires_grad_()
    y = ops.factored_linear(*args)
    columns = torch.randn(6, *y.shape, dtype=torch.float64, device=device)

    def input_gradient(column: Tensor) -> Tensor:
        return torch.autograd.grad(y, x, column, retain_graph=True)[0]

    name = "ella_cuda::factored_linear_backward"
    batched, found = checks.runs_during(lambda: torch.func.vmap(input_gradient)(columns), name)
    assert found[name] == 2  # the batched call and, inside it, the physical one; a loop over columns would make 1 + 6
    checks.assert_same(batched, torch.stack([input_gradient(c) for c in columns]))


@pytest.mark.parametrize("channels", [39, 40])  # all threads take a step together, or each its channels
def test_memory_of_the_backward_has_a_bound(channels):
    """Beside the gradients, with many images: the intermediate would take six times as much as x."""
    x, u, v, *_ = arguments((60_000, channels, 6, 1, 2), torch.device("cpu"), torch.float32)
    grad = torch.randn(60_000, 6, 2)
    peak = checks.peak_bytes(lambda: _backward(grad, x, u, v, None, *[True] * 3, False, False))
    assert 0.9 * x.nbytes < peak < 2 * x.nbytes + (8 << 20)


def test_threads_do_not_write_each_others_sums():
    args = [a.requires_grad_() for a in arguments((32, 80, 6, 5, 33), torch.device("cpu"), torch.float64)]
    results = lambda: torch.autograd.grad(ops.factored_linear(*args).sum(), args)  # noqa: E731
    checks.same_for_any_number_of_threads(results, (1, *[4] * 50))


ONE_POSITION = [(3, 2, 4, 1, 5), (3, 2, 4, 5, 1), (2, 3, 2, 1, 1)]


def products(call) -> tuple[int, bool]:
    """Matrix products by torch during a call, and whether an op of ours runs."""
    _, found = checks.runs_during(call, "aten::addmm", "aten::mm", *(f"ella_cuda::{op}" for op in OURS))
    return found["aten::addmm"] + found["aten::mm"], any(found[f"ella_cuda::{op}"] for op in OURS)


OURS = (
    "factored_linear",
    "factored_linear_backward",
    "factored_linear_keeping",
    "factored_linear_backward_keeping",
)


def multiplied_out_by_torch(shape: tuple[int, ...]) -> bool:  # in float32
    return shape[3] == 1 < shape[4]


def multiply_out_from_nothing_on(monkeypatch) -> None:
    monkeypatch.setattr(factored_linear_module._C, "factored_linear_by_torch", lambda n, c, x, d, y, *_: y > 1)


@pytest.mark.parametrize(
    "shape",
    [
        (140, 60, 70, 1, 4),
        (140, 60, 70, 4, 1),
        (140, 60, 70, 1, 1),
        (120, 60, 70, 1, 4),
        (140, 60, 70, 2, 4),
        (1000, 60, 70, 1, 4),  # 16.8 MB: more than 2^24 bytes
        (990, 60, 70, 1, 4),
    ],
)
def test_what_is_multiplied_out(shape, device):
    """From 2^19 numbers of the intermediate on, 2^24 bytes on CUDA, by three products in all; batched gradients, and those with a graph,
    are the op's."""
    args = [a.requires_grad_() for a in arguments(shape, device, torch.float32)]
    n, c, d, *_ = shape
    out = multiplied_out_by_torch(shape) and n * c * d >= (1 << 22 if device.type == "cuda" else 1 << 19)
    assert products(lambda: torch.autograd.grad(ops.factored_linear(*args).sum(), args)) == (
        (3, False) if out else (0, True)
    )
    with torch.no_grad():
        assert products(lambda: ops.factored_linear(*args)) == ((1, False) if out else (0, True))
    y = ops.factored_linear(*args)
    assert products(lambda: torch.autograd.grad(y, args, torch.ones_like(y), create_graph=True))[1]
    columns = torch.ones(2, *y.shape, device=device)
    assert products(lambda: torch.autograd.grad(y, args, columns, is_grads_batched=True))[1]


@pytest.mark.parametrize("shape", ONE_POSITION)
def test_multiplied_out(shape, device, monkeypatch):
    multiply_out_from_nothing_on(monkeypatch)
    args = tuple(a.requires_grad_() for a in arguments(shape, device))
    if multiplied_out_by_torch(shape):
        assert products(lambda: ops.factored_linear(*args)) == (1, False)
    assert ops.factored_linear(*args).is_contiguous()
    for biases in ((None, None), (args[3], None), (None, args[4]), args[3:]):
        call = (*args[:3], *biases)
        leaves = [a for a in call if a is not None]
        result, expected = ops.factored_linear(*call), dense(*call)
        checks.assert_same(result, expected)
        grad = torch.randn_like(result)
        exact = torch.autograd.grad(expected, leaves, grad)
        checks.assert_same(torch.autograd.grad(result, leaves, grad, retain_graph=True), exact)
        for leaf, gradient in zip(leaves, exact, strict=True):
            checks.assert_same(torch.autograd.grad(result, leaf, grad, retain_graph=True)[0], gradient)
    checks.check_derivatives(ops.factored_linear, args)
    detached = tuple(a.detach() for a in args)
    checks.check_func_transforms(ops.factored_linear, ops.factored_linear_torch, detached)
    checks.check_vmap(ops.factored_linear, detached, batch=2)
    checks.check_compile(ops.factored_linear, detached)


@pytest.mark.parametrize(
    "shape", [(0, 2, 3, 4, 1), (2, 0, 3, 1, 5), (2, 3, 0, 1, 5), (2, 3, 4, 0, 1), (2, 3, 4, 1, 0), (2, 3, 4, 5, 0)]
)
def test_multiplied_out_empty(shape, device, monkeypatch):
    multiply_out_from_nothing_on(monkeypatch)
    args = [a.requires_grad_() for a in arguments(shape, device)]
    result = ops.factored_linear(*args)
    checks.assert_same(result, dense(*args))
    references = [a.detach().clone().requires_grad_() for a in args]
    checks.assert_same(
        torch.autograd.grad(result.sum(), args),
        torch.autograd.grad(ops.factored_linear_torch(*references).sum(), references),
    )


@pytest.mark.parametrize("shape", ONE_POSITION[:2])
def test_multiplied_out_under_autocast(shape, device, monkeypatch):
    """In the arguments' precision, as the op, whatever autocast makes of matrix products; forward and backward."""
    multiply_out_from_nothing_on(monkeypatch)
    args = [a.requires_grad_() for a in arguments(shape, device, torch.float32)]
    expected = ops.factored_linear(*args)
    gradients = torch.autograd.grad(expected.sum(), args)
    with torch.autocast(device.type, torch.bfloat16):
        result = ops.factored_linear(*args)
        again = torch.autograd.grad(result.sum(), args)
    assert torch.equal(result, expected)
    assert all(torch.equal(a, b) for a, b in zip(again, gradients, strict=True))


@pytest.mark.parametrize("shape", ONE_POSITION[:2])
def test_exports_for_any_number_of_images(shape, device):
    """One program, on both sides of the size from which weights are multiplied out."""

    class Layer(torch.nn.Module):
        def forward(self, *args):
            return ops.factored_linear(*args)

    n, c, d, x, y = 3, 60, 70, *shape[3:]
    args = arguments((n, c, d, x, y), device, torch.float32)
    images = {0: torch.export.Dim("images")}
    program = torch.export.export(Layer(), args, dynamic_shapes=((images, *[None] * 4),)).module()
    for n in (3, 140):
        args = arguments((n, c, d, x, y), device, torch.float32)
        torch.testing.assert_close(program(*args), ops.factored_linear_torch(*args), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(140, 60, 70, 1, 4), (140, 60, 70, 4, 1)])
def test_meta_tensors(shape):
    args = [a.to("meta") for a in arguments(shape, torch.device("cpu"))]
    assert ops.factored_linear(*args).shape == (shape[0], shape[2], shape[4])
    args[0] = torch.zeros(shape[0], shape[1], shape[3], dtype=torch.float64)
    with pytest.raises(RuntimeError, match="must be on the device of x"):
        ops.factored_linear(*args)


@pytest.mark.parametrize(
    ("position", "bad", "words"),
    [
        (0, lambda t: t[0], "x"),
        (1, lambda t: t[:, :, :-1], "weight_in"),
        (2, lambda t: t[:-1], "weight_out"),
        (3, lambda t: t[:-1], "bias_in"),
        (4, lambda t: t[:-1], "bias_out"),
        (1, lambda t: t.float(), "weight_in"),
        (0, lambda t: t.long(), "x must be float32"),
    ],
)
@pytest.mark.parametrize("shape", [(3, 2, 4, 5, 3), *ONE_POSITION[:2]])
def test_errors_name_the_argument(shape, position, bad, words, device, monkeypatch):
    multiply_out_from_nothing_on(monkeypatch)
    args = list(arguments(shape, device))
    args[position] = bad(args[position])
    with pytest.raises(RuntimeError, match=words):
        ops.factored_linear(*args)
