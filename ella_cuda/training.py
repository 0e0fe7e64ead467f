"""Training of weights and hyperparameters together: MAP steps on the weights, evidence steps on the prior precisions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ella_cuda.checkpoint import load_checkpoint, random_state, restore_random_state, save_checkpoint
from ella_cuda.laplace import KronLaplace
from ella_cuda.nn import SpatialBasis
from ella_cuda.progress import bar_size
from ella_cuda.training_graph import CudaGraphs, GraphedStep, Snapshot
from ella_cuda.training_step import TrainingStep, first_bad_layer, require_classes

Objective = Literal["evidence", "map"]
PriorStructure = Literal["layerwise", "module", "scalar"]


@dataclasses.dataclass
class Evaluation:
    """What is recorded at every evaluation; a list of these is in the checkpoint under ``history``."""

    epoch: int  # epochs done
    loss: float  # data fit, mean over the epoch's batches, plus the prior's part at the epoch's start
    accuracy: float | None  # of the training batches as they were seen, fraction; None for regression
    neg_log_marginal_likelihood: float | None  # per data point; None without an evidence step
    prior_precision: list[float]  # per parameter tensor
    effective_parameters: dict[str, float] | None  # per parameter tensor
    sigma_noise: float
    inverse_lengthscale: dict[str, float]  # per basis of a sparsified layer, by its name


def marglik_training(
    model: nn.Module,
    train_loader: Iterable[tuple[Tensor, Tensor]],
    likelihood: str = "classification",
    *,
    optimizer_cls: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
    optimizer_kwargs: dict[str, Any] | None = None,
    scheduler_cls: type[torch.optim.lr_scheduler.LRScheduler] | None = None,
    scheduler_kwargs: dict[str, Any] | None = None,
    n_epochs: int = 300,
    lr_hyp: float = 0.1,
    prior_structure: PriorStructure = "layerwise",
    n_epochs_burnin: int = 0,
    n_hypersteps: int = 10,
    marglik_frequency: int = 1,
    prior_prec_init: float = 1.0,
    sigma_noise_init: float = 1.0,
    fix_sigma_noise: bool = False,
    cuda_graph: bool = False,
    learn: Sequence[str] = (),
    lr_lengthscales: float = 0.03,
    lr_anchors: float = 0.003,
    progress_bar: bool = True,
    objective: Objective = "evidence",
    fisher: str = "exact",
    resolution: str = "shared",
    column_tolerance: float = 0.0,
    marglik_loader: Iterable[tuple[Tensor, Tensor]] | None = None,
    checkpoint: str | Path | None = None,
    on_evaluation: Callable[[Evaluation], None] | None = None,
    description: str = "training",
) -> tuple[KronLaplace, nn.Module, list[float], list[float]]:
    r"""Train ``model`` and learn one prior precision per parameter tensor by gradient ascent on the marginal likelihood.

    Every step minimises mean loss :math:`+ \frac{1}{2N} \sum_l \delta_l \|\theta_l\|^2`. After ``n_epochs_burnin`` epochs, every
    ``marglik_frequency`` epochs, one pass over ``marglik_loader`` accumulates the curvature at the present weights and
    ``n_hypersteps`` Adam steps on :math:`\log\delta` (and :math:`\log\sigma`) raise the Laplace evidence. ``objective="map"`` is the
    same loop without evidence steps. Arguments named as in laplace-torch mean the same, and defaults are its own unless noted.

    Args:
        model: maps a batch to ``(N, K)`` outputs (logits for classification). Trained in place.
        train_loader: yields ``(x, y)`` batches on the model's device; iterated once per epoch.
        likelihood: "classification" (softmax; y are ``(N,)`` class indices) or "regression" (Gaussian; y are ``(N, K)``).
        optimizer_cls: of the weights, called with their list. optimizer_kwargs: its other arguments. Default: Adam with its own defaults.
        scheduler_cls: of the weights' learning rate, stepped after every batch. scheduler_kwargs: its arguments.
        n_epochs: passes over ``train_loader``.
        lr_hyp: Adam's learning rate on the log hyperparameters, kept from one evidence step to the next.
        prior_structure: which tensors share a precision: "layerwise" (none: one precision per tensor), "module" (the tensors of
            one module) or "scalar" (all).
        n_epochs_burnin: the first evidence step is after the first multiple of ``marglik_frequency`` above it, as in the paper's
            recipe (laplace-torch does one at a multiple equal to it too).
        n_hypersteps: hyperparameter steps per evidence step.
        marglik_frequency: epochs between evaluations (evidence step and checkpoint).
        prior_prec_init: δ at the start. With N data points the prior weighs δ/N against one data point's loss.
        sigma_noise_init: σ at the start, regression only. fix_sigma_noise: whether to keep it there.
        cuda_graph: whether to record a step as a CUDA graph, once for each shape of batch (at most eight), and replay it, so that the GPU
            does not wait for Python between small kernels. For models on CUDA whose work depends on shapes alone and
            that keep no tensor from one call to the next; optimizers with the option ``capturable``, such as Adam; schedules of the
            learning rate alone. Takes one more copy of the weights and of the optimizer's state: where a loss is not finite or a label
            no class, the epoch is done again without graphs, so that the error can name the layer and the step.
        learn: which hyperparameters of sparsified layers the evidence learns beside the precisions: any of "lengthscales" (log
            :math:`\omega` of every :class:`ella_cuda.nn.SpatialBasis`) and "anchors" (their locations, in pixels). At the end of every
            evidence step but one at the last epoch, which no training would follow, they make one Adam step
            along the evidence's gradient; one, because the data fit's part is a gradient at the present values. With
            ``objective="map"`` they stay.
        lr_lengthscales: Adam's learning rate on log ω.
        lr_anchors: Adam's learning rate on anchors, in pixels. Low, since where anchors nearly coincide the interpolating basis changes
            wholly over a fraction of their distance, and the network with it.
        progress_bar: whether to show a tqdm bar with loss, accuracy and ``-log q/N``.
        objective: "evidence" or "map".
        fisher: "exact" or "mc" curvature in the evidence steps; see :class:`ella_cuda.laplace.KronLaplace`.
        resolution: "shared" or "per_channel" output factors of F-FC.
        column_tolerance: share of the output Hessian's trace that may be left out; see :class:`ella_cuda.laplace.KronLaplace`.
        marglik_loader: the training data without augmentation, for the evidence; default ``train_loader``, unless that is a
            :class:`ella_cuda.data.TensorLoader` that augments.
        checkpoint: a file, written atomically at every evaluation and at the end. If it exists, training resumes from it; on the
            CPU a resumed run gives the numbers of an uninterrupted one bit for bit.
        on_evaluation: called with an :class:`Evaluation` after every evaluation.
        description: of the progress bar.

    Returns:
        ``(la, model, margliks, losses)``: the Laplace approximation at the last weights (fitted for "evidence"; for "map" not
        fitted, call ``la.fit``), the trained model, ``-log q`` after every evidence step, and the mean loss of every epoch,
        the prior's term included.
        Unlike laplace-torch, the last weights are kept, not those of the evaluation with the best evidence.

    Raises:
        ValueError: an argument out of range, or a burn-in that leaves no epoch for an evidence step; labels that are no class
            indices; an empty loader; a checkpoint of other settings or another amount of data, or one that cannot be read.
        FloatingPointError: the loss, a factor, or a parameter after an epoch is not finite; the message names layer, epoch and
            step. The last good checkpoint stays.

    Source: Immer et al., "Scalable marginal likelihood estimation for model selection in deep learning", ICML 2021, algorithm 1;
    van der Ouderaa et al., NeurIPS 2023, section 5.
    """
    _check_arguments(
        likelihood=(likelihood, ("classification", "regression")),
        objective=(objective, ("evidence", "map")),
        prior_structure=(prior_structure, ("layerwise", "module", "scalar")),
    )
    _check_numbers(
        n_epochs=(n_epochs, 1),
        n_epochs_burnin=(n_epochs_burnin, 0),
        n_hypersteps=(n_hypersteps, 1),
        marglik_frequency=(marglik_frequency, 1),
    )
    if objective == "evidence" and n_epochs_burnin >= n_epochs:
        raise ValueError(
            f"marglik_training: n_epochs_burnin must be less than n_epochs, or no evidence step is done; got {n_epochs_burnin} and "
            f"{n_epochs}. For training without evidence steps pass objective='map'."
        )
    evaluations = range(marglik_frequency, n_epochs, marglik_frequency)
    if learn and objective == "evidence" and not any(epoch > n_epochs_burnin for epoch in evaluations):
        raise ValueError(
            f"marglik_training: learn={learn!r} needs an evidence step after n_epochs_burnin = {n_epochs_burnin} and before the last epoch, "
            f"{n_epochs}; with marglik_frequency = {marglik_frequency} there is none."
        )
    for name, value in (
        ("lr_hyp", lr_hyp),
        ("prior_prec_init", prior_prec_init),
        ("sigma_noise_init", sigma_noise_init),
        ("lr_lengthscales", lr_lengthscales),
        ("lr_anchors", lr_anchors),
    ):
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"marglik_training: {name} must be positive and finite, got {value!r}.")
    prior = _Prior(model, prior_structure, prior_prec_init, sigma_noise_init)
    optimizer = optimizer_cls(prior.parameters, **(optimizer_kwargs or {}))
    groups = prior.described(optimizer)  # before a scheduler changes their rates
    scheduler = None if scheduler_cls is None else scheduler_cls(optimizer, **(scheduler_kwargs or {}))
    step = TrainingStep(model, optimizer, prior.parameters, likelihood)
    graphed = GraphedStep(step, CudaGraphs(prior.parameters[0].device)) if cuda_graph else None
    learn_sigma = likelihood == "regression" and not fix_sigma_noise
    hyper_optimizer = torch.optim.Adam(
        [prior.log_precision, *([prior.log_sigma] if learn_sigma else [])], lr=lr_hyp, fused=True
    )
    laplace_settings = {"likelihood": likelihood, "fisher": fisher, "resolution": resolution}
    laplace_settings["column_tolerance"] = column_tolerance
    shape = _Shape(model, learn)
    shape_rates = {"lengthscales": lr_lengthscales, "anchors": lr_anchors}
    shape_optimizer = torch.optim.Adam(shape.groups(shape_rates)) if shape.leaves else None
    settings = {
        **laplace_settings,
        "objective": objective,
        "learn": list(shape.learn),
        **{f"lr_{name}": rate if name in shape.learn else None for name, rate in shape_rates.items()},
        "n_epochs": n_epochs,
        "lr_hyp": lr_hyp,
        "prior_structure": prior_structure,
        "n_epochs_burnin": n_epochs_burnin,
        "n_hypersteps": n_hypersteps,
        "marglik_frequency": marglik_frequency,
        "prior_prec_init": prior_prec_init,
        "sigma_noise_init": sigma_noise_init,
        "fix_sigma_noise": fix_sigma_noise,
        "parameters": prior.names,
        "optimizer_cls": optimizer_cls.__name__,
        "optimizer_kwargs": _plain(optimizer_kwargs),
        "optimizer_groups": groups,
        "scheduler_cls": None if scheduler_cls is None else scheduler_cls.__name__,
        "scheduler_kwargs": _plain(scheduler_kwargs),
        "n_data": _dataset_size(train_loader),
    }
    if objective == "evidence" and marglik_loader is None and getattr(train_loader, "augment", None) is not None:
        raise ValueError(
            "marglik_training: marglik_loader must be given where train_loader augments its images: the evidence is that of the data "
            "as they are. Pass a TensorLoader of the same data without augment."
        )
    evidence_loader = train_loader if marglik_loader is None else marglik_loader
    loaders = [train_loader, evidence_loader]
    margliks: list[float] = []
    losses: list[float] = []
    history: list[dict[str, Any]] = []
    parts = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "prior": prior,
        "hyper_optimizer": hyper_optimizer,
        "shape_optimizer": shape_optimizer,
    }
    first_epoch = 0
    la = random_at_fit = None
    if checkpoint is not None and Path(checkpoint).exists():
        state = load_checkpoint(checkpoint, settings, model)
        for key, part in parts.items():
            if part is not None:
                part.load_state_dict(state[key])
        margliks, losses, history, first_epoch = state["margliks"], state["losses"], state["history"], state["epoch"]
        random_at_fit = state["random_at_fit"]
        restore_random_state(state["random"], loaders)

    def new_laplace() -> KronLaplace:
        return KronLaplace(
            model, prior_precision=prior.precision().detach(), sigma_noise=prior.sigma().detach(), **laplace_settings
        )

    bar = tqdm(
        total=n_epochs,
        initial=first_epoch,
        desc=description,
        unit="epoch",
        disable=not progress_bar,
        **bar_size(),
    )
    try:
        for epoch in range(first_epoch + 1, n_epochs + 1):
            if graphed is None:
                loss, accuracy = _train_epoch(step, None, train_loader, scheduler, prior, epoch)
            else:
                loss, accuracy = _train_epoch_by_graphs(step, graphed, train_loader, scheduler, prior, epoch)
            prior.check_finite(epoch)
            losses.append(loss)
            shown = {"loss": f"{loss:.3f}"} | ({} if accuracy is None else {"acc": f"{100 * accuracy:.1f}%"})
            if epoch % marglik_frequency == 0 or epoch == n_epochs:
                evidence = effective = None
                lengthscales = shape.inverse_lengthscales()
                if objective == "evidence" and epoch > n_epochs_burnin:
                    bar.set_postfix(shown | {"-log q/N": "..."})  # it takes as long as some epochs
                    random_at_fit = random_state(loaders)
                    la = None  # before the next one is made, or the factors of both are in memory
                    with shape.differentiable():
                        la = new_laplace().fit(evidence_loader)
                    evidence = _evidence_step(la, prior, hyper_optimizer, learn_sigma, n_hypersteps)
                    margliks.append(-evidence * la.n_data)
                    evidence = -evidence
                    effective = la.effective_parameters()
                    if shape_optimizer is not None and epoch < n_epochs:
                        _shape_step(la, shape, shape_optimizer)
                    if graphed is not None and shape.bases:
                        graphed.forget()  # bases keep matrices, which are others now
                    shown["-log q/N"] = f"{evidence:.3f}"
                evaluation = Evaluation(
                    epoch,
                    loss,
                    accuracy,
                    evidence,
                    prior.precision().tolist(),
                    effective,
                    float(prior.sigma().detach()),
                    lengthscales,
                )
                history.append(dataclasses.asdict(evaluation))
                if on_evaluation is not None:
                    on_evaluation(evaluation)
                if checkpoint is not None:
                    state = {key: None if part is None else part.state_dict() for key, part in parts.items()}
                    state |= {"epoch": epoch, "margliks": margliks, "losses": losses, "history": history}
                    state |= {"random": random_state(loaders), "random_at_fit": random_at_fit}
                    save_checkpoint(checkpoint, state | {"settings": settings})
            bar.set_postfix(shown, refresh=False)
            bar.update()
    finally:
        bar.close()
    if la is None:
        la = new_laplace()
        if objective == "evidence":  # a finished run, resumed: its last fit again
            restore_random_state(random_at_fit, loaders)
            with shape.differentiable():
                la.fit(evidence_loader)
            restore_random_state(state["random"], loaders)
    return la, model, margliks, losses


def _plain(arguments: dict[str, Any] | None) -> dict[str, str]:
    """Arguments in words, by which two sessions of a run can be compared."""
    return {key: _words(value) for key, value in sorted((arguments or {}).items())}


def _words(value: Any) -> str:
    """Numbers, strings and data classes as they are written, functions and other objects by name: no addresses."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_words, value))})"
    if isinstance(value, (bool, int, float, str, type(None))) or dataclasses.is_dataclass(value):
        return repr(value)
    return getattr(value, "__qualname__", type(value).__qualname__)


class _Prior:
    """Log precisions, one per group of parameter tensors, and the log noise scale; float64 whatever the model's dtype."""

    def __init__(self, model: nn.Module, structure: PriorStructure, precision: float, sigma: float) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise ValueError("marglik_training: model has no parameter that requires grad; there is nothing to train.")
        self.names, self.parameters = [n for n, _ in named], [p for _, p in named]
        key = {"layerwise": lambda n: n, "module": lambda n: n.rpartition(".")[0], "scalar": lambda n: ""}[structure]
        groups = list(dict.fromkeys(key(n) for n in self.names))
        device = self.parameters[0].device
        self.group = torch.tensor([groups.index(key(n)) for n in self.names], device=device)
        self.log_precision = torch.full(
            (len(groups),), math.log(precision), dtype=torch.float64, device=device
        ).requires_grad_()
        self.log_sigma = torch.tensor(math.log(sigma), dtype=torch.float64, device=device).requires_grad_()

    def log_precisions(self) -> Tensor:
        """log δ, one per parameter tensor, differentiable in the log precisions."""
        return self.log_precision[self.group] if len(self.log_precision) < len(self.group) else self.log_precision

    def precision(self) -> Tensor:
        """δ, one per parameter tensor, differentiable in the log precisions."""
        return self.log_precisions().exp()

    def sigma(self) -> Tensor:
        """σ, 0-dim."""
        return self.log_sigma.exp()

    def described(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        """The optimizer's groups in words: each one's numbers, such as its learning rate, and its parameters by name."""
        names = dict(zip(map(id, self.parameters), self.names, strict=True))
        return [
            _plain({key: value for key, value in group.items() if key != "params"})
            | {"params": [names.get(id(p), "?") for p in group["params"]]}
            for group in optimizer.param_groups
        ]

    def check_finite(self, epoch: int) -> None:
        """Raise FloatingPointError when a parameter is not finite: such weights must not replace a good checkpoint."""
        bad = ~torch.stack([norm.isfinite() for norm in torch._foreach_norm([p.detach() for p in self.parameters])])
        if bad.any():
            name = self.names[int(bad.nonzero()[0])]
            raise FloatingPointError(
                f"marglik_training: the parameter {name} is not finite after epoch {epoch}, although the loss was: a gradient or the "
                "optimizer's step was not. Lower the learning rate, or look for a function with an infinite derivative in the model; the "
                "last checkpoint, if any, is from before this epoch."
            )

    def state_dict(self) -> dict[str, Tensor]:
        return {"log_precision": self.log_precision.detach().clone(), "log_sigma": self.log_sigma.detach().clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        with torch.no_grad():
            self.log_precision.copy_(state["log_precision"])
            self.log_sigma.copy_(state["log_sigma"])


class _Shape:
    """Hyperparameters inside the network: the bases of its sparsified layers, of which ``learn`` says what moves.

    Leaves are what the optimizer works on, float64 whatever the model's dtype, lengthscales in logarithms. The model's buffers are the
    truth: leaves are read from them before a step, buffers written after it.
    """

    def __init__(self, model: nn.Module, learn: Sequence[str]) -> None:
        if isinstance(learn, str):
            raise ValueError(
                f"marglik_training: learn must be a list of names, got {learn!r}; pass a list, such as [{learn!r}]."
            )
        if any(name not in ("anchors", "lengthscales") for name in learn):
            raise ValueError(f"marglik_training: learn must list any of anchors, lengthscales, got {learn!r}.")
        self.learn = tuple(sorted(set(learn)))
        self.bases = {name: m for name, m in model.named_modules() if isinstance(m, SpatialBasis)}
        if self.learn and not self.bases:
            raise ValueError(
                f"marglik_training: learn={list(learn)} needs sparsified layers (ella_cuda.nn.SparseFactoredLinear2d, SparseConv2d), the "
                "model has none."
            )
        attributes = {"anchors": "anchors", "lengthscales": "inverse_lengthscale"}
        self._places = [(basis, attributes[name]) for basis in self.bases.values() for name in self.learn]
        self._kinds = [name for _ in self.bases for name in self.learn]
        self.leaves = [b.detach().double().clone().requires_grad_() for b in self.buffers()]
        self.read()

    def groups(self, rates: dict[str, float]) -> list[dict[str, Any]]:
        """The leaves as an optimizer's groups, each kind at its rate."""
        return [
            {
                "params": [leaf for leaf, kind in zip(self.leaves, self._kinds, strict=True) if kind == name],
                "lr": rates[name],
            }
            for name in self.learn
        ]

    def buffers(self) -> list[Tensor]:
        """What moves, as it stands in the model."""
        return [getattr(basis, name) for basis, name in self._places]

    @contextmanager
    def differentiable(self) -> Iterator[None]:
        """The buffers that move require a gradient for the duration of the context."""
        before = [(buffer, buffer.requires_grad) for buffer in self.buffers()]
        for buffer, _ in before:
            buffer.requires_grad_()
        try:
            yield
        finally:
            for buffer, required in before:
                buffer.requires_grad_(required)

    def read(self) -> None:
        """The leaves from the buffers; ValueError where a lengthscale has no logarithm."""
        with torch.no_grad():
            for leaf, buffer in zip(self.leaves, self.buffers(), strict=True):
                if not leaf.dim() and not buffer > 0:
                    raise ValueError("marglik_training: learn='lengthscales' needs positive inverse lengthscales.")
                leaf.copy_(buffer if leaf.dim() else buffer.double().log())

    def write(self) -> None:
        """The buffers from the leaves."""
        with torch.no_grad():
            for leaf, buffer in zip(self.leaves, self.buffers(), strict=True):
                buffer.copy_(leaf if leaf.dim() else leaf.exp())

    def inverse_lengthscales(self) -> dict[str, float]:
        """ω of every basis, by the basis' name."""
        return {name: float(basis.inverse_lengthscale) for name, basis in self.bases.items()}


def _train_epoch(
    step: TrainingStep,
    graphed: GraphedStep | None,
    loader: Iterable[tuple[Tensor, Tensor]],
    scheduler: Any,
    prior: _Prior,
    epoch: int,
) -> tuple[float, float | None]:
    """One pass; returns the batches' mean data loss plus the prior's part at its start, and the training accuracy as a fraction."""
    step.model.train()
    penalty = step.begin_epoch(prior.precision().detach(), float(prior.sigma().detach()), _dataset_size(loader))
    done = 0

    def require_finite(loss: Tensor) -> None:
        if not torch.isfinite(loss + penalty):
            raise FloatingPointError(
                f"marglik_training: the loss is {float(loss) + penalty} at epoch {epoch}, step {done + 1}; "
                f"{first_bad_layer(step.model, x)}. Lower the learning rate or raise prior_prec_init; the last checkpoint, if any, is "
                "from before this epoch."
            )

    seen = 0
    for x, y in loader:
        if graphed is None:
            step(x, y, require_classes, require_finite)
        else:
            graphed(x, y)
        if scheduler is not None:
            scheduler.step()
        seen, done = seen + len(x), done + 1
    if done == 0:
        raise ValueError("marglik_training: train_loader yielded no batch; check its data set and drop_last.")
    loss, accuracy = step.epoch_means(done, seen)
    return loss + penalty, accuracy


def _train_epoch_by_graphs(
    step: TrainingStep,
    graphed: GraphedStep,
    loader: Iterable[tuple[Tensor, Tensor]],
    scheduler: Any,
    prior: _Prior,
    epoch: int,
) -> tuple[float, float | None]:
    """The same by recorded steps. Where one went wrong, the epoch is done again without them, to say which and why."""
    before, random_before = Snapshot(step, scheduler), random_state([loader])
    graphed.begin_epoch()
    loss, accuracy = _train_epoch(step, graphed, loader, scheduler, prior, epoch)
    if math.isfinite(loss) and graphed.labels_were_classes():
        return loss, accuracy
    before.restore()
    restore_random_state(random_before, [loader])
    graphed.forget()  # they read the optimizer's state where it was
    return _train_epoch(step, None, loader, scheduler, prior, epoch)


def _dataset_size(loader: Any) -> int:
    """N, which weighs the prior against the data: how many points one pass yields."""
    batches = getattr(loader, "batch_sampler", None)
    if hasattr(loader, "dataset_size"):
        size = loader.dataset_size
    elif hasattr(getattr(batches, "sampler", None), "__len__") and hasattr(batches, "batch_size"):
        size = len(batches.sampler)  # a subset of the data set, where a sampler takes one
        if batches.drop_last:
            size -= size % batches.batch_size
    elif hasattr(getattr(loader, "dataset", None), "__len__"):
        size = len(loader.dataset)
    else:
        raise ValueError(
            "marglik_training: the number of data points is unknown; train_loader needs a `dataset` with a length (as "
            "torch.utils.data.DataLoader has) or an attribute `dataset_size`."
        )
    if size < 1:
        raise ValueError("marglik_training: train_loader has no data points.")
    return size


def _evidence_step(
    la: KronLaplace, prior: _Prior, optimizer: torch.optim.Optimizer, learn_sigma: bool, steps: int
) -> float:
    """Adam steps on the hyperparameters with the curvature held; returns log q / N at the last ones."""
    upward = prior.log_precision.new_tensor(-1 / la.n_data)
    for _ in range(steps):
        optimizer.zero_grad()
        la.evidence_at(prior.log_precisions(), prior.log_sigma if learn_sigma else None).backward(upward)
        optimizer.step()
    with torch.no_grad():
        la.prior_precision = prior.precision()
        la.sigma_noise = prior.sigma()
        return float(la.log_marginal_likelihood()) / la.n_data


def _shape_step(la: KronLaplace, shape: _Shape, optimizer: torch.optim.Optimizer) -> None:
    """One step on the hyperparameters inside the network, along the gradient of log q / N at the fit."""
    shape.read()
    buffers = shape.buffers()
    with shape.differentiable(), torch.enable_grad():
        gradients = torch.autograd.grad(la.log_marginal_likelihood() / la.n_data, buffers)
    for leaf, buffer, gradient in zip(shape.leaves, buffers, gradients, strict=True):
        leaf.grad = -(
            gradient if leaf.dim() else gradient * buffer
        ).double()  # a leaf of no axes is its buffer's logarithm
    optimizer.step()
    shape.write()


def _check_arguments(**choices: tuple[str, tuple[str, ...]]) -> None:
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            raise ValueError(f"marglik_training: {name} must be one of {', '.join(allowed)}, got {value!r}.")


def _check_numbers(**bounds: tuple[int, int]) -> None:
    for name, (value, least) in bounds.items():
        if not isinstance(value, int) or value < least:
            raise ValueError(f"marglik_training: {name} must be an integer >= {least}, got {value!r}.")
