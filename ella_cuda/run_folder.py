"""The folder of a grid of runs: its files, what is in them, and how they are read and written.

Everything that reads or writes such a folder does it by these names. Files are whole at any moment; a digest tells one that was edited or
is of something else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ella_cuda.digest import DIGEST, broken_seal, sealed
from ella_cuda.files import damaged, path_part, read_json, write_file

CONFIG_FILE = "config.json"  # the grid and the options it was started with
SUMMARY_FILE = "summary.json"  # the finished rows
CSV_FILE, TABLE_FILE = "summary.csv", "table.txt"  # the same for people
ENVIRONMENT_FILE = "environment.json"  # versions and device, an entry for each session
# Of a run, in a folder of its own.
CHECKPOINT_FILE = "checkpoint.pt"
DIARY_FILE = "progress.json"  # what it has done so far
HISTORY_FILE = "history.json"  # of a finished run
SAMPLES_FILE = "samples.json"  # of a finished run that learned an augmentation
PREDICTIONS_FILE = "predictions.json"  # of a finished run on images of one's own
LAPLACE_FILE = "laplace.pt"  # its approximation
PREDICTIVE = "predictive_prior_precision"  # an entry of a finished run's history
EXAMPLES_FILE = "examples.json"  # of a finished run: images to look at
REPORT_FILE = "report.html"  # of a finished run, and of a folder of runs
NETWORK = "network."  # what begins the names of a network's tensors where it is averaged over copies

UNSEALED = ("seconds",)  # of rows and diaries: what their digests do not cover, since sessions differ in it
GRID_ADVICE = "start anew in another folder"
SUMMARY_ADVICE = "move it away to do its runs again"


def read_config(
    out_dir: str | os.PathLike[str], of: Callable[[list[Any]], list[Any]] = list
) -> tuple[list[Any], dict[str, Any]]:
    """The runs, made by ``of`` of their records, and the options that a folder was started with.

    Raises:
        ValueError: the folder has no readable ``config.json``, or one that was edited, or of which ``of`` raised ValueError or TypeError.
    """
    path = Path(out_dir) / CONFIG_FILE
    try:
        stored = read_json(path, GRID_ADVICE)
    except FileNotFoundError as error:
        lacks = f"has no {CONFIG_FILE}" if Path(out_dir).exists() else "does not exist"
        raise ValueError(f"{out_dir} is not a folder of runs: it {lacks}.") from error
    except NotADirectoryError as error:
        raise ValueError(f"{out_dir} is a file; name a folder of runs.") from error
    _require_seal(path, stored, [CONFIG_FILE], GRID_ADVICE)
    try:
        return of(stored["runs"]), stored["options"]
    except (TypeError, ValueError) as error:
        raise damaged(path, error, GRID_ADVICE) from error


def write_config(out_dir: Path, runs: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> None:
    """Keep what a folder is started with."""
    write_file(out_dir / CONFIG_FILE, json.dumps(sealed({"options": options, "runs": runs}, [CONFIG_FILE]), indent=1))


def _require_seal(path: Path, found: Any, of: list[Any], advice: str, which: str = "") -> None:
    """ValueError where what a file has is not what was written as that."""
    if why := broken_seal(found, of, UNSEALED):
        raise ValueError(f"{path} was edited, or is of another version: {which}{why}. Undo the edit, or {advice}.")


def _require_run(path: Path, found: Mapping[str, Any], advice: str) -> None:
    """ValueError where a file of a run was edited, or is of another run than the folder that it is in, among those of a grid."""
    _require_seal(path, found, [path.name], advice)
    folder = path.parent.resolve()
    if (folder.parent / CONFIG_FILE).exists() and found.get("run") != folder.name:
        raise ValueError(f"{path} is of the run {found.get('run')!r}. Put it back there, or {advice}.")


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
    grid, seen = _grid(out_dir), set()
    for i, row in enumerate(rows):
        advice = "delete the row to do its run again from its last checkpoint"
        _require_seal(path, row, [SUMMARY_FILE, grid], advice, f"in row {i + 1} ")
        try:
            name = path_part(row["run"])
        except ValueError as error:
            raise damaged(path, f"row {i + 1}: run: {error}", SUMMARY_ADVICE) from error
        if name in seen:
            raise damaged(path, f"two rows of {name}", "delete one of them")
        seen.add(name)
    return rows


def write_summary(out_dir: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Keep the rows of the finished runs, each of :func:`sealed_row`."""
    write_file(out_dir / SUMMARY_FILE, json.dumps(list(rows), indent=1, allow_nan=False) + "\n")


def sealed_row(row: Mapping[str, Any], out_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """A finished run's row with its digest, as one of the folder's grid."""
    return sealed(row, [SUMMARY_FILE, _grid(out_dir)], UNSEALED)


def _grid(out_dir: str | os.PathLike[str]) -> Any:
    """The digest of a folder's grid; None where it has none."""
    config = Path(out_dir) / CONFIG_FILE
    found = read_json(config, GRID_ADVICE) if config.exists() else None
    return found.get(DIGEST) if isinstance(found, dict) else None


def _write_of_run(run_dir: Path, file: str, content: Mapping[str, Any]) -> None:
    write_file(run_dir / file, json.dumps(sealed(content, [file], UNSEALED), allow_nan=False))


def _read_of_run(run_dir: Path, file: str, advice: str) -> dict[str, Any]:
    """What :func:`_write_of_run` wrote; ValueError where it is damaged, or was edited, or is of another run."""
    path = run_dir / file
    found = read_json(path, advice)
    _require_run(path, found, advice)
    return found


def read_diary(run_dir: Path) -> dict[str, Any]:
    """What a run has done so far: ``run``, ``seconds``, ``evaluations`` (at least one), ``layout`` and more.

    Raises:
        ValueError: the file is damaged, or was edited, or is of another run.
    """
    return _read_of_run(run_dir, DIARY_FILE, f"move {run_dir} away to do that run again")


def write_diary(run_dir: Path, diary: Mapping[str, Any]) -> None:
    """Keep what a run, named in its entry ``run``, has done so far."""
    _write_of_run(run_dir, DIARY_FILE, diary)


def read_history(run_dir: Path) -> dict[str, Any]:
    """A run's ``evaluations`` and, once it is finished, the ``losses`` of all epochs; raises as :func:`read_diary` does."""
    if not (run_dir / HISTORY_FILE).exists():
        return read_diary(run_dir)
    return _read_of_run(run_dir, HISTORY_FILE, "do that run again in another folder")


def write_history(
    run_dir: Path,
    run: str,
    losses: Sequence[float],
    evaluations: Sequence[Mapping[str, Any]],
    predictive_prior_precision: Mapping[str, float] | None = None,
) -> None:
    """Keep what a finished run has done, and by which precisions it predicts; None is those of its last evaluation."""
    found = {"losses": losses, "evaluations": evaluations, PREDICTIVE: predictive_prior_precision}
    _write_of_run(run_dir, HISTORY_FILE, {"run": run, **found})


def write_samples(run_dir: Path, run: str, images: Sequence[Any], draws: Sequence[Any]) -> None:
    """Keep what a learned augmentation makes of images, rows of images of pixels in 0..255, and the draws that the run was evaluated with."""
    _write_of_run(run_dir, SAMPLES_FILE, {"run": run, "images": images, "draws": draws})


def read_samples(run_dir: Path) -> dict[str, Any]:
    """What :func:`write_samples` kept: ``images`` and ``draws``; raises as :func:`read_diary` does."""
    return _read_of_run(run_dir, SAMPLES_FILE, "delete it, and the run's row in summary.json, to have it made anew")


def write_predictions(run_dir: Path, predictions: Mapping[str, Any]) -> None:
    """Keep what a run, named in the entry ``run``, predicts of the images that it is evaluated on: ``evaluated_on``, ``class_names`` and, an
    entry for each image, ``names``, ``labels``, ``probabilities`` of each class."""
    _write_of_run(run_dir, PREDICTIONS_FILE, predictions)


def read_predictions(run_dir: Path) -> dict[str, Any]:
    """What :func:`write_predictions` kept; raises as :func:`read_diary` does."""
    return _read_of_run(run_dir, PREDICTIONS_FILE, "do that run again in another folder")


def write_examples(run_dir: Path, run: str, examples: Mapping[str, Any]) -> None:
    """Keep the images to look at, of :func:`ella_cuda.experiments.examples.find_examples`."""
    _write_of_run(run_dir, EXAMPLES_FILE, {"run": run, **examples})


def read_examples(run_dir: Path) -> dict[str, Any]:
    """What :func:`write_examples` kept, empty of runs of earlier versions; raises as :func:`read_diary` does."""
    if not (run_dir / EXAMPLES_FILE).exists():
        return {}
    return _read_of_run(run_dir, EXAMPLES_FILE, "delete it; the report is then without its images")


def of_network(named: Mapping[str, Any]) -> dict[str, Any]:
    """By name, what belongs to a run's network, whether the run averaged it over copies or not."""
    return {name.removeprefix(NETWORK): value for name, value in named.items()}
