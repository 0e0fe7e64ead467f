"""Whether a picture is fit for a page, as matplotlib renders it."""

from __future__ import annotations

import itertools
from unittest import mock

import numpy as np
from matplotlib.text import Text

TEXT_WIDTH, SMALLEST = 7.0, 7.0  # inches of a page's text, points
TOUCH = 0.015  # inches: boxes of text have room for letters that are not there


def shown(figure) -> list:
    """A figure's panels."""
    return [axis for axis in figure.axes if axis.get_visible()]


def rendered_texts(figure) -> list:
    """Every text that is drawn (ticks outside of an axis are not), with its box in inches."""
    found = []
    draw = Text.draw

    def record(text, renderer, *args, **options):
        if text.get_visible() and text.get_text().strip():
            found.append((text, text.get_window_extent(renderer).extents / figure.dpi))
        return draw(text, renderer, *args, **options)

    with mock.patch.object(Text, "draw", record):
        figure.canvas.draw()
    return found


def overlap(one, other) -> float:
    """Inches by which two boxes lie on each other; negative where they are apart."""
    return float(min(np.minimum(one[2:], other[2:]) - np.maximum(one[:2], other[:2])))


def check_page(figure) -> None:
    """No rendered text leaves the figure, is too small to read, or lies on another text, panel or legend; nor does a panel."""
    width, height = figure.get_size_inches()
    assert width <= TEXT_WIDTH + 1e-6
    texts = rendered_texts(figure)
    assert min(text.get_fontsize() for text, _ in texts) >= SMALLEST
    frames = [(axis, axis.get_window_extent().extents / figure.dpi) for axis in shown(figure)]
    legends = [(legend, legend.get_window_extent().extents / figure.dpi) for legend in figure.legends]
    page = np.array([0, 0, width, height])
    for artist, box in (*texts, *frames, *legends):
        assert (box[:2] >= 0).all() and (box[2:] <= page[2:]).all(), f"{artist} leaves the page: {box}"
    for (one, box), (other, its) in itertools.combinations(texts, 2):
        assert overlap(box, its) < TOUCH, f"{one.get_text()!r} lies on {other.get_text()!r}"
    for text, box in texts:
        for axis, its in frames:
            assert text.axes is axis or overlap(box, its) < TOUCH, f"{text.get_text()!r} lies on another panel"
    for (one, box), (other, its) in itertools.combinations((*frames, *legends), 2):
        assert overlap(box, its) < TOUCH, f"{one} lies on {other}"


def check_same_sizes(figure) -> None:
    """Panels are of one size."""
    sizes = [axis.get_window_extent().size for axis in shown(figure)]
    np.testing.assert_allclose(sizes, [sizes[0]] * len(sizes), rtol=0.01)
