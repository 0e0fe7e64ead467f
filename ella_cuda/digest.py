"""Short digests by which data and settings are told apart; they are no protection against forgery."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 1 << 24
DIGEST = "digest"  # the entry of a sealed mapping


def tensors_digest(*tensors: Tensor) -> str:
    """32 hexadecimal digits of the tensors' types, shapes and bytes, wherever they are. A core does some 0.6 GB a second."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        found.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        rows = tensor.detach()[None] if tensor.dim() == 0 else tensor.detach()
        count = max(1, CHUNK_BYTES * len(rows) // max(1, rows.numel() * rows.element_size()))
        for part in rows.split(count):
            found.update(part.cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


def sealed(values: Mapping[str, Any], without: Collection[str] = ()) -> dict[str, Any]:
    """The values with a digest of them as they are written in JSON, of all but those named."""
    return {**values, DIGEST: _seal(values, without)}


def fits_seal(values: Mapping[str, Any], without: Collection[str] = ()) -> bool:
    """Whether values read from a file are those that :func:`sealed` was given; those without a digest are."""
    return DIGEST not in values or values[DIGEST] == _seal(values, without)


def _seal(values: Mapping[str, Any], without: Collection[str]) -> str:
    kept = {key: value for key, value in values.items() if key != DIGEST and key not in without}
    return hashlib.blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=8).hexdigest()
