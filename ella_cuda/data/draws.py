"""Random numbers that belong to an image: a function of (seed, purpose, image id) alone.

A counter-based generator, so that a draw does not depend on the order, number or split of the images, nor on torch's
or numpy's generators and their versions.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch
from torch import Tensor


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's output function on uint64 (Steele, Lea, Flood, OOPSLA 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def bits(ids: Tensor, seed: int, purpose: str) -> np.ndarray:
    """64 random bits for every id.

    Args:
        ids: ``(N,)`` int64, not negative.
        seed: any integer of at most 64 bits.
        purpose: names the draw, so that two draws for one image are independent.

    Returns:
        ``(N,)`` numpy uint64.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    key = _mix(_mix(np.array([seed & (2**64 - 1)], dtype=np.uint64) + golden) + np.uint64(zlib.crc32(purpose.encode())))
    return _mix(_mix(ids.cpu().numpy().astype(np.uint64) * golden + key))


def integers(ids: Tensor, seed: int, purpose: str, high: int) -> Tensor:
    """For every id a uniform integer in ``0 .. high - 1``, ``(N,)`` int64; ``high`` at most 2**20 (bias below
    2**-44)."""
    return torch.from_numpy((bits(ids, seed, purpose) % np.uint64(high)).astype(np.int64))


def uniform(ids: Tensor, seed: int, purpose: str, low: float, high: float) -> Tensor:
    """For every id a uniform number in ``low .. high``, of 53 random bits, ``(N,)`` float64."""
    fraction = (bits(ids, seed, purpose) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return torch.from_numpy(low + (high - low) * fraction)


def stratified_order(labels: Tensor, ids: Tensor, seed: int, purpose: str) -> Tensor:
    """A random order of the images in which every beginning has the classes in proportion.

    Each class is shuffled by its images' draws and spread evenly over the order.

    Args:
        labels: ``(N,)`` int64 class labels.
        ids: ``(N,)`` int64 image numbers.
        seed: chooses the order.
        purpose: names the draw.

    Returns:
        ``(N,)`` int64, positions into ``labels``.
    """
    drawn, classes, numbers = bits(ids, seed, purpose), labels.cpu().numpy(), ids.cpu().numpy()
    place = np.empty(len(classes), dtype=np.float64)
    for c in np.unique(classes):
        members = np.flatnonzero(classes == c)
        shuffled = members[np.argsort(drawn[members], kind="stable")]
        place[shuffled] = (np.arange(len(members)) + 0.5) / len(members)
    return torch.from_numpy(np.lexsort((numbers, drawn, place)).astype(np.int64))
