"""Pictures of runs, drawn without a display."""

from ella_cuda.reports.pictures.amounts import draw_amounts, draw_samples
from ella_cuda.reports.pictures.anchors import draw_anchors
from ella_cuda.reports.pictures.calibration import draw_reliability, draw_rotations
from ella_cuda.reports.pictures.curves import draw_curves
from ella_cuda.reports.pictures.filters import draw_filters
from ella_cuda.reports.pictures.folder import Drawn, add_picture, save_pictures
from ella_cuda.reports.pictures.layers import draw_layers
from ella_cuda.reports.pictures.page import PATH_STYLES, save_picture
from ella_cuda.reports.pictures.precisions import draw_precisions

__all__ = [
    "PATH_STYLES",
    "Drawn",
    "add_picture",
    "draw_amounts",
    "draw_anchors",
    "draw_curves",
    "draw_filters",
    "draw_layers",
    "draw_precisions",
    "draw_reliability",
    "draw_rotations",
    "draw_samples",
    "save_picture",
    "save_pictures",
]
