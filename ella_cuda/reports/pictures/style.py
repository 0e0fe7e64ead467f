"""What all pictures share: colours, figures without a display, and files that are the same when drawn again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ella_cuda.reports.files import write_file

DPI = 150
SUFFIXES = (".png", ".svg")
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
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINE_STYLES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
# Dark for negative, grey for zero, light for positive: the lightness rises all the way, so grey prints keep the sign.
SIGNED_COLOURS = ("#0b1f5c", "#3f63ad", "#9b9b9b", "#f0b24a", "#fff6c8")


def path_styles(paths: list[str]) -> dict[str, tuple[str, str]]:
    """Colour and hatch of each path; names that are not the package's get what is left, in their order."""
    spare = iter(OTHER_STYLES * (1 + len(paths) // len(OTHER_STYLES)))
    return {path: PATH_STYLES.get(path) or next(spare) for path in paths}


def signed_colour_map() -> Any:
    """A matplotlib colour map for signed values, to be centred at 0."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("signed", SIGNED_COLOURS).with_extremes(bad="white")


@dataclasses.dataclass(frozen=True)
class Rooms:
    """Inches of a figure: its panels with the room for labels that each has around it, and what stands around them all.

    Set by hand: matplotlib's own layouts draw everything several times to find these numbers.
    """

    width: float
    height: float
    left: float = 0.7
    right: float = 0.12
    top: float = 0.3
    bottom: float = 0.5
    outer_left: float = 0.0
    outer_right: float = 0.0
    outer_bottom: float = 0.0


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
    figure = new_figure(rooms.width * across, rooms.height * math.ceil(count / across))
    axes = list(figure.subplots(math.ceil(count / across), across, squeeze=False, **options).flat)
    for axis in axes[count:]:
        axis.set_visible(False)
    return figure, axes


def arrange(
    figure: Any,
    rooms: Rooms,
    legend: Mapping[str, Any],
    columns: int,
    title: str | None = None,
    legend_title: str | None = None,
) -> None:
    """Put panels in their places, a title above them and a legend below.

    Args:
        figure: of :func:`panels`.
        rooms: the same as there.
        legend: handles by label.
        columns: of the legend.
        title: of the figure.
        legend_title: of the legend.
    """
    down, across = figure.axes[0].get_gridspec().get_geometry()
    lines = math.ceil(len(legend) / columns) + (legend_title is not None)
    above, below = 0.32 if title else 0.0, (0.19 * lines + 0.06 if legend else 0.0) + rooms.outer_bottom
    width = rooms.width * across + rooms.outer_left + rooms.outer_right
    height = rooms.height * down + above + below
    inner = (rooms.width - rooms.left - rooms.right, rooms.height - rooms.top - rooms.bottom)
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
        figure.suptitle(title, fontsize=10, y=1 - 0.08 / height, va="top")
    if legend:
        place = {"loc": "lower center", "ncols": columns, "frameon": False, "fontsize": 8, "borderaxespad": 0.2}
        figure.legend(legend.values(), legend.keys(), title=legend_title, title_fontsize=8, **place)


def new_figure(width: float, height: float) -> Any:
    """An empty figure, sizes in inches; not through pyplot, which would pick the user's display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure


def plain_axes(axis: Any, title: str, x: str, y: str) -> None:
    """Title and labels, no box, a light grid."""
    axis.set_title(title, fontsize=9, y=1.0)  # the place given: finding one measures every tick
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.3)


def whole_epochs(axis: Any) -> None:
    """Ticks of an axis of epochs at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))


def picture_files(stem: Path) -> list[Path]:
    """The files of a picture: ``stem`` as PNG and SVG."""
    return [stem.with_name(stem.name + suffix) for suffix in SUFFIXES]


def save_picture(figure: Any, stem: Path) -> list[Path]:
    """Write a figure as PNG and SVG, byte for byte the same whenever the figure is.

    Returns:
        The files.

    Raises:
        OSError: a file cannot be written; what was there is untouched.
    """
    return list(_saved(figure, stem))


def _saved(figure: Any, stem: Path) -> Iterator[Path]:
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "ella_cuda"}):  # else the names inside an SVG file are drawn at random
        for file in picture_files(stem):
            metadata = {"Date": None} if file.suffix == ".svg" else None
            write_file(file, lambda path, metadata=metadata: figure.savefig(path, dpi=DPI, metadata=metadata))
            yield file
