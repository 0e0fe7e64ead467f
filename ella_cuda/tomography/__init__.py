"""Computed tomography by a deep image prior, with error bars from its linearisation."""

from ella_cuda.tomography.filter_prior import FilterPrior, filter_blocks
from ella_cuda.tomography.linearised import Hyperparameters, LinearisedDIP
from ella_cuda.tomography.rays import LinearMap, RayOperator, RayTransform
from ella_cuda.tomography.total_variation import total_variation, total_variation_gaussian
from ella_cuda.tomography.unet import UNet

__all__ = [
    "FilterPrior",
    "Hyperparameters",
    "LinearMap",
    "LinearisedDIP",
    "RayOperator",
    "RayTransform",
    "UNet",
    "filter_blocks",
    "total_variation",
    "total_variation_gaussian",
]
