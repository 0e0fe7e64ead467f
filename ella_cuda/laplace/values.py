"""Checks of the arguments of an approximation."""

from __future__ import annotations

import numbers

import torch
from torch import Tensor

Value = float | Tensor


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    """The choice that the value equals, as a plain string whatever the value is (members of string enums are equal to theirs);
    ValueError where it is none of them."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")
    return choices[choices.index(value)]


def as_float64(name: str, value: Value, device: torch.device) -> Tensor:
    """A float64 tensor on the device, still attached to the graph of what was given; TypeError where that is neither number nor tensor."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float64)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):  # numpy's numbers are
        raise TypeError(
            f"{name}: expected a number or a tensor, got {type(value).__name__}; of several make torch.tensor(...)."
        )
    return torch.tensor(float(value), dtype=torch.float64, device=device)


def check_positive(name: str, value: Tensor) -> None:
    """ValueError where an entry is not positive and finite; the message has its index."""
    bad = ~((value > 0) & value.isfinite()).flatten()
    if bad.any():
        first = int(bad.nonzero()[0])
        where = f" at index {first}" if len(bad) > 1 else ""
        raise ValueError(f"{name}: expected positive finite values, got {value.flatten()[first].item()}{where}.")


def positive_number(name: str, value: Value) -> float:
    """The value as a float; ValueError where it is not one positive finite number, TypeError where it is none."""
    found = as_float64(name, value, torch.device("cpu"))
    if found.numel() != 1:
        raise ValueError(f"{name}: expected one number, got shape {tuple(found.shape)}.")
    check_positive(name, found)
    return found.item()


def rounding_of(tensor: Tensor) -> float:
    """By how much, of its largest number, a tensor's derivative may differ from the same by another way. On CUDA cuDNN takes TF32 for
    float32 by default, through many layers; what is wrong is off by more."""
    return 2.0**-6 if tensor.is_cuda and tensor.dtype == torch.float32 else torch.finfo(tensor.dtype).eps ** 0.5
