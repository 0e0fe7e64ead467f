"""Figures without a display, no wider than a page's text: panels, titles and legends in their places."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ella_cuda.reports.pictures.style import LARGE, NORMAL, SMALL

LINE = 1.25 / 72  # inches from a line of text to the next, for each point of its size
MARGIN = 0.06


@dataclasses.dataclass(frozen=True)
class Rooms:
    """Inches of a figure: its panels with the room for labels that each has around it, and what stands around them all.

    Set by hand: matplotlib's own layouts draw everything several times to find these numbers.
    """

    width: float
    height: float
    left: float = 0.5
    right: float = 0.08
    top: float = 0.2
    bottom: float = 0.38
    outer_left: float = 0.0
    outer_right: float = 0.0
    outer_bottom: float = 0.0
    outer_top: float = 0.0

    def across(self, count: int) -> float:
        """Inches of a figure with so many panels side by side."""
        return self.width * count + self.outer_left + self.outer_right

    @property
    def inner(self) -> tuple[float, float]:
        """Width and height of a panel without its labels."""
        return self.width - self.left - self.right, self.height - self.top - self.bottom


def panels(count: int, rooms: Rooms, per_line: int = 3, **options: Any) -> tuple[Any, list[Any]]:
    """A figure with ``count`` panels, and its panels; what is left of the last line is hidden. :func:`arrange` puts them
    in their places.

    Args:
        count: of panels.
        rooms: the sizes.
        per_line: panels in a line.
        **options: of ``Figure.subplots``.
    """
    across = min(count, per_line)
    figure = new_figure(rooms.across(across), rooms.height * math.ceil(count / across))
    axes = list(figure.subplots(math.ceil(count / across), across, squeeze=False, **options).flat)
    for axis in axes:
        axis.tick_params(labelsize=SMALL, length=2.5, pad=2)
    for axis in axes[count:]:
        axis.set_visible(False)
    return figure, axes


def arrange(
    figure: Any, rooms: Rooms, legend: Mapping[str, Any], title: str | None = None, legend_title: str | None = None
) -> None:
    """Put panels in their places, a title above them and a legend below, in as many lines and columns as fit.

    Args:
        figure: of :func:`panels`.
        rooms: the same as there.
        legend: handles by label.
        title: of the figure.
        legend_title: of the legend.
    """
    down, across = figure.axes[0].get_gridspec().get_geometry()
    width = rooms.across(across)
    heading = wrapped(title, width - 2 * MARGIN, LARGE) if title else ""
    above = (MARGIN + LARGE * LINE * (heading.count("\n") + 1)) if title else 0.0
    columns = legend_columns([*legend], width)
    lines = math.ceil(len(legend) / columns) + (legend_title is not None)
    below = (NORMAL * LINE * 1.1 * lines + 2 * MARGIN if legend else 0.0) + rooms.outer_bottom
    above += rooms.outer_top
    height = rooms.height * down + above + below
    inner = rooms.inner
    figure.set_size_inches(width, height)
    figure.subplots_adjust(
        left=(rooms.outer_left + rooms.left) / width,
        right=1 - (rooms.outer_right + rooms.right) / width,
        bottom=(below + rooms.bottom) / height,
        top=1 - (above + rooms.top) / height,
        wspace=(rooms.left + rooms.right) / inner[0],
        hspace=(rooms.top + rooms.bottom) / inner[1],
    )
    if title:
        figure.suptitle(heading, fontsize=LARGE, y=1 - MARGIN / height, va="top")
    if legend:
        place = {"loc": "lower center", "ncols": columns, "frameon": False, "borderaxespad": 0.3}
        spacing = {"columnspacing": 1.5, "handlelength": 2.2, "labelspacing": 0.3}
        sizes = {"fontsize": NORMAL, "title_fontsize": NORMAL}
        figure.legend(legend.values(), legend.keys(), title=legend_title, **place, **spacing, **sizes)


def legend_columns(labels: Sequence[str], width: float) -> int:
    """The most columns in which a legend's entries fit side by side in ``width`` inches."""
    entry = NORMAL * 4.6 / 72  # inches of a handle and the gaps around it
    for columns in range(len(labels), 1, -1):
        size, more = divmod(len(labels), columns)  # matplotlib fills column by column, the first ones with one more
        ends = [k * size + min(k, more) for k in range(columns + 1)]
        filled = [labels[i:j] for i, j in itertools.pairwise(ends)]
        if sum(max(inches(label, NORMAL) for label in column) + entry for column in filled) <= width:
            return columns
    return 1


@functools.cache
def inches(text: str, size: float) -> float:
    """How wide a line of text is in print."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextToPath

    width, _, _ = TextToPath().get_text_width_height_descent(text, FontProperties(size=size), ismath=False)
    return width / 72


def wrapped(text: str, width: float, size: float) -> str:
    """Text in lines that fit in ``width`` inches, broken at spaces and, where a word is too long, behind a ``+``."""
    lines: list[str] = []
    for paragraph in text.splitlines():
        lines.append("")
        for word in _words(paragraph):
            if lines[-1] and inches((lines[-1] + word).rstrip(), size) > width:
                lines.append("")
            lines[-1] += word
    return "\n".join(line.rstrip() for line in lines)


def _words(text: str) -> Iterable[str]:
    for word in text.split(" "):
        *parts, last = word.split("+")
        yield from (part + "+" for part in parts)
        yield last + " "


def new_figure(width: float, height: float) -> Any:
    """An empty figure, sizes in inches; not through pyplot, which would pick the user's display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure


def plain_axes(axis: Any, title: str, x: str, y: str) -> None:
    """Title and labels, no box, a light grid."""
    axis.set_title(title, fontsize=NORMAL, y=1.0, pad=4)  # the place given: finding one measures every tick
    axis.set_xlabel(x, fontsize=NORMAL, labelpad=2)
    axis.set_ylabel(y, fontsize=NORMAL, labelpad=2)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.3, linewidth=0.6)


def whole_epochs(axis: Any) -> None:
    """Ticks of an axis of epochs at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5, steps=[1, 2, 5, 10]))


def logarithmic_scale(axis: Any, which: str) -> None:
    """Makes ``which``, ``x`` or ``y``, logarithmic, with plain decimals at as many of its ticks as have room."""
    from matplotlib.ticker import FuncFormatter

    axis.set(**{f"{which}scale": "log"})
    side = getattr(axis, f"{which}axis")

    def label(value: float, position: int | None = None) -> str:
        low, high = side.get_view_interval()
        decades = math.log10(high / low)
        leading = value / 10 ** math.floor(math.log10(value) + 1e-9)
        shown = (1,) if decades > 2.2 else (1, 2, 5) if decades > 0.7 else ()
        return f"{value:g}" if not shown or any(math.isclose(leading, x) for x in shown) else ""

    side.set_major_formatter(FuncFormatter(label))
    side.set_minor_formatter(FuncFormatter(label))
    axis.tick_params(axis=which, which="minor", labelsize=SMALL, length=1.5, pad=2)
