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
from ella_cuda.laplace.check_model import Place
from ella_cuda.laplace.check_rule import is_own
from ella_cuda.laplace.curvature import CurvaturePass, at_test_time, in_plain_products, requiring_grad
from ella_cuda.laplace.factors import FactorShape
from ella_cuda.laplace.jacobian import Jacobian, total
from ella_cuda.laplace.likelihoods import Columns
from ella_cuda.laplace.rules import Rule
from ella_cuda.laplace.second_moment import UnkeptMoment
from ella_cuda.laplace.weight_sharing import Use, Uses, batch_first
from ella_cuda.nn._autocast import full

POINTS = 16  # data points that go together, before columns do
ColumnsOf = Callable[[Tensor, slice], Columns | Tensor]  # of outputs and which data points they are of


class Consumer:
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
    """The passes of a prediction, :func:`running`.

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
        super().__init__(model, rules, memory_budget)
        self.shapes = shapes
        self._names = {id(p): name for name, p in model.named_parameters() if name in shapes}
        for rule in self.rules:
            if not rule.knows_jacobians() or not is_own(type(rule)):
                rule.allocate(UnkeptMoment)  # what its inputs add to
        self.uses = _KeptUses(self._seen)
        self._awaited: dict[tuple[str, range | None], list[Jacobian]] = {}
        self._consumer = Consumer()
        self.tried_out = False

    def try_out(self, x: Inputs, several: bool) -> None:
        super().try_out(x, several)
        self.tried_out = True

    def run(
        self, x: Inputs, columns: ColumnsOf, consumer: Consumer, all_data: bool = False, each_alone: bool = False
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
            else self._step(take(x, slice(1)), columns, consumer.row_bytes, each_alone)
        )
        for begin in range(0, max(count, 1), step):
            which = slice(begin, begin + step)
            outputs.append(self._some(take(x, which), which, columns, consumer, each_alone))
        return torch.cat(outputs)

    def _step(self, one: Inputs, columns: ColumnsOf, row_bytes: int, each_alone: bool) -> int:
        """How many data points go together: as many as the budget has room for with all columns, one at least. Columns that may come some
        at a time do so where it would be few: what a pass does with inputs alone, it does for every few columns again."""
        with self.nodes():
            outputs = self.forward(one)
            wanted = len(columns(outputs.detach(), slice(1)))
        self.release()
        column = max(self.column_bytes, row_bytes)
        room = self.memory_budget // max(column, 1)
        return max(room // max(wanted, 1), min(room, POINTS) if each_alone else 1, 1)

    def _some(self, x: Inputs, which: slice, columns: ColumnsOf, consumer: Consumer, each_alone: bool) -> Tensor:
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
                    self._consumer = consumer
                    chunk = back[part]
                    self._go_back(outputs, chunk)
                    self._hand_out()
                    self._hand_out_per_example(x, chunk)
                    consumer.end()
            finally:
                self._awaited.clear()
                self.release()
        return found

    def _go_back(self, outputs: Tensor, columns: Tensor) -> None:
        if not (len(self.uses) and outputs.requires_grad and len(outputs)):
            return
        self.uses.together = self.findings.batched
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
                    self.uses.join()
        finally:
            self._differentiating = False

    def _hand_out_per_example(self, x: Inputs, columns: Tensor) -> None:
        """Of the parameters that no rule knows."""
        if self.per_example is None or not data_points(x):
            return
        with self.aside(), in_plain_products():
            found = self.per_example.gradients(x, columns)
        for name, gradient in found.items():
            if name in self.shapes:
                self._consumer.take(name, Jacobian(self.shapes[name].to_blocks(gradient, 2)))

    def _seen(self, use: _KeptUse, gradient: Tensor) -> None:
        """Take what a call's gradients say, ``(K, N, ...)``."""
        with torch.no_grad():
            parameters, shapes = use.rule.parameters(), use.rule.shapes()
            for name, jacobian in use.rule.jacobians(use.arguments, gradient).items():
                parameter = parameters[name]
                full = self._names.get(id(parameter))
                if full is None:
                    continue
                jacobian = jacobian.over_copies(use.place.copies)
                jacobian = jacobian.in_shape(shapes[name], self.shapes[full], parameter)
                key = full, jacobian.blocks
                calls = self._awaited.setdefault(key, [])
                calls.append(jacobian)
                if len(calls) == self.uses.calls_of(parameter, use.took_part[name]):
                    self._hand_on(key)

    def _hand_on(self, key: tuple[str, range | None]) -> None:
        name, _ = key
        self._consumer.take(name, total(self._awaited.pop(key), self.shapes[name].groups))

    def _hand_out(self) -> None:
        """What is left: of parameters some of whose calls have no part in the outputs."""
        with torch.no_grad():
            for key in list(self._awaited):
                self._hand_on(key)


class _KeptUse(Use):
    """A call with its arguments, their versions, and the blocks of the parameters that took part."""

    arguments: Sequence[Any] = ()
    versions: Sequence[int] = ()
    took_part: Mapping[str, range | None]

    def takes_samples(self) -> bool:
        return False  # rows are those of all positions

    def outputs(self, gradient: Tensor) -> None:
        with self.uses.ready(self):
            self.uses.see(self, self._batch_first(gradient))

    def vjp(self, gradient: Tensor, input_shape: torch.Size | None) -> Tensor | None:
        found = super().vjp(gradient, input_shape)
        self.uses.see(self, self._batch_first(gradient))
        return found

    def _vjp(self, gradient: Tensor, input_shape: torch.Size | None) -> Tensor | None:
        with self.uses.ready(self):
            return self.rule.vjp(gradient, input_shape)


class _KeptUses(Uses):
    """The calls of one batch with their arguments; nothing is accumulated.

    Attributes:
        together: whether a call gets the gradients of all columns at once.
    """

    def __init__(self, seen: Callable[[_KeptUse, Tensor], None]) -> None:
        super().__init__()
        self._seen, self.together = seen, True
        self._calls: collections.Counter[tuple[int, range | None]] = collections.Counter()
        self._apart: dict[_KeptUse, list[Tensor]] = {}

    def call(self, rule: Rule, arguments: Sequence[Any], place: Place) -> _KeptUse:
        use = _KeptUse(self, rule, place)
        use.arguments = [full(batch_first(a, place)) if isinstance(a, Tensor) else a for a in arguments]
        use.versions = [a._version for a in use.arguments if isinstance(a, Tensor)]
        rule.inputs(*use.arguments)
        use.keep_state()
        use.took_part = rule.touched()
        parameters = rule.parameters()
        for name, blocks in use.took_part.items():
            self._calls[id(parameters[name]), blocks] += 1
        self._all.append(use)
        self._counts[rule] += 1
        return use

    def calls_of(self, parameter: nn.Parameter, blocks: range | None) -> int:
        """How many calls have a part in the gradient of these blocks of a parameter."""
        return self._calls[id(parameter), blocks]

    def see(self, use: _KeptUse, gradient: Tensor) -> None:
        """A call's gradients, of some or of all columns."""
        if [a._version for a in use.arguments if isinstance(a, Tensor)] != use.versions:
            raise ValueError(
                f"{use.rule.label}: its input was changed in place after the call; its Jacobian needs it as it was. Change a copy."
            )
        if self.together:
            self._seen(use, gradient)
        else:
            self._apart.setdefault(use, []).append(gradient)

    def join(self) -> None:
        """All columns of calls that got them one after the other are there."""
        for use, gradients in self._apart.items():
            with self.ready(use):
                self._seen(use, torch.cat(gradients))
        self._apart.clear()

    def clear(self) -> None:
        super().clear()
        self._calls.clear()
        self._apart.clear()


@contextmanager
def running(run: JacobianPass) -> Iterator[JacobianPass]:
    """The model :func:`at_test_time`, its parameters and buffers constants, for the duration of the context."""
    learnt = [t for t in (*run.model.parameters(), *run.model.buffers()) if t.requires_grad]
    with at_test_time(run.model), requiring_grad(learnt, False):
        try:
            yield run
        finally:
            run.release()
