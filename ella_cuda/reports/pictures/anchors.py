"""Anchors and lengthscales of sparsified layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ella_cuda.reports.pictures.page import (
    NORMAL,
    SMALL,
    TEXT_WIDTH,
    finish,
    panels,
    signed_colour_map,
    weight_scale,
)
from ella_cuda.reports.text import number, run_title, tensor_title
from ella_cuda.reports.weights import Basis, SpatialWeight, strongest_channels

CIRCLE_COLOUR = "#d7191c"
PER_LINE = 4
IMAGE, AROUND = 1.1, 0.42  # inches, about: of a grid, and for a panel's title and ticks
LARGEST_DOT = 3.0  # points


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
    """
    names = [layer["name"] for layer in row["layers"]]
    based = [w for w in weights if w.basis is not None]
    sparse = [w for w in based if w.positions > 1]
    lines = _lines(sparse, names)
    across = max(map(len, lines))
    figure, axes = panels(len(lines) * across, across, TEXT_WIDTH / PER_LINE * across, IMAGE + AROUND)
    for i, line in enumerate(lines):
        in_line = axes[i * across : (i + 1) * across]
        for axis, weight in zip(in_line, line, strict=False):
            (pair,) = strongest_channels([w for w in sparse if (w.layer, w.path) == (weight.layer, weight.path)], 1)
            shown = _draw_panel(axis, weight, pair, (start or {}).get(weight.basis.name))
            title = f"layer {names.index(weight.layer) + 1}, {pair[0]}←{pair[1]}\n{_reach(weight.basis)}"
            axis.set_title(title, fontsize=SMALL, pad=2, y=1.0)
        for axis in in_line[len(line) :]:
            axis.set_visible(False)
        in_line[0].set_ylabel(tensor_title(line[0].path, line[0].tensor).replace(" ", "\n"), fontsize=NORMAL)
    note = "Axes: column and row, pixels from the grid's centre. Titles: output channel ← input channel, radius."
    if which := [
        f"{tensor_title(w.path, w.tensor)} of layer {names.index(w.layer) + 1}" for w in based if w.positions == 1
    ]:
        note += f"\nNot drawn, as of a single position: {', '.join(which)}."
    weight_scale(figure, shown, axes, "weight / panel's largest")
    finish(figure, f"{run_title(row)}: anchors", _legend(start), note)
    return figure


def _lines(weights: Sequence[SpatialWeight], names: Sequence[str]) -> list[list[SpatialWeight]]:
    """Weights of a tensor side by side, by layer."""
    by_title: dict[str, list[SpatialWeight]] = {}
    for weight in sorted(weights, key=lambda w: names.index(w.layer)):
        by_title.setdefault(tensor_title(weight.path, weight.tensor), []).append(weight)
    return [of[k : k + PER_LINE] for of in by_title.values() for k in range(0, len(of), PER_LINE)]


def _reach(basis: Basis) -> str:
    omega = basis.inverse_lengthscale
    return f"{number(1 / omega) if omega else '∞'} px"


def _draw_panel(axis: Any, weight: SpatialWeight, pair: tuple[int, int], start: Any) -> Any:
    from matplotlib.collections import LineCollection
    from matplotlib.patches import Circle
    from matplotlib.ticker import MaxNLocator

    basis: Basis = weight.basis  # type: ignore[assignment]
    values = weight.images[pair]
    largest = float(values.abs().max()) or 1.0
    half = [n / 2 for n in values.shape]
    extent = (-half[1], half[1], half[0], -half[0])  # left, right, bottom, top: rows grow downwards
    style = {"cmap": signed_colour_map(), "vmin": -1, "vmax": 1, "interpolation": "nearest"}
    image = axis.imshow((values / largest).numpy(), extent=extent, **style)
    across, down = basis.anchors[:, 1], basis.anchors[:, 0]
    dot = min(LARGEST_DOT, 72 * IMAGE / len(basis.anchors) ** 0.5 / 2)  # half as wide as an anchor's share of the grid
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
        for colour, width in (("white", 2.0), (CIRCLE_COLOUR, 1.0)):  # on dark weights the red is dark for some
            circle = {"fill": False, "color": colour, "linewidth": width, "zorder": 2.5}
            axis.add_patch(Circle(centre, 1 / basis.inverse_lengthscale, **circle))
    # Anchors may leave the grid, all are shown; a circle larger than the grid is not.
    reach = [max(float(v.abs().max()) + 0.3, h) for v, h in ((across, half[1]), (down, half[0]))]
    axis.set_xlim(-reach[0], reach[0])
    axis.set_ylim(reach[1], -reach[1])
    axis.set_anchor("W")
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_locator(MaxNLocator(nbins=4, integer=True))
    return image


def _legend(start: Any) -> dict[str, Any]:
    from matplotlib.lines import Line2D

    anchor = {"marker": "o", "linestyle": "", "color": "white", "markeredgecolor": "black", "markersize": 4}
    circle = {"marker": "o", "linestyle": "", "color": "none", "markeredgecolor": CIRCLE_COLOUR, "markersize": 8}
    way = {"color": "black", "alpha": 0.5, "linewidth": 0.8, "marker": "o", "markersize": 2.5}
    styles = {"anchor": anchor, "radius 1/ω: how far a basis function reaches": circle}
    styles |= {"from where the anchor started": way} if start else {}
    return {label: Line2D([], [], **style) for label, style in styles.items()}
