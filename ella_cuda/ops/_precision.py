"""The precision of an op's arithmetic: none of autocast's, TF32 where torch may use it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

Arguments, Result = ParamSpec("Arguments"), TypeVar("Result")

DEVICES = ("cpu", "cuda")  # in words: torch 2.11 cannot compile its own question which devices have an autocast


def autocast_is_on(device: str) -> bool:
    """Whether autocast is on for that type of device, one that this package has ops for."""
    return device in DEVICES and torch.is_autocast_enabled(device)


def without_autocast(device: str) -> AbstractContextManager[object]:
    """For the duration of the context products on that type of device are in their arguments' precision."""
    return torch.autocast(device, enabled=False) if autocast_is_on(device) else nullcontext()


def casting_anew(device: str) -> AbstractContextManager[object]:
    """For the duration of the context autocast casts parameters at each use. It would keep casts until its outermost context ends: of
    parameters that have changed since, and of calls without gradients."""
    if not autocast_is_on(device):
        return nullcontext()
    return torch.autocast(device, dtype=torch.get_autocast_dtype(device), cache_enabled=False)


def in_own_precision(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The function, whose products are in their arguments' precision under autocast too."""

    @functools.wraps(function)
    def wrapped(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with without_autocast("cpu"), without_autocast("cuda"):
            return function(*args, **kwargs)

    return wrapped


def allows_tf32(tensor: Tensor) -> bool:
    """Whether an op on such a tensor may round float32 numbers to TF32: on CUDA, where torch may for its matrix products.

    The setting is the argument of a call: its derivatives of any order, on whatever thread, have that of the forward pass, and so has a
    compiled or captured graph. What ``torch.compile`` compiled is compiled again when the setting changes.
    """
    return tensor.is_cuda and _torch_allows_tf32()


def _torch_allows_tf32() -> bool:
    # The one question that torch answers however the setting was made: by this name, by allow_tf32 or by set_float32_matmul_precision.
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


# As torch.compiler.assume_constant_result, which would import the compiler. Dynamo's own guards have the setting.
_torch_allows_tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]
