"""The IDX file format of the MNIST family."""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ella_cuda.files import no_file

UNSIGNED_BYTE = 0x08
GZIP_MAGIC = b"\x1f\x8b"
MAX_BYTES = 1 << 30  # of a file's data; the images of EMNIST, the largest of the family, have 547 million
CHUNK_BYTES = 1 << 20
MAX_DEFLATED = 1032  # bytes that one of gzip's can stand for


def read_idx(path: str | os.PathLike[str]) -> np.ndarray:
    """Read an IDX file of unsigned bytes, plain or gzip-compressed (told apart by content, not by name).

    The header is two zero bytes, the type code 0x08, the number of dimensions, and each dimension as a big-endian
    32-bit integer. No more is read, and uncompressed, than it says.

    Args:
        path: the file.

    Returns:
        An array of uint8 of the header's shape.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not an IDX file, an IDX file of another type, damaged compression, more or fewer bytes than the
            header says, or more than :data:`MAX_BYTES` in a compressed file.

    Source: Y. LeCun, C. Cortes, "The MNIST database of handwritten digits", section "File formats".
    """
    path = Path(path)
    return parse_idx(idx_content(path), path)


def idx_shape(path: Path) -> tuple[int, ...]:
    """The shape in a file's header; raises as :func:`read_idx` does."""
    with _opened(path) as stream:
        return _promised(stream, _header(stream), path)


def idx_content(path: Path) -> bytearray:
    """The bytes of a file, uncompressed, and at most one more than its header says; raises as :func:`read_idx` does."""
    with _opened(path) as stream:
        content = _header(stream)
        size = len(content) + math.prod(_promised(stream, content, path))
        while len(content) <= size and (part := stream.read(min(CHUNK_BYTES, size + 1 - len(content)))):
            content += part
        return content


def parse_idx(raw: bytes | bytearray, path: Path) -> np.ndarray:
    """The array in an IDX file's bytes, in their memory; ``path`` is for the messages of what :func:`read_idx` raises."""
    shape = _shape(raw, path)
    start, size = 4 + 4 * len(shape), math.prod(shape)
    if len(raw) - start != size:
        got = f"{len(raw) - start}{' or more' if len(raw) - start > size else ''}"
        raise ValueError(f"{path} must hold {size} bytes of data for its shape {shape}, got {got}; fetch it again.")
    return np.frombuffer(raw, dtype=np.uint8, offset=start).reshape(shape)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The file's content, uncompressed."""
    if what := no_file(path):
        raise ValueError(f"{path} must be a file, got {what}.")
    with path.open("rb") as plain:
        compressed = plain.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        plain.seek(0)
        if not compressed:
            yield plain
            return
        try:
            with gzip.GzipFile(fileobj=plain) as stream:
                yield stream  # type: ignore[misc]
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{path} is a damaged or truncated gzip file ({error}); fetch it again.") from error


def _header(stream: BinaryIO) -> bytearray:
    """As much of the header as there is."""
    head = bytearray(stream.read(4))
    if len(head) == 4:
        head += stream.read(4 * head[3])
    return head


def _promised(stream: BinaryIO, raw: bytearray, path: Path) -> tuple[int, ...]:
    """The header's shape; ValueError where a compressed file cannot hold as much, or more than is read."""
    shape = _shape(raw, path)
    size, stored = math.prod(shape), path.stat().st_size
    if not isinstance(stream, gzip.GzipFile):
        return shape
    if size > MAX_DEFLATED * stored:
        raise ValueError(
            f"{path} is a damaged or truncated gzip file (its {stored} bytes cannot hold the {size} of its shape {shape}); fetch it again."
        )
    if size > MAX_BYTES:
        raise ValueError(
            f"{path} must hold {size} bytes of data for its shape {shape}, more than the {MAX_BYTES} that are uncompressed; uncompress it."
        )
    return shape


def _shape(raw: bytes | bytearray, path: Path) -> tuple[int, ...]:
    if len(raw) < 4 or raw[:2] != b"\0\0":
        raise ValueError(
            f"{path} is not an IDX file: it must begin with two zero bytes, got {raw[:4].hex(' ') or 'an empty file'}."
        )
    if raw[2] != UNSIGNED_BYTE:
        raise ValueError(f"{path} must hold unsigned bytes (type 0x08), got type 0x{raw[2]:02x}.")
    start = 4 + 4 * raw[3]
    if len(raw) < start:
        raise ValueError(
            f"{path} ends inside its header: {raw[3]} dimensions need {start} bytes, got {len(raw)}; fetch it again."
        )
    return struct.unpack(f">{raw[3]}I", raw[4:start])
