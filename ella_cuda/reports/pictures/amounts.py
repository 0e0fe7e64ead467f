"""Learned augmentations: their amounts over training, and what they make of images."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ella_cuda.reports.pictures.page import (
    LARGE,
    LINE,
    MARKERS,
    NORMAL,
    OTHER_STYLES,
    SMALL,
    TEXT_WIDTH,
    finish,
    panels,
    plain_axes,
    whole_epochs,
)

COLOURS = {
    "rotation": "#cc4c02",
    "tx": "#1f4e9c",
    "ty": "#7cc7f0",
    "sx": "#009e73",
    "sy": "#b0b060",
    "shear": "#8000e0",
}
GAP = 2  # pixels between images
BETWEEN = 1.5  # of these, between an image and its copies, in widths of a copy's gap

Line = tuple[Sequence[int], Mapping[str, Sequence[float]]]  # epochs, and amounts by generator


def generator_styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour and marker of each amount; names that are no generator's get what is left, in their order."""
    spare = iter(OTHER_STYLES * (1 + len(names) // len(OTHER_STYLES)))
    known = list(COLOURS)
    return {
        name: {
            "color": COLOURS.get(name) or next(spare)[0],
            "marker": MARKERS[(known.index(name) if name in COLOURS else len(known)) % len(MARKERS)],
        }
        for name in names
    }


def draw_amounts(
    lines: Mapping[str, Sequence[Line]],
    title: str = "",
    unit: str = "amount",
    true: Mapping[str, Mapping[str, float]] | None = None,
    note: str = "",
    shared: bool = True,
    x: str = "epoch",
) -> Any:
    """Amounts over the epochs, a panel for each kind of runs, a colour for each generator, a line for each run.

    Args:
        lines: by the panel's title, the runs: epochs, and at each the amounts by generator.
        title: of the picture. unit: of all amounts.
        true: by the panel's title, amounts at which a line is drawn.
        note: below the picture.
        shared: whether all panels have one scale.
        x: what the amounts are over.

    Returns:
        A matplotlib ``Figure``.
    """
    figure, axes = panels(len(lines), 3, TEXT_WIDTH, 2.1, sharey=shared)
    names = dict.fromkeys(name for runs in lines.values() for _, amounts in runs for name in amounts)
    styles, legend, highest = generator_styles(list(names)), {}, dict.fromkeys(lines, 0.0)
    for kind, runs in lines.items():
        found = [value for _, amounts in runs for values in amounts.values() for value in values]
        highest[kind] = max([*found, *(true or {}).get(kind, {}).values()], default=1.0)
    if shared:
        highest = dict.fromkeys(lines, max(highest.values()))
    for i, (axis, (kind, runs)) in enumerate(zip(axes, lines.items(), strict=False)):
        for epochs, amounts in runs:
            for name, values in amounts.items():
                every = max(1, len(epochs) // 6)
                (handle,) = axis.plot(epochs, values, linewidth=1.0, markersize=3, markevery=every, **styles[name])
                legend.setdefault(name, handle)
        for k, (name, value) in enumerate((true or {}).get(kind, {}).items()):
            style = {"color": styles.get(name, {}).get("color", "#000000"), "linewidth": 1.2}
            axis.axhline(value, linestyle=(3 * k, (1, 5)), **style)  # several of one value take turns
            (dotted,) = axis.plot([], [], color="#777777", linestyle=":", linewidth=1.2)
            legend["of the data"] = dotted
        plain_axes(axis, kind, x, unit if i % 3 == 0 else "")
        whole_epochs(axis)
        axis.set_ylim(0, 1.06 * highest[kind])
    finish(figure, title, legend, note)
    return figure


def draw_samples(groups: Mapping[str, Sequence[Sequence[Any]]], title: str = "", note: str = "") -> Any:
    """Images and copies of them: a panel for each group, in it a line for each image, first as it is.

    Args:
        groups: by the panel's title, rows of images ``(H, W)`` or ``(H, W, 3)`` of pixels from 0, black, to 255.
        title: of the picture. note: below it.

    Returns:
        A matplotlib ``Figure``.
    """
    composed = {name: _composed(rows) for name, rows in groups.items()}
    across = 1 if len(groups) == 1 else 2
    height, width = (max(c.shape[axis] for c in composed.values()) for axis in (0, 1))
    inches = TEXT_WIDTH / across - 0.2
    if across == 1:
        inches = min(inches, 0.55 * len(next(iter(groups.values()))[0]))
    figure, axes = panels(len(groups), across, across * (inches + 0.2), inches * height / width + LARGE * LINE / 72)
    for axis, (name, picture) in zip(axes, composed.items(), strict=False):
        axis.imshow(picture, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        axis.set_axis_off()
        axis.set_anchor("N")
        axis.set_title(name, fontsize=NORMAL if across == 1 else SMALL, y=1.0, pad=3)
    finish(figure, title, note=note)
    return figure


def _composed(rows: Sequence[Sequence[Any]]) -> Any:
    """One picture, white between images."""
    images = np.array(rows, dtype=np.uint8)
    images = np.pad(images, [(0, 0), (0, 0), (0, GAP), (0, GAP), (0, 0)][: images.ndim], constant_values=255)
    first, *copies = images.swapaxes(0, 1)
    more = (
        [np.full((*first.shape[:2], math.ceil(BETWEEN * GAP), *first.shape[3:]), 255, dtype=np.uint8)] if copies else []
    )
    return np.concatenate([*np.concatenate([first, *more, *copies], 2)])[:-GAP, :-GAP]
