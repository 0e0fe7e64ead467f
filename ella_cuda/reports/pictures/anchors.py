"""Anchors and lengthscales of sparsified layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ella_cuda.reports.pictures.page import Rooms, arrange, panels
from ella_cuda.reports.pictures.style import NORMAL, SMALL, TEXT_WIDTH, signed_colour_map
from ella_cuda.reports.text import number, run_title, tensor_title
from ella_cuda.reports.weights import Basis, SpatialWeight, strongest_channels

CIRCLE_COLOUR = "#d7191c"
WIDEST = 1.3  # inches of a panel's image
ROOMS = Rooms(
    0.0, 0.0, left=0.28, right=0.03, top=0.32, bottom=0.2, outer_left=0.3, outer_right=0.58, outer_bottom=0.22
)


def draw_anchors(
    row: Mapping[str, Any], weights: Sequence[SpatialWeight], start: Mapping[str, Sequence[Sequence[float]]] | None
) -> Any:
    r"""Where the anchors of sparsified layers lie on their grids, over the expanded weight of the strongest pair of
    channels: a panel for each basis and layer whose grid has more than one position.

    A circle of radius :math:`1/\omega` stands around the anchor nearest to the grid's centre: so far does a basis
    function reach.

    Args:
        row: of ``summary.json``, or of a run that is not finished.
        weights: of the run, of :func:`ella_cuda.reports.weights.spatial_weights`.
        start: by the basis' name, where its anchors started, ``(A, 2)`` rows and columns in pixels from the centre:
            lines lead from there; None where they did not move.

    Returns:
        A matplotlib ``Figure``.

    Raises:
        ValueError: no sparsified weight.
    """
    sparse = [w for w in weights if w.basis is not None and w.positions > 1]
    if not sparse:
        raise ValueError("weights must hold at least one of a sparsified layer, got none.")
    names = [layer["name"] for layer in row["layers"]]
    by_title: dict[str, list[SpatialWeight]] = {}
    for weight in sorted(sparse, key=lambda w: names.index(w.layer)):
        by_title.setdefault(tensor_title(weight.path, weight.tensor), []).append(weight)
    by_title = {title: by_title[title] for title in dict.fromkeys(tensor_title(w.path, w.tensor) for w in sparse)}
    across = _per_line([len(members) for members in by_title.values()])
    image = min(WIDEST, (TEXT_WIDTH - ROOMS.across(0)) / across - ROOMS.left - ROOMS.right)
    size = {"width": image + ROOMS.left + ROOMS.right, "height": image + ROOMS.top + ROOMS.bottom}
    rooms = dataclasses.replace(ROOMS, **size)
    lines = [
        (title, members[k : k + across]) for title, members in by_title.items() for k in range(0, len(members), across)
    ]
    figure, axes = panels(len(lines) * across, rooms, across)
    for i, (title, members) in enumerate(lines):
        in_line = axes[i * across : (i + 1) * across]
        in_line[0].set_ylabel(f"{title}\nrow, pixels", fontsize=NORMAL, labelpad=1)
        for axis in in_line[len(members) :]:
            axis.set_visible(False)
        for axis, weight in zip(in_line, members, strict=False):
            (pair,) = strongest_channels([w for w in sparse if (w.layer, w.path) == (weight.layer, weight.path)], 1)
            shown = _draw_panel(axis, weight, pair, (start or {}).get(weight.basis.name))
            omega = weight.basis.inverse_lengthscale
            reach = f"1/ω = {number(1 / omega, 2) if omega else '∞'} px"
            heading = f"layer {names.index(weight.layer) + 1}, {pair[0]}←{pair[1]}\n{reach}"
            axis.set_title(heading, fontsize=SMALL, pad=2, y=1.0)
    arrange(figure, rooms, _legend(start), f"{run_title(row)}: anchors")
    width, height = figure.get_size_inches()
    below = in_line[0].get_position().y0 * height - ROOMS.bottom
    foot = "column, pixels from the grid's centre; weights of output channel ← input channel"
    figure.text(0.5, below / height, foot, fontsize=NORMAL, ha="center", va="top")
    tall = min(2.4, height - 1.2) / height
    scale = figure.add_axes((1 - 0.52 / width, 0.5 - tall / 2, 0.1 / width, tall))
    bar = figure.colorbar(shown, cax=scale, ticks=[-1, 0, 1])
    bar.ax.tick_params(labelsize=SMALL)
    bar.set_label("weight / panel's largest", fontsize=NORMAL, labelpad=0)
    return figure


def _per_line(counts: Sequence[int]) -> int:
    """Panels side by side: 4, or 5 where so many weights would else not fit on a page."""
    return min(max(counts), 4 if sum(-(-count // 4) for count in counts) <= 5 else 5)


def _draw_panel(axis: Any, weight: SpatialWeight, pair: tuple[int, int], start: Any) -> Any:
    from matplotlib.collections import LineCollection
    from matplotlib.patches import Circle
    from matplotlib.ticker import MaxNLocator

    basis: Basis = weight.basis  # type: ignore[assignment]
    values = weight.images[pair]
    largest = float(values.abs().max()) or 1.0
    many = len(basis.anchors) >= 100
    half = [n / 2 for n in values.shape]
    extent = (-half[1], half[1], half[0], -half[0])  # left, right, bottom, top: rows grow downwards
    style = {"cmap": signed_colour_map(), "vmin": -1, "vmax": 1, "interpolation": "nearest"}
    image = axis.imshow((values / largest).numpy(), extent=extent, **style)
    across, down = basis.anchors[:, 1], basis.anchors[:, 0]
    if start is not None:
        ways = [((c0, r0), (c1, r1)) for (r0, c0), r1, c1 in zip(start, down.tolist(), across.tolist(), strict=True)]
        axis.add_collection(LineCollection(ways, colors="black", linewidths=0.25 if many else 0.6, alpha=0.5))
        points = {"s": 0.4 if many else 5, "c": "black", "alpha": 0.4, "linewidths": 0}
        axis.scatter([c for _, c in start], [r for r, _ in start], **points)
    style = {"s": 1.1, "linewidths": 0.15} if many else {"s": 9, "linewidths": 0.5}
    axis.scatter(across, down, c="white", edgecolors="black", zorder=3, **style)
    if basis.inverse_lengthscale:
        nearest = int(basis.anchors.square().sum(1).argmin())
        centre = (float(across[nearest]), float(down[nearest]))
        radius = 1 / basis.inverse_lengthscale
        axis.add_patch(Circle(centre, radius, fill=False, color=CIRCLE_COLOUR, linewidth=1.0, zorder=4))
    # Anchors may leave the grid, all are shown; a circle larger than the grid is not.
    reach = [max(float(v.abs().max()) + 0.3, h) for v, h in ((across, half[1]), (down, half[0]))]
    axis.set_xlim(-reach[0], reach[0])
    axis.set_ylim(reach[1], -reach[1])
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_locator(MaxNLocator(nbins=4, integer=True))
    return image


def _legend(start: Any) -> dict[str, Any]:
    from matplotlib.lines import Line2D

    anchor = {"marker": "o", "linestyle": "", "color": "white", "markeredgecolor": "black", "markersize": 4}
    circle = {"marker": "o", "linestyle": "", "color": "none", "markeredgecolor": CIRCLE_COLOUR, "markersize": 8}
    legend = {
        "anchor": Line2D([], [], **anchor),
        "radius 1/ω: how far a basis function reaches": Line2D([], [], **circle),
    }
    if start:
        way = {"color": "black", "alpha": 0.5, "linewidth": 0.8, "marker": "o", "markersize": 2.5}
        legend["from where the anchor started"] = Line2D([], [], **way)
    return legend
