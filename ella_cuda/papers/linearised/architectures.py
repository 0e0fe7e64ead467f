"""The talk's five architectures, as wide as a number of parameters says."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

PATCHES = 4  # of the transformer, along a side
HEADS = 2


def network(name: str, parameters: int, image_size: int, in_channels: int = 1, num_classes: int = 10) -> nn.Module:
    """One of :data:`NETWORKS` whose number of trainable parameters is as near to ``parameters`` as a width makes it.

    Normalisations have no affine parameters, and layers that one follows no biases.

    Args:
        name: of :data:`NETWORKS`.
        parameters: how many there should be.
        image_size: height and width, a multiple of 8.
        in_channels: of the images.
        num_classes: K.

    Raises:
        ValueError: an unknown name, or a size that does not fit.
    """
    if name not in NETWORKS:
        raise ValueError(f"network must be one of {', '.join(NETWORKS)}, got {name!r}.")
    if image_size < 8 or image_size % 8:
        raise ValueError(f"image_size must be a multiple of 8, got {image_size}.")
    make, best, distance = NETWORKS[name], 2, math.inf
    for width in range(2, 2 + 2 * math.isqrt(max(parameters, 1)), 2):
        with torch.device("meta"):
            found = sum(p.numel() for p in make(width, in_channels, image_size, num_classes).parameters())
        if abs(found - parameters) >= distance:
            break
        best, distance = width, abs(found - parameters)
    return make(best, in_channels, image_size, num_classes)


def _conv(inputs: int, outputs: int, stride: int = 1, bias: bool = False, kernel_size: int = 3) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel_size, stride, kernel_size // 2, bias=bias)


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, affine=False)


def _pooled(channels: int, num_classes: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)]


def _widths(width: int) -> tuple[tuple[int, int, int], ...]:
    """Channels in and out, and the stride, of each block."""
    return (width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)


def cnn(width: int, in_channels: int, image_size: int, num_classes: int) -> nn.Module:
    """Four convolutions with BatchNorm."""
    layers = [_conv(in_channels, width), _norm(width), nn.ReLU()]
    for inputs, outputs, stride in _widths(width):
        layers += [_conv(inputs, outputs, stride), _norm(outputs), nn.ReLU()]
    return nn.Sequential(*layers, *_pooled(4 * width, num_classes))


class _Residual(nn.Module):
    """``after(branch(x) + shortcut(x))``."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module, after: nn.Module) -> None:
        super().__init__()
        self.branch, self.shortcut, self.after = branch, shortcut, after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.branch(x) + self.shortcut(x))


def resnet(width: int, in_channels: int, image_size: int, num_classes: int) -> nn.Module:
    """Three blocks of two convolutions, BatchNorm after each; where a block changes the size, its shortcut is a convolution."""
    layers: list[nn.Module] = [_conv(in_channels, width), _norm(width), nn.ReLU()]
    for inputs, outputs, stride in _widths(width):
        branch = nn.Sequential(
            _conv(inputs, outputs, stride), _norm(outputs), nn.ReLU(), _conv(outputs, outputs), _norm(outputs)
        )
        shortcut = nn.Sequential(_conv(inputs, outputs, stride, kernel_size=1), _norm(outputs))
        layers.append(_Residual(branch, nn.Identity() if inputs == outputs else shortcut, nn.ReLU()))
    return nn.Sequential(*layers, *_pooled(4 * width, num_classes))


def pre_resnet(width: int, in_channels: int, image_size: int, num_classes: int) -> nn.Module:
    """As :func:`resnet`, with BatchNorm and activation before each convolution: the last one of a block has none after it."""
    layers: list[nn.Module] = [_conv(in_channels, width)]
    for inputs, outputs, stride in _widths(width):
        branch = nn.Sequential(
            *(_norm(inputs), nn.ReLU(), _conv(inputs, outputs, stride)),
            *(_norm(outputs), nn.ReLU(), _conv(outputs, outputs)),
        )
        shortcut = nn.Identity() if inputs == outputs else _conv(inputs, outputs, stride, kernel_size=1)
        layers.append(_Residual(branch, shortcut, nn.Identity()))
    return nn.Sequential(*layers, _norm(4 * width), nn.ReLU(), *_pooled(4 * width, num_classes))


def fixup(width: int, in_channels: int, image_size: int, num_classes: int) -> nn.Module:
    """As :func:`resnet` without normalisation, by Fixup's start: a block's first convolution is smaller, its last one and the head are zero.
    Convolutions have biases, in place of Fixup's scalar ones; there are no multipliers.

    Source: Zhang, Dauphin and Ma, "Fixup initialization", ICLR 2019.
    """
    blocks = _widths(width)
    layers: list[nn.Module] = [_conv(in_channels, width, bias=True), nn.ReLU()]
    for inputs, outputs, stride in blocks:
        first, last = _conv(inputs, outputs, stride, bias=True), _conv(outputs, outputs, bias=True)
        nn.init.kaiming_normal_(first.weight)
        with torch.no_grad():
            first.weight.mul_(len(blocks) ** -0.5)
        for tensor in (first.bias, last.weight, last.bias):
            nn.init.zeros_(tensor)
        shortcut = nn.Identity() if inputs == outputs else _conv(inputs, outputs, stride, True, kernel_size=1)
        layers.append(_Residual(nn.Sequential(first, nn.ReLU(), last), shortcut, nn.ReLU()))
    head = _pooled(4 * width, num_classes)
    for tensor in head[-1].parameters():
        nn.init.zeros_(tensor)
    return nn.Sequential(*layers, *head)


class _Block(nn.Module):
    """Attention and a network of two layers, LayerNorm before both, each added to what it gets."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = nn.MultiheadAttention(width, HEADS, batch_first=True)
        self.layers = nn.Sequential(
            nn.LayerNorm(width, elementwise_affine=False),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.layers(x)


class _Transformer(nn.Module):
    def __init__(self, width: int, in_channels: int, image_size: int, num_classes: int) -> None:
        super().__init__()
        side = image_size // PATCHES
        self.embedding = nn.Conv2d(in_channels, width, side, side)
        self.register_buffer("positions", _waves(PATCHES**2, width), persistent=False)
        self.blocks = nn.Sequential(_Block(width), _Block(width))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(x)).mean(1))


def _waves(count: int, width: int) -> Tensor:
    """Sines and cosines of positions, ``(count, width)``."""
    rates = 10_000 ** (-torch.arange(0, width, 2) / width)
    phases = torch.arange(count)[:, None] * rates
    return torch.stack([phases.sin(), phases.cos()], dim=2).flatten(1)


NETWORKS: dict[str, Callable[[int, int, int, int], nn.Module]] = {
    "t-former": _Transformer,
    "cnn": cnn,
    "resnet": resnet,
    "pre-resnet": pre_resnet,
    "fixup": fixup,
}
