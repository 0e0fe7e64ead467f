"""Gradients of single data points, for parameters that no rule knows and for layers whose output all data points share."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ella_cuda.laplace.batches import Inputs, data_points, map_tensors, model_outputs, take, tensors_of
from ella_cuda.laplace.call import Call, arguments_in_order
from ella_cuda.laplace.check_model import Findings, alike_flag, identical, leaf_uses, led
from ella_cuda.laplace.copies import chunks_of
from ella_cuda.laplace.interception import hooks
from ella_cuda.laplace.kronecker_sums import KroneckerSums
from ella_cuda.laplace.likelihoods import Columns
from ella_cuda.laplace.tangent import OfPoint, ReplacedParameters, Values, by_vmap, differ, one_by_one
from ella_cuda.ops._operator import unwrapped

if TYPE_CHECKING:
    from ella_cuda.laplace.rules import Rule


class PerExampleGradients:
    """The gradients of single data points, of some columns and data points at a time: in parameters that no rule knows, in those that are
    used outside of their layers' calls too, and of layers whose output has no batch axis.

    A data point is a batch of one, so that whatever the forward does with the parameter is differentiated by autograd. Data points and
    columns go together by :func:`torch.func.vmap`, or one after the other where that cannot take the model. A layer without a batch axis has
    the same input for every data point; of a data point's gradient at its output its rule makes rows.

    Args:
        model: in evaluation mode, without hooks of a fit; its parameters and buffers are constants.
        rules: of the modules whose parameters are wanted.
        findings: of a trial of the model, which name the others.

    Attributes:
        together: whether data points and columns go together.
        shared: the rules of layers without a batch axis.
    """

    def __init__(self, model: nn.Module, rules: Sequence[Rule], findings: Findings | None = None) -> None:
        self.model, self.shared = model, [] if findings is None else list(findings.shared)
        self.together = True
        others = {} if findings is None else findings.outside
        self._apart = [(rule, n) for rule in rules for n in rule.trainable]
        self._apart += [(rule, n) for rule, names in others.items() if rule not in self.shared for n in names]
        names = [rule.full_name(name) for rule, name in self._apart]
        self._parameters = ReplacedParameters(model, names)
        self._all = ReplacedParameters(model, names + [r.full_name(n) for r in self.shared for n in r.trainable])
        modules = {rule.module for rule, _ in self._apart}
        # What a module keeps of its parameters in evaluation mode, as attention biases in timm's LeViT, its own train() drops.
        self._keeping = [m for m in modules if type(m).train is not nn.Module.train]
        # Of shared layers, with arguments and the output's shape.
        self._calls: list[tuple[Call, list[Any], torch.Size]] = []

    def try_out(self, x: Inputs) -> None:
        """Compare both ways on two data points; parameters require a gradient as they do in training.

        Raises:
            ValueError: the forward takes a parameter from somewhere else than the modules that have it, or calls a layer without a batch
                axis otherwise for another data point.

        Warns:
            UserWarning: vmap cannot take the model, or takes wrong gradients.
        """
        few = take(x, slice(2))
        self._require_read_from_modules(take(x, slice(1)))
        self._require_shared(few)
        with torch.no_grad():
            outputs = model_outputs(self.model, few)
        generator, kind = torch.Generator("cpu").manual_seed(0), {"dtype": torch.float64, "device": "cpu"}
        columns = torch.randn(2, *outputs.shape, generator=generator, **kind).to(outputs)
        values = self._all.values()
        apart = self._one_by_one(few, columns, values)
        try:
            together = self._by_vmap(few, columns, values)
            reason = "torch.func.vmap takes wrong gradients" if differ(together, apart) else ""
        except Exception as error:  # whatever the model's functions raise under vmap
            reason = f"torch.func.vmap cannot take the model ({' '.join(str(error).split())[:300]})"
        self.together = not reason
        if reason:
            names = ", ".join(list(apart)[:3]) + (", ..." if len(apart) > 3 else "")
            warnings.warn(
                f"fit: {reason}; the gradients of parameters without a rule ({names}) are taken for one data point after the other, which "
                "takes longer.",
                UserWarning,
                stacklevel=5,
            )

    def add(
        self,
        x: Inputs,
        columns: Columns | Tensor,
        column_bytes: int,
        memory_budget: int,
        consumer: KroneckerSums,
        most_copies: int | None = None,
    ) -> None:
        """Have a consumer take the gradients of a batch, of some of the data points and columns at a time.

        Args:
            column_bytes: of the gradients of a column of the whole batch. memory_budget: that gradients may take at a time.
            most_copies: of a data point that are there at a time, where the model averages over copies; None is all.
        """
        self._look_up(x)
        count, own = data_points(x), sum(v.numel() * v.element_size() for v in self._values(True).values())
        self.begin(consumer, count)
        each = max(-(-column_bytes // count), 2 * own)
        pairs = max(memory_budget // each, 1)
        wide = min(len(columns), pairs)
        step = max(pairs // wide, 1) if self.together else 1
        for begin in range(0, len(columns), wide):
            part = columns[begin : begin + wide]
            for first in range(0, count, step):
                some = slice(first, first + step)
                found = self._of_copies(take(x, some), part[:, some], most_copies)
                self.hand_on(consumer, found, begin + wide >= len(columns))

    def begin(self, consumer: KroneckerSums, count: int) -> None:
        """Have a consumer take the calls of shared layers, for so many data points."""
        consumer.begin()
        for call, arguments, shape in self._calls:
            consumer.forward(call, _led(arguments, count, shape))
        consumer.close()

    def hand_on(self, consumer: KroneckerSums, found: Mapping[str, Tensor], data_too: bool) -> None:
        """Have a consumer take gradients ``(K, N, ...)`` in parameters, and at outputs behind :meth:`begin`. ``data_too``: whether columns
        are the last, with which data points are counted."""
        for rule, name in self._apart:
            consumer.add_per_example(rule, name, found[rule.full_name(name)], data_too)
        for number, (call, arguments, shape) in enumerate(self._calls):
            gradient = found[_output(number)]
            one = arguments[0].shape[:1] == shape[:1] == (1,)
            call.kept = call.rule.keep(*_led(arguments, gradient.shape[1], shape))
            consumer.backward(call, gradient[:, :, 0] if one else gradient, False)
        consumer.flush()

    def gradients(self, x: Inputs, columns: Tensor, keep: bool = False, at_outputs: bool = False) -> dict[str, Tensor]:
        """``(K, N, *parameter.shape)`` of every parameter, by name, from columns ``(K, N, *outputs)``, all at once; in the graph of columns
        and of the model's buffers if ``keep``. ``at_outputs``: of shared layers, those for :meth:`hand_on` in the place of parameters'."""
        if at_outputs:
            self._look_up(x)
        return self._found(x, columns, keep, at_outputs)

    def _found(self, x: Inputs, columns: Tensor, keep: bool, at_outputs: bool) -> dict[str, Tensor]:
        values = self._values(at_outputs)
        return self._by_vmap(x, columns, values) if self.together else self._one_by_one(x, columns, values, keep)

    def _values(self, at_outputs: bool) -> Values:
        """What gradients are taken in: parameters, and of shared layers zeros that are added to outputs if ``at_outputs``."""
        if not at_outputs:
            return self._all.values()
        like = next(self.model.parameters())
        zeros = {_output(number): like.new_zeros(shape) for number, (*_, shape) in enumerate(self._calls)}
        return self._parameters.values() | zeros

    def _look_up(self, x: Inputs) -> None:
        """Note the calls of shared layers for the first data point."""
        self._calls = self._calls_on(take(x, slice(1)))

    def _calls_on(self, one: Inputs) -> list[tuple[Call, list[Any], torch.Size]]:
        calls: list[tuple[Call, list[Any], torch.Size]] = []
        known = {rule.module: rule for rule in self.shared}

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
            arguments = arguments_in_order(module, args, kwargs)
            arguments = [a.detach().clone() if isinstance(a, Tensor) else a for a in arguments]
            calls.append((Call(known[module], input_shape=arguments[0].shape), arguments, out.shape))

        if known:
            with hooks(known, after=note, with_kwargs=True), torch.no_grad():
                model_outputs(self.model, one)
        return calls

    def _require_shared(self, few: Inputs) -> None:
        one, other = (self._calls_on(take(few, slice(n, n + 1))) for n in (0, data_points(few) - 1))
        for (call, its, _), (_, others, _) in zip(one, other, strict=False):
            if len(one) != len(other) or len(its) != len(others) or not all(map(identical, its, others)):
                raise self._not_shared(call)

    @staticmethod
    def _not_shared(call: Call) -> ValueError:
        return ValueError(
            f"fit: give the input of {call.rule.label} a batch axis, or freeze the layer with requires_grad_(False): its output has none, "
            "and its input is another one for another data point."
        )

    def _of_copies(self, x: Inputs, columns: Tensor, most: int | None) -> dict[str, Tensor]:
        """:meth:`gradients`, of so many copies at a time."""
        if most is None:
            return self._found(x, columns, False, True)
        total: dict[str, Tensor] = {}
        for some, share in chunks_of(x, most):
            for name, found in self._found(some, columns * share, False, True).items():
                total[name] = total[name] + found if name in total else found
        return total

    def _require_read_from_modules(self, x: Inputs) -> None:
        values = {name: value.requires_grad_() for name, value in self._all.values().items()}
        with torch.enable_grad():
            with self._nothing_kept():
                theirs = leaf_uses(model_outputs(self.model, x).grad_fn)
            replaced = leaf_uses(self._output(values, x).grad_fn)
        for name, parameter in self._all.parameters.items():
            if theirs[id(parameter)] != replaced[id(values[name])]:
                raise ValueError(
                    f"fit: the forward takes the parameter {name!r} from somewhere else than the module that has it, such as a list of its "
                    "own, where no value can be put in its place: gradients of single data points are not to be had. Read it as an attribute "
                    "of the module, or freeze it."
                )

    def _output(self, values: Mapping[str, Tensor], x: Inputs) -> Tensor:
        """The outputs for the only data point of x, with these values."""
        at_outputs = _output(0) in values
        replaced = (self._parameters if at_outputs else self._all).replaced(values)
        with self._nothing_kept(), replaced, self._shifted(values, at_outputs):
            return model_outputs(self.model, x)[0]

    @contextmanager
    def _nothing_kept(self) -> Iterator[None]:
        """The modules compute anew what they keep of their parameters, before the context and after it."""
        modes = {m: m.training for parent in self._keeping for m in parent.modules()}

        def drop() -> None:
            for module in self._keeping:
                module.train(not module.training)
                module.train(not module.training)
            for module, mode in modes.items():
                module.training = mode

        drop()
        try:
            yield
        finally:
            drop()

    @contextmanager
    def _shifted(self, values: Mapping[str, Tensor], at_outputs: bool) -> Iterator[None]:
        """For the duration of the context, the outputs of shared layers have values added if ``at_outputs``."""
        numbers: dict[nn.Module, list[int]] = {}
        for number, (call, *_) in enumerate(self._calls if at_outputs else ()):
            numbers.setdefault(call.rule.module, []).append(number)
        counts: collections.Counter[nn.Module] = collections.Counter()

        def add(module: nn.Module, args: Any, kwargs: Any, out: Tensor) -> Tensor:
            its, at = numbers[module], counts[module]
            counts[module] += 1
            number = its[at % len(its)]  # a checkpoint calls the layer anew
            call, noted, _ = self._calls[number]
            if not all(map(self._is_noted, arguments_in_order(module, args, kwargs), noted)):
                raise self._not_shared(call)
            return out + values[_output(number)]

        with hooks(numbers, after=add, with_kwargs=True):
            yield

    @staticmethod
    def _is_noted(given: Any, noted: Any) -> bool:
        """Whether the argument of a shared layer is that for the first data point. Under vmap the host reads it where the data points are in
        it."""
        if not isinstance(given, Tensor):
            return True
        if given.shape != noted.shape:
            return False
        if torch._C._are_functorch_transforms_active() and not _is_batched(given):
            return True
        same = alike_flag(given, noted) if given.is_floating_point() else (given == noted).all()
        return bool(unwrapped(same).all())

    def _by_vmap(self, x: Inputs, columns: Tensor, values: Values) -> dict[str, Tensor]:
        """Gradients ``(K, N, ...)`` in values from columns ``(K, N, *outputs)``."""
        recording = torch.is_grad_enabled()
        with torch.enable_grad():  # without it a kernel may keep nothing for its backward, as an LSTM's on the CPU
            found = by_vmap(self._of_point(x), values, tensors_of(x), columns)
        return found if recording else {name: gradient.detach() for name, gradient in found.items()}

    def _one_by_one(self, x: Inputs, columns: Tensor, values: Values, keep: bool = False) -> dict[str, Tensor]:
        """:meth:`_by_vmap` by plain autograd, in the graph if ``keep``."""
        return one_by_one(self._of_point(x), values, tensors_of(x), columns, keep)

    def _of_point(self, x: Inputs) -> OfPoint:
        """:meth:`_output` as a function of values and the tensors of a data point of x."""

        def outputs(values: Values, tensors: Sequence[Tensor]) -> Tensor:
            parts = iter(tensors)
            return self._output(values, map_tensors(x, lambda _: next(parts)[None]))

        return outputs


def _is_batched(tensor: Tensor) -> bool:
    """Whether vmap has several of the tensor."""
    functorch = torch._C._functorch
    while not functorch.is_batchedtensor(tensor) and functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return functorch.is_batchedtensor(tensor)


def _output(number: int) -> str:
    """The name of what is added to the output of a shared layer's call."""
    return f"output {number}"


def _led(arguments: Sequence[Any], count: int, out: torch.Size) -> list[Any]:
    return [led(a, count, out) if isinstance(a, Tensor) else a for a in arguments]
