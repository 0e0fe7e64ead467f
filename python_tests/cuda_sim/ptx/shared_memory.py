"""A block's shared memory and who touched it.

It stops a kernel with an error where a thread reads what nobody wrote, two threads touch a word without a barrier
between and one of them writes, somebody touches a word to which an asynchronous copy is on its way, or a product of a
warpgroup reads a word that was not made visible to it or is written under it. Every access must lie on a multiple of its size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .fault import WORD, Array, Fault, check_aligned

BEGIN = 1024  # where a block's dynamic shared memory starts: more alignment than any kernel asks for, and not 0


@dataclass
class Copy:
    """Asynchronous copies of one instruction: by thread, word by word, and the group each thread will commit it with."""

    threads: Array
    words: Array
    data: Array
    groups: Array


class SharedMemory:
    """A block's, of `size` bytes, for `threads` threads."""

    def __init__(self, size: int, threads: int) -> None:
        words = (BEGIN + size + WORD - 1) // WORD
        self._data = np.zeros(words, np.uint32)
        self._end = BEGIN + size
        self._written = np.zeros(words, bool)
        self._writer, self._write_interval = np.full(words, -1), np.full(words, -1)
        self._reader, self._read_interval = np.full(words, -1), np.full(words, -1)  # reader -2: several
        self._arriving = np.zeros(words, bool)
        self._hidden = np.zeros(words, bool)  # written, and not yet visible to products
        self._products = np.zeros(words, int)  # under way that read a word
        self._interval = 0  # between which barriers
        self._copies: list[Copy] = []
        self._committed = np.zeros(threads, int)

    def barrier(self) -> None:
        self._interval += 1

    def _words(self, addresses: Array, size: int) -> Array:
        """(threads, words) of accesses of `size` bytes."""
        check_aligned(addresses, size)
        if np.any(addresses < BEGIN) or np.any(addresses + np.uint64(size) > self._end):
            raise Fault("an access outside the block's shared memory")
        if size % WORD:
            raise Fault(f"an access of {size} bytes to shared memory, which is watched in words of {WORD}")
        return (addresses // np.uint64(WORD)).astype(np.int64)[:, None] + np.arange(size // WORD)

    def load(self, threads: Array, addresses: Array, width: int, count: int) -> Array:
        words = self._words(addresses, width * count)
        self._read(threads, words)
        return np.ascontiguousarray(self._data[words]).view(f"u{width}")

    def _read(self, threads: Array, words: Array) -> None:
        if not self._written[words].all():
            raise Fault("a read of shared memory that nobody wrote, or whose copy was not waited for")
        if self._arriving[words].any():
            raise Fault("a read of shared memory to which an asynchronous copy is on its way")
        who = threads[:, None]
        if np.any((self._write_interval[words] == self._interval) & (self._writer[words] != who)):
            raise Fault("a read of what another thread wrote to shared memory, without a barrier between")
        several = (self._read_interval[words] == self._interval) & (self._reader[words] != who)
        self._reader[words] = who
        self._reader[words[several | (self._reader[words] != who)]] = -2  # others before, or others of these threads
        self._read_interval[words] = self._interval

    def store(self, threads: Array, addresses: Array, values: Array) -> None:
        words = self._words(addresses, values.dtype.itemsize * values.shape[1])
        self._claim(threads, words)
        self._put(threads, words, np.ascontiguousarray(values).view(np.uint32))

    def _claim(self, threads: Array, words: Array) -> None:
        who = threads[:, None]
        if self._arriving[words].any():
            raise Fault("a write to shared memory to which an asynchronous copy is on its way")
        if self._products[words].any():
            raise Fault("a write to shared memory that a product under way reads")
        if np.any((self._write_interval[words] == self._interval) & (self._writer[words] != who)):
            raise Fault("a write to what another thread wrote to shared memory, without a barrier between")
        read = (self._read_interval[words] == self._interval) & (self._reader[words] != who)
        if np.any(read):
            raise Fault("a write to what another thread read in shared memory, without a barrier between")

    def _put(self, threads: Array, words: Array, values: Array) -> None:
        self._data[words] = values
        self._writer[words] = threads[:, None]
        if np.any(self._writer[words] != threads[:, None]):
            raise Fault("two threads write one word of shared memory at once")
        self._written[words] = self._hidden[words] = True
        self._write_interval[words] = self._interval

    def start_copy(self, threads: Array, addresses: Array, data: Array) -> None:
        """Words `data` (threads, words) on their way to shared memory, there when their group was waited for."""
        words = self._words(addresses, WORD * data.shape[1])
        self._claim(threads, words)
        if len(np.unique(words)) < words.size:
            raise Fault("two asynchronous copies to one word of shared memory")
        self._arriving[words] = True
        self._copies.append(Copy(threads, words, data, self._committed[threads]))

    def commit_copies(self, threads: Array) -> None:
        self._committed[threads] += 1

    def wait_for_copies(self, threads: Array, pending: int) -> None:
        """The copies of these threads but those of their `pending` newest groups arrive."""
        waits = np.zeros(len(self._committed), bool)
        waits[threads] = True
        rest = []
        for copy in self._copies:
            done = waits[copy.threads] & (copy.groups < self._committed[copy.threads] - pending)
            words = copy.words[done]
            self._arriving[words] = False
            self._put(copy.threads[done], words, copy.data[done])
            left = ~done
            if left.any():
                rest.append(Copy(copy.threads[left], copy.words[left], copy.data[left], copy.groups[left]))
        self._copies = rest

    def finish(self) -> None:
        """At a block's end: nothing may be on its way."""
        if self._copies:
            raise Fault("a block ended before its asynchronous copies arrived")
        if self._products.any():
            raise Fault("a block ended before its products were waited for")

    def show_to_products(self, threads: Array) -> None:
        """What these threads wrote becomes visible to products."""
        self._hidden &= ~np.isin(self._writer, threads)

    def start_product(self, threads: Array, bytes_at: Array) -> tuple[Array, Array]:
        """The words at byte offsets `bytes_at`, read by a product of these threads from now on; and the words' numbers."""
        words = self._words(bytes_at.astype(np.uint64).ravel(), WORD).reshape(bytes_at.shape)
        if self._hidden[words].any():
            raise Fault("a product reads shared memory that was written without making it visible to products")
        flat = words.reshape(1, -1)
        for thread in (threads[0], threads[-1]):  # two of them: whoever wrote without a barrier, one is another thread
            self._read(np.array([thread]), flat)
        np.add.at(self._products, words, 1)
        return self._data[words], words

    def end_product(self, words: Array) -> None:
        np.subtract.at(self._products, words, 1)
