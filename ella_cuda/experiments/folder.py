"""What a folder of runs holds: its grid, the finished rows, and how far the others are."""

from __future__ import annotations

import numbers
import os
from pathlib import Path
from typing import Any

from ella_cuda.digest import DIGEST, fits_seal
from ella_cuda.experiments.config import RunConfig
from ella_cuda.experiments.files import CONFIG_FILE, SUMMARY_FILE, UNSEALED
from ella_cuda.files import damaged, read_json
from ella_cuda.reports import describe_layers
from ella_cuda.reports.files import CHECKPOINT_FILE, DIARY_FILE
from ella_cuda.training.checkpoint import read_checkpoint

GRID_ADVICE = "start anew in another folder"
SUMMARY_ADVICE = "move it away to do its runs again"
OPTIONAL_NUMBER = (numbers.Real, type(None))
# What a finished row has, at least, and what evaluations have.
ROW = {
    **dict.fromkeys(("run", "data", "task", "layer", "objective", "evaluated_on"), str),
    **dict.fromkeys(("seed", "evaluated_size"), int),
    **dict.fromkeys(("accuracy", "nll", "seconds"), numbers.Real),
    "neg_log_marginal_likelihood": OPTIONAL_NUMBER,
    "layers": list,
}
LAYER = {"name": str, "type": (str, type(None)), "paths": dict}
EVALUATION = {
    **dict.fromkeys(("epoch", "loss"), numbers.Real),
    "accuracy": OPTIONAL_NUMBER,
    "neg_log_marginal_likelihood": OPTIONAL_NUMBER,
    "prior_precision": dict,
    "effective_parameters": (dict, type(None)),
    "inverse_lengthscale": dict,
    "anchors": dict,
}


def read_grid(out_dir: str | os.PathLike[str]) -> tuple[list[RunConfig], dict[str, Any]]:
    """The runs and the options that a folder was started with.

    Raises:
        ValueError: the folder has no readable ``config.json``, or one that was edited.
    """
    path = Path(out_dir) / CONFIG_FILE
    try:
        stored = read_json(path, GRID_ADVICE)
    except FileNotFoundError as error:
        lacks = f"has no {CONFIG_FILE}" if Path(out_dir).exists() else "does not exist"
        raise ValueError(f"{out_dir} is not a folder of runs: it {lacks}.") from error
    except NotADirectoryError as error:
        raise ValueError(f"{out_dir} is a file; name a folder of runs.") from error
    if wrong := _missing(stored, {"runs": list, "options": dict}):
        raise damaged(path, wrong, GRID_ADVICE)
    edited = (
        "{path} was edited after the runs began: its digest {what}. Undo the edit, or start anew in another folder."
    )
    if not fits_seal(stored):
        raise ValueError(edited.format(path=path, what="does not fit"))
    try:
        configs = [RunConfig(**run) for run in stored["runs"]]
    except (TypeError, ValueError) as error:
        raise damaged(path, error, GRID_ADVICE) from error
    names = [config.name for config in configs]
    if not names or len(set(names)) < len(names):
        raise damaged(path, "a run is in it twice" if names else "no run is in it", GRID_ADVICE)
    if DIGEST not in stored and _begun_sealed(Path(out_dir)):
        raise ValueError(edited.format(path=path, what="is gone"))
    return configs, stored["options"]


def _begun_sealed(out_dir: Path) -> bool:
    """Whether all rows and diaries have a digest, and there are some: the version that began the folder gave its grid one too."""
    files = [file for file in (out_dir / SUMMARY_FILE, *out_dir.glob(f"*/{DIARY_FILE}")) if file.is_file()]
    contents = [read_json(file, SUMMARY_ADVICE) for file in files]
    entries = [entry for content in contents for entry in (content if isinstance(content, list) else [content])]
    return bool(entries) and all(isinstance(entry, dict) and DIGEST in entry for entry in entries)


def read_summary(out_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a folder's finished runs; none yet is an empty list.

    Raises:
        ValueError: ``summary.json`` is damaged, or was edited.
    """
    path = Path(out_dir) / SUMMARY_FILE
    if not path.exists():
        return []
    rows = read_json(path, SUMMARY_ADVICE)
    if not isinstance(rows, list):
        raise damaged(path, f"a {type(rows).__name__}, not a list of rows", SUMMARY_ADVICE)
    config = Path(out_dir) / CONFIG_FILE
    has_digests = config.exists() and DIGEST in read_json(
        config, GRID_ADVICE
    )  # as of the version that began the folder
    for i, row in enumerate(rows):
        wrong = _missing(row, ROW) or next(filter(None, (_missing(layer, LAYER) for layer in row["layers"])), None)
        if wrong:
            raise damaged(path, f"row {i + 1}: {wrong}", SUMMARY_ADVICE)
        if not fits_seal(row, without=UNSEALED) or (has_digests and DIGEST not in row):
            raise ValueError(
                f"{path} was edited: the row of {row['run']} does not fit its digest. Undo the edit, or delete the row to do its run "
                "again from its last checkpoint."
            )
    return rows


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
        diary = read_diary(Path(out_dir) / config.name)
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
    return read_diary(Path(run_dir))["evaluations"]


def read_anchors(run_dir: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """Where the anchors of a run's newest checkpoint lie: by basis ``now`` and, where they are learned, ``start``, each
    ``(A, 2)`` rows and columns in pixels from the grid's centre. Empty without sparsified layers or checkpoint.

    Raises:
        ValueError: the run's diary or checkpoint is damaged.
    """
    diary, path = read_diary(Path(run_dir)), Path(run_dir) / CHECKPOINT_FILE
    names = diary["evaluations"][-1]["inverse_lengthscale"]
    if not names or not path.exists():
        return {}
    model, start = read_checkpoint(path)["model"], diary.get("anchors_at_start", {})
    found = {name: {"now": model[f"{name}.anchors"].tolist()} for name in names}
    return {name: entry | ({"start": start[name]} if name in start else {}) for name, entry in found.items()}


def read_diary(run_dir: Path) -> dict[str, Any]:
    """What a run has done so far: ``seconds``, ``evaluations`` (at least one), ``layout`` and more.

    Raises:
        ValueError: the file is damaged, or was edited.
    """
    path = run_dir / DIARY_FILE
    advice = f"move {run_dir} away to do that run again"
    diary = read_json(path, advice)
    wrong = _missing(diary, {"seconds": numbers.Real, "evaluations": list, "layout": dict})
    if wrong is None and not diary["evaluations"]:
        wrong = "no evaluation"
    if wrong is None:
        wrong = next(filter(None, (_missing(entry, EVALUATION) for entry in diary["evaluations"])), None)
    if wrong:
        raise damaged(path, wrong, advice)
    if not fits_seal(diary, without=UNSEALED):
        raise ValueError(f"{path} was edited: its digest does not fit. Undo the edit, or {advice}.")
    return diary


def _missing(found: Any, expected: dict[str, Any]) -> str | None:
    """What a mapping read from a file lacks or has of another type, in words; None if nothing."""
    if not isinstance(found, dict):
        return f"a {type(found).__name__} where a mapping is due"
    for key, kind in expected.items():
        if key not in found:
            return f"no {key}"
        if not isinstance(found[key], kind) or (isinstance(found[key], bool)):
            return f"{key} is a {type(found[key]).__name__}"
    return None
