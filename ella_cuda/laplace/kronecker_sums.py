"""Kronecker factors from the rows of layers' calls: what each call adds to which side.

All positions of all calls of layers that share a weight are shared positions of one layer. KFAC-expand: A is the sum over them, B the mean.
KFAC-reduce: A is the outer product of the inputs' mean over them, B that of the gradients' sum. Blocks without an input side are exact:
their gradients are summed over positions and calls before the outer product. Of copies of a data point, means of input rows and sums of
output rows come first, see :mod:`ella_cuda.laplace.copies`.

Source: Eschenhagen et al., "Kronecker-factored approximate curvature for modern neural network architectures", NeurIPS 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ella_cuda.laplace.call import Call
from ella_cuda.laplace.factors import KroneckerFactor
from ella_cuda.laplace.rows import Diagonal, Rows
from ella_cuda.ops.conv_kron_accumulate import GroupedSums

if TYPE_CHECKING:
    from ella_cuda.laplace.rules import Rule

Part = tuple[KroneckerFactor, range | None]  # of a factor: the blocks that a call can take part in together
RowsOf = Mapping[str, Rows]
Key = tuple["Rule", int]  # of a call: its number among the rule's
WAITING = 256 << 20  # bytes of inputs and gradients that wait to be added together
WORKSPACE = 256 << 20  # of the kernels that add them, see csrc/kron/cuda/syrk_tile.cuh


def together(values: Tensor) -> bool:
    """Whether sums of rows take less time together than one after the other."""
    return values.is_cuda


class Consumer:
    """Takes what layers see in one pass of a network: each call's arguments on the way forward, and gradients at its output on the way
    back, data points first.

    Attributes:
        takes_samples: whether gradients may be those at some positions alone, see :class:`Call`.
    """

    takes_samples = False

    def begin(self) -> None:
        """Forget the calls: a forward pass begins."""

    def forward(self, call: Call, arguments: Sequence[Any]) -> None:
        """Take a call's arguments ``(N, ...)``."""

    def close(self) -> None:
        """Take note that the forward pass has no more calls."""

    def backward(self, call: Call, gradient: Tensor, wanted: bool) -> Tensor | None:
        """Take gradients ``(K, N, ...)`` at a call's output; returns those at its input if they are wanted."""
        return call.rule.input_gradient(gradient, call) if wanted else None

    def flush(self) -> None:
        """Take note that all gradients of these columns were there."""

    def release(self) -> None:
        """Drop what is kept of the pass."""


class KroneckerSums(Consumer):
    """Adds both sides to the factors of the calls' rules."""

    takes_samples = True

    def __init__(self) -> None:
        self._calls: dict[Part, list[tuple[Call, str]]] = {}
        self._counts: dict[tuple[Call, str], int] = {}  # rows that a call added to the input side
        self._shares: dict[tuple[Call, str], float] = {}  # of calls that share a weight, in the output side's mean
        self._means: dict[
            Part, list[tuple[int, Rows]]
        ] = {}  # of KFAC-reduce: positions, and rows that are means over these
        self._sums: dict[Part, Rows | None] = {}  # of gradients that are summed over calls
        self._waiting = GroupedSums(WAITING)

    def add(self, factor: KroneckerFactor, side: str, rows: Rows, alpha: float = 1.0) -> None:
        """Add alpha times the rows' outer products to the "input" or "output" side of a factor, on CUDA together with others' later in the
        pass. As for autograd in training, nobody may change a layer's input in place before."""
        moment = getattr(factor, f"{side}_moment")
        if not together(rows.values):
            rows.gram_(moment, alpha)
            return
        moment.sums = self._waiting
        try:
            rows.gram_(moment, alpha)
        finally:
            del moment.sums

    def begin(self) -> None:
        self._waiting.launch()
        for each in (self._calls, self._counts, self._shares, self._means, self._sums):
            each.clear()

    def forward(self, call: Call, arguments: Sequence[Any]) -> None:
        rows = call.rule.input_rows(*arguments)
        call.kept = call.rule.keep(*arguments)
        self.add_inputs(call, over_copies(rows, call.copies, mean=True))

    def add_inputs(self, call: Call, rows: RowsOf) -> None:
        """Take a call's input rows, over copies."""
        rule = call.rule
        call.blocks = rule.touched(call.kept)
        for name, blocks in call.blocks.items():
            part = rule.factors[name], blocks
            self._calls.setdefault(part, []).append((call, name))
            side = None if part[0].shape.constant_input else rows[name]
            self._counts[call, name] = 0 if side is None else side.count
            if side is None:
                continue
            if rule.approximation == "reduce":
                self._means.setdefault(part, []).append((side.mean_over, side.mean()))
            else:
                self.add(part[0], "input", side)

    def close(self) -> None:
        """Add what all calls have together.

        Raises:
            ValueError: two calls took part in different sets of a factor's blocks that have some in common.
        """
        for part, calls in self._means.items():
            factor, _ = part
            if len(calls) > 1 and isinstance(calls[0][1], Diagonal):
                call, name = self._calls[part][0]
                raise ValueError(
                    f"fit: approximation='reduce' does not serve a layer whose inputs are indices and that is called several times "
                    f"({call.rule.full_name(name)}); use approximation='expand', or freeze it."
                )
            total = max(sum(positions for positions, _ in calls), 1)
            (positions, mean), *others = calls
            mean = mean.times(positions / total) if others else mean
            for positions, rows in others:
                mean = mean.plus(rows.times(positions / total))
            self.add(factor, "input", mean)
        self._means.clear()
        for part, calls in self._calls.items():
            factor, blocks = part
            if blocks is not None:
                _require_blocks_apart(part, calls[0], self._calls)
            if len(calls) == 1:
                continue
            total = sum(self._counts[call] for call in calls)
            for call, name in calls:
                call.rule.separate_outputs()
                self._shares[call, name] = self._counts[call, name] / total if total else 1 / len(calls)
            if factor.shape.constant_input or calls[0][0].rule.approximation == "reduce":
                self._sums[part] = None

    def backward(self, call: Call, gradient: Tensor, wanted: bool) -> Tensor | None:
        rule = call.rule
        summed = any((rule.factors[name], blocks) in self._sums for name, blocks in call.blocks.items())
        if call.copies == 1 and not summed:
            return rule.backward(gradient, call, lambda rows: self.add_outputs(call, rows), wanted)
        rows = rule.output_rows(gradient, call.kept)
        self.add_outputs(call, over_copies(rows, call.copies, mean=False))
        return rule.input_gradient(gradient, call) if wanted else None

    def add_outputs(self, call: Call, rows: RowsOf) -> None:
        """Take a call's output rows, over copies; those of a call that is alone with its weight may come in parts."""
        rule = call.rule
        shared = {
            name: owner
            for name, owner in rule.shares_outputs().items()
            if rule.factors[owner].output_moment is rule.factors[name].output_moment
        }
        many = rule.approximation == "expand"
        if any(rows[n] is not rows.get(o) or (many and rows[n].positions != 1) for n, o in shared.items() if n in rows):
            self._waiting.launch()
            rule.separate_outputs()
            shared = {}
        for name, blocks in call.blocks.items():
            if name not in rows or name in shared:
                continue  # another parameter has the same rows
            factor, side = rule.factors[name], _at_samples(rows[name], call)
            part = factor, blocks
            if part in self._sums:
                before = self._sums[part]
                self._sums[part] = side.summed() if before is None else before.plus(side.summed())
            elif factor.shape.constant_input or rule.approximation == "reduce":
                self.add(factor, "output", side.summed())
            else:
                self.add(factor, "output", side, self._shares.get((call, name), 1.0) / max(side.positions, 1))

    def release(self) -> None:
        self._waiting.drop()
        self.begin()

    def flush(self) -> None:
        for (factor, blocks), rows in self._sums.items():
            if rows is not None:
                self.add(factor, "output", rows)
                self._sums[factor, blocks] = None
        self._waiting.launch()

    def add_per_example(self, rule: Rule, name: str, gradients: Tensor, data_too: bool) -> None:
        """Take gradients of single data points, see :meth:`ella_cuda.laplace.Rule.rows`."""
        for side, rows in zip(("input", "output"), rule.rows(name, gradients, data_too), strict=True):
            if rows is not None:
                self.add(rule.factors[name], side, rows)
        self._waiting.launch()


class SummedCopies(Consumer):
    """Sums the rows of chunks of copies, and hands the sums to another consumer as the calls of a network without copies.

    Columns may go back in several passes, the same ones of every chunk.

    Args:
        consumer: who gets the sums.
    """

    def __init__(self, consumer: KroneckerSums) -> None:
        self.consumer = consumer
        self._share = 1.0  # of the chunk in all copies
        self._sums: dict[Key, tuple[Call, dict[str, Rows]]] = {}  # of every call, its input rows
        self._outputs: list[dict[Key, dict[str, Rows]]] = []  # of every pass
        self._keys: dict[Call, Key] = {}  # of the chunk's calls
        self._pass, self._added, self._first = 0, False, True

    def chunk(self, share: float) -> None:
        """Begin a chunk with this share in all copies."""
        self._share, self._pass = share, 0

    def begin(self) -> None:
        if not self._keys:
            return
        seen = set(self._keys.values())
        if missing := next((rule for rule, number in self._sums if (rule, number) not in seen), None):
            raise _other_calls(missing)
        self._keys.clear()
        self._first = False

    def forward(self, call: Call, arguments: Sequence[Any]) -> None:
        rows = call.rule.input_rows(*arguments)
        call.kept = call.rule.keep(*arguments)
        self.add_inputs(call, over_copies(rows, call.copies, mean=True))

    def add_inputs(self, call: Call, rows: dict[str, Rows]) -> None:
        """Take a call's input rows, over copies."""
        key = self._keys[call] = call.rule, sum(rule is call.rule for rule, _ in self._keys.values())
        if self._first:
            self._sums[key] = Call(call.rule, kept=call.kept), {}
        elif key not in self._sums:
            raise _other_calls(call.rule)
        if not self._added:
            of_all, before = self._sums[key]
            rows = _each(rows, lambda of: of.times(self._share).settled())
            self._sums[key] = of_all, _sum(before, rows, call.rule)

    def backward(self, call: Call, gradient: Tensor, wanted: bool) -> Tensor | None:
        rule, key = call.rule, self._keys[call]
        rows = over_copies(rule.output_rows(gradient, call.kept), call.copies, mean=False)
        if len(self._outputs) == self._pass:
            self._outputs.append({})
        found = self._outputs[self._pass]
        found[key] = _sum(found.get(key, {}), _each(rows, lambda of: of.settled()), rule)
        return rule.input_gradient(gradient, call) if wanted else None

    def flush(self) -> None:
        self._pass += 1

    def tensors(self) -> list[Tensor]:
        """The values of all sums, in an order of their own."""
        return [tensor for rows in self._rows() for tensor in rows.tensors()]

    def put(self, tensors: Iterator[Tensor]) -> None:
        """Put others in the place of :meth:`tensors`."""
        for rows in self._rows():
            rows.put(tensors)

    def _rows(self) -> list[Rows]:
        calls = [rows for _, rows in self._sums.values()] + [rows for found in self._outputs for rows in found.values()]
        return list({id(rows): rows for of_call in calls for rows in of_call.values()}.values())

    def add(self) -> None:
        """Hand the sums of all chunks over: input rows once, and the output rows of the passes that were there since the last time."""
        if not self._added:
            self.consumer.begin()
            for key, (call, rows) in self._sums.items():
                self.consumer.add_inputs(call, rows)
                self._sums[key] = call, {}
            self.consumer.close()
            self._added = True
        for found in self._outputs:
            for key, rows in found.items():
                self.consumer.add_outputs(self._sums[key][0], rows)
            self.consumer.flush()
        self._outputs.clear()
        self._keys.clear()


def over_copies(rows: RowsOf, copies: int, mean: bool) -> dict[str, Rows]:
    """Rows over so many copies of each data point, see :meth:`Rows.over_copies`."""
    return _each(rows, lambda of: of.over_copies(copies, mean))


def _each(rows: RowsOf, change: Callable[[Rows], Rows]) -> dict[str, Rows]:
    """Changed rows; those that parameters have in common are changed once."""
    changed = {id(of): change(of) for of in {id(of): of for of in rows.values()}.values()}
    return {name: changed[id(of)] for name, of in rows.items()}


def _sum(one: RowsOf, other: dict[str, Rows], rule: Rule) -> dict[str, Rows]:
    if not one:
        return other
    if one.keys() != other.keys():
        raise _other_calls(rule)
    try:
        its = {id(rows): other[name] for name, rows in one.items()}
        return _each(one, lambda rows: rows.plus(its[id(rows)]))
    except ValueError as error:
        if "differ" not in str(error):
            raise
        raise _other_calls(rule) from error


def _other_calls(rule: Rule) -> ValueError:
    return ValueError(
        f"fit: {rule.label} was called another number of times, or otherwise, for some copies of a data point than for others; copies that "
        "go through the network in chunks must take the same way. Use a larger memory_budget, by which all go together, or freeze the layer."
    )


def _at_samples(rows: Rows, call: Call) -> Rows:
    """The rows of all positions, where gradients are at some alone."""
    return rows.among(call.samples[0] * call.samples[1]) if call.samples else rows


def _require_blocks_apart(part: Part, call: tuple[Call, str], others: Sequence[Part] | Mapping[Part, Any]) -> None:
    factor, blocks = part
    for other, its_blocks in others:
        if other is factor and its_blocks != blocks and {*blocks} & {*its_blocks}:
            rule, name = call[0].rule, call[1]
            raise ValueError(
                f"fit: {rule.label} was called in one forward pass in ways that have a part of {name!r} in common, as an attention is "
                "whose query is its key once, and another time is not. Give each use its own layer, or freeze it."
            )
