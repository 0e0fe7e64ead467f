"""Learned weights as images over positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ella_cuda.reports.pictures.page import LINE, Rooms, arrange, panels, wrapped
from ella_cuda.reports.pictures.style import NORMAL, SMALL, TEXT_WIDTH, signed_colour_map
from ella_cuda.reports.text import number, run_title, tensor_title
from ella_cuda.reports.weights import SpatialWeight, strongest_channels

CHANNELS = 4  # pairs of channels shown of each weight, where there is room
NARROWEST, WIDEST = 0.37, 0.55  # inches of an image: its label is as wide
NARROW = 2  # images, and the panel's title takes two lines
GAP = 0.12  # between images, of their width
ROOMS = Rooms(0.0, 0.0, left=0.06, right=0.06, top=0.16, bottom=0.2, outer_left=0.2, outer_right=0.62)


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

    Raises:
        ValueError: no weight.
    """
    if not weights:
        raise ValueError("weights must hold at least one, got none.")
    columns = list(dict.fromkeys(tensor_title(w.path, w.tensor) for w in weights))
    names = [layer["name"] for layer in row["layers"]]
    layers = [name for name in names if any(w.layer == name for w in weights)]
    rooms, places = _fitted(len(columns))
    foot = wrapped(_explained(weights, places), rooms.across(len(columns)) - 0.2, NORMAL)
    headings = [wrapped(title, rooms.inner[0], NORMAL) for title in columns]
    above, below = (NORMAL * LINE * (1 + max(t.count("\n") for t in texts)) for texts in (headings, [foot]))
    rooms = dataclasses.replace(rooms, outer_top=above + 0.06, outer_bottom=below + 0.1)
    figure, axes = panels(len(layers) * len(columns), rooms, per_line=len(columns))
    arrange(figure, rooms, {}, f"{run_title(row)}: weights")
    size = figure.get_size_inches()
    grid = [axes[i * len(columns) : (i + 1) * len(columns)] for i in range(len(layers))]
    shown = _chosen(weights, places)
    image = None
    for axis, heading in zip(grid[0], headings, strict=True):
        where = axis.get_position()
        figure.text(where.x0, where.y1 + (rooms.top + 0.03) / size[1], heading, fontsize=NORMAL)
    for i, layer in enumerate(layers):
        for j, title in enumerate(columns):
            axis = grid[i][j]
            axis.set_frame_on(False)
            axis.set_yticks([])
            axis.set_xticks([])
            for weight, pairs in shown:
                if (weight.layer, tensor_title(weight.path, weight.tensor)) == (layer, title):
                    image = _draw_panel(axis, weight, pairs, places)
        where = grid[i][0].get_position()
        text = f"layer {names.index(layer) + 1}"
        middle = (where.y0 + where.y1) / 2
        figure.text(0.12 / size[0], middle, text, rotation=90, va="center", ha="center", fontsize=NORMAL)
    tall = min(2.4, size[1] - 1.0) / size[1]
    scale = figure.add_axes((1 - 0.56 / size[0], 0.5 - tall / 2, 0.1 / size[0], tall))
    bar = figure.colorbar(image, cax=scale, ticks=[-1, 0, 1])
    bar.ax.tick_params(labelsize=SMALL)
    bar.set_label("weight / largest", fontsize=NORMAL, labelpad=0)
    figure.text(0.5, 0.06 / size[1], foot, fontsize=NORMAL, ha="center", va="bottom")
    return figure


def _fitted(columns: int) -> tuple[Rooms, int]:
    """Rooms of so many panels side by side, and how many images fit in each."""
    most = (TEXT_WIDTH - ROOMS.outer_left - ROOMS.outer_right) / columns - ROOMS.left - ROOMS.right
    places = max(1, min(CHANNELS, int((most + GAP * NARROWEST) / (NARROWEST * (1 + GAP)))))
    image = min(WIDEST, most / (places * (1 + GAP) - GAP))
    width = ROOMS.left + ROOMS.right + image * (places * (1 + GAP) - GAP)
    top = ROOMS.top + (SMALL * LINE if places <= NARROW else 0.0)
    return dataclasses.replace(ROOMS, width=width, height=top + ROOMS.bottom + image, top=top), places


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
