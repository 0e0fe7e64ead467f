"""Batches of loaders: checks, devices, parts, and calls of the model, for fits and for training."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

Inputs = Tensor | tuple[Any, ...] | dict[str, Any]


class DictKeys(NamedTuple):
    """Under which keys a batch that is a mapping has the model's only input and the targets."""

    x: str = "input_ids"
    y: str = "labels"


DEFAULT_KEYS = DictKeys()


def require_loader(loader: Any, where: str) -> None:
    """TypeError where the loader cannot yield batches: a data set of single examples, a tensor, nothing that can be iterated.

    Args:
        loader: what was given.
        where: the argument for the message, such as "fit: loader".
    """
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise TypeError(
            f"{where} must yield batches (x, y), but a data set yields single examples; pass torch.utils.data.DataLoader(...)."
        )
    if isinstance(loader, Tensor) or not isinstance(loader, Iterable):
        raise TypeError(
            f"{where} must be a loader of batches (x, y), got {type(loader).__name__}; tensors make one by "
            "ella_cuda.data.TensorLoader(x, y, batch_size=...)."
        )


def dict_keys(x: Any, y: Any, where: str = "") -> DictKeys:
    """The arguments ``dict_key_x`` and ``dict_key_y``; TypeError where one is no string, ValueError where they are equal."""
    for name, key in (("dict_key_x", x), ("dict_key_y", y)):
        if not isinstance(key, str):
            raise TypeError(f"{where}{name} must be a string, got {key!r}.")
    if x == y:
        raise ValueError(f"{where}dict_key_x and dict_key_y must be different keys, got {x!r} for both.")
    return DictKeys(x, y)


def pair_of(batch: Any, where: str, keys: DictKeys = DEFAULT_KEYS) -> tuple[Inputs, Tensor]:
    """The batch as inputs for :func:`run_model` and targets, plain tensors all: subclasses of tensors that hold their numbers themselves,
    as image libraries have, are viewed as what they hold.

    Args:
        batch: what a loader yielded: a pair, or a mapping with the targets under ``keys.y``.
        where: who took it, for the message.
        keys: of a mapping.

    Raises:
        KeyError: it is a mapping without a key.
        TypeError: it is no pair of inputs and a tensor, or has tensors of a subclass that computes by itself, such as a distributed tensor,
            or ones that are sparse or nested.
        ValueError: x or y has no axis for the batch, or x has tensors of other sizes along it.
    """
    if isinstance(batch, Mapping):
        parts: Any = _parts(batch, where, keys)
    elif isinstance(batch, (tuple, list)) and len(batch) == 2:
        parts = batch
    else:
        raise _no_pair(batch, where)
    if not (tensors_of(parts[0]) and isinstance(parts[1], Tensor)):
        raise _no_pair(batch, where, keys)
    x, y = map_tensors(parts[0], lambda t: _plain(t, where)), _plain(parts[1], where)
    if not (y.dim() and all(t.dim() for t in tensors_of(x))):
        raise ValueError(
            f"{where}: the loader must yield batches x (N, ...) and y (N, ...), got shapes {shapes_of(x)} and {tuple(y.shape)}: single "
            "examples? Give the DataLoader a batch_size."
        )
    _require_batch_axis(x, where)
    return x, y


def _parts(batch: Mapping[Any, Any], where: str, keys: DictKeys) -> tuple[Any, Any]:
    """A mapping's inputs and targets."""
    rest = {key: value for key, value in batch.items() if key != keys.y}
    named = keys.x == DEFAULT_KEYS.x or keys.x in rest  # a key that somebody gave is there
    if len(rest) == len(batch) or not named or not all(isinstance(key, str) for key in rest):
        raise _no_pair(batch, where, keys)
    return (rest[keys.x] if rest.keys() == {keys.x} else rest), batch[keys.y]


class MissingKeyError(KeyError):
    """A mapping has no entry of a key."""

    def __str__(self) -> str:
        return self.args[0]  # of a KeyError it is the representation


def _no_pair(batch: Any, where: str, keys: DictKeys = DEFAULT_KEYS) -> TypeError | MissingKeyError:
    got, how = type(batch).__name__, ""
    if isinstance(batch, (tuple, list)):
        got += f" of {', '.join(type(part).__name__ for part in batch) or 'nothing'}"
    elif isinstance(batch, Mapping):
        held = ", ".join(f"{key!r} ({type(value).__name__})" for key, value in batch.items()) or "none"
        how = (
            f" Of a {got} the targets are the tensor under dict_key_y={keys.y!r}, and the model gets what is under the other keys by their "
            f"names, or what is under dict_key_x={keys.x!r} where that is alone; its keys are {held}: pass dict_key_y and dict_key_x."
        )
    missing = isinstance(batch, Mapping) and (keys.y not in batch or (keys.x != DEFAULT_KEYS.x and keys.x not in batch))
    return (MissingKeyError if missing else TypeError)(
        f"{where}: the loader must yield pairs of tensors (x, y), got {got}; make pairs in the DataLoader's collate_fn, or pass a loader "
        f"of your own that yields (x, y).{how}"
    )


def inputs_on(x: Any, device: torch.device, where: str) -> Inputs:
    """A batch's inputs on a device, see :func:`pair_of`.

    Raises:
        TypeError: x is no tensor, nor a tuple, list or mapping that has one.
        ValueError: a tensor has no axis for the batch, or another size along it than the others.
    """
    if not tensors_of(x):
        raise TypeError(
            f"{where}: x must be a tensor with all data along its first axis, or a tuple, list or mapping of the model's arguments with such "
            f"tensors, got {type(x).__name__}; concatenate a loader's batches with torch.cat."
        )
    if not all(t.dim() for t in tensors_of(x)):
        raise ValueError(f"{where}: x has no data points; it must have shape (N, ...), got {shapes_of(x)}.")
    _require_batch_axis(x, where)
    return map_tensors(x, lambda t: plain_tensor(t).to(device))


def _require_batch_axis(x: Inputs, where: str) -> None:
    if not isinstance(x, Tensor) and len({len(tensor) for tensor in tensors_of(x)}) > 1:
        raise ValueError(
            f"{where}: the tensors of x must all have the batch along their first axis, (N, ...), got shapes {shapes_of(x)}; expand what "
            "all data points share, or make it a part of the model."
        )


def pair_on(batch: Any, device: torch.device, where: str, keys: DictKeys = DEFAULT_KEYS) -> tuple[Inputs, Tensor]:
    """:func:`pair_of` the batch on a device, as tensors that autograd may save."""
    x, y = pair_of(batch, where, keys)

    def there(tensor: Tensor) -> Tensor:
        tensor = tensor.to(device)
        return tensor.clone() if tensor.is_inference() else tensor

    return map_tensors(x, there), there(y)


# a model's inputs -----------------------------------------------------------------------------------------------------


def run_model(model: Callable[..., Any], x: Inputs) -> Any:
    """What the model returns for inputs: a tensor, a tuple or list of arguments, or a mapping of arguments by name, which a model of one
    argument with another name gets whole.

    Raises:
        TypeError: the model takes no argument of such a name, or fails on inputs of another dtype than its parameters have; and whatever
            else the model raises.
    """
    try:
        if isinstance(x, Tensor):
            return model(x)
        if isinstance(x, Mapping):
            return model(x) if _takes_mapping(model, x) else model(**x)
        return model(*x)
    except RuntimeError as error:
        if refusal := _other_dtype(model, x, str(error)):
            raise refusal from error
        raise
    except TypeError as error:
        if not isinstance(x, Mapping) or "unexpected keyword argument" not in str(error):
            raise
        raise TypeError(
            f"the model was called with a batch's entries by name ({', '.join(x)}), as is done where there is more than dict_key_x and "
            f"dict_key_y, and refused one ({error}). Take such names in forward, or leave them out of the batch in collate_fn."
        ) from error


def _takes_mapping(model: Callable[..., Any], x: Mapping[str, Any]) -> bool:
    """Whether the model takes one argument, whose name is no key, so that it is the mapping itself."""
    parameters = inspect.signature(model.forward if isinstance(model, nn.Module) else model).parameters
    wanted = [p for p in parameters.values() if p.default is p.empty]
    by_name = parameters.keys() & x.keys() or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return not by_name and len(wanted) == 1 and wanted[0].kind is wanted[0].POSITIONAL_OR_KEYWORD


def _other_dtype(model: Any, x: Inputs, said: str) -> TypeError | None:
    """The refusal that a model's RuntimeError stands for where it is about the dtype of inputs that is not that of the parameters."""
    own = {p.dtype for p in model.parameters() if p.is_floating_point()} if isinstance(model, nn.Module) else set()
    given = {t.dtype for t in tensors_of(x)}
    given = {dtype for dtype in given if dtype.is_floating_point} or given
    if len(own) > 1 and "dtype" in said:
        return TypeError(
            f"the model has parameters of {', '.join(sorted(map(str, own)))}, and a function got numbers of two of these ({said}). Fits and "
            "predictions run without the caller's autocast: enter torch.autocast inside of forward, or convert between the layers."
        )
    if len(own) != 1 or given <= own or "type" not in said or "indices" in said:
        return None
    (dtype,) = own
    return TypeError(
        f"the model failed on a batch x of {', '.join(sorted(map(str, given)))}, its parameters being {dtype} ({said}). Convert the data: "
        f"x.to({dtype})."
    )


def checked_outputs(outputs: Any, count: int) -> Tensor:
    """A model's outputs for so many data points, as a plain tensor ``(N, K)`` or ``(N, ..., K)``.

    Raises:
        TypeError: it is no tensor.
        ValueError: it has no axis beside the batch's, or is of another number of data points.
    """
    if not isinstance(outputs, Tensor):
        words = ", ".join(map(repr, outputs)) if isinstance(outputs, Mapping) else ""
        parts = (
            f" with the keys {words}" if words else f" of {len(outputs)}" if isinstance(outputs, (tuple, list)) else ""
        )
        raise TypeError(
            f"the model must return a tensor (N, K), got {type(outputs).__name__}{parts}; wrap it to return the outputs alone."
        )
    if outputs.dim() < 2:
        remedy = "; of one output per data point return outputs[:, None]" if outputs.dim() == 1 else ""
        raise ValueError(
            f"the model must return a tensor (N, K), got shape {tuple(outputs.shape)} for N = {count}{remedy}."
        )
    if len(outputs) != count:
        raise ValueError(
            f"the model must return the outputs of a data point as one row, (N, ...), got shape {tuple(outputs.shape)} for N = {count}; "
            "positions are axes of their own, (N, T, K) for T of them."
        )
    return outputs if type(outputs) is Tensor else outputs.as_subclass(Tensor)


def model_outputs(model: Callable[..., Any], x: Inputs) -> Tensor:
    """:func:`checked_outputs` of the model for inputs."""
    return checked_outputs(run_model(model, x), data_points(x))


def map_tensors(x: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Inputs with every tensor changed; other arguments stay as they are."""
    if isinstance(x, Tensor):
        return change(x)
    if isinstance(x, Mapping):
        return {key: change(value) if isinstance(value, Tensor) else value for key, value in x.items()}
    return tuple(change(value) if isinstance(value, Tensor) else value for value in x)


def tensors_of(x: Any) -> list[Tensor]:
    """The tensors of inputs, in order; none where x can be no inputs."""
    if isinstance(x, Tensor):
        return [x]
    parts = x.values() if isinstance(x, Mapping) else x if isinstance(x, (tuple, list)) else ()
    return [part for part in parts if isinstance(part, Tensor)]


def data_points(x: Inputs) -> int:
    """How many data points inputs have."""
    return len(tensors_of(x)[0])


def take(x: Inputs, which: slice | Tensor) -> Inputs:
    """Some of the data points."""
    return map_tensors(x, lambda tensor: tensor[which])


def kept(batch: Any) -> Any:
    """Copies of a batch's tensors, for whoever holds them while a loader goes on, which may use its memory again."""
    if isinstance(batch, Tensor):
        return batch.clone()
    if isinstance(batch, Mapping):
        return {key: kept(value) for key, value in batch.items()}
    return tuple(map(kept, batch)) if isinstance(batch, (tuple, list)) else batch


def merged(pairs: Iterable[tuple[Inputs, Tensor]], room: Callable[[Inputs], int]) -> Iterator[tuple[Inputs, Tensor]]:
    """Consecutive pairs as one, as long as there is room for the data points of both and their tensors are of one kind.

    Args:
        pairs: inputs and targets, on one device.
        room: how many data points go together with inputs; asked after each pair was taken. Zero leaves all pairs as they are.
    """
    held: list[tuple[Inputs, Tensor]] = []
    count, kind = 0, None
    for x, y in pairs:
        size, most, own = data_points(x), room(x), _kind(x, y)
        if held and (count + size > most or own is None or own != kind):
            yield joined(held)
            held, count = [], 0
        kind = own
        held.append((x, y))
        count += size
        if count >= most:
            yield joined(held)
            held, count = [], 0
        else:
            held[-1] = kept((x, y))
    if held:
        yield joined(held)


def _kind(x: Inputs, y: Tensor) -> Any:
    """What pairs have alike that can be one; None of what cannot be joined to another."""
    parts = [x] if isinstance(x, Tensor) else list(x.values() if isinstance(x, Mapping) else x)
    if len(y) != data_points(x) or not all(isinstance(part, Tensor) for part in parts):
        return None
    names = tuple(x) if isinstance(x, Mapping) else isinstance(x, Tensor)
    return names, [(part.shape[1:], part.dtype) for part in (*parts, y)]


def joined(pairs: Sequence[tuple[Inputs, Tensor]]) -> tuple[Inputs, Tensor]:
    """All data points as one pair."""
    if len(pairs) == 1:
        return pairs[0]
    columns = iter([torch.cat(parts) for parts in zip(*(tensors_of(x) for x, _ in pairs), strict=True)])
    return map_tensors(pairs[0][0], lambda _: next(columns)), torch.cat([y for _, y in pairs])


def shapes_of(x: Inputs) -> str:
    """The tensors' shapes, for messages."""
    if isinstance(x, Mapping):
        return ", ".join(f"{key} {tuple(value.shape)}" for key, value in x.items() if isinstance(value, Tensor))
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors_of(x))


def plain_tensor(tensor: Tensor) -> Tensor:
    """A tensor of a subclass that holds its numbers itself, viewed as what it holds; others as they are."""
    if type(tensor) in (Tensor, nn.Parameter):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def _plain(tensor: Tensor, where: str) -> Tensor:
    if type(tensor) not in (Tensor, nn.Parameter) and type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise TypeError(
            f"{where}: the loader must yield plain tensors, got a {type(tensor).__name__}; convert it in collate_fn."
        )
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "nested" if tensor.is_nested else f"of layout {tensor.layout}"
        how = "torch.nested.to_padded_tensor" if tensor.is_nested else "to_dense()"
        raise TypeError(
            f"{where}: the loader must yield dense tensors, got one that is {kind}; convert it by {how} in the data set or in collate_fn."
        )
    return plain_tensor(tensor)
