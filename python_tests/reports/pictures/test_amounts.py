"""Pictures of learned augmentations."""

from __future__ import annotations

import numpy as np

from ella_cuda.reports.pictures.amounts import draw_amounts, draw_samples
from python_tests.reports.pictures.pages import check_page, shown

TITLE = "A title of two lines, as people write it: which data, which task, which network, and of which seed; digits, task rotated, seed 0"


def lines(scale: float = 1.0) -> list:
    return [([1, 2, 3], {"rotation": [0.1, 0.2 * scale, 0.3 * scale], "tx": [0.1, 0.1, 0.05]})]


def test_amounts_have_a_panel_for_each_kind_and_a_colour_for_each_generator():
    runs = {"turned": lines() * 2, "moved": lines(4.0)}
    figure = draw_amounts(runs, TITLE, "share", {"turned": {"rotation": 0.5}})
    check_page(figure)
    turned, moved = shown(figure)
    curves = [line for line in turned.lines if len(line.get_xdata()) == 3]
    assert [line.get_ydata()[-1] for line in curves] == [0.3, 0.05, 0.3, 0.05]
    assert curves[0].get_color() == curves[2].get_color() != curves[1].get_color()
    (level,) = [line for line in turned.lines if list(line.get_ydata()) == [0.5, 0.5]]
    assert level.get_color() == curves[0].get_color()
    # All of it is in sight, of one scale.
    assert turned.get_ylim() == moved.get_ylim() and turned.get_ylim()[1] > 1.2
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["rotation", "tx", "of the data"]


def test_panels_may_have_scales_of_their_own():
    small, large = shown(draw_amounts({"a": lines(0.5), "b": lines(4.0)}, shared=False))
    assert small.get_ylim()[1] < 0.2 and large.get_ylim()[1] > 1.2


def test_samples_are_their_pixels_with_the_image_apart():
    images = np.arange(2 * 3 * 4 * 4).reshape(2, 3, 4, 4)
    figure = draw_samples({"": images.tolist()}, TITLE)
    check_page(figure)
    picture = np.asarray(shown(figure)[0].images[0].get_array())
    np.testing.assert_array_equal(picture[:4, :4], images[0, 0])
    np.testing.assert_array_equal(picture[-4:, -4:], images[1, 2])
    between = [np.flatnonzero((picture == 255).all(0))]
    steps = np.split(between[0], np.flatnonzero(np.diff(between[0]) > 1) + 1)
    assert [len(step) for step in steps] == [5, 2]
