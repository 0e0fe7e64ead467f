"""Checks before the first step: the optimizer, its schedule, the loaders, the evidence of a batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ella_cuda.laplace import KronLaplace
from ella_cuda.laplace.batches import dict_keys, kept, pair_of, require_loader, take
from ella_cuda.training.checkpoint import random_state, restore_random_state
from ella_cuda.training.checks import in_words, name_of, warn


def make_optimizer(
    optimizer_cls: Any, parameters: Sequence[Tensor], optimizer_kwargs: dict[str, Any] | None
) -> torch.optim.Optimizer:
    """The optimizer of the weights.

    Raises:
        TypeError: ``optimizer_kwargs`` do not fit ``optimizer_cls``.
        ValueError: a value in ``optimizer_kwargs`` is out of its range.
    """
    optimizer = _made("optimizer", optimizer_cls, parameters, optimizer_kwargs)
    _warn_of_weight_decay(optimizer)
    return optimizer


def _warn_of_weight_decay(optimizer: torch.optim.Optimizer) -> None:
    """UserWarning where groups have a weight decay of their own."""
    decays = {i: group["weight_decay"] for i, group in enumerate(optimizer.param_groups) if group.get("weight_decay")}
    if not decays:
        return
    several = len(optimizer.param_groups) > 1
    words = [f"{decay} in group {i}" if several else decay for i, decay in in_words(decays).items()]
    warn(
        f"marglik_training: {type(optimizer).__name__} has weight_decay = {', '.join(words)}, which is added to the prior's: the prior, "
        "whose precision is learned or given, is the weight decay already. Pass weight_decay=0 in optimizer_kwargs. A weight decay as "
        "strong at the start is prior_prec_init = N * weight_decay, N the number of data points."
    )


def make_scheduler(
    scheduler_cls: Any, optimizer: torch.optim.Optimizer, scheduler_kwargs: dict[str, Any] | None
) -> Any:
    """The schedule of the weights' learning rate, None without ``scheduler_cls``.

    Args:
        scheduler_cls: called with the optimizer and ``scheduler_kwargs``.
        optimizer: of the weights.
        scheduler_kwargs: other arguments.

    Raises:
        TypeError: ``scheduler_kwargs`` do not fit ``scheduler_cls``.
        ValueError: a value in ``scheduler_kwargs`` is out of its range.
    """
    return None if scheduler_cls is None else _made("scheduler", scheduler_cls, optimizer, scheduler_kwargs)


def _made(what: str, make: Callable[..., Any], first: Any, arguments: Any) -> Any:
    """``make(first, **arguments)``; errors name the argument of :func:`ella_cuda.marglik_training`."""
    try:
        return make(first, **(arguments or {}))
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f"marglik_training: {what}_cls = {name_of(make)} cannot be made with {what}_kwargs = {in_words(arguments)}: {error}"
        ) from error


def try_evidence(
    la: KronLaplace,
    loader: Iterable[Any],
    name: str,
    then: Callable[[KronLaplace, Iterable[Any]], None] = lambda la, few: None,
    where: str = "marglik_training",
) -> None:
    """Fit to the first images of the first batch that has data, so that what the evidence refuses is refused before training. Random
    generators are put back to where they were, and what was fitted is to be dropped.

    Args:
        la: to be fitted.
        loader, name: of the evidence's data, and what it is called.
        then: called with the fitted la and a loader of these images.
        where: whose argument the loader is, for messages.

    Raises:
        What :meth:`ella_cuda.laplace.KronLaplace.fit` and ``then`` raise, but for values that are not finite: those of trained weights
        may be, and training names the layer. Sizes in its errors are those of a few images, as they say. ValueError where the loader
        yields no data.
    """
    before, keys = random_state([loader]), dict_keys(la.dict_key_x, la.dict_key_y)
    try:
        with contextlib.closing(pair_of(batch, f"{where} ({name})", keys) for batch in loader) as pairs:
            few = next((kept(tuple(take(part, slice(3)) for part in pair)) for pair in pairs if len(pair[1])), None)
        if few is None:
            raise ValueError(f"{where}: {name} yielded no data; check its data set, samplers and drop_last.")
        try:
            la.fit([few])
            then(la, [few])
        except FloatingPointError:
            pass
        except (TypeError, ValueError, RuntimeError) as error:
            if type(error) not in (TypeError, ValueError, RuntimeError):
                raise  # a kind of its own may be made of other arguments
            raise type(error)(f"{where}: on {len(few[1])} images of {name}: {error}") from error
    finally:
        restore_random_state(before, [loader])


def require_passes(loader: Any, where: str) -> None:
    """TypeError where the loader is none, or can be passed over once only. ``where`` is whose argument, and its name."""
    require_loader(loader, where)
    if isinstance(loader, Iterator) and iter(loader) is loader:
        raise TypeError(
            f"{where} must be a loader that is iterated anew in every epoch, got an iterator ({type(loader).__name__}), "
            "which is consumed by the first; pass a DataLoader, a list of batches, or an object whose __iter__ starts a new pass."
        )
