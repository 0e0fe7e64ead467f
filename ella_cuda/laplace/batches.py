"""What a loader must be and yield, for fits and for training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset


def require_loader(loader: Any, where: str) -> None:
    """TypeError where the loader cannot yield batches: a data set of single examples, a tensor, nothing that can be iterated.

    Args:
        loader: what was given.
        where: the argument for the message, such as "fit: loader".
    """
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise TypeError(
            f"{where} must yield batches (x, y), but a data set yields single examples; pass "
            "torch.utils.data.DataLoader(dataset, batch_size=...)."
        )
    if isinstance(loader, Tensor) or not isinstance(loader, Iterable):
        raise TypeError(
            f"{where} must be a loader of batches (x, y), got {type(loader).__name__}; tensors make one by "
            "ella_cuda.data.TensorLoader(x, y, batch_size=...)."
        )


def pair_of(batch: Any, where: str) -> tuple[Tensor, Tensor]:
    """The batch as plain tensors ``(x, y)``. Subclasses of tensors that hold their numbers themselves, as image libraries have, are
    viewed as what they hold.

    Args:
        batch: what a loader yielded.
        where: who took it, for the message.

    Raises:
        TypeError: it is no pair of tensors, or one of a subclass that computes by itself, such as a distributed tensor, or one that is
            sparse or nested.
        ValueError: x or y has no axis for the batch.
    """
    if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not all(isinstance(t, Tensor) for t in batch):
        got = type(batch).__name__
        if isinstance(batch, (tuple, list)):
            got += f" of {', '.join(type(part).__name__ for part in batch) or 'nothing'}"
        raise TypeError(
            f"{where}: the loader must yield pairs of tensors (x, y), got {got}; make pairs in the DataLoader's collate_fn, or pass a loader "
            "of your own that yields (x, y)."
        )
    x, y = (_plain(tensor, where) for tensor in batch)
    if not (x.dim() and y.dim()):
        raise ValueError(
            f"{where}: the loader must yield batches x (N, ...) and y (N, ...), got shapes {tuple(x.shape)} and {tuple(y.shape)}: single "
            "examples? Give the DataLoader a batch_size."
        )
    return x, y


def pair_on(batch: Any, device: torch.device, where: str) -> tuple[Tensor, Tensor]:
    """:func:`pair_of` the batch on a device, as tensors that autograd may save."""
    x, y = (t.to(device) for t in pair_of(batch, where))
    return x.clone() if x.is_inference() else x, y.clone() if y.is_inference() else y


def plain_tensor(tensor: Tensor) -> Tensor:
    """A tensor of a subclass that holds its numbers itself, viewed as what it holds; others as they are."""
    if type(tensor) in (Tensor, nn.Parameter):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def _plain(tensor: Tensor, where: str) -> Tensor:
    if type(tensor) not in (Tensor, nn.Parameter) and type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise TypeError(
            f"{where}: the loader must yield plain tensors, got a {type(tensor).__name__}, which computes by itself; convert it in the "
            "data set or in collate_fn."
        )
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "nested" if tensor.is_nested else f"of layout {tensor.layout}"
        how = "torch.nested.to_padded_tensor" if tensor.is_nested else "to_dense()"
        raise TypeError(
            f"{where}: the loader must yield dense tensors, got one that is {kind}; convert it by {how} in the data set or in collate_fn."
        )
    return plain_tensor(tensor)
