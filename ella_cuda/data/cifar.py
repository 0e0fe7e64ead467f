"""The "python version" of CIFAR-10 and CIFAR-100: pickled dictionaries of raw pixels."""

from __future__ import annotations

import codecs
import pickle
from pathlib import Path
from typing import Any

import numpy as np

# What numpy's arrays pickle to, under the module names of numpy 1 and 2.
_ARRAY_PARTS: dict[tuple[str, str], Any] = {
    ("_codecs", "encode"): codecs.encode,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


class _ArrayUnpickler(pickle.Unpickler):
    """Reads dictionaries, lists, strings, numbers and numpy arrays, and refuses all else: no file can run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ARRAY_PARTS:
            return _ARRAY_PARTS[module, name]
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.ndarray.__reduce__(np.empty(0))[0]
        if module in ("numpy.core.numeric", "numpy._core.numeric") and name == "_frombuffer":
            return _from_buffer
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no CIFAR file does")


def _from_buffer(buffer: Any, dtype: np.dtype, shape: tuple[int, ...], order: str) -> np.ndarray:
    return np.frombuffer(buffer, dtype=dtype).reshape(shape, order=order)


def read_cifar_batch(path: Path, label_key: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Read one file of the python version.

    Args:
        path: for example ``cifar-10-batches-py/data_batch_1``.
        label_key: the entry with the labels, ``b"labels"`` (CIFAR-10), ``b"fine_labels"`` or
            ``b"coarse_labels"`` (CIFAR-100).

    Returns:
        Images ``(N, 3, 32, 32)`` uint8 and labels ``(N,)`` int64.

    Raises:
        ValueError: not such a file, damaged, or counts that disagree.

    Source: A. Krizhevsky, "Learning multiple layers of features from tiny images", 2009, and its web page's
    description of the layout.
    """
    try:
        with path.open("rb") as file:
            batch = _ArrayUnpickler(file, encoding="bytes").load()
        pixels, labels = np.asarray(batch[b"data"]), np.asarray(batch[label_key], dtype=np.int64)
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a readable CIFAR batch in the python version ({error!r}); fetch it again."
        ) from error
    if pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != 3072 or labels.shape != pixels.shape[:1]:
        raise ValueError(
            f"{path} must hold uint8 data of shape (N, 3072) and N labels, got {pixels.dtype} {pixels.shape} and "
            f"{labels.shape}; fetch it again."
        )
    return pixels.reshape(-1, 3, 32, 32), labels
