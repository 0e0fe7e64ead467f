"""Networks with every layer that has a rule, and their Jacobians by torch.func."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ella_cuda import nn as ella_nn
from ella_cuda.laplace import FactorShape, Rule, register
from python_tests.laplace.checks import Function, randomised


class Scaled(nn.Module):
    """A layer of a user's own, whose rule knows no Jacobians."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


@register(Scaled)
class ScaledRule(Rule):
    """Its block is exact."""

    def shapes(self) -> dict[str, FactorShape]:
        return {"weight": FactorShape.bias(4)}

    def inputs(self, x: Tensor) -> None:
        self.kept = x

    def outputs(self, gradient: Tensor) -> None:
        rows = (gradient * self.kept).reshape(*gradient.shape[:2], -1, 4).sum(2)
        self.factors["weight"].output_moment.add(rows.flatten(0, 1)[:, None])


class Unservable(Scaled):
    """One that torch.func.vmap cannot take, for which the rule of the other is registered."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x if x.sum().item() else 0 * x)


register(Unservable)(ScaledRule)


def twice() -> nn.Module:
    """A layer called twice, on two scales, and a head."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = torch.tanh(m.norm(m.conv(x)))
        return m.head(torch.tanh(m.norm(m.conv(F.avg_pool2d(x, 2)))).mean((2, 3)))

    return Function(forward, conv=nn.Conv2d(2, 2, 3, padding=1), norm=nn.BatchNorm2d(2), head=nn.Linear(2, 3))


def tied() -> nn.Module:
    """An embedding whose transpose is the output layer, and positions that no rule knows."""
    layers = {"embed": nn.Embedding(6, 4), "inner": nn.Linear(4, 4), "head": nn.Linear(4, 6)}
    layers["head"].weight = layers["embed"].weight
    places = nn.Parameter(torch.zeros(1, 3, 4))
    return Function(lambda m, x: m.head(torch.tanh(m.inner(m.embed(x) + m.places)).mean(1)), **layers, places=places)


def attending() -> nn.Module:
    """Self-attention, and a query that attends to it."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        z = m.norm(m.own(x, x, x)[0])
        return m.head(m.other(z[:, :1], z, z)[0][:, 0])

    own = nn.MultiheadAttention(4, 2, batch_first=True)
    other = nn.MultiheadAttention(4, 2, batch_first=True, kdim=4, vdim=4)
    return Function(forward, own=own, other=other, norm=nn.LayerNorm(4), head=nn.Linear(4, 3))


def folded() -> nn.Module:
    """Positions folded into the batch, a linear layer used by a function alone, and a checkpoint."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        inner = m.norm(m.first(x.flatten(0, 1)))
        linear = F.linear(torch.tanh(inner.unflatten(0, x.shape[:2])), m.second.weight, m.second.bias)
        return m.head(checkpoint(torch.tanh, linear, use_reentrant=False).flatten(1))

    layers = {"first": nn.Linear(4, 5), "norm": nn.LayerNorm(5), "second": nn.Linear(5, 3), "head": nn.Linear(9, 2)}
    return Function(forward, **layers)


def distances() -> nn.Module:
    """A function of which torch.func.vmap has wrong gradients, in a layer of a user's too."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        z = m.own(m.first(x))
        return m.head(torch.cdist(z, z).sum(2))

    return Function(forward, first=nn.Linear(4, 3), own=OwnDistances(), head=nn.Linear(3, 2))


def bags() -> nn.Module:
    """Bags of words and their order, with padding."""
    bag, words = nn.EmbeddingBag(6, 3, mode="mean", padding_idx=0), nn.Embedding(6, 3, padding_idx=0)
    head = nn.Linear(3, 2)
    return Function(lambda m, x: m.head(torch.tanh(m.bag(x) + m.words(x).sum(1))), bag=bag, words=words, head=head)


def every_second() -> nn.Module:
    return Function(lambda m, x: x[:, :, ::2, ::2])


class OwnTanh(nn.Module):
    """Without a forward mode, and with a gradient that torch.func.vmap cannot take."""

    class _Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            out = torch.tanh(x)
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (out,) = ctx.saved_tensors
            if gradient.abs().sum().item() < 0:
                raise AssertionError
            return gradient * (1 - out.square())

    def forward(self, x: Tensor) -> Tensor:
        return self._Function.apply(x)


class OwnDistances(nn.Module):
    """Of positions to points."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.ones(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(x, self.points.expand(len(x), -1, -1))


@register(OwnDistances)
class OwnDistancesRule(Rule):
    """Some block, whose Jacobian autograd gives."""

    def shapes(self) -> dict[str, FactorShape]:
        return {"points": FactorShape(1, 3, 3, 1)}

    def inputs(self, x: Tensor) -> None:
        self.factors["points"].input_moment.add(x.flatten(0, 1)[:, None])

    def outputs(self, gradient: Tensor) -> None:
        self.factors["points"].output_moment.add(gradient.flatten(0, 2)[:, None])


def _images(*layers: nn.Module, channels: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*layers, nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 3))


def _words() -> Tensor:
    """With words that repeat, and padding."""
    return torch.tensor([[0, 3, 3], [2, 2, 2], [0, 1, 5], [3, 0, 4]])


def _real(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(4, *shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Scaled(), nn.Linear(4, 2, bias=False)), _real(3)),
    "a user's": (lambda: nn.Sequential(nn.Linear(3, 4), Scaled(), Unservable(), nn.Linear(4, 2)), _real(3)),
    "several outputs": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), _real(3, 4)),
    "conv": (
        _images(
            nn.Conv2d(2, 4, 3, stride=2, padding=1),
            nn.GroupNorm(2, 4),
            nn.Conv2d(4, 4, (2, 3), padding="same", groups=2, padding_mode="circular"),
            nn.Conv2d(4, 3, 3, padding=2, dilation=2, padding_mode="reflect"),
            channels=3,
        ),
        _real(2, 8, 8),
    ),
    "sampled conv": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.ReLU(),
            every_second(),
            nn.Conv2d(4, 3, 3, padding=1),
            every_second(),
            nn.ZeroPad2d(1),
            nn.Conv2d(3, 3, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(3, 2),
        ),
        _real(2, 8, 8),
    ),
    "narrow conv": (_images(nn.Conv2d(1, 6, (1, 2)), channels=6), _real(1, 4, 4)),  # positions between inputs and K outputs
    "our conv": (
        _images(ella_nn.CircularConv2d(2, 3, 3), nn.Tanh(), ella_nn.StridedCircularConv2d(3, 4, 3), ella_nn.SparseConv2d(4, 3), channels=3),
        _real(2, 8, 8),
    ),
    "factored": (
        _images(ella_nn.FactoredLinear2d(2, 3, 8, 4), nn.Tanh(), ella_nn.SparseFactoredLinear2d(3, 2, 4, 4, num_anchors=5), channels=2),
        _real(2, 8, 8),
    ),
    "twice": (twice, _real(2, 8, 8)),
    "tied": (tied, _words),
    "attention": (attending, _real(3, 4)),
    "bags": (bags, _words),
    "folded": (folded, _real(3, 4)),
    "distances": (distances, _real(3, 4)),
}  # fmt: skip


def network(name: str) -> tuple[nn.Module, Tensor]:
    """One of them, with its inputs."""
    torch.manual_seed(0)
    make, inputs = NETWORKS[name]
    return randomised(copy.deepcopy(make()), 0.6), inputs()


def dense_jacobians(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """By name, ``(N, K, *parameter.shape)``, with K the entries of a data point's outputs; of single data points by plain autograd."""
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    rows = []
    for image in x:
        outputs = model(image[None]).flatten()
        rows += [
            torch.autograd.grad(o, list(parameters.values()), retain_graph=True, materialize_grads=True)
            for o in outputs
        ]
    stacked = [torch.stack(parts).unflatten(0, (len(x), -1)) for parts in zip(*rows, strict=True)]
    return dict(zip(parameters, stacked, strict=True))
