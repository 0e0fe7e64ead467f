"""The "python version" of CIFAR-10 and CIFAR-100: pickled dictionaries of raw pixels."""

from __future__ import annotations

import gzip
import posixpath
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ella_cuda.data.array_pickle import load_dictionary

MAX_MEMBER_BYTES = 1 << 28  # CIFAR-100's training file has 155 million
MAX_ARCHIVE_BYTES = 1 << 29  # uncompressed; CIFAR's have 186 million
MAX_HEADER_BYTES = 1 << 16  # between two members: some hundreds each


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


class _Bounded:
    """A stream that yields so many bytes and then fails: tar reads headers whole, whatever length they say."""

    def __init__(self, stream: gzip.GzipFile, path: Path) -> None:
        self._stream, self._path = stream, path
        self.left, self.left_here = MAX_ARCHIVE_BYTES, MAX_HEADER_BYTES

    def read(self, size: int) -> bytes:
        found = self._stream.read(min(size, 1 << 20))
        self.left, self.left_here = self.left - len(found), self.left_here - len(found)
        if min(self.left, self.left_here) < 0:
            what = "headers" if self.left_here < 0 else "content"
            raise ValueError(f"{self._path} has more {what} than CIFAR's archives have; fetch it again.")
        return found


def read_archive(path: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Files out of a ``.tar.gz``, in memory: nothing is unpacked to the disk, whatever the archive holds.

    It is read to its end, so that gzip's checksum covers all of it.

    Args:
        path: the archive.
        names: of the files within it, with their folders.

    Returns:
        name -> content.

    Raises:
        ValueError: not a gzip-compressed tar archive, damaged or truncated, a file missing, there twice, or larger than any
            of CIFAR's.
    """
    found: dict[str, bytes] = {}
    try:
        with gzip.open(path) as stream:
            bounded = _Bounded(stream, path)
            with tarfile.open(fileobj=bounded, mode="r|", bufsize=tarfile.BLOCKSIZE) as archive:
                for member in archive:
                    bounded.left_here = member.size + MAX_HEADER_BYTES  # this member and the headers of the next
                    name = posixpath.normpath(member.name)
                    if member.size > MAX_MEMBER_BYTES:
                        raise ValueError(
                            f"{path}: {name} has {member.size} bytes, more than the {MAX_MEMBER_BYTES} that are read; "
                            f"fetch the archive again."
                        )
                    if member.size < 0:
                        raise ValueError(f"{path}: {name} has {member.size} bytes; fetch the archive again.")
                    if name not in names or not member.isreg():
                        continue
                    if name in found:
                        raise ValueError(f"{path} has {name} twice in it; fetch it again.")
                    found[name] = archive.extractfile(member).read()  # type: ignore[union-attr]
            bounded.left_here = bounded.left
            while bounded.read(1 << 20):
                pass
    except (EOFError, OSError, zlib.error, tarfile.TarError) as error:
        raise ValueError(f"{path} is a damaged or truncated .tar.gz archive ({error}); fetch it again.") from error
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"{path} has no {', '.join(missing)} in it; fetch it again.")
    return found
