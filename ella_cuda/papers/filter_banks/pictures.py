"""Filter banks: transformed filters, amounts over training by objective, angles of known data, and first layers side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ella_cuda.reports.pictures.amounts import Line, generator_styles
from ella_cuda.reports.pictures.page import (
    LARGE,
    LINE,
    LINE_STYLES,
    MARKERS,
    SMALL,
    TEXT_WIDTH,
    finish,
    panels,
    plain_axes,
    signed_colour_map,
    weight_scale,
    whole_epochs,
)

GAP, FIRST_GAP = 2, 6  # pixels between filters, and between one and its copies
COLOURS = ("#1f4e9c", "#cc4c02", "#009e73", "#000000")
RED_GREEN_BLUE = 3


def draw_sampled_filters(groups: Mapping[str, Sequence[Any]], title: str = "") -> Any:
    """Filters, and copies of them: a panel for each group, in it a line for each filter, first as it is, then transformed. Each line has its
    own symmetric scale. Filters of three channels are colours around grey.

    Args:
        groups: by the panel's title, rows of filters ``(C, H, W)``.
        title: of the picture.

    Returns:
        A matplotlib ``Figure``.

    Raises:
        ValueError: no filter.
    """
    if not groups or not all(len(rows) and len(rows[0]) for rows in groups.values()):
        raise ValueError("groups must hold at least one filter each, got one without.")
    composed = {name: _composed(np.asarray(rows, dtype=float)) for name, rows in groups.items()}
    height, width = (max(c.shape[axis] for c in composed.values()) for axis in (0, 1))
    across = min(len(groups), 2)
    inches = TEXT_WIDTH / across - 0.45
    figure, axes = panels(len(groups), across, TEXT_WIDTH, inches * height / width + LARGE * LINE / 72)
    shown = None
    for axis, (name, picture) in zip(axes, composed.items(), strict=False):
        colours = {} if picture.ndim == 3 else {"cmap": signed_colour_map(), "vmin": -1, "vmax": 1}
        image = axis.imshow(picture, interpolation="nearest", **colours)
        shown = image if picture.ndim == 2 else shown
        axis.set_axis_off()
        axis.set_anchor("N")
        axis.set_title(name, fontsize=SMALL, y=1.0, pad=3)
    if shown is not None:
        weight_scale(figure, shown, axes, "weight / largest")
    finish(figure, title)
    return figure


def _composed(filters: Any) -> Any:
    """One picture of ``(lines, columns, C, H, W)``; of one channel's or the channels' mean ``(h, w)``, nan between, or of three
    ``(h, w, 3)``, white between."""
    lines, columns, channels, height, width = filters.shape
    filters = filters / (np.abs(filters).max(axis=(1, 2, 3, 4), keepdims=True) + 1e-12)
    coloured = channels == RED_GREEN_BLUE
    tiles = 0.5 + 0.5 * filters.transpose(0, 1, 3, 4, 2) if coloured else filters.mean(2)
    across = columns * (width + GAP) - GAP + (FIRST_GAP - GAP if columns > 1 else 0)
    tail = (RED_GREEN_BLUE,) if coloured else ()
    picture = np.full((lines * (height + GAP) - GAP, across, *tail), 1.0 if coloured else np.nan)
    for i in range(lines):
        for j in range(columns):
            left = j * (width + GAP) + (FIRST_GAP - GAP if j else 0)
            picture[i * (height + GAP) : i * (height + GAP) + height, left : left + width] = tiles[i, j]
    return picture


def draw_trajectories(
    lines: Mapping[str, Mapping[str, Sequence[Line]]],
    title: str = "",
    unit: str = "amount",
    true: Mapping[str, Mapping[str, float]] | None = None,
) -> Any:
    """Amounts over the epochs: a line of panels for each objective, a column for each kind of data, a colour for each generator.

    Args:
        lines: by objective and kind of data, the runs: epochs, and at each the amounts by generator.
        title: of the picture. unit: of all amounts.
        true: by kind of data, amounts at which a dotted line is drawn.

    Returns:
        A matplotlib ``Figure``.

    Raises:
        ValueError: no run.
    """
    kinds = list(dict.fromkeys(kind for runs in lines.values() for kind in runs))
    if not kinds:
        raise ValueError("lines must hold at least one run, got none.")
    figure, axes = panels(len(lines) * len(kinds), len(kinds), TEXT_WIDTH, 1.7, sharex=True, sharey=True)
    everything = [run for runs in lines.values() for some in runs.values() for run in some]
    names = list(dict.fromkeys(name for _, amounts in everything for name in amounts))
    styles, legend = generator_styles(names), {}
    highest = max(v for _, amounts in everything for values in amounts.values() for v in values)
    for i, (objective, runs) in enumerate(lines.items()):
        for j, kind in enumerate(kinds):
            axis = axes[i * len(kinds) + j]
            for epochs, amounts in runs.get(kind, ()):
                for name, values in amounts.items():
                    every = max(1, len(epochs) // 5)
                    drawn = axis.plot(epochs, values, linewidth=1.0, markersize=3, markevery=every, **styles[name])
                    legend.setdefault(name, drawn[0])
            for k, (name, value) in enumerate((true or {}).get(kind, {}).items()):
                colour = styles.get(name, {}).get("color", "#000000")
                axis.axhline(value, linestyle=(3 * k, (1, 5)), color=colour, linewidth=1.2)
                (legend["of the data"],) = axis.plot([], [], color="#777777", linestyle=":", linewidth=1.2)
            last = i == len(lines) - 1
            plain_axes(axis, f"{kind}, {objective}", "epoch" if last else "", unit if j == 0 else "")
            whole_epochs(axis)
            axis.title.set_fontsize(SMALL)
            axis.set_ylim(0, 1.06 * max(highest, *(v for some in (true or {}).values() for v in some.values()), 0))
    finish(figure, title, legend)
    return figure


def draw_recovery(results: Sequence[Mapping[str, Any]], objectives: Mapping[str, str], title: str = "") -> Any:
    """Learned angles over the epochs: a panel for each true angle, which a dotted line shows, a line for each seed and objective.

    Args:
        results: ``true``, ``objective`` and ``angles`` in degrees at each epoch.
        objectives: titles of these. title: of the picture.

    Returns:
        A matplotlib ``Figure``.

    Raises:
        ValueError: no result.
    """
    if not results:
        raise ValueError("results must hold at least one, got none.")
    true = sorted({one["true"] for one in results})
    figure, axes = panels(len(true), len(true), TEXT_WIDTH, 2.0, sharey=True)
    legend: dict[str, Any] = {}
    highest = max(180.0, *(angle for one in results for angle in one["angles"]))
    for i, (axis, degrees) in enumerate(zip(axes, true, strict=True)):
        for k, (objective, name) in enumerate(objectives.items()):
            for one in results:
                if (one["true"], one["objective"]) == (degrees, objective):
                    style = {"color": COLOURS[k], "linestyle": LINE_STYLES[k], "linewidth": 1.0}
                    (legend[name],) = axis.plot(range(len(one["angles"])), one["angles"], **style)
        legend["true angle"] = axis.axhline(degrees, color="#777777", linestyle=":", linewidth=1.2)
        plain_axes(axis, f"true angle {degrees:g}°", "epoch", "degrees" if i == 0 else "")
        whole_epochs(axis)
        axis.set_ylim(-4, highest + 4)
        axis.set_yticks(range(0, 181, 45))
    finish(figure, title, legend)
    return figure


def draw_first_layers(
    rows: Sequence[Mapping[str, Any]], layers: Mapping[str, str], tasks: Mapping[str, str], title: str = ""
) -> Any:
    """The bound, accuracy and NLL of each task, a mark for each first layer: means over seeds with standard errors.

    Args:
        rows: ``task, layer, bound, accuracy, nll`` each.
        layers: titles of the layers. tasks: titles of the tasks. title: of the picture.

    Returns:
        A matplotlib ``Figure``.

    Raises:
        ValueError: no row.
    """
    if not rows:
        raise ValueError("rows must hold at least one, got none.")
    figure, axes = panels(3, 3, TEXT_WIDTH, 2.2)
    present = [task for task in tasks if any(r["task"] == task for r in rows)]
    legend: dict[str, Any] = {}
    quantities = {"bound": "bound/N, nats", "accuracy": "test accuracy, %", "nll": "test NLL, nats"}
    for axis, (key, what) in zip(axes, quantities.items(), strict=True):
        for k, (layer, name) in enumerate(layers.items()):
            some = {task: [r[key] for r in rows if (r["task"], r["layer"]) == (task, layer)] for task in present}
            places = [i + 0.18 * (k - (len(layers) - 1) / 2) for i, task in enumerate(present) if some[task]]
            values = [np.array(found) for found in some.values() if found]
            errors = [v.std(ddof=1) / len(v) ** 0.5 if len(v) > 1 else 0.0 for v in values]
            style = {"color": COLOURS[k % len(COLOURS)], "marker": MARKERS[k], "markersize": 4, "linestyle": ""}
            legend[name] = axis.errorbar(places, [v.mean() for v in values], yerr=errors, capsize=1.5, **style)
        axis.set_xticks(range(len(present)), [tasks[task].replace(" ", "\n") for task in present])
        axis.set_xlim(-0.5, len(present) - 0.5)
        plain_axes(axis, "", "", what)
    finish(figure, title, legend)
    return figure
