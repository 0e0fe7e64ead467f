"""A training of several processes: each has a slice of every batch, and all make the same steps on the same weights."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from ella_cuda.digest import tensors_digest
from ella_cuda.distributed import Ranks, require_whole, slice_of
from ella_cuda.laplace import KronLaplace
from ella_cuda.laplace.batches import (
    DictKeys,
    Inputs,
    checked_outputs,
    data_points,
    kept,
    pair_of,
    pair_on,
    run_model,
    take,
)
from ella_cuda.laplace.distributed_fit import rounded
from ella_cuda.laplace.evidence import set_values
from ella_cuda.laplace.fingerprint import fingerprint_of
from ella_cuda.ops._precision import casting_anew, without_autocast
from ella_cuda.training.checkpoint import plain, random_state, restore_random_state
from ella_cuda.training.learners import Learner, Prior
from ella_cuda.training.points import Points
from ella_cuda.training.step import TrainingStep, what_is_not_finite

LOSS, CORRECT, COUNTED, FAILED, LAST = range(5)  # what follows the gradients in a step's sum
Part = tuple[Inputs, Tensor, int]  # a rank's inputs and targets, and how many data points the batch has on all ranks


class OneProcess:
    """A process that trains alone, with what :class:`Ranks` has of several."""

    group, rank, size, is_first = None, 0, 1, True

    def together(self, work: Callable[[], Any]) -> Any:
        return work()

    def exchange(self, value: Any) -> list[Any]:
        return [value]

    def from_first(self, value: Any) -> Any:
        return value


Processes = Ranks | OneProcess


def all_raise_together(make: Callable[..., None]) -> Callable[..., None]:
    """The trainer's constructor, after which no rank goes on where another's has raised, or its arguments or data are others."""

    @functools.wraps(make)
    def made(self: Any, *args: Any, group: Any = None, **kwargs: Any) -> None:
        if group is None:
            make(self, *args, group=OneProcess(), **kwargs)
            return
        ranks = Ranks(group, "marglik_training")
        ranks.together(lambda: make(self, *args, group=ranks, **kwargs))
        settings = ranks.together(self.described_settings)
        found = ranks.exchange({name: json.dumps(value, default=str) for name, value in settings.items()})
        ranks.require_same_facts(found, "Pass all ranks the same arguments and data.")
        given = ranks.exchange([kwargs.get(name) is not None for name in ("checkpoint", "on_evaluation")])
        checkpoints, callbacks = zip(*given, strict=True)
        if any(checkpoints) and not checkpoints[0]:
            raise ValueError(
                f"marglik_training: checkpoint must be given on rank 0, which writes it, but rank {checkpoints.index(True)} of {ranks.size} "
                "has one and rank 0 has none. Pass it on rank 0, or on all ranks."
            )
        if any(callbacks) and callbacks.index(True) != ranks.rank:
            self._on_evaluation = None

    return made


def require_served(model: nn.Module, loaders: Iterable[Any], cuda_graph: bool, ranks: Ranks) -> None:
    """ValueError where several processes would train another network than one, or cannot."""
    if cuda_graph:
        raise ValueError(
            "marglik_training: cuda_graph must be False with a group: a step waits for the other ranks, which a graph cannot record. Leave "
            "out one of the two."
        )
    for loader in loaders:
        require_whole(loader, ranks.size, "marglik_training: a loader")
    for name, module in model.named_modules():
        tracks = isinstance(module, _InstanceNorm) and module.track_running_stats
        if ranks.size > 1 and (isinstance(module, _BatchNorm) or tracks):
            raise ValueError(
                f"marglik_training: with a group a layer must not depend on what else is in a batch, of which a rank has a slice, but "
                f"{name!r} is a {type(module).__name__}, whose statistics would be the slice's. Use torch.nn.GroupNorm or LayerNorm, "
                "or train in one process."
            )


# random numbers, learners ---------------------------------------------------------------------------------------------


def own_random_state(loaders: Iterable[Any], device: torch.device, ranks: Processes) -> dict[str, Any]:
    """:func:`random_state`; of several ranks, with the generator of this device alone among those of CUDA: ranks have other numbers of
    devices."""
    state = random_state(loaders)
    if ranks.group is None:
        return state
    return state | {"cuda": [torch.cuda.get_rng_state(device)] if state["cuda"] and device.type == "cuda" else []}


def restore_own_random_state(
    state: dict[str, Any], loaders: Iterable[Any], device: torch.device, ranks: Processes
) -> None:
    if ranks.group is None:
        restore_random_state(state, loaders)
        return
    restore_random_state(state | {"cuda": []}, loaders)
    if state["cuda"] and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"][0], device)


def share_random_state(loaders: Iterable[Any], device: torch.device, ranks: Processes) -> None:
    """Have all generators be where rank 0's are."""
    if ranks.group is None:
        return
    state = ranks.from_first(own_random_state(loaders, device, ranks))
    if not ranks.is_first:
        restore_own_random_state(state, loaders, device, ranks)


def share_learners(learners: Iterable[Learner], ranks: Processes) -> None:
    """Have what learners learned, and go on from, be rank 0's."""
    if ranks.group is None:
        return
    learners = list(learners)
    own = [[learner.state_dict(), {n: t.detach() for n, t in learner.tensors().items()}] for learner in learners]
    for learner, (state, tensors) in zip(learners, ranks.from_first(plain(own)), strict=True):
        if not ranks.is_first:
            with torch.no_grad():
                for name, tensor in learner.tensors().items():
                    tensor.copy_(tensors[name])
            learner.load_state_dict(state)


def step_together(la: KronLaplace, prior: Prior, learners: Iterable[Learner], ranks: Processes) -> None:
    """One evidence step of the prior, and of other learners outside of the network, on la, whose values are the prior's then."""
    ranks.together(lambda: [learner.step(la, {}) for learner in learners])
    if ranks.group is not None:
        share_learners(learners, ranks)
        set_values(la, prior.precision(), prior.sigma(), checked=True)


def without_cuda(state: Mapping[str, Any], ranks: Processes) -> Mapping[str, Any]:
    """A training's state, of several ranks without the generators of CUDA where it goes on."""
    if ranks.group is None:
        return state
    random = state.get("random")
    return {**state, "random": {**random, "cuda": []} if isinstance(random, dict) else random}


def require_same_gradients(found: Mapping[Learner, Mapping[str, Tensor] | None], ranks: Processes) -> None:
    """ValueError where a learner's gradients are those of a rank's own part of the data."""
    if ranks.group is None:
        return
    for learner, gradients in found.items():
        sums = ranks.exchange({name: float(g.double().norm()) for name, g in (gradients or {}).items()})
        for name, value in sums[0].items():
            if not all(math.isclose(one[name], value, rel_tol=1e-6, abs_tol=1e-300) for one in sums):
                raise ValueError(
                    f"marglik_training: the gradients of the learner {learner.name!r} must be the same on all ranks, but those in {name!r} "
                    "differ: its loader has a rank's part of the data alone. Sum over loader.group what gradients returns "
                    "(ella_cuda.laplace.evidence_gradient(la, loader, group=loader.group) does)."
                )


# steps on the weights -------------------------------------------------------------------------------------------------


class StepTogether:
    """A :class:`TrainingStep` whose batch is spread over ranks. Its only collective is one sum: of the gradients of the ranks' parts of
    the loss, the loss, the numbers of correct and counted targets, and whether a rank failed or has seen the epoch's last batch.
    """

    def __init__(self, step: TrainingStep, ranks: Ranks) -> None:
        self.step, self.ranks = step, ranks
        parameters = step.parameters
        dtype = max((p.dtype for p in parameters), key=lambda dtype: torch.finfo(dtype).bits)
        sizes = [p.numel() for p in parameters]
        self._flat = torch.zeros(sum(sizes) + 5, dtype=dtype, device=parameters[0].device)
        *pieces, self._tail = self._flat.split([*sizes, 5])
        self._views = [piece.view_as(p) for piece, p in zip(pieces, parameters, strict=True)]

    def __call__(self, part: Part | None, last: bool, error: Exception | None, penalty: float, where: str) -> bool:
        """One step; returns whether the batch was the epoch's last.

        Args:
            part: of this rank; its own data points may be none. None where ``error`` came in their place.
            last: whether this rank's loader has no more.
            error: what this rank raised since the last step.
            penalty: the prior's part of the objective.
            where: epoch and step, for messages.

        Raises:
            What one rank raises, on all, naming it. ValueError: ranks' loaders end apart.
        """
        self._flat.zero_()
        if error is None:
            try:
                self._add(*part)
            except Exception as raised:
                self._flat.zero_()
                error = raised
        self._tail[FAILED], self._tail[LAST] = float(error is not None), float(last)
        self.ranks.sum_(self._flat)
        loss, correct, counted, failed, ended = self._tail.tolist()
        if failed:
            self.ranks.agree(error)
        if not math.isfinite(loss + penalty):
            self.ranks.together(lambda: self._require_finite(part, penalty, where))
            raise FloatingPointError(
                f"marglik_training: the ranks' losses are finite at {where}, and their sum with the prior's part, {loss + penalty}, is not. "
                "Lower the learning rate or raise prior_prec_init."
            )
        self._move(loss, correct, counted)
        if ended not in (0, self.ranks.size):
            raise ValueError(
                f"marglik_training: train_loader must yield the same batches on all ranks, but at {where} it ended on {int(ended)} of "
                f"{self.ranks.size}. Give all ranks the same loader of the same data."
            )
        return bool(ended)

    def _add(self, x: Inputs, y: Tensor, count: int) -> None:
        """The gradients of this rank's part of the loss, and its share of the sums."""
        own = data_points(x)
        if not own:
            return
        step = self.step
        device = step.variance.device.type
        with casting_anew(device):
            outputs = checked_outputs(run_model(step.model, x), own)
        with without_autocast(device):
            y = step.checked(outputs, y)
            loss = step.likelihood.loss(outputs, y, step.variance)
            step.optimizer.zero_grad(set_to_none=True)
            (loss * (own / count)).backward()
        with torch.no_grad():
            there = [(v, p.grad) for v, p in zip(self._views, step.parameters, strict=True) if p.grad is not None]
            torch._foreach_copy_([view for view, _ in there], [gradient for _, gradient in there])
            self._tail[LOSS] = loss * own
            if step.likelihood.has_classes:
                self._tail[CORRECT], self._tail[COUNTED] = step.likelihood.hits(outputs, y)

    def _require_finite(self, part: Part, penalty: float, where: str) -> None:
        """FloatingPointError where this rank's own part of the loss is not finite."""
        x, y, _ = part
        if not len(y):
            return
        with torch.no_grad(), casting_anew(self.step.variance.device.type):
            own = float(self.step.likelihood.loss(run_model(self.step.model, x), y, self.step.variance))
        if not math.isfinite(own):
            raise FloatingPointError(
                f"marglik_training: the loss is {own + penalty} at {where}; {what_is_not_finite(self.step.model, x, y)}. The last "
                "checkpoint, if any, is from before this epoch."
            )

    def _move(self, loss: float, correct: float, counted: float) -> None:
        step = self.step
        with torch.no_grad():
            for parameter, view in zip(step.parameters, self._views, strict=True):
                parameter.grad = view.to(parameter.dtype)
            step.add_prior()
            step.total.add_(loss)
            step.correct.add_(correct)
            step.counted.add_(counted)
        step.move()


def train_epoch_together(
    together: StepTogether,
    loader: Iterable[Any],
    keys: DictKeys,
    points: Points,
    scheduler: Any,
    prior: Prior,
    epoch: int,
) -> tuple[float, float | None]:
    """As :func:`ella_cuda.training.epoch.train_epoch`, of all ranks together, each with its slice of every batch."""
    step, ranks = together.step, together.ranks
    step.model.train()
    penalty = step.begin_epoch(prior.of_parameters(), float(prior.sigma().detach()), points.count)
    device = step.parameters[0].device
    parts: Iterator[tuple[Part, str | None]] = iter(())
    following, error, digest = None, None, None
    try:
        parts = _parts(loader, keys, device, ranks)
        following = next(parts, None)
        digest = None if following is None else following[1]
    except Exception as raised:
        error = raised
    headers = ranks.agree(error, batch=digest, fingerprint=float(fingerprint_of(step.model)))
    ranks.require_same(
        rounded([one["fingerprint"] for one in headers]),
        "parameters and buffers",
        "Seed all ranks alike before the model is made, or load one state on all; buffers must not follow from a rank's own data.",
    )
    ranks.require_same(
        [one["batch"] for one in headers],
        "first batch of train_loader",
        "Give all ranks the same loader of the same data, whose order follows from generators alone.",
    )
    if following is None:
        raise ValueError(
            f"marglik_training: train_loader yielded no data in epoch {epoch}; every epoch iterates over it anew. Check its data set and "
            "drop_last, and that its __iter__ starts a new pass."
        )
    seen = done = 0
    last = False
    while not last:
        part = None
        if error is None:
            (part, _), following = following, None
            try:
                seen += part[2]
                points.require_at_most(seen)
                following = next(parts, None)
            except Exception as raised:
                error = raised
        done += 1
        last = together(part, following is None, error, penalty, f"epoch {epoch}, step {done}")
        if scheduler is not None:
            scheduler.step()
    points.require(seen)
    loss, accuracy = step.epoch_means(seen)
    return loss + penalty, accuracy


def _parts(
    loader: Iterable[Any], keys: DictKeys, device: torch.device, ranks: Ranks
) -> Iterator[tuple[Part, str | None]]:
    """This rank's part of every batch that has data points, with a digest of the first batch's targets. Parts are copies: the next one is
    taken before a step on this one."""
    where, first = "marglik_training (train_loader)", True
    if callable(getattr(loader, "parts", None)):
        for x, y, count in loader.parts(ranks.rank, ranks.size):
            if count:
                yield (*kept(pair_on((x, y), device, where, keys)), count), str(count) if first else None
                first = False
        return
    for batch in loader:
        x, y = pair_of(batch, where, keys)
        if data_points(x) != len(y):  # slices of both could fit each other
            raise ValueError(
                f"{where}: a batch must have a target for each data point, got {data_points(x)} and {len(y)}."
            )
        if not len(y):
            continue
        mine = slice_of(len(y), ranks.rank, ranks.size)
        part = kept(pair_on((take(x, mine), y[mine]), device, where, keys))
        yield (*part, len(y)), tensors_digest(y) if first else None
        first = False
