"""What the forwards of a model's modules read beside their modules: globals, closures and defaults, found in the functions' code."""

from __future__ import annotations

import builtins
import dis
import functools
import hashlib
import marshal
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.memory_format,
    torch.layout,
)
CONSTANT = ("torch", "math", "typing", "builtins", "_operator", "operator")  # modules whose names always mean the same
# By which code reads what its names do not say.
UNSEEN = {
    "getattr",
    "vars",
    "locals",
    "globals",
    "eval",
    "exec",
    "open",
    "input",
    "compile",
    "__import__",
    "hasattr",
    "dir",
}
INTERCEPTING = {"__getattr__", "__getattribute__", "__call__", "__torch_function__", "__setattr__"}
OF_MODULES = {*vars(nn.Module())}
DEPTH = 4  # of containers


class GlobalsRead:
    """What a model's forwards read beside what its modules have.

    Attributes:
        values: in words, such that other words are another function.
        all_seen: whether that and the modules' attributes, parameters and buffers are all that they read.

    Args:
        modules: of the model.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.all_seen, found, modules = True, [], [*modules]
        users = {type(module): None for module in modules if not _is_constant(type(module).__module__)}
        self._classes = [c for kind in users for c in kind.__mro__ if not _is_constant(c.__module__)]
        if any(INTERCEPTING & vars(c).keys() for c in self._classes):
            self.all_seen = False
        self._modules, self._seen = {id(module) for module in modules}, {"forward"}
        for of_class in self._classes:
            if "forward" in vars(of_class):
                found.append(self._described(vars(of_class)["forward"]))
        for module in modules:
            found += [(name, self._described(v)) for name, v in vars(module).items() if name not in OF_MODULES]
        self.values = repr(found)

    def _described(self, value: Any, depth: int = DEPTH) -> Any:
        if type(value) in PLAIN:
            return value
        if isinstance(value, (list, tuple)) and depth:
            return [self._described(one, depth - 1) for one in value]
        if isinstance(value, dict) and depth:
            return [(self._described(key, 0), self._described(one, depth - 1)) for key, one in value.items()]
        if isinstance(value, (staticmethod, classmethod)):
            return self._described(value.__func__)
        if isinstance(value, property):
            return self._described(value.fget)
        if type(value) is functools.partial:
            return self._described([value.func, value.args, value.keywords])
        if isinstance(value, FunctionType) and not _is_constant(value.__module__):
            return self._of_function(value)
        where = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        constant = isinstance(value, (ModuleType, type, FunctionType, BuiltinFunctionType)) and _is_constant(where)
        if not constant and id(value) not in self._modules:  # which are described by themselves
            self.all_seen = False
        return id(value)

    def _of_function(self, function: FunctionType) -> Any:
        names, imports, words = _names(function.__code__)
        if function in self._seen:
            return words
        self._seen.add(function)
        if imports or names & UNSEEN:
            self.all_seen = False
        found: list[Any] = [words, self._described(function.__defaults__)]
        found.append(self._described(function.__kwdefaults__))
        for cell in function.__closure__ or ():
            try:
                found.append(None if cell.cell_contents in self._classes else self._described(cell.cell_contents))
            except ValueError:  # it is empty
                self.all_seen = False
        for name in sorted(names):
            if name in function.__globals__:
                found.append((name, self._described(function.__globals__[name])))
            elif not hasattr(builtins, name) and name not in self._seen:  # an attribute, maybe a method of a module
                self._seen.add(name)
                found += [self._described(vars(c)[name]) for c in self._classes if name in vars(c)]
        return found


def _is_constant(module: Any) -> bool:
    return isinstance(module, str) and module.split(".")[0] in CONSTANT


@functools.lru_cache(4096)
def _names(code: CodeType) -> tuple[frozenset[str], bool, str]:
    """The names of globals and attributes in a function's code, strings in it among them, whether it imports, and a digest of it."""
    every = [*_nested(code)]
    names = {name for one in every for name in one.co_names}
    names |= {constant for one in every for constant in one.co_consts if isinstance(constant, str)}
    imports = any(step.opname == "IMPORT_NAME" for one in every for step in dis.get_instructions(one))
    return frozenset(names), imports, hashlib.sha256(marshal.dumps(code)).hexdigest()


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
