"""Description of a model's function beside its numbers, to tell later whether it changed."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from torch import fx, nn

from ella_cuda.modes import exclusively

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
OF_TRAINING = {"training", "momentum", "dropout"}  # attributes that torch's own modules do not read in evaluation mode
PLAIN = (bool, int, float, str, type(None), FunctionType)


class FunctionDescription:
    """Of each of a model's modules its class, forward, hooks, its parameters' names and dtypes, and constants: plain attributes of torch's
    own, as padding, stride and eps; of other modules which object it is, and those that ``__constants__`` names. Their other attributes may
    change in a forward, and are not described. What is added to a module later, as a label, is no change."""

    def __init__(self, model: nn.Module) -> None:
        named = [*model.named_modules()]
        self._held = [module for _, module in named]  # or another might get the id of one that is gone
        self._names = [name for name, _ in named]
        with exclusively(model):  # another thread's fit has hooks on it
            self._parts = [_part(module) for module in self._held]

    def change(self, model: nn.Module) -> str:
        """Which module is another than it was, in words; "" where none is."""
        modules = [*model.modules()]
        with exclusively(model):
            parts = [_part(module) for module in modules]
        for name, was, part, module in zip(self._names, self._parts, parts, modules, strict=False):
            if part[:-1] != was[:-1] or not was[-1].items() <= part[-1].items():
                return f"{name or 'the model itself'!r} ({type(module).__name__}): its class, forward, hooks, constants or dtypes"
        return "" if len(modules) == len(self._parts) else "the number of its modules"


def _part(module: nn.Module) -> tuple[Any, ...]:
    own, kind = module.__dict__, type(module)
    # Another module of torch's with the same attributes and numbers is the same function.
    torchs = kind.__module__.startswith("torch.nn.modules.")
    without = OF_TRAINING | {"p"} if isinstance(module, nn.modules.dropout._DropoutNd) else OF_TRAINING
    names = {n for n in own if n[0] != "_"} - without if torchs else getattr(kind, "__constants__", ())
    return (
        None if torchs else id(module),
        kind,
        own.get("forward"),
        _forward(module),
        [*(tuple(own[hooks].values()) for hooks in HOOKS if own.get(hooks))],
        [(name, p.dtype) for name, p in module._parameters.items() if p is not None],
        {name: own[name] for name in names if name in own and _is_plain(own[name])},
    )


def _forward(module: nn.Module) -> Any:
    """Its class's forward; of a graph, which writes it anew whenever it is set, the code. One that ``train()`` replaces, as in torchvision's
    feature extractors, is another in each mode."""
    if not isinstance(module, fx.GraphModule):
        return getattr(type(module), "forward", None)
    return module.code if type(module).train is nn.Module.train else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(type(one) in PLAIN for one in value)
    return type(value) in PLAIN
