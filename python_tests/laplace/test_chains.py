"""The links of chains, one by one, beside torch's functions and autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ella_cuda.laplace.chains import INCREASING, Chain, Elementwise, Layer, Pooled, _link

N, COPIES, COLUMNS = 2, 3, 2

CONVOLUTIONS = [  # channels, kernel, stride, padding, dilation, groups
    (2, 3, (3, 2), 1, (0, 1), 1, 1),
    (4, 6, 2, (2, 3), (1, 0), 1, 2),
    (2, 3, (2, 3), 3, 0, (2, 1), 1),
    (2, 3, 2, 1, 4, 1, 1),  # more padding than the kernel reaches
    (16, 18, (4, 3), 1, (1, 2), (2, 1), 1),
    (16, 18, (1, 2), 1, (1, 0), 1, 1),
    (16, 18, 2, 2, 1, 1, 1),
    (16, 32, 3, 1, 1, 1, 2),
]


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_links(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


def gradient(function, x: Tensor, g: Tensor, graph: bool = False) -> Tensor:
    """Of one column ``(N, S, ...)`` at the function's output, in x."""
    (found,) = torch.autograd.grad(function(x.flatten(0, 1)).unflatten(0, x.shape[:2]), x, g, create_graph=graph)
    return found


@pytest.mark.parametrize("sides", CONVOLUTIONS)
def test_convolutions(sides):
    into, outs, kernel, stride, padding, dilation, groups = sides
    m = nn.Conv2d(into, outs, kernel, stride, padding, dilation, groups).double()
    x = randn(N, COPIES, into, 7, 6, seed=0).requires_grad_()
    with torch.no_grad():
        link = Layer(m, x)
        g, t = randn(COLUMNS, *link.out.shape, seed=1), randn(COLUMNS, N, 1, into, 7, 6, seed=2)
        back, summed, along = link.back(g), link.back_summed(g), link.along(t)
    assert_links(link.out.flatten(0, 1), m(x.flatten(0, 1)))
    for k in range(COLUMNS):
        assert_links(back[k], gradient(m, x, g[k]))
        tangents = t[k].expand(-1, COPIES, -1, -1, -1).flatten(0, 1)
        assert_links(
            along[k].flatten(0, 1), F.conv2d(tangents, m.weight, None, m.stride, m.padding, m.dilation, m.groups)
        )
    assert_links(summed, back.sum(2))


@pytest.mark.parametrize("tokens", [(), (3,)])
@pytest.mark.parametrize("alike", [True, False])
def test_linear_layers(tokens, alike):
    m = nn.Linear(5, 4).double()
    x = randn(N, COPIES, *tokens, 5, seed=0).requires_grad_()
    with torch.no_grad():
        link = Layer(m, x)
        g = randn(COLUMNS, N, 1 if alike else COPIES, *tokens, 4, seed=1).expand(-1, -1, COPIES, *tokens, 4)
        back = link.back(g)
    assert back.shape == (COLUMNS, *x.shape)
    for k in range(COLUMNS):
        assert_links(back[k], gradient(m, x, g[k]))


FUNCTIONS = [nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.SiLU, nn.GELU, nn.ELU, nn.Mish]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions(function):
    x, m = randn(N, COPIES, 2, 7, 8, seed=0).requires_grad_(), function()
    link = Elementwise(m, x.detach())
    g, t = randn(COLUMNS, *x.shape, seed=1), randn(COLUMNS, *x.shape, seed=2)
    assert_links(link.out, m(x))
    columns = torch.stack([gradient(m, x, c, graph=True) for c in g])
    assert_links(link.back(g), columns)
    assert_links(link.along(t), t * torch.autograd.grad(m(x).sum(), x)[0])
    assert (link.second is None) == (function is nn.ReLU)
    if link.second is not None:
        assert_links(link.bent(t, g), torch.autograd.grad((columns * t).sum(), x)[0])


@pytest.mark.parametrize("sides", [((2,), {}), ((3, 2), {"padding": 1}), (((2, 3), (1, 4)), {"dilation": (2, 1)})])
@pytest.mark.parametrize("function", [None, *FUNCTIONS])
def test_pools_behind_functions(function, sides):
    """Of values of which many are equal, and zero, the first one counts, as in torch."""
    x = randn(N, COPIES, 2, 7, 8, seed=0).mul(2).round().requires_grad_()
    pool = nn.MaxPool2d(*sides[0], **sides[1])
    whole = nn.Sequential(*([] if function is None else [function()]), pool)
    links, rows = [], x.detach()
    for module in Chain([*whole])._modules:
        links.append(_link(module, rows))
        rows = links[-1].out
    assert isinstance(links[-1], Pooled) == (function not in INCREASING)
    g, t = randn(COLUMNS, *links[-1].out.shape, seed=1), randn(COLUMNS, N, 1, *x.shape[2:], seed=2)
    assert_links(links[-1].out.flatten(0, 1), whole(x.flatten(0, 1)))
    back, along = g, t
    for link in reversed(links):
        summed, back = link.back_summed(back), link.back(back)
    for link in links:
        along = link.along(along)
    for k in range(COLUMNS):
        assert_links(back[k], gradient(whole, x, g[k]))
        tangent = t[k].expand(x.shape).flatten(0, 1)
        _, expected = torch.func.jvp(whole, (x.detach().flatten(0, 1),), (tangent,))
        assert_links(along[k].flatten(0, 1), expected)
    assert_links(summed, back.sum(2))


def test_pools_are_where_the_values_are():
    """Whatever device torch makes tensors on."""
    x = randn(N, COPIES, 2, 7, 8, seed=0)
    with torch.device("meta"):
        link = Pooled(nn.MaxPool2d(2), x)
    assert_links(link.out.flatten(0, 1), F.max_pool2d(x.flatten(0, 1), 2))
