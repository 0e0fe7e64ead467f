"""The IDX file format of the MNIST family."""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from pathlib import Path

import numpy as np

UNSIGNED_BYTE = b"\x08"
GZIP_MAGIC = b"\x1f\x8b"


def read_idx(path: str | os.PathLike[str]) -> tuple[bytes, np.ndarray]:
    """Read an IDX file of unsigned bytes, plain or gzip-compressed (told apart by content, not by name).

    The header is two zero bytes, the type code 0x08, the number of dimensions, and each dimension as a big-endian
    32-bit integer.

    Args:
        path: the file.

    Returns:
        Its bytes, uncompressed, and in their memory the array of uint8 of the header's shape.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not an IDX file, an IDX file of another type, damaged compression, or more or fewer bytes than the
            header says.

    Source: Y. LeCun, C. Cortes, "The MNIST database of handwritten digits", section "File formats".
    """
    raw = Path(path).read_bytes()
    if raw.startswith(GZIP_MAGIC):
        try:
            raw = gzip.decompress(raw)
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{path} is a damaged or truncated gzip file ({error}); fetch it again.") from error
    if raw[:2] != b"\0\0" or raw[2:3] != UNSIGNED_BYTE:
        raise ValueError(
            f"{path} is not an IDX file of unsigned bytes: it must begin with 00 00 08, got {raw[:4].hex(' ') or 'an empty file'}."
        )
    start = 4 + 4 * sum(raw[3:4])
    shape = struct.unpack(f">{raw[3]}I", raw[4:start]) if len(raw) >= start else ()
    if len(raw) - start != math.prod(shape):
        raise ValueError(
            f"{path} must hold {math.prod(shape)} bytes of data for its shape {shape}, got {len(raw) - start}; fetch it again."
        )
    return raw, np.frombuffer(raw, dtype=np.uint8, offset=start).reshape(shape)
