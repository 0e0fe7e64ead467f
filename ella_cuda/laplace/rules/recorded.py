"""Rules whose methods add to moments, as rules that say their rows.

A class of rules may define ``inputs``, ``outputs`` and ``vjp``, which add to the moments of :attr:`Rule.factors`, in the place of
:meth:`Rule.input_rows`, :meth:`Rule.output_rows` and :meth:`Rule.input_gradient`. What they add is recorded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ella_cuda.laplace.call import Call
from ella_cuda.laplace.factors import Jacobian
from ella_cuda.laplace.rows import Dense, Diagonal, OneHot, Rows
from ella_cuda.laplace.second_moment import SecondMoment
from ella_cuda.laplace.tangent import by_autograd
from ella_cuda.nn._autocast import full

# What a rule has from the start; the rest is what a call left there.
_OF_THE_RULE = {"module", "name", "resolution", "factors", "trainable", "tied", "lent", "approximation", "copies"}


def complete(kind: Any) -> None:
    """Make the methods that say rows of those that a class of rules defines to add to moments."""
    own = vars(kind)
    if "inputs" in own:
        kind.input_rows, kind.keep = _recorded_inputs, _state
        if "jacobians" not in own:
            kind.jacobians = _jacobians_by_autograd
    if "outputs" in own or "vjp" in own:
        kind.output_rows = _recorded_outputs
        base = next(c for c in kind.__mro__ if AddsToMoments in c.__bases__)
        if _said(kind, "output_rows") is base.output_rows and kind.jacobians is base.jacobians:
            kind.jacobians = _jacobians_by_autograd
    if "vjp" in own:
        kind.input_gradient, kind.backward = _gradient_of_vjp, _backward_of_vjp


def adds(kind: type) -> bool:
    """Whether a class of rules has methods of its own that add to moments."""
    return kind.input_rows is _recorded_inputs or kind.output_rows is _recorded_outputs


def promises(kind: type, flag: str, *methods: str) -> bool:
    """Whether the classes that define these methods set the flag; a class that defines one anew has not given the promise."""
    owners = {next(c for c in kind.__mro__ if method in vars(c)) for method in methods} - {AddsToMoments}
    return all(vars(owner).get(flag, False) for owner in owners)


class AddsToMoments:
    """Methods of a rule that add to moments, made of those that say rows: for classes that define some of them anew."""

    def inputs(self, *arguments: Any) -> None:
        """Add the input side of a call."""
        self.kept = self._said("keep")(self, *arguments)
        found = {n: rows for n, rows in self._said("input_rows")(self, *arguments).items() if n in self.factors}
        self.positions = max((rows.mean_over for rows in found.values()), default=1)
        for name, rows in found.items():
            rows = rows.over_copies(self._copies_seen(), mean=True)
            rows = rows.mean() if self.approximation == "reduce" else rows
            self.factors[name].input_moment.take(rows.settled())

    def outputs(self, gradient: Tensor) -> None:
        """Add the output side, from K gradients at the call's output, ``(K, N, ...)``."""
        self.separate_outputs()
        for name, rows in self._said("output_rows")(self, gradient, self.kept).items():
            if name in self.factors:
                factor, rows = self.factors[name], rows.over_copies(self._copies_seen(), mean=False)
                summed = factor.shape.constant_input or self.approximation == "reduce"
                rows, alpha = (rows.summed(), 1.0) if summed else (rows, 1 / max(rows.positions, 1))
                factor.output_moment.take(rows.settled(), alpha)

    def vjp(self, gradient: Tensor, input_shape: torch.Size | None) -> Tensor | None:
        """Do as :meth:`outputs`, and return the gradient at the input, ``(K, *input_shape)``, unless ``input_shape`` is None."""
        self.outputs(gradient)
        call = Call(self, input_shape=input_shape, kept=self.kept)
        return None if input_shape is None else self._said("input_gradient")(self, gradient, call)

    def _copies_seen(self) -> int:
        """Copies of each data point in what the methods get."""
        return self.copies if self.sees_copies else 1

    def _said(self, method: str) -> Callable[..., Any]:
        return _said(type(self), method)


def _said(kind: type, method: str) -> Callable[..., Any]:
    """The method of the nearest class that says rows by itself."""
    recorded = (_recorded_inputs, _recorded_outputs, _state, _gradient_of_vjp)
    return next(vars(c)[method] for c in kind.__mro__ if method in vars(c) and vars(c)[method] not in recorded)


class Recorder:
    """A moment's place while what a method adds is recorded: ``pieces``, rows with their weights, and ``counted`` rows beside these.
    ``total`` is the moment's, whose shape methods read."""

    def __init__(self, moment: Any) -> None:
        self.total, self.dtype, self.name = moment.total, moment.dtype, moment.name
        self.pieces: list[tuple[Rows, float]] = []
        self.counted = 0

    def add(self, rows: Tensor, alpha: float = 1.0) -> None:
        self.take(Dense(rows[:, None]), alpha)

    def add_to(self, blocks: range, rows: Tensor, alpha: float = 1.0) -> None:
        self.take(Dense(rows[:, None], blocks), alpha)

    def add_counts(self, counts: Tensor) -> None:
        self.add_diagonal(counts, int(counts.sum()))

    def add_diagonal(self, values: Tensor, rows: int) -> None:
        self.take(Diagonal(values, rows))

    def count(self, rows: int) -> None:
        self.counted += rows

    def take(self, rows: Rows, alpha: float = 1.0) -> None:
        """Add rows that are said."""
        self.pieces.append((rows, alpha))

    def clone(self, name: str) -> Recorder:
        """Another one with the same pieces, of an output side that is no longer shared."""
        other = copy.copy(self)
        other.pieces = list(self.pieces)
        return other


class Recorded(Rows):
    """Rows as a method of a rule added them: means and sums over positions and copies are the method's own."""

    def __init__(self, recorder: Recorder, rule: Any) -> None:
        super().__init__(torch.empty(0))
        self.pieces, self.counted, self.rule, self.shared = recorder.pieces, recorder.counted, rule, rule.positions

    @property
    def positions(self) -> int:
        return 1

    @property
    def mean_over(self) -> int:
        return self.shared

    @property
    def count(self) -> int:
        return self.counted + sum(rows.count for rows, _ in self.pieces)

    def gram_(self, moment: SecondMoment, alpha: float = 1.0) -> None:
        for rows, weight in self.pieces:
            rows.gram_(moment, alpha * weight)
        moment.count(self.counted)

    def quadratic(self, matrix: Tensor) -> Tensor:
        return sum((weight * rows.quadratic(matrix) for rows, weight in self.pieces), matrix.new_zeros(()))

    def products(self, groups: int) -> Tensor | None:
        found = [(rows.products(groups), weight) for rows, weight in self.pieces]
        terms = [weight * products for products, weight in found if products is not None]
        return sum(terms[1:], terms[0]) if terms else None

    def dense(self) -> Tensor:
        if not self.pieces or any(type(rows) is not Dense or rows.blocks is not None for rows, _ in self.pieces):
            raise NotImplementedError("rows that a method did not add as such, or to some blocks, are not written out.")
        return torch.cat([rows.dense() * weight**0.5 for rows, weight in self.pieces])

    def summed(self) -> Rows:
        return self

    def over_copies(self, copies: int, mean: bool) -> Rows:
        return self

    def times(self, weight: float) -> Rows:
        return self if weight == 1 else self._with([(r.times(weight), alpha) for r, alpha in self._written()])

    def plus(self, other: Rows) -> Rows:
        mine, its = self._written(), other._written()
        kinds = [[(r.blocks, alpha, r.values.shape) for r, alpha in pieces] for pieces in (mine, its)]
        if kinds[0] != kinds[1]:
            raise ValueError("rows of calls that are summed differ.")
        return self._with([(one.plus(two), alpha) for (one, alpha), (two, _) in zip(mine, its, strict=True)])

    def tensors(self) -> list[Tensor]:
        return [tensor for rows, _ in self._written() for tensor in rows.tensors()]

    def put(self, tensors: Iterator[Tensor]) -> None:
        for rows, _ in self._written():
            rows.put(tensors)

    def _with(self, pieces: list[tuple[Rows, float]]) -> Recorded:
        found = copy.copy(self)
        found.pieces = pieces
        return found

    def _written(self) -> list[tuple[Rows, float]]:
        if any(isinstance(rows, Diagonal | OneHot) for rows, _ in self.pieces):
            raise ValueError(
                f"fit: {self.rule.label}: {type(self.rule).__name__} adds to a factor by add_counts() or add_diagonal(), of which several "
                "calls, or copies that go through the network in chunks, make no sum. Have the rule use add() or add_to(), take a larger "
                "memory_budget, by which all copies go together, or freeze the layer."
            )
        return self.pieces


class _State(dict):
    """The attributes that a call left on a rule."""


def _state(rule: Any, *arguments: Any) -> Any:
    if type(rule).output_rows is not _recorded_outputs:
        return rule._said("keep")(rule, *arguments)
    return _State({key: value for key, value in vars(rule).items() if key not in _OF_THE_RULE})


def _restore(rule: Any, kept: Any) -> None:
    if isinstance(kept, _State):
        vars(rule).update(kept)
    else:
        rule.kept = kept


@contextmanager
def _recorders(rule: Any, side: str) -> Iterator[dict[str, Recorder]]:
    """For the duration of the context, a side of the rule's factors is recorded; what was, by parameter, is there after it."""
    factors, found = rule.factors, {}
    held = {name: getattr(factor, side) for name, factor in factors.items()}
    by_moment = {id(moment): Recorder(moment) for moment in held.values() if moment is not None}
    try:
        for name, moment in held.items():
            if moment is not None:
                setattr(factors[name], side, by_moment[id(moment)])
        yield found
        found |= {name: getattr(factor, side) for name, factor in factors.items() if held[name] is not None}
    finally:
        for name, moment in held.items():
            setattr(factors[name], side, moment)


def _seen(rule: Any, tensors: Any, mean: bool, axis: int) -> list[Any]:
    """Tensors as the rule's methods take them: without reduced precision, and over copies where the rows are linear in them."""
    tensors = [full(t) if isinstance(t, Tensor) else t for t in tensors]
    if rule.copies == rule._copies_seen():
        return tensors
    apart = [t.unflatten(axis, (-1, rule.copies)) if isinstance(t, Tensor) else t for t in tensors]
    return [(t.mean(axis + 1) if mean else t.sum(axis + 1)) if isinstance(t, Tensor) else t for t in apart]


def _recorded_inputs(rule: Any, *arguments: Any) -> dict[str, Rows]:
    with _recorders(rule, "input_moment") as found:
        rule.inputs(*_seen(rule, arguments, True, 0))
    return _by_moment(found, rule)


def _recorded_outputs(rule: Any, gradient: Tensor, kept: Any) -> dict[str, Rows]:
    _restore(rule, kept)
    (gradient,) = _seen(rule, [gradient], False, 1)
    with _recorders(rule, "output_moment") as found:
        if type(rule).vjp is not AddsToMoments.vjp:
            rule.vjp(gradient, None)
        else:
            rule.outputs(gradient)
    return _by_moment(found, rule)


def _by_moment(found: Mapping[str, Recorder], rule: Any) -> dict[str, Rows]:
    """Parameters that share a moment have the same rows."""
    rows = {id(moment): Recorded(moment, rule) for moment in found.values()}
    return {name: rows[id(moment)] for name, moment in found.items()}


def _gradient_of_vjp(rule: Any, gradient: Tensor, call: Any) -> Tensor:
    return _backward_of_vjp(rule, gradient, call, lambda rows: None, True)


def _backward_of_vjp(rule: Any, gradient: Tensor, call: Any, take: Callable[..., None], wanted: bool) -> Tensor | None:
    _restore(rule, call.kept)
    with _recorders(rule, "output_moment") as found:
        pulled = rule.vjp(gradient, call.input_shape if wanted else None)
    take(_by_moment(found, rule))
    return pulled


def _jacobians_by_autograd(rule: Any, arguments: Any, gradient: Tensor) -> dict[str, Jacobian]:
    shapes, names = rule.shapes(), list(rule.touched(None))
    found = by_autograd(rule.module, names, arguments, gradient)
    return {name: Jacobian(shapes[name].to_blocks(found[name], 2)) for name in names}
