"""Passes that are recorded, those over a fit's batches first: the operators of one batch's forward pass, columns, backward pass and sums,
run again on others.

What a model was tried for, and the tapes of its batches, are kept as long as the model and its layers are what they were, so that a second
fit does neither again. A tape knows parameters, buffers and sums by name, never by what they hold. In every fit a tape's outputs are compared
with the network's own, once: before the tape adds to a sum, or, where the data can be passed over once more, by a flag on the device that is
read at the end of the fit. What has no tape runs as it is, by the same code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ella_cuda.laplace.batches import Inputs, data_points, map_tensors, model_outputs, tensors_of
from ella_cuda.laplace.check_extensions import is_own
from ella_cuda.laplace.check_model import alike_flag
from ella_cuda.laplace.known_model import known_of
from ella_cuda.laplace.likelihoods import Likelihood
from ella_cuda.laplace.second_moment import Use, Watch, are_alike
from ella_cuda.laplace.tape import NotRecordable, Tape, geometry, record
from ella_cuda.nn import SpatialBasis
from ella_cuda.recording import MAX_SHAPES, CudaGraphs, has_graphs, recorded_or_told

if TYPE_CHECKING:
    from ella_cuda.laplace.curvature import CurvaturePass
    from ella_cuda.laplace.layer_pass import LayerPass
    from ella_cuda.laplace.rules import Rule

# Batches of a kind before one is recorded. A recording takes as long as a few batches, of which a GPU's are short beside their Python.
PATIENCE = {"cuda": 2, "cpu": 16}
LARGE = 8 << 20  # bytes of layers' outputs of a batch, beside whose work a CPU's Python is short
MOST_KINDS = 64  # that are counted at a time
# (inputs, targets, generator, admitted) -> the part of the statistic and the outputs; what fits the likelihood is asked of ``admitted``
Add = Callable[[Inputs, Tensor, torch.Generator | None, Callable[[Tensor, Tensor], Tensor]], tuple[Tensor, Tensor]]
Name = tuple[str, Any]
Choices = tuple[tuple[bool, ...], ...]  # of each use of each sum, whether products are float64's


@dataclasses.dataclass(eq=False)
class Kind:
    """Passes over the same shapes in the same state, as batches of a fit with products of the same dtypes.

    Attributes:
        seen: how many there were.
        tape: of one; None before it is recorded. names: of the tensors that the tape finds there.
        outputs: the tape of what is compared with the network's own.
        recorded: the network's outputs for the pass that was recorded, of which the tape may hold numbers.
        proven: whether the tape had other outputs of the network, so that it holds none of these.
        refused: why there is no tape, in words.
        has_sums: of a batch of the evidence's gradient, after which sums of gradients there are.
        rows, products, calls: what a batch of a fit adds to the counts of sums and of layers' calls.
        decide: the sums of whose rows a fit's tape has the likeness, and how many tensors that is.
    """

    seen: int = 0
    tape: Tape | None = None
    names: list[Name] = dataclasses.field(default_factory=list)
    outputs: Callable[..., list[Tensor]] | None = None
    recorded: Tensor | None = None
    proven: bool = False
    refused: str = ""
    has_sums: list[bool] = dataclasses.field(default_factory=list)
    rows: list[int] = dataclasses.field(default_factory=list)
    calls: list[int] = dataclasses.field(default_factory=list)
    products: list[int] = dataclasses.field(default_factory=list)
    decide: dict[int, int] = dataclasses.field(default_factory=dict)

    @property
    def writes_sums_alone(self) -> bool:
        return all(self.names[number][0] == "moment" for number in self.tape.written)

    def refuse(self) -> None:
        """Have no tape from now on."""
        self.tape, self.refused = None, "the network's outputs for another batch are not those of the recorded function"


class NotTheNetwork(Exception):
    """A fit has batches by tapes whose outputs were not the network's own; these tapes are dropped."""

    def __init__(self, kinds: Iterable[Kind]) -> None:
        super().__init__()
        for kind in kinds:
            kind.refuse()


class RecordedPasses:
    """Passes over a model that are recorded, each by its kind.

    Args:
        run: whose network is tried out. rules: of the network's layers.
        settings: what else decides on what a pass does.
    """

    def __init__(
        self, run: LayerPass, rules: Sequence[Rule], settings: tuple[Any, ...], likelihood: Likelihood | None = None
    ) -> None:
        self._run, self._known = run, known_of(run.model)
        described = [(rule.name, rule.trainable, sorted(rule.tied), rule.copies) for rule in rules]
        kinds = (type(likelihood), *map(type, rules))
        # No output tells what a user's likelihood or rule reads elsewhere, so that passes with them are recorded anew in each fit.
        of_users = None if likelihood is None or all(map(is_own, kinds)) else object()
        self._settings = (
            kinds,
            repr(described),
            "" if likelihood is None else repr(sorted(vars(likelihood).items())),
            of_users,
            *settings,
        )
        self._verified: set[Kind] = set()
        self._defers = False  # whether comparisons of tapes that had other outputs before are read later
        self.compared: dict[Kind, Tensor] = {}  # whether their outputs were the network's own, 0-dim
        self._given: dict[Kind, tuple[list[Tensor], Sequence[Tensor]]] = {}
        self._graphs: dict[Kind, _Graph] = {}
        self._device_graphs: CudaGraphs | None = None

    def _key(self, x: Inputs, beside: Sequence[Tensor], *state: Any) -> Any:
        """That of a pass with inputs and tensors beside them, whose device is that of the first; None of what is not recorded."""
        tensors, device = [*tensors_of(x), *beside], beside[0].device
        others = not isinstance(x, Tensor) and len(tensors) - len(beside) < len(x)
        if self._known is None or others or device.type not in PATIENCE or any(t.device != device for t in tensors):
            return None
        if device.type == "cpu" and self._run.findings.image_bytes * data_points(x) > LARGE:
            return None
        names = tuple(x) if isinstance(x, Mapping) else type(x)
        return self._settings, names, *((t.shape, t.stride(), t.dtype) for t in tensors), device, *state, _precision()

    def _kind(self, key: Any) -> Kind:
        kinds = self._kinds
        if key not in kinds:
            recorded = [which for which, kind in kinds.items() if kind.tape is not None]
            if len(kinds) >= MOST_KINDS or len(recorded) >= MAX_SHAPES:
                left = kinds.pop((recorded or [*kinds])[0])
                self._verified.discard(left)
                for each in (self._given, self._graphs):
                    each.pop(left, None)
        return kinds.setdefault(key, Kind())

    @staticmethod
    def _is_due(kind: Kind, device: torch.device) -> bool:
        """Count a pass; whether it is to be recorded."""
        kind.seen += 1
        return kind.tape is None and not kind.refused and kind.seen >= PATIENCE[device.type]

    @property
    def _kinds(self) -> dict[Any, Kind]:
        """The passes that there were."""
        return self._known.kinds

    def _taped(
        self,
        kind: Kind,
        function: Callable[[], Sequence[Tensor]],
        inputs: Sequence[Tensor],
        tensors: Callable[[], Mapping[Name, Tensor]],
        staying: Iterable[Tensor],
        compared: Sequence[int],
        generator: torch.Generator | None = None,
        always: int | None = None,
    ) -> Tape:
        """The tape of a function, for the kind; raises as :func:`record`.

        Args:
            inputs: of the function. generator: that the function draws from. always: see :func:`record`.
            tensors: that the function may find there, by name; the function replaces none of them.
            staying: those of them that stay.
            compared: the numbers of the outputs that are to be the network's own.
        """
        before = tensors()
        tape, given = record(function, inputs, generator, staying, always, before.values())
        after = tensors()
        if before.keys() != after.keys() or any(tensor is not after[name] for name, tensor in before.items()):
            raise NotRecordable("a pass replaces tensors of the model or of the sums")
        if tape.mixed and inputs[0].is_cuda:
            raise NotRecordable("a pass copies between devices")
        if tape.draws_inside and generator is not None and has_graphs(inputs[0].device):
            raise NotRecordable("a graph draws random numbers from torch's own generator alone")
        kind.names = _named(given, before)
        kind.outputs = tape.part(compared)
        return tape

    def _of_pass(
        self, kind: Kind, tensors: Callable[[], Mapping[Name, Tensor]]
    ) -> tuple[list[Tensor], Sequence[Tensor]]:
        """The tensors that a kind's tape finds there, and what the tape makes of those that stay."""
        if kind not in self._given:
            found = tensors()
            given = [found[name] for name in kind.names]
            self._given[kind] = given, kind.tape.prepared(given)
        return self._given[kind]

    def _is_the_network(
        self, kind: Kind, inputs: Sequence[Tensor], given: Any, own: Callable[[], Sequence[Tensor]]
    ) -> bool:
        """Whether the tape's outputs are the network's own, the last of ``own()``; compared until a pass has other outputs than the recorded
        one. Where they are not, the tape is dropped. Waits for the device, but for comparisons that are read later."""
        if kind in self._verified:
            return True
        with torch.no_grad():
            wanted = own()
            same = torch.stack([*map(alike_flag, kind.outputs(inputs, *given), wanted)]).all()
        if self._defers and kind.proven:
            self.compared[kind] = same
            self._verified.add(kind)
            return True
        if not same:
            kind.refuse()
            return False
        if kind.recorded is None:
            kind.recorded = wanted[-1]
        elif not torch.equal(wanted[-1], kind.recorded):
            self._verified.add(kind)
            kind.proven = True
        return True

    def _outputs(
        self,
        kind: Kind,
        inputs: Sequence[Tensor],
        given: Any,
        generator: torch.Generator | None = None,
        all_outputs: bool = False,
    ) -> list[Tensor]:
        """The tape's outputs, see :meth:`Tape.run`; on CUDA the next call writes over them."""
        if not has_graphs(inputs[0].device):
            return kind.tape.run(inputs, *given, kind.tape.draws(generator), generator, all_outputs)
        if kind not in self._graphs:
            if self._device_graphs is None:
                self._device_graphs = CudaGraphs(inputs[0].device)
            self._graphs[kind] = _Graph(kind.tape, *given, self._device_graphs)
        return self._graphs[kind](inputs, generator, all_outputs)


@dataclasses.dataclass
class _Shape:
    """Batches of the same shapes.

    Attributes:
        uses: of the sums, by the last batch that ran as it is; None before.
        likely: whether rows were alike then.
    """

    uses: list[list[Use]] | None = None
    likely: list[bool | None] = dataclasses.field(default_factory=list)


class _Plan(NamedTuple):
    """What sums do with a batch that is to come.

    Attributes:
        choices: in which dtypes products are.
        are_alike: of the sums after it. asked: the sums of which data decide on that.
    """

    choices: Choices
    are_alike: list[bool | None]
    asked: list[int]


class RecordedBatches(RecordedPasses):
    """The batches of one fit.

    Attributes:
        fine: whether all targets of batches that were graphs fit the likelihood, 0-dim; None where there were none.
        changeless: whether all that ran were tapes that write nothing but the sums.
        compared: of tapes, whether their outputs were the network's own, 0-dim, which nobody has read.
        ways: of each shape of the batches' inputs, how the last batch ran, in words.

    Args:
        run: of the fit, its network tried out with the first batch.
        add: adds a batch to the sums.
        likelihood: of the targets.
        settings: what else decides on what ``add`` does.
        defers: whether the fit is done again where one of ``compared`` is false, so that no batch waits for its comparison.
    """

    def __init__(
        self, run: CurvaturePass, add: Add, likelihood: Likelihood, settings: tuple[Any, ...], defers: bool = False
    ) -> None:
        super().__init__(run, run.all_rules, settings, likelihood)
        self._add, self._likelihood = add, likelihood
        self._checks = not _checks_on_device(type(likelihood))
        self._may_defer = defers and not self._checks
        self.changeless = True
        self.fine: Tensor | None = None
        self.ways: dict[str, str] = {}

    def add(self, x: Inputs, y: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Add a batch; returns its part of the statistic, and the outputs."""
        sums = _Sums(self._run)
        key = self._key(x, [y], None if generator is None else generator.device, tuple(sums.places))
        name = ", ".join(str(tuple(tensor.shape)) for tensor in tensors_of(x))
        if key is None:
            self.changeless, self.ways[name] = False, f"as it is: {self._why_not()}"
            return self._add(x, y, generator, self._checked)
        shapes = self._known.shapes
        if key not in shapes and len(shapes) >= MOST_KINDS:
            shapes.clear()
        shape = shapes.setdefault(key, _Shape())
        plan, kind = None if shape.uses is None else sums.plan(shape), None
        if plan is not None:
            kind = self._kind((key, plan.choices))
            if self._is_due(kind, y.device):
                self._record(kind, plan, x, y, generator, sums)
            if kind.tape is not None and self._can_decide(kind, plan, sums):
                inputs, given = [*tensors_of(x), y], self._of_pass(kind, sums.tensors)
                if self._is_the_network(kind, inputs, given, lambda: self._own(x, y)):
                    found = self._again(kind, plan, inputs, given, generator, sums)
                    if found is not None:
                        self.ways[name] = "recorded"
                        return found
        self.ways[name] = f"as it is: {kind.refused}" if kind is not None and kind.refused else "as it is"
        return self._as_it_is(key, plan, x, y, generator, sums)

    def _why_not(self) -> str:
        """Why no batch like the last is recorded."""
        if self._known is None:
            return "the model has hooks, or another forward than its class"
        return f"layers' outputs of more than {LARGE >> 20} MiB, other devices, or inputs that are no tensors"

    def _checked(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self._likelihood.check(outputs, targets)
        return targets

    def _as_it_is(
        self, key: Any, plan: _Plan | None, x: Inputs, y: Tensor, generator: torch.Generator | None, sums: _Sums
    ) -> tuple[Tensor, Tensor]:
        """Add a batch without a tape, and see what it does to the sums."""
        self.changeless = False
        with sums.watched(samples=False) as watches:
            found = self._add(x, y, generator, self._checked)
        shape, after = self._known.shapes[key], _Sums(self._run)
        if after.places == sums.places:
            shape.uses = [watch.uses for watch in watches]
            now = [moment.are_alike for moment in sums.moments]
            likely = shape.likely or now
            shape.likely = [was if one is None else one for was, one in zip(likely, now, strict=True)]
            if plan is None:
                self._kind((key, _choices(shape.uses))).seen += 1
        return found

    # recording -------------------------------------------------------------------------------------------------------

    def _record(
        self, kind: Kind, plan: _Plan, x: Inputs, y: Tensor, generator: torch.Generator | None, sums: _Sums
    ) -> None:
        run, calls = self._run, dict(self._run.calls)
        before = [(moment.rows, moment.products, moment.are_alike) for moment in sums.moments]
        fine: list[Tensor] = []
        x, y = map_tensors(x, apart), apart(y)  # they may be views of one tensor; the next batch's are others

        def admitted(outputs: Tensor, targets: Tensor) -> Tensor:
            targets, fit = self._likelihood.admitted(outputs, targets)
            fine.append(fit)
            return targets

        def function() -> list[Tensor]:
            statistic, outputs = self._add(x, y, generator, admitted)
            (fit,) = fine
            return [statistic, outputs, fit, *(matrix for watch in watches for matrix in watch.likeness)]

        inputs, staying = [*tensors_of(x), y], [t for (what, _), t in sums.tensors().items() if what != "moment"]
        try:
            with sums.watched(samples=True) as watches:
                for moment, likely in zip(sums.moments, plan.are_alike, strict=True):
                    moment.are_alike = likely
                tape = self._taped(
                    kind, function, inputs, lambda: _Sums(run).tensors(), staying, [0, 1], generator, always=3
                )
            if _Sums(run).places != sums.places:
                raise NotRecordable("a batch gives a factor other sums")
            if _choices([watch.uses for watch in watches]) != plan.choices:
                raise NotRecordable("batches of one shape add other rows")
            kind.decide = {n: len(watch.likeness) for n, watch in enumerate(watches) if watch.likeness}
            kind.rows = [moment.rows - rows for moment, (rows, _, _) in zip(sums.moments, before, strict=True)]
            kind.products = [m.products - products for m, (_, products, _) in zip(sums.moments, before, strict=True)]
            kind.calls = [run.calls[rule] - calls[rule] for rule in run.rules]
            kind.tape = tape
        except Exception as error:  # whatever a mode makes a model raise: the batch runs as it is, with its own errors
            kind.refused = f"{type(error).__name__}: {error}"
        finally:
            run.release()
            run.calls.update(calls)
            sums.restore()
            for moment, counts in zip(sums.moments, before, strict=True):
                moment.rows, moment.products, moment.are_alike = counts

    # running again ---------------------------------------------------------------------------------------------------

    def _own(self, x: Inputs, y: Tensor) -> tuple[Tensor, Tensor]:
        """The statistic and the outputs of the network itself."""
        own = model_outputs(self._run.model, map_tensors(x, Tensor.clone))
        return self._likelihood.statistic(own, self._likelihood.admitted(own, y)[0]), own

    def _is_the_network(
        self, kind: Kind, inputs: Sequence[Tensor], given: Any, own: Callable[[], Sequence[Tensor]]
    ) -> bool:
        """The network's own forward changes nothing where the tape, which has its operators, changes nothing."""
        self.changeless = self.changeless and kind.writes_sums_alone
        self._defers = self._may_defer and kind.writes_sums_alone and has_graphs(inputs[-1].device)
        return super()._is_the_network(kind, inputs, given, own)

    @staticmethod
    def _can_decide(kind: Kind, plan: _Plan, sums: _Sums) -> bool:
        """Whether what data decide on can be found out by the tape, whose batch can be undone."""
        if not plan.asked:
            return True
        undone = kind.writes_sums_alone and not kind.tape.draws_inside
        return undone and kind.decide.keys() >= {*plan.asked} and not any(m.rows or m.products for m in sums.moments)

    def _again(
        self,
        kind: Kind,
        plan: _Plan,
        inputs: Sequence[Tensor],
        given: Any,
        generator: torch.Generator | None,
        sums: _Sums,
    ) -> tuple[Tensor, Tensor] | None:
        """Add a batch by the tape. What data decide on is found out with it; None where that is not what the plan takes for it, and nothing
        is added."""
        self.changeless, y = self.changeless and kind.writes_sums_alone, inputs[-1]
        draws_before = states(y.device, generator) if plan.asked else []
        statistic, outputs, fine, *matrices = self._outputs(kind, inputs, given, generator, bool(plan.asked))
        if plan.asked:
            taken = iter(matrices)
            likeness = {number: tuple(next(taken) for _ in range(count)) for number, count in kind.decide.items()}
            if are_alike([likeness[number] for number in plan.asked]) != [plan.are_alike[n] for n in plan.asked]:
                for moment in sums.moments:
                    moment.total.zero_()
                for its_own, state in draws_before:
                    its_own.set_state(state)
                return None
        if kind in self._graphs:
            self.fine = fine.clone() if self.fine is None else self.fine.logical_and_(fine)
        elif not fine:
            self._likelihood.check(outputs, y)
            raise ValueError(
                f"targets: {type(self._likelihood).__name__}.admitted refuses what its check takes; both must agree."
            )
        if self._checks:
            self._likelihood.check(outputs, y)
        for moment, rows, products, few in zip(sums.moments, kind.rows, kind.products, plan.are_alike, strict=True):
            moment.products, moment.are_alike = moment.products + products, few
            moment.count(rows)
        for rule, calls in zip(self._run.rules, kind.calls, strict=True):
            self._run.calls[rule] += calls
        return statistic, outputs


class _Sums:
    """The sums of a fit as they are.

    Attributes:
        moments: each once. places: of every side of every factor, which of them it is.
    """

    def __init__(self, run: CurvaturePass) -> None:
        self._model, self.moments, self.places = run.model, [], []
        numbers: dict[int, int] = {}
        self._factors = [(f, f.input_moment, f.output_moment) for rule in run.all_rules for f in rule.factors.values()]
        for factor, *_ in self._factors:
            for moment in (factor.input_moment, factor.output_moment):
                if moment is not None and id(moment) not in numbers:
                    numbers[id(moment)] = len(self.moments)
                    self.moments.append(moment)
                self.places.append(numbers.get(id(moment)))

    def restore(self) -> None:
        """Undo that factors got other sums, as a bias does where its layer meets shared positions."""
        for factor, inputs, outputs in self._factors:
            factor.input_moment, factor.output_moment = inputs, outputs

    @contextmanager
    def watched(self, samples: bool) -> Iterator[list[Watch]]:
        """For the duration of the context, what a batch does to the sums is noted."""
        watches = [Watch(samples) for _ in self.moments]
        try:
            for moment, watch in zip(self.moments, watches, strict=True):
                moment.watch = watch
            yield watches
        finally:
            for moment in self.moments:
                moment.watch = None

    def plan(self, shape: _Shape) -> _Plan | None:
        """What the sums do with a batch of this shape; None where that cannot be said."""
        uses = zip(self.moments, shape.uses, shape.likely, strict=True)
        found = [moment.choices(its, likely) for moment, its, likely in uses]
        if any(asked and likely is None for _, likely, asked in found):
            return None
        choices, likely, asked = zip(*found, strict=True) if found else ((), (), ())
        return _Plan(choices, [*likely], [number for number, one in enumerate(asked) if one])

    def tensors(self) -> dict[Name, Tensor]:
        """The tensors that a tape takes from the fit, by name."""
        return {("moment", n): moment.total for n, moment in enumerate(self.moments)} | tensors_of_model(self._model)


class _Graph:
    """A tape with the tensors of one fit as a CUDA graph, which is captured at the second batch.

    Args:
        tape: of the batches.
        given, prepared: see :meth:`Tape.run`.
        graphs: of the device.
    """

    def __init__(self, tape: Tape, given: Sequence[Tensor], prepared: Sequence[Tensor], graphs: CudaGraphs) -> None:
        self._tape, self._of_fit, self._graphs = tape, (given, prepared), graphs
        self._places: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._replay: Callable[[], None] | None = None

    def __call__(
        self, inputs: Sequence[Tensor], generator: torch.Generator | None, all_outputs: bool = False
    ) -> list[Tensor]:
        """The tape's outputs, which the next call writes over; all of them of the first call alone."""
        tensors = [*inputs, *self._tape.draws(generator)]
        if not self._places:
            self._places = [apart(t) for t in tensors]
            work = self._graphs.warm_up
        elif self._replay is None:
            self._replay = recorded_or_told(self._graphs, self._work, "a recorded pass")
        for place, tensor in zip(self._places, tensors, strict=True):
            _fill(place, tensor)
        if self._replay is None:
            work(partial(self._work, all_outputs))
        else:
            self._replay()
        return self._outputs

    def _work(self, all_outputs: bool = False) -> None:
        count = len(self._places) - self._tape.drawn
        inputs, draws = self._places[:count], self._places[count:]
        self._outputs = self._tape.run(inputs, *self._of_fit, draws, all_outputs=all_outputs)


def can_be_again(loader: Iterable[Any], device: torch.device) -> bool:
    """Whether a fit may pass over a loader's data once more, so that its comparisons need not be waited for."""
    return has_graphs(device) and not isinstance(loader, Iterator)


def _choices(uses: Sequence[Sequence[Use]]) -> Choices:
    return tuple(tuple(use.doubled for use in its) for its in uses)


def states(device: torch.device, generator: torch.Generator | None) -> list[tuple[torch.Generator, Tensor]]:
    """The generators that a fit may draw from, and their states."""
    own = [torch.default_generator] if generator is None else [torch.default_generator, generator]
    if device.type == "cuda":
        own.append(torch.cuda.default_generators[device.index or 0])
    return [(one, one.get_state()) for one in own]


def apart(tensor: Tensor) -> Tensor:
    """A copy with the same strides in memory of its own."""
    place = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    _fill(place, tensor)
    return place


def _fill(place: Tensor, tensor: Tensor) -> None:
    """Write a tensor's numbers to a place with the same strides; what is expanded is written once."""
    for dim, stride in enumerate(tensor.stride()):
        if not stride and tensor.shape[dim]:
            place, tensor = place.narrow(dim, 0, 1), tensor.narrow(dim, 0, 1)
    place.copy_(tensor)


def tensors_of_model(model: nn.Module) -> dict[Name, Tensor]:
    """Parameters, buffers and the matrices of bases, by name."""
    found: dict[Name, Tensor] = {("parameter", name): tensor for name, tensor in model.named_parameters()}
    found |= {("buffer", name): tensor for name, tensor in model.named_buffers()}
    bases = {name: module for name, module in model.named_modules() if isinstance(module, SpatialBasis)}
    with torch.no_grad():
        return found | {("basis", name): basis.matrix() for name, basis in bases.items()}


def _named(given: Sequence[Tensor], tensors: Mapping[Name, Tensor]) -> list[Name]:
    """The names of what a pass found there."""
    by_memory: dict[int, dict[Any, Name]] = {}
    for name, tensor in tensors.items():
        by_memory.setdefault(tensor.untyped_storage()._cdata, {})[geometry(tensor)] = name
    names = []
    for tensor in given:
        there = by_memory.get(tensor.untyped_storage()._cdata)
        if there is None:
            raise NotRecordable(f"a pass reads a tensor {tuple(tensor.shape)} that is no parameter and no buffer")
        if (name := there.get(geometry(tensor))) is None:
            of, its = next(iter(there.values()))
            raise NotRecordable(f"a pass reads a view of the {of} {its!r} that was there before")
        names.append(name)
    return names


def _checks_on_device(likelihood: type[Likelihood]) -> bool:
    """Whether ``admitted`` finds what ``check`` finds in values: it does where no subclass defines the latter alone."""
    for kind in likelihood.__mro__:
        if "admitted" in vars(kind):
            return kind is not Likelihood
        if "check" in vars(kind):
            return False
    return False


def _precision() -> tuple[Any, ...]:
    """Settings of torch by which the same operators have other results."""
    return (
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.deterministic,
        torch.get_num_threads(),
    )
