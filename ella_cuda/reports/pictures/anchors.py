"""Anchors and lengthscales of sparsified layers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ella_cuda.reports.pictures.page import LINE, MARGIN, Rooms, arrange, panels, wrapped
from ella_cuda.reports.pictures.style import NORMAL, SMALL, TEXT_WIDTH, signed_colour_map
from ella_cuda.reports.text import number, run_title, tensor_title
from ella_cuda.reports.weights import Basis, SpatialWeight, strongest_channels

CIRCLE_COLOUR = "#d7191c"
LARGE_IMAGE, SMALL_IMAGE = 1.22, 0.7  # inches: four large panels fit side by side, or six small ones
MANY = 100  # positions: panels with fewer are small where there are such with more
LEFT, RIGHT, BOTTOM = 0.28, 0.03, 0.2  # inches around an image
OUTER_LEFT, OUTER_RIGHT = 0.2, 0.6
LARGEST_DOT = 3.0  # points

Line = tuple[str, float, list[SpatialWeight]]  # heading, inches of an image, weights side by side


def draw_anchors(
    row: Mapping[str, Any], weights: Sequence[SpatialWeight], start: Mapping[str, Sequence[Sequence[float]]] | None
) -> Any:
    r"""Where the anchors of sparsified layers lie on their grids, over the expanded weight of the strongest pair of
    channels: a panel for each basis and layer whose grid has more than one position; the others are named below.

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
    names = [layer["name"] for layer in row["layers"]]
    based = [w for w in weights if w.basis is not None]
    sparse = [w for w in based if w.positions > 1]
    if not sparse:
        raise ValueError("weights must hold at least one of a sparsified layer, got none.")
    reaches = {_reach(w.basis) for w in sparse}
    same = reaches.pop() if len(reaches) == 1 else None
    above = SMALL * LINE * (1 if same else 2) + 0.05
    lines = list(_lines(sparse, names))
    heights = [above + image + BOTTOM + (NORMAL * LINE if heading else 0.0) for heading, image, _ in lines]
    foot = wrapped(_explained([w for w in based if w.positions == 1], names), TEXT_WIDTH - 2 * MARGIN, NORMAL)
    below = NORMAL * LINE * (foot.count("\n") + 1)
    around = {"outer_left": OUTER_LEFT, "outer_right": OUTER_RIGHT, "outer_bottom": below, "outer_top": MARGIN}
    rooms = Rooms(TEXT_WIDTH - OUTER_LEFT - OUTER_RIGHT, sum(heights), 0.0, 0.0, 0.0, 0.0, **around)
    figure, (area,) = panels(1, rooms)
    arrange(figure, rooms, _legend(start, same), f"{run_title(row)}: anchors")
    width, height = figure.get_size_inches()
    top, bottom = area.get_position().y1 * height, area.get_position().y0 * height
    area.remove()
    for (heading, image, members), tall in zip(lines, heights, strict=True):
        if heading:
            figure.text(OUTER_LEFT / width, top / height, heading, fontsize=NORMAL, va="top")
        for k, weight in enumerate(members):
            left = OUTER_LEFT + k * (LEFT + image + RIGHT) + LEFT
            axis = figure.add_axes((left / width, (top - tall + BOTTOM) / height, image / width, image / height))
            (pair,) = strongest_channels([w for w in sparse if (w.layer, w.path) == (weight.layer, weight.path)], 1)
            shown = _draw_panel(axis, weight, pair, (start or {}).get(weight.basis.name), image)
            title = f"layer {names.index(weight.layer) + 1}, {pair[0]}←{pair[1]}"
            axis.set_title(title if same else f"{title}\n{_reach(weight.basis)}", fontsize=SMALL, pad=2, y=1.0)
        top -= tall
    figure.text(0.5, bottom / height, foot, fontsize=NORMAL, ha="center", va="top")
    middle = (bottom + sum(heights) / 2) / height
    label = {"fontsize": NORMAL, "rotation": 90, "va": "center"}
    figure.text(MARGIN / width, middle, "row, pixels from the grid's centre", **label)
    long = min(2.4, height - 1.2) / height
    scale = figure.add_axes((1 - 0.52 / width, middle - long / 2, 0.1 / width, long))
    bar = figure.colorbar(shown, cax=scale, ticks=[-1, 0, 1])
    bar.ax.tick_params(labelsize=SMALL)
    bar.set_label("weight / panel's largest", fontsize=NORMAL, labelpad=0)
    return figure


def _lines(weights: Sequence[SpatialWeight], names: Sequence[str]) -> Iterator[Line]:
    """Weights in lines, those of a tensor together; only the first line of a tensor has a heading."""
    by_title: dict[str, list[SpatialWeight]] = {}
    for weight in weights:
        by_title.setdefault(tensor_title(weight.path, weight.tensor), []).append(weight)
    some_large = any(w.positions >= MANY for w in weights)
    for title, members in by_title.items():
        heading = title
        members.sort(key=lambda w: names.index(w.layer))
        for small, run in itertools.groupby(members, lambda w: some_large and w.positions < MANY):
            image = SMALL_IMAGE if small else LARGE_IMAGE
            together = list(run)
            most = int((TEXT_WIDTH - OUTER_LEFT - OUTER_RIGHT) / (LEFT + image + RIGHT))
            across = -(-len(together) // -(-len(together) // most))  # lines of one tensor are about as long
            for k in range(0, len(together), across):
                yield heading, image, together[k : k + across]
                heading = ""


def _reach(basis: Basis) -> str:
    omega = basis.inverse_lengthscale
    return f"{number(1 / omega) if omega else '∞'} px"


def _explained(single: Sequence[SpatialWeight], names: Sequence[str]) -> str:
    text = "column, pixels from the grid's centre; weights of output channel ← input channel"
    which = [f"{tensor_title(w.path, w.tensor)} of layer {names.index(w.layer) + 1}" for w in single]
    return text + (f"\nnot drawn, as of a single position: {', '.join(which)}" if which else "")


def _draw_panel(axis: Any, weight: SpatialWeight, pair: tuple[int, int], start: Any, inches: float) -> Any:
    from matplotlib.collections import LineCollection
    from matplotlib.patches import Circle
    from matplotlib.patheffects import withStroke
    from matplotlib.ticker import MaxNLocator

    basis: Basis = weight.basis  # type: ignore[assignment]
    values = weight.images[pair]
    largest = float(values.abs().max()) or 1.0
    half = [n / 2 for n in values.shape]
    extent = (-half[1], half[1], half[0], -half[0])  # left, right, bottom, top: rows grow downwards
    style = {"cmap": signed_colour_map(), "vmin": -1, "vmax": 1, "interpolation": "nearest"}
    image = axis.imshow((values / largest).numpy(), extent=extent, **style)
    across, down = basis.anchors[:, 1], basis.anchors[:, 0]
    dot = min(LARGEST_DOT, 72 * inches / len(basis.anchors) ** 0.5 / 2)  # half as wide as an anchor's share of the grid
    thin = dot / LARGEST_DOT
    if start is not None:
        ways = [((c0, r0), (c1, r1)) for (r0, c0), r1, c1 in zip(start, down.tolist(), across.tolist(), strict=True)]
        axis.add_collection(LineCollection(ways, colors="black", linewidths=0.6 * thin, alpha=0.5))
        points = {"s": 0.5 * dot**2, "c": "black", "alpha": 0.4, "linewidths": 0}
        axis.scatter([c for _, c in start], [r for r, _ in start], **points)
    axis.scatter(across, down, s=dot**2, c="white", edgecolors="black", linewidths=0.5 * thin, zorder=3)
    if basis.inverse_lengthscale:
        nearest = int(basis.anchors.square().sum(1).argmin())
        centre = (float(across[nearest]), float(down[nearest]))
        circle = {"fill": False, "color": CIRCLE_COLOUR, "linewidth": 1.0, "zorder": 2.5}
        halo = withStroke(linewidth=2.0, foreground="white")  # on dark weights the red is dark for some
        axis.add_patch(Circle(centre, 1 / basis.inverse_lengthscale, path_effects=[halo], **circle))
    # Anchors may leave the grid, all are shown; a circle larger than the grid is not.
    reach = [max(float(v.abs().max()) + 0.3, h) for v, h in ((across, half[1]), (down, half[0]))]
    axis.set_xlim(-reach[0], reach[0])
    axis.set_ylim(reach[1], -reach[1])
    axis.tick_params(labelsize=SMALL, length=2.5, pad=2)
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_locator(MaxNLocator(nbins=4 if inches > 1 else 2, integer=True))
    return image


def _legend(start: Any, reach: str | None) -> dict[str, Any]:
    from matplotlib.lines import Line2D

    anchor = {"marker": "o", "linestyle": "", "color": "white", "markeredgecolor": "black", "markersize": 4}
    circle = {"marker": "o", "linestyle": "", "color": "none", "markeredgecolor": CIRCLE_COLOUR, "markersize": 8}
    legend = {
        "anchor": Line2D([], [], **anchor),
        f"radius 1/ω{f' = {reach}' if reach else ', in the title'}: how far a basis function reaches": Line2D(
            [], [], **circle
        ),
    }
    if start:
        way = {"color": "black", "alpha": 0.5, "linewidth": 0.8, "marker": "o", "markersize": 2.5}
        legend["from where the anchor started"] = Line2D([], [], **way)
    return legend
