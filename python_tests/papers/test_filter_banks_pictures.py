"""Pictures of filter banks."""

from __future__ import annotations

import numpy as np
import pytest

from ella_cuda.papers.filter_banks.pictures import (
    draw_first_layers,
    draw_recovery,
    draw_sampled_filters,
    draw_trajectories,
)
from python_tests.reports.pictures.pages import check_page, shown

TITLE = "A title of two lines, as people write it: which data, which task, which network, and of which seed; digits, task rotated, seed 0"
LAYERS = {"fc": "FC", "learned": "learned"}


def test_filters_are_on_symmetric_scales_of_their_lines():
    filters = np.random.default_rng(0).normal(size=(2, 4, 1, 5, 5))
    figure = draw_sampled_filters({"a": filters.tolist(), "b": (3 * filters).tolist(), "c": filters.tolist()}, TITLE)
    check_page(figure)
    first, second = (np.ma.filled(axis.images[0].get_array(), np.nan) for axis in shown(figure)[:2])
    np.testing.assert_allclose(first, second)  # each line on its own
    np.testing.assert_allclose(first[:5, :5], filters[0, 0, 0] / np.abs(filters[0]).max())
    np.testing.assert_allclose(first[-5:, -5:], filters[1, 3, 0] / np.abs(filters[1]).max())
    assert np.isnan(first[5:7]).all() and shown(figure)[0].images[0].get_clim() == (-1, 1)


def test_filters_of_three_channels_are_colours_around_grey():
    filters = np.zeros((1, 2, 3, 4, 4))
    filters[0, 0, 0], filters[0, 1, 2] = 2.0, -1.0
    figure = draw_sampled_filters({"a": filters.tolist()}, TITLE)
    picture = np.asarray(figure.axes[0].images[0].get_array())
    np.testing.assert_allclose(picture[0, 0], (1.0, 0.5, 0.5))
    np.testing.assert_allclose(picture[0, -1], (0.5, 0.5, 0.25))


def lines(end: float) -> list:
    return [([1, 2, 3], {"rotation": [0.1, 0.2, end], "tx": [0.1, 0.1, 0.05]})]


def test_trajectories_have_a_line_of_panels_for_each_objective():
    runs = {"bound": {"turned": lines(0.9), "moved": lines(0.1)}, "point": {"turned": lines(0.0)}}
    figure = draw_trajectories(runs, TITLE, "share", {"turned": {"rotation": 2.0}})
    check_page(figure)
    axes = shown(figure)
    assert [axis.get_title() for axis in axes] == ["turned, bound", "moved, bound", "turned, point", "moved, point"]
    ends = [[line.get_ydata()[-1] for line in axis.lines if len(line.get_xdata()) == 3] for axis in axes]
    assert ends == [[0.9, 0.05], [0.1, 0.05], [0.0, 0.05], []]
    assert [2.0, 2.0] in [list(line.get_ydata()) for line in axes[0].lines] and axes[0].get_ylim()[1] > 2
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["rotation", "tx", "of the data"]


def test_recovery_has_a_panel_for_each_true_angle():
    results = [
        {"true": true, "objective": objective, "angles": [45.0, end]}
        for true in (60, 0)
        for objective, end in (("bound", float(true)), ("point", 5.0))
    ]
    figure = draw_recovery(results, {"bound": "bound", "point": "point estimate"}, TITLE)
    check_page(figure)
    assert [axis.get_title() for axis in shown(figure)] == ["true angle 0°", "true angle 60°"]
    ends = [line.get_ydata()[-1] for line in shown(figure)[1].lines]
    assert ends == [60.0, 5.0, 60]


def test_first_layers_have_means_and_errors():
    rows = [
        {"task": task, "layer": layer, "bound": -seed, "accuracy": 90 + seed, "nll": 0.1}
        for task in ("plain", "rotated")
        for layer in LAYERS
        for seed in (0, 2)
    ]
    figure = draw_first_layers(rows, LAYERS, {"plain": "plain", "rotated": "rotated ±180°", "scaled": "scaled"}, TITLE)
    check_page(figure)
    axes = shown(figure)
    assert [label.get_text() for label in axes[0].get_xticklabels()] == ["plain", "rotated\n±180°"]
    assert [list(line.get_ydata()) for line in axes[1].lines if line.get_marker() in "os"] == [[91, 91], [91, 91]]


def test_nothing_to_draw_is_refused():
    for call, words in (
        (lambda: draw_sampled_filters({}), "groups must hold at least one filter"),
        (lambda: draw_sampled_filters({"a": []}), "groups must hold at least one filter"),
        (lambda: draw_trajectories({"bound": {}}), "lines must hold at least one run"),
        (lambda: draw_recovery([], {}), "results must hold at least one"),
        (lambda: draw_first_layers([], {}, {}), "rows must hold at least one"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
