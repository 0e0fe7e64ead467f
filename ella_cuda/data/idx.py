"""The IDX file format of the MNIST family."""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from pathlib import Path

import numpy as np

UNSIGNED_BYTE = 0x08
GZIP_MAGIC = b"\x1f\x8b"


def read_idx(path: str | os.PathLike[str]) -> np.ndarray:
    """Read an IDX file of unsigned bytes, plain or gzip-compressed (told apart by content, not by name).

    The header is two zero bytes, the type code 0x08, the number of dimensions, and each dimension as a big-endian
    32-bit integer.

    Args:
        path: the file.

    Returns:
        An array of uint8 of the header's shape.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not an IDX file, an IDX file of another type, damaged compression, or more or fewer bytes than the
            header says.

    Source: Y. LeCun, C. Cortes, "The MNIST database of handwritten digits", section "File formats".
    """
    path = Path(path)
    return parse_idx(idx_content(path), path)


def idx_content(path: Path) -> bytes:
    """The bytes of a file, uncompressed; raises as :func:`read_idx` does."""
    raw = path.read_bytes()
    if not raw.startswith(GZIP_MAGIC):
        return raw
    try:
        return gzip.decompress(raw)
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} is a damaged or truncated gzip file ({error}); fetch it again.") from error


def parse_idx(raw: bytes, path: Path) -> np.ndarray:
    """The array in an IDX file's bytes, in their memory; ``path`` is for the messages of what :func:`read_idx` raises."""
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
    shape = struct.unpack(f">{raw[3]}I", raw[4:start])
    if len(raw) - start != math.prod(shape):
        raise ValueError(
            f"{path} must hold {math.prod(shape)} bytes of data for its shape {shape}, got {len(raw) - start}; fetch it again."
        )
    return np.frombuffer(raw, dtype=np.uint8, offset=start).reshape(shape)
