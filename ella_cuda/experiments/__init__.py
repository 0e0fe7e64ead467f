"""Runs: one training with its evaluation, grids of them in a folder, and the recipes they follow."""

from ella_cuda.experiments.device import device_of_process, resolve_device
from ella_cuda.experiments.evaluation import evaluate
from ella_cuda.experiments.folder import read_anchors, read_evaluations, read_grid, read_running
from ella_cuda.experiments.grid import run_grid
from ella_cuda.experiments.hyperparameters import DENSE_PATH, DENSE_REASON, OBJECTIVES, RunConfig, configure, recipe
from ella_cuda.experiments.load import LoadedRun, load_run
from ella_cuda.experiments.optimizer import adam_for, learning_rate_schedule
from ella_cuda.experiments.report import write_overview, write_report
from ella_cuda.experiments.run import prepare, prepare_for, require_data, run_one
from ella_cuda.experiments.spread import SPREADS
from ella_cuda.experiments.tensorboard import require_tensorboard
from ella_cuda.run_folder import CONFIG_FILE, read_summary

__all__ = [
    "CONFIG_FILE",
    "DENSE_PATH",
    "DENSE_REASON",
    "OBJECTIVES",
    "SPREADS",
    "LoadedRun",
    "RunConfig",
    "adam_for",
    "configure",
    "device_of_process",
    "evaluate",
    "learning_rate_schedule",
    "load_run",
    "prepare",
    "prepare_for",
    "read_anchors",
    "read_evaluations",
    "read_grid",
    "read_running",
    "read_summary",
    "recipe",
    "require_data",
    "require_tensorboard",
    "resolve_device",
    "run_grid",
    "run_one",
    "write_overview",
    "write_report",
]
