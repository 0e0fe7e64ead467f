"""Sizes, colours and marks of all pictures; figures without a display, no wider than a page's text; their files."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ella_cuda.files import write_file

# Apart for every kind of colour vision, most in grey as well; hatches for bars that print without them.
PATH_STYLES = {
    "f_fc": ("#cc4c02", "//"),
    "fc": ("#000000", "\\\\"),
    "conv": ("#1f4e9c", ""),
    "s_fc": ("#f0b020", "---"),
    "s_conv": ("#009e73", "||"),
    "gconv": ("#7cc7f0", ".."),
}
OTHER_STYLES = (("#8000e0", "xx"), ("#602000", "++"), ("#b0b060", "oo"), ("#777777", "**"))  # what is not one path
MARKERS = ("o", "s", "^", "D", "v", "<", ">", "P", "X")
LINE_STYLES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
# Dark for negative, grey for zero, light for positive: the lightness rises all the way, so grey prints keep the sign.
SIGNED_COLOURS = ("#0b1f5c", "#3f63ad", "#9b9b9b", "#f0b24a", "#fff6c8")

TEXT_WIDTH = 7.0  # inches; no picture is wider, so that in print all have these sizes of letters, in points:
SMALL, NORMAL, LARGE = 7.0, 8.0, 9.0
CHARACTER, LINE = 0.6, 1.3  # a character's width and the distance of lines, of a font's size
HANDLE = 5.0  # a legend's handle with the gaps around it, of its font's size
PAD = 0.06  # inches around a panel with its labels
DPI = 200
SUFFIXES = (".png", ".svg")


def path_styles(paths: list[str]) -> dict[str, tuple[str, str]]:
    """Colour and hatch of each path; names that are not the package's get what is left, in their order."""
    spare = iter(OTHER_STYLES * (1 + len(paths) // len(OTHER_STYLES)))
    return {path: PATH_STYLES.get(path) or next(spare) for path in paths}


def signed_colour_map() -> Any:
    """A matplotlib colour map for signed values, to be centred at 0."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("signed", SIGNED_COLOURS).with_extremes(bad="white")


def panels(count: int, per_line: int, width: float, height: float, **options: Any) -> tuple[Any, list[Any]]:
    """A figure with ``count`` panels, whose places matplotlib's constrained layout finds, and its panels; what is left of
    the last line is hidden. Not through pyplot, which would pick the user's display.

    Args:
        count: of panels.
        per_line: panels in a line.
        width: inches of the figure.
        height: inches of a line of panels with their labels; :func:`finish` adds those of title and legend.
        **options: of ``Figure.subplots``.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    across = min(count, per_line)
    down = math.ceil(count / across)
    figure = Figure(figsize=(width, height * down), dpi=DPI, layout="constrained")
    figure.get_layout_engine().set(w_pad=PAD, h_pad=PAD)
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(down, across, squeeze=False, **options).flat)
    for axis in axes:
        axis.tick_params(labelsize=SMALL, length=2.5, pad=2)
    for axis in axes[count:]:
        axis.set_visible(False)
    return figure, axes


def finish(figure: Any, title: str = "", legend: Mapping[str, Any] | None = None, note: str = "") -> None:
    """Set a title above the panels, a note below them and a legend of handles by label, make the figure higher by their
    lines, and lay it out, once for files of both kinds."""
    from matplotlib import rc_context

    width, height = figure.get_size_inches()
    title, note = folded(title, width, LARGE), folded(note, width, NORMAL)
    lines = LARGE * len(title.splitlines()) + NORMAL * len(note.splitlines())
    if title:
        figure.suptitle(title, fontsize=LARGE)
    if legend:
        entries = [NORMAL / 72 * (CHARACTER * len(label) + HANDLE) for label in legend]
        fits = [k for k in range(1, len(entries) + 1) if sum(map(max, np.array_split(entries, k))) < width]
        columns = max(fits, default=1)  # which a legend fills one after the other, as array_split does
        place = {"loc": "outside lower center", "ncols": columns, "frameon": False, "title": note or None}
        spacing = {"columnspacing": 1.5, "handlelength": 2.2, "labelspacing": 0.3, "borderpad": 0.2}
        sizes = {"fontsize": NORMAL, "title_fontsize": NORMAL}
        figure.legend(legend.values(), legend.keys(), **place, **spacing, **sizes)
        lines += NORMAL * (math.ceil(len(legend) / columns) + 1)
    elif note:
        figure.supxlabel(note, fontsize=NORMAL)
    figure.set_figheight(height + lines * LINE / 72)
    figure.get_layout_engine().execute(figure)
    # No engine at all: with "none" every file is drawn twice.
    with rc_context({"figure.autolayout": False, "figure.constrained_layout.use": False}):
        figure.set_layout_engine(None)


def folded(text: str, width: float, size: float) -> str:
    """Text in lines of about ``width`` inches in letters of ``size`` points, broken at spaces."""
    most = int(72 * width / (CHARACTER * size))
    lines = (textwrap.wrap(line, most, break_long_words=False, break_on_hyphens=False) for line in text.splitlines())
    return "\n".join("\n".join(line) for line in lines)


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


def weight_scale(figure: Any, image: Any, axes: Any, label: str) -> None:
    """A colour bar of signed weights at the right of ``axes``, at most 2.4 inches high."""
    height = figure.get_figheight()
    bar = figure.colorbar(image, ax=axes, ticks=[-1, 0, 1], shrink=min(0.9, 2.4 / height), aspect=24, panchor=False)
    bar.ax.tick_params(labelsize=SMALL)
    bar.set_label(label, fontsize=NORMAL, labelpad=0)


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
