"""Arguments of a training in four groups, each declared and checked once; :func:`ella_cuda.marglik_training` documents them."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from ella_cuda.laplace.batches import DEFAULT_KEYS
from ella_cuda.laplace.kron import FISHERS
from ella_cuda.laplace.likelihoods import IGNORED
from ella_cuda.laplace.parameters import check_choice
from ella_cuda.laplace.prior_structure import STRUCTURES, PriorStructure
from ella_cuda.laplace.rules import UNKNOWN
from ella_cuda.laplace.rules.base import APPROXIMATIONS, RESOLUTIONS
from ella_cuda.training.checks import positive, whole
from ella_cuda.training.learners import HYPER_OPTIMIZERS, STEP_LIMIT, HyperOptimizer, Learner, learner_arguments

Objective = Literal["evidence", "map"]
Keep = Literal["last", "best"]


class _Checked:
    """A group of arguments, put to what their checks return."""

    def _choose(self, **choices: tuple[str, ...]) -> None:
        for name, known in choices.items():
            object.__setattr__(self, name, check_choice(f"marglik_training: {name}", getattr(self, name), known))

    def _count(self, minimum: int, *names: str) -> None:
        for name in names:
            if getattr(self, name) is not None:
                object.__setattr__(self, name, whole(name, getattr(self, name), minimum))

    def _positive(self, *names: str) -> None:
        for name in names:
            object.__setattr__(self, name, positive(name, getattr(self, name)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps(_Checked):
    """The steps on the weights, and when evidence steps come between them."""

    objective: Objective = "evidence"
    optimizer_cls: Callable[..., torch.optim.Optimizer] = torch.optim.Adam
    optimizer_kwargs: dict[str, Any] | None = None
    scheduler_cls: type[torch.optim.lr_scheduler.LRScheduler] | None = None
    scheduler_kwargs: dict[str, Any] | None = None
    n_epochs: int = 300
    n_epochs_burnin: int = 0
    marglik_frequency: int = 1
    evidence_batch: int | None = None
    keep: Keep = "last"
    cuda_graph: bool = False

    def __post_init__(self) -> None:
        self._choose(objective=get_args(Objective), keep=get_args(Keep))
        self._count(1, "n_epochs", "marglik_frequency", "evidence_batch")
        self._count(0, "n_epochs_burnin")
        if self.evidence_batch is not None and self.keep == "best":
            raise ValueError(
                "marglik_training: keep must be 'last' with evidence_batch: evidences of different data points do not say which step is best."
            )

    @property
    def schedule(self) -> dict[str, Any]:
        """What decides when evidence steps come, by argument."""
        names = ("objective", "n_epochs", "n_epochs_burnin", "marglik_frequency")
        subsets = {} if self.evidence_batch is None else {"evidence_batch": self.evidence_batch}
        return {name: getattr(self, name) for name in names} | subsets

    @property
    def before_the_last(self) -> int:
        """How many evidence steps come before the last epoch."""
        if self.objective == "map":
            return 0
        return max((self.n_epochs - 1) // self.marglik_frequency - self.n_epochs_burnin // self.marglik_frequency, 0)

    def check_schedule(self, learn: Sequence[Any]) -> None:
        """ValueError where the evidence steps that the arguments ask for never come."""
        if self.objective != "evidence":
            return
        if self.n_epochs_burnin >= self.n_epochs:
            raise ValueError(
                f"marglik_training: n_epochs_burnin must be less than n_epochs, or no evidence step is done; got {self.n_epochs_burnin} and "
                f"{self.n_epochs}. For training without evidence steps pass objective='map'."
            )
        if learn and not self.before_the_last:
            raise ValueError(
                f"marglik_training: learn={learn!r} needs an evidence step after n_epochs_burnin = {self.n_epochs_burnin} and before the "
                f"last epoch, {self.n_epochs}; with marglik_frequency = {self.marglik_frequency} there is none."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PriorOptions(_Checked):
    """The prior's precisions, the noise, and how evidence steps move them."""

    prior_structure: PriorStructure = "layerwise"
    prior_prec_init: float = 1.0
    sigma_noise_init: float = 1.0
    fix_sigma_noise: bool = False
    hyper_optimizer: HyperOptimizer = "adam"
    hyper_step_limit: float | None = STEP_LIMIT
    lr_hyp: float = 0.1
    n_hypersteps: int = 10

    def __post_init__(self) -> None:
        self._choose(prior_structure=STRUCTURES, hyper_optimizer=HYPER_OPTIMIZERS)
        self._positive("prior_prec_init", "sigma_noise_init", "lr_hyp")
        if self.hyper_step_limit is not None:
            self._positive("hyper_step_limit")
        self._count(1, "n_hypersteps")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curvature(_Checked):
    """Arguments of :class:`ella_cuda.laplace.KronLaplace`."""

    fisher: str = "exact"
    resolution: str = "shared"
    approximation: str = "expand"
    unknown: str = "error"
    column_tolerance: float = 0.0
    dict_key_x: str = DEFAULT_KEYS.x
    dict_key_y: str = DEFAULT_KEYS.y
    ignore_index: int = IGNORED

    def __post_init__(self) -> None:
        self._choose(fisher=FISHERS, resolution=RESOLUTIONS, approximation=APPROXIMATIONS, unknown=UNKNOWN)

    @property
    def settings(self) -> dict[str, Any]:
        """What a checkpoint must agree on."""
        names = ("fisher", "resolution", "approximation", "unknown", "column_tolerance")
        return {name: getattr(self, name) for name in names}

    @property
    def keys(self) -> dict[str, str]:
        """Of batches that are mappings."""
        return {"dict_key_x": self.dict_key_x, "dict_key_y": self.dict_key_y}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session(_Checked):
    """The data of the evidence, what is learned beside the precisions, and who is told."""

    marglik_loader: Iterable[Any] | None = None
    n_data: int | None = None
    learn: Sequence[str | Learner] = ()
    learners: Sequence[Learner] | None = None
    augment: nn.Module | None = None
    progress_bar: bool = True
    checkpoint: str | Path | None = None
    depends_on: Mapping[str, Any] | None = None
    on_evaluation: Callable[..., None] | None = None
    description: str = "training"
    group: Any = None
    calibrate: bool = True

    def __post_init__(self) -> None:
        self._count(1, "n_data")
        if self.on_evaluation is not None and not callable(self.on_evaluation):
            raise TypeError(
                f"marglik_training: on_evaluation must be None or a function of an Evaluation, got {self.on_evaluation!r}."
            )
        if isinstance(self.learn, str) or not isinstance(self.learn, Iterable):
            example = self.learn if isinstance(self.learn, str) else "augmentation"
            raise ValueError(
                f"marglik_training: learn must be a list of names, got {self.learn!r}; pass a list, such as [{example!r}]."
            )
        object.__setattr__(self, "learn", [*self.learn, *(self.learners or ())])


GROUPS = (Steps, PriorOptions, Curvature, Session)


def parted(arguments: Mapping[str, Any]) -> tuple[Steps, PriorOptions, Curvature, Session, dict[str, Any]]:
    """Arguments by group, and those of the learners that ``learn`` may name.

    Raises:
        TypeError, ValueError: an argument is unknown, or of a wrong type or value.
    """
    arguments = _without_laplace_torch_s(arguments)
    known = {name for group in GROUPS for name in group.__dataclass_fields__} | learner_arguments().keys()
    if unknown := arguments.keys() - known:
        raise TypeError(f"marglik_training: got an unexpected keyword argument {min(unknown)!r}.")
    groups = (
        group(**{name: arguments[name] for name in group.__dataclass_fields__ if name in arguments}) for group in GROUPS
    )
    return *groups, {name: arguments[name] for name in learner_arguments() if name in arguments}


def _without_laplace_torch_s(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments without laplace-torch's ``hessian_structure``, ``temperature`` and ``backend``, of which one value each means something
    here; ValueError where another is given."""
    rest = dict(arguments)
    structure, temperature = rest.pop("hessian_structure", "kron"), rest.pop("temperature", 1)
    check_choice("marglik_training: hessian_structure", structure, ("kron", "ella_kron"))
    if temperature != 1:
        raise ValueError(
            f"marglik_training: temperature must be 1, got {temperature!r}: steps and evidence are of the posterior itself. Set "
            "la.temperature afterwards."
        )
    if (backend := rest.pop("backend", None)) is not None:
        raise ValueError(
            f"marglik_training: backend must be None, got {backend!r}: the curvature is this package's own. A sampled column, as of "
            "laplace-torch's stochastic=True, is fisher='mc'."
        )
    return rest


def signature(function: Callable[..., Any], returns: Any) -> inspect.Signature:
    """The signature of a function of arguments, all of them by name and default."""
    own = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    of_groups = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=typing.get_type_hints(group)[field.name],
        )
        for group in GROUPS
        for field in dataclasses.fields(group)
    ]
    return inspect.Signature([*own, *of_groups, *learner_arguments().values()], return_annotation=returns)
