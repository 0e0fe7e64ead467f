"""Pickled dictionaries of arrays, read without numpy's or anybody's own code being called from the file."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

TYPES = ("u1", "i4", "i8")  # whose bytes are numbers and nothing else
NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric", "numpy._core.numeric")


class _Type:
    """Stands for a ``numpy.dtype``, of which plain integers alone are known."""

    def __init__(self, code: Any, *flags: Any) -> None:
        self.code, self.order = _text(code).lstrip("<>|="), "|"

    def __setstate__(self, state: Any) -> None:
        self.order = _text(state[1])


class _Array:
    """Stands for a ``numpy.ndarray``: a shape, a type and bytes, which are looked at when the whole file is read."""

    def __setstate__(self, state: Any) -> None:
        _, self.shape, self.type, self.fortran, self.raw = state

    def resolved(self) -> np.ndarray:
        if self.type.code not in TYPES or self.type.order not in "<>|=":
            raise pickle.UnpicklingError(f"an array of type {self.type.code!r}, which no CIFAR file holds")
        dtype = np.dtype(self.type.code).newbyteorder(self.type.order)
        return np.frombuffer(bytes(self.raw), dtype).reshape(self.shape, order="F" if self.fortran else "C")


def _text(value: Any) -> str:
    return value.decode("ascii") if isinstance(value, bytes) else str(value)


class _Unpickler(pickle.Unpickler):
    """Dictionaries, lists, strings, numbers, and stand-ins for all else that a CIFAR file names."""

    def find_class(self, module: str, name: str) -> Any:
        def encoded(text: str, encoding: Any = "latin1") -> bytes:  # how Python 3 writes bytes for Python 2
            return text.encode("latin1")

        def from_buffer(buffer: Any, kind: Any, shape: Any, order: Any) -> _Array:
            array = _Array()
            array.__setstate__((1, shape, kind, _text(order) == "F", buffer))
            return array

        known = {("_codecs", "encode"): encoded, ("numpy", "ndarray"): _Array, ("numpy", "dtype"): _Type}
        known |= {(module, "_reconstruct"): lambda *ignored: _Array() for module in NUMPY}
        known |= {(module, "_frombuffer"): from_buffer for module in NUMPY}
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no CIFAR file does")
        return known[module, name]


def load_dictionary(raw: bytes, keys: Sequence[bytes]) -> dict[bytes, np.ndarray]:
    """Arrays, or lists of integers, out of a pickled dictionary. Nothing that the file names is called.

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
        return {key: _resolved(loaded[key]) for key in keys}
    except Exception as error:  # a damaged pickle fails in whatever way its bytes lead to
        raise ValueError(repr(error)) from error


def _resolved(value: Any) -> np.ndarray:
    if type(value) is _Array:
        return value.resolved()
    if type(value) is not list or any(type(n) is not int for n in value):
        raise pickle.UnpicklingError(f"a {type(value).__name__} where an array or a list of integers is due")
    return np.array(value, dtype=np.int64)
