"""Loss, evidence and accuracy over training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ella_cuda.reports.pictures.page import (
    MARKERS,
    NORMAL,
    OTHER_STYLES,
    PATH_STYLES,
    TEXT_WIDTH,
    finish,
    logarithmic_scale,
    panels,
    plain_axes,
    whole_epochs,
)
from ella_cuda.reports.text import OBJECTIVE_TITLES, PATH_TITLES, network_title

EVIDENCE_LINES = ("-", "-.", ":")  # of runs that differ only in what of their bases the evidence learned
FIRST_STEP = {"color": "#555555", "linewidth": 0.7, "linestyle": (0, (1, 1.5)), "zorder": 0}


def draw_curves(rows: Sequence[Mapping[str, Any]], histories: Sequence[Mapping[str, Any]]) -> Any:
    """Training loss, ``-log q/N`` and training accuracy over the epochs: a line of panels for each task, a colour and marker
    for each network; MAP is dashed and hollow.

    Markers stand at the epochs that were evaluated; on the loss of evidence runs, at their evidence steps alone. A vertical
    line stands at the first of these: burn-in ends, and the loss jumps as its prior is replaced.

    Args:
        rows: rows of ``summary.json``, or of runs that are not finished.
        histories: for each row ``evaluations`` (with ``epoch``, ``loss``, ``accuracy``,
            ``neg_log_marginal_likelihood``), and ``losses`` (one per epoch) where they are known.

    Returns:
        A matplotlib ``Figure``.
    """
    tasks = list(dict.fromkeys((r["data"], r["task"]) for r in rows))
    styles = run_styles(rows)
    figure, axes = panels(3 * len(tasks), 3, TEXT_WIDTH, 1.95)
    legend: dict[str, Any] = {}
    by_task = [
        [(r, h) for r, h in zip(rows, histories, strict=True) if (r["data"], r["task"]) == task] for task in tasks
    ]
    for i, runs in enumerate(by_task):
        _draw_line(axes[3 * i : 3 * i + 3], runs, rows, styles, legend)
    for axis, (data, task), runs in zip(axes[::3], tasks, by_task, strict=True):
        axis.set_title(f"{data}, task {task}, {_seeds(runs)}", fontsize=NORMAL, y=1.0, pad=6, loc="left")
    finish(figure, legend=legend | _marks(histories))
    return figure


def _seeds(runs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> str:
    seeds = sorted({row["seed"] for row, _ in runs})
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {', '.join(map(str, seeds))}"


def run_styles(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """By full title and objective, the line of a run: a network has one colour under all objectives."""
    networks = {_network(row): row["layer"] for row in rows}
    colours = {name: PATH_STYLES[layer][0] for name, layer in networks.items() if name == PATH_TITLES.get(layer)}
    others = [name for name in networks if name not in colours]
    colours |= {name: OTHER_STYLES[i % len(OTHER_STYLES)][0] for i, name in enumerate(others)}
    markers = {name: MARKERS[i % len(MARKERS)] for i, name in enumerate(networks)}
    lines: dict[str, list[str]] = {}  # by network, titles of the runs that the evidence learned
    styles = {}
    for row in rows:
        network, title = _network(row), network_title(row)
        style = {"color": colours[network], "linewidth": 1.0, "marker": markers[network], "markersize": 3}
        if row["objective"] == "map":
            style |= {"linestyle": "--", "markerfacecolor": "white", "markeredgewidth": 0.7}
        else:
            known = lines.setdefault(network, [])
            if title not in known:
                known.append(title)
            style |= {"linestyle": EVIDENCE_LINES[known.index(title) % len(EVIDENCE_LINES)], "markeredgewidth": 0}
        styles[title, row["objective"]] = style
    return styles


def _network(row: Mapping[str, Any]) -> str:
    """What is trained, whatever the evidence learned of it."""
    return network_title({**row, "learn": ""})


def _draw_line(
    axes: Sequence[Any],
    runs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
    among: Sequence[Mapping[str, Any]],
    styles: Mapping[tuple[str, str], Mapping[str, Any]],
    legend: dict[str, Any],
) -> None:
    """The panels of a task, whose labels tell the rows ``among`` apart."""
    loss_axis, evidence_axis, training_axis = axes
    positive = True
    for row, history in runs:
        style = styles[network_title(row), row["objective"]]
        losses, steps = _losses(history), _steps(history)
        marked = steps if row["objective"] == "evidence" else [e["epoch"] for e in history["evaluations"]]
        at = [k for k, (epoch, _) in enumerate(losses) if epoch in marked]
        loss_axis.plot(*_columns(losses), markevery=at, **style)
        positive = positive and all(value > 0 for _, value in losses)
        evidence = [(e["epoch"], e["neg_log_marginal_likelihood"]) for e in history["evaluations"]]
        evidence = [(epoch, value) for epoch, value in evidence if value is not None]
        if evidence:
            evidence_axis.plot(*_columns(evidence), **style)
        accuracy = [(e["epoch"], 100 * e["accuracy"]) for e in history["evaluations"]]
        (handle,) = training_axis.plot(*_columns(accuracy), **style)
        legend.setdefault(_label(row, among), handle)
    logarithmic = positive and bool(loss_axis.lines)
    for epoch in sorted({steps[0] for _, history in runs if (steps := _steps(history))}):
        for axis in axes:
            axis.axvline(epoch, **FIRST_STEP)
    for axis, what in (
        (loss_axis, "training loss with prior,\nnats" + (", log scale" if logarithmic else "")),
        (evidence_axis, "-log q/N,\nnats per data point"),
        (training_axis, "training accuracy, %"),
    ):
        plain_axes(axis, "", "epoch", what)
        whole_epochs(axis)
    if logarithmic:
        logarithmic_scale(loss_axis, "y")
    if not any(_steps(history) for _, history in runs):
        middle = {"ha": "center", "fontsize": NORMAL, "transform": evidence_axis.transAxes}
        evidence_axis.text(0.5, 0.5, "no evidence step", **middle)


def _label(row: Mapping[str, Any], among: Sequence[Mapping[str, Any]]) -> str:
    return f"{network_title(row, among)}, {OBJECTIVE_TITLES[row['objective']]}"


def _marks(histories: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Legend entries of what is no run's own."""
    from matplotlib.lines import Line2D

    found: dict[str, dict[str, Any]] = {}
    if any(map(_steps, histories)):
        point = {"linestyle": "-", "linewidth": 1.0, "marker": "o", "markersize": 3, "markeredgewidth": 0}
        found["evidence step, on the loss"] = {**point, "color": "#555555"}
        found["burn-in ends: the prior changes"] = {**FIRST_STEP, "linewidth": 1.2}
    return {label: Line2D([], [], **style) for label, style in found.items()}


def _steps(history: Mapping[str, Any]) -> list[int]:
    """The epochs of a run's evidence steps."""
    return [e["epoch"] for e in history["evaluations"] if e["neg_log_marginal_likelihood"] is not None]


def _losses(history: Mapping[str, Any]) -> list[tuple[int, float]]:
    if "losses" in history:
        return list(enumerate(history["losses"], start=1))
    return [(e["epoch"], e["loss"]) for e in history["evaluations"]]  # a run that is not finished


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
