"""The file of a run's progress."""

from __future__ import annotations

import dataclasses
import time
import warnings
from pathlib import Path
from typing import Any

from torch import nn

from ella_cuda.experiments.hyperparameters import RunConfig
from ella_cuda.files import damaged
from ella_cuda.nn import SpatialBasis
from ella_cuda.reports import layout
from ella_cuda.run_folder import CHECKPOINT_FILE, DIARY_FILE, of_network, read_diary, write_diary
from ella_cuda.training import Evaluation
from ella_cuda.training.checkpoint import threads_of


def diary_of(run_dir: Path, config: RunConfig) -> dict[str, Any]:
    """A run's diary; ValueError where it is damaged, was edited, or is of another run."""
    diary, path, advice = read_diary(run_dir), run_dir / DIARY_FILE, f"move {run_dir} away to do that run again"
    try:
        found = RunConfig(**diary["config"])
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, f"config: {error!r}", advice) from error
    here = config.chosen
    for name in dict.fromkeys([*found.chosen, *here]):
        its, ours = getattr(found, name), getattr(config, name)
        if its != ours and name != "evidence_batch_size":  # the device's, where the grid does not say
            raise ValueError(f"{path} is of a run with {name}={its!r}, here {ours!r}. Put it back there, or {advice}.")
    return diary


class Diary:
    """A run's seconds and evaluations so far, in a file: what a resumed run adds to, what `inspect` shows of a running one, and
    what `load_run` rebuilds the network from. Warns where a run with a checkpoint lacks it.

    Args:
        folder: the run's.
        config: the run.
        network: what predictions need to know of the data, the numbers of :func:`build_network` among it.
        model: the network, with its anchors where they start; a resumed run draws the same ones.
    """

    def __init__(self, folder: Path, config: RunConfig, network: dict[str, Any], model: nn.Module) -> None:
        self.folder, self.start = folder, time.monotonic()
        self.names = [n for n, p in model.named_parameters() if p.requires_grad]
        self.bases = {n: m for n, m in model.named_modules() if isinstance(m, SpatialBasis)}
        self.start_anchors = {n: basis.anchors.detach().clone() for n, basis in self.bases.items()}
        self.fixed = {
            "run": config.name,
            "config": dataclasses.asdict(config),
            "network": network,
            "layout": layout(model),
        }
        self.fixed["threads"] = threads_of(model)
        if "anchors" in config.learn.split("+"):
            self.fixed["anchors_at_start"] = {n: a.tolist() for n, a in self.start_anchors.items()}
        self.before, self.evaluations = 0.0, []
        if (folder / DIARY_FILE).exists():
            saved = diary_of(folder, config)
            self.before, self.evaluations = saved["seconds"], saved["evaluations"]
        elif (folder / CHECKPOINT_FILE).exists():
            warnings.warn(
                f"{folder} has a {CHECKPOINT_FILE} but no {DIARY_FILE}: its run goes on, and its evaluations and seconds before are lost. "
                "Put the file back to keep them.",
                stacklevel=2,
            )

    def seconds(self) -> float:
        return self.before + time.monotonic() - self.start

    def anchors(self) -> dict[str, dict[str, float]]:
        """By basis, how many anchors it has and how far they are from where they started, in pixels."""
        found = {}
        for name, basis in self.bases.items():
            moved = (basis.anchors.detach() - self.start_anchors[name]).double().norm(dim=1)
            distances = {"mean_displacement": float(moved.mean()), "largest_displacement": float(moved.max())}
            found[name] = {"count": basis.num_anchors, **distances}
        return found

    def record(self, evaluation: Evaluation) -> None:
        # Written before the checkpoint of the same epoch: a run killed between the two repeats this evaluation.
        self.evaluations = [e for e in self.evaluations if e["epoch"] < evaluation.epoch]
        entry = dataclasses.asdict(evaluation)
        entry["prior_precision"] = dict(zip(self.names, evaluation.prior_precision, strict=True))
        entry["anchors"] = self.anchors()
        entry["inverse_lengthscale"] = of_network(evaluation.inverse_lengthscale)
        if evaluation.effective_parameters is not None:
            entry["effective_parameters"] = of_network(evaluation.effective_parameters)
        self.evaluations.append(entry)
        state = {**self.fixed, "seconds": self.seconds(), "evaluations": self.evaluations}
        write_diary(self.folder, state)
