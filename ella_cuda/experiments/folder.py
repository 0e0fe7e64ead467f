"""What a folder of runs holds: its grid, the finished rows, and how far the others are."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ella_cuda.experiments.config import RunConfig
from ella_cuda.experiments.files import CONFIG_FILE, SUMMARY_FILE
from ella_cuda.reports import describe_layers
from ella_cuda.reports.files import CHECKPOINT_FILE, DIARY_FILE
from ella_cuda.training.checkpoint import read_checkpoint


def read_grid(out_dir: str | os.PathLike[str]) -> tuple[list[RunConfig], dict[str, Any]]:
    """The runs and the options that a folder was started with.

    Raises:
        ValueError: the folder has no readable ``config.json``.
    """
    path = Path(out_dir) / CONFIG_FILE
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return [RunConfig(**run) for run in stored["runs"]], stored["options"]
    except FileNotFoundError as error:
        lacks = f"has no {CONFIG_FILE}" if Path(out_dir).exists() else "does not exist"
        raise ValueError(f"{out_dir} is not a folder of runs: it {lacks}.") from error
    except NotADirectoryError as error:
        raise ValueError(f"{out_dir} is a file; name a folder of runs.") from error
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged or of another version ({error!r}); start anew in another folder."
        ) from error


def read_summary(out_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a folder's finished runs; none yet is an empty list.

    Raises:
        ValueError: ``summary.json`` is damaged.
    """
    path = Path(out_dir) / SUMMARY_FILE
    if not path.exists():
        return []
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged ({error}); move it away to do its runs again.") from error


def read_running(out_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The present state of the runs that have begun and not finished, as rows like ``summary.json``'s.

    Accuracy and NLL on test images are not known yet and missing; ``epoch`` and ``epochs`` say how far each is,
    ``loss`` and ``train_accuracy`` (percent) are those of the last evaluation, written at ``last_written`` (seconds since
    1970). Whether a run still goes on, its folder does not know.

    Raises:
        ValueError: the folder is not that of a run.
    """
    configs, _ = read_grid(out_dir)
    done = {row["run"] for row in read_summary(out_dir)}
    rows = []
    for config in configs:
        if config.name in done or not (Path(out_dir) / config.name / DIARY_FILE).exists():
            continue
        written = (Path(out_dir) / config.name / DIARY_FILE).stat().st_mtime
        diary = _read_diary(Path(out_dir) / config.name)
        last = diary["evaluations"][-1]
        found = [last[key] for key in ("prior_precision", "effective_parameters", "inverse_lengthscale", "anchors")]
        layers, others = describe_layers(diary["layout"], *found)
        rows.append(
            {
                "run": config.name,
                **config.described,
                "epoch": last["epoch"],
                "epochs": config.epochs,
                "last_written": written,
                "loss": last["loss"],
                "train_accuracy": 100 * last["accuracy"],
                "neg_log_marginal_likelihood": last["neg_log_marginal_likelihood"],
                "seconds": round(diary["seconds"], 2),
                "layers": layers,
                "other_parameters": others,
            }
        )
    return rows


def read_evaluations(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All evaluations of a run so far: an :class:`ella_cuda.training.Evaluation` each, with prior precisions by parameter
    name, and ``anchors`` as in a row.

    Raises:
        ValueError: the run's diary is damaged.
    """
    return _read_diary(Path(run_dir))["evaluations"]


def read_anchors(run_dir: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """Where the anchors of a run's newest checkpoint lie: by basis ``now`` and, where they are learned, ``start``, each
    ``(A, 2)`` rows and columns in pixels from the grid's centre. Empty without sparsified layers or checkpoint.

    Raises:
        ValueError: the run's diary or checkpoint is damaged.
    """
    diary, path = _read_diary(Path(run_dir)), Path(run_dir) / CHECKPOINT_FILE
    names = diary["evaluations"][-1]["inverse_lengthscale"]
    if not names or not path.exists():
        return {}
    model, start = read_checkpoint(path)["model"], diary.get("anchors_at_start", {})
    found = {name: {"now": model[f"{name}.anchors"].tolist()} for name in names}
    return {name: entry | ({"start": start[name]} if name in start else {}) for name, entry in found.items()}


def _read_diary(run_dir: Path) -> dict[str, Any]:
    path = run_dir / DIARY_FILE
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged ({error}); move {run_dir} away to do that run again.") from error
