"""Learned weights as images over positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ella_cuda.reports.pictures.page import (
    LINE,
    NORMAL,
    PAD,
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
NARROWEST, WIDEST = 0.37, 0.55  # inches of an image: its label is as wide
NARROW = 2  # images, and the panel's title takes two lines
GAP = 0.12  # between images, of their width
AROUND, BETWEEN = 0.95, 2 * PAD  # inches beside all panels, and from one to the next


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
    width, places = _fitted(len(columns))
    height = width / (places * (1 + GAP) - GAP) + SMALL * LINE * (3 if places <= NARROW else 2) / 72 + BETWEEN
    across = AROUND + len(columns) * (width + BETWEEN)
    figure, axes = panels(len(layers) * len(columns), len(columns), across, height, gridspec_kw={"wspace": 0.1})
    grid = [axes[i * len(columns) : (i + 1) * len(columns)] for i in range(len(layers))]
    shown = _chosen(weights, places)
    image = None
    for i, layer in enumerate(layers):
        for j, title in enumerate(columns):
            axis = grid[i][j]
            axis.set_frame_on(False)
            axis.set_yticks([])
            axis.set_xticks([])
            for weight, pairs in shown:
                if (weight.layer, tensor_title(weight.path, weight.tensor)) == (layer, title):
                    image = _draw_panel(axis, weight, pairs, places)
        grid[i][0].set_ylabel(f"layer {names.index(layer) + 1}", fontsize=NORMAL)
    for axis, title in zip(grid[0], columns, strict=True):
        own = f"\n{axis.get_title(loc='left')}"
        axis.set_title(folded(title, width, SMALL) + own, fontsize=SMALL, pad=2, y=1.0, loc="left")
    weight_scale(figure, image, axes, "weight / largest")
    finish(figure, f"{run_title(row)}: weights", note=_explained(weights, places))
    return figure


def _fitted(columns: int) -> tuple[float, int]:
    """Inches of each of so many panels side by side, and how many images fit in it."""
    most = (TEXT_WIDTH - AROUND) / columns - BETWEEN
    places = max(1, min(CHANNELS, int((most + GAP * NARROWEST) / (NARROWEST * (1 + GAP)))))
    image = min(WIDEST, most / (places * (1 + GAP) - GAP))
    return image * (places * (1 + GAP) - GAP), places


def _explained(weights: Sequence[SpatialWeight], places: int) -> str:
    which = "the largest weight" if places == 1 else f"up to {places} filters, the largest first"
    text = f"Each panel: {which}, by output channel ← input channel; in its title: positions, largest weight."
    if any(w.elements > 1 for w in weights):
        text += " Subscript of an input channel: the element of the group that the filter belongs to, 0 its identity."
    return text


def _chosen(weights: Sequence[SpatialWeight], places: int) -> list[tuple[SpatialWeight, list[tuple[int, int]]]]:
    """Each weight with the pairs of channels to show."""
    together: dict[tuple[Any, ...], list[SpatialWeight]] = {}
    for weight in weights:
        together.setdefault((weight.layer, weight.path, *weight.images.shape[:2]), []).append(weight)
    return [(w, strongest_channels(members, places)) for members in together.values() for w in members]


def pair_title(weight: SpatialWeight, pair: tuple[int, int]) -> str:
    """``output←input`` channel, the input's with the group's element as a subscript where there are several."""
    out, (into, element) = pair[0], divmod(pair[1], weight.elements)
    return f"{out}←{into}" + (f"$_{{{element}}}$" if weight.elements > 1 else "")


def _draw_panel(axis: Any, weight: SpatialWeight, pairs: Sequence[tuple[int, int]], places: int) -> Any:
    tiles = [weight.images[d, c] for d, c in pairs]
    largest = max(float(tile.abs().max()) for tile in tiles)
    picture, centres = _side_by_side([tile / (largest or 1.0) for tile in tiles], places)
    image = axis.imshow(picture.numpy(), cmap=signed_colour_map(), vmin=-1, vmax=1, interpolation="nearest")
    axis.set_xlim(-0.5, picture.shape[1] - 0.5)
    axis.set_anchor("NW")
    axis.set_xticks(centres, [pair_title(weight, pair) for pair in pairs], fontsize=SMALL)
    axis.tick_params(length=0, pad=1)
    if weight.positions == 1:
        for centre, tile in zip(centres, tiles, strict=True):
            style = {
                "color": "white" if float(tile) < 0 else "black",
                "fontsize": SMALL,
                "ha": "center",
                "va": "center",
            }
            axis.text(centre, (len(picture) - 1) / 2, number(float(tile), 2), **style)
    rows, columns = weight.images.shape[-2:]
    between = "\n" if places <= NARROW else ", "
    axis.set_title(f"{rows}×{columns}{between}±{number(largest, 2)}", fontsize=SMALL, pad=2, y=1.0, loc="left")
    return image


def _side_by_side(tiles: Sequence[Tensor], places: int) -> tuple[Tensor, list[float]]:
    """Tiles in a row with room for ``places`` of them, nan between, and the columns of their centres."""
    height, width = tiles[0].shape
    gap = GAP * width
    # Pixels of the picture are a whole fraction of a weight's, so that gaps can be narrower than a position.
    fine = max(1, round(1 / gap)) if gap < 1 else 1
    gap = max(1, round(gap * fine))
    picture = torch.full((height * fine, places * (width * fine + gap) - gap), float("nan"))
    centres = []
    for k, tile in enumerate(tiles):
        left = k * (width * fine + gap)
        picture[:, left : left + width * fine] = tile.repeat_interleave(fine, 0).repeat_interleave(fine, 1)
        centres.append(left + width * fine / 2 - 0.5)
    return picture, centres
