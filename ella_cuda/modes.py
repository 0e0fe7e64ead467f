"""Modes of modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


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
