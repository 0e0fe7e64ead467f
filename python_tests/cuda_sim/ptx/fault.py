"""What stops a kernel in the machine, and what both of its memories share."""

from __future__ import annotations

import numpy as np

Array = np.ndarray
WORD = 4  # bytes; memories are watched in words


class Fault(Exception):
    """What a GPU would trap on, or what no GPU promises."""


def check_aligned(addresses: Array, size: int) -> None:
    if np.any(addresses % np.uint64(size)):
        raise Fault(f"an access of {size} bytes is not on a multiple of {size}")
