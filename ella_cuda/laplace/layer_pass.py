"""Passes of a network whose layers' calls are handed to a consumer."""

from __future__ import annotations

import collections
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ella_cuda.laplace.batches import Inputs, data_points, model_outputs, plain_tensor
from ella_cuda.laplace.call import Call, Place, Tap, arguments_in_order, batch_first
from ella_cuda.laplace.check_model import Findings, linear_functions
from ella_cuda.laplace.copies import copies_of
from ella_cuda.laplace.interception import hooks
from ella_cuda.laplace.kronecker_sums import Consumer, KroneckerSums, over_copies
from ella_cuda.laplace.rows import Rows

if TYPE_CHECKING:
    from ella_cuda.laplace.rules import Rule


class LayerPass(ABC):
    """Hooks on the layers of a network, by which a pass sees their calls.

    Args:
        model: the network, ``(N, ...) -> (N, K)``.
        rules: of its layers with trainable parameters.
        consumer: who gets what layers see.

    Attributes:
        findings: what a trial of the network found.
        copies: of a data point that layers see.
    """

    def __init__(self, model: nn.Module, rules: Sequence[Rule], consumer: Consumer) -> None:
        self.model, self.rules, self.consumer, self.copies = model, list(rules), consumer, copies_of(model)
        self.findings = Findings({}, frozenset(), True)
        self._by_module = {rule.module: rule for rule in self.rules}
        self._anchor = torch.zeros((), requires_grad=True, device="cpu")
        self._counts: collections.Counter[Rule] = collections.Counter()  # calls of the last forward pass
        self._batch_size = 0
        self._aside = False  # whether the network runs for somebody else

    @abstractmethod
    def node(self, rule: Rule, arguments: Sequence[Any], out: Tensor, place: Place) -> Tensor:
        """The output of a call, in the pass's graph; takes the call."""

    @abstractmethod
    def recomputing(self) -> bool:
        """Whether layers are called by a checkpoint that computes them anew."""

    @abstractmethod
    def recomputed(self, rule: Rule, out: Tensor) -> Tensor:
        """The output of such a call. It saves nothing: a checkpoint counts what functions save."""

    def charge_bytes(self, size: int) -> None:
        """Take note of bytes that a column's gradients take beside layers' outputs."""
        return

    @contextmanager
    def layers(self) -> Iterator[None]:
        """For the duration of the context, layers' calls are seen."""
        inside = {
            rule: partial(rule.tapped, tap=self._tap(rule), charge=self.charge_bytes)
            for rule in self.rules
            if rule.inner_modules()
        }
        by_function, others = self.findings.by_function, self.findings.by_function | self.findings.shared
        with ExitStack() as stack:
            # A hook comes first: a user's own then sees, and may change, what comes after the layer.
            for rule in self.rules:
                if rule not in inside and rule not in others:
                    hook = self._hook(rule)
                    stack.enter_context(hooks([rule.module], after=hook, prepend=True, with_kwargs=True))
            for rule, make in inside.items():
                rule.module.forward = make(rule.module.forward)
                stack.callback(delattr, rule.module, "forward")
            if by_function:
                modules = [rule.module for rule in by_function]
                stack.enter_context(linear_functions(modules, self._used_by_function, ()))
            yield

    def _hook(self, rule: Rule) -> Callable[..., Tensor]:
        """The forward hook of a rule's layer."""

        def replace(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor:
            kind = type(out)
            if self._aside:
                return out
            if self.recomputing():
                again = self.recomputed(rule, plain_tensor(out))
                return again if kind is Tensor else again.as_subclass(kind)
            place = self._place(rule)
            if not isinstance(out, Tensor) or not self._fits(out, place):
                got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
                raise ValueError(
                    f"{rule.label}: expected an output with the batch in front, ({self._batch_size}, ...), got {got}. "
                    "Positions that share weights must be dimensions of their own, not folded into the batch."
                )
            arguments = [
                plain_tensor(a) if isinstance(a, Tensor) else a for a in arguments_in_order(module, args, kwargs)
            ]
            out = self.node(rule, arguments, plain_tensor(out), place)
            return out if kind is Tensor else out.as_subclass(kind)

        return replace

    def _place(self, rule: Rule) -> Place:
        """Of the images in the rule's next call, as in the same call of the probe."""
        places = self.findings.places.get(rule, (Place(),))
        return places[min(self._counts[rule], len(places) - 1)]._replace(copies=self.copies)

    def _fits(self, out: Tensor, place: Place) -> bool:
        """Whether the images can be there."""
        return out.dim() > place.axis and out.shape[place.axis] == self._batch_size * place.rows

    def _used_by_function(self, module: nn.Module, x: Tensor, out: Tensor) -> Tensor:
        """What a function made of a linear layer's parameters, behind our node."""
        if self._aside:
            return out
        rule = self._by_module[module]
        if self.recomputing():
            return self.recomputed(rule, out)
        return self.node(rule, (x,), out, self._place(rule))

    def _tap(self, rule: Rule) -> Tap:
        """What stands behind the projections inside of an attention."""

        def tap(arguments: tuple[Any, ...], out: Tensor, axis: int) -> Tensor:
            if self._aside:
                return out
            if self.recomputing():
                return self.recomputed(rule, out)
            return self.node(rule, arguments, out, Place(axis, 1, self.copies))

        return tap


class Noted(NamedTuple):
    """A call in autograd's graph.

    Attributes:
        call: the call. arguments: copies of what the layer got, in the graph; what follows may work on the originals in place.
        rows: input rows over copies, where the layer sees several; ``call.kept`` is there then, and no arguments are.
        out: the output.
    """

    call: Call
    arguments: list[Any]
    rows: dict[str, Rows] | None
    out: Tensor


class GraphPass(LayerPass):
    """A pass whose layers' calls stay in autograd's graph, for derivatives of what a consumer makes of them.

    Attributes:
        noted: calls of the last forward pass.
    """

    def __init__(self, model: nn.Module, rules: Sequence[Rule], consumer: KroneckerSums) -> None:
        super().__init__(model, rules, consumer)
        self.noted: list[Noted] = []
        self._noting = False

    def forward(self, x: Inputs) -> Tensor:
        """The outputs ``(N, ...)``; calls are noted."""
        self._batch_size, self._noting = data_points(x), True
        self.forget()
        try:
            return model_outputs(self.model, x)
        finally:
            self._noting = False

    def forget(self) -> None:
        """Drop the calls."""
        self.noted.clear()
        self._counts.clear()

    def gradients(self, outputs: Tensor, columns: Sequence[Tensor], keep: bool) -> list[Tensor | None]:
        """Gradients ``(K, N, ...)`` of columns at each call's output, in the graph if ``keep``; None where there are none."""
        if not (self.noted and outputs.requires_grad):
            return [None] * len(self.noted)
        tapped = [noted.out for noted in self.noted]
        rows = [
            torch.autograd.grad(outputs, tapped, c, retain_graph=True, create_graph=keep, allow_unused=True)
            for c in columns
        ]
        found = zip(self.noted, zip(*rows, strict=True), strict=True)
        return [None if g[0] is None else batch_first(torch.stack(g), noted.call.place, 1) for noted, g in found]

    def hand_on(self, gradients: Sequence[Tensor | None]) -> None:
        """Have the consumer take all calls."""
        self.consumer.begin()
        for noted in self.noted:
            if noted.rows is None:
                self.consumer.forward(noted.call, noted.arguments)
            else:
                self.consumer.add_inputs(noted.call, noted.rows)
        self.consumer.close()
        for noted, gradient in zip(self.noted, gradients, strict=True):
            if gradient is not None:
                self.consumer.backward(noted.call, gradient, False)
        self.consumer.flush()

    def node(self, rule: Rule, arguments: Sequence[Any], out: Tensor, place: Place) -> Tensor:
        call = Call(rule, place)
        seen, rows = [batch_first(a, place) if isinstance(a, Tensor) else a for a in arguments], None
        if place.copies == 1 or rule.keeps():
            seen = [a.clone() if isinstance(a, Tensor) else a for a in seen]
        if place.copies > 1:
            rows = over_copies(rule.input_rows(*seen), place.copies, mean=True)
            call.kept, seen = rule.keep(*seen), []  # at once: a rule may have left there what this call alone has
        tapped = _in_a_graph(out)
        self.noted.append(Noted(call, seen, rows, tapped))
        self._counts[rule] += 1
        return tapped.clone()  # which the next layer may change in place

    def recomputing(self) -> bool:
        return not self._noting

    def recomputed(self, rule: Rule, out: Tensor) -> Tensor:
        return _in_a_graph(out).clone()


def _in_a_graph(out: Tensor) -> Tensor:
    """A copy of an output that requires a gradient, as those of first layers do not."""
    return out + torch.zeros((), device=out.device, requires_grad=True)
