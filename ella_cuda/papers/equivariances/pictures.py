"""Our numbers beside the paper's, drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ella_cuda.papers.equivariances.broken import accuracy_axis
from ella_cuda.papers.equivariances.entry import Entry
from ella_cuda.papers.equivariances.plan import Plan
from ella_cuda.papers.equivariances.tables import TABLES
from ella_cuda.reports.pictures.page import (
    NORMAL,
    SMALL,
    TEXT_WIDTH,
    finish,
    logarithmic_scale,
    panels,
    plain_axes,
)
from ella_cuda.reports.text import METRICS, OBJECTIVE_TITLES

OURS, PAPER = "#1f4e9c", "#cc4c02"
ROW = 0.165  # inches
AROUND = 0.6  # inches for a panel's title and labels


def draw_comparison(plan: Plan, found: Sequence[Entry]) -> Any:
    """Our numbers, filled, beside the paper's, hollow: a line of panels for each objective, a panel in it for each metric of
    which somewhere both have a number, and in each panel a place for each row of the table.

    Bars are standard errors over seeds. The title states our scale.

    Args:
        plan: of the table. found: of :func:`ella_cuda.papers.equivariances.entries`.

    Returns:
        A matplotlib ``Figure``.

    Raises:
        ValueError: there is no metric of which both have a number.
    """
    shown = {o: [e for e in found if e.objective == o] for o in dict.fromkeys(e.objective for e in found)}
    metrics = {o: [m for m in METRICS if any(e.has_both(m) for e in of)] for o, of in shown.items()}
    metrics = {o: names for o, names in metrics.items() if names}
    if not metrics:
        raise ValueError("found must hold at least one metric that both we and the paper have a number of, got none.")
    across = max(map(len, metrics.values()))
    labels = {o: [_label(e) for e in shown[o]] for o in metrics}
    height = AROUND + ROW * max(map(len, labels.values()))
    figure, axes = panels(len(metrics) * across, across, TEXT_WIDTH, height)
    legend: dict[str, Any] = {}
    drawn: dict[str, list[Any]] = {}  # by metric
    for i, (objective, names) in enumerate(metrics.items()):
        in_line = axes[i * across : (i + 1) * across]
        for axis in in_line[len(names) :]:
            axis.set_visible(False)
        for j, (axis, metric) in enumerate(zip(in_line, names, strict=False)):
            legend = _draw_panel(axis, shown[objective], metric) | legend
            drawn.setdefault(metric, []).append(axis)
            axis.set_title(OBJECTIVE_TITLES[objective], fontsize=NORMAL, y=1.0, pad=4)
            axis.set_yticks(range(len(labels[objective])), labels[objective] if j == 0 else [], fontsize=SMALL)
    for metric, of in drawn.items():
        _scale(of, metric)
    finish(figure, _title(plan, found), {label: legend[label] for label in sorted(legend)})
    return figure


def _label(entry: Entry) -> str:
    return entry.title + ("" if entry.status == "done" else f" ({entry.status})")


def _title(plan: Plan, found: Sequence[Entry]) -> str:
    table = TABLES[plan.table]
    papers = ", ".join(dict.fromkeys(row.data for row in table.rows))
    return f"{table.title}\nours: {', '.join(plan.images)}, scale {plan.scale:g}; the paper's: {papers}"


def _draw_panel(axis: Any, entries: Sequence[Entry], metric: str) -> dict[str, Any]:
    """Draws the entries from top to bottom; returns the legend."""
    legend: dict[str, Any] = {}
    ours = [(y, *value) for y, e in enumerate(entries) if (value := e.ours(metric)) is not None]
    printed = [(y, value) for y, e in enumerate(entries) if (value := getattr(e.printed, metric)) is not None]
    seeds = {row["seed"] for e in entries for row in e.rows}
    style = {"linestyle": "", "marker": "o", "markersize": 4, "color": OURS, "elinewidth": 1.0, "capsize": 2}
    errors = [math.nan if error is None else error for _, _, error in ours]
    bars = {"xerr": errors} if any(error is not None for *_, error in ours) else {}
    label = f"ours, mean ± standard error over {len(seeds)} seeds" if bars else "ours"
    legend[label] = axis.errorbar([x for _, x, _ in ours], [y for y, *_ in ours], zorder=3, **bars, **style)
    hollow = {"linestyle": "", "marker": "o", "markersize": 6, "markerfacecolor": "none", "zorder": 4}
    (legend["the paper's"],) = axis.plot([x for _, x in printed], [y for y, _ in printed], color=PAPER, **hollow)
    plain_axes(axis, "", "", "")
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(len(entries) - 0.4, -0.6)
    return legend


def _scale(axes: Sequence[Any], metric: str) -> None:
    """One scale for a metric under all objectives: logarithmic where its values are further apart than tenfold, but
    broken for accuracies."""
    values = [float(x) for axis in axes for line in axis.lines for x in line.get_xdata()]
    values = [x for x in values if not math.isnan(x)]  # ends of a missing error bar
    name = METRICS[metric][0]
    if metric == "accuracy":
        name += accuracy_axis(axes, "x", values)
    else:
        low, high = min(values), max(values)
        logarithmic = low > 0 and high > 10 * low
        share = 0.06  # of the axis, on both sides of the outermost values
        margin = (high / low) ** share if logarithmic else share * (high - low) or 1.0
        for axis in axes:
            if logarithmic:
                logarithmic_scale(axis, "x")
            axis.set_xlim(*((low / margin, high * margin) if logarithmic else (low - margin, high + margin)))
        name += ", log scale" if logarithmic else ""
    for axis in axes:
        axis.set_xlabel(name, fontsize=NORMAL, labelpad=2)
