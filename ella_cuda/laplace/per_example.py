"""Gradients of single data points, for parameters that no rule knows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ella_cuda.laplace.batches import Inputs, data_points, map_tensors, model_outputs, take, tensors_of
from ella_cuda.laplace.check_model import leaf_uses
from ella_cuda.laplace.copies import chunks_of
from ella_cuda.laplace.likelihoods import Columns
from ella_cuda.laplace.tangent import OfPoint, ReplacedParameters, Values, by_vmap, differ, one_by_one

if TYPE_CHECKING:
    from ella_cuda.laplace.rules import PerExampleRule


class PerExampleGradients:
    """The gradients that :class:`PerExampleRule` takes, of some columns and data points at a time: in a model in evaluation mode, without
    hooks of a fit, whose parameters and buffers are constants.

    A data point is a batch of one, so that whatever the forward does with the parameter is differentiated by autograd. Data points and
    columns go together by :func:`torch.func.vmap`, or one after the other where that cannot take the model.

    Args:
        model: in evaluation mode, without hooks of a fit; its parameters and buffers are constants.
        rules: of the modules whose parameters are wanted.

    Attributes:
        together: whether data points and columns go together.
    """

    def __init__(self, model: nn.Module, rules: Sequence[PerExampleRule]) -> None:
        self.model, self.rules = model, rules
        self.together = True
        names = [rule.full_name(name) for rule in rules for name in rule.trainable]
        self._parameters = ReplacedParameters(model, names)

    def try_out(self, x: Inputs) -> None:
        """Compare both ways on two data points; parameters require a gradient as they do in training.

        Raises:
            ValueError: the forward takes a parameter from somewhere else than the modules that have it.

        Warns:
            UserWarning: vmap cannot take the model, or takes wrong gradients.
        """
        few = take(x, slice(2))
        self._require_read_from_modules(take(x, slice(1)))
        with torch.no_grad():
            outputs = model_outputs(self.model, few)
        generator, kind = torch.Generator("cpu").manual_seed(0), {"dtype": torch.float64, "device": "cpu"}
        columns = torch.randn(2, *outputs.shape, generator=generator, **kind).to(outputs)
        apart = self._one_by_one(few, columns)
        try:
            together = self._by_vmap(few, columns)
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
        hand_on: Callable[[PerExampleRule, str, Tensor, bool], None],
        most_copies: int | None = None,
    ) -> None:
        """Hand on the gradients of a batch: to ``hand_on`` a rule, the name of a parameter, gradients ``(K, N, *parameter.shape)`` of some of
        the data points and columns, and whether columns are the last.

        Args:
            column_bytes: of the gradients of a column of the whole batch. memory_budget: that gradients may take at a time.
            most_copies: of a data point that are there at a time, where the model averages over copies; None is all.
        """
        count, own = data_points(x), sum(v.numel() * v.element_size() for v in self._parameters.values().values())
        each = max(-(-column_bytes // count), 2 * own)
        pairs = max(memory_budget // each, 1)
        wide = min(len(columns), pairs)
        step = max(pairs // wide, 1) if self.together else 1
        for begin in range(0, len(columns), wide):
            part = columns[begin : begin + wide]
            for first in range(0, count, step):
                some = slice(first, first + step)
                found = self._of_copies(take(x, some), part[:, some], most_copies)
                last_columns = begin + wide >= len(columns)
                for rule in self.rules:
                    for name in rule.trainable:
                        hand_on(rule, name, found[rule.full_name(name)], last_columns)

    def gradients(self, x: Inputs, columns: Tensor, keep: bool = False) -> dict[str, Tensor]:
        """``(K, N, *parameter.shape)`` of every parameter, by name, from columns ``(K, N, *outputs)``, all at once; in the graph of columns
        and of the model's buffers if ``keep``."""
        return self._by_vmap(x, columns) if self.together else self._one_by_one(x, columns, keep)

    def _of_copies(self, x: Inputs, columns: Tensor, most: int | None) -> dict[str, Tensor]:
        """:meth:`gradients`, of so many copies at a time."""
        if most is None:
            return self.gradients(x, columns)
        total: dict[str, Tensor] = {}
        for some, share in chunks_of(x, most):
            for name, found in self.gradients(some, columns * share).items():
                total[name] = total[name] + found if name in total else found
        return total

    def _require_read_from_modules(self, x: Inputs) -> None:
        values = {name: value.requires_grad_() for name, value in self._parameters.values().items()}
        with torch.enable_grad():
            theirs = leaf_uses(model_outputs(self.model, x).grad_fn)
            replaced = leaf_uses(self._output(values, x).grad_fn)
        for name, parameter in self._parameters.parameters.items():
            if theirs[id(parameter)] != replaced[id(values[name])]:
                raise ValueError(
                    f"fit: the forward takes the parameter {name!r} from somewhere else than the module that has it, such as a list of its "
                    "own, where no value can be put in its place: gradients of single data points are not to be had. Read it as an attribute "
                    "of the module, or freeze it."
                )

    def _output(self, values: Mapping[str, Tensor], x: Inputs) -> Tensor:
        """The outputs for the only data point of x, with these values of the parameters."""
        with self._parameters.replaced(values):
            return model_outputs(self.model, x)[0]

    def _by_vmap(self, x: Inputs, columns: Tensor) -> dict[str, Tensor]:
        """``(K, N, *parameter.shape)`` of every parameter from columns ``(K, N, *outputs)``."""
        recording = torch.is_grad_enabled()
        with torch.enable_grad():  # without it a kernel may keep nothing for its backward, as an LSTM's on the CPU
            found = by_vmap(self._of_point(x), self._parameters.values(), tensors_of(x), columns)
        return found if recording else {name: gradient.detach() for name, gradient in found.items()}

    def _one_by_one(self, x: Inputs, columns: Tensor, keep: bool = False) -> dict[str, Tensor]:
        """:meth:`_by_vmap` by plain autograd, in the graph if ``keep``."""
        return one_by_one(self._of_point(x), self._parameters.values(), tensors_of(x), columns, keep)

    def _of_point(self, x: Inputs) -> OfPoint:
        """:meth:`_output` as a function of values and the tensors of a data point of x."""

        def outputs(values: Values, tensors: Sequence[Tensor]) -> Tensor:
            parts = iter(tensors)
            return self._output(values, map_tensors(x, lambda _: next(parts)[None]))

        return outputs
