"""Images that a person should look at after a training: those the network is least sure of, and those whose labels are likely wrong."""

from __future__ import annotations

import base64
import io
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ella_cuda.data import Dataset, TensorLoader
from ella_cuda.laplace import KronLaplace
from ella_cuda.laplace.leave_one_out import SCALES, affordable
from ella_cuda.modes import evaluation_mode
from ella_cuda.run_folder import write_examples

SHOWN = 12  # of each kind
EXAMINED = 200  # training images of the largest losses, which are predicted from all others
BATCH = 100
SIDE = 128  # pixels of an image in a report, at most: pages of many large ones would take long to open


def keep_examples(
    run_dir: Path, run: str, model: nn.Module, la: KronLaplace | None, dataset: Dataset, probabilities: Tensor
) -> None:
    """Keep what :func:`find_examples` finds in the folder of a run; a failure is a warning, for the run is trained."""
    try:
        with evaluation_mode(model):
            write_examples(run_dir, run, find_examples(model, la, dataset, probabilities))
    except Exception as error:  # whatever went wrong: results do not depend on it
        warnings.warn(
            f"{run_dir}: the images to look at could not be found ({type(error).__name__}: {error}); report.html is without them.",
            RuntimeWarning,
            stacklevel=2,
        )


def find_examples(model: nn.Module, la: KronLaplace | None, dataset: Dataset, probabilities: Tensor) -> dict[str, Any]:
    """Predictions that a report shows.

    Labels are likely wrong where all other training images expect another class (:meth:`ella_cuda.laplace.KronLaplace.influence`); of the
    training images the :data:`EXAMINED` of the largest loss are examined.

    Args:
        model: in evaluation mode. la: fitted to the training images; None without curvature.
        dataset: whose test part ``probabilities`` ``(M, K)`` are of.

    Returns:
        ``confusion``, a list of label, predicted class and count; ``least_sure`` and ``suspects``, lists of images with ``png`` (base64),
        ``label``, ``predicted`` and, where they have one, ``name``, the first with its ``probability``, the second with the ``score`` in
        nats; ``examined``, and ``reason``, why none was.
    """
    labels, (sure, predicted) = dataset.test_labels, probabilities.max(1)
    pairs, counts = torch.stack([labels, predicted]).unique(dim=1, return_counts=True)
    least = sure.argsort(stable=True)[:SHOWN].tolist()
    found = {
        "class_names": list(dataset.class_names),
        "confusion": [[*pair, count] for pair, count in zip(pairs.T.tolist(), counts.tolist(), strict=True)],
        "least_sure": [
            _shown(dataset, dataset.test_ids[i], dataset.test_images[i], labels[i], predicted[i])
            | {"probability": float(sure[i])}
            for i in least
        ],
        "suspects": [],
        "examined": 0,
        "reason": None if la is not None else "the curvature of this network was not computed",
    }
    if la is not None:
        try:
            found |= _suspects(model, la, dataset)
        except (ValueError, RuntimeError, MemoryError, FloatingPointError, NotImplementedError) as error:
            found["reason"] = " ".join(str(error).split())
    return found


@torch.no_grad()
def _suspects(model: nn.Module, la: KronLaplace, dataset: Dataset) -> dict[str, Any]:
    images, labels = dataset.train_images, dataset.train_labels
    loss, loader = nn.CrossEntropyLoss(reduction="none"), TensorLoader(images, labels, BATCH)
    count = affordable(EXAMINED, len(SCALES) * la.n_params * la.n_outputs**2)
    some = torch.cat([loss(model(x), y) for x, y in loader]).argsort(descending=True, stable=True)[:count]
    ids, images, labels = dataset.train_ids[some], images[some], labels[some]
    left = la.influence(TensorLoader(images, labels, BATCH))
    outputs = torch.cat([model(x) for x in images.split(BATCH)])
    expected = (outputs + left.influence.to(outputs)).argmax(1)
    wrong = [i for i in left.order.tolist() if expected[i] != labels[i]][:SHOWN]
    shown = [
        _shown(dataset, ids[i], images[i], labels[i], expected[i]) | {"score": float(left.score[i])} for i in wrong
    ]
    return {"suspects": shown, "examined": len(some)}


def _shown(dataset: Dataset, number: Tensor, image: Tensor, label: Tensor, predicted: Tensor) -> dict[str, Any]:
    name = {"name": dataset.names[int(number)]} if dataset.names else {}
    name["png"] = thumbnail(image, dataset.black, dataset.white)
    return {**name, "label": int(label), "predicted": int(predicted)}


def pixels(images: Tensor, black: Tensor, white: Tensor) -> Tensor:
    """Images ``(..., C, H, W)``, of pixels that are ``black`` and ``white`` ``(C,)`` at their ends, as uint8 on the CPU."""
    scale = (white - black)[:, None, None]
    return (255 * (images - black[:, None, None]) / scale).round().clamp(0, 255).byte().cpu()


def shrunk(images: Tensor) -> Tensor:
    """Square images ``(N, C, S, S)``, of at most :data:`SIDE` pixels a side."""
    return images if images.shape[-1] <= SIDE else functional.interpolate(images, SIDE, mode="area")


def thumbnail(image: Tensor, black: Tensor, white: Tensor) -> str:
    """An image ``(C, H, W)`` as a small PNG in base64, grey unless C is 3, of pixels that are ``black`` and ``white`` ``(C,)`` at their
    ends."""
    from PIL import Image

    found = pixels(shrunk(image[None])[0], black, white)
    array = found.permute(1, 2, 0).numpy() if len(found) == 3 else found[0].numpy()
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
