"""Our numbers beside the paper's."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ella_cuda.experiments.config import RunConfig
from ella_cuda.experiments.folder import read_grid, read_summary
from ella_cuda.experiments.paper.plan import Plan
from ella_cuda.experiments.paper.tables import PAPER_EPOCHS, TABLES, Printed, Row
from ella_cuda.experiments.recipes import RECIPES
from ella_cuda.reports.files import write_file
from ella_cuda.reports.text import OBJECTIVE_TITLES, PATH_TITLES, columns

COMPARISON_TEXT, COMPARISON_CSV = "comparison.txt", "comparison.csv"
METRICS = {  # of a row of summary.json: title, style
    "accuracy": ("accuracy, %", "{:.2f}"),
    "nll": ("NLL, nats", "{:.3f}"),
    "neg_log_marginal_likelihood": ("-log q/N, nats", "{:.3f}"),
}


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
        summed = {path: mean_and_error(values) for path, values in found.items()}
        return None if None in summed.values() else summed  # type: ignore[return-value]


def mean_and_error(values: Iterable[float | None]) -> tuple[float, float | None] | None:
    """Mean and standard error of the mean; no error of one value, nothing where a value is missing or there is none."""
    numbers = list(values)
    if not numbers or None in numbers:
        return None
    n = len(numbers)
    mean = math.fsum(numbers) / n  # type: ignore[arg-type]
    if n == 1:
        return mean, None
    return mean, math.sqrt(math.fsum((x - mean) ** 2 for x in numbers) / (n - 1) / n)  # type: ignore[operator]


def entries(plan: Plan, configs: Sequence[RunConfig], rows: Sequence[Mapping[str, Any]]) -> list[Entry]:
    """The table's rows under their objectives.

    Args:
        plan: see :func:`ella_cuda.experiments.paper.plan_table`. configs: its runs.
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


def comparison_table(plan: Plan, found: Sequence[Entry]) -> str:
    """A line for each row and objective, ours and the paper's side by side under a header that states our scale.

    ``-`` stands for what was not computed, or not printed in the paper. Columns in which nobody has a number are left out.
    """
    blocks = [["", ""], ["row", "objective"]]
    lines = [
        ["" if i and found[i - 1].row is e.row else e.row.title, OBJECTIVE_TITLES[e.objective]]
        for i, e in enumerate(found)
    ]
    for title, ours, printed in _columns(found):
        if not any(x != "-" for x in (*ours, *printed)):
            continue
        if any(x != "-" for x in printed):
            blocks[0] += [title, ""]
            blocks[1] += ["ours", "paper"]
            lines = [[*line, o, p] for line, o, p in zip(lines, ours, printed, strict=True)]
        else:
            blocks[0].append(title)
            blocks[1].append("ours")
            lines = [[*line, o] for line, o in zip(lines, ours, strict=True)]
    return "\n".join([*_header(plan, found), "", columns([*blocks, *lines], left=2), *_notes(plan, found)])


def _columns(found: Sequence[Entry]) -> Iterable[tuple[str, list[str], list[str]]]:
    """Title, our cells and the paper's."""
    for metric, (title, style) in METRICS.items():
        ours = [_shown(e.ours(metric), style) for e in found]
        if metric == "accuracy":  # every run has one: what is missing says why
            ours = [f"{cell} ({e.status})" if " of " in e.status else cell for cell, e in zip(ours, found, strict=True)]
            ours = [e.status if cell == "-" else cell for cell, e in zip(ours, found, strict=True)]
        yield title, ours, [_shown_one(getattr(e.printed, metric), style) for e in found]
    shared = [e for e in found if e.printed.shares is not None]
    if shared:
        paths = shared[0].row.layer.split("+")
        ours = [_shown_shares(e, paths) if e in shared else "-" for e in found]
        printed = ["-" if e.printed.shares is None else "/".join(f"{s:.0f}" for s in e.printed.shares) for e in found]
        yield f"{'/'.join(PATH_TITLES.get(p, p) for p in paths)}, %", ours, printed
    counts = [_shown_one(e.parameters(), "{:,}") for e in found]
    yield "parameters", counts, [_shown_one(e.printed.parameters, "{:,}") for e in found]


def _shown_one(value: float | None, style: str) -> str:
    return "-" if value is None else style.format(value)


def _shown(value: tuple[float, float | None] | None, style: str) -> str:
    if value is None:
        return "-"
    mean, error = value
    return style.format(mean) + ("" if error is None else " ± " + style.format(error))


def _shown_shares(entry: Entry, paths: Sequence[str]) -> str:
    shares, counted = entry.shares(), entry.counted_layers()
    if shares is None or counted is None:
        return "-"
    text = "/".join(f"{shares[p][0]:.0f}" for p in paths)
    errors = [shares[p][1] for p in paths]
    text = text if None in errors else text + " ± " + "/".join(f"{e:.0f}" for e in errors)
    return text if counted[0] == counted[1] else f"{text} (of {counted[0]} of {counted[1]} layers)"


def _header(plan: Plan, found: Sequence[Entry]) -> list[str]:
    table = TABLES[plan.table]
    lines = [f"{table.title}. Table of van der Ouderaa et al., NeurIPS 2023; scale {plan.scale:g}"]
    for data, images in plan.images.items():
        configs = [c for e in found for c in e.configs if c.data == data]
        rows = [r for e in found for r in e.rows if r["data"] == data]
        one = next((c for c in configs if c.objective == "evidence"), configs[0])
        text = f"{one.train_size or images:,} of {images:,} training images, {_epochs(one.epochs)}"
        if one.epochs != RECIPES[data].epochs:
            text += f" (recipe: {RECIPES[data].epochs})"
        text += f", width {_listed(c.width for c in configs)}"
        if one.objective == "evidence":
            text += f", evidence every {_epochs(one.frequency, 'epoch')} after {one.burn_in}"
        if rows:
            text += f"; {rows[0]['evaluated_size']:,} test images"
        seeds = sorted({c.seed for c in configs})
        text += f"; seed {seeds[0]}" if len(seeds) == 1 else f"; mean ± standard error over seeds {_listed(seeds)}"
        lines.append(f"ours:  {data}, {text}")
    for data in dict.fromkeys(row.data for row in table.rows):
        lines.append(f"paper: {data}, all training images, {_epochs(PAPER_EPOCHS[data])}, width {table.paper_width}")
    return lines


def _epochs(count: int, one: str = "1 epoch") -> str:
    return one if count == 1 else f"{count} epochs"


def _listed(values: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(values))))


def _notes(plan: Plan, found: Sequence[Entry]) -> list[str]:
    """Which rows are not here, why some are not run, and what there is to say about others."""
    reasons: dict[str, dict[str, list[str]]] = {}
    for e in found:
        if e.reason:
            reasons.setdefault(e.reason, {}).setdefault(e.row.title, []).append(OBJECTIVE_TITLES[e.objective])
    all_of = {e.row.title: len(e.row.printed) for e in found}
    notes = []
    for reason, which in reasons.items():
        titles = (t if len(o) == all_of[t] else f"{t} ({', '.join(o)})" for t, o in which.items())
        notes.append(f"not run: {'; '.join(titles)}: {reason}.")
    if others := len(TABLES[plan.table].rows) - len(all_of):
        notes.append(f"{others} other rows of the table were not asked for.")
    notes += [f"{note}." for note in dict.fromkeys(e.row.note for e in found if e.row.note)]
    return ["", *notes] if notes else []


def comparison_csv(plan: Plan, found: Sequence[Entry]) -> str:
    """The same as CSV, a line for each row and objective; empty cells for what there is not."""
    lines = []
    for e in found:
        first = e.configs[0] if e.configs else None
        cells = {
            "table": plan.table,
            "row": e.row.key,
            "title": e.row.title,
            "objective": e.objective,
            "status": e.status,
            "reason": e.reason,
            "scale": plan.scale,
            "data": first and first.data,
            "paper_data": e.row.data,
            "task": e.row.task,
            "layer": e.row.layer,
            "learn": first and first.learn,
            "train_size": first and (first.train_size or plan.images[first.data]),
            "epochs": first and first.epochs,
            "width": first and first.width,
            "seeds": " ".join(str(r["seed"]) for r in e.rows),
            "runs": " ".join(c.name for c in e.configs),
            "seconds": sum(r["seconds"] for r in e.rows) if e.rows else None,
            "parameters": e.parameters(),
            "paper_parameters": e.printed.parameters,
        }
        for metric in METRICS:
            mean, error = e.ours(metric) or (None, None)
            cells |= {metric: mean, f"{metric}_standard_error": error, f"paper_{metric}": getattr(e.printed, metric)}
        paths = e.row.layer.split("+")
        shares = e.shares() if len(paths) > 1 else None
        for i, path in enumerate(paths if len(paths) > 1 else ()):
            mean, error = shares[path] if shares else (None, None)
            printed = e.printed.shares and e.printed.shares[i]
            cells |= {f"{path}_share": mean, f"{path}_share_standard_error": error, f"paper_{path}_share": printed}
        lines.append(cells)
    out = io.StringIO()
    names = list(dict.fromkeys(name for cells in lines for name in cells))
    writer = csv.DictWriter(out, fieldnames=names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def save_comparison(out_dir: str | os.PathLike[str]) -> str:
    """Bring ``comparison.txt`` and ``comparison.csv`` of a folder up to date with its finished runs.

    Returns:
        The text.

    Raises:
        ValueError: not the folder of a table. OSError: it cannot be written; what was there is untouched.
    """
    out_dir = Path(out_dir)
    configs, options = read_grid(out_dir)
    if "plan" not in options:
        raise ValueError(f"{out_dir} is not the folder of a table of the paper: its config.json has no plan.")
    plan = Plan.from_json(options["plan"])
    found = entries(plan, configs, read_summary(out_dir))
    text = comparison_table(plan, found)
    write_file(out_dir / COMPARISON_TEXT, text + "\n")
    write_file(out_dir / COMPARISON_CSV, comparison_csv(plan, found))
    return text
