"""What warps ask of the memories while a kernel runs in the machine: counts that a profiler would read off a GPU.

Global memory is moved in sectors of 32 bytes, each asked for once by each warp's instruction; shared memory serves in a turn
one word of each of 32 banks to the threads of a warp, of half of it for accesses of 8 bytes, of a quarter for 16.

Source: CUDA C++ Programming Guide, "Device Memory Accesses", "Shared Memory" of the compute capabilities; Nsight Compute, "Memory Tables".
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from .fault import WORD, Array
from .parse import Instruction

WARP, SECTOR, BANKS = 32, 32, 32


class Traffic:
    """Counts over the blocks that were run.

    Attributes:
        instructions: of PTX, by warps; also where all threads are predicated off.
        products: those of them for tensor cores.
        moved: sectors or turns, by "global read", "global write", "shared read", "shared write".
        needed: how many would do for the same bytes, were they as close together as can be.
    """

    def __init__(self) -> None:
        self.instructions = self.products = 0
        self.moved: Counter[str] = Counter()
        self.needed: Counter[str] = Counter()

    def step(self, instruction: Instruction, active: Array) -> None:
        """Threads `active` come to an instruction together."""
        warps = len(np.unique(active // WARP))
        self.instructions += warps
        self.products += warps if {"mma", "mma_async"} & set(instruction.parts[:2]) else 0

    def access(self, kind: str, threads: Array, addresses: Array, size: int) -> None:
        """These threads access `size` bytes each; `kind` is a key of `moved`."""
        at = addresses.astype(np.int64)
        if kind.startswith("global"):
            warps = threads // WARP
            ends = np.concatenate([at, at + size - 1]) // SECTOR
            self.moved[kind] += len(_distinct(np.tile(warps, 2), ends)[0])
            bytes_of_warp = size * np.bincount(_distinct(warps, at)[0])
            self.needed[kind] += int(np.sum(-(-bytes_of_warp // SECTOR)))
        else:
            phases = threads * size // (BANKS * WORD)
            words = (at // WORD)[:, None] + np.arange(size // WORD)
            phase, word = _distinct(np.repeat(phases, size // WORD), words.ravel())
            busy = np.bincount((phase - phase.min()) * BANKS + word % BANKS, minlength=BANKS)
            self.moved[kind] += int(np.append(busy, np.zeros(-len(busy) % BANKS, int)).reshape(-1, BANKS).max(1).sum())
            bytes_of_warp = WORD * np.bincount(_distinct(np.repeat(threads // WARP, size // WORD), words.ravel())[0])
            self.needed[kind] += int(np.sum(-(-bytes_of_warp // (BANKS * WORD))))


def _distinct(first: Array, second: Array) -> tuple[Array, Array]:
    pairs = np.unique(np.stack([first, second]), axis=1)
    return pairs[0], pairs[1]
