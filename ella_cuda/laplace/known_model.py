"""Descriptions of a model as a function, and what was found of it, which holds as long as the description does."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import FunctionType
from typing import Any

from torch import fx, nn
from torch.nn.modules.module import _has_any_global_hook

from ella_cuda.laplace.copies import is_changed
from ella_cuda.laplace.interception import HOOKS
from ella_cuda.modes import exclusively

OF_TRAINING = {"training", "momentum", "dropout"}  # attributes that torch's own modules do not read in evaluation mode
DEPTH = 4  # of attributes' attributes that are described
PLAIN = (bool, int, float, str, type(None), FunctionType)


class FunctionDescription:
    """The class of each of a model's modules, its forward, hooks, its parameters' names and dtypes, and constants: plain attributes of
    torch's own modules, as padding, stride and eps; the object itself of other modules, and the attributes that ``__constants__`` names.
    Their other attributes may change in a forward, and are not described. An attribute that is added to a module later, as a label, is no
    change."""

    def __init__(self, model: nn.Module) -> None:
        named = [*model.named_modules(remove_duplicate=False)]
        self._held = [module for _, module in named]  # or another might get the id of one that is gone
        self._names = [name for name, _ in named]
        with exclusively(model):  # another thread's fit has hooks on it
            self._parts = [_part(module) for module in self._held]

    def change(self, model: nn.Module) -> str:
        """Which module is another than it was, in words; "" where none is."""
        modules = [module for _, module in model.named_modules(remove_duplicate=False)]
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


def describe_module(module: nn.Module) -> tuple[Any, ...]:
    """A module's class, forward and constants, as :class:`FunctionDescription` has them, in words that hold no module; of a user's module
    all attributes, and methods and numbers of its classes."""
    own, kind, _, forward, _, dtypes, constants = _part(module)
    if own is None:
        return kind, forward, dtypes, sorted(constants.items())
    classes = [c for c in kind.__mro__ if not c.__module__.startswith("torch.")]
    of_classes = [
        (name, value) for c in classes for name, value in vars(c).items() if callable(value) or type(value) in PLAIN
    ]
    methods = [(name, id(value) if callable(value) else value) for name, value in of_classes]
    given = {name: value for name, value in vars(module).items() if name[0] != "_" and name != "training"}
    return own, kind, forward, dtypes, _described(given), methods


def _described(value: Any, depth: int = DEPTH) -> Any:
    """Numbers and words by their value, containers and objects by what is in them, everything else by its identity."""
    if type(value) in PLAIN and not isinstance(value, FunctionType):
        return value
    if depth and isinstance(value, dict):
        return [(str(key), _described(one, depth - 1)) for key, one in value.items()]
    if depth and isinstance(value, (list, tuple)):
        return [_described(one, depth - 1) for one in value]
    inside = vars(value) if depth and hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)) else {}
    return id(value), _described(inside, depth - 1) if inside and not callable(value) else ()


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


class Known:
    """Findings about a model with this description.

    Attributes:
        findings: of trials, by what was tried.
        shapes, kinds: of batches that fits had, see :mod:`ella_cuda.laplace.recorded_batches`.
        steps: how many data points of predictions go together, by inputs.
        described: the modules and what they have, which the description knows by addresses that others get once they are gone.
    """

    def __init__(self, description: tuple[str, ...], modules: list[nn.Module]) -> None:
        self.description = description
        things = (thing for module in modules for thing in (module, type(module).forward, *vars(module).values()))
        self.described = [weakref.ref(thing) for thing in things if type(thing).__weakrefoffset__]
        self.findings: dict[Any, Any] = {}
        self.shapes: dict[Any, Any] = {}
        self.kinds: dict[Any, Any] = {}
        self.steps: dict[Any, int] = {}


_known: weakref.WeakKeyDictionary[nn.Module, Known] = weakref.WeakKeyDictionary()


def known_of(model: nn.Module) -> Known | None:
    """The findings about a model, empty where it changed; None of a model with hooks, of which a tape would not know."""
    modules = [*model.modules()]
    if any(is_changed(module) for module in modules) or _has_any_global_hook():
        return None
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    tensors = [(name, tuple(t.shape), t.stride(), t.dtype, t.device) for name, t in named]
    # What has two names, or memory in common, may come apart.
    every = [*model.named_modules(remove_duplicate=False)]
    places = [(t.untyped_storage()._cdata, t.storage_offset()) for _, t in named]
    same = _numbered(id(m) for _, m in every), _numbered(id(t) for _, t in named), _numbered(places)
    structure = [name for name, _ in every], same
    description = tuple(map(repr, (structure, *map(describe_module, modules), *tensors)))
    found = _known.get(model)
    if found is None or found.description != description or any(thing() is None for thing in found.described):
        found = _known[model] = Known(description, modules)
    return found


def _numbered(things: Iterable[Any]) -> list[int]:
    """The number of each, in the order in which they first come."""
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(thing, len(numbers)) for thing in things]
