"""Global memory during a launch: the tensors whose addresses host code asked for, and which threads touched their words.

It stops a kernel with an error where a thread reads or writes what is no element of those tensors, or writes to one whose address
was asked for reading; where two threads of a block touch a word without a barrier between, or threads of two blocks without fences and
an atomic operation between, and one of them writes; where a block writes what another one has read; where a word that atomic
operations change is accessed otherwise; and where what a kernel writes is read by the instruction for what none does.

Not watched: whether two blocks' atomic operations are on the same word, and which half of a word is read.

Source: PTX ISA, "Memory Consistency Model"; "ld.global.nc".
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .fault import WORD, Array, Fault, check_aligned

BEGIN = 4096  # no address below is anybody's
NOBODY, SEVERAL = -1, -2  # as a reader, and as who fenced: then all of the block know


class Elements(NamedTuple):
    """Where a tensor's elements are: strides in elements of `item` bytes."""

    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    item: int
    writable: bool

    def words(self) -> Array:
        """The numbers of their words, counted from address 0; one of two elements is there twice."""
        places = np.arange(0, self.item, WORD, dtype=np.int64) + self.address
        for size, stride in zip(self.sizes, self.strides, strict=True):
            distinct = size if stride else min(size, 1)
            places = np.add.outer(np.arange(distinct) * stride * self.item, places).ravel()
        return places // WORD


class GlobalMemory:
    """Of a launch of blocks of `threads` threads: this process's memory, as far as it is `tensors`."""

    def __init__(self, tensors: Sequence[Elements], threads: int) -> None:
        self._views = {}
        for width, kind in ((1, ctypes.c_uint8), (2, ctypes.c_uint16), (4, ctypes.c_uint32), (8, ctypes.c_uint64)):
            everything = (kind * ((1 << 48) // width - BEGIN // width)).from_address(BEGIN)
            self._views[width] = np.ctypeslib.as_array(everything)
        words = [(tensor.words(), tensor.writable) for tensor in tensors]
        self._first, self._end = self._hulls([places for places, _ in words if len(places)])
        lengths = self._end - self._first
        self._begin = np.cumsum(lengths) - lengths  # where a hull's words are in what follows
        count = int(lengths.sum())
        self._readable, self._writable = np.zeros(count, bool), np.zeros(count, bool)
        for places, writable in words:
            numbers = self._numbers(places)
            self._readable[numbers] = True
            self._writable[numbers] |= writable
        # Of words that may be written: who did, and read, last, and between which barriers.
        self._writer, self._reader = np.full(count, NOBODY), np.full(count, NOBODY)
        self._write_interval, self._read_interval = np.full(count, -1), np.full(count, -1)
        self._reading_block = np.full(count, NOBODY)
        # Which thread of the writer's block put a fence after that, and whether one told other blocks so.
        self._fencer, self._published = np.full(count, NOBODY), np.zeros(count, bool)
        self._read_only, self._atomic = np.zeros(count, bool), np.zeros(count, bool)  # accessed as such
        self._threads, self._block, self._interval = threads, 0, 0
        self.enter(0)

    @staticmethod
    def _hulls(places: list[Array]) -> tuple[Array, Array]:
        """First and last + 1 of the words around each tensor, those that overlap or touch as one, ascending."""
        merged: list[list[int]] = []
        for first, end in sorted((int(p.min()), int(p.max()) + 1) for p in places):
            if merged and first <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([first, end])
        both = np.array(merged, np.int64).reshape(-1, 2)
        return both[:, 0], both[:, 1]

    def _numbers(self, places: Array) -> Array:
        """Where the words are in the arrays of this class, -1 outside all hulls."""
        if not len(self._first):
            return np.full(places.shape, -1)
        hull = np.searchsorted(self._first, places, side="right") - 1
        inside = (hull >= 0) & (places < self._end[hull])
        return np.where(inside, places - self._first[hull] + self._begin[hull], -1)

    # ---- what a block does apart from accesses ----

    def enter(self, block: int) -> None:
        """The threads that come are of this block."""
        self._block = block
        self._interval += 1
        # Whether a thread's atomic operation, or one that it knows of by a barrier, was before, and a fence after it.
        self._has_added, self._acquired = (np.zeros(self._threads, bool) for _ in range(2))

    def barrier(self) -> None:
        self._interval += 1
        for known in (self._has_added, self._acquired):
            known[:] = known.any()
        self._fencer[(self._writer // self._threads == self._block) & (self._fencer >= 0)] = SEVERAL

    def fence(self, threads: Array) -> None:
        """What these threads wrote, and what others of the block did before a barrier, comes before what they do next."""
        mine = self._writer // self._threads == self._block
        own = mine & np.isin(self._writer % self._threads, threads)
        others = mine & ~own & (self._write_interval < self._interval)
        self._fencer[own] = self._writer[own] % self._threads
        self._fencer[others] = threads[0] if len(threads) == 1 else SEVERAL
        self._acquired[threads] |= self._has_added[threads]

    # ---- accesses ----

    def load(self, threads: Array, addresses: Array, width: int, count: int, coherent: bool = True) -> Array:
        """(threads, count) numbers of `width` bytes; not `coherent`: by the instruction for what no thread writes."""
        index = self._index(addresses, width, count)
        half = width * count < WORD
        words = (
            self._words(addresses - addresses % np.uint64(WORD), WORD)
            if half
            else self._words(addresses, width * count)
        )
        if not self._readable[words].all():
            raise Fault("a read of global memory that is no element of a tensor")
        if self._writable[words].any():
            self._read(threads, words, coherent)
        return self._views[width][index]

    def _read(self, threads: Array, words: Array, coherent: bool) -> None:
        who = threads[:, None] + self._block * self._threads
        self._check_writers(who, words, "read of")
        if not coherent and np.any(self._writer[words] != NOBODY):
            raise Fault("a read of what the kernel wrote, by an instruction for what it does not write")
        if np.any(self._atomic[words]):
            raise Fault("a read of what atomic operations change")
        self._read_only[words] |= not coherent
        several = (self._read_interval[words] == self._interval) & (self._reader[words] != who)
        self._reader[words] = who
        several |= self._reader[words] != who  # others of these threads
        self._reader[words[several]] = SEVERAL
        self._read_interval[words] = self._interval
        others = (self._reading_block[words] != NOBODY) & (self._reading_block[words] != self._block)
        self._reading_block[words] = np.where(others, SEVERAL, self._block)

    def store(self, threads: Array, addresses: Array, values: Array) -> None:
        """Writes (threads, count) numbers."""
        width = values.dtype.itemsize
        index = self._index(addresses, width, values.shape[1])
        words = self._words(addresses, values[0].nbytes)
        self._check_writable(words)
        who = threads[:, None] + self._block * self._threads
        self._check_writers(who, words, "write to")
        if np.any(self._atomic[words]):
            raise Fault("a write to what atomic operations change")
        if np.any(self._read_only[words]):
            raise Fault("a write to what the kernel read by an instruction for what it does not write")
        if np.any((self._read_interval[words] == self._interval) & (self._reader[words] != who)):
            raise Fault("a write to what another thread read in global memory, without a barrier between")
        if np.any((self._reading_block[words] != NOBODY) & (self._reading_block[words] != self._block)):
            raise Fault("a write to what another block read in global memory")
        self._writer[words] = who
        if np.any(self._writer[words] != who):
            raise Fault("two threads write one word of global memory at once")
        self._write_interval[words] = self._interval
        self._fencer[words], self._published[words] = NOBODY, False
        self._views[width][index] = values

    def add(self, threads: Array, addresses: Array, values: Array) -> Array:
        """Adds one thread after the other and returns what each found."""
        places = self._index(addresses, values.dtype.itemsize, 1)[:, 0]
        words = self._words(addresses, values.dtype.itemsize)
        self._check_writable(words)
        self._check_writers(threads[:, None] + self._block * self._threads, words, "change of")
        self._atomic[words] = True
        mine = self._writer // self._threads == self._block
        self._published |= mine & (np.isin(self._fencer, threads) | (self._fencer == SEVERAL))
        self._has_added[threads] = True
        view, found = self._views[values.dtype.itemsize], np.empty_like(values)
        for i, place in enumerate(places):
            found[i] = view[place]
            view[place] += values[i]
        return found

    def _index(self, addresses: Array, width: int, count: int) -> Array:
        check_aligned(addresses, width * count)
        if np.any(addresses < BEGIN):
            raise Fault("an access to global memory near address 0")
        first = (addresses - np.uint64(BEGIN)) // np.uint64(width)
        return (first[:, None] + np.arange(count, dtype=np.uint64)).view(np.int64)

    def _words(self, addresses: Array, size: int) -> Array:
        """(threads, words) of accesses of `size` bytes."""
        if size % WORD:
            raise Fault(f"an access of {size} bytes to global memory, which is watched in words of {WORD}")
        places = (addresses // np.uint64(WORD)).astype(np.int64)[:, None] + np.arange(size // WORD)
        numbers = self._numbers(places)
        if np.any(numbers < 0):
            raise Fault(
                f"an access to global memory outside all tensors, address {addresses[(numbers < 0).any(1)][0]:#x}"
            )
        return numbers

    def _check_writable(self, words: Array) -> None:
        if not self._readable[words].all():
            raise Fault("a write to global memory that is no element of a tensor")
        if not self._writable[words].all():
            raise Fault("a write to a tensor whose address was asked for reading")

    def _check_writers(self, who: Array, words: Array, what: str) -> None:
        writer = self._writer[words]
        others = (writer != NOBODY) & (writer != who)
        if not others.any():
            return
        here = writer // self._threads == self._block
        if np.any(others & here & (self._write_interval[words] == self._interval)):
            raise Fault(f"a {what} what another thread wrote to global memory, without a barrier between")
        seen = self._published[words] & self._acquired[who % self._threads]
        if np.any(others & ~here & ~seen):
            raise Fault(
                f"a {what} what another block wrote to global memory, without fences and an atomic operation between"
            )
