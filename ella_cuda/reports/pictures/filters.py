"""Learned weights as images over positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ella_cuda.reports.pictures.style import Rooms, arrange, panels, signed_colour_map
from ella_cuda.reports.text import number, run_title, tensor_title
from ella_cuda.reports.weights import SpatialWeight, strongest_channels

CHANNELS = 4  # pairs of channels shown of each weight
ROOMS = Rooms(
    3.2, 1.2, left=0.08, right=0.08, top=0.22, bottom=0.2, outer_left=0.45, outer_right=0.85, outer_bottom=0.35
)


def draw_filters(row: Mapping[str, Any], weights: Sequence[SpatialWeight]) -> Any:
    """A line for each layer, a column for each weight of its paths: the images of the channels where it is largest,
    side by side, each panel on a colour scale of its own that its title gives.

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
    figure, axes = panels(len(layers) * len(columns), ROOMS, per_line=len(columns))
    arrange(figure, ROOMS, {}, 1, title=f"{run_title(row)}: weights over positions")
    inches = figure.get_size_inches()
    grid = [axes[i * len(columns) : (i + 1) * len(columns)] for i in range(len(layers))]
    shown = _chosen(weights)
    image = None
    for i, layer in enumerate(layers):
        for j, title in enumerate(columns):
            axis = grid[i][j]
            axis.set_frame_on(False)
            axis.set_yticks([])
            axis.set_xticks([])
            for weight, pairs in shown:
                if (weight.layer, tensor_title(weight.path, weight.tensor)) == (layer, title):
                    image = _draw_panel(axis, weight, pairs)
        where = grid[i][0].get_position()
        text = f"layer {names.index(layer) + 1}"
        middle = (where.y0 + where.y1) / 2
        figure.text(0.3 / inches[0], middle, text, rotation=90, va="center", ha="center", fontsize=9)
    height = min(3.0, inches[1] - 0.9) / inches[1]
    scale = figure.add_axes((1 - 0.8 / inches[0], 0.5 - height / 2, 0.12 / inches[0], height))
    bar = figure.colorbar(image, cax=scale, ticks=[-1, 0, 1])
    bar.set_label("weight / panel's largest (in its title)", fontsize=8)
    figure.supxlabel("output channel ← input channel, the largest weights first", fontsize=9, y=0.12 / inches[1])
    return figure


def _chosen(weights: Sequence[SpatialWeight]) -> list[tuple[SpatialWeight, list[tuple[int, int]]]]:
    """Each weight with the pairs of channels to show."""
    together: dict[tuple[Any, ...], list[SpatialWeight]] = {}
    for weight in weights:
        together.setdefault((weight.layer, weight.path, *weight.images.shape[:2]), []).append(weight)
    return [(w, strongest_channels(members, CHANNELS)) for members in together.values() for w in members]


def _draw_panel(axis: Any, weight: SpatialWeight, pairs: Sequence[tuple[int, int]]) -> Any:
    tiles = [weight.images[d, c] for d, c in pairs]
    largest = max(float(tile.abs().max()) for tile in tiles)
    picture, centres = _side_by_side([tile / (largest or 1.0) for tile in tiles], CHANNELS)
    image = axis.imshow(picture.numpy(), cmap=signed_colour_map(), vmin=-1, vmax=1, interpolation="nearest")
    axis.set_xlim(-0.5, picture.shape[1] - 0.5)
    axis.set_anchor("NW")
    axis.set_xticks(centres, [f"{d}←{c}" for d, c in pairs], fontsize=7)
    axis.tick_params(length=0, pad=1)
    rows, columns = weight.images.shape[-2:]
    title = f"{tensor_title(weight.path, weight.tensor)}, {rows}×{columns}"
    axis.set_title(f"{title}, up to ±{number(largest, 2)}", fontsize=8, pad=3, y=1.0, loc="left")
    return image


def _side_by_side(tiles: Sequence[Tensor], places: int) -> tuple[Tensor, list[float]]:
    """Tiles in a row with room for ``places`` of them, nan between, and the columns of their centres."""
    height, width = tiles[0].shape
    gap = max(0.25, 0.12 * width)
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
