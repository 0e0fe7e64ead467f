"""Predictions that are recorded, see :mod:`ella_cuda.laplace.recorded_batches`: the precisions of posteriors are inputs of a tape, the
tensors that all posteriors of a fit have stay."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ella_cuda.laplace.batches import Inputs, data_points, map_tensors, model_outputs, take, tensors_of
from ella_cuda.laplace.known_model import known_of
from ella_cuda.laplace.likelihoods import unit_columns
from ella_cuda.laplace.recorded_batches import Kind, Name, RecordedPasses, apart, tensors_of_model

if TYPE_CHECKING:
    from ella_cuda.laplace.fitted_model import FittedModel
    from ella_cuda.laplace.jacobian_pass import JacobianPass
    from ella_cuda.laplace.posterior import Posterior

# (run, x, posteriors, joint, diagonal) -> mean and covariances
Moments = Callable[["JacobianPass", Inputs, Sequence["Posterior"], bool, bool], list[Tensor]]


class _How(NamedTuple):
    """What is asked of a pass."""

    posteriors: Sequence[Posterior]
    joint: bool
    diagonal: bool

    def state(self) -> tuple[Any, ...]:
        return type(self.posteriors[0]), len(self.posteriors), self.joint, self.diagonal


class RecordedPredictions(RecordedPasses):
    """The passes of one fit's predictions.

    Args:
        run: of the fit.
        model: of the fit.
        moments: the outputs ``(N, ...)``, and their covariances under each of several posteriors, by a pass.
    """

    def __init__(self, run: JacobianPass, model: FittedModel, moments: Moments) -> None:
        super().__init__(run, run.all_rules, ())
        self.run, self._model, self._moments = run, model, moments
        self._of_fit: dict[Any, Kind] = {}
        self._steps: dict[Any, int] = {}
        self._found: list[tuple[int, Tensor]] = []  # what tapes read beside their inputs, and where it was

    @property
    def _kinds(self) -> dict[Any, Kind]:
        return self._of_fit

    def __call__(self, x: Inputs, posteriors: Sequence[Posterior], joint: bool, diagonal: bool) -> list[Tensor]:
        """What ``moments`` gives, of as many data points at a time as there is room for, and with ``joint`` of all."""
        count = data_points(x)
        if not count:
            with self.run.running():
                return self._moments(self.run, x, posteriors, joint, diagonal)
        self._look_at(posteriors[0])
        how = _How(posteriors, joint, diagonal)
        step = count if joint else self._step(x, how)
        parts = [take(x, slice(begin, begin + step)) for begin in range(0, count, step)]
        found = [self._part(part, how) for part in parts]
        return found[0] if len(found) == 1 else [torch.cat(of_parts) for of_parts in zip(*found, strict=True)]

    def _step(self, x: Inputs, how: _How) -> int:
        """How many data points go together."""
        rows = sum(posterior.row_bytes for posterior in how.posteriors)
        names = tuple(x) if isinstance(x, Mapping) else type(x)
        inputs = [(t.shape[1:], t.dtype) for t in tensors_of(x)]
        key = self._settings, names, *inputs, rows, how.diagonal, self.run.memory_budget
        steps = self._steps if self._known is None else self._known.steps
        if key not in steps:
            with self.running(x):
                one = take(x, slice(1))
                steps[key] = self.run.step(one, lambda f, _: unit_columns(f), rows, how.diagonal)
        return steps[key]

    @contextmanager
    def running(self, x: Inputs) -> Iterator[JacobianPass]:
        """The pass, :meth:`JacobianPass.running`, whose network is tried out."""
        with self.run.running():
            if not self.run.tried_out:
                self.run.try_out(x, several=True)
            yield self.run

    def _part(self, x: Inputs, how: _How) -> list[Tensor]:
        own = [tensor for posterior in how.posteriors for tensor in posterior.own()]
        inputs, tensors = [*tensors_of(x), *own], partial(self._tensors, how.posteriors[0])
        key = self._key(x, own, *how.state(), self.run.memory_budget, frozenset(self._model.filled))
        kind = None if key is None else self._kind(key)
        if kind is not None and kind.tape is not None and kind in self._verified:
            return self._again(kind, inputs, self._of_pass(kind, tensors))
        with self.running(x):
            if kind is not None:
                if self._is_due(kind, own[0].device):
                    self._record(kind, x, how)
                if kind.tape is not None:
                    given = self._of_pass(kind, tensors)
                    if self._is_the_network(kind, inputs, given, lambda: [self._own(x)]):
                        return self._again(kind, inputs, given)
            return self._moments(self.run, x, *how)

    def _own(self, x: Inputs) -> Tensor:
        """The outputs of the network itself."""
        return model_outputs(self.run.model, map_tensors(x, Tensor.clone))

    def _look_at(self, posterior: Posterior) -> None:
        """Forget the tapes of a model that has changed, and what was made of tensors that are elsewhere now."""
        known, model = known_of(self.run.model), self.run.model
        if known is not self._known:
            self._of_fit.clear()
            self._steps.clear()
        found = [(t.data_ptr(), t) for t in (*model.parameters(), *model.buffers(), *posterior.held())]
        before, self._found = self._found, found
        same = len(found) == len(before) and all(
            p == q and t is u for (p, t), (q, u) in zip(found, before, strict=True)
        )
        if known is not self._known or not same:
            for each in (self._verified, self._given, self._graphs):
                each.clear()
        self._known = known

    def _tensors(self, posterior: Posterior) -> dict[Name, Tensor]:
        return tensors_of_model(self.run.model) | {("posterior", n): t for n, t in enumerate(posterior.held())}

    def _record(self, kind: Kind, x: Inputs, how: _How) -> None:
        x, own = map_tensors(x, apart), [[apart(t) for t in posterior.own()] for posterior in how.posteriors]

        def function() -> list[Tensor]:
            others = [posterior.of(its) for posterior, its in zip(how.posteriors, own, strict=True)]
            return self._moments(self.run, x, others, how.joint, how.diagonal)

        tensors = partial(self._tensors, how.posteriors[0])
        before = tensors()
        staying = [t for (what, name), t in before.items() if what != "buffer" or self._model.holds(name, t)]
        try:
            kind.tape = self._taped(kind, function, [*tensors_of(x), *itertools.chain(*own)], tensors, staying, [0])
        except Exception as error:  # whatever a mode makes a model raise: the pass runs as it is, with its own errors
            kind.refused = f"{type(error).__name__}: {error}"
        finally:
            self.run.release()

    def _again(self, kind: Kind, inputs: Sequence[Tensor], given: Any) -> list[Tensor]:
        outputs = self._outputs(kind, inputs, given)
        return [t.clone() for t in outputs] if kind in self._graphs else outputs
