"""Shallow networks on images, their training, and what is measured of them; of amounts and layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ella_cuda.augment import AffineAugment
from ella_cuda.data import Dataset, TensorLoader
from ella_cuda.invariance import BayesianLinear, ElboTrainer, InvariantFilterBank, ShallowNetwork
from ella_cuda.metrics import accuracy, nll
from ella_cuda.papers.invariances.images import counts
from ella_cuda.papers.invariances.sizes import LARGE, TWO_CORES, of_small
from ella_cuda.papers.studies import Work, share
from ella_cuda.run_folder import CHECKPOINT_FILE

LAYERS = {"fc": "FC", "conv": "convolution", "learned": "learned"}
IMAGE_SIZE, SMALL_SIZE = 28, 16
COPIES, SMALL_COPIES = 31, 16
FILTERS, SMALL_FILTERS = 256, 100
BATCH, SMALL_BATCH = 500, 100
STEPS, SMALL_STEPS = 24_000, 2000
RATE, SMALL_RATE = 1e-3, 3e-3  # of filters and q; the second where steps are few
AMOUNT_RATE, SMALL_AMOUNT_RATE = 1e-2, 5e-2  # of amounts, before their softplus, and of the prior precision's logarithm
INIT = 0.1  # of amounts
KERNEL = 5  # of the convolution
COARSE = 3  # pixels that are alike in filters at the start
PRIOR = 100.0  # variance of a logit under the prior at the start, of features with a mean square of 1
LOGITS = 10  # draws of logits of a step
TEST_LOGITS, TEST_BATCH = 100, 500
EVERY = 10  # epochs between checkpoints


def settings_of(data: str, scale: float) -> dict[str, Any]:
    """What all studies on a data set have in common."""
    train, test = counts(data, scale)
    large = scale >= LARGE
    batch = min(BATCH if large else of_small(scale, SMALL_BATCH, 20), train)
    steps = max(share(scale, STEPS, 1), of_small(scale, SMALL_STEPS, 9))
    return {
        "data": data,
        "image_size": IMAGE_SIZE if large else SMALL_SIZE,
        "train_size": train,
        "test_size": test,
        "filters": FILTERS if large else of_small(scale, SMALL_FILTERS, 6),
        "copies": COPIES if large else of_small(scale, SMALL_COPIES, 3),
        "batch": batch,
        "epochs": max(3, math.ceil(steps / math.ceil(train / batch))),
        "rate": RATE if large else SMALL_RATE,
        "amount_rate": AMOUNT_RATE if large else SMALL_AMOUNT_RATE,
    }


def plan_of(
    part: str,
    tasks: Iterable[str],
    varied: str,
    values: Iterable[str],
    seeds: Sequence[int],
    scale: float,
    data: Sequence[str],
) -> dict[str, dict[str, Any]]:
    """Studies of a part by name: of every data set, task, value of the setting ``varied`` and seed."""
    return {
        f"{part}-{name}-{task}-{value}-seed{seed}": {**common, "task": task, varied: value, "seed": seed}
        for name in data
        for common in [settings_of(name, scale)]
        for task in tasks
        for value in values
        for seed in seeds
    }


def row_of(settings: Mapping[str, Any], varied: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """What rows of both parts have: settings, ``varied`` among them, and what was measured."""
    keys = (
        "data",
        "task",
        varied,
        "seed",
        "image_size",
        "train_size",
        "test_size",
        "filters",
        "copies",
        "epochs",
        "batch",
    )
    row = {key: settings[key] for key in keys} | {key: result[key] for key in ("accuracy", "nll", "bound")}
    return row | {"prior_precision": result["learned"]["prior_precision"]}


def sizes_said(s: Mapping[str, Any]) -> str:
    """The sizes in words."""
    return (
        f"{s['data']}, {s['image_size']} x {s['image_size']} pixels: {s['train_size']:,} images, {s['epochs']} epochs, {s['filters']} "
        f"filters, {s['copies']} copies"
    )


def small_said(rows: list[dict[str, Any]]) -> str:
    """A sentence where rows are of less than the full size."""
    if all(r["image_size"] == IMAGE_SIZE for r in rows):
        return ""
    return f"Sizes are below the full ones, which `--scale 1` has; those of {TWO_CORES:g} are for two cores.\n"


def network(layer: str, dataset: Dataset, settings: Mapping[str, Any]) -> ShallowNetwork:
    """With a first layer of :data:`LAYERS`, weights of torch's global generator.

    "fc" has a filter of the image's size for each feature; "learned" averages these over transformations; "conv" has small filters and the
    mean over positions, so that it is invariant to shifts.
    """
    channels, size, count = dataset.channels, settings["image_size"], settings["filters"]
    image = (count, channels, size, size)
    if layer == "learned":
        features: nn.Module = InvariantFilterBank(image[1:], count, AffineAugment(settings["copies"], init=INIT))
        start, weight = smooth(*image), features.weight
    elif layer == "conv":
        convolution = nn.Conv2d(channels, count, KERNEL, padding=KERNEL // 2)
        features = nn.Sequential(convolution, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        start, weight = torch.randn(convolution.weight.shape), convolution.weight
    else:
        features = nn.Sequential(nn.Flatten(), nn.Linear(channels * size**2, count), nn.ReLU())
        start, weight = smooth(*image), features[1].weight
    with torch.no_grad():
        deviation = (2 / start[0].numel()) ** 0.5  # of images of variance 1 features have a mean square of 1
        weight.copy_((start * deviation / start.square().mean().sqrt()).view_as(weight))
    return ShallowNetwork(features, BayesianLinear(count, dataset.num_classes, prior_precision=count / PRIOR))


def smooth(*shape: int) -> Tensor:
    """Random filters ``(N, C, H, W)`` whose neighbouring pixels are alike: of others a transformation makes less by interpolation alone."""
    coarse = torch.randn(*shape[:2], *(max(side // COARSE, 2) for side in shape[2:]))
    return F.interpolate(coarse, shape[2:], mode="bicubic", align_corners=True)


def trained(layer: str, dataset: Dataset, settings: Mapping[str, Any], work: Work, objective: str) -> ElboTrainer:
    """After its training, from its checkpoint where there is one."""
    torch.manual_seed(settings["seed"])
    model = network(layer, dataset, settings).to(work.device)
    loader = TensorLoader(
        dataset.train_images, dataset.train_labels, settings["batch"], shuffle=True, data_digest=dataset.digest
    )
    trainer = ElboTrainer(
        model,
        loader,
        n_epochs=settings["epochs"],
        objective=objective,
        lr=settings["rate"],
        lr_hyp=settings["amount_rate"],
        n_samples=LOGITS,
        progress_bar=work.progress,
        checkpoint=work.folder / CHECKPOINT_FILE,
        checkpoint_frequency=min(EVERY, max(1, settings["epochs"] // 3)),
        depends_on=dict(settings),
        description=work.folder.name,
    )
    trainer.run()
    model.eval()
    return trainer


def measured(trainer: ElboTrainer, dataset: Dataset) -> dict[str, Any]:
    """Accuracy in percent and NLL of the test images, the bound in nats per training image (None of a point estimate), and what is learned
    beside weights; at one set of copies."""
    model, point = trainer.model, trainer.objective == "point"
    generator = torch.Generator().manual_seed(0)
    (augment,) = [*model.augments()] or (None,)
    draws = None if augment is None else augment.draw(1, "sobol", generator)
    with torch.no_grad(), nullcontext() if augment is None else augment.held(draws):
        parts = [
            model(x).softmax(1) if point else model.predict(x, TEST_LOGITS, generator)
            for x in dataset.test_images.split(TEST_BATCH)
        ]
        bound = None if point else _bound(model, dataset, generator)
    probabilities = torch.cat(parts)
    return {
        "accuracy": 100 * float(accuracy(probabilities, dataset.test_labels)),
        "nll": float(nll(probabilities, dataset.test_labels)),
        "bound": bound,
        "learned": model.hyperparameters(),
    }


def _bound(model: ShallowNetwork, dataset: Dataset, generator: torch.Generator) -> float:
    kl, total = model.layer.kl().double(), 0.0
    data = TensorLoader(dataset.train_images, dataset.train_labels, TEST_BATCH)
    for x, y in data:
        total += float(model.elbo(x, y, n_samples=TEST_LOGITS, generator=generator).double() + kl)
    return (total - float(kl)) / len(dataset.train_images)


def sampled_filters(model: ShallowNetwork, count: int, copies: int) -> list[Any]:
    """Those of the features that the output depends on most: each as it is and transformed, ``count`` rows of ``1 + copies`` filters
    ``(C, H, W)``, with four digits."""
    bank = model.features
    draws = 2 * torch.rand(copies, bank.augment.dims, generator=torch.Generator().manual_seed(1)) - 1
    with torch.no_grad():
        strength = model.layer.mean.norm(dim=0) * bank.weight.flatten(1).norm(dim=1)
        some = strength.topk(min(count, len(strength))).indices.sort().values
        shown = torch.cat([bank.weight[None], bank.filters(draws.to(bank.weight))])[:, some].transpose(0, 1)
    return F.normalize(shown.flatten(1), p=math.inf).reshape(shown.shape).mul(1e4).round().div(1e4).tolist()
