"""Factors of every layer type against their defining sums, written out with explicit patches and output gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ella_cuda import ops
from ella_cuda.laplace import KronLaplace
from ella_cuda.laplace.rules import factored as factored_rule
from ella_cuda.nn import FactoredLinear2d


def half_hessians(f: Tensor) -> Tensor:
    """``diag(sqrt p) - p sqrt(p)^T``, all K columns, (K, N, K): another square root than the package uses."""
    p = f.softmax(1)
    s = torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None, :]
    return s.permute(2, 0, 1).detach()


def output_gradients(tail: nn.Module, out: Tensor) -> Tensor:
    """(K, N, ...): the columns back-propagated from the network's output to a layer's output, one at a time."""
    out = out.detach().requires_grad_()
    f = tail(out)
    return torch.stack([torch.autograd.grad(f, out, column, retain_graph=True)[0] for column in half_hessians(f)])


def check(factor, inputs: Tensor, outputs: Tensor) -> None:
    torch.testing.assert_close(factor.inputs, inputs, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(factor.outputs, outputs, rtol=1e-10, atol=1e-12)


CONVOLUTIONS = {
    "circular": dict(kernel_size=3, padding=1, padding_mode="circular"),
    "circular, stride 2": dict(kernel_size=3, padding=1, stride=2, padding_mode="circular"),
    "circular, dilation 2": dict(kernel_size=3, padding=2, dilation=2, padding_mode="circular"),
    "circular, narrow": dict(kernel_size=3, padding=(0, 1), padding_mode="circular"),
    "circular, wide": dict(kernel_size=(1, 3), padding=(2, 3), padding_mode="circular"),
    "circular, same, even": dict(kernel_size=(2, 4), padding="same", padding_mode="circular"),
    "zeros": dict(kernel_size=3, padding=1),
    "zeros, stride (2, 3)": dict(kernel_size=(3, 2), padding=(2, 0), stride=(2, 3)),
    "zeros, dilation (1, 2)": dict(kernel_size=3, padding=1, dilation=(1, 2)),
    "zeros, same, even": dict(kernel_size=(2, 4), padding="same"),
    "valid": dict(kernel_size=(2, 3), padding="valid"),
    "circular, groups": dict(kernel_size=3, padding=1, groups=2, padding_mode="circular"),
    "zeros, depth-wise, stride 2": dict(kernel_size=3, padding=1, groups=4, stride=2),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution(name, batches):
    options = CONVOLUTIONS[name]
    groups = options.get("groups", 1)
    first = nn.Conv2d(2, 4, 1)  # its factors check the gradient that the convolution sends back
    conv = nn.Conv2d(4, 8, **options)
    x = torch.randn(5, 2, 6, 5, dtype=torch.float64)
    size = nn.Sequential(first, conv)(x.float())[0].numel()
    tail = nn.Sequential(nn.Tanh(), nn.Flatten(), nn.Linear(size, 3)).double()
    model = nn.Sequential(first, nn.Tanh(), conv, tail).double()
    la = KronLaplace(model).fit(batches(x, torch.randint(3, (5,)), 2))

    hidden = torch.tanh(first(x)).detach()
    left, right, top, bottom = _pads(conv)
    padded = F.pad(
        hidden, (left, right, top, bottom), mode="circular" if conv.padding_mode == "circular" else "constant"
    )
    patches = F.unfold(padded, conv.kernel_size, dilation=conv.dilation, stride=conv.stride)  # (N, 4*kh*kw, P)
    patches = patches.unflatten(1, (groups, -1))
    g = output_gradients(tail, conv(hidden)).unflatten(2, (groups, -1)).flatten(4)  # (K, N, groups, 8/groups, P)
    assert patches.shape[-1] == g.shape[-1]
    inputs = torch.einsum("ngap,ngbp->gab", patches, patches) / 5
    outputs = torch.einsum("kngap,kngbp->gab", g, g) / g.shape[-1]
    check(la.factors["2.weight"], inputs, outputs)
    assert la.factors["2.weight"].input_moment.rows == 5 * patches.shape[-1]  # one row a patch

    g = output_gradients(model[1:], first(x))
    check(
        la.factors["0.weight"],
        torch.einsum("nahw,nbhw->ab", x, x)[None] / 5,
        torch.einsum("knahw,knbhw->ab", g, g)[None] / 30,
    )


def _pads(conv: nn.Conv2d) -> tuple[int, ...]:
    if conv.padding == "valid":
        return 0, 0, 0, 0
    if conv.padding == "same":  # torch pads the odd one at the end
        pads = [
            (d * (k - 1) // 2, d * (k - 1) - d * (k - 1) // 2)
            for d, k in zip(conv.dilation, conv.kernel_size, strict=True)
        ]
        return *pads[1], *pads[0]
    return conv.padding[1], conv.padding[1], conv.padding[0], conv.padding[0]


@pytest.mark.parametrize("resolution", ["shared", "per_channel"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "sizes",
    [((2, 3), (1, 1)), ((2, 3), (2, 2)), ((5, 4), (3, 3))],
    ids=["one position", "map of all pairs", "two factors"],
)
@pytest.mark.parametrize("frozen", [(), ("weight_in",), ("bias_in",), ("weight_out", "bias_out")], ids=str)
def test_factored_linear(resolution, bias, sizes, frozen, batches):
    n, c, d = 5, 2, 3
    (height, width), y_size = sizes[0], sizes[1][0] * sizes[1][1]
    first, layer = nn.Conv2d(2, c, 1), FactoredLinear2d(c, d, *sizes, bias=bias)
    if bias:
        nn.init.normal_(layer.bias_in)
    tail = nn.Sequential(nn.Tanh(), nn.Flatten(), nn.Linear(d * y_size, 3))
    model = nn.Sequential(first, nn.Tanh(), layer, tail).double()
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name not in frozen)
    x = torch.randn(n, 2, height, width, dtype=torch.float64)
    la = KronLaplace(model, resolution=resolution).fit(batches(x, torch.randint(3, (n,)), 2))

    h = torch.tanh(first(x)).detach().flatten(2)
    u, v = layer.weight_in.detach().flatten(2), layer.weight_out.detach().flatten(2)
    z = torch.einsum("ncx,dcx->ndc", h, u) + (layer.bias_in.detach()[:, None] if bias else 0)
    g = output_gradients(tail, layer(h.view(n, c, height, width))).flatten(3)
    dz = torch.einsum("kndy,dcy->kndc", g, v)
    if resolution == "shared":
        b_in, b_out = torch.einsum("kndc,knec->de", dz, dz)[None] / c, torch.einsum("kndy,kndz->yz", g, g)[None] / d
    else:
        b_in, b_out = torch.einsum("kndc,knec->cde", dz, dz), torch.einsum("kndy,kndz->dyz", g, g)
    if "weight_in" not in frozen:
        check(la.factors["2.weight_in"], torch.einsum("ncx,ncy->cxy", h, h) / n, b_in)
    if "weight_out" not in frozen:
        check(la.factors["2.weight_out"], torch.einsum("ndc,nde->dce", z, z) / n, b_out)
    if bias and "bias_in" not in frozen:
        s = dz.sum(3)
        torch.testing.assert_close(la.factors["2.bias_in"].outputs[0], torch.einsum("knd,kne->de", s, s))
    if bias and "bias_out" not in frozen:
        s = g.sum(2)
        torch.testing.assert_close(la.factors["2.bias_out"].outputs[0], torch.einsum("kny,knz->yz", s, s))
    assert set(la.factors) == {name for name, p in model.named_parameters() if p.requires_grad}

    g = output_gradients(model[1:], first(x)).flatten(3)
    expected = torch.einsum("knap,knbp->ab", g, g) / (height * width)
    torch.testing.assert_close(la.factors["0.weight"].outputs[0], expected)


class Sizes(TorchDispatchMode):
    """Numbers of elements of all tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.seen.update(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))
        return out


@pytest.mark.parametrize("side, formed", [(1, False), (2, True)])
def test_an_inner_gradient_is_formed_for_several_positions_only(side, formed):
    n, c, d, columns = 3, 5, 7, 2
    layer = FactoredLinear2d(c, d, (2, 4), (1, side))
    model = nn.Sequential(nn.Conv2d(2, c, 1), layer, nn.Flatten(), nn.Linear(d * side, columns + 1))
    data = torch.randn(n, 2, 2, 4), torch.randint(columns + 1, (n,))
    with Sizes() as sizes:
        KronLaplace(model).fit([data])
    assert (columns * n * d * c in sizes.seen) == formed


@pytest.mark.parametrize("resolution", ["shared", "per_channel"])
def test_an_inner_gradient_too_large_to_be_there_at_once(resolution, monkeypatch):
    model = nn.Sequential(
        nn.Conv2d(2, 3, 1), FactoredLinear2d(3, 4, (5, 4), 3), nn.Flatten(), nn.Linear(36, 3)
    ).double()
    data = torch.randn(7, 2, 5, 4, dtype=torch.float64), torch.randint(3, (7,))
    whole = KronLaplace(model, resolution=resolution).fit([data])
    sizes, vjp = [], ops.factored_linear_vjp
    monkeypatch.setattr(factored_rule, "MIN_ROWS", 2)
    monkeypatch.setattr(factored_rule, "MAX_INTERMEDIATE", 5 * 3 * 4 * 8)  # bytes of five rows: two blocks of two
    monkeypatch.setattr(ops, "factored_linear_vjp", lambda *a: sizes.append(a[0].shape[0]) or vjp(*a))
    parts = KronLaplace(model, resolution=resolution).fit([data])
    assert sizes == [4, 4, 4, 2]  # of two columns and seven images
    for name, factor in whole.factors.items():
        for side in ("inputs", "outputs"):
            ours, expected = getattr(parts.factors[name], side), getattr(factor, side)
            torch.testing.assert_close(ours, expected)


def test_linear_with_shared_positions(batches):
    first, tail = nn.Linear(4, 3), nn.Sequential(nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))
    model = nn.Sequential(first, tail).double()
    x = torch.randn(5, 2, 2, 4, dtype=torch.float64)
    la = KronLaplace(model).fit(batches(x, torch.randint(3, (5,)), 2))
    g = output_gradients(tail, first(x)).flatten(2, 3)
    inputs = torch.einsum("nsta,nstb->ab", x, x)[None] / 5
    check(la.factors["0.weight"], inputs, torch.einsum("kntd,knte->de", g, g)[None] / 4)
    sums = g.sum(2)
    ones = torch.ones(1, 1, 1, dtype=torch.float64)
    check(la.factors["0.bias"], ones, torch.einsum("knd,kne->de", sums, sums)[None])


def test_linear_met_first_without_and_then_with_shared_positions():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 3)

        def forward(self, x):
            y = torch.tanh(self.linear(x))
            return y if y.dim() == 2 else y.sum(1)

    model = Pooled().double()
    flat, deep = torch.randn(3, 2, dtype=torch.float64), torch.randn(4, 2, 2, dtype=torch.float64)
    la = KronLaplace(model).fit([(flat, torch.randint(3, (3,))), (deep, torch.randint(3, (4,)))])

    def gradients(x):
        out = model.linear(x).detach().requires_grad_()
        y = torch.tanh(out)
        f = y if y.dim() == 2 else y.sum(1)
        return torch.stack([torch.autograd.grad(f, out, s, retain_graph=True)[0] for s in half_hessians(f)])

    g1, g2 = gradients(flat), gradients(deep)
    first = torch.einsum("knd,kne->de", g1, g1)
    torch.testing.assert_close(
        la.factors["linear.weight"].outputs[0], first + torch.einsum("kntd,knte->de", g2, g2) / 2
    )
    s = g2.sum(2)
    torch.testing.assert_close(la.factors["linear.bias"].outputs[0], first + torch.einsum("knd,kne->de", s, s))
