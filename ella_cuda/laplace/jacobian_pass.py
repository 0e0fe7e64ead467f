"""Jacobians of all outputs in all parameters, layer by layer, while columns go back through the network once.

No Jacobian is there for all layers at once: a layer's is handed to whoever wants it as soon as the gradients at the layer's output are
there. What is kept for all layers are the layers' inputs.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ella_cuda.laplace.batches import Inputs, data_points, take
from ella_cuda.laplace.call import Call
from ella_cuda.laplace.curvature import CurvaturePass
from ella_cuda.laplace.factors import FactorShape, Jacobian, sum_of_jacobians
from ella_cuda.laplace.kronecker_sums import Consumer
from ella_cuda.laplace.likelihoods import Columns
from ella_cuda.laplace.rules.base import Rule
from ella_cuda.laplace.rules.recorded import adds
from ella_cuda.laplace.second_moment import UnkeptMoment
from ella_cuda.laplace.test_time import at_test_time, in_plain_products, requiring_grad
from ella_cuda.nn._autocast import full

POINTS = 16  # data points that go together, before columns do
ColumnsOf = Callable[[Tensor, slice], Columns | Tensor]  # of outputs and which data points they are of


class JacobianConsumer:
    """Takes Jacobians: between :meth:`begin` and :meth:`end`, of some data points and some columns, each parameter's once; a parameter
    without a part in the outputs may be missing, and one whose blocks come from several calls comes in parts.

    Attributes:
        row_bytes: what it keeps of a data point's column.
    """

    row_bytes: int = 0

    def begin(self, outputs: Tensor, which: slice, columns: slice) -> None:
        """What follows is of these data points, whose outputs are ``(N, ...)``, and columns."""

    def take(self, name: str, jacobian: Jacobian) -> None:
        """A parameter's."""

    def end(self) -> None:
        """All parameters' were there."""


class JacobianPass(CurvaturePass):
    """The passes of a prediction, :meth:`running`.

    Args:
        model: the network.
        rules: of its layers with trainable parameters, new.
        shapes: by name, of the parameters whose Jacobians are wanted, those of their factors.
        memory_budget: bytes that the gradients of a pass may take.

    Attributes:
        tried_out: whether :meth:`try_out` was called.
    """

    def __init__(
        self, model: nn.Module, rules: Sequence[Rule], shapes: Mapping[str, FactorShape], memory_budget: int
    ) -> None:
        self.jacobians = Jacobians(model, shapes)
        super().__init__(model, rules, memory_budget, self.jacobians)
        self.shapes = shapes
        for rule in self.rules:
            if adds(type(rule)):
                rule.allocate(UnkeptMoment)  # whose shapes its methods read
        self.tried_out = False

    @contextmanager
    def running(self) -> Iterator[JacobianPass]:
        """The model :func:`at_test_time`, its parameters and buffers constants, for the duration of the context."""
        learnt = [t for t in (*self.model.parameters(), *self.model.buffers()) if t.requires_grad]
        with at_test_time(self.model), requiring_grad(learnt, False):
            try:
                yield self
            finally:
                self.release()

    def try_out(self, x: Inputs, several: bool) -> None:
        super().try_out(x, several)
        self.tried_out = True

    def run(
        self,
        x: Inputs,
        columns: ColumnsOf,
        consumer: JacobianConsumer,
        all_data: bool = False,
        each_alone: bool = False,
    ) -> Tensor:
        """Hand the Jacobians of all data points out, those of some points at a time; returns the outputs ``(N, ...)``.

        Args:
            x: inputs.
            columns: what is to go back.
            consumer: who gets them.
            all_data: whether the Jacobians of a parameter are wanted of all data points at once.
            each_alone: whether columns may come some at a time; otherwise a parameter's come together.
        """
        count, outputs = data_points(x), []
        step = (
            max(count, 1)
            if all_data or not count
            else self.step(take(x, slice(1)), columns, consumer.row_bytes, each_alone)
        )
        for begin in range(0, max(count, 1), step):
            which = slice(begin, begin + step)
            outputs.append(self._some(take(x, which), which, columns, consumer, each_alone))
        return torch.cat(outputs)

    def step(self, one: Inputs, columns: ColumnsOf, row_bytes: int, each_alone: bool) -> int:
        """How many data points go together: as many as the budget has room for with all columns, one at least. Columns that may come some
        at a time do so where it would be few: what a pass does with inputs alone, it does for every few columns again."""
        with self.nodes():
            outputs = self.forward(one)
            wanted = len(columns(outputs.detach(), slice(1)))
        self.release()
        column = max(self.column_bytes, row_bytes)
        room = self.memory_budget // max(column, 1)
        return max(room // max(wanted, 1), min(room, POINTS) if each_alone else 1, 1)

    def _some(
        self, x: Inputs, which: slice, columns: ColumnsOf, consumer: JacobianConsumer, each_alone: bool
    ) -> Tensor:
        with self.nodes():
            outputs = self.forward(x)
            found = outputs.detach()
            back = columns(found, which)
            room = max(self.memory_budget // max(self.column_bytes, consumer.row_bytes * len(found), 1), 1)
            size = max(min(len(back), room) if each_alone else len(back), 1)
            try:
                for begin in range(0, len(back), size):
                    part = slice(begin, min(begin + size, len(back)))
                    consumer.begin(found, which, part)
                    chunk = back[part]
                    self.jacobians.take, self.jacobians.together = consumer.take, self.findings.batched
                    self._go_back(outputs, chunk)
                    with torch.no_grad():
                        self.jacobians.hand_out()
                    self._hand_out_per_example(x, chunk, consumer)
                    consumer.end()
            finally:
                self.release()
        return found

    def _go_back(self, outputs: Tensor, columns: Tensor) -> None:
        if not (self._calls and outputs.requires_grad and len(outputs)):
            return
        self._differentiating = True
        try:
            with self._attention():

                def vjp(column: Tensor) -> Tensor:
                    torch.autograd.grad(outputs, self._anchor, column, retain_graph=True, allow_unused=True)
                    return column.new_zeros(())

                if self.findings.batched:
                    torch.func.vmap(vjp)(columns)
                else:
                    for column in columns:
                        vjp(column)
        finally:
            self._differentiating = False

    def _hand_out_per_example(self, x: Inputs, columns: Tensor, consumer: JacobianConsumer) -> None:
        """Of the parameters that no rule knows."""
        if self.per_example is None or not data_points(x):
            return
        with self.aside(), in_plain_products():
            found = self.per_example.gradients(x, columns)
        for name, gradient in found.items():
            if name in self.shapes:
                consumer.take(name, Jacobian(self.shapes[name].to_blocks(gradient, 2)))


class Jacobians(Consumer):
    """Makes a parameter's Jacobian once the gradients of all calls that the parameter has a part in are there.

    Args:
        model: the network.
        shapes: by name, of the parameters whose Jacobians are wanted, those of their factors.

    Attributes:
        take: gets a parameter's name and its Jacobian.
        together: whether a call gets the gradients of all columns at once.
    """

    def __init__(self, model: nn.Module, shapes: Mapping[str, FactorShape]) -> None:
        self._shapes = shapes
        self._names = {id(p): name for name, p in model.named_parameters() if name in shapes}
        self.take: Callable[[str, Jacobian], None] = lambda name, jacobian: None
        self.together = True
        self._arguments: dict[Call, tuple[list[Any], list[int]]] = {}  # with their versions
        self._calls: collections.Counter[tuple[int, range | None]] = collections.Counter()
        self._columns: dict[Call, list[Tensor]] = {}  # gradients of calls that get columns one after the other
        self._awaited: dict[tuple[str, range | None], list[Jacobian]] = {}

    def begin(self) -> None:
        for each in (self._arguments, self._calls, self._columns, self._awaited):
            each.clear()

    release = begin

    def forward(self, call: Call, arguments: Sequence[Any]) -> None:
        rule, arguments = call.rule, [full(a) if isinstance(a, Tensor) else a for a in arguments]
        self._arguments[call] = arguments, _versions(arguments)
        if adds(type(rule)):
            rule.input_rows(*arguments)  # leaves its state on the rule
        if adds(type(rule)) or rule.has_input_gradient() or type(rule).touched is not Rule.touched:
            call.kept = rule.keep(*arguments)
        call.blocks = rule.touched(call.kept)
        parameters = rule.parameters()
        for name, blocks in call.blocks.items():
            self._calls[id(parameters[name]), blocks] += 1

    def backward(self, call: Call, gradient: Tensor, wanted: bool) -> Tensor | None:
        found = call.rule.input_gradient(gradient, call) if wanted else None
        arguments, versions = self._arguments[call]
        if _versions(arguments) != versions:
            raise ValueError(
                f"{call.rule.label}: its input was changed in place after the call; its Jacobian needs it as it was. Change a copy."
            )
        if self.together:
            self._seen(call, gradient)
        else:
            self._columns.setdefault(call, []).append(gradient)
        return found

    def _seen(self, call: Call, gradient: Tensor) -> None:
        """Take what a call's gradients say, ``(K, N, ...)``."""
        parameters, shapes = call.rule.parameters(), call.rule.shapes()
        for name, jacobian in call.rule.jacobians(self._arguments[call][0], gradient).items():
            parameter = parameters[name]
            of_model = self._names.get(id(parameter))
            if of_model is None:
                continue
            jacobian = jacobian.over_copies(call.copies)
            jacobian = jacobian.in_shape(shapes[name], self._shapes[of_model], parameter)
            key = of_model, jacobian.blocks
            calls = self._awaited.setdefault(key, [])
            calls.append(jacobian)
            if len(calls) == self._calls[id(parameter), call.blocks[name]]:
                self._hand_on(key)

    def hand_out(self) -> None:
        """Take note that all gradients of these columns were there."""
        for call, gradients in self._columns.items():
            self._seen(call, torch.cat(gradients))
        self._columns.clear()
        for key in list(self._awaited):  # some of whose calls have no part in the outputs
            self._hand_on(key)

    def _hand_on(self, key: tuple[str, range | None]) -> None:
        self.take(key[0], sum_of_jacobians(self._awaited.pop(key), self._shapes[key[0]].groups))


def _versions(arguments: Sequence[Any]) -> list[int]:
    return [a._version for a in arguments if isinstance(a, Tensor)]
