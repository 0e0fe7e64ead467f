"""Prior precisions over training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ella_cuda.reports.pictures.page import (
    LINE_STYLES,
    MARKERS,
    TEXT_WIDTH,
    finish,
    panels,
    path_styles,
    plain_axes,
    whole_epochs,
)
from ella_cuda.reports.text import run_title, tensor_title

PER_LINE = 3
HEAD_COLOUR = "#444444"  # of tensors outside the relaxed layers
MANY = 12  # of them, from which on their lines are told apart by the network's order alone


def draw_precisions(row: Mapping[str, Any], evaluations: Sequence[Mapping[str, Any]]) -> Any:
    """Prior precisions over the epochs on a logarithmic scale that all panels share: a panel for each layer, one more
    for the tensors outside of them; a colour for each path, a line style and marker for each of its tensors. Many tensors outside have
    colours from dark to light, in the network's order, and the legend names the first and the last.

    Args:
        row: of ``summary.json``, or of a run that is not finished.
        evaluations: the run's, each with ``epoch`` and ``prior_precision`` by parameter name.

    Returns:
        A matplotlib ``Figure``.
    """
    drawn: list[tuple[str, list[tuple[str, str, str, int]]]] = []  # by panel: (parameter, label, colour, style)
    for i, layer in enumerate(row["layers"], start=1):
        lines = []
        for path, (colour, _) in path_styles(list(layer["paths"])).items():
            for j, tensor in enumerate(layer["paths"][path]["prior_precision"]):
                lines.append((f"{layer['name']}.{path}.{tensor}", tensor_title(path, tensor), colour, j))
        drawn.append((f"layer {i} ({layer['name']})", lines))
    if row["other_parameters"]:
        names = [*row["other_parameters"]]
        lines = [(name, name, HEAD_COLOUR, j) for j, name in enumerate(names)]
        if len(names) > MANY:
            lines = [(name, name, colour, 0) for name, colour in zip(names, _in_order(len(names)), strict=True)]
        drawn.append(("outside the layers" if drawn else "parameter tensors", lines))
    figure, axes = panels(len(drawn), PER_LINE, TEXT_WIDTH, 1.7, sharex=True, sharey=True)
    epochs = [e["epoch"] for e in evaluations]
    values = [e["prior_precision"][name] for e in evaluations for _, lines in drawn for name, *_ in lines]
    legend: dict[str, Any] = {}
    for k, (axis, (title, lines)) in enumerate(zip(axes, drawn, strict=False)):
        for name, label, colour, j in lines:
            style = {"color": colour, "linestyle": LINE_STYLES[j % len(LINE_STYLES)], "linewidth": 1.0}
            points = {"marker": MARKERS[j % len(MARKERS)], "markersize": 0 if len(lines) > MANY else 3}
            (handle,) = axis.plot(epochs, [e["prior_precision"][name] for e in evaluations], **style, **points)
            between = len(lines) > MANY and name not in (lines[0][0], lines[-1][0])
            label = f"{len(lines) - 2} tensors between them, in order" if between else label
            if label not in legend or name == lines[len(lines) // 2][0]:
                legend[label] = handle
        axis.set_yscale("log")
        if max(values) > 100 * min(values):
            axis.minorticks_off()  # whole powers of ten are enough
        first, last = k % PER_LINE == 0, k + PER_LINE >= len(drawn)
        plain_axes(axis, title, "epoch" if last else "", "δ, 1/weight², log scale" if first else "")
        axis.tick_params(labelbottom=last)
        whole_epochs(axis)
    finish(figure, f"{run_title(row)}: prior precisions δ", legend)
    return figure


def _in_order(count: int) -> list[str]:
    """So many colours from dark to light."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps["viridis"](0.9 * j / (count - 1))) for j in range(count)]
