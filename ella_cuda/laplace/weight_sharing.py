"""Calls of layers that share a weight, in one batch: what each adds to the weight's factor.

All positions of all calls are shared positions of one layer. KFAC-expand: A is the sum over them, B the mean. KFAC-reduce: A is the outer
product of the inputs' mean over them, B that of the gradients' sum. Blocks without an input side are exact: their gradients are summed
over the calls before the outer product.

Of a network that averages over copies, a rule gets the inputs' mean and the gradients' sum over the copies of a data point, see
:mod:`ella_cuda.laplace.copies`. Where copies come in chunks, :class:`SummedUses` has these of all chunks, and then makes the calls of them.

Source: Eschenhagen et al., "Kronecker-factored approximate curvature for modern neural network architectures", NeurIPS 2023.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ella_cuda.laplace.check_model import Place
from ella_cuda.laplace.factors import KroneckerFactor
from ella_cuda.laplace.rules import MultiheadAttentionRule, Rule
from ella_cuda.laplace.second_moment import SecondMoment, UnkeptMoment

# What a rule has from the start; the rest is what a call left there.
_OF_THE_RULE = {"module", "name", "resolution", "factors", "trainable", "tied", "lent", "approximation", "copies"}


@dataclasses.dataclass(eq=False)
class Use:
    """One call of a rule's layer.

    Attributes:
        rule: the layer's.
        place: of the images in the layer's input and output.
        state: what the call left on the rule.
        blocks: by parameter that took part, the range of its factor's blocks that did; None is all.
        rows: by parameter, the rows that the call added to the input side.
        shares: by parameter that other calls use too, the call's part in the output side's mean.
        handed: gradients at the output, ``(K, *output.shape)``, which others have taken this far in the graph's place.
    """

    uses: Uses
    rule: Rule
    place: Place
    state: dict[str, Any] = dataclasses.field(default_factory=dict)
    blocks: dict[str, range | None] = dataclasses.field(default_factory=dict)
    rows: dict[str, int] = dataclasses.field(default_factory=dict)
    shares: dict[str, float] = dataclasses.field(default_factory=dict)
    handed: Tensor | None = None

    def takes_samples(self) -> bool:
        """Whether the rule takes gradients at some positions alone."""
        return self.rule.takes_samples and self.place == Place()

    def hand(self, columns: Tensor, samples: tuple[int, ...] | None) -> None:
        """Hand gradients at the output on; see :attr:`Rule.samples`."""
        self.handed, self.state["samples"] = columns, samples

    def keep_state(self) -> None:
        """Remember what the call left on the rule."""
        self.state = {key: value for key, value in vars(self.rule).items() if key not in _OF_THE_RULE}

    def outputs(self, gradient: Tensor) -> None:
        """:meth:`Rule.outputs` of this call, ``(K, *output.shape)``."""
        with self.uses.ready(self):
            self.rule.outputs(summed_over_copies(self.rule, self._batch_first(gradient)))

    def vjp(self, gradient: Tensor, input_shape: torch.Size | None) -> Tensor | None:
        """:meth:`Rule.vjp` of this call."""
        if input_shape is not None and self.place.folded > 1:
            input_shape = torch.Size((input_shape[0] // self.place.folded, self.place.folded, *input_shape[1:]))
        elif input_shape is not None and self.place.axis:
            input_shape = torch.Size((input_shape[1], input_shape[0], *input_shape[2:]))
        found = self._vjp(self._batch_first(gradient), input_shape)
        if found is None:
            return None
        return found.flatten(1, 2) if self.place.folded > 1 else self._batch_first(found)

    def _vjp(self, gradient: Tensor, input_shape: torch.Size | None) -> Tensor | None:
        """Of gradients ``(K, N, ...)``. Those of copies go back one by one, and are added to the factors as sums."""
        with self.uses.ready(self):
            if self.rule.copies == 1:
                return self.rule.vjp(gradient, input_shape)
            self.rule.vjp(summed_over_copies(self.rule, gradient), None)
            if input_shape is None:
                return None
            with _without_factors(self.rule):
                return self.rule.vjp(gradient, input_shape)

    def _batch_first(self, columns: Tensor) -> Tensor:
        """``(K, *output.shape)`` as ``(K, N, ...)``."""
        return batch_first(columns, self.place, 1)

    def parts(self) -> Iterator[tuple[str, Part]]:
        """What took part, by parameter."""
        for name, blocks in self.blocks.items():
            yield name, (self.rule.factors[name], blocks)


Part = tuple[KroneckerFactor, range | None]  # of a factor: the blocks that a call can take part in together


class Uses:
    """The calls of one batch, in their order."""

    def __init__(self) -> None:
        self._all: list[Use] = []
        self._counts: collections.Counter[Rule] = collections.Counter()
        self._of: dict[Part, list[tuple[Use, str]]] = {}
        # Of KFAC-reduce: positions, and rows that are means over these.
        self._inputs: dict[Part, list[tuple[int, _Summed]]] = {}
        self._sums: dict[Part, _Summed] = {}

    def __len__(self) -> int:
        return len(self._all)

    def of(self, rule: Rule) -> int:
        """How many calls there are of this rule."""
        return self._counts[rule]

    def kept_bytes(self) -> int:
        """What rules keep of the calls."""
        kept = [use.state.get("kept") for use in self._all]
        return sum(tensor.numel() * tensor.element_size() for tensor in kept if isinstance(tensor, Tensor))

    def call(self, rule: Rule, arguments: Sequence[Any], place: Place, add: Callable[..., None] | None = None) -> Use:
        """A call with these arguments, the images at ``place``; accumulates its input side, as the rule does unless ``add`` is given."""
        use = Use(self, rule, place)
        before = {name: _rows(factor) for name, factor in rule.factors.items()}
        reduced = rule.factors if rule.approximation == "reduce" else {}
        collected = {n: _Summed(f.input_moment) for n, f in reduced.items() if f.input_moment is not None}
        with _exchanged(rule, "input_moment", collected):
            placed = (batch_first(a, place) if isinstance(a, Tensor) else a for a in arguments)
            (add or rule.inputs)(*mean_over_copies(rule, placed))
        use.keep_state()
        use.blocks = rule.touched()
        for name, part in use.parts():
            self._of.setdefault(part, []).append((use, name))
            use.rows[name] = _rows(part[0]) - before[name]
            if name in collected:
                self._inputs.setdefault(part, []).append((rule.positions, collected[name]))
        self._all.append(use)
        self._counts[rule] += 1
        return use

    def close(self) -> None:
        """All calls of the forward pass are there.

        Raises:
            ValueError: two calls took part in different sets of a factor's blocks that have some in common.
        """
        for (factor, _), calls in self._inputs.items():
            total, mean = max(sum(positions for positions, _ in calls), 1), _Summed(factor.input_moment)
            for positions, rows in calls:
                mean.begin()
                mean.take(rows, positions / total)
            mean.flush()
        self._inputs.clear()
        for part, calls in self._of.items():
            factor, blocks = part
            if blocks is not None:
                _require_blocks_apart(part, calls[0], self._of)
            if len(calls) == 1:
                continue
            total = sum(use.rows[name] for use, name in calls)
            for use, name in calls:
                use.rule.separate_outputs()
                use.shares[name] = use.rows[name] / total if total else 1 / len(calls)
            if factor.shape.constant_input or calls[0][0].rule.approximation == "reduce":
                self._sums[part] = _Summed(factor.output_moment)

    @contextmanager
    def ready(self, use: Use) -> Iterator[None]:
        """For the duration of the context, the rule is as the call left it, and adds output sides with the call's part in them."""
        vars(use.rule).update(use.state)
        moments: dict[str, Any] = {}
        for name, part in use.parts():
            if part in self._sums:
                self._sums[part].begin()
                moments[name] = self._sums[part]
            elif name in use.shares:
                moments[name] = _Scaled(part[0].output_moment, use.shares[name])
        with _exchanged(use.rule, "output_moment", moments):
            yield

    def flush(self) -> None:
        """All gradients of these columns are there."""
        for sums in self._sums.values():
            sums.flush()

    def clear(self) -> None:
        """Forget the batch."""
        for each in (self._all, self._counts, self._of, self._inputs, self._sums):
            each.clear()


class SummedUses(Uses):
    """The calls of a batch whose copies go through the network in chunks. Nothing is added to factors but by :meth:`add_inputs` and
    :meth:`add_outputs`, once all chunks were there: then the calls are those of a network without copies, at the means of inputs and sums of
    gradients. Of a rule that sees copies it is the rows that are summed.

    Columns may go back in several passes, the same ones of every chunk.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[SummedCall] = []
        self._of_rule: dict[Rule, list[SummedCall]] = {}
        self._made: list[Use] = []
        self._share, self._pass, self._first = 1.0, 0, True

    def begin(self, share: float) -> None:
        """The next calls and gradients are those of a chunk with this share in all copies."""
        super().clear()
        self._share, self._pass = share, 0

    def end(self) -> None:
        """The chunk's calls and gradients are there."""
        if short := next((r for r, calls in self._of_rule.items() if len(calls) != self._counts[r]), None):
            raise _other_calls(short)
        super().clear()
        self._first = False

    def clear(self) -> None:
        """Nothing: sums are of all chunks."""

    def close(self) -> None:
        """Nothing: calls are made in :meth:`add_inputs`."""

    def flush(self) -> None:
        self._pass += 1

    def call(self, rule: Rule, arguments: Sequence[Any], place: Place, add: Callable[..., None] | None = None) -> Use:
        calls, index = self._of_rule.setdefault(rule, []), self._counts[rule]
        if self._first:
            calls.append(SummedCall(rule))
            self._calls.append(calls[-1])
        elif index >= len(calls):
            raise _other_calls(rule)
        call = calls[index]
        own = mean_over_copies(rule, (batch_first(a, place) if isinstance(a, Tensor) else a for a in arguments))
        if not self._made:
            call.note(own, self._share)
        if self._made or not rule.sees_copies:
            moments = {n: _unkept(f.input_moment) for n, f in rule.factors.items() if f.input_moment is not None}
            with _exchanged(rule, "input_moment", moments):
                rule.inputs(*own)
        use = _ChunkUse(self, rule, place, of=call)
        use.keep_state()
        call.state = use.state
        self._all.append(use)
        self._counts[rule] += 1
        return use

    @contextmanager
    def ready(self, use: Use) -> Iterator[None]:
        vars(use.rule).update(use.state)
        yield

    def take(self, call: SummedCall, gradient: Tensor) -> None:
        """Gradients ``(K, N S, ...)`` of a chunk, at a call's output."""
        call.take(gradient, self._pass)

    def add_inputs(self, uses: Uses) -> None:
        """Make the calls, whose rules know of no copies for the duration, and add the input sides; once."""
        if self._made:
            return
        for call in self._calls:
            vars(call.rule).update(call.state)
            self._made.append(uses.call(call.rule, (), Place(), call.add_inputs))
        uses.close()

    def add_outputs(self, uses: Uses) -> None:
        """Add the output sides of the columns that are there, and forget these."""
        for i in range(self._pass):
            for use, call in zip(self._made, self._calls, strict=True):
                with uses.ready(use):
                    call.add_outputs(i)
            uses.flush()
        for call in self._calls:
            call.gradients.clear()
            call.outputs.clear()


class SummedCall:
    """One call of a rule's layer over all chunks of copies: means and sums ``(N, ...)`` and ``(K, N, ...)``, or rows."""

    def __init__(self, rule: Rule) -> None:
        self.rule, self.state = rule, {}
        self.arguments: list[Any] | None = None
        self.gradients: dict[int, Tensor] = {}
        self.inputs: dict[str, _Rows] = {}
        self.outputs: dict[int, dict[str, _Rows]] = {}  # by pass

    def note(self, arguments: Sequence[Any], share: float) -> None:
        """Arguments as the rule takes them, of a chunk with this share in all copies."""
        if self.rule.sees_copies:
            self.inputs = self.inputs or _rows_in_place_of(self.rule, "input_moment")
            for rows in self.inputs.values():
                rows.begin(share)
            with _exchanged(self.rule, "input_moment", self.inputs):
                self.rule.inputs(*arguments)
            return
        parts = [a * share if isinstance(a, Tensor) else a for a in arguments]
        before = self.arguments or [None] * len(parts)
        if len(before) != len(parts):
            raise _other_calls(self.rule)
        self.arguments = [
            p if b is None or not isinstance(p, Tensor) else b + p for b, p in zip(before, parts, strict=True)
        ]

    def take(self, gradient: Tensor, columns: int = 0) -> None:
        """Gradients ``(K, N S, ...)`` of a chunk at the output, in a pass of some columns."""
        if not self.rule.sees_copies:
            own, before = summed_over_copies(self.rule, gradient), self.gradients.get(columns)
            self.gradients[columns] = own if before is None else before + own
            return
        if columns not in self.outputs:
            self.outputs[columns] = _rows_in_place_of(self.rule, "output_moment")
        for rows in self.outputs[columns].values():
            rows.begin(1.0)
        with _exchanged(self.rule, "output_moment", self.outputs[columns]):
            _show(self.rule, gradient)

    def add_inputs(self, *_: Any) -> None:
        """Add the sums to the factors, of a rule that knows of no copies."""
        if self.rule.sees_copies:
            self._pour(self.inputs, "input_moment")
        else:
            self.rule.inputs(*self.arguments)
        self.arguments, self.inputs = None, {}

    def add_outputs(self, columns: int = 0) -> None:
        """Likewise, of a pass."""
        if columns in self.outputs:
            self._pour(self.outputs[columns], "output_moment")
        elif columns in self.gradients:
            _show(self.rule, self.gradients[columns])

    def tensors(self) -> list[Tensor]:
        """All sums, in an order of their own."""
        return [holder[key] for holder, key in self._places()]

    def put(self, tensors: Iterator[Tensor]) -> None:
        """Others in the place of :meth:`tensors`."""
        for holder, key in self._places():
            holder[key] = next(tensors)

    def _places(self) -> list[tuple[Any, Any]]:
        arguments = self.arguments or []
        places = [(arguments, i) for i, a in enumerate(arguments) if isinstance(a, Tensor)]
        places += [(self.gradients, i) for i in self.gradients]
        for rows in (self.inputs, *self.outputs.values()):
            places += [(each.sums, i) for each in dict.fromkeys(rows.values()) for i in range(len(each.sums))]
        return places

    def _pour(self, rows: dict[str, _Rows], side: str) -> None:
        poured: set[tuple[int, int]] = set()  # a moment of several parameters once
        for name, of_name in rows.items():
            moment = getattr(self.rule.factors[name], side)
            if (id(of_name), id(moment)) not in poured:
                poured.add((id(of_name), id(moment)))
                of_name.pour(moment)


def _show(rule: Rule, gradient: Tensor) -> None:
    """Let a rule accumulate the output side."""
    if rule.differentiates:
        rule.vjp(gradient, None)
    else:
        rule.outputs(gradient)


def _rows_in_place_of(rule: Rule, side: str) -> dict[str, _Rows]:
    """By parameter; those that share a moment share rows."""
    moments = {name: getattr(factor, side) for name, factor in rule.factors.items()}
    rows = {id(moment): _Rows(moment, rule) for moment in moments.values() if moment is not None}
    return {name: rows[id(moment)] for name, moment in moments.items() if moment is not None}


def _other_calls(rule: Rule) -> ValueError:
    return ValueError(
        f"fit: {rule.label} was called another number of times, or otherwise, for some copies of a data point than for others; copies that "
        "go through the network in chunks must take the same way. Use a larger memory_budget, by which all go together, or freeze the layer."
    )


@dataclasses.dataclass(eq=False)
class _ChunkUse(Use):
    """A call for a chunk of copies.

    Attributes:
        of: the call of all.
    """

    of: SummedCall | None = None

    def takes_samples(self) -> bool:
        return False  # gradients are summed over copies as they are

    def outputs(self, gradient: Tensor) -> None:
        with self.uses.ready(self):
            self.uses.take(self.of, self._batch_first(gradient))

    def _vjp(self, gradient: Tensor, input_shape: torch.Size | None) -> Tensor | None:
        with self.uses.ready(self):
            self.uses.take(self.of, gradient)
            if input_shape is None:
                return None
            with _without_factors(self.rule):
                return self.rule.vjp(gradient, input_shape)


def batch_first(tensor: Tensor, place: Place, ahead: int = 0) -> Tensor:
    """The tensor with the images along the first axis behind ``ahead`` others."""
    if place.folded > 1:
        return tensor.unflatten(ahead, (-1, place.folded))
    return tensor.transpose(ahead, ahead + 1) if place.axis else tensor


def more_than_a_call(rule: Rule) -> str:
    """Why the factors of a layer are more than what one call of its module adds to them; "" where they are not."""
    if rule.tied or rule.lent:
        names = ", ".join(rule.full_name(name) for name in (*rule.tied, *sorted(rule.lent)))
        return f"has weights of several layers ({names}: one tied parameter)"
    return "has its projections inside" if isinstance(rule, MultiheadAttentionRule) else ""


def mean_over_copies(rule: Rule, arguments: Iterable[Any]) -> list[Any]:
    """A call's arguments, ``(N S, ...)``, as the rule takes them: ``(N, ...)`` where its rows are linear in them."""
    if rule.copies == 1 or rule.sees_copies:
        return list(arguments)
    return [a.unflatten(0, (-1, rule.copies)).mean(1) if isinstance(a, Tensor) else a for a in arguments]


def summed_over_copies(rule: Rule, gradient: Tensor) -> Tensor:
    """Gradients ``(K, N S, ...)`` as the rule takes them: ``(K, N, ...)`` where its rows are linear in them."""
    if rule.copies == 1 or rule.sees_copies:
        return gradient
    return gradient.unflatten(1, (-1, rule.copies)).sum(2)


@contextmanager
def _without_factors(rule: Rule) -> Iterator[None]:
    """For the duration of the context, the rule has no factor to add to."""
    factors, rule.factors = rule.factors, {}
    try:
        yield
    finally:
        rule.factors = factors


def _unkept(moment: SecondMoment) -> UnkeptMoment:
    """Something to add to in the place of a moment."""
    groups, size, _ = moment.total.shape
    return UnkeptMoment(groups, size, moment.total.new_empty(0, dtype=moment.dtype), moment.name, moment.basis)


def _rows(factor: KroneckerFactor) -> int:
    return 0 if factor.input_moment is None else factor.input_moment.rows


def _require_blocks_apart(part: Part, call: tuple[Use, str], others: Iterable[Part]) -> None:
    factor, blocks = part
    for other, its_blocks in others:
        if other is factor and its_blocks != blocks and {*blocks} & {*its_blocks}:
            use, name = call
            raise ValueError(
                f"fit: {use.rule.label} was called in one forward pass in ways that have a part of {name!r} in common, as an attention is "
                "whose query is its key once, and another time is not. Give each use its own layer, or freeze it."
            )


@contextmanager
def _exchanged(rule: Rule, side: str, moments: dict[str, Any]) -> Iterator[None]:
    """For the duration of the context, the rule adds a side of these parameters' factors to these."""
    before = {name: getattr(rule.factors[name], side) for name in moments}
    try:
        for name, moment in moments.items():
            setattr(rule.factors[name], side, moment)
        yield
    finally:
        for name, moment in before.items():
            setattr(rule.factors[name], side, moment)


class _InPlaceOfAMoment:
    """What a rule adds to while a call's share in a moment is known, or the other calls' rows are awaited."""

    def __init__(self, moment: SecondMoment) -> None:
        self._moment = moment

    @property
    def total(self) -> Tensor:
        """The moment's, whose shape rules read."""
        return self._moment.total

    @property
    def dtype(self) -> torch.dtype:
        """Of the moment's rows."""
        return self._moment.dtype


class _Rows(_InPlaceOfAMoment):
    """Rows of a rule that sees copies, summed over chunks of these; a chunk's may come in pieces, the same ones of every chunk."""

    def __init__(self, moment: SecondMoment, rule: Rule) -> None:
        super().__init__(moment)
        self._rule, self._kinds, self._next, self._weight = rule, [], 0, 1.0
        self.sums: list[Tensor] = []

    def begin(self, weight: float) -> None:
        """The next rows are a chunk's first, and count so much."""
        self._next, self._weight = 0, weight

    def add(self, rows: Tensor, alpha: float = 1.0) -> None:
        self._collect(None, rows, alpha)

    def add_to(self, blocks: range, rows: Tensor, alpha: float = 1.0) -> None:
        self._collect(blocks, rows, alpha)

    def count(self, rows: int) -> None:
        """Nothing: what is added at last is counted then."""

    def _collect(self, blocks: range | None, rows: Tensor, alpha: float) -> None:
        rows = rows if self._weight == 1 else rows * self._weight
        kind = blocks, alpha, rows.shape
        if self._next == len(self.sums):
            self._kinds.append(kind)
            self.sums.append(rows)
        elif self._kinds[self._next] != kind:
            raise _other_calls(self._rule)
        else:
            self.sums[self._next] = self.sums[self._next] + rows
        self._next += 1

    def pour(self, moment: Any) -> None:
        """Add all of them to a moment."""
        for (blocks, alpha, _), rows in zip(self._kinds, self.sums, strict=True):
            if blocks is None:
                moment.add(rows, alpha)
            else:
                moment.add_to(blocks, rows, alpha)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("add"):
            raise AttributeError(name)
        raise ValueError(
            f"fit: {self._rule.label}: {type(self._rule).__name__} has sees_copies = True and adds to a factor by {name}(), of which copies "
            "that go through the network in chunks make no sum. Have the rule use add() or add_to(), take a larger memory_budget, by which "
            "all copies go together, or freeze the layer."
        )


class _Scaled(_InPlaceOfAMoment):
    """Adds to a moment, times a number."""

    def __init__(self, moment: SecondMoment, scale: float) -> None:
        super().__init__(moment)
        self._scale = scale

    def add(self, rows: Tensor, alpha: float = 1.0) -> None:
        self._moment.add(rows, alpha * self._scale)

    def add_to(self, blocks: range, rows: Tensor, alpha: float = 1.0) -> None:
        self._moment.add_to(blocks, rows, alpha * self._scale)

    def add_weighted(self, rows: Tensor, weights: Tensor) -> None:
        self._moment.add_weighted(rows, weights * self._scale)

    def add_patches(
        self, x: Tensor, kernel_size: Any, padding_mode: str = "circular", alpha: float = 1.0, **geometry: Any
    ) -> None:
        self._moment.add_patches(x, kernel_size, padding_mode, alpha * self._scale, **geometry)

    def add_windows(self, x: Tensor, kernel_size: Any, stride: Any, dilation: Any, alpha: float = 1.0) -> None:
        self._moment.add_windows(x, kernel_size, stride, dilation, alpha * self._scale)

    def add_diagonal(self, values: Tensor, rows: int) -> None:
        self._moment.add_diagonal(values * self._scale, rows)

    def count(self, rows: int) -> None:
        self._moment.count(rows)


class _Summed(_InPlaceOfAMoment):
    """Rows that are summed over calls; those of a call may come in pieces, of the same sizes in every call."""

    def __init__(self, moment: SecondMoment) -> None:
        super().__init__(moment)
        self._pieces: list[tuple[range | None, Tensor]] = []
        self._diagonals: list[Tensor] = []
        self._next = 0

    def begin(self) -> None:
        """The next rows are a call's first."""
        self._next = 0

    def add(self, rows: Tensor, alpha: float = 1.0) -> None:
        self._collect(None, rows, alpha)

    def add_to(self, blocks: range, rows: Tensor, alpha: float = 1.0) -> None:
        self._collect(blocks, rows, alpha)

    def add_counts(self, counts: Tensor) -> None:
        self._diagonals.append(counts)

    def count(self, rows: int) -> None:
        """Nothing: what is added at last is counted then."""

    def _collect(self, blocks: range | None, rows: Tensor, alpha: float) -> None:
        rows = rows if alpha == 1 else rows * alpha**0.5
        if self._next == len(self._pieces):
            self._pieces.append((blocks, rows))
        else:
            self._pieces[self._next] = blocks, self._pieces[self._next][1] + rows
        self._next += 1

    def take(self, other: _Summed, weight: float) -> None:
        """Add another's rows, times a number.

        Raises:
            ValueError: they are a diagonal, which does not say what the rows are, and the number is not one.
        """
        if other._diagonals and weight != 1:
            raise ValueError(
                f"fit: approximation='reduce' does not serve a layer whose inputs are indices and that is called several times "
                f"({self._moment.name}); use approximation='expand', or freeze it."
            )
        self._diagonals += other._diagonals
        for blocks, rows in other._pieces:
            self._collect(blocks, rows, weight**2)

    def flush(self) -> None:
        """Add the outer products of the sums, and forget them."""
        for blocks, rows in self._pieces:
            if blocks is None:
                self._moment.add(rows)
            else:
                self._moment.add_to(blocks, rows)
        for counts in self._diagonals:
            self._moment.add_counts(counts)
        self._pieces.clear()
        self._diagonals.clear()
        self._next = 0
