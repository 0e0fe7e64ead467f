"""Tables and pictures of runs, from the rows of ``summary.json``."""

from ella_cuda.reports.layers import describe_layers, layer_table, layout
from ella_cuda.reports.pictures import (
    draw_anchors,
    draw_curves,
    draw_filters,
    draw_layers,
    draw_precisions,
    draw_reliability,
    draw_rotations,
    save_picture,
    save_pictures,
)
from ella_cuda.reports.results import results_table, save_report

__all__ = [
    "describe_layers",
    "draw_anchors",
    "draw_curves",
    "draw_filters",
    "draw_layers",
    "draw_precisions",
    "draw_reliability",
    "draw_rotations",
    "layer_table",
    "layout",
    "results_table",
    "save_picture",
    "save_pictures",
    "save_report",
]
