"""Checks that a network is one function, whose gradients are its derivatives: random numbers, hooks that change gradients."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_all_modules
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ella_cuda.laplace.batches import Inputs, map_tensors, run_model
from ella_cuda.laplace.parameters import rounding_of

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
Hook = Callable[..., Any]
OUTPUT = -1  # among a forward hook's arguments
RUNS = 8  # that are compared where a generator moved
# Of every call that ended: the module in words, its inputs, its outputs.
Recorded = list[tuple[str, list[Any], list[Any]]]


def generator_states(device: torch.device) -> tuple[Any, ...]:
    """The states of the global generators that a forward on the device may draw from: Python's, numpy's and torch's."""
    _, keys, *rest = np.random.get_state()
    states = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])
    return random.getstate(), keys.tobytes(), *rest, *(state.numpy().tobytes() for state in states)


def require_one_function(model: nn.Module, few: Inputs, drew: bool) -> None:
    """Run the network on the same images several times.

    Args:
        few: images.
        drew: whether a global generator moved while the network ran; else outputs differed.

    Raises:
        ValueError: outputs differ; names the innermost module that makes the difference.

    Warns:
        UserWarning: a generator moved, and outputs do not differ.
    """
    first = _recorded(model, few)
    for _ in range(RUNS):
        again = _recorded(model, few)
        differing = [not _alike(one[2], other[2]) for one, other in zip(first, again, strict=False)]
        if len(first) != len(again) or differing[-1]:
            # A module ends after those inside of it; what it got may differ because of others.
            culprits = (a[0] for a, b, d in zip(first, again, differing, strict=False) if d and _alike(a[1], b[1]))
            raise ValueError(
                f"fit: {next(culprits, type(model).__name__)} draws random numbers in evaluation mode, or keeps something from call to call: "
                "the model's outputs for the same images differ, and the evidence would be that of one draw. Draw in training alone "
                "(F.dropout(x, p, self.training)), keep the draws in a buffer, or hold them: an Augment's by its context held()."
            )
    if drew:
        warnings.warn(
            f"fit: the model draws random numbers in evaluation mode. Outputs of {RUNS} runs are the same; where they depend on what is "
            "drawn all the same, the evidence is that of one draw.",
            UserWarning,
            stacklevel=6,
        )


def _alike(one: list[Any], other: list[Any]) -> bool:
    """Whether tensors are the same; on CUDA, where sums have no order, up to rounding."""
    return len(one) == len(other) and all(map(_is_alike, one, other))


def _is_alike(one: Any, other: Any) -> bool:
    if not (isinstance(one, Tensor) and one.is_cuda and one.is_floating_point()):
        return identical(one, other)
    bound = rounding_of(one) * one.abs().nan_to_num().amax() if one.numel() else 0
    return one.shape == other.shape and bool(((one - other).abs().nan_to_num() <= bound).all())


def _recorded(model: nn.Module, few: Inputs) -> Recorded:
    """The calls of all modules, the model's own last, with copies of what they get and return."""
    calls: Recorded = []
    given: list[list[Any]] = []

    def copied(*values: Any) -> list[Any]:
        return [v.detach().clone() if isinstance(v, Tensor) else v for v in tree_leaves(values)]

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:  # what follows may work in place
        given.append(copied(args, kwargs))

    def end(module: nn.Module, args: Any, out: Any) -> None:
        calls.append((f"{names[module]!r} ({type(module).__name__})", given.pop(), copied(out)))

    # Scripted modules take no hooks.
    names = {m: name for name, m in model.named_modules() if name and not isinstance(m, torch.jit.ScriptModule)}
    handles = []
    try:
        for module in names:
            handles.append(module.register_forward_pre_hook(begin, with_kwargs=True))
            handles.append(module.register_forward_hook(end))
        with torch.enable_grad():  # a forward may put hooks on its tensors
            out = run_model(model, map_tensors(few, Tensor.clone))
    finally:
        for handle in handles:
            handle.remove()
    calls.append((type(model).__name__, [], copied(out)))
    return calls


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
