"""Learners: what the evidence steps move. ``learn`` names those of :data:`WORDS`, or has objects of the same interface."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from ella_cuda.training.checks import in_words
from ella_cuda.training.learners.augmentation import Augmentation
from ella_cuda.training.learners.learner import BufferLearner, Learner
from ella_cuda.training.learners.prior import HYPER_OPTIMIZERS, STEP_LIMIT, HyperOptimizer, Prior
from ella_cuda.training.learners.spatial_basis import Anchors, Lengthscales

__all__ = [
    "HYPER_OPTIMIZERS",
    "STEP_LIMIT",
    "WORDS",
    "BufferLearner",
    "HyperOptimizer",
    "Learner",
    "Prior",
    "add_settings",
    "learner_arguments",
    "learners_of",
]

WORDS: dict[str, type[Learner]] = {"anchors": Anchors, "augmentation": Augmentation, "lengthscales": Lengthscales}


def learner_arguments(words: Iterable[str] = WORDS) -> dict[str, inspect.Parameter]:
    """The keyword arguments of the learners of those words, which are arguments of the trainer, by name."""
    parameters = [p for word in words for p in inspect.signature(WORDS[word], eval_str=True).parameters.values()]
    return {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}


def learners_of(
    learn: Sequence[str | Learner], model: nn.Module, n_steps: int, arguments: Mapping[str, Any]
) -> list[Learner]:
    """The learners that ``learn`` names, each with its own of the arguments, then those that it holds.

    Raises:
        TypeError: a learner is no object of :class:`Learner`, or its name no string.
        ValueError: a word is unknown, a name is not unique, or a learner's tensor is none that the model saves
            as a buffer.
    """
    own = [entry for entry in learn if not isinstance(entry, str)]
    if any(isinstance(entry, str) and entry not in WORDS for entry in learn):
        raise ValueError(
            f"marglik_training: learn must list any of {', '.join(WORDS)}, got {learn!r}; beside these it takes objects of "
            "ella_cuda.training.Learner."
        )
    for entry in own:
        if not isinstance(entry, Learner) or not isinstance(getattr(entry, "name", None), str):
            raise TypeError(
                "marglik_training: learn must list names and objects of a subclass of ella_cuda.training.Learner that has a name, got "
                f"{type(entry).__name__}."
            )
    found = [
        make(model, n_steps, **{name: arguments[name] for name in learner_arguments([word]) if name in arguments})
        for word, make in WORDS.items()
        if word in learn
    ]
    found += own
    names = ["prior", *(learner.name for learner in found)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(
            f"marglik_training: learn must have one learner of each name, got several named {twice[0]!r}; rename one."
        )
    saved = {id(t) for t in model.state_dict(keep_vars=True).values() if not isinstance(t, nn.Parameter)}
    for learner in own:
        for name, tensor in learner.tensors().items():
            if id(tensor) not in saved or not tensor.is_floating_point():
                raise ValueError(
                    f"marglik_training: learn: what the learner {learner.name!r} calls {name!r} must be a persistent buffer of the model, "
                    "of floating point numbers; make it one by register_buffer (parameters are the training loss's)."
                )
    return found


def add_settings(settings: dict[str, Any], learner: Learner) -> None:
    """Add a learner's settings to a training's, what is no plain value in words; ValueError where one of that name is there."""
    for key, value in learner.settings().items():
        if key in settings or key == "data":  # digests of which come last
            raise ValueError(
                f"marglik_training: the setting {key!r} of the learner {learner.name!r} is another's; give it a name of its own."
            )
        settings[key] = value if isinstance(value, (bool, int, float, str)) else in_words({key: value})[key]
