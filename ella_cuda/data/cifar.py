"""The "python version" of CIFAR-10 and CIFAR-100: pickled dictionaries of raw pixels."""

from __future__ import annotations

import codecs
import gzip
import io
import pickle
import posixpath
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

MAX_MEMBER_BYTES = 1 << 28  # CIFAR-100's training file has 155 million

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


def parse_cifar_batch(raw: bytes, where: str, label_key: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Read one batch of the python version.

    Args:
        raw: the bytes of, for example, ``cifar-10-batches-py/data_batch_1``.
        where: what to call it in messages.
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
        batch = _ArrayUnpickler(io.BytesIO(raw), encoding="bytes").load()
        pixels, labels = np.asarray(batch[b"data"]), np.asarray(batch[label_key], dtype=np.int64)
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ValueError(
            f"{where} is not a readable CIFAR batch in the python version ({error!r}); fetch it again."
        ) from error
    if pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != 3072 or labels.shape != pixels.shape[:1]:
        raise ValueError(
            f"{where} must hold uint8 data of shape (N, 3072) and N labels, got {pixels.dtype} {pixels.shape} and "
            f"{labels.shape}; fetch it again."
        )
    return pixels.reshape(-1, 3, 32, 32), labels


def read_archive(path: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Files out of a ``.tar.gz``, in memory: nothing is unpacked to the disk, whatever the archive holds.

    It is read to its end, so that gzip's checksum covers all of it.

    Args:
        path: the archive.
        names: of the files within it, with their folders.

    Returns:
        name -> content.

    Raises:
        ValueError: not a gzip-compressed tar archive, damaged or truncated, a file missing or larger than any of
            CIFAR's.
    """
    found: dict[str, bytes] = {}
    try:
        with gzip.open(path) as stream:
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                for member in archive:
                    name = posixpath.normpath(member.name)
                    if name not in names or not member.isreg():
                        continue
                    if member.size > MAX_MEMBER_BYTES:
                        raise ValueError(
                            f"{path}: {name} has {member.size} bytes, more than the {MAX_MEMBER_BYTES} that are read; "
                            f"fetch the archive again."
                        )
                    found[name] = archive.extractfile(member).read()  # type: ignore[union-attr]
            while stream.read(1 << 20):
                pass
    except (EOFError, OSError, zlib.error, tarfile.TarError) as error:
        raise ValueError(f"{path} is a damaged or truncated .tar.gz archive ({error}); fetch it again.") from error
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"{path} has no {', '.join(missing)} in it; fetch it again.")
    return found
