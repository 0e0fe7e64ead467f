"""Training of weights and hyperparameters together: MAP steps on the weights, evidence steps on the prior precisions."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ella_cuda.laplace import KronLaplace
from ella_cuda.laplace.kron import FISHERS
from ella_cuda.laplace.likelihoods import LIKELIHOODS
from ella_cuda.laplace.rules.base import RESOLUTIONS
from ella_cuda.laplace.values import check_choice
from ella_cuda.progress import bar_size
from ella_cuda.training.bases import LearnedBases, bases_step
from ella_cuda.training.checkpoint import (
    claimed,
    random_state,
    restore_random_state,
    resume,
    save_checkpoint,
    threads_of,
    warn_of_unsaved_state,
)
from ella_cuda.training.data import data_digest
from ella_cuda.training.epoch import train_epoch, train_epoch_by_graphs
from ella_cuda.training.graph import CudaGraphs, GraphedStep
from ella_cuda.training.points import Points, points_of
from ella_cuda.training.prior import Prior, PriorStructure, evidence_step
from ella_cuda.training.start import make_optimizer, make_scheduler, require_passes, require_writable, try_evidence
from ella_cuda.training.step import TrainingStep
from ella_cuda.training.words import in_words, name_of

Objective = Literal["evidence", "map"]


@dataclasses.dataclass
class Evaluation:
    """What is recorded at every evaluation; a list of these is in the checkpoint under ``history``."""

    epoch: int  # epochs done
    loss: float  # data fit, mean over the epoch's data points, plus the prior's part at the epoch's start
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
    n_data: int | None = None,
    checkpoint: str | Path | None = None,
    depends_on: Mapping[str, Any] | None = None,
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
        train_loader: yields ``(x, y)`` batches, which are moved to the model's device; iterated once per epoch.
        likelihood: "classification" (softmax; y are ``(N,)`` class indices) or "regression" (Gaussian; y are ``(N, K)``).
        optimizer_cls: of the weights, called with their list. Default: Adam with its own defaults.
        optimizer_kwargs: its other arguments. Pass ``weight_decay=0`` to an optimizer that decays weights unasked, such as AdamW: the prior
            is the weight decay, and another is added to it, of which a warning tells.
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
            :class:`ella_cuda.data.TensorLoader` that augments. Its first images are tried before the first step.
        n_data: N, where it is not what a pass over ``train_loader`` and one over ``marglik_loader`` both yield: some images are drawn
            several times, dropped, or left out of the evidence. None takes N from the loader's ``dataset_size``, or from a
            ``DataLoader``'s data set and samplers; where these do not tell, batches are counted in one pass before the first step.
        checkpoint: a file, written atomically at every evaluation and at the end. If it exists, training resumes from it. On the
            CPU a resumed run gives the numbers of an uninterrupted one bit for bit on the same machine with the same number of torch's
            threads, and the same run up to rounding on another, which a warning says for threads. That covers what is drawn
            from the global generators of torch, numpy and Python and from the ``generator`` of a loader or of its samplers, by
            a ``DataLoader``'s workers too, which are seeded anew every epoch. It does not cover workers that go on from epoch to epoch
            (``persistent_workers=True``) or batches in the order in which they are ready (``in_order=False``), of both of which it
            warns; nor generators that a data set has of its own, where it is read in this process (``num_workers=0``), nor any other
            state that a loader or data set keeps from one epoch to the next. One call at a time works on a file.
            A file of other settings or other data is refused, as far as the data tell without a pass over them: by the loader's attribute
            ``data_digest`` (a string of your choice, None for unknown), which :class:`ella_cuda.data.TensorLoader` has, or the tensors of a
            DataLoader's ``TensorDataset``; for others by the number of data points alone.
        depends_on: what else the numbers depend on, by name, such as how the data were made; a checkpoint of another is refused.
        on_evaluation: called with an :class:`Evaluation` after every evaluation.
        description: of the progress bar.

    Returns:
        ``(la, model, margliks, losses)``: the Laplace approximation at the last weights (fitted for "evidence"; for "map" not
        fitted, call ``la.fit``), the trained model, ``-log q`` after every evidence step, and the mean loss of every epoch,
        the prior's term included.
        Unlike laplace-torch, the last weights are kept, not those of the evaluation with the best evidence.

    Raises:
        TypeError: an argument is of a wrong type; layers have no curvature rule, all of which are named; a loader yields something else
            than pairs of tensors, or can be passed over once only; an optimizer or a schedule whose ``step`` needs arguments.
        ValueError: an argument out of range, or a burn-in that leaves no epoch for an evidence step; outputs or labels that do not fit
            the likelihood; an empty loader; a pass with another number of data points than N; a checkpoint of other settings or
            data, or one that cannot be read.
        OSError: the checkpoint cannot be written.
        RuntimeError: another call, of this process or another, works on the checkpoint; an optimizer's step asks for a closure.
        FloatingPointError: the loss, a factor, or a parameter after an epoch is not finite; the message names layer, epoch and
            step. The last good checkpoint stays.

    Source: Immer et al., "Scalable marginal likelihood estimation for model selection in deep learning", ICML 2021, algorithm 1;
    van der Ouderaa et al., NeurIPS 2023, section 5.
    """
    likelihood, objective, prior_structure, fisher, resolution = (
        check_choice(f"marglik_training: {name}", choice, choices)
        for name, choice, choices in (
            ("likelihood", likelihood, tuple(LIKELIHOODS)),
            ("objective", objective, get_args(Objective)),
            ("prior_structure", prior_structure, get_args(PriorStructure)),
            ("fisher", fisher, FISHERS),
            ("resolution", resolution, RESOLUTIONS),
        )
    )
    n_epochs, n_epochs_burnin = _whole("n_epochs", n_epochs, 1), _whole("n_epochs_burnin", n_epochs_burnin, 0)
    n_hypersteps = _whole("n_hypersteps", n_hypersteps, 1)
    marglik_frequency = _whole("marglik_frequency", marglik_frequency, 1)
    require_passes(train_loader, "train_loader")
    if marglik_loader is not None:
        require_passes(marglik_loader, "marglik_loader")
    if on_evaluation is not None and not callable(on_evaluation):
        raise TypeError(
            f"marglik_training: on_evaluation must be None or a function of an Evaluation, got {on_evaluation!r}."
        )
    if checkpoint is not None:
        require_writable(checkpoint)
    if objective == "evidence" and n_epochs_burnin >= n_epochs:
        raise ValueError(
            f"marglik_training: n_epochs_burnin must be less than n_epochs, or no evidence step is done; got {n_epochs_burnin} and "
            f"{n_epochs}. For training without evidence steps pass objective='map'."
        )
    before_last = (
        (n_epochs - 1) // marglik_frequency * marglik_frequency
    )  # the last evaluation before that of the last epoch
    if learn and objective == "evidence" and before_last <= n_epochs_burnin:
        raise ValueError(
            f"marglik_training: learn={learn!r} needs an evidence step after n_epochs_burnin = {n_epochs_burnin} and before the last epoch, "
            f"{n_epochs}; with marglik_frequency = {marglik_frequency} there is none."
        )
    lr_hyp, prior_prec_init = _positive("lr_hyp", lr_hyp), _positive("prior_prec_init", prior_prec_init)
    sigma_noise_init = _positive("sigma_noise_init", sigma_noise_init)
    bases_rates = {
        "lengthscales": _positive("lr_lengthscales", lr_lengthscales),
        "anchors": _positive("lr_anchors", lr_anchors),
    }
    laplace_settings = {"likelihood": likelihood, "fisher": fisher, "resolution": resolution}
    laplace_settings["column_tolerance"] = column_tolerance
    KronLaplace(model, sigma_noise=sigma_noise_init, **laplace_settings)  # refuses what no evidence step could do
    if objective == "evidence" and marglik_loader is None and getattr(train_loader, "augment", None) is not None:
        raise ValueError(
            "marglik_training: marglik_loader must be given where train_loader augments its images: the evidence is that of the data "
            "as they are. Pass a TensorLoader of the same data without augment."
        )
    evidence_loader = train_loader if marglik_loader is None else marglik_loader
    evidence_name = "train_loader" if marglik_loader is None else "marglik_loader"
    prior = Prior(model, prior_structure, prior_prec_init, sigma_noise_init)
    optimizer = make_optimizer(optimizer_cls, prior.parameters, optimizer_kwargs)
    groups = prior.described(optimizer)  # before a scheduler changes their rates
    batches = _length(train_loader)
    scheduler = make_scheduler(
        scheduler_cls, optimizer, scheduler_kwargs, None if batches is None else batches * n_epochs
    )
    step = TrainingStep(model, optimizer, prior.parameters, likelihood)
    graphed = GraphedStep(step, CudaGraphs(prior.parameters[0].device)) if cuda_graph else None
    learn_sigma = likelihood == "regression" and not fix_sigma_noise
    hyper_optimizer = torch.optim.Adam(
        [prior.log_precision, *([prior.log_sigma] if learn_sigma else [])], lr=lr_hyp, fused=True
    )
    bases = LearnedBases(model, learn)
    bases_optimizer = torch.optim.Adam(bases.groups(bases_rates)) if bases.leaves else None
    if n_data is not None:
        points = evidence_points = Points(_whole("n_data", n_data, 1), "train_loader", "")
    else:
        points = evidence_points = points_of(train_loader, "train_loader", progress_bar)
        if objective == "evidence" and evidence_loader is not train_loader:
            evidence_points = points_of(evidence_loader, "marglik_loader", progress_bar)
            if evidence_points.count != points.count:
                raise ValueError(
                    f"marglik_training: marglik_loader must yield as many data points as train_loader, got {evidence_points.count} and "
                    f"{points.count}: the prior has one precision for both. Pass loaders of the same data, or n_data=N, against which "
                    "the prior is weighed in training."
                )
    settings = {
        **laplace_settings,
        "objective": objective,
        "learn": list(bases.learn),
        **{f"lr_{name}": rate if name in bases.learn else None for name, rate in bases_rates.items()},
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
        "optimizer_cls": name_of(optimizer_cls),
        "optimizer_kwargs": in_words(optimizer_kwargs),
        "optimizer_groups": groups,
        "scheduler_cls": None if scheduler_cls is None else name_of(scheduler_cls),
        "scheduler_kwargs": in_words(scheduler_kwargs),
        "n_data": points.count,
        "depends_on": in_words(depends_on),
    }
    loaders = [train_loader, evidence_loader]
    if checkpoint is not None:
        warn_of_unsaved_state(loaders)
    margliks: list[float] = []
    losses: list[float] = []
    history: list[dict[str, Any]] = []
    parts = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "prior": prior,
        "hyper_optimizer": hyper_optimizer,
        "shape_optimizer": bases_optimizer,  # as checkpoints name it
    }
    first_epoch = 0
    la = random_at_fit = None
    if checkpoint is not None:
        settings["data"] = {"training": data_digest(train_loader), "evidence": data_digest(evidence_loader)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(claimed(checkpoint))
        if checkpoint is not None and Path(checkpoint).exists():
            state = resume(checkpoint, settings, parts, loaders)
            settings["optimizer_groups"] = state["settings"]["optimizer_groups"]  # rates as they were rounded at first
            margliks, losses, history = state["margliks"], state["losses"], state["history"]
            first_epoch, random_at_fit = state["epoch"], state["random_at_fit"]
        claims = stack.pop_all()  # until the last checkpoint is written

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
        if objective == "evidence" and first_epoch < n_epochs:
            with bases.differentiable():
                try_evidence(new_laplace(), evidence_loader, evidence_name)
        for epoch in range(first_epoch + 1, n_epochs + 1):
            prior.require_parameters_of(model)
            if graphed is None:
                loss, accuracy = train_epoch(step, None, train_loader, points, scheduler, prior, epoch)
            else:
                loss, accuracy = train_epoch_by_graphs(step, graphed, train_loader, points, scheduler, prior, epoch)
            prior.check_finite(epoch)
            losses.append(loss)
            shown = {"loss": f"{loss:.3f}"} | ({} if accuracy is None else {"acc": f"{100 * accuracy:.1f}%"})
            if epoch % marglik_frequency == 0 or epoch == n_epochs:
                evidence = effective = None
                lengthscales = bases.inverse_lengthscales()
                if objective == "evidence" and epoch > n_epochs_burnin:
                    bar.set_postfix(shown | {"-log q/N": "..."})  # it takes as long as some epochs
                    random_at_fit = random_state(loaders)
                    la = None  # before the next one is made, or the factors of both are in memory
                    with bases.differentiable():
                        la = new_laplace().fit(evidence_loader)
                    evidence_points.require(la.n_data)
                    evidence = evidence_step(la, prior, hyper_optimizer, learn_sigma, n_hypersteps)
                    margliks.append(-evidence * la.n_data)
                    evidence = -evidence
                    effective = la.effective_parameters()
                    if bases_optimizer is not None and epoch < n_epochs:
                        bases_step(la, bases, bases_optimizer)
                    if graphed is not None and bases.by_name:
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
                    state |= {"settings": settings, "threads": threads_of(model)}
                    save_checkpoint(checkpoint, state)
            bar.set_postfix(shown, refresh=False)
            bar.update()
    finally:
        bar.close()
        claims.close()
    if la is None:
        la = new_laplace()
        if objective == "evidence":  # a finished run, resumed: its last fit again
            restore_random_state(random_at_fit, loaders)
            with bases.differentiable():
                la.fit(evidence_loader)
            restore_random_state(state["random"], loaders)
    return la, model, margliks, losses


def _length(loader: Any) -> int | None:
    """Batches of a pass; None where the loader does not tell."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _whole(name: str, value: int, least: int) -> int:
    """The value as an int; numpy's are whole numbers too."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"marglik_training: {name} must be an integer, got {value!r}.")
    if value < least:
        raise ValueError(f"marglik_training: {name} must be at least {least}, got {value!r}.")
    return int(value)


def _positive(name: str, value: float) -> float:
    """The value as a float, from whatever is one real number."""
    try:
        if isinstance(value, (bool, str)):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"marglik_training: {name} must be one number, got {type(value).__name__}.") from error
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(f"marglik_training: {name} must be positive and finite, got {value!r}.")
    return number
