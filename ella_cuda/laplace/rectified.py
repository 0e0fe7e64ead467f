"""A ReLU and the layers that it feeds, differentiated together in a fit: the gradient that a layer pulls back is new memory, so the
ReLU's part can be done in it, in place of a pass that reads and writes as much again.

That takes that nobody else sees what is between the two. Which pairs are such is told from the modules, before the model runs; and
they are, only while the module that hands the one's output to the other is called, and not its parts by somebody else.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ella_cuda.laplace.rules import Rule
from ella_cuda.nn import RelaxedEquivariance, StridedCircularConv2d


class _Call(NamedTuple):
    """Of a ReLU, by the module that hands its output on."""

    by: nn.Module
    relu: nn.Module
    x: Tensor
    out: Tensor

    def still_holds(self) -> bool:
        """Whether autograd has the one made from the other by a ReLU, nobody asked for the gradient between them, and what is saved
        for the backward pass is kept as it is: recomputed with the forward of a checkpoint, the layer would be called twice.
        """
        node, before = self.out.grad_fn, self.x.grad_fn
        return (
            node is not None
            and before is not None
            and node.name() == "ReluBackward0"
            and node.next_functions[0][0] is before
            and not self.out._backward_hooks
            and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        )


class Rectifiers:
    """The ReLUs of a model that feed layers with rules and nothing else.

    Args:
        model: as it is outside of a fit, without our hooks.
        rules: of its layers.
    """

    def __init__(self, model: nn.Module, rules: Sequence[Rule]) -> None:
        by_module = {rule.module: rule for rule in rules}
        # By who hands on, the ReLU and what it feeds: the rules whose layers get its output.
        self._pairs: dict[tuple[nn.Module, nn.Module, nn.Module], list[Rule]] = {}
        for by, relu, fed in handed_on(model):
            first = _first_rules(fed, by_module)
            if type(relu) is nn.ReLU and not relu.inplace and plain(relu) and first is not None:
                self._pairs[by, relu, fed] = first
        self.forget()

    def forget(self) -> None:
        """Hold no tensor."""
        self._running: list[nn.Module] = []  # calls of modules that hand on, the innermost last
        self._last: _Call | None = None
        self._feeding: _Call | None = None
        self._rules: Sequence[Rule] = ()

    def before(self, rule: Rule, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """For the input x of a rule's layer: the ReLU's input that it was made from, and x as a constant; or x itself, and None."""
        call = self._feeding
        if call is None or x is not call.out or rule not in self._rules or not call.still_holds():
            return x, None
        return call.x, x.detach()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """For the duration of the context, follow what the ReLUs return."""

        def begin(by: nn.Module, args: Any) -> None:
            self._running.append(by)

        def end(by: nn.Module, args: Any, out: Any) -> None:
            if self._running and self._running[-1] is by:
                self._running.pop()

        def remember(relu: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            self._last = _Call(self._running[-1], relu, args[0], out) if args and self._running else None

        def enter(fed: nn.Module, args: tuple[Any, ...]) -> None:
            call, self._last = self._last, None
            if call is None or not args or args[0] is not call.out or torch.nn.modules.module._has_any_global_hook():
                return
            since_the_fit_began = (_hooks(m) != hooks[m] for m in (call.relu, *fed.modules()))
            if not any(since_the_fit_began):
                self._feeding, self._rules = call, self._pairs.get((call.by, call.relu, fed), ())

        def leave(fed: nn.Module, args: Any, out: Any) -> None:
            self._feeding = None

        handles = []
        for relu in dict.fromkeys(relu for _, relu, _ in self._pairs):
            handles.append(relu.register_forward_hook(remember))
        for fed in dict.fromkeys(fed for _, _, fed in self._pairs):
            handles.append(fed.register_forward_pre_hook(enter))
            handles.append(fed.register_forward_hook(leave, always_call=True))
        for by in dict.fromkeys(by for by, _, _ in self._pairs):  # after enter, where it is fed itself
            handles.append(by.register_forward_pre_hook(begin))
            handles.append(by.register_forward_hook(end, prepend=True, always_call=True))
        hooks = {m: _hooks(m) for _, relu, fed in self._pairs for m in (relu, *fed.modules())}
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.forget()


def handed_on(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module, nn.Module]]:
    """Modules of which the first, when called, gives what the second returns to the third alone, and nobody can see it on the way:
    a :func:`sequential` module and neighbours in it, a module of another class and what it names in a method ``handed_on`` of that class.
    """
    compiled = any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in model.modules())
    if compiled or torch.nn.modules.module._has_any_global_hook():
        return
    for module in model.modules():
        if "forward" in vars(module):
            continue
        if sequential(module):
            yield from ((module, *pair) for pair in zip(module, list(module)[1:], strict=False))
        elif inspect.isfunction(vars(type(module)).get("handed_on")):
            yield from ((module, *pair) for pair in module.handed_on())


def sequential(module: nn.Module) -> bool:
    """Whether each of a module's children, under hooks, is called with what the one before it returns, and nothing besides."""
    return type(module) in (nn.Sequential, StridedCircularConv2d)


def plain(module: nn.Module) -> bool:
    """Whether a call of the module is its class's forward and nothing besides."""
    return "forward" not in vars(module) and not _hooks(module)


def _hooks(module: nn.Module) -> int:
    """How many the module has, of all kinds."""
    return sum(len(v) for name, v in vars(module).items() if name.endswith("_hooks") and isinstance(v, dict))


def _first_rules(module: nn.Module, by_module: Mapping[nn.Module, Rule]) -> list[Rule] | None:
    """Rules of the layers that get the module's input; None where something else may see it, or a rule does not own what it
    pulls back.
    """
    if not plain(module):
        return None
    if module in by_module:
        rule = by_module[module]
        return [rule] if _pulls_afresh(rule) else None
    if sequential(module) and len(module):
        return _first_rules(module[0], by_module)
    if type(module) is RelaxedEquivariance:
        paths = [_first_rules(module.get_submodule(name), by_module) for name in module.path_names]
        return None if None in paths else [rule for path in paths for rule in path]
    return None


def _pulls_afresh(rule: Rule) -> bool:
    """The promise of the class that defines ``pull_back``; one that defines it anew has not given it."""
    owner = next(c for c in type(rule).__mro__ if "pull_back" in vars(c))
    return bool(vars(owner).get("pulls_afresh", False))
