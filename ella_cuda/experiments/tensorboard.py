"""A run's numbers for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ella_cuda.reports import describe_layers
from ella_cuda.reports.text import CALIBRATION

FOLDER = "tensorboard"  # in that of a run


def require_tensorboard() -> Any:
    """``torch.utils.tensorboard.SummaryWriter``.

    Raises:
        RuntimeError: the package tensorboard cannot be imported.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise RuntimeError(
            f"logging for TensorBoard needs the package tensorboard, which cannot be imported ({error}); install it (pip "
            "install tensorboard) or leave the option out."
        ) from error
    return SummaryWriter


class TensorBoardLog:
    """Scalars over the epochs: loss, accuracies, NLL, ``-log q/N``; for each tensor its prior precision, for each path its
    share of the layer's effective parameters, for each basis its inverse lengthscale and how far its anchors moved.

    Every session writes the whole run from its diary, and has TensorBoard forget what sessions before it wrote: a resumed run has
    every step once, also if it was killed before its last evaluation was in a checkpoint, or began without a log.

    Args:
        folder: for the event files.
        layout: of the run's network, see :func:`ella_cuda.reports.layout`.

    Raises:
        RuntimeError: the package tensorboard cannot be imported.
    """

    def __init__(self, folder: Path, layout: dict[str, Any]) -> None:
        self._make, self._folder, self._layout = require_tensorboard(), folder, layout
        self._writer: Any = None
        self._written = 0

    def write(self, evaluations: Sequence[Mapping[str, Any]]) -> None:
        """Write those evaluations of the run, as in its diary, that this session has not written yet."""
        if self._writer is None:
            self._writer = self._make(str(self._folder), purge_step=0)
        for entry in evaluations[self._written :]:
            for tag, value in self._scalars(entry).items():
                if value is not None:
                    self._writer.add_scalar(tag, value, entry["epoch"])
        self._written = len(evaluations)
        self._writer.flush()  # before the checkpoint of this epoch

    def finish(self, row: Mapping[str, Any], evaluations: Sequence[Mapping[str, Any]]) -> None:
        """Write what is left of the evaluations, and how good the finished row says predictions are, and close the file."""
        self.write(evaluations)
        where, epoch = row["evaluated_on"], evaluations[-1]["epoch"]
        for key in ("accuracy", "nll", *CALIBRATION):
            if row[key] is not None:
                self._writer.add_scalar(f"{key}/{where}", row[key], epoch)
        self._writer.close()

    def _scalars(self, entry: Mapping[str, Any]) -> dict[str, float | None]:
        precision, gamma = entry["prior_precision"], entry["effective_parameters"]
        values = {
            "loss": entry["loss"],
            "accuracy/train": 100 * entry["accuracy"],
            "neg_log_marginal_likelihood": entry["neg_log_marginal_likelihood"],
            **{f"prior_precision/{name}": value for name, value in precision.items()},
            **{f"inverse_lengthscale/{name}": value for name, value in entry["inverse_lengthscale"].items()},
            **{f"augmentation/{n}": value for n, value in entry.get("learned", {}).get("augmentation", {}).items()},
            **{f"anchors_moved/{name}": value["mean_displacement"] for name, value in entry["anchors"].items()},
        }
        for layer in describe_layers(self._layout, precision, gamma)[0]:
            for path, found in layer["paths"].items():
                share = found["relative_effective_parameters"]
                values[f"relative_effective_parameters/{layer['name']}.{path}"] = share
        return values
