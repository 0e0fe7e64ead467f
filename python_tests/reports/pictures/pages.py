"""Whether a picture is fit for a page, as matplotlib renders it."""

from __future__ import annotations

import itertools

from matplotlib.text import Text

TEXT_WIDTH, SMALLEST = 7.0, 7.0  # inches of a page's text, points


def check_page(figure) -> None:
    """Nothing that is rendered leaves the figure, is too small to read, or lies on another panel or text."""
    width, height = figure.get_size_inches()
    assert width <= TEXT_WIDTH + 1e-6
    renderer = figure.canvas.get_renderer()
    sizes = [t.get_fontsize() for t in figure.findobj(Text) if t.get_text() and t.get_visible()]
    assert min(sizes) >= SMALLEST
    artists = [a for a in figure.axes if a.get_visible()] + figure.texts + figure.legends
    boxes = [box for a in artists if (box := a.get_tightbbox(renderer)) is not None]
    for box in boxes:
        assert min(box.x0, box.y0) > -1 and box.x1 < width * figure.dpi + 1 and box.y1 < height * figure.dpi + 1, box
    for one, other in itertools.combinations(boxes, 2):
        across = min(one.x1, other.x1) - max(one.x0, other.x0)
        down = min(one.y1, other.y1) - max(one.y0, other.y0)
        assert min(across, down) < 2, (one, other)  # pixels
