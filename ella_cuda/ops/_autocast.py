"""Arithmetic that autocast does not touch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

DEVICES = ("cpu", "cuda")  # in words: torch 2.11 cannot compile its own question which devices have an autocast


def autocast_is_on(device: str) -> bool:
    """Whether autocast is on for that type of device, one that this package has ops for."""
    return device in DEVICES and torch.is_autocast_enabled(device)


def without_autocast(device: str) -> AbstractContextManager[object]:
    """For the duration of the context products on that type of device are in their arguments' precision."""
    return torch.autocast(device, enabled=False) if autocast_is_on(device) else nullcontext()
