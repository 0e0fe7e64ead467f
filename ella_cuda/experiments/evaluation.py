"""What a trained network's predictions are worth: on the images it is evaluated on, on other data, on images that turn.

Predictions are made in two ways: ``plugin``, the softmax at the network's parameters, and ``predictive``, that of a Laplace approximation.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm.auto import tqdm

from ella_cuda import metrics
from ella_cuda.data import Dataset, TensorLoader, load, make_task, normalized_as, rotated, stratified_order
from ella_cuda.experiments.hyperparameters import ROTATED, RunConfig
from ella_cuda.laplace import KronLaplace
from ella_cuda.laplace.leave_one_out import affordable
from ella_cuda.modes import evaluation_mode
from ella_cuda.progress import bar_size

EVALUATION_BATCH = 500
DEGREES = range(0, 181, 15)
LEFT_OUT = 250  # training images, each of which is left out
EXPONENTS = [k / 4 for k in range(-24, 13)]  # of ten, between bins; what is beyond the ends is in the last ones
SCORES: dict[str, Callable[[Tensor], Tensor]] = {  # of unfamiliarity
    "entropy": metrics.entropy,
    "max_probability": lambda p: 1 - p.amax(1),
}

Predict = Callable[[Tensor], Tensor]


def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Accuracy in percent and mean negative log likelihood in nats of the softmax at the model's parameters.

    Args:
        model: ``(N, C, H, W) -> (N, K)`` logits; evaluated in evaluation mode, and left in its own.
        images: ``(N, C, H, W)``.
        labels: ``(N,)`` int64.
    """
    correct = nll = 0.0
    with evaluation_mode(model), torch.no_grad():
        for x, y in TensorLoader(images, labels, EVALUATION_BATCH):
            logits = model(x).double()
            correct += float((logits.argmax(1) == y).sum())
            nll += float(F.cross_entropy(logits, y, reduction="sum"))
    return 100 * correct / len(labels), nll / len(labels)


@dataclasses.dataclass(frozen=True)
class AskedImages:
    """What a run's network is asked about at its end, beside the images it is evaluated on.

    Attributes:
        others: by data set, ``(M, C, S, S)`` test images as the network takes its own.
        turned: ``(M, C, S, S)``, those it is evaluated on, to be turned, and their labels; None without the word for them.
    """

    others: Mapping[str, Tensor]
    turned: tuple[Tensor, Tensor] | None


def asked_images(
    config: RunConfig, dataset: Dataset, data_dir: str | None = None, download: bool = False
) -> AskedImages:
    """The images that the run's ``ood`` names, ``ood_size`` of each at most, classes in proportion.

    Args:
        config: the run.
        dataset: its own images, of :func:`ella_cuda.experiments.prepare_for`.
        data_dir, download: see :func:`ella_cuda.data.load`.

    Raises:
        ValueError: a data set's images have another number of channels than the run's. What :func:`ella_cuda.data.load` raises.
        FileNotFoundError: a data set is not there.
    """
    names = config.ood.split("+") if config.ood else []
    others = {name: _others(name, config, dataset, data_dir, download) for name in names if name != ROTATED}
    if ROTATED not in names:
        return AskedImages(others, None)
    some = _some(dataset, config).to(dataset.test_images.device)
    return AskedImages(others, (dataset.test_images[some], dataset.test_labels[some]))


def _others(name: str, config: RunConfig, dataset: Dataset, data_dir: str | None, download: bool) -> Tensor:
    try:
        loaded = load(name, data_dir, download)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"ood: {error}") from error
    if loaded.channels != dataset.channels:
        raise ValueError(
            f"ood must name data whose images have the {dataset.channels} channel(s) of {config.data}'s, got {name} with {loaded.channels}."
        )
    parts = {"train": slice(0), "test": _some(loaded, config)}
    names = [f"{part}_{kind}" for part in parts for kind in ("images", "labels", "ids")]
    few = dataclasses.replace(loaded, **{n: getattr(loaded, n)[parts[n.partition("_")[0]]] for n in names})
    made = make_task(few, config.task, config.image_size, config.data_seed)
    return normalized_as(made.test_images.to(dataset.black.device), dataset)


def _some(dataset: Dataset, config: RunConfig) -> Tensor:
    """Positions among the test images."""
    order = stratified_order(dataset.test_labels, dataset.test_ids, config.data_seed, "ood")
    return order[: config.ood_size].sort().values


def describe_predictions(
    model: nn.Module,
    la: KronLaplace | None,
    dataset: Dataset,
    asked: AskedImages,
    progress: bool = True,
    name: str = "",
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A row's entries about a network's predictions, see :func:`ella_cuda.experiments.run_one` for its keys; and by way to predict the
    probabilities ``(M, K)`` of the images it is evaluated on.

    Args:
        model: ``(N, C, H, W) -> (N, K)`` logits; predicts in evaluation mode.
        la: fitted at the model's parameters; None where the curvature was not computed, which leaves the predictive's numbers None.
        dataset: whose test images and labels are evaluated.
        asked: of :func:`asked_images`.
        progress: whether to show a progress bar, called ``name``.
    """

    def plugin(x: Tensor) -> Tensor:
        return torch.softmax(model(x).double(), 1)

    ways: dict[str, Predict] = {"plugin": plugin} | ({} if la is None else {"predictive": la})
    count = len(dataset.test_images) + sum(map(len, asked.others.values()))
    if asked.turned is not None:
        count += len(DEGREES) * len(asked.turned[0])
    with (
        evaluation_mode(model),
        tqdm(
            total=len(ways) * count, desc=f"{name}: predictions", unit="image", disable=not progress, **bar_size()
        ) as bar,
    ):

        def predicted(predict: Predict, images: Tensor) -> Tensor:
            found = []
            for x in images.split(EVALUATION_BATCH):
                with torch.no_grad():
                    found.append(predict(x).double())
                bar.update(len(x))
            return torch.cat(found)

        own = {way: predicted(predict, dataset.test_images) for way, predict in ways.items()}
        row: dict[str, Any] = {}
        labels = dataset.test_labels
        for way, key in (("predictive", ""), ("plugin", "_plugin")):
            p = own.get(way)
            row[f"ece{key}"] = None if p is None else float(metrics.expected_calibration_error(p, labels))
            row[f"brier{key}"] = None if p is None else float(metrics.brier_score(p, labels))
        predictive = own.get("predictive")
        row["nll_predictive"] = None if predictive is None else float(metrics.nll(predictive, labels))
        row["reliability"] = {way: _bins(metrics.reliability(p, labels)) for way, p in own.items()}
        if la is not None and la.predictive_prior_precision is not None:
            row["leave_one_out"] = _left_out(la, dataset)
        if asked.others:
            row["ood"] = {
                other: {way: _told_apart(own[way], predicted(predict, images)) for way, predict in ways.items()}
                for other, images in asked.others.items()
            }
        if asked.turned is not None:
            images, turned_labels = asked.turned
            row["rotated_size"] = len(images)
            row["rotations"] = {way: [] for way in ways}
            for degrees in DEGREES:
                turned = _turned(images, degrees, dataset)
                for way, predict in ways.items():
                    row["rotations"][way].append(
                        {"degrees": degrees, **_scored(predicted(predict, turned), turned_labels)}
                    )
    return row, own


def _turned(images: Tensor, degrees: float, dataset: Dataset) -> Tensor:
    """Turned with black from outside, as before normalising."""
    black = dataset.black[:, None, None]
    return rotated(images - black, degrees) + black


def _bins(found: metrics.Reliability) -> dict[str, list[float | None]]:
    return {
        "count": found.count.tolist(),
        **{key: [None if v != v else v for v in getattr(found, key).tolist()] for key in ("confidence", "accuracy")},
    }


def _left_out(la: KronLaplace, dataset: Dataset) -> dict[str, Any]:
    """Histograms of leave-one-out losses and leverages at the learned precisions, and at those of predictions."""
    count = affordable(LEFT_OUT, 2 * la.n_params * la.n_outputs**2)
    loader = TensorLoader(dataset.train_images[:count], dataset.train_labels[:count], EVALUATION_BATCH)
    predicting = copy.copy(la)
    predicting.prior_precision = la.predictive_prior_precision
    found: dict[str, Any] = {"exponents": EXPONENTS}
    for name, posterior in (("learned", la), ("predictions", predicting)):
        left = posterior.leave_one_out(loader)
        nll = left.nll.item()
        found[name] = {
            "points": len(left.leverage),
            "undefined": left.n_undefined,
            "nll": None if math.isnan(nll) else nll,
            "leverage": _counts(left.leverage),
            "loss": _counts(-left.log_density[~left.log_density.isnan()]),
        }
    return found


def _counts(values: Tensor) -> list[int]:
    inner = 10.0 ** torch.tensor(EXPONENTS[1:-1], dtype=values.dtype, device=values.device)
    return torch.bucketize(values, inner, right=True).bincount(minlength=len(EXPONENTS) - 1).tolist()


def _told_apart(own: Tensor, others: Tensor) -> dict[str, float]:
    return {score: float(metrics.auroc(of(own), of(others))) for score, of in SCORES.items()}


def _scored(p: Tensor, labels: Tensor) -> dict[str, float]:
    return {
        "nll": float(metrics.nll(p, labels)),
        "accuracy": 100 * float(metrics.accuracy(p, labels)),
        "confidence": 100 * float(p.amax(1).mean()),
        "entropy": float(metrics.entropy(p).mean()),
    }
