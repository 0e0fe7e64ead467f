"""A table's rows under their objectives: our runs and the paper's numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ella_cuda.experiments.hyperparameters import RunConfig
from ella_cuda.papers.equivariances.plan import Plan
from ella_cuda.papers.equivariances.tables import TABLES, Printed, Row


@dataclasses.dataclass(frozen=True)
class Entry:
    """A row under one objective, ours beside the paper's.

    Attributes:
        row: of the table. objective: ``map`` or ``evidence``.
        configs: our runs, one for each seed. rows: those of ``summary.json`` that are done.
        printed: the paper's numbers.
        reason: why there are no runs.
    """

    row: Row
    objective: str
    configs: tuple[RunConfig, ...]
    rows: tuple[Mapping[str, Any], ...]
    printed: Printed
    reason: str = ""

    @property
    def title(self) -> str:
        """The row's, with the width of our networks where that is a share of the table's."""
        if self.row.width_share == 1:
            return self.row.title
        return f"{self.row.title}, {f'width {self.configs[0].width}' if self.configs else 'narrow'}"

    @property
    def status(self) -> str:
        """``done``, ``waiting``, ``not run``, or how many seeds are done of how many."""
        if not self.configs:
            return "not run"
        if len(self.rows) == len(self.configs):
            return "done"
        return f"{len(self.rows)} of {len(self.configs)} seeds" if self.rows else "waiting"

    def ours(self, metric: str) -> tuple[float, float | None] | None:
        """Mean over the seeds that are done and its standard error (None of one seed); None where nothing was computed."""
        return mean_and_error(row[metric] for row in self.rows)

    def has_both(self, metric: str) -> bool:
        """Whether we and the paper have a number of it."""
        return self.ours(metric) is not None and getattr(self.printed, metric) is not None

    def parameters(self) -> int | None:
        """Of our network."""
        return self.rows[0]["parameters"] if self.rows else None

    def counted_layers(self) -> tuple[int, int] | None:
        """Over the seeds, how many layers have effective parameters enough for a type, and so for shares, of how many."""
        layers = [layer for row in self.rows for layer in row["layers"]]
        return (sum(layer["type"] is not None for layer in layers), len(layers)) if layers else None

    def shares(self) -> dict[str, tuple[float, float | None]] | None:
        """By path, the mean over layers and seeds of its relative effective parameters in percent, and its standard error over seeds;
        None where no row has them. Layers without effective parameters have no shares and do not count."""
        found: dict[str, list[float]] = {path: [] for path in self.row.layer.split("+")}
        for row in self.rows:
            layers = [layer["paths"] for layer in row["layers"] if layer["type"] is not None]
            if not layers:
                return None
            for path, values in found.items():
                values.append(100 * sum(p[path]["relative_effective_parameters"] for p in layers) / len(layers))
        summed = {path: value for path, values in found.items() if (value := mean_and_error(values)) is not None}
        return summed or None


def mean_and_error(values: Iterable[float | None]) -> tuple[float, float | None] | None:
    """Mean and standard error of the mean; no error of one value, nothing where a value is missing or there is none."""
    given = list(values)
    numbers = [x for x in given if x is not None]
    n = len(numbers)
    if n == 0 or n < len(given):
        return None
    mean = math.fsum(numbers) / n
    if n == 1:
        return mean, None
    return mean, math.sqrt(math.fsum((x - mean) ** 2 for x in numbers) / (n - 1) / n)


def entries(plan: Plan, configs: Sequence[RunConfig], rows: Sequence[Mapping[str, Any]]) -> list[Entry]:
    """The table's rows under their objectives.

    Args:
        plan: see :func:`ella_cuda.papers.equivariances.plan_table`. configs: its runs.
        rows: of ``summary.json``; those of runs that are done.
    """
    by_key = {row.key: row for row in TABLES[plan.table].rows}
    named, done = {c.name: c for c in configs}, {r["run"]: r for r in rows}
    return [
        Entry(
            by_key[cell.row],
            cell.objective,
            tuple(named[run] for run in cell.runs),
            tuple(done[run] for run in cell.runs if run in done),
            by_key[cell.row].printed[cell.objective],
            cell.reason,
        )
        for cell in plan.cells
    ]
