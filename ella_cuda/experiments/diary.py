"""What a run has done so far, in a file."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

from torch import nn

from ella_cuda.experiments.config import RunConfig
from ella_cuda.reports import layout
from ella_cuda.reports.files import write_file
from ella_cuda.training import Evaluation


class Diary:
    """A run's seconds and evaluations so far, in a file: what a resumed run adds to, what `inspect` shows of a running one, and
    what `load_run` rebuilds the network from: ``network`` is its numbers that follow from the data, see :func:`build_network`."""

    def __init__(self, path: Path, config: RunConfig, network: dict[str, int], model: nn.Module) -> None:
        self.path, self.start = path, time.monotonic()
        self.names = [n for n, p in model.named_parameters() if p.requires_grad]
        self.fixed = {"config": dataclasses.asdict(config), "network": network, "layout": layout(model)}
        self.before, self.evaluations = 0.0, []
        if path.exists():
            saved = json.loads(path.read_text(encoding="utf-8"))
            self.before, self.evaluations = saved["seconds"], saved["evaluations"]

    def seconds(self) -> float:
        return self.before + time.monotonic() - self.start

    def record(self, evaluation: Evaluation) -> None:
        # Written before the checkpoint of the same epoch: a run killed between the two repeats this evaluation.
        self.evaluations = [e for e in self.evaluations if e["epoch"] < evaluation.epoch]
        entry = dataclasses.asdict(evaluation)
        entry["prior_precision"] = dict(zip(self.names, evaluation.prior_precision, strict=True))
        self.evaluations.append(entry)
        state = {**self.fixed, "seconds": self.seconds(), "evaluations": self.evaluations}
        write_file(self.path, json.dumps(state, allow_nan=False))
