"""Loss, evidence and accuracy over training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ella_cuda.reports.pictures.style import MARKERS, PATH_STYLES, Rooms, arrange, panels, plain_axes, whole_epochs
from ella_cuda.reports.text import OBJECTIVE_TITLES, PATH_TITLES, network_title

LINE_COLOURS = ("#1b9e77", "#7570b3", "#e7298a", "#666666", "#b8860b")  # of sums of paths
ROOMS = Rooms(width=4.1, height=3.0, left=0.72)
EVALUATED = {"test": "test images", "holdout": "held-out images"}


def draw_curves(rows: Sequence[Mapping[str, Any]], histories: Sequence[Mapping[str, Any]]) -> Any:
    """Training loss, ``-log q/N`` and training accuracy over the epochs: a line of panels for each task, a colour and
    marker for each network, MAP dashed. A star is the accuracy on the images a finished run was evaluated on.

    Args:
        rows: rows of ``summary.json``, or of runs that are not finished.
        histories: for each row ``evaluations`` (with ``epoch``, ``loss``, ``accuracy``,
            ``neg_log_marginal_likelihood``), and ``losses`` (one per epoch) where they are known.

    Returns:
        A matplotlib ``Figure``.

    Raises:
        ValueError: no row, or not one history for each.
    """
    if not rows or len(rows) != len(histories):
        raise ValueError(
            f"rows and histories must be equally many, at least one, got {len(rows)} and {len(histories)}."
        )
    tasks = list(dict.fromkeys((r["data"], r["task"]) for r in rows))
    networks = {network_title(r): r["layer"] for r in rows}
    colours = {name: PATH_STYLES[layer][0] for name, layer in networks.items() if name == PATH_TITLES.get(layer)}
    others = [name for name in networks if name not in colours]
    colours |= {name: LINE_COLOURS[i % len(LINE_COLOURS)] for i, name in enumerate(others)}
    markers = {name: MARKERS[i % len(MARKERS)] for i, name in enumerate(networks)}
    figure, axes = panels(3 * len(tasks), ROOMS)
    legend: dict[str, Any] = {}
    for i, (data, task) in enumerate(tasks):
        loss_axis, evidence_axis, accuracy_axis = axes[3 * i : 3 * i + 3]
        positive = True
        for row, history in zip(rows, histories, strict=True):
            if (row["data"], row["task"]) != (data, task):
                continue
            network, mapped = network_title(row), row["objective"] == "map"
            line = {"color": colours[network], "linestyle": "--" if mapped else "-", "linewidth": 1.2}
            points = {"marker": markers[network], "markersize": 3.5, "markerfacecolor": "none" if mapped else None}
            losses = _losses(history)
            loss_axis.plot(*_columns(losses), **line)
            positive = positive and all(value > 0 for _, value in losses)
            evidence = [(e["epoch"], e["neg_log_marginal_likelihood"]) for e in history["evaluations"]]
            evidence = [(epoch, value) for epoch, value in evidence if value is not None]
            if evidence:
                evidence_axis.plot(*_columns(evidence), **line, **points)
            accuracy = [(e["epoch"], 100 * e["accuracy"]) for e in history["evaluations"]]
            (handle,) = accuracy_axis.plot(*_columns(accuracy), **line, **points)
            legend.setdefault(f"{network}, {OBJECTIVE_TITLES[row['objective']]}", handle)
            if row.get("accuracy") is not None and accuracy:
                filled = {"markerfacecolor": "white" if mapped else colours[network]}
                star = {"marker": "*", "markersize": 10, "linestyle": "", "color": colours[network], **filled}
                accuracy_axis.plot(accuracy[-1][0], row["accuracy"], clip_on=False, zorder=3, **star)
        for axis, what in (
            (loss_axis, "training loss with prior, nats"),
            (evidence_axis, "-log q/N, nats per data point"),
            (accuracy_axis, "training accuracy, %"),
        ):
            plain_axes(axis, f"{data}, task {task}", "epoch", what)
            whole_epochs(axis)
        accuracy_axis.set_ylim(0, 101)
        if positive and loss_axis.lines:
            _logarithmic(loss_axis)
        if not evidence_axis.lines:
            evidence_axis.text(0.5, 0.5, "no evidence step", ha="center", transform=evidence_axis.transAxes)
    finished = [EVALUATED[r["evaluated_on"]] for r in rows if r.get("accuracy") is not None]
    if finished:
        from matplotlib.lines import Line2D

        star = Line2D([], [], marker="*", markersize=10, linestyle="", color="black")
        legend[f"accuracy on {finished[0]}, at the end"] = star
    arrange(figure, ROOMS, legend, columns=min(4, len(legend)))
    return figure


def _losses(history: Mapping[str, Any]) -> list[tuple[int, float]]:
    if "losses" in history:
        return list(enumerate(history["losses"], start=1))
    return [(e["epoch"], e["loss"]) for e in history["evaluations"]]  # a run that is not finished


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _logarithmic(axis: Any) -> None:
    from matplotlib.ticker import LogFormatter

    class Decimals(LogFormatter):
        """Its choice of labels, in the shorter of 0.06 and 6e-05."""

        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:g}" if super().__call__(x, pos) else ""

    axis.set_yscale("log")
    for which in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
        which(Decimals(minor_thresholds=(2, 0.5)))
