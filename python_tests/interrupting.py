"""What kills a run in the middle of its work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def interrupted(owner: Any, name: str, condition: Callable[..., bool]) -> Iterator[None]:
    """Inside, a class's method or a module's function raises KeyboardInterrupt instead of a call of which the condition holds."""
    function = getattr(owner, name)

    def stopping(*args: Any, **options: Any) -> Any:
        if condition(*args):
            raise KeyboardInterrupt
        return function(*args, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, name, stopping)
        yield
