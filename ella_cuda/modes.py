"""Who changes a model for a while, and how it is put back."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_owners: dict[int, tuple[int, int]] = {}  # by a part's id: the thread that has it, and how many contexts of that thread
_freed = threading.Condition()


@contextmanager
def exclusively(model: nn.Module) -> Iterator[None]:
    """No other thread is in this context for a model that has a module, parameter or buffer of this one's: fits put hooks on modules,
    and change their modes and what requires a gradient.

    A thread waits until it can have all parts at once, holding none, so two threads that want the same parts never wait for each other.
    One that has them may have them again, as a loader does that fits a model.
    """
    parts = {id(part): part for part in (*model.modules(), *model.parameters(), *model.buffers())}
    me = threading.get_ident()
    with _freed:
        _freed.wait_for(lambda: all(_owners.get(part, (me, 0))[0] == me for part in parts))
        for part in parts:
            _owners[part] = me, _owners.get(part, (me, 0))[1] + 1
    try:
        yield
    finally:
        with _freed:
            for part in parts:
                _, contexts = _owners.pop(part)
                if contexts > 1:
                    _owners[part] = me, contexts - 1
            _freed.notify_all()


def running_the_model(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of an object with a ``model``, run so that autograd works, in the grad mode of whoever calls it, which is what others' code
    inside sees, and by one thread at a time for a model."""

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(before), exclusively(self.model):
            return method(self, *args, **kwargs)

    return wrapped


def differentiating(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that trains, run so that autograd records, whatever the modes of whoever calls it, which are theirs again after it."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False), torch.enable_grad():
            return function(*args, **kwargs)

    return wrapped


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for the duration of the context, :func:`exclusively`. Modes are put back by ``train``, which a module may have
    made do more than set a flag.
    """
    with exclusively(model):
        before = {module: module.training for module in model.modules()}
        try:
            model.eval()
            yield
        finally:
            for module, training in before.items():  # a module comes before those inside it, which its train() changes
                if module.training != training:
                    module.train(training)
            for module, training in before.items():  # where a train() of its own keeps another mode
                module.training = training
