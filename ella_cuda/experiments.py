"""Runs: one training with its evaluation, grids of them in a folder, and the recipes they follow."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from ella_cuda import __version__, build_info
from ella_cuda.data import SOURCES, TASKS, Dataset, TensorLoader, holdout, load, make_task, normalize, subsample
from ella_cuda.models import INITS, PATHS, SPARSE_PATHS, neyshabur
from ella_cuda.nn import FactoredLinear2d, SparseConv2d, SparseFactoredLinear2d, SpatialBasis
from ella_cuda.ops.basis import BASIS_KINDS
from ella_cuda.reports import describe_layers, layout, save_report
from ella_cuda.reports.files import write_file
from ella_cuda.training import Evaluation, marglik_training
from ella_cuda.workers import run_at_once

OBJECTIVES = ("map", "evidence")
# Of the bases of sparsified layers, under evidence; joined by "+" as paths are.
LEARN = ("", "anchors", "lengthscales", "anchors+lengthscales")
EVALUATION_BATCH = 500
MAP_EVIDENCE_BYTES = 100_000_000  # curvature of MAP networks is computed for the record only, so only where it is cheap
CONFIG_FILE, SUMMARY_FILE, ENVIRONMENT_FILE, CHECKPOINT_FILE, HISTORY_FILE, DIARY_FILE = (
    "config.json",
    "summary.json",
    "environment.json",
    "checkpoint.pt",
    "history.json",
    "progress.json",
)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The numbers every row of a data set's table shares, whatever its layer and objective."""

    tasks: tuple[str, ...]  # what `train` runs when no task is named
    width: int = 4
    init: str = "equivariant"
    epochs: int = 100
    batch_size: int = 128
    lr: float = 3e-3  # of Adam
    fan_in_limit: int | None = None  # weights with more inputs learn at lower rates, see `adam_for`
    # Share of the steps, the last, in which lr falls linearly to 0; None is a cosine over all steps.
    cooldown: float | None = None
    prior_prec_init: float = 0.03  # δ at the start of evidence training
    map_prior_prec: float = 0.03  # δ of MAP training
    lr_hyp: float = 0.1
    burn_in: int = 10  # epochs before the first evidence step
    frequency: int = 5  # epochs between evidence steps
    hypersteps: int = 20
    fisher: str = "exact"
    column_tolerance: float = 0.0
    prior_structure: str = "layerwise"


# One recipe for all rows of a table, to be chosen on held-out training data (`--holdout`); README.md says how the digits one was.
RECIPES: dict[str, Recipe] = {
    "digits": Recipe(
        tasks=("digit", "quadrant"),
        width=4,
        epochs=45,
        batch_size=64,
        lr=5e-3,
        fan_in_limit=256,
        cooldown=0.3,
        lr_hyp=0.3,
        hypersteps=40,
        column_tolerance=0.05,
    ),
    "mnist": Recipe(tasks=("digit", "quadrant"), epochs=20, burn_in=2, frequency=2),
    "fashion-mnist": Recipe(tasks=("plain", "quadrant"), epochs=20, burn_in=2, frequency=2),
    "cifar10": Recipe(tasks=("plain",), width=10, init="published", lr=0.01, prior_prec_init=1.0, map_prior_prec=1.0),
    "cifar100": Recipe(tasks=("plain",), width=10, init="published", lr=0.01, prior_prec_init=1.0, map_prior_prec=1.0),
}


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
        cooldown: share of the steps, the last ones, in which lr falls linearly to 0 after being constant; None is a
            cosine to 0 over all steps.
        prior_prec_init: prior precision δ of every tensor, at the start (evidence) or throughout (map).
        lr_hyp: Adam's learning rate on log δ.
        burn_in: epochs before the first evidence step.
        frequency: epochs between evidence steps.
        hypersteps: steps on log δ in each.
        evidence_batch_size: images in a minibatch of the curvature pass; numbers do not depend on it beyond rounding.
        fisher: ``exact`` or ``mc``.
        resolution: ``shared`` or ``per_channel``, see :class:`ella_cuda.laplace.KronLaplace`.
        column_tolerance: share of the output Hessian's trace that curvature may leave out, see there.
        prior_structure: which tensors share a precision, see :func:`ella_cuda.marglik_training`.
        learn: what of sparsified layers' bases the evidence learns: a name of :data:`LEARN`.
        lr_shape: Adam's learning rate on those; None is lr_hyp.
        basis: of sparsified layers, ``interpolating`` or ``exponential``.
        inverse_lengthscale: of S-FC paths at the start, per pixel.
        device: ``cpu``, ``cuda`` or ``cuda:<index>``.
        train_size: how many training images to use; None for all.
        holdout: fraction of the training images to evaluate on instead of the test images; None for the test images.
        data_seed: of the quadrants, the subsample and the hold-out split; runs of a table share it.
        image_size: height and width of the images, in pixels.

    Raises:
        ValueError: a name that is not known or a number out of range; the message names the attribute.
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
    evidence_batch_size: int = 150
    fisher: str = "exact"
    resolution: str = "shared"
    column_tolerance: float = 0.0
    prior_structure: str = "layerwise"
    learn: str = ""
    lr_shape: float | None = None
    basis: str = "interpolating"
    inverse_lengthscale: float = 1.0
    cooldown: float | None = None
    init: str = "published"
    fan_in_limit: int | None = None
    device: str = "cpu"
    train_size: int | None = None
    holdout: float | None = None
    data_seed: int = 0
    image_size: int = 32

    def __post_init__(self) -> None:
        choices = {
            "data": SOURCES,
            "task": TASKS,
            "objective": OBJECTIVES,
            "init": INITS,
            "fisher": ("exact", "mc"),
            "resolution": ("shared", "per_channel"),
            "prior_structure": ("layerwise", "module", "scalar"),
            "basis": BASIS_KINDS,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}.")
        paths = self.layer.split("+")
        if not set(paths) <= set(PATHS) or len(set(paths)) != len(paths):
            raise ValueError(
                f"layer must be different names out of {', '.join(PATHS)} joined by '+', got {self.layer!r}."
            )
        if self.learn not in LEARN:
            raise ValueError(f"learn must be one of {', '.join(map(repr, LEARN))}, got {self.learn!r}.")
        if self.learn and (self.objective != "evidence" or not SPARSE_PATHS & set(paths)):
            raise ValueError(
                f"learn={self.learn!r} needs evidence and a layer with a path out of {', '.join(sorted(SPARSE_PATHS))}; got {self.objective} "
                f"and {self.layer}."
            )
        least = {"width": 1, "epochs": 1, "batch_size": 1, "evidence_batch_size": 1, "frequency": 1, "hypersteps": 1}
        least |= {"burn_in": 0, "seed": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name} must be at least {bound}, got {getattr(self, name)}.")
        if self.objective == "evidence" and self.burn_in >= self.epochs:
            raise ValueError(
                f"burn_in must be less than epochs for evidence runs, or no evidence step is done; got burn_in "
                f"{self.burn_in} and epochs {self.epochs}."
            )
        for name in ("lr", "lr_hyp", "prior_prec_init", "inverse_lengthscale"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}.")
        if self.lr_shape is not None and not 0 < self.lr_shape < float("inf"):
            raise ValueError(f"lr_shape must be positive and finite, got {self.lr_shape}.")
        for name in ("train_size", "fan_in_limit"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.cooldown is not None and not 0 < self.cooldown <= 1:
            raise ValueError(f"cooldown must be above 0 and at most 1, got {self.cooldown}.")
        if self.holdout is not None and not 0 < self.holdout < 1:
            raise ValueError(f"holdout must lie between 0 and 1, got {self.holdout}.")

    @property
    def name(self) -> str:
        """The run's name within its grid, and its folder's."""
        learn = f"-{self.learn}" if self.learn else ""
        return f"{self.data}-{self.task}-{self.layer}-{self.objective}{learn}-seed{self.seed}"


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
    return RunConfig(data=data, task=task, layer=layer, objective=objective, seed=seed, **{**numbers, **changes})


@dataclasses.dataclass(frozen=True)
class Cooldown:
    """Share of the learning rate at a step: 1, then in the last ``falling`` of ``steps`` steps linearly to 0."""

    steps: int
    falling: int

    def __call__(self, step: int) -> float:
        return min(1.0, max(0.0, (self.steps - step) / self.falling))


def learning_rate_schedule(cooldown: float | None, steps: int) -> dict[str, Any]:
    """``scheduler_cls`` and ``scheduler_kwargs`` of :func:`ella_cuda.marglik_training` for a run of so many steps.

    Args:
        cooldown: share of the steps, the last ones, in which the rate falls linearly to 0; None is a cosine over all steps.
        steps: minibatches in the whole run.
    """
    if cooldown is None:
        return {"scheduler_cls": torch.optim.lr_scheduler.CosineAnnealingLR, "scheduler_kwargs": {"T_max": steps}}
    share = Cooldown(steps, max(1, round(cooldown * steps)))
    return {"scheduler_cls": torch.optim.lr_scheduler.LambdaLR, "scheduler_kwargs": {"lr_lambda": share}}


def adam_for(model: nn.Module, fan_in_limit: int | None) -> Callable[..., torch.optim.Adam]:
    """Adam with a learning rate for each weight of the model: ``lr * min(1, fan_in_limit / fan_in)``.

    Adam moves every entry by about lr a step, so an output that sums ``fan_in`` entries moves ``fan_in`` times as far.
    ``fan_in`` is the number of inputs that an output sums: height times width for ``weight_in`` of an F-FC path, the
    channels for its ``weight_out``, both times what a value at an anchor moves on the average where weights are given at anchors, one
    for biases and vectors, and for every other parameter the size of its first slice,
    as is right for ``Linear`` and ``Conv*d`` but not for embeddings and transposed convolutions.

    Args:
        model: of such layers.
        fan_in_limit: None leaves every rate at lr.

    Returns:
        ``(parameters, lr=..., **options) -> Adam``, for ``optimizer_cls`` of :func:`ella_cuda.marglik_training`.

    Source: Yang et al., "Tuning large neural networks via zero-shot hyperparameter transfer", NeurIPS 2021, table 3.
    """
    if fan_in_limit is None:
        return torch.optim.Adam
    fan_in = {id(p): p[0].numel() if p.dim() > 1 else 1 for p in model.parameters()}
    for layer in model.modules():
        if isinstance(layer, FactoredLinear2d):
            fan_in[id(layer.weight_in)] = layer.in_size[0] * layer.in_size[1]
            fan_in[id(layer.weight_out)] = layer.in_channels
            if layer.bias_out is not None:
                fan_in[id(layer.bias_out)] = 1
        elif isinstance(layer, SparseFactoredLinear2d):
            fan_in[id(layer.weight_in)] = _reach(layer.basis_in)
            fan_in[id(layer.weight_out)] = layer.in_channels * _reach(layer.basis_out) / layer.basis_out.num_points
        elif isinstance(layer, SparseConv2d):
            fan_in[id(layer.weight)] = layer.in_channels * _reach(layer.basis)

    def adam_by_fan_in(parameters: Sequence[nn.Parameter], lr: float, **options: Any) -> torch.optim.Adam:
        groups: dict[float, list[nn.Parameter]] = {}
        for p in parameters:
            groups.setdefault(min(1.0, fan_in_limit / fan_in[id(p)]), []).append(p)
        return torch.optim.Adam([{"params": g, "lr": lr * share} for share, g in groups.items()], lr=lr, **options)

    return adam_by_fan_in


def _reach(basis: SpatialBasis) -> float:
    """How far the function's values at all positions move together, by size, when the value at every anchor moves by one."""
    return float(basis.matrix().abs().sum())


def resolve_device(name: str) -> torch.device:
    """The device of that name; ``auto`` is the GPU where there is one that this build has kernels for, else the CPU.

    Raises:
        ValueError: not the name of a CPU or CUDA device.
        RuntimeError: a CUDA device where torch finds none, or where ella_cuda was built without CUDA.
    """
    built = bool(build_info()["cuda"])
    if name == "auto":
        return torch.device("cuda" if built and torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device must be auto, cpu, cuda or cuda:<index>, got {name!r}.") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:<index>, got {name!r}.")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError(f"device {name}: torch {torch.__version__} finds no CUDA device; use cpu.")
        if (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"device {name}: there are only {torch.cuda.device_count()} CUDA devices.")
        if not built:
            raise RuntimeError(
                f"device {name}: ella_cuda was built without CUDA; install it where nvcc is found (ELLA_CUDA=1 pip "
                f"install .)."
            )
    return device


@functools.lru_cache(maxsize=2)
def prepare(
    data: str,
    task: str,
    image_size: int = 32,
    data_seed: int = 0,
    train_size: int | None = None,
    holdout_fraction: float | None = None,
    data_dir: str | None = None,
    download: bool = False,
) -> Dataset:
    """A run's images and labels on the CPU: loaded, split, subsampled, made into the task, normalised."""
    dataset = load(data, data_dir, download)
    if holdout_fraction is not None:
        dataset = holdout(dataset, holdout_fraction, data_seed)
    if train_size is not None:
        dataset = subsample(dataset, train_size, data_seed)
    return normalize(make_task(dataset, task, image_size, data_seed))


def prepare_for(config: RunConfig, data_dir: str | None = None, download: bool = False) -> Dataset:
    """The images and labels of a run, on the CPU; see :func:`prepare`."""
    size, seed = config.image_size, config.data_seed
    return prepare(config.data, config.task, size, seed, config.train_size, config.holdout, data_dir, download)


def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Accuracy in percent and mean negative log likelihood in nats of the softmax at the model's parameters.

    Args:
        model: ``(N, C, H, W) -> (N, K)`` logits.
        images: ``(N, C, H, W)``.
        labels: ``(N,)`` int64.
    """
    model.eval()
    correct = nll = 0.0
    with torch.no_grad():
        for x, y in TensorLoader(images, labels, EVALUATION_BATCH):
            logits = model(x).double()
            correct += float((logits.argmax(1) == y).sum())
            nll += float(F.cross_entropy(logits, y, reduction="sum"))
    return 100 * correct / len(labels), nll / len(labels)


def run_one(
    config: RunConfig,
    run_dir: str | os.PathLike[str],
    *,
    progress: bool = True,
    data_dir: str | None = None,
    download: bool = False,
) -> dict[str, Any]:
    """Train and evaluate one network.

    Args:
        config: the run.
        run_dir: its folder; gets ``checkpoint.pt`` and, at the end, ``history.json``. A checkpoint that is there is
            resumed.
        progress: whether to show a progress bar.
        data_dir: see :func:`ella_cuda.data.load`.
        download: see :func:`ella_cuda.data.load`.

    Returns:
        A row of ``summary.json``: ``data, task, layer, objective, seed, accuracy`` (percent) ``, nll``
        (nats) ``, neg_log_marginal_likelihood`` (nats per data point; None with ``..._reason`` where the curvature
        would be too large) ``, seconds, layers, other_parameters``, counts, and ``evaluated_on`` (test or holdout).

    Raises:
        ValueError: the data or a checkpoint do not fit; see :func:`ella_cuda.marglik_training`.
        OSError: ``run_dir`` cannot be written; what was there is untouched.
        FloatingPointError: training diverged; the last good checkpoint stays.
    """
    run_dir = Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    device = resolve_device(config.device)
    dataset = prepare_for(config, data_dir, download).to(device)
    torch.manual_seed(config.seed)
    sizes = (dataset.channels, dataset.num_classes, config.width, config.image_size)
    shape = {"init": config.init, "basis": config.basis, "inverse_lengthscale": config.inverse_lengthscale}
    model = neyshabur(config.layer, *sizes, **shape).to(device)
    diary = _Diary(run_dir / DIARY_FILE, config, model)
    train_loader = TensorLoader(dataset.train_images, dataset.train_labels, config.batch_size, shuffle=True)
    evidence_loader = TensorLoader(dataset.train_images, dataset.train_labels, config.evidence_batch_size)
    la, model, _, losses = marglik_training(
        model,
        train_loader,
        "classification",
        optimizer_cls=adam_for(model, config.fan_in_limit),
        optimizer_kwargs={"lr": config.lr, "fused": True},
        **learning_rate_schedule(config.cooldown, config.epochs * len(train_loader)),
        n_epochs=config.epochs,
        lr_hyp=config.lr_hyp,
        prior_structure=config.prior_structure,
        learn=[name for name in config.learn.split("+") if name],
        lr_shape=config.lr_shape,
        n_epochs_burnin=config.burn_in,
        n_hypersteps=config.hypersteps,
        marglik_frequency=config.frequency,
        prior_prec_init=config.prior_prec_init,
        progress_bar=progress,
        objective=config.objective,
        fisher=config.fisher,
        resolution=config.resolution,
        column_tolerance=config.column_tolerance,
        marglik_loader=evidence_loader,
        checkpoint=run_dir / CHECKPOINT_FILE,
        on_evaluation=diary.record,
        description=config.name,
    )
    accuracy, nll = evaluate(model, dataset.test_images, dataset.test_labels)
    reason = None
    if config.objective == "map":
        needed = la.memory_estimate()
        if needed > MAP_EVIDENCE_BYTES:
            reason = (
                f"its factors need {needed / 1e6:.0f} MB; computed for MAP runs up to {MAP_EVIDENCE_BYTES / 1e6:.0f} MB"
            )
        else:
            la.fit(evidence_loader)
    fitted = reason is None
    evidence = float(la.log_marginal_likelihood()) / len(dataset.train_images) if fitted else None
    precision = dict(zip(la.parameter_names, la.prior_precision.tolist(), strict=True))
    lengthscales = {n: float(m.inverse_lengthscale) for n, m in model.named_modules() if isinstance(m, SpatialBasis)}
    gamma = la.effective_parameters() if fitted else None
    layers, others = describe_layers(layout(model), precision, gamma, lengthscales)
    write_file(
        run_dir / HISTORY_FILE, json.dumps({"losses": losses, "evaluations": diary.evaluations}, allow_nan=False)
    )
    return {
        "run": config.name,
        "data": config.data,
        "task": config.task,
        "layer": config.layer,
        "objective": config.objective,
        "learn": config.learn,
        "seed": config.seed,
        "accuracy": accuracy,
        "nll": nll,
        "neg_log_marginal_likelihood": None if evidence is None else -evidence,
        "neg_log_marginal_likelihood_reason": reason,
        "seconds": round(diary.seconds(), 2),
        "parameters": sum(p.numel() for p in model.parameters()),
        "train_size": len(dataset.train_images),
        "evaluated_on": "test" if config.holdout is None else "holdout",
        "evaluated_size": len(dataset.test_images),
        "layers": layers,
        "other_parameters": others,
    }


class _Diary:
    """A run's seconds and evaluations so far, in a file: what a resumed run adds to, and what `inspect` shows of a
    running one."""

    def __init__(self, path: Path, config: RunConfig, model: nn.Module) -> None:
        self.path, self.start = path, time.monotonic()
        self.names = [n for n, p in model.named_parameters() if p.requires_grad]
        self.fixed = {"config": dataclasses.asdict(config), "layout": layout(model)}
        self.before, self.evaluations = 0.0, []
        if path.exists():
            saved = json.loads(path.read_text(encoding="utf-8"))
            self.before, self.evaluations = saved["seconds"], saved["evaluations"]

    def seconds(self) -> float:
        return self.before + time.monotonic() - self.start

    def record(self, evaluation: Evaluation) -> None:
        # Written before the checkpoint of the same epoch: a run killed between the two repeats this evaluation.
        self.evaluations = [e for e in self.evaluations if e["epoch"] < evaluation.epoch]
        entry = dataclasses.asdict(evaluation)
        entry["prior_precision"] = dict(zip(self.names, evaluation.prior_precision, strict=True))
        self.evaluations.append(entry)
        state = {**self.fixed, "seconds": self.seconds(), "evaluations": self.evaluations}
        write_file(self.path, json.dumps(state, allow_nan=False))


def run_grid(
    configs: Sequence[RunConfig],
    out_dir: str | os.PathLike[str],
    *,
    options: dict[str, Any] | None = None,
    jobs: int = 1,
    progress: bool = True,
    data_dir: str | None = None,
    download: bool = False,
    on_row: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Do every run that is not done yet; after each, bring the folder's summary, table and pictures up to date.

    Args:
        configs: the runs, of different names.
        out_dir: the folder: ``config.json`` (the runs), ``environment.json`` (versions and device, one entry for each
            session), ``summary.json``, ``summary.csv``, ``table.txt``, pictures, and a folder for each run with its
            checkpoint. If it holds the same grid already, that grid is resumed.
        options: kept in ``config.json``, for whoever built ``configs``.
        jobs: runs at once, each in a process of its own with an equal share of torch's threads.
        progress: whether to show progress bars.
        data_dir: see :func:`ella_cuda.data.load`.
        download: see :func:`ella_cuda.data.load`.
        on_row: called with each new row.

    Returns:
        The rows of all finished runs, in the order of ``configs``.

    Raises:
        ValueError: two runs of one name, or the folder belongs to another grid. What :func:`run_one` raises.
        OSError: the folder cannot be written.
    """
    out_dir = Path(out_dir)
    names = [c.name for c in configs]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"configs must be at least one run, each of another name, got {names}.")
    prepare_for(configs[0], data_dir, download)  # before anything is written: the data may be missing
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(error.errno, f"the folder {out_dir} cannot be made ({error.strerror}); name another.") from error
    runs = [dataclasses.asdict(c) for c in configs]
    config_path = out_dir / CONFIG_FILE
    if config_path.exists():
        if read_grid(out_dir)[0] != list(configs):
            raise ValueError(f"{out_dir} belongs to other runs (see {config_path}); choose another folder.")
    else:
        if (out_dir / SUMMARY_FILE).exists():
            raise ValueError(
                f"{out_dir} has a {SUMMARY_FILE} but no {CONFIG_FILE}: not a folder of ella_cuda; choose another."
            )
        write_file(config_path, json.dumps({"options": options or {}, "runs": runs}, indent=1))
    _note_environment(out_dir, configs[0].device)
    done = {row["run"]: row for row in read_summary(out_dir)}
    if done:  # a session killed after writing the summary left the pictures behind it
        save_report([done[n] for n in names if n in done], out_dir)
    waiting = sorted((c for c in configs if c.name not in done), key=_cost, reverse=jobs > 1)
    epochs = sum(c.epochs for c in configs)
    bar = tqdm(total=epochs, desc=f"{len(configs)} runs", unit="epoch", disable=not progress, dynamic_ncols=True)

    def show() -> None:
        bar.n = sum(c.epochs for c in configs if c.name in done) + sum(r["epoch"] for r in read_running(out_dir))
        bar.set_postfix({"done": len(done)})

    def finish(row: dict[str, Any]) -> None:
        done[row["run"]] = row
        save_report([done[n] for n in names if n in done], out_dir)
        show()
        if on_row is not None:
            on_row(row)

    with bar:
        show()
        if jobs == 1:
            for config in waiting:
                finish(run_one(config, out_dir / config.name, progress=progress, data_dir=data_dir, download=download))
        elif waiting:
            calls = [(config, out_dir / config.name, data_dir, download) for config in waiting]
            threads = max(1, torch.get_num_threads() // jobs)
            dense = [_is_dense(config) for config in waiting]  # every step reads and writes all weights several times
            for _, row in run_at_once(_run_quietly, calls, jobs, threads, show, heavy=dense):
                finish(row)
    return [done[n] for n in names]


def _is_dense(config: RunConfig) -> bool:
    return "fc" in config.layer.split("+")


def _cost(config: RunConfig) -> tuple[bool, bool]:
    """What takes longest sorts last: dense layers, then the evidence of sums."""
    return _is_dense(config), config.objective == "evidence" and "+" in config.layer


def _run_quietly(config: RunConfig, run_dir: Path, data_dir: str | None, download: bool) -> dict[str, Any]:
    return run_one(config, run_dir, progress=False, data_dir=data_dir, download=download)


def read_grid(out_dir: str | os.PathLike[str]) -> tuple[list[RunConfig], dict[str, Any]]:
    """The runs and the options that a folder was started with.

    Raises:
        ValueError: the folder has no readable ``config.json``.
    """
    path = Path(out_dir) / CONFIG_FILE
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return [RunConfig(**run) for run in stored["runs"]], stored["options"]
    except FileNotFoundError as error:
        raise ValueError(f"{out_dir} is not the folder of a run: it has no {CONFIG_FILE}.") from error
    except NotADirectoryError as error:
        raise ValueError(f"{out_dir} is a file; name the folder of a run.") from error
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged or of another version ({error!r}); start anew in another folder."
        ) from error


def read_summary(out_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a folder's finished runs; none yet is an empty list.

    Raises:
        ValueError: ``summary.json`` is damaged.
    """
    path = Path(out_dir) / SUMMARY_FILE
    if not path.exists():
        return []
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged ({error}); move it away to do its runs again.") from error


def read_running(out_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The present state of the runs that have begun and not finished, as rows like ``summary.json``'s.

    Accuracy and NLL on test images are not known yet and missing; ``epoch`` and ``epochs`` say how far each is,
    ``loss`` and ``train_accuracy`` (percent) are those of the last evaluation.

    Raises:
        ValueError: the folder is not that of a run.
    """
    configs, _ = read_grid(out_dir)
    done = {row["run"] for row in read_summary(out_dir)}
    rows = []
    for config in configs:
        path = Path(out_dir) / config.name / DIARY_FILE
        if config.name in done or not path.exists():
            continue
        try:
            diary = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is damaged ({error}); move {path.parent} away to do that run again.") from error
        last = diary["evaluations"][-1]
        found = [last[key] for key in ("prior_precision", "effective_parameters", "inverse_lengthscale")]
        layers, others = describe_layers(diary["layout"], *found)
        rows.append(
            {
                "run": config.name,
                **{
                    key: getattr(config, key)
                    for key in ("data", "task", "layer", "objective", "learn", "seed", "epochs")
                },
                "epoch": last["epoch"],
                "loss": last["loss"],
                "train_accuracy": 100 * last["accuracy"],
                "neg_log_marginal_likelihood": last["neg_log_marginal_likelihood"],
                "seconds": round(diary["seconds"], 2),
                "layers": layers,
                "other_parameters": others,
            }
        )
    return rows


def _note_environment(out_dir: Path, device: str) -> None:
    path = out_dir / ENVIRONMENT_FILE
    try:
        sessions = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):  # a damaged note is no reason to refuse a resume
        sessions = []
    cuda = torch.device(device).type == "cuda"
    sessions.append(
        {
            "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "ella_cuda": __version__,
            "build": {
                k: v if isinstance(v, str | int | float | bool | list) else str(v) for k, v in build_info().items()
            },
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "device": device,
            "device_name": torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "command": sys.argv,
        }
    )
    write_file(path, json.dumps(sessions, indent=1))
