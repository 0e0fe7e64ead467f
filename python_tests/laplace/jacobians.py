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
from python_tests.laplace.checks import randomised


class EverySecond(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, ::2, ::2]


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
        self.factors["weight"].output_moment.add((gradient * self.kept).flatten(0, 1)[:, None])


class Unservable(Scaled):
    """One that torch.func.vmap cannot take, for which the rule of the other is registered."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x if x.sum().item() else 0 * x)


register(Unservable)(ScaledRule)


class Twice(nn.Module):
    """A layer called twice, on two scales, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.conv(x)))
        return self.head(torch.tanh(self.norm(self.conv(F.avg_pool2d(x, 2)))).mean((2, 3)))


class Tied(nn.Module):
    """An embedding whose transpose is the output layer, and positions that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6)
        self.head.weight = self.embed.weight
        self.places = nn.Parameter(torch.zeros(1, 3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.embed(x) + self.places)).mean(1))


class Attending(nn.Module):
    """Self-attention, and a query that attends to it."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(4, 2, batch_first=batch_first)
        self.other = nn.MultiheadAttention(4, 2, batch_first=True, kdim=4, vdim=4)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        z = x if self.batch_first else x.transpose(0, 1)
        z = self.own(z, z, z)[0]
        z = self.norm(z if self.batch_first else z.transpose(0, 1))
        return self.head(self.other(z[:, :1], z, z)[0][:, 0])


class Folded(nn.Module):
    """Positions folded into the batch, a linear layer used by a function alone, and a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second, self.head = (
            nn.Linear(4, 5),
            nn.LayerNorm(5),
            nn.Linear(5, 3),
            nn.Linear(9, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        folded = self.norm(self.first(x.flatten(0, 1)))
        linear = F.linear(torch.tanh(folded.unflatten(0, x.shape[:2])), self.second.weight, self.second.bias)
        return self.head(checkpoint(torch.tanh, linear, use_reentrant=False).flatten(1))


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


class Distances(nn.Module):
    """A function of which torch.func.vmap has wrong gradients, in a layer of a user's too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.own, self.head = nn.Linear(4, 3), OwnDistances(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        z = self.own(self.first(x))
        return self.head(torch.cdist(z, z).sum(2))


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


class Bags(nn.Module):
    """Bags of words and their order, with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(6, 3, mode="mean", padding_idx=0)
        self.words, self.head = nn.Embedding(6, 3, padding_idx=0), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.bag(x) + self.words(x).sum(1)))


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
            EverySecond(),
            nn.Conv2d(4, 3, 3, padding=1),
            EverySecond(),
            nn.ZeroPad2d(1),
            nn.Conv2d(3, 3, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(3, 2),
        ),
        _real(2, 8, 8),
    ),
    "our conv": (
        _images(
            ella_nn.CircularConv2d(2, 3, 3),
            nn.Tanh(),
            ella_nn.StridedCircularConv2d(3, 4, 3),
            ella_nn.SparseConv2d(4, 3),
            channels=3,
        ),
        _real(2, 8, 8),
    ),
    "factored": (
        _images(
            ella_nn.FactoredLinear2d(2, 3, 8, 4),
            nn.Tanh(),
            ella_nn.SparseFactoredLinear2d(3, 2, 4, 4, num_anchors=5),
            channels=2,
        ),
        _real(2, 8, 8),
    ),
    "twice": (Twice, _real(2, 8, 8)),
    "tied": (Tied, _words),
    "attention": (Attending, _real(3, 4)),
    "bags": (Bags, _words),
    "folded": (Folded, _real(3, 4)),
    "distances": (Distances, _real(3, 4)),
}


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
