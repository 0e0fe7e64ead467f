"""Which path each layer chose, as stacked bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ella_cuda.reports.pictures.style import Rooms, arrange, panels, path_styles
from ella_cuda.reports.text import OBJECTIVE_TITLES, PATH_TITLES, mean, network_title

ROOMS = Rooms(width=4.6, height=3.3, top=0.45)


def draw_layers(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Stacked bars: how each layer's effective parameters divide among its paths, a panel for each task and network.

    Runs that differ in their seed only share a panel, as means.

    Args:
        rows: rows of ``summary.json`` with effective parameters.

    Returns:
        A matplotlib ``Figure``.

    Raises:
        ValueError: no row, or a row without effective parameters.

    Source: after van der Ouderaa et al., NeurIPS 2023, Figure 3.
    """
    groups: dict[tuple[str, str, str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if any(p["effective_parameters"] is None for layer in row["layers"] for p in layer["paths"].values()):
            raise ValueError(
                f"rows: {row['task']}/{row['layer']}/{row['objective']} has no effective parameters to draw."
            )
        groups.setdefault((row["data"], row["task"], network_title(row), row["objective"]), []).append(row)
    if not groups:
        raise ValueError("rows must hold at least one run to draw, got none.")
    figure, axes = panels(len(groups), ROOMS)
    for axis, ((data, task, network, objective), members) in zip(axes, groups.items(), strict=False):
        names = [entry["name"] for entry in members[0]["layers"]]
        bottom = [0.0] * len(names)
        for p, (colour, hatch) in path_styles(members[0]["layer"].split("+")).items():
            shares = [_share(members, i, p) for i in range(len(names))]
            title = PATH_TITLES.get(p, p)
            style = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.6, "width": 0.8}
            axis.bar(range(1, len(names) + 1), shares, bottom=bottom, label=title, **style)
            bottom = [b + s for b, s in zip(bottom, shares, strict=True)]
        seeds = sorted(r["seed"] for r in members)
        over = f"seed {seeds[0]}" if len(seeds) == 1 else f"mean over {len(seeds)} seeds"
        axis.set_title(f"{data}, task {task}\n{network}, {OBJECTIVE_TITLES[objective]}, {over}", fontsize=9, y=1.0)
        axis.set_xlabel("layer")
        axis.set_ylabel("share of effective parameters, %")
        axis.set_xticks(range(1, len(names) + 1))
        axis.set_ylim(0, 100)
        axis.spines[["top", "right"]].set_visible(False)
    handles: dict[str, Any] = {}
    for axis in axes[: len(groups)]:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    arrange(figure, ROOMS, handles, columns=len(handles), legend_title="path")
    return figure


def _share(members: Sequence[Mapping[str, Any]], layer: int, path: str) -> float:
    values = [r["layers"][layer]["paths"][path]["relative_effective_parameters"] for r in members]
    return 100 * (mean(0.0 if v is None else v for v in values) or 0.0)
