"""Convolutions of every number of axes, plain and transposed: against the dense GGN where the factors are exact, and against KFAC-expand
written out with patches by an identity kernel and output gradients by autograd.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ella_cuda.laplace import KronLaplace, column_functions, exact_log_marginal_likelihood
from ella_cuda.laplace.call import Call
from ella_cuda.laplace.rules import rule_for

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
FUNCTION = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
IMAGES, CLASSES = 3, 2


def network(layer: nn.Module, channels: int, size: tuple[int, ...]) -> nn.Sequential:
    """The layer between nonlinear ones, on inputs ``(N, channels, *size)``, in float64."""
    model = nn.Sequential(nn.Tanh(), layer, nn.Tanh(), nn.Flatten(), nn.LazyLinear(CLASSES)).double()
    model(torch.zeros(1, channels, *size, dtype=torch.float64))
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    return model


def columns(model: nn.Sequential, x: Tensor) -> tuple[Tensor, Tensor]:
    """The layer's input, and the gradients at its output of a square root of the softmax Hessian: ``(K, N, D, ...)``."""
    inner = model[0](x).detach()
    out = model[1](inner).detach().requires_grad_()
    logits = model[2:](out)
    p = logits.detach().softmax(1)
    root = torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None, :]  # of diag(p) - p p^T, column k in [..., k]
    found = [torch.autograd.grad(logits, out, root[..., k], retain_graph=True)[0] for k in range(CLASSES)]
    return inner, torch.stack(found)


def patches(x: Tensor, m: nn.Module, groups: int, padding: tuple[int, ...]) -> Tensor:
    """``(N, C, ...) -> (N, groups, C/groups * k, positions)``, by a convolution with the identity."""
    c, k = x.shape[1] // groups, math.prod(m.kernel_size)
    kernel = torch.eye(c * k, dtype=x.dtype).view(c * k, c, *m.kernel_size)
    of_groups = [
        FUNCTION[len(m.kernel_size)](part, kernel, None, m.stride, padding, m.dilation) for part in x.chunk(groups, 1)
    ]
    return torch.stack(of_groups, 1).flatten(3)


def require(model: nn.Sequential, x: Tensor, y: Tensor, inputs: Tensor, outputs: Tensor, bias: Tensor | None) -> None:
    """The layer's factors are these, from one batch and from several."""
    for size in (len(x), 2):
        factors = KronLaplace(model).fit(list(zip(x.split(size), y.split(size), strict=True))).factors
        torch.testing.assert_close(factors["1.weight"].inputs, inputs, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(factors["1.weight"].outputs, outputs, rtol=1e-9, atol=1e-11)
        if bias is not None:
            torch.testing.assert_close(factors["1.bias"].outputs[0], bias, rtol=1e-9, atol=1e-11)


CASES = [  # axes, channels in, out, size, options
    (1, 2, 3, (7,), dict(kernel_size=3)),
    (1, 2, 3, (7,), dict(kernel_size=3, padding=2, stride=2, dilation=2)),
    (1, 4, 6, (8,), dict(kernel_size=4, padding="same", groups=2)),
    (1, 2, 3, (7,), dict(kernel_size=3, padding=1, padding_mode="circular")),
    (1, 2, 3, (7,), dict(kernel_size=3, padding=2, padding_mode="reflect", bias=False)),
    (1, 2, 3, (7,), dict(kernel_size=4, padding="same", padding_mode="replicate")),
    (2, 2, 3, (5, 4), dict(kernel_size=3, padding=1, padding_mode="reflect")),
    (2, 4, 2, (5, 4), dict(kernel_size=(3, 2), padding=(1, 2), padding_mode="replicate", stride=2, groups=2)),
    (2, 2, 3, (6, 6), dict(kernel_size=4, padding="same", padding_mode="reflect")),
    (3, 2, 3, (3, 4, 5), dict(kernel_size=(2, 3, 3))),
    (3, 2, 4, (3, 4, 5), dict(kernel_size=3, padding=(1, 2, 0), stride=(1, 2, 1), dilation=(1, 1, 2), groups=2)),
    (3, 1, 2, (3, 4, 5), dict(kernel_size=(2, 3, 3), padding="same")),
    (3, 2, 2, (3, 3, 3), dict(kernel_size=3, padding=1, padding_mode="circular", bias=False)),
    (3, 2, 2, (3, 3, 4), dict(kernel_size=2, padding=1, padding_mode="replicate")),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_factors_of_a_convolution_are_those_of_kfac_expand(case, dense_ggn):
    axes, c, d, size, options = case
    layer = CONV[axes](c, d, **options)
    model = network(layer, c, size)
    x, y = torch.randn(IMAGES, c, *size, dtype=torch.float64), torch.randint(CLASSES, (IMAGES,))
    inner, gradient = columns(model, x)
    if layer.padding_mode != "zeros" or layer.padding == "same":  # as torch pads
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        inner, padding = F.pad(inner, layer._reversed_padding_repeated_twice, mode=mode), (0,) * axes
    else:
        padding = layer.padding
    rows = patches(inner, layer, layer.groups, padding)
    g = gradient.flatten(3).unflatten(2, (layer.groups, -1))
    expected_in = torch.einsum("ngap,ngbp->gab", rows, rows) / IMAGES
    expected_out = torch.einsum("kngap,kngbp->gab", g, g) / g.shape[-1]
    require(model, x, y, expected_in, expected_out, dense_ggn(model, x, y).get("1.bias"))


@pytest.mark.parametrize("axes", CONV)
def test_one_position_of_one_data_point_is_exact(axes, dense_ggn):
    size = (3, 2, 2)[:axes]
    x, y = torch.randn(1, 2, *size, dtype=torch.float64), torch.randint(CLASSES, (1,))
    model = network(CONV[axes](2, 3, size), 2, size)
    block = dense_ggn(model, x, y)["1.weight"].unflatten(0, (3, -1)).unflatten(2, (3, -1)).permute(1, 0, 3, 2)
    found = KronLaplace(model).fit([(x, y)]).factors["1.weight"].to_dense()[0]
    torch.testing.assert_close(found, block.reshape(found.shape), rtol=1e-9, atol=1e-12)


TRANSPOSED_CASES = [
    (1, 2, 3, (4,), dict(kernel_size=3)),
    (1, 4, 6, (4,), dict(kernel_size=3, stride=2, padding=1, output_padding=1, groups=2)),
    (2, 2, 3, (3, 4), dict(kernel_size=2, stride=2)),
    (2, 4, 2, (3, 4), dict(kernel_size=(3, 2), stride=(2, 1), padding=(1, 0), dilation=2, groups=2)),
    (2, 2, 3, (3, 3), dict(kernel_size=4, stride=3, padding=1, output_padding=(2, 1), bias=False)),
    (3, 2, 3, (2, 3, 2), dict(kernel_size=2, stride=2)),
    (3, 2, 2, (2, 3, 2), dict(kernel_size=(3, 2, 3), stride=(2, 1, 2), padding=1, output_padding=(1, 0, 0), groups=2)),
]


@pytest.mark.parametrize("case", TRANSPOSED_CASES, ids=str)
def test_factors_of_a_transposed_convolution(case, dense_ggn):
    axes, c, d, size, options = case
    layer = TRANSPOSED[axes](c, d, **options)
    model = network(layer, c, size)
    x, y = torch.randn(IMAGES, c, *size, dtype=torch.float64), torch.randint(CLASSES, (IMAGES,))
    inner, gradient = columns(model, x)
    positions = inner.flatten(2).unflatten(1, (layer.groups, -1))
    rows = patches(gradient.flatten(0, 1), layer, layer.groups, layer.padding)
    assert rows.shape[-1] == positions.shape[-1]
    expected_in = torch.einsum("ngap,ngbp->gab", positions, positions) / IMAGES
    expected_out = torch.einsum("ngap,ngbp->gab", rows, rows) / rows.shape[-1]
    require(model, x, y, expected_in, expected_out, dense_ggn(model, x, y).get("1.bias"))


@pytest.mark.parametrize("axes", TRANSPOSED)
def test_one_input_position_of_one_data_point_is_exact(axes, dense_ggn):
    """Not by patches: the dense matrix knows where the layer puts them."""
    size = (1,) * axes
    x, y = torch.randn(1, 3, *size, dtype=torch.float64), torch.randint(CLASSES, (1,))
    model = network(TRANSPOSED[axes](3, 2, (3, 2, 2)[:axes], stride=2, padding=0, output_padding=1), 3, size)
    found = KronLaplace(model).fit([(x, y)]).factors["1.weight"].to_dense()[0]
    torch.testing.assert_close(found, dense_ggn(model, x, y)["1.weight"], rtol=1e-9, atol=1e-12)


def test_output_padding_that_reaches_a_stride_is_refused():
    layer = nn.ConvTranspose1d(2, 3, 3, stride=1, dilation=2, output_padding=1)
    with pytest.raises(ValueError, match=r"layer '0' \(ConvTranspose1d\): output_padding must be below the stride"):
        KronLaplace(nn.Sequential(layer))


class Sized(nn.Module):
    """A transposed convolution that is told its output's size."""

    def __init__(self, layer: nn.ConvTranspose2d, size: list[int] | None) -> None:
        super().__init__()
        self.layer, self.size = layer, size

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, output_size=self.size)


@pytest.mark.parametrize("size", [None, [6, 5], [5, 6]])
def test_a_call_may_say_the_size(size):
    layer = nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1)
    extra = (0, 0) if size is None else tuple(s - 5 for s in size)
    plain = nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=extra)
    x, y = torch.randn(4, 2, 3, 3).double(), torch.randint(CLASSES, (4,))
    model = network(Sized(layer, size), 2, (3, 3))
    other = network(plain, 2, (3, 3))
    other.load_state_dict({k.replace("layer.", ""): v for k, v in model.state_dict().items()})
    found, expected = KronLaplace(model).fit([(x, y)]), KronLaplace(other).fit([(x, y)])
    torch.testing.assert_close(found.log_marginal_likelihood(), expected.log_marginal_likelihood())
    torch.testing.assert_close(exact_log_marginal_likelihood(found, x, y), expected.log_marginal_likelihood())


def test_patches_of_three_axes_in_parts(monkeypatch):
    from ella_cuda.laplace import second_moment

    model = network(nn.Conv3d(2, 3, 2, groups=1), 2, (3, 4, 3))
    batch = torch.randn(5, 2, 3, 4, 3).double(), torch.randint(CLASSES, (5,))
    whole = KronLaplace(model).fit([batch]).factors["1.weight"]
    for at_a_time in (1, 16 * 6 * 2, 16 * 12 * 2):  # planes, one by one; two planes; two images
        monkeypatch.setattr(second_moment, "WINDOWS", at_a_time)
        parts = KronLaplace(model).fit([batch]).factors["1.weight"]
        torch.testing.assert_close(parts.inputs, whole.inputs, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(2, 2, 3, padding=1, padding_mode="reflect"),
        nn.ConvTranspose1d(2, 2, 3, stride=2),
        nn.BatchNorm1d(2),
        nn.GroupNorm(2, 2),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_the_exact_evidence_is_that_of_a_fit(layer):
    model = network(layer, 2, (4,))
    x, y = torch.randn(4, 2, 4).double(), torch.randint(CLASSES, (4,))
    la = KronLaplace(model).fit([(x, y)])
    torch.testing.assert_close(exact_log_marginal_likelihood(la, x, y), la.log_marginal_likelihood())


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("piece", [1, 3000])
@pytest.mark.parametrize(
    "options", [{"padding": 1}, {"stride": 2, "padding": 1}, {"stride": 2, "padding": 1, "padding_mode": "circular"}]
)
def test_gradients_go_back_by_pieces(options, piece, layout, monkeypatch):
    """One row of gradients at a time, or a few with a rest; against autograd."""
    monkeypatch.setattr(column_functions, "PIECE", piece)
    layer, x = nn.Conv2d(4, 6, 3, **options).double(), torch.randn(5, 4, 6, 6, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn(3, *layer(x).shape, dtype=torch.float64)
    gradient = gradient.flatten(0, 1).contiguous(memory_format=layout).unflatten(0, (3, 5))
    expected = torch.stack([torch.autograd.grad(layer(x), x, g)[0] for g in gradient])
    rule = rule_for(layer, "layer")
    found = rule.input_gradient(gradient, Call(rule, input_shape=x.shape))
    torch.testing.assert_close(found, expected)
    assert found.flatten(0, 1).is_contiguous(memory_format=layout)
