"""Passes that are recorded, those over a fit's batches first: the operators of one batch's forward pass, columns, backward pass and sums,
run again on others.

What a model was tried for, and the tapes of its batches, are kept as long as the model and its layers are what they were, so that a second
fit does neither again. A tape knows parameters, buffers and sums by name, never by what they hold. In every fit a tape's outputs are compared
with the network's own, once, before the tape adds to a sum. What has no tape runs as it is, by the same code.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ella_cuda.laplace.batches import Inputs, data_points, map_tensors, model_outputs, tensors_of
from ella_cuda.laplace.check_model import alike
from ella_cuda.laplace.known_model import known_of
from ella_cuda.laplace.likelihoods import Likelihood
from ella_cuda.laplace.second_moment import SMALL
from ella_cuda.laplace.tape import NotRecordable, Tape, geometry, record
from ella_cuda.nn import SpatialBasis
from ella_cuda.recording import MAX_SHAPES, CudaGraphs

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


@dataclasses.dataclass(eq=False)
class Kind:
    """Passes over the same shapes in the same state, as of the sums of a fit.

    Attributes:
        seen: how many there were.
        tape: of one; None before it is recorded. names: of the tensors that the tape finds there.
        rows, products, calls: what a batch of a fit adds to the counts of sums and of layers' calls.
        are_alike: of the sums after a batch.
        outputs: the tape of what is compared with the network's own.
        fresh: whether the tape's outputs were compared for no batch but the one that was recorded, of which it may hold numbers.
        refused: why there is no tape, in words.
    """

    seen: int = 0
    tape: Tape | None = None
    names: list[Name] = dataclasses.field(default_factory=list)
    rows: list[int] = dataclasses.field(default_factory=list)
    calls: list[int] = dataclasses.field(default_factory=list)
    products: list[int] = dataclasses.field(default_factory=list)
    are_alike: list[bool | None] = dataclasses.field(default_factory=list)
    outputs: Callable[..., list[Tensor]] | None = None
    fresh: bool = True
    refused: str = ""


class RecordedPasses:
    """Passes over a model that are recorded, each by its kind.

    Args:
        run: whose network is tried out. rules: of the network's layers.
        settings: what else decides on what a pass does.
    """

    def __init__(self, run: LayerPass, rules: Sequence[Rule], settings: tuple[Any, ...]) -> None:
        self._run, self._known = run, known_of(run.model)
        described = [(type(rule), rule.name, rule.trainable, sorted(rule.tied), rule.copies) for rule in rules]
        self._settings = (repr(described), *settings)
        self._verified: set[Kind] = set()
        self._given: dict[Kind, tuple[list[Tensor], Sequence[Tensor]]] = {}
        self._graphs: dict[Kind, _Graph] = {}
        self._device_graphs: CudaGraphs | None = None

    def _kind(self, x: Inputs, beside: Sequence[Tensor], *state: Any) -> Kind | None:
        """That of a pass with inputs and tensors beside them, whose device is that of the first; None of what has none."""
        tensors, device = [*tensors_of(x), *beside], beside[0].device
        others = not isinstance(x, Tensor) and len(tensors) - len(beside) < len(x)
        if self._known is None or others or device.type not in PATIENCE or any(t.device != device for t in tensors):
            return None
        if device.type == "cpu" and self._run.findings.image_bytes * data_points(x) > LARGE:
            return None
        names = tuple(x) if isinstance(x, Mapping) else type(x)
        key = self._settings, names, *((t.shape, t.stride(), t.dtype) for t in tensors), device, *state, _precision()
        kinds = self._kinds
        if key not in kinds and (
            len(kinds) >= MOST_KINDS or sum(k.tape is not None for k in kinds.values()) >= MAX_SHAPES
        ):
            kinds.clear()
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
    ) -> Tape:
        """The tape of a function, for the kind; raises as :func:`record`.

        Args:
            inputs: of the function. generator: that the function draws from.
            tensors: that the function may find there, by name; the function replaces none of them.
            staying: those of them that stay.
            compared: the numbers of the outputs that are to be the network's own.
        """
        before = tensors()
        tape, given = record(function, inputs, generator, staying)
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
        """Whether the tape's outputs are the network's own, compared once. Waits for the device."""
        if kind not in self._verified:
            with torch.no_grad():
                wanted = own()
            if not all(map(alike, kind.outputs(inputs, *given), wanted)):
                kind.tape = None
                kind.refused = "the network's outputs for another batch are not those of the recorded function"
                return False
            if not kind.fresh:
                self._verified.add(kind)
            kind.fresh = False
        return True

    def _outputs(
        self, kind: Kind, inputs: Sequence[Tensor], given: Any, generator: torch.Generator | None = None
    ) -> list[Tensor]:
        """The tape's outputs; on CUDA the next call writes over them."""
        if not has_graphs(inputs[0].device):
            return kind.tape.run(inputs, *given, kind.tape.draws(generator), generator)
        if kind not in self._graphs:
            if self._device_graphs is None:
                self._device_graphs = CudaGraphs(inputs[0].device)
            self._graphs[kind] = _Graph(kind.tape, *given, self._device_graphs)
        return self._graphs[kind](inputs, generator)


class RecordedBatches(RecordedPasses):
    """The batches of one fit.

    Args:
        run: of the fit, its network tried out with the first batch.
        add: adds a batch to the sums.
        likelihood: of the targets.
        settings: what else decides on what ``add`` does.
    """

    def __init__(self, run: CurvaturePass, add: Add, likelihood: Likelihood, settings: tuple[Any, ...]) -> None:
        super().__init__(run, run.all_rules, (repr(sorted(vars(likelihood).items())), type(likelihood), *settings))
        self._add, self._likelihood = add, likelihood
        self._checks = not _checks_on_device(type(likelihood))
        self._fine: Tensor | None = None

    def add(self, x: Inputs, y: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Add a batch; returns its part of the statistic, and the outputs."""
        sums = _Sums(self._run)
        kind = self._kind(x, [y], None if generator is None else generator.device, sums.state())
        if kind is not None:
            if self._is_due(kind, y.device):
                self._record(kind, x, y, generator, sums)
            if kind.tape is not None and sums.are_like_those_of(kind):
                inputs, given = [*tensors_of(x), y], self._of_pass(kind, sums.tensors)
                if self._is_the_network(kind, inputs, given, lambda: self._own(x, y)):
                    return self._again(kind, inputs, given, generator, sums)
        return self._add(x, y, generator, self._checked)

    def finish(self) -> bool:
        """Whether all targets of recorded batches fit the likelihood. Waits for the device."""
        return self._fine is None or bool(self._fine)

    def _checked(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self._likelihood.check(outputs, targets)
        return targets

    # recording -------------------------------------------------------------------------------------------------------

    def _record(self, kind: Kind, x: Inputs, y: Tensor, generator: torch.Generator | None, sums: _Sums) -> None:
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
            return [statistic, outputs, *fine]

        staying = [tensor for (what, _), tensor in sums.tensors().items() if what != "moment"]
        try:
            tape = self._taped(
                kind, function, [*tensors_of(x), y], lambda: _Sums(run).tensors(), staying, [0, 1], generator
            )
            if _Sums(run).places != sums.places:
                raise NotRecordable("a batch gives a factor other sums")
            if not all(
                m.products <= SMALL or products > SMALL
                for m, (_, products, _) in zip(sums.moments, before, strict=True)
            ):
                raise NotRecordable("a sum passes the number of products up to which they are float64's")
            kind.rows = [moment.rows - rows for moment, (rows, _, _) in zip(sums.moments, before, strict=True)]
            kind.products = [m.products - products for m, (_, products, _) in zip(sums.moments, before, strict=True)]
            kind.are_alike = [moment.are_alike for moment in sums.moments]
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

    def _again(
        self, kind: Kind, inputs: Sequence[Tensor], given: Any, generator: torch.Generator | None, sums: _Sums
    ) -> tuple[Tensor, Tensor]:
        (statistic, outputs, fine), y = self._outputs(kind, inputs, given, generator), inputs[-1]
        if has_graphs(y.device):
            self._fine = fine.clone() if self._fine is None else self._fine.logical_and_(fine)
        elif not fine:
            self._likelihood.check(outputs, y)
            raise ValueError(
                f"targets: {type(self._likelihood).__name__}.admitted refuses what its check takes; both must agree."
            )
        if self._checks:
            self._likelihood.check(outputs, y)
        added = zip(sums.moments, kind.rows, kind.products, kind.are_alike, strict=True)
        for moment, rows, products, moment.are_alike in added:
            moment.products += products
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

    def state(self) -> tuple[Any, ...]:
        of_products = tuple((moment.are_alike, moment.products > SMALL) for moment in self.moments)
        return of_products, tuple(self.places)

    def are_like_those_of(self, kind: Kind) -> bool:
        """Whether a batch of the kind has products in the dtypes in which they were recorded."""
        return all(
            m.products > SMALL or m.products + more <= SMALL
            for m, more in zip(self.moments, kind.products, strict=True)
        )

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

    def __call__(self, inputs: Sequence[Tensor], generator: torch.Generator | None) -> list[Tensor]:
        """The tape's outputs, which the next call writes over."""
        tensors = [*inputs, *self._tape.draws(generator)]
        if not self._places:
            self._places = [apart(t) for t in tensors]
            work = self._graphs.warm_up
        elif self._replay is None:
            self._replay = self._captured()
        for place, tensor in zip(self._places, tensors, strict=True):
            _fill(place, tensor)
        if self._replay is None:
            work(self._work)
        else:
            self._replay()
        return self._outputs

    def _captured(self) -> Callable[[], None]:
        try:
            return self._graphs.record(self._work)
        except RuntimeError as error:
            warnings.warn(
                f"a recorded pass cannot be captured as a CUDA graph ({error}); its operators run one by one.",
                stacklevel=2,
            )
            return self._work

    def _work(self) -> None:
        count = len(self._places) - self._tape.drawn
        self._outputs = self._tape.run(self._places[:count], *self._of_fit, self._places[count:])


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


def has_graphs(device: torch.device) -> bool:
    """Whether work on a device can be recorded as a graph."""
    return device.type == "cuda"


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
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.deterministic,
        torch.get_num_threads(),
    )
