"""One run: everything that its numbers depend on."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any

from ella_cuda.data import AUGMENTATIONS, SOURCES, TASKS
from ella_cuda.experiments.recipes import RECIPES
from ella_cuda.groups import GROUPS
from ella_cuda.models import GROUP_PATH, INITS, PATHS, SPARSE_PATHS
from ella_cuda.nn.group_conv import VARIANTS
from ella_cuda.nn.group_layers import FRAMES
from ella_cuda.ops.basis import BASIS_KINDS, LARGEST_INVERSE_LENGTHSCALE

OBJECTIVES = ("map", "evidence")
RESTARTS = ("none", "evidence")  # of the learning rate
# Of the bases of sparsified layers, under evidence; joined by "+" as paths are.
LEARN = ("", "anchors", "lengthscales", "anchors+lengthscales")
DENSE_PATH = "fc"  # its curvature costs more than all else together: by evidence only on request
DENSE_REASON = "the curvature of an FC path is large; --all runs it"  # why it was not run
MANY = 2**31 - 1
# Of whole numbers, the least and the most. What takes memory or time in proportion is bounded far above any use.
WHOLE: dict[str, tuple[int, int]] = {
    "width": (1, 1024),
    "epochs": (1, 10**6),
    "batch_size": (1, MANY),
    "frequency": (1, MANY),
    "hypersteps": (1, 10**6),
    "burn_in": (0, MANY),
    "seed": (0, 2**64 - 1),  # what torch's generators take
    "data_seed": (-(2**63), 2**64 - 1),
    "image_size": (1, 1024),
    "train_size": (1, MANY),
    "fan_in_limit": (1, MANY),
    "evidence_batch_size": (1, MANY),
}
SINGLE = (2.0**-126, 2.0**128 - 2.0**104)  # of single precision, the least number that is not subnormal, and the most
LEAST_HOLDOUT = 1e-6  # of the images of any data set here, less than one
REAL = (
    "lr",
    "lr_hyp",
    "lr_lengthscales",
    "lr_anchors",
    "prior_prec_init",
    "inverse_lengthscale",
    "cooldown",
    "column_tolerance",
    "holdout",
)
OPTIONAL = ("train_size", "fan_in_limit", "evidence_batch_size", "cooldown", "holdout")  # may be None


def as_learn(words: str) -> str:
    """The words in :data:`LEARN`'s order: what is learned does not depend on it, and a run has one name."""
    return "+".join(sorted(words.split("+")))


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """One run: everything that its numbers depend on.

    Attributes:
        data: a name of :data:`ella_cuda.data.SOURCES`.
        task: a name of :data:`ella_cuda.data.TASKS`.
        layer: sum of paths, see :func:`ella_cuda.models.neyshabur`.
        objective: ``map`` or ``evidence``.
        seed: of the initial weights and of the order of the minibatches.
        width: α of the network.
        init: ``published`` or ``equivariant``, see :func:`ella_cuda.models.neyshabur`.
        epochs: passes over the training data.
        batch_size: images in a minibatch.
        lr: Adam's learning rate, at the start.
        fan_in_limit: inputs of a weight up to which it learns at that rate, see :func:`adam_for`; None is no limit.
        cooldown: share of the steps, or of each cycle's with restarts, the last ones, in which lr falls linearly towards 0 after
            being constant; None is a cosine to 0 over all steps.
        restarts: ``none``, or ``evidence``: lr falls so before every evidence step but the first, and at the end, and starts anew
            after each: a cycle ends there, and the last cycle is no shorter than ``frequency``. MAP runs do the same. Needs a
            cooldown.
        prior_prec_init: prior precision δ of every tensor, at the start (evidence) or throughout (map).
        lr_hyp: Adam's learning rate on log δ.
        burn_in: epochs before the first evidence step.
        frequency: epochs between evidence steps.
        hypersteps: steps on log δ in each.
        evidence_batch_size: images in a minibatch of the curvature pass; None leaves it to the device, see
            :data:`ella_cuda.experiments.run.EVIDENCE_BATCH_SIZES`. It decides which columns ``column_tolerance`` leaves out and what
            ``mc`` draws; other numbers do not depend on it beyond rounding.
        fisher: ``exact`` or ``mc``.
        resolution: ``shared`` or ``per_channel``, see :class:`ella_cuda.laplace.KronLaplace`.
        column_tolerance: share of the output Hessian's trace that curvature may leave out, see there.
        prior_structure: which tensors share a precision, see :func:`ella_cuda.marglik_training`.
        learn: what of sparsified layers' bases the evidence learns: a name of :data:`LEARN`, its words in any order.
        lr_lengthscales: Adam's learning rate on log lengthscales. lr_anchors: on anchors, in pixels.
        basis: of sparsified layers, ``interpolating`` or ``exponential``.
        inverse_lengthscale: of S-FC paths at the start, per pixel.
        group: of GCONV paths, a name of :data:`ella_cuda.groups.GROUPS`.
        group_conv: variant of GCONV paths, see :class:`ella_cuda.nn.GroupConv2d`.
        frames: of GCONV paths and convolutions beside them, ``own`` or ``common``, see there.
        augment: what the weights' training images go through, a name of :data:`ella_cuda.data.AUGMENTATIONS`; the
            evidence always gets the images as they are.
        device: ``cpu``, ``cuda`` or ``cuda:<index>``.
        train_size: how many training images to use; None for all.
        holdout: fraction of the training images to evaluate on instead of the test images; None for the test images.
        data_seed: of what the task draws for each image, the subsample and the hold-out split; runs of a table share it.
        image_size: height and width of the images, in pixels.

    Raises:
        ValueError: a name that is not known, a value of another type or a number out of range; the message names the attribute.
    """

    data: str
    task: str
    layer: str
    objective: str
    seed: int
    width: int
    epochs: int
    batch_size: int
    lr: float
    prior_prec_init: float
    lr_hyp: float
    burn_in: int
    frequency: int
    hypersteps: int
    evidence_batch_size: int | None = None
    fisher: str = "exact"
    resolution: str = "shared"
    column_tolerance: float = 0.0
    prior_structure: str = "layerwise"
    learn: str = ""
    lr_lengthscales: float = 0.03
    lr_anchors: float = 0.003
    basis: str = "interpolating"
    inverse_lengthscale: float = 1.0
    group: str = "p4"
    group_conv: str = "pointwise"
    frames: str = "own"
    cooldown: float | None = None
    restarts: str = "none"
    init: str = "published"
    fan_in_limit: int | None = None
    augment: str = "none"
    device: str = "cpu"
    train_size: int | None = None
    holdout: float | None = None
    data_seed: int = 0
    image_size: int = 32

    def __post_init__(self) -> None:
        self._check_numbers()
        choices = {
            "data": SOURCES,
            "task": TASKS,
            "objective": OBJECTIVES,
            "init": INITS,
            "fisher": ("exact", "mc"),
            "resolution": ("shared", "per_channel"),
            "prior_structure": ("layerwise", "module", "scalar"),
            "basis": BASIS_KINDS,
            "augment": AUGMENTATIONS,
            "group": GROUPS,
            "group_conv": VARIANTS,
            "frames": FRAMES,
            "restarts": RESTARTS,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in [*allowed]:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}.")
        if TASKS[self.task].positional and self.augment != "none":
            raise ValueError(
                f"augment must be none for the task {self.task}, whose labels say where things are; got {self.augment!r}."
            )
        for name in ("layer", "device"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be a string, got {getattr(self, name)!r}.")
        paths = self.layer.split("+")
        if not set(paths) <= set(PATHS) or len(set(paths)) != len(paths):
            raise ValueError(
                f"layer must be different names out of {', '.join(PATHS)} joined by '+', got {self.layer!r}."
            )
        if isinstance(self.learn, str):
            object.__setattr__(self, "learn", as_learn(self.learn))
        if self.learn not in LEARN:
            raise ValueError(f"learn must be one of {', '.join(map(repr, LEARN))}, got {self.learn!r}.")
        if self.learn and (self.objective != "evidence" or not SPARSE_PATHS & set(paths)):
            raise ValueError(
                f"learn={self.learn!r} needs evidence and a layer with a path out of {', '.join(sorted(SPARSE_PATHS))}; got {self.objective} "
                f"and {self.layer}."
            )
        if self.objective == "evidence" and self.burn_in >= self.epochs:
            raise ValueError(
                f"burn_in must be less than epochs for evidence runs, or no evidence step is done; got burn_in "
                f"{self.burn_in} and epochs {self.epochs}."
            )
        if self.learn and not self._evidence_steps():
            raise ValueError(
                f"learn={self.learn!r} needs an evidence step after burn_in and before the last epoch, of which there is none: got burn_in "
                f"{self.burn_in}, frequency {self.frequency} and epochs {self.epochs}."
            )
        for name in ("lr", "lr_hyp", "lr_lengthscales", "lr_anchors", "prior_prec_init", "inverse_lengthscale"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}.")
            least, most = SINGLE[0], LARGEST_INVERSE_LENGTHSCALE if name == "inverse_lengthscale" else SINGLE[1]
            if not least <= getattr(self, name) <= most:
                raise ValueError(
                    f"{name} must be at least {least:.3g} and at most {most:.3g}, as single precision holds it, got {getattr(self, name)}."
                )
        if self.cooldown is not None and not SINGLE[0] <= self.cooldown <= 1:
            raise ValueError(
                f"cooldown must be above 0, by {SINGLE[0]:.3g} or more, and at most 1, got {self.cooldown}."
            )
        if self.restarts != "none" and self.cooldown is None:
            raise ValueError(f"restarts={self.restarts!r} needs a cooldown, got None; give one, or restarts='none'.")
        if not 0 <= self.column_tolerance < 1:
            raise ValueError(f"column_tolerance must be at least 0 and less than 1, got {self.column_tolerance}.")
        if self.column_tolerance and self.column_tolerance < SINGLE[0]:
            raise ValueError(f"column_tolerance must be 0 or at least {SINGLE[0]:.3g}, got {self.column_tolerance}.")
        if self.holdout is not None and not LEAST_HOLDOUT <= self.holdout <= 1 - LEAST_HOLDOUT:
            raise ValueError(
                f"holdout must lie between {LEAST_HOLDOUT:g} and {1 - LEAST_HOLDOUT:g}, got {self.holdout}: images are needed on both sides."
            )

    def _check_numbers(self) -> None:
        """Raise ValueError for what is no number or is out of range; make Python's numbers of others'."""
        for name in (*WHOLE, *REAL):
            value = getattr(self, name)
            if value is None and name in OPTIONAL:
                continue
            checked = whole_number(name, value) if name in WHOLE else _real_number(name, value)
            object.__setattr__(self, name, checked)

    def _evidence_steps(self) -> range:
        """The epochs with an evidence step, but the last epoch."""
        first = (self.burn_in // self.frequency + 1) * self.frequency
        return range(first, self.epochs, self.frequency)

    @property
    def cycle_ends(self) -> list[int]:
        """The epochs after which the learning rate starts anew, and the last."""
        if self.restarts == "none":
            return [self.epochs]
        # A short last cycle would only unsettle the weights.
        return [*(e for e in self._evidence_steps()[1:] if self.epochs - e >= self.frequency), self.epochs]

    @property
    def chosen(self) -> dict[str, Any]:
        """The attributes that differ from their defaults: what a checkpoint says of its run, also when later versions have more of them."""
        values = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}

    @property
    def name(self) -> str:
        """The run's name within its grid, and its folder's."""
        learn = f"-{self.learn}" if self.learn else ""
        network = f"-{self.group}-{self.group_conv}-width{self.width}" if self.over_group else ""
        return f"{self.data}-{self.task}-{self.layer}-{self.objective}{learn}{network}-seed{self.seed}"

    @property
    def over_group(self) -> bool:
        """Whether the network has group convolutions, so that their attributes mean something."""
        return GROUP_PATH in self.layer.split("+")

    @property
    def described(self) -> dict[str, Any]:
        """What a row says of the run; ``group`` and ``group_conv`` are empty without group convolutions."""
        names = ("data", "task", "layer", "objective", "learn", "seed", "width")
        groups = {name: getattr(self, name) if self.over_group else "" for name in ("group", "group_conv")}
        return {name: getattr(self, name) for name in names} | groups


def whole_number(name: str, value: Any) -> int:
    """The value of an attribute of :data:`WHOLE` as an int; ValueError where it is none, or out of range."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name} must be a whole number, got {value!r}.")
    least, most = WHOLE[name]
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}.")
    if value > most:
        power = (most + 1).bit_length() - 1
        bound = f"less than 2**{power}" if most + 1 == 2**power else f"at most {most}"
        raise ValueError(f"{name} must be {bound}, got {value}.")
    return int(value)


def _real_number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be a real number, got {value!r}.")
    try:
        return float(value)
    except OverflowError:  # a whole number beyond all floats
        return math.inf if value > 0 else -math.inf


def configure(data: str, task: str, layer: str, objective: str, seed: int = 0, **changes: Any) -> RunConfig:
    """A run after the data set's recipe.

    Args:
        data: a name of :data:`RECIPES`. task, layer, objective, seed: see :class:`RunConfig`.
        **changes: other attributes of :class:`RunConfig`, in place of the recipe's.

    Raises:
        ValueError: an unknown data set, or what :class:`RunConfig` raises.
    """
    if data not in RECIPES:
        raise ValueError(f"data must be one of {', '.join(RECIPES)}, got {data!r}.")
    numbers = dataclasses.asdict(RECIPES[data])
    del numbers["tasks"]
    map_prior_prec = numbers.pop("map_prior_prec")
    if objective == "map":
        numbers["prior_prec_init"] = map_prior_prec
    fc_fan_in_limit = numbers.pop("fc_fan_in_limit")
    if layer == DENSE_PATH and fc_fan_in_limit is not None:
        numbers["fan_in_limit"] = fc_fan_in_limit
    if task in TASKS and TASKS[task].positional:
        numbers["augment"] = "none"
    return RunConfig(data=data, task=task, layer=layer, objective=objective, seed=seed, **{**numbers, **changes})
