"""Reading a folder of runs: its grid, progress of unfinished runs, and what runs learned."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ella_cuda import run_folder
from ella_cuda.experiments.diary import diary_of
from ella_cuda.experiments.hyperparameters import RunConfig
from ella_cuda.files import damaged, path_part
from ella_cuda.reports import describe_layers
from ella_cuda.training.checkpoint import read_checkpoint


def read_grid(out_dir: str | os.PathLike[str]) -> tuple[list[RunConfig], dict[str, Any]]:
    """The runs and the options that a folder was started with.

    Raises:
        ValueError: the folder has no readable ``config.json``, or one that was edited.
    """
    return run_folder.read_config(out_dir, _configs)


def _configs(runs: list[dict[str, Any]]) -> list[RunConfig]:
    configs = [RunConfig(**run) for run in runs]
    if not configs or len({path_part(config.name) for config in configs}) < len(configs):
        raise ValueError("a run is in it twice" if configs else "no run is in it")
    return configs


def read_running(out_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The present state of the runs that have begun and not finished, as rows like ``summary.json``'s.

    Accuracy and NLL on test images are not known yet and missing; ``epoch`` and ``epochs`` say how far each is,
    ``loss`` and ``train_accuracy`` (percent) are those of the last evaluation, written at ``last_written`` (seconds since
    1970). Whether a run still goes on, its folder does not know.

    Raises:
        ValueError: the folder is not that of a run.
    """
    configs, _ = read_grid(out_dir)
    done = {row["run"] for row in run_folder.read_summary(out_dir)}
    rows = []
    for config in configs:
        if config.name in done or not (Path(out_dir) / config.name / run_folder.DIARY_FILE).exists():
            continue
        written = (Path(out_dir) / config.name / run_folder.DIARY_FILE).stat().st_mtime
        diary = diary_of(Path(out_dir) / config.name, config)
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
                **{key: last["learned"][key] for key in ("augmentation",) if key in last.get("learned", {})},
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
    return run_folder.read_diary(Path(run_dir))["evaluations"]


def read_anchors(run_dir: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """Where the anchors of a run's newest checkpoint lie: by basis ``now`` and, where they are learned, ``start``, each
    ``(A, 2)`` rows and columns in pixels from the grid's centre. Empty without sparsified layers or checkpoint.

    Raises:
        ValueError: the run's diary or checkpoint is damaged.
    """
    diary, path = run_folder.read_diary(Path(run_dir)), Path(run_dir) / run_folder.CHECKPOINT_FILE
    names = diary["evaluations"][-1]["inverse_lengthscale"]
    if not names or not path.exists():
        return {}
    start = diary.get("anchors_at_start", {})
    try:
        model = run_folder.of_network(read_checkpoint(path)["model"])
        found = {name: {"now": model[f"{name}.anchors"].tolist()} for name in names}
    except (LookupError, TypeError, AttributeError) as error:
        raise damaged(path, f"its model: {error!r}", "do that run again in another folder") from error
    return {name: entry | ({"start": start[name]} if name in start else {}) for name, entry in found.items()}
