"""A run's settings in words, by which two sessions of it are compared."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
from torch import Tensor


def in_words(arguments: dict[str, Any] | None) -> dict[str, str]:
    """Arguments of a function in words."""
    return {key: _word(value) for key, value in sorted((arguments or {}).items())}


def name_of(function: Any) -> str:
    """A class or function by its name, one whose arguments are given in part with these."""
    if isinstance(function, functools.partial):
        return f"{name_of(function.func)}{_word(function.args)}{in_words(function.keywords)}"
    return getattr(function, "__name__", type(function).__qualname__)


def _word(value: Any) -> str:
    """Numbers, strings and data classes as they are written, functions and other objects by name: no addresses."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_word, value))})"
    if isinstance(value, functools.partial):
        return name_of(value)
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return _word(value.tolist())
    if isinstance(value, (bool, int, float, str, type(None))) or dataclasses.is_dataclass(value):
        return repr(value)
    return getattr(value, "__qualname__", type(value).__qualname__)
