"""Tensor-core products: which lane holds which element, what a descriptor means, how sums are cut.

Source: PTX ISA, "Matrix Fragments for mma.m16n8k8", "Register Fragments for wgmma.mma_async.m64nNk8", "Matrix Descriptor
Format", "Shared Memory Matrix Layout". The places of elements are held against another compiler's in test_products.py.
"""

from __future__ import annotations

import numpy as np

from .fault import Array, Fault

LANES = np.arange(32)
GROUP, IN_GROUP = LANES // 4, LANES % 4


def _places(rows: list[Array], columns: list[Array]) -> tuple[Array, Array]:
    return np.stack(rows, 1), np.stack(columns, 1)


# Row and column of the element in each lane's registers, (32, registers).
A_PLACES = _places([GROUP, GROUP + 8, GROUP, GROUP + 8], [IN_GROUP, IN_GROUP, IN_GROUP + 4, IN_GROUP + 4])
B_PLACES = _places([IN_GROUP, IN_GROUP + 4], [GROUP, GROUP])
C_PLACES = _places([GROUP, GROUP, GROUP + 8, GROUP + 8], [2 * IN_GROUP, 2 * IN_GROUP + 1] * 2)
# Of a warpgroup's 64 x 64 results, the ones in the 32 registers of each lane of its first warp; a warp has 16 rows.
WIDE_PLACES = (np.tile(C_PLACES[0], 8), np.concatenate([C_PLACES[1] + 8 * eight for eight in range(8)], 1))


def multiply(c: Array, a: Array, b: Array) -> Array:
    """c (..., 16, n) float32 + a (..., 16, 8) b (..., 8, n), both words whose lower 13 bits are not looked at.

    Four products and the sum so far are cut to 24 bits relative to the largest of them, added, and cut to float32, twice:
    the coarsest arithmetic that tensor cores were seen to have (Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of
    NVIDIA tensor cores", PeerJ Computer Science 2021).
    """
    x, y = (_tf32(words).astype(np.float64) for words in (a, b))
    total = c.astype(np.float64)
    for half in (slice(0, 4), slice(4, 8)):
        terms = np.concatenate([total[..., None], x[..., :, None, half] * y[..., None, half, :].swapaxes(-1, -2)], -1)
        total = _cut(_cut(terms, np.abs(terms).max(-1, keepdims=True)).sum(-1), None)
    return total.astype(np.float32)


def _tf32(words: Array) -> Array:
    return (words & np.uint32(0xFFFFE000)).view(np.float32)


def _cut(values: Array, largest: Array | None) -> Array:
    """Towards zero, to 24 bits of the largest (of each value)."""
    size = np.abs(values) if largest is None else largest
    with np.errstate(all="ignore"):
        _, exponent = np.frexp(size)
        quantum = np.ldexp(1.0, np.maximum(exponent, -125) - 24)
        cut = np.trunc(values / quantum) * quantum
    return np.where(np.isfinite(size) & (size > 0), cut, values)


def warp_product(c: Array, a: Array, b: Array) -> Array:
    """mma.m16n8k8 of warps: registers c (warps, 32, 4) float32, a (warps, 32, 4), b (warps, 32, 2) words."""
    warps = len(c)
    sums, left, right = (
        np.zeros((warps, *shape), dtype)
        for shape, dtype in (((16, 8), np.float32), ((16, 8), np.uint32), ((8, 8), np.uint32))
    )
    for matrix, (rows, columns), registers in ((sums, C_PLACES, c), (left, A_PLACES, a), (right, B_PLACES, b)):
        matrix[:, rows, columns] = registers
    return multiply(sums, left, right)[:, C_PLACES[0], C_PLACES[1]]


def operand_bytes(descriptor: int) -> Array:
    """(8, 64): the byte offsets in shared memory of a wgmma operand of 64 columns and 8 TF32 rows, depth along memory."""
    start = (descriptor & 0x3FFF) << 4
    stride = (descriptor >> 32 & 0x3FFF) << 4  # from eight columns to the next eight
    offset, kind = descriptor >> 49 & 7, descriptor >> 62
    if kind != 1 or offset:
        raise Fault(
            f"a descriptor of kind {kind} and base offset {offset}, where 1, swizzled by 128 bytes, and 0 are known"
        )
    depth, column = np.arange(8)[:, None], np.arange(64)[None]
    linear = start + column // 8 * stride + column % 8 * 128 + depth * 4
    return linear ^ (linear >> 7 & 7) << 4
