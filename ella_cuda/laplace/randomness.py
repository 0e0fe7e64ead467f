"""Networks that answer the same images with other outputs, of which a fit would be that of one draw."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ella_cuda.laplace.batches import Inputs, map_tensors, run_model
from ella_cuda.laplace.hooks import identical
from ella_cuda.laplace.tangent import rounding_of

RUNS = 8  # that are compared where a generator moved
# Of every call that ended: the module in words, its inputs, its outputs.
Recorded = list[tuple[str, list[Any], list[Any]]]


def generator_states(device: torch.device) -> tuple[Any, ...]:
    """Of the global generators that a forward on the device may draw from: Python's, numpy's and torch's."""
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
