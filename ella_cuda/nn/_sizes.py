"""Checks that the layers on images share."""

from __future__ import annotations

from numbers import Integral

from torch import Tensor

Size = int | tuple[int, int]


def as_size(name: str, value: Size) -> tuple[int, int]:
    """``(H, W)`` from one number or a pair; ValueError unless both are positive integers."""
    size = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    if len(size) != 2 or not all(_is_count(s) for s in size):
        raise ValueError(f"{name} must be a positive integer or a pair (height, width) of them, got {value!r}.")
    return int(size[0]), int(size[1])


def as_kernel_size(value: Size) -> tuple[int, int]:
    """As :func:`as_size`; ValueError unless both are odd."""
    size = as_size("kernel_size", value)
    if any(k % 2 == 0 for k in size):
        raise ValueError(f"kernel_size must be odd, got {value!r}.")
    return size


def as_count(name: str, value: int) -> int:
    """The value; ValueError unless it is a positive integer."""
    if not _is_count(value):
        raise ValueError(f"{name} must be a positive integer, got {value!r}.")
    return int(value)


def _is_count(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and value > 0  # numpy's integers too


def check_same_kind(layer: str, x: Tensor, weight: Tensor) -> None:
    """ValueError unless x is of the weight's dtype and on its device."""
    if x.device != weight.device:
        raise ValueError(
            f"{layer}: x is on {x.device}, the layer's parameters are on {weight.device}; move one with .to(), for example "
            f"x.to({str(weight.device)!r})."
        )
    if x.dtype != weight.dtype:
        raise ValueError(
            f"{layer}: x is {x.dtype}, the layer's parameters are {weight.dtype}; convert one with .to(), for example x.to({weight.dtype})."
        )


def check_image(layer: str, x: Tensor, channels: int, size: tuple[int, int] | None, weight: Tensor) -> None:
    """ValueError unless x is ``(N, channels, *size)``, of any size where that is None, of the weight's dtype and on its device;
    TypeError where it is no tensor."""
    wanted = f"(N, {channels}, {'H, W' if size is None else f'{size[0]}, {size[1]}'})"
    if not isinstance(x, Tensor):
        raise TypeError(f"{layer}: x must be a tensor {wanted}, got {type(x).__name__}.")
    check_same_kind(layer, x, weight)
    if x.dim() != 4 or x.shape[1] != channels or size not in (None, tuple(x.shape[2:])):
        raise ValueError(f"{layer}: x must have shape {wanted}, got {tuple(x.shape)}.")
