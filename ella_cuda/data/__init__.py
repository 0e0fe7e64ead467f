"""Image data sets as tensors, the tasks made from them, and a loader that keeps them on one device."""

from ella_cuda.data.augment import AUGMENTATIONS, FlipsShifts
from ella_cuda.data.dataset import Dataset
from ella_cuda.data.draws import stratified_order
from ella_cuda.data.labelled import folder
from ella_cuda.data.loader import TensorLoader
from ella_cuda.data.preprocess import black_as_zero, holdout, normalize, normalized_as, resize, subsample
from ella_cuda.data.sources import SOURCES, load
from ella_cuda.data.tasks import TASKS, make_task
from ella_cuda.data.warp import rotated

__all__ = [
    "AUGMENTATIONS",
    "SOURCES",
    "TASKS",
    "Dataset",
    "FlipsShifts",
    "TensorLoader",
    "black_as_zero",
    "folder",
    "holdout",
    "load",
    "make_task",
    "normalize",
    "normalized_as",
    "resize",
    "rotated",
    "stratified_order",
    "subsample",
]
