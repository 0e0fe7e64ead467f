"""Axes of accuracies: where matplotlib puts values on them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ella_cuda.papers.equivariances.broken import accuracy_axis
from ella_cuda.reports.pictures.page import panels

FAR = [24.0, 25.5, 91.0, 93.0, 99.0]


def placed(which: str, values: list[float]):
    """An axis of these values, and what its label says."""
    _, (axis,) = panels(1, 1, 3.0, 3.0)
    return axis, accuracy_axis([axis], which, values)


def shares(axis, which: str, values) -> np.ndarray:
    """Where values lie, as shares of the panel."""
    points = np.zeros((len(values), 2))
    points[:, "xy".index(which)] = values
    return axis.transAxes.inverted().transform(axis.transData.transform(points))[:, "xy".index(which)]


@pytest.mark.parametrize("which", ["x", "y"])
def test_values_far_apart_keep_one_scale_on_both_sides(which):
    axis, said = placed(which, FAR)
    assert said == ", broken axis"
    places = shares(axis, which, FAR)
    assert (np.diff(places) > 0.05).all() and places[0] > 0 and places[-1] < 1
    steps = np.diff(places) / np.diff(FAR)
    assert steps[[2, 3]] == pytest.approx(steps[0])
    assert steps[0] > 3 / (FAR[-1] - FAR[0])  # of a plain axis without margins, threefold
    ticks = getattr(axis, f"get_{which}ticks")()
    assert min(abs(a - b) for a, b in itertools.pairwise(ticks)) >= 1
    assert min(t for t in ticks if t > 50) > 85 and max(t for t in ticks if t < 50) < 30
    assert (np.diff(shares(axis, which, ticks)) > 0.05).all()  # labels have room, also around the break
    assert len({round(float(t) % 1, 6) for t in ticks}) == 1


@pytest.mark.parametrize(
    "values", [[91.0, 91.5, 97.0], [24.0, 97.5, 98.0], [24.0, 50.0, 60.0, 98.0], [60.0, 95.0, 10.0], [97.0]]
)
def test_other_values_lie_on_a_plain_axis(values):
    axis, said = placed("y", values)
    assert said == "" and axis.get_yscale() == "linear"
    low, high = axis.get_ylim()
    assert low < min(values) and high > max(values)
    assert not axis.lines and not axis.patches


def test_the_break_is_marked_where_nothing_lies():
    axis, _ = placed("x", FAR)
    (band,) = axis.patches
    ends = [band.get_x(), band.get_x() + band.get_width()]
    assert 25.5 < ends[0] < ends[1] < 91
    strokes = [line for line in axis.lines if line.get_color() == "black"]
    assert [list(line.get_xdata()) for line in strokes] == [pytest.approx(ends)]
    assert np.diff(shares(axis, "x", ends)) < 0.1
