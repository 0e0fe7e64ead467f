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


def values_digest(value: Any) -> str:
    """32 hexadecimal digits of mappings, sequences, tensors, numbers, strings and None; of tensors as :func:`tensors_digest`, and wherever
    they are; the order of a mapping's entries does not count."""
    if isinstance(value, Tensor):
        return tensors_digest(value)
    if isinstance(value, Mapping):
        value = sorted((repr(key), values_digest(entry)) for key, entry in value.items())
    elif isinstance(value, (list, tuple)):
        value = [values_digest(entry) for entry in value]
    elif isinstance(value, float):
        value = float(value)  # of numpy's too
    return hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest()


def sealed(values: Mapping[str, Any], of: Any, without: Collection[str] = ()) -> dict[str, Any]:
    """The values with a digest of what they are and of them, as both are written in JSON.

    Args:
        of: what the values are: the kind of file and the name of what it is of. The same values under another name have another digest.
        without: entries that the digest does not cover.
    """
    return {**values, DIGEST: _seal(values, of, without)}


def broken_seal(values: Any, of: Any, without: Collection[str] = ()) -> str | None:
    """Why values read from a file are not what :func:`sealed` was given, in words; None where they are."""
    if not isinstance(values, Mapping) or DIGEST not in values:
        return "its digest is gone"
    return None if values[DIGEST] == _seal(values, of, without) else "its digest does not fit"


def _seal(values: Mapping[str, Any], of: Any, without: Collection[str]) -> str:
    kept = {key: value for key, value in values.items() if key != DIGEST and key not in without}
    return hashlib.blake2b(json.dumps([of, kept], sort_keys=True).encode(), digest_size=8).hexdigest()
