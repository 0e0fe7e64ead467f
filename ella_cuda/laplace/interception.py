"""Hooks on modules, on torch's functions and operators, and on what autograd saves, for the duration of a context."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# A module's tables of hooks.
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def hookable_modules(model: nn.Module) -> dict[nn.Module, str]:
    """The modules that take hooks, all but scripted ones, the model among them, and their names."""
    return {m: name for name, m in model.named_modules() if not isinstance(m, torch.jit.ScriptModule)}


@contextmanager
def hooks(
    modules: Iterable[nn.Module],
    before: Callable[..., Any] | None = None,
    after: Callable[..., Any] | None = None,
    *,
    prepend: bool = False,
    with_kwargs: bool = False,
    always_call: bool = False,
) -> Iterator[None]:
    """Forward hooks on modules for the duration of the context.

    Args:
        modules: each once.
        before: a hook of :meth:`torch.nn.Module.register_forward_pre_hook`, ``(module, args)``.
        after: a hook of :meth:`torch.nn.Module.register_forward_hook`, ``(module, args, output)``.
        prepend: whether the hooks run before those that a module has.
        with_kwargs: whether the hooks get the keyword arguments, a dictionary, behind ``args``.
        always_call: whether ``after`` runs where the forward raises, too.
    """
    with ExitStack() as stack:
        for module in modules:
            if before is not None:
                handle = module.register_forward_pre_hook(before, prepend=prepend, with_kwargs=with_kwargs)
                stack.callback(handle.remove)
            if after is not None:
                handle = module.register_forward_hook(
                    after, prepend=prepend, with_kwargs=with_kwargs, always_call=always_call
                )
                stack.callback(handle.remove)
        yield


class FunctionMode(TorchFunctionMode):
    """A mode of this thread that hands calls of torch's functions to a handler.

    Args:
        handler: ``(func, args, kwargs) -> result``; the mode is off while the handler runs, which may call ``func``.
    """

    def __init__(self, handler: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        self._handler = handler

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return self._handler(func, args, kwargs or {})


class OperatorMode(TorchDispatchMode):
    """A mode of this thread that hands calls of operators, below autograd, to a handler.

    Args:
        handler: ``(operator, args, kwargs) -> result``; the mode is off while the handler runs, which may call ``operator``.
    """

    def __init__(self, handler: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._handler = handler

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return self._handler(op, args, kwargs or {})


def saved_tensors(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> AbstractContextManager[None]:
    """For the duration of the context, autograd saves ``pack(tensor)`` in the place of a tensor, and reads it by ``unpack``."""
    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
