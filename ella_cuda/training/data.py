"""Digests that tell training data apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from ella_cuda.digest import tensors_digest


def data_digest(loader: Any) -> str | None:
    """A digest of the data that a loader yields, None where it cannot be had without a pass over them.

    That is the loader's attribute ``data_digest`` if it has one, which may be any string, or None; of a DataLoader of a
    ``TensorDataset``, or of a ``Subset`` of one, a digest of the tensors. What a sampler chooses is not covered.

    Raises:
        TypeError: the attribute is neither a string nor None.
    """
    if hasattr(loader, "data_digest"):
        found = loader.data_digest
        if not isinstance(found, str | None):
            raise TypeError(
                f"marglik_training: a loader's data_digest must be a string or None, got {type(found).__name__}."
            )
        return found
    dataset, chosen = getattr(loader, "dataset", None), []
    while type(dataset) is Subset:
        chosen.append(torch.as_tensor(dataset.indices))
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset:
        return None
    tensors = [*dataset.tensors, *chosen]
    # Other kinds of tensors have no bytes of their own.
    plain = all(type(t) is Tensor and t.layout == torch.strided and not t.is_quantized for t in tensors)
    return tensors_digest(*tensors) if plain else None
