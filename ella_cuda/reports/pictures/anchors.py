"""Anchors and lengthscales of sparsified layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ella_cuda.reports.pictures.style import Rooms, arrange, panels, signed_colour_map
from ella_cuda.reports.text import number, run_title, tensor_title
from ella_cuda.reports.weights import Basis, SpatialWeight, strongest_channels

CIRCLE_COLOUR = "#d7191c"
ROOMS = Rooms(
    2.05, 2.15, left=0.32, right=0.06, top=0.25, bottom=0.25, outer_left=0.35, outer_right=0.8, outer_bottom=0.2
)


def draw_anchors(
    row: Mapping[str, Any], weights: Sequence[SpatialWeight], start: Mapping[str, Sequence[Sequence[float]]] | None
) -> Any:
    r"""Where the anchors of sparsified layers lie on their grids, over the expanded weight of the strongest pair of
    channels: a column for each layer, a line for each basis.

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
    sparse = [w for w in weights if w.basis is not None]
    if not sparse:
        raise ValueError("weights must hold at least one of a sparsified layer, got none.")
    lines = list(dict.fromkeys(tensor_title(w.path, w.tensor) for w in sparse))
    names = [layer["name"] for layer in row["layers"]]
    layers = [name for name in names if any(w.layer == name for w in sparse)]
    figure, axes = panels(len(lines) * len(layers), ROOMS, per_line=len(layers))
    grid = [axes[i * len(layers) : (i + 1) * len(layers)] for i in range(len(lines))]
    image = None
    for i, line in enumerate(lines):
        for j, layer in enumerate(layers):
            axis = grid[i][j]
            axis.tick_params(labelsize=6, length=2)
            axis.locator_params(nbins=4)
            found = [w for w in sparse if (w.layer, tensor_title(w.path, w.tensor)) == (layer, line)]
            axis.set_visible(bool(found))
            for weight in found:
                ((out, into),) = strongest_channels([w for w in sparse if (w.layer, w.path) == (layer, weight.path)], 1)
                image = _draw_panel(axis, weight, (out, into), (start or {}).get(weight.basis.name))
                heading = f"layer {names.index(layer) + 1}, {out}←{into}"
                omega = weight.basis.inverse_lengthscale
                axis.set_title(
                    f"{heading}, 1/ω = {number(1 / omega, 2) if omega else '∞'} px", fontsize=7, pad=3, y=1.0
                )
        first = next(axis for axis in grid[i] if axis.get_visible())
        first.set_ylabel(f"{line}\nrow, pixels from the centre", fontsize=8)
    title = f"{run_title(row)}: anchors of weights (output channel ← input channel)"
    arrange(figure, ROOMS, _legend(start), 3, title=title)
    width, height = figure.get_size_inches()
    figure.supxlabel("column, pixels from the centre", fontsize=8, y=0.32 / height, va="bottom")
    tall = min(3.0, height - 1.2) / height
    scale = figure.add_axes((1 - 0.72 / width, 0.5 - tall / 2, 0.12 / width, tall))
    bar = figure.colorbar(image, cax=scale, ticks=[-1, 0, 1])
    bar.set_label("weight / panel's largest", fontsize=8)
    return figure


def _draw_panel(axis: Any, weight: SpatialWeight, pair: tuple[int, int], start: Any) -> Any:
    from matplotlib.collections import LineCollection
    from matplotlib.patches import Circle

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
        axis.add_collection(LineCollection(ways, colors="black", linewidths=0.3 if many else 0.7))
    style = {"s": 3, "linewidths": 0.25} if many else {"s": 12, "linewidths": 0.5}
    axis.scatter(across, down, c="white", edgecolors="black", zorder=3, **style)
    if basis.inverse_lengthscale:
        nearest = int(basis.anchors.square().sum(1).argmin())
        centre = (float(across[nearest]), float(down[nearest]))
        radius = 1 / basis.inverse_lengthscale
        axis.add_patch(Circle(centre, radius, fill=False, color=CIRCLE_COLOUR, linewidth=1.3, zorder=4))
    # Anchors may leave the grid, all are shown; a circle larger than the grid is not.
    reach = [max(float(v.abs().max()) + 0.3, h) for v, h in ((across, half[1]), (down, half[0]))]
    axis.set_xlim(-reach[0], reach[0])
    axis.set_ylim(reach[1], -reach[1])
    return image


def _legend(start: Any) -> dict[str, Any]:
    from matplotlib.lines import Line2D

    anchor = {"marker": "o", "linestyle": "", "color": "white", "markeredgecolor": "black", "markersize": 5}
    circle = {"marker": "o", "linestyle": "", "color": "none", "markeredgecolor": CIRCLE_COLOUR, "markersize": 9}
    legend = {
        "anchor": Line2D([], [], **anchor),
        "radius 1/ω: how far a basis function reaches": Line2D([], [], **circle),
    }
    if start:
        legend["from where the anchor started"] = Line2D([], [], color="black", linewidth=0.8)
    return legend
