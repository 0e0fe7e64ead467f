"""Hooks that make of gradients something else than derivatives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as of_all_modules
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

Hook = Callable[..., Any]
OUTPUT = -1  # among a forward hook's arguments


class _Watched:
    """Hooks that note, for as long as this is on, whether they change what they get: their argument number ``at``; those that get an output,
    of these layers."""

    def __init__(self, layers: Collection[nn.Module]) -> None:
        self.on, self.found, self._layers = True, "", layers

    def __call__(self, hook: Hook, at: int, words: str) -> Hook:
        def called(*args: Any, **kwargs: Any) -> Any:
            if not self.on or (at == OUTPUT and args[0] not in self._layers):
                return hook(*args, **kwargs)
            before = [v.clone() if isinstance(v, Tensor) else v for v in tree_leaves(args[at])]
            out = hook(*args, **kwargs)
            after = tree_leaves(args[at] if out is None else out)
            if len(after) != len(before) or not all(map(identical, before, after)):
                self.found = self.found or f"{words} ({getattr(hook, '__qualname__', type(hook).__name__)})"
            return out

        return called


def identical(one: Any, other: Any) -> bool:
    """Whether tensors have the same numbers, nan and nan being the same; what is no tensor is."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return True
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _put_back(table: dict[Any, Hook], key: Any, hook: Hook) -> None:
    if key in table:  # a hook may remove itself
        table[key] = hook


class _TensorHooks(TorchFunctionMode):
    """While the mode is on, hooks that a forward puts on tensors of the graph are watched."""

    def __init__(self, watched: _Watched) -> None:
        self._watched = watched

    def __torch_function__(self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is Tensor.register_hook and len(args) == 2 and args[0].grad_fn is not None:
            args = args[0], self._watched(args[1], 0, "a hook that the forward puts on a tensor")
        return func(*args, **(kwargs or {}))


@contextmanager
def refusing_changes_of_gradients(model: nn.Module, layers: Collection[nn.Module]) -> Iterator[None]:
    """Watch hooks during a forward pass and plain backward passes of it inside the context: backward hooks of modules, of all modules, and
    of tensors, and forward hooks of all modules, which stand before those of a fit on these layers. Hooks of the graph's nodes cannot be
    watched.

    Raises:
        ValueError: at the end of the context, one changed what it got; names it.
    """
    watched = _Watched(layers)
    tables: list[tuple[dict[Any, Hook], int, str]] = [
        (of_all_modules._global_backward_hooks, 1, "a backward hook of all modules"),
        (of_all_modules._global_backward_pre_hooks, 1, "a backward hook of all modules"),
        (of_all_modules._global_forward_hooks, OUTPUT, "a forward hook of all modules"),
    ]
    for name, module in model.named_modules():
        words = f"a backward hook of {name or 'the model'!r} ({type(module).__name__})"
        tables += [(module._backward_hooks, 1, words), (module._backward_pre_hooks, 1, words)]
    with ExitStack() as stack:
        stack.callback(setattr, watched, "on", False)
        for table, at, words in tables:
            for key, hook in [*table.items()]:
                table[key] = watched(hook, at, words)
                stack.callback(_put_back, table, key, hook)
        stack.enter_context(_TensorHooks(watched))
        yield
    if watched.found:
        raise ValueError(
            f"fit: {watched.found} changes what passes it, so that gradients are no derivatives of the model's outputs. Remove it by its "
            "handle for the fit; a hook that looks on may stay."
        )
