"""How gradients of all columns go back through functions without parameters: as plain backward passes of single outputs go."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ella_cuda.laplace import KronLaplace
from python_tests.laplace.checks import Function, assert_exact_biases

CLASSES, CHANNELS, SIZE, IMAGES = 3, 4, 12, 5


def of(function: Callable[[Tensor], Tensor]) -> nn.Module:
    return Function(lambda m, x: function(x))


def network(*layers: nn.Module, channels: int = CHANNELS, size: int = SIZE) -> nn.Module:
    """Layers between a linear one, whose bias has an element for each pixel, and a linear one."""
    torch.manual_seed(0)
    stem = nn.Linear(3, channels * size * size), nn.Unflatten(1, (channels, size, size))
    model = nn.Sequential(*stem, *layers, nn.Flatten(), nn.LazyLinear(CLASSES)).double()
    model(torch.randn(2, 3).double())
    return model


def check(model: nn.Module, **settings: object) -> None:
    assert_exact_biases(model, torch.randn(IMAGES, 3, generator=torch.Generator().manual_seed(1)).double(), **settings)


FUNCTIONS = {
    "relu": F.relu,
    "torch's relu": torch.relu,
    "method": Tensor.relu,
    "pool": lambda x: F.max_pool2d(x, 2),
    "pool of a rest": lambda x: F.max_pool2d(x, (2, 5)),
    "torch's pool": lambda x: torch.max_pool2d(x, 3, 2, 1),
    "pool that overlaps": lambda x: F.max_pool2d(x, 3, stride=1),
    "pool with gaps": lambda x: F.max_pool2d(x, 2, stride=4),
    "dilated pool": lambda x: F.max_pool2d(x, 2, stride=(2, 1), padding=1, dilation=(1, 2)),
    "pool to the ceiling": lambda x: F.max_pool2d(x, 5, 2, ceil_mode=True),
    "pool with places": lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
    "pad": lambda x: F.pad(x, (1, 0, 2, 3), value=2.0),
    "pad of one axis": lambda x: F.pad(x, (1, 2)),
    "circular pad": lambda x: F.pad(x, (1, 2, 0, 3), mode="circular"),
    "circular pad by all": lambda x: F.pad(x, (12, 12, 6, 6), mode="circular"),
    "slice": lambda x: x[:, :, ::2, 1::3],
    "slice of channels": lambda x: x[:, 1:3, -4:-1],
    "slice of what autograd keeps": lambda x: torch.sigmoid(x)[:, :, ::2, ::2],
    "slice of an exported graph": lambda x: F.relu(torch.ops.aten.slice.Tensor(x, -1, -3, -1)),
    "slice that changes": lambda x: x[:, :, ::2].mul_(3),
    "slice of what changes": lambda x: (x[:, :, ::2], x.mul_(3))[0],
    "slice in place": lambda x: (x[:, :, ::2].relu_(), x)[1],
    "in place": lambda x: (F.relu(x, inplace=True), x)[1],
    "in place through a view": lambda x: (F.relu(x.view(-1), inplace=True), x)[1],
    "others": lambda x: F.relu6(F.silu(x)) + torch.tanh(x),
    "checkpoint": lambda x: F.relu(checkpoint(lambda h: F.max_pool2d(F.relu(h), 2).tanh(), x, use_reentrant=False)),
    "transform": torch.func.vmap(lambda image: F.relu(image) * 2),
    "one after the other": lambda x: F.pad(F.max_pool2d(F.relu(x), 2), (1, 1, 1, 1)),
}


@pytest.mark.parametrize("memory_budget", [None, 1])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_between_layers(name, memory_budget):
    first, second = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.LazyConv2d(2, 2)
    check(network(first, of(FUNCTIONS[name]), second), memory_budget=memory_budget)


SAMPLED = {
    "every second": lambda x: x[:, :, ::2, ::2],
    "of a relu": lambda x: F.relu(x)[:, :, ::2, ::3],
    "before a relu": lambda x: F.relu(x[:, :, ::2]),
    "padded": lambda x: F.pad(F.relu(x)[..., ::2], (1, 1, 1, 1), mode="circular"),
    "by slices of one axis": lambda x: x[:, :, ::3][:, :, :, ::2],
    "by steps beyond the size": lambda x: x[:, :, ::20, ::2],
}


@pytest.mark.parametrize(
    "options",
    [
        {"padding": 1},
        {"stride": (1, 2), "padding": 2},
        {"dilation": 2, "padding": 2, "groups": 2},
        {"padding": 1, "padding_mode": "circular", "stride": (2, 1)},
        {"padding": 1, "padding_mode": "circular"},
        {"padding": "same", "kernel_size": (2, 3)},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", SAMPLED)
def test_a_convolution_sampled_by_a_slice(name, options):
    first = nn.Conv2d(CHANNELS, CHANNELS, **{"kernel_size": 3, **options})
    check(network(first, of(SAMPLED[name]), nn.LazyConv2d(3, 1)))


@pytest.mark.parametrize(
    "second",
    [nn.Identity(), nn.Conv2d(4, 3, 1).requires_grad_(False), nn.Tanh(), nn.Conv2d(4, 3, 3, 1, 1, padding_mode="circular")],
    ids=["a head", "a frozen layer", "another function", "a circular convolution"],
)  # fmt: skip
def test_a_slice_behind_a_convolution_and_before_others(second):
    check(network(nn.Conv2d(4, 4, 3), of(lambda h: F.relu(h[:, :, ::2, ::2])), second))


def shared(*sampled: bool) -> nn.Module:
    """A convolution that is sampled in some of its calls."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        for some in sampled:
            x = F.relu(m.shared(x))
            x = m.second(x[:, :, ::2, ::2]).repeat(1, 2, 1, 1) if some else x + x.sin()
        return x

    return Function(forward, shared=nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), second=nn.Conv2d(CHANNELS, 2, 1))


@pytest.mark.parametrize("sampled", [(True, False), (False, True), (True, True, False)])
def test_a_shared_convolution_sampled_in_some_calls(sampled):
    check(network(shared(*sampled)))


def branches(function: Callable[[Tensor], Tensor], first: int) -> nn.Module:
    """The sum of a function of one convolution, and of another convolution, made in either order."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        ahead = [lambda: function(F.relu(m.norm(m.convs[0](x)))), lambda: m.convs[1](x)]
        one = ahead[first]()
        return ahead[1 - first]() + one

    convs = nn.ModuleList([nn.Conv2d(CHANNELS, CHANNELS, 3, padding=padding) for padding in (1, 2)])
    norm = nn.BatchNorm2d(CHANNELS).requires_grad_(False)
    norm.running_var.fill_(0.1)
    return Function(forward, convs=convs, norm=norm)


PADS = {
    "constant": lambda h: F.pad(h, (1, 1, 1, 1)),
    "circular": lambda h: F.pad(h, (1, 1, 1, 1), mode="circular"),
    "twice": lambda h: F.pad(F.pad(h, (0, 1, 0, 1), mode="circular"), (1, 0, 1, 0)),
    "pool": lambda h: F.max_pool2d(F.pad(h, (1, 1, 1, 1)), 1),
    "scale": lambda h: F.pad(h * 2, (1, 1, 1, 1)),
}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("name", PADS)
def test_a_gradient_of_two_branches_is_not_changed_for_the_other(name, first):
    check(network(branches(PADS[name], first), size=6))


def test_many_additions_before_a_layer():
    """More than Python's recursion goes deep, and more ways through them than there are nodes."""

    def added(h):
        h = 2**-40 * h
        for _ in range(1500):
            h = h + 1e-15
        for _ in range(40):
            h = h + h
        return h

    check(network(nn.Conv2d(2, 2, 3, padding=1), of(added), nn.Conv2d(2, 2, 3), channels=2, size=3))


def residual(in_place: bool) -> nn.Module:
    """Functions whose results are used twice, each in another way."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = m.pool(m.relu(m.norms[3](m.convs[3](x))))
        y = m.relu(m.norms[0](m.convs[0](x)))
        x = m.relu(m.norms[1](m.convs[1](y)) + x)
        x = m.relu(m.norms[2](m.convs[2](x[:, :, ::2])) + x[:, :, ::2])
        return F.adaptive_avg_pool2d(x, 1)

    convs = nn.ModuleList([nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(4)])
    norms = nn.ModuleList([nn.BatchNorm2d(CHANNELS) for _ in range(4)])
    for norm in norms:
        norm.running_var.uniform_(0.5, 2)
        norm.running_mean.normal_()
    return Function(forward, convs=convs, norms=norms, relu=nn.ReLU(in_place), pool=nn.MaxPool2d(3, 2, 1))


@pytest.mark.parametrize("memory_budget", [None, 1])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_residual_network(in_place, memory_budget):
    check(network(residual(in_place)), memory_budget=memory_budget)


class Twice(torch.autograd.Function):
    """x, whose gradient is doubled."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def hooked(place: int, function: Callable[[Tensor], Tensor]) -> nn.Module:
    """Functions between layers; the output of one of them goes to a function of its own."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        for here, layer in enumerate(m.layers):
            x = layer(x)
            x = function(x) if here == place else x
        return x

    layers = [
        nn.Conv2d(2, CHANNELS, 3, padding=1), nn.BatchNorm2d(CHANNELS).requires_grad_(False), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(CHANNELS, 3, 3, padding=1), nn.ReLU(), of(lambda x: x[:, :, ::2, ::2]), nn.ZeroPad2d(1),
        nn.Conv2d(3, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(18, CLASSES),
    ]  # fmt: skip
    return Function(forward, layers=nn.ModuleList(layers))


def prehook(h: Tensor) -> Tensor:
    """h, on whose node a hook doubles what comes."""
    if h.requires_grad:
        h.grad_fn.register_prehook(lambda gradients: (2 * gradients[0],))
    return h


def fitted(model: nn.Module) -> KronLaplace:
    return KronLaplace(model).fit([(torch.randn(IMAGES, 2, 12, 12).double(), torch.arange(IMAGES) % CLASSES)])


UNSEEN = pytest.mark.xfail(strict=True, reason="nothing tells of a hook on autograd's own node, that of the slice")


@pytest.mark.parametrize("place", [pytest.param(p, marks=UNSEEN if p == 6 else ()) for p in range(11)])
def test_hooks_see_gradients_and_change_them(place):
    found = []
    for function in (prehook, Twice.apply):
        torch.manual_seed(0)
        found.append(fitted(hooked(place, function).double()).factors)
    for name, factor in found[1].items():
        torch.testing.assert_close(found[0][name].outputs, factor.outputs)


def test_gradients_that_are_kept_are_there():
    kept = []

    def retain(h: Tensor) -> Tensor:
        if h.requires_grad:
            kept.append(h)
            h.retain_grad()
        return h

    with pytest.warns(UserWarning, match="columns go back one at a time"):
        fitted(hooked(2, retain).double())
    assert kept[-1].grad.abs().max() > 0
