"""Colours, marks and sizes that all pictures share."""

from __future__ import annotations

from typing import Any

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


def path_styles(paths: list[str]) -> dict[str, tuple[str, str]]:
    """Colour and hatch of each path; names that are not the package's get what is left, in their order."""
    spare = iter(OTHER_STYLES * (1 + len(paths) // len(OTHER_STYLES)))
    return {path: PATH_STYLES.get(path) or next(spare) for path in paths}


def signed_colour_map() -> Any:
    """A matplotlib colour map for signed values, to be centred at 0."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("signed", SIGNED_COLOURS).with_extremes(bad="white")
