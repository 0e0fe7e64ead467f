"""One run: everything that its numbers depend on, each a setting that is declared here and nowhere else."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Collection
from typing import Any

from ella_cuda.augment import GENERATORS
from ella_cuda.data import AUGMENTATIONS, SOURCES, TASKS
from ella_cuda.data.labelled import IMAGE_SIZE, SPLIT
from ella_cuda.data.sources import is_path
from ella_cuda.experiments.declaring import setting, settings_of
from ella_cuda.groups import GROUPS
from ella_cuda.laplace.kron import FISHERS
from ella_cuda.laplace.prior_structure import STRUCTURES
from ella_cuda.laplace.rules.base import APPROXIMATIONS, RESOLUTIONS
from ella_cuda.models import GROUP_PATH, INITS, PATHS, require_image_size, require_paths
from ella_cuda.nn.group_conv import VARIANTS
from ella_cuda.nn.group_layers import FRAMES
from ella_cuda.ops.basis import BASIS_KINDS, LARGEST_INVERSE_LENGTHSCALE
from ella_cuda.reports.text import OBJECTIVE_TITLES
from ella_cuda.training.learners import HYPER_OPTIMIZERS, STEP_LIMIT, WORDS, learner_arguments

OBJECTIVES = tuple(OBJECTIVE_TITLES)  # in the order of the tables
CALIBRATIONS = ("auto", "leave-one-out", "folds", "none")
ERROR_BARS = ("auto", "all", "last-layer")
RESTARTS = ("none", "evidence")  # of the learning rate
TOGETHER = sorted(word for word, learner in WORDS.items() if not learner.alone)
# What the evidence learns beside the precisions: words joined by "+", as paths are.
LEARN = (
    "",
    *("+".join(words) for k in range(1, len(TOGETHER) + 1) for words in itertools.combinations(TOGETHER, k)),
    *sorted(word for word, learner in WORDS.items() if learner.alone),
)
# In place of the recipes, where amounts are learned: they need many evidence steps.
AUGMENTED = {"burn_in": 4, "frequency": 2, "restarts": "none"}
DENSE_PATH = "fc"  # its curvature costs more than all else together: by evidence only on request
DENSE_REASON = "the curvature of an FC path is large; --all runs it"  # why it was not run
MIN_HOLDOUT = 1e-6  # of the images of any data set here, less than one
ROTATED = "rotated"  # in place of other data: the images that a network is evaluated on, turned
# Data sets that have most of their recipe in common.
MNIST, CIFAR = ("mnist", "fashion-mnist"), ("cifar10", "cifar100")
FOLDER = "folder"  # stands for all images of one's own among the recipes
RECIPES = (*SOURCES, FOLDER)
UNREADABLE = ("error", "skip")


def as_data(value: str) -> str:
    """The name of a data set, or the absolute path of images."""
    return os.path.abspath(value) if is_path(value) else value


def recipe_of(data: str) -> str:
    """Which of :data:`RECIPES` a run of the data follows."""
    return FOLDER if os.path.isabs(data) else data


def data_title(data: str) -> str:
    """A data set's name; of a path its last part, in letters, digits, ``-``, ``_`` and ``.``, at most 40."""
    if recipe_of(data) != FOLDER:
        return data
    return re.sub(r"[^\w.-]+", "_", os.path.basename(data)).strip("._")[:40] or FOLDER


def _check_data(name: str, value: str) -> None:
    if value not in SOURCES and not os.path.isabs(value):
        raise ValueError(
            f"{name} must be one of {', '.join(SOURCES)}, or the path of a folder, a .npz or a .csv that is there; got {value!r}."
        )


def _check_model(name: str, value: str) -> None:
    if value and not re.fullmatch(r"[\w.:-]{1,200}", value):
        raise ValueError(f"{name} must be a network's name, timm:NAME or module:function, got {value!r}.")


def as_path(value: str) -> str:
    """The absolute path of a file; empty for none."""
    return os.path.abspath(value) if value else ""


def as_learn(words: str) -> str:
    """The words in :data:`LEARN`'s order: what is learned does not depend on it, and a run has one name."""
    return "+".join(sorted(words.split("+")))


def can_learn(words: str, paths: Collection[str]) -> bool:
    """Whether a network of layers of those paths has what all of the words, joined by "+", learn."""
    return all(not WORDS[word].paths or not WORDS[word].paths.isdisjoint(paths) for word in words.split("+") if word)


def _check_layer(name: str, value: str) -> None:
    if value:
        require_paths(name, value)


def _check_generators(name: str, value: str) -> None:
    if not value or not set(value.split("+")) <= set(GENERATORS):
        raise ValueError(f"{name} must be names out of {', '.join(GENERATORS)}, got {value!r}.")


def _check_ood(name: str, value: str) -> None:
    known = (*SOURCES, ROTATED)
    if value and not set(value.split("+")) <= set(known):
        raise ValueError(f"{name} must be names out of {', '.join(known)}, got {value!r}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridConfig:
    """What the runs of a grid differ in."""

    data: str = setting(
        recipe="digits",
        read=as_data,
        check=_check_data,
        axis=True,
        title=data_title,
        help=f"data set ({', '.join(SOURCES)}), or images of one's own: a folder with a folder for each class, a .npz or a .csv",
    )
    task: str = setting(
        recipe=("digit", "quadrant"),
        by_data={"fashion-mnist": ("plain", "quadrant"), (*CIFAR, FOLDER): ("plain",)},
        choices=TASKS,
        axis=True,
        help="; ".join(f"{name}: {task.description}" for name, task in TASKS.items()),
    )
    layer: str = setting(
        "",
        recipe=("conv", "f_fc+conv"),
        by_data={FOLDER: ("",)},
        check=_check_layer,
        axis=True,
        help=f"sums of {', '.join(PATHS)}, such as f_fc+conv",
    )
    model: str = setting(
        "",
        recipe=("",),
        by_data={FOLDER: ("resnet18",)},
        check=_check_model,
        axis=True,
        help="in place of layers, networks of torchvision by name, timm:NAME of timm, or module:function of your own, called with "
        "in_channels and num_classes",
    )
    objective: str = setting(
        recipe=OBJECTIVES,
        by_data={FOLDER: ("evidence",)},
        choices=OBJECTIVES,
        axis=True,
        help="map, evidence or both",
    )
    learn: str = setting(
        "",
        recipe=("",),
        choices=LEARN,
        read=as_learn,
        axis=True,
        help="what the evidence learns beside the precisions, of sparsified layers (s_fc, s_conv) or augmentation: the amounts of affine "
        f"transformations that the network averages over, with {', '.join(f'{k} {v}' for k, v in AUGMENTED.items())} in place of the "
        "recipe's; of several words each is a run of its own",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The images."""

    augment: str = setting(
        "none",
        by_data={CIFAR: "flips-shifts"},
        choices=AUGMENTATIONS,
        help="of the images that weights learn from; none where labels say where things are",
    )
    train_size: int | None = setting(None, help="use only so many training images, classes in proportion")
    test_size: int | None = setting(
        None,
        help="evaluate on only so many images, classes in proportion: predictions with error bars of many take long",
    )
    holdout: float | None = setting(
        None,
        minimum=MIN_HOLDOUT,
        maximum=1 - MIN_HOLDOUT,
        help="keep this fraction of the training images to evaluate on, instead of the test images",
    )
    data_seed: int = setting(
        0,
        minimum=-(2**63),
        maximum=2**64 - 1,
        help="of what the task draws for each image, the subsample and the hold-out split",
    )
    image_size: int = setting(
        32, by_data={FOLDER: IMAGE_SIZE}, maximum=1024, help="height and width of the images, in pixels"
    )
    split: float = setting(
        SPLIT,
        minimum=0.0,
        maximum=0.9,
        help="share of each class of one's own images to evaluate on, where they have no test part; 0 trains on all",
    )
    unreadable: str = setting(
        "error",
        choices=UNREADABLE,
        help="what is done about images of one's own that cannot be read: error, or skip and name them",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """The network: arguments of :func:`ella_cuda.models.neyshabur`."""

    group: str = setting(
        "p4",
        choices=GROUPS,
        path=GROUP_PATH,
        named="{}",
        help="of gconv paths: rotations by 90 degrees, or with mirror images",
    )
    group_conv: str = setting(
        "pointwise", choices=VARIANTS, path=GROUP_PATH, named="{}", help="how filters of gconv paths are factored"
    )
    width: int = setting(
        recipe=4,
        by_data={CIFAR: 10},
        maximum=1024,
        named="width{}",
        named_with=GROUP_PATH,
        help="network width, the multiple of all channel counts",
    )
    init: str = setting(
        "published",
        recipe="equivariant",
        by_data={CIFAR: "published"},
        choices=INITS,
        help="initial weights: as published, or with only the equivariant paths on",
    )
    basis: str = setting("interpolating", choices=BASIS_KINDS, help="of sparsified layers")
    inverse_lengthscale: float = setting(
        1.0,
        maximum=LARGEST_INVERSE_LENGTHSCALE,
        path="s_fc",
        help="of s_fc paths at the start, per pixel; kernels of s_conv start at 1",
    )
    frames: str = setting(
        "own",
        choices=FRAMES,
        path=GROUP_PATH,
        help="how gconv paths mix the slices of the group: as they are, as published, or turned back to one frame",
    )
    pool_norm: str = setting(
        "2",
        choices=("1", "2", "inf"),
        help="of polyphase components, which decides where convolutional paths halve an image; the released code takes the maximum, inf",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartConfig:
    """The weights that a network by name starts from."""

    weights: str = setting(
        "",
        recipe="",
        read=as_path,
        help="file of weights, of torch.save or safetensors, where networks of --model start; a last layer of other classes is drawn anew",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Adam's steps on the weights."""

    epochs: int = setting(
        recipe=100, by_data={"digits": 60, MNIST: 12, FOLDER: 30}, maximum=10**6, help="passes over the training data"
    )
    batch_size: int = setting(recipe=128, by_data={("digits", FOLDER): 64}, help="images in a minibatch")
    lr: float = setting(
        recipe=3e-3, by_data={"digits": 5e-3, CIFAR: 0.01, FOLDER: 1e-3}, help="Adam's learning rate at the start"
    )
    fan_in_limit: int | None = setting(
        None,
        by_data={"digits": 256},
        by_layer={DENSE_PATH: {"digits": 64}},
        help="weights with more inputs than this learn at rates lower in proportion (- below: no limit)",
    )
    cooldown: float | None = setting(
        None,
        by_data={"digits": 0.3},
        maximum=1.0,
        help="share of the steps, or of each cycle, the last, in which lr falls linearly (- below: a cosine over all)",
    )
    restarts: str = setting(
        "none",
        by_data={"digits": "evidence"},
        choices=RESTARTS,
        help="with a cooldown: lr falls at the end only, or also before every evidence step but the first, and starts anew; of MAP too",
    )
    prior_prec_init: float = setting(
        recipe=0.03, by_data={(*CIFAR, FOLDER): 1.0}, help="prior precision: MAP's, and evidence's at the start"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CurvatureConfig:
    """The curvature: arguments of :class:`ella_cuda.laplace.KronLaplace` and :func:`ella_cuda.marglik_training`."""

    fisher: str = setting(
        "exact", by_data={FOLDER: "mc"}, choices=FISHERS, help="curvature: exact GGN or one sampled column"
    )
    resolution: str = setting("shared", choices=RESOLUTIONS, help="output factors of F-FC")
    approximation: str = setting(
        "expand", choices=APPROXIMATIONS, help="curvature of weights that positions share: KFAC-expand or KFAC-reduce"
    )
    column_tolerance: float = setting(
        0.0,
        by_data={"digits": 0.05},
        minimum=0.0,
        maximum=0.999,
        help="share of the output Hessian's trace that curvature may leave out",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvidenceConfig(CurvatureConfig):
    """Evidence steps, and the curvature that they need."""

    hyper_optimizer: str = setting(
        recipe="adam",
        by_data={MNIST: "mackay"},
        choices=HYPER_OPTIMIZERS,
        help="steps on the prior precisions: Adam's, or MacKay's fixed-point updates until they rest",
    )
    hyper_step_limit: float = setting(
        STEP_LIMIT, help="how far MacKay's updates move the logarithm of a precision in an evidence step, at most"
    )
    lr_hyp: float = setting(recipe=0.1, by_data={"digits": 0.3}, help="Adam's learning rate on log prior precisions")
    burn_in: int = setting(recipe=10, by_data={MNIST: 2}, minimum=0, help="epochs before the first evidence step")
    frequency: int = setting(recipe=5, by_data={"digits": 20, MNIST: 4}, help="epochs between evidence steps")
    hypersteps: int = setting(
        recipe=20,
        by_data={"digits": 40},
        maximum=10**6,
        help="steps on the prior precisions in each, of MacKay's at most",
    )
    # It decides which columns column_tolerance leaves out and what mc draws; other numbers depend on it by rounding alone.
    evidence_batch_size: int | None = setting(
        None, option=False, help="images in a minibatch of the curvature pass; None leaves it to the device"
    )
    prior_structure: str = setting("layerwise", choices=STRUCTURES, help="which parameter tensors share a precision")


LearnersConfig = dataclasses.make_dataclass(
    "LearnersConfig",
    [
        (name, learner_arguments([word])[name].annotation, setting(default, help=text))
        for word, learner in WORDS.items()
        for name, (default, text) in learner.run_settings.items()
    ],
    namespace={"__doc__": "Arguments of the learners that a run may name."},
    frozen=True,
    kw_only=True,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AmountsConfig:
    """A learned augmentation: arguments of :class:`ella_cuda.augment.AffineAugment`."""

    generators: str = setting(
        "+".join(sorted(GENERATORS)),
        several=True,
        check=_check_generators,
        help=f"transformations of --learn augmentation, out of {', '.join(GENERATORS)} (all)",
    )
    copies: int = setting(
        4,
        maximum=4096,
        help="copies of each image that a network with a learned augmentation averages over, in all passes",
    )
    amount_init: float = setting(
        0.1,
        maximum=3.0,
        help="amounts at the start: half images of tx, ty, radians of rotation, logarithms of sx, sy, shear",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """What else a trained network is asked about."""

    ood: str = setting(
        "",
        several=True,
        check=_check_ood,
        help=f"other data sets, whose test images the network's uncertainty should tell from its own; {ROTATED}: those it is evaluated on, "
        "turned by 0, 15, ..., 180 degrees",
    )
    calibration: str = setting(
        "auto",
        choices=CALIBRATIONS,
        help="what chooses the precisions of predictions: each training image left out, in closed form; one more network, trained on two "
        "thirds of the images and asked about the others; or nothing, for the learned ones. auto leaves images out, and trains the other "
        "network where the first knows its images by heart, so that without one it is as sure",
    )
    error_bars: str = setting(
        "auto",
        choices=ERROR_BARS,
        help="the weights whose uncertainty predictions show: all, or the last layer's, of which an image takes milliseconds in any network; "
        "auto: the last layer's of networks of --model with more than 5 million parameters times classes",
    )
    ood_size: int = setting(2000, help="images of each of --ood, at most, classes in proportion")


# Fields begin with GridConfig's, the last base's: a run's name has their order.
@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(
    EvaluationConfig,
    AmountsConfig,
    LearnersConfig,
    EvidenceConfig,
    OptimizerConfig,
    StartConfig,
    NetworkConfig,
    DataConfig,
    GridConfig,
):
    """One run: everything that its numbers depend on. The ``help`` of each field says what it is, as ``ella-cuda train --help`` does.

    Raises:
        ValueError: a name that is not known, a value of another type or a number out of range; the message names the attribute.
    """

    device: str = setting("cpu", option=False, help="cpu, cuda or cuda:<index>")
    seed: int = setting(
        recipe=(0,),
        minimum=0,
        maximum=2**64 - 1,  # what torch's generators take
        axis=True,
        named="seed{}",
        help="one or several; tables show means",
    )

    def __post_init__(self) -> None:
        for name, known in settings_of(type(self)).items():
            object.__setattr__(self, name, known.checked(getattr(self, name)))
        if bool(self.layer) == bool(self.model):
            raise ValueError(
                f"one of layer and model must name the network, got layer={self.layer!r} and model={self.model!r}."
            )
        if self.layer:
            require_image_size(self.image_size)
        if self.weights and not self.model:
            raise ValueError(f"weights must be of a network of model, got {self.weights!r} and layer={self.layer!r}.")
        if TASKS[self.task].positional and self.augment != "none":
            raise ValueError(
                f"augment must be none for the task {self.task}, whose labels say where things are; got {self.augment!r}."
            )
        if TASKS[self.task].positional and ROTATED in self.ood.split("+"):
            raise ValueError(
                f"ood must be without {ROTATED} for the task {self.task}, whose labels say where things are; got {self.ood!r}."
            )
        if self.data in self.ood.split("+"):
            raise ValueError(f"ood must name other data than the run's own, {self.data}; got {self.ood!r}.")
        if self.learns_amounts and TASKS[self.task].positional:
            others = " or ".join(name for name, task in TASKS.items() if not task.positional)
            raise ValueError(
                f"task must be one whose labels do not say where things are with learn={self.learn!r}, such as {others}; got {self.task}."
            )
        if self.learns_amounts and self.augment != "none":
            raise ValueError(
                f"augment must be none with learn={self.learn!r}, whose evidence is that of the images as they are; got {self.augment!r}."
            )
        if self.learn and (self.objective != "evidence" or not can_learn(self.learn, self.paths)):
            needed = frozenset().union(*(WORDS[word].paths for word in self.learn.split("+")))
            layer = f" and a layer with a path out of {', '.join(sorted(needed))}" if needed else ""
            got = f"{self.objective} and {self.layer or self.model}"
            raise ValueError(f"learn={self.learn!r} needs evidence{layer}; got {got}.")
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
        if self.restarts != "none" and self.cooldown is None:
            raise ValueError(f"restarts={self.restarts!r} needs a cooldown, got None; give one, or restarts='none'.")

    def of(self, subject: type) -> dict[str, Any]:
        """The settings that a class of them declares, by name: where they are arguments of those names."""
        return {name: getattr(self, name) for name in settings_of(subject)}

    @property
    def learns_amounts(self) -> bool:
        """Whether the network averages over an augmentation whose amounts the evidence learns."""
        return "augmentation" in self.learn.split("+")

    @property
    def amounts(self) -> tuple[str, ...]:
        """The names of the amounts, in the library's order."""
        return tuple(name for name in GENERATORS if name in self.generators.split("+"))

    @property
    def paths(self) -> frozenset[str]:
        """The paths of every layer."""
        return frozenset(self.layer.split("+"))

    def _evidence_steps(self) -> range:
        """The epochs with an evidence step, but the last epoch."""
        first = (self.burn_in // self.frequency + 1) * self.frequency
        return range(first, self.epochs, self.frequency)

    @property
    def cycle_ends(self) -> list[int]:
        """The epochs after which the learning rate starts anew, and the last: under restarts those of all evidence steps but the first,
        and of those that leave a last cycle shorter than ``frequency``."""
        if self.restarts == "none":
            return [self.epochs]
        # A short last cycle would only unsettle the weights.
        return [*(e for e in self._evidence_steps()[1:] if self.epochs - e >= self.frequency), self.epochs]

    @property
    def chosen(self) -> dict[str, Any]:
        """The attributes of the training that differ from their defaults: what a checkpoint says of its run, also when later versions have
        more of them."""
        known, later = settings_of(type(self)).items(), settings_of(EvaluationConfig)
        return {
            name: value for name, one in known if name not in later and (value := getattr(self, name)) != one.default
        }

    @property
    def name(self) -> str:
        """The run's name within its grid, and its folder's."""
        parts = (
            known.named.format(known.titled(getattr(self, name)))
            for name, known in settings_of(type(self)).items()
            if {known.path, known.named_with} - {""} <= self.paths
        )
        return "-".join(filter(None, parts))

    @property
    def described(self) -> dict[str, Any]:
        """What a row says of the run: what its name may have. It is empty without the path that gives it a meaning."""
        return {
            name: known.titled(getattr(self, name)) if {known.path} - {""} <= self.paths else ""
            for name, known in settings_of(type(self)).items()
            if known.named
        }


def recipe(data: str, layer: str = "") -> dict[str, Any]:
    """What the runs of a data set's tables have in common, by attribute; of an axis of grids, the values of one that names none.

    One for all rows of a table, to be chosen on held-out training images (``holdout``); benchmarks/results/README.md says how the digits
    one was.

    Args:
        data: a name of :data:`ella_cuda.data.SOURCES`, or a path.
        layer: of the networks, where that makes a difference.

    Raises:
        ValueError: an unknown data set.
    """
    known = settings_of(RunConfig)
    data = recipe_of(known["data"].checked(data))
    return {name: one.in_recipe(data, layer) for name, one in known.items()}


def configure(data: str, task: str, layer: str, objective: str, seed: int = 0, **changes: Any) -> RunConfig:
    """A run after the data set's recipe.

    Args:
        data, task, layer, objective, seed: see :class:`RunConfig`.
        **changes: other attributes, in place of the recipe's. Of ``ood``, turned images are left out where labels say where things are.
            With ``epochs`` too few for the recipe's ``burn_in`` and ``frequency``, these are a third of them at most.

    Raises:
        ValueError: what :class:`RunConfig` raises.
    """
    common = {name: value for name, value in recipe(data, layer).items() if not settings_of(RunConfig)[name].axis}
    if "augmentation" in str(changes.get("learn", "")).split("+"):
        common |= {**AUGMENTED, "augment": "none"}
    epochs = changes.get("epochs", common["epochs"])
    first = (common["burn_in"] // common["frequency"] + 1) * common["frequency"]
    if isinstance(epochs, int) and 1 <= epochs <= (first if changes.get("learn") else common["burn_in"]):
        common |= {"burn_in": epochs // 3, "frequency": min(common["frequency"], max(1, epochs // 3))}
    if task in TASKS and TASKS[task].positional:
        common["augment"] = "none"
        if isinstance(ood := changes.get("ood"), str):
            changes["ood"] = "+".join(word for word in ood.split("+") if word != ROTATED)
    return RunConfig(data=data, task=task, layer=layer, objective=objective, seed=seed, **{**common, **changes})
