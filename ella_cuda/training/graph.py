"""Steps on the weights as CUDA graphs, so that the GPU does not wait for Python between small kernels."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ella_cuda.laplace.batches import Inputs, map_tensors, shapes_of, tensors_of
from ella_cuda.recording import MAX_SHAPES, CudaGraphs
from ella_cuda.training.step import TrainingStep


@dataclasses.dataclass
class _Recorded:
    """A step's graph and the tensors that it reads its batch from."""

    x: Inputs
    y: Tensor
    replay: Callable[[], None]


class GraphedStep:
    """A :class:`TrainingStep` recorded once for each shape of batch, from its second batch on.

    Nothing is read back from the device: at the end of an epoch the step's sums say whether all losses were finite, and
    :meth:`labels_were_classes` the rest.

    Raises:
        ValueError: the optimizer cannot be recorded.
    """

    def __init__(self, step: TrainingStep, graphs: CudaGraphs) -> None:
        self._step, self._graphs, groups = step, graphs, step.optimizer.param_groups
        if not all("capturable" in group for group in groups):
            raise ValueError(
                "marglik_training: cuda_graph=True needs an optimizer that has the option capturable, such as torch.optim.Adam; got "
                f"{type(step.optimizer).__name__}. Pass cuda_graph=False, or another optimizer_cls."
            )
        device = step.parameters[0].device
        self._classes = torch.ones((), dtype=torch.bool, device=device)
        self._rates = [torch.zeros((), dtype=torch.float32, device=device) for _ in groups]  # what the graphs read
        self._rates_set: list[float | None] = [None] * len(groups)
        self.forget()

    def forget(self) -> None:
        """Drop the graphs: tensors that they read are to be replaced."""
        self._graphs.begin_anew()
        self._step.optimizer.zero_grad(set_to_none=True)  # the gradients lie in the graphs' memory
        self._seen: set[Any] = set()
        self._recorded: dict[Any, _Recorded] = {}
        self._options: list[dict[str, Any]] | None = None

    def begin_epoch(self) -> None:
        self._classes.fill_(True)

    def labels_were_classes(self) -> bool:
        """Whether all labels since the epoch's begin were classes. Waits for the device."""
        return bool(self._classes)

    def __call__(self, x: Inputs, y: Tensor) -> None:
        """One step on a batch; see :class:`TrainingStep`.

        Raises:
            TypeError: an argument of the model is no tensor.
            ValueError: a schedule changed another option of the optimizer than the learning rate.
            RuntimeError: the step cannot be recorded.
        """
        if self._options is None:
            self._options = self._present_options()
        names = tuple(x) if isinstance(x, dict) else None
        key = (names, *((t.shape, t.dtype) for t in (*tensors_of(x), y)))
        if not isinstance(x, Tensor) and len(tensors_of(x)) < len(x):
            raise TypeError(
                "marglik_training: cuda_graph=True needs batches whose inputs are tensors alone, for a recorded step reads nothing else, got "
                f"{type(x).__name__} with {len(x) - len(tensors_of(x))} other(s) beside the tensors {shapes_of(x)}; leave these out of the "
                "batch, or pass cuda_graph=False."
            )
        recorded = self._recorded.get(key)
        if recorded is None:
            if key not in self._seen or len(self._recorded) == MAX_SHAPES:
                self._seen.add(key)
                self._graphs.warm_up(lambda: self._run(x, y, self._step.checked))
                return
            recorded = self._recorded[key] = self._record(x, y)
        if self._options != self._present_options():
            raise ValueError(
                "marglik_training: with cuda_graph=True a schedule may change the learning rate alone, but other options of the optimizer "
                "have changed since the first step. Pass cuda_graph=False, or another scheduler_cls (for OneCycleLR and CyclicLR "
                "cycle_momentum=False)."
            )
        for place, given in zip((*tensors_of(recorded.x), recorded.y), (*tensors_of(x), y), strict=True):
            place.copy_(given)
        for i, group in enumerate(self._step.optimizer.param_groups):
            rate = float(group["lr"])
            if rate != self._rates_set[i]:
                self._rates[i].fill_(rate)
                self._rates_set[i] = rate
        recorded.replay()

    def _run(self, x: Inputs, y: Tensor, checked: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._step(x, y, checked, lambda loss: None)

    def _note_labels(self, outputs: Tensor, y: Tensor) -> Tensor:
        """y with targets that fit the likelihood in the place of those that do not, which are noted; a batch of this shape was checked in
        full before."""
        inside, fit = self._step.likelihood.admitted(outputs, y)
        self._classes.logical_and_(fit)
        return inside

    def _record(self, x: Inputs, y: Tensor) -> _Recorded:
        place, labels = map_tensors(x, torch.empty_like), torch.empty_like(y)
        handled = sys.exc_info()[1]  # by whoever trains, no matter of ours
        with self._capturable():
            try:
                replay = self._graphs.record(lambda: self._run(place, labels, self._note_labels))
            except (AssertionError, RuntimeError) as error:
                hidden = None if error.__suppress_context__ else error.__context__
                # A capture that cannot end hides why.
                words = str(error) if hidden in (None, handled) else f"{hidden}; {error}"
                raise RuntimeError(
                    f"marglik_training: a step of this model on batches {shapes_of(x)} cannot be recorded as a CUDA graph ({words}). "
                    "What the model does must not depend on values, nor read any back. In a new process, pass cuda_graph=False."
                ) from error
        return _Recorded(place, labels, replay)

    @contextmanager
    def _capturable(self) -> Iterator[None]:
        """The optimizer with its rates and single numbers on the device; outside of the context it is as its owner made it."""
        optimizer = self._step.optimizer
        for parameter, state in optimizer.state.items():
            for key, value in state.items():  # the count of steps, and what NAdam multiplies up
                if isinstance(value, Tensor) and value.dim() == 0:
                    state[key] = value.to(parameter.device)
        before = [(group["capturable"], group["lr"]) for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["capturable"], group["lr"] = True, rate
        try:
            yield
        finally:
            for group, (capturable, rate) in zip(optimizer.param_groups, before, strict=True):
                group["capturable"], group["lr"] = capturable, rate

    def _present_options(self) -> list[dict[str, Any]]:
        groups = self._step.optimizer.param_groups
        return [{key: value for key, value in group.items() if key not in ("params", "lr")} for group in groups]
