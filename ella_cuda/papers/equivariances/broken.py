"""Axes of accuracies, broken where nothing lies between values far apart."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

WIDE = 30.0  # percentage points
MARGIN, ROOM = 0.06, 0.08  # beyond the outermost values, and of what is left out: shares of what is shown


def widest_gap(values: Iterable[float]) -> tuple[float, float] | None:
    """Neighbours among accuracies in percent that are further apart than :data:`WIDE` and than twice all else together;
    None if there are none, or all else is within a point."""
    ordered = sorted(values)
    low, high = max(itertools.pairwise(ordered), key=lambda pair: pair[1] - pair[0], default=(0.0, 0.0))
    rest = ordered[-1] - ordered[0] - (high - low)
    return (low, high) if high - low > max(WIDE, 2 * rest) and rest > 1 else None


def accuracy_axis(axes: Sequence[Any], which: str, values: Sequence[float]) -> str:
    """Limits around accuracies in percent on the ``which``, ``x`` or ``y``, of all ``axes``; between values far apart a
    stretch is left out, so that the others can be told apart, on one scale on both of its sides.

    Returns:
        What the axis' label should say of it.
    """
    gap = widest_gap(values)
    low, high = min(values), max(values)
    shown = high - low - (gap[1] - gap[0] if gap else 0.0)
    margin = MARGIN * shown or 1.0
    for axis in axes:
        if gap:
            _break(axis, which, gap, (low, high), shown)
        axis.set(**{f"{which}lim": (low - margin, high + margin)})
    return ", broken axis" if gap else ""


def _break(axis: Any, which: str, gap: tuple[float, float], ends: tuple[float, float], shown: float) -> None:
    from matplotlib.ticker import MaxNLocator

    step = float(np.diff(MaxNLocator(8 if which == "x" else 5, steps=[1, 2, 5, 10]).tick_values(0, shown))[0])
    pieces = (ends[0], math.ceil(gap[0] / step) * step), (math.floor(gap[1] / step) * step, ends[1])
    start, end = pieces[0][1] + MARGIN / 2 * shown, pieces[1][0] - MARGIN / 2 * shown
    room = ROOM * shown
    left_out = end - start - room

    def forward(value: Any) -> Any:
        return value - left_out * np.clip((value - start) / (end - start), 0, 1)

    def inverse(place: Any) -> Any:
        return place + left_out * np.clip((place - start) / room, 0, 1)

    set_scale = axis.set_xscale if which == "x" else axis.set_yscale
    set_scale("function", functions=(forward, inverse))
    ticks = [k * step for low, high in pieces for k in range(math.ceil(low / step), math.floor(high / step) + 1)]
    axis.set(**{f"{which}ticks": ticks})
    _draw_break(axis, which, start, end)


def _draw_break(axis: Any, which: str, start: float, end: float) -> None:
    along, across = [start, end], [0, 0]
    if which == "x":
        axis.axvspan(start, end, color="white", zorder=1.6)  # over the grid
        where = {"transform": axis.get_xaxis_transform()}
    else:
        axis.axhspan(start, end, color="white", zorder=1.6)
        where = {"transform": axis.get_yaxis_transform()}
        along, across = across, along
    axis.plot(along, across, color="white", linewidth=2.0, zorder=3, clip_on=False, **where)
    stroke = {"marker": [(-1, -2), (1, 2)] if which == "x" else [(-2, -1), (2, 1)], "markersize": 6, "color": "black"}
    axis.plot(along, across, linestyle="", zorder=4, clip_on=False, **stroke, **where)
