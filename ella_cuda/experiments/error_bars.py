"""The approximation that a run predicts by: of all its tensors, or of its last layer alone, whose time does not grow with the network."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from ella_cuda.experiments.hyperparameters import CurvatureConfig, RunConfig
from ella_cuda.laplace import KronLaplace
from ella_cuda.laplace.evidence import is_finer
from ella_cuda.laplace.leave_one_out import FACTORS
from ella_cuda.run_folder import NETWORK

LARGE = 5_000_000  # parameters times classes, above which an image takes a core about a second


def by_last_layer(config: RunConfig, model: nn.Module, num_classes: int) -> bool:
    """Whether the run's predictions have the error bars of the last layer alone."""
    if config.error_bars != "auto":
        return config.error_bars == "last-layer"
    return bool(config.model) and num_classes * sum(p.numel() for p in model.parameters()) > LARGE


def of_last_layer(config: RunConfig, la: KronLaplace, num_classes: int) -> KronLaplace:
    """The approximation of the last layer, not fitted, with the precisions that ``la`` has of it: the layer of the last matrix with a row
    for each class; where there is none, of the last matrix, or the last tensor."""
    values = la.prior_precision.detach()
    parts = values if not is_finer(la, values) else la.unit_precisions.values()
    precisions = dict(zip(la.parameter_names, parts, strict=True))
    tensors = dict(la.model.named_parameters())
    matrices = [name for name in precisions if tensors[name].dim() > 1]
    named = [name for name in matrices if len(tensors[name]) == num_classes] or matrices or [*precisions]
    layer = named[-1].rpartition(".")[0]
    names = [name for name in precisions if name.rpartition(".")[0] == layer]
    # All columns of a last layer's Hessian cost less than drawing one.
    how = {**config.of(CurvatureConfig), "fisher": "exact", "column_tolerance": 0.0, "subset_of_weights": names}
    precision = torch.cat([precisions[name].reshape(-1) for name in names])
    return KronLaplace(la.model, la.likelihood_function, prior_precision=precision, sigma_noise=la.sigma_noise, **how)


def described(la: KronLaplace) -> dict[str, object]:
    """Whose error bars a run's predictions have: ``layer``, None of all; the ``factor`` of the learned precisions that calibration took, None
    where there was none; and whether the error bars are ``off``, as it is the largest."""
    predictive = la.predictive_prior_precision
    factor = None if predictive is None else float((predictive / la.prior_precision.to(predictive)).mean())
    layer = None if la.subset_of_weights == "all" else la.parameter_names[-1].removeprefix(NETWORK).rpartition(".")[0]
    return {"layer": layer, "factor": factor, "off": factor is not None and factor > 0.99 * FACTORS[-1]}


def marks(pixels: Tensor) -> Tensor:
    """Of each image ``(N, C, H, W)`` uint8 a number that tells it from others, ``(N,)`` int64."""
    digests = [hashlib.blake2b(image.numpy().tobytes(), digest_size=8).digest() for image in pixels.contiguous()]
    return torch.tensor([int.from_bytes(digest, "big", signed=True) for digest in digests], dtype=torch.int64)
