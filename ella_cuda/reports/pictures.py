"""Pictures of runs, drawn without a display."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ella_cuda.reports.text import OBJECTIVE_TITLES, PATH_TITLES, mean, network_title

DPI = 150
# Colours apart in grey as well, and hatches for those that print without them.
PATH_STYLES = {
    "f_fc": ("#d95f02", "//"),
    "fc": ("#a6761d", "\\\\"),
    "conv": ("#1f4e9c", ""),
    "s_fc": ("#e6ab02", "--"),
    "s_conv": ("#66c2a5", "||"),
    "gconv": ("#66a61e", ".."),
}
OTHER_STYLES = (("#7570b3", "xx"), ("#e7298a", "++"), ("#999999", "oo"))
LINE_COLOURS = ("#1b9e77", "#7570b3", "#e7298a", "#666666", "#e6ab02")  # of sums of paths


def draw_layers(rows: Sequence[Mapping[str, Any]], path: str) -> None:
    """Stacked bars: how each layer's effective parameters divide among its paths, a panel for each task and network.

    Runs that differ in their seed only share a panel, as means.

    Args:
        rows: rows of ``summary.json`` with effective parameters.
        path: the file, of any type matplotlib writes.

    Raises:
        ValueError: no row, or a row without effective parameters.

    Source: after van der Ouderaa et al., NeurIPS 2023, Figure 3.
    """
    panels: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if any(p["effective_parameters"] is None for layer in row["layers"] for p in layer["paths"].values()):
            raise ValueError(
                f"rows: {row['task']}/{row['layer']}/{row['objective']} has no effective parameters to draw."
            )
        panels.setdefault((row["task"], network_title(row), row["objective"]), []).append(row)
    if not panels:
        raise ValueError("rows must hold at least one run to draw, got none.")
    figure, axes = _panels(len(panels), width=4.6, height=3.3)
    for axis, ((task, network, objective), members) in zip(axes, panels.items(), strict=False):
        names = [entry["name"] for entry in members[0]["layers"]]
        bottom = [0.0] * len(names)
        spare = iter(OTHER_STYLES)
        for p in members[0]["layer"].split("+"):
            shares = [_share(members, i, p) for i in range(len(names))]
            colour, hatch = PATH_STYLES.get(p) or next(spare)
            title = PATH_TITLES.get(p, p)
            style = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.6, "width": 0.8}
            axis.bar(range(1, len(names) + 1), shares, bottom=bottom, label=title, **style)
            bottom = [b + s for b, s in zip(bottom, shares, strict=True)]
        seeds = sorted(r["seed"] for r in members)
        over = f"seed {seeds[0]}" if len(seeds) == 1 else f"mean over {len(seeds)} seeds"
        axis.set_title(
            f"{members[0]['data']}, task {task}\n{network}, {OBJECTIVE_TITLES[objective]}, {over}",
            fontsize=9,
        )
        axis.set_xlabel("layer")
        axis.set_ylabel("share of effective parameters, %")
        axis.set_xticks(range(1, len(names) + 1))
        axis.set_ylim(0, 100)
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    for axis in axes[1 : len(panels)]:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            if label not in labels:
                handles.append(handle)
                labels.append(label)
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), title="path", frameon=False)
    figure.savefig(path, dpi=DPI)


def _share(members: Sequence[Mapping[str, Any]], layer: int, path: str) -> float:
    values = [r["layers"][layer]["paths"][path]["relative_effective_parameters"] for r in members]
    return 100 * (mean(0.0 if v is None else v for v in values) or 0.0)


def draw_curves(rows: Sequence[Mapping[str, Any]], histories: Sequence[Mapping[str, Any]], path: str) -> None:
    """Training loss and ``-log q/N`` over the epochs: a line of panels for each task, a colour for each layer, MAP
    dashed.

    Args:
        rows: rows of ``summary.json``.
        histories: for each row ``losses`` (one per epoch) and ``evaluations`` (with ``epoch``,
            ``neg_log_marginal_likelihood``).
        path: the file, of any type matplotlib writes.

    Raises:
        ValueError: no row, or not one history for each.
    """
    if not rows or len(rows) != len(histories):
        raise ValueError(
            f"rows and histories must be equally many, at least one, got {len(rows)} and {len(histories)}."
        )
    from matplotlib.ticker import LogFormatter, MaxNLocator

    tasks = list(dict.fromkeys(r["task"] for r in rows))
    networks = {network_title(r): r["layer"] for r in rows}
    colours = {name: PATH_STYLES[layer][0] for name, layer in networks.items() if name == PATH_TITLES.get(layer)}
    others = [name for name in networks if name not in colours]
    colours |= {name: LINE_COLOURS[i % len(LINE_COLOURS)] for i, name in enumerate(others)}
    figure, axes = _panels(2 * len(tasks), width=4.6, height=3.1, per_line=2)
    lines: dict[str, Any] = {}
    for i, task in enumerate(tasks):
        loss_axis, evidence_axis = axes[2 * i], axes[2 * i + 1]
        for row, history in zip(rows, histories, strict=True):
            if row["task"] != task:
                continue
            style = {
                "color": colours[network_title(row)],
                "linestyle": "--" if row["objective"] == "map" else "-",
                "linewidth": 1.2,
            }
            losses = history["losses"]
            label = f"{network_title(row)}, {OBJECTIVE_TITLES[row['objective']]}"
            lines.setdefault(label, loss_axis.plot(range(1, len(losses) + 1), losses, **style)[0])
            points = [(e["epoch"], e["neg_log_marginal_likelihood"]) for e in history["evaluations"]]
            points = [(epoch, value) for epoch, value in points if value is not None]
            if points:
                evidence_axis.plot(*zip(*points, strict=True), marker=".", markersize=3, **style)
        for axis, what in (
            (loss_axis, "training loss with prior, nats"),
            (evidence_axis, "-log q/N, nats per data point"),
        ):
            axis.set_title(f"{rows[0]['data']}, task {task}", fontsize=9)
            axis.set_xlabel("epoch")
            axis.set_ylabel(what)
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(alpha=0.3)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        if all(min(h["losses"]) > 0 for r, h in zip(rows, histories, strict=True) if r["task"] == task):
            loss_axis.set_yscale("log")
            for which in (loss_axis.yaxis.set_major_formatter, loss_axis.yaxis.set_minor_formatter):
                which(LogFormatter(minor_thresholds=(2, 0.5)))
        if not evidence_axis.lines:
            evidence_axis.text(0.5, 0.5, "no evidence step", ha="center", transform=evidence_axis.transAxes)
    figure.legend(
        lines.values(), lines.keys(), loc="outside lower center", ncols=min(3, len(lines)), frameon=False, fontsize=8
    )
    figure.savefig(path, dpi=DPI)


def _panels(count: int, width: float, height: float, per_line: int = 3) -> tuple[Any, list[Any]]:
    """A figure with ``count`` panels, sizes in inches; not through pyplot, which would pick the user's display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    across = min(count, per_line)
    down = math.ceil(count / across)
    figure = Figure(figsize=(width * across, height * down + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(down, across, squeeze=False).flat)
    for axis in axes[count:]:
        axis.set_visible(False)
    return figure, axes
