"""What torch compiles, at its first call: merely asking for it imports a compiler, which takes seconds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled for every shape it meets."""

    @functools.cache
    def made() -> Callable[..., Any]:
        return torch.compile(function, dynamic=False)

    return lambda *args, **kwargs: made()(*args, **kwargs)
