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
LARGE_IMAGE, SMALL_IMAGE = 1.1, 0.7  # inches, about: lines of small grids are lower where there are large ones
MANY = 100  # positions of a large grid
AROUND = 0.42  # inches for a panel's title and ticks
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
    reaches = {_reach(w.basis) for w in sparse}
    same = reaches.pop() if len(reaches) == 1 else None
    lines = _lines(sparse, names)
    large = [any(w.positions >= MANY for w in line) for line in lines]
    images = [LARGE_IMAGE if of or not any(large) else SMALL_IMAGE for of in large]
    across = max(map(len, lines))
    height = sum(images) / len(images) + AROUND
    ratios = {"height_ratios": images}
    figure, axes = panels(len(lines) * across, across, TEXT_WIDTH / PER_LINE * across, height, gridspec_kw=ratios)
    for i, (line, image) in enumerate(zip(lines, images, strict=True)):
        in_line = axes[i * across : (i + 1) * across]
        for axis, weight in zip(in_line, line, strict=False):
            (pair,) = strongest_channels([w for w in sparse if (w.layer, w.path) == (weight.layer, weight.path)], 1)
            shown = _draw_panel(axis, weight, pair, (start or {}).get(weight.basis.name), image)
            title = f"layer {names.index(weight.layer) + 1}, {pair[0]}←{pair[1]}"
            axis.set_title(title if same else f"{title}\n{_reach(weight.basis)}", fontsize=SMALL, pad=2, y=1.0)
        for axis in in_line[len(line) :]:
            axis.set_visible(False)
        in_line[0].set_ylabel(tensor_title(line[0].path, line[0].tensor).replace(" ", "\n"), fontsize=NORMAL)
    note = _explained([w for w in based if w.positions == 1], names)
    weight_scale(figure, shown, axes, "weight / panel's largest")
    finish(figure, f"{run_title(row)}: anchors", _legend(start, same), note)
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


def _explained(single: Sequence[SpatialWeight], names: Sequence[str]) -> str:
    text = "Axes: column and row, pixels from the grid's centre. Titles: output channel ← input channel."
    which = [f"{tensor_title(w.path, w.tensor)} of layer {names.index(w.layer) + 1}" for w in single]
    return text + (f"\nNot drawn, as of a single position: {', '.join(which)}." if which else "")


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
    axis.set_anchor("W")
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
