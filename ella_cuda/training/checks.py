"""The arguments of :func:`ella_cuda.marglik_training`: checks, warnings, and the words by which two sessions of a run compare them."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import sys
import warnings
from typing import Any

import numpy as np
from torch import Tensor


def whole(name: str, value: int, minimum: int) -> int:
    """The value as an int; numpy's are whole numbers too."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"marglik_training: {name} must be an integer, got {value!r}.")
    if value < minimum:
        raise ValueError(f"marglik_training: {name} must be at least {minimum}, got {value!r}.")
    return int(value)


def positive(name: str, value: float, where: str = "marglik_training") -> float:
    """The value as a float, from whatever is one real number."""
    try:
        if isinstance(value, (bool, str)):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{where}: {name} must be one number, got {type(value).__name__}.") from error
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(f"{where}: {name} must be positive and finite, got {value!r}.")
    return number


def positive_integer(name: str, value: int, where: str) -> int:
    """The value as an int; numpy's are whole numbers too."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(f"{where}: {name} must be a positive integer, got {value!r}.")
    return int(value)


WITHIN = ("ella_cuda.training", "ella_cuda.modes")


def warn(message: str) -> None:
    """A UserWarning at the line that called ``ella_cuda.training``."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(WITHIN):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


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
