"""Learned data augmentation: transformations with amounts that the evidence learns, and functions that are averaged over them."""

from ella_cuda.augment.affine import GENERATORS, AffineAugment, affine_matrix, lie_generators
from ella_cuda.augment.averaged import AveragedFunction
from ella_cuda.augment.base import Augment
from ella_cuda.augment.local import LocalDeformation

__all__ = [
    "GENERATORS",
    "AffineAugment",
    "Augment",
    "AveragedFunction",
    "LocalDeformation",
    "affine_matrix",
    "lie_generators",
]
