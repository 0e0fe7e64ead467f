"""The links of chains, one by one, beside torch's functions and autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ella_cuda.laplace import chains
from ella_cuda.laplace.chains import Elementwise, Layer, Pooled
from python_tests.laplace.checks import drawn

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
    x = drawn(N, COPIES, into, 7, 6, seed=0).requires_grad_()
    with torch.no_grad():
        link = Layer(m, x)
        g, t = drawn(COLUMNS, *link.out.shape, seed=1), drawn(COLUMNS, N, 1, into, 7, 6, seed=2)
        back, summed, along = link.back(g), link.back_summed(g), link.along(t)
    assert_links(link.out.flatten(0, 1), m(x.flatten(0, 1)))
    for k in range(COLUMNS):
        assert_links(back[k], gradient(m, x, g[k]))
        moved = t[k].expand(-1, COPIES, -1, -1, -1).flatten(0, 1)
        assert_links(along[k].flatten(0, 1), F.conv2d(moved, m.weight, None, m.stride, m.padding, m.dilation, m.groups))
    assert_links(summed, back.sum(2))


@pytest.mark.parametrize("tokens", [(), (3,)])
@pytest.mark.parametrize("alike", [True, False])
def test_linear_layers(tokens, alike):
    m = nn.Linear(5, 4).double()
    x = drawn(N, COPIES, *tokens, 5, seed=0).requires_grad_()
    with torch.no_grad():
        link = Layer(m, x)
        g = drawn(COLUMNS, N, 1 if alike else COPIES, *tokens, 4, seed=1).expand(-1, -1, COPIES, *tokens, 4)
        back = link.back(g)
    assert back.shape == (COLUMNS, *x.shape)
    for k in range(COLUMNS):
        assert_links(back[k], gradient(m, x, g[k]))


@pytest.mark.parametrize(
    ("sides", "size", "with_avx512", "with_avx2"),
    [  # channels, kernel, padding, dilation
        ((1, 6, 5, 2, 1), (28, 28), (4, 4), (2, 4)),
        ((6, 16, 3, 0, 1), (14, 14), (1, 2), (1, 1)),
        ((2, 5, (3, 4), (1, 2), 1), (8, 9), (4, 1), (4, 1)),
        ((3, 8, 3, (2, 1), 1), (6, 4), (2, 2), (1, 2)),
        ((3, 8, 3, 1, 1), (7, 9), (1, 1), (1, 1)),
        ((3, 8, 3, 2, 2), (6, 4), (1, 1), (1, 1)),
        ((16, 17, 3, 1, 1), (8, 8), (1, 1), (1, 1)),
    ],
)
@pytest.mark.parametrize("capability", ["AVX512", "AVX2", "DEFAULT"])
def test_positions_as_channels(sides, size, with_avx512, with_avx2, capability, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    into, outs, kernel, padding, dilation = sides
    m = nn.Conv2d(into, outs, kernel, 1, padding, dilation)
    x = drawn(N, COPIES, into, *size, seed=0)
    with torch.no_grad():
        link = Layer(m, x.float())
        g = drawn(COLUMNS, *link.out.shape, seed=1)
        back = link.back(g.float())
    phases = chains._phases(m, size, g.float())
    assert phases == {"AVX512": with_avx512, "AVX2": with_avx2, "DEFAULT": (1, 1)}[capability]
    for k in range(COLUMNS):
        expected = gradient(m.double(), x.requires_grad_(), g[k])
        torch.testing.assert_close(back[k], expected.float(), rtol=1e-5, atol=1e-5)


def smooth(pool: nn.Module | None, function: nn.Module, link: Elementwise | Pooled, x: Tensor) -> None:
    """A link's derivatives, both of them, beside autograd's."""
    g, t = drawn(COLUMNS, *link.out.shape, seed=1), drawn(COLUMNS, *x.shape, seed=2)

    def both(rows: Tensor) -> Tensor:
        return function(rows) if pool is None else pool(function(rows))

    assert_links(link.out.flatten(0, 1), both(x.flatten(0, 1)))
    columns = [gradient(both, x, c, graph=True) for c in g]
    assert_links(link.back(g), torch.stack(columns))
    assert_links(link.back_summed(g), torch.stack(columns).sum(2))
    products = sum((c * d).sum() for c, d in zip(columns, t, strict=True))
    _, along = torch.func.jvp(
        lambda rows: both(rows.flatten(0, 1)).unflatten(0, x.shape[:2]), (x.detach(),), (t[0].clone(),)
    )
    assert_links(link.along(t)[0], along)
    if link.curved:
        bent, further = link.bent(t, g)
        assert_links(bent, torch.autograd.grad(products, x)[0])
        assert_links(further, link.along(t))


@pytest.mark.parametrize("pool", [None, ((2,), {}), ((3, 2), {"padding": 1}), (((2, 3), (1, 4)), {"dilation": (2, 1)})])
@pytest.mark.parametrize("function", [None, nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.SiLU, nn.GELU, nn.ELU, nn.Mish])  # fmt: skip
def test_functions_and_pools_behind(function, pool):
    """At values of which many are equal, and zero: what counts is the first one, as torch has it."""
    x = drawn(N, COPIES, 2, 7, 8, seed=0).mul(2).round().requires_grad_()
    pool = None if pool is None else nn.MaxPool2d(*pool[0], **pool[1])
    module = nn.ReLU() if function is None and pool is None else function and function()
    link = Elementwise(module, x.detach()) if pool is None else Pooled(pool, x.detach(), module)
    smooth(pool, module or nn.Identity(), link, x)


def test_pools_are_where_the_values_are():
    """Whatever device torch makes tensors on."""
    x = drawn(N, COPIES, 2, 7, 8, seed=0)
    with torch.device("meta"):
        link = Pooled(nn.MaxPool2d(2), x, nn.Tanh())
    assert_links(link.out.flatten(0, 1), F.max_pool2d(x.flatten(0, 1).tanh(), 2))
