"""The "python version" of CIFAR-10 and CIFAR-100: pickled dictionaries of raw pixels."""

from __future__ import annotations

import posixpath
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ella_cuda.data.array_pickle import load_dictionary


def parse_cifar_batch(raw: bytes, where: str, label_key: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Read one batch of the python version. No file can run code, see :func:`ella_cuda.data.array_pickle.load_dictionary`.

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
        batch = load_dictionary(raw, (b"data", label_key))
    except ValueError as error:
        raise ValueError(
            f"{where} is not a readable CIFAR batch in the python version ({error}); fetch it again."
        ) from error
    pixels, labels = batch[b"data"], batch[label_key]
    if pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != 3072 or labels.shape != pixels.shape[:1]:
        raise ValueError(
            f"{where} must hold uint8 data of shape (N, 3072) and N labels, got {pixels.dtype} {pixels.shape} and "
            f"{labels.shape}; fetch it again."
        )
    return pixels.reshape(-1, 3, 32, 32), labels.astype(np.int64)


def read_archive(path: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Files out of a ``.tar.gz``, in memory: nothing is unpacked to the disk, whatever the archive holds.

    Args:
        path: the archive.
        names: of the files within it, with their folders.

    Returns:
        name -> content.

    Raises:
        ValueError: not a gzip-compressed tar archive, damaged or truncated, or a file missing.
    """
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                if (name := posixpath.normpath(member.name)) in names and member.isreg():
                    found[name] = archive.extractfile(member).read()  # type: ignore[union-attr]
            while archive.fileobj.read(1 << 20):  # to the end, whose checksum covers all of it
                pass
    except (EOFError, OSError, zlib.error, tarfile.TarError) as error:
        raise ValueError(f"{path} is a damaged or truncated .tar.gz archive ({error}); fetch it again.") from error
    if missing := [name for name in names if name not in found]:
        raise ValueError(f"{path} has no {', '.join(missing)} in it; fetch it again.")
    return found
