"""What instructions compute that only read and write registers: one function on arrays with an element a thread each.

Source: PTX ISA, "Integer Arithmetic Instructions" to "Data Movement and Conversion Instructions".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .fault import Array

DTYPES = {
    **{f"{kind}{8 * width}": np.dtype(f"u{width}") for kind in "ub" for width in (1, 2, 4, 8)},
    **{f"s{8 * width}": np.dtype(f"i{width}") for width in (1, 2, 4, 8)},
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "pred": np.dtype(bool),
}


class Operation(NamedTuple):
    """How to read each source, what comes out, and the function."""

    sources: tuple[np.dtype, ...]
    result: np.dtype
    compute: Callable[..., Array]


def _divide(a: Array, b: Array) -> Array:
    """Towards zero; whatever by zero."""
    quotient = a // b
    return np.where((a - quotient * b != 0) & ((a < 0) != (b < 0)), quotient + quotient.dtype.type(1), quotient)


def _shift(left: bool) -> Callable[[Array, Array], Array]:
    def shift(a: Array, by: Array) -> Array:
        bits = 8 * a.dtype.itemsize
        most = np.minimum(by, bits - 1).astype(a.dtype)
        if left:
            return np.where(by < bits, a << most, a.dtype.type(0))
        return np.where(by < bits, a >> most, a >> a.dtype.type(bits - 1) if a.dtype.kind == "i" else a.dtype.type(0))

    return shift


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """The sum, and what its rounding left out; 0 for that where it is not finite."""
    total = a + b
    other = total - a
    lost = (a - (total - other)) + (b - other)
    return total, np.where(np.isfinite(lost), lost, 0.0)


def _fma32(a: Array, b: Array, c: Array) -> Array:
    """The product is exact in float64; the sum is rounded to odd there, so that the second rounding is the only one that counts."""
    total, lost = _two_sum(a.astype(np.float64) * b, c.astype(np.float64))
    bits = total.view(np.int64)
    towards = np.where((lost > 0) == (total > 0), 1, -1)
    odd = np.where((lost != 0) & (bits % 2 == 0), bits + towards, bits)
    return odd.view(np.float64).astype(np.float32)


def _fma32_down(a: Array, b: Array, c: Array) -> Array:
    total, lost = _two_sum(a.astype(np.float64) * b, c.astype(np.float64))
    near = total.astype(np.float32)
    above = (near > total) | ((near == total) & (lost < 0))
    return np.where(above, np.nextafter(near, np.float32(-np.inf)), near)


def _fma64(a: Array, b: Array, c: Array) -> Array:
    """The product in two parts by Dekker's split, both added to c; without the small parts where the split overflows."""
    product = a * b
    parts = []
    for value in (a, b):
        carried = value * 134217729.0
        high = carried - (carried - value)
        parts.append((high, value - high))
    (a1, a2), (b1, b2) = parts
    error = a2 * b2 - (((product - a1 * b1) - a2 * b1) - a1 * b2)
    total, lost = _two_sum(product, c)
    small = error + lost
    return total + np.where(np.isfinite(small), small, 0.0)


def _bit_field_insert(field: Array, into: Array, begin: Array, length: Array) -> Array:
    one = field.dtype.type(1)
    bits = 8 * field.dtype.itemsize
    mask = np.where(length >= bits, ~field.dtype.type(0), (one << length.astype(field.dtype)) - one)
    at = begin.astype(field.dtype)
    return (into & ~(mask << at)) | ((field & mask) << at)


def _approximate_reciprocal(a: Array) -> Array:
    """rcp.approx.ftz.f64: only the upper word is told, 20 bits of the fraction."""
    return ((1 / a).view(np.uint64) & np.uint64(0xFFFFFFFF00000000)).view(np.float64)


ORDERED = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


def _comparison(name: str, dtype: np.dtype) -> Callable[[Array, Array], Array]:
    if dtype.kind != "f":
        return ORDERED[name]
    if name in ("num", "nan"):
        return lambda a, b: (np.isnan(a) | np.isnan(b)) == (name == "nan")
    if name.endswith("u"):  # true where an operand is NaN
        return lambda a, b: ORDERED[name[:-1]](a, b) | np.isnan(a) | np.isnan(b)
    return lambda a, b: ORDERED[name](a, b) & ~np.isnan(a) & ~np.isnan(b)


TO_WHOLE = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _to_tf32(a: Array) -> Array:
    """The nearest TF32 number's bits, of two the one away from zero; the instruction's NaN. Those below the last place are junk."""
    nearest = a.view(np.uint32) + np.uint32(0x1000)
    return np.where(np.isnan(a), np.uint32(0x7FFFFFFF), nearest)


def _conversion(parts: list[str]) -> Operation | None:
    if parts == ["cvt", "rna", "tf32", "f32"]:
        return Operation((DTYPES["f32"],), DTYPES["b32"], _to_tf32)
    target, source, how = DTYPES[parts[-2]], DTYPES[parts[-1]], [part for part in parts[1:-2] if part != "ftz"]
    if source.kind == "f" and target.kind in "iu" and len(how) == 1 and how[0] in TO_WHOLE:
        limits = np.iinfo(target)
        narrow = source.itemsize < 8 and target.itemsize < 8
        of_nan = 0 if narrow else limits.min if target.kind == "i" else 1 << (8 * target.itemsize - 1)

        def to_integer(a: Array) -> Array:
            whole = TO_WHOLE[how[0]](a.astype(np.float64))
            inside = (whole > float(limits.min)) & (whole < float(limits.max))
            ends = np.where(whole > 0, limits.max, limits.min).astype(target)
            numbers = np.where(inside, np.where(inside, whole, 0).astype(target), ends)
            return np.where(np.isnan(a), np.array(of_nan, target), numbers)

        return Operation((source,), target, to_integer)
    if source == target and target.kind == "f" and len(how) == 1 and how[0] in TO_WHOLE:
        return Operation((source,), target, lambda a: TO_WHOLE[how[0]](a).astype(target))
    if how == ["sat"] and source == target and target.kind == "f":
        return Operation((source,), target, lambda a: np.where(np.isnan(a), 0, np.clip(a, 0, 1)))
    if how == (["rn"] if target.kind == "f" and source.itemsize >= target.itemsize else []) or how == ["rn"]:
        return Operation((source,), target, lambda a: a.astype(target))
    return None


NEAREST = {"rn", "ftz"}
SIMPLE: dict[str, tuple[int, Callable[..., Array]]] = {
    "add": (2, lambda a, b: a + b),
    "sub": (2, lambda a, b: a - b),
    "min": (2, lambda a, b: np.fmin(a, b)),
    "max": (2, lambda a, b: np.fmax(a, b)),
    "rem": (2, lambda a, b: a - _divide(a, b) * b),
    "and": (2, lambda a, b: a & b),
    "or": (2, lambda a, b: a | b),
    "xor": (2, lambda a, b: a ^ b),
    "not": (1, lambda a: ~a),
    "neg": (1, lambda a: -a),
    "abs": (1, np.abs),
    "sqrt": (1, np.sqrt),
    "copysign": (2, lambda a, b: np.copysign(b, a)),  # the first operand's sign
    "mov": (1, lambda a: a),
    "ex2": (1, np.exp2),
}


def operation(parts: list[str]) -> Operation | None:
    """The operation of an instruction of that name, None where it is not of this kind or not known."""
    name, how, dtype = parts[0], parts[1:-1], DTYPES.get(parts[-1])
    if name == "cvt":
        return _conversion(parts)
    if name == "cvta":
        return Operation((dtype,), dtype, lambda a: a)  # global addresses are generic ones
    if dtype is None:
        return None
    if name == "setp" and len(how) == 1:
        return Operation((dtype, dtype), DTYPES["pred"], _comparison(how[0], dtype))
    if name == "selp":
        return Operation((dtype, dtype, DTYPES["pred"]), dtype, lambda a, b, p: np.where(p, a, b))
    if name in ("shl", "shr"):
        return Operation((dtype, DTYPES["u32"]), dtype, _shift(name == "shl"))
    if name == "mul" and how == ["wide"]:
        wide = np.dtype(f"{dtype.kind}{2 * dtype.itemsize}")
        return Operation((dtype, dtype), wide, lambda a, b: a.astype(wide) * b.astype(wide))
    if name == "mul" and how == ["hi"] and dtype.itemsize == 4:
        wide = np.dtype(f"{dtype.kind}8")
        return Operation(
            (dtype, dtype), dtype, lambda a, b: (a.astype(wide) * b.astype(wide) >> wide.type(32)).astype(dtype)
        )
    if name == "bfi":
        return Operation((dtype, dtype, DTYPES["u32"], DTYPES["u32"]), dtype, _bit_field_insert)
    if name == "mul" and (set(how) <= NEAREST if dtype.kind == "f" else how == ["lo"]):
        return Operation((dtype, dtype), dtype, lambda a, b: a * b)
    if name == "mad" and how == ["lo"]:
        return Operation((dtype,) * 3, dtype, lambda a, b, c: a * b + c)
    if name == "fma" and how == ["rm"] and dtype == np.float32:
        return Operation((dtype,) * 3, dtype, _fma32_down)
    if name == "fma" and how == ["rn"]:
        return Operation((dtype,) * 3, dtype, _fma32 if dtype == np.float32 else _fma64)
    if name == "div" and set(how) <= NEAREST:
        return Operation((dtype, dtype), dtype, (lambda a, b: a / b) if dtype.kind == "f" else _divide)
    if name == "rcp" and (set(how) <= NEAREST or how == ["approx", "ftz"]):
        # Of float32 the machine's is off by a unit in the last place.
        coarse = "approx" in how and dtype == np.float64
        return Operation((dtype,), dtype, _approximate_reciprocal if coarse else lambda a: 1 / a)
    if name in SIMPLE and set(how) <= (NEAREST | {"approx"} if name == "ex2" else NEAREST):
        count, compute = SIMPLE[name]
        return Operation((dtype,) * count, dtype, compute)
    return None
