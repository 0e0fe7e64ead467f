"""All pictures of a folder of runs."""

from __future__ import annotations

import dataclasses
import functools
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ella_cuda.files import write_file
from ella_cuda.metrics import Reliability
from ella_cuda.models import SPARSE_PATHS
from ella_cuda.reports.pictures.amounts import draw_amounts, draw_samples
from ella_cuda.reports.pictures.anchors import draw_anchors
from ella_cuda.reports.pictures.calibration import draw_left_out, draw_reliability, draw_rotations
from ella_cuda.reports.pictures.curves import draw_curves
from ella_cuda.reports.pictures.filters import draw_filters
from ella_cuda.reports.pictures.layers import draw_layers
from ella_cuda.reports.pictures.page import picture_files, save_picture
from ella_cuda.reports.pictures.precisions import draw_precisions
from ella_cuda.reports.text import AMOUNTS, WAYS, run_title
from ella_cuda.reports.weights import SpatialWeight, spatial_weights
from ella_cuda.run_folder import (
    CHECKPOINT_FILE,
    DIARY_FILE,
    HISTORY_FILE,
    SAMPLES_FILE,
    of_network,
    read_diary,
    read_history,
    read_samples,
)
from ella_cuda.training.checkpoint import read_checkpoint

MATRIX_PATH = "fc"  # the one whose weights have no images over positions


@dataclasses.dataclass
class Drawn:
    """What became of the pictures.

    Attributes:
        files: that are there now.
        failures: a sentence for each picture that could not be drawn.
    """

    files: list[Path] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)


def save_pictures(rows: Sequence[Mapping[str, Any]], runs_dir: Path, out_dir: Path) -> Drawn:
    """Draw everything there is to draw of runs, finished or not, as PNG and SVG.

    ``curves`` and, where a network chose among paths, ``layers`` show all runs. In a folder for each run are its own ``curves``,
    ``precisions`` (of evidence runs), ``filters`` (where weights have images), ``anchors`` (of sparsified layers), ``amounts`` (of a learned
    augmentation), and of finished runs ``samples`` (of one), ``reliability``, ``leave_one_out`` (where predictions are calibrated) and, with
    turned images, ``rotations``.
    A run's own pictures that are in its folder and younger than what they show are not drawn again, but copied where
    they are wanted elsewhere: delete a picture to have it drawn anew.

    Args:
        rows: of ``summary.json``, or of runs that are not finished.
        runs_dir: with a folder for each run.
        out_dir: where the pictures go; may be ``runs_dir``.

    Returns:
        What was drawn. A picture that cannot be drawn costs no other.

    Raises:
        OSError: a file cannot be written; what was there is untouched.
    """
    drawn = Drawn()
    chose = [r for r in rows if r["objective"] == "evidence" and "+" in r["layer"] and _knows_effective_parameters(r)]
    if chose:
        add_picture(drawn, out_dir / "layers", lambda: draw_layers(chose))
    if rows:
        add_picture(
            drawn, out_dir / "curves", lambda: draw_curves(rows, [read_history(runs_dir / r["run"]) for r in rows])
        )
    for row in rows:
        _save_run_pictures(drawn, row, runs_dir / row["run"], out_dir / row["run"])
    return drawn


def _knows_effective_parameters(row: Mapping[str, Any]) -> bool:
    paths = [entry for layer in row["layers"] for entry in layer["paths"].values()]
    return all(entry["effective_parameters"] is not None for entry in paths)


def _save_run_pictures(drawn: Drawn, row: Mapping[str, Any], run_dir: Path, out_dir: Path) -> None:
    sources = [p for p in (run_dir / HISTORY_FILE, run_dir / DIARY_FILE, run_dir / CHECKPOINT_FILE) if p.exists()]
    youngest = max((p.stat().st_mtime_ns for p in sources), default=0)
    paths = set(row["layer"].split("+"))
    history = functools.cache(lambda: read_history(run_dir))
    weights = functools.cache(lambda: _weights(row, run_dir))
    makers: dict[str, Callable[[], Any]] = {"curves": lambda: draw_curves([row], [history()])}
    if row["objective"] == "evidence":
        makers["precisions"] = lambda: draw_precisions(row, history()["evaluations"])
    if row.get("augmentation"):
        makers["amounts"] = lambda: draw_run_amounts(row, history()["evaluations"])
        if (run_dir / SAMPLES_FILE).exists():
            makers["samples"] = lambda: draw_samples(
                {"": read_samples(run_dir)["images"]},
                f"{run_title(row)}: images, and copies at the learned amounts",
            )
    if row["layers"] and paths != {MATRIX_PATH} and (run_dir / CHECKPOINT_FILE).exists():
        makers["filters"] = lambda: draw_filters(row, weights())
        if paths & SPARSE_PATHS:
            makers["anchors"] = lambda: draw_anchors(row, weights(), _start(run_dir))
    if "reliability" in row:
        makers["reliability"] = lambda: draw_reliability(_methods(row["reliability"], _reliability), run_title(row))
    if "leave_one_out" in row:
        makers["leave_one_out"] = lambda: draw_left_out(row["leave_one_out"], f"{run_title(row)}: each image left out")
    if "rotations" in row:
        makers["rotations"] = lambda: draw_rotations(
            _methods(row["rotations"], list),
            f"{run_title(row)}, {row['rotated_size']} of {row['evaluated_size']} images",
        )
    out_dir.mkdir(parents=True, exist_ok=True)
    for name, make in makers.items():
        there = picture_files(run_dir / name)
        if all(p.exists() and p.stat().st_mtime_ns >= youngest for p in there):
            drawn.files += there if out_dir == run_dir else [_copied(p, out_dir / p.name) for p in there]
        else:
            add_picture(drawn, out_dir / name, make)


def _weights(row: Mapping[str, Any], run_dir: Path) -> list[SpatialWeight]:
    kind = read_diary(run_dir)["config"]["basis"]
    return spatial_weights(row["layers"], of_network(read_checkpoint(run_dir / CHECKPOINT_FILE)["model"]), kind)


def draw_run_amounts(row: Mapping[str, Any], evaluations: Sequence[Mapping[str, Any]]) -> Any:
    """A run's amounts over its evaluations, those of one unit in a panel."""
    some = [e for e in evaluations if "augmentation" in e.get("learned", {})]
    epochs, panels = [e["epoch"] for e in some], {}
    for title, names in (
        ("rotation, degrees", ("rotation",)),
        ("translations, half images", ("tx", "ty")),
        ("scales and shear, logarithmic", ("sx", "sy", "shear")),
    ):
        here = [name for name in names if name in row["augmentation"]]
        lines = {n: [AMOUNTS[n][1] * e["learned"]["augmentation"][n] for e in some] for n in here}
        if here:
            panels[title] = [(epochs, lines)]
    return draw_amounts(panels, f"{run_title(row)}: amounts of the augmentation", shared=False)


def _methods(found: Mapping[str, Any], of: Callable[[Any], Any]) -> dict[str, Any]:
    return {title: of(found[way]) for way, title in WAYS.items() if way in found}


def _reliability(bins: Mapping[str, list[Any]]) -> Reliability:
    numbers = ([math.nan if v is None else v for v in bins[key]] for key in ("confidence", "accuracy"))
    return Reliability(torch.tensor(bins["count"]), *(torch.tensor(n, dtype=torch.float64) for n in numbers))


def _start(run_dir: Path) -> dict[str, list[list[float]]] | None:
    return read_diary(run_dir).get("anchors_at_start")


def _copied(source: Path, target: Path) -> Path:
    write_file(target, lambda path: shutil.copyfile(source, path))
    return target


def add_picture(drawn: Drawn, stem: Path, make: Callable[[], Any]) -> None:
    """Draw a picture and save it as ``stem``; note its files, or why it could not be drawn.

    Raises:
        OSError: a file cannot be written; what was there is untouched.
    """

    def failed(error: Exception) -> None:
        drawn.failures.append(f"{stem} could not be drawn ({type(error).__name__}: {error}).")

    try:
        figure = make()
    except Exception as error:  # whatever went wrong: results and other pictures do not depend on it
        return failed(error)
    try:
        drawn.files += save_picture(figure, stem)
    except OSError:  # a full disk is no matter of this picture alone
        raise
    except Exception as error:
        failed(error)
