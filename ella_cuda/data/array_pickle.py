"""Pickled dictionaries of arrays, read without numpy's or anybody's own code being called from the file."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

# Types whose bytes are numbers and nothing else.
_TYPES = {"u1": np.dtype(np.uint8), "i4": np.dtype(np.int32), "i8": np.dtype(np.int64)}


class _Type:
    """Stands for a ``numpy.dtype``, of which only plain integers are known."""

    def __init__(self, code: Any, *flags: Any) -> None:
        self.code, self.order = _text(code), "|"

    def __setstate__(self, state: Any) -> None:
        _, order, *rest = state
        if any(part is not None for part in rest[:3]):
            raise pickle.UnpicklingError("an array of records, which no CIFAR file holds")
        self.order = _text(order)

    def resolved(self) -> np.dtype:
        code = self.code.lstrip("<>|=")
        if code not in _TYPES or self.order not in "<>|=":
            raise pickle.UnpicklingError(f"an array of type {self.code!r}, which no CIFAR file holds")
        return _TYPES[code].newbyteorder(self.order)


class _Array:
    """Stands for a ``numpy.ndarray``: a shape, a type and bytes, which are looked at when the whole file is read."""

    def __init__(self, *ignored: Any) -> None:
        self.shape, self.type, self.fortran, self.raw = (0,), _Type("u1"), False, b""

    def __setstate__(self, state: Any) -> None:
        _, self.shape, self.type, self.fortran, self.raw = state

    def resolved(self) -> np.ndarray:
        dtype, shape = self.type.resolved(), self.shape
        if not isinstance(self.raw, bytes | bytearray) or not all(type(n) is int and n >= 0 for n in shape):
            raise pickle.UnpicklingError("an array without bytes or with a shape that is none")
        if len(self.raw) != math.prod(shape) * dtype.itemsize:
            raise pickle.UnpicklingError(f"{len(self.raw)} bytes for an array of shape {shape} and type {dtype}")
        return np.frombuffer(bytes(self.raw), dtype).reshape(shape, order="F" if self.fortran else "C")


def _text(value: Any) -> str:
    return value.decode("ascii") if isinstance(value, bytes) else str(value)


def _encode(text: str, encoding: Any = "latin1") -> bytes:
    """How Python 3 writes bytes for Python 2."""
    if _text(encoding) != "latin1":
        raise pickle.UnpicklingError(f"text in the encoding {encoding!r}")
    return text.encode("latin1")


def _reconstruct(*ignored: Any) -> _Array:
    return _Array()


def _from_buffer(buffer: Any, kind: Any, shape: Any, order: Any) -> _Array:
    array = _Array()
    array.__setstate__((1, shape, kind, _text(order) == "F", buffer))
    return array


_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric", "numpy._core.numeric")
_STAND_INS: dict[tuple[str, str], Any] = {
    ("_codecs", "encode"): _encode,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
    **{(module, "_reconstruct"): _reconstruct for module in _NUMPY},
    **{(module, "_frombuffer"): _from_buffer for module in _NUMPY},
}


class _Unpickler(pickle._Unpickler):
    """Dictionaries, lists, strings, numbers and the stand-ins.

    The unpickler written in Python: that in C gives memory for whatever number a damaged file names.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STAND_INS:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no CIFAR file does")
        return _STAND_INS[module, name]

    def load_build(self) -> None:
        state = self.stack.pop()
        if type(self.stack[-1]) not in (_Type, _Array):  # the default would set attributes of anything
            raise pickle.UnpicklingError(f"a state for a {type(self.stack[-1]).__name__}")
        self.stack[-1].__setstate__(state)

    dispatch[pickle.BUILD[0]] = load_build

    def load_bytearray8(self) -> None:
        """As many bytes as the file has: the default gives memory for the number that it names, before it reads."""
        count = int.from_bytes(self.read(8), "little")
        self.append(bytearray(self.read(count)))

    dispatch[pickle.BYTEARRAY8[0]] = load_bytearray8


def load_dictionary(raw: bytes, keys: Sequence[bytes]) -> dict[bytes, np.ndarray]:
    """Arrays, or lists of integers, out of a pickled dictionary.

    Nothing that the file names is called: classes and functions are stand-ins, arrays are made of their bytes alone.

    Args:
        raw: the pickle, by Python 2 or 3, of any protocol.
        keys: of the entries that are wanted.

    Returns:
        The entries: arrays of uint8, int32 or int64, lists as int64. Read-only where they were arrays.

    Raises:
        ValueError: damaged, an entry missing, or anything else than what is said above.
    """
    try:
        loaded = _Unpickler(io.BytesIO(raw), encoding="bytes").load()
        if type(loaded) is not dict:
            raise pickle.UnpicklingError(f"a {type(loaded).__name__} instead of a dictionary")
        return {key: _resolved(loaded[key]) for key in keys}
    except Exception as error:  # a damaged pickle fails in whatever way its bytes lead to
        raise ValueError(repr(error)) from error


def _resolved(value: Any) -> np.ndarray:
    if type(value) is _Array:
        return value.resolved()
    if type(value) is not list or any(type(n) is not int for n in value):
        raise pickle.UnpicklingError(f"a {type(value).__name__} where an array or a list of integers is due")
    return np.array(value, dtype=np.int64)
