"""One training with its evaluation."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ella_cuda.augment import AffineAugment, Augment, AveragedFunction
from ella_cuda.claim import LOCK_FILE, claim
from ella_cuda.data import (
    SOURCES,
    Dataset,
    FlipsShifts,
    TensorLoader,
    black_as_zero,
    folder,
    holdout,
    load,
    make_task,
    normalize,
    stratified_order,
    subsample,
)
from ella_cuda.data.labelled import SPLIT
from ella_cuda.digest import tensors_digest
from ella_cuda.distributed import Ranks, shard
from ella_cuda.experiments.device import device_of_process, resolve_device
from ella_cuda.experiments.diary import Diary
from ella_cuda.experiments.error_bars import by_last_layer, described, marks, of_last_layer
from ella_cuda.experiments.evaluation import asked_images, describe_predictions, evaluate
from ella_cuda.experiments.examples import keep_examples, pixels, shrunk
from ella_cuda.experiments.hyperparameters import CurvatureConfig, LearnersConfig, RunConfig
from ella_cuda.experiments.networks import build_network, load_weights, require_network
from ella_cuda.experiments.optimizer import adam_for, learning_rate_schedule
from ella_cuda.experiments.tensorboard import FOLDER, TensorBoardLog, require_tensorboard
from ella_cuda.files import remove_temporary_files, write_file
from ella_cuda.laplace import KronLaplace
from ella_cuda.laplace.evidence import of_tensors
from ella_cuda.laplace.leave_one_out import affordable, have_learned_alike, knows_by_heart, training_nll
from ella_cuda.nn import SpatialBasis
from ella_cuda.reports import describe_layers, layout
from ella_cuda.run_folder import (
    CHECKPOINT_FILE,
    LAPLACE_FILE,
    of_network,
    write_history,
    write_predictions,
    write_samples,
)
from ella_cuda.training import Evaluation, marglik_training
from ella_cuda.training.checkpoint import kept_random_state
from ella_cuda.training.processes import OneProcess, Processes
from ella_cuda.training.trainer import calibrated

# A batch of the curvature pass is some 300 kernels, however many images it has: of few a GPU is done before Python has launched them.
EVIDENCE_BATCH_SIZES = {"cpu": 150, "cuda": 1000}
FOLDS_FOLDER, PARTS = "folds", 3  # of a run's folder: the network that has not seen one image in so many
SAMPLED, SHOWN_COPIES = 5, 9  # images, and copies of each, that a picture shows
MAP_EVIDENCE_BYTES = 400_000_000  # curvature of MAP networks is computed for the record only, so only where it is cheap


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
    test_size: int | None = None,
    split: float = SPLIT,
    skip_unreadable: bool = False,
) -> Dataset:
    """A run's images and labels on the CPU: loaded, split, subsampled, made into the task, normalised; of a path by
    :func:`ella_cuda.data.folder`.

    Their digest is that of images before the task and of labels after it, which no rounding reaches: the same on every machine.
    """
    if data in SOURCES:
        dataset = load(data, data_dir, download)
    else:
        dataset = _in_proportion(folder(data, image_size, split, seed=data_seed, skip_unreadable=skip_unreadable))
    if holdout_fraction is not None:
        dataset = holdout(dataset, holdout_fraction, data_seed)
    if train_size is not None:
        dataset = subsample(dataset, train_size, data_seed)
    if test_size is not None:
        dataset = subsample(dataset, test_size, data_seed, "test")
    made = normalize(make_task(dataset, task, image_size, data_seed))
    sources = (dataset.train_images, dataset.train_ids, dataset.test_images, dataset.test_ids)
    return dataclasses.replace(made, digest=tensors_digest(*sources, made.train_labels, made.test_labels))


def _in_proportion(dataset: Dataset) -> Dataset:
    """The data set with its training images in an order whose every beginning has the classes in proportion: what is chosen by the first of
    them is not chosen by one class."""
    order = stratified_order(dataset.train_labels, dataset.train_ids, 0, "training order")
    names = [f"train_{kind}" for kind in ("images", "labels", "ids")]
    return dataclasses.replace(dataset, **{name: getattr(dataset, name)[order] for name in names})


def prepare_for(config: RunConfig, data_dir: str | None = None, download: bool = False) -> Dataset:
    """The images and labels of a run, on the CPU; see :func:`prepare`."""
    dataset = prepare(
        config.data,
        config.task,
        config.image_size,
        config.data_seed,
        config.train_size,
        config.holdout,
        data_dir,
        download,
        config.test_size,
        config.split,
        config.unreadable == "skip",
    )
    return black_as_zero(dataset) if config.learns_amounts else dataset


def require_data(config: RunConfig, data_dir: str | None = None, download: bool = False) -> Dataset:
    """The run's images and labels. Raise what a run raises whose data are not there, or do not fit together or its network, before anything
    is written."""
    dataset = prepare_for(config, data_dir, download)
    asked_images(config, dataset, data_dir, download)
    if config.model:
        images = torch.cat([dataset.train_images[:2], dataset.train_images[:1]])[:2]
        require_network(config, images, dataset.num_classes)
    return dataset


def averaged(config: RunConfig, network: nn.Module) -> nn.Module:
    """The network; where an augmentation is learned, the average of its outputs over copies, on the network's device."""
    if not config.learns_amounts:
        return network
    augment = AffineAugment(config.copies, config.amounts, config.amount_init)
    return AveragedFunction(network, augment).to(next(network.parameters()).device)


def same_copies(model: nn.Module, draws: Tensor | None) -> AbstractContextManager[Any]:
    """For the duration of the context, a network that averages over copies takes these draws."""
    return model.augment.held(draws) if isinstance(model, AveragedFunction) and draws is not None else nullcontext()


own_random_state = functools.partial(kept_random_state, [])  # the generators of torch, numpy and Python


@own_random_state()
def run_one(
    config: RunConfig,
    run_dir: str | os.PathLike[str],
    *,
    progress: bool = True,
    data_dir: str | None = None,
    download: bool = False,
    tensorboard: bool = False,
    cuda_graph: bool = False,
    group: Any = None,
) -> dict[str, Any]:
    """Train and evaluate one network. The caller's random state is left as it was.

    Args:
        config: the run.
        run_dir: its folder; gets ``checkpoint.pt`` and, at the end, ``history.json``. A checkpoint that is there is
            resumed, see :func:`ella_cuda.marglik_training`. One call at a time works in a folder; meanwhile ``.lock`` says which.
        progress: whether to show a progress bar.
        data_dir: see :func:`ella_cuda.data.load`.
        download: see :func:`ella_cuda.data.load`.
        tensorboard: whether to write event files for TensorBoard to ``run_dir/tensorboard``; the numbers do not depend on it.
        cuda_graph: whether steps on the weights are recorded as CUDA graphs, see :func:`ella_cuda.marglik_training`; the numbers depend
            on it by rounding alone.
        group: a ``torch.distributed`` group whose processes train together, see there; all call this, and all get the row. Rank 0 alone
            writes and evaluates.

    Returns:
        A row of ``summary.json``: ``run``, :attr:`RunConfig.described`, ``accuracy`` (percent) ``, nll``
        (nats) ``, neg_log_marginal_likelihood`` (nats per data point; None with ``..._reason`` where the curvature
        would be too large) ``, seconds, layers, other_parameters``, counts, and ``evaluated_on`` (test or
        holdout). In a grid's folder it has the ``digest`` of all but the seconds too. Where they are learned, ``augmentation``: amounts by
        generator. A network that averages over copies is evaluated on those of the last fit.

        ``calibrated_by``, "leave-one-out" or "folds", says what chose the precisions of predictions, ``..._reason`` why, and what it took;
        neither is there where they are the learned ones.

        Of images of one's own, ``nll_leave_one_out`` of the training images, of large networks fewer (nats; None where a leverage is 1 or
        more, or without error bars).

        ``error_bars``, where there are any: the ``layer`` that they are of, None of all; the ``factor`` of the learned precisions that
        calibration took; and whether they are ``off``, as it is the largest.

        Of the Laplace approximation's calibrated predictive (``link_approx="probit"``; None where the curvature would be too large)
        ``nll_predictive`` (probabilities below 1e-12 count as such) ``, ece`` (a fraction, of 15 bins) ``, brier``, of the softmax
        ``ece_plugin, brier_plugin``. Of the first 250 training images ``leave_one_out``, at the ``learned`` precisions and at those of
        ``predictions``: ``points, undefined, nll`` and counts of ``leverage`` and ``loss`` between the powers of ten that ``exponents`` has;
        none where predictions are not calibrated.

        What follows has a part ``plugin`` and, where there is one, ``predictive``: ``reliability``, by bin ``count, confidence, accuracy``
        (None in an empty one); of ``ood``, by data set, AUROC of ``entropy`` and ``max_probability``; ``rotations``, of ``rotated_size``
        images, a list of ``degrees, nll, accuracy, confidence`` (percent) ``, entropy``.

    Raises:
        ValueError: data of ``ood`` do not fit; a checkpoint is of another configuration or of other data, see
            :func:`ella_cuda.marglik_training`.
        OSError: ``run_dir`` cannot be written; what was there is untouched.
        FloatingPointError: training diverged; the last good checkpoint stays.
        RuntimeError: ``tensorboard`` without the package of that name; somebody else works in the folder.
    """
    run_dir = Path(run_dir)
    ranks = OneProcess() if group is None else Ranks(group, "run_one")
    first = ranks.is_first
    with ExitStack() as stack:
        ranks.together(lambda: _begin(run_dir, tensorboard, stack) if first else None)
        return _run(config, run_dir, progress and first, data_dir, download, tensorboard and first, cuda_graph, ranks)


def _begin(run_dir: Path, tensorboard: bool, stack: ExitStack) -> None:
    """Claim a run's folder, which is made."""
    if tensorboard:
        require_tensorboard()  # before anything is written
    run_dir.mkdir(parents=True, exist_ok=True)
    stack.enter_context(claim(run_dir / LOCK_FILE, f"the run's folder {run_dir}"))
    remove_temporary_files(run_dir)


def sampled(
    augment: Augment,
    dataset: Dataset,
    count: int = SAMPLED,
    copies: int = SHOWN_COPIES,
    draws: Tensor | None = None,
) -> list[list[Any]]:
    """Some test images, each as it is and as copies at the amounts that were learned: rows of images ``(H, W, 3)``, or ``(H, W)`` of the
    first channel unless there are three, of pixels from 0, black, to 255. Draws are uniform, or the given ones."""
    some = stratified_order(dataset.test_labels, dataset.test_ids, 0, "samples")[:count]
    images = dataset.test_images[some.to(dataset.test_images.device)]
    generator = torch.Generator().manual_seed(0)
    if draws is None:
        draws = 2 * torch.rand(len(images), copies, len(augment.names), generator=generator) - 1
    with torch.no_grad():
        shown = torch.cat([images[:, None], augment(images, draws.to(images))], 1)
    small = pixels(shrunk(shown.flatten(0, 1)), dataset.black, dataset.white).unflatten(0, shown.shape[:2])
    return (small.movedim(2, -1) if dataset.channels == 3 else small[:, :, 0]).tolist()


def _run(
    config: RunConfig,
    run_dir: Path,
    progress: bool,
    data_dir: str | None,
    download: bool,
    tensorboard: bool,
    cuda_graph: bool,
    ranks: Processes,
) -> dict[str, Any]:
    """:func:`run_one` in a folder that is claimed, by rank 0 where there are several."""
    first = ranks.is_first
    device = device_of_process(resolve_device(config.device))
    if config.evidence_batch_size is None:
        config = dataclasses.replace(config, evidence_batch_size=EVIDENCE_BATCH_SIZES[device.type])

    def loaded() -> tuple[Dataset, Any]:
        found = prepare_for(config, data_dir, download).to(device)
        return found, asked_images(config, found, data_dir, download)

    dataset, asked = ranks.together(loaded)
    network = {"in_channels": dataset.channels, "num_classes": dataset.num_classes}
    bare = _untrained(config, network, run_dir).to(device)
    model = averaged(config, bare)
    known = {**network, **learned_from(dataset)}
    diary = ranks.together(lambda: Diary(run_dir, config, known, bare) if first else None)
    log = ranks.together(lambda: TensorBoardLog(run_dir / FOLDER, layout(bare)) if tensorboard else None)

    def record(evaluation: Evaluation) -> None:
        diary.record(evaluation)
        if log is not None:
            log.write(diary.evaluations)

    la, model, losses, reason = _trained(config, dataset, run_dir, model, bare, progress, cuda_graph, ranks, record)
    posterior = _posterior(config, dataset, la, bare, reason, progress, ranks)
    calibration: dict[str, Any] = {}
    if posterior is not None and config.calibration != "none":
        calibration = _calibrate(config, dataset, run_dir, posterior, network, progress, cuda_graph, ranks)

    def row() -> dict[str, Any]:
        found = _row(config, dataset, asked, model, bare, la, posterior, losses, reason, diary, log, run_dir, progress)
        return found | calibration

    return ranks.exchange(ranks.together(lambda: row() if first else None))[0]


def _posterior(
    config: RunConfig,
    dataset: Dataset,
    la: KronLaplace,
    bare: nn.Module,
    reason: str | None,
    progress: bool,
    ranks: Processes,
) -> KronLaplace | None:
    """What the run predicts by: its approximation, or that of its last layer, which rank 0 alone fits; None where there is none."""
    if not by_last_layer(config, bare, dataset.num_classes):
        return None if reason else la
    posterior = of_last_layer(config, la, dataset.num_classes)

    def fit() -> None:
        loader = TensorLoader(dataset.train_images, dataset.train_labels, config.evidence_batch_size)
        with same_copies(la.model, la.fitted_model.draws):
            posterior.fit(loader, progress_bar=progress)

    ranks.together(lambda: fit() if ranks.is_first else None)
    return posterior


def _untrained(config: RunConfig, network: dict[str, int], folder: Path) -> nn.Module:
    """The run's network on the CPU, with the weights that its training in this folder starts from."""
    torch.manual_seed(config.seed)
    bare = build_network(config, **network)
    if config.weights and not (folder / CHECKPOINT_FILE).exists():
        load_weights(bare, config.weights, network["num_classes"])
    return bare


def _trained(
    config: RunConfig,
    dataset: Dataset,
    run_dir: Path,
    model: nn.Module,
    bare: nn.Module,
    progress: bool,
    cuda_graph: bool,
    ranks: Processes,
    record: Callable[[Evaluation], None] | None,
    part: str = "",
) -> tuple[KronLaplace, nn.Module, list[float], str | None]:
    """The approximation, the model, the losses, and why the approximation is not fitted, None where it is; ``part`` names the images where
    these are not all."""
    train_loader = TensorLoader(
        dataset.train_images,
        dataset.train_labels,
        config.batch_size,
        shuffle=True,
        augment=None if config.augment == "none" else FlipsShifts(dataset.black),
        data_digest=dataset.digest,
    )
    evidence_loader = TensorLoader(
        dataset.train_images, dataset.train_labels, config.evidence_batch_size, data_digest=dataset.digest
    )
    la, model, _, losses = marglik_training(
        model,
        train_loader,
        "classification",
        optimizer_cls=adam_for(bare, config.fan_in_limit),
        optimizer_kwargs={"lr": config.lr, "fused": True},
        **learning_rate_schedule(config.cooldown, [epoch * len(train_loader) for epoch in config.cycle_ends]),
        n_epochs=config.epochs,
        hyper_optimizer=config.hyper_optimizer,
        hyper_step_limit=config.hyper_step_limit,
        lr_hyp=config.lr_hyp,
        prior_structure=config.prior_structure,
        learn=[name for name in config.learn.split("+") if name],
        **config.of(LearnersConfig),
        n_epochs_burnin=config.burn_in,
        n_hypersteps=config.hypersteps,
        marglik_frequency=config.frequency,
        prior_prec_init=config.prior_prec_init,
        progress_bar=progress,
        objective=config.objective,
        **config.of(CurvatureConfig),
        marglik_loader=evidence_loader,
        cuda_graph=cuda_graph,
        checkpoint=run_dir / CHECKPOINT_FILE,
        depends_on=config.chosen,
        on_evaluation=record,
        description=f"{config.name}{part}",
        calibrate=False,
        group=ranks.group,
    )
    reason = None
    if config.objective == "map":
        needed = la.memory_estimate()
        if needed > MAP_EVIDENCE_BYTES:
            reason = f"its curvature needs {needed / 1e6:.0f} MB; computed for MAP runs up to {MAP_EVIDENCE_BYTES / 1e6:.0f} MB"
        else:
            own = evidence_loader if ranks.group is None else shard(evidence_loader, ranks.group)
            la.fit(own, group=ranks.group)
    return la, model, losses, reason


def _calibrate(
    config: RunConfig,
    dataset: Dataset,
    run_dir: Path,
    la: KronLaplace,
    network: dict[str, int],
    progress: bool,
    cuda_graph: bool,
    ranks: Processes,
) -> dict[str, Any]:
    """Choose the precisions of predictions; returns what the row says of it."""
    how, fold, first = config.calibration, None, ranks.is_first
    by_heart, nll = _of_first(ranks, lambda: (knows_by_heart(la), training_nll(la)))
    why = f"it knows its training labels {'' if by_heart else 'not '}by heart ({nll:.2g} nats)"
    if how == "auto":
        how = "folds" if by_heart else "leave-one-out"
    if how == "folds":
        fold, unseen = _fold(config, dataset, run_dir, network, progress, cuda_graph, ranks)
        alike, nll = _of_first(ranks, lambda: (have_learned_alike(la, [fold]), training_nll(fold)))
        why += f"; one training more of two thirds of the images knows its own at {nll:.2g}"
        if not alike:
            how, why = "leave-one-out", f"{why} and has learned too little to say how sure the first may be"

    def choose() -> None:
        with ExitStack() as stack:
            for each in (la, fold) if how == "folds" else (la,):
                draws = each.fitted_model.draws if config.learns_amounts else None
                stack.enter_context(same_copies(each.model, draws))
            if how == "folds":
                la.calibrate(folds=[(fold, unseen)], progress_bar=progress)
            else:
                loader = TensorLoader(dataset.train_images, dataset.train_labels, config.evidence_batch_size)
                calibrated(la, loader, progress)

    ranks.together(lambda: choose() if first else None)
    if la.predictive_prior_precision is None:  # too many outputs, as a warning says
        return {}
    return {"calibrated_by": how, "calibrated_by_reason": why}


def _of_first(ranks: Processes, work: Callable[[], tuple[bool, float]]) -> tuple[bool, float]:
    """What rank 0 finds, everywhere."""
    return ranks.from_first(ranks.together(lambda: work() if ranks.is_first else None))


def _fold(
    config: RunConfig,
    dataset: Dataset,
    run_dir: Path,
    network: dict[str, int],
    progress: bool,
    cuda_graph: bool,
    ranks: Processes,
) -> tuple[KronLaplace, TensorLoader]:
    """The run's network trained on two thirds of the images, in a folder of its own, and a loader of the others."""
    order = stratified_order(dataset.train_labels, dataset.train_ids, config.data_seed, FOLDS_FOLDER)
    count = -(-len(order) // PARTS)  # a beginning, for every third image of the order can be one class
    unseen, seen = order.to(dataset.train_images.device).tensor_split([count])
    folder = run_dir / FOLDS_FOLDER
    ranks.together(lambda: folder.mkdir(parents=True, exist_ok=True) if ranks.is_first else None)
    kept = {f"train_{kind}": getattr(dataset, f"train_{kind}")[seen] for kind in ("images", "labels", "ids")}
    part = dataclasses.replace(dataset, **kept, digest=f"{dataset.digest}, the last two thirds")
    bare = _untrained(config, network, folder).to(dataset.train_images.device)
    model, name = averaged(config, bare), ", two thirds of the images"
    la, _, _, reason = _trained(config, part, folder, model, bare, progress, cuda_graph, ranks, None, name)
    fold = _posterior(config, part, la, bare, reason, progress, ranks)
    rest = dataset.train_images[unseen], dataset.train_labels[unseen]
    return fold, TensorLoader(*rest, config.evidence_batch_size)


def learned_from(dataset: Dataset) -> dict[str, Any]:
    """A data set's part in a prediction but for its images: the values of black and white, and of images of one's own the classes."""
    found = {name: getattr(dataset, name).tolist() for name in ("black", "white")}
    return found | ({"class_names": list(dataset.class_names)} if dataset.class_names else {})


def _on_training_images(dataset: Dataset) -> Dataset:
    """The data set evaluated on what it trains on, which has other ids and the same names."""
    shift = max(int(dataset.train_ids.max()) + 1, len(dataset.names))
    own = {f"test_{kind}": getattr(dataset, f"train_{kind}") for kind in ("images", "labels")}
    ids = {"test_ids": dataset.train_ids, "train_ids": dataset.train_ids + shift}
    return dataclasses.replace(dataset, **own, **ids, names=dataset.names * 2)


def _nll_leave_one_out(la: KronLaplace, dataset: Dataset, config: RunConfig, progress: bool) -> float | None:
    """Mean over the training images, or as many as are affordable, under the precisions that predictions take; None where a leverage is 1
    or more."""
    count = affordable(len(dataset.train_images), la.n_params * la.n_outputs**2)
    la = copy.copy(la)
    if la.predictive_prior_precision is not None:
        la.prior_precision = la.predictive_prior_precision
    loader = TensorLoader(dataset.train_images[:count], dataset.train_labels[:count], config.evidence_batch_size)
    found = la.leave_one_out(loader, progress_bar=progress)
    return None if found.n_undefined else -float(found.log_density.mean())


def _keep_predictions(
    run_dir: Path,
    config: RunConfig,
    dataset: Dataset,
    where: str,
    probabilities: Tensor,
    la: KronLaplace | None,
    learned: Tensor,
) -> None:
    """Keep what the run predicts of the images of one's own that it is evaluated on, and its approximation, which later predictions
    take, with the marks of the images that it has ``learned`` from."""
    names = [dataset.names[i] for i in dataset.test_ids.tolist()]
    found = {"names": names, "labels": dataset.test_labels.tolist(), "probabilities": probabilities.tolist()}
    write_predictions(run_dir, {"run": config.name, "evaluated_on": where, "class_names": dataset.class_names, **found})
    if la is not None:
        state = {"run": config.name, "laplace": la.state_dict(), "learned": learned}
        write_file(run_dir / LAPLACE_FILE, lambda path: torch.save(state, path))


def _row(
    config: RunConfig,
    dataset: Dataset,
    asked: Any,
    model: nn.Module,
    bare: nn.Module,
    la: KronLaplace,
    posterior: KronLaplace | None,
    losses: list[float],
    reason: str | None,
    diary: Diary,
    log: TensorBoardLog | None,
    run_dir: Path,
    progress: bool,
) -> dict[str, Any]:
    """The row of a run that is trained, evaluated here by the ``posterior``; ``reason`` is why it has no evidence."""
    fitted, where = reason is None, "test" if config.holdout is None else "holdout"
    learned = marks(pixels(dataset.train_images, dataset.black, dataset.white)) if dataset.names else None
    if not len(dataset.test_images):
        dataset, where = _on_training_images(dataset), "train"
    evidence = float(la.log_marginal_likelihood()) / len(dataset.train_images) if fitted else None
    draws = la.fitted_model.draws if isinstance(model, AveragedFunction) else None
    with same_copies(model, draws):
        accuracy, nll = evaluate(model, dataset.test_images, dataset.test_labels)
        predictions, own = describe_predictions(model, posterior, dataset, asked, progress, config.name)
        keep_examples(run_dir, config.name, model, posterior, dataset, own.get("predictive", own["plugin"]))
    precision = of_network(dict(zip(la.parameter_names, of_tensors(la, la.prior_precision).tolist(), strict=True)))
    lengthscales = {n: float(m.inverse_lengthscale) for n, m in bare.named_modules() if isinstance(m, SpatialBasis)}
    gamma = of_network(la.effective_parameters()) if fitted else None
    norms = {n: float(p.detach().norm()) for n, p in bare.named_parameters()}
    layers, others = describe_layers(layout(bare), precision, gamma, lengthscales, diary.anchors(), norms)
    amounts = {}
    if isinstance(model, AveragedFunction):
        amounts = {"augmentation": model.augment.amounts()}
        write_samples(run_dir, config.name, sampled(model.augment, dataset), draws.tolist())
    predictive = None if posterior is None else posterior.predictive_prior_precision
    by_name = None
    if predictive is not None:
        by_name = dict(zip(posterior.parameter_names, of_tensors(posterior, predictive).tolist(), strict=True))
    write_history(run_dir, config.name, losses, diary.evaluations, by_name)
    if learned is not None:
        found = own.get("predictive", own["plugin"])
        _keep_predictions(run_dir, config, dataset, where, found, posterior, learned)
    left_out = {} if posterior is None else {"error_bars": described(posterior)}
    if learned is not None:
        known = posterior is not None
        left_out["nll_leave_one_out"] = _nll_leave_one_out(posterior, dataset, config, progress) if known else None
    row = {
        "run": config.name,
        **config.described,
        "accuracy": accuracy,
        "nll": nll,
        "neg_log_marginal_likelihood": None if evidence is None else -evidence,
        "neg_log_marginal_likelihood_reason": reason,
        **amounts,
        **predictions,
        **left_out,
        "seconds": round(diary.seconds(), 2),
        "parameters": sum(p.numel() for p in model.parameters()),
        "train_size": len(dataset.train_images),
        "evaluated_on": where,
        "evaluated_size": len(dataset.test_images),
        "layers": layers,
        "other_parameters": others,
    }
    if log is not None:
        log.finish(row, diary.evaluations)
    return row
