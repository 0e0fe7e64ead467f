"""Layers under autocast."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from ella_cuda.ops._precision import autocast_is_on, without_autocast

Layer = TypeVar("Layer", bound=nn.Module)
REDUCED = (torch.float16, torch.bfloat16)


def full_precision(forward: Callable[[Layer, Tensor], Tensor]) -> Callable[[Layer, Tensor], Tensor]:
    """A layer's forward, which under autocast takes inputs of reduced precision as float32 and reduces none itself: what torch does
    with the functions of which it knows that they need float32. The compiled ops have no other kernels. A layer whose parameters
    are of another dtype takes its inputs as they are."""

    @functools.wraps(forward)
    def wrapped(self: Layer, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or not autocast_is_on(x.device.type):
            return forward(self, x)
        with without_autocast(x.device.type):
            return forward(self, widened(x, self))

    # Code of its own: a compiler that begins here limits how often it compiles the same code again.
    wrapped.__code__ = wrapped.__code__.replace(co_name=f"forward of {forward.__qualname__.partition('.')[0]}")
    return wrapped


def widened(x: Tensor, layer: nn.Module) -> Tensor:
    """An input of reduced precision as float32, if the layer's parameters are of float32 or there are none."""
    own = next(layer.parameters(), None)
    return full(x) if own is None or own.dtype == torch.float32 else x


def full(x: Tensor) -> Tensor:
    """A tensor of reduced precision as float32, any other as it is."""
    return x.float() if x.dtype in REDUCED else x
