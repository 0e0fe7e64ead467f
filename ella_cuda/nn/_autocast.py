"""What layers do under autocast."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

Layer = TypeVar("Layer", bound=nn.Module)
REDUCED = (torch.float16, torch.bfloat16)


def full_precision(forward: Callable[[Layer, Tensor], Tensor]) -> Callable[[Layer, Tensor], Tensor]:
    """A layer's forward, which under autocast takes inputs of reduced precision as float32 and reduces none itself: what torch does
    with the functions of which it knows that they need float32. The compiled ops have no other kernels."""

    @functools.wraps(forward)
    def wrapped(self: Layer, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or not _is_on(x.device.type):
            return forward(self, x)
        with torch.autocast(x.device.type, enabled=False):
            return forward(self, x.float() if x.dtype in REDUCED else x)

    # Code of its own: a compiler that begins here limits how often it compiles the same code again.
    wrapped.__code__ = wrapped.__code__.replace(co_name=f"forward of {forward.__qualname__.partition('.')[0]}")
    return wrapped


def _is_on(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
