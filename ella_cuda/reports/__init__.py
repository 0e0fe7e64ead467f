"""Tables and pictures of runs, from the rows of ``summary.json``."""

from ella_cuda.reports.kernels import KernelCheck, check_kernels, kernel_table
from ella_cuda.reports.layers import describe_layers, layer_table, layout
from ella_cuda.reports.pictures import draw_curves, draw_layers
from ella_cuda.reports.results import results_table, save_report

__all__ = [
    "KernelCheck",
    "check_kernels",
    "describe_layers",
    "draw_curves",
    "draw_layers",
    "kernel_table",
    "layer_table",
    "layout",
    "results_table",
    "save_report",
]
