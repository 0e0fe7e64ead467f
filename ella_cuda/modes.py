"""Who changes a model for a while, and how it is put back."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_locks_lock = threading.Lock()


@contextmanager
def exclusively(model: nn.Module) -> Iterator[None]:
    """No other thread is in this context for the same model: fits put hooks on it and change its modes."""
    with _locks_lock:
        lock = _locks.setdefault(model, threading.RLock())
    with lock:
        yield


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for the duration of the context. Modes are put back by ``train``, which a module may have made do more than set
    a flag.
    """
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
