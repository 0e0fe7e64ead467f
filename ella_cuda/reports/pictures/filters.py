"""Learned weights as images over positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ella_cuda.reports.pictures.page import (
    NORMAL,
    SMALL,
    TEXT_WIDTH,
    finish,
    folded,
    panels,
    signed_colour_map,
    weight_scale,
)
from ella_cuda.reports.text import number, run_title, tensor_title
from ella_cuda.reports.weights import SpatialWeight, strongest_channels

CHANNELS = 4  # pairs of channels shown of each weight, where there is room
ACROSS = 13  # images side by side in all columns, at most: an image's label is as wide as it
WIDE, AROUND, HEIGHT = 0.55, 0.95, 0.85  # inches: of an image at most, beside all panels, and of a line with its labels
FINE = 8  # pixels of the picture for a weight's: gaps are one, narrower than a position


def draw_filters(row: Mapping[str, Any], weights: Sequence[SpatialWeight]) -> Any:
    """A line for each layer, a column for each weight of its paths: the images of the channels where it is largest,
    side by side, each panel on a colour scale of its own that its title gives. An image of one position has its number
    on it.

    The weights of one path show the same channels where they have the same: what F-FC looks for by ``weight_in`` it
    writes by ``weight_out``.

    Args:
        row: of ``summary.json``, or of a run that is not finished.
        weights: of the run, of :func:`ella_cuda.reports.weights.spatial_weights`.

    Returns:
        A matplotlib ``Figure``.
    """
    columns = list(dict.fromkeys(tensor_title(w.path, w.tensor) for w in weights))
    names = [layer["name"] for layer in row["layers"]]
    layers = [name for name in names if any(w.layer == name for w in weights)]
    places = max(1, min(CHANNELS, ACROSS // len(columns)))
    across = min(TEXT_WIDTH, AROUND + WIDE * places * len(columns))
    figure, axes = panels(len(layers) * len(columns), len(columns), across, HEIGHT)
    for axis in axes:
        axis.set_frame_on(False)
        axis.set(xticks=[], yticks=[])
    for weight in weights:
        together = [w for w in weights if (w.layer, w.path) == (weight.layer, weight.path)]
        pairs = strongest_channels([w for w in together if w.images.shape[:2] == weight.images.shape[:2]], places)
        line, column = layers.index(weight.layer), columns.index(tensor_title(weight.path, weight.tensor))
        image = _draw_panel(axes[line * len(columns) + column], weight, pairs, places)
    for axis, layer in zip(axes[:: len(columns)], layers, strict=True):
        axis.set_ylabel(f"layer {names.index(layer) + 1}", fontsize=NORMAL)
    for axis, title in zip(axes, columns, strict=False):
        own = f"{folded(title, (across - AROUND) / len(columns), SMALL)}\n{axis.get_title(loc='left')}"
        axis.set_title(own, fontsize=SMALL, pad=2, y=1.0, loc="left")
    weight_scale(figure, image, axes, "weight / largest")
    which = "the largest weight" if places == 1 else f"up to {places} filters, the largest first"
    note = f"Each panel: {which}, by output channel ← input channel; in its title: positions, largest weight."
    if any(w.elements > 1 for w in weights):
        note += " Subscript of an input channel: the element of the group that the filter belongs to, 0 its identity."
    finish(figure, f"{run_title(row)}: weights", note=note)
    return figure


def pair_title(weight: SpatialWeight, pair: tuple[int, int]) -> str:
    """``output←input`` channel, the input's with the group's element as a subscript where there are several."""
    out, (into, element) = pair[0], divmod(pair[1], weight.elements)
    return f"{out}←{into}" + (f"$_{{{element}}}$" if weight.elements > 1 else "")


def _draw_panel(axis: Any, weight: SpatialWeight, pairs: Sequence[tuple[int, int]], places: int) -> Any:
    """The images of these channels, with room for ``places`` of them; nan is between."""
    tiles = torch.stack([weight.images[pair] for pair in pairs])
    largest, (rows, columns) = float(tiles.abs().max()), tiles.shape[1:]
    fine = max(1, -(-FINE // columns))
    wide = torch.nn.functional.pad(tiles.repeat_interleave(fine, 1).repeat_interleave(fine, 2), (0, 1), value=torch.nan)
    step = wide.shape[2]
    picture = torch.cat([*(wide / (largest or 1.0))], 1)
    image = axis.imshow(picture.numpy(), cmap=signed_colour_map(), vmin=-1, vmax=1, interpolation="nearest")
    axis.set_xlim(-0.5, places * step - 1.5)
    axis.set_anchor("NW")
    centres = [k * step + columns * fine / 2 - 0.5 for k in range(len(pairs))]
    axis.set_xticks(centres, [pair_title(weight, pair) for pair in pairs], fontsize=SMALL)
    axis.tick_params(length=0, pad=1)
    if weight.positions == 1:
        for centre, value in zip(centres, tiles.flatten().tolist(), strict=True):
            style = {"color": "white" if value < 0 else "black", "fontsize": SMALL, "ha": "center", "va": "center"}
            axis.text(centre, (fine - 1) / 2, number(value, 2), **style)
    between = "\n" if places <= 2 else ", "
    axis.set_title(f"{rows}×{columns}{between}±{number(largest, 2)}", fontsize=SMALL, pad=2, y=1.0, loc="left")
    return image
